"""How many members train side by side, and how many rows at once: what memory allows.

Three small compilations foretell what a block needs (`jaxprobe.fit.memory`); the one
that is chosen is compiled to make sure. Results do not depend on the plan
(`PlannedConfig`), so it is recorded, and asks for nothing to be trained again.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from extract.records import Setting
from extract.run.contents import settings_of
from extract.run.directory import RunDir
from extract.run.manifest import PRESETS
from extract.run.stages import Forecast, bytes_in_words
from extract.store.families import numpy_dtype
from extract.store.read import FeatureStore
from jaxprobe.config import PlannedConfig, TrainConfig, row_choices
from jaxprobe.features.reading import (
    family_dims,
    longest_spans,
    span_lengths,
    stored_dtypes,
)
from jaxprobe.features.subsets import N_SUBSETS, subset_index
from jaxprobe.fit.blocks import Block, Member
from jaxprobe.fit.memory import Foretold, Sizes, StepBytes, compiled_bytes, rows_bytes
from jaxprobe.fit.work import Workload, turn_flops
from jaxprobe.settings import GRID_PRESETS, GridConfig
from jaxprobe.stage import open_rows

KEPT_FREE = 0.15  # of a device: fragments, libraries, and what the compiler left out
# More members share what is read of a seed's hidden states, and more rows share the
# sum of gradients, which is as large as a member's weights: at the paper's sizes it is
# a twentieth of what a step of 64 rows moves. Members come first down to here.
_FEW_ROWS = 64
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_EVERY_FAMILY = subset_index("HPRA")
_FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a setting's members are trained on a device.

    Attributes:
      n_subsets: of a seed side by side, on each device.
      n_seeds: side by side.
      n_rows: of which a gradient is computed at once; None for the protocol's own.
      limit: bytes that may be used, or None where nobody has counted.
      resident: bytes beside those of a step.
      needed: of a step, by the compiler.
    """

    n_subsets: int
    n_seeds: int
    n_rows: int | None = None
    limit: int | None = None
    resident: int = 0
    needed: StepBytes | None = None

    def in_words(self, config: TrainConfig) -> str:
        """Say it for a person."""
        n_rows = self.n_rows or config.rows_at_once()
        n = self.n_subsets * self.n_seeds
        who = f"{n} members side by side" if n > 1 else "members one by one"
        text = f"{who}, a batch as {config.batch_size // n_rows} x {n_rows} rows"
        if self.needed is None or self.limit is None:
            return text
        parts = self.needed.temporaries, self.needed.arguments + self.needed.outputs
        step, own, other, limit = map(
            bytes_in_words, (*parts, self.resident, self.limit)
        )
        return (
            f"{text}; as compiled, {step} of temporaries, {own} of rows and weights, "
            f"and {other} of other rows, of {limit} that may be used"
        )

    def config(self, config: TrainConfig) -> TrainConfig:
        """Return the protocol as it is carried out."""
        if self.n_rows is None:
            return config
        return PlannedConfig(**dataclasses.asdict(config), n_rows=self.n_rows)

    def blocks(self, members: Sequence[Member]) -> tuple[Block, ...]:
        """Put members into blocks, every subset of a block with every seed of it."""
        of_seed: dict[int, tuple[int, ...]] = {}
        for subset, seed in members:
            of_seed[seed] = (*of_seed.get(seed, ()), subset)
        seeds_of: dict[tuple[int, ...], list[int]] = {}
        for seed, subsets in of_seed.items():
            seeds_of.setdefault(subsets, []).append(seed)
        size = self.n_subsets * max(1, jax.device_count())
        return tuple(
            Block(part, some)
            for subsets, seeds in seeds_of.items()
            for some in _split(seeds, self.n_seeds)
            for part in _split(subsets, size)
        )


def _split(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[i : i + size]) for i in range(0, len(items), size)]


