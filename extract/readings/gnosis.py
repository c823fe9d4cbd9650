"""What Gnosis reads (Ghasemabadi and Niu, 2025): maps of attention, traces of states.

Followed: Amirhosein-gh98/Gnosis at f8ff11d, models/qwen3 (modeling_qwen3.py,
feature_extractors.py); of the paper (arXiv 2512.20578) the abstract alone could be
read. Each head's map of the whole sequence is averaged over a square of cells and
described by 23 statistics, all groups of the official code; its convolutions over the
cells, which may stand beside them, would need every cell kept. Departures:

- 32 cells a side, not 256: their sequences have thousands of tokens, ours tens to
  hundreds, of which 256 cells would repeat most; 32 is the least number for which their
  two bands about the diagonal (n/32 and n/16 cells wide) are not empty;
- states are read at the answer, not over the whole sequence: theirs is nearly all
  answer, in ours an answer would be a part of the last step;
- float32 throughout, where theirs is half precision.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from beatrice.extract.readings.batch import Part

N_CELLS, N_STEPS, N_STATISTICS = 32, 8, 23
_TINY = 1e-12


def bin_weights(
    edges: Sequence[tuple[int, int]], n_tokens: int, n_bins: int
) -> torch.Tensor:
    """Return what averages stretches of tokens over a fixed number of bins.

    Bin i of n tokens is the mean of `[floor(i n / n_bins), ceil((i + 1) n / n_bins))`,
    as in Torch's adaptive pooling; bins overlap, and repeat tokens where n is small.

    Args:
      edges: `[start, stop)` of every example, at least one token each.
      n_tokens: of the padded sequences.
      n_bins: of every example.

    Returns:
      `[n_examples, n_bins, n_tokens]` float32; every row sums to 1.
    """
    weights = torch.zeros(len(edges), n_bins, n_tokens)
    for example, (start, stop) in zip(weights, edges, strict=True):
        n = stop - start
        for i in range(n_bins):
            first, last = start + i * n // n_bins, start - (-(i + 1) * n // n_bins)
            example[i, first:last] = 1 / (last - first)
    return weights


def map_statistics(maps: torch.Tensor) -> torch.Tensor:
    """Describe square maps of attention.

    In order: of the power spectrum the entropy and the shares of four bands; variance
    of row sums and of column sums, mean entropy of rows and of columns; shares of the
    diagonal and of two bands about it; all that is off the diagonal; mean, variance
    and covariance of the place (down, across), and how unlike the variances are; of the
    map as a distribution the entropy, those of its margins, and their mutual
    information, as shares of the most possible. Entropies in nats elsewhere.

    Args:
      maps: `[…, n, n]` float, not negative.

    Returns:
      `[…, 23]`.
    """
    n = maps.shape[-1]
    rows, columns, total = maps.sum(-1), maps.sum(-2), maps.sum((-2, -1))
    near = [_about_diagonal(maps, width) for width in (0, n // 32, n // 16)]
    statistics = [
        *_spectrum(maps),
        rows.var(-1, correction=0),
        columns.var(-1, correction=0),
        _line_entropy(maps),
        _line_entropy(maps.mT),
        *(mass / (total + 1e-6) for mass in near),
        total - near[0],
        *_moments(rows, columns, maps, total),
        *_entropies(maps),
    ]
    return torch.stack(statistics, dim=-1)


def _spectrum(maps: torch.Tensor) -> list[torch.Tensor]:
    """Entropy of the power spectrum, and its shares by distance from a corner.

    The official distances run from -1/2 to 1/2 over rows that `rfft2` orders from 0:
    the constant part counts as the highest frequency of columns. Kept as it is.
    """
    n = maps.shape[-1]
    power = torch.fft.rfft2(maps).abs().square() + _TINY
    share = power / (power.sum((-2, -1), keepdim=True) + _TINY)
    down = torch.linspace(-0.5, 0.5, n, dtype=torch.float64)
    across = torch.linspace(0, 0.5, n // 2 + 1, dtype=torch.float64)
    radius = torch.hypot(down[:, None], across).to(maps.device)
    edges = [
        -1.0,
        *(
            share_of_radius * float(radius.max())
            for share_of_radius in (0.15, 0.35, 0.6)
        ),
        1.0,
    ]
    bands = [
        (share * ((radius > low) & (radius <= high))).sum((-2, -1))
        for low, high in zip(edges[:-1], edges[1:], strict=True)
    ]
    return [-(share * share.log()).sum((-2, -1)), *bands]


def _line_entropy(maps: torch.Tensor) -> torch.Tensor:
    """Mean entropy of the rows."""
    share = (maps / (maps.sum(-1, keepdim=True) + 1e-8)).clamp_min(1e-8)
    return -(share * share.log()).sum(-1).mean(-1)


def _about_diagonal(maps: torch.Tensor, width: int) -> torch.Tensor:
    """Sum of the diagonal and `width` lines on both sides of it."""
    return maps.triu(-width).tril(width).sum((-2, -1))


def _moments(
    rows: torch.Tensor, columns: torch.Tensor, maps: torch.Tensor, total: torch.Tensor
) -> list[torch.Tensor]:
    """Where a map's weight lies, each side from 0 to 1."""
    total = total.clamp_min(1e-8)
    position = torch.linspace(
        0, 1, maps.shape[-1], device=maps.device, dtype=maps.dtype
    )
    means, spreads, apart = [], [], []
    for margin in (rows, columns):
        means.append((margin * position).sum(-1) / total)
        apart.append(position - means[-1][..., None])
        spreads.append((margin * apart[-1].square()).sum(-1) / total)
    both = apart[0][..., :, None] * apart[1][..., None, :]
    covariance = (maps * both).sum((-2, -1)) / total
    unlike = (spreads[0] - spreads[1]).abs() / (sum(spreads) + 1e-8)
    return [*means, *spreads, covariance, unlike]


