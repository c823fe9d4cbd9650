"""The champion's encoders trained anew with one token span left out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.rows import load_rows
from benchmarks.stages.select_stage import CodesOf, read_selection, reads
from benchmarks.stages.sides import sides_of, tokens_of
from benchmarks.stages.train_sides import encode_all, fit_sides
from benchmarks.stages.train_stage import read_codes
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.detector import HeadName
from jaxprobe.features import reading
from jaxprobe.features.families import all_but
from jaxprobe.features.reading import SPAN_NAMES
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.grid import Block, default_blocks, join
from jaxprobe.model.encoder import Encoder, MemberOutputs

SPANS: dict[Setting, tuple[str, ...]] = {
    setting: tuple(SPAN_NAMES[span] for span in read)
    for setting, read in reading.SPANS.items()
}
CHAMPIONS: tuple[HeadName, ...] = ("closed_book", "with_context")


def subsets_read(run: RunDir) -> dict[Setting, tuple[int, ...]]:
    """Return the encoders of each pass that a champion reads, as rows of SUBSETS."""
    read = [
        pair
        for branch in CHAMPIONS
        for pair in reads(branch, read_selection(run, branch)[1]["members"])
    ]
    return {
        setting: tuple(sorted({SUBSET_NAMES.index(n) for s, n in read if s == setting}))
        for setting in SETTINGS
    }


def codes_file(folder: Path, setting: Setting, span: str) -> Path:
    """Return where the codes of a pass without a span lie."""
    return folder / f"{setting}.without_{span}.safetensors"


def train_without_spans(
    run: RunDir,
    config: RunConfig,
    folder: Path,
    key: str,
    setting: Setting,
    subsets: tuple[int, ...],
    tick: Callable[[], None],
) -> None:
    """Train the encoders of a pass, once without each of its spans.

    Every member has the weights, batches and noise it began with in the grid: what
    differs is the span. Finished members and finished spans are not trained again.

    Args:
      run: with a trained grid.
      config: the run's.
      folder: of the results, and of the members meanwhile.
      key: identity of all that the members depend on.
      setting: the pass.
      subsets: rows of SUBSETS.
      tick: called after every block.
    """
    blocks = default_blocks(config.train.n_seeds, subsets)
    left = [
        span
        for span in SPANS[setting]
        if not load_cache(codes_file(folder, setting, span), key)
    ]
    for _ in range(len(blocks) * (len(SPANS[setting]) - len(left))):
        tick()
    if not left or not subsets:
        return
    store, rows = load_rows(run, setting)
    read = tokens_of(run, setting, store, rows, config.stream)
    sides = sides_of(read, rows, config.stream)
    encoder = Encoder(config.encoder, read.dims)
    order = Block(subsets, tuple(range(config.train.n_seeds))).members
    for span in left:
        mask = all_but(SPANS[setting].index(span), len(SPANS[setting]))
        without = sides.with_spans(mask)
        members = folder / f"{setting}.without_{span}.members"
        trained = fit_sides(
            without,
            rows.labels,
            blocks,
            encoder=encoder,
            config=config.train,
            folder=members,
            key=key,
            tick=tick,
        )
        codes = encode_all(join(trained, order), without.read, len(rows.ids), encoder)
        save_cache(codes_file(folder, setting, span), codes._asdict(), key)
        shutil.rmtree(members, ignore_errors=True)


def codes_without(
    folder: Path, key: str, span: str, subsets: dict[Setting, tuple[int, ...]]
) -> CodesOf:
    """Return what reads a run's codes, those of the champions' encoders without a span.

    The other encoders keep their codes; no head reads them. So the pool keeps its
    shape, and a head its place in the pool, its draws and its executable.

    Args:
      folder: of the codes.
      key: identity of what they were made from.
      span: which one was left out.
      subsets: the encoders that were trained without it, pass by pass.
    """

    def codes_of(run: RunDir, setting: Setting) -> MemberOutputs:
        codes = read_codes(run, setting)
        if span not in SPANS[setting] or not subsets[setting]:
            return codes
        path = codes_file(folder, setting, span)
        found = load_cache(path, key)
        if found is None:
            raise ValueError(f"{path} is missing or damaged; run the same line again")
        return replaced(codes, MemberOutputs(**found), subsets[setting])

    return codes_of


def replaced(
    codes: MemberOutputs, by: MemberOutputs, subsets: tuple[int, ...]
) -> MemberOutputs:
    """Put the codes of some encoders in the place of the grid's.

    Args:
      codes: of the grid, `[n_seeds * 15, ...]`, seed-major.
      by: of the subsets, `[n_seeds * n_subsets, ...]`, seed-major.
      subsets: rows of SUBSETS.
    """
    n_seeds = len(codes.logits) // N_SUBSETS
    at = [s * N_SUBSETS + k for s in range(n_seeds) for k in subsets]

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        whole = np.array(old)
        whole[at] = new
        return whole

    return MemberOutputs(put(codes.logits, by.logits), put(codes.pooled, by.pooled))
