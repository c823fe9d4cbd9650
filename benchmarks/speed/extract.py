"""`beatrice bench extract`: reading and storing on this CPU, and at full size on a GPU.

What is measured on a CPU is told in `reading`. On a GPU the time of a reading is also
held against the peak, and a profile tells where the rest goes. Two real backbones with
random weights are built there: what a reading costs does not depend on what the
weights say. The sizes are those of the released checkpoints (Qwen3.5-9B, and the text
model of Gemma 4 E4B). With `--model` a model of one's own answers prompts with worked
examples, and its answers are read, beside the bare forward over the same tokens.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import click
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from beatrice.benchmarks.speed.commands import AS_JSON, RowPrinter
from beatrice.benchmarks.speed.reading import (
    HEAD,
    LOOP_HEAD,
    N_THREADS,
    BatchConfig,
    Bench,
    Loop,
    LoopConfig,
    LoopCost,
    Times,
    alternate,
    batch_configs,
    measure_loops,
    measure_reading,
)
from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import ModelDtype, model_path
from beatrice.extract.generate.local import generate
from beatrice.extract.generate.prompts import SHOTS, TEMPLATES, build_prompt
from beatrice.extract.generate.requests import GenerationConfig, Request
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of

_N_KERNELS = 12
_QWEN = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,  # the class's default is 1e4
        "partial_rotary_factor": 0.25,
    },
}
_GEMMA = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2560,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 18,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
# Name -> class, class of its configuration, and sizes.
FULL_MODELS: Mapping[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "Qwen3.5-9B": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _QWEN),
    "Gemma 4 E4B": (Gemma4ForCausalLM, Gemma4TextConfig, _GEMMA),
}


def full_model(name: str, device: str) -> PreTrainedModel:
    """Return a model of `FULL_MODELS` in bfloat16 with random weights, made there."""
    model_class, config_class, sizes = FULL_MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(config_class(**sizes), dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the floating-point operations of one token's forward with its logits.

    Two per weight of every linear module, the head among them; lookups, norms,
    attention's own products and recurrent scans, together a few percent at 400
    tokens, are left out, so that a share of the peak is rather told too low.
    """
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return 2.0 * sum(linear.weight.numel() for linear in linears)


def gemm_peak(width: int = 8192) -> float:
    """Return the GPU's best FLOP/s of a square bf16 matrix product, of ten."""
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    left, right = (torch.randn(width, width, **shape) for _ in range(2))
    best = float("inf")
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        left @ right
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return 2.0 * width**3 / best