def _entropies(maps: torch.Tensor) -> list[torch.Tensor]:
    """Entropies of the map and of its margins, and mutual information."""
    maps, most = maps.clamp_min(_TINY), math.log(maps.shape[-1])
    share = (maps / maps.sum((-2, -1), keepdim=True)).clamp_min(_TINY)
    margins = [share.sum(-1), share.sum(-2)]
    joint = -(share * share.log()).sum((-2, -1))
    apart = [-(margin * margin.log()).sum(-1) for margin in margins]
    mutual = (sum(apart) - joint).clamp_min(0)
    return [joint / (2 * most), *(margin / most for margin in apart), mutual / most]


class AttentionStatistics(Part):
    """Statistics of every head's map, `[n_attention_layers, n_heads, 23]`.

    The map is that of prompt and answer, so an answer without tokens has one.
    """

    names = ("gnosis_maps",)
    reads_weights = True

    @cached_property
    def _bins(self) -> torch.Tensor:
        batch = self.batch
        bins = bin_weights(batch.sequence_edges, max(batch.lengths), N_CELLS)
        return bins.to(batch.backbone.device)[:, None]

    def first_row(self) -> int:
        """Return the first row of the sequence."""
        return 0

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Add some rows to the cells; behind the last row, describe them."""
        stop = log_weights.shape[-1]
        cells = log_weights.exp() @ self._bins[..., :stop].mT
        added = self._bins[..., start:stop] @ cells
        maps = self.add(layer, added)
        if stop == self._bins.shape[-1]:
            del self._by_layer["", layer]  # cells of all layers would take much memory
            self.add(layer, map_statistics(maps), "statistics")

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Return them by layer."""
        return {"gnosis_maps": list(self.stacked("statistics"))}


class StateTrace(Part):
    """Final-normed states of the answer in 8 steps, `[8, d_model]`.

    Each state is standardised first. The official code then projects and pools; a mean
    of projections is the projection of the mean, so that a projection may be learned
    from what is kept. The answer begins at the last prompt token, which emits its first
    token, so an answer without tokens has one too.
    """

    names = ("gnosis_states",)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Standardise and average."""
        edges = [(start - 1, stop) for start, stop in self.batch.answer_edges]
        bins = bin_weights(edges, final.shape[1], N_STEPS).to(final.device)
        states = torch.nn.functional.layer_norm(final.float(), final.shape[-1:])
        return {"gnosis_states": list(bins @ states)}
