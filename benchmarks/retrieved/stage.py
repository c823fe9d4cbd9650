"""The stage that measures a run's detectors on answers from retrieved passages.

The paper's appendix on real retrieval: k passages from a corpus, the backbone answers,
labels as in the run, and every detector as it was trained on gold contexts.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import msgspec
import numpy as np

from benchmarks.baselines.length import length_features
from benchmarks.baselines.linear import scores_of, standardise
from benchmarks.baselines.perplexity import perplexity_scores
from benchmarks.baselines.probe import pooled_signals
from benchmarks.baselines.text import fit_tfidf, texts_of
from benchmarks.retrieved.questions import (
    TransferConfig,
    asked_questions,
    inner_run,
    with_passages,
    write_questions,
)
from extract.generate.requests import answer_config
from extract.generate.stage import ANSWER, load_tokenizer_only
from extract.label.stage import LABEL
from extract.label.verdicts import LABEL_PRESETS
from extract.records import IN_DOMAIN, SETTINGS, Example, Setting
from extract.run.console import Progress, Update
from extract.run.contents import read_examples, require_both_settings, row_files
from extract.run.directory import RunDir
from extract.run.results import RIVALS, ResultRow, publish, rows_file
from extract.run.stages import once, run_stage
from extract.signals.stage import EXTRACT
from extract.store.read import FeatureStore
from jaxprobe import checkpoint
from jaxprobe.config import set_compiler
from jaxprobe.detector import Detector
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.families import (
    Features,
    Standardizer,
    split_families,
    width_groups,
    widths_of,
)
from jaxprobe.features.reading import (
    family_dims,
    longest_spans,
    read_features,
    stored_lengths,
)
from jaxprobe.features.rows import Rows, partners, rows_at_once
from jaxprobe.features.subsets import (
    FAMILIES,
    LETTERS,
    SUBSET_NAMES,
    SUBSETS,
    FamilyDims,
)
from jaxprobe.fit.grid import grid_members, member_logits
from jaxprobe.fit.stage import EVERY_FAMILY
from jaxprobe.model.encoder import Encoder
from jaxprobe.stage import (
    chosen_layer,
    encoder_folders,
    grid_config,
    open_rows,
    run_bootstrap,
)
from pgir.retrieval.commands import retrieval_config, retrieval_of
from pgir.retrieval.recall import has_answer

NAME = "transfer"
EXPERIMENT = "real_retrieval"
_ROWS_OF_A_KIND = 64  # of the longest rows, which are read by themselves
ALL_SETS = "all_sets"  # the questions of all sets together, the paper's column "All"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run's detectors and, in one setting, the answers they are put to.

    Attributes:
      run: where the detectors were trained.
      inner: the run of the answers.
      setting: with context, of gold passages in the one and retrieved in the other.
    """

    run: RunDir
    inner: RunDir
    setting: Setting

    def joined(self) -> Rows:
        """Return the rows of both, the run's own first; only those are trained on."""
        (_, own), (_, new) = self.own, self.new
        fields = {
            field.name: np.concatenate(
                [getattr(own, field.name), getattr(new, field.name)]
            )
            for field in dataclasses.fields(Rows)
            if field.name != "setting"
        }
        unseen = np.full(len(new.ids), "ood")
        fields["splits"] = np.concatenate([own.splits, unseen])
        return Rows(setting=self.setting, **fields)

    @property
    def own(self) -> tuple[FeatureStore, Rows]:
        """The run's store, with its rows."""
        return open_rows(self.run, self.setting)

    @property
    def new(self) -> tuple[FeatureStore, Rows]:
        """The inner run's."""
        return open_rows(self.inner, self.setting)

    def parts(self, dims: FamilyDims) -> Iterator[tuple[np.ndarray, Features]]:
        """Yield the new rows in parts that memory holds, with their features.

        Rows of similar length lie together; the last rows of a part fill it up, so that
        one executable serves all parts of a group.
        """
        store, rows = self.new
        lengths = stored_lengths(store)
        layer = chosen_layer(self.run)
        for group in width_groups(lengths, _ROWS_OF_A_KIND):
            widths = widths_of(lengths[group])
            n_at_once = min(len(group), rows_at_once(widths, dims))
            for start in range(0, len(group), n_at_once):
                part = group[start : start + n_at_once]
                full = np.pad(part, (0, n_at_once - len(part)), mode="edge")
                yield part, read_features(store, layer, full, widths)

    def scored(
        self, dims: FamilyDims, score: Callable[[np.ndarray, Features], np.ndarray]
    ) -> np.ndarray:
        """Return `score(part, features)`, `[..., n]`, of all parts: `[..., n_rows]`."""
        places, made = [], []
        for part, features in self.parts(dims):
            places.append(part)
            made.append(np.asarray(score(part, features))[..., : len(part)])
        return np.concatenate(made, axis=-1)[..., np.argsort(np.concatenate(places))]


