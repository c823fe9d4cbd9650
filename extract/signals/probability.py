"""Five scalars of each next-token distribution, without storing a distribution.

The vocabulary is processed in blocks and the tokens in chunks. Memory holds a block of
logits and one of exponentials, and sums over the vocabulary as in an online softmax.
"""

import contextlib
import dataclasses
from typing import Any

import torch

from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.precision import products_of_bfloat16

# Exponentials alive at once on a CPU: a quarter of the level-2 cache of two cores.
_N_CACHED = 2**18
# Numbers of the vocabulary's matrix that are widened to float32 at once on a CPU. The
# memory of larger copies comes anew from the system, which takes three times as long.
_N_WIDENED = 2**22
# This far from the shift, logits lose two millionths of a nat, and none overflows.
_FARTHEST = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The output side of a language model."""

    weight: torch.Tensor  # `[vocab_size, d_model]`, W_U
    bias: torch.Tensor | None  # `[vocab_size]` or None
    # Logits become `softcap * tanh(logits / softcap)`; None for no cap.
    softcap: float | None
    scale: float = 1.0  # multiplies the logits (Cohere, Granite), before the cap

    def rows(self, words: torch.Tensor) -> torch.Tensor:
        """Return the float32 rows `[…, d_model]` of W_U for token ids `[…]`.

        They include the logit scale: a push is how much a contribution changes the
        logit of the emitted token (section 3.2), and the model's logits are scaled.
        """
        return self.weight[words].float() * self.scale

    def n_words_at_once(self, budget: ReadingBudget) -> int:
        """Return how many entries of the vocabulary to multiply at once."""
        vocab_size, d_model = self.weight.shape
        n_words = min(budget.n_words_per_block, vocab_size)
        if self.weight.is_cuda or self.weight.dtype == torch.float32:
            return n_words
        return min(n_words, _N_WIDENED // d_model)

    def logits(
        self,
        states: torch.Tensor,
        start: int,
        stop: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return float32 logits `[n, stop - start]` of normed states `[n, d_model]`.

        Products of half-precision numbers are summed in float32: Transformers' own
        bf16 logits are spaced 0.125 apart around 16, which ties the two best tokens.
        """
        weight = self.weight[start:stop]
        if states.is_cuda and states.dtype != torch.float32:
            logits = torch.mm(states, weight.T, out_dtype=torch.float32, out=out)
        else:
            is_exact = states.dtype == weight.dtype == torch.bfloat16
            with products_of_bfloat16() if is_exact else contextlib.nullcontext():
                logits = torch.mm(states.float(), weight.float().T, out=out)
        if self.bias is not None:
            logits += self.bias[start:stop].float()
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def head_of(model: Any) -> Head:
    """Return the output side of a Transformers causal LM."""
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    # HyperCLOVA X multiplies by the entry that Granite and MiniCPM divide by.
    multiplies = config.model_type.startswith("hyperclovax")
    return Head(
        scale=scale * scaling if multiplies else scale / scaling,
        weight=linear.weight,
        bias=linear.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _candidates(logits: torch.Tensor) -> torch.Tensor:
    """Return a few values of every row that include its two largest.

    Takes one pass over the logits, a tenth of topk's cost on a CPU: the vocabulary is
    split into interleaved columns, and the largest of each is taken. The two largest
    are among the best column, the largest of the second-best, and the remainder.
    """
    width = logits.shape[1]
    n_columns = min(128, width)
    n_split = width // n_columns * n_columns
    split = logits[:, :n_split].unflatten(1, (-1, n_columns))
    best = split.amax(1).topk(min(2, n_columns), dim=1)
    column = best.indices[:, None, :1].expand(-1, split.shape[1], 1)
    members = split.gather(2, column)[..., 0]
    return torch.cat([members, best.values[:, 1:], logits[:, n_split:]], dim=1)


class _OnlineSoftmax:
    """Running sums over vocabulary blocks for one chunk of tokens.

    Sums are relative to a shift per token, which loosely follows the largest logit:
    subtracting it costs a pass over the block, saved while it stays zero.
    """

    def __init__(self, targets: torch.Tensor) -> None:
        n_tokens = len(targets)
        device = targets.device
        self.targets = targets
        self.top = torch.full((n_tokens, 2), -torch.inf, device=device)
        self.shift = torch.zeros(n_tokens, device=device)
        self.is_shifted = False
        self.total = torch.zeros(n_tokens, device=device)
        self.weighted = torch.zeros(n_tokens, device=device)
        self.target_logit = torch.full((n_tokens,), -torch.inf, device=device)

    def add(self, logits: torch.Tensor, start: int, buffer: torch.Tensor) -> None:
        """Add the logits of the token ids `[start, start + width)`.

        Overwrites the logits and `buffer`, which is flat and holds at least a row.
        """
        n_tokens, width = logits.shape
        local = self.targets - start
        logit = logits.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
        is_here = (local >= 0) & (local < width)
        self.target_logit = torch.where(is_here, logit, self.target_logit)
        best = torch.cat([self.top, _candidates(logits)], dim=1)
        self.top = best.topk(2, dim=1).values
        self._follow(self.top[:, 0])
        # A few rows at a time, so that they stay in the cache for all four passes.
        n_rows = max(1, len(buffer) // width)
        for row in range(0, n_tokens, n_rows):
            self._add_rows(logits, slice(row, row + n_rows), buffer)

    def _add_rows(self, block: torch.Tensor, rows: slice, buffer: torch.Tensor) -> None:
        """Add exponentials, and exponentials times logits, of some rows of a block."""
        logits = block[rows]
        if self.is_shifted:
            logits.sub_(self.shift[rows, None])
        weights = torch.exp(logits, out=buffer[: logits.numel()].view(logits.shape))
        self.total[rows] += weights.sum(1)
        self.weighted[rows] += weights.mul_(logits).sum(1)

    def _follow(self, largest: torch.Tensor) -> None:
        """Move the shift to the largest logit of each token if any is too far away."""
        # On a GPU the pass costs nothing, but the check would wait for the device.
        is_near = not largest.is_cuda and bool(
            ((largest - self.shift).abs() <= _FARTHEST).all()
        )
        if is_near:
            return
        step = self.shift - largest
        # Before the first block, the sums are zero whatever the step.
        rescale = step.exp().masked_fill_(self.total == 0, 0.0)
        self.weighted = rescale * (self.weighted + step * self.total)
        self.total = rescale * self.total
        self.shift, self.is_shifted = largest, True

    def scalars(self) -> torch.Tensor:
        """Return the five scalars `[n, 5]`, see `token_probabilities`."""
        log_total = self.total.log()
        log_p = self.target_logit - self.shift - log_total
        entropy = (log_total - self.weighted / self.total).clamp_min(0.0)
        p_top = (self.top - (self.shift + log_total)[:, None]).exp()
        margin = p_top[:, 0] - p_top[:, 1]
        # Subtracting from zero avoids minus zero when the token is certain.
        return torch.stack([log_p.exp(), 0.0 - log_p, entropy, p_top[:, 0], margin], 1)


def scalars_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return `token_probabilities` of float32 logits `[n_tokens, vocab_size]`."""
    sums = _OnlineSoftmax(targets)
    n_cached = max(logits.shape[1], _N_CACHED)
    buffer = logits.new_empty(logits.numel() if logits.is_cuda else n_cached)
    sums.add(logits.clone(), 0, buffer)
    return sums.scalars()


def token_probabilities(
    states: torch.Tensor, targets: torch.Tensor, head: Head, budget: ReadingBudget
) -> torch.Tensor:
    """Read the next-token distribution at every position (section 3.2).

    `states` are `[n_tokens, d_model]` after the final norm, `targets` v_t `[n_tokens]`
    int64. Returns `[n_tokens, 5]` float32: p(v_t), surprisal of v_t in nats, entropy in
    nats, top probability, margin between the two largest probabilities.
    """
    vocab_size = head.weight.shape[0]
    n_tokens = min(budget.n_tokens_per_chunk, len(states))
    n_words = head.n_words_at_once(budget)
    n_block = n_tokens * n_words
    n_cached = n_block if states.is_cuda else max(n_words, _N_CACHED)
    # Reused by every block: on a CPU, fresh pages cost more than the sums.
    block = states.new_empty(n_block, dtype=torch.float32)
    buffer = states.new_empty(n_cached, dtype=torch.float32)
    chunks = []
    for start in range(0, len(states), budget.n_tokens_per_chunk):
        rows = slice(start, start + n_tokens)
        sums = _OnlineSoftmax(targets[rows])
        for word in range(0, vocab_size, n_words):
            stop = min(word + n_words, vocab_size)
            shape = (len(sums.targets), stop - word)
            logits = block[: shape[0] * shape[1]].view(shape)
            head.logits(states[rows], word, stop, out=logits)
            sums.add(logits, word, buffer)
        chunks.append(sums.scalars())
    return torch.cat(chunks)
