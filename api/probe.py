"""A probe: a detector beside the language model whose answers it judges."""

import copy
import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from beatrice.benchmarks import what_to_do
from beatrice.card import card
from beatrice.extract.backbone.names import IN_MEMORY, ModelHashes, lasting_name
from beatrice.extract.forks import ForkLock
from beatrice.extract.records import Setting
from beatrice.extract.run.directory import NotWritten, RunDir, read_manifest
from beatrice.extract.run.files import (
    CHECKSUMS,
    UNCHECKED,
    from_json,
    read_json,
    replaced_folder,
    sha256_file,
)
from beatrice.extras import naming_extra
from beatrice.jaxprobe.detector import (
    ARRAYS,
    CONFIG,
    OWN_PASS_HEADS,
    About,
    Detector,
    Example,
)
from beatrice.pgir.arguments import argument_error, as_path, as_probability, as_rows
from beatrice.pgir.asking import BATCH_SIZE, AnswerScorer

if TYPE_CHECKING:
    import pandas

    from beatrice.extract.store.store import FeatureStore
    from beatrice.jaxprobe.scope import Thresholds
    from beatrice.model import LanguageModel
    from beatrice.pgir.scorer import Scorer
    from beatrice.signals import Signals

_REPORT, _EXAMPLES, CARD = "eval.json", "examples.jsonl", "README.md"
_FILES = [CONFIG, ARRAYS, _REPORT, _EXAMPLES, CHECKSUMS, CARD]
PROBES = Path(__file__).parent / "probes"  # that come along, a folder each
_HUB = "hf://"
MOST_EXAMPLES = 5
_LOADING = ForkLock()  # not of a probe, which could not be pickled with it
# How far an example's score before the map may lie from where it was: of another
# machine's sums in float32, and of 8 and 11 bits.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


