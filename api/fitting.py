"""Fit a probe: from signals and labels to a calibrated P(answer is correct).

`fit` follows the protocol of the commands `sweep`, `train`, `select` and `calibrate`
and uses the same functions: choose a layer, train every encoder with every seed, select
and fuse encoders, calibrate.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from beatrice.extract.generate.templates import MAX_NEW_TOKENS, PromptConfig
from beatrice.extract.records import SETTINGS, Label, Setting
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import Preset
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.calibrate import (
    FusedHead,
    Pool,
    TrainedGrid,
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
    set_library_compiler,
    usual_jax,
)
from beatrice.jaxprobe.detector import (
    Detector,
    HeadName,
    Provenance,
    branch_setting,
    branches_of,
)
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.grid import expected_epochs
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    auprc,
    auroc,
    auroc_interval,
    interval_of,
    resamples,
    wider_auprc_interval,
)
from beatrice.jaxprobe.rows import (
    StoreRows,
    check_groups_unsplit,
    first_id,
    training_set,
)
from beatrice.jaxprobe.tokens import stored_dtypes
from beatrice.jaxprobe.train import (
    LINEAR_ONLY,
    check_plan,
    train_encoders,
    train_regression,
)
from beatrice.pgir.arguments import (
    argument_error,
    as_count,
    as_labels,
    as_list,
    as_names,
    as_probability,
    as_splits,
)
from beatrice.probe import Probe, scorer_of
from beatrice.selection.greedy import HeadTrainer, select_heads
from beatrice.selection.stages import SWEEP_PRESETS, SweepSection
from beatrice.selection.sweep import choose_layer
from beatrice.signals import Signals, by_setting

Passes = Signals | Mapping[Setting, Signals]
Labels = Sequence[bool | None] | Sequence[Label] | np.ndarray
Recipe = Literal["auto", "linear", "encoder", "paper"]
_VALIDATION_SHARE = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of a fit, for each of its steps.

    Fields default to the paper's values, but `fit` uses the preset "few". To vary that:
    `dataclasses.replace(FitConfig.preset("few"), n_resamples=200)`. The recipes "auto"
    and "linear" use neither `encoders` nor `heads`.

    Attributes:
      sweep: the small probes that choose one of several layers, and how many answers
        they read.
      encoders: widths and training of the encoders, including seeds and learning rate.
      heads: the same for the fusion heads, and the margin of the search.
      n_resamples: number of bootstrap resamples for the report's intervals.
    """

    sweep: SweepSection = SweepSection()
    encoders: GridConfig = GridConfig()
    heads: SelectConfig = SelectConfig()
    n_resamples: int = 1000

    def __post_init__(self) -> None:
        """Check the type of every field."""
        parts = {"sweep": SweepSection, "encoders": GridConfig, "heads": SelectConfig}
        for name, kind in parts.items():
            if not isinstance(getattr(self, name), kind):
                expected = f"a {kind.__name__}"
                raise argument_error(name, expected, getattr(self, name))
        as_count(self.n_resamples, "n_resamples")

    def seeded(self, seed: int) -> "FitConfig":
        """Return a copy with a seed for every random choice."""
        encoders, heads = self.encoders.seeded(seed), self.heads.seeded(seed)
        return dataclasses.replace(self, encoders=encoders, heads=heads)

    @classmethod
    def preset(cls, name: Preset) -> "FitConfig":
        """Return the settings of a preset of the command line."""
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


