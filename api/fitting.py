"""Fit a probe: from signals and labels to a calibrated P(answer is correct).

`fit` is the protocol of the verbs `sweep`, `train`, `select` and `calibrate`, by the
same functions: choose a layer, train every encoder with every seed, select and fuse,
calibrate.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from beatrice.extract.backbone.names import ModelHashes
from beatrice.extract.generate.prompts import PromptConfig
from beatrice.extract.records import SETTINGS, Label, Setting
from beatrice.extract.run.console import Progress
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.calibrate import (
    FusedHead,
    Grid,
    Pool,
    branch_setting,
    branches_of,
    calibrated,
    passing_head,
    pool_of,
)
from beatrice.jaxprobe.calibration import brier, ece, ece_by_chance
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
    auprc,
    auroc,
    auroc_interval,
    interval_of,
    resamples,
)
from beatrice.jaxprobe.rows import Rows, training_set
from beatrice.jaxprobe.tokens import stored_dtypes
from beatrice.jaxprobe.train import LINEAR_ONLY, train_encoders, train_regression
from beatrice.pgir.arguments import (
    argument_error,
    as_count,
    as_list,
    as_probability,
)
from beatrice.probe import Probe, scorer_of
from beatrice.selection.greedy import HeadTrainer, select_heads
from beatrice.selection.sweep import SWEEP_PRESETS, SweepSection, choose_layer
from beatrice.signals import Signals, by_setting

Passes = Signals | Mapping[Setting, Signals]
Labels = Sequence[bool | None] | Sequence[Label] | np.ndarray
Preset = Literal["few", "smoke", "demo", "paper"]
Recipe = Literal["auto", "linear", "encoder", "paper"]
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

    def __post_init__(self) -> None:
        """Check that every field is of its type."""
        parts = {"sweep": SweepSection, "encoders": GridConfig, "heads": SelectConfig}
        for name, kind in parts.items():
            if not isinstance(getattr(self, name), kind):
                expected = f"a {kind.__name__}"
                raise argument_error(name, expected, getattr(self, name))
        as_count(self.n_resamples, "n_resamples")

    def seeded(self, seed: int) -> "FitConfig":
        """Return the same with a seed of every random choice."""
        encoders, heads = self.encoders.seeded(seed), self.heads.seeded(seed)
        return dataclasses.replace(self, encoders=encoders, heads=heads)

    @classmethod
    def preset(cls, name: Preset) -> "FitConfig":
        """Return the sizes of a preset of the command line."""
        if not isinstance(name, str) or name not in GRID_PRESETS:
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
    recipe: Recipe = "auto",
    config: FitConfig | Preset = "few",
    precision: float = 0.9,
    seed: int = 0,
    progress: bool = True,
) -> "Probe":
    """Fit a probe on the signals and labels of answers.

    Args:
      signals: of answers in one setting, or of both as a mapping by setting;
        with-context answers are then judged with the closed-book pass of the same
        question as well.
      labels: whether each answer is right: booleans (or 0 and 1), None where nobody
        knows, or `Label` records in any order. Of both settings, a mapping as above.
      groups: what must not be torn apart by the split, one name an answer; None takes
        the question ids.
      splits: "train", "validation" or "test" of each answer, or "" to leave it out.
        None draws about three tenths of the groups for validation and tests on none.
      recipe: "linear" is one regression of all families, "encoder" one network of all
        families with every seed, "paper" selects among the encoders of all subsets and
        fuses them. "auto" takes what wins on held-out questions: "linear".
      config: sizes of "encoder" and "paper", or the name of a preset: "few" begins
        encoders as regressions, for hundreds of answers; "demo" is for thousands,
        "paper" is the paper's; "smoke" means nothing and is quick.
      precision: share of trusted answers that shall be right, in (0, 1); the threshold
        holds it with 90 % confidence, or there is none.
      seed: of every random choice.
      progress: show how far it is.

    Returns:
      A probe. It judges answers of the language model that was read, if
      `LanguageModel.read` made the signals, and signals in any case.

    Raises:
      ValueError: counts differ, a split has one class alone, or a value is of another
        type.
    """
    passes = by_setting(signals)
    as_probability(precision, "precision")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise argument_error("seed", "a whole number from 0 on", seed)
    set_compiler("demo")  # a process has these flags once: the next fit may be large
    if not isinstance(config, FitConfig):
        config = FitConfig.preset(config)
    if recipe not in get_args(Recipe):
        choices = ", ".join(get_args(Recipe))
        raise ValueError(f"recipe: expected one of {choices}, found {recipe!r}")
    rows = _rows_of(passes, labels, groups, splits, seed)
    layer = _choose_layer(passes, rows, config, seed)
    fused, grids = _fit_heads(
        passes, rows, layer, recipe, config.seeded(seed), progress
    )
    detector = calibrated(
        fused,
        grids,
        provenance=_provenance(passes, layer),
        precision=precision,
    )
    report = _report(fused, detector, rows, config.n_resamples, seed)
    model = next(iter(passes.values())).model
    opener = partial(scorer_of, detector, model)
    return Probe(detector, report, layer=layer, open_scorer=opener)


def _fit_heads(
    passes: Mapping[Setting, Signals],
    rows: Mapping[Setting, Rows],
    layer: int | None,
    recipe: Recipe,
    config: FitConfig,
    progress: bool,
) -> tuple[dict[HeadName, FusedHead], dict[Setting, Grid]]:
    """Train encoders of each setting as a recipe says, and the heads that read them."""
    grids: dict[Setting, Grid] = {}
    outputs: dict[Setting, MemberOutputs] = {}
    for setting, signals in passes.items():
        grids[setting], outputs[setting] = _train(
            signals, rows[setting], layer, recipe, config.encoders, progress
        )
    if recipe == "paper":
        n_seeds = config.encoders.train.n_seeds
        pools: dict[Setting, Pool] = {
            setting: pool_of(outputs, rows, setting, n_seeds) for setting in passes
        }
        return _fuse(pools, config.heads), grids
    heads: dict[HeadName, FusedHead] = {}
    for branch in branches_of(tuple(passes)):
        setting = branch_setting(branch)
        every = grids[setting].dims.n_subsets - 1
        heads[branch] = passing_head(every, outputs[setting])
    return heads, grids


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
    recipe: Recipe,
    config: GridConfig,
    progress: bool,
) -> tuple[Grid, MemberOutputs]:
    """Train a recipe's encoders of a setting, and apply them to all of its rows."""
    data = training_set(
        signals.store,
        rows,
        layer=layer,
        n_batch=config.train.batch_size,
        streamed=config.stream is not None,
    )
    subsets = range(data.dims.n_subsets)
    if recipe != "paper":
        subsets = subsets[-1:]  # all families
    is_linear = recipe in ("auto", "linear")
    n_members = 1 if is_linear else config.train.n_seeds * len(subsets)
    done = itertools.count(1)
    with Progress().stage(f"fit {rows.setting}") as update:

        def count_member() -> None:
            if progress:
                update(next(done), n_members)

        if is_linear:
            trained, outputs = train_regression(data)
            count_member()
        else:
            result = train_encoders(data, config, subsets=subsets, on_part=count_member)
            assert result is not None  # a process alone trains every member
            trained, outputs = result
    grid = Grid(
        store=signals.store,
        rows=rows,
        layer=layer,
        trained=trained,
        standardizer=data.standardizer,
        config=LINEAR_ONLY if is_linear else config.encoder,
    )
    return grid, outputs


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
    """Return whether each answer is right, and whether anybody knows."""
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
    """Return what the rows of every store are; rows that no one chose have no split."""
    truth: dict[Setting, tuple[np.ndarray, np.ndarray]] = {
        s: _as_labels(_of(labels, s, passes), x) for s, x in passes.items()
    }
    names = {}
    for setting, signals in passes.items():
        group = _of(groups, setting, passes)
        if group is not None:
            group = as_list(group, "groups", "a list of names, one an answer")
        names[setting] = np.array(signals.ids if group is None else [*map(str, group)])
        if len(names[setting]) != len(signals):
            raise ValueError(
                f"groups: expected one for each of {len(signals)} answers, found "
                f"{len(names[setting])}"
            )
    drawn = _drawn_splits(names, truth, seed) if splits is None else {}
    rows = {}
    for setting, signals in passes.items():
        chosen = drawn.get(setting)
        if chosen is None:
            chosen = _as_splits(_of(splits, setting, passes), len(signals))
        n_stored, at = len(signals.store.spec.keys), signals.indices
        fields = {
            "ids": ("", names[setting]),
            "splits": ("", chosen),
            "labels": (False, truth[setting][0]),
            "is_labelled": (False, truth[setting][1]),
        }
        stored = {}
        for name, (empty, values) in fields.items():
            stored[name] = np.full(n_stored, empty, dtype=values.dtype)
            stored[name][at] = values
        rows[setting] = Rows(
            setting=setting,
            datasets=np.full(n_stored, "fitted"),
            variants=np.array([key[-1] for key in signals.store.spec.keys]),
            **stored,
        )
    return rows


