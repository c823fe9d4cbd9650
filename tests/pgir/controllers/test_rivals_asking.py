"""What rivals of PGIR read from a model: the embedded one, asked by each of them."""

import numpy as np
import pytest
import torch

from beatrice.extract.generate.requests import GenerationConfig
from beatrice.extract.records import Example, Passage
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.controllers.calls import Call
from beatrice.pgir.controllers.dragin import Wording, last_attention
from beatrice.pgir.controllers.probing import Probing, probed_layers
from beatrice.pgir.controllers.seakr import Spreading
from beatrice.pgir.controllers.services import Answering
from beatrice.pgir.controllers.waves import Journal
from tests.pgir.small_detector import PASSAGE, QUESTION


def labelled(call, gold):
    """An answer to train on, right where it says `gold`."""
    return call, Example(
        id=gold, dataset="world", split="train", question="q?", golds=(gold,)
    )


@pytest.fixture(scope="module")
def answering(probed, tmp_path_factory):
    small = ProbedBackbone(
        probed.backbone,
        probed.detector,
        GenerationConfig(max_new_tokens=8, tokens_per_batch=512),
    )
    return Answering(small, [Passage(title="", text=PASSAGE)])


@pytest.fixture(scope="module")
def asked(answering, tmp_path_factory):
    """Two answers in a journal, without a passage and with one."""
    journal = Journal(tmp_path_factory.mktemp("calls") / "calls.jsonl", "one")
    calls = [Call("answer", QUESTION), Call("answer", QUESTION, (0,))]
    for batch in answering.batches(calls, ()):
        places, values = zip(*batch, strict=True)
        journal.add("first", [calls[i] for i in places], values, 0.0)
    return journal, calls


def values_of(service, calls):
    found = dict(pair for batch in service.batches(calls, ()) for pair in batch)
    return [found[i] for i in range(len(calls))]


def test_an_answer_that_can_be_read_from_its_passage_is_surer_than_a_guess(
    answering, asked
):
    calls = [as_kind(call, "spread", 12) for call in asked[1]]
    (guess, _), (read, n_new) = values_of(Spreading(answering), calls)
    assert read < guess and n_new >= 12
    cost = Spreading(answering).cost(calls[1], (read, n_new))
    assert (cost.generations, cost.sequences, cost.forwards) == (0, 12, 12)


def as_kind(call, kind, n=0):
    return Call(kind, call.text, call.passages, n)


def test_last_attention_is_that_of_transformers(backbone):
    ids = backbone.tokenizer(QUESTION)["input_ids"]
    longer = [*ids, *ids]
    found = last_attention(backbone, [ids, longer], 4096)
    model = backbone.model
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            for given_ids, weights in zip((ids, longer), found, strict=True):
                expected = model(torch.tensor([given_ids]), output_attentions=True)
                want = expected.attentions[-1][0].numpy()
                # Eager and ours add the same float32 products in another order.
                np.testing.assert_allclose(weights, want, atol=1e-5)
    finally:
        model.set_attn_implementation(own)


def test_words_of_an_answer_have_attention_and_entropy(answering, asked):
    journal, answers = asked
    wording = Wording(answering, journal)
    found = values_of(wording, [as_kind(c, "words") for c in answers])
    read = found[1]
    assert read.words == ("Guzolt", "Falls")
    assert min(read.attention) > 0 and all(e >= 0 for e in read.entropy)
    (attended,) = values_of(wording, [as_kind(answers[1], "attended")])
    assert attended.words == (*QUESTION.split(), "Guzolt", "Falls")
    for place, row in enumerate(attended.rows):
        n_before = len(QUESTION.split()) + place
        assert sum(row) == pytest.approx(1, abs=1e-5)
        assert not any(row[n_before:])  # of what comes before alone


def test_probes_are_trained_on_answers_and_judge_them(answering, asked):
    journal, answers = asked
    training = [labelled(answers[0], "yes"), labelled(answers[1], "Guzolt")]
    probe = Probing(answering, journal, training * 8)
    calls = [as_kind(c, "probe", 16) for c in answers]
    sums = values_of(probe, calls)
    n_probes = len(probed_layers(6))
    for wrong, right in sums:
        assert wrong + right == pytest.approx(n_probes, abs=1e-4)
    assert sums[1][1] > sums[0][1]  # the second was labelled right


def test_a_prompt_is_cut_to_the_window_by_whole_passages(answering, backbone):
    many = Answering(
        answering.probed, [Passage(title="", text=PASSAGE * 3) for _ in range(30)]
    )
    request, n_shown = many.request(Call("answer", QUESTION, tuple(range(30))))
    assert 1 < n_shown < 30
    assert len(request.prompt.ids) + 8 <= backbone.max_length


def test_a_reply_is_as_long_as_its_log_probabilities_say(answering, asked):
    journal, answers = asked
    for call in answers:
        value = journal.value(call)
        n_written = len(value.token_ids) + (value.stop_id is not None)
        assert len(value.log_probs) == n_written
        assert value.log_prob == pytest.approx(np.mean(value.log_probs))
        cost = answering.cost(call, value)
        assert cost.tokens == value.n_prompt_tokens + n_written
    assert journal.value(answers[1]).text == "Guzolt Falls"
