"""Each rival does what its publication and its official code do."""

import copy
import dataclasses
import itertools
import json
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from beatrice.benchmarks.results.tables import controller_table, results_of
from beatrice.extract.generate.generator import Generated
from beatrice.extract.generate.local import stop_ids
from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.extract.records import Passage
from beatrice.extract.signals.batch import BatchSplitter
from beatrice.extract.store.spec import Family
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.controllers import (
    CONTROLLERS,
    RIVALS,
    adaptive,
    dragin,
    probing,
    seakr,
)
from beatrice.pgir.controllers.loop import (
    AttentionToWords,
    Call,
    ControllerConfig,
    Cost,
    Policy,
    WordReading,
    best_under_cap,
    pgir,
)
from beatrice.pgir.controllers.session import all_rivals, rival
from beatrice.pgir.controllers.stage import left_out_rows
from beatrice.pgir.controllers.waves import (
    ENTROPY,
    GROUP_SIZE,
    AnswerService,
    CallJournal,
    Failed,
    ScoreService,
)
from beatrice.pgir.index import TextEncoder, read_encoder_config
from tests.extract.signals.test_full_device import room_for
from tests.jaxprobe.samples import rows_of, store_like
from tests.pgir.small import (
    PASSAGE,
    QUESTION,
    input_shapes,
    played,
    reply,
    save_encoder,
)
from tests.pretended_gpu import PretendedGpu
from tests.records import an_example

SEARCH = ControllerConfig(n_passages=3, depth=9)


def kinds(calls):
    return [call.kind for call in calls]


def no_call(call):
    raise AssertionError(f"a written draft asks for {call.kind}")


def nine_or_x(call):
    """Reply to a search with nine passages, and to every other call with "x"."""
    return range(9) if call.kind == "search" else reply("x")


# SKR


@given(*[st.integers(0, 10)] * 2, *[st.integers(0, 400)] * 3)
def test_skr_votes_by_the_rule_that_flashrag_uses(near, hurt, better, worse, same):
    k, n_all = 10, max(1, better + worse + same)
    delta, total = near - hurt, better - worse
    least = int(total * k / n_all)
    expected = (
        not (delta < 0 and delta <= least)
        if total < 0
        else delta > 0 and delta >= least
    )
    counts = (better, worse, n_all)
    assert adaptive.wants_retrieval(np.array([delta]), counts, k).tolist() == [expected]


def test_skr_asks_only_neighbours_whose_outcome_the_passages_changed():
    encoder = adaptive.question_encoder(["who wrote it", "where is it", "when was it"])
    questions = [f"who wrote book {i}" for i in range(6)]
    questions += [f"where is town {i}" for i in range(6)] + ["when was it"] * 3
    without = np.array([True] * 6 + [False] * 6 + [False] * 3)
    with_passages = np.array([False] * 6 + [True] * 6 + [False] * 3)
    index = adaptive.neighbours_of(questions, without, with_passages, encoder)
    assert index.vectors.shape[0] == 12 and index.n_all == 15
    new = encoder(["who wrote that", "where is that town"])
    assert index.retrieves(new, k=5).tolist() == [False, True]
    index = adaptive.neighbours_of(questions, without, without, encoder)
    assert index.retrieves(new, k=5).tolist() == [False] * 2  # no neighbour is left


def test_questions_that_share_words_are_similar_in_any_script():
    questions = ["谁写了它", "它在哪里", "भाषा की", "भाषा का"]
    vectors = adaptive.question_encoder(questions)(["他在哪里", "घर का"])
    near = (vectors @ adaptive.question_encoder(questions)(questions).T).toarray()
    assert near.argmax(axis=1).tolist() == [1, 3]
    english = ["Who wrote it, a or b?", "Where is it", "2 of Köln's"]
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(english)
    vectors = adaptive.question_encoder(english)(english)
    dense = words.transform(english).toarray()
    np.testing.assert_array_equal(vectors.toarray(), dense)


