"""A probe: a detector together with the language model whose answers it judges."""

import contextlib
import copy
import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from beatrice.benchmarks import what_to_do
from beatrice.card import card
from beatrice.extract.backbone.names import (
    IN_MEMORY,
    ModelHashes,
    absolute_name,
    released_name,
    unreachable_hub,
)
from beatrice.extract.forks import ForkLock
from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.extract.records import Setting
from beatrice.extract.run.directory import NotWritten, RunDir, read_manifest
from beatrice.extract.run.files import (
    CHECKSUMS,
    UNCHECKED,
    from_json,
    read_json,
    replaced_folder,
    sha256_file,
    unreplaced,
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
from beatrice.pgir.given import ARGUMENTS, READING, as_answer
from beatrice.pgir.warnings import (
    differences,
    signal_differences,
    warn_of_path,
    warn_of_prompt,
)

if TYPE_CHECKING:
    import pandas

    from beatrice.extract.store.store import FeatureStore
    from beatrice.jaxprobe.scope import Thresholds
    from beatrice.model import LanguageModel
    from beatrice.pgir.scorer import Scorer
    from beatrice.signals import Signals

Frame = TypeVar("Frame")  # a pandas or Polars data frame
_REPORT, _EXAMPLES, CARD = "eval.json", "examples.jsonl", "README.md"
_FILES = [CONFIG, ARRAYS, _REPORT, _EXAMPLES, CHECKSUMS, CARD]
PROBES = Path(__file__).parent / "probes"  # the packaged ones, a folder each
_HUB = "hf://"
MOST_EXAMPLES = 5
_LOADING = ForkLock()  # global, because a probe with a lock could not be pickled
# How far an example's uncalibrated score may differ between machines, because sums
# round differently in float32, and in 8 or 11 bits of precision.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


class Probe(AnswerScorer):
    """A detector of right answers, together with its language model.

    `predict` takes signals and needs no language model. `score` takes texts; the model
    is loaded when it is first needed, see `load`. A probe that is sent to another
    process or deep-copied leaves its loaded model behind, and loads it again.
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
        model: Any = None,
        strict: bool = True,
    ) -> None:
        """Wrap a detector; use `fit` or `load` to obtain a probe.

        Args:
          detector: the encoders, heads and calibration maps.
          report: metrics of the probe, as rows.
          layer: entry of the resid axis that hidden states are read from; None if no
            family has layers.
          examples: answers with their P, see `save`.
          identity: SHA-256 of the loaded files; empty if the probe was just fitted.
          open_scorer: loads the language model; None loads the one that the detector
            names.
          model: the language model, if it is in memory and not to be loaded.
          strict: refuse signals of another model, dtype or answer span.
        """
        self.detector = detector
        self.layer = layer
        self.identity = identity
        self.strict = strict
        self.rows = tuple(dict(row) for row in report)
        self._examples = [dict(row) for row in examples]
        self._open_scorer = open_scorer or partial(scorer_of, detector)
        self._model = None if isinstance(model, str | Path) else model
        self._scorer: Scorer | None = None

    def __repr__(self) -> str:
        """Show which encoders the probe reads and its model."""
        heads = ", ".join(
            f"{name}: {'+'.join(subset for _, subset in head.reads)}"
            for name, head in self.detector.heads.items()
        )
        provenance = self.detector.provenance
        of = "arrays" if provenance is None else provenance.model
        return f"Probe({heads}; fitted on {of})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the language model, which is reloaded."""
        return {**self.__dict__, "_scorer": None}

    def __copy__(self) -> "Probe":
        """Return a copy that shares the language model."""
        probe = object.__new__(type(self))
        vars(probe).update(vars(self))
        return probe

    @property
    def report(self) -> "pandas.DataFrame":
        """AUROC, AUPRC, ECE and Brier score with 95 % intervals, one per row.

        Rows of the split "validation" are optimistic, because it chose the layer,
        encoders, heads and map; rows of "test" are not. Empty for a run directory,
        whose metrics are in its `results.jsonl` until `beatrice export` writes a probe.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "report is a pandas data frame, but pandas is not installed: pip "
                "install pandas, or read the same rows from `rows`",
                name="pandas",
            ) from error
        return pandas.DataFrame(list(self.rows))

    def with_report(self, report: Iterable[Mapping[str, Any]]) -> "Probe":
        """Return the same probe with other report rows."""
        probe = copy.copy(self)
        probe.rows = tuple(dict(row) for row in report)
        return probe

    def predict(
        self, signals: "Signals", *, closed_book: "Signals | None" = None
    ) -> np.ndarray:
        """Return the calibrated P(correct) of answers, `[n_answers]`, from signals.

        Warns if the probe rests on too few answers or is not shown to beat chance; only
        `score` warns of a single answer, such as one outside the training range.

        Args:
          signals: signals of answers in one setting, read as for the fit.
          closed_book: for with-context answers, signals of the same questions asked
            closed-book, matched by ids; the head that reads both passes then scores.
            None uses the head that reads only the with-context pass.

        Raises:
          ValueError: the signals lack a family or layer of the probe or have another
            setting; they have another model, dtype or answer span (strict=False only
            warns of these); or they are so large that a score overflows.
        """
        with naming_extra("Probe.predict"):
            import torch

            from beatrice.jaxprobe.calibrate import score_store
            from beatrice.pgir.forward import TorchForward
            from beatrice.signals import Signals, by_setting

        if not isinstance(signals, Signals):
            raise argument_error("signals", "Signals of one setting", signals)
        passes, branch = by_setting(signals), OWN_PASS_HEADS[signals.setting]
        if closed_book is not None:
            branch = "with_context"
            passes |= by_setting(closed_book)
            if list(passes) != ["with_context", "closed_book"]:
                raise ValueError(
                    "closed_book: expected closed-book signals to go with with-context "
                    f"ones, found {closed_book} with {signals}"
                )
        for reading in passes.values():
            self._check_model(reading)
            self._check_layer(reading)
        stores: dict[Setting, FeatureStore] = {
            setting: reading.store for setting, reading in passes.items()
        }
        examples: dict[Setting, np.ndarray] = {s: x.indices for s, x in passes.items()}
        if not len(signals):
            return np.zeros(0)
        # Torch needs no compilation for new numbers or lengths of answers.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scores = score_store(
            self.detector,
            branch,
            stores,
            layer=self.layer,
            examples=examples,
            score=TorchForward(self.detector, device).score,
        )
        if len(odd := np.flatnonzero(np.isnan(scores.p_correct))):
            raise ValueError(
                f"signals: the scores of {len(odd)} of {len(signals)} answers overflow "
                f"float32, the first that of {signals.ids[odd[0]]!r}; they lie far "
                "outside the training range: check that they were read as for the fit"
            )
        for doubt in self.detector.heads[branch].evidence.doubts:
            warnings.warn(doubt, stacklevel=2)
        return scores.p_correct

    def _check_layer(self, signals: "Signals") -> None:
        if not signals.layers or self.layer in signals.layers:
            return
        if self.layer is None:
            raise ValueError(
                "signals: the probe was fitted on signals without layers, but these "
                "have some; pass signals like those of the fit"
            )
        raise ValueError(
            f"signals: the probe needs layer {self.layer}, but these hold only "
            f"{', '.join(map(str, signals.layers))}; read that layer as well"
        )

    def _check_model(self, signals: "Signals") -> None:
        """Check that signals come from the fit's model, if they record a model."""
        trained, about = self.detector.provenance, signals.store.spec.fingerprint
        if trained is None or "model" not in about:  # arrays
            return
        backbone = None if signals.model is None else signals.model.backbone
        unlike = [*signal_differences(trained, about, backbone)]
        if self.strict and unlike:
            raise ValueError(
                f"signals: {unlike[0]}; to predict with a warning instead, load the "
                "probe in Python with strict=False"
            )
        dtype, setting = str(about.get("dtype", trained.dtype)), signals.setting
        mixed = warn_of_path(trained, setting, dtype, signals.store.spec.path)
        for text in (*unlike, *warn_of_prompt(trained, about), *mixed):
            warnings.warn(text, stacklevel=3)

    @property
    def scorer(self) -> "Scorer":
        """The probe with its language model, which is loaded on first access."""
        if self._scorer is None:
            with self._loading():  # else several threads would each load the model
                if self._scorer is None:
                    self._scorer = self._open_scorer()
        return self._scorer

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        """Return the lock to load a model, or the one of a model in memory.

        A thread may hold the latter already, so that with both, a second thread and it
        could wait for each other.
        """
        if self._model is None:
            return _LOADING
        from beatrice.pgir.scorer import backbone_of

        return backbone_of(self._model).splitter.lock

    def load_scorer(self) -> "Scorer":
        """Load the language model if necessary, and return `scorer`."""
        return self.scorer

    def score_frame(self, frame: Frame, batch_size: int = BATCH_SIZE) -> Frame:
        """Return a data frame with the scores of its rows as added columns.

        The added columns are `p_correct`, `decision`, `reason`, `warnings` (joined by
        "; ") and `error`. Columns that `score` does not know are kept but not read.

        Args:
          frame: a pandas or Polars data frame, with the columns that `score` takes:
            `question`, `answer` and optionally `context`.
          batch_size: most answers in one forward pass.

        Raises:
          ValueError: `frame` is not a data frame, or already has an added column.
        """
        added = ("p_correct", "decision", "reason", "warnings", "error")
        table: Any = frame
        if not hasattr(table, "assign") and not hasattr(table, "with_columns"):
            raise argument_error("frame", "a pandas or Polars data frame", frame)
        if there := [name for name in added if name in table.columns]:
            raise ValueError(f"frame: it already has a column {there[0]!r}; rename it")
        scores = self.score_many(table, batch_size)
        columns: dict[str, Any] = {x: [getattr(s, x) for s in scores] for x in added}
        columns["warnings"] = ["; ".join(texts) for texts in columns["warnings"]]
        # Types that do not depend on the scores, so that frames can be concatenated.
        if hasattr(table, "assign"):
            import pandas

            types = dict.fromkeys(added, object) | {"p_correct": float}
            return table.assign(
                **{x: pandas.Series(columns[x], table.index, types[x]) for x in added}
            )
        import polars

        types = dict.fromkeys(added, polars.String) | {"p_correct": polars.Float64}
        return table.with_columns(
            polars.Series(name, columns[name], types[name]) for name in added
        )

    def thresholds(self, setting: Setting) -> "Thresholds | None":
        """Return the thresholds on P for decisions on answers in a setting."""
        return self.scorer.thresholds(setting)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return messages as the text that the model reads, to which ranges refer."""
        return self.scorer.render(messages)

    def save(
        self,
        path: str | Path,
        *,
        examples: Iterable[Any] | None = None,
        untrustworthy: bool = False,
    ) -> None:
        """Write the probe into a folder that `load` reads on any machine.

        The folder holds weights and maps (`probe.safetensors`), their configuration
        (`config.json`), the report (`eval.json`), examples and a card (`README.md`).
        The card may be edited; all other files have checksums.

        Args:
          path: a new folder, or the folder of a probe, which is replaced.
          examples: at most five answers, as rows for `score_many`. They are scored now,
            and again when the probe is loaded elsewhere; loading fails if a score
            differs. None keeps the examples that the probe came with.
          untrustworthy: save the probe even if it rests on too few answers; each of its
            scores then says so.

        Raises:
          ValueError: the place holds something else, an example has no P, or the probe
            rests on too few answers and `untrustworthy` is False.
        """
        doubts = self.detector.doubts
        if doubts and not untrustworthy:
            raise ValueError(
                f"{doubts[0]}; fit it on more answers, or save it anyway with "
                "untrustworthy=True (--untrustworthy on the command line); each of its "
                "scores will then say so"
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

        If the model is a path on this machine, only its last part is published.

        Args:
          repository: "owner/name"; created if it does not exist. A probe and card in it
            are replaced; other files stay.
          private: whether a new repository is private; None uses the owner's default.
          untrustworthy: see `save`.

        Returns:
          The id of the commit that holds the probe: `load("hf://owner/name@COMMIT")`.

        Raises:
          ValueError: the Hub cannot be reached or written to, the repository holds
            something else, or `save` fails.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        if not isinstance(repository, str):
            raise argument_error("repository", "'owner/name'", repository)
        hub = HfApi()
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "probe"
            ours = copy.copy(self)
            ours.detector = published(self.detector)
            ours.save(work, untrustworthy=untrustworthy)
            try:
                hub.create_repo(repository, private=private, exist_ok=True)
                names = {*hub.list_repo_files(repository)}
                if ARRAYS not in names:  # next to a probe, other files are allowed
                    check_replaceable(f"{_HUB}{repository}", names - {*UNCHECKED})
                commit = hub.upload_folder(repo_id=repository, folder_path=work)
            except (*_hub_errors(), HFValidationError) as error:
                raise ValueError(
                    f"{_HUB}{repository}: {_first_line(error)}; check that the Hub can "
                    "be reached, and log in with `hf auth login`"
                ) from None
        return str(commit.oid)


def check_place(folder: Path) -> None:
    """Check that a folder does not exist, is empty, or may be replaced by a probe."""
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"{folder} is a broken link; give a new folder")
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a new folder")
    if folder.exists() and folder.samefile("."):  # replacing would delete it
        raise ValueError(f"{folder} is the current folder; give a new folder in it")
    if folder.is_mount():
        raise ValueError(f"{folder} is a mount point; give a new folder in it")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    check_replaceable(f"{folder}", names)


def check_replaceable(place: str, names: set[str]) -> None:
    """Check that a probe may replace the files of these names at a place."""
    if others := sorted(names - {*_FILES, *UNCHECKED} if ARRAYS in names else names):
        raise ValueError(
            f"{place} holds something else ({others[0]!r}); give a new place, or the "
            "place of a probe, which is replaced"
        )


def _is_saved(folder: Path) -> bool:
    # By any of its files, so that what a download left out is named; a run has none.
    return any((folder / name).is_file() for name in (ARRAYS, _REPORT, CHECKSUMS))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the Hub's client: `OSError` and connection errors.

    The connection errors come from a library that depends on the client's version;
    transfers of large files raise RuntimeError, and a proxy's page is no JSON.
    """
    from huggingface_hub.errors import HfHubHTTPError

    errors = *HfHubHTTPError.__bases__, RuntimeError, json.JSONDecodeError
    return cast(tuple[type[Exception], ...], errors)


def _portable(detector: Detector, scorer: "Scorer | None") -> Detector:
    """Return a detector with its released model's name and the model's file hashes."""
    trained = detector.provenance
    if trained is None:
        return detector
    model = released_name(trained.revision) or trained.model
    about: dict[str, Any] = {"model": model}
    is_of_run = trained.hashes == ModelHashes()
    if scorer is not None and is_of_run and _other_model(scorer) is None:
        about |= scorer.probed.backbone.identity()
    provenance = dataclasses.replace(trained, **about)
    return dataclasses.replace(detector, provenance=provenance)


def _other_model(scorer: "Scorer") -> str | None:
    """Return how a scorer's model differs from its probe's, or None."""
    return next(differences(scorer.probed.trained, scorer.probed.backbone), None)


def published(detector: Detector) -> Detector:
    """Return a detector whose model, if it is a path, is named by its last part."""
    trained = detector.provenance
    # A model with a commit is on the Hub; any other name may be a local path.
    if trained is None or trained.commit is not None:
        return detector
    provenance = dataclasses.replace(trained, model=Path(trained.model).name)
    return dataclasses.replace(detector, provenance=provenance)


def _scored_examples(scorer: "Scorer", examples: Iterable[Any]) -> list[dict[str, Any]]:
    """Return examples with their P, as stored in a probe's folder."""
    if (difference := _other_model(scorer)) is not None:
        raise ValueError(f"examples: {difference}")
    rows = as_rows(examples, ARGUMENTS)
    if len(rows) > MOST_EXAMPLES:
        raise ValueError(
            f"examples: expected at most {MOST_EXAMPLES}, because each is scored when "
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
    """Check, once per machine, that examples get the scores they were saved with."""
    from beatrice.extract.signals.precision import float32_precision

    answers = [
        {k: v for k, v in row.items() if k not in ("p_correct", "raw", "reading")}
        for row in examples
    ]
    backbone = scorer.probed.backbone
    dtype = str(backbone.dtype).removeprefix("torch.")
    rounding = float32_precision(backbone.device)

    def come_out() -> bool:
        for row, score in zip(examples, scorer.score_many(answers), strict=True):
            # Uncalibrated: the steps of isotonic regression amplify rounding.
            if score.raw is None or abs(score.raw - row["raw"]) > _TOLERANCE[dtype]:
                remedy = "check that the model is the one on its card"
                if dtype == "float32" and rounding in ("tf32", "bf16"):
                    remedy = (
                        f"Torch rounds factors to {rounding} here, so first call "
                        "torch.set_float32_matmul_precision('highest')"
                    )
                elif row.get("reading", 1) != READING:
                    remedy = (
                        "an earlier version saved it and read answers given as texts "
                        "differently (answer_ids score as before): fit it again"
                    )
                raise ValueError(
                    f"the probe's example {row.get('question')!r} has P "
                    f"{score.p_correct} here, but had {row['p_correct']} when the "
                    f"probe was saved; {remedy}, or in Python load with strict=False"
                )
        return True

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
    """Return a scorer with the language model given, or else the detector's own.

    Options are those of `load`; `examples` are answers that must get their saved P,
    `identity` is the SHA-256 of the probe's files.
    """
    from beatrice.model import LanguageModel
    from beatrice.pgir.scorer import Scorer

    provenance = detector.provenance
    if provenance is None:
        raise ValueError(
            "this probe was fitted on arrays and has no language model; use "
            "predict(signals), or fit it on signals of LanguageModel.read"
        )
    if model is None and provenance.model == IN_MEMORY:
        raise ValueError(
            "this probe was fitted on a model in memory; give that model, or the path "
            "where it was saved, as model= (--model on the command line)"
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
    """Load a probe from a folder, the Hub, the package or a run directory.

    Args:
      path: a folder written by `Probe.save`; "hf://owner/name" or
        "hf://owner/name@revision", from the Hub or its local cache; a name listed by
        `beatrice probes`; or a run directory.
      model: path of the language model, if it has moved; or a `LanguageModel`.
      device: device of the language model, which is loaded when it is first needed.
      dtype: dtype of the language model; None uses that of the fit.
      strict: refuse a model or signals of another revision or dtype than the probe's,
        and a probe whose examples get other scores. False warns with every score.
      precision: share of the trusted answers that must be right, and of the distrusted
        answers that must be wrong, in (0, 1]; None uses that of the fit (default .9).

    Raises:
      ValueError: there is no probe, a file was changed, or `precision` is not in
        (0, 1].
    """
    if precision is not None:
        precision = as_probability(precision, "precision")
    is_in_memory = not isinstance(model, str | Path | None)
    if is_in_memory and (device is not None or dtype is not None):
        raise ValueError(
            "a model in memory keeps its device and dtype; leave them out, or give a "
            "path instead of the model"
        )
    if is_in_memory:
        from beatrice.pgir.scorer import backbone_of  # Torch, like the model

        backbone_of(model)
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
    again = "copy the folder again, or save the probe again"
    with unreplaced(folder):
        # In the Hub's cache, other tools may have put more files of the repository.
        detector = Detector.load(folder, _FILES if is_of_hub else None)
        about, file = read_json(folder / _REPORT, About, again), folder / _EXAMPLES
        lines = file.read_bytes().splitlines()
        identity = sha256_file(folder / CHECKSUMS)
    if len(lines) > MOST_EXAMPLES:
        few = f"at most {MOST_EXAMPLES} lines"
        raise ValueError(f"{file}: expected {few}, found {len(lines)}; {again}")
    for line in lines:
        from_json(Example, line, str(file), again)
    examples = [from_json(dict[str, Any], line, str(file), again) for line in lines]
    known = {"examples": examples, "identity": identity}
    opener = partial(scorer_of, detector, **known, **options)
    known |= {"model": options["model"], "strict": options["strict"]}
    layer = about.layer
    return Probe(detector, about.report, layer=layer, open_scorer=opener, **known)


def _probe_of_run(folder: Path, options: Mapping[str, Any]) -> Probe:
    """Return a run's probe; `options` are those of `Scorer.load`."""
    read_manifest(folder)  # raises an error if it is not a run
    run = RunDir(folder)
    try:
        detector = Detector.load(run.require(run.detector))
        identity = sha256_file(run.detector / CHECKSUMS)
    except NotWritten as error:
        raise ValueError(f"{error}; {what_to_do(error)}") from None

    trained = detector.provenance
    layer = None if trained is None else trained.layer
    # A run stores the path as typed, which is relative to the folder at that time.
    if trained is not None and trained.commit is None:
        trained = dataclasses.replace(trained, model=absolute_name(trained.model))
        detector = dataclasses.replace(detector, provenance=trained)
    opener = partial(_scorer_of_run, run.path, options)
    known = {"model": options["model"], "strict": options["strict"]}
    known |= {"open_scorer": opener, "identity": identity}
    return Probe(detector, layer=layer, **known)


def _scorer_of_run(folder: Path, options: Mapping[str, Any]) -> "Scorer":
    """Load a run's probe with its language model (can be sent to other processes)."""
    from beatrice.pgir.scorer import Scorer

    return Scorer.load(folder, **options)


def local_probes() -> dict[str, Path]:
    """Return the folders of the packaged probes and of those in the Hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return packaged_probes()
    fetched = {
        # The whole hash: only the Hub can complete a part of it.
        f"{_HUB}{repository.repo_id}@{revision.commit_hash}": revision.snapshot_path
        for repository in repositories
        for revision in repository.revisions
        # Other repositories in the cache may also hold an eval.json.
        if (revision.snapshot_path / ARRAYS).is_file()
    }
    return packaged_probes() | dict(sorted(fetched.items()))


def packaged_probes() -> dict[str, Path]:
    """Return the folders of the packaged probes, by name."""
    return {path.name: path for path in sorted(PROBES.glob("*")) if _is_saved(path)}


def _find(path: str | Path) -> Path:
    """Return the folder that a path or a probe's name refers to."""
    name, folder = str(path), as_path(path, "path")
    if not folder.exists() and name in packaged_probes():
        return packaged_probes()[name]
    if not folder.exists():
        raise ValueError(
            f"{name}: expected a probe's folder, a run directory, hf://owner/name, or "
            f"one of {', '.join(packaged_probes()) or 'no packaged probe'}"
        )
    if folder.is_file():
        raise ValueError(f"{name} is a file; give the folder that holds it")
    return folder


def _snapshot(address: str) -> Path:
    """Return the folder of a Hub probe in the local cache; download it if needed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = address.removeprefix(_HUB).partition("@")
    silent = unreachable_hub()

    def fetch(is_local: bool) -> Path:
        options = {"allow_patterns": _FILES, "local_files_only": is_local}
        return Path(snapshot_download(repository, revision=revision or None, **options))

    try:
        try:
            return fetch(silent is not None)
        except _hub_errors() as error:
            if isinstance(error, OSError):  # the client has also searched the cache
                raise
            silent = f"the Hub ({_first_line(error)})"
            return fetch(True)
    except HFValidationError as error:
        raise ValueError(
            f"{address}: expected {_HUB}owner/name ({_first_line(error)})"
        ) from None
    except (*_hub_errors(), ValueError) as error:
        if silent is not None:  # the client's own message would hide this cause
            raise ValueError(
                f"{address}: not in the local cache, and {silent} does not answer; "
                "download it where the Hub can be reached, or look for its name in "
                "`beatrice probes`"
            ) from None
        raise ValueError(
            f"{address}: cannot be fetched from the Hub ({_first_line(error)}); check "
            "its name, and log in with `hf auth login` if it is private"
        ) from None
