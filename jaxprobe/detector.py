"""The trained detector: from signals to a calibrated P(answer is correct).

It holds, per pass, the encoders that some head reads, and, per setting, the fusion
heads of all seeds and a calibrator. The raw score is the mean over seeds of the heads'
probabilities.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from beatrice.extract.generate.prompts import PromptConfig
from beatrice.extract.records import AnswerSpan, Record, Setting
from beatrice.extract.store.families import Dtype
from beatrice.extract.store.spec import ReadingPath
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.encoder import Encoder, Params, apply_module
from beatrice.jaxprobe.families import (
    FamilyDims,
    Features,
    Standardizer,
    check_features,
)
from beatrice.jaxprobe.family_tokens import FamilyTokens, split_families
from beatrice.jaxprobe.fusion import FusionHead, head_inputs, slots_of
from beatrice.jaxprobe.scope import Evidence, Scope, Threshold

_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBank:
    """The selected encoders of one pass.

    Attributes:
      dims: channels of that pass.
      config: shape of its encoders.
      names: subsets, as in "HPA"; one per encoder.
      spans: that the encoders read, indices into `SPAN_NAMES`.
      lengths: of the longest spans in training; whoever pads to them compiles once.
        Empty where unknown.
      standardizer: fitted on its training tokens.
      params: leaves `[n_seeds, n_encoders, ...]`.
      scope: where its signals lay in training; None where unknown.
    """

    dims: FamilyDims
    config: EncoderConfig
    names: tuple[str, ...]
    spans: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    standardizer: Standardizer
    params: Params
    scope: Scope | None = None

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
    over_kept = jax.vmap(lambda p, mask: apply_module(encoder, p, families, mask))
    return jax.vmap(over_kept, in_axes=(0, None))(params, family_masks)


# `single_pass` reads the with-context pass alone (the paper's ablation "w/o
# closed-book"), for a caller who has one answer and one forward pass.
HeadName = Literal["closed_book", "with_context", "single_pass"]


class Scores(NamedTuple):
    """Scores of `n_examples` answers.

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

    def take(self, rows: np.ndarray | slice) -> "Scores":
        """Select examples by index or slice."""
        return self._replace(
            raw=self.raw[rows],
            p_correct=self.p_correct[rows],
            encoders=self.encoders[rows],
        )

    def first(self, n: int) -> "Scores":
        """The first `n` examples; the others were padding."""
        return self.take(slice(n))

    @staticmethod
    def joined(scores: "Sequence[Scores]") -> "Scores":
        """Scores of answers that were scored in parts."""
        raw, p_correct, encoders, names = zip(*scores, strict=True)
        arrays = map(np.concatenate, (raw, p_correct, encoders))
        return Scores(*arrays, encoder_names=names[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingHead:
    """The fusion heads of one setting.

    Attributes:
      reads: the selected encoders in pool order, as (pass, subset name).
      config: shape of the heads.
      threshold: from which P(correct) on answers are trusted; None without a threshold.
      evidence: on how many answers it rests; None where unknown.
      params: leaves `[n_seeds, ...]`.
      calibrator: from raw score to probability.
    """

    reads: tuple[tuple[Setting, str], ...]
    config: FusionConfig
    threshold: Threshold | None = None
    evidence: Evidence | None = None
    params: Params
    calibrator: Calibrator


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a detector was trained on: a model, and how its answers were read.

    Attributes:
      model: name or path of the backbone.
      revision: identity of its weights; the detector scores this model alone.
      layer: entry of the resid axis that hidden states are of (0 is the embedding).
      dtype: in which the backbone computed.
      stored_as: types in which the families were stored, in their order; live signals
        are rounded likewise. Empty where they were not rounded.
      answer_span: which tokens were the answer's, see `extract.signals.sequence`.
      prompt: how questions were put.
      stop_id: the token that ended most answers; None where none ended.
      scripts: that the training texts are written in, see `jaxprobe.scope.scripts_of`;
        empty where unknown.
      path: by which most of the signals came: "decode", of the passes that wrote the
        answers, or "teacher_forced", of passes that read them again.
    """

    model: str
    revision: str
    layer: int
    dtype: str = "float32"
    stored_as: tuple[Dtype, ...] = ()
    answer_span: AnswerSpan = "emitting"
    prompt: PromptConfig = PromptConfig()
    stop_id: int | None = None
    scripts: tuple[str, ...] = ()
    path: ReadingPath = "teacher_forced"


class _Saved(Record, frozen=True, kw_only=True):
    """A detector without its arrays, which are the tree of the checkpoint."""

    format: Literal[5]
    banks: dict[Setting, dict[str, Any]]
    heads: dict[HeadName, dict[str, Any]]
    provenance: Provenance | None


_ARRAYS = {
    "params": dict,
    "standardizer": Standardizer,
    "scope": Scope,
}  # fields of a bank or a head that hold arrays


def _split_arrays(value: EncoderBank | SettingHead) -> tuple[dict, dict[str, Any]]:
    """Return the arrays of a bank or a head as a tree, and its other fields."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    arrays = {name: fields.pop(name) for name in _ARRAYS if name in fields}
    tree = {
        name: x if isinstance(x, dict) else x._asdict()
        for name, x in arrays.items()
        if x is not None
    }
    return tree, msgspec.to_builtins(fields)


def _merge_arrays(tree: dict, fields: dict[str, Any], kind: type[_Kind]) -> _Kind:
    arrays = {name: _ARRAYS[name](**arrays) for name, arrays in tree.items()}
    return msgspec.convert({**fields, **arrays}, kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
    """Scores answers from their signals, with or without the context's.

    Attributes:
      banks: encoders per pass.
      heads: by name; see `HeadName`.
      provenance: what it was trained on; None where that was a caller's arrays.
    """

    banks: Mapping[Setting, EncoderBank]
    heads: Mapping[HeadName, SettingHead]
    provenance: Provenance | None = None

    def __post_init__(self):
        """Check that every encoder that a head reads is in its bank."""
        for setting, head in self.heads.items():
            for where, name in head.reads:
                if where not in self.banks or name not in self.banks[where].names:
                    raise ValueError(
                        f"the {setting} head reads encoder {name} of {where}, which "
                        "the detector lacks"
                    )

    @property
    def doubts(self) -> tuple[str, ...]:
        """Say why P is not to be trusted, by head; empty where it may be."""
        return tuple(
            f"{name}: {doubt}"
            for name, head in self.heads.items()
            if head.evidence is not None
            for doubt in head.evidence.doubts
        )

    def passes_of(self, branch: HeadName) -> tuple[Setting, ...]:
        """Return the passes that a head reads."""
        return tuple(dict.fromkeys(where for where, _ in self._head(branch).reads))

    def score_closed_book(self, features: Features) -> Scores:
        """Score answers given without context; features have two spans."""
        return self.score("closed_book", {"closed_book": features})

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
        return self.score("with_context", passes)

    def score_single_pass(self, with_context: Features) -> Scores:
        """Score answers given with context from their own forward pass alone."""
        return self.score("single_pass", {"with_context": with_context})

    def score(self, branch: HeadName, passes: Mapping[Setting, Features]) -> Scores:
        """Encode the passes that a head reads, fuse, calibrate.

        Args:
          branch: which head.
          passes: signals of the same answers; others than are read may be among them.
        """
        head = self._head(branch)
        encoded = {
            where: self._encode(where, passes) for where in self.passes_of(branch)
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
        encoders = np.asarray(jax.nn.sigmoid(filled).mean(axis=0).T, np.float64)
        names = tuple(f"{where}/{name}" for where, name in head.reads)
        return Scores(raw, head.calibrator(raw), encoders, names)

    def _head(self, setting: HeadName) -> SettingHead:
        if setting not in self.heads:
            raise ValueError(
                f"this detector was not trained for {setting}, but for "
                f"{', '.join(self.heads)}"
            )
        return self.heads[setting]

    def _encode(self, where: Setting, passes: Mapping[Setting, Features]):
        if where not in passes:
            raise ValueError(f"this score needs the signals of the {where} pass too")
        bank, features = self.banks[where], passes[where]
        check_features(features, bank.dims)
        if features.n_spans != len(bank.spans):
            raise ValueError(
                f"{where} features have {len(bank.spans)} spans, got {features.n_spans}"
            )
        subsets = [bank.dims.subset_index(name) for name in bank.names]
        masks = bank.dims.subset_masks[subsets]
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
        tree, saved = (
            {},
            {"format": 5, "provenance": msgspec.to_builtins(self.provenance)},
        )
        for name, values in (("banks", self.banks), ("heads", self.heads)):
            split = {key: _split_arrays(value) for key, value in values.items()}
            tree[name] = {key: arrays for key, (arrays, _) in split.items()}
            saved[name] = {key: fields for key, (_, fields) in split.items()}
        checkpoint.save(Path(path), tree, saved)

    @classmethod
    def load(cls, path: Path | str) -> "Detector":
        """Read a detector; every file is checked against its SHA-256 first."""
        tree, saved = checkpoint.restore(Path(path), _Saved)
        try:
            banks: dict[Setting, EncoderBank] = {
                setting: _merge_arrays(tree["banks"][setting], fields, EncoderBank)
                for setting, fields in saved.banks.items()
            }
            heads: dict[HeadName, SettingHead] = {
                name: _merge_arrays(tree["heads"][name], fields, SettingHead)
                for name, fields in saved.heads.items()
            }
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no detector of this version ({error}); run `beatrice "
                "calibrate` again"
            ) from error
        return cls(banks=banks, heads=heads, provenance=saved.provenance)
