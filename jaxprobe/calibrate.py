"""From trained encoders and selected heads to a calibrated detector.

With context, heads are selected from a pool of the with-context encoders followed by
the closed-book encoders, which read the closed-book pass of the same question;
closed-book, from the closed-book encoders. The `run_…` functions read these from a run.

Calibration uses only validation rows: one map is fitted per head, and the resulting P
of these rows certifies the head's decisions.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import read_answers, read_examples, settings_of
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibration import (
    Calibrator,
    choose_calibrator,
    cross_fit,
    fit_calibrator,
    folds_of,
)
from beatrice.jaxprobe.config import (
    CALIBRATE_PRESETS,
    INTERVAL_PRESETS,
    CalibrateConfig,
    EncoderConfig,
    FusionConfig,
    MapKind,
    set_compiler,
    usual_jax,
)
from beatrice.jaxprobe.detector import (
    Detector,
    EncoderBank,
    HeadName,
    Provenance,
    Scores,
    SettingHead,
    branch_setting,
    branches_of,
    encoders_read,
)
from beatrice.jaxprobe.encoder import MemberOutputs, Params
from beatrice.jaxprobe.families import (
    FamilyDims,
    Features,
    Standardizer,
    span_lengths,
    used_spans,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.fusion import (
    LARGEST,
    FusionHead,
    PoolOutputs,
    head_inputs,
    pool_outputs,
    slots_of,
)
from beatrice.jaxprobe.grid import TrainedMembers, grid_members
from beatrice.jaxprobe.metrics import BootstrapConfig, auroc_interval
from beatrice.jaxprobe.rows import StoreRows, closed_book_ids, closed_book_rows
from beatrice.jaxprobe.scope import (
    Evidence,
    Validation,
    fit_scope,
    n_of_classes,
    scripts_of,
)
from beatrice.jaxprobe.stages import (
    SearchSummary,
    chosen_layer,
    grid_config,
    select_config,
)
from beatrice.jaxprobe.tokens import (
    family_dims,
    read_features,
    stored_dtypes,
    stored_lengths,
)
from beatrice.jaxprobe.train import open_rows, run_outputs


class Pool(NamedTuple):
    """The outputs of a setting's pool of encoders on its rows.

    Each pass has `n_subsets` encoders; that of only family f is at `2**f - 1`.
    """

    train: PoolOutputs
    valid: PoolOutputs
    all_rows: PoolOutputs
    rows: StoreRows
    n_subsets: int


def pool_of(
    outputs: Mapping[Setting, MemberOutputs],
    rows: Mapping[Setting, StoreRows],
    setting: Setting,
    n_seeds: int,
    questions: Mapping[Setting, np.ndarray] | None = None,
) -> Pool:
    """Return a setting's pool from the outputs of encoders on all rows of their passes.

    With context, the closed-book pass of the same question is included if `outputs` has
    it. `questions` are question ids, for `rows` whose ids are those of groups.
    """
    setting_rows, passes = rows[setting], [outputs[setting]]
    if setting == "with_context" and "closed_book" in outputs:
        questions = questions or {s: x.ids for s, x in rows.items()}
        closed_book = questions["closed_book"]
        ids = closed_book_ids(questions[setting], closed_book)
        # Rows without a split or a label may lack a closed-book answer.
        is_needed = (setting_rows.splits != "") & setting_rows.is_labelled
        is_read = is_needed | np.isin(ids, closed_book)
        where = np.zeros(len(ids), np.int64)
        where[is_read] = closed_book_rows(ids[is_read], closed_book)
        logits, pooled = _take(outputs["closed_book"], where)
        logits = np.where(is_read, logits, np.float32(np.nan))
        pooled = np.where(is_read[:, None], pooled, np.float32(np.nan))
        passes.append(MemberOutputs(logits, pooled))

    def outputs_of_rows(where: np.ndarray) -> PoolOutputs:
        of_passes = tuple(_take(member_outputs, where) for member_outputs in passes)
        of_rows = setting_rows.take(where)
        return pool_outputs(of_passes, n_seeds, of_rows.labels, of_rows.ids)

    return Pool(
        train=outputs_of_rows(setting_rows.where("train")),
        valid=outputs_of_rows(setting_rows.where("validation")),
        all_rows=outputs_of_rows(np.arange(len(setting_rows.ids))),
        rows=setting_rows,
        n_subsets=len(passes[0].logits) // n_seeds,
    )


def _take(outputs: MemberOutputs, where: np.ndarray) -> MemberOutputs:
    return MemberOutputs(outputs.logits[:, where], outputs.pooled[:, where])


SEEN = ("train", "validation")  # splits that a detector was fitted on
_MOST_BYTES = 1 << 30  # of signals and activations in memory at once
_OF_A_KIND = 64  # fewest rows of similar length for a batch of their own
# Maps a head, and the signals of the same answers in each pass, to scores.
ScoreBatch = Callable[[HeadName, Mapping[Setting, Features]], Scores]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainedGrid:
    """A setting's trained encoders: every subset with every seed.

    `layer` is the entry of the resid axis for the hidden family (0 is the embedding),
    or None if no family is stored by layer.
    """

    store: FeatureStore
    rows: StoreRows
    layer: int | None
    trained: TrainedMembers
    standardizer: Standardizer
    config: EncoderConfig

    @property
    def dims(self) -> FamilyDims:
        """The families that the encoders read."""
        return family_dims(self.store)


class FusedHead(NamedTuple):
    """The heads of a selected set, with their scores of every row of their setting."""

    members: Sequence[int]  # pool positions, see `jaxprobe.detector.encoders_read`
    config: FusionConfig  # shape of the heads
    params: Params  # leaves `[n_seeds, ...]`
    scores: np.ndarray  # `[n_seeds, n_rows]` uncalibrated probabilities
    n_tried: int = 1  # number of encoders from which validation chose the first


def passing_head(member: int, outputs: MemberOutputs) -> FusedHead:
    """Return a head that passes on one encoder's logits, like a fresh head."""
    # Two slots, one of which stays empty, so that no array of the head is empty.
    config = FusionConfig(hidden=1, n_slots=2, is_mean_first=True)
    n_seeds, n_rows = outputs.logits.shape
    inputs = head_inputs(outputs.pooled[:, None, :1], outputs.logits[:, None, :1])
    slots, mask = (jnp.asarray(x) for x in slots_of((0,), config.n_slots))
    init = jax.jit(FusionHead(config).init)  # else each operation compiles
    params = jax.device_get(init(jax.random.key(0), inputs[0], slots, mask))
    params = jax.tree.map(lambda x: np.repeat(x[None], n_seeds, axis=0), params)
    ends = np.clip(outputs.logits.astype(np.float64), -LARGEST, LARGEST)
    return FusedHead((member,), config, params, 1 / (1 + np.exp(-ends)))


