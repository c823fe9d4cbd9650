"""The stage that takes something away: a signal family, or a token span.

Without a family: the greedy search over the encoders that do not read it. Without a
span: the champion's encoders trained anew, then its head, in two ways. `zeroed` is the
paper's (appendix D): the span's signals are zero while training, and the evaluation is
unchanged. `without` leaves the span out of both. A head reads the answer span's vector,
so without that span it loses by construction: the encoders' own probabilities, which
no head has touched, are rows too. All runs in the executables of the ordinary stages;
the paper's other variants are rows of `evaluate` already.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, settings_of
from extract.run.directory import RunDir
from extract.run.files import read_json, write_json_atomic
from extract.run.results import ON_REQUEST, ResultRow, publish, rows_file
from extract.run.stages import Stage, side_by_side
from jaxprobe.checkpoint import Cache, load_cache, save_cache
from jaxprobe.config import SELECT_PRESETS, SelectConfig, set_compiler
from jaxprobe.evaluation import METRICS, Scored, detection_rows
from jaxprobe.features import families
from jaxprobe.features.families import all_but
from jaxprobe.features.rows import Rows, TrainingSet
from jaxprobe.features.subsets import FAMILIES, LETTERS, N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.stage import settings_at_once, train_encoders
from jaxprobe.model.encoder import MemberOutputs
from jaxprobe.model.fusion import PoolOutputs
from jaxprobe.pool import pool_names, reads
from jaxprobe.stage import (
    encoder_folders,
    grid_config,
    run_bootstrap,
    run_outputs,
    run_pool,
    run_selection,
    run_training_set,
)
from selection.greedy import NoSignalError, Selection
from selection.stage import HeadTrainer, load_results

EXPERIMENT = "ablation"
SPANS: dict[Setting, tuple[str, ...]] = {
    setting: tuple(families.SPAN_NAMES[span] for span in spans)
    for setting, spans in families.SPANS.items()
}


WAYS = ("zeroed", "without")  # in which a span is taken away
OWN = "_encoders"  # ends the name of a mean of encoders' own probabilities


def span_variants(setting: Setting) -> list[str]:
    """Return the names of what is trained anew in a setting, in the order of tables."""
    return [f"{way}_{span}_span" for way in WAYS for span in SPANS[setting]]


def variants(setting: Setting) -> list[str]:
    """Return the names of what is taken away in a setting, in the order of tables."""
    return [*(f"without_{family}" for family in FAMILIES), *span_variants(setting)]


def rows_without(data: TrainingSet, setting: Setting, variant: str) -> TrainingSet:
    """Return a setting's training rows as a span variant reads them."""
    way, name, _ = variant.split("_")
    span = SPANS[setting].index(name)
    if way == "zeroed":
        return data.with_zeroed(span)
    return data.with_spans(all_but(span, len(SPANS[setting])))


def own_scores(pool: PoolOutputs, members: Sequence[int]) -> np.ndarray:
    """Return the mean of some encoders' own probabilities, `[n_seeds, n_examples]`."""
    return np.asarray(pool.outputs)[:, list(members), -1].mean(axis=1)


def candidates_without(setting: Setting, n_pool: int, family: str) -> list[int]:
    """Return the pool positions of the encoders that do not read a family."""
    letter = LETTERS[FAMILIES.index(family)]
    pool = reads(setting, range(n_pool))
    return [i for i, (_, name) in enumerate(pool) if letter not in name]


def replaced(
    outputs: MemberOutputs, by: MemberOutputs, subsets: tuple[int, ...]
) -> MemberOutputs:
    """Put the outputs of some encoders in the place of the grid's.

    Args:
      outputs: of the grid, `[n_seeds * 15, ...]`, seed-major.
      by: of the subsets, `[n_seeds * n_subsets, ...]`, seed-major.
      subsets: rows of SUBSETS.
    """
    n_seeds = len(outputs.logits) // N_SUBSETS
    places = [s * N_SUBSETS + k for s in range(n_seeds) for k in subsets]

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        copy = np.array(old)
        copy[places] = new
        return copy

    return MemberOutputs(put(outputs.logits, by.logits), put(outputs.pooled, by.pooled))


