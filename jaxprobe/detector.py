"""The trained detector: from signals to a calibrated P(answer is correct).

It holds, per pass, the encoders that some head reads, and, per setting, the fusion
heads of all seeds and a calibrator. The raw score is the mean over seeds of the heads'
probabilities.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from extract.records import Record, Setting
from jaxprobe import checkpoint
from jaxprobe.calibration import Calibrator
from jaxprobe.config import EncoderConfig, FusionConfig
from jaxprobe.features.families import (
    FamilyTokens,
    Features,
    Standardizer,
    check_features,
    split_families,
)
from jaxprobe.features.reading import SPANS
from jaxprobe.features.subsets import SUBSET_NAMES, SUBSETS, FamilyDims, subset_index
from jaxprobe.fit.grid import Trained
from jaxprobe.model.encoder import Encoder, Params
from jaxprobe.model.fusion import FusionHead, head_inputs, slots_of
from jaxprobe.scope import Scope, Threshold


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
      scope: where its signals lay in training; None where unknown.
    """

    dims: FamilyDims
    config: EncoderConfig
    standardizer: Standardizer
    names: tuple[str, ...]
    params: Params
    lengths: tuple[int, ...] = ()
    scope: Scope | None = None

    @classmethod
    def from_trained(
        cls,
        trained: Trained,
        names: Sequence[str],
        *,
        dims: FamilyDims,
        config: EncoderConfig,
        standardizer: Standardizer,
        lengths: Sequence[int] = (),
        scope: Scope | None = None,
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
            scope=scope,
        )

    @property
    def row_bytes(self) -> int:
        """What encoding an answer of the longest spans in training takes, in bytes.

        An upper estimate: the compiled modules of three runs take .4 to 1.0 of it.
        """
        n_encoders = int(np.prod(jax.tree.leaves(self.params)[0].shape[:2]))
        projected = len(self.dims.sizes) * self.config.projection
        widths = n_encoders * (3 * projected + 6 * self.config.hidden)
        return 4 * sum(self.lengths) * (self.dims.total + widths)


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


# `single_pass` reads the with-context pass alone (the paper's ablation "w/o
# closed-book"), for a caller who has one answer and one forward pass.
HeadName = Literal["closed_book", "with_context", "single_pass"]


