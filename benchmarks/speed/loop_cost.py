"""What the store costs beside reading alone: the same batches, with and without it.

The extraction loop reads every batch of a plan and drops what it read. End to end is
`extract`'s own work on that plan: the same batches, rounded to the stored type, and
written with their checksums and commit records. Both take turns in one process.
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.speed.extract_cost import CostConfig, alternate, make_model
from extract.backbone.loading import Backbone, load_backbone
from extract.backbone.names import EMBEDDED, model_path
from extract.signals.extraction import read_batches, run_plan
from extract.signals.plan import (
    ExtractConfig,
    ExtractionPlan,
    TokenSequence,
    plan_extraction,
)
from extract.signals.reader import SignalReader


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What is extracted.

    Attributes:
      n_examples: sequences.
      shortest: tokens of the shortest.
      longest: tokens of the longest; lengths between are equally likely.
      n_answer: tokens of every answer span, at the end.
      extract: how they are read and kept.
    """

    n_examples: int
    shortest: int
    longest: int
    n_answer: int
    extract: ExtractConfig


# As the demo's questions with a passage are, and as the demo reads them; so many that
# the last unit's writing, which nothing is read beside, is a small part.
DEMO_LIKE = LoopConfig(
    n_examples=1600,
    shortest=33,
    longest=49,
    n_answer=4,
    extract=ExtractConfig(tokens_per_batch=4096, rows_per_shard=4096),
)
# As long as the shorter batches of `extract_cost`, for the same model.
LLAMA_LIKE = LoopConfig(
    n_examples=24,
    shortest=448,
    longest=512,
    n_answer=64,
    extract=ExtractConfig(tokens_per_batch=2048, rows_per_shard=4096),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopCost:
    """One row: rates in tokens per second, medians over rounds.

    Attributes:
      model: whose signals are read.
      device: where.
      dtype: of its weights.
      n_tokens: tokens of all sequences.
      n_batches: batches they are read in.
      loop: rate of reading alone.
      whole: rate end to end.
      share: `whole` as a share of `loop`, median over neighbouring runs.
      n_rounds: rounds.
    """

    model: str
    device: str
    dtype: str
    n_tokens: int
    n_batches: int
    loop: float
    whole: float
    share: float
    n_rounds: int

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `LOOP_HEAD`."""
        return [
            self.model,
            self.device,
            self.dtype,
            f"{self.n_tokens} in {self.n_batches} batches",
            f"{self.loop:.0f}",
            f"{self.whole:.0f}",
            f"{self.share:.2f}",
        ]


LOOP_HEAD = (
    "model",
    "device",
    "dtype",
    "tokens",
    "reading tokens/s",
    "with the store tokens/s",
    "end to end / reading",
)


def make_sequences(config: LoopConfig, n_words: int) -> list[TokenSequence]:
    """Return random text with a context, a question and an answer."""
    rng = np.random.default_rng(0)
    made = []
    for n in rng.integers(config.shortest, config.longest + 1, config.n_examples):
        answer = int(n) - config.n_answer
        question = answer - (answer - 2) // 3
        ids = rng.integers(3, n_words, int(n) + 1)
        spans = np.array([[2, question], [question, answer], [answer, n]])
        made.append(TokenSequence(ids=ids[:-1], targets=ids[1:], spans=spans))
    return made


class Loop:
    """A reader and a plan, ready to run with and without the store."""

    def __init__(self, reader: SignalReader, config: LoopConfig) -> None:
        """Build sequences and plan; the reader reads what `config.extract` keeps."""
        self.reader = reader
        n_words = reader.backbone.model.get_input_embeddings().num_embeddings
        self.sequences = make_sequences(config, n_words)
        keys = [(str(i),) for i in range(config.n_examples)]
        self.plan: ExtractionPlan = plan_extraction(
            self.sequences, keys, reader, config.extract, {}
        )
        self.batches = [batch for unit in self.plan.units for batch in unit.batches]

    def read(self) -> None:
        """Read every batch and keep nothing."""
        for _ in read_batches(self.reader, self.sequences, self.batches):
            pass

    def extract(self) -> None:
        """Do the plan, into a store that is deleted again."""
        with tempfile.TemporaryDirectory() as folder:
            run_plan(self.reader, self.sequences, self.plan, Path(folder))

    def measure(self, name: str, n_rounds: int) -> LoopCost:
        """Let both take turns, after one unmeasured run each."""
        rounds = alternate([self.read, self.extract], n_rounds)
        n_tokens = int(self.plan.spec.lengths.sum())
        backbone = self.reader.backbone
        return LoopCost(
            model=name,
            device=str(backbone.device),
            dtype=str(backbone.dtype).removeprefix("torch."),
            n_tokens=n_tokens,
            n_batches=len(self.batches),
            loop=n_tokens / statistics.median(loop for loop, _ in rounds),
            whole=n_tokens / statistics.median(whole for _, whole in rounds),
            share=statistics.median(loop / whole for loop, whole in rounds),
            n_rounds=n_rounds,
        )


def measure_loops(n_rounds: int, *, is_small: bool = False) -> Iterator[LoopCost]:
    """Measure on the CPU: the embedded model, and the one of `make_model`.

    Args:
      n_rounds: of each.
      is_small: a few examples of each, to see that it works.
    """
    embedded = load_backbone(model_path(EMBEDDED))
    llama = Backbone.from_model(make_model(CostConfig()), revision="random")
    for name, backbone, config in (
        (EMBEDDED, embedded, DEMO_LIKE),
        ("llama, d=512", llama, LLAMA_LIKE),
    ):
        work = dataclasses.replace(config, n_examples=4) if is_small else config
        reader = SignalReader.for_config(backbone, work.extract)
        yield Loop(reader, work).measure(name, n_rounds)
