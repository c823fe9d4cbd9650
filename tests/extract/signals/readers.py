"""Readers without a model, their plans and stores; representative architectures."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from beatrice.extract.signals.extract import ExtractConfig, plan_extraction, run_plan
from beatrice.extract.signals.sequence import TokenSequence

FAMILIES = ("hidden", "prob", "resid", "attn")
SMALL = ExtractConfig(tokens_per_batch=96, rows_per_shard=64)
# Architectures that represent all others in laws that every architecture follows.
REPRESENTATIVES = (
    "llama gemma2 gemma4 gpt2 falcon bloom qwen3_5 granitemoehybrid".split()
)


def representatives(families):
    """Return all families as parameters for pytest, most of them only for slow runs."""
    others = set(families) - set(REPRESENTATIVES)
    return [
        pytest.param(family, marks=[pytest.mark.slow] * (family in others))
        for family in families
    ]


@dataclasses.dataclass
class WaveReader:
    """A real reader without a model: signals are waves of the running sum of ids."""

    hidden_layers: tuple[int, ...] = (2, 5)
    hidden_spans: str = "all"
    width: int = 16  # of hidden states
    scale: float = 1.0
    poison: int | None = None  # an id with a state that is not finite
    most_tokens: int | None = None  # of a padded batch of several sequences
    n_read: int = 0

    fingerprint = {"model": "waves"}

    @property
    def shapes(self):
        return {"hidden": (len(self.hidden_layers), self.width), "prob": (5,)}

    def start(self, sequences):
        if self.most_tokens and len(sequences) > 1:
            width = max(len(sequence.ids) for sequence in sequences)
            assert width * len(sequences) <= self.most_tokens
        self.n_read += len(sequences)
        readings = [self.read_ids(sequence.ids) for sequence in sequences]
        return SimpleNamespace(result=lambda: readings)

    def read_ids(self, ids):
        """Return `hidden`, `[n_tokens, 2, width]`, and `prob`, `[n_tokens, 5]`."""
        sums = np.cumsum(ids).astype(np.float32)[:, None]
        waves = np.cos(sums * np.arange(1, 33, dtype=np.float32)) * self.scale
        hidden = waves.astype(np.float32).reshape(-1, 2, 16)
        if self.poison in ids:
            hidden[-1, 0, 0] = np.inf
        return SimpleNamespace(
            hidden=np.tile(hidden, (1, 1, self.width // 16)),
            prob=np.sin(sums * np.arange(5, dtype=np.float32)),
        )


def plan_of(sequences, reader, config=SMALL):
    """Return the plan of a store of these sequences, with the keys of answers."""
    keys = [(f"q{i}", "closed_book", "original") for i in range(len(sequences))]
    return plan_extraction(sequences, keys, reader, config, {"model": "waves"})


def write_store(where, sequences, reader, config=SMALL, **worker):
    """Run the plan of these sequences; return the report."""
    plan = plan_of(sequences, reader, config)
    return run_plan(reader, sequences, plan, where, **worker)


def sequences_of(n_examples=40, longest=150):
    """Return sequences of 6 to 39 tokens, except for the eighth, which is `longest`."""
    rng = np.random.default_rng(0)
    sequences = []
    for number in range(n_examples):
        n_tokens = int(rng.integers(6, 40)) if number != 7 else longest
        a, b, c, d = sorted(rng.integers(0, n_tokens + 1, 4))
        # A range of examples without answer tokens, and an example that is all answer.
        c = d if 12 <= number < 20 else c
        a, b, c, d = (0, 0, 0, n_tokens) if number == 30 else (a, b, c, d)
        ids = rng.integers(0, 50, n_tokens)
        sequences.append(sequence_of_ids(ids, [(a, b), (b, c), (c, d)]))
    return sequences


def sequence_of_ids(ids, spans):
    """Return ids as a sequence, with each one's next id as its target."""
    return TokenSequence(ids=ids, targets=np.roll(ids, -1), spans=np.array(spans))


def files_under(folder):
    """Return the bytes of all files, except temporary files of a killed writer."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".__lock"
    }


def assert_same_signals(left, right, atol=0):
    """Check that answers, one or a list, have the same signals of every family."""
    pairs = [(left, right)]
    if isinstance(left, list):
        pairs = zip(left, right, strict=True)
    for pair in pairs:
        for name in FAMILIES:
            values = (getattr(item, name) for item in pair)
            tolerances = dict(rtol=atol, atol=atol, equal_nan=False)
            np.testing.assert_allclose(*values, **tolerances, err_msg=name)