def as_bytes(text: str) -> int:
    """Read a number of bytes such as "80GiB"; units are powers of 1024.

    Raises:
      ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"expected a number of bytes such as 80GiB, got {text!r}")
    return int(float(found[1]) * 2 ** _UNITS[found[2]])


def device_bytes() -> int | None:
    """Return what programs may use of this machine's accelerator; None on a CPU.

    JAX takes three quarters of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more.
    """
    if jax.default_backend() == "cpu":
        return None
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def choose(sizes: Sizes, device_memory: int | None = None) -> Plan:
    """Choose blocks and microbatches for a device.

    On a CPU a block is one member, whose activations stay in cache, unless a size is
    given. Elsewhere: the most members of which at least 64 rows fit, whole seeds or
    equal parts of one, and then the most rows; fewer rows for one member alone.

    Args:
      sizes: what is trained.
      device_memory: bytes; what the device says by default.

    Raises:
      ValueError: one row of one member does not fit.
    """
    device_memory = device_memory or device_bytes()
    if device_memory is None:
        if jax.default_backend() == "cpu" and jax.device_count() == 1:
            return Plan(n_subsets=1, n_seeds=1)
        return Plan(n_subsets=_subsets_each(), n_seeds=sizes.train.n_seeds)
    limit = int((1 - KEPT_FREE) * device_memory)
    held = sizes.resident + rows_bytes(sizes, sizes.n_train)
    if held >= limit:
        raise ValueError(
            f"the rows that training holds take {bytes_in_words(held)}, and of the "
            f"device's {bytes_in_words(device_memory)} {bytes_in_words(limit)} may be "
            "used; train with --streamed, or store fewer or narrower hidden states"
        )
    foretold = Foretold.of(sizes)
    for n_subsets, n_seeds, n_rows in _candidates(sizes):
        if sizes.resident + foretold.total(n_subsets, n_seeds, n_rows) > limit:
            continue
        needed = compiled_bytes(sizes, n_subsets, n_seeds, n_rows)
        if sizes.resident + needed.total <= limit:
            return Plan(
                n_subsets=n_subsets,
                n_seeds=n_seeds,
                n_rows=n_rows,
                limit=limit,
                resident=sizes.resident,
                needed=needed,
            )
    raise ValueError(
        f"one member's step on one row does not fit into {bytes_in_words(limit)} "
        f"beside {bytes_in_words(held)} of rows; train with --streamed, with a smaller "
        "`hidden` width, or on a device with more memory"
    )


def _subsets_each() -> int:
    """Subsets of a seed on each device, where all of them are side by side."""
    return -(-N_SUBSETS // jax.device_count())


def _candidates(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Yield subsets, seeds and rows, best first."""
    rows = row_choices(sizes.train)
    many = [n for n in rows if n >= _FEW_ROWS] or rows[:1]
    seeds = range(sizes.train.n_seeds, 0, -1)
    whole = _subsets_each()
    # Parts of a seed that are as equal as can be: 15, 8, 5, 4, 3, 2, 1.
    parts = sorted({-(-whole // n) for n in range(1, whole + 1)}, reverse=True)
    blocks = [(whole, n) for n in seeds] + [(n, 1) for n in parts[1:]]
    for n_subsets, n_seeds in blocks:
        yield from ((n_subsets, n_seeds, n) for n in many)
    yield from ((1, 1, n) for n in rows if n < many[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans:
    """The manifest's section `plan`: by what plan each setting was trained last."""

    closed_book: Plan | None = None
    with_context: Plan | None = None


def run_plans(
    run: RunDir, config: GridConfig, device_memory: int | None = None
) -> dict[Setting, Plan]:
    """Return the plan of every setting of a run that has rows to train on.

    Raises:
      ValueError: one does not fit, see `choose`.
    """
    plans = {}
    for setting in settings_of(run):
        store, rows = open_rows(run, setting)
        where = [rows.where(split) for split in ("train", "validation")]
        if min(map(len, where)) == 0:
            continue  # training says why
        lengths = span_lengths(store.spec.spans, setting)
        kept = family_dims(store), lengths, where, stored_dtypes(store)
        sizes = Sizes.of(config, *kept)
        plans[setting] = choose(sizes, device_memory)
    return plans


def record_plans(run: RunDir, plans: Mapping[Setting, Plan]) -> None:
    """Write down in the manifest how settings are trained; results do not tell."""
    none = dict.fromkeys(PRESETS, Plans())
    run.settle(
        "plan", none, lambda held: dataclasses.replace(held, **plans),
        is_replaceable=True,
    )  # fmt: skip


def plans_in_words(plans: Mapping[Setting, Plan], config: TrainConfig) -> str:
    """Say how every setting is trained, in one line."""
    parts = (f"{s.replace('_', ' ')}: {p.in_words(config)}" for s, p in plans.items())
    return "; ".join(parts)


def look_at_plan(path: Path) -> str | None:
    """Return what the doctor says of a run's training; None before its signals.

    Raises:
      ValueError: it does not fit here.
    """
    run = RunDir(path)
    needed = [run.labels, *(run.features(setting) for setting in settings_of(run))]
    if not all(path.exists() for path in needed):
        return None
    config = run.settle("train", GRID_PRESETS, is_recorded=False)
    return plans_in_words(run_plans(run, config), config.train)


def workload_of(
    config: GridConfig, setting: Setting, store: FeatureStore, n_train: int
) -> Workload:
    """Return the work of a setting's grid if no member stops early."""
    widths = longest_spans(store.spec.spans, setting)
    return Workload(
        encoder=config.encoder,
        dims=family_dims(store),
        spans=tuple((1, width) for width in widths),
        batch_size=config.train.batch_size,
        n_steps=-(-n_train // config.train.batch_size) * config.train.max_epochs,
        n_seeds=config.train.n_seeds,
    )


def forecast(device_memory: int | None, run: RunDir, config: GridConfig) -> Forecast:
    """Return what training takes if no member stops early.

    Operations are those of matrix products over all positions of the batches, padded
    ones included; memory is that of the tokens in memory, or of two groups of a stream.
    """
    n_flops = in_memory = outputs = 0
    settings = settings_of(run)
    for setting in settings:
        store, rows = open_rows(run, setting)
        n_train = len(rows.where("train"))
        workload = workload_of(config, setting, store, n_train)
        control = [(_EVERY_FAMILY, seed) for seed in range(config.train.n_seeds)]
        n_flops += turn_flops(workload, [*workload.members, *control])
        token = zip(workload.dims.sizes, stored_dtypes(store), strict=True)
        row_bytes = workload.n_tokens * sum(
            n * numpy_dtype(dtype).itemsize for n, dtype in token
        )
        n_rows = n_train + len(rows.where("validation"))
        if config.stream is not None:
            n_rows = 2 * config.stream.n_chunk * config.stream.n_mixed
        in_memory += n_rows * row_bytes
        pooled = 1 + config.encoder.d_pooled
        outputs += len(workload.members) * len(rows.ids) * pooled * _FLOAT
    plans = run_plans(run, config, device_memory)
    n_members = (N_SUBSETS + 1) * config.train.n_seeds
    return Forecast(
        stage="train",
        n_flops=n_flops,
        memory_bytes=in_memory,
        disk_bytes=outputs,
        basis=(
            f"{n_members} members for {' and '.join(settings)} each, at most "
            f"{config.train.max_epochs} epochs each (early stopping makes them fewer); "
            "disk is that of their outputs, weights come on top\n"
            f"  {plans_in_words(plans, config.train)}"
        ),
    )
