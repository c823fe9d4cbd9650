"""Five scalars of each next-token distribution, without keeping a distribution.

The vocabulary is visited in blocks and the tokens in chunks, so that the only
vocabulary-sized memory is one block of logits. Sums over the vocabulary are kept
relative to a running maximum, as in an online softmax.
"""

import dataclasses

import torch

N_SCALARS = 5  # p(v), -log p(v), entropy, top p, margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The output side of a language model.

    Attributes:
      weight: `[vocab_size, d_model]`, W_U.
      bias: `[vocab_size]` or None.
      softcap: logits become `softcap * tanh(logits / softcap)`; None for no cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None

    def logits(self, states: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return float32 logits `[n, stop - start]` of final-normed states.

        Products of half-precision numbers are summed in float32: Transformers' own
        bf16 logits are spaced 0.125 apart around 16, which ties the two best tokens.
        """
        weight = self.weight[start:stop]
        if states.is_cuda and states.dtype != torch.float32:
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
        else:
            logits = states.float() @ weight.float().T
        if self.bias is not None:
            logits += self.bias[start:stop].float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def head_of(model: torch.nn.Module) -> Head:
    """Return the output side of a Transformers causal LM."""
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    return Head(
        weight=linear.weight,
        bias=linear.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _two_largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the two largest of every row, `[n, 2]`; a tie is two equal values.

    Four passes, and yet a quarter of the time of topk on a CPU.
    """
    first = logits.amax(1)
    is_first = logits == first[:, None]
    second = logits.masked_fill(is_first, -torch.inf).amax(1)
    return torch.stack([first, torch.where(is_first.sum(1) > 1, first, second)], 1)


class _OnlineSoftmax:
    """Running sums over vocabulary blocks for one chunk of tokens."""

    def __init__(self, targets: torch.Tensor) -> None:
        n_tokens = len(targets)
        device = targets.device
        self.targets = targets
        self.top = torch.full((n_tokens, 2), -torch.inf, device=device)
        self.total = torch.zeros(n_tokens, device=device)
        self.weighted = torch.zeros(n_tokens, device=device)
        self.target_logit = torch.full((n_tokens,), -torch.inf, device=device)

    def add(self, logits: torch.Tensor, start: int) -> None:
        """Add the logits of the words `[start, start + width)`; overwrites them."""
        width = logits.shape[1]
        local = self.targets - start
        found = logits.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
        is_here = (local >= 0) & (local < width)
        self.target_logit = torch.where(is_here, found, self.target_logit)
        best = torch.cat([self.top, _two_largest(logits)], dim=1)
        old_max, self.top = self.top[:, 0], best.topk(2, dim=1).values
        new_max = self.top[:, 0]
        # Shift the running sums to the new maximum. Before the first block the old
        # maximum is minus infinity and both sums are zero.
        shift = (old_max - new_max).nan_to_num(neginf=0.0)
        rescale = shift.exp()
        self.weighted = rescale * (self.weighted + shift * self.total)
        self.total = rescale * self.total
        centred = logits.sub_(new_max[:, None])
        weights = centred.exp()
        self.total += weights.sum(1)
        self.weighted += centred.mul_(weights).sum(1)

    def scalars(self) -> torch.Tensor:
        """Return `[n, 5]`."""
        log_total = self.total.log()
        log_p = self.target_logit - self.top[:, 0] - log_total
        entropy = (log_total - self.weighted / self.total).clamp_min(0.0)
        p_top = (self.top - self.top[:, :1] - log_total[:, None]).exp()
        margin = p_top[:, 0] - p_top[:, 1]
        # Adding zero turns the minus zero of a certain token into zero.
        return torch.stack([log_p.exp(), 0.0 - log_p, entropy, p_top[:, 0], margin], 1)


def token_probabilities(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    n_tokens_per_chunk: int,
    n_words_per_block: int,
) -> torch.Tensor:
    """Read the next-token distribution at every position (section 3.2).

    Args:
      states: `[n_tokens, d_model]`, final-normed.
      targets: `[n_tokens]` int64, v_t.
      head: W_U with its bias and softcap.
      n_tokens_per_chunk: rows of one block of logits.
      n_words_per_block: columns of one block of logits; at least 2.

    Returns:
      `[n_tokens, 5]` float32: p(v_t), surprisal of v_t in nats, entropy in nats, top
      probability, margin between the two largest probabilities.
    """
    vocab_size = head.weight.shape[0]
    chunks = []
    for start in range(0, len(states), n_tokens_per_chunk):
        rows = slice(start, start + n_tokens_per_chunk)
        sums = _OnlineSoftmax(targets[rows])
        for word in range(0, vocab_size, n_words_per_block):
            stop = min(word + n_words_per_block, vocab_size)
            sums.add(head.logits(states[rows], word, stop), word)
        chunks.append(sums.scalars())
    return torch.cat(chunks)