class Probe(AnswerScorer):
    """A detector of right answers, with the language model that it belongs to.

    `predict` takes signals and needs no language model. `score` takes texts: the model
    is loaded when it is first needed, see `load`. What is sent to another process, or
    copied deeply, is without the model that was loaded, and loads it again.
    """

    def __init__(
        self,
        detector: Detector,
        report: Sequence[Mapping[str, Any]] = (),
        *,
        layer: int | None,
        examples: Sequence[Mapping[str, Any]] = (),
        identity: str = "",
        open_scorer: "Callable[[], Scorer] | None" = None,
        strict: bool = True,
    ) -> None:
        """Take a detector; see `fit` and `load`.

        Args:
          detector: the encoders, heads and maps.
          report: what it is worth, as rows.
          layer: entry of the resid axis that hidden states are read from; None where
            no family has layers.
          examples: answers with their P, see `save`.
          identity: SHA-256 of what was loaded; empty where it was fitted now.
          open_scorer: loads the language model; None loads the one that the detector
            names.
          strict: refuse signals of another model, type or answer span.
        """
        self.detector = detector
        self.layer = layer
        self.identity = identity
        self.strict = strict
        self.rows = tuple(dict(row) for row in report)
        self._examples = [dict(row) for row in examples]
        self._open_scorer = open_scorer or partial(scorer_of, detector)
        self._scorer: Scorer | None = None

    def __repr__(self) -> str:
        """Say what it reads, and of which model."""
        heads = ", ".join(
            f"{name}: {'+'.join(subset for _, subset in head.reads)}"
            for name, head in self.detector.heads.items()
        )
        provenance = self.detector.provenance
        of = "arrays" if provenance is None else provenance.model
        return f"Probe({heads}; fitted on {of})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to a process: it opens the language model again there."""
        return {**self.__dict__, "_scorer": None}

    def __copy__(self) -> "Probe":
        """Return a probe beside the same language model."""
        probe = object.__new__(type(self))
        vars(probe).update(vars(self))
        return probe

    @property
    def report(self) -> "pandas.DataFrame":
        """AUROC, AUPRC, ECE and Brier score with 95 % intervals, a row each.

        Rows of the split "validation" flatter: it has chosen layer, encoders, heads and
        map. Those of "test" do not. Empty for a run directory, whose numbers are in its
        `results.jsonl` until `beatrice export` writes its probe.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "report is a table of pandas, which is not installed: pip install "
                "pandas, or read the same rows in `rows`",
                name="pandas",
            ) from error
        return pandas.DataFrame(list(self.rows))

    def with_report(self, report: Iterable[Mapping[str, Any]]) -> "Probe":
        """Return the same probe, of which other rows say what it is worth."""
        probe = copy.copy(self)
        probe.rows = tuple(dict(row) for row in report)
        return probe

    def predict(
        self, signals: "Signals", *, closed_book: "Signals | None" = None
    ) -> np.ndarray:
        """Return calibrated P(correct) of answers from their signals, `[n_answers]`.

        Args:
          signals: of answers in one setting, read as those of the fit.
          closed_book: of with-context answers, the signals of the same questions asked
            closed-book, which the head of both passes reads too and finds by their
            ids; None takes the head that reads the with-context pass alone.

        Raises:
          ValueError: the signals are not of the probe's families, layer or setting, not
            of its model, type or answer span (but for strict=False, which warns), or so
            large that a score overflows.
        """
        with naming_extra("Probe.predict"):
            import torch

            from beatrice.jaxprobe.calibrate import score_store
            from beatrice.pgir.bridge import TorchForward
            from beatrice.signals import Signals, by_setting

        if not isinstance(signals, Signals):
            raise argument_error("signals", "Signals of one setting", signals)
        passes, branch = by_setting(signals), OWN_PASS_HEADS[signals.setting]
        if closed_book is not None:
            branch = "with_context"
            passes |= by_setting(closed_book)
            if list(passes) != ["with_context", "closed_book"]:
                raise ValueError(
                    "closed_book: expected closed-book signals beside with-context "
                    f"ones, found {closed_book} beside {signals}"
                )
        for reading in passes.values():
            self._check_model(reading)
            if reading.layers and self.layer not in reading.layers:
                raise ValueError(
                    f"signals: the probe reads layer {self.layer}, these keep "
                    f"{', '.join(map(str, reading.layers))}; read them with that layer"
                )
        stores: dict[Setting, FeatureStore] = {
            setting: reading.store for setting, reading in passes.items()
        }
        if not len(signals):
            return np.zeros(0)
        # Torch compiles nothing, whatever the number and the lengths of the answers.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scores = score_store(
            self.detector,
            branch,
            stores,
            layer=self.layer,
            examples=signals.indices,
            score=TorchForward(self.detector, device).score,
        )
        if len(odd := np.flatnonzero(np.isnan(scores.p_correct))):
            raise ValueError(
                f"signals: the score of {len(odd)} of {len(signals)} answers is beyond "
                f"float32, the first of {signals.ids[odd[0]]!r}; they lie far outside "
                "what the probe was fitted on: look whether they are read alike"
            )
        return scores.p_correct

    def _check_model(self, signals: "Signals") -> None:
        """Check that signals are of the model of the fit, as far as they tell."""
        from beatrice.pgir.warnings import signal_differences, warn_of_prompt

        trained, about = self.detector.provenance, signals.store.spec.fingerprint
        if trained is None or "model" not in about:  # arrays
            return
        backbone = None if signals.model is None else signals.model.backbone
        unlike = [*signal_differences(trained, about, backbone)]
        if self.strict and unlike:
            raise ValueError(
                f"signals: {unlike[0]}; in Python load with strict=False predicts, and "
                "warns"
            )
        for text in (*unlike, *warn_of_prompt(trained, about)):
            warnings.warn(text, stacklevel=3)

    @property
    def scorer(self) -> "Scorer":
        """The probe beside its language model, which is loaded when first asked for."""
        if self._scorer is None:
            with _LOADING:  # or each of several threads would load a model of its own
                if self._scorer is None:
                    self._scorer = self._open_scorer()
        return self._scorer

    def load_scorer(self) -> "Scorer":
        """Return the probe beside its language model, which is loaded now."""
        return self.scorer

    def score_frame(self, frame: Any, batch_size: int = BATCH_SIZE) -> Any:
        """Return a data frame with what `score_many` says of each row beside it.

        Added are the columns `p_correct`, `decision`, `reason`, `warnings` (joined by
        "; ") and `error`; columns that `score` does not know stay, and are not read.

        Args:
          frame: of pandas or Polars, with columns that `score` takes: `question`,
            `answer` and perhaps `context`.
          batch_size: most answers in one forward pass.

        Raises:
          ValueError: it is another thing, or has one of the added columns already.
        """
        added = ("p_correct", "decision", "reason", "warnings", "error")
        if not hasattr(frame, "assign") and not hasattr(frame, "with_columns"):
            raise argument_error("frame", "a data frame of pandas or Polars", frame)
        if there := [name for name in added if name in frame.columns]:
            raise ValueError(f"frame: it has a column {there[0]!r} already; rename it")
        columns: dict[str, list[Any]] = {name: [] for name in added}
        for score in self.score_many(frame, batch_size):
            for name in added:
                value = getattr(score, name)
                columns[name].append("; ".join(value) if name == "warnings" else value)
        if hasattr(frame, "assign"):
            return frame.assign(**columns)
        import polars

        return frame.with_columns(polars.Series(k, v) for k, v in columns.items())

    def thresholds(self, setting: Setting) -> "Thresholds | None":
        """Return at which P decisions on answers of a setting begin, and how sure."""
        return self.scorer.thresholds(setting)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return messages as the text that the model reads, in which ranges count."""
        return self.scorer.render(messages)

    def save(
        self,
        path: str | Path,
        *,
        examples: Iterable[Any] | None = None,
        untrustworthy: bool = False,
    ) -> None:
        """Write the probe into a folder of its own, which `load` reads anywhere.

        Weights and maps are `probe.safetensors`, what they belong to `config.json`,
        what the probe is worth `eval.json`; `README.md` is a card for people and the
        Hub, and may be edited. All others are under checksums.

        Args:
          path: a new folder, or that of a probe, which is replaced.
          examples: at most five answers as rows of `score_many`. Each is scored now,
            and again when the probe is loaded elsewhere; a P that does not come out
            is refused there. None keeps the examples that the probe came with.
          untrustworthy: save a probe that rests on too few answers; each of its scores
            says so.

        Raises:
          ValueError: something else is there, an example has no P by the probe's own
            model, or the probe rests on too few answers and not `untrustworthy`.
        """
        doubts = self.detector.doubts
        if doubts and not untrustworthy:
            raise ValueError(
                f"{doubts[0]}; fit it on more answers, or save it as it is with "
                "untrustworthy=True (of a verb, --untrustworthy), and each of its "
                "scores will say so"
            )
        folder = as_path(path, "path")
        check_place(folder)
        stored = self._examples
        if examples is not None:
            stored = _scored_examples(self.scorer, examples)
        detector = _portable(self.detector, self._scorer)
        with replaced_folder(folder) as work:
            detector.write(work)
            about = {"layer": self.layer, "report": self.rows}
            (work / _REPORT).write_text(json.dumps(about, indent=1))
            lines = "".join(json.dumps(row) + "\n" for row in stored)
            (work / _EXAMPLES).write_text(lines)
            (work / CARD).write_text(card(detector, self.rows), "utf-8")
        self._examples = stored

    def push(
        self,
        repository: str,
        *,
        private: bool | None = None,
        untrustworthy: bool = False,
    ) -> str:
        """Publish the probe on the Hugging Face Hub, with its card.

        Of a model's path on this machine the last name alone is published.

        Args:
          repository: "owner/name"; made if it is not there. A probe and a card in it
            are replaced; all else stays.
          private: whether a new repository is; None takes its owner's default.
          untrustworthy: as of `save`.

        Returns:
          The commit that holds it: `load("hf://owner/name@COMMIT")`.

        Raises:
          ValueError: the Hub cannot be reached or written to, the repository holds
            something else, or as of `save`.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        hub = HfApi()
        try:
            with tempfile.TemporaryDirectory() as folder:
                work = Path(folder) / "probe"
                ours = copy.copy(self)
                ours.detector = published(self.detector)
                ours.save(work, untrustworthy=untrustworthy)
                hub.create_repo(repository, private=private, exist_ok=True)
                names = {*hub.list_repo_files(repository)}
                if ARRAYS not in names:  # a probe may lie beside other files
                    check_replaceable(f"{_HUB}{repository}", names - {*UNCHECKED})
                commit = hub.upload_folder(repo_id=repository, folder_path=work)
        except (*_hub_errors(), HFValidationError) as error:
            raise ValueError(
                f"{_HUB}{repository}: {_first_line(error)}; look whether the Hub can "
                "be reached, and log in with `hf auth login`"
            ) from None
        return str(commit.oid)


def check_place(folder: Path) -> None:
    """Check that a folder is not there, is empty, or may be replaced by a probe."""
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"{folder} is a link to nothing; give a new folder")
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a new folder")
    if folder.exists() and folder.samefile("."):  # replaced, it would be no more
        raise ValueError(f"{folder} is the current folder; give a new one in it")
    if folder.is_mount():
        raise ValueError(f"{folder} is where a disk is mounted; give a new one in it")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    check_replaceable(f"{folder}", names)


def check_replaceable(place: str, names: set[str]) -> None:
    """Check that what lies in a place by these names may be replaced by a probe."""
    if others := sorted(names - {*_FILES, *UNCHECKED} if ARRAYS in names else names):
        raise ValueError(
            f"{place} holds something else ({others[0]!r}); give a new place, or that "
            "of a probe, which is replaced"
        )


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (ARRAYS, _REPORT))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return what the Hub's client raises: `OSError`, and its connection's errors.

    The latter are of a library that depends on the client's version.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)


def _portable(detector: Detector, scorer: "Scorer | None") -> Detector:
    """Name a released model as it is fetched, and say what it is besides weights."""
    from beatrice.extract.backbone.names import name_of_released

    trained = detector.provenance
    if trained is None:
        return detector
    model = name_of_released(trained.revision) or trained.model
    about: dict[str, Any] = {"model": model}
    is_of_run = trained.hashes == ModelHashes()
    if scorer is not None and is_of_run and _other_model(scorer) is None:
        backbone = scorer.probed.backbone
        about |= {"hashes": backbone.hashes, "files_sha256": backbone.files_sha256}
    provenance = dataclasses.replace(trained, **about)
    return dataclasses.replace(detector, provenance=provenance)


def _other_model(scorer: "Scorer") -> str | None:
    """Say in what a scorer's model is another than its probe's, if it is."""
    from beatrice.pgir.warnings import differences

    return next(differences(scorer.probed.trained, scorer.probed.backbone), None)


def published(detector: Detector) -> Detector:
    """Name a model that is a path, or was where it was fitted, by its last part."""
    trained = detector.provenance
    # What has a commit is of the Hub; any other name may be a path somewhere.
    if trained is None or trained.commit is not None:
        return detector
    provenance = dataclasses.replace(trained, model=Path(trained.model).name)
    return dataclasses.replace(detector, provenance=provenance)


def _scored_examples(scorer: "Scorer", examples: Iterable[Any]) -> list[dict[str, Any]]:
    """Return examples with their P, as they stand in a probe's folder."""
    from beatrice.pgir.given import ARGUMENTS, READING, as_answer

    if (difference := _other_model(scorer)) is not None:
        raise ValueError(f"examples: {difference}")
    rows = as_rows(examples, ARGUMENTS)
    if len(rows) > MOST_EXAMPLES:
        raise ValueError(
            f"examples: expected at most {MOST_EXAMPLES}, since each is scored when "
            f"the probe is loaded, found {len(rows)}"
        )
    stored: list[dict[str, Any]] = []
    for row, score in zip(rows, scorer.score_many(rows), strict=True):
        if score.p_correct is None:
            raise ValueError(f"examples: {row} has no P: {score.reason}")
        given = as_answer(row)
        context = [{"title": p.title, "text": p.text} for p in given.context]
        fields = {**vars(given), "context": context or None}
        fields |= {"p_correct": score.p_correct, "raw": score.raw, "reading": READING}
        stored.append({k: v for k, v in fields.items() if v is not None})
    return stored