@usual_jax()
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

    This configures JAX for the whole process. On a CPU, a matrix product then uses one
    core, unless JAX already has a device or `XLA_FLAGS` is set. Compiled code, also the
    caller's, is cached in `~/.cache/beatrice/compiled` or `JAX_COMPILATION_CACHE_DIR`.

    Args:
      signals: signals of answers in one setting, or a mapping from both settings to
        signals. With both, "paper" may choose a head for with-context answers that also
        reads the closed-book pass of the same question.
      labels: whether each answer is right: booleans (or 0 and 1), None if unknown, or
        `Label` records in any order. For both settings, a mapping like `signals`.
      groups: one name per answer; answers of a group stay in the same split. None uses
        the question ids, which differ between spellings of the same question.
      splits: "train", "validation" or "test" for each answer, or "" to leave it out.
        None draws about three tenths of the groups for validation and none for test.
      recipe: "linear" fits one regression on all families, "encoder" one network on all
        families with every seed, and "paper" selects and fuses encoders of all subsets
        of families. "auto" is what does best on held-out questions: "linear".
      config: settings, used mainly by "encoder" and "paper", or the name of a preset:
        "few" starts encoders from regressions and suits hundreds of answers, "demo"
        suits thousands, "paper" has the paper's sizes, and "smoke" is a quick trial.
      precision: share of trusted answers that must be right, in (0, 1]. The threshold
        reaches it with 90 % confidence; if none does, no answer is trusted.
      seed: seed of every random choice.
      progress: show progress.

    Returns:
      A probe. It can predict from signals and, if they were read by a `LanguageModel`,
      also score answers of that model.

    Raises:
      ValueError: counts differ, a split has only one class, or a value has the wrong
        type.
    """
    passes = by_setting(signals)
    precision = as_probability(precision, "precision")
    seed = as_count(seed, "seed", least=0)
    set_library_compiler()
    if not isinstance(config, FitConfig):
        config = FitConfig.preset(config)
    if recipe not in get_args(Recipe):
        choices = ", ".join(get_args(Recipe))
        raise ValueError(f"recipe: expected one of {choices}, found {recipe!r}")
    rows = _rows_of(passes, labels, groups, splits, seed)
    layer = _choose_layer(passes, rows, config, seed)
    seeded, provenance = config.seeded(seed), _provenance(passes, layer)
    fused, grids = _fit_heads(passes, rows, layer, recipe, seeded, progress)
    detector = calibrated(fused, grids, provenance=provenance, precision=precision)
    report = _report(fused, detector, rows, config.n_resamples, seed)
    model = next(iter(passes.values())).model
    opener = partial(scorer_of, detector, model)
    return Probe(detector, report, layer=layer, open_scorer=opener, model=model)


def _fit_heads(
    passes: Mapping[Setting, Signals],
    rows: Mapping[Setting, StoreRows],
    layer: int | None,
    recipe: Recipe,
    config: FitConfig,
    progress: bool,
) -> tuple[dict[HeadName, FusedHead], dict[Setting, TrainedGrid]]:
    """Train a recipe's encoders for each setting, and the heads that read them."""
    families = {setting: ", ".join(x.families) for setting, x in passes.items()}
    if recipe == "paper" and len({*families.values()}) > 1:
        each = "; ".join(
            f"{setting} has {names}" for setting, names in families.items()
        )
        raise ValueError(
            "signals: recipe 'paper' needs the same families in the same order in both "
            f"settings, but {each}; give them alike, or use another recipe"
        )
    grids: dict[Setting, TrainedGrid] = {}
    outputs: dict[Setting, MemberOutputs] = {}
    for setting, signals in passes.items():
        grids[setting], outputs[setting] = _train(
            signals, rows[setting], layer, recipe, config.encoders, progress
        )
    if recipe == "paper":
        n_seeds = config.encoders.train.n_seeds
        questions: dict[Setting, np.ndarray] = {
            setting: np.array([key[0] for key in signals.store.spec.keys])
            for setting, signals in passes.items()
        }
        pools: dict[Setting, Pool] = {
            setting: pool_of(outputs, rows, setting, n_seeds, questions)
            for setting in passes
        }
        selected = select_heads(pools, config.heads)
        return {
            branch: FusedHead(
                chosen.members,
                chosen.config,
                chosen.params,
                HeadTrainer(pools[branch_setting(branch)], config.heads).scores(chosen),
                len(chosen.path[0].candidates),
            )
            for branch, chosen in selected.items()
        }, grids
    heads: dict[HeadName, FusedHead] = {}
    for branch in branches_of(tuple(passes)):
        setting = branch_setting(branch)
        every = grids[setting].dims.n_subsets - 1
        heads[branch] = passing_head(every, outputs[setting])
    return heads, grids


