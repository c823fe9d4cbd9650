"""From signals and labels to a probe that says a calibrated P(answer is correct).

`fit` is the protocol of the verbs `sweep`, `train`, `select` and `calibrate`, by the
same functions: choose a layer, train every encoder with every seed, select and fuse,
calibrate.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
import numpy as np

from beatrice.benchmarks.recipes import what_to_do
from beatrice.extract.generate.prompts import PromptConfig
from beatrice.extract.records import SETTINGS, Label, Setting
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import NotWritten, RunDir, read_manifest
from beatrice.extract.run.files import read_sealed, seal, write_json_atomic
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.calibrate import (
    FusedHead,
    Grid,
    Pool,
    branch_setting,
    calibrated,
    pool_of,
    score_store,
)
from beatrice.jaxprobe.calibration import brier, ece
from beatrice.jaxprobe.config import (
    GRID_PRESETS,
    SELECT_PRESETS,
    GridConfig,
    SelectConfig,
    set_compiler,
)
from beatrice.jaxprobe.detector import Detector, HeadName, Provenance
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    Metric,
    auprc,
    auroc,
    interval_of,
    resamples,
)
from beatrice.jaxprobe.rows import Rows, training_set
from beatrice.jaxprobe.tokens import stored_dtypes
from beatrice.jaxprobe.train import train_encoders
from beatrice.pgir.arguments import argument_error, as_path, as_probability
from beatrice.selection.greedy import HeadTrainer, select_heads
from beatrice.selection.sweep import SWEEP_PRESETS, SweepSection, choose_layer
from beatrice.signals import Signals

if TYPE_CHECKING:
    import pandas

    from beatrice.model import LanguageModel
    from beatrice.pgir.scorer import Score, Scorer

Passes = Signals | Mapping[Setting, Signals]
Labels = Sequence[bool | None] | Sequence[Label] | np.ndarray
Preset = Literal["few", "smoke", "demo", "paper"]
_DETECTOR, _ABOUT = "detector", "probe.json"
_VALIDATION_SHARE = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a probe is fitted; every field of every step can be set.

    Attributes:
      sweep: the small probes that choose a layer, where there are several, and how
        many answers they read.
      encoders: widths and protocol of the encoders, seeds and learning rate included.
      heads: likewise of the fusion heads, and the margin of the search.
      n_resamples: of the intervals in the report.
    """

    sweep: SweepSection = SweepSection()
    encoders: GridConfig = GridConfig()
    heads: SelectConfig = SelectConfig()
    n_resamples: int = 1000

    @classmethod
    def preset(cls, name: Preset) -> "FitConfig":
        """Return the sizes of a preset of the command line."""
        if name not in GRID_PRESETS:
            raise ValueError(
                f"config: expected a FitConfig or one of {', '.join(GRID_PRESETS)}, "
                f"found {name!r}"
            )
        return cls(
            sweep=SWEEP_PRESETS[name],
            encoders=GRID_PRESETS[name],
            heads=SELECT_PRESETS[name],
        )


