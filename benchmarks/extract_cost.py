"""What a full reading costs beside the bare forward of the same model.

The model is random and Llama-shaped. Bare forward and reading take turns on the same
batch in one process, so that a busy machine slows both; the ratio is the median over
pairs of neighbours. Peak memory is taken in a process of its own per figure, above
what the loaded model and the libraries hold.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from extract.backbone import Backbone
from extract.signals import Sequence, SignalReader

Mode = Literal["bare", "read"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
VOCAB_SIZES = (32000, 248320)


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


def make_sequences(config: CostConfig) -> list[Sequence]:
    """Return random text with a template, a context, a question and an answer."""
    rng = np.random.default_rng(0)
    start, stop = config.n_tokens - config.n_read, config.n_tokens
    answer = stop - config.n_read // 3
    spans = np.array([[8, start], [start, answer], [answer, stop]])
    texts = rng.integers(3, config.vocab_size, (config.n_examples, stop + 1))
    return [Sequence(ids=t[:-1], targets=t[1:], spans=spans) for t in texts]


class Bench:
    """One model and one batch, ready to run."""

    def __init__(self, config: CostConfig) -> None:
        """Build model, reader and batch; the reader keeps every hidden layer."""
        self.config = config
        self.model = make_model(config)
        self.backbone = Backbone.from_model(self.model, revision="random")
        self.reader = SignalReader(self.backbone)
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