def _train(
    signals: Signals,
    rows: StoreRows,
    layer: int | None,
    recipe: Recipe,
    config: GridConfig,
    progress: bool,
) -> tuple[TrainedGrid, MemberOutputs]:
    """Train a recipe's encoders for a setting, and apply them to all of its rows."""
    is_linear = recipe in ("auto", "linear")
    if not is_linear:
        check_plan(signals.store, rows, config)
    data = training_set(
        signals.store,
        rows,
        layer=layer,
        n_batch=config.train.batch_size,
        # A regression reads every row once, so rows need not stay in memory.
        streamed=is_linear or config.stream is not None,
    )
    subsets = range(data.dims.n_subsets)
    if recipe != "paper":
        subsets = subsets[-1:]  # all families
    n_epochs = expected_epochs(config.encoder, config.train) * config.train.n_seeds
    total, done = len(subsets) * n_epochs, 0
    silent = contextlib.nullcontext(lambda done, total: None)
    with Progress().stage(f"fit {rows.setting}") if progress else silent as update:

        def count(n: int) -> None:
            nonlocal done
            done += n
            if done:
                update(done, total)

        if is_linear:
            trained, outputs = train_regression(data)
            count(total)
        else:
            result = train_encoders(data, config, subsets=subsets, on_epochs=count)
            assert result is not None  # a single process trains every member
            trained, outputs = result
    grid = TrainedGrid(
        store=signals.store,
        rows=rows,
        layer=layer,
        trained=trained,
        standardizer=data.standardizer,
        config=LINEAR_ONLY if is_linear else config.encoder,
    )
    return grid, outputs


def _of_settings(
    values: Any, name: str, passes: Mapping[Setting, Signals]
) -> dict[Setting, Any]:
    """Return each setting's part of an argument that may be a mapping by setting."""
    if isinstance(values, Mapping) and set(values) <= {*SETTINGS}:
        if absent := [setting for setting in passes if setting not in values]:
            raise ValueError(f"{name}: missing for the {absent[0]} signals; give both")
        return {setting: values[setting] for setting in passes}
    if values is not None and len(passes) > 1:
        raise ValueError(
            "with signals of both settings, labels, groups and splits must be mappings "
            "too: {'closed_book': …, 'with_context': …}"
        )
    return dict.fromkeys(passes, values)


