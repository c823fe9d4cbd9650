"""Arithmetic of attention between spans: entropies and masses from queries and keys.

For an earlier span U and a later span V (section 3.2): a token t of V gets, for U, the
entropy of its weights normalised over U, and their sum ("out"); a token s of U gets,
for V, the entropy of the weights that V sends to it, normalised over V, and their sum
("in"). With three ordered spans, every token has two partner spans. With m the sum of
weights a, the entropy is log m - (sum of a log a) / m: two sums per span replace a map.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

# Below this mass, float32 terms are subnormal: they have few digits on a CPU and are
# flushed to zero on some devices, so their entropy would be noise.
_ZERO_MASS = 1e-30
_HIDDEN = -1e30  # finite, so that zero weight times its log is zero and not NaN


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments with which a model calls its attention function."""

    query: torch.Tensor  # `[n_examples, n_heads, n_tokens, d_head]`
    # `[n_examples, n_kv_heads, n_keys, d_head]`; query head h uses the kv head
    # `h // (n_heads / n_kv_heads)`. The last `n_tokens` keys belong to the queries'
    # tokens, those before them come from a cache.
    key: torch.Tensor
    # None (causal), or `[n_examples | 1, n_heads | 1, n_tokens, n_keys]`: bool, True =
    # visible; or added to scaled logits (Falcon's alibi), hugely negative if invisible.
    mask: torch.Tensor | None
    scaling: float  # multiplies the logits
    softcap: float | None  # bounds the scaled logits (Gemma 2), or None
    # `[n_heads]`, one more logit in every row's softmax that belongs to no token
    # (gpt-oss), or None. The weights over tokens then sum to less than one.
    sinks: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return n_examples, n_heads, n_tokens."""
        return self.query.shape[0], self.query.shape[1], self.query.shape[2]

    @property
    def n_cached(self) -> int:
        """Return how many keys precede those of the queries' tokens."""
        return self.key.shape[2] - self.query.shape[2]

    @property
    def device(self) -> torch.device:
        """Return the device on which the model computes."""
        return self.query.device

    def prepared(self) -> "AttentionCall":
        """Return the call with its keys in a layout that suits many products."""
        # Heads are strided in memory; each chunk's product would gather them again.
        return dataclasses.replace(self, key=self.key.float().contiguous())

    def first(self, n_tokens: int) -> "AttentionCall":
        """Return the call cut to its first tokens."""
        mask, n_keys = self.mask, self.n_cached + n_tokens
        return dataclasses.replace(
            self,
            query=self.query[:, :, :n_tokens],
            key=self.key[:, :, :n_keys],
            mask=None if mask is None else mask[:, :, :n_tokens, :n_keys],
        )

    def logits(
        self, start: int, stop: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of rows `[start, stop)`, in a flat buffer if one is given.

        They are `[n_examples, n_heads, stop - start, n_cached + stop]` float32. Keys
        after the last row's own are left out; other invisible keys are hugely negative.
        """
        n_examples, n_heads, _, d_head = self.query.shape
        n_kv_heads, n_keys = self.key.shape[1], self.n_cached + stop
        query = self.query[:, :, start:stop].float() * self.scaling
        query = query.reshape(n_examples, n_kv_heads, -1, d_head)
        # Upcast before the product: bf16 rounding of logits moves weights by percents.
        keys = self.key.float()[:, :, :n_keys].mT
        if out is not None:
            out = out[: query.shape[2] * query.shape[1] * n_examples * n_keys]
            out = out.view(n_examples, n_kv_heads, -1, n_keys)
        logits = torch.matmul(query, keys, out=out)
        logits = logits.view(n_examples, n_heads, stop - start, n_keys)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        self._hide(logits, start, stop)
        return logits

    def added(self, start: int, stop: int) -> torch.Tensor:
        """Return the mask of rows `[start, stop)` as eager attention adds it."""
        shape = (1, 1, stop - start, self.n_cached + stop)
        rows = torch.zeros(shape, device=self.device)
        if self.mask is not None:
            rows = rows.expand(*self.mask.shape[:2], -1, -1).contiguous()
        self._hide(rows, start, stop)
        # Rounded to minus infinity, a row of padding would attend to nothing: NaN. Half
        # of float16's lowest leaves room for the logits that it is added to.
        lowest = torch.finfo(self.query.dtype).min / 2
        return rows.clamp_min_(lowest).to(self.query.dtype)

    def log_weights(self, start: int, stop: int) -> torch.Tensor:
        """Return log a of these rows like `logits`; invisible keys: hugely negative."""
        logits = self.logits(start, stop)
        log_total = logits.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            log_total = torch.logaddexp(log_total, self.sinks.float()[:, None, None])
        return logits.sub_(log_total)

    def weights_and_terms(
        self, start: int, stop: int, buffers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights a of these rows, and a log a, in two flat buffers.

        Takes one exponential per weight: with a row's largest logit m and its weight w,
        the logarithm of the row's normaliser is m - log w.
        """
        logits = self.logits(start, stop, buffers[0])
        out = buffers[1][: logits.numel()].view(logits.shape)
        weights = torch.softmax(logits, -1, out=out)
        largest = logits.amax(-1, keepdim=True)
        log_total = largest.sub_(weights.amax(-1, keepdim=True).log_())
        if self.sinks is not None:
            with_sinks = torch.logaddexp(log_total, self.sinks.float()[:, None, None])
            weights.mul_((log_total - with_sinks).exp_())
            log_total = with_sinks
        return weights, logits.sub_(log_total).mul_(weights)

    def _hide(self, logits: torch.Tensor, start: int, stop: int) -> None:
        """Overwrite the logits of keys that rows `[start, stop)` do not see."""
        if self.mask is not None:
            mask = self.mask[:, :, start:stop, : self.n_cached + stop]
            if mask.dtype == torch.bool:
                logits.masked_fill_(mask.logical_not(), _HIDDEN)
            else:
                logits.add_(mask).clamp_min_(_HIDDEN)
            return
        if stop - start == 1:
            return
        rows = torch.arange(stop - start, device=logits.device)
        # Every row sees all keys before the first row.
        logits[..., self.n_cached + start :].masked_fill_(rows > rows[:, None], _HIDDEN)


class StepCalls:
    """Collects a layer's attention calls of consecutive decode steps, one row each."""

    def __init__(self, call: AttentionCall) -> None:
        """Begin with one step."""
        self._call = call  # with every key that any of the steps sees
        self._queries, self._masks = [call.query], [call.mask]
        self._n_keys = [call.key.shape[2]]  # per step; the last key is the step's own

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._queries)

    def add(self, call: AttentionCall) -> None:
        """Add the next step; its keys replace the earlier ones, as a cache grows."""
        key = call.key
        if call.n_cached != self._call.key.shape[2]:
            # A sliding window has dropped the first key, which an earlier step saw.
            key = torch.cat([self._call.key, call.key[:, :, -1:]], dim=2)
        self._call = dataclasses.replace(self._call, key=key)
        self._queries.append(call.query)
        self._masks.append(call.mask)
        self._n_keys.append(call.key.shape[2])

    def joined(self, masks: dict[Any, torch.Tensor | None]) -> AttentionCall:
        """Return the steps as one call with a row each; layers share `masks`."""
        shared = (*map(id, self._masks), *self._n_keys, self._call.key.shape[2])
        if shared not in masks:
            masks[shared] = self._mask()
        query = torch.cat(self._queries, dim=2)
        return dataclasses.replace(self._call, query=query, mask=masks[shared])

    def _mask(self) -> torch.Tensor | None:
        """Return which of all keys each step sees, or None if plainly causal."""
        n_keys = self._call.key.shape[2]
        stops = range(n_keys - len(self) + 1, n_keys + 1)
        given = [mask for mask in self._masks if mask is not None]
        if not given and self._n_keys == list(stops):
            return None
        dtype = given[0].dtype if given else torch.bool
        is_bool = dtype == torch.bool
        seen, hidden = (True, False) if is_bool else (0.0, torch.finfo(dtype).min)
        rows = []
        for mask, n_seen, stop in zip(self._masks, self._n_keys, stops, strict=True):
            if mask is None:
                shape = (1, 1, 1, n_seen)
                mask = torch.full(shape, seen, dtype=dtype, device=self._call.device)
            edges, mask = (stop - n_seen, n_keys - stop), mask[..., :n_seen]
            rows.append(torch.nn.functional.pad(mask, edges, value=hidden))
        sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
        return torch.cat([row.expand(*sizes, -1, -1) for row in rows], dim=2)


