"""The first step of an encoder: gather a batch of a family, add noise and project it.

None of this is done for a family that is not read.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from beatrice.jaxprobe.config import MatmulDtype
from beatrice.jaxprobe.random import RowKeys, hashed_normal
from beatrice.jaxprobe.stored import (
    StoredTokens,
    contract,
    product,
    rows_of_tokens,
    take_rows,
    values_of,
)


def shared_branch(
    compute: Callable[[Any], jax.Array],
    gate: jax.Array,
    operands: Any,
    *,
    is_read: bool = True,
) -> jax.Array:
    """Return `compute(operands)` if the gate is open, computed once for all members.

    Plain `vmap` over gates would copy what the members share, such as a batch of hidden
    states, for every member. Here `compute` runs once if all operands are shared. There
    is no gradient. Operands must be passed rather than closed over, since `vmap` has to
    see them. A closed gate gives zeros, or any value if `is_read` is False.
    """
    shape = jax.eval_shape(compute, operands)

    @jax.custom_batching.custom_vmap
    def branch(gate, operands):
        return jax.lax.cond(
            gate, compute, lambda _: jnp.zeros(shape.shape, shape.dtype), operands
        )

    @branch.def_vmap
    def several(n, is_batched, gate, operands):
        is_gate_batched, are_given = is_batched
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, are_given)
        is_shared = not any(jax.tree.leaves(are_given))
        results = (
            compute(operands)
            if is_shared
            else jax.vmap(compute, in_axes=(axes,), axis_size=n)(operands)
        )
        if not is_read:
            return results, not is_shared
        in_axes = 0 if is_gate_batched else None, None if is_shared else 0
        masked = jax.vmap(
            lambda gate, x: jnp.where(gate, x, 0.0), in_axes=in_axes, axis_size=n
        )
        return masked(gate, results), True

    return branch(gate, operands)


# Numbers of channels: from `_WIDE` on a member does not copy a batch before it projects
# it; from `_BROAD` on no copy is made for the members that share it either: they are
# projected together, which reads every token once for all of them.
_WIDE, _BROAD = 1024, 256


class SpanBatch(NamedTuple):
    """A batch of one span, gathered and drawn once for all members of a seed."""

    # Per family `[n_tokens, batch_size, d_family]`, with noise if there are no more
    # channels than `d_out`; `AllTokens` if broad, for all members alone; None if the
    # family is not read in this span.
    tokens: tuple[Any, ...]
    # `[d_out, n_tokens, batch_size]` of variance 1, for the other families.
    noise: jax.Array | None
    products: Any = None  # a member's `Products` of all broad families

    def products_of(
        self,
        weights: Sequence[Any],
        is_read: jax.Array,
        matmul_dtype: MatmulDtype,
    ) -> jax.Array | None:
        """Return the sum of the broad families' products for all members, if any.

        Per family, `weights` are `[n_members, d_out, d_family]`, and `is_read`
        `[n_members]` bool. The sum is `[n_members, d_out, n_padded]`.
        """
        products = [
            jnp.where(
                is_read[f][:, None, None],
                member_products(matmul_dtype, weights[f], family, is_read[f]),
                0.0,
            )
            for f, family in enumerate(self.tokens)
            if isinstance(family, AllTokens)
        ]
        return reduce(jnp.add, products) if products else None

    def of_member(self, values: jax.Array | None) -> "SpanBatch":
        """Return the batch with a member's `products_of` in place of broad tokens."""
        if values is None:
            return self
        broad = next(x for x in self.tokens if isinstance(x, AllTokens))
        tokens = (None if isinstance(x, AllTokens) else x for x in self.tokens)
        products = Products(values, broad.positions)
        return self._replace(tokens=tuple(tokens), products=products)


class Draw(NamedTuple):
    """What training draws for one batch."""

    rows: jax.Array  # `[batch_size]` int32, rows of the features that form the batch
    # Key of the input noise, shared by a seed's members; None for no noise.
    noise: jax.Array | RowKeys | None
    dropout: jax.Array | RowKeys | None  # key of the dropout, a member's own, or None
    spans: tuple[SpanBatch, ...] = ()  # what members share, if they do