def test_sparse_and_dense_word_counts_lead_to_the_same_decisions():
    rng = np.random.default_rng(0)
    questions = [" ".join(f"w{i}" for i in row) for row in rng.zipf(1.5, (200, 10))]
    encoder = adaptive.question_encoder(questions[:100])
    right = rng.random((2, 100)) < 0.5
    labels = rng.choice([*"ABC"], 100).tolist()
    votes, routes = [], []
    for encode in (encoder, lambda texts: encoder(texts).toarray()):
        index = adaptive.neighbours_of(questions[:100], *right, encode)
        vectors, new = encode(questions[:100]), encode(questions[100:])
        votes.append([index.retrieves(new, k).tolist() for k in adaptive.NEIGHBOURS])
        fitted = (adaptive.fit_router(vectors, labels, x) for x in adaptive.STRENGTHS)
        routes.append([router.predict(new).tolist() for router in fitted])
    assert votes[0] == votes[1] and routes[0] == routes[1]


def test_questions_are_encoded_with_the_encoders_own_prefix_and_pooling(tmp_path):
    folder = tmp_path / "small-e5"
    save_encoder(folder, n_positions=128)
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    questions = ["where is the river?", "is it an island?"]
    vectors = adaptive.question_encoder([], folder)(questions)
    encoder = TextEncoder(read_encoder_config(folder, max_tokens=128))
    assert (encoder.config.query_prefix, encoder.config.pooling) == ("query: ", "cls")
    np.testing.assert_array_equal(vectors, encoder.encode(questions, "query"))


# Adaptive-RAG


def test_the_silver_label_is_the_cheapest_strategy_that_is_right():
    right = {
        "A": np.array([1, 0, 0, 0], bool),
        "B": np.array([1, 1, 0, 0], bool),
        "C": np.array([1, 1, 1, 0], bool),
    }
    assert adaptive.silver_labels(right) == ["A", "B", "C", None]


def test_known_question_sets_give_some_questions_a_label_of_their_own():
    given = [an_example(dataset=x) for x in ("nq", "musique", "world") for _ in "12345"]
    labels = [(e.dataset, label) for e, label in adaptive.bias_labels(given, 2)]
    assert labels == [("nq", "B")] * 2 + [("musique", "C")] * 2


def test_the_router_finds_planted_classes_and_can_learn_a_single_class():
    vectors, labels = (
        np.repeat(np.eye(3), 20, axis=0),
        [*"A" * 20 + "B" * 20 + "C" * 20],
    )
    router = adaptive.fit_router(vectors, labels, 10.0)
    assert router.predict(np.eye(3)).tolist() == [*"ABC"]
    router = adaptive.fit_router(vectors[:9], ["B"] * 9, 1.0)
    assert router.predict(np.eye(3)).tolist() == [*"BBB"]


def test_the_third_strategy_searches_by_its_last_answer_and_keeps_passages():
    answers = iter(["Rome", "Tiber", "Tiber"])
    rankings = {"who?": range(3), "Rome": range(2, 8), "Tiber": range(20, 29)}

    def serve(call):
        return rankings[call.text] if call.kind == "search" else reply(next(answers))

    answer, calls = played(adaptive.iterative("who?", SEARCH), serve)
    assert answer == "Tiber"  # written twice in a row
    assert [c.text for c in calls if c.kind == "search"] == ["who?", "Rome", "Tiber"]
    shown = [c.passages for c in calls if c.kind == "answer"]
    assert shown == [(0, 1, 2), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 20, 21, 22)]


@pytest.mark.parametrize(
    "plan",
    [
        adaptive.iterative("who?", SEARCH),
        dragin.dragin("who?", -1.0, SEARCH),
        seakr.seakr("who?", -9.0, 20, SEARCH),
        probing.probing_rag("who?", 0.0, 9, lambda shown: "", SEARCH),
    ],
)
def test_if_a_search_finds_nothing_a_rival_answers_once_from_memory(plan):
    def serve(call):
        values = {"search": (), "answer": reply("Tiber")}
        values |= {"spread": (0.0, 30), "probe": (3.0, 3.0)}
        return values[call.kind] if call.kind in values else dragin_serve(call)

    answer, calls = played(plan, serve)
    assert answer == "Tiber"
    assert kinds(calls).count("answer") == kinds(calls).count("search") == 1


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("A", ["answer"]),
        ("B", ["search", "answer"]),  # A and B are also SKR's two
        ("C", ["search", "answer"] * 2),
    ],
)
def test_strategies_a_b_and_c_search_never_once_and_repeatedly(strategy, expected):
    _, calls = played(adaptive.adaptive_rag("who?", strategy, SEARCH), nine_or_x)
    assert kinds(calls) == expected


