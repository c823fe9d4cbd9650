"""LUMINA's two scores (Yeh et al., 2026, arXiv 2509.21875).

Followed: deeplearning-wisc/LUMINA (c43ff41), read at the positions that predict the
answer's tokens and averaged over them. Where the model's words come from its own
layers the processing rate is high; where the passages decide them, so is the
discrepancy to the same answer read behind other passages.
"""

from collections.abc import Sequence

import numpy as np
import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.readings.beginning import final_states
from beatrice.extract.readings.part import Batch, Part, mean_rows, rows_in_cache
from beatrice.extract.signals.batch import Rows, pad_batch
from beatrice.extract.signals.probability import token_probabilities

_N_TOP = 100
_GUARD = 1e-8  # of the official code, under an entropy that divides


def processing_rate(
    matches: torch.Tensor, entropies: torch.Tensor, emphasis: torch.Tensor
) -> torch.Tensor:
    """Return the information processing rate of every token.

    Args:
      matches: `[n_tokens, n_layers]`: what each layer's lens gives to the word that the
        model finds likeliest, divided by what the model gives it.
      entropies: `[n_tokens, n_layers]` nats, of each layer's lens.
      emphasis: `[n_tokens]`: the answer's token's probability divided by that word's.

    Returns:
      `[n_tokens]`: with l from 1, the sum of l (1 - min(match, 1)) over that of
      l / entropy, times the emphasis. The last factor stands in the code alone.
    """
    weights = torch.arange(1, matches.shape[-1] + 1, device=matches.device)
    late = (weights * (1 - matches.clamp_max(1.0))).sum(-1)
    return late / (weights / (entropies + _GUARD)).sum(-1) * emphasis


def discrepancy(
    own: torch.Tensor, other: torch.Tensor, embeddings: torch.Tensor, n_top: int = 100
) -> torch.Tensor:
    """Return the squared maximum mean discrepancy of two next-token distributions.

    Of each the largest probabilities are kept, not renormalised; words are as near as
    (1 + cos) / 2 of their input embeddings. The double sums of the definition are half
    of (sum P - sum Q)^2 + |sum P e - sum Q e|^2, with e of length 1.

    Args:
      own: `[n_rows, vocab_size]` log P, behind the question's own passages.
      other: the same of Q, behind others.
      embeddings: `[≥ vocab_size, d_model]`, of the input.
      n_top: words kept, at most the vocabulary.

    Returns:
      `[n_rows]`, at least 0.
    """
    total, mean = 0.0, 0.0
    for sign, log_probs in ((1, own), (-1, other)):
        top = log_probs.topk(min(n_top, log_probs.shape[-1]), dim=-1)
        unit = torch.nn.functional.normalize(embeddings[top.indices].float(), dim=-1)
        weights = sign * top.values.exp()
        total = total + weights.sum(-1)
        mean = mean + (weights[..., None] * unit).sum(-2)
    return (total.square() + mean.square().sum(-1)) / 2


