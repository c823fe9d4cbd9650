"""The champion's encoders trained anew with one token span left out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.detector import HeadName
from jaxprobe.features import reading
from jaxprobe.features.families import all_but
from jaxprobe.features.reading import SPAN_NAMES
from jaxprobe.features.rows import load_rows, row_reader, training_rows
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.grid import Block, default_blocks, join
from jaxprobe.fit.stage import fit_rows, outputs_of_rows, read_member_outputs
from jaxprobe.model.encoder import Encoder, MemberOutputs
from jaxprobe.pool import OutputsOf, read_selection, reads
from jaxprobe.settings import grid_config

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


def outputs_file(folder: Path, setting: Setting, span: str) -> Path:
    """Return where the outputs of a pass without a span lie."""
    return folder / f"{setting}.without_{span}.safetensors"


def train_without_spans(
    run: RunDir,
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
      folder: of the results, and of the members meanwhile.
      key: identity of all that the members depend on.
      setting: the pass.
      subsets: rows of SUBSETS.
      tick: called after every block.
    """
    config = grid_config(run)
    blocks = default_blocks(config.train.n_seeds, subsets)
    left = [
        span
        for span in SPANS[setting]
        if not load_cache(outputs_file(folder, setting, span), key)
    ]
    for _ in range(len(blocks) * (len(SPANS[setting]) - len(left))):
        tick()
    if not left or not subsets:
        return
    store, rows = load_rows(run, setting)
    read = row_reader(run, setting, store, rows, config.stream)
    training = training_rows(read, rows, config.stream)
    encoder = Encoder(config.encoder, read.dims)
    order = Block(subsets, tuple(range(config.train.n_seeds))).members
    for span in left:
        mask = all_but(SPANS[setting].index(span), len(SPANS[setting]))
        without = training.with_spans(mask)
        members = folder / f"{setting}.without_{span}.members"
        trained = fit_rows(
            without,
            rows.labels,
            blocks,
            encoder=encoder,
            config=config.train,
            folder=members,
            key=key,
            tick=tick,
        )
        outputs = outputs_of_rows(
            join(trained, order), without.read, len(rows.ids), encoder
        )
        save_cache(outputs_file(folder, setting, span), outputs._asdict(), key)
        shutil.rmtree(members, ignore_errors=True)


def outputs_without(
    folder: Path, key: str, span: str, subsets: dict[Setting, tuple[int, ...]]
) -> OutputsOf:
    """Return what reads a run's outputs, the champions' encoders without a span.

    The other encoders keep their outputs; no head reads them. So the pool keeps its
    shape, and a head its place in the pool, its draws and its executable.

    Args:
      folder: of the outputs.
      key: identity of what they were made from.
      span: which one was left out.
      subsets: the encoders that were trained without it, pass by pass.
    """

    def outputs_of(run: RunDir, setting: Setting) -> MemberOutputs:
        outputs = read_member_outputs(run, setting)
        if span not in SPANS[setting] or not subsets[setting]:
            return outputs
        path = outputs_file(folder, setting, span)
        found = load_cache(path, key)
        if found is None:
            raise ValueError(f"{path} is missing or damaged; run the same line again")
        return replaced(outputs, MemberOutputs(**found), subsets[setting])

    return outputs_of


def replaced(
    outputs: MemberOutputs, by: MemberOutputs, subsets: tuple[int, ...]
) -> MemberOutputs:
    """Put the outputs of some encoders in the place of the grid's.

    Args:
      outputs: of the grid, `[n_seeds * 15, ...]`, seed-major.
      by: of the subsets, `[n_seeds * n_subsets, ...]`, seed-major.
      subsets: rows of SUBSETS.
    """
    n_seeds = len(outputs.logits) // N_SUBSETS
    at = [s * N_SUBSETS + k for s in range(n_seeds) for k in subsets]

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        whole = np.array(old)
        whole[at] = new
        return whole

    return MemberOutputs(put(outputs.logits, by.logits), put(outputs.pooled, by.pooled))