# DRAGIN


def test_a_words_value_is_attention_share_times_entropy_times_word_count():
    words = WordReading(("the", "Tiber"), (1.0, 3.0), (2.0, 0.5))
    assert dragin.word_values(words) == pytest.approx([0.25 * 2.0 * 2, 0.75 * 0.5 * 2])


def test_each_token_belongs_to_the_word_that_it_is_in():
    words, owners = dragin.word_owners([2, 5, 6, 12], "Guzolt Falls"[:12])
    assert words == ["Guzolt", "Falls"] and owners.tolist() == [0, 0, 0, 1]
    # A bat of four bytes, each decoded to one sign until the last one is there.
    _, owners = dragin.word_owners([1, 2, 3, 1, 3, 5], "🦇 a b")
    assert owners.tolist() == [0, 0, 0, 0, 1, 2]


def test_the_query_is_what_uncertain_words_attend_to_in_text_order():
    attended = AttentionToWords(
        ("where", "is", "the", "Tiber", "rising", "Monte", "Fumaiolo"),
        ((0.1, 0.0, 0.5, 0.3, 0.1, 0.0, 0.0), (0.0, 0.0, 0.1, 0.2, 0.6, 0.1, 0.0)),
    )
    # Neither function words nor the words that triggered are in the query.
    hits = np.array([False, True])
    assert dragin.query_words(attended, hits) == "Tiber rising Monte"
    assert dragin.query_words(attended, hits, most=1) == "rising"
    assert dragin.query_words(attended, np.array([True, True])) == "Tiber rising"


def test_function_words_may_trigger_a_query_of_content_words():
    assert dragin.content_words("Where is the Tiber's rise?") == ["tiber's", "rise"]
    attended = AttentionToWords(("Tiber", "rises", "the"), ((0.9, 0.1, 0.0),))
    assert dragin.query_words(attended, np.array([True])) == "Tiber rises"


def dragin_serve(call):
    values = {
        "answer": reply("Monte Fumaiolo" if not call.passages else "Balze"),
        "words": WordReading(("Monte", "Fumaiolo"), (1.0, 1.0), (0.2, 2.0)),
        "attended": AttentionToWords(
            ("Tiber", "source?", "Monte", "Fumaiolo"),
            ((1.0, 0.0, 0.0, 0.0), (0.6, 0.3, 0.1, 0.0)),
        ),
        "search": tuple(range(9)),
    }
    return values[call.kind]


def test_dragin_answers_again_only_if_a_word_triggers():
    answer, calls = played(dragin.dragin("Tiber source?", 2.5, SEARCH), dragin_serve)
    assert (answer, kinds(calls)) == ("Monte Fumaiolo", ["answer", "words"])
    answer, calls = played(dragin.dragin("Tiber source?", 1.5, SEARCH), dragin_serve)
    assert answer == "Balze"
    assert kinds(calls) == ["answer", "words", "attended", "search", "answer"]
    assert calls[3].text == "Tiber source? Monte"


# SeaKR


def seakr_serve(call):
    if call.kind == "search":
        return (5, 6, 7, 8)
    if call.kind == "spread":
        return {(): -3.0, (5,): -4.0, (6,): -9.0, (7,): -20.0}[call.passages], 30
    return reply({(): "guess", (5,): "a", (6,): "b", (7,): ""}[call.passages])


