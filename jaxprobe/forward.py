"""A detector's forward pass in JAX, as in training; it compiles for every shape.

`pgir.bridge` has the same in Torch, which scores answers, and signals of a caller.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.extract.records import Setting
from beatrice.jaxprobe.detector import (
    Detector,
    Encode,
    HeadName,
    Params,
    Scores,
    SettingHead,
)
from beatrice.jaxprobe.encoder import Encoder, apply_module
from beatrice.jaxprobe.families import FamilyDims, Features, Standardizer
from beatrice.jaxprobe.fusion import FusionHead, head_inputs, slots_of
from beatrice.jaxprobe.tokens import FamilyTokens, split_families


def score(
    detector: Detector, branch: HeadName, passes: Mapping[Setting, Features]
) -> Scores:
    """Return a head's scores from the signals of the same answers in each pass."""
    return detector.score(branch, passes, encoder_of(detector), fuse)


def encoder_of(detector: Detector) -> Encode:
    """Return what encodes the features of a detector's passes."""

    def encode(where: Any, features: Features) -> tuple[jax.Array, jax.Array]:
        bank = detector.banks[where]
        subsets = [bank.dims.subset_index(name) for name in bank.names]
        return bank_outputs(
            bank.params,
            jnp.asarray(bank.dims.subset_masks[subsets]),
            bank.standardizer,
            features,
            dims=bank.dims,
            encoder=Encoder(bank.config, bank.dims),
        )

    return encode


def fuse(
    head: SettingHead, logits: list[jax.Array], pooled: list[jax.Array]
) -> tuple[np.ndarray, np.ndarray]:
    """Fuse the outputs of a head's encoders, see `detector.Fuse`."""
    n_empty = head.config.n_slots - len(logits)
    filled = jnp.stack(logits, axis=1)
    fill = ((0, 0), (0, n_empty), (0, 0))
    raw = _fuse(
        head.params,
        jnp.pad(jnp.stack(pooled, axis=1), (*fill, (0, 0))),
        jnp.pad(filled, fill),
        jnp.asarray(slots_of(tuple(range(len(logits))), head.config.n_slots)[1]),
        head=FusionHead(head.config),
    )
    encoders = np.asarray(jax.nn.sigmoid(filled).mean(axis=0).T, np.float64)
    return np.asarray(raw, np.float64), encoders


@partial(jax.jit, static_argnames=("dims", "encoder"))
def bank_outputs(
    params: Params,
    family_masks: jax.Array,
    standardizer: Standardizer,
    features: Features,
    *,
    dims: FamilyDims,
    encoder: Encoder,
) -> tuple[jax.Array, jax.Array]:
    """Run all kept encoders on the same features.

    Weights have leaves `[n_seeds, n_kept, ...]`, and `family_masks` are `[n_kept,
    n_families]` bool. Returned are logits `[n_seeds, n_kept, n_examples]` and pooled
    vectors `[..., d_pooled]`.
    """
    families: FamilyTokens = split_families(features, dims, standardizer)
    over_members = jax.vmap(lambda p, mask: apply_module(encoder, p, families, mask))
    return jax.vmap(over_members, in_axes=(0, None))(params, family_masks)


@partial(jax.jit, static_argnames=("head",))
def _fuse(
    params: Params,
    pooled: jax.Array,
    logits: jax.Array,
    slot_mask: jax.Array,
    *,
    head: FusionHead,
) -> jax.Array:
    """Probability `[n_examples]`, mean over seeds of the heads'."""

    def fuse_seed(params, pooled, logits):
        slots = jnp.arange(len(slot_mask))
        inputs = head_inputs(pooled, logits)
        return apply_module(head, params, inputs, slots, slot_mask)

    return jax.nn.sigmoid(jax.vmap(fuse_seed)(params, pooled, logits)).mean(axis=0)