@dataclasses.dataclass(frozen=True)
class AttentionMap:
    """The weights that a model computed, if it does not give out queries and keys."""

    # `[n_examples, n_heads, n_tokens, n_tokens]`, attention weights.
    map: torch.Tensor
    n_cached = 0  # maps are only read for whole sequences

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return n_examples, n_heads, n_tokens."""
        return self.map.shape[0], self.map.shape[1], self.map.shape[2]

    @property
    def device(self) -> torch.device:
        """Return the device on which the model computes."""
        return self.map.device

    def prepared(self) -> "AttentionMap":
        """Return the map unchanged."""
        return self

    def log_weights(self, start: int, stop: int) -> torch.Tensor:
        """Return log a of these rows, up to the key of the last."""
        return self.map[:, :, start:stop, :stop].float().log()

    def weights_and_terms(
        self, start: int, stop: int, buffers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights a of these rows, and a log a, without using buffers."""
        weights = self.map[:, :, start:stop, :stop].float()
        return weights, torch.special.xlogy(weights, weights)


Attention = AttentionCall | AttentionMap  # the attention of one layer


def _entropy_and_mass(mass: torch.Tensor, plogp: torch.Tensor) -> torch.Tensor:
    """Turn sums of a and of a log a into (entropy in nats, mass), stacked last."""
    is_empty = mass < _ZERO_MASS
    safe = mass.masked_fill(is_empty, 1.0)
    entropy = (safe.log() - plogp / safe).clamp_min_(0.0).masked_fill_(is_empty, 0.0)
    return torch.stack([entropy, mass.masked_fill(is_empty, 0.0)], dim=-1)