def _as_labels(labels: Any, signals: Signals) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each answer is right, and whether it is labelled."""
    kind = "a list of True, False or None, one per answer"
    given = as_list(labels, "labels", kind)
    if given and all(isinstance(label, Label) for label in given):
        verdicts: dict[tuple[str, ...], bool | None] = {}
        for label in given:
            first = verdicts.setdefault(label.key, label.label)
            if first != label.label:
                raise ValueError(
                    f"labels: the answer {label.key} has two labels, {first} and "
                    f"{label.label}; give one label per answer"
                )
        if missing := [key for key in signals.keys if key not in verdicts]:
            raise ValueError(f"labels: missing for the answer {missing[0]}")
        given = [verdicts[key] for key in signals.keys]
    return as_labels(given, len(signals))


def _as_groups(groups: Any, signals: Signals, known: Collection[str]) -> np.ndarray:
    """Return each answer's group for splitting; by default its question.

    `known` are the question ids of both settings.
    """
    if groups is None:
        return np.array([first_id(name, known) for name in signals.ids])
    return as_names(groups, "groups", len(signals))


def _rows_of(
    passes: Mapping[Setting, Signals], labels: Any, groups: Any, splits: Any, seed: int
) -> dict[Setting, StoreRows]:
    """Return the rows of every store; rows that were not given have no split."""
    for signals in passes.values():
        if (n_answers := len({*signals.indices.tolist()})) < len(signals):
            raise ValueError(
                f"signals: expected each answer once, found {len(signals)} rows of "
                f"{n_answers} answers; leave copies out, since all rows weigh the same"
            )
    given = _of_settings(labels, "labels", passes)
    truth: dict[Setting, tuple[np.ndarray, np.ndarray]] = {
        s: _as_labels(given[s], x) for s, x in passes.items()
    }
    given = _of_settings(groups, "groups", passes)
    known = {name for x in passes.values() for name in x.ids}
    names: dict[Setting, np.ndarray] = {
        s: _as_groups(given[s], x, known) for s, x in passes.items()
    }
    if splits is None:
        chosen = drawn_splits(names, truth, seed)
        unsplit = {s: np.array(x.ids) for s, x in passes.items()}
    else:
        given = _of_settings(splits, "splits", passes)
        parts = ("train", "validation", "test", "")
        chosen = {s: as_splits(given[s], len(x), parts) for s, x in passes.items()}
        unsplit = names
    check_groups_unsplit(
        *(np.concatenate([x[s] for s in passes]) for x in (unsplit, chosen))
    )
    rows: dict[Setting, StoreRows] = {}
    for setting, signals in passes.items():
        keys = signals.store.spec.keys
        columns = {"ids": names[setting], "splits": chosen[setting]}
        columns["labels"], columns["is_labelled"] = truth[setting]
        for name, values in columns.items():  # stored answers not given are empty
            columns[name] = np.zeros(len(keys), values.dtype)
            columns[name][signals.indices] = values
        columns["datasets"] = np.full(len(keys), "fitted")
        columns["variants"] = np.array([key[-1] for key in keys])
        rows[setting] = StoreRows(setting=setting, **columns)
    return rows


def drawn_splits(
    names: Mapping[Setting, np.ndarray],
    truth: Mapping[Setting, tuple[np.ndarray, np.ndarray]],
    seed: int,
) -> dict[Setting, np.ndarray]:
    """Draw validation groups: three tenths of the groups per number of right answers.

    Groups without labels are not drawn. Groups whose number of right answers is unique
    are sorted by it and drawn at even distances from a random start, so that each can
    be drawn with some seed.
    """
    n_right: dict[str, int] = {}
    for setting, ids in names.items():
        labels, is_labelled = truth[setting]
        for name, is_right in zip(ids[is_labelled], labels[is_labelled], strict=True):
            n_right[name] = n_right.get(name, 0) + int(is_right)
    rng, validation, unlike = np.random.default_rng(seed), set(), []
    for count in sorted(set(n_right.values())):
        alike = sorted(name for name, n in n_right.items() if n == count)
        if len(alike) == 1:
            unlike += alike
            continue
        n_drawn = round(_VALIDATION_SHARE * len(alike))
        validation.update(rng.permutation(alike)[:n_drawn].tolist())
    at = (np.arange(len(unlike)) + rng.random()) / _VALIDATION_SHARE
    validation.update(unlike[int(i)] for i in at[at < len(unlike)])
    if unlike and not validation:
        validation.add(unlike[rng.integers(len(unlike))])
    return {
        setting: np.array(["validation" if n in validation else "train" for n in ids])
        for setting, ids in names.items()
    }


def _choose_layer(
    passes: Mapping[Setting, Signals],
    rows: Mapping[Setting, StoreRows],
    config: FitConfig,
    seed: int,
) -> int | None:
    """Return the layer that is best on average over settings; None without layers."""
    layer_sets = {signals.layers for signals in passes.values()}
    if len(layer_sets) > 1:
        raise ValueError(
            f"signals: the settings have different layers, {sorted(layer_sets)}"
        )
    (layers,) = layer_sets
    if len(layers) < 2:
        return layers[0] if layers else None
    stores: dict[Setting, tuple[FeatureStore, StoreRows]] = {
        s: (signals.store, rows[s]) for s, signals in passes.items()
    }
    return choose_layer(stores, config.sweep.seeded(seed)).layer


def _provenance(
    passes: Mapping[Setting, Signals], layer: int | None
) -> Provenance | None:
    """Return the signals' model, prompt and layer; None without a language model."""
    first = next(iter(passes.values()))
    model, abouts = first.model, [x.store.spec.fingerprint for x in passes.values()]
    facts, stop_ids = abouts[0], [x.get("stop_id") for x in abouts]
    if layer is None or any("name" not in about for about in abouts):
        return None
    # `answer` leaves defaults out; `read` does not know how answers were generated.
    generated = [
        about
        for part, about in zip(passes.values(), abouts, strict=True)
        if part.store.spec.path == "decode" or {"max_new_tokens", "stop"} & {*about}
    ]
    limits = [x.get("max_new_tokens", MAX_NEW_TOKENS) for x in generated]
    # A store on disk turns tuples into lists.
    stops = [msgspec.convert(x.get("stop"), tuple[str, ...] | None) for x in generated]
    for name in ("model", "dtype", "answer_span", "attention_layers", "prompt", "stop"):
        values = [about.get(name, "all") for about in abouts]
        if name == "prompt":
            values = [msgspec.convert(value, PromptConfig) for value in values]
        if name == "stop":
            values = stops
        if any(value != values[0] for value in values):
            raise ValueError(
                "signals: expected both settings to be read in the same way by one "
                f"model, but their {name} are {' and '.join(map(str, values))}"
            )
    return Provenance(
        model=facts["name"] if model is None else model.name,
        revision=facts["model"],
        layer=layer,
        dtype=facts["dtype"].removeprefix("torch."),
        stored_as=stored_dtypes(first.store),
        answer_span=facts["answer_span"],
        prompt=msgspec.convert(facts["prompt"], PromptConfig),
        stop_id=next((x for x in stop_ids if x is not None), None),
        # Signals stored by earlier versions do not record scripts.
        scripts=tuple(sorted({x for y in abouts for x in y.get("scripts", ())})),
        paths={setting: part.store.spec.path for setting, part in passes.items()},
        attention_layers=facts.get("attention_layers", "all"),
        max_new_tokens=max(limits, default=MAX_NEW_TOKENS),
        stop=next(iter(stops), None),
        **({} if model is None else model.backbone.identity()),
    )


