"""Reading at full size on a GPU: time, share of the peak, and where the rest goes."""

import dataclasses
from collections.abc import Callable

import torch

from benchmarks.speed.extract_cost import Bench, CostConfig
from benchmarks.speed.full_models import FullModel, flops_per_token, gemm_peak
from benchmarks.speed.loop_cost import Loop, LoopConfig, LoopCost
from extract.backbone.loading import Backbone
from extract.signals.plan import ExtractConfig
from extract.signals.reader import SignalReader

_N_KERNELS = 12

GPU_HEAD = (
    "model",
    "tokens",
    "bare s",
    "reading s",
    "time ratio",
    "TFLOP/s",
    "GEMM peak TFLOP/s",
    "share of the peak",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCost:
    """One model: a row of each table, and its profile.

    Attributes:
      model: its name.
      batch: examples and tokens of each.
      bare: seconds of the forward with logits.
      read: seconds of the full reading.
      ratio: median over neighbouring pairs.
      flops: floating-point operations per second of the reading, see
        `flops_per_token`.
      peak: the same of a large bf16 matrix product.
      loop: with and without the store.
      profile: the kernels that take longest, as the profiler prints them.
    """

    model: str
    batch: tuple[int, int]
    bare: float
    read: float
    ratio: float
    flops: float
    peak: float
    loop: LoopCost
    profile: str

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `GPU_HEAD`."""
        return [
            self.model,
            f"{self.batch[0]} x {self.batch[1]}",
            f"{self.bare:.3f}",
            f"{self.read:.3f}",
            f"{self.ratio:.2f}",
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
    full: FullModel,
    n_pairs: int,
    *,
    device: str = "cuda",
    peak: Callable[[str, torch.dtype], float] = gemm_peak,
    n_examples: int = 40,
    n_tokens: int = 400,
    n_batches: int = 24,
    is_small: bool = False,
) -> GpuCost:
    """Build a model on the device and measure it; one middle layer is kept.

    Args:
      full: the model.
      n_pairs: runs of each.
      device: where; a CPU only makes sense with a small model.
      peak: how the peak is measured.
      n_examples: of the batch.
      n_tokens: of each example; 60 of 400 are the answer, 100 the question.
      n_batches: such batches are extracted with and without the store.
      is_small: build it small.
    """
    dtype = torch.bfloat16
    backbone = Backbone.from_model(
        full.build(device, dtype, is_small=is_small), revision="random"
    )
    layers = (backbone.n_layers // 2,)
    reader = SignalReader(backbone, layers)
    shape = CostConfig(
        n_tokens=n_tokens,
        n_examples=n_examples,
        n_read=n_tokens * 2 // 5,
        vocab_size=backbone.layout.head.out_features,
        device=device,
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
        model=full.name,
        batch=(n_examples, n_tokens),
        bare=times.bare,
        read=times.read,
        ratio=times.ratio,
        flops=flops_per_token(backbone.model) * budget / times.read,
        peak=peak(device, dtype),
        loop=Loop(reader, work).measure(full.name, max(1, n_pairs // 2)),
        profile=profile_of(bench.read),
    )