def row_chunks(
    rows: tuple[int, int], n_weights_per_row: int, budget: int
) -> Iterator[tuple[int, int]]:
    """Split rows into even chunks of at most `budget` weights, but at least one row."""
    n_rows = rows[1] - rows[0]
    n_chunks = math.ceil(n_rows / max(1, budget // n_weights_per_row))
    size = math.ceil(n_rows / max(1, n_chunks))
    for start in range(*rows, max(1, size)):
        yield start, min(start + size, rows[1])


def _attended(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the attention output of rows, `[n_examples, n_rows, n_heads, d_head]`."""
    n_examples, n_heads, n_rows, n_keys = weights.shape
    n_kv_heads = value.shape[1]
    grouped = weights.view(n_examples, n_kv_heads, -1, n_keys) @ value[:, :, :n_keys]
    return grouped.view(n_examples, n_heads, n_rows, -1).transpose(1, 2)


def span_sums(
    call: Attention,
    key_members: torch.Tensor,
    row_members: torch.Tensor,
    rows: tuple[int, int],
    budget: int,
    value: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sum a and a log a by span, along rows and along columns; attend if needed.

    Args:
      call: as in `span_readings`; it may have more keys than rows.
      key_members: `[n_examples, 2, n_keys]` bool, keys in context and question.
      row_members: `[n_examples, 2, n_tokens]` bool, rows in question and answer.
      rows: `[start, stop)` of the rows that are read, up to the last.
      budget: as in `span_readings`.
      value: as in `span_readings`.

    Returns:
      `[2 (a, a log a), n_examples, n_heads, 2, n_tokens]` of every row over the keys in
      (context, question); `[…, n_keys]` of every key over the rows in (question,
      answer); and the attention output `[n_examples, n_rows, n_heads, d_head]` or None.
    """
    call = call.prepared()
    n_examples, n_heads, n_tokens = call.shape
    n_keys = call.n_cached + n_tokens
    sums = (2, n_examples, n_heads, 2)
    by_row = torch.zeros((*sums, n_tokens), device=call.device)
    by_key = torch.zeros((*sums, n_keys), device=call.device)
    attended = None
    if value is not None:
        value = value.contiguous()
        shape = n_examples, rows[1] - rows[0], n_heads, value.shape[-1]
        attended = value.new_empty(shape)
    in_key_span = key_members[:, None].float()
    in_row_span = row_members[:, None].float()
    per_row = n_examples * n_heads * n_keys
    chunks = list(row_chunks(rows, per_row, budget))
    size = max((stop - start for start, stop in chunks), default=0) * per_row
    # Reused by every chunk: on a CPU, fresh pages cost more than the sums.
    buffers = torch.empty((2, size), device=call.device)
    for start, stop in chunks:
        pair = call.weights_and_terms(start, stop, buffers)
        n_seen = call.n_cached + stop
        is_key, is_row = in_key_span[..., :n_seen], in_row_span[..., start:stop]
        at = slice(start - rows[0], stop - rows[0])
        # Every product is a batch over heads, so that a core finds in its own cache
        # what it wrote. One product over both kinds would give one kind to each core,
        # and exchanging data between cores is slow if they share no cache.
        for kind, values in enumerate(pair):
            # The skinny operand comes first: the other order is six times slower.
            by_row[kind, ..., start:stop] = is_key @ values.mT
            by_key[kind, ..., :n_seen] += is_row @ values
        if value is not None and attended is not None:
            attended[:, at] = _attended(pair[0], value)
    return by_row, by_key, attended


def step_sums(
    call: AttentionCall,
    key_members: torch.Tensor,
    row_members: torch.Tensor,
    value: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the result of `span_sums` for a call with one row, as in a decode step.

    It makes a third as many calls of Torch, whose number determines the time. Members
    are `[n_examples, 2, n_keys]` and `[n_examples, 2, 1]` float32, 0 or 1.
    """
    logits = call.logits(0, 1)
    log_weights = logits.log_softmax(-1)
    if call.sinks is not None:
        log_total = (logits.amax(-1) - log_weights.amax(-1))[..., None]
        sinks = call.sinks.float()[:, None, None]
        log_weights += log_total - torch.logaddexp(log_total, sinks)
    weights = log_weights.exp()
    pair = torch.stack([weights, log_weights.mul_(weights)])
    by_row = key_members[:, None] @ pair.mT
    by_key = row_members[:, None] * pair
    attended = None if value is None else _attended(weights, value)
    return by_row, by_key, attended


def span_readings(
    call: Attention,
    members: torch.Tensor,
    rows: tuple[int, int],
    budget: int,
    value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read one layer's attention between spans.

    Args:
      call: queries, keys and mask, cached keys first; or the model's weights.
      members: `[n_examples, 3, n_tokens]` bool, tokens of context, question, answer.
      rows: `[start, stop)` covering every question and answer token.
      budget: most attention weights alive at once.
      value: `[n_examples, n_kv_heads, n_tokens, d_head]` float32 to attend to, or None.

    Returns:
      `[n_examples, n_tokens, 2 (partner span), 2 (entropy in nats, mass), n_heads]`
      float32, and `[n_examples, stop - start, n_heads, d_head]` if `value` is given.
      Partners are the other two spans in the order context, question, answer. Values
      are zero for tokens of no span and for empty or unseen partners.
    """
    n_cached = call.n_cached
    keys = torch.nn.functional.pad(members[:, :2], (n_cached, 0))
    by_row, by_key, attended = span_sums(
        call, keys, members[:, 1:], rows, budget, value
    )
    return entropies_and_masses(by_row, by_key[..., n_cached:], members), attended


def entropies_and_masses(
    by_row: torch.Tensor, by_key: torch.Tensor, members: torch.Tensor
) -> torch.Tensor:
    """Turn the sums of a whole sequence into its readings.

    Sums are `[2, n_examples, n_heads, 2, n_tokens]`, see `span_sums`. `members` and the
    returned `[n_examples, n_tokens, 2, 2, n_heads]` are as in `span_readings`.
    """
    to_context, to_question = _entropy_and_mass(*by_row).unbind(2)
    from_question, from_answer = _entropy_and_mass(*by_key).unbind(2)
    in_context, in_question, in_answer = members[:, :, None, :, None].unbind(1)
    first = torch.where(in_context, from_question, to_context)
    second = torch.where(in_answer, to_question, from_answer)
    in_any = in_context | in_question | in_answer
    # [n_examples, n_heads, n_tokens, 2 (entropy, mass), 2 (partner)]
    both = torch.stack([first, second], dim=-1) * in_any[..., None]
    return both.permute(0, 2, 4, 3, 1)
