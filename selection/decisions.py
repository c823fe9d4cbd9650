"""Decisions: gains from combining, flips without a family, support, and cases.

Complementarity (paper, figure of that name) thresholds every single-family encoder to
flag as many answers as are wrong (section 4.3). Pairs and fusion are compared question
by question (paper: figure across backbones, lower half, which compares with the better
member; table of features and fusion). Combinations describe the ranking made by `select
--exhaustive` (paper, figure of the combination search).

Flips (appendix G, table of flips and figure of the boundary band): decisions, P above
or below one half, that change without a family. A flip is precise if the intact encoder
decides correctly. Grounding: flips of attention on answers for which verbatim support
and correctness disagree (appendix G, table of grounding).

Cases follow the paper's table of case studies (appendix J), but for every set and kind,
and by a rule. A closed-book answer is accepted if its P(correct) reaches its threshold;
else the with-context answer is trusted if its P reaches its own; else both are flagged.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas

from beatrice.extract.label.labels import stands_in_context
from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.rows import ResultRow, Subject, encoder
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import LETTERS
from beatrice.jaxprobe.rows import StoreRows
from beatrice.selection.ablation import SUBJECTS
from beatrice.selection.analysis import (
    EVERY_FAMILY,
    AnalysisInput,
    AnalysisOutput,
    CaseStudy,
    Deployed,
    QuestionTexts,
    Ratio,
    judged_sets,
    per_setting,
    ratio_rows,
    row_of,
)
from beatrice.selection.exhaustive import SET_SIZE, Ranking, traits

COMPLEMENTARITY = "anatomy_complementarity"
PAIRS, VARIANTS = "anatomy_pairs", "anatomy_fusion"
_ALL = "anatomy_all"  # rows that are dropped, since other stages write them
COMBINATIONS = "anatomy_combinations"
N_PARTS = 20  # parts of the ranking
N_BEST = 10  # sets, as in the paper


def mistakes(scores: np.ndarray, labels: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Return the mistakes of a score that flags as many answers as are wrong.

    They are `[n]` bool, true for answers that are right but flagged, or wrong but not
    flagged. `names` `[n]` are all different, and break ties independently of order.
    """
    is_flagged = np.zeros(len(scores), bool)
    is_flagged[np.lexsort((names, scores))[: int((~labels).sum())]] = True
    return is_flagged == labels


def complementarity(deployed: Deployed) -> list[ResultRow]:
    """Return each family's error rate, and the share of each other's errors it rights.

    Seeds are counted together: a share is over the mistakes of all seeds, each compared
    with the same seed of the other family.
    """
    rows, result = deployed.rows, []
    names = np.char.add(np.char.add(rows.ids, " "), rows.variants)
    for dataset, split in judged_sets(rows):
        where = rows.where(split, dataset)
        labels = rows.labels[where]
        wrong = {
            letter: np.stack([mistakes(x[where], labels, names[where]) for x in logits])
            for letter, logits in ((x, deployed.logits_of(x)) for x in LETTERS)
        }
        all_answers = np.ones_like(wrong["H"])
        ratios = [
            Ratio(encoder(x), "error_rate", wrong[x], all_answers) for x in LETTERS
        ]
        for row, of in itertools.permutations(LETTERS, 2):
            both = wrong[of] & ~wrong[row], wrong[of]
            ratios.append(Ratio(encoder(row), "rights", *both, {"family": of}))
        set_fields = deployed.set_fields(dataset, split)
        ids, config = rows.ids[where], deployed.bootstrap
        result += ratio_rows(
            COMPLEMENTARITY, ratios, ids, set_fields, config, "it has no mistake"
        )
    return result


def _differences(
    deployed: Deployed,
    scored: list[DetectorScores],
    pairs: Sequence[tuple[Subject | str, Subject | str]],
    name: str,
) -> list[ResultRow]:
    """Return each pair's difference in AUROC, first minus second, on judged sets."""
    rows = deployed.rows.take(deployed.judged)
    judged = [scores.take(deployed.judged) for scores in scored]
    result = detection_rows(judged, rows, deployed.bootstrap, _ALL, {name: pairs})
    return [r for r in result if r.experiment == name and r.metric == "auroc"]