def gather_span(
    tokens: Sequence[jax.Array | StoredTokens | None],
    first: int,
    real: jax.Array,
    rows: jax.Array,
    key: jax.Array | RowKeys | None,
    *,
    d_out: int,
    deviation: float,
    span: int,
) -> SpanBatch:
    """Gather a span and draw its noise, as `project_span` would for each member.

    Args:
      tokens: per family `[n_tokens, n_examples, d_family]`; None if it is not read.
      first: the span's first token.
      real: `[n_span_tokens, batch_size]` bool, the batch's mask.
      rows: `[batch_size]` int32 indices of examples.
      key: key of the noise; None for no noise.
      d_out: see `SpanBatch`.
      deviation: see `project`.
      span: see `project_span`.
    """
    *streams, last = _streams(span, len(tokens))

    def gather(family: Any, stream: int) -> Any:
        if family is None:
            return None
        at = rows_of_tokens(family, rows)[first : first + len(real)]
        d_family = family.shape[-1]
        if d_family >= _BROAD and d_family > d_out:
            return AllTokens(family, _positions(at, real, True))
        batch = take_rows(family, at)
        if key is None or d_family > d_out:
            return batch
        return batch + deviation * hashed_normal(key, stream, batch.shape, row_axis=1)

    shape = d_out, *real.shape
    noise = None if key is None else hashed_normal(key, last, shape)
    return SpanBatch(tuple(map(gather, tokens, streams)), noise)


def _streams(span: int, n_families: int) -> range:
    """Return the streams of a span's noise: one for each family, then for their sum."""
    return range(span * (n_families + 1), (span + 1) * (n_families + 1))


def project(
    weight: jax.Array,
    tokens: jax.Array | StoredTokens,
    real: jax.Array,
    gate: jax.Array,
    draw: Draw | None,
    *,
    deviation: float,
    stream: int,
    matmul_dtype: MatmulDtype,
    first: int = 0,
) -> jax.Array:
    """Project a family's tokens; if the gate is closed, return zeros without work.

    Without a batch axis on `gate` this is a real branch, forward and backward; under
    `vmap` over gates it becomes a select with the same value.

    Args:
      weight: `[d_projection, d_family]`.
      tokens: `[n_all_tokens, n_examples, d_family]`, standardised or as stored.
      real: `[n_tokens, batch_size]` bool, the batch's mask.
      gate: scalar bool.
      draw: the batch; None outside training, for all examples without noise.
      deviation: standard deviation of the noise on each input channel.
      stream: a number that separates the noise of families and of spans.
      matmul_dtype: see `jaxprobe.stored`; the noise is not rounded.
      first: the first token of the batch; without a draw, all tokens are projected.

    Returns:
      `[d_projection, n_tokens, batch_size]`. Padding has noise and must be masked.
    """
    d_projection, d_family = weight.shape
    if draw is None:
        if d_family >= _WIDE:
            return wide_product(matmul_dtype, weight, tokens, None, real, gate)
        shape = (d_projection, *tokens.shape[:2])
        return _gated(
            lambda: _product(weight, values_of(tokens), matmul_dtype), gate, shape
        )
    at = rows_of_tokens(tokens, draw.rows)[first : first + len(real)]
    if d_family >= _WIDE:
        y: Any = wide_product(matmul_dtype, weight, tokens, at, real, gate)
        if deviation == 0.0:
            return y
        return y + _noise(weight, draw.noise, stream, gate, y.shape, deviation)
    before = deviation if _is_narrow(weight) else 0.0

    def gather(operands):
        tokens, at, key = operands
        batch = take_rows(tokens, at)
        if before == 0.0:
            return batch
        return batch + before * hashed_normal(key, stream, batch.shape, row_axis=1)

    # The product checks the gate as well, so a closed gate's batch is never read.
    operands = tokens, at, draw.noise
    batch = shared_branch(gather, gate, operands, is_read=False)
    y = gated_product(matmul_dtype, weight, batch, gate)
    if deviation in (0.0, before):
        return y
    return y + _noise(weight, draw.noise, stream, gate, y.shape, deviation)