GPU_HEAD = (
    "model, tokens, bare s, reading s, time ratio, TFLOP/s, GEMM peak TFLOP/s, "
    "share of the peak"
).split(", ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCost:
    """One model: a row of each table, and its profile.

    Attributes:
      model: its name.
      batch: examples and tokens of each.
      times: of the bare forward and the reading.
      flops: operations per second of the reading, see `flops_per_token`.
      peak: the same of a large bf16 matrix product.
      loop: with and without the store.
      profile: the kernels that take longest, as the profiler prints them.
    """

    model: str
    batch: tuple[int, int]
    times: Times
    flops: float
    peak: float
    loop: LoopCost
    profile: str

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `GPU_HEAD`."""
        return [
            self.model,
            f"{self.batch[0]} x {self.batch[1]}",
            f"{self.times.bare:.3f}",
            f"{self.times.read:.3f}",
            f"{self.times.ratio:.2f}",
            f"{self.flops / 1e12:.0f}",
            f"{self.peak / 1e12:.0f}",
            f"{self.flops / self.peak:.0%}",
        ]


def profile_of(run: Callable[[], None]) -> str:
    """Return a table of the kernels that one run spends most time in."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        order = "self_cuda_time_total"
    with torch.profiler.profile(activities=kinds) as profile:
        run()
    averages = profile.key_averages()
    return averages.table(sort_by=order, row_limit=_N_KERNELS, max_name_column_width=60)


def measure_gpu(
    name: str,
    model: PreTrainedModel,
    n_pairs: int,
    peak: float,
    *,
    n_examples: int = 40,
    n_tokens: int = 400,
    n_batches: int = 24,
) -> GpuCost:
    """Measure a model where it lies; one middle layer is kept.

    Args:
      name: of the model.
      model: on a GPU; on a CPU only a small one makes sense.
      n_pairs: runs of each.
      peak: FLOP/s that the reading's are held against.
      n_examples: of the batch.
      n_tokens: of each example; 60 of 400 are the answer, 100 the question.
      n_batches: such batches are extracted with and without the store.
    """
    backbone = Backbone.from_model(model, revision="random")
    layers = (backbone.n_layers // 2,)
    reader = SignalReader(backbone, layers)
    shape = BatchConfig(
        n_tokens=n_tokens,
        n_examples=n_examples,
        n_read=n_tokens * 2 // 5,
        vocab_size=backbone.layout.head.out_features,
        device=backbone.device.type,
        dtype="bfloat16",
    )
    bench = Bench(shape, reader)
    times = bench.time(n_pairs)
    budget = n_examples * n_tokens
    work = LoopConfig(
        n_examples=n_batches * n_examples,
        shortest=n_tokens * 7 // 8,
        longest=n_tokens * 9 // 8,
        n_answer=max(1, n_tokens * 3 // 20),
        extract=ExtractConfig(tokens_per_batch=budget, hidden_layers=layers),
    )
    return GpuCost(
        model=name,
        batch=(n_examples, n_tokens),
        times=times,
        flops=flops_per_token(backbone.model) * budget / times.read,
        peak=peak,
        loop=Loop(reader, work).measure(name, max(1, n_pairs // 2)),
        profile=profile_of(bench.read),
    )


EXAMPLES_HEAD = (
    "model, dtype, tokens, of them read, bare tokens/s, answer tokens/s, "
    "answer / bare, extract tokens/s, extract / bare"
).split(", ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesCost:
    """One row: tokens per second with worked examples in every prompt.

    Attributes:
      model: its name.
      dtype: of weights and stream.
      n_tokens: of prompts and answers.
      n_read: of them, those that signals are read of.
      bare: tokens per second of a forward with all logits; median over rounds.
      answer: the same of greedy generation.
      extract: the same of reading all four families.
    """

    model: str
    dtype: str
    n_tokens: int
    n_read: int
    bare: float
    answer: float
    extract: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `EXAMPLES_HEAD`."""
        counts = [str(self.n_tokens), str(self.n_read), f"{self.bare:.0f}"]
        rates = [
            cell
            for rate in (self.answer, self.extract)
            for cell in (f"{rate:.0f}", f"{rate / self.bare:.2f}")
        ]
        return [self.model, self.dtype, *counts, *rates]


def measure_with_examples(
    backbone: Backbone, n_rounds: int, n_questions: int = 24
) -> ExamplesCost:
    """Let bare forward, answering and reading take turns on one batch.

    Args:
      backbone: with its tokenizer.
      n_rounds: of each, after one unmeasured.
      n_questions: prompts of the batch, closed-book; at most 16 new tokens each.
    """
    template = dataclasses.replace(TEMPLATES["few-shot"], shots=SHOTS)
    requests = [
        Request(
            example_id=str(code),
            setting="closed_book",
            variant="original",
            prompt=build_prompt(
                backbone.tokenizer,
                template,
                f"Which country has the international calling code +{code}?",
                (),
            ),
        )
        for code in range(30, 30 + n_questions)
    ]
    config = GenerationConfig(stop=("\n",))
    reader = SignalReader(backbone)
    answers = generate(backbone, requests, config)
    sequences = [sequence_of(answer) for answer in answers]
    n_tokens = sum(len(sequence.ids) for sequence in sequences)
    longest = max(sequences, key=lambda sequence: len(sequence.ids)).ids
    ids = torch.from_numpy(longest).repeat(n_questions, 1).to(backbone.device)

    @torch.inference_mode()
    def bare() -> None:
        backbone.model(input_ids=ids, use_cache=False)

    runs = [
        bare,
        lambda: generate(backbone, requests, config),
        lambda: reader.read(sequences),
    ]
    seconds = [
        statistics.median(side) for side in zip(*alternate(runs, n_rounds), strict=True)
    ]
    return ExamplesCost(
        model=backbone.name,
        dtype=str(backbone.dtype).removeprefix("torch."),
        n_tokens=n_tokens,
        n_read=sum(len(signals.prob) for signals in reader.read(sequences)),
        bare=ids.numel() / seconds[0],
        answer=n_tokens / seconds[1],
        extract=n_tokens / seconds[2],
    )


@click.command()
@click.option(
    "--model",
    help="Measure this model alone, on prompts with worked examples.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of that model.",
)
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=5,
    help="Runs of each per row.",
)
@AS_JSON
def extract(model: str | None, dtype: ModelDtype, pairs: int, as_json: bool) -> None:
    """Time a full reading beside the bare forward with logits; print the tables.

    Llama-shaped, d=512, 8 layers, fp32 readings, every hidden layer kept. Both take
    turns on the same batch; peak memory is above the loaded model. Then extraction
    into a store beside its own reading, on the same batches; and on a GPU both, and a
    profile, for Qwen3.5-9B and Gemma 4 E4B at full size with random weights.

    With --model: tokens per second of `answer` and `extract` on prompts with worked
    examples beside the bare forward, for that model.

    Example: beatrice bench extract --pairs 7
    """
    quiet()
    torch.set_num_threads(N_THREADS)
    if model is not None:
        printer = RowPrinter(as_json)
        printer.head(EXAMPLES_HEAD)
        backbone = load_backbone(model_path(model), dtype=dtype)
        printer.row(measure_with_examples(backbone, pairs))
        return
    has_gpu = torch.cuda.is_available()
    configs = batch_configs(has_gpu=has_gpu)
    printer = RowPrinter(as_json)
    printer.head(HEAD)
    with Progress().stage("extract") as update:
        for done, config in enumerate(configs, start=1):
            printer.row(measure_reading(config, pairs))
            update(done, len(configs) + 2)
        if not has_gpu:
            printer.not_measured(["GPU", "bfloat16"], HEAD)
        printer.head(LOOP_HEAD)
        for done, cost in enumerate(measure_loops(pairs), start=len(configs) + 1):
            printer.row(cost)
            update(done, len(configs) + 2)
    peak = gemm_peak() if has_gpu else 0.0
    models = FULL_MODELS if has_gpu else ()
    found = [measure_gpu(x, full_model(x, "cuda"), pairs, peak) for x in models]
    for cost in found:
        printer.row(cost.loop)
    printer.head(GPU_HEAD)
    for cost in found:
        printer.row(cost)
    for name in () if has_gpu else FULL_MODELS:
        printer.not_measured([name], GPU_HEAD)
    for cost in found:
        printer.text(f"{cost.model}\n{cost.profile}")