def pairs(deployed: Deployed) -> list[ResultRow]:
    """Return each two-family encoder's AUROC minus that of each of its families."""
    both = [*map("".join, itertools.combinations(LETTERS, 2))]
    scored = [
        DetectorScores(name=encoder(name), scores=deployed.logits_of(name))
        for name in (*LETTERS, *both)
    ]
    compared = [(encoder(name), encoder(letter)) for name in both for letter in name]
    return _differences(deployed, scored, compared, PAIRS)


def fusion(inputs: AnalysisInput) -> AnalysisOutput:
    """Return the AUROC of the selected set minus that of each other variant.

    The one without hidden states is included if `evaluate --ablations` found one.
    """
    rows: list[ResultRow] = []
    for setting, deployed in inputs.settings.items():
        scores: dict[Subject | str, np.ndarray] = {**inputs.searches[setting].scores}
        scores["hidden_only"] = deployed.logits_of("H")
        scores["early_fusion"] = deployed.logits_of(EVERY_FAMILY)
        if setting == "with_context" and len(inputs.settings) > 1:
            single_pass = inputs.searches["single_pass"]
            scores["without_closed_book"] = single_pass.scores["champion"]
        if setting in inputs.without_hidden:
            scores[SUBJECTS["without_hidden"]] = inputs.without_hidden[setting]
        scored = [
            DetectorScores(name=name, scores=values) for name, values in scores.items()
        ]
        compared = [("champion", name) for name in scores if name != "champion"]
        rows += _differences(deployed, scored, compared, VARIANTS)
    return rows


def combinations(inputs: AnalysisInput) -> AnalysisOutput:
    """Return rows on the composition of each setting's ranking by validation AUROC."""
    rankings = inputs.rankings
    return per_setting(lambda x: _of_ranking(rankings[x.setting], x))(inputs)


def _of_ranking(ranking: Ranking, deployed: Deployed) -> list[ResultRow]:
    n_sets, n_pool = len(ranking.sets), int(ranking.sets.max()) + 1
    by_trait = traits(deployed.setting, n_pool)
    set_fields = deployed.set_fields(IN_DOMAIN, "validation")
    best = ranking.sets[ranking.order[:N_BEST]]
    rows: list[ResultRow] = []

    def add(metric: str, value: float, n: int, **columns: Any) -> None:
        columns |= set_fields
        rows.append(row_of(COMBINATIONS, "sets_of_three", metric, value, n, columns))

    for (letter, reads), is_read in by_trait.items():
        trait = {"family": letter, "kind": reads}
        add("encoders_in_best_set", _mean(is_read, best), len(best), **trait)
        add("encoders_in_set", _mean(is_read, ranking.sets), n_sets, **trait)
    closed = [x for (_, reads), x in by_trait.items() if reads == "closed_book"]
    if closed and not (is_closed_book := np.any(closed, axis=0)).all():
        n_of_set = is_closed_book[ranking.sets].sum(axis=1)
        for k in range(SET_SIZE + 1):
            n_best = float((is_closed_book[best].sum(axis=1) == k).sum())
            add("best_sets", n_best, len(best), n_closed_book=k)
            for i, part in enumerate(ranking.parts(n_of_set == k, N_PARTS), start=1):
                add("share", float(part.mean()), n_sets, n_closed_book=k, bin=i)
    return rows


def _mean(reads: np.ndarray, sets: Sequence[np.ndarray] | np.ndarray) -> float:
    """Return the mean number of encoders per set that have a trait."""
    return float(reads[np.asarray(sets)].sum(axis=1).mean())


FLIPS, BAND = "anatomy_flips", "anatomy_boundary"
NEAR = 1.0  # logits: a remaining score this near the boundary is undecided
_N_CELLS = 12  # cells of the boundary's figure, from zero to its edge
_NARROWEST = 0.5  # least width of a cell, in logits
GROUNDING = "anatomy_grounding"
CASES = "anatomy_cases"
TRUSTED_FROM = 0.6  # the paper's threshold, used if `calibrate` found none
KINDS = ("accepted closed-book", "trusted with context", "both flagged")


