"""What each rival detector reads: its `Part`, with its paper and its official code.

LLM-Check (Sriramanan et al., NeurIPS 2024; GaurangSriramanan/
LLM_Check_Hallucination_Detection at 2f3bf9e): its script scores hidden states and
attention over the whole sequence (here `_all`), or with a flag over only the answer
tokens. Its entropies are of the distributions at the answer tokens, each of which
predicts the token after it: the first token's is missed, and one after the last is
counted. The `_corrected` ones are of those that predict the answer. Whether wrong
answers have higher or lower values depends on the data; no direction is assumed here.

Gnosis (Ghasemabadi and Niu, 2025; Amirhosein-gh98/Gnosis at f8ff11d, models/qwen3,
modeling_qwen3.py and feature_extractors.py; only the abstract of the paper, arXiv
2512.20578, could be read): attention maps and traces of states. Each head's map of the
whole sequence is averaged over a square of cells and described by 23 statistics, all
groups of the official code. Its optional convolutions over the cells are left out, as
they would need every cell to be kept. Departures:

- 32 cells a side, not 256: their sequences have thousands of tokens, ours tens to
  hundreds, most of which 256 cells would repeat; 32 is the smallest number for which
  their two bands about the diagonal (n/32 and n/16 cells wide) are not empty;
- states are read at the answer, not over the whole sequence: theirs is nearly all
  answer, whereas in ours an answer would be part of the last step;
- everything is float32, where theirs is half precision.

Lookback Lens (Chuang et al., 2024; voidism/Lookback-Lens at f2846ef,
step01_extract_attns.py): its context is the whole prompt before the answer cue, not
only the passages as in the paper. The cue counts as new tokens, so that there is one
when the first token is predicted.

ReDeEP (Sun et al., 2025; Jeryi-Sun/ReDEeP-ICLR at e969202, token level): scores at the
positions that predict the answer's tokens, averaged here. Its "copying heads" are a
list per published model, whose script is lost; here all heads are read, to choose from.

LUMINA (Yeh et al., 2026, arXiv 2509.21875; deeplearning-wisc/LUMINA at c43ff41): read
at the same positions and averaged. If the model's words come from its own layers, the
processing rate is high; if from the passages, the discrepancy to the same answer after
other passages is high.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.readings.batch import (
    Batch,
    Part,
    final_states,
    mean_rows,
    rows_in_cache,
)
from beatrice.extract.signals.batch import TokenRows, pad_batch
from beatrice.extract.signals.sequence import sequence_of

_RIDGE = 1e-3


def hidden_scores(
    states: torch.Tensor, edges: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the mean log singular value of centred Gram matrices, in nats.

    Every row is centred over its own features, as in the code; the paper does not
    centre. Computed in float64: with more tokens than features, or equal tokens, the
    determinant is that of the 0.001 on the diagonal.

    Args:
      states: `[n_examples, n_tokens, d_model]`.
      edges: `[start, stop)` of the tokens of every example.

    Returns:
      `[n_examples]` float64; NaN for an example without tokens.
    """
    first, stop = torch.tensor(edges, device=states.device).T[..., None]
    counts = stop - first
    positions = first + torch.arange(int(counts.max()), device=states.device)
    every = torch.arange(len(states), device=states.device)[:, None]
    rows = states[every, positions.clamp(max=states.shape[1] - 1)].double()
    rows -= rows.mean(-1, keepdim=True)
    # Padding gives rows of zeros, each of which multiplies the determinant by 0.001.
    rows.masked_fill_((positions >= stop)[..., None], 0.0)
    n_padded = positions.shape[1] - counts[:, 0]
    scores = _log_determinants(rows) - n_padded.double() * math.log(_RIDGE)
    return (scores / counts[:, 0]).masked_fill(counts[:, 0] == 0, math.nan)


def _log_determinants(rows: torch.Tensor) -> torch.Tensor:
    """Return log determinants of the rows' Gram matrices plus 0.001 on the diagonal.

    If rounding leaves a matrix indefinite (more rows than features, of very different
    sizes), its determinant is noise, for which MKL's LU has returned NaN. The singular
    values of the rows themselves, whose squares are the matrix's, are exact.
    """
    gram = rows @ rows.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    factors, failed = torch.linalg.cholesky_ex(gram)
    log_dets = 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    for i in failed.nonzero()[:, 0].tolist():
        values = torch.linalg.svdvals(rows[i])
        of_null = (len(rows[i]) - len(values)) * math.log(_RIDGE)
        log_dets[i] = (values.square() + _RIDGE).log().sum() + of_null
    return log_dets