def _as_splits(splits: Any, n_answers: int) -> np.ndarray:
    expected = "a list with train, validation, test or '' for each answer"
    given = [] if splits is None else [*map(str, as_list(splits, "splits", expected))]
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
    layer_sets = {signals.layers for signals in passes.values()}
    if len(layer_sets) > 1:
        raise ValueError(
            f"signals: settings keep different layers, {sorted(layer_sets)}"
        )
    (layers,) = layer_sets
    if len(layers) < 2:
        return layers[0] if layers else None
    stores: dict[Setting, tuple[FeatureStore, Rows]] = {
        s: (signals.store, rows[s]) for s, signals in passes.items()
    }
    return choose_layer(stores, config.sweep.seeded(seed)).layer


def _provenance(
    passes: Mapping[Setting, Signals], layer: int | None
) -> Provenance | None:
    """Return what the signals are of; None where no language model is known."""
    first = next(iter(passes.values()))
    store, model = first.store, first.model
    facts = store.spec.fingerprint
    parts = passes.values()
    if layer is None or any("name" not in p.store.spec.fingerprint for p in parts):
        return None
    # Signals that an earlier version stored do not tell.
    scripts = [x for p in parts for x in p.store.spec.fingerprint.get("scripts", ())]
    return Provenance(
        model=facts["name"],
        revision=facts["model"],
        layer=layer,
        dtype=facts["dtype"].removeprefix("torch."),
        stored_as=stored_dtypes(store),
        answer_span=facts["answer_span"],
        prompt=msgspec.convert(facts["prompt"], PromptConfig),
        stop_id=facts["stop_id"],
        scripts=tuple(sorted(set(scripts))),
        path=store.spec.path,
        hashes=ModelHashes() if model is None else model.backbone.hashes,
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
            measured = metric_rows(
                head.scores.mean(axis=0)[where],
                p_correct[where],
                setting_rows.labels[where],
                setting_rows.ids[where],
                bootstrap,
            )
            report += [{"head": branch, "split": split, **row} for row in measured]
    return report


def metric_rows(
    raw: np.ndarray,
    p_correct: np.ndarray,
    labels: np.ndarray,
    clusters: np.ndarray,
    bootstrap: BootstrapConfig,
) -> list[dict[str, Any]]:
    """Return AUROC, AUPRC, ECE and Brier score with 95 % intervals, a row each.

    A metric that is undefined has the value None. AUROC has `auroc_interval`, since
    resamples of few right answers on top are all as good. The ECE of resamples is above
    that of the answers by as much as theirs is above the true one: its interval begins
    as far below the value as theirs ends above it, and at zero where a P that is right
    shows as much by chance.

    Args:
      raw: `[n]` scores that rank.
      p_correct: `[n]` calibrated probabilities.
      labels: `[n]` bool.
      clusters: `[n]` questions, which are resampled.
      bootstrap: how.
    """
    resampled: dict[str, tuple[Callable[..., float], np.ndarray]] = {
        "auprc": (lambda scores, labels: auprc(scores, labels).value, raw),
        "ece": (ece, p_correct),
        "brier": (brier, p_correct),
    }
    draws: dict[str, list[float]] = {name: [] for name in resampled}
    for weights in resamples(clusters, bootstrap):
        for counts in weights.T.astype(np.int64):
            drawn = np.repeat(np.arange(len(labels)), counts)
            for name, (metric, scores) in resampled.items():
                draws[name].append(metric(scores[drawn], labels[drawn]))
    values = {"auroc": float(auroc(raw, labels).value)}
    values |= {name: f(scores, labels) for name, (f, scores) in resampled.items()}
    rows = []
    for name, value in values.items():
        row: dict[str, Any] = dict.fromkeys(("value", "ci_low", "ci_high"))
        if np.isfinite(value):
            if name == "auroc":
                low, high = auroc_interval(raw, np.asarray(labels, bool), clusters)
            else:
                low, high = interval_of(np.array(draws[name]))
            if name == "ece":
                chance = ece_by_chance(p_correct, clusters, seed=bootstrap.seed)
                high = max(value, high)
                low = 0.0 if value <= chance else max(0.0, 2 * value - high)
            row = {"value": value, "ci_low": low, "ci_high": high}
        counts = {"n": len(labels), "n_right": int(labels.sum())}
        rows.append({"metric": name, **row, **counts})
    return rows
