"""The ablation stage: removes a signal family or a token span.

Without a family, the greedy search runs over the encoders that do not read it. Without
a span, the champion's encoders are retrained, then its head: `zeroed` is the paper's
method (appendix E), `without` leaves the span out of training and evaluation. A head
reads the answer span's vector, so without that span it loses by construction; there are
therefore also rows for the encoders' own probabilities.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from beatrice.extract.records import Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import row_files, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import read_json, write_json_atomic
from beatrice.extract.run.rows import ResultRow, Subject, publish, rows_file
from beatrice.extract.run.stages import Stage, side_by_side
from beatrice.jaxprobe import families
from beatrice.jaxprobe.calibrate import Pool, pool_of, run_bootstrap, run_selection
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    INTERVAL_FORMAT,
    SELECT_PRESETS,
    GridConfig,
    SelectConfig,
    set_compiler,
)
from beatrice.jaxprobe.detector import encoders_read, pool_names
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.evaluation import METRICS, DetectorScores, detection_rows
from beatrice.jaxprobe.families import FAMILIES, LETTERS, N_SUBSETS, SUBSET_NAMES
from beatrice.jaxprobe.fusion import PoolOutputs
from beatrice.jaxprobe.grid import expected_epochs
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import StoreRows, TrainingSet
from beatrice.jaxprobe.stages import encoder_folders, grid_config
from beatrice.jaxprobe.train import (
    check_protocol,
    open_rows,
    run_outputs,
    run_training_set,
    settings_at_once,
    train_encoders,
)
from beatrice.selection.greedy import HeadTrainer, NoSignalError, Selection, load_part

EXPERIMENT = "ablation"
SPANS: dict[Setting, tuple[str, ...]] = {
    setting: tuple(families.SPAN_NAMES[span] for span in spans)
    for setting, spans in families.SPANS.items()
}
WAYS = ("zeroed", "without")  # how a span is removed
ENCODERS = "encoders"  # kind of rows: mean of encoders' own probabilities, no head
# Variant -> what its rows measure.
SUBJECTS = {
    **{
        f"without_{family}": Subject("without_family", LETTERS.replace(letter, ""))
        for family, letter in zip(FAMILIES, LETTERS, strict=True)
    },
    **{
        f"{way}_{span}_span": Subject(f"{way}_span", span=span)
        for way in WAYS
        for span in families.SPAN_NAMES
    },
}


def span_variants(setting: Setting) -> list[str]:
    """Return the names of a setting's span variants, in table order."""
    return [f"{way}_{span}_span" for way in WAYS for span in SPANS[setting]]


def variants(setting: Setting) -> list[str]:
    """Return the names of all variants of a setting, in table order."""
    return [*(f"without_{family}" for family in FAMILIES), *span_variants(setting)]


def rows_without(data: TrainingSet, setting: Setting, variant: str) -> TrainingSet:
    """Return a setting's training rows with the variant's span zeroed or left out."""
    way, name, _ = variant.split("_")
    span = SPANS[setting].index(name)
    return data.with_zeroed(span) if way == "zeroed" else data.without(span)


def own_scores(pool: PoolOutputs, members: Sequence[int]) -> np.ndarray:
    """Return the mean of the members' own probabilities, `[n_seeds, n_examples]`."""
    return np.asarray(pool.outputs)[:, list(members), -1].mean(axis=1)


def candidates_without(setting: Setting, n_pool: int, family: str) -> list[int]:
    """Return the pool positions of the encoders that do not read a family."""
    letter = LETTERS[FAMILIES.index(family)]
    pool = encoders_read(setting, range(n_pool))
    return [i for i, (_, name) in enumerate(pool) if letter not in name]


def replaced(
    outputs: MemberOutputs, by: MemberOutputs, subsets: tuple[int, ...]
) -> MemberOutputs:
    """Replace the grid's outputs of some encoders by new ones.

    Both are seed-major: `outputs` is `[n_seeds * 15, ...]`, `by` is `[n_seeds *
    n_subsets, ...]`; `subsets` are rows of SUBSETS.
    """
    n_seeds = len(outputs.logits) // N_SUBSETS
    indices = [s * N_SUBSETS + k for s in range(n_seeds) for k in subsets]

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        copy = np.array(old)
        copy[indices] = new
        return copy

    return MemberOutputs(put(outputs.logits, by.logits), put(outputs.pooled, by.pooled))


