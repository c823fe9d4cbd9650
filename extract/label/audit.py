"""Are the labels to be trusted? Judges against exact match, and against each other."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from extract.label.rubrics import RUBRICS, Rubric
from extract.label.verdicts import exact_match
from extract.records import Answer, Example, Label


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two raters agree on the same items."""

    n: int  # items that both rated
    n_agree: int  # of them, rated alike
    kappa: float | None  # in [-1, 1], or None where it is undefined
    ci_low: float | None  # of the 95 % percentile bootstrap interval
    ci_high: float | None
    n_bootstrap: int  # resamples drawn
    n_undefined: int  # of them without kappa (one class); not in the interval
    reason: str | None  # why kappa is undefined

    @property
    def rate(self) -> float | None:
        """Return the share of items rated alike, or None without items."""
        return self.n_agree / self.n if self.n else None

    def in_words(self) -> str:
        """Return one line for a person."""
        if self.rate is None:
            return "nothing to compare"
        line = f"{self.n_agree} of {self.n} agree ({100 * self.rate:.1f} %), kappa "
        if self.kappa is None:
            return f"{line}undefined: {self.reason}"
        if self.ci_low is None:
            return f"{line}{self.kappa:.3f}"
        return f"{line}{self.kappa:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"


def _kappas(tables: np.ndarray) -> np.ndarray:
    """Return `cohen_kappa_score` of many tables; one by one, 10 000 take 8 s.

    `tables` are `[n_tables, 4]` counts: both yes, only the first, only the second, both
    no; NaN where both raters put everything into one class.
    """
    both, first, second, neither = tables.T.astype(np.float64)
    n = both + first + second + neither
    chance = (both + first) * (both + second) + (neither + second) * (neither + first)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return (n * (both + neither) - chance) / (n * n - chance)


def agreement(
    pairs: Sequence[tuple[bool, bool]], *, n_bootstrap: int = 10_000, seed: int = 0
) -> Agreement:
    """Compare two raters by Cohen's kappa (Cohen 1960).

    Args:
      pairs: both ratings of every item.
      n_bootstrap: resamples of the items. Drawn as counts of the four cells, which has
        the same distribution as drawing the items one by one.
      seed: of the resamples.
    """
    # Here, since a second of the verb's start would go into loading it.
    from sklearn.metrics import cohen_kappa_score

    n = len(pairs)
    a, b = np.array(pairs, dtype=bool).reshape(n, 2).T
    cells = np.array([(a & b).sum(), (a & ~b).sum(), (~a & b).sum(), (~a & ~b).sum()])
    kappa, low, high, drawn = None, None, None, np.empty(0)
    if len(np.unique(pairs)) > 1:
        kappa = float(cohen_kappa_score(a, b))
        rng = np.random.default_rng(seed)
        drawn = _kappas(rng.multinomial(n, cells / n, size=n_bootstrap))
        defined = drawn[~np.isnan(drawn)]
        if len(defined):
            low, high = np.quantile(defined, (0.025, 0.975)).tolist()
    undefined = "both raters put every item into one class" if n else "no items"
    return Agreement(
        n=n,
        n_agree=int(cells[0] + cells[3]),
        kappa=kappa,
        ci_low=low,
        ci_high=high,
        n_bootstrap=len(drawn),
        n_undefined=int(np.isnan(drawn).sum()),
        reason=undefined if kappa is None else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledAnswer:
    """An answer with its question and its label."""

    example: Example
    answer: Answer
    label: Label

    @property
    def exact(self) -> bool:
        """Return whether the answer matches a gold exactly, after normalising."""
        return exact_match(self.answer.text, self.example.golds)

    @property
    def group(self) -> tuple[str, str]:
        """Return setting and variant."""
        return (self.label.setting, self.label.variant)


def join_labels(
    examples: Iterable[Example], answers: Iterable[Answer], labels: Iterable[Label]
) -> list[LabelledAnswer]:
    """Return every labelled answer with its question, in the order of the keys.

    Raises:
      ValueError: an answer has no label, or a label no answer.
    """
    by_id = {example.id: example for example in examples}
    by_key = {answer.key: answer for answer in answers}
    found = {label.key: label for label in labels}
    lone = sorted(by_key.keys() ^ found.keys())
    if lone:
        what = "label" if lone[0] in by_key else "answer"
        raise ValueError(
            f"{lone[0]} has no {what}; run `beatrice label` again before the audit"
        )
    return [
        LabelledAnswer(example=by_id[key[0]], answer=by_key[key], label=found[key])
        for key in sorted(found)
    ]


def disagreements(rows: Sequence[LabelledAnswer]) -> list[dict[str, Any]]:
    """List the answers that the judges dropped, or label unlike exact match."""
    listed = []
    for row in rows:
        if row.label.label is None:
            kind = "unparsable" if "unparsable" in row.label.verdicts else "dropped"
        elif row.label.label != row.exact:
            kind = "judge_only" if row.label.label else "exact_match_only"
        else:
            continue
        listed.append(
            {
                "kind": kind,
                "example_id": row.example.id,
                "setting": row.label.setting,
                "variant": row.label.variant,
                "question": row.example.question,
                "golds": list(row.example.golds),
                "answer": row.answer.text,
                "verdicts": list(row.label.verdicts),
                "exact_match": row.exact,
                "reason": row.label.reason,
            }
        )
    return listed


def against_exact_match(
    rows: Sequence[LabelledAnswer], *, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare the labels with exact match: over all, and per setting and variant."""
    groups: dict[tuple[str, str], list[LabelledAnswer]] = {("all", "all"): list(rows)}
    for row in sorted(rows, key=lambda row: row.group):
        groups.setdefault(row.group, []).append(row)
    compared = []
    for (setting, variant), chosen in groups.items():
        kept = [row for row in chosen if row.label.label is not None]
        rated = [(bool(row.label.label), row.exact) for row in kept]
        compared.append(
            {
                "setting": setting,
                "variant": variant,
                "n_answers": len(chosen),
                "n_dropped": len(chosen) - len(kept),
                "n_unparsable_verdicts": sum(
                    row.label.verdicts.count("unparsable") for row in chosen
                ),
                **dataclasses.asdict(agreement(rated, seed=seed)),
            }
        )
    return compared


def between_judges(
    rows: Sequence[LabelledAnswer],
    *,
    seed: int = 0,
    rubrics: Sequence[Rubric] = RUBRICS,
) -> list[dict[str, Any]]:
    """Compare the rubrics pairwise, where both gave a verdict.

    Args:
      rows: labelled answers.
      seed: of the bootstrap.
      rubrics: in the order of the verdicts.

    Returns:
      A row for each pair; none for labels that did not come from these rubrics.
    """
    if {len(row.label.verdicts) for row in rows} != {len(rubrics)}:
        return []
    compared = []
    for i, j in itertools.combinations(range(len(rubrics)), 2):
        pairs = [(row.label.verdicts[i], row.label.verdicts[j]) for row in rows]
        parsed = [pair for pair in pairs if "unparsable" not in pair]
        rated = [(a == "correct", b == "correct") for a, b in parsed]
        compared.append(
            {
                "first": rubrics[i].name,
                "second": rubrics[j].name,
                "n_unparsable": len(pairs) - len(parsed),
                **dataclasses.asdict(agreement(rated, seed=seed)),
            }
        )
    return compared