def flip_ratios(
    name: str, family: str, intact: np.ndarray, without: np.ndarray, labels: np.ndarray
) -> list[Ratio]:
    """Return how often decisions flip, how precisely, and how near the boundary.

    `name` and `family` are letters; `intact` and `without` (that family) are logits
    `[n_seeds, n]`, `labels` `[n]` bool. Precision by chance assumes that an intact
    decision for "right" holds as often as any answer is right; "wrong" likewise.
    """
    is_flip = (intact > 0) != (without > 0)
    is_right = (intact > 0) == labels[None]
    right = labels.sum() / max(len(labels), 1)
    by_chance = np.where(intact > 0, right, 1 - right)
    is_near, every = np.abs(without) <= NEAR, np.ones_like(is_flip)
    added = intact - without
    ratios = {
        "flip_rate": (is_flip, every),
        "flip_precision": (is_flip & is_right, is_flip),
        "flip_precision_by_chance": (is_flip * by_chance, is_flip),
        "flips_near_boundary": (is_flip & is_near, is_flip),
        "answers_near_boundary": (is_near, every),
        "mean_contribution": (np.abs(added), every),
    }
    return [
        Ratio(encoder(name), metric, numerator, denominator, {"family": family})
        for metric, (numerator, denominator) in ratios.items()
    ]


def flips(deployed: Deployed) -> list[ResultRow]:
    """Return flips of each queried encoder and family, and shares of right answers."""
    rows, result = deployed.rows, []
    for dataset, split in judged_sets(rows):
        at = np.isin(deployed.judged, rows.where(split, dataset))
        labels = rows.labels[deployed.judged[at]]
        ratios = [Ratio("answers", "right", labels, np.ones_like(labels))]
        for name in deployed.queried:
            intact = deployed.intact(name)[:, at]
            right = (intact > 0) == labels[None]
            ratios.append(Ratio(encoder(name), "accuracy", right, np.ones_like(right)))
            for letter in name:
                without = deployed.without(name, letter)[:, at]
                ratios += flip_ratios(name, letter, intact, without, labels)
        set_fields = deployed.set_fields(dataset, split)
        ids = rows.ids[deployed.judged[at]]
        result += ratio_rows(
            FLIPS, ratios, ids, set_fields, deployed.bootstrap, "no decision flips"
        )
    return result


def boundary(deployed: Deployed) -> list[ResultRow]:
    """Count answers in cells of remaining score (x) and removed contribution (y).

    Counts are over the in-domain test rows and all seeds. Each cell with its centre and
    width is a row: `answers` for unchanged decisions, `flips` for changed ones. All
    cells of an encoder have one width, which covers every answer (see `_width`).
    """
    rows, result = deployed.rows, []
    at = np.isin(deployed.judged, rows.where("test"))
    set_fields = deployed.set_fields(IN_DOMAIN, "test")
    for name in deployed.queried:
        intact = deployed.intact(name)[:, at]
        rests = {letter: deployed.without(name, letter)[:, at] for letter in name}
        width = max(_width(x) for rest in rests.values() for x in (rest, intact - rest))
        for letter, without in rests.items():
            flipped = (intact > 0) != (without > 0)
            points = np.stack([without, intact - without], axis=-1)
            cells = width * (np.floor(points / width) + 0.5)
            for metric, chosen in (("answers", ~flipped), ("flips", flipped)):
                centres, counts = np.unique(cells[chosen], axis=0, return_counts=True)
                for (x, y), count in zip(centres.tolist(), counts, strict=True):
                    cell = {"bin_x": x, "bin_y": y, "bin_width": float(width)}
                    columns = {"family": letter, **cell, **set_fields}
                    measured = metric, float(count), int(at.sum())
                    result.append(row_of(BAND, encoder(name), *measured, columns))
    return result


