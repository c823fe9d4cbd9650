"""Does a few heads' attention carry the signal? Integrated gradients over its channels.

Paper, appendix E, figure of attention heads: from a baseline in which the attention
family lies at its means, over 400 test answers; a head's share is the absolute
attribution of its channels over all tokens and spans. Unlike the paper's, the eight
largest heads are found on one half of these answers and measured on the other: found
and measured on the same ones, the largest of any map hold more than eight drawn ones.
"""

import numpy as np

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from jaxprobe.features.subsets import FAMILIES, FamilyDims
from selection.anatomy.analysis import (
    Analysis,
    Ratio,
    drawn,
    in_each_setting,
    ratio_rows,
)
from selection.anatomy.encoders import TOLERANCE, Deployed, PerChannel, incompleteness

EXPERIMENT = "anatomy_heads"
N_ANSWERS = 400  # the paper's
N_HEADS = 8  # likewise
N_DRAWS = 20  # sets of as many random heads
_ATTENTION = FAMILIES.index("attn")


def incomplete(experiment: str, detector: str, error: float, **place) -> ResultRow:
    """Return the row that says how far attributions are from adding up."""
    fields = dict(experiment=experiment, detector=detector, metric="incompleteness")
    return ResultRow(**fields, value=error, **place)


def not_attributed(error: float) -> str:
    """Say why attributions that do not add up are not shown."""
    return (
        f"the attributions miss the differences of the logits by {error:.1%}, more "
        f"than {TOLERANCE:.0%}; a family of 1,024 channels or more gives no gradient"
    )


def test_answers(deployed: Deployed) -> np.ndarray:
    """Return the test rows that are attributed, in their original wording."""
    rows = deployed.rows
    where = rows.where("test")
    where = where[rows.variants[where] == "original"]
    return drawn(rows, where, N_ANSWERS, deployed.seed)


def head_sums(
    deployed: Deployed, name: str, where: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return what each head of each layer moves, and how far it is from adding up.

    Args:
      deployed: encoders of a setting.
      name: of one that reads attention.
      where: `[n]` rows of the store.

    Returns:
      `[n, n_layers, n_heads]` absolute attributions in logits, summed over seeds,
      tokens, spans and channels; and the incompleteness.
    """
    shape = deployed.store.spec.families["attn"].shape
    sums = np.zeros((len(where), *shape[-2:]))
    added, wanted = [], []
    for places, change, found, _ in deployed.attributions(name, where, (_ATTENTION,)):
        attention = found[_ATTENTION]
        whole = np.abs(attention).sum(axis=(0, 1))
        sums[places] = whole.reshape(len(places), -1, *shape[-2:]).sum(axis=1)
        added.append(attention.sum(axis=(1, 3)).ravel())
        wanted.append(change.ravel())
    return sums, incompleteness(np.concatenate(added), np.concatenate(wanted))


def channels_of_heads(dims: FamilyDims, n_spans: int, cells: np.ndarray) -> PerChannel:
    """Return which channels are gone where some heads are.

    Args:
      dims: of the encoders.
      n_spans: of the setting.
      cells: `[n_layers, n_heads]` bool.
    """
    channels = [np.zeros((n_spans, size), bool) for size in dims.sizes]
    # Two other spans and two readings stand before layers and heads.
    channels[_ATTENTION][:] = np.tile(
        cells.ravel(), dims.sizes[_ATTENTION] // cells.size
    )[None]
    return tuple(channels)


def _chosen(shape: tuple[int, ...], flat: np.ndarray) -> np.ndarray:
    cells = np.zeros(int(np.prod(shape)), bool)
    cells[flat] = True
    return cells.reshape(shape)


def heads(deployed: Deployed) -> list[ResultRow]:
    """Return the share of every head, and what the largest eight of them are worth."""
    where = test_answers(deployed)
    names = dict.fromkeys([*(n for n in deployed.queried if "A" in n), "A"])
    place = deployed.place(IN_DOMAIN, "test")
    made: list[ResultRow] = []
    for name in names if len(where) > 1 else ():
        printed = deployed.printed(name)
        sums, error = head_sums(deployed, name, where)
        made.append(incomplete(EXPERIMENT, printed, error, **place, n=len(where)))
        if error > TOLERANCE:
            fields = dict(experiment=EXPERIMENT, detector=printed, n=len(where))
            reason = not_attributed(error)
            fields |= {"metric": "share of 8", "value": None, "reason": reason}
            made.append(ResultRow(**fields, **place))
            continue
        made += _of_encoder(deployed, name, where, sums, place)
    return made


def _of_encoder(
    deployed: Deployed, name: str, where: np.ndarray, sums: np.ndarray, place: dict
) -> list[ResultRow]:
    """Return the rows of one encoder's heads."""
    printed = deployed.printed(name)
    shape, n_cells = sums.shape[1:], int(np.prod(sums.shape[1:]))
    whole = sums.sum(axis=(1, 2))
    ratios = [
        Ratio(printed, f"share at {layer} {head}", sums[:, layer, head], whole)
        for layer in range(shape[0])
        for head in range(shape[1])
    ]
    ids, config = deployed.rows.ids[where], deployed.bootstrap
    made = ratio_rows(EXPERIMENT, ratios, ids, place, config)
    n_heads = min(N_HEADS, n_cells)
    half = len(where) // 2  # they are in the order of a hash
    order = np.argsort(-sums[:half].sum(axis=0).ravel(), kind="stable")
    top = _chosen(shape, order[:n_heads])
    rng = np.random.default_rng(deployed.seed)
    others = [
        _chosen(shape, rng.choice(n_cells, n_heads, replace=False))
        for _ in range(N_DRAWS)
    ]
    rest = where[half:]
    each = [
        channels_of_heads(deployed.dims, deployed.n_spans, cells)
        for cells in (top & ~top, top, *others)  # none of them first
    ]
    (without,) = deployed.logits_without([name], rest, each)
    moved = np.abs(without[1:] - without[:1]).mean(axis=1)  # [1 + n_draws, n]
    by_random, every = moved[1:].mean(axis=0), np.ones(len(rest))
    kept = sums[half:]
    ratios = [
        Ratio(printed, "share of 8", kept[:, top].sum(axis=1), kept.sum(axis=(1, 2))),
        Ratio(printed, "moved by 8", moved[0], every),
        Ratio(printed, "moved by random 8", by_random, every),
        Ratio(printed, "moved more by 8", moved[0] - by_random, every),
    ]
    made += ratio_rows(EXPERIMENT, ratios, deployed.rows.ids[rest], place, config)
    even = dict(experiment=EXPERIMENT, detector=printed, metric="even share of 8")
    made.append(ResultRow(**even, **place, value=n_heads / n_cells, n=n_cells))
    return made


ANALYSES = (Analysis("heads", in_each_setting(heads)),)