def test_seakr_keeps_a_certain_answer_or_the_surest_from_a_single_passage():
    answer, calls = played(seakr.seakr("who?", -2.0, 20, SEARCH), seakr_serve)
    assert (answer, kinds(calls)) == ("guess", ["answer", "spread"])
    answer, calls = played(seakr.seakr("who?", -6.0, 20, SEARCH), seakr_serve)
    assert answer == "b"  # the surest answer with a text
    shown = [call.passages for call in calls if call.kind == "spread"]
    assert shown == [(), (5,), (6,), (7,)]
    assert {call.n for call in calls if call.kind == "spread"} == {20}


def test_deltas_are_quantiles_of_the_spreads_and_one_that_never_retrieves():
    grid = seakr.deltas([3.0, -1.0, 1.0, math.inf])
    assert (grid[0], min(grid), grid[-1]) == (1.0, -1.0, 4.0)
    none = seakr.uncertainty(np.zeros((0, 9)))  # of no draws: retrieve, whatever delta
    assert none == math.inf and seakr.deltas([none])[-1] == 1.0


# Probing-RAG


def test_probes_have_the_published_depths_and_parts():
    assert probing.state_layers(18) == (7, 9, 11, 13, 15, 17)
    assert probing.state_layers(6) == (3, 4, 5, 6)
    names = [type(layer).__name__ for layer in probing.make_probe(12)]
    block = ["Linear", "SiLU", "LayerNorm", "Dropout"]
    assert names == ["LayerNorm", *block, *block, "Linear"]
    assert sum(p.numel() for p in probing.make_probe(2048).parameters()) == 1_318_914


def test_a_probe_learns_a_planted_direction_and_nothing_from_permuted_labels():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(1200, 16)).astype(np.float32)
    labels = states[:, 0] > 0
    new = rng.normal(size=(400, 16)).astype(np.float32)

    def accuracy(labels):
        probe = probing.fit_probe(states, labels, 3)
        with torch.no_grad():
            predicted = probe(torch.from_numpy(new)).argmax(-1)
        return (predicted.numpy().astype(bool) == (new[:, 0] > 0)).mean()

    few = np.arange(12) < 3
    rows = probing.balanced(few)  # equally many right and wrong answers
    assert len(rows) == 6 and few[rows].sum() == 3
    assert accuracy(labels) > 0.85
    assert 0.3 < accuracy(rng.permutation(labels)) < 0.7


def test_fitting_a_probe_does_not_seed_gpus():
    states = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    with PretendedGpu() as gpu:
        gpu.seed = 5
        probing.fit_probe(states, states[:, 0] > 0, 3)
        assert gpu.seed == 5


def probing_serve(surest):
    def serve(call):
        if call.kind == "search":
            return tuple(range(9)) if call.text == "who?" else tuple(range(4, 13))
        if call.kind == "probe":
            return (0.0, 6.0) if call.passages == surest else (3.0, 3.0)
        return reply(f"saw {call.passages}")

    return serve


def probed_plan(theta, serve):
    plan = probing.probing_rag("who?", theta, 9, lambda shown: f"<{shown[0]}>", SEARCH)
    return played(plan, serve)


def test_probing_rag_searches_by_the_question_and_then_by_its_whole_output():
    answer, calls = probed_plan(0.0, probing_serve((4, 5, 6)))
    assert answer == "saw (4, 5, 6)"  # which replace the passages before
    searched = [call.text for call in calls if call.kind == "search"]
    assert searched == ["who?", "<0> who? saw (0, 1, 2)"]


def test_tied_probes_retrieve_four_times_unless_theta_breaks_the_tie():
    _, calls = probed_plan(0.0, probing_serve(None))
    assert kinds(calls).count("search") == 4 and kinds(calls).count("answer") == 5
    assert kinds(calls).count("probe") == 4  # the last answer is not judged
    _, calls = probed_plan(-0.1, probing_serve(None))
    assert kinds(calls) == ["answer", "probe"]


# The threshold on perplexity, and what all rivals share