def _width(logits: np.ndarray) -> float:
    """Return a width in logits, doubled until `_N_CELLS` cells cover all values."""
    needed = max(float(np.abs(logits).max(initial=0.0)) / _N_CELLS, _NARROWEST)
    return _NARROWEST * 2.0 ** np.ceil(np.log2(needed / _NARROWEST))


class Grounded(NamedTuple):
    """Labels of with-context answers, and whether the passages contain them."""

    labels: np.ndarray  # `[n]` bool
    stands: np.ndarray  # `[n]` bool, whether the answer stands in the passages
    # `[n]` float, whether the closed-book answer is right; NaN if it is missing or has
    # no label.
    right_without: np.ndarray


def grounding_ratios(
    answers: Grounded, flips: dict[str, tuple[np.ndarray, np.ndarray]]
) -> list[Ratio]:
    """Return shares of answers and the precision of flips.

    `flips` has two `[n_seeds, n]` bool arrays for each encoder: whether decisions flip,
    and whether the intact decision is right.
    """
    labels, stands, without = answers
    every, has = np.ones(len(labels)), ~np.isnan(without)
    ratios = [
        Ratio("answers", "right_with_context", labels, every),
        Ratio("answers", "right_closed_book", without == 1, has),
        Ratio("answers", "wrong_in_passage", stands & ~labels, ~labels),
        Ratio("answers", "right_in_passage", stands & labels, labels),
    ]
    subsets = {
        None: every > 0,
        "in_passage_but_wrong": stands & ~labels,
        "right_not_in_passage": ~stands & labels,
    }
    for name, (is_flip, is_right) in flips.items():
        for kind, is_read in subsets.items():
            subject = encoder(name)._replace(kind=kind)
            flipped = is_flip & is_read[None]
            columns = subject, "flip_precision", flipped & is_right, flipped
            ratios.append(Ratio(*columns, {"family": "A"}))
            if kind is not None:
                all_flips = np.broadcast_to(is_read[None], is_flip.shape)
                columns = subject, "flip_rate", flipped, all_flips
                ratios.append(Ratio(*columns, {"family": "A"}))
    return ratios


def _grounded(
    deployed: Deployed, texts: QuestionTexts, closed_book: StoreRows | None
) -> Grounded:
    rows, where = deployed.rows, deployed.judged
    stands = np.zeros(len(where), bool)
    for index, i in enumerate(where):
        key = str(rows.ids[i]), deployed.setting, str(rows.variants[i])
        stands[index] = stands_in_context(texts.examples[key[0]], texts.answers[key])
    without = np.full(len(where), np.nan)
    if closed_book is not None:
        labelled = np.flatnonzero(closed_book.is_labelled)
        labels = {closed_book.ids[i]: float(closed_book.labels[i]) for i in labelled}
        without = np.array([labels.get(rows.ids[i], np.nan) for i in where])
    return Grounded(rows.labels[where], stands, without)


def grounding(inputs: AnalysisInput) -> AnalysisOutput:
    """Return the grounding rows of every test and held-out set, only with context."""
    deployed, result = inputs.settings["with_context"], []
    closed_book = inputs.settings.get("closed_book")
    grounded = _grounded(
        deployed, inputs.read_texts(), closed_book and closed_book.rows
    )
    for dataset, split in judged_sets(deployed.rows):
        at = np.isin(deployed.judged, deployed.rows.where(split, dataset))
        of_set = Grounded(*(x[at] for x in grounded))
        flips = {}
        for name in deployed.queried:
            if "A" not in name:
                continue
            intact, without = (
                x[:, at] for x in (deployed.intact(name), deployed.without(name, "A"))
            )
            is_right = (intact > 0) == of_set.labels[None]
            flips[name] = (intact > 0) != (without > 0), is_right
        ids = deployed.rows.ids[deployed.judged[at]]
        set_fields = deployed.set_fields(dataset, split)
        ratios = grounding_ratios(of_set, flips)
        result += ratio_rows(GROUNDING, ratios, ids, set_fields, deployed.bootstrap)
    return result


