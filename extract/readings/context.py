"""Does the answer follow its context? Lookback Lens, ReDeEP and LUMINA.

Lookback Lens (Chuang et al., 2024; voidism/Lookback-Lens at f2846ef,
step01_extract_attns.py): its context is the whole prompt before the answer cue, not the
passages alone as in the paper, and the cue counts among the new tokens, so that there
is one when the first token is predicted.

ReDeEP (Sun et al., 2025; Jeryi-Sun/ReDEeP-ICLR at e969202, token level): scores at the
positions that predict the answer's tokens; here the mean over them. Its candidate
"copying heads" are a list per published model, whose script is lost: all heads are
read, and whoever trains the detector chooses.

LUMINA (Yeh et al., 2026, arXiv 2509.21875; deeplearning-wisc/LUMINA at c43ff41): read
at the same positions and averaged. Where the model's words come from its own layers the
processing rate is high; where the passages decide them, so is the discrepancy to the
same answer read behind other passages.
"""

import math

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
from beatrice.extract.signals.batch import Rows, pad_batch
from beatrice.extract.signals.sequence import sequence_of


def lookback_ratio(
    weights: torch.Tensor, n_context: torch.Tensor, n_seen: torch.Tensor
) -> torch.Tensor:
    """Return the share of the mean weight on the context.

    Args:
      weights: `[n_examples, n_heads, n_rows, n_keys]`, zero for keys that a row does
        not see.
      n_context: `[n_examples]` keys of the context, the first ones; the others are new.
      n_seen: `[n_rows]` keys up to the row itself. Where it is not more than
        `n_context` what is returned means nothing.

    Returns:
      `[n_examples, n_heads, n_rows]` in [0, 1]: a / (a + b) of the two means, not of
      the sums.
    """
    is_context = torch.arange(weights.shape[-1], device=weights.device)
    is_context = (is_context < n_context[:, None])[:, None, :, None]
    sums = weights @ torch.cat([is_context, ~is_context], dim=-1).to(weights.dtype)
    n_context = n_context[:, None, None]
    context, new = sums[..., 0] / n_context, sums[..., 1] / (n_seen - n_context)
    return context / (context + new)


class Lookback(Part):
    """The mean ratio over the steps of the answer, `[n_attention_layers, n_heads]`.

    The steps are the positions that predict a token of the answer; that of the stop
    token is one, as in the official code.
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
        """Add the ratios of some rows; every row has its own number of new tokens."""
        n_examples, n_heads, _, n_keys = log_weights.shape
        added = log_weights.new_zeros((n_examples, n_heads))
        rows = torch.arange(start, n_keys, device=log_weights.device)
        rows = rows[max(0, self._least - start) :]
        if len(rows):
            weights = log_weights[:, :, n_keys - start - len(rows) :].exp()
            ratios = lookback_ratio(weights, self._n_context, rows + 1)
            first, stop = self._first[:, None], self._stop[:, None]
            in_answer = ((rows >= first) & (rows < stop))[:, None]
            added = ratios.masked_fill(~in_answer, 0.0).sum(-1)
        self.add(layer, added)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Divide by the steps; NaN for an answer without steps."""
        counts = (self._stop - self._first)[:, None, None]
        return {"lookback": list(self.stacked() / counts)}


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
    sums = mid.new_zeros((len(mid), 2))
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
            sums[rows, 0] += first.mul_(from_mid).sum(-1)
            sums[rows, 0] += second.mul_(from_post).sum(-1)
            sums[rows, 1] -= between.mul_(from_mid.add_(from_post)).sum(-1)
    return sums / 2


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
            some = slice(max(first - start, 0), max(stop - start, 0))
            n_prompt = first + 1
            rows = log_weights[example, :, some, :n_prompt]
            if rows.shape[1]:
                top = rows.topk(n_attended(n_prompt), dim=-1)
                indices = top.indices.masked_fill_(top.values < _UNSEEN, -1).int()
            else:
                indices = rows.new_empty((len(rows), 0, n_attended(n_prompt))).int()
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
    """Return the mean cosine of every head, `[n_heads]`, from what it attends to."""
    n_prompt = len(prompt)
    counts = prompt.new_zeros((*indices.shape[:2], n_prompt + 1))
    counts.scatter_(-1, indices.masked_fill(indices < 0, n_prompt), 1.0)
    chosen = counts[..., :n_prompt]
    # Cosines do not depend on the length, so the sum serves for the mean.
    cosines = torch.cosine_similarity(chosen @ prompt, predictors, dim=-1)
    return cosines.masked_fill(chosen.sum(-1) == 0, torch.nan).nanmean(-1)


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
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    embeddings: torch.Tensor,
    n_top: int = 100,
) -> torch.Tensor:
    """Return the squared maximum mean discrepancy of two next-token distributions.

    Of each the largest probabilities are kept, not renormalised; words are as near as
    (1 + cos) / 2 of their input embeddings. The double sums of the definition are half
    of (sum P - sum Q)^2 + |sum P e - sum Q e|^2, with e of length 1.

    Args:
      log_p: `[n_rows, vocab_size]`, behind the question's own passages.
      log_q: likewise, behind other passages.
      embeddings: `[≥ vocab_size, d_model]`, of the input.
      n_top: words kept, at most the vocabulary.

    Returns:
      `[n_rows]`, at least 0.
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
    """What the logit lens reads behind every layer where the answer is predicted.

    The parametric knowledge score of every layer, `[n_layers]` in nats: how far its
    feed-forward part moves the next-token distribution, the mean over the answer's
    tokens of `divergences`. And the information processing rate, a scalar:
    "lumina_ipr" reads every layer as the official code does, which norms the last
    state twice (Transformers' last hidden state is normed already); of
    "lumina_ipr_inner" the last layer is left out, as the paper's sum leaves it out.
    """

    names = (*_KNOWLEDGE, *_RATES)

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        self._rows = batch.rows(batch.predictor_edges)
        self._reads_knowledge = not wanted.isdisjoint(_KNOWLEDGE)
        self._reads_rates = not wanted.isdisjoint(_RATES)

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Keep the stream behind the layer, and before its feed-forward part."""
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
        # The last layer's lens is that of the final state, normed once more.
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
        """Return of every row the best log-probability, its word, the answer's own."""
        ids = [i for answer in self.batch.answers for i in answer.token_ids]
        answer_ids = torch.tensor(ids, device=final.device, dtype=torch.long)
        best, log_p_answer = torch.zeros((2, len(ids)), device=final.device)
        words = torch.zeros_like(answer_ids)
        for rows, log_probs in self.batch.log_probs(final, is_normed=True):
            best[rows], words[rows] = log_probs.max(-1)
            log_p_answer[rows] = log_probs.gather(1, answer_ids[rows, None])[:, 0]
        return best, words, log_p_answer


def _word_and_entropy(log_probs: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return `[n_rows, 2]`: the log-probability of each row's word, entropy in nats."""
    chunks = log_probs.split(rows_in_cache(log_probs))
    entropies = torch.cat([-(chunk.exp() * chunk).sum(-1) for chunk in chunks])
    return torch.stack([log_probs.gather(1, words[:, None])[:, 0], entropies], dim=-1)


class Discrepancies(Part):
    """The mean discrepancy: a scalar, NaN where no other passages are given.

    It costs a second forward, of the same answer ids behind the other prompt.
    """

    names = ("lumina_mmd",)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read the answer behind the other passages."""
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
        other = Rows(edges, padded.shape[1], batch.backbone.device).of(other)
        rows = batch.rows(answer_edges)
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