def window_entropy(entropies: torch.Tensor, n_words: int) -> torch.Tensor:
    """Return the largest of `[n_tokens]` nats / the vocabulary's size; NaN if empty."""
    if not len(entropies):
        return entropies.new_tensor(math.nan)
    return entropies.amax() / n_words


def top_entropies(log_probs: torch.Tensor, n_top: int = 50) -> torch.Tensor:
    """Return the mean of -q log q over the likeliest words, q their softmax.

    That is the entropy in nats divided by the number of words, `[n_tokens]`, given
    logits or log-probabilities `[n_tokens, vocab_size]`.
    """
    top = log_probs.topk(min(n_top, log_probs.shape[-1]), dim=-1).values
    return _entropy(top.log_softmax(-1)) / top.shape[-1]


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Return entropies in nats; a probability that underflows counts as zero."""
    return -(log_probs.exp() * log_probs).sum(-1)


class _AnswerOrAll(Part):
    """Two readings: one of the answer tokens, one of all tokens of the sequence."""

    @cached_property
    def _edges(self) -> dict[str, list[tuple[int, int]]]:
        edges = self.batch.answer_edges, self.batch.sequence_edges
        pairs = zip(self.names, edges, strict=True)
        return {name: edges for name, edges in pairs if name in self.wanted}

    def first_row(self) -> int:
        """Return the first row of the sequence, or of any answer."""
        return min(start for edges in self._edges.values() for start, _ in edges)


class HiddenScores(_AnswerOrAll):
    """The hidden score of each layer, `[n_layers]`; the last layer's states are normed.

    This is as in the official code, which takes Transformers' `hidden_states`.
    """

    names = ("llmcheck_hidden", "llmcheck_hidden_all")

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Score the output of every layer but the last."""
        if layer_pass.index < self.batch.backbone.n_layers - 1:
            self._score(layer_pass.index, layer_pass.h_out)

    def _score(self, layer: int, states: torch.Tensor) -> None:
        for name, edges in self._edges.items():
            self.add(layer, hidden_scores(states, edges), name)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Score the last layer."""
        self._score(self.batch.backbone.n_layers - 1, final)
        return {name: list(self.stacked(name)) for name in self._edges}


class DiagonalScores(_AnswerOrAll):
    """Sum over heads of the mean log weight that tokens give to themselves.

    Shape `[n_attention_layers]`. Logarithms are taken before weights are rounded, so
    they are finite where those of the official code can be minus infinity.
    """

    names = ("llmcheck_attention", "llmcheck_attention_all")
    reads_weights = True

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Add the diagonal of some rows."""
        diagonal = log_weights.diagonal(start, -2, -1).double().sum(1)
        positions = start + torch.arange(diagonal.shape[1], device=diagonal.device)
        for name, every in self._edges.items():
            edges = torch.tensor(every, device=diagonal.device)[:, :, None]
            in_answer = (positions >= edges[:, 0]) & (positions < edges[:, 1])
            self.add(layer, diagonal.masked_fill(~in_answer, 0.0).sum(1), name)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Divide by the number of tokens; NaN for an answer without tokens."""
        scores = {}
        for name, edges in self._edges.items():
            sums = self.stacked(name)
            counts = sums.new_tensor([stop - start for start, stop in edges])
            scores[name] = list(sums / counts[:, None])
        return scores


class Entropies(Part):
    """Window entropy (of one token) and logit entropy (of 50 words), both scalars."""

    names = (
        "window_entropy",
        "window_entropy_corrected",
        "logit_entropy",
        "logit_entropy_corrected",
    )

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read the distributions at the answer tokens, and those that predict them."""
        # One stretch holds both: from the first token's predictor to the last token.
        edges = [(start - 1, stop) for start, stop in self.batch.answer_edges]
        rows = self.batch.rows(edges)
        chunks = [
            (_entropy(log_probs), top_entropies(log_probs))
            for _, log_probs in self.batch.log_probs(rows.of(final), is_normed=True)
        ]
        every, top = (torch.cat(values) for values in zip(*chunks, strict=True))
        n_words = self.batch.head.weight.shape[0]
        scores: dict[str, list[torch.Tensor]] = {name: [] for name in self.names}
        for at in rows.slices():
            answer, before = slice(at.start + 1, at.stop), slice(at.start, at.stop - 1)
            for suffix, tokens in (("", answer), ("_corrected", before)):
                window = window_entropy(every[tokens], n_words)
                scores[f"window_entropy{suffix}"].append(window)
                scores[f"logit_entropy{suffix}"].append(top[tokens].mean())
        return {name: scores[name] for name in self.wanted}


