import dataclasses

import pytest
import torch

from benchmarks.speed.extract_cost import (
    Bench,
    Cost,
    CostConfig,
    Times,
    alternate,
    configs,
    measure_peak,
    peak_above,
)

TINY = CostConfig(
    n_tokens=24, n_examples=2, n_read=12, vocab_size=97, d_model=64, n_layers=2
)


def test_runs_take_turns_after_one_unmeasured_round():
    order = []
    rounds = alternate([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert order == ["a", "b"] * 4
    assert len(rounds) == 3 and all(len(times) == 2 for times in rounds)


def test_the_peak_sees_what_a_run_held_and_gave_back():
    n_mib = 192
    found = peak_above(lambda: torch.ones(n_mib * 2**18).sum(), "cpu")
    # The rest of the process may give back a little meanwhile.
    assert 0.8 * n_mib < found < 1.5 * n_mib


def test_reading_and_bare_forward_are_of_the_same_batch():
    bench = Bench(TINY)
    assert bench.ids.shape == (2, 24)
    for sequence, ids in zip(bench.sequences, bench.ids, strict=True):
        assert sequence.ids.tolist() == ids.tolist()
        assert sequence.spans.tolist() == [[8, 12], [12, 20], [20, 24]]
    times = bench.time(2)
    assert times.n_pairs == 2 and times.ratio > 0


def test_a_peak_is_measured_in_a_process_of_its_own():
    wide = dataclasses.replace(TINY, vocab_size=50000, n_tokens=512)
    # The bare forward holds all logits: 2 x 512 x 50000 floats.
    assert measure_peak(wide, "bare", 1) > 180


def test_a_process_that_fails_says_why():
    broken = dataclasses.replace(TINY, device="nowhere")
    with pytest.raises(ValueError, match="memory failed.*nowhere"):
        measure_peak(broken, "read", 1)


def test_without_a_gpu_no_gpu_row_is_planned():
    without = configs("float32", (97,), has_gpu=False)
    assert {config.device for config in without} == {"cpu"}
    with_gpu = configs("float32", (97,), has_gpu=True)
    assert {(c.device, c.dtype) for c in with_gpu} == {
        ("cpu", "float32"),
        ("cuda", "bfloat16"),
    }


def test_a_row_shows_ratios_of_reading_to_bare():
    times = Times(bare=2.0, read=2.2, ratio=1.1, n_pairs=3)
    cells = Cost(config=TINY, times=times, bare_mib=100.0, read_mib=50.0).cells()
    assert cells[-4:] == ["1.10", "100", "50", "0.50"]