def project_span(
    weights: Sequence[jax.Array | None],
    tokens: Sequence[jax.Array | StoredTokens],
    first: int,
    real: jax.Array,
    gates: jax.Array,
    draw: Draw,
    *,
    deviation: float,
    span: int,
    matmul_dtype: MatmulDtype,
) -> jax.Array:
    """Project a span of all families and return the sum, with noise.

    Args:
      weights: per family `[d_out, d_family]`; None if it is not read in this span.
      tokens: per family, see `project`.
      first: the span's first token.
      real: `[n_tokens, batch_size]` bool, the span's mask.
      gates: `[n_families]` bool.
      draw: the batch.
      deviation: see `project`.
      span: number of the span, which separates the noise of spans.
      matmul_dtype: see `project`.

    Returns:
      `[d_out, n_tokens, batch_size]`. Padding has noise and must be masked.
    """
    read = [(f, weight) for f, weight in enumerate(weights) if weight is not None]
    shape = (len(read[0][1]), *real.shape)
    noise: Any = draw.noise
    *streams, last = _streams(span, len(weights))
    if not draw.spans:
        fixed = {"matmul_dtype": matmul_dtype, "first": first}
        parts: list[Any] = [
            project(
                weight,
                tokens[f],
                real,
                gates[f],
                draw,
                stream=streams[f],
                deviation=deviation if _is_narrow(weight) else 0.0,
                **fixed,
            )
            for f, weight in read
        ]
    else:
        batch = draw.spans[span]
        noise = batch.noise
        parts = [
            gated_product(matmul_dtype, weight, batch.tokens[f], gates[f])
            for f, weight in read
            if batch.tokens[f] is not None
        ]
        if batch.products is not None:
            placed: Any = _in_place(*batch.products, gates.any())
            parts.append(placed.reshape(shape))
    wide = [(f, weight) for f, weight in read if not _is_narrow(weight)]
    if wide and deviation and noise is not None:
        every = jnp.concatenate([weight for _, weight in wide], axis=1)
        gate = gates[jnp.asarray([f for f, _ in wide])].any()
        parts.append(_noise(every, noise, last, gate, shape, deviation))
    return reduce(jnp.add, parts)


def _is_narrow(weight: jax.Array) -> bool:
    """Return whether noise is added before the product with a weight.

    Then it takes no more draws, and the noise behind would not have full rank.
    """
    return weight.shape[1] <= weight.shape[0]