def test_perplexity_judges_in_the_same_loop_without_calling_the_detector():
    maps = {"closed_book": lambda x: 0.3, "with_context": lambda x: x}
    judge = adaptive.perplexity_judge(maps)

    def serve(call):
        if call.kind == "search":
            return range(9)
        return reply("sure" if call.passages else "guess", math.log(0.8))

    policy = Policy(threshold=0.7, budget=2)
    answer, calls = played(pgir("who?", policy, ControllerConfig(), judge), serve)
    assert (answer, kinds(calls)) == ("sure", ["answer", "search", "answer"])


def test_the_increasing_map_of_perplexity_keeps_different_drafts_apart():
    rng = np.random.default_rng(0)
    n = 90
    spans = np.tile([(0, 0), (0, 1), (1, 2)], (n, 1, 1))
    store = store_like("memory://likely", {"prob": Family(shape=(5,))}, spans)
    rows = rows_of(rng.random(n) < 0.5, "with_context", ["validation"] * n)
    maps = adaptive.perplexity_maps({"with_context": (store, rows)}, "increasing")
    judge = adaptive.perplexity_judge(maps)
    log_probs = np.linspace(-5, -0.01, 200)
    plans = [judge("who?", (0,), reply("x", log_prob)) for log_prob in log_probs]
    p_correct = [played(plan, no_call)[0][0] for plan in plans]
    assert (np.diff(p_correct) > 0).all()


def test_the_best_setting_under_the_cap_is_chosen_and_the_cheapest_of_equals():
    right, wrong = np.ones(4), np.zeros(4)
    costs = {"dear": 5, "first": 3, "cheap": 2, "bad": 1}
    tried = {x: (wrong if n == 1 else right, np.full(4, n)) for x, n in costs.items()}
    assert best_under_cap(tried, 4.0) == "cheap"
    assert best_under_cap({"a": tried["dear"], "b": tried["bad"]}, 0.5) == "b"


@pytest.fixture(scope="module")
def answering(probed, tmp_path_factory):
    config = GenerationConfig(max_new_tokens=8, tokens_per_batch=512)
    small = ProbedBackbone(probed.backbone, probed.detector, config)
    journal = CallJournal(tmp_path_factory.mktemp("calls") / "calls.jsonl", "one")
    passages = [Passage(title="", text=PASSAGE)]
    return AnswerService(small, passages, journal, probing.state_layers(6))


@pytest.fixture(scope="module")
def answers(answering):
    """The calls of two answers in the journal, without a passage and with one."""
    calls = [Call("answer", QUESTION), Call("answer", QUESTION, (0,))]
    answering.journal.add("first", calls, values_of(answering, calls), 0.0)
    return calls


def values_of(service, calls):
    values = dict(pair for batch in service.batches(calls, ()) for pair in batch)
    return [values[i] for i in range(len(calls))]


def test_an_answer_that_its_passage_contains_is_surer_than_a_guess(answering, answers):
    calls = [as_kind(call, "spread", 12) for call in answers]
    (guess, _), (read, n_new) = values_of(seakr.SpreadService(answering), calls)
    assert read < guess and n_new >= 12
    cost = seakr.SpreadService(answering).cost(calls[1], (read, n_new))
    assert cost == Cost(sequences=12, tokens=n_new + 12)  # one stop token each


class TextsInTurn:
    """A generator of given draws, each a pair of ids and text."""

    tokens_per_batch = 512

    def __init__(self, *texts):
        self.texts = texts

    def stream(self, prompts, config):
        for index, (ids, text) in enumerate(self.texts):
            fields = {"text": text, "token_ids": ids, "stop_id": 2, "finish": "stop"}
            fields |= {"n_prompt_tokens": 3, "n_new_tokens": len(ids) + 1}
            yield index, Generated(log_probs=(-1.0,) * (len(ids) + 1), **fields)


def drawing_of(answering, *texts):
    """Return a service that measures the spread of given draws, see `TextsInTurn`."""
    drawing = copy.copy(answering)
    drawing.generator = TextsInTurn(*texts)
    return seakr.SpreadService(drawing)


DRAWS = [((40 + i, 41), str(i)) for i in range(12)]


