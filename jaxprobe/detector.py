"""The trained detector: from signals to a calibrated P(answer is correct).

It holds, per pass, the encoders that some head reads, and, per setting, the fusion
heads of all seeds and a calibrator. The raw score is the mean over seeds of the heads'
probabilities.
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
from beatrice.extract.records import AnswerSpan, Record, Setting
from beatrice.extract.run.files import read_json, replaced_folder, verify_checksums
from beatrice.extract.store.spec import Dtype, ReadingPath
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.families import (
    FamilyDims,
    Features,
    Standardizer,
    check_features,
)
from beatrice.jaxprobe.scope import Evidence, Scope, Thresholds, Validation, certified

Params = Any  # nested dictionaries of arrays
CONFIG, ARRAYS = "config.json", "probe.safetensors"
_Kind = TypeVar("_Kind", bound="EncoderBank | SettingHead")
# Of a pass's features: logits `[n_seeds, n_kept, n_examples]` and pooled vectors
# `[..., d_pooled]` of its encoders, arrays of any framework.
Encode = Callable[[Setting, Features], tuple[Any, Any]]
# Of a head and what its encoders put out, lists over encoders: the fused probability
# and the encoders' `[n_examples, n_selected]`, each a mean over seeds, in float64.
Fuse = Callable[["SettingHead", list[Any], list[Any]], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBank:
    """The selected encoders of one pass."""

    dims: FamilyDims  # channels of that pass
    config: EncoderConfig  # shape of its encoders
    names: tuple[str, ...]  # subsets, as in "HPA"; one per encoder
    spans: tuple[int, ...]  # that the encoders read, indices into `SPAN_NAMES`
    # Of the longest spans in training; whoever pads to them compiles once.
    lengths: tuple[int, ...]
    standardizer: Standardizer  # fitted on its training tokens
    params: Params  # leaves `[n_seeds, n_encoders, ...]`
    scope: Scope  # where its signals lay in training

    @property
    def row_bytes(self) -> int:
        """Bytes that an answer as long as training's longest takes, at most."""
        return self.bytes_of(self.lengths)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Return the bytes that encoding an answer takes whose spans are so long."""
        _, first = next(leaves(self.params))
        n_encoders = int(np.prod(first.shape[:2]))
        projected = len(self.dims.sizes) * self.config.projection
        widths = n_encoders * (3 * projected + 6 * self.config.hidden)
        return 4 * sum(lengths) * (self.dims.total + widths)


# `single_pass` reads the with-context pass alone (the paper's ablation "w/o
# closed-book"), for a caller who has one answer and one forward pass.
HeadName = Literal["closed_book", "with_context", "single_pass"]
# By the setting of an answer, the head that reads its own pass alone.
OWN_PASS_HEADS: dict[Setting, HeadName] = {
    "closed_book": "closed_book",
    "with_context": "single_pass",
}


class Scores(NamedTuple):
    """Scores of `n_examples` answers."""

    # `[n_examples]` mean over seeds of the fused probability, uncalibrated.
    raw: np.ndarray
    p_correct: np.ndarray  # `[n_examples]` calibrated probability of being correct
    # `[n_examples, n_selected]` each selected encoder's own probability, mean over
    # seeds.
    encoders: np.ndarray
    encoder_names: tuple[str, ...]  # `n_selected` names, as in "with_context/HPA"

    def take(self, rows: np.ndarray | slice) -> "Scores":
        """Select examples by index or slice."""
        return self._replace(
            raw=self.raw[rows],
            p_correct=self.p_correct[rows],
            encoders=self.encoders[rows],
        )

    @staticmethod
    def joined(scores: "Sequence[Scores]") -> "Scores":
        """Scores of answers that were scored in parts."""
        *arrays, names = zip(*scores, strict=True)
        return Scores(*map(np.concatenate, arrays), encoder_names=names[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingHead:
    """The fusion heads of one setting."""

    # The selected encoders in pool order, as (pass, subset name).
    reads: tuple[tuple[Setting, str], ...]
    config: FusionConfig  # shape of the heads
    # Share of decisions that shall be right, where nobody asks for another.
    precision: float = 0.9
    evidence: Evidence  # on how many answers it rests
    validation: Validation  # its P of the answers that it was calibrated on
    params: Params  # leaves `[n_seeds, ...]`
    calibrator: Calibrator  # from raw score to probability

    def thresholds(self, precision: float | None = None) -> Thresholds:
        """Return where decisions begin that are right as often as asked."""
        both = certified(self.validation, precision or self.precision)
        if not (doubts := self.evidence.doubts):
            return both
        # A certified threshold among them would be luck.
        nothing = {"p_correct": None, "n_decided": 0, "n_errors": 0, "low": 0.0}
        return Thresholds(
            *(dataclasses.replace(x, **nothing, doubt=doubts[0]) for x in both)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a detector was trained on: a model, and how its answers were read."""

    model: str  # name or path of the backbone
    revision: str  # identity of its weights; the detector scores this model alone
    layer: int  # entry of the resid axis that hidden states are of (0 is the embedding)
    dtype: str = "float32"  # in which the backbone computed
    # Types in which the families were stored, in their order; live signals are rounded
    # likewise. Empty where they were not rounded.
    stored_as: tuple[Dtype, ...] = ()
    # Which tokens were the answer's, see `extract.signals.sequence`.
    answer_span: AnswerSpan = "emitting"
    prompt: PromptConfig = PromptConfig()  # how questions were put
    # The token that ended most answers; None where none ended.
    stop_id: int | None = None
    # That the training texts are written in, see `jaxprobe.scope.scripts_of`; empty
    # where unknown.
    scripts: tuple[str, ...] = ()
    # Of the backbone's config, tokenizer and chat template.
    hashes: ModelHashes = ModelHashes()
    # Of weights and config as files, which copies and later commits of a model of the
    # Hub may share; empty where unknown, and of a model in memory.
    files_sha256: str = ""
    # By which most of the signals came: "decode", of the passes that wrote the answers,
    # or "teacher_forced", of passes that read them again.
    path: ReadingPath = "teacher_forced"
    attention_layers: AttentionLayers = "all"  # whose attention was read
    max_new_tokens: int = MAX_NEW_TOKENS  # of an answer
    stop: tuple[str, ...] | None = None  # that ended answers; None: `prompt.usual_stop`

    @property
    def commit(self) -> str | None:
        """The commit of a model of the Hub; None of any other."""
        return self.revision if COMMIT.fullmatch(self.revision) else None