def undefined_rows(name: str, rows: Rows) -> list[ResultRow]:
    """Return the rows of a search that found nothing to select."""
    return [
        ResultRow(
            experiment=EXPERIMENT,
            detector=name,
            metric=metric,
            value=None,
            **rows.fields_of(*place),
            reason="no encoder of those left is better than chance on validation",
        )
        for place, metric in itertools.product(rows.evaluated_sets(), METRICS)
    ]


def _arrays(heads: HeadTrainer, selection: Selection) -> dict[str, np.ndarray]:
    """Return a variant's encoders and the scores of every row, as they are saved."""
    return {
        "members": np.array(selection.members),
        "scores": heads.scores(selection),
        "own": own_scores(heads.pool.all_rows, selection.members),
    }


def _folder(run: RunDir) -> Path:
    return run.path / "ablations"


def _inputs(run: RunDir) -> list[Path]:
    """Return everything a variant depends on."""
    return [*row_files(run), run.sweep, run.selection, *encoder_folders(run)]


@dataclasses.dataclass(frozen=True)
class Ablation:
    """The ablations of one run; what an interrupted one has finished is kept.

    Attributes:
      run: with selected encoders.
      config: heads and search, with the run's seed.
    """

    run: RunDir
    config: SelectConfig

    @cached_property
    def key(self) -> str:
        """Identity of everything that a variant depends on."""
        return " ".join(self.run.hash_inputs(*_inputs(self.run)).values())

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Of the run."""
        return settings_of(self.run)

    @cached_property
    def champions(self) -> dict[Setting, tuple[int, ...]]:
        """Pool positions of the selected encoders, by setting."""
        found = {s: run_selection(self.run, s)[1]["members"] for s in self.settings}
        return {setting: tuple(members) for setting, members in found.items()}

    @cached_property
    def subsets(self) -> dict[Setting, tuple[int, ...]]:
        """The encoders of each pass that a champion reads, as rows of SUBSETS."""
        read = {pair for s in self.settings for pair in reads(s, self.champions[s])}
        return {
            setting: tuple(
                sorted(SUBSET_NAMES.index(n) for s, n in read if s == setting)
            )
            for setting in self.settings
        }

    def n_members(self, setting: Setting) -> int:
        """Return how many of a pass's encoders are trained for each span variant."""
        return grid_config(self.run).train.n_seeds * len(self.subsets[setting])

    def _outputs_file(self, setting: Setting, variant: str) -> Path:
        return _folder(self.run) / f"{setting}.{variant}.safetensors"

    def _scores_file(self, setting: Setting, variant: str) -> Path:
        return _folder(self.run) / f"{setting}.{variant}.scores.safetensors"

    def train_without_spans(self, setting: Setting, tick: Callable[[], None]) -> None:
        """Train the champions' encoders of a pass, once for each of its span variants.

        Every member has the weights, batches and noise it began with in the grid: what
        differs is the span. Finished members and variants are not trained again.
        """
        named, subsets = span_variants(setting), self.subsets[setting]
        missing = [
            variant
            for variant in named
            if load_cache(self._outputs_file(setting, variant), self.key) is None
        ]
        for _ in range(self.n_members(setting) * (len(named) - len(missing))):
            tick()
        if not missing or not subsets:
            return
        config = grid_config(self.run)
        data = run_training_set(self.run, setting, config)
        for variant in missing:
            without = rows_without(data, setting, variant)
            cache = Cache(_folder(self.run) / f"{setting}.{variant}.members", self.key)
            _, outputs = train_encoders(
                without, config, subsets=subsets, cache=cache, on_part=tick
            )
            path = self._outputs_file(setting, variant)
            save_cache(path, outputs._asdict(), self.key)
            cache.clear()

    def _outputs_without(self, variant: str, setting: Setting) -> MemberOutputs:
        """Return a pass's outputs, those of the champions' encoders as retrained.

        The other encoders keep their outputs; no head reads them. So the pool keeps its
        shape, and a head its place in the pool, its draws and its executable.
        """
        outputs = run_outputs(self.run, setting)
        subsets = self.subsets[setting]
        if variant not in span_variants(setting) or not subsets:
            return outputs
        path = self._outputs_file(setting, variant)
        retrained = MemberOutputs(**load_results(path, self.key, "ablate"))
        return replaced(outputs, retrained, subsets)

    def make_variants(self, setting: Setting, tick: Callable[[], None]) -> None:
        """Train the heads of every variant of a setting that is not finished yet."""
        heads = None
        for variant in variants(setting):
            path = self._scores_file(setting, variant)
            if load_cache(path, self.key) is None:
                if variant in span_variants(setting):
                    arrays = self._without_span(setting, variant)
                else:
                    if heads is None:
                        heads = HeadTrainer(run_pool(self.run, setting), self.config)
                    family = variant.removeprefix("without_")
                    arrays = self._without_family(heads, family)
                save_cache(path, arrays, self.key)
            tick()

    def _without_family(self, heads: HeadTrainer, family: str) -> dict[str, np.ndarray]:
        """Search among the other encoders, which may be no better than chance."""
        setting, n_pool = heads.pool.rows.setting, heads.pool.train.n_pool
        try:
            selection = heads.search(candidates_without(setting, n_pool, family))
        except NoSignalError:
            return {"members": np.zeros(0, np.int32)}
        return _arrays(heads, selection)

    def _without_span(self, setting: Setting, variant: str) -> dict[str, np.ndarray]:
        """Fit heads on the champion's encoders, retrained without a span."""
        pool = run_pool(self.run, setting, partial(self._outputs_without, variant))
        heads = HeadTrainer(pool, self.config)
        return _arrays(heads, heads.fit(self.champions[setting]))

    def _load(self, setting: Setting) -> dict[str, dict[str, np.ndarray]]:
        return {
            variant: load_results(
                self._scores_file(setting, variant), self.key, "ablate"
            )
            for variant in variants(setting)
        }

    def scores(self, setting: Setting, variant: str) -> np.ndarray | None:
        """Return what a variant says of every row, `[n_seeds, n_rows]`.

        None where its search found nothing to select.
        """
        return self._load(setting)[variant].get("scores")

    def rows(self, setting: Setting) -> list[ResultRow]:
        """Return the rows of a setting's variants, undefined ones last."""
        pool = run_pool(self.run, setting)
        rows, champion = pool.rows, self.champions[setting]
        own = own_scores(pool.all_rows, champion)
        scored, undefined = [Scored(name=f"champion{OWN}", scores=own)], []
        for variant, arrays in self._load(setting).items():
            if "scores" not in arrays:
                undefined += undefined_rows(variant, rows)
                continue
            scored.append(Scored(name=variant, scores=arrays["scores"]))
            if variant in span_variants(setting):
                scored.append(Scored(name=variant + OWN, scores=arrays["own"]))
        bootstrap = run_bootstrap(self.run)
        return detection_rows(scored, rows, bootstrap, EXPERIMENT) + undefined

    def summary(self) -> dict[str, dict[str, list[str]]]:
        """Return the printed names of every variant's encoders, by setting."""
        summary = {
            setting: {
                variant: pool_names(setting, arrays["members"].tolist())
                for variant, arrays in self._load(setting).items()
            }
            for setting in self.settings
        }
        if len(self.settings) == 1:
            return summary
        alone = run_selection(self.run, "single_pass")[1]["members"]
        names = pool_names("single_pass", alone)  # its scores are rows of `evaluate`
        summary["with_context"]["without_closed_book"] = names
        return summary