def encoder_scores(scene: Scenario) -> dict[str, np.ndarray]:
    """Return the logits of every encoder on the new rows, `[n_seeds, n_rows]`."""
    config = grid_config(scene.run)
    tree, _ = checkpoint.restore(scene.run.encoders(scene.setting))
    dims = family_dims(scene.own[0])
    standardizer = Standardizer(**tree["standardizer"])
    members = grid_members(config.train.n_seeds, dims.n_subsets)
    every = [
        (jax.tree.map(lambda x, i=i: x[i], tree["params"]), SUBSETS[member.subset])
        for i, member in enumerate(members)
    ]

    split = jax.jit(lambda features: split_families(features, dims, standardizer))
    encoder = Encoder(config.encoder, dims)

    def logits(_: np.ndarray, features: Features) -> np.ndarray:
        return member_logits(every, split(features), encoder=encoder)

    said = scene.scored(dims, logits).astype(np.float64)
    own = {
        name: said[[i for i, m in enumerate(members) if m.subset == subset]]
        for subset, name in enumerate(SUBSET_NAMES)
    }
    found = {f"encoder:{name}": logits for name, logits in own.items()}
    singles = {"hidden_only": 0, "early_fusion": EVERY_FAMILY}
    return found | {name: own[SUBSET_NAMES[at]] for name, at in singles.items()}


def selected_scores(scene: Scenario, detector: Detector) -> dict[str, np.ndarray]:
    """Return the raw scores of the selected heads on the new rows, `[1, n_rows]`."""
    if scene.setting == "closed_book":

        def closed_book(_: np.ndarray, features: Features) -> np.ndarray:
            return detector.score_closed_book(features).raw

        dims = detector.banks["closed_book"].dims
        return {"champion": scene.scored(dims, closed_book)[None]}
    bank = detector.banks.get("with_context") or detector.banks["closed_book"]
    _, rows = scene.new
    closed_store, closed_rows = open_rows(scene.inner, "closed_book")
    partner = partners(rows.ids, closed_rows.ids)
    read = partial(
        read_features,
        closed_store,
        chosen_layer(scene.run),
        n_tokens=longest_spans(closed_store),
    )

    def both(part: np.ndarray, features: Features) -> np.ndarray:
        n_more = len(features.tokens[0]) - len(part)
        where = np.pad(partner[part], (0, n_more), mode="edge")
        closed: Features = read(examples=where)
        return detector.score_with_context(features, closed).raw

    def alone(_: np.ndarray, features: Features) -> np.ndarray:
        return detector.score_single_pass(features).raw

    found = {"champion": scene.scored(bank.dims, both)[None]}
    if "single_pass" in detector.heads:
        found["without_closed_book"] = scene.scored(bank.dims, alone)[None]
    return found


def rival_scores(scene: Scenario) -> dict[str, np.ndarray]:
    """Return the scores of probes, length, text and perplexity on the new rows.

    They are fitted as in `evaluate`, on the run's own training and validation rows.
    """
    (own_store, own), (new_store, new) = scene.own, scene.new
    rows, n_own = scene.joined(), len(own.ids)
    train = rows.where("train")
    families = {}
    for family, letter in zip(FAMILIES, LETTERS, strict=True):
        layer = chosen_layer(scene.run) if family == "hidden" else None
        families[letter] = np.concatenate(
            [
                pooled_signals(store, scene.setting, family, layer)
                for store in (own_store, new_store)
            ]
        )
        standardise(families[letter], train)
    found = {}
    for letters in (*LETTERS, LETTERS):
        features = np.concatenate([families[x] for x in letters], axis=1)
        found[f"probe:{letters}"] = scores_of(features, rows)[0][:, n_own:]
    lengths = [length_features(scene.run, own), length_features(scene.inner, new)]
    length = np.concatenate(lengths)
    standardise(length, train)
    found["answer_length"] = scores_of(length, rows)[0][:, n_own:]
    texts = texts_of(scene.run, own)
    valid = own.where("validation")
    own_train = own.where("train")
    text = fit_tfidf(
        [texts[i] for i in own_train],
        own.labels[own_train],
        [texts[i] for i in valid],
        own.labels[valid],
    )
    found["tfidf"] = text.score(texts_of(scene.inner, new))[None]
    found["perplexity"] = perplexity_scores(new_store)
    return found