def kinds_of(p: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return each question's index into KINDS, from probabilities `[n, 2]`."""
    is_trusted = p >= thresholds[None]
    return np.where(is_trusted[:, 0], 0, np.where(is_trusted[:, 1], 1, 2))


def surest_questions(
    ids: np.ndarray, p: np.ndarray, thresholds: np.ndarray
) -> dict[int, int]:
    """Return the index of the surest question of each kind, by the kind's index.

    A question is as sure as the deciding probability nearest to its threshold; the
    closed-book one alone decides an acceptance. Ties go to the smaller id. `ids` `[n]`
    are all different, `p` `[n, 2]` is calibrated P(correct), closed-book and with
    context, and `thresholds` is `[2]`.
    """
    kinds, distance = kinds_of(p, thresholds), np.abs(p - thresholds[None])
    margin = np.where(kinds == 0, distance[:, 0], distance.min(axis=1))
    order = np.lexsort((ids, -margin))
    first = {int(kinds[i]): int(i) for i in reversed(order)}
    return dict(sorted(first.items()))


def _read_decisions(
    inputs: AnalysisInput, setting: Setting
) -> tuple[pandas.DataFrame, float]:
    """Return P and labels of a setting's judged original answers, and the threshold."""
    deployed, head = inputs.settings[setting], inputs.heads[setting]
    rows, where = deployed.rows, deployed.judged
    where = where[rows.variants[where] == "original"]
    p = head.calibrator(inputs.searches[setting].scores["champion"].mean(axis=0))
    trusted_from = head.thresholds().trust.p_correct
    columns = {"p": np.asarray(p)[where], "label": rows.labels[where]}
    frame = pandas.DataFrame(columns, index=rows.ids[where].tolist())
    return frame, TRUSTED_FROM if trusted_from is None else trusted_from


def cases(inputs: AnalysisInput) -> AnalysisOutput:
    """Return each kind's share of questions and of right answers, and its case."""
    settings: tuple[Setting, Setting] = ("closed_book", "with_context")
    deployed = inputs.settings["with_context"]
    frames, ends = zip(*(_read_decisions(inputs, x) for x in settings), strict=True)
    both = pandas.concat(frames, axis=1, join="inner").sort_index()
    every_p, every_label = both["p"].to_numpy(float), both["label"].to_numpy(bool)
    every_id, thresholds = both.index.to_numpy(str), np.array(ends)
    examples, answers = inputs.read_texts()
    result: list[ResultRow | CaseStudy] = []
    rows = deployed.rows
    for dataset, split in judged_sets(rows):
        of_set = rows.where(split, dataset)
        at = np.isin(every_id, rows.ids[of_set])
        ids, p, labels = every_id[at].tolist(), every_p[at], every_label[at]
        if not ids:
            continue
        kinds, every = kinds_of(p, thresholds), np.ones(len(ids))
        final = np.where(kinds == 0, labels[:, 0], labels[:, 1])
        ratios = []
        for number, kind in enumerate(KINDS):
            subject, is_kind = Subject("answers", kind=kind), kinds == number
            ratios.append(Ratio(subject, "share", is_kind, every))
            ratios.append(Ratio(subject, "right", is_kind & final, is_kind))
        set_fields = deployed.set_fields(dataset, split) | {"setting": "both"}
        result += ratio_rows(
            CASES, ratios, every_id[at], set_fields, deployed.bootstrap
        )
        if len(set(datasets := rows.datasets[of_set].tolist())) > 1:
            continue  # no cases for all in-domain sets together
        for kind, i in surest_questions(every_id[at], p, thresholds).items():
            example = examples[ids[i]]
            texts = [answers[ids[i], s, "original"].text for s in settings]
            result.append(
                CaseStudy(
                    dataset=datasets[0],
                    split=split,
                    kind=KINDS[kind],
                    question=example.question,
                    gold="; ".join(example.golds[:3]),  # any of them is right
                    closed_book=texts[0],
                    p_closed_book=float(p[i, 0]),
                    is_closed_book_right=bool(labels[i, 0]),
                    with_context=texts[1],
                    p_with_context=float(p[i, 1]),
                    is_with_context_right=bool(labels[i, 1]),
                )
            )
    return result
