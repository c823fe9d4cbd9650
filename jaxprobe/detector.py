"""The trained detector: from signals to a calibrated P(answer is correct).

A detector holds the encoders of each pass that some head reads and, for each setting,
the fusion heads of all seeds and a calibrator. The raw score is the mean over seeds of
the heads' probabilities.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from beatrice.extract.backbone.names import COMMIT, AttentionLayers, ModelHashes
from beatrice.extract.generate.templates import MAX_NEW_TOKENS, PromptConfig
from beatrice.extract.records import SETTINGS, AnswerSpan, Record, Setting
from beatrice.extract.run.files import (
    read_json,
    replaced_folder,
    unreplaced,
    verify_checksums,
)
from beatrice.extract.store.spec import Dtype, ReadingPath
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.config import DETECTOR_FORMAT, EncoderConfig, FusionConfig
from beatrice.jaxprobe.families import (
    SUBSET_NAMES,
    FamilyDims,
    Features,
    Standardizer,
    check_features,
)
from beatrice.jaxprobe.scope import Evidence, Scope, Thresholds, Validation, certified

Params = Any  # nested dictionaries of arrays
CONFIG, ARRAYS = "config.json", "probe.safetensors"
_Kind = TypeVar("_Kind", bound="EncoderBank | SettingHead")
# Maps a pass and its features to its encoders' logits `[n_seeds, n_kept, n_examples]`
# and pooled vectors `[..., d_pooled]`, arrays of any framework.
Encode = Callable[[Setting, Features], tuple[Any, Any]]
# Maps a head and lists of its encoders' logits and pooled vectors to the fused
# probability and the encoders' `[n_examples, n_selected]`, means over seeds in float64.
Fuse = Callable[["SettingHead", list[Any], list[Any]], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBank:
    """The selected encoders of one pass."""

    dims: FamilyDims  # channels of the pass
    config: EncoderConfig  # shape of the encoders
    names: tuple[str, ...]  # the subset of each encoder, such as "HPA"
    spans: tuple[int, ...]  # spans that the encoders read, indices into `SPAN_NAMES`
    # Longest length of each span in training; padding to these compiles code once.
    lengths: tuple[int, ...]
    standardizer: Standardizer  # fitted on the training tokens
    params: Params  # leaves `[n_seeds, n_encoders, ...]`
    scope: Scope  # ranges of the training signals

    def __post_init__(self) -> None:
        """Check that channels' statistics have their shapes; others would broadcast."""
        shapes = [np.shape(x) for x in (*self.standardizer, *self.scope)]
        expected = [(self.dims.total,)] * 4 + [(self.dims.n_families,)]
        if shapes != expected:
            raise ValueError(
                "standardizer and scope: expected arrays of shapes "
                f"{expected}, found {shapes}"
            )

    @property
    def row_bytes(self) -> int:
        """Most bytes that encoding takes for an answer no longer than in training."""
        return self.bytes_of(self.lengths)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Return the bytes that encoding takes for an answer with such span lengths."""
        _, first = next(leaves(self.params))
        n_encoders = int(np.prod(first.shape[:2]))
        projected = len(self.dims.sizes) * self.config.projection
        widths = n_encoders * (3 * projected + 6 * self.config.hidden)
        return 4 * sum(lengths) * (self.dims.total + widths)


# `single_pass` reads only the with-context pass (the paper's ablation "w/o
# closed-book"), for a caller who has one answer and one forward pass.
HeadName = Literal["closed_book", "with_context", "single_pass"]
# For each setting, the head that reads only the setting's own pass.
OWN_PASS_HEADS: dict[Setting, HeadName] = {
    "closed_book": "closed_book",
    "with_context": "single_pass",
}


BRANCHES: tuple[HeadName, ...] = ("closed_book", "with_context", "single_pass")


def branch_setting(branch: HeadName) -> Setting:
    """Return the setting whose answers a branch scores."""
    return "closed_book" if branch == "closed_book" else "with_context"


def branches_of(settings: Sequence[Setting]) -> tuple[HeadName, ...]:
    """Return the branches that score answers of these settings."""
    return tuple(branch for branch in BRANCHES if branch_setting(branch) in settings)


def encoders_read(
    branch: HeadName, members: Sequence[int], names: Sequence[str] = SUBSET_NAMES
) -> tuple[tuple[Setting, str], ...]:
    """Return the (pass, subset name) of each position in a branch's pool.

    `names` are the names of all subsets.
    """
    setting, n = branch_setting(branch), len(names)
    return tuple((setting if i < n else "closed_book", names[i % n]) for i in members)


def pool_names(branch: HeadName, members: Sequence[int]) -> list[str]:
    """Return pool positions as printed: [HP] for with context, (HA) for closed-book."""
    return [
        f"({name})" if where == "closed_book" else f"[{name}]"
        for where, name in encoders_read(branch, members)
    ]


class Scores(NamedTuple):
    """Scores of `n_examples` answers."""

    raw: np.ndarray  # `[n_examples]` uncalibrated fused probability, mean over seeds
    p_correct: np.ndarray  # `[n_examples]` calibrated probability of being correct
    # `[n_examples, n_selected]` probability of each selected encoder, mean over seeds.
    encoders: np.ndarray
    encoder_names: tuple[str, ...]  # `n_selected` names such as "with_context/HPA"

    def take(self, rows: np.ndarray | slice) -> "Scores":
        """Select examples by index or slice."""
        return self._replace(
            raw=self.raw[rows],
            p_correct=self.p_correct[rows],
            encoders=self.encoders[rows],
        )

    @staticmethod
    def joined(scores: "Sequence[Scores]") -> "Scores":
        """Join the scores of answers that were scored in parts."""
        *arrays, names = zip(*scores, strict=True)
        return Scores(*map(np.concatenate, arrays), encoder_names=names[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingHead:
    """The fusion heads of one setting."""

    # The selected encoders in pool order, as (pass, subset name).
    reads: tuple[tuple[Setting, str], ...]
    config: FusionConfig  # shape of the heads
    precision: float = 0.9  # default share of decisions that should be right
    evidence: Evidence  # how many answers it was trained and calibrated on
    validation: Validation  # P of the answers that it was calibrated on
    params: Params  # leaves `[n_seeds, ...]`
    calibrator: Calibrator  # from raw score to probability

    def thresholds(self, precision: float | None = None) -> Thresholds:
        """Return the thresholds that hold a precision; None is `self.precision`."""
        wanted = self.precision if precision is None else precision
        both = certified(self.validation, wanted, self.evidence.n_tried)
        if not (doubts := self.evidence.doubts):
            return both
        # With so little evidence a certified threshold would be luck.
        nothing = {"p_correct": None, "n_decided": 0, "n_errors": 0, "low": 0.0}
        return Thresholds(
            *(dataclasses.replace(x, **nothing, doubt=doubts[0]) for x in both)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a detector was trained on: a model, and how its answers were read."""

    model: str  # name or path of the backbone
    revision: str  # identity of its weights; the detector scores only this model
    layer: int  # entry of the resid axis read as hidden states (0 is the embedding)
    dtype: str = "float32"  # type in which the backbone computed
    # Types in which the families were stored, in their order; live signals are rounded
    # to them. Empty if signals were not rounded.
    stored_as: tuple[Dtype, ...] = ()
    answer_span: AnswerSpan = "emitting"  # its tokens, see `extract.signals.sequence`
    prompt: PromptConfig = PromptConfig()  # how questions were asked
    stop_id: int | None = None  # token that ended most answers; None if none ended
    # Scripts of the training texts, see `jaxprobe.scope.scripts_of`; empty if unknown.
    scripts: tuple[str, ...] = ()
    hashes: ModelHashes = ModelHashes()  # of config, tokenizer and chat template
    # Hash of the weight and config files, which copies and later commits of a Hub model
    # may share; empty if unknown, or if the model was in memory.
    files_sha256: str = ""
    # Hash of the loaded config and weights, by which the model is known again if it was
    # loaded by other code; empty if unknown.
    weights_sha256: str = ""
    # Where most signals of a setting came from: "decode", the passes that wrote the
    # answers, or "teacher_forced", later passes over the finished answers.
    paths: Mapping[Setting, ReadingPath] = dataclasses.field(default_factory=dict)
    attention_layers: AttentionLayers = "all"  # layers whose attention was read
    max_new_tokens: int = MAX_NEW_TOKENS  # per answer
    stop: tuple[str, ...] | None = None  # stop strings; None: `prompt.usual_stop`

    @property
    def commit(self) -> str | None:
        """The commit of a Hub model; None for any other model."""
        return self.revision if COMMIT.fullmatch(self.revision) else None


