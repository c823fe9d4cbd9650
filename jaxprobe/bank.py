"""The encoders that a detector keeps of one pass, run on features side by side."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from jaxprobe.config import EncoderConfig
from jaxprobe.features.features import (
    FamilyDims,
    FamilyTokens,
    Features,
    Standardizer,
    split_families,
)
from jaxprobe.features.subsets import SUBSET_NAMES, subset_index
from jaxprobe.fit.grid import Trained
from jaxprobe.fit.loop import Params
from jaxprobe.model.encoder import Encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBank:
    """The encoders kept for one pass.

    Attributes:
      dims: channels of that pass.
      config: shape of its encoders.
      standardizer: fitted on its training tokens.
      names: subsets, as in "HPA"; one per kept encoder.
      params: leaves `[n_seeds, n_kept, ...]`.
      lengths: of the longest spans in training; whoever pads to them compiles once.
        Empty where unknown.
    """

    dims: FamilyDims
    config: EncoderConfig
    standardizer: Standardizer
    names: tuple[str, ...]
    params: Params
    lengths: tuple[int, ...] = ()

    @classmethod
    def keep(
        cls,
        trained: Trained,
        names: Sequence[str],
        *,
        dims: FamilyDims,
        config: EncoderConfig,
        standardizer: Standardizer,
        lengths: Sequence[int] = (),
    ) -> "EncoderBank":
        """Take some subsets, all seeds, out of a trained grid."""
        seeds = sorted({m.seed for m in trained.members})
        rows = np.asarray(
            [
                [trained.members.index((subset_index(name), seed)) for name in names]
                for seed in seeds
            ]
        )
        params = jax.tree.map(lambda x: np.asarray(x)[rows], trained.params)
        return cls(
            dims=dims,
            config=config,
            standardizer=standardizer,
            names=tuple(SUBSET_NAMES[subset_index(name)] for name in names),
            params=params,
            lengths=tuple(lengths),
        )


@partial(jax.jit, static_argnames=("dims", "encoder"))
def encode_bank(
    params: Params,
    family_masks: jax.Array,
    standardizer: Standardizer,
    features: Features,
    *,
    dims: FamilyDims,
    encoder: Encoder,
) -> tuple[jax.Array, jax.Array]:
    """Run all kept encoders on the same features.

    Args:
      params: leaves `[n_seeds, n_kept, ...]`.
      family_masks: `[n_kept, n_families]` bool.
      standardizer: of the pass.
      features: of `n_examples` answers.
      dims: channels of the pass.
      encoder: the module.

    Returns:
      Logits `[n_seeds, n_kept, n_examples]` and pooled vectors `[..., d_pooled]`.
    """
    families: FamilyTokens = split_families(features, dims, standardizer)
    over_kept = jax.vmap(lambda p, mask: encoder.apply(p, families, mask))
    return jax.vmap(over_kept, in_axes=(0, None))(params, family_masks)
