"""ReDeEP's two scores (Sun et al., 2025): external context, parametric knowledge.

Followed: Jeryi-Sun/ReDEeP-ICLR at e969202, token level, at the positions that predict
the answer's tokens; here the mean over them. Its candidate "copying heads" are a list
per published model, made by a script that is lost: all heads are read, and whoever
trains the detector chooses.
"""

import math

import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.readings.part import Batch, Part, mean_rows, rows_in_cache

_SHARE = 0.1
_UNSEEN = -1e29
_WORDS = 2**15
_LEAST = 1e-37  # a float32 that is not subnormal


def n_attended(n_prompt: int) -> int:
    """Return how many prompt tokens count as attended: a tenth, at least one."""
    return max(1, math.floor(_SHARE * n_prompt))


def divergences(mid: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
    """Compare two next-token distributions P and Q of every row.

    Args:
      mid: `[n_rows, vocab_size]` log P.
      post: the same of Q.

    Returns:
      `[n_rows, 2]` nats, with M their mean: the Jensen-Shannon divergence, half of
      KL(P|M) + KL(Q|M), as in the paper; and half of KL(M|P) + KL(M|Q), what the
      official code computes with arguments exchanged (there a mean over words times a
      million, in half precision; here their sum).
    """
    found = mid.new_zeros((len(mid), 2))
    # A few rows at a time, and of these a block of words, which a CPU's cache holds for
    # all the passes over them.
    n_rows = rows_in_cache(mid)
    for start in range(0, len(mid), n_rows):
        rows = slice(start, start + n_rows)
        blocks = (mid[rows].split(_WORDS, -1), post[rows].split(_WORDS, -1))
        for p, q in zip(*blocks, strict=True):
            first, second = p.exp(), q.exp()
            between = (first + second).div_(2)
            # Where both underflow the term is zero, and so is what multiplies this.
            log_between = between.clamp_min(_LEAST).log_()
            from_mid, from_post = p - log_between, q - log_between
            found[rows, 0] += first.mul_(from_mid).sum(-1)
            found[rows, 0] += second.mul_(from_post).sum(-1)
            found[rows, 1] -= between.mul_(from_mid.add_(from_post)).sum(-1)
    return found / 2


class ContextScores(Part):
    """The external context score of every head, `[n_attention_layers, n_heads]`.

    The cosine between the final state that predicts a token and the mean final state
    of the tenth of the prompt that the head attends to most. Keys that a head does not
    see (a sliding window) never count; a position that sees none of the prompt is left
    out of the mean.
    """

    names = ("redeep_ecs",)
    reads_weights = True

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        # What is attended to is known before the final states are: `[n_heads, n_rows,
        # n_attended]` places per example and layer, minus one where a key is unseen.
        self._places: list[dict[int, list[torch.Tensor]]] = [{} for _ in batch.answers]

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Keep which prompt tokens some rows attend to most."""
        for example, (first, stop) in enumerate(self.batch.predictor_edges):
            own = slice(max(first - start, 0), max(stop - start, 0))
            n_prompt = first + 1
            rows = log_weights[example, :, own, :n_prompt]
            if rows.shape[1]:
                top = rows.topk(n_attended(n_prompt), dim=-1)
                places = top.indices.masked_fill_(top.values < _UNSEEN, -1).int()
            else:
                places = rows.new_empty((len(rows), 0, n_attended(n_prompt))).int()
            self._places[example].setdefault(layer, []).append(places)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Compare the states; NaN for an answer without tokens."""
        found = []
        for example, (first, stop) in enumerate(self.batch.predictor_edges):
            prompt = final[example, : first + 1].float()
            told = final[example, first:stop].float()
            scores = [
                _cosines(torch.cat(kept, dim=1).long(), prompt, told)
                for _, kept in sorted(self._places[example].items())
            ]
            found.append(torch.stack(scores))
        return {"redeep_ecs": found}


def _cosines(
    places: torch.Tensor, prompt: torch.Tensor, told: torch.Tensor
) -> torch.Tensor:
    """Return the mean cosine of every head, `[n_heads]`, from what it attends to."""
    n_prompt = len(prompt)
    counts = prompt.new_zeros((*places.shape[:2], n_prompt + 1))
    counts.scatter_(-1, places.masked_fill(places < 0, n_prompt), 1.0)
    chosen = counts[..., :n_prompt]
    # Cosines do not depend on the length, so the sum serves for the mean.
    cosines = torch.cosine_similarity(chosen @ prompt, told, dim=-1)
    return cosines.masked_fill(chosen.sum(-1) == 0, torch.nan).nanmean(-1)


class KnowledgeScores(Part):
    """The parametric knowledge score of every layer, `[n_layers]` in nats.

    How far a layer's feed-forward part moves the next-token distribution that the
    logit lens reads: the mean over the answer's tokens of `divergences`.
    """

    names = ("redeep_pks", "redeep_pks_swapped")

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        self._rows = batch.rows(batch.predictor_edges)
        # `[n_rows, 2, d_model]` each, before and behind the feed-forward part.
        self._pairs: list[torch.Tensor] = []

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Keep the stream before and behind the feed-forward part."""
        mid = self._rows.of(layer_pass.h_in) + self._rows.of(layer_pass.att)
        self._pairs.append(torch.stack([mid, self._rows.of(layer_pass.h_out)], dim=1))

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Compare all layers at once and average over the answer's tokens.

        NaN where there is none.
        """
        pairs = torch.stack(self._pairs, dim=1)
        n_rows, n_layers, _, width = pairs.shape
        states = pairs.reshape(-1, width)
        every = states.new_empty((n_rows * n_layers, 2), dtype=torch.float32)
        for rows, log_probs in self.batch.log_probs(states, is_normed=False):
            own = slice(rows.start // 2, rows.stop // 2)
            every[own] = divergences(log_probs[::2], log_probs[1::2])
            for show in self.batch.lenses:
                show(final, own, log_probs[1::2])
        every = every.view(n_rows, n_layers, 2)
        means = mean_rows(every, self._rows.slices())
        return {
            name: [m[:, k] for m in means]
            for k, name in enumerate(self.names)
            if name in self.wanted
        }