def _ablate(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    ablation = Ablation(run, config.seeded(run.seed))
    settings = ablation.settings
    n_members = sum(ablation.n_members(s) * len(span_variants(s)) for s in settings)
    n_all = n_members + sum(len(variants(setting)) for setting in settings)
    # The with-context heads need the closed-book encoders, so training comes first.
    side_by_side(
        ablation.train_without_spans,
        settings,
        update,
        n_all,
        at_once=settings_at_once(grid_config(run)),
    )
    side_by_side(
        ablation.make_variants,
        settings,
        lambda done, total: update(n_members + done, total),
        n_all,
    )
    rows = [row for setting in settings for row in ablation.rows(setting)]
    publish(run, "ablate", rows, progress)
    write_json_atomic(_folder(run) / "summary.json", ablation.summary())


def ablation_summary(run: RunDir) -> dict[str, dict[str, list[str]]]:
    """Return which encoders every variant reads, by setting and name."""
    again = f"run `{ON_REQUEST['ablate']}` again"
    kind = dict[str, dict[str, list[str]]]
    return read_json(_folder(run) / "summary.json", kind, again)


ABLATE = Stage(
    name="ablate",
    inputs=_inputs,
    outputs=lambda run: [_folder(run), rows_file(run, "ablate")],
    work=_ablate,
    presets=SELECT_PRESETS,
    section="select",
)