N_CELLS, N_STEPS = 32, 8
_TINY = 1e-12


def bin_weights(
    edges: Sequence[tuple[int, int]], n_tokens: int, n_bins: int
) -> torch.Tensor:
    """Return weights that average stretches of tokens over a fixed number of bins.

    Bin i of n tokens is the mean of `[floor(i n / n_bins), ceil((i + 1) n / n_bins))`,
    as in Torch's adaptive pooling; bins overlap, and repeat tokens if n is small.
    `edges` are `[start, stop)` of every example, at least one token each. Returns
    `[n_examples, n_bins, n_tokens]` float32, whose rows sum to 1.
    """
    weights = torch.zeros(len(edges), n_bins, n_tokens)
    for example, (start, stop) in zip(weights, edges, strict=True):
        n = stop - start
        for i in range(n_bins):
            first, last = start + i * n // n_bins, start - (-(i + 1) * n // n_bins)
            example[i, first:last] = 1 / (last - first)
    return weights


def map_statistics(maps: torch.Tensor) -> torch.Tensor:
    """Describe square attention maps by 23 statistics.

    In order: entropy of the power spectrum and its shares in four bands; variance of
    row sums and of column sums, mean entropy of rows and of columns; shares of the
    diagonal and of two bands about it; sum of all off-diagonal weights; means,
    variances and covariance of the position (down, across), and how much the variances
    differ; entropy of the map as a distribution, those of its margins, and their mutual
    information, each relative to its maximum. Other entropies are in nats. Maps are
    `[…, n, n]`, not negative; returns `[…, 23]`.
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
    """Return the entropy of the power spectrum, and its shares by distance to a corner.

    The official distances run from -1/2 to 1/2 over rows that `rfft2` orders from 0, so
    the constant part counts as the highest frequency of columns. This is kept.
    """
    n = maps.shape[-1]
    power = torch.fft.rfft2(maps).abs().square() + _TINY
    share = power / (power.sum((-2, -1), keepdim=True) + _TINY)
    down = torch.linspace(-0.5, 0.5, n, dtype=torch.float64)
    across = torch.linspace(0, 0.5, n // 2 + 1, dtype=torch.float64)
    radius = torch.hypot(down[:, None], across).to(maps.device)
    largest = float(radius.max())
    edges = [-1.0, 0.15 * largest, 0.35 * largest, 0.6 * largest, 1.0]
    bands = [
        (share * ((radius > low) & (radius <= high))).sum((-2, -1))
        for low, high in itertools.pairwise(edges)
    ]
    return [-(share * share.log()).sum((-2, -1)), *bands]


def _line_entropy(maps: torch.Tensor) -> torch.Tensor:
    share = (maps / (maps.sum(-1, keepdim=True) + 1e-8)).clamp_min(1e-8)
    return -(share * share.log()).sum(-1).mean(-1)


def _about_diagonal(maps: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sum of the diagonal and of `width` lines on both sides of it."""
    return maps.triu(-width).tril(width).sum((-2, -1))


