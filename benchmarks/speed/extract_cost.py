"""What a full reading costs beside the bare forward of the same model.

The model is random and Llama-shaped. Bare forward and reading take turns on the same
batch in one process, so that a busy machine slows both; the ratio is the median over
pairs of neighbours. Peak memory is taken in a process of its own per figure, above
what the loaded model and the libraries hold.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.speed.memory import MIB, held_bytes, peak_bytes, reset_peak
from extract.backbone.loading import Backbone, keep_freed_memory
from extract.signals.plan import TokenSequence
from extract.signals.reader import SignalReader

Mode = Literal["bare", "read"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostConfig:
    """One batch and the model that reads it.

    Attributes:
      n_tokens: length of every sequence.
      n_examples: sequences of the batch.
      n_read: question and answer tokens, at the end; the context is before them.
      vocab_size: words.
      d_model: width.
      n_layers: decoder layers.
      device: a Torch device.
      dtype: of weights and stream.
    """

    n_tokens: int = 512
    n_examples: int = 4
    n_read: int = 192
    vocab_size: int = 32000
    d_model: int = 512
    n_layers: int = 8
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"


# The two lengths hold equally many tokens; a third of each is question and answer.
LENGTHS = (
    {"n_tokens": 512, "n_examples": 4, "n_read": 192},
    {"n_tokens": 2048, "n_examples": 1, "n_read": 576},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Medians over alternating runs.

    Attributes:
      bare: seconds of the forward with logits.
      read: seconds of the full reading.
      ratio: median over pairs of neighbouring runs.
      n_pairs: pairs.
    """

    bare: float
    read: float
    ratio: float
    n_pairs: int


def make_model(config: CostConfig) -> LlamaForCausalLM:
    """Return the random model."""
    torch.manual_seed(0)
    with torch.device(config.device):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                intermediate_size=config.d_model * 11 // 4,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.d_model // 64,
                num_key_value_heads=config.d_model // 64,
                max_position_embeddings=max(length["n_tokens"] for length in LENGTHS),
            )
        )
    return model.to(getattr(torch, config.dtype)).eval().requires_grad_(False)


def make_sequences(config: CostConfig) -> list[TokenSequence]:
    """Return random text with a template, a context, a question and an answer."""
    rng = np.random.default_rng(0)
    start, stop = config.n_tokens - config.n_read, config.n_tokens
    answer = stop - config.n_read // 3
    spans = np.array([[8, start], [start, answer], [answer, stop]])
    texts = rng.integers(3, config.vocab_size, (config.n_examples, stop + 1))
    return [TokenSequence(ids=t[:-1], targets=t[1:], spans=spans) for t in texts]


class Bench:
    """One model and one batch, ready to run."""

    def __init__(self, config: CostConfig, reader: SignalReader | None = None) -> None:
        """Build batch, and model and reader; the reader keeps every hidden layer."""
        if config.device == "cpu":
            keep_freed_memory()  # for both runs, as `load_backbone` does
        if reader is None:
            reader = SignalReader(
                Backbone.from_model(make_model(config), revision="random")
            )
        self.config = config
        self.reader = reader
        self.model = reader.backbone.model
        self.sequences = make_sequences(config)
        ids = np.stack([sequence.ids for sequence in self.sequences])
        self.ids = torch.from_numpy(ids).to(config.device)

    @torch.no_grad()
    def bare(self) -> None:
        """Run the language model with its logits."""
        self.model(input_ids=self.ids, use_cache=False).logits  # noqa: B018
        self._wait()

    def read(self) -> None:
        """Read all four families."""
        self.reader.read(self.sequences)
        self._wait()

    def _wait(self) -> None:
        if self.config.device != "cpu":
            torch.cuda.synchronize()

    def time(self, n_pairs: int) -> Times:
        """Let both take turns, after one unmeasured run each."""
        pairs = alternate([self.bare, self.read], n_pairs)
        return Times(
            bare=statistics.median(bare for bare, _ in pairs),
            read=statistics.median(read for _, read in pairs),
            ratio=statistics.median(read / bare for bare, read in pairs),
            n_pairs=n_pairs,
        )


def alternate(runs: list[Callable[[], None]], n_rounds: int) -> list[tuple[float, ...]]:
    """Run each in turn; return seconds per round, after one unmeasured round."""
    rounds = []
    for _ in range(n_rounds + 1):
        times = []
        for run in runs:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        rounds.append(tuple(times))
    return rounds[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """One row of the table: seconds and MiB of both.

    Attributes:
      config: the batch and its model.
      times: medians.
      bare_mib: peak above the model of the bare forward.
      read_mib: peak above the model of the full reading.
    """

    config: CostConfig
    times: Times
    bare_mib: float
    read_mib: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of the heading."""
        config, times = self.config, self.times
        return [
            config.device,
            config.dtype,
            f"{config.n_examples} x {config.n_tokens}",
            str(config.vocab_size),
            f"{times.bare:.2f}",
            f"{times.read:.2f}",
            f"{times.ratio:.2f}",
            f"{self.bare_mib:.0f}",
            f"{self.read_mib:.0f}",
            f"{self.read_mib / self.bare_mib:.2f}",
        ]


def configs(
    dtype: str, vocab_sizes: tuple[int, ...], *, has_gpu: bool
) -> list[CostConfig]:
    """Return what is measured: both lengths, each vocabulary, each device."""
    devices = [("cpu", dtype)] + [("cuda", "bfloat16")] * has_gpu
    return [
        CostConfig(**length, vocab_size=n_words, device=device, dtype=kind)
        for device, kind in devices
        for n_words in vocab_sizes
        for length in LENGTHS
    ]


def measure_cost(config: CostConfig, n_pairs: int, n_threads: int) -> Cost:
    """Measure times here and both peaks in processes of their own."""
    times = Bench(config).time(n_pairs)
    return Cost(
        config=config,
        times=times,
        bare_mib=measure_peak(config, "bare", n_threads),
        read_mib=measure_peak(config, "read", n_threads),
    )


def peak_above(run: Callable[[], None], device: str) -> float:
    """Return the peak of one run above what is held before it, in MiB.

    On a GPU of the allocator; else of the process, which must not have held more
    before on systems where the high-water mark cannot be reset.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - held) / MIB
    reset_peak()
    held = held_bytes()
    run()
    return (peak_bytes() - held) / MIB


def measure_peak(config: CostConfig, mode: Mode, n_threads: int) -> float:
    """Return the peak memory above the model in MiB, in a process of its own."""
    job = json.dumps([dataclasses.asdict(config), mode, n_threads])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.extract_cost", job],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the process that measures {mode} memory failed: {last}")
    return float(done.stdout.strip().splitlines()[-1])


def _main(job: str) -> None:
    """Measure one peak; what `measure_peak` runs."""
    config, mode, n_threads = json.loads(job)
    torch.set_num_threads(n_threads)
    # The libraries' own buffers are allocated by a run on a short batch.
    short = {**config, "n_tokens": 32, "n_examples": 1, "n_read": 12}
    bench = Bench(CostConfig(**config))
    warm = Bench(CostConfig(**short), bench.reader)
    getattr(warm, mode)()
    sys.stdout.write(f"{peak_above(getattr(bench, mode), config['device'])}\n")


if __name__ == "__main__":
    _main(sys.argv[1])