def _answer_rows(examples: list[Example], rows: Rows) -> list[ResultRow]:
    """Return how often answers are right, and how often a passage holds a gold."""
    held = {
        e.id: has_answer(np.arange(len(e.passages)), e.passages, e.golds, (99,))[99]
        for e in examples
    }
    made = []
    for dataset, split in rows.evaluated_sets():
        where = rows.where(split, dataset)
        values = {"em": rows.labels[where]}
        if rows.setting == "with_context":
            values["answer_found"] = np.array([held[i] for i in rows.ids[where]])
        made += [
            ResultRow(
                experiment=EXPERIMENT,
                detector="backbone",
                metric=metric,
                value=float(own.mean()) if len(own) else None,
                reason=None if len(own) else "no labelled answer",
                **rows.fields_of(dataset, split),
            )
            for metric, own in values.items()
        ]
    return made


def _counted(
    made: list[ResultRow], rows: Rows, asked: list[Example]
) -> list[ResultRow]:
    """Add to each row's failures the questions that have no answer to be scored."""
    there = set(rows.ids)
    missing = [example for example in asked if example.id not in there]
    n_missing = {
        ALL_SETS: len(missing),
        **collections.Counter((e.dataset, e.split) for e in missing),
        **collections.Counter((IN_DOMAIN, e.split) for e in missing),
    }
    return [
        msgspec.structs.replace(
            row,
            n_failed=row.n_failed
            + n_missing.get(
                ALL_SETS if row.dataset == ALL_SETS else (row.dataset, row.split), 0
            ),
        )
        for row in made
    ]


def _measure(
    run: RunDir, inner: RunDir, asked: list[Example], update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    detector, bootstrap = Detector.load(run.detector), run_bootstrap(run)
    examples, made = read_examples(inner), []
    for n_done, setting in enumerate(SETTINGS, start=1):
        scene = Scenario(run=run, inner=inner, setting=setting)
        scores = selected_scores(scene, detector)
        scores |= encoder_scores(scene) | rival_scores(scene)
        detectors = [Scored(name=name, scores=own) for name, own in scores.items()]
        _, rows = scene.new
        pairs = {f"{EXPERIMENT}_paired": [("champion", rival) for rival in RIVALS]}
        together = dataclasses.replace(
            rows,
            datasets=np.full(len(rows.ids), ALL_SETS),
            splits=np.full(len(rows.ids), "ood"),
        )
        for some in (rows, together):
            own = detection_rows(detectors, some, bootstrap, EXPERIMENT, pairs)
            own += _answer_rows(examples, some)
            made += _counted(own, some, asked)
        update(n_done, len(SETTINGS))
    publish(run, NAME, made, progress)


def transfer_run(run: RunDir, config: TransferConfig, progress: Progress) -> None:
    """Do everything that is not done, in a run that is held by the caller.

    Raises:
      ValueError: the run has no detector, or questions got no passages; what the
        others gave is published, and the same call again asks for the rest.
    """
    require_both_settings(run, NAME)
    run.finished_detector()
    asked = asked_questions(run, config)
    found = retrieval_of(run, progress.note)
    model, _ = load_tokenizer_only(run)
    template = answer_config(run).prompt.prompt_template()
    examples, failed = with_passages(
        asked, found, config.n_passages, (model.tokenizer, template)
    )
    progress.note(
        f"transfer: {len(examples)} of {len(asked)} questions have passages, by "
        f"{retrieval_config(run).retriever} over {len(found.passages):,}"
    )
    if not examples:
        raise ValueError(f"no question got passages: {next(iter(failed.values()))}")
    del found  # an index and its encoder; the backbone comes next
    match = run.settle("label", LABEL_PRESETS, is_recorded=False)
    with inner_run(run) as inner:
        write_questions(inner, run, examples, progress.note)
        run_stage(ANSWER, inner, progress)
        if not inner.stage_done("label"):  # judges may have labelled
            run_stage(LABEL, inner, progress, lambda _: match)
        run_stage(EXTRACT, inner, progress)
        inputs = run.hash_inputs(
            *row_files(run),
            *row_files(inner),
            run.detector,
            run.sweep,
            *encoder_folders(run),
        )
        inputs |= {"n_asked": str(len(asked)), "n_failed": str(len(failed))}
        once(
            run,
            NAME,
            inputs,
            [rows_file(run, NAME)],
            progress,
            lambda update: _measure(run, inner, asked, update, progress),
        )
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(asked)} questions got no passages and are counted "
            f"as failed, the first since {next(iter(failed.values()))}; the same line "
            "again asks for them"
        )