def _check_examples(
    scorer: "Scorer", examples: Sequence[Mapping[str, Any]], identity: str
) -> None:
    """Check that examples come out as they were saved, on each machine once."""
    from beatrice.pgir.given import READING

    answers = [
        {k: v for k, v in row.items() if k not in ("p_correct", "raw", "reading")}
        for row in examples
    ]
    dtype = str(scorer.probed.backbone.dtype).removeprefix("torch.")

    def come_out() -> bool:
        for row, score in zip(examples, scorer.score_many(answers), strict=True):
            # Before the map: steps of isotonic regression make much of rounding.
            if score.raw is None or abs(score.raw - row["raw"]) > _TOLERANCE[dtype]:
                remedy = "look whether the model is the one of its card"
                if row.get("reading", 1) != READING:
                    remedy = (
                        "an earlier version saved it, which read answers given as "
                        "texts otherwise (answer_ids score as before): fit it again"
                    )
                raise ValueError(
                    f"the probe's example {row.get('question')!r} has P "
                    f"{score.p_correct} here, and had {row['p_correct']} when the "
                    f"probe was saved; {remedy}, or in Python load with strict=False"
                )
        return True

    backbone = scorer.probed.backbone
    about = [identity, dataclasses.asdict(backbone.hashes)]
    backbone.check_once("examples", about, come_out)


