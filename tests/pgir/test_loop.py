"""Controllers: their decisions, their costs, and the rows that report them."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beatrice.extract.records import Passage
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.stages import change_settings
from beatrice.jaxprobe.calibrate import N_FOLDS
from beatrice.jaxprobe.calibration import folds_of
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    drawn_clusters,
    interval_of,
    wilson_interval,
)
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.commands import ControlOptions
from beatrice.pgir.controllers import RIVALS
from beatrice.pgir.controllers.loop import (
    ControllerConfig,
    Cost,
    DraftScore,
    Outcome,
    Policy,
    QuestionSet,
    TracedDraft,
    TracedSet,
    decide,
    draft_rag,
    drafts,
    fresh_passages,
    no_rag,
    pgir,
    recalibrated,
    upper_bound,
    vanilla_rag,
)
from beatrice.pgir.controllers.session import choose_policy
from beatrice.pgir.controllers.stage import (
    _cross_fitted,
    choose_cases,
    control_rows,
    frontier,
)
from beatrice.pgir.stages import CONTROL, CONTROL_PRESETS, ControlConfig
from tests.pgir.small import CORPUS, played, reply
from tests.records import an_example


def trace(*drafts):
    return tuple(TracedDraft(answer=a, p_correct=p, raw=p) for a, p in drafts)


def trace_of(*scores):
    return trace(*((f"a{i}", p) for i, p in enumerate(scores)))


@pytest.mark.parametrize(
    ("scores", "budget", "expected"),  # round, generations, accepted
    [
        ((0.9, 0.99), 4, (0, 1, True)),
        ((0.1, 0.7, 0.9), 4, (1, 2, True)),
        ((0.1, 0.5, 0.3), 2, (1, 3, False)),
        ((0.1, 0.2, 0.99), 1, (1, 2, False)),  # the budget allows no second retrieval
    ],
)
def test_a_policy_returns_the_first_confident_draft_or_else_the_best(
    scores, budget, expected
):
    decision = decide(trace_of(*scores), Policy(threshold=0.6, budget=budget))
    result = (decision.round, decision.n_generations, decision.is_accepted)
    assert result == expected


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(1, 5),
)
def test_a_decision_never_costs_more_than_its_budget(scores, threshold, budget):
    decision = decide(trace_of(*scores), Policy(threshold=threshold, budget=budget))
    assert decision.round < decision.n_generations <= budget + 1


def test_passages_already_shown_are_skipped_for_deeper_ones():
    assert fresh_passages([1, 2, 3, 4, 5, 6], frozenset({1, 2, 3}), 3) == (4, 5, 6)
    assert fresh_passages([1, 2, 3, 4], frozenset({1, 3}), 3) == (2,)
    assert fresh_passages([1, 2], frozenset({1, 2}), 3) == ()


def planted(ranking=lambda query: range(12), wanted=None):
    """Return a service whose answers are right and confident once shown `wanted`."""

    def serve(call):
        if call.kind == "search":
            return tuple(ranking(call.text))[: call.n]
        is_shown = wanted in call.passages
        if call.kind == "score":
            return DraftScore(0.9, 0.9) if is_shown else DraftScore(0.2, 0.2)
        return reply("right" if is_shown else "guess")

    return serve


def shown(trace):
    return [draft.passages for draft in trace]


def test_no_passage_is_shown_twice_and_every_round_shows_something_new():
    trace, _ = played(drafts("who?", ControllerConfig(depth=12)), planted())
    assert shown(trace) == [(), (0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    serve = planted(lambda query: range(4))  # soon exhausted
    trace, _ = played(drafts("who?", ControllerConfig()), serve)
    assert shown(trace) == [(), (0, 1, 2), (3,)]


def test_a_passage_that_does_not_fit_the_window_counts_as_not_shown():
    def serve(call):
        if call.kind == "answer":
            return reply("guess", n_shown=2)
        return planted()(call)

    trace, _ = played(drafts("who?", ControllerConfig(max_budget=2)), serve)
    assert shown(trace) == [(), (0, 1), (2,)]


def test_a_nan_score_ranks_below_all_others():
    policy = Policy(threshold=0.9, budget=2)
    assert decide(trace_of(math.nan, 0.1, 0.2), policy).round == 2
    assert decide(trace_of(math.nan, math.nan), policy).round == 0


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("draft", ["who? guess", "who? right"]),
        ("question", ["who?", "who?"]),
        ("question_first", ["who?", "who? right"]),
        ("sure_draft", ["who?", "who? right"]),  # sure once shown passage 1
        ("fused", ["who?", "who? guess"]),
        ("both", ["who?", "who? guess"]),
    ],
)
def test_each_kind_of_query_uses_the_draft_as_documented(query, expected):
    config = ControllerConfig(max_budget=2, query=query, depth=12, sure=0.9)
    _, calls = played(drafts("who?", config), planted(wanted=1))
    queries = [call.text for call in calls if call.kind == "search"]
    assert queries[:2] == expected
    with pytest.raises(ValueError, match="query: expected one of draft, question"):
        ControllerConfig(query="both_ways")


@pytest.mark.parametrize(
    ("query", "passages"),
    [
        ("fused", (2, 0, 1)),  # ranks 3 and 1, 1 and 4; then only rank 2
        ("both", (0, 1, 2, 9, 8)),  # each once
    ],
)
def test_rankings_of_two_queries_are_fused_or_both_shown(query, passages):
    rankings = planted(lambda q: (0, 1, 2, 3) if q == "who?" else (2, 9, 8, 0))
    config = ControllerConfig(max_budget=1, query=query)
    trace, _ = played(drafts("who?", config), rankings)
    assert shown(trace)[1] == passages


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.95])
def test_the_loop_gives_the_answer_that_the_policy_chooses_from_the_trace(threshold):
    policy, config = Policy(threshold=threshold, budget=3), ControllerConfig()
    serve = planted(wanted=4)
    trace, _ = played(drafts("who?", config), serve)
    decision = decide(trace, policy)
    answer, calls = played(pgir("who?", policy, config), serve)
    assert answer == decision.draft.answer == trace[decision.round].answer
    n_answers = sum(call.kind == "answer" for call in calls)
    assert n_answers == decision.n_generations


def test_an_oracle_for_one_part_loses_only_what_the_other_parts_lose():
    # Round 1 is trusted and wrong, round 2 would be right.
    scores = {(): 0.3, (0, 1, 2): 0.8, (3, 4, 5): 0.9}

    def serve(call):
        if call.kind == "search":
            return range(6)
        p = scores[call.passages]
        texts = {(): "guess", (0, 1, 2): "wrong", (3, 4, 5): "right"}
        return DraftScore(p, p) if call.kind == "score" else reply(texts[call.passages])

    policy, config = Policy(threshold=0.7, budget=2), ControllerConfig()

    def result(knows, truth, policy=policy):
        plan = upper_bound("who?", policy, config, knows, lambda a: a == truth)
        answer, calls = played(plan, serve)
        return answer, sum(call.kind == "answer" for call in calls)

    assert result("judge", "right") == ("right", 3)
    assert result("gate", "right") == ("wrong", 2)
    assert result("gate", "right", policy=Policy(threshold=0.3, budget=2))[0] == "wrong"
    assert result("gate", "guess") == ("guess", 1)
    assert result("choice", "right") == ("wrong", 2)  # right answer never drafted
    assert result("choice", "guess") == ("guess", 2)  # drafted and discarded


def validated(gold, *scores):
    """Return ten validation questions with the same drafts, `a0`, `a1` and so on."""
    examples = tuple(an_example(id=f"q{i}", golds=(gold,)) for i in range(10))
    return TracedSet(
        dataset="world",
        split="validation",
        examples=examples,
        traces=(trace_of(*scores),) * 10,
    )


def test_the_policy_search_finds_the_planted_policy_and_obeys_the_cap():
    # Closed-book scores are worthless here; the second retrieval is right.
    questions = validated("a2", 0.5, 0.4, 0.9)
    free, (right, generations) = choose_policy(
        [questions], ControllerConfig(max_budget=2)
    )
    assert free == Policy(budget=2, threshold=0.55)  # the lowest above 0.5
    assert right.all() and set(generations.tolist()) == {3}
    capped = ControllerConfig(max_generations=0.5)
    assert choose_policy([questions], capped)[0] == Policy(budget=1, threshold=0.05)
    # Only the fourth retrieval, which is the fifth generation, is right.
    questions = validated("a4", 0.5, 0.4, 0.3, 0.3, 0.9)
    low, high = (
        choose_policy([questions], ControllerConfig(max_generations=cap))[0].budget
        for cap in (4.0, 5.0)
    )
    assert high == 4 > low
    # The first retrieval is right, and any cheaper policy is wrong.
    best, (right, _) = choose_policy([validated("a1", 0.5, 0.9)], ControllerConfig())
    assert best.budget == 1 and right.all()


def test_recalibration_maps_each_passs_probabilities_and_nothing_else():
    result = recalibrated(trace_of(0.5, 0.4, 0.9), lambda x: x / 2, lambda x: 1 - x)
    assert [draft.p_correct for draft in result] == pytest.approx([0.25, 0.6, 0.1])
    assert [d.answer for d in result] == ["a0", "a1", "a2"]
    assert [d.raw for d in result] == [0.5, 0.4, 0.9]


def test_a_cross_fitted_probability_ignores_the_labels_of_its_own_fold(
    smoke_run, tmp_path
):
    run = RunDir(shutil.copytree(smoke_run, tmp_path / "run"))
    examples = tuple(e for e in read_examples(run) if e.split == "validation")
    traces = (trace_of(0.2, 0.5, 0.8),) * len(examples)
    about = {"dataset": examples[0].dataset, "split": "validation"}
    traced = [TracedSet(**about, examples=examples, traces=traces)]
    (before,) = _cross_fitted(run, traced)
    folds = folds_of([e.id for e in examples], N_FOLDS)
    ids = {e.id for e, fold in zip(examples, folds, strict=True) if fold == 2}
    labels = [json.loads(line) for line in run.labels.read_text().splitlines()]
    for label in labels:
        label["label"] ^= label["example_id"] in ids
    run.labels.write_text("".join(f"{json.dumps(x)}\n" for x in labels))
    (after,) = _cross_fitted(run, traced)
    pairs = zip(folds, before.traces, after.traces, strict=True)
    for fold, *of_question in pairs:
        p, others = ([draft.p_correct for draft in x] for x in of_question)
        assert (p == others) == (fold == 2)


def test_the_cap_is_a_setting_of_the_run(tmp_path):
    change = ControlOptions(max_generations=4.63).change
    with RunDir.open(tmp_path / "run", NewRun(preset="paper")) as run:
        assert CONTROL.resolve_section(run, change).max_generations == 4.63
        section = json.loads((run.path / "manifest.json").read_text())["sections"]
        assert section["control"]["max_generations"] == 4.63
        assert CONTROL.resolve_section(run).max_generations == 4.63
        other = ControlOptions(cross_fit=True).change
        change_settings(run, CONTROL, other)  # the policy may be searched for again
        settled = ControlConfig(max_generations=4.63, cross_fit=True)
        assert CONTROL.resolve_section(run) == settled


def test_bm25_ranks_the_passage_with_the_rare_word_first_and_needs_a_word():
    result = Bm25Retriever(CORPUS).search(["shared word7", "text word3"], 3)
    assert [ranking[0] for ranking in result] == [7, 3]
    for passages in ([], [Passage(title="", text="?!")]):
        with pytest.raises(ValueError, match="at least one passage with a word"):
            Bm25Retriever(passages)


TEXTS = ["राम का घर", "राम की भाषा", "बाघ वन का", "vitamin C", "Apollo 5", "it's a"]


@pytest.mark.parametrize(
    ("texts", "queries", "expected"),
    [
        # Words with vowel signs, and words of one character.
        (TEXTS, ["भाषा", "राम", "का", "c", "5"], [[1], [0, 1], [0, 2], [3], [4]]),
        # Two encodings of a letter match.
        (
            ["caf\u00e9 \u0958लम"],
            ["cafe\u0301", "\u0915\u093cलम", "cafe"],
            [[0], [0], []],
        ),
        # A script without spaces, and a soft hyphen.
        (["首都是北京。", "a hy\u00adphen"], ["北京在哪里", "hyphen"], [[0], [1]]),
        (["word3", "shared"], ["zzzz", "?!", "word3 zzzz"], [[], [], [0]]),
    ],
)
def test_bm25_finds_the_passages_that_share_a_word_and_no_others(
    texts, queries, expected
):
    retriever = Bm25Retriever([Passage(title="", text=text) for text in texts])
    rankings = retriever.search(queries, 6)
    assert [sorted(ranking.tolist()) for ranking in rankings] == expected


POLICY = Policy(threshold=0.5, budget=2)
RANKED = ("no_rag", "vanilla_rag", "draft_rag", "pgir", "perfect_judge")


def traced():
    """Four questions, all with the gold "yes"; plain retrieval helps one of them."""
    traces = (
        trace(("yes", 0.9)),  # kept; the ranking was exhausted
        trace(("no", 0.2), ("yes", 0.7), ("no", 0.1)),  # retrieved for, and trusted
        trace(("no", 0.8), ("yes", 0.9), ("yes", 0.9)),  # trusted, and wrong
        trace(("no", 0.1), ("no", 0.3), ("yes", 0.2), ("yes", 0.9)),  # a wrong one kept
    )
    examples = tuple(
        an_example(id=f"q{i}", question=f"question {i}?", golds=("yes",))
        for i in range(len(traces))
    )
    return TracedSet(dataset="world", split="test", examples=examples, traces=traces)


PLAIN = (90, 91, 92)  # what a search with only the question finds


def serve_from(replies, vanilla):
    """Return a service that replies with a trace's drafts, three passages a round."""

    def serve(call):
        if call.kind == "search":
            is_plain = call.text.endswith("?")
            return PLAIN if is_plain else range(3 * (len(replies) - 1))
        if call.passages == PLAIN:
            return reply(vanilla)
        draft = replies[call.passages[0] // 3 + 1] if call.passages else replies[0]
        if call.kind == "score":
            return DraftScore(draft.p_correct, draft.raw)
        return reply(draft.answer)

    return serve


def answers_of(loop, vanilla=("no", "no", "yes", "no")):
    """Return every controller's answers, with costs counted from its calls."""
    config = ControllerConfig()
    result = {name: [] for name in RANKED}
    for example, item, plain in zip(loop.examples, loop.traces, vanilla, strict=True):
        text = example.question
        plans = (
            no_rag(text),
            vanilla_rag(text, config),
            draft_rag(text, config),
            pgir(text, POLICY, config),
            upper_bound(text, POLICY, config, "judge", lambda a: a == "yes"),
        )
        for name, plan in zip(RANKED, plans, strict=True):
            value, calls = played(plan, serve_from(item, plain))
            kinds = [call.kind for call in calls]
            cost = Cost(
                generations=kinds.count("answer"),
                retrievals=kinds.count("search"),
                forwards=kinds.count("score"),
            )
            result[name].append(Outcome(value, cost))
    return result


def measured(metric):
    questions, config = traced(), BootstrapConfig(n_resamples=20)
    rows = control_rows([questions], [answers_of(questions)], config)
    rows = [row for row in rows if row.experiment == "controller"]
    return {row.detector: row for row in rows if row.metric == metric}


@pytest.mark.parametrize(
    ("metric", "sums"),  # over the four questions, for the controllers in `RANKED`
    [
        ("em", (1, 1, 3, 2, 4)),  # draft_rag: round 1 of every trace, or its only one
        ("generations", (4, 4, 1 + 2 + 2 + 2, 1 + 2 + 1 + 3, 1 + 2 + 2 + 3)),
        # draft_rag must search to find that the first question's ranking is exhausted.
        ("retrievals", (0, 4, 4, 0 + 1 + 0 + 2, 0 + 1 + 1 + 2)),
        ("forwards", (0, 0, 0, 1 + 2 + 1 + 3, 1 + 2 + 2 + 3)),
    ],
)
def test_controllers_have_the_expected_accuracy_and_every_call_is_counted(metric, sums):
    values = {name: row.value for name, row in measured(metric).items()}
    assert values == {name: n / 4 for name, n in zip(RANKED, sums, strict=True)}


@pytest.mark.parametrize("n_right", [29, 30])
def test_right_answers_have_no_narrower_interval_than_a_share(n_right):
    examples = tuple(an_example(id=f"q{i}", golds=("yes",)) for i in range(30))
    questions = QuestionSet(dataset="world", split="test", examples=examples)
    done = [Outcome("yes" if i < n_right else "no", Cost()) for i in range(30)]
    config = BootstrapConfig(n_resamples=200)
    rows = control_rows([questions], [{"no_rag": done}], config)
    (row,) = (r for r in rows if (r.experiment, r.metric) == ("controller", "em"))
    assert row.ci_low == pytest.approx(wilson_interval(n_right / 30, 30)[0])
    assert row.value == n_right / 30 and row.ci_high == 1
    (row, *_) = measured("forwards").values()  # costs that are equal are certain
    assert row.ci_low == row.ci_high == 0


def test_a_larger_budget_never_generates_less():
    points = frontier("pgir", [traced()], POLICY, ControllerConfig(max_budget=3))
    assert [point["budget"] for point in points] == [1, 2, 3]
    costs = [point["generations"] for point in points]
    assert costs == sorted(costs) and costs[-1] == pytest.approx(8 / 4)


def test_two_question_sets_of_equal_size_are_resampled_independently():
    first = traced()
    other = dataclasses.replace(first, dataset="held", split="ood")
    answers = [answers_of(first), answers_of(other)]
    config = BootstrapConfig(n_resamples=2000)
    rows = control_rows([first, other], answers, config)
    widths = {
        row.dataset: row.ci_high - row.ci_low
        for row in rows
        if (row.detector, row.metric, row.against) == ("no_rag", "em", None)
    }
    # The mean is over twice as many questions, not over the same ones twice.
    assert widths["macro"] < 0.9 * widths["world"] == 0.9 * widths["held"]


def test_pgir_is_compared_with_each_controller_on_the_same_questions():
    first = traced()
    other = dataclasses.replace(first, dataset="held", split="ood")
    config = BootstrapConfig(n_resamples=500)
    answers = [answers_of(first), answers_of(other, ("yes",) * 4)]
    for of_set in answers:  # a controller without a title
        of_set["judge:own"] = of_set["no_rag"]
    rows = control_rows([first, other], answers, config)
    paired = [r for r in rows if r.experiment == "controller_paired"]
    assert {r.detector for r in paired} == {"pgir"}
    plain = {"no_rag", "vanilla_rag", "draft_rag"}
    assert {r.against for r in paired} == {*plain, "judge:own"}
    gains = [r for r in paired if (r.metric, r.against) == ("em", "vanilla_rag")]
    by_set = {"world": 0.25, "held": -0.5, "macro": -0.125}
    assert {r.dataset: r.value for r in gains} == by_set
    for row in gains:
        assert row.ci_low <= row.value <= row.ci_high and 0 < row.p_value <= 1
    gain = np.array([1, 1, -1, 0])  # of pgir over plain retrieval, per question
    means = [gain[drawn].mean() for drawn in drawn_clusters(4, config)]
    (row,) = (r for r in gains if r.dataset == "world")
    assert (row.ci_low, row.ci_high) == pytest.approx(interval_of(np.array(means)))


@pytest.mark.parametrize("n_better", [0, 3, 20])
def test_a_gain_on_few_questions_is_no_surer_than_by_a_sign_test(n_better):
    examples = tuple(an_example(id=f"q{i}", golds=("yes",)) for i in range(30))
    questions = QuestionSet(dataset="world", split="test", examples=examples)
    ours = [Outcome("yes", Cost())] * 30
    other = [Outcome("no" if i < n_better else "yes", Cost()) for i in range(30)]
    config = BootstrapConfig(n_resamples=200)
    rows = control_rows([questions], [{"pgir": ours, "no_rag": other}], config)
    paired = [r for r in rows if (r.against, r.metric) == ("no_rag", "em")]
    for row in paired:  # of the set, and of all
        assert row.value == pytest.approx(n_better / 30)
        assert (row.ci_low > 0) == (n_better == 20)
        assert row.p_value >= min(1, 2 ** (1 - n_better)) and row.p_value <= 1
        assert (row.p_value < 0.05) == (n_better == 20)
    assert len(paired) == 2


def test_cases_are_chosen_from_every_question_set_by_one_rule():
    given = traced()
    others = [
        dataclasses.replace(given, dataset=d, split="ood") for d in ("nq", "popqa")
    ]
    result = choose_cases([given, *others], POLICY)
    shown = [(c.traced.dataset, c.example_index, c.action) for c in result]
    assert shown == [
        ("world", 0, "Accept, no retrieval"),
        ("nq", 1, "Retrieve, then trust"),
        ("popqa", 1, "Retrieve, then trust"),
        ("world", 3, "Retrieve; all flagged, none trusted"),
        ("nq", 2, "Trusted, and wrong"),
    ]  # no question was trusted in a second round
    reversed_fields = {"traces": given.traces[::-1], "examples": given.examples[::-1]}
    turned = dataclasses.replace(given, **reversed_fields)
    for questions, expected in ((given, [0, 1, 3, 2]), (turned, [3, 2, 0, 1])):
        cases = choose_cases([questions], POLICY)
        assert [case.example_index for case in cases] == expected


def test_the_demo_runs_every_rival_but_the_dearest_and_the_paper_all():
    assert set(RIVALS) - set(CONTROL_PRESETS["demo"].rivals) == {"seakr"}
    assert CONTROL_PRESETS["paper"].rivals == RIVALS