# Of what is saved. In 8 answers of one P lie in the order of their file; 9 has no hash
# of the files of a Hub's model.
FORMAT = 10


class _Format(msgspec.Struct):
    """What is read first, since all else may be another version's."""

    format: int


class _Saved(Record, frozen=True, kw_only=True):
    """A detector without its arrays."""

    format: Literal[8, 9, 10]
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
    # Field by field: of what was read, `to_builtins` leaves the defaults out.
    for name, x in fields.items():
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields[name] = dataclasses.asdict(x)
    return tree, msgspec.to_builtins(fields, enc_hook=lambda number: number.item())


def _merge_arrays(tree: dict, fields: dict[str, Any], kind: type[_Kind]) -> _Kind:
    arrays = {name: _ARRAYS[name](**arrays) for name, arrays in tree.items()}
    value = msgspec.convert({**fields, **arrays}, kind)
    if names := sorted(_names(fields) ^ _names(_split_arrays(value)[1])):
        raise ValueError(f"fields that are unknown or missing: {', '.join(names)}")
    return value


def _names(fields: Mapping[str, Any]) -> set[str]:
    return {name for name, _ in leaves(fields)}


def _read_provenance(fields: dict[str, Any] | None) -> Provenance | None:
    """Return where a detector is from; what it lacks is as of before there was any."""
    value = msgspec.convert(fields, Provenance | None)
    known = _names(msgspec.to_builtins(value) or {})
    if names := sorted(_names(fields or {}) - known):
        raise ValueError(f"fields that are unknown: {', '.join(names)}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
    """Scores answers from their signals, with or without the context's."""

    banks: Mapping[Setting, EncoderBank]  # encoders per pass
    heads: Mapping[HeadName, SettingHead]  # by name; see `HeadName`
    # What it was trained on; None where that was a caller's arrays.
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
        """Encode the passes that a head reads and no others, fuse, calibrate.

        `encode` and `fuse` are a framework's, see `pgir.bridge`.
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
                f"this detector was not trained for {setting}, but for "
                f"{', '.join(self.heads)}"
            )
        return self.heads[setting]

    def _check_pass(self, where: Setting, passes: Mapping[Setting, Features]) -> None:
        if where not in passes:
            raise ValueError(f"this score needs the signals of the {where} pass too")
        bank, features = self.banks[where], passes[where]
        check_features(features, bank.dims)
        if features.n_spans != len(bank.spans):
            raise ValueError(
                f"{where} features have {len(bank.spans)} spans, got {features.n_spans}"
            )

    def save(self, path: Path | str) -> None:
        """Write the detector to a folder, atomically, with checksums."""
        with replaced_folder(Path(path)) as folder:
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the two files of a detector into a folder: structure and arrays."""
        tree: dict[str, Any] = {}
        saved: dict[str, Any] = {
            "format": FORMAT,
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
        """Read a detector; every file is checked against its SHA-256 first.

        `files` as of `verify_checksums`.
        """
        folder = Path(path)
        verify_checksums(folder, files=files)
        again = "fit the probe, or run `beatrice calibrate`, again"
        if (saved_as := read_json(folder / CONFIG, _Format, again).format) > FORMAT:
            raise ValueError(
                f"{folder / CONFIG}: a newer version of beatrice-probe wrote it, of "
                f"format {saved_as} (this one reads {FORMAT}); install that version"
            )
        saved = read_json(folder / CONFIG, _Saved, again)
        try:
            provenance = _read_provenance(saved.provenance)
            tree = _nested(load_file(folder / ARRAYS))
            banks: dict[Setting, EncoderBank] = {
                setting: _merge_arrays(tree["banks"][setting], fields, EncoderBank)
                for setting, fields in saved.banks.items()
            }
            heads: dict[HeadName, SettingHead] = {
                name: _merge_arrays(tree["heads"][name], fields, SettingHead)
                for name, fields in saved.heads.items()
            }
            for name, head in heads.items() if saved.format == 8 else ():
                validation = head.validation.with_ties_against()
                heads[name] = dataclasses.replace(head, validation=validation)
        # Names of arrays that make no tree end in an IndexError or the last of them.
        except (
            ValueError,
            LookupError,
            TypeError,
            OSError,
            SafetensorError,
            AttributeError,
        ) as error:
            raise ValueError(
                f"{path} is no detector of this version ({error}); {again}"
            ) from error
        return cls(banks=banks, heads=heads, provenance=provenance)


class _Row(msgspec.Struct):
    """What the card and `beatrice probes` read of a row of a probe's report."""

    head: HeadName
    split: str
    metric: str
    value: float | None
    n: int | None
    ci_low: float | None = None
    ci_high: float | None = None


class About(msgspec.Struct):
    """What a probe's folder says beside its detector."""

    layer: int | None
    report: tuple[dict[str, Any], ...]

    def __post_init__(self) -> None:
        """Check the rows, which keep what else they hold."""
        msgspec.convert(self.report, tuple[_Row, ...])


class Example(msgspec.Struct):
    """What is compared where an example is scored again."""

    p_correct: float
    raw: float
    question: str | None = None  # a prompt may stand for it


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of nested dictionaries by path, as in "banks/closed_book/x"."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return arrays by path as nested dictionaries."""
    tree: dict[str, Any] = {}
    for path, x in arrays.items():
        *folders, name = path.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[name] = x
    return tree