def _moments(
    rows: torch.Tensor, columns: torch.Tensor, maps: torch.Tensor, total: torch.Tensor
) -> list[torch.Tensor]:
    """Return where a map's weight lies, with sides running from 0 to 1."""
    n, total = maps.shape[-1], total.clamp_min(1e-8)
    position = torch.linspace(0, 1, n, device=maps.device, dtype=maps.dtype)
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
    maps, most = maps.clamp_min(_TINY), math.log(maps.shape[-1])
    share = (maps / maps.sum((-2, -1), keepdim=True)).clamp_min(_TINY)
    margins = [share.sum(-1), share.sum(-2)]
    joint = -(share * share.log()).sum((-2, -1))
    apart = [-(margin * margin.log()).sum(-1) for margin in margins]
    mutual = (sum(apart) - joint).clamp_min(0)
    return [joint / (2 * most), *(margin / most for margin in apart), mutual / most]


class AttentionStatistics(Part):
    """Statistics of every head's map, `[n_attention_layers, n_heads, 23]`.

    The map covers prompt and answer, so it exists even for an answer without tokens.
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
        """Add some rows to the cells; after the last row, describe the cells."""
        stop = log_weights.shape[-1]
        cells = log_weights.exp() @ self._bins[..., :stop].mT
        added = self._bins[..., start:stop] @ cells
        maps = self.add(layer, added)
        if stop == self._bins.shape[-1]:
            del self._by_layer["", layer]  # cells of all layers would take much memory
            self.add(layer, map_statistics(maps), "statistics")

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Return the statistics by layer."""
        return {"gnosis_maps": list(self.stacked("statistics"))}