def fit(
    signals: Passes,
    labels: Labels | Mapping[Setting, Labels],
    *,
    groups: Sequence[str] | Mapping[Setting, Sequence[str]] | None = None,
    splits: Sequence[str] | Mapping[Setting, Sequence[str]] | None = None,
    config: FitConfig | Preset = "few",
    precision: float = 0.9,
    seed: int = 0,
    progress: bool = True,
) -> "Probe":
    """Fit a probe on the signals and labels of answers.

    Args:
      signals: of answers in one setting, or of both: `{"closed_book": …,
        "with_context": …}`; with-context answers are then judged with the closed-book
        pass of the same question as well.
      labels: whether each answer is right: booleans (or 0 and 1), None where nobody
        knows, or `Label`s in any order. Of both settings, a mapping as above.
      groups: what must not be torn apart by the split, one name an answer; None takes
        the question ids.
      splits: "train", "validation" or "test" of each answer, or "" to leave it out.
        None draws about three tenths of the groups for validation and tests on none.
      config: how it is fitted, or the name of a preset: "few" begins encoders as
        regressions, for hundreds of answers; "demo" is for thousands, "paper" is the
        paper's; "smoke" means nothing and is quick.
      precision: share of trusted answers that shall be right, in (0, 1].
      seed: of every random choice.
      progress: show how far it is.

    Returns:
      A probe. It judges answers of the language model that was read, if
      `LanguageModel.read` made the signals, and signals in any case.

    Raises:
      ValueError: counts differ, a split has one class alone, or a value is of another
        type.
    """
    passes = _by_setting(signals)
    as_probability(precision, "precision")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise argument_error("seed", "a whole number from 0 on", seed)
    set_compiler("smoke" if config == "smoke" else "demo")
    if not isinstance(config, FitConfig):
        config = FitConfig.preset(config)
    rows = _rows_of(passes, labels, groups, splits, seed)
    layer = _choose_layer(passes, rows, config, seed)
    encoders, heads = config.encoders.seeded(seed), config.heads.seeded(seed)
    grids: dict[Setting, Grid] = {}
    outputs: dict[Setting, MemberOutputs] = {}
    for setting, part in passes.items():
        grids[setting], outputs[setting] = _train(
            part, rows[setting], layer, encoders, progress
        )
    n_seeds = encoders.train.n_seeds
    pools: dict[Setting, Pool] = {
        setting: pool_of(outputs, rows, setting, n_seeds) for setting in passes
    }
    fused = _fuse(pools, heads)
    detector = calibrated(
        fused, grids, provenance=_provenance(passes, layer), precision=precision
    )
    report = _report(fused, detector, rows, config.n_resamples, seed)
    model = next(iter(passes.values())).model
    opener = partial(_open_scorer, detector, model)
    return Probe(detector, report, layer=layer, open_scorer=opener)


def _fuse(
    pools: Mapping[Setting, Pool], config: SelectConfig
) -> dict[HeadName, FusedHead]:
    """Select encoders for each head, and score every row by their fusion."""
    return {
        branch: FusedHead(
            chosen.members,
            chosen.config,
            chosen.params,
            HeadTrainer(pools[branch_setting(branch)], config).scores(chosen),
        )
        for branch, chosen in select_heads(pools, config).items()
    }


def _train(
    signals: Signals,
    rows: Rows,
    layer: int | None,
    config: GridConfig,
    progress: bool,
) -> tuple[Grid, MemberOutputs]:
    """Train every encoder of a setting, and apply them to all of its rows."""
    data = training_set(
        signals.store,
        rows,
        layer=layer,
        n_batch=config.train.batch_size,
        streamed=config.stream is not None,
    )
    n_members = config.train.n_seeds * data.dims.n_subsets
    done = itertools.count(1)
    with Progress().stage(f"fit {rows.setting}") as update:
        result = train_encoders(
            data,
            config,
            on_part=lambda: update(next(done), n_members) if progress else None,
        )
    assert result is not None  # a process alone trains every member
    trained, outputs = result
    grid = Grid(
        store=signals.store,
        rows=rows,
        layer=layer,
        trained=trained,
        standardizer=data.standardizer,
        config=config.encoder,
    )
    return grid, outputs


def _by_setting(signals: Passes) -> dict[Setting, Signals]:
    """Return signals by the setting of their answers.

    Raises:
      ValueError: of another type, under a name that is not theirs, or empty.
    """
    passes = signals
    if isinstance(signals, Signals):
        passes = {signals.setting: signals}
    if not isinstance(passes, Mapping) or not passes:
        raise argument_error(
            "signals", f"Signals, or a mapping from {' and '.join(SETTINGS)}", signals
        )
    for setting, part in passes.items():
        if not isinstance(part, Signals):
            raise argument_error(f"signals[{setting!r}]", "Signals", part)
        if part.setting != setting:
            raise ValueError(
                f"signals[{setting!r}]: these are of {part.setting} answers; give them "
                "under that name"
            )
    return {setting: passes[setting] for setting in SETTINGS if setting in passes}


def _of(values: Any, setting: Setting, passes: Mapping[Setting, Signals]) -> Any:
    """Return one setting's part of an argument that may be a mapping by setting."""
    if isinstance(values, Mapping) and set(values) <= {*SETTINGS}:
        return values.get(setting)
    if values is not None and len(passes) > 1:
        raise ValueError(
            "with signals of both settings, labels, groups and splits are mappings "
            "too: {'closed_book': …, 'with_context': …}"
        )
    return values