def _gated(
    compute: Callable[[], jax.Array], gate: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Return `compute()` if the gate is open, else zeros of the same shape."""
    return jax.lax.cond(gate, compute, lambda: jnp.zeros(shape, jnp.float32))


def _product(
    weight: jax.Array, tokens: jax.Array, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Contract the channels: `[n_tokens, n, d_family]` to `[d_projection, ...]`."""
    y = product(weight, tokens.reshape(-1, tokens.shape[-1]).T, matmul_dtype)
    return y.reshape(-1, *tokens.shape[:2])


def _noise(weight, source, stream, gate, shape, deviation) -> jax.Array:
    """Return what Gaussian noise on every input channel adds to the projection.

    Noise `n` on the input adds `Wn` to the projection, which is Gaussian of covariance
    `deviation**2 * WW'`. Drawn after the projection, with the Cholesky factor of that
    covariance, it takes `d_projection` draws per token instead of `d_family` (64
    instead of 4096 at the paper's widths). The expected gradient is the same, since the
    factor is differentiated too. `source` is a key, or the draws.
    """

    def add() -> jax.Array:
        is_key = isinstance(source, RowKeys) or jnp.issubdtype(
            source.dtype, jax.dtypes.prng_key
        )
        noise: Any = hashed_normal(source, stream, shape) if is_key else source
        factor = deviation * noise_factor(weight)
        return (factor @ noise.reshape(shape[0], -1)).reshape(shape)

    return _gated(add, gate, shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_product(matmul_dtype, weight, batch, gate):
    """Return `_product` if the gate is open; only `weight` has a gradient."""

    def compute(operands):
        weight, batch = operands
        return _product(weight, batch, matmul_dtype)

    return shared_branch(compute, gate, (weight, batch))


def _gated_product_forward(matmul_dtype, *operands):
    return gated_product(matmul_dtype, *operands), operands


def _gated_product_backward(matmul_dtype, residuals, dy):
    weight, batch, gate = residuals

    def vjp(operands):
        weight, batch, dy = operands
        return jax.vjp(lambda x: _product(x, batch, matmul_dtype), weight)[1](dy)[0]

    return shared_branch(vjp, gate, (weight, batch, dy)), None, None


gated_product.defvjp(_gated_product_forward, _gated_product_backward)


def noise_factor(weight: jax.Array) -> jax.Array:
    """Return lower triangular `L` with `L L' = WW'`, `[d_projection, d_projection]`."""
    # Rounded to TF32, the default of GPUs, the matrix may be indefinite.
    gram = jnp.matmul(weight, weight.T, precision="highest")
    # For a projection with dead rows, rounding may make it so as well.
    ridge = 1e-6 * jnp.trace(gram) / gram.shape[0] + 1e-12
    return jnp.linalg.cholesky(gram + ridge * jnp.eye(gram.shape[0], dtype=gram.dtype))


# Tokens per chunk: one megabyte at 1024 channels, four at 4096.
_N_CHUNK = 256


class _Positions(NamedTuple):
    """Where the real tokens of a batch are."""

    rows: jax.Array  # `[n]` int32, every position's row among all tokens
    order: jax.Array  # `[n_padded]` int32, positions, the real ones first
    rank: jax.Array  # `[n]` int32, a real position's place in `order`
    real: jax.Array  # `[n]` bool
    # int32, chunks of `order` with a real position; 0 if the gate is closed.
    n_chunks: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_product(
    matmul_dtype: MatmulDtype,
    weight: jax.Array,
    tokens: jax.Array | StoredTokens,
    at: jax.Array | None,
    real: jax.Array,
    gate: jax.Array,
) -> jax.Array:
    """Gather a batch and project it; zeros on padding, or if the gate is closed.

    `weight` has a gradient, and so have standardised tokens if `at` is None, which
    only attributions of a logit use.

    Args:
      matmul_dtype: see `jaxprobe.stored`.
      weight: `[d_projection, d_family]`.
      tokens: `[n_tokens, n_examples, d_family]`, or those of a batch that is gathered.
      at: `[n_tokens, n_batch]` int32, see `take_rows`; None takes all.
      real: `[n_tokens, n_batch]` bool, the batch's mask.
      gate: scalar bool.

    Returns:
      `[d_projection, n_tokens, n_batch]`.
    """
    return _wide_forward(matmul_dtype, weight, tokens, at, real, gate)[0]


def _by_platform(on_cpu, on_accelerator, matmul_dtype, *operands):
    here, there = (partial(f, matmul_dtype) for f in (on_cpu, on_accelerator))
    return jax.lax.platform_dependent(*operands, cpu=here, default=there)


def _wide_forward(matmul_dtype, *operands):
    ways = project_on_cpu, project_on_accelerator
    return _by_platform(*ways, matmul_dtype, *operands), operands


def _wide_backward(matmul_dtype, operands, dy):
    # The tokens are not kept, but gathered a second time.
    weight, tokens, at, real, gate = operands
    ways = cpu_vjp, accelerator_vjp
    d_weight = _by_platform(*ways, matmul_dtype, dy, *operands)
    if at is not None or not isinstance(tokens, jax.Array):
        return d_weight, None, None, None, None
    masked = jnp.where(real[None], dy, 0.0).reshape(len(weight), -1)

    def vjp() -> jax.Array:
        return contract(masked, weight, 0, matmul_dtype).reshape(tokens.shape)

    return d_weight, _gated(vjp, gate, tokens.shape), None, None, None


wide_product.defvjp(_wide_forward, _wide_backward)


def _positions(at, real, gate) -> _Positions:
    """Find the real positions of a batch."""
    real = real.reshape(-1)
    n_chunks = -(-real.size // _N_CHUNK)
    n_padded = n_chunks * _N_CHUNK
    rank = jnp.cumsum(real, dtype=jnp.int32) - 1
    positions = jnp.arange(real.size, dtype=jnp.int32)
    sorted_positions = jnp.where(real, rank, n_padded)
    order = (
        jnp.zeros(n_padded, jnp.int32).at[sorted_positions].set(positions, mode="drop")
    )
    n_filled = (real.sum(dtype=jnp.int32) + _N_CHUNK - 1) // _N_CHUNK
    n_filled = jnp.where(gate, n_filled, 0)
    return _Positions(at.reshape(-1), order, rank, real, n_filled)


class AllTokens(NamedTuple):
    """All tokens, with the positions of a batch's tokens among them."""

    tokens: Any  # `[n_tokens, n_examples, d_family]`, standardised or as stored
    positions: _Positions

    def chunk(self, number: jax.Array) -> jax.Array:
        """Gather a chunk of the real tokens, `[_N_CHUNK, d_family]`."""
        order, first = self.positions.order, number * _N_CHUNK
        at = jax.lax.dynamic_slice(order, (first,), (_N_CHUNK,))
        return take_rows(self.tokens, self.positions.rows[at])


class Products(NamedTuple):
    """A member's projection of the real tokens of a batch."""

    values: jax.Array  # `[d_projection, n_padded]`, in the order of `positions`
    positions: _Positions


@jax.custom_vjp
def _in_place(values: jax.Array, positions: _Positions, gate: jax.Array) -> jax.Array:
    """Put products in their places, `[d_projection, n]`; zeros on padding."""

    def place() -> jax.Array:
        return jnp.where(positions.real, values[:, positions.rank], 0.0)

    return _gated(place, gate, (len(values), positions.real.size))


def _in_place_forward(values, positions, gate):
    return _in_place(values, positions, gate), (positions, gate)


def _in_place_backward(residuals, dy):
    positions, gate = residuals
    n_padded = len(positions.order)

    def vjp():
        filled = jnp.arange(n_padded) < positions.real.sum()
        return jnp.where(filled, dy[:, positions.order], 0.0)

    return _gated(vjp, gate, (len(dy), n_padded)), None, None


_in_place.defvjp(_in_place_forward, _in_place_backward)


def _of_readers(
    compute: Callable[[jax.Array], jax.Array],
    is_read: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """Return the results of the members that read, `[n_members, *shape]`.

    `compute` takes the numbers `[n]` of members and returns their results, `n` times as
    long as `shape` on the first axis. Since shapes are static, `n` is a power of two or
    all: members that do not read fill it up, and the rest have zeros.
    """
    n_members = len(is_read)
    order = jnp.argsort(~is_read)
    sizes = [*(1 << i for i in range((n_members - 1).bit_length())), n_members]

    def of_first(n: int) -> jax.Array:
        results = jnp.zeros((n_members, *shape), jnp.float32)
        if n == 0:
            return results
        for i, result in enumerate(compute(order[:n]).reshape(n, 1, *shape)):
            start = (order[i], *(0 for _ in shape))
            results = jax.lax.dynamic_update_slice(results, result, start)
        return results

    choices = [partial(of_first, n) for n in (0, *sizes)]
    choice = jnp.searchsorted(jnp.asarray([0, *sizes]), is_read.sum())
    return jax.lax.switch(choice, choices)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def member_products(
    matmul_dtype: MatmulDtype,
    weights: jax.Array,
    batch: "AllTokens",
    is_read: jax.Array,
) -> jax.Array:
    """Project a batch for several members; only `weights` have a gradient.

    Members that read the family share one product: a chunk of tokens is gathered once
    for all of them, and a product with a member's few rows alone would take longer.

    Args:
      matmul_dtype: see `jaxprobe.stored`.
      weights: `[n_members, d_projection, d_family]`.
      batch: the tokens.
      is_read: `[n_members]` bool; the results of other members mean nothing.

    Returns:
      `[n_members, d_projection, n_padded]`, in the order of the batch's positions.
    """
    _, d_projection, d_family = weights.shape
    n_padded = len(batch.positions.order)

    def project(members: jax.Array) -> jax.Array:
        rows = weights[members].reshape(-1, d_family)

        def put(chunk, products):
            y = contract(rows, batch.chunk(chunk), 1, matmul_dtype)
            return jax.lax.dynamic_update_slice(products, y, (0, chunk * _N_CHUNK))

        start = jnp.zeros((len(rows), n_padded), jnp.float32)
        return jax.lax.fori_loop(0, batch.positions.n_chunks, put, start)

    return _of_readers(project, is_read, (d_projection, n_padded))


def _member_products_forward(matmul_dtype, weights, batch, is_read):
    return member_products(matmul_dtype, weights, batch, is_read), (batch, is_read)


def _member_products_backward(matmul_dtype, residuals, dy):
    batch, is_read = residuals
    n_members, d_projection, _ = dy.shape
    d_family = batch.tokens.shape[-1]

    def vjp(members: jax.Array) -> jax.Array:
        def add(chunk, total):
            start, size = (0, 0, chunk * _N_CHUNK), (n_members, d_projection, _N_CHUNK)
            part = jax.lax.dynamic_slice(dy, start, size)[members]
            part = part.reshape(-1, _N_CHUNK).T
            return total + contract(part, batch.chunk(chunk), 0, matmul_dtype)

        start = jnp.zeros((len(members) * d_projection, d_family), jnp.float32)
        return jax.lax.fori_loop(0, batch.positions.n_chunks, add, start)

    return _of_readers(vjp, is_read, (d_projection, d_family)), None, None


member_products.defvjp(_member_products_forward, _member_products_backward)


def project_on_cpu(matmul_dtype, weight, tokens, at, real, gate):
    """Compute `wide_product` on a CPU, in chunks that stay in its cache."""
    at = rows_of_tokens(tokens, None) if at is None else at
    batch = AllTokens(tokens, _positions(at, real, gate))
    products: Any = member_products(matmul_dtype, weight[None], batch, gate[None])
    placed: Any = _in_place(products[0], batch.positions, gate)
    return placed.reshape(-1, *real.shape)


def cpu_vjp(matmul_dtype, dy, weight, *operands):
    """Return the gradient of `weight` on a CPU."""
    compute = partial(project_on_cpu, matmul_dtype)
    return jax.vjp(lambda weight: compute(weight, *operands), weight)[1](dy)[0]


def _batch(tokens, at) -> jax.Array:
    """Return the tokens at all positions of a batch, `[n, d_family]`."""
    at = rows_of_tokens(tokens, None) if at is None else at
    return take_rows(tokens, at.reshape(-1))


def project_on_accelerator(matmul_dtype, weight, tokens, at, real, gate):
    """Compute `wide_product` on an accelerator, as one product."""

    def project(operands):
        weight, tokens, at, real = operands
        batch = _batch(tokens, at)
        y = contract(weight, batch, 1, matmul_dtype).reshape(-1, *real.shape)
        return jnp.where(real[None], y, 0.0)

    return shared_branch(project, gate, (weight, tokens, at, real))


def accelerator_vjp(matmul_dtype, dy, weight, tokens, at, real, gate):
    """Return the gradient of `weight` on an accelerator."""

    def vjp(operands):
        dy, tokens, at, real = operands
        batch = _batch(tokens, at)
        transposed = jnp.where(real[None], dy, 0.0).reshape(len(weight), -1)
        return product(transposed, batch, matmul_dtype)

    return shared_branch(vjp, gate, (dy, tokens, at, real))