def undefined_rows(name: str, rows: StoreRows) -> list[ResultRow]:
    """Return null rows for a search that found no encoder to select."""
    return [
        ResultRow(
            experiment=EXPERIMENT,
            metric=metric,
            value=None,
            **SUBJECTS[name]._asdict(),
            **rows.fields_of(*of_set),
            reason="no encoder of those left is better than chance on validation",
        )
        for of_set, metric in itertools.product(rows.evaluated_sets(), METRICS)
    ]


def _arrays(heads: HeadTrainer, selection: Selection) -> dict[str, np.ndarray]:
    return {
        "members": np.array(selection.members),
        "scores": heads.scores(selection),
        "own": own_scores(heads.pool.all_rows, selection.members),
    }


def _folder(run: RunDir) -> Path:
    return run.path / "ablations"


def _inputs(run: RunDir) -> list[Path]:
    return [*row_files(run), run.sweep, run.selection, *encoder_folders(run)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ablation:
    """Ablations of the selected sets of all settings."""

    # Pool positions of the selected encoders, by setting.
    champions: Mapping[Setting, tuple[int, ...]]
    rows: Mapping[Setting, StoreRows]
    # Reads the outputs of all encoders of a pass on its rows.
    read_outputs: Callable[[Setting], MemberOutputs]
    # Reads a setting's rows as the training of encoders does.
    read_training_set: Callable[[Setting], TrainingSet]
    grid: GridConfig
    config: SelectConfig  # heads and search, with the run's seed
    # Finished variants; the key covers everything that they depend on.
    cache: Cache

    @cached_property
    def subsets(self) -> dict[Setting, tuple[int, ...]]:
        """The encoders of each pass that any champion reads, as rows of SUBSETS."""
        read: dict[Setting, set[int]] = {setting: set() for setting in self.champions}
        for setting, members in self.champions.items():
            for where, name in encoders_read(setting, members):
                read[where].add(SUBSET_NAMES.index(name))
        return {setting: tuple(sorted(subsets)) for setting, subsets in read.items()}

    def n_epochs(self, setting: Setting) -> int:
        """Return the expected epochs of a pass's encoders without a span."""
        n_members = self.grid.train.n_seeds * len(self.subsets[setting])
        return n_members * expected_epochs(self.grid.encoder, self.grid.train)

    def train_without_spans(self, setting: Setting, tick: Callable[..., None]) -> None:
        """Retrain the champions' encoders of a pass for each variant without a span.

        Every member starts from the same weights and sees the same batches and noise as
        in the grid; only the span differs. Finished members and variants are skipped.
        """
        subsets, data = self.subsets[setting], None
        for variant in span_variants(setting):
            name = f"{setting}.{variant}"
            folder = self.cache.folder and self.cache.folder / f"{name}.members"
            members = Cache(folder, self.cache.key)
            if self.cache.load(name) is not None or not subsets:
                members.clear()  # left if a process was killed just before it did so
                tick(self.n_epochs(setting))
                continue
            data = data or self.read_training_set(setting)
            trained = train_encoders(
                rows_without(data, setting, variant),
                self.grid,
                subsets=subsets,
                cache=members,
                on_epochs=tick,
            )
            assert trained is not None  # only a share of the members returns None
            self.cache.save(name, trained[1]._asdict())
            members.clear()

    def _outputs_without(self, variant: str, setting: Setting) -> MemberOutputs:
        """Return a pass's outputs, with those of the champions' retrained encoders."""
        outputs = self.read_outputs(setting)
        subsets = self.subsets[setting]
        if variant not in span_variants(setting) or not subsets:
            return outputs
        retrained = load_part(self.cache, f"{setting}.{variant}", ABLATE.verb)
        return replaced(outputs, MemberOutputs(**retrained), subsets)

    def _pool(self, setting: Setting, variant: str = "") -> Pool:
        passes = tuple(self.champions) if setting == "with_context" else (setting,)
        outputs: dict[Setting, MemberOutputs] = {
            where: self._outputs_without(variant, where) for where in passes
        }
        return pool_of(outputs, self.rows, setting, self.grid.train.n_seeds)

    def fit_variants(self, setting: Setting, tick: Callable[[], None]) -> None:
        """Train the heads of every unfinished variant of a setting.

        Without a span, they are trained on the champion's retrained encoders; without a
        family, by a search among the other encoders, which may find no signal.
        """
        heads = None
        for variant in variants(setting):
            name = f"{setting}.{variant}.scores"
            if self.cache.load(name) is None:
                if variant in span_variants(setting):
                    retrained = HeadTrainer(self._pool(setting, variant), self.config)
                    selection = retrained.fit(self.champions[setting])
                    arrays = _arrays(retrained, selection)
                else:
                    heads = heads or HeadTrainer(self._pool(setting), self.config)
                    family = variant.removeprefix("without_")
                    left = candidates_without(setting, heads.pool.train.n_pool, family)
                    try:
                        arrays = _arrays(heads, heads.search(left))
                    except NoSignalError:
                        arrays = {"members": np.zeros(0, np.int32)}
                self.cache.save(name, arrays)
            tick()

    def result_rows(
        self, setting: Setting, bootstrap: BootstrapConfig
    ) -> list[ResultRow]:
        """Return the result rows of a setting's variants, undefined ones last."""
        rows = self.rows[setting]
        scores = own_scores(self._pool(setting).all_rows, self.champions[setting])
        champion = Subject("champion", kind=ENCODERS)
        scored, undefined = [DetectorScores(name=champion, scores=scores)], []
        for variant, arrays in load_variants(self.cache, setting).items():
            if "scores" not in arrays:
                undefined += undefined_rows(variant, rows)
                continue
            subject = SUBJECTS[variant]
            scored.append(DetectorScores(name=subject, scores=arrays["scores"]))
            if variant in span_variants(setting):
                subject = subject._replace(kind=ENCODERS)
                scored.append(DetectorScores(name=subject, scores=arrays["own"]))
        return detection_rows(scored, rows, bootstrap, EXPERIMENT) + undefined


def load_variants(cache: Cache, setting: Setting) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays (see `_arrays`) of every variant of a setting."""
    return {
        variant: load_part(cache, f"{setting}.{variant}.scores", ABLATE.verb)
        for variant in variants(setting)
    }


def _cache(run: RunDir) -> Cache:
    return Cache(_folder(run), " ".join(run.hash_inputs(*_inputs(run)).values()))


def scores_without(run: RunDir, setting: Setting, variant: str) -> np.ndarray | None:
    """Read a variant's scores `[n_seeds, n_rows]`; None if nothing was selected."""
    return load_variants(_cache(run), setting)[variant].get("scores")


def _summary(run: RunDir, cache: Cache) -> dict[str, dict[str, list[str]]]:
    summary = {
        setting: {
            variant: pool_names(setting, arrays["members"].tolist())
            for variant, arrays in load_variants(cache, setting).items()
        }
        for setting in settings_of(run)
    }
    if len(summary) > 1:
        members = run_selection(run, "single_pass")[1]["members"]
        names = pool_names("single_pass", members)  # `evaluate` writes its scores
        summary["with_context"]["without_closed_book"] = names
    return summary


def _ablate(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    check_protocol(run, "encoders without a span")
    set_compiler(run.preset)
    settings, grid, cache = settings_of(run), grid_config(run), _cache(run)
    ablation = Ablation(
        champions={s: tuple(run_selection(run, s)[1]["members"]) for s in settings},
        rows={setting: open_rows(run, setting)[1] for setting in settings},
        read_outputs=partial(run_outputs, run),
        read_training_set=lambda setting: run_training_set(run, setting, grid),
        grid=grid,
        config=config.seeded(run.seed),
        cache=cache,
    )
    n_epochs = sum(ablation.n_epochs(s) * len(span_variants(s)) for s in settings)
    n_all = n_epochs + sum(len(variants(setting)) for setting in settings)
    # With-context heads read closed-book encoders too, so all encoders come first.
    side_by_side(
        ablation.train_without_spans,
        settings,
        update,
        n_all,
        at_once=settings_at_once(run, grid),
    )
    side_by_side(
        ablation.fit_variants,
        settings,
        lambda done, total: update(n_epochs + done, total),
        n_all,
    )
    bootstrap = run_bootstrap(run)
    rows = [row for s in settings for row in ablation.result_rows(s, bootstrap)]
    publish(run, "ablate", rows, progress)
    write_json_atomic(_folder(run) / "summary.json", _summary(run, cache))


def ablation_summary(run: RunDir) -> dict[str, dict[str, list[str]]]:
    """Read the encoders that each variant reads, by setting and variant."""
    again = "run `beatrice evaluate RUN_DIR --ablations` again"
    kind = dict[str, dict[str, list[str]]]
    return read_json(_folder(run) / "summary.json", kind, again)


ABLATE = Stage(
    name="ablate",
    verb="evaluate --ablations",
    inputs=_inputs,
    outputs=lambda run: [_folder(run), rows_file(run, "ablate")],
    work=_ablate,
    identity=lambda config: {"interval format": str(INTERVAL_FORMAT)},
    presets=SELECT_PRESETS,
    section="select",
)