def scorer_of(
    detector: Detector,
    model: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    *,
    strict: bool = True,
    precision: float | None = None,
    examples: Sequence[Mapping[str, Any]] = (),
    identity: str = "",
) -> "Scorer":
    """Load the language model that a detector names, or take the one that is given.

    Options are those of `load`; `examples` are answers whose P must come out,
    `identity` is the SHA-256 of the probe's files.
    """
    from beatrice.extract.generate.prompts import GenerationConfig
    from beatrice.model import LanguageModel
    from beatrice.pgir.scorer import Scorer

    provenance = detector.provenance
    if provenance is None:
        raise ValueError(
            "this probe was fitted on arrays and names no language model; "
            "predict(signals) works, or fit it on signals of LanguageModel.read"
        )
    if model is None and provenance.model == IN_MEMORY:
        raise ValueError(
            "this probe was fitted on a model in memory; give that model, or where it "
            "was saved, as model= (of a verb, --model)"
        )
    if model is None or isinstance(model, str | Path):
        model = LanguageModel(
            provenance.model if model is None else model,
            device=device,
            dtype=provenance.dtype if dtype is None else dtype,
            revision=provenance.commit if model is None else None,
            prompt=provenance.prompt,
        )
    stop = provenance.prompt.usual_stop if provenance.stop is None else provenance.stop
    generation = GenerationConfig(max_new_tokens=provenance.max_new_tokens, stop=stop)
    scorer = Scorer(model, detector, generation, strict=strict, precision=precision)
    if strict and examples:
        _check_examples(scorer, examples, identity)
    return scorer


