"""What reading costs, what the store adds, and the models of full size."""

import dataclasses
import itertools
import json
import math
import operator
import resource
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from beatrice.benchmarks.bench import answer, extract, oracle
from beatrice.benchmarks.bench.commands import (
    RowPrinter,
    measure_fresh,
    peak_above,
    take_turns,
)
from beatrice.benchmarks.bench.tiny_models import tiny_model
from beatrice.cli import main
from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.local import generate
from beatrice.extract.records import SETTINGS
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of
from tests.process import forked

pytestmark = pytest.mark.usefixtures("threads_as_before")
TINY = extract.BatchConfig(
    n_tokens=24, n_examples=2, n_read=12, vocab_size=97, d_model=64, n_layers=2
)
SMALL = extract.LoopConfig(
    n_examples=30,
    shortest=12,
    longest=24,
    n_answer=3,
    extract=ExtractConfig(tokens_per_batch=96, rows_per_shard=64),
)
N_MIB = 192


def test_runs_take_turns_after_one_unmeasured_round():
    order = []
    seconds = take_turns([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert order == [*"ab", *"ba"] * 2  # each round begins with the other one
    assert seconds.shape == (3, 2, 2) and (seconds >= 0).all()


def test_the_peak_includes_memory_that_a_run_has_freed():
    # In a fresh process, as it is measured: other tests' models have left this one
    # freed memory that it keeps, and what is held there again raises no peak.
    ones = partial(operator.mul, b"1", N_MIB * 2**20)
    result = measure_fresh("the memory of ones", peak_above, ones, "cpu")
    assert 0.95 * N_MIB < result < 1.1 * N_MIB


def test_no_peak_is_measured_if_none_can_be_started():
    def child():
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # no file can be opened
        assert peak_above(bytes, "cpu") is None

    assert forked(child) == 0


def test_reading_and_the_bare_forward_run_on_the_same_batch():
    bench = extract.ReadingBench(TINY)
    assert bench.ids.shape == (2, 24)
    for sequence, ids in zip(bench.sequences, bench.ids, strict=True):
        assert sequence.ids.tolist() == ids.tolist()
        assert sequence.spans.tolist() == [[8, 12], [12, 20], [20, 24]]
    assert bench.time(2)["time ratio"] > 0


def test_hooks_on_transformers_read_the_same_or_are_not_timed():
    bench = extract.ReadingBench(TINY)
    bench.require_same(extract.Hooked(bench.model, bench.sequences))
    later = [
        dataclasses.replace(x, spans=x.spans + [[0, 1], [1, 0], [0, 0]])
        for x in bench.sequences
    ]
    with pytest.raises(ValueError, match="hooks and reader give different attn"):
        bench.require_same(extract.Hooked(bench.model, later))


def test_a_peak_is_measured_in_a_process_of_its_own():
    wide = dataclasses.replace(TINY, vocab_size=50000, n_tokens=512)
    # The bare forward holds all logits: 2 x 512 x 50000 floats.
    assert measure_fresh("memory", extract.measure_peak, wide, "bare") > 180


def test_a_process_that_fails_says_why():
    with pytest.raises(ValueError, match="memory has failed: math domain error"):
        measure_fresh("memory", math.sqrt, -1)


def test_without_a_gpu_no_gpu_row_is_planned():
    without, with_gpu = (
        {(x.device, x.dtype) for x in extract.batch_configs(has_gpu=has_gpu)}
        for has_gpu in (False, True)
    )
    assert without == {("cpu", "float32")}
    assert with_gpu == without | {("cuda", "bfloat16")}


def test_rows_are_printed_as_a_table_with_three_digits_or_as_json(capsys):
    row = {"what": "a", "n": 1234, "s": 0.01234, "MiB": 1234.5, "of": (1.0, 0.5, None)}
    printer = RowPrinter(as_json=False)
    for each in (row, row, {"other": None}):
        printer.row(each)
    printer.text("end")
    assert capsys.readouterr().out.splitlines() == [
        "| what | n | s | MiB | of |",
        "| --- | --- | --- | --- | --- |",
        *["| a | 1234 | 0.0123 | 1,234 | 1 [0.5, ] |"] * 2,
        "",
        "| other |",
        "| --- |",
        "|  |",
        "end",
    ]
    printer = RowPrinter(as_json=True)
    printer.row(row)
    printer.text("end")
    assert json.loads(capsys.readouterr().out) == row | {"of": [1.0, 0.5, None]}


def test_reading_and_extracting_use_the_same_batches():
    seen, backbone = [], Backbone.from_model(tiny_model("llama"), revision="tiny")

    class Watched(SignalReader):
        def start(self, sequences):
            seen.append([id(item) for item in sequences])
            return super().start(sequences)

    loop = extract.StoreBench(Watched.for_config(backbone, SMALL.extract), SMALL)
    loop.read()
    alone, seen[:] = list(seen), []
    loop.extract()
    assert seen == alone and len(seen) == len(loop.batches) > 1
    assert loop.measure("tiny", 1)["tokens"] == loop.plan.spec.lengths.sum()


def test_a_small_and_a_large_model_are_measured_with_the_store():
    small, large = extract.measure_loops(1, is_small=True)
    assert small["model"] == "embedded" and small["tokens"] < large["tokens"]
    rates = ("with the store tokens/s", "reading tokens/s", "end to end / reading")
    assert min(row[rate] for row in (small, large) for rate in rates) > 0


@pytest.mark.parametrize(
    ("name", "n_parameters", "gflop"),
    [
        ("Qwen3.5-9B", 8.954e9, 13.84 + 2.03),
        ("Gemma 4 E4B", 7.463e9, 7.95 + 1.34),
    ],
)
def test_the_full_models_have_the_parameters_of_the_released_ones(
    name, n_parameters, gflop
):
    model = answer.full_model(name, "meta")
    counted = sum(p.numel() for p in model.parameters())
    assert counted == pytest.approx(n_parameters, rel=1e-3)
    assert extract.flops_per_token(model) / 1e9 == pytest.approx(gflop, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4"])
def test_small_models_of_the_same_types_are_measured(family):
    model = tiny_model(family).to(torch.bfloat16)
    sizes = dict(n_examples=2, n_tokens=24, n_batches=2)
    row, loop, profile = extract.measure_gpu(family, model, 1, 1e12, **sizes)
    assert row["share of the peak"] > 0 and row["time ratio"] > 0
    assert loop["end to end / reading"] > 0 and "aten::" in profile


def test_the_row_of_reading_comes_before_the_store_fails():
    model = tiny_model("gemma4").to(torch.bfloat16)
    sizes = dict(n_examples=2, n_tokens=24, n_batches=0)
    rows = extract.measure_gpu("gemma4", model, 1, 1e12, **sizes)
    assert next(rows)["reading s"] > 0
    with pytest.raises(ValueError, match="expected answers to read"):
        next(rows)


def test_answering_and_reading_with_worked_examples_are_measured():
    row = extract.measure_with_examples(load_backbone(WEIGHTS), 1, n_questions=3)
    assert min(value for name, value in row.items() if "tokens/s" in name) > 0
    assert 0 < row["of them read"] <= row["tokens"]


@pytest.mark.slow  # for memory each way of each setting starts a process of its own
def test_every_setting_has_a_row_with_all_ratios_above_zero():
    done = CliRunner().invoke(main, ["bench", "answer", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["setting"] for row in rows] == ["closed_book", "with_context"]
    for row in rows:
        ratios = [value for name, value in row.items() if "÷" in name]
        assert len(ratios) == 6 and min(ratios) > 0


def test_a_warm_score_and_a_warm_answer_are_timed_against_the_model():
    assert min(itertools.chain(*answer.warm_ratios("embedded", 1))) > 0


def test_a_failure_of_what_is_timed_is_reported():
    done = CliRunner().invoke(main, ["bench", "score", "no-such-probe"])
    assert done.exit_code == 1 and "no-such-probe" in done.output
    assert "Traceback" not in done.output and "exit status" not in done.output


@pytest.mark.parametrize("bench", ["survey", "written"])
def test_a_model_type_that_does_not_exist_is_wrong_usage(bench):
    done = CliRunner().invoke(main, ["bench", bench, "lama"])
    assert done.exit_code == 2 and "did you mean llama" in done.output


def test_a_model_type_that_cannot_be_read_has_a_row_with_the_reason():
    row = oracle.measure_written("mamba")
    assert row["read"] == "not at all" and "layout.py" in row["reason"]
    assert row["fp32"] is None


def test_a_model_is_read_while_it_writes_as_exactly_as_it_repeats_itself():
    row = oracle.measure_written("llama")
    assert row["read"] == "while writing" and row["reason"] == ""
    exact = row["fp32"], row["fp32 of its own"]
    assert 0 < min(exact) < max(exact) < 1e-5 < row["bf16"] < 0.05


@pytest.fixture(scope="module")
def answer_bench():
    return answer.AnswerBench.of("embedded", "float32", "with_context")


def test_the_floor_computes_the_logits_of_all_tokens_that_are_read(answer_bench):
    """Plain generation multiplies one state of a row and step by the output matrix."""
    counts = dict.fromkeys(answer.WAYS, 0)

    def count(module, inputs, output):
        counts[way] += inputs[0][..., 0].numel()

    handle = answer_bench.backbone.layout.head.register_forward_hook(count)
    for way in ("plain", "floor"):
        answer_bench.run(way)
    handle.remove()
    prompts = [request.prompt for request in answer_bench.requests]
    n_rows, starts = len(prompts), [prompt.context_span[0] for prompt in prompts]
    # If 48 or more tokens precede a context, none of them is read.
    n_read = sum(len(prompt.ids) for prompt in prompts)
    n_read -= sum(start for start in starts if start >= 48)
    assert counts["plain"] <= n_rows * answer.CONFIG.max_new_tokens
    # Steps at which a batch is split differ by those that run what was cut.
    assert abs(counts["floor"] - counts["plain"] - n_read) <= n_rows


def n_computed(backbone, run):
    """Count the tokens that the decoder computes while something runs."""
    counts = []

    def count(module, inputs, output):
        counts.append(output.last_hidden_state[..., 0].numel())

    with backbone.layout.decoder.register_forward_hook(count):
        run()
    return sum(counts)


def long_requests(backbone, n):
    """Return prompts whose beginning is shared, and so long that readers keep it."""
    n_words = backbone.layout.head.out_features
    return answer.random_requests(n_words, "closed_book", n, (64, 0, 9))


def test_a_later_turn_of_two_passes_computes_as_many_tokens_as_the_first(answer_bench):
    backbone = answer_bench.backbone
    bench = answer.AnswerBench(backbone, long_requests(backbone, 3))
    first, later = (
        n_computed(backbone, lambda: bench.run("two passes")) for _ in range(2)
    )
    assert first == later > 0


def test_a_warm_score_computes_as_many_tokens_as_the_bare_forward(answer_bench):
    backbone = answer_bench.backbone
    (written,) = generate(backbone, long_requests(backbone, 1), answer.CONFIG)
    sequence, reader = sequence_of(written), SignalReader(backbone)
    probe = SimpleNamespace(
        scorer=SimpleNamespace(
            probed=SimpleNamespace(backbone=backbone, reader=reader),
            prepare=lambda given: SimpleNamespace(sequence=sequence),
        ),
        score=lambda question, answer: reader.read([sequence]),
    )
    first, later = (
        n_computed(backbone, partial(answer.warm_ratio, probe, 2, is_first=is_first))
        for is_first in (True, False)
    )
    # Both run once, and twice more in turns; later only the tokens read are computed.
    assert first == 3 * (len(sequence.ids) + len(sequence.ids))
    assert later == 3 * (len(sequence.ids) + len(sequence.ids) - 64)


def test_the_four_ways_of_a_setting_have_ratios_and_peaks(answer_bench):
    peaks = {"plain": 2.0, "one pass": 3.0}
    row = answer.measure_setting(answer_bench, 1, peaks.get)
    assert row["setting"] == "with_context"
    ratios = [value for name, value in row.items() if "÷" in name]
    assert len(ratios) == 6 and min(ratios) > 0
    whole = row["floor ÷ plain"] * row["one pass ÷ floor"]
    assert row["one pass ÷ plain"] == pytest.approx(whole)  # of one round
    assert (row["MiB plain"], row["MiB one pass"]) == (2.0, 3.0)
    about = "embedded", "float32", "with_context", "one pass"
    assert measure_fresh("a peak", answer.measure_peak, *about) > 0


def test_every_row_of_a_gpu_has_a_ratio_and_a_peak():
    """Measure a small model on the host, as a large one is measured on a GPU."""
    sizes = {"n_requests": 2, "n_tokens": (8, 9, 7)}
    rows = [*answer.measure_model("small", tiny_model("gemma4"), 1, **sizes)]
    assert [row["setting"] for row in rows] == [*SETTINGS]
    assert [row["prompt tokens"] for row in rows] == [2 * (8 + 7), 2 * (8 + 9 + 7)]
    for row in rows:
        assert row["one pass ÷ plain"] > 0 and row["MiB one pass"] >= 0