def _as_labels(labels: Any, signals: Signals) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each answer is right, and whether anybody knows.

    Args:
      labels: booleans, 0 and 1, None; or `Label`s in any order.
      signals: of the same answers.
    """
    if isinstance(labels, str | bytes | Mapping) or not isinstance(labels, Iterable):
        raise argument_error(
            "labels", "a list with True, False or None for each answer", labels
        )
    given = list(labels)
    if given and all(isinstance(label, Label) for label in given):
        verdicts = {label.key: label.label for label in given}
        if missing := [key for key in signals.keys if key not in verdicts]:
            raise ValueError(f"labels: none for the answer {missing[0]}")
        given = [verdicts[key] for key in signals.keys]
    if len(given) != len(signals):
        raise ValueError(
            f"labels: expected one for each of {len(signals)} answers, found "
            f"{len(given)}"
        )
    for number, label in enumerate(given):
        is_unknown = label is None or label != label  # NaN, as a table says it
        if not is_unknown and label not in (0, 1):
            raise argument_error(f"labels[{number}]", "True, False or None", label)
    is_labelled = np.array([x is not None and x == x for x in given])
    return np.array([x is not None and x == 1 for x in given]), is_labelled


def _rows_of(
    passes: Mapping[Setting, Signals],
    labels: Any,
    groups: Any,
    splits: Any,
    seed: int,
) -> dict[Setting, Rows]:
    """Return what the rows of every store are; those that no one chose have no split.

    Raises:
      ValueError: counts differ, or a split is none.
    """
    truth: dict[Setting, tuple[np.ndarray, np.ndarray]] = {
        s: _as_labels(_of(labels, s, passes), x) for s, x in passes.items()
    }
    names = {}
    for setting, part in passes.items():
        group = _of(groups, setting, passes)
        names[setting] = np.array(part.ids if group is None else [*map(str, group)])
        if len(names[setting]) != len(part):
            raise ValueError(
                f"groups: expected one for each of {len(part)} answers, found "
                f"{len(names[setting])}"
            )
    drawn = _drawn_splits(names, truth, seed) if splits is None else {}
    rows = {}
    for setting, part in passes.items():
        chosen = drawn.get(setting)
        if chosen is None:
            chosen = _as_splits(_of(splits, setting, passes), len(part))
        n_stored, at = len(part.store.spec.keys), part.indices
        fields = {
            "ids": ("", names[setting]),
            "splits": ("", chosen),
            "labels": (False, truth[setting][0]),
            "is_labelled": (False, truth[setting][1]),
        }
        whole = {}
        for name, (empty, values) in fields.items():
            whole[name] = np.full(n_stored, empty, dtype=values.dtype)
            whole[name][at] = values
        rows[setting] = Rows(
            setting=setting,
            datasets=np.full(n_stored, "fitted"),
            variants=np.array([key[-1] for key in part.store.spec.keys]),
            **whole,
        )
    return rows


def _as_splits(splits: Any, n_answers: int) -> np.ndarray:
    given = [] if splits is None else [str(split) for split in splits]
    known = ("train", "validation", "test", "")
    if odd := [split for split in given if split not in known]:
        raise ValueError(
            f"splits: expected {', '.join(map(repr, known))}, found {odd[0]!r}"
        )
    if len(given) != n_answers:
        raise ValueError(
            f"splits: expected one for each of {n_answers} answers, found {len(given)}"
        )
    return np.array(given)


def _drawn_splits(
    names: Mapping[Setting, np.ndarray],
    truth: Mapping[Setting, tuple[np.ndarray, np.ndarray]],
    seed: int,
) -> dict[Setting, np.ndarray]:
    """Draw three tenths of the groups for validation, as many of those all right.

    A group has the same split in both settings. Groups are drawn within those that
    have as many right answers, so that both splits have both classes where they can.
    """
    n_right: dict[str, int] = {}
    for setting, ids in names.items():
        labels, is_labelled = truth[setting]
        for name, is_right in zip(ids, labels & is_labelled, strict=True):
            n_right[name] = n_right.get(name, 0) + int(is_right)
    rng, validation = np.random.default_rng(seed), set()
    for count in sorted(set(n_right.values())):
        alike = sorted(name for name, n in n_right.items() if n == count)
        n_drawn = round(_VALIDATION_SHARE * len(alike))
        validation.update(rng.permutation(alike)[:n_drawn].tolist())
    return {
        setting: np.array(["validation" if n in validation else "train" for n in ids])
        for setting, ids in names.items()
    }


def _choose_layer(
    passes: Mapping[Setting, Signals],
    rows: Mapping[Setting, Rows],
    config: FitConfig,
    seed: int,
) -> int | None:
    """Return the layer that hidden states are read from: best in the settings' mean.

    Where only one is kept, or no family has layers, there is nothing to choose.
    """
    layer_sets = {part.layers for part in passes.values()}
    if len(layer_sets) > 1:
        raise ValueError(
            f"signals: settings keep different layers, {sorted(layer_sets)}"
        )
    (layers,) = layer_sets
    if len(layers) < 2:
        return layers[0] if layers else None
    stores: dict[Setting, tuple[FeatureStore, Rows]] = {
        s: (part.store, rows[s]) for s, part in passes.items()
    }
    return choose_layer(stores, config.sweep.seeded(seed)).layer


def _provenance(
    passes: Mapping[Setting, Signals], layer: int | None
) -> Provenance | None:
    """Return what the signals are of; None where no language model is known."""
    store = next(iter(passes.values())).store
    facts = store.spec.fingerprint
    if any(part.store.spec.fingerprint.get("name") is None for part in passes.values()):
        return None
    return Provenance(
        model=facts["name"],
        revision=facts["model"],
        layer=layer,
        dtype=facts["dtype"].removeprefix("torch."),
        stored_as=stored_dtypes(store),
        answer_span=facts["answer_span"],
        prompt=msgspec.convert(facts["prompt"], PromptConfig),
        stop_id=facts["stop_id"],
    )


def _report(
    fused: Mapping[HeadName, FusedHead],
    detector: Detector,
    rows: Mapping[Setting, Rows],
    n_resamples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return what the probe is worth: a row for every head, split and metric."""
    bootstrap = BootstrapConfig(n_resamples=n_resamples, seed=seed)
    report = []
    for branch, head in fused.items():
        setting_rows = rows[branch_setting(branch)]
        calibrator = detector.heads[branch].calibrator
        p_correct = calibrator(head.scores.mean(axis=0))
        for split in ("validation", "test"):
            where = setting_rows.where(split)
            if not len(where):
                continue
            labels, clusters = setting_rows.labels[where], setting_rows.ids[where]
            n = {"n": len(where), "n_right": int(labels.sum())}
            raw = head.scores.mean(axis=0)[where]
            for name, metric, scores in (
                ("auroc", partial(_value, auroc), raw),
                ("auprc", partial(_value, auprc), raw),
                ("ece", ece, p_correct[where]),
                ("brier", brier, p_correct[where]),
            ):
                measured = _measured(metric, scores, labels, clusters, bootstrap)
                report.append(
                    {"head": branch, "split": split, "metric": name, **measured, **n}
                )
    return report