def test_draws_without_a_text_do_not_count_in_the_spread_of_answers(answering, answers):
    def spread_of(*texts):
        call = as_kind(answers[0], "spread", len(texts))
        ((spread, n_new),) = values_of(drawing_of(answering, *texts), [call])
        assert n_new == sum(len(ids) + 1 for ids, _ in texts)
        return spread

    texts = ((40, 41), "one"), ((50,), "two")
    # A single line end has an id and no text; the official code leaves it out.
    assert spread_of(*texts, ((60,), "")) == spread_of(*texts)


def test_the_prompt_before_the_draws_is_computed_only_once(answering, answers):
    backbone, call = answering.probed.backbone, as_kind(answers[1], "spread", 12)
    reading = drawing_of(answering, *DRAWS)
    with input_shapes(backbone) as shapes:
        ((spread, _),) = values_of(reading, [call])
    prompt, stop = answering.request(call)[0].prompt.ids, stop_ids(backbone)[0]
    n_tokens = sum(map(math.prod, shapes))
    assert n_tokens <= len(prompt) + 12 * 3  # two ids and the stop token
    sequences = [(*prompt, *ids, stop) for ids, _ in DRAWS]
    states = np.concatenate([reading._states([ids]) for ids in sequences])
    assert spread == pytest.approx(seakr.uncertainty(states), abs=1e-3)


def test_draws_are_read_in_halves_if_they_do_not_fit_in_the_device(answering, answers):
    drawing, call = copy.copy(answering), as_kind(answers[1], "spread", 12)
    drawing.probed = copy.copy(drawing.probed)
    backbone = drawing.probed.backbone
    drawing.probed.backbone = dataclasses.replace(backbone, splitter=BatchSplitter())
    ((expected, _),) = values_of(drawing_of(drawing, *DRAWS), [call])
    with room_for(backbone, 4) as refused:
        ((spread, _),) = values_of(drawing_of(drawing, *DRAWS), [call])
    assert refused and spread == pytest.approx(expected, abs=1e-3)
    single = as_kind(call, "spread", 1)
    with room_for(backbone, 0):
        (failed,) = values_of(drawing_of(drawing, DRAWS[0]), [single])
    assert isinstance(failed, Failed) and "does not fit" in failed.reason


def as_kind(call, kind, n=0):
    return Call(kind, call.text, call.passages, n)


def test_attention_of_the_last_layer_equals_that_of_transformers(backbone):
    ids = backbone.tokenizer(QUESTION)["input_ids"]
    longer = [*ids, *ids]
    attention = dragin.last_attention(backbone, [ids, longer], 4096, np.array)
    model = backbone.model
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            for given_ids, weights in zip((ids, longer), attention, strict=True):
                expected = model(torch.tensor([given_ids]), output_attentions=True)
                want = expected.attentions[-1][0].numpy()
                # The two add the same float32 products in different orders.
                np.testing.assert_allclose(weights, want, atol=1e-5)
    finally:
        model.set_attn_implementation(implementation)


def test_words_of_an_answer_have_attention_and_entropy(answering, answers):
    wording = dragin.WordService(answering)
    _, read = values_of(wording, [as_kind(c, "words") for c in answers])
    assert read.words == ("Guzolt", "Falls")
    assert min(read.attention) > 0 and all(e >= 0 for e in read.entropy)
    (attended,) = values_of(wording, [as_kind(answers[1], "attended")])
    assert attended.words == (*QUESTION.split(), "Guzolt", "Falls")
    for position, row in enumerate(attended.rows):
        n_before = len(QUESTION.split()) + position
        assert sum(row) == pytest.approx(1, abs=1e-5)
        assert not any(row[n_before:])  # only earlier words are attended to