class ProcessingRates(Part):
    """The information processing rate: a scalar.

    "lumina_ipr" reads every layer as the official code does, which norms the last
    state twice (Transformers' last hidden state is normed already); of
    "lumina_ipr_inner" the last layer is left out, as the paper's sum leaves it out.
    """

    names = ("lumina_ipr", "lumina_ipr_inner")

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        self._rows = batch.rows(batch.predictor_edges)
        # Kept until the model's own likeliest word is known: `[n_rows, d_model]` each.
        self._states: list[torch.Tensor] = []
        self._told: tuple[torch.Tensor, ...] | None = None
        # Of `_lenses`, where another part's lens reads the same states.
        self._shown: torch.Tensor | None = None
        if wanted & {"redeep_pks", "redeep_pks_swapped"}:
            batch.lenses.append(self._show)

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Keep the states that predict the answer."""
        if layer_pass.index < self.batch.backbone.n_layers - 1:
            self._states.append(self._rows.of(layer_pass.h_out))

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read every layer's lens; NaN for an answer without tokens."""
        states = self._rows.of(final)
        best, best_word, log_told = self._likeliest(final)
        if self._shown is None:
            log_match, entropies = self._lenses((*self._states, states), best_word)
        else:
            log_match, entropies = self._shown.unbind(-1)
            last = self._lenses((states,), best_word)
            log_match[:, -1:], entropies[:, -1:] = last
        matches, emphasis = (log_match - best[:, None]).exp(), (log_told - best).exp()
        n_layers = matches.shape[1]
        found = {}
        for name, n_read in zip(self.names, (n_layers, n_layers - 1), strict=True):
            if name in self.wanted:
                parts = matches[:, :n_read], entropies[:, :n_read]
                rates = processing_rate(*parts, emphasis)
                found[name] = mean_rows(rates, self._rows.slices())
        return found

    def _likeliest(self, final: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return of every row the best log-probability, its word, the answer's own."""
        if self._told is not None:
            return self._told
        states = self._rows.of(final)
        ids = [i for answer in self.batch.answers for i in answer.token_ids]
        told = torch.tensor(ids, device=states.device, dtype=torch.long)
        best, best_word, log_told = (states.new_zeros(len(told)) for _ in range(3))
        best, log_told, best_word = best.float(), log_told.float(), best_word.long()
        for rows, log_probs in self.batch.log_probs(states, is_normed=True):
            best[rows], best_word[rows] = log_probs.max(-1)
            log_told[rows] = log_probs.gather(1, told[rows, None])[:, 0]
        self._told = best, best_word, log_told
        return self._told

    def _show(self, final: torch.Tensor, cells: slice, log_probs: torch.Tensor) -> None:
        """Keep of another part's lens what `_lenses` would return, see `Batch`."""
        words, n_layers = self._likeliest(final)[1], self.batch.backbone.n_layers
        if self._shown is None:
            self._shown = words.new_empty(
                (len(words), n_layers, 2), dtype=torch.float32
            )
        own = words.repeat_interleave(n_layers)[cells, None]
        parts = log_probs.split(rows_in_cache(log_probs))
        entropies = torch.cat([-(part.exp() * part).sum(-1) for part in parts])
        found = torch.stack([log_probs.gather(1, own)[:, 0], entropies], dim=-1)
        self._shown.view(-1, 2)[cells] = found

    def _lenses(
        self, layers: Sequence[torch.Tensor], words: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[n_rows, n_layers]`: the words' log-probability, entropy in nats."""
        backbone, head, budget = self.batch.backbone, self.batch.head, self.batch.budget
        states = torch.stack(tuple(layers), dim=1)
        n_rows, n_layers, width = states.shape
        if not n_rows:
            return states.new_zeros((0, n_layers)), states.new_zeros((0, n_layers))
        normed = backbone.layout.final_norm(states.to(head.weight.dtype))
        scalars = token_probabilities(
            normed.view(-1, width),
            words.repeat_interleave(n_layers),
            head,
            n_tokens_per_chunk=budget.n_tokens_per_chunk,
            n_words_per_block=budget.n_words_per_block,
        ).view(n_rows, n_layers, -1)
        return -scalars[..., 1], scalars[..., 2]


class Discrepancies(Part):
    """The mean discrepancy: a scalar, NaN where no other passages are given.

    It costs a second forward, of the same answer ids behind the other prompt.
    """

    names = ("lumina_mmd",)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read the answer behind the other passages."""
        batch = self.batch
        cells = zip(batch.answers, batch.swapped, batch.predictor_edges, strict=True)
        ids, edges, own_edges = [], [], []
        for answer, prompt, own in cells:
            is_read = prompt is not None and len(answer.token_ids) > 0
            own_edges.append(own if is_read else (0, 0))
            if is_read:
                ids.append(np.array(prompt + answer.token_ids))
                edges.append((len(prompt) - 1, len(ids[-1]) - 1))
        if not ids:
            return {"lumina_mmd": [torch.tensor(torch.nan)] * len(own_edges)}
        padded = pad_batch(ids, batch.backbone.device)
        other = final_states(batch.backbone.layout, padded, batch.beginning)
        other = Rows(edges, padded.shape[1], batch.backbone.device).of(other)
        rows = batch.rows(own_edges)
        embeddings = batch.backbone.model.get_input_embeddings().weight
        pairs = zip(
            batch.log_probs(rows.of(final), is_normed=True),
            batch.log_probs(other, is_normed=True),
            strict=True,
        )
        values = torch.cat(
            [discrepancy(p, q, embeddings, _N_TOP) for (_, p), (_, q) in pairs]
        )
        return {"lumina_mmd": mean_rows(values, rows.slices())}
