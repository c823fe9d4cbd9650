"""The arithmetic of attention between spans: entropies and masses from q and k.

For an earlier span U and a later span V (section 3.2): a token t of V gets, for U,
the entropy of its weights normalised over U and their sum ("out"); a token s of U
gets, for V, the entropy of the weights that V sends to it, normalised over V, and
their sum ("in"). With three ordered spans every token has two partner spans. With m
the sum of weights a, the entropy is log m - (sum of a log a) / m, so two sums per
span suffice and no map is kept.
"""

import dataclasses
from collections.abc import Iterator

import torch

# Below this mass float32 terms are subnormal: they have few digits on a CPU and are
# flushed to zero on some devices, so the entropy would be noise.
_ZERO_MASS = 1e-30
# A logit this far from zero costs one millionth of a nat in float32.
_FARTHEST = 16.0
_HIDDEN = -1e30  # finite, so that zero weight times its log is zero and not NaN


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What a model hands to its attention function.

    Attributes:
      query: `[n_examples, n_heads, n_tokens, d_head]`.
      key: `[n_examples, n_kv_heads, n_tokens, d_head]`; query head h uses the kv
        head `h // (n_heads / n_kv_heads)`.
      mask: None (causal), or bool `[n_examples | 1, 1, n_tokens, n_tokens]`, True =
        visible.
      scaling: multiplies the logits.
      softcap: bounds the scaled logits (Gemma 2), or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    softcap: float | None

    def logits(
        self,
        start: int,
        stop: int,
        keys: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention logits of the rows `[start, stop)`, in float32.

        Keys from `stop` on are invisible to all these rows and left out.

        Args:
          start: first row.
          stop: row behind the last.
          keys: `self.key` in float32, for who calls often.
          out: a flat buffer to write to; None makes a new tensor.

        Returns:
          `[n_examples, n_heads, stop - start, stop]`; invisible keys are hugely
          negative, the largest of a row is near zero.
        """
        n_examples, n_heads, _, d_head = self.query.shape
        n_kv_heads = self.key.shape[1]
        query = self.query[:, :, start:stop].float() * self.scaling
        query = query.reshape(n_examples, n_kv_heads, -1, d_head)
        # Upcast before the product: logits rounded to bf16 move weights by percents.
        keys = (self.key.float() if keys is None else keys)[:, :, :stop].mT
        if out is not None:
            out = out[: query.shape[2] * query.shape[1] * n_examples * stop]
            out = out.view(n_examples, n_kv_heads, -1, stop)
        logits = torch.matmul(query, keys, out=out)
        logits = logits.view(n_examples, n_heads, stop - start, stop)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        self._hide(logits, start, stop)
        return _centred(logits)

    def _hide(self, logits: torch.Tensor, start: int, stop: int) -> None:
        """Overwrite the logits of invisible keys."""
        if self.mask is None:  # every row sees all keys before the first row
            hidden = self.visible(start, stop)[..., start:].logical_not()
            logits[..., start:].masked_fill_(hidden, _HIDDEN)
        else:
            logits.masked_fill_(~self.visible(start, stop), _HIDDEN)

    def visible(self, start: int, stop: int) -> torch.Tensor:
        """Return the bool mask `[n_examples | 1, 1, stop - start, stop]`."""
        if self.mask is not None:
            return self.mask[:, :, start:stop, :stop]
        positions = torch.arange(stop, device=self.query.device)
        return (positions <= positions[start:, None])[None, None]


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Subtract each row's largest, if that is needed by one."""
    largest = logits.amax(-1, keepdim=True)
    # A pass over all weights, saved where exponentials are exact without it. On a
    # GPU the pass is nothing and the question would wait for the device.
    if not logits.is_cuda and bool((largest.abs() <= _FARTHEST).all()):
        return logits
    return logits.sub_(largest)


def _entropy_and_mass(mass: torch.Tensor, plogp: torch.Tensor) -> torch.Tensor:
    """Turn sums of a and a log a into (entropy in nats, mass), stacked last."""
    is_empty = mass < _ZERO_MASS
    safe = mass.masked_fill(is_empty, 1.0)
    entropy = (safe.log() - plogp / safe).clamp_min_(0.0).masked_fill_(is_empty, 0.0)
    return torch.stack([entropy, mass.masked_fill(is_empty, 0.0)], dim=-1)


def row_chunks(
    rows: tuple[int, int], n_weights_per_row: int, budget: int
) -> Iterator[tuple[int, int]]:
    """Split rows into chunks of at most `budget` weights, of at least one row."""
    size = max(1, budget // max(1, n_weights_per_row))
    for start in range(*rows, size):
        yield start, min(start + size, rows[1])


def _chunk_sums(
    logits: torch.Tensor,
    weights: torch.Tensor,
    is_key: torch.Tensor,
    is_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a and a log a of one chunk of rows; overwrites logits and weights.

    With z the sum of e = exp(logit) over a row, a is e / z and a log a is
    (e logit - e log z) / z: everything follows from sums of e and of e logit, one
    exponential each, and the division happens after the sums.

    Args:
      logits: `[n_examples, n_heads, n_rows, n_keys]`.
      weights: a flat buffer at least as large.
      is_key: `[n_examples, 1, 3, n_keys]`: in context, in question, one.
      is_row: `[n_examples, 1, 2, n_rows]`: in question, in answer.

    Returns:
      `[2 (a, a log a), n_examples, n_heads, 2, n_rows]` over keys, and the same with
      `n_keys` over rows.
    """
    weights = weights[: logits.numel()].view(logits.shape)
    torch.exp(logits, out=weights)
    weighted = logits.mul_(weights)
    # The skinny operand comes first: the other order is six times slower on a CPU.
    sums = is_key @ weights.mT
    total = sums[..., 2:, :]
    log_total = total.log()
    mass = sums[..., :2, :] / total
    plogp = is_key[..., :2, :] @ weighted.mT / total - mass * log_total
    row = is_row / total
    both = torch.cat([row, row * log_total], dim=2) @ weights
    key_mass, key_log_total = both.split(2, dim=2)
    key_plogp = row @ weighted - key_log_total
    return torch.stack([mass, plogp]), torch.stack([key_mass, key_plogp])


def _span_sums(
    call: AttentionCall, members: torch.Tensor, rows: tuple[int, int], budget: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a and a log a by span, along rows and along columns.

    Returns:
      Two tensors `[2 (a, a log a), n_examples, n_heads, 2, n_tokens]`: of every row
      over the keys in (context, question), and of every key over the rows in
      (question, answer).
    """
    n_examples, n_heads, n_tokens, _ = call.query.shape
    shape = (2, n_examples, n_heads, 2, n_tokens)
    by_row = torch.zeros(shape, device=call.query.device)
    by_key = torch.zeros(shape, device=call.query.device)
    is_key = members[:, None].float()
    is_key[:, :, 2] = 1.0
    is_row = members[:, None, 1:].float()
    keys = call.key.float()
    per_row = n_examples * n_heads * n_tokens
    size = max(1, min(budget // per_row, rows[1] - rows[0])) * per_row
    # Reused by every chunk: fresh pages cost more than the sums on a CPU.
    buffers = torch.empty((2, size), device=keys.device)
    for start, stop in row_chunks(rows, per_row, budget):
        row_sums, key_sums = _chunk_sums(
            call.logits(start, stop, keys, buffers[0]),
            buffers[1],
            is_key[..., :stop],
            is_row[..., start:stop],
        )
        by_row[..., start:stop] = row_sums
        by_key[..., :stop] += key_sums
    return by_row, by_key


def span_readings(
    call: AttentionCall, members: torch.Tensor, rows: tuple[int, int], budget: int
) -> torch.Tensor:
    """Read one layer's attention between spans.

    Args:
      call: queries, keys and mask.
      members: `[n_examples, 3, n_tokens]` bool, tokens of context, question, answer.
      rows: `[start, stop)` covering every question and answer token.
      budget: most attention weights alive at once.

    Returns:
      `[n_examples, n_tokens, 2 (partner span), 2 (entropy in nats, mass), n_heads]`
      float32. Partners are the two other spans in the order context, question,
      answer. Tokens of no span, and empty or unseen partners, read zero.
    """
    sums_by_row, sums_by_key = _span_sums(call, members, rows, budget)
    to_context, to_question = _entropy_and_mass(*sums_by_row).unbind(2)
    from_question, from_answer = _entropy_and_mass(*sums_by_key).unbind(2)
    in_context, in_question, in_answer = members[:, :, None, :, None].unbind(1)
    first = torch.where(in_context, from_question, to_context)
    second = torch.where(in_answer, to_question, from_answer)
    in_any = in_context | in_question | in_answer
    # [n_examples, n_heads, n_tokens, 2 (entropy, mass), 2 (partner)]
    both = torch.stack([first, second], dim=-1) * in_any[..., None]
    return both.permute(0, 2, 4, 3, 1)