class _Format(msgspec.Struct):
    """The format number, read first because all else may differ between versions."""

    format: int


class _Saved(Record, frozen=True, kw_only=True):
    """A detector without its arrays."""

    format: Literal[8, 9, 10, 11, 12, 13]
    banks: dict[Setting, dict[str, Any]]
    heads: dict[HeadName, dict[str, Any]]
    provenance: dict[str, Any] | None


_ARRAYS = {
    "params": dict,
    "standardizer": Standardizer,
    "scope": Scope,
    "validation": Validation,
}  # fields of a bank or a head that hold arrays


def _split_arrays(value: EncoderBank | SettingHead) -> tuple[dict, dict[str, Any]]:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    arrays = {name: fields.pop(name) for name in _ARRAYS if name in fields}
    tree = {
        name: x if isinstance(x, dict) else x._asdict() for name, x in arrays.items()
    }
    # Field by field, since `to_builtins` omits the defaults of what was read.
    for name, x in fields.items():
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields[name] = dataclasses.asdict(x)
    return tree, msgspec.to_builtins(fields, enc_hook=lambda number: number.item())


def _merge_arrays(tree: dict, fields: dict[str, Any], kind: type[_Kind]) -> _Kind:
    arrays = {name: _ARRAYS[name](**arrays) for name, arrays in tree.items()}
    value = msgspec.convert({**fields, **arrays}, kind)
    if names := sorted(_names(fields) ^ _names(_split_arrays(value)[1])):
        raise ValueError(f"unknown or missing fields: {', '.join(names)}")
    return value


