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

    def first(self, n_tokens: int) -> "AttentionCall":
        """Return the call cut to the first tokens."""
        mask = self.mask
        return dataclasses.replace(
            self,
            query=self.query[:, :, :n_tokens],
            key=self.key[:, :, :n_tokens],
            mask=None if mask is None else mask[:, :, :n_tokens, :n_tokens],
        )

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
        hidden, first = self.hidden(start, stop)
        logits[..., first:].masked_fill_(hidden, _HIDDEN)
        return _centred(logits)

    def hidden(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Return which keys the rows `[start, stop)` do not see.

        Returns:
          Bool `[n_examples | 1, 1, stop - start, stop - first]`, and `first`: all
          keys before it are visible to all these rows.
        """
        first = start if self.mask is None else 0
        return self.visible(start, stop)[..., first:].logical_not(), first

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


def _exponentials(
    logits: torch.Tensor, hidden: tuple[torch.Tensor, int], out: torch.Tensor
) -> torch.Tensor:
    """Return exp of the logits, zero for hidden keys, whose logits become zero."""
    weights = out[: logits.numel()].view(logits.shape)
    is_hidden, first = hidden
    # An argument whose exponential underflows sends a CPU's vector units down a path
    # ten times as slow, so none is given to it.
    logits[..., first:].masked_fill_(is_hidden, 0.0)
    torch.exp(logits, out=weights)
    weights[..., first:].masked_fill_(is_hidden, 0.0)
    return weights


def _chunk_sums(
    logits: torch.Tensor,
    weights: torch.Tensor,
    is_key: torch.Tensor,
    is_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum a and a log a of one chunk of rows; overwrites the logits.

    With z the sum of e = exp(logit) over a row, a is e / z and a log a is
    (e logit - e log z) / z: everything follows from sums of e and of e logit, one
    exponential each, and the division happens after the sums.

    Args:
      logits: `[n_examples, n_heads, n_rows, n_keys]`.
      weights: their exponentials e.
      is_key: `[n_examples, 1, 3, n_keys]`: in context, in question, one.
      is_row: `[n_examples, 1, 2, n_rows]`: in question, in answer.

    Returns:
      `[2 (a, a log a), n_examples, n_heads, 2, n_rows]` over keys, the same with
      `n_keys` over rows, and z, `[n_examples, n_heads, 1, n_rows]`.
    """
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
    by_row = torch.stack([mass, plogp])
    return by_row, torch.stack([key_mass, key_plogp]), total


def _attended(
    weights: torch.Tensor, total: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return what rows attend to, `[n_examples, n_rows, n_heads, d_head]`."""
    n_examples, n_heads, n_rows, n_keys = weights.shape
    n_kv_heads = value.shape[1]
    grouped = weights.view(n_examples, n_kv_heads, -1, n_keys) @ value[:, :, :n_keys]
    output = grouped.view(n_examples, n_heads, n_rows, -1) / total.mT
    return output.transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What is filled chunk by chunk for one layer.

    Attributes:
      by_row: `[2 (a, a log a), n_examples, n_heads, 2, n_tokens]`, of every row over
        the keys in (context, question).
      by_key: the same of every key over the rows in (question, answer).
      attended: `[n_examples, n_rows, n_heads, d_head]`, or None where not wanted.
    """

    by_row: torch.Tensor
    by_key: torch.Tensor
    attended: torch.Tensor | None


def _empty_layer(
    call: AttentionCall, n_rows: int, value: torch.Tensor | None
) -> _Layer:
    """Return a layer with all sums zero."""
    n_examples, n_heads, n_tokens, _ = call.query.shape
    sums = call.query.new_zeros(
        (2, 2, n_examples, n_heads, 2, n_tokens), dtype=torch.float32
    )
    attended = None
    if value is not None:
        attended = value.new_empty((n_examples, n_rows, n_heads, value.shape[-1]))
    return _Layer(sums[0], sums[1], attended)


def _read_rows(
    call: AttentionCall,
    members: torch.Tensor,
    rows: tuple[int, int],
    budget: int,
    value: torch.Tensor | None,
) -> _Layer:
    """Sum a and a log a by span, along rows and along columns; attend if wanted."""
    n_examples, n_heads, n_tokens, _ = call.query.shape
    layer = _empty_layer(call, rows[1] - rows[0], value)
    is_key = members[:, None].float()
    is_key[:, :, 2] = 1.0
    is_row = members[:, None, 1:].float()
    # Heads lie apart in memory; a product per chunk would gather them every time.
    keys = call.key.float().contiguous()
    value = None if value is None else value.contiguous()
    per_row = n_examples * n_heads * n_tokens
    size = max(1, min(budget // per_row, rows[1] - rows[0])) * per_row
    # Reused by every chunk: fresh pages cost more than the sums on a CPU.
    buffers = torch.empty((2, size), device=keys.device)
    for start, stop in row_chunks(rows, per_row, budget):
        logits = call.logits(start, stop, keys, buffers[0])
        weights = _exponentials(logits, call.hidden(start, stop), buffers[1])
        row_sums, key_sums, total = _chunk_sums(
            logits, weights, is_key[..., :stop], is_row[..., start:stop]
        )
        layer.by_row[..., start:stop] = row_sums
        layer.by_key[..., :stop] += key_sums
        if value is not None:
            at = slice(start - rows[0], stop - rows[0])
            layer.attended[:, at] = _attended(weights, total, value)
    return layer


def span_readings(
    call: AttentionCall,
    members: torch.Tensor,
    rows: tuple[int, int],
    budget: int,
    value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read one layer's attention between spans.

    Args:
      call: queries, keys and mask.
      members: `[n_examples, 3, n_tokens]` bool, tokens of context, question, answer.
      rows: `[start, stop)` covering every question and answer token.
      budget: most attention weights alive at once.
      value: `[n_examples, n_kv_heads, n_tokens, d_head]` float32 to attend to with
        the weights that are there anyway, or None.

    Returns:
      `[n_examples, n_tokens, 2 (partner span), 2 (entropy in nats, mass), n_heads]`
      float32, and `[n_examples, stop - start, n_heads, d_head]` if `value` is given.
      Partners are the two other spans in the order context, question, answer. Tokens
      of no span, and empty or unseen partners, read zero.
    """
    layer = _read_rows(call, members, rows, budget, value)
    to_context, to_question = _entropy_and_mass(*layer.by_row).unbind(2)
    from_question, from_answer = _entropy_and_mass(*layer.by_key).unbind(2)
    in_context, in_question, in_answer = members[:, :, None, :, None].unbind(1)
    first = torch.where(in_context, from_question, to_context)
    second = torch.where(in_answer, to_question, from_answer)
    in_any = in_context | in_question | in_answer
    # [n_examples, n_heads, n_tokens, 2 (entropy, mass), 2 (partner)]
    both = torch.stack([first, second], dim=-1) * in_any[..., None]
    return both.permute(0, 2, 4, 3, 1), layer.attended
