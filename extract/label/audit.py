"""Are the labels to be trusted? Judges against exact match, and against each other."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from extract.label.judge import exact_match
from extract.label.kappa import Agreement, agreement
from extract.label.rubrics import RUBRICS
from extract.records import Answer, Example, Label


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
    groups = sorted({row.group for row in rows})
    selections = [(("all", "all"), rows)]
    selections += [(g, [row for row in rows if row.group == g]) for g in groups]
    return [
        {
            "setting": setting,
            "variant": variant,
            "n_answers": len(chosen),
            "n_dropped": sum(row.label.label is None for row in chosen),
            "n_unparsable_verdicts": sum(
                row.label.verdicts.count("unparsable") for row in chosen
            ),
            **dataclasses.asdict(_with_exact(chosen, seed)),
        }
        for (setting, variant), chosen in selections
    ]


def _with_exact(rows: Sequence[LabelledAnswer], seed: int) -> Agreement:
    kept = [row for row in rows if row.label.label is not None]
    return agreement(
        [row.label.label is True for row in kept],
        [row.exact for row in kept],
        seed=seed,
    )


def between_judges(
    rows: Sequence[LabelledAnswer], *, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare the rubrics pairwise, where both gave a verdict; none for one judge."""
    n_judges = {len(row.label.verdicts) for row in rows}
    if n_judges != {len(RUBRICS)}:
        return []
    compared = []
    for i, j in itertools.combinations(range(len(RUBRICS)), 2):
        pairs = [(row.label.verdicts[i], row.label.verdicts[j]) for row in rows]
        parsed = [pair for pair in pairs if "unparsable" not in pair]
        found = agreement(
            [a == "correct" for a, _ in parsed],
            [b == "correct" for _, b in parsed],
            seed=seed,
        )
        compared.append(
            {
                "first": RUBRICS[i].name,
                "second": RUBRICS[j].name,
                "n_unparsable": len(pairs) - len(parsed),
                **dataclasses.asdict(found),
            }
        )
    return compared