def _names(fields: Mapping[str, Any]) -> set[str]:
    return {name for name, _ in leaves(fields)}


def _read_provenance(fields: dict[str, Any] | None, saved_as: int) -> Provenance | None:
    """Return a detector's provenance; missing fields have their defaults."""
    if fields is not None and "path" in fields:  # of formats up to 10
        path = fields.pop("path")
        fields["paths"] = dict.fromkeys(SETTINGS, path)
    if fields is not None and saved_as < 13:
        fields.get("hashes", {}).pop("config", None)
    value = msgspec.convert(fields, Provenance | None)
    known = _names(msgspec.to_builtins(value) or {})
    if names := sorted(_names(fields or {}) - known):
        raise ValueError(f"unknown fields: {', '.join(names)}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
    """Scores answers from their signals, with or without a context."""

    banks: Mapping[Setting, EncoderBank]  # encoders per pass
    heads: Mapping[HeadName, SettingHead]  # by name; see `HeadName`
    provenance: Provenance | None = None  # None if trained on a caller's arrays

    def __post_init__(self):
        """Check that the banks have the encoders that heads read, named alike."""
        for setting, head in self.heads.items():
            for where, name in head.reads:
                if where not in self.banks or name not in self.banks[where].names:
                    raise ValueError(
                        f"the {setting} head reads encoder {name} of {where}, which "
                        "the detector lacks"
                    )
                families = {bank.dims.names for bank in self.banks.values()}
                if where != branch_setting(setting) and len(families) > 1:
                    raise ValueError(
                        f"the {setting} head reads encoders of {where}, whose families "
                        "are others; fit the probe again with the same in both settings"
                    )

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons not to trust P, each with its head; empty if there are none."""
        return tuple(
            f"{name}: {doubt}"
            for name, head in self.heads.items()
            for doubt in head.evidence.doubts
        )

    def passes_of(self, branch: HeadName) -> tuple[Setting, ...]:
        """Return the passes that a head reads."""
        return tuple(dict.fromkeys(where for where, _ in self._head(branch).reads))

    def score(
        self,
        branch: HeadName,
        passes: Mapping[Setting, Features],
        encode: Encode,
        fuse: Fuse,
    ) -> Scores:
        """Score answers: encode the passes that the head reads, fuse and calibrate.

        `encode` and `fuse` are the forward pass of a framework; see `pgir.forward`.
        """
        head = self._head(branch)
        encoded = {}
        for where in self.passes_of(branch):
            self._check_pass(where, passes)
            encoded[where] = encode(where, passes[where])
        logits, pooled = [], []
        for where, name in head.reads:
            row = self.banks[where].names.index(name)
            logits.append(encoded[where][0][:, row])
            pooled.append(encoded[where][1][:, row])
        raw, encoders = fuse(head, logits, pooled)
        names = tuple(f"{where}/{name}" for where, name in head.reads)
        return Scores(raw, head.calibrator(raw), encoders, names)

    def _head(self, setting: HeadName) -> SettingHead:
        if setting not in self.heads:
            raise ValueError(
                f"this detector has no head {setting}, only {', '.join(self.heads)}"
            )
        return self.heads[setting]

    def _check_pass(self, where: Setting, passes: Mapping[Setting, Features]) -> None:
        if where not in passes:
            raise ValueError(f"this score needs the signals of the {where} pass")
        bank, features = self.banks[where], passes[where]
        check_features(features, bank.dims)
        if features.n_spans != len(bank.spans):
            raise ValueError(
                f"expected {where} features of {len(bank.spans)} spans, got "
                f"{features.n_spans}"
            )

    def save(self, path: Path | str) -> None:
        """Write the detector to a folder atomically, with checksums."""
        with replaced_folder(Path(path)) as folder:
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the two files of a detector into a folder: structure and arrays."""
        tree: dict[str, Any] = {}
        saved: dict[str, Any] = {
            "format": DETECTOR_FORMAT,
            "provenance": msgspec.to_builtins(self.provenance),
        }
        for name, values in (("banks", self.banks), ("heads", self.heads)):
            split = {key: _split_arrays(value) for key, value in values.items()}
            tree[name] = {key: arrays for key, (arrays, _) in split.items()}
            saved[name] = {key: fields for key, (_, fields) in split.items()}
        arrays = {path: np.ascontiguousarray(x) for path, x in leaves(tree)}
        (folder / ARRAYS).write_bytes(save(arrays))
        (folder / CONFIG).write_text(json.dumps(saved, indent=1, sort_keys=True))

    @classmethod
    def load(cls, path: Path | str, files: Sequence[str] | None = None) -> "Detector":
        """Read a detector, after checking the SHA-256 of every file.

        `files` is passed to `verify_checksums`.
        """
        folder = Path(path)
        with unreplaced(folder):
            verify_checksums(folder, files=files)
            return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> "Detector":
        again = "fit the probe again, or run `beatrice calibrate` again"
        saved_as = read_json(folder / CONFIG, _Format, again).format
        if saved_as > DETECTOR_FORMAT:
            raise ValueError(
                f"{folder / CONFIG} has format {saved_as} of a newer beatrice-probe "
                f"(this version reads up to {DETECTOR_FORMAT}); install the newer "
                "version"
            )
        saved = read_json(folder / CONFIG, _Saved, again)
        try:
            provenance = _read_provenance(saved.provenance, saved.format)
            tree = _nested(load_file(folder / ARRAYS))
            banks: dict[Setting, EncoderBank] = {
                setting: _merge_arrays(tree["banks"][setting], fields, EncoderBank)
                for setting, fields in saved.banks.items()
            }
            for fields in saved.heads.values() if saved.format < 11 else ():
                fields["evidence"].setdefault("n_tried", 1)
            heads: dict[HeadName, SettingHead] = {
                name: _merge_arrays(tree["heads"][name], fields, SettingHead)
                for name, fields in saved.heads.items()
            }
            for name, head in heads.items() if saved.format == 8 else ():
                validation = head.validation.with_ties_against()
                heads[name] = dataclasses.replace(head, validation=validation)
        # Array names that form no tree raise IndexError or AttributeError.
        except (
            ValueError,
            LookupError,
            TypeError,
            OSError,
            SafetensorError,
            AttributeError,
        ) as error:
            raise ValueError(
                f"{folder} is not a detector of this version ({error}); {again}"
            ) from error
        return cls(banks=banks, heads=heads, provenance=provenance)


class _Row(msgspec.Struct):
    """The fields of a probe's report that its card and `beatrice probes` use."""

    head: HeadName
    split: str
    metric: str
    value: float | None
    n: int | None
    ci_low: float | None = None
    ci_high: float | None = None


class About(msgspec.Struct):
    """What a probe's folder holds besides its detector."""

    layer: int | None
    report: tuple[dict[str, Any], ...]

    def __post_init__(self) -> None:
        """Check the rows; their other fields are kept."""
        msgspec.convert(self.report, tuple[_Row, ...])


class Example(msgspec.Struct):
    """A stored example, with the scores to compare when it is scored again."""

    p_correct: float
    raw: float
    question: str | None = None  # None if the example has a prompt instead


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of nested dictionaries with paths like "banks/closed_book/x"."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return nested dictionaries of arrays that are given by path."""
    tree: dict[str, Any] = {}
    for path, x in arrays.items():
        *folders, name = path.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[name] = x
    return tree
