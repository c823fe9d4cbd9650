"""Answers to look at: the surest right and wrong ones of every set, chosen by a rule.

Nobody picks: of each kind the three test answers with the highest, or the lowest,
calibrated P(correct); of equals the smaller id, since isotonic calibration gives many
answers one P. Contexts in their original wording alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorInput
from beatrice.benchmarks.results.saved import N_SHOWN
from beatrice.extract.records import Answer, Example
from beatrice.extract.store.store import Ragged, read_family
from beatrice.jaxprobe.scope import Threshold

TRUSTED_FROM = 0.5  # where the run has no threshold of its own


class Kind(NamedTuple):
    """A kind of answer, and which of them are shown.

    Attributes:
      name: in words.
      is_correct: by its label.
      is_trusted: whether its P is at least the threshold.
      is_highest: whether the highest P come first, or the lowest.
    """

    name: str
    is_correct: bool
    is_trusted: bool
    is_highest: bool


KINDS = (
    Kind("right and trusted", True, True, True),
    Kind("wrong and caught", False, False, False),
    Kind("wrong and missed", False, True, True),
    Kind("right and distrusted", True, False, False),
)


def choose_answers(
    p_correct: np.ndarray,
    labels: np.ndarray,
    ids: Sequence[str],
    threshold: float,
) -> list[tuple[Kind, int, list[int]]]:
    """Return, for each kind, how many there are and the indices of those to show.

    Args:
      p_correct: `[n]` calibrated.
      labels: `[n]` bool.
      ids: `n`, all different; they settle ties.
      threshold: answers with at least this P are trusted.
    """
    found = []
    for kind in KINDS:
        own = np.flatnonzero(
            (labels == kind.is_correct) & ((p_correct >= threshold) == kind.is_trusted)
        )
        sign = -1.0 if kind.is_highest else 1.0
        first = sorted(own.tolist(), key=lambda i: (sign * p_correct[i], ids[i]))
        found.append((kind, len(own), first[:N_SHOWN]))
    return found


Spell = Callable[[Answer, np.ndarray, int], list[dict[str, Any]]]


def shown_sets(
    evidence: DetectorInput,
    p_correct: np.ndarray,
    threshold: Threshold | None,
    spell: Spell | None,
) -> list[dict[str, Any]]:
    """Return the answers to look at of every test and held-out set of a setting.

    Args:
      evidence: of the setting; the tokens' probabilities are read from its store.
      p_correct: `[n_rows]` calibrated.
      threshold: for the precision that was asked for.
      spell: spells the tokens of an answer, or None.

    Returns:
      As `benchmarks.results.saved.ShownSet` has them.
    """
    rows, wanted = evidence.rows, threshold and threshold.p_correct
    trusted_from = TRUSTED_FROM if wanted is None else float(wanted)
    made = []
    for dataset, split in rows.evaluated_sets():
        if split == "validation" or " " in dataset:  # all in-domain sets together
            continue
        where = rows.where(split, dataset)
        where = where[rows.variants[where] == "original"]
        ids = rows.ids[where].tolist()
        kinds = []
        for kind, n, chosen in choose_answers(
            p_correct[where], rows.labels[where], ids, trusted_from
        ):
            shown = []
            for i in chosen:
                answer = evidence.answers[where[i]]
                example = evidence.examples[where[i]]
                prob = read_family(evidence.store, "prob", where[i : i + 1])
                draft = _draft(example, answer, prob, spell)
                draft |= {"p_correct": float(p_correct[where[i]])}
                draft |= {"correct": kind.is_correct}
                golds = list(example.golds[:4])
                asked = {"id": ids[i], "question": example.question, "golds": golds}
                shown.append({**asked, "n_golds": len(example.golds), "draft": draft})
            kinds.append({"name": kind.name, "n": n, "answers": shown})
        place = {"setting": rows.setting, "dataset": dataset, "split": split}
        made.append(
            {**place, "n": len(where), "threshold": trusted_from, "kinds": kinds}
        )
    return made


def _draft(
    example: Example,
    answer: Answer,
    prob: Ragged,
    spell: Spell | None,
) -> dict[str, Any]:
    """Return an answer as the page shows drafts; the context's tokens are left out."""
    passages = example.passages if answer.setting == "with_context" else ()
    given = [p.text for i, p in enumerate(passages) if i not in answer.dropped]
    first_token = int(prob.first_tokens[0])
    tokens = spell(answer, prob.example(0), first_token) if spell else []
    return {
        "setting": answer.setting,
        "answer": answer.text,
        "passages": given,
        "tokens": [token for token in tokens if token["span"] != "context"],
    }
