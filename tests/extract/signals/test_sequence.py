import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.tiny_models import tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import TokenSequence, batches_of, sequence_of
from tests.records import an_answer


def make_answer(**changes):
    ids = dict(prompt_ids=(1, 7, 9, 11, 13, 15, 17, 19), token_ids=(21, 23, 25))
    fields = dict(setting="with_context", stop_id=2, context_span=(1, 4))
    return an_answer(**{**ids, **fields, **changes})


def test_an_answer_becomes_a_sequence_with_emitting_spans():
    sequence = sequence_of(make_answer())
    assert sequence.ids.tolist() == [1, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25]
    assert sequence.targets.tolist() == [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 2]
    assert sequence.spans.tolist() == [[1, 4], [4, 7], [7, 11]]


@pytest.mark.parametrize("answer_span", ["emitting", "literal"])
def test_every_token_from_the_context_on_belongs_to_exactly_one_span(answer_span):
    for context in ((1, 4), (1, 1)):
        answer = make_answer(context_span=context)
        spans = sequence_of(answer, answer_span=answer_span).spans
        held = [t for start, stop in spans for t in range(start, stop)]
        assert held == list(range(1, 11))


CUT, EMPTY = {"stop_id": None}, {"token_ids": ()}
SPANS = {  # changes of an answer, whose span is meant, the spans
    "answer tokens alone": ({}, "literal", [[1, 4], [4, 8], [8, 11]]),
    "a question without a context": (
        {"context_span": (1, 1)},
        "emitting",
        [[1, 1], [1, 7], [7, 11]],
    ),
    "nothing but the stop token": (EMPTY, "emitting", [[1, 4], [4, 7], [7, 8]]),
    # A cut answer leaves out the position whose token is unknown.
    "a cut answer": (CUT, "emitting", [[1, 4], [4, 7], [7, 10]]),
    "a cut answer's tokens": (CUT, "literal", [[1, 4], [4, 8], [8, 10]]),
    "a cut answer of nothing": (CUT | EMPTY, "emitting", [[1, 4], [4, 7], [7, 7]]),
    "its tokens": (CUT | EMPTY, "literal", [[1, 4], [4, 8], [8, 8]]),
}


@pytest.mark.parametrize("case", SPANS)
def test_spans_are_of_the_context_the_question_and_the_answer(case):
    changes, answer_span, expected = SPANS[case]
    sequence = sequence_of(make_answer(**changes), answer_span=answer_span)
    assert sequence.spans.tolist() == expected


def test_a_one_token_answer_has_its_own_probability_in_its_span():
    reader = SignalReader(Backbone.from_model(tiny_model("llama")))
    sequence = sequence_of(make_answer(token_ids=(21,)))
    start, stop = sequence.spans[2]
    result = reader.read([sequence])[0].prob[start:stop, 0]
    with torch.no_grad():
        ids = torch.from_numpy(sequence.ids)[None]
        p = reader.backbone.model(input_ids=ids).logits[0].softmax(-1)
    expected = [float(p[7, 21]), float(p[8, 2])]  # the token, then the stop token
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("context_span", [(-1, 2), (3, 2), (1, 8)])
def test_a_context_outside_the_prompt_is_refused(context_span):
    with pytest.raises(ValueError, match="expected (a context span|\\[start, stop\\))"):
        sequence_of(make_answer(context_span=context_span))


def test_overlapping_spans_are_refused():
    ids, spans = np.arange(9), np.array([[1, 4], [3, 6], [6, 9]])
    with pytest.raises(ValueError, match="ordered context, question, answer"):
        TokenSequence(ids=ids, targets=ids, spans=spans)


def test_an_unknown_answer_span_is_refused():
    with pytest.raises(ValueError, match="one of emitting, literal, found 'whole'"):
        ExtractConfig(answer_span="whole")


def positions(batches, lengths):
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


@pytest.mark.parametrize("shape", [(8, 24), (30, 50), (80, 240), (190, 1400)])
def test_batches_compute_at_most_1_1_positions_a_token(shape):
    rng, n = np.random.default_rng(0), 256
    # Most are near the shortest, and a tail is long, as published questions are.
    lengths = (shape[0] + (shape[1] - shape[0]) * rng.beta(1, 3, n)).astype(int)
    budget = 16_384
    batches = batches_of(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(n))
    assert positions(batches, lengths) <= 1.1 * lengths.sum()
    assert all(len(b) * max(lengths[i] for i in b) <= budget for b in batches)
    order = rng.permutation(n)
    widths = [[lengths[i] for i in batch] for batch in batches]
    again = [[lengths[order][i] for i in b] for b in batches_of(lengths[order], budget)]
    assert again == widths
    # Without the rule, as where many passes go over a batch, padding is more.
    filled = batches_of(lengths, 10**6, n_passes=10**6)
    assert positions(filled, lengths) > 1.1 * lengths.sum()


def test_a_few_short_sequences_are_one_batch_and_a_beginning_is_of_the_budget():
    assert batches_of([4, 8, 2, 6], 4096) == [[1, 3, 0, 2]]
    assert [len(b) for b in batches_of([10] * 8, 80, n_beside=10)] == [4, 4]