def _report(
    fused: Mapping[HeadName, FusedHead],
    detector: Detector,
    rows: Mapping[Setting, StoreRows],
    n_resamples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return the report: a row for every head, split and metric."""
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
    """Return AUROC, AUPRC, ECE and Brier score with 95 % intervals, one per row.

    An undefined metric has the value None. AUROC uses `auroc_interval`, because all
    bootstrap resamples are perfect if the few right answers rank on top, and AUPRC uses
    `wider_auprc_interval` for the same reason. Resampling biases ECE upwards, by at
    most as much as the ECE of the answers exceeds the true one. Its interval therefore
    starts as far below the value as the resamples end above it, plus their mean excess,
    which covers the true ECE at 100 answers (without the excess only in 90 % of
    simulations). It starts at zero if a perfectly calibrated P would show such an ECE
    by chance.

    Args:
      raw: `[n]` scores for ranking.
      p_correct: `[n]` calibrated probabilities.
      labels: `[n]` bool.
      clusters: `[n]` question of each answer; questions are resampled.
      bootstrap: settings of the bootstrap.
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
            of_resamples = np.array(draws.get(name, ()))
            if name == "auroc":
                low, high = auroc_interval(raw, labels, clusters)
            elif name == "auprc":
                low, high = wider_auprc_interval(of_resamples, value, labels, clusters)
            else:
                low, high = interval_of(of_resamples)
            if name == "ece":
                chance = ece_by_chance(p_correct, clusters, seed=bootstrap.seed)
                high, bias = max(value, high), float(of_resamples.mean()) - value
                low = 0.0 if value <= chance else max(0.0, 2 * value - high - bias)
            row = {"value": value, "ci_low": low, "ci_high": high}
        counts = {"n": len(labels), "n_right": int(labels.sum())}
        rows.append({"metric": name, **row, **counts})
    return rows