def load(
    path: str | Path,
    *,
    model: "str | Path | LanguageModel | None" = None,
    device: str | None = None,
    dtype: str | None = None,
    strict: bool = True,
    precision: float | None = None,
) -> Probe:
    """Return a saved probe, one of the Hub, one that comes along, or a run's.

    Args:
      path: a folder written by `Probe.save`; "hf://owner/name" or
        "hf://owner/name@revision", from the Hub or its local cache; a name of
        `beatrice probes`; or a run directory.
      model: where the language model lies, if that has moved; or one in memory.
      device: of the language model, which is loaded when it is first needed.
      dtype: likewise; None takes the type in which the probe was fitted.
      strict: refuse a model or signals of another revision or type than the probe's,
        and a probe whose examples do not come out. False warns with every score.
      precision: share of the trusted answers that shall be right, and of the
        distrusted that shall be wrong, in (0, 1); None takes that of the fit, .9.

    Raises:
      ValueError: there is no probe, a file is not as it was written, or `precision` is
        no share.
    """
    if precision is not None:
        precision = as_probability(precision, "precision")
    is_in_memory = not isinstance(model, str | Path | None)
    if is_in_memory and (device is not None or dtype is not None):
        raise ValueError(
            "device and dtype are those of the model in memory; give a path to choose "
            "them"
        )
    options: dict[str, Any] = {"model": model, "device": device, "dtype": dtype}
    options |= {"strict": strict, "precision": precision}
    if str(path).startswith(_HUB):
        return _saved_probe(_snapshot(str(path)), options, is_of_hub=True)
    folder = _find(path)
    return (_saved_probe if _is_saved(folder) else _probe_of_run)(folder, options)