def _value(
    metric: Callable[..., Metric], scores: np.ndarray, labels: np.ndarray
) -> float:
    return metric(scores, labels).value


def _measured(
    metric: Callable[[np.ndarray, np.ndarray], float],
    scores: np.ndarray,
    labels: np.ndarray,
    clusters: np.ndarray,
    bootstrap: BootstrapConfig,
) -> dict[str, float | None]:
    """Return a metric with its 95 % interval; None where it is undefined."""
    value = metric(scores, labels)
    if not np.isfinite(value):
        return {"value": None, "ci_low": None, "ci_high": None}
    draws = []
    for weights in resamples(clusters, bootstrap):
        for counts in weights.T.astype(np.int64):
            drawn = np.repeat(np.arange(len(labels)), counts)
            draws.append(metric(scores[drawn], labels[drawn]))
    low, high = interval_of(np.array([d for d in draws if np.isfinite(d)]))
    return {"value": value, "ci_low": low, "ci_high": high}


class Probe:
    """A detector of right answers, with the language model that it belongs to.

    `predict` takes signals and needs no language model. `score` takes texts: the model
    is loaded when it is first needed, see `load`.
    """

    def __init__(
        self,
        detector: Detector,
        report: Sequence[Mapping[str, Any]] = (),
        *,
        layer: int | None,
        open_scorer: "Callable[[], Scorer] | None" = None,
    ) -> None:
        """Take a detector; see `fit` and `load`.

        Args:
          detector: the encoders, heads and maps.
          report: what it is worth, as rows.
          layer: entry of the resid axis that hidden states are read from; None where
            no family has layers.
          open_scorer: loads the language model; None loads the one that the detector
            names.
        """
        self.detector = detector
        self.layer = layer
        self._rows = [dict(row) for row in report]
        self._open_scorer = open_scorer or partial(_open_scorer, detector)

    def __repr__(self) -> str:
        """Say what it reads, and of which model."""
        heads = ", ".join(
            f"{name}: {'+'.join(subset for _, subset in head.reads)}"
            for name, head in self.detector.heads.items()
        )
        provenance = self.detector.provenance
        of = "arrays" if provenance is None else provenance.model
        return f"Probe({heads}; fitted on {of})"

    @property
    def report(self) -> "pandas.DataFrame":
        """AUROC, AUPRC, ECE and Brier score with 95 % intervals, a row each.

        Rows of the split "validation" flatter: it has chosen layer, encoders, heads and
        map. Those of "test" do not.
        """
        import pandas

        return pandas.DataFrame(self._rows)

    def predict(
        self, signals: Signals, *, closed_book: Signals | None = None
    ) -> np.ndarray:
        """Return calibrated P(correct) of answers from their signals, `[n_answers]`.

        Args:
          signals: of answers in one setting, read as those of the fit.
          closed_book: of with-context answers, the signals of the same questions asked
            closed-book, which the head of both passes reads too and finds by their
            ids; None takes the head that reads the with-context pass alone.

        Raises:
          ValueError: the signals are not of the probe's families, layer or setting.
        """
        passes = _by_setting(signals)
        if closed_book is not None:
            passes |= _by_setting(closed_book)
            if list(passes) != ["with_context", "closed_book"]:
                raise ValueError(
                    "closed_book: expected closed-book signals beside with-context "
                    f"ones, found {closed_book} beside {signals}"
                )
        branch: HeadName = signals.setting
        if branch == "with_context" and closed_book is None:
            branch = "single_pass"
        for part in passes.values():
            if part.layers and self.layer not in part.layers:
                raise ValueError(
                    f"signals: the probe reads layer {self.layer}, these keep "
                    f"{', '.join(map(str, part.layers))}; read them with that layer"
                )
        stores: dict[Setting, FeatureStore] = {
            setting: part.store for setting, part in passes.items()
        }
        return score_store(
            self.detector,
            branch,
            stores,
            layer=self.layer,
            examples=signals.indices,
        ).p_correct

    @cached_property
    def scorer(self) -> "Scorer":
        """The probe beside its language model, which is loaded now."""
        return self._open_scorer()

    def score(
        self,
        question: str | None = None,
        answer: str | None = None,
        context: Any = None,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt_ids: Sequence[int] | None = None,
        answer_ids: Sequence[int] | None = None,
        context_range: tuple[int, int] | None = None,
        question_range: tuple[int, int] | None = None,
    ) -> "Score":
        """Return P(the answer is correct) from one forward pass.

        Args:
          question: as the model was asked.
          answer: its answer, or anybody's; it is read as if the model had written it.
          context: the passages that the model was shown: a text, a mapping with `text`
            and `title`, a document with `page_content`, or a list of these; None for
            closed-book.
          prompt: the text that was really sent to be completed.
          messages: the chat that was really sent, each with `role` and `content`.
          prompt_ids: the ids that the model really read.
          answer_ids: the ids that it wrote.
          context_range: characters `[start, stop)` of the context in the prompt's text.
          question_range: likewise of the question.

        Raises:
          ValueError: an argument is of another type, a text is empty or holds control
            tokens, or the probe was fitted on arrays or in another setting.
        """
        return self.scorer.score(
            question,
            answer,
            context,
            prompt=prompt,
            messages=messages,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            context_range=context_range,
            question_range=question_range,
        )

    def score_many(self, rows: Any, batch_size: int = 64) -> "list[Score]":
        """Return the scores of many answers, in shared forward passes.

        Args:
          rows: a list or a data frame. A row is a mapping of what `score` takes, or a
            tuple of question, answer and perhaps context. One that cannot be read has
            no P, the decision "unknown" and the reason in `error`.
          batch_size: most answers in one forward pass.
        """
        return self.scorer.score_many(rows, batch_size)

    @overload
    def answer(self, questions: str, contexts: Any = None) -> "Score": ...
    @overload
    def answer(
        self, questions: Sequence[str], contexts: Sequence[Any] | None = None
    ) -> "list[Score]": ...

    def answer(self, questions: Any, contexts: Any = None) -> Any:
        """Answer questions, and score the answers in the passes that write them.

        The language model is asked as in the fit, and answers greedily.

        Args:
          questions: a text, or several.
          contexts: what is shown with the question, as `score` takes it; or a list of
            that, one for each question. None asks closed-book.

        Returns:
          A score with the answer's `text`; of several questions a list of scores.
        """
        if not isinstance(questions, str):
            return self.scorer.answer_and_score(questions, contexts)
        contexts = None if contexts is None else [contexts]
        return self.scorer.answer_and_score([questions], contexts)[0]

    def threshold(self, setting: Setting) -> Any:
        """Return at which P answers of a setting are trusted, and how often rightly."""
        return self.scorer.threshold(setting)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return messages as the text that the model reads, in which ranges count."""
        return self.scorer.render(messages)

    def save(self, path: str | Path) -> None:
        """Write the probe into a folder, which `load` reads: weights, maps, report.

        Raises:
          ValueError: something else is there.
        """
        folder = as_path(path, "path")
        if folder.exists() and not _is_saved(folder) and any(folder.iterdir()):
            raise ValueError(
                f"{folder} holds something else; give a new folder, or that of a "
                "probe, which is replaced"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.detector.save(folder / _DETECTOR)
        about = {"layer": self.layer, "report": self._rows}
        write_json_atomic(folder / _ABOUT, seal(about))


def _is_saved(folder: Path) -> bool:
    return (folder / _DETECTOR).is_dir() and (folder / _ABOUT).is_file()


def _open_scorer(
    detector: Detector,
    model: Any = None,
    device: str | None = None,
    dtype: str | None = None,
) -> "Scorer":
    """Load the language model that a detector names, or take the one that is given."""
    from beatrice.extract.generate.requests import GenerationConfig
    from beatrice.model import LanguageModel, usual_stop
    from beatrice.pgir.scorer import Scorer

    provenance = detector.provenance
    if provenance is None:
        raise ValueError(
            "this probe was fitted on arrays and names no language model; "
            "predict(signals) works, or fit it on signals of LanguageModel.read"
        )
    if model is None or isinstance(model, str | Path):
        model = LanguageModel(
            model or provenance.model,
            device=device,
            dtype=dtype or provenance.dtype,
            prompt=provenance.prompt,
        )
    generation = GenerationConfig(max_new_tokens=32, stop=usual_stop(provenance.prompt))
    return Scorer(model, detector, generation)


def load(
    path: str | Path,
    *,
    model: "str | Path | LanguageModel | None" = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Probe:
    """Return a saved probe, or the probe of a finished run.

    Args:
      path: a folder written by `Probe.save`, or a run directory.
      model: where the language model lies, if that has moved; or one in memory.
      device: of the language model, which is loaded when it is first needed.
      dtype: likewise; None takes the type in which the probe was fitted.

    Raises:
      ValueError: neither is there, or a file is not as it was written.
    """
    folder = as_path(path, "path")
    options = {"model": model, "device": device, "dtype": dtype}
    if _is_saved(folder):
        about = read_sealed(folder / _ABOUT, "save the probe again")
        detector = Detector.load(folder / _DETECTOR)
        opener = partial(_open_scorer, detector, **options)
        return Probe(
            detector, about["report"], layer=about["layer"], open_scorer=opener
        )
    read_manifest(folder)  # refuses what is no run
    run = RunDir(folder)
    try:
        detector = Detector.load(run.require(run.detector))
    except NotWritten as error:
        raise ValueError(f"{error}; {what_to_do(error)}") from None
    set_compiler(run.preset)

    def open_scorer() -> "Scorer":
        from beatrice.pgir.scorer import Scorer

        return Scorer.load(folder, **options)

    layer = None if detector.provenance is None else detector.provenance.layer
    return Probe(detector, layer=layer, open_scorer=open_scorer)