def test_a_word_in_the_stop_token_is_not_one_of_the_answers_words(answering):
    call = Call("answer", "is it?")

    def read(kind, reply, **fields):
        other = copy.copy(answering)
        other.journal = CallJournal(None, "")
        value = msgspec.structs.replace(reply, **fields)
        other.journal.add("first", [call], [value], 0.0)
        return values_of(dragin.WordService(other), [as_kind(call, kind)])

    full_stop = read("words", reply("."), token_ids=(), log_probs=(-0.5,))
    assert full_stop == [WordReading((), (), ())]
    ids = tuple(answering.probed.backbone.tokenizer("Guzolt Falls")["input_ids"])
    (attended,) = read("attended", reply("Guzolt Falls :"), token_ids=ids)
    assert attended.words == ("is", "it?", "Guzolt", "Falls")


def test_probes_learn_from_labelled_answers_and_refuse_one_class(answering, answers):
    examples = [an_example(golds=(gold,)) for gold in ("yes", "Guzolt")]
    training = list(zip(answers, examples, strict=True))
    probe = probing.ProbeService(answering, training * 8)
    sums = values_of(probe, [as_kind(c, "probe", 16) for c in answers])
    for wrong, right in sums:
        assert wrong + right == pytest.approx(len(probing.state_layers(6)), abs=1e-4)
    assert sums[1][1] > sums[0][1]  # the second was labelled right
    with pytest.raises(ValueError, match="8 of 8 training answers are right, and a s"):
        probing.ProbeService(answering, training[1:] * 8)


def test_a_rival_that_cannot_learn_is_left_out_with_its_reason():
    rows = left_out_rows({"probing_rag": "one class"})
    table = controller_table(results_of(rows))
    (line,) = table.lines
    assert line.label == CONTROLLERS["probing_rag"] and table.notes == ("one class",)


def test_drafts_are_scored_by_the_passes_that_wrote_them_even_when_resumed(
    answering, answers
):
    """A process that resumes has no signals and writes the answers again."""
    journal = answering.journal
    resumed = AnswerService(
        answering.probed, answering.passages, journal, probing.state_layers(6)
    )
    calls = [as_kind(call, "score") for call in answers]
    for service in (ScoreService(answering), ScoreService(resumed)):
        assert {service.cost(c, None).forwards for c in calls} == {0}
    scores = values_of(ScoreService(answering), calls)
    assert values_of(ScoreService(resumed), calls) == scores
    states = answering.states_of(answers)
    np.testing.assert_array_equal(states, resumed.states_of(answers))
    reading = answering.reading_of(answers)
    records = [answering.answer_of(c, journal.value(c)) for c in answers]
    again = answering.probed.read(records)
    for signals, expected in zip(reading.signals, again.signals, strict=True):
        assert (signals.path, expected.path) == ("decode", "teacher_forced")
        np.testing.assert_allclose(signals.hidden, expected.hidden, atol=1e-3)
        np.testing.assert_allclose(signals.attn, expected.attn, atol=1e-4)
    for call, expected in zip(answers, again.signals, strict=True):
        reply = journal.value(call)
        entropies = expected.prob[-len(reply.token_ids) - 1 : -1, ENTROPY]
        np.testing.assert_allclose(reply.entropies, entropies, atol=1e-4)


@pytest.mark.parametrize("places", [(), (0,)])
def test_an_answer_too_long_to_be_written_again_fails_only_its_question(
    answering, places
):
    """With a passage, the first answer is read again too, and does not fit either."""
    questions = [QUESTION, "who is " * 60, "who was it?"]
    drafts = [Call("answer", question) for question in questions]
    shown = [Call("answer", question, places) for question in questions]
    parts = answering.probed, answering.passages, CallJournal(None, "")
    first, resumed = AnswerService(*parts), AnswerService(*parts)
    scoring = ScoreService(first)
    for wave in (drafts, shown)[: 1 + len(places)]:
        first.journal.add(str(wave), wave, values_of(first, wave), 0.0)
        scores = [as_kind(call, "score") for call in wave]
        expected = values_of(scoring, scores)
        first.journal.add(f"scores of {wave}", scores, expected, 0.0)
    lengths = [len(first.request(call)[0].prompt.ids) for call in (*shown, drafts[1])]
    with room_for(answering.probed.backbone, n_tokens=lengths[-1] - 1):
        known, wrong, last = values_of(ScoreService(resumed), scores)
    assert max(lengths[0], lengths[2]) + 8 < lengths[-1]
    assert "does not fit in the device" in wrong.reason
    raw = pytest.approx([expected[0].raw, expected[2].raw], abs=1e-5)
    assert [known.raw, last.raw] == raw