def _saved_probe(
    folder: Path, options: Mapping[str, Any], *, is_of_hub: bool = False
) -> Probe:
    """Return a probe from its folder; `options` are those of `scorer_of`."""
    # Other tools put the rest of a repository into the Hub's cache.
    detector = Detector.load(folder, _FILES if is_of_hub else None)
    again = "copy the folder again, or save the probe again"
    about, file = read_json(folder / _REPORT, About, again), folder / _EXAMPLES
    lines = file.read_bytes().splitlines()
    if len(lines) > MOST_EXAMPLES:
        few = f"at most {MOST_EXAMPLES} lines"
        raise ValueError(f"{file}: expected {few}, found {len(lines)}; {again}")
    for line in lines:
        from_json(Example, line, str(file), again)
    examples = [from_json(dict[str, Any], line, str(file), again) for line in lines]
    identity = sha256_file(folder / CHECKSUMS)
    known = {"examples": examples, "identity": identity}
    opener = partial(scorer_of, detector, **known, **options)
    known |= {"open_scorer": opener, "strict": options["strict"]}
    return Probe(detector, about.report, layer=about.layer, **known)


def _probe_of_run(folder: Path, options: Mapping[str, Any]) -> Probe:
    """Return the probe of a run; `options` are those of `Scorer.load`."""
    read_manifest(folder)  # refuses what is no run
    run = RunDir(folder)
    try:
        detector = Detector.load(run.require(run.detector))
        identity = sha256_file(run.detector / CHECKSUMS)
    except NotWritten as error:
        raise ValueError(f"{error}; {what_to_do(error)}") from None

    trained = detector.provenance
    layer = None if trained is None else trained.layer
    # A run has a path as it was typed, which in another folder is another model's.
    if trained is not None and trained.commit is None:
        trained = dataclasses.replace(trained, model=lasting_name(trained.model))
        detector = dataclasses.replace(detector, provenance=trained)
    opener = partial(_scorer_of_run, run.path, options)
    known = {"open_scorer": opener, "strict": options["strict"]}
    return Probe(detector, layer=layer, identity=identity, **known)


def _scorer_of_run(folder: Path, options: Mapping[str, Any]) -> "Scorer":
    """Load a run's probe beside its language model, also in another process."""
    from beatrice.pgir.scorer import Scorer

    return Scorer.load(folder, **options)


def local_probes() -> dict[str, Path]:
    """Return the folders of the probes that come along, and of the Hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return packaged_probes()
    fetched = {
        # The whole hash: of a part the Hub alone knows the commit.
        f"{_HUB}{repository.repo_id}@{revision.commit_hash}": revision.snapshot_path
        for repository in repositories
        for revision in repository.revisions
        # Whatever else is in the cache may hold a file called eval.json.
        if (revision.snapshot_path / ARRAYS).is_file()
    }
    return packaged_probes() | dict(sorted(fetched.items()))


def packaged_probes() -> dict[str, Path]:
    """Return the folders of the probes that come along, by name."""
    return {path.name: path for path in sorted(PROBES.glob("*")) if _is_saved(path)}


def _find(path: str | Path) -> Path:
    """Return the folder that a path, or the name of a probe, means."""
    name, folder = str(path), as_path(path, "path")
    if not folder.exists() and name in packaged_probes():
        return packaged_probes()[name]
    if not folder.exists():
        raise ValueError(
            f"{name}: expected a probe's folder, a run directory, hf://owner/name, or "
            f"one of {', '.join(packaged_probes()) or 'no probe that comes along'}"
        )
    return folder


def _snapshot(address: str) -> Path:
    """Return where a probe of the Hub lies in the local cache, fetched if need be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    from beatrice.extract.backbone.names import unreachable_hub

    repository, _, revision = address.removeprefix(_HUB).partition("@")
    silent = unreachable_hub()

    def fetch(is_local: bool) -> Path:
        options = {"allow_patterns": _FILES, "local_files_only": is_local}
        return Path(snapshot_download(repository, revision=revision or None, **options))

    try:
        try:
            return fetch(silent is not None)
        except _hub_errors() as error:
            if isinstance(error, OSError):  # the client has looked into the cache
                raise
            silent = f"the Hub ({_first_line(error)})"
            return fetch(True)
    except HFValidationError as error:
        raise ValueError(
            f"{address}: expected {_HUB}owner/name ({_first_line(error)})"
        ) from None
    except (*_hub_errors(), ValueError) as error:
        if silent is not None:  # else what the client says is that it did not ask
            raise ValueError(
                f"{address}: not in the local cache, and {silent} does not answer; "
                "fetch it where the Hub can be reached, or look for its name in "
                "`beatrice probes`"
            ) from None
        raise ValueError(
            f"{address}: no such probe on the Hub ({_first_line(error)}); look at its "
            "name, and log in with `hf auth login` where it is private"
        ) from None
