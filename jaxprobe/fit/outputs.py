"""What trained encoders say of examples: logits, and the vectors that fusion reads."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.subsets import SUBSETS
from jaxprobe.fit.grid import Trained, in_chunks
from jaxprobe.fit.loop import Params
from jaxprobe.model.encoder import Encoder


class MemberOutputs(NamedTuple):
    """What trained encoders say of some examples.

    Attributes:
      logits: `[n_members, n_examples]` float32.
      pooled: `[n_members, n_examples, 2 * hidden]` float32.
    """

    logits: Any
    pooled: Any


@partial(jax.jit, static_argnames=("encoder", "n_chunk"))
def encode_member(
    params: Params,
    family_mask: jax.Array,
    features: FamilyTokens,
    *,
    encoder: Encoder,
    n_chunk: int = 256,
) -> tuple[jax.Array, jax.Array]:
    """Logits `[n_examples]` and pooled `[n_examples, 2 * hidden]` of one encoder."""
    return in_chunks(
        lambda batch: encoder.apply(params, batch, family_mask), features, n_chunk
    )


def encode(
    trained: Trained, features: FamilyTokens, *, encoder: Encoder, n_chunk: int = 256
) -> MemberOutputs:
    """What every trained member says of every example (see `MemberOutputs`)."""
    logits, pooled = [], []
    for i, member in enumerate(trained.members):
        params = jax.tree.map(lambda x, i=i: x[i], trained.params)
        mask = jnp.asarray(SUBSETS[member.subset])
        out = encode_member(params, mask, features, encoder=encoder, n_chunk=n_chunk)
        logits.append(out[0])
        pooled.append(out[1])
    return MemberOutputs(jnp.stack(logits), jnp.stack(pooled))
