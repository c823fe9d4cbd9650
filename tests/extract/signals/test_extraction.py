"""From a prompt and its answer to signals: sequences, and their extraction."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.tiny_models import tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.run.process import Share
from beatrice.extract.signals.extract import ExtractConfig, n_rows_of
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import TokenSequence, batches_of, sequence_of
from beatrice.extract.store.store import done_ranges, open_store
from tests.extract.signals.readers import (
    SMALL,
    WaveReader,
    files_under,
    plan_of,
    sequences_of,
    write_store,
)
from tests.records import an_answer


def id_reader(**fields):
    return WaveReader(most_tokens=SMALL.tokens_per_batch, **fields)


def run(where, *, reader=None, sequences=None, **worker):
    sequences = sequences or sequences_of()
    return write_store(where, sequences, reader or id_reader(), **worker)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_a_finished_run_reads_nothing_again(whole):
    reader = id_reader()
    report = run(whole, reader=reader)
    assert reader.n_read == 0
    assert (report.n_written, report.n_missing) == (0, 0)
    assert report.n_skipped == open_store(whole).spec.n_ranges


def test_progress_counts_only_the_answers_that_are_left(tmp_path):
    run(tmp_path, share=Share(1, 2))
    seen = []
    report = run(tmp_path, progress=lambda done, total: seen.append((done, total)))
    n_left = len(seen)
    assert seen == [(number, n_left) for number in range(1, n_left + 1)]
    assert report.n_written < n_left < len(sequences_of())
    assert report.n_skipped + report.n_written == open_store(tmp_path).spec.n_ranges


def test_a_run_cut_after_any_file_continues_to_the_same_bytes(tmp_path):
    sequences = sequences_of(8)
    first = tmp_path / "first"
    run(first, sequences=sequences)
    files = sorted(
        (path for path in first.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_mtime_ns,
    )
    assert files[-1].parent.parent.name == "commits"
    for n_files in range(len(files)):
        cut = tmp_path / str(n_files)
        for path in files[:n_files]:
            copy = cut / path.relative_to(first)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        if n_files and files[n_files - 1].name == "0":  # the last shard half written
            copy.write_bytes(copy.read_bytes()[:50])
        run(cut, sequences=sequences)
        assert files_under(cut) == files_under(first)


def test_other_answers_of_equal_length_are_refused(tmp_path):
    run(tmp_path, sequences=sequences_of())
    other = sequences_of()
    other[3].ids[0] += 1
    with pytest.raises(ValueError, match="fingerprint.sequences_sha256 "):
        run(tmp_path, sequences=other)


def test_a_value_that_is_not_finite_is_named_and_not_stored(tmp_path):
    sequences = sequences_of(10)
    sequences[4].ids[0] = 99
    advice = r"'hidden' of answer \('q4', .* hold: 0 .* 1 were NaN .* load the model"
    with pytest.raises(ValueError, match=advice):
        run(tmp_path, sequences=sequences, reader=id_reader(poison=99))
    store = open_store(tmp_path)
    range_id = int(np.searchsorted(store.spec.range_examples, 4, side="right")) - 1
    assert range_id not in done_ranges(store)


OTHER_SHAPES = {
    "the last row alone": lambda rows: rows[-1:],
    "one channel": lambda rows: rows[..., :1],
    "a row of the stop token": lambda rows: np.concatenate([rows, rows[-1:]]),
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_a_reading_of_another_shape_is_refused_not_broadcast_or_cut(tmp_path, shape):
    class Wrong(WaveReader):
        def read_ids(self, ids):
            reading = super().read_ids(ids)
            reading.prob = OTHER_SHAPES[shape](reading.prob)
            return reading

    with pytest.raises(ValueError, match=r"returned 'prob' of answer .* with shape \["):
        run(tmp_path, reader=Wrong(), sequences=sequences_of(10))


@pytest.mark.parametrize(
    ("n_answers", "fields", "message"),
    [
        (0, {}, "expected answers to read, found none"),
        (3, {"rows_per_shard": 0}, "must be a power of two, found 0"),
        (3, {"hidden_layers": (1,)}, r"keeps layers \[2, 5\], but the config"),
    ],
)
def test_a_plan_without_answers_or_with_unfit_settings_is_refused(
    n_answers, fields, message
):
    with pytest.raises(ValueError, match=message):
        plan_of(sequences_of(n_answers), id_reader(), ExtractConfig(**fields))


def test_readings_may_be_lists(tmp_path):
    class Listing(WaveReader):
        def read_ids(self, ids):
            arrays = vars(super().read_ids(ids))
            return SimpleNamespace(**{name: x.tolist() for name, x in arrays.items()})

    for name, reader in (("arrays", WaveReader()), ("lists", Listing())):
        run(tmp_path / name, reader=reader, sequences=sequences_of(10))
    assert files_under(tmp_path / "lists") == files_under(tmp_path / "arrays")


def test_shards_hold_few_rows_of_a_small_store_or_a_wide_family():
    narrow = 2 * 4096
    assert n_rows_of(50_000 * 400, [33 * narrow, 20]) == 256
    assert n_rows_of(50_000 * 400, [narrow, 20]) == 16384
    assert n_rows_of(3_000 * 40, [narrow, 20]) == 1024
    assert n_rows_of(3 * 4, [narrow, 20]) == 256


def make_answer(**changes):
    ids = dict(prompt_ids=(1, 7, 9, 11, 13, 15, 17, 19), token_ids=(21, 23, 25))
    fields = dict(setting="with_context", stop_id=2, context_span=(1, 4))
    return an_answer(**{**ids, **fields, **changes})


def test_the_targets_of_an_answer_are_the_ids_that_follow():
    sequence = sequence_of(make_answer())
    assert sequence.ids.tolist() == [1, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25]
    assert sequence.targets.tolist() == [*sequence.ids[1:], 2]


CUT, EMPTY, BARE = {"stop_id": None}, {"token_ids": ()}, {"context_span": (1, 1)}
SPANS = {  # changes to an answer, the kind of answer span, the spans
    "positions that emit the answer": ({}, "emitting", [[1, 4], [4, 7], [7, 11]]),
    "answer tokens alone": ({}, "literal", [[1, 4], [4, 8], [8, 11]]),
    "a question without a context": (BARE, "emitting", [[1, 1], [1, 7], [7, 11]]),
    "nothing but the stop token": (EMPTY, "emitting", [[1, 4], [4, 7], [7, 8]]),
    # A cut answer's span excludes the last position, whose next token is unknown.
    "a cut answer": (CUT, "emitting", [[1, 4], [4, 7], [7, 10]]),
    "a cut answer's tokens": (CUT, "literal", [[1, 4], [4, 8], [8, 10]]),
    "a cut answer of nothing": (CUT | EMPTY, "emitting", [[1, 4], [4, 7], [7, 7]]),
    "its tokens": (CUT | EMPTY, "literal", [[1, 4], [4, 8], [8, 8]]),
}


@pytest.mark.parametrize("case", SPANS)
def test_spans_are_those_of_the_context_the_question_and_the_answer(case):
    changes, answer_span, expected = SPANS[case]
    sequence = sequence_of(make_answer(**changes), answer_span=answer_span)
    assert sequence.spans.tolist() == expected


def test_a_one_token_answer_has_its_own_probability_in_its_span():
    reader = SignalReader(Backbone.from_model(tiny_model("llama")))
    sequence = sequence_of(make_answer(token_ids=(21,)))
    start, stop = sequence.spans[2]
    result = reader.read([sequence])[0].prob[start:stop, 0]
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


def positions(batches, lengths):
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


@pytest.mark.parametrize("shape", [(8, 24), (30, 50), (80, 240), (190, 1400)])
def test_batches_compute_at_most_1_1_positions_per_token(shape):
    rng, n = np.random.default_rng(0), 256
    # Most are near the shortest, with a long tail, like published questions.
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
    # Without the rule, as if a batch were run in many passes, padding is more.
    filled = batches_of(lengths, 10**6, n_passes=10**6)
    assert positions(filled, lengths) > 1.1 * lengths.sum()


def test_few_short_sequences_form_one_batch_and_a_beginning_uses_its_budget():
    assert batches_of([4, 8, 2, 6], 4096) == [[1, 3, 0, 2]]
    assert [len(b) for b in batches_of([10] * 8, 80, n_beside=10)] == [4, 4]
