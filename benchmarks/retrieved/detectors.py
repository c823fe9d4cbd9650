"""A run's detectors, as they are, on answers from retrieved passages.

The paper's appendix on real retrieval: k passages from a corpus, the backbone answers,
labels as in the run, and every detector as it was trained on gold contexts.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import msgspec
import numpy as np

from beatrice.benchmarks.baselines.detector import Evidence
from beatrice.benchmarks.baselines.length import length_features
from beatrice.benchmarks.baselines.linear import scores_of, standardise
from beatrice.benchmarks.baselines.perplexity import perplexity_scores
from beatrice.benchmarks.baselines.probe import pooled_signals
from beatrice.benchmarks.baselines.text import text_scores
from beatrice.benchmarks.results.names import RIVALS
from beatrice.extract.records import IN_DOMAIN, Example, Setting
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.config import GridConfig
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.features.families import (
    Features,
    Standardizer,
    split_families,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.features.reading import (
    family_dims,
    longest_spans,
    read_features,
    stored_lengths,
)
from beatrice.jaxprobe.features.rows import Rows, partners, rows_at_once
from beatrice.jaxprobe.features.subsets import (
    FAMILIES,
    LETTERS,
    SUBSET_NAMES,
    SUBSETS,
    FamilyDims,
)
from beatrice.jaxprobe.fit.grid import grid_members, member_logits
from beatrice.jaxprobe.fit.stage import EVERY_FAMILY
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.model.encoder import Encoder
from beatrice.pgir.corpus import has_answer

EXPERIMENT = "real_retrieval"
_ROWS_OF_A_KIND = 64  # of the longest rows, which are read by themselves
ALL_SETS = "all_sets"  # the questions of all sets together, the paper's column "All"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """Detectors and, in one setting, the answers they are put to.

    Attributes:
      own: of the answers on which the detectors were trained, from gold passages.
      new: of those they are put to, from retrieved ones.
      closed_book: the closed-book pass of the new questions; None where the setting is
        closed-book itself.
    """

    own: Evidence
    new: Evidence
    closed_book: Evidence | None = None

    @property
    def setting(self) -> Setting:
        """Of the answers."""
        return self.own.rows.setting

    def joined(self) -> Rows:
        """Return the rows of both, the run's own first; only those are trained on."""
        own, new = self.own.rows, self.new.rows
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

    def parts(self, dims: FamilyDims) -> Iterator[tuple[np.ndarray, Features]]:
        """Yield the new rows in parts that memory holds, with their features.

        Rows of similar length lie together; the last rows of a part fill it up, so that
        one executable serves all parts of a group.
        """
        store, layer = self.new.store, self.own.layer
        lengths = stored_lengths(store)
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


def encoder_scores(
    scene: Scenario,
    tree: Mapping[str, Any],
    config: GridConfig,
) -> dict[str, np.ndarray]:
    """Return the logits of every encoder on the new rows, `[n_seeds, n_rows]`.

    Args:
      scene: of the setting.
      tree: the setting's checkpoint.
      config: by which the encoders were trained.
    """
    dims = family_dims(scene.own.store)
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
    if scene.closed_book is None:

        def closed_book(_: np.ndarray, features: Features) -> np.ndarray:
            return detector.score_closed_book(features).raw

        dims = detector.banks["closed_book"].dims
        return {"champion": scene.scored(dims, closed_book)[None]}
    bank = detector.banks.get("with_context") or detector.banks["closed_book"]
    closed_store = scene.closed_book.store
    partner = partners(scene.new.rows.ids, scene.closed_book.rows.ids)
    read = partial(
        read_features,
        closed_store,
        scene.own.layer,
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
    own, new = scene.own, scene.new
    rows, n_own = scene.joined(), len(own.rows.ids)
    train = rows.where("train")
    families = {}
    for family, letter in zip(FAMILIES, LETTERS, strict=True):
        layer = own.layer if family == "hidden" else None
        families[letter] = np.concatenate(
            [
                pooled_signals(store, scene.setting, family, layer)
                for store in (own.store, new.store)
            ]
        )
        standardise(families[letter], train)
    found = {}
    for letters in (*LETTERS, LETTERS):
        features = np.concatenate([families[x] for x in letters], axis=1)
        found[f"probe:{letters}"] = scores_of(features, rows)[0][:, n_own:]
    length = length_features([*own.answers, *new.answers])
    standardise(length, train)
    found["answer_length"] = scores_of(length, rows)[0][:, n_own:]
    found["tfidf"], _ = text_scores(own.texts, own.rows, new.texts)
    found["perplexity"] = perplexity_scores(new.store)
    return found


def _answer_rows(examples: Sequence[Example], rows: Rows) -> list[ResultRow]:
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
    made: list[ResultRow], rows: Rows, asked: Sequence[Example]
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


def scene_rows(
    scene: Scenario,
    scores: Mapping[str, np.ndarray],
    asked: Sequence[Example],
    intervals: BootstrapConfig,
) -> list[ResultRow]:
    """Return the rows of a setting, of each set and of all sets together.

    Args:
      scene: of the setting.
      scores: by detector, `[n_seeds, n_rows]` of the new rows.
      asked: all questions; those without an answer are counted as failed.
      intervals: of the rows.
    """
    rows = scene.new.rows
    detectors = [Scored(name=name, scores=own) for name, own in scores.items()]
    pairs = {f"{EXPERIMENT}_paired": [("champion", rival) for rival in RIVALS]}
    everything = np.full(len(rows.ids), ALL_SETS)
    unseen = np.full(len(rows.ids), "ood")
    together = dataclasses.replace(rows, datasets=everything, splits=unseen)
    made = []
    for some in (rows, together):
        own = detection_rows(detectors, some, intervals, EXPERIMENT, pairs)
        own += _answer_rows(scene.new.questions, some)
        made += _counted(own, some, asked)
    return made