class StateTrace(Part):
    """Final-normed states of the answer in 8 steps, `[8, d_model]`.

    Each state is standardised first. The official code then projects and pools; a mean
    of projections is the projection of the mean, so a projection can be learned from
    what is kept. The answer begins at the last prompt token, which emits its first
    token, so there is a trace even for an answer without tokens.
    """

    names = ("gnosis_states",)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Standardise the states and average them."""
        edges = [(start - 1, stop) for start, stop in self.batch.answer_edges]
        bins = bin_weights(edges, final.shape[1], N_STEPS).to(final.device)
        states = torch.nn.functional.layer_norm(final.float(), final.shape[-1:])
        return {"gnosis_states": list(bins @ states)}


def lookback_ratio(
    weights: torch.Tensor, n_context: torch.Tensor, n_seen: torch.Tensor
) -> torch.Tensor:
    """Return the context's share of the mean weight: a / (a + b) of two means.

    `weights` are `[n_examples, n_heads, n_rows, n_keys]`, zero for unseen keys. The
    first `n_context` keys (`[n_examples]`) are the context; the others up to `n_seen`
    (`[n_rows]`), at least one, are new. Returns shares `[n_examples, n_heads, n_rows]`.
    """
    is_context = torch.arange(weights.shape[-1], device=weights.device)
    is_context = (is_context < n_context[:, None])[:, None, :, None]
    sums = weights @ torch.cat([is_context, ~is_context], dim=-1).to(weights.dtype)
    n_context = n_context[:, None, None]
    context, new = sums[..., 0] / n_context, sums[..., 1] / (n_seen - n_context)
    return context / (context + new)


class Lookback(Part):
    """The mean lookback ratio over the answer's steps, `[n_attention_layers, n_heads]`.

    Steps are the positions that predict a token of the answer, including that of the
    stop token, as in the official code.
    """

    names = ("lookback",)
    reads_weights = True

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        spans = [sequence_of(a).spans[2].tolist() for a in batch.answers]
        device = batch.backbone.device
        self._first, self._stop = torch.tensor(spans, device=device).T
        prompts = [len(answer.prompt_ids) for answer in batch.answers]
        n_context = [max(1, n - batch.n_cue) for n in prompts]
        self._n_context = torch.tensor(n_context, device=device)
        self._least = min(first for first, _ in spans)

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Add the ratios of some rows, each of which has its own number of new keys."""
        rows = torch.arange(start, log_weights.shape[-1], device=log_weights.device)
        some = slice(max(0, self._least - start), None)
        rows, weights = rows[some], log_weights[:, :, some].exp()
        ratios = lookback_ratio(weights, self._n_context, rows + 1)
        first, stop = self._first[:, None], self._stop[:, None]
        in_answer = ((rows >= first) & (rows < stop))[:, None]
        self.add(layer, ratios.masked_fill(~in_answer, 0.0).sum(-1))

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Divide by the number of steps; NaN for an answer without steps."""
        counts = (self._stop - self._first)[:, None, None]
        return {"lookback": list(self.stacked() / counts)}


_LEAST = 1e-37  # about the smallest float32 that is not subnormal


def divergences(mid: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
    """Compare two next-token distributions P and Q, given as log-probabilities.

    Both are `[n_rows, vocab_size]`. Returns `[n_rows, 2]` nats, with M their mean: the
    Jensen-Shannon divergence, half of KL(P|M) + KL(Q|M), as in the paper; and half of
    KL(M|P) + KL(M|Q), which the official code computes with swapped arguments (there a
    mean over words times a million, in half precision; here their sum).
    """
    sums = mid.new_zeros((len(mid), 2))
    # A few rows and a block of words at a time, which a CPU's cache holds.
    n_rows = rows_in_cache(mid)
    for start in range(0, len(mid), n_rows):
        rows = slice(start, start + n_rows)
        blocks = (mid[rows].split(2**15, -1), post[rows].split(2**15, -1))
        for p, q in zip(*blocks, strict=True):
            first, second = p.exp(), q.exp()
            between = (first + second).div_(2)
            # If both underflow, the term is zero: this logarithm is multiplied by zero.
            log_between = between.clamp_min(_LEAST).log_()
            from_mid, from_post = p - log_between, q - log_between
            sums[rows, 0] += first.mul_(from_mid).sum(-1)
            sums[rows, 0] += second.mul_(from_post).sum(-1)
            sums[rows, 1] -= between.mul_(from_mid.add_(from_post)).sum(-1)
    return sums / 2


class ContextScores(Part):
    """The external context score of every head, `[n_attention_layers, n_heads]`.

    It is the cosine between the final state that predicts a token and the mean final
    state of the tenth of the prompt to which the head attends most. Keys that a head
    does not see (outside a sliding window) never count; a position that sees none of
    the prompt is left out of the mean.
    """

    names = ("redeep_ecs",)
    reads_weights = True

    @cached_property
    def _places(self) -> list[dict[int, list[torch.Tensor]]]:
        # Attended tokens are known before the final states: per example and layer,
        # `[n_heads, n_rows, n_attended]` positions, -1 for an unseen key.
        return [{} for _ in self.batch.answers]

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Keep the prompt tokens to which some rows attend most."""
        for example, (first, stop) in enumerate(self.batch.predictor_edges):
            some = slice(max(first - start, 0), max(stop - start, 0))
            rows = log_weights[example, :, some, : first + 1]
            n_top = max(1, (first + 1) // 10)
            if rows.shape[1]:
                top = rows.topk(n_top, dim=-1)
                indices = top.indices.masked_fill_(top.values < -1e29, -1).int()
            else:
                indices = rows.new_empty((len(rows), 0, n_top)).int()
            self._places[example].setdefault(layer, []).append(indices)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Compare the states; NaN for an answer without tokens."""
        result = []
        for example, (first, stop) in enumerate(self.batch.predictor_edges):
            prompt = final[example, : first + 1].float()
            predictors = final[example, first:stop].float()
            scores = [
                _cosines(torch.cat(chunks, dim=1).long(), prompt, predictors)
                for _, chunks in sorted(self._places[example].items())
            ]
            result.append(torch.stack(scores))
        return {"redeep_ecs": result}


def _cosines(
    indices: torch.Tensor, prompt: torch.Tensor, predictors: torch.Tensor
) -> torch.Tensor:
    """Return the mean cosine of every head, `[n_heads]`, from its attended tokens."""
    n_prompt = len(prompt)
    counts = prompt.new_zeros((*indices.shape[:2], n_prompt + 1))
    counts.scatter_(-1, indices.masked_fill(indices < 0, n_prompt), 1.0)
    chosen = counts[..., :n_prompt]
    # Cosines do not depend on length, so the sum can replace the mean.
    cosines = torch.cosine_similarity(chosen @ prompt, predictors, dim=-1)
    return cosines.masked_fill(chosen.sum(-1) == 0, torch.nan).nanmean(-1)


def processing_rate(
    matches: torch.Tensor, entropies: torch.Tensor, emphasis: torch.Tensor
) -> torch.Tensor:
    """Return the information processing rate of every token, `[n_tokens]`.

    With l from 1, it is the sum of l (1 - min(match, 1)) over that of l / entropy,
    times the emphasis, a factor that only the code has. `matches` are each layer's lens
    probability of the model's likeliest word, divided by the model's own, and
    `entropies` those of each lens in nats, both `[n_tokens, n_layers]`. `emphasis` is
    the probability of the answer's token divided by that of the likeliest word.
    """
    weights = torch.arange(1, matches.shape[-1] + 1, device=matches.device)
    late = (weights * (1 - matches.clamp_max(1.0))).sum(-1)
    # The official code has the same guard against an entropy of zero.
    return late / (weights / (entropies + 1e-8)).sum(-1) * emphasis


def discrepancy(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    embeddings: torch.Tensor,
    n_top: int = 100,
) -> torch.Tensor:
    """Return the squared maximum mean discrepancy of two next-token distributions.

    They are `[n_rows, vocab_size]`, after the question's own and after other passages;
    `embeddings` are the input's, `[≥ vocab_size, d_model]`. Only the largest
    probabilities of each are kept, not renormalised; the similarity of words is
    (1 + cos) / 2 of their embeddings. The definition's double sums, `[n_rows]`, are
    half of (sum P - sum Q)^2 + |sum P e - sum Q e|^2, with e of length 1.
    """
    total, mean = 0.0, 0.0
    for sign, log_probs in ((1, log_p), (-1, log_q)):
        top = log_probs.topk(min(n_top, log_probs.shape[-1]), dim=-1)
        unit = torch.nn.functional.normalize(embeddings[top.indices].float(), dim=-1)
        weights = sign * top.values.exp()
        total = total + weights.sum(-1)
        mean = mean + (weights[..., None] * unit).sum(-2)
    return (total.square() + mean.square().sum(-1)) / 2


_KNOWLEDGE = ("redeep_pks", "redeep_pks_swapped")
_RATES = ("lumina_ipr", "lumina_ipr_inner")


class LensScores(Part):
    """Logit-lens readings after every layer, at positions that predict the answer.

    The parametric knowledge score of every layer, `[n_layers]` in nats, is how much its
    feed-forward part changes the next-token distribution: the mean of `divergences`
    over the answer's tokens. The information processing rate is a scalar: "lumina_ipr"
    reads every layer like the official code, which norms the last state twice
    (Transformers' last hidden state is already normed); "lumina_ipr_inner" leaves out
    the last layer, as the paper's sum does.
    """

    names = (*_KNOWLEDGE, *_RATES)

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        self._rows = batch.rows(batch.predictor_edges)
        self._reads_knowledge = not wanted.isdisjoint(_KNOWLEDGE)
        self._reads_rates = not wanted.isdisjoint(_RATES)

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Keep the stream after the layer, and before its feed-forward part."""
        states = [self._rows.of(layer_pass.h_out)]
        if self._reads_knowledge:
            middle = self._rows.of(layer_pass.h_in) + self._rows.of(layer_pass.att)
            states.insert(0, middle)
        self.add(layer_pass.index, torch.stack(states, dim=1))

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read all layers at once; NaN for an answer without tokens."""
        final, states = self._rows.of(final), self.stacked()
        n_rows, n_layers, n_states, width = states.shape
        best, words, log_p_answer = self._likeliest(final)
        every_word = words.repeat_interleave(n_layers)
        knowledge = states.new_empty((n_rows * n_layers, 2), dtype=torch.float32)
        lens = torch.empty_like(knowledge)
        states = states.reshape(-1, width)
        for rows, log_probs in self.batch.log_probs(states, is_normed=False):
            cells = slice(rows.start // n_states, rows.stop // n_states)
            behind = log_probs[n_states - 1 :: n_states]
            if self._reads_knowledge:
                knowledge[cells] = divergences(log_probs[::2], behind)
            if self._reads_rates:
                lens[cells] = _word_and_entropy(behind, every_word[cells])
        lens = lens.view(n_rows, n_layers, 2)
        # The last layer's lens reads the final state, normed a second time.
        for rows, log_probs in self.batch.log_probs(final, is_normed=False):
            lens[rows, -1] = _word_and_entropy(log_probs, words[rows])
        matches, entropies = (lens[..., 0] - best[:, None]).exp(), lens[..., 1]
        emphasis = (log_p_answer - best).exp()
        every = knowledge.view(n_rows, n_layers, 2)
        inner = matches[:, :-1], entropies[:, :-1]
        per_token = {
            "redeep_pks": every[..., 0],
            "redeep_pks_swapped": every[..., 1],
            "lumina_ipr": processing_rate(matches, entropies, emphasis),
            "lumina_ipr_inner": processing_rate(*inner, emphasis),
        }
        slices = self._rows.slices()
        return {name: mean_rows(per_token[name], slices) for name in self.wanted}

    def _likeliest(self, final: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each row's best log-probability, its word, and the answer's own."""
        ids = [i for answer in self.batch.answers for i in answer.token_ids]
        answer_ids = torch.tensor(ids, device=final.device, dtype=torch.long)
        best, log_p_answer = torch.zeros((2, len(ids)), device=final.device)
        words = torch.zeros_like(answer_ids)
        for rows, log_probs in self.batch.log_probs(final, is_normed=True):
            best[rows], words[rows] = log_probs.max(-1)
            log_p_answer[rows] = log_probs.gather(1, answer_ids[rows, None])[:, 0]
        return best, words, log_p_answer


def _word_and_entropy(log_probs: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return `[n_rows, 2]`: log-probability of each row's word, and entropy in nats."""
    chunks = log_probs.split(rows_in_cache(log_probs))
    entropies = torch.cat([_entropy(chunk) for chunk in chunks])
    return torch.stack([log_probs.gather(1, words[:, None])[:, 0], entropies], dim=-1)


class Discrepancies(Part):
    """The mean discrepancy, a scalar from a second pass; NaN without other passages."""

    names = ("lumina_mmd",)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read the answer after the other passages."""
        batch = self.batch
        cells = zip(batch.answers, batch.swapped, batch.predictor_edges, strict=True)
        ids, edges, answer_edges = [], [], []
        for answer, prompt, edge in cells:
            if prompt is None or not answer.token_ids:
                answer_edges.append((0, 0))
                continue
            answer_edges.append(edge)
            ids.append(np.array(prompt + answer.token_ids))
            edges.append((len(prompt) - 1, len(ids[-1]) - 1))
        if not ids:
            return {"lumina_mmd": [torch.tensor(torch.nan)] * len(answer_edges)}
        padded = pad_batch(ids, batch.backbone.device)
        other = final_states(batch.backbone.layout, padded, batch.beginning)
        other = TokenRows(edges, padded.shape[1], batch.backbone.device).of(other)
        rows = batch.rows(answer_edges)
        embeddings = batch.backbone.model.get_input_embeddings().weight
        pairs = zip(
            batch.log_probs(rows.of(final), is_normed=True),
            batch.log_probs(other, is_normed=True),
            strict=True,
        )
        values = torch.cat([discrepancy(p, q, embeddings) for (_, p), (_, q) in pairs])
        return {"lumina_mmd": mean_rows(values, rows.slices())}


class ExactAnswerStates(Part):
    """Feed-forward contributions at the last answer token, `[n_layers, d_model]`.

    A short answer is its own exact answer, so no model has to find one in the text.
    Contributions are what the layer adds to the stream, after the norm of a sandwich
    block (Gemma 3); in the paper's models they are the MLP's output.
    """

    names = ("mlp_exact_answer",)

    @cached_property
    def _rows(self) -> TokenRows:
        return self.batch.rows([(n - 1, n) for n in self.batch.lengths])

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Keep the last token's contribution."""
        self.add(layer_pass.index, self._rows.of(layer_pass.ffn).float())

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Return the contributions; NaN for an answer without tokens."""
        every = self.stacked()
        is_empty = [not answer.token_ids for answer in self.batch.answers]
        every[torch.tensor(is_empty, device=every.device)] = torch.nan
        return {"mlp_exact_answer": list(every)}


PARTS: tuple[type[Part], ...] = (
    HiddenScores,
    DiagonalScores,
    Entropies,
    Lookback,
    ContextScores,
    LensScores,
    Discrepancies,
    ExactAnswerStates,
    AttentionStatistics,
    StateTrace,
)
