"""The arithmetic of attention between spans: entropies and masses from q and k.

For an earlier span U and a later span V (section 3.2): a token t of V gets, for U,
the entropy of its weights normalised over U and their sum ("out"); a token s of U
gets, for V, the entropy of the weights that V sends to it, normalised over V, and
their sum ("in"). With three ordered spans every token has two partner spans. With m
the sum of weights a, the entropy is log m - (sum of a log a) / m, so two sums per
span suffice and no map is kept.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch

# Below this mass float32 terms are subnormal: they have few digits on a CPU and are
# flushed to zero on some devices, so the entropy would be noise.
_ZERO_MASS = 1e-30
_HIDDEN = -1e30  # finite, so that zero weight times its log is zero and not NaN


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What a model hands to its attention function.

    Attributes:
      query: `[n_examples, n_heads, n_tokens, d_head]`.
      key: `[n_examples, n_kv_heads, n_tokens, d_head]`; query head h uses the kv
        head `h // (n_heads / n_kv_heads)`.
      mask: None (causal), or bool `[n_examples | 1, n_heads | 1, n_tokens, n_tokens]`,
        True = visible.
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
          negative.
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
        return logits

    def _hide(self, logits: torch.Tensor, start: int, stop: int) -> None:
        """Overwrite the logits of keys that the rows `[start, stop)` do not see."""
        if self.mask is not None:
            visible = self.mask[:, :, start:stop, :stop]
            logits.masked_fill_(visible.logical_not(), _HIDDEN)
            return
        rows = torch.arange(stop - start, device=logits.device)
        # Every row sees all keys before the first row.
        logits[..., start:].masked_fill_(rows > rows[:, None], _HIDDEN)


def _entropy_and_mass(mass: torch.Tensor, plogp: torch.Tensor) -> torch.Tensor:
    """Turn sums of a and a log a into (entropy in nats, mass), stacked last."""
    is_empty = mass < _ZERO_MASS
    safe = mass.masked_fill(is_empty, 1.0)
    entropy = (safe.log() - plogp / safe).clamp_min_(0.0).masked_fill_(is_empty, 0.0)
    return torch.stack([entropy, mass.masked_fill(is_empty, 0.0)], dim=-1)


def row_chunks(
    rows: tuple[int, int], n_weights_per_row: int, budget: int
) -> Iterator[tuple[int, int]]:
    """Split rows into even chunks of at most `budget` weights, or of one row."""
    n_rows = rows[1] - rows[0]
    n_chunks = math.ceil(n_rows / max(1, budget // n_weights_per_row))
    size = math.ceil(n_rows / max(1, n_chunks))
    for start in range(*rows, max(1, size)):
        yield start, min(start + size, rows[1])


def _weights_and_terms(
    logits: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights a and the terms a log a; overwrites the logits.

    One exponential per weight: with the largest logit m and its weight w, the
    logarithm of a row's normaliser is m - log w.
    """
    weights = torch.softmax(logits, -1, out=out.view(logits.shape))
    largest = logits.amax(-1, keepdim=True)
    log_total = largest.sub_(weights.amax(-1, keepdim=True).log_())
    return weights, logits.sub_(log_total).mul_(weights)


def _attended(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return what rows attend to, `[n_examples, n_rows, n_heads, d_head]`."""
    n_examples, n_heads, n_rows, n_keys = weights.shape
    n_kv_heads = value.shape[1]
    grouped = weights.view(n_examples, n_kv_heads, -1, n_keys) @ value[:, :, :n_keys]
    return grouped.view(n_examples, n_heads, n_rows, -1).transpose(1, 2)


def _read_rows(
    call: AttentionCall,
    members: torch.Tensor,
    rows: tuple[int, int],
    budget: int,
    value: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sum a and a log a by span, along rows and along columns; attend if wanted.

    Returns:
      `[2 (a, a log a), n_examples, n_heads, 2, n_tokens]` of every row over the keys in
      (context, question); the same of every key over the rows in (question, answer);
      and `[n_examples, n_rows, n_heads, d_head]`, or None where it is not wanted.
    """
    n_examples, n_heads, n_tokens, _ = call.query.shape
    sums = call.query.new_zeros(
        (2, 2, n_examples, n_heads, 2, n_tokens), dtype=torch.float32
    )
    attended = None
    if value is not None:
        value = value.contiguous()
        shape = n_examples, rows[1] - rows[0], n_heads, value.shape[-1]
        attended = value.new_empty(shape)
    by_row, by_key = sums
    in_key_span = members[:, None, :2].float()
    in_row_span = members[:, None, 1:].float()
    # Heads lie apart in memory; a product per chunk would gather them every time.
    keys = call.key.float().contiguous()
    per_row = n_examples * n_heads * n_tokens
    chunks = list(row_chunks(rows, per_row, budget))
    size = max((stop - start for start, stop in chunks), default=0) * per_row
    # Reused by every chunk: fresh pages cost more than the sums on a CPU.
    buffers = torch.empty((2, size), device=keys.device)
    for start, stop in chunks:
        logits = call.logits(start, stop, keys, buffers[0])
        pair = _weights_and_terms(logits, buffers[1][: logits.numel()])
        is_key, is_row = in_key_span[..., :stop], in_row_span[..., start:stop]
        at = slice(start - rows[0], stop - rows[0])
        # Every product is a batch over heads, so that a core finds in its own cache
        # what it wrote: one product over both kinds would hand one kind to each core,
        # and what two cores exchange is slow where they share no cache.
        for kind, values in enumerate(pair):
            # The skinny operand comes first: the other order is six times slower.
            by_row[kind, ..., start:stop] = is_key @ values.mT
            by_key[kind, ..., :stop] += is_row @ values
        if value is not None:
            attended[:, at] = _attended(pair[0], value)
    return by_row, by_key, attended


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
    by_row, by_key, attended = _read_rows(call, members, rows, budget, value)
    to_context, to_question = _entropy_and_mass(*by_row).unbind(2)
    from_question, from_answer = _entropy_and_mass(*by_key).unbind(2)
    in_context, in_question, in_answer = members[:, :, None, :, None].unbind(1)
    first = torch.where(in_context, from_question, to_context)
    second = torch.where(in_answer, to_question, from_answer)
    in_any = in_context | in_question | in_answer
    # [n_examples, n_heads, n_tokens, 2 (entropy, mass), 2 (partner)]
    both = torch.stack([first, second], dim=-1) * in_any[..., None]
    return both.permute(0, 2, 4, 3, 1), attended