# Fit maps to scores, labels and questions; the paper's, isotonic, needs no questions.
FIT_MAP: dict[MapKind, Callable[..., Calibrator]] = {
    "increasing": choose_calibrator,
    "isotonic": lambda scores, labels, questions: fit_calibrator(scores, labels),
}


def calibrated_head(
    branch: HeadName,
    fused: FusedHead,
    grid: TrainedGrid,
    precision: float,
    kind: MapKind,
) -> SettingHead:
    """Fit a head's map on the validation rows, and keep the resulting P of them."""
    where, trained = map(grid.rows.where, ("validation", "train"))
    scores, labels = fused.scores.mean(axis=0)[where], grid.rows.labels[where]
    questions = grid.rows.ids[where]
    calibrator = FIT_MAP[kind](scores, labels, questions)
    validation = Validation.of_answers(scores, calibrator(scores), labels, questions)
    return SettingHead(
        reads=encoders_read(branch, fused.members, grid.dims.subset_names),
        config=fused.config,
        params=fused.params,
        calibrator=calibrator,
        precision=precision,
        evidence=Evidence(
            train=n_of_classes(grid.rows.labels[trained], grid.rows.ids[trained]),
            validation=n_of_classes(labels, questions),
            auroc=auroc_interval(scores, labels, questions, fused.n_tried),
            n_tried=fused.n_tried,
        ),
        validation=validation,
    )


def encoder_bank(grid: TrainedGrid, names: Sequence[str]) -> EncoderBank:
    """Return the encoders of some subsets, with the ranges of the training signals."""
    store, rows, dims, trained = grid.store, grid.rows, grid.dims, grid.trained
    seeds = sorted({member.seed for member in trained.members})
    at = [
        [trained.members.index((dims.subset_index(name), seed)) for name in names]
        for seed in seeds
    ]
    return EncoderBank(
        dims=dims,
        config=grid.config,
        standardizer=grid.standardizer,
        names=tuple(names),
        spans=used_spans(store.spec.spans),
        params=jax.tree.map(lambda x: np.asarray(x)[np.asarray(at)], trained.params),
        lengths=widths_of(stored_lengths(store)[rows.where("train")]),
        scope=fit_scope(
            partial(read_features, store, grid.layer),
            dims,
            store.spec.n_read,
            *map(rows.where, SEEN),
        ),
    )