@pytest.mark.parametrize("most_bytes", [0, 2**30])
def test_states_of_the_latest_answers_are_kept_and_of_others_if_they_fit(
    answering, most_bytes
):
    probed, layers = answering.probed, probing.state_layers(6)
    parts = answering.passages, CallJournal(None, "")
    fresh = AnswerService(probed, *parts, layers, most_bytes)
    words = [*filter(str.isalpha, probed.backbone.tokenizer.get_vocab())]
    pairs = itertools.islice(itertools.product(words, repeat=2), GROUP_SIZE + 2)
    calls = [Call("answer", f"who is {a} {b}?") for a, b in pairs]
    fresh.journal.add("first", calls, values_of(fresh, calls), 0.0)
    prompts = [fresh.request(call)[0].prompt.ids for call in calls]
    before = dict(fresh._states)
    assert set(before) == set(prompts)
    values_of(fresh, [Call("answer", QUESTION)])  # begins a wave
    n_kept = (len(calls) if most_bytes else GROUP_SIZE) + 1
    assert len(fresh._states) == len(fresh._signals) == n_kept
    np.testing.assert_array_equal(
        fresh.states_of(calls), [before[prompt] for prompt in prompts]
    )


def test_a_model_that_needs_a_second_pass_scores_alike_and_counts_the_pass(
    answering, answers
):
    probed = answering.probed
    again = ProbedBackbone(probed.backbone, probed.detector, probed.config)
    again.why_read_again = "its attention does not allow it"
    fixed = answering.passages, CallJournal(None, "")
    slow = AnswerService(again, *fixed, probing.state_layers(6))
    slow.journal.add("first", answers, values_of(slow, answers), 0.0)
    for call in answers:
        before, after = (x.journal.value(call) for x in (answering, slow))
        assert (after.text, after.token_ids) == (before.text, before.token_ids)
        assert after.entropies is None
    states = answering.states_of(answers)
    np.testing.assert_allclose(slow.states_of(answers), states, atol=1e-3)
    calls = [as_kind(call, "score") for call in answers]
    services = ScoreService(answering), ScoreService(slow)
    ours, theirs = ([s.raw for s in values_of(x, calls)] for x in services)
    assert theirs == pytest.approx(ours, abs=1e-3)
    assert [x.cost(calls[0], None).forwards for x in services] == [0, 1]
    calls = [as_kind(call, "words") for call in answers]
    services = dragin.WordService(answering), dragin.WordService(slow)
    ours, theirs = (values_of(x, calls) for x in services)
    kinds = (calls[0], as_kind(answers[0], "attended"))
    forwards = [[x.cost(call, None).forwards for call in kinds] for x in services]
    assert forwards == [[1, 1], [2, 1]]  # its entropies, read again
    for words, others in zip(ours, theirs, strict=True):
        assert words.words == others.words
        np.testing.assert_allclose(words.entropy, others.entropy, atol=1e-3)


def test_a_reply_has_one_log_probability_per_written_token(answering, answers):
    journal = answering.journal
    for call in answers:
        value = journal.value(call)
        n_written = len(value.token_ids) + (value.stop_id is not None)
        assert len(value.log_probs) == n_written
        assert value.log_prob == pytest.approx(np.mean(value.log_probs))
        cost = answering.cost(call, value)
        assert cost.tokens == value.n_prompt_tokens + n_written
    assert journal.value(answers[1]).text == "Guzolt Falls"


def test_a_rival_has_a_name_of_the_list_and_not_that_of_another():
    assert (*all_rivals(),) == RIVALS
    with pytest.raises(ValueError, match="'mine' has no place .* RIVALS"):
        rival("mine")(lambda session: None)
    with pytest.raises(ValueError, match="'skr' is already defined in .*adaptive"):
        rival("skr")(lambda session: None)