class Scores(NamedTuple):
    """What the detector says of `n_examples` answers.

    Attributes:
      raw: `[n_examples]` mean over seeds of the fused probability, uncalibrated.
      p_correct: `[n_examples]` calibrated probability of being correct.
      encoders: `[n_examples, n_selected]` each selected encoder's own probability, mean
        over seeds.
      encoder_names: `n_selected` names, as in "with_context/HPA".
    """

    raw: np.ndarray
    p_correct: np.ndarray
    encoders: np.ndarray
    encoder_names: tuple[str, ...]

    def first(self, n: int) -> "Scores":
        """The first `n` examples; the others were padding."""
        return self._replace(
            raw=self.raw[:n], p_correct=self.p_correct[:n], encoders=self.encoders[:n]
        )

    @staticmethod
    def joined(parts: "Sequence[Scores]") -> "Scores":
        """Scores of answers that were scored in parts."""
        *arrays, names = zip(*parts, strict=True)
        return Scores(*map(np.concatenate, arrays), names[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingHead:
    """The fusion heads of one setting.

    Attributes:
      reads: the selected encoders in pool order, as (pass, subset name).
      config: shape of the heads.
      params: leaves `[n_seeds, ...]`.
      calibrator: from raw score to probability.
      threshold: at which answers are trusted; None where none was asked for.
    """

    reads: tuple[tuple[Setting, str], ...]
    config: FusionConfig
    params: Params
    calibrator: Calibrator
    threshold: Threshold | None = None


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

    def one(params, pooled, logits):
        slots = jnp.arange(len(slot_mask))
        return head.apply(params, head_inputs(pooled, logits), slots, slot_mask)

    return jax.nn.sigmoid(jax.vmap(one)(params, pooled, logits)).mean(axis=0)


class _SavedBank(Record, frozen=True, kw_only=True):
    """What is not an array of an `EncoderBank`."""

    dims: FamilyDims
    config: EncoderConfig
    names: tuple[str, ...]
    lengths: tuple[int, ...]


class _SavedHead(Record, frozen=True, kw_only=True):
    """What is not an array of a `SettingHead`."""

    reads: tuple[tuple[Setting, str], ...]
    config: FusionConfig
    threshold: Threshold | None


class _Saved(Record, frozen=True, kw_only=True):
    """What is not an array of a `Detector`."""

    format: Literal[2]
    banks: dict[Setting, _SavedBank]
    heads: dict[HeadName, _SavedHead]
    facts: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
    """Scores answers from their signals, with or without the context's.

    Attributes:
      banks: encoders per pass.
      heads: by name; see `HeadName`.
      facts: what the detector belongs to (backbone, layer, template), JSON values.
    """

    banks: Mapping[Setting, EncoderBank]
    heads: Mapping[HeadName, SettingHead]
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Refuse heads that read encoders which are not there."""
        for setting, head in self.heads.items():
            for where, name in head.reads:
                if where not in self.banks or name not in self.banks[where].names:
                    raise ValueError(
                        f"the {setting} head reads encoder {name} of {where}, which "
                        "the detector does not hold"
                    )

    def score_closed_book(self, features: Features) -> Scores:
        """Score answers given without context; features have two spans."""
        return self._score("closed_book", {"closed_book": features})

    def score_with_context(
        self, with_context: Features, closed_book: Features | None
    ) -> Scores:
        """Score answers given with context.

        Args:
          with_context: signals of the pass with context, three spans.
          closed_book: signals of the closed-book pass on the same questions; None only
            where no selected encoder reads them.
        """
        passes: dict[Setting, Features] = {"with_context": with_context}
        if closed_book is not None:
            passes["closed_book"] = closed_book
        return self._score("with_context", passes)

    def score_single_pass(self, with_context: Features) -> Scores:
        """Score answers given with context from their own forward pass alone."""
        return self._score("single_pass", {"with_context": with_context})

    def _score(self, setting: HeadName, passes: Mapping[Setting, Features]) -> Scores:
        """Encode the passes that the setting's head reads, fuse, calibrate."""
        head = self._head(setting)
        encoded = {
            where: self._encode(where, passes) for where in {w for w, _ in head.reads}
        }
        logits, pooled = [], []
        for where, name in head.reads:
            row = self.banks[where].names.index(name)
            logits.append(encoded[where][0][:, row])
            pooled.append(encoded[where][1][:, row])
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
        raw = np.asarray(raw, np.float64)
        own = np.asarray(jax.nn.sigmoid(filled).mean(axis=0).T, np.float64)
        names = tuple(f"{where}/{name}" for where, name in head.reads)
        return Scores(raw, head.calibrator(raw), own, names)

    def _head(self, setting: HeadName) -> SettingHead:
        """The heads of a setting, or a clear error."""
        if setting not in self.heads:
            raise ValueError(
                f"this detector was not trained for {setting}; it knows "
                f"{', '.join(self.heads)}"
            )
        return self.heads[setting]

    def _encode(self, where: Setting, passes: Mapping[Setting, Features]):
        """Run the bank of one pass over its features."""
        if where not in passes:
            raise ValueError(f"this score needs the signals of the {where} pass too")
        bank, features = self.banks[where], passes[where]
        check_features(features, bank.dims)
        n_spans = len(SPANS[where])
        if features.n_spans != n_spans:
            raise ValueError(
                f"{where} features have {n_spans} spans, got {features.n_spans}"
            )
        masks = np.stack([SUBSETS[subset_index(name)] for name in bank.names])
        return bank_outputs(
            bank.params,
            jnp.asarray(masks),
            bank.standardizer,
            features,
            dims=bank.dims,
            encoder=Encoder(bank.config, bank.dims),
        )

    def save(self, path: Path | str) -> None:
        """Write the detector to a directory, atomically (see `checkpoint`)."""
        arrays: dict[str, Any] = {"banks": {}, "heads": {}}
        config: dict[str, Any] = {"format": 2, "banks": {}, "heads": {}}
        config["facts"] = dict(self.facts)
        for where, bank in self.banks.items():
            arrays["banks"][where] = {
                "params": bank.params,
                "standardizer": bank.standardizer._asdict(),
            }
            if bank.scope is not None:
                arrays["banks"][where]["scope"] = bank.scope._asdict()
            config["banks"][where] = {
                "dims": dataclasses.asdict(bank.dims),
                "config": dataclasses.asdict(bank.config),
                "names": list(bank.names),
                "lengths": list(bank.lengths),
            }
        for setting, head in self.heads.items():
            arrays["heads"][setting] = {
                "params": head.params,
                "calibrator": head.calibrator._asdict(),
            }
            config["heads"][setting] = {
                "config": dataclasses.asdict(head.config),
                "reads": [list(read) for read in head.reads],
                "threshold": head.threshold and dataclasses.asdict(head.threshold),
            }
        checkpoint.save(Path(path), arrays, config)

    @classmethod
    def load(cls, path: Path | str) -> "Detector":
        """Read a detector; every file is checked against its SHA-256 first."""
        arrays, saved = checkpoint.restore(Path(path), _Saved)
        scopes = {where: found.get("scope") for where, found in arrays["banks"].items()}
        banks = {
            where: EncoderBank(
                **msgspec.structs.asdict(spec),
                params=arrays["banks"][where]["params"],
                standardizer=Standardizer(**arrays["banks"][where]["standardizer"]),
                scope=scopes[where] and Scope(**scopes[where]),
            )
            for where, spec in saved.banks.items()
        }
        heads = {
            setting: SettingHead(
                **msgspec.structs.asdict(spec),
                params=arrays["heads"][setting]["params"],
                calibrator=Calibrator(**arrays["heads"][setting]["calibrator"]),
            )
            for setting, spec in saved.heads.items()
        }
        return cls(banks=banks, heads=heads, facts=saved.facts)