@usual_jax()
def calibrated(
    fused: Mapping[HeadName, FusedHead],
    grids: Mapping[Setting, TrainedGrid],
    *,
    provenance: Provenance | None = None,
    precision: float = 0.9,
    kind: MapKind = "increasing",
) -> Detector:
    """Return the detector of selected heads and the encoders that they read."""
    heads: dict[HeadName, SettingHead] = {
        branch: calibrated_head(
            branch, head, grids[branch_setting(branch)], precision, kind
        )
        for branch, head in fused.items()
    }
    banks = {}
    for setting, grid in grids.items():
        read = {name for h in heads.values() for s, name in h.reads if s == setting}
        if read:
            names = [name for name in grid.dims.subset_names if name in read]
            banks[setting] = encoder_bank(grid, names)
    return Detector(banks=banks, heads=heads, provenance=provenance)


def score_store(
    detector: Detector,
    branch: HeadName,
    stores: Mapping[Setting, FeatureStore],
    *,
    layer: int | None,
    score: ScoreBatch,
    examples: Mapping[Setting, np.ndarray] | None = None,
) -> Scores:
    """Return a detector's scores of stored answers, read in batches.

    The answers are those of the branch's setting, at least one. A head that also reads
    closed-book encoders uses the closed-book answer to the same question. `examples`
    are the answers `[n]` to use of each setting, by default all. `layer` is as in
    `TrainedGrid`; for `score` see `pgir.forward.TorchForward`.
    """
    setting = branch_setting(branch)
    passes = detector.passes_of(branch)
    if missing := {setting, *passes} - stores.keys():
        raise ValueError(
            f"scoring {branch} needs the signals of {' and '.join(sorted(missing))}"
        )
    chosen: dict[Setting, np.ndarray] = {
        name: np.arange(len(store.spec.keys)) for name, store in stores.items()
    }
    chosen |= examples or {}
    ids = {name: _ids(stores[name])[where] for name, where in chosen.items()}
    rows, lengths = {}, {}
    for name in passes:
        store, bank = stores[name], detector.banks[name]
        _check_families(bank.dims, store)
        rows[name] = chosen[name]
        if name != setting:
            rows[name] = rows[name][closed_book_rows(ids[setting], ids[name])]
        lengths[name] = span_lengths(store.spec.spans[rows[name]], bank.spans)
    indices, scores = [], []
    every = np.concatenate(list(lengths.values()), axis=1)
    for group in width_groups(every, _OF_A_KIND):
        widths = {name: widths_of(lengths[name][group]) for name in passes}
        row_bytes = max(detector.banks[name].bytes_of(widths[name]) for name in passes)
        n_at_once = max(1, _MOST_BYTES // row_bytes)
        for start in range(0, len(group), n_at_once):
            batch = group[start : start + n_at_once]
            features: dict[Setting, Features] = {
                name: read_features(
                    stores[name],
                    layer,
                    rows[name][batch],
                    widths[name],
                    detector.banks[name].spans,
                )
                for name in passes
            }
            indices.append(batch)
            scores.append(score(branch, features))
    return Scores.joined(scores).take(np.argsort(np.concatenate(indices)))


def _check_families(dims: FamilyDims, store: FeatureStore) -> None:
    stored = family_dims(store)
    has_spans = all(
        stored_spans in ("all", read)
        for stored_spans, read in zip(stored.spans, dims.spans, strict=False)
    )
    if (stored.names, stored.sizes) != (dims.names, dims.sizes) or not has_spans:
        raise ValueError(
            f"the signals are {stored.in_words()}, but the detector was trained on "
            f"{dims.in_words()}; pass signals that were read like these"
        )


def _ids(store: FeatureStore) -> np.ndarray:
    return np.array([key[0] for key in store.spec.keys])


N_FOLDS = 5  # folds of `fold_calibrators`


def run_branches(run: RunDir) -> tuple[HeadName, ...]:
    """Return the branches that score answers of a run's settings."""
    return branches_of(settings_of(run))


def run_selection(
    run: RunDir, branch: HeadName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a branch's selected heads and scores, and the summary of its search."""
    tree, summary = checkpoint.restore(run.selection / branch, SearchSummary)
    return tree, msgspec.to_builtins(summary)


def run_pool(run: RunDir, setting: Setting) -> Pool:
    """Return a setting's pool from the outputs of the run's encoders."""
    passes: list[Setting] = [setting]
    if setting == "with_context" and "closed_book" in settings_of(run):
        passes.append("closed_book")
    return pool_of(
        {where: run_outputs(run, where) for where in passes},
        {where: open_rows(run, where)[1] for where in passes},
        setting,
        grid_config(run).train.n_seeds,
    )


def run_bootstrap(run: RunDir) -> BootstrapConfig:
    """Return the configuration of a run's intervals, with the run's seed."""
    config = run.resolve_section("intervals", INTERVAL_PRESETS)
    return BootstrapConfig(n_resamples=config.n_resamples, seed=run.seed)


def fold_calibrators(run: RunDir, branch: HeadName) -> tuple[Calibrator, ...]:
    """Return a head's map for each fold of validation questions; see `cross_fit`."""
    _, rows = open_rows(run, branch_setting(branch))
    where = rows.where("validation")
    scores = _fused(run, branch).scores.mean(axis=0)[where]
    questions = rows.ids[where]
    fit = FIT_MAP[run.resolve_section("calibrate", CALIBRATE_PRESETS).maps]
    folds = folds_of(questions, N_FOLDS)
    return cross_fit(fit, scores, rows.labels[where], questions, folds, N_FOLDS)


def _fused(run: RunDir, branch: HeadName) -> FusedHead:
    """Return the heads that a branch's search selected."""
    tree, summary = run_selection(run, branch)
    config = dataclasses.replace(select_config(run).head, n_slots=summary["n_slots"])
    champion = tree["champion"]
    return FusedHead(
        summary["members"],
        config,
        champion["params"],
        champion["scores"],
        len(summary["rounds"][0]["candidates"]),
    )


def _grid(run: RunDir, setting: Setting) -> TrainedGrid:
    store, rows = open_rows(run, setting)
    tree, _ = checkpoint.restore(run.encoders(setting))
    config = grid_config(run)
    members = grid_members(config.train.n_seeds, family_dims(store).n_subsets)
    return TrainedGrid(
        store=store,
        rows=rows,
        layer=chosen_layer(run),
        trained=TrainedMembers(members, tree["params"], tree["info"]),
        standardizer=Standardizer(**tree["standardizer"]),
        config=config.encoder,
    )


def _provenance(run: RunDir, grids: Mapping[Setting, TrainedGrid]) -> Provenance:
    """Return the provenance of a run's detector, given the grids of all settings."""
    store = next(iter(grids.values())).store
    sections = read_manifest(run.path)["sections"]
    ends = Counter(a.stop_id for a in read_answers(run) if a.stop_id is not None)
    questions = (e for e in read_examples(run) if e.split == "train")
    return Provenance(
        model=sections["backbone"]["model"],
        revision=str(store.spec.fingerprint["model"]),
        layer=chosen_layer(run),
        dtype=sections["backbone"]["dtype"],
        stored_as=stored_dtypes(store),
        answer_span=sections["extract"]["answer_span"],
        prompt=msgspec.convert(sections["answer"]["prompt"], PromptConfig),
        max_new_tokens=sections["answer"]["generation"]["max_new_tokens"],
        stop=tuple(sections["answer"]["generation"]["stop"]),
        stop_id=ends.most_common(1)[0][0] if ends else None,
        scripts=scripts_of(
            text
            for e in questions
            for text in (e.question, *(p.text for p in e.passages))
        ),
        paths={setting: grid.store.spec.path for setting, grid in grids.items()},
        attention_layers=store.spec.fingerprint.get("attention_layers", "all"),
    )


def calibrate_run(
    run: RunDir, config: CalibrateConfig, update: Update, progress: Progress
) -> None:
    """Fit the maps of a run's heads, and save its detector."""
    set_compiler(run.preset)
    grids: dict[Setting, TrainedGrid] = {s: _grid(run, s) for s in settings_of(run)}
    detector = calibrated(
        {branch: _fused(run, branch) for branch in run_branches(run)},
        grids,
        provenance=_provenance(run, grids),
        precision=config.precision,
        kind=config.maps,
    )
    for branch, head in detector.heads.items():
        for threshold in head.thresholds():
            progress.note(f"{branch}: {threshold.in_words()}")
    detector.save(run.detector)
