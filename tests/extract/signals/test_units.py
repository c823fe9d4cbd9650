"""Units: batches do not depend on existing files, workers or interruptions."""

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.tiny_models import tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.run.process import Share
from beatrice.extract.signals.extract import ExtractConfig, tokens_per_unit
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.store.spec import model_shapes
from beatrice.extract.store.store import open_store
from tests.extract.signals.readers import (
    SMALL,
    assert_same_signals,
    files_under,
    plan_of,
    sequence_of_ids,
    sequences_of,
    write_store,
)

BUDGET = 16384
WIDE = model_shapes(d_model=4096, n_layers=32, n_attention_layers=8, n_heads=16)


def wide_plan(n_stored_layers, low, high, n_examples=4000):
    """Return the plan of a reader with the shapes of a 9B model."""
    ids = np.zeros(high, np.int64)
    lengths = np.random.default_rng(0).integers(low, high, n_examples)
    sequences = [
        sequence_of_ids(ids[:n], [(0, 50), (50, n - 60), (n - 60, n)]) for n in lengths
    ]
    hidden = {"hidden_layers": tuple(range(n_stored_layers)), "hidden_spans": "all"}
    shapes = WIDE | {"hidden": (n_stored_layers, 4096)}
    config = ExtractConfig(tokens_per_batch=BUDGET, **hidden)
    return plan_of(sequences, SimpleNamespace(shapes=shapes, **hidden), config)


@pytest.mark.parametrize(
    ("n_stored_layers", "low", "high", "most_waste", "fullness"),
    [(33, 350, 450, 0.08, 0.65), (1, 350, 450, 0.03, 0.65), (1, 130, 800, 0.1, 0.5)],
)
def test_units_of_a_wide_model_fit_and_batches_are_full_of_similar_lengths(
    n_stored_layers, low, high, most_waste, fullness
):
    plan = wide_plan(n_stored_layers, low, high)
    lengths = plan.spec.lengths
    ranges = [r for unit in plan.units for r in unit.ranges]
    assert ranges == list(range(plan.spec.n_ranges))
    row_bytes = sum(family.row_bytes for family in plan.spec.families.values())
    for unit in plan.units:
        first, last = plan.spec.range_examples[[unit.ranges.start, unit.ranges.stop]]
        examples = [i for batch in unit.batches for i in batch]
        assert sorted(examples) == list(range(first, last))
        # A unit is kept in the host's memory.
        assert row_bytes * lengths[examples].sum() <= 8 << 30
    batches = [batch for unit in plan.units for batch in unit.batches]
    sizes = [len(batch) * int(lengths[list(batch)].max()) for batch in batches]
    assert max(sizes) <= BUDGET
    assert sum(sizes) / lengths.sum() - 1 < most_waste
    assert np.mean(sizes) > fullness * BUDGET


def test_units_are_small_enough_to_share_and_large_enough_to_fill_batches():
    assert tokens_per_unit(60_000 * 400, [8192], BUDGET) == 16 * BUDGET
    assert tokens_per_unit(4_000 * 400, [8192], BUDGET) == 4_000 * 400 // 16
    assert tokens_per_unit(100 * 400, [8192], BUDGET) == BUDGET


def tiny_sequences(n_examples=120):
    return sequences_of(n_examples, longest=100)  # the small model has 128 positions


def tiny_reader(hidden_spans="all"):
    backbone = Backbone.from_model(tiny_model("llama"), revision="tiny")
    return SignalReader(backbone, hidden_spans=hidden_spans)


def run_tiny(where, share=Share(), reader=None):
    return write_store(where, tiny_sequences(), reader or tiny_reader(), share=share)


@pytest.fixture(autouse=True, scope="module")
def single_thread():
    """Use one thread, since last bits depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with units of several ranges, and batches across ranges."""
    plan = plan_of(tiny_sequences(), tiny_reader())
    folder = tmp_path_factory.mktemp("whole")
    inner = set(plan.spec.range_examples.tolist())
    batches = [batch for unit in plan.units for batch in unit.batches]
    assert any(inner & set(range(min(b) + 1, max(b) + 1)) for b in batches)
    run_tiny(folder)
    return folder


def test_one_share_of_three_continued_by_two_workers_has_the_bytes_of_one(
    tmp_path, whole
):
    report = run_tiny(tmp_path, Share(1, 3))
    assert 0 < report.n_written < report.n_missing
    shares, readers = (Share(0, 2), Share(1, 2)), (tiny_reader(), tiny_reader())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_tiny, [tmp_path] * 2, shares, readers))
    assert files_under(tmp_path) == files_under(whole)


def test_a_unit_that_lacks_one_range_is_completed_to_the_same_bytes(tmp_path, whole):
    units = plan_of(tiny_sequences(), tiny_reader()).units
    unit = next(unit for unit in units if len(unit.ranges) > 1)
    for missing in unit.ranges:
        folder = tmp_path / str(missing)
        shutil.copytree(whole, folder)
        store = open_store(folder)
        (folder / store.commit_key(missing)).unlink()
        there = {
            key: (folder / key).stat().st_mtime_ns
            for range_id in unit.ranges
            if range_id != missing
            for key in store.shard_keys(range_id, "hidden")
        }
        assert run_tiny(folder).n_written == 1
        assert files_under(folder) == files_under(whole)
        # What was committed is not written again.
        assert all((folder / k).stat().st_mtime_ns == t for k, t in there.items())


def test_a_reader_of_answer_spans_writes_the_same_store_as_one_of_all_spans(tmp_path):
    config = dataclasses.replace(SMALL, hidden_spans="answer")
    for spans in ("all", "answer"):
        write_store(tmp_path / spans, tiny_sequences(), tiny_reader(spans), config)
    assert files_under(tmp_path / "all") == files_under(tmp_path / "answer")
    with pytest.raises(ValueError, match="keeps hidden states of the answer span"):
        plan_of(tiny_sequences(), tiny_reader("answer"))


def test_a_batch_may_start_before_the_result_of_another_is_taken():
    reader, batch = tiny_reader(), tiny_sequences(8)
    first, second = reader.start(batch[:4]), reader.start(batch[4:])
    together = [*first.result(), *second.result()]
    assert_same_signals(together, reader.read(batch[:4]) + reader.read(batch[4:]))
