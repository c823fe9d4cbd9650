"""The cost of the store beside reading, and the full-size builders made small."""

import pytest
import torch
from click.testing import CliRunner

from benchmarks.speed.bench_extraction import extract
from benchmarks.speed.full_models import FULL_MODELS, GEMMA, QWEN, flops_per_token
from benchmarks.speed.gpu_cost import GPU_HEAD, measure_gpu
from benchmarks.speed.loop_cost import LOOP_HEAD, Loop, LoopConfig, measure_loops
from benchmarks.speed.tiny_models import tiny_model
from extract.backbone.loading import Backbone
from extract.signals.plan import ExtractConfig
from extract.signals.reader import SignalReader

SMALL = LoopConfig(
    n_examples=30,
    shortest=12,
    longest=24,
    n_answer=3,
    extract=ExtractConfig(tokens_per_batch=96, rows_per_shard=64),
)


@pytest.fixture(scope="module")
def backbone():
    return Backbone.from_model(tiny_model("llama"), revision="tiny")


def test_reading_and_extracting_are_of_the_same_batches(backbone):
    seen = []

    class Watched(SignalReader):
        def start(self, sequences):
            seen.append([id(item) for item in sequences])
            return super().start(sequences)

    loop = Loop(Watched.for_config(backbone, SMALL.extract), SMALL)
    loop.read()
    alone, seen[:] = list(seen), []
    loop.extract()
    assert seen == alone and len(seen) == len(loop.batches) > 1


def test_a_row_gives_both_rates_of_all_tokens(backbone):
    loop = Loop(SignalReader.for_config(backbone, SMALL.extract), SMALL)
    row = loop.measure("tiny", 2)
    assert row.n_tokens == loop.plan.spec.lengths.sum()
    assert row.whole > 0 and row.loop > 0 and row.n_rounds == 2
    assert len(row.cells()) == len(LOOP_HEAD)


def test_a_small_and_a_large_model_are_measured_with_the_store():
    small, large = measure_loops(1, is_small=True)
    assert small.model == "embedded" and small.n_tokens < large.n_tokens
    assert min(small.loop, small.whole, large.loop, large.whole) > 0


@pytest.mark.parametrize(
    ("full", "n_parameters", "gflop"),
    [(QWEN, 8.954e9, 13.84 + 2.03), (GEMMA, 7.463e9, 7.95 + 1.34)],
)
def test_the_full_models_have_the_parameters_of_the_released_ones(
    full, n_parameters, gflop
):
    model = full.build("meta", torch.bfloat16)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == pytest.approx(n_parameters, rel=1e-3)
    assert flops_per_token(model) / 1e9 == pytest.approx(gflop, rel=0.01)


@pytest.mark.parametrize("full", FULL_MODELS, ids=lambda full: full.name)
def test_a_full_model_made_small_is_measured(full):
    cost = measure_gpu(
        full,
        1,
        device="cpu",
        peak=lambda device, dtype: 1e12,
        n_examples=2,
        n_tokens=24,
        n_batches=2,
        is_small=True,
    )
    assert cost.flops > 0 and cost.ratio > 0 and cost.loop.share > 0
    assert len(cost.cells()) == len(GPU_HEAD)
    assert "aten::" in cost.profile


@pytest.mark.parametrize("option", ["--pairs", "--threads"])
def test_no_runs_and_no_threads_are_refused(option):
    found = CliRunner().invoke(extract, [option, "0"])
    assert found.exit_code == 2 and "x>=1" in found.output
