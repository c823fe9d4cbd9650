"""A branch that members side by side take together."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def shared_branch(
    compute: Callable[[Any], jax.Array],
    mask: Callable[[jax.Array, jax.Array], jax.Array] | None,
    gate: jax.Array,
    given: Any,
) -> jax.Array:
    """`compute(given)` where the gate is open; for members side by side, once for all.

    By itself `vmap` over gates copies what the members share, a batch of hidden states,
    for every member. Here what is computed is as shared as what it is computed from.

    Args:
      compute: has no gradient of its own.
      mask: makes zeros of a value whose gate is closed; None where nobody reads it.
      gate: scalar bool.
      given: arrays, not closed over, since `vmap` must see them.
    """
    shape = jax.eval_shape(compute, given)

    @jax.custom_batching.custom_vmap
    def branch(gate, given):
        return jax.lax.cond(
            gate, compute, lambda _: jnp.zeros(shape.shape, shape.dtype), given
        )

    @branch.def_vmap
    def several(n, is_batched, gate, given):
        is_gate_batched, are_given = is_batched
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, are_given)
        is_shared = not any(jax.tree.leaves(are_given))
        found = (
            compute(given)
            if is_shared
            else jax.vmap(compute, in_axes=(axes,), axis_size=n)(given)
        )
        if mask is None:
            return found, not is_shared
        own = 0 if is_gate_batched else None, None if is_shared else 0
        return jax.vmap(mask, in_axes=own, axis_size=n)(gate, found), True

    return branch(gate, given)


def zeros_if_closed(gate: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, or zeros unless the gate is open: a mask of `shared_branch`."""
    return jnp.where(gate, x, 0.0)
