"""The gate for pipelines of others: two questions, answered by the one score.

`should_retrieve` lets the run's backbone answer closed-book and asks whether that
answer may stand; `keep` takes that answer and one written with passages, by whoever
wrote it, and says which is to be returned. The threshold is PGIR's tau where `beatrice
control` has chosen one, the same that its tables were made with.
"""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from extract.run.directory import RunDir
from extract.run.files import read_json
from pgir.scoring.scorer import Scorer

Passages = Sequence[Any]  # texts, or records with `title` and `text`, as `score` takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A closed-book answer, and whether it may stand.

    Attributes:
      question: as it was asked.
      answer: of the run's backbone.
      p_correct: in [0, 1]; None where the detector abstains.
      retrieve: whether passages are wanted: the score is below the threshold, or there
        is none.
    """

    question: str
    answer: str
    p_correct: float | None
    retrieve: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The answer to return.

    Attributes:
      answer: its text.
      p_correct: in [0, 1]; None where the detector abstains from both.
      is_grounded: whether it is the one written with passages.
      is_trusted: whether it reaches the threshold; else it is only the better one.
    """

    answer: str
    p_correct: float | None
    is_grounded: bool
    is_trusted: bool


class _Policy(msgspec.Struct):
    """What is read of control.json."""

    tau: float


class Gate:
    """Decides by a scorer; may be called from several threads.

    Args:
      scorer: of a run, see `Scorer.load`.
      threshold: least probability of an answer that may stand, in (0, 1].

    Raises:
      ValueError: the threshold is no such number.
    """

    def __init__(self, scorer: Scorer, threshold: float) -> None:
        """Take the detector and its threshold."""
        if not 0 < threshold <= 1:
            raise ValueError(
                f"threshold: expected a probability above 0, found {threshold}"
            )
        self.scorer, self.threshold = scorer, threshold
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        threshold: float | None = None,
        model: str | None = None,
    ) -> "Gate":
        """Open the gate of a finished run.

        Args:
          path: the run's folder.
          threshold: None takes PGIR's, which `beatrice control` chose.
          model: where the backbone lies, if it was moved.

        Raises:
          ValueError: nobody chose a threshold.
        """
        if threshold is None:
            found = RunDir(Path(path)).control / "control.json"
            again = "run `beatrice control`, or give a threshold"
            threshold = read_json(found, _Policy, again).tau
        return cls(Scorer.load(Path(path), model=model), threshold)

    def draft(self, questions: Sequence[str]) -> list[Draft]:
        """Answer questions closed-book, and say of each whether to retrieve."""
        if not questions:
            return []
        with self._lock:
            answers = self.scorer.answer(questions)
        rows = [
            {"question": question, "answer": answer}
            for question, answer in zip(questions, answers, strict=True)
        ]
        scores = self.scorer.score_many(rows)
        return [
            Draft(
                question=question,
                answer=answer,
                p_correct=score.p_correct,
                retrieve=not self._stands(score.p_correct),
            )
            for question, answer, score in zip(questions, answers, scores, strict=True)
        ]

    def should_retrieve(self, question: str) -> bool:
        """Return whether the closed-book answer to a question may not stand."""
        return self.draft([question])[0].retrieve

    def keep(self, draft: Draft, grounded: str, passages: Passages = ()) -> Kept:
        """Return the draft or the grounded answer: the first that may stand.

        If neither does, the one with the higher score, the draft at a tie; an answer
        that the detector abstains from has none.

        Args:
          draft: of the same question, see `draft`.
          grounded: an answer that somebody's model wrote with passages.
          passages: those; without any the answer is read as a closed-book one.
        """
        score = self.scorer.score(draft.question, grounded, list(passages) or None)
        ours, theirs = draft.p_correct, score.p_correct
        is_grounded = not self._stands(ours) and (
            self._stands(theirs) or (theirs or 0.0) > (ours or 0.0)
        )
        p_correct = theirs if is_grounded else ours
        return Kept(
            answer=grounded if is_grounded else draft.answer,
            p_correct=p_correct,
            is_grounded=is_grounded,
            is_trusted=self._stands(p_correct),
        )

    def _stands(self, p_correct: float | None) -> bool:
        return p_correct is not None and p_correct >= self.threshold
