"""Scoring answers that exist: the calls for a user who has question and answer."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from extract.backbone.loading import load_backbone
from extract.backbone.names import model_path
from extract.generate.prompts import apply_template
from extract.generate.requests import (
    GenerationConfig,
    answer_config,
    plan_batches,
)
from extract.records import Setting
from extract.run.directory import RunDir
from extract.run.manifest import read_manifest
from jaxprobe.detector import Detector, HeadName, Scores
from jaxprobe.scope import Threshold
from jaxprobe.settings import set_compiler
from pgir.bridge import ProbedBackbone
from pgir.scoring.given import GivenAnswer, Prepared
from pgir.scoring.scope import warn_after, warn_before, why_not
from pgir.scoring.sequences import prepare

BATCH_SIZE = 64  # one of the bridge's padded numbers of examples: few compilations
_HEADS: dict[Setting, HeadName] = {
    "closed_book": "closed_book",
    "with_context": "single_pass",
}
Decision = Literal["trust", "abstain"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What the detector says of one answer.

    Attributes:
      p_correct: calibrated probability that the answer is correct, in [0, 1]; None
        where the detector abstains because it cannot read the answer to any use.
      raw: the fused score before calibration, in [0, 1]; None likewise.
      encoders: each selected encoder's own score, in [0, 1].
      decision: "trust" from the threshold of `beatrice calibrate --precision` on,
        "abstain" below it and where `p_correct` is None; None where the detector has
        no threshold.
      reason: why it abstains, in words.
      warnings: what makes the number less reliable, in words.
      tokens: the answer's text, a piece a token.
      log_probs: of each token, log p in nats under the backbone, at most 0.
    """

    p_correct: float | None
    raw: float | None
    encoders: dict[str, float]
    decision: Decision | None
    reason: str | None
    warnings: tuple[str, ...]
    tokens: tuple[str, ...]
    log_probs: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        found = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


class Scorer:
    """A backbone and its detector; may be called from several threads.

    Calls from several threads are served one after another: the model is read through
    hooks, and uses all cores anyway. Many answers are fastest in one `score_many`.

    Args:
      model: a `Backbone`, or an object that has one as its `backbone`.
      detector: trained on this model's signals.
      generation: how `answer` writes.

    Raises:
      ValueError: the detector was trained on another model.
    """

    def __init__(
        self,
        model: Any,
        detector: Detector,
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (it is frozen)
    ) -> None:
        """Check that the two belong together; see `load` for those of a run."""
        backbone = getattr(model, "backbone", model)
        self._probed = ProbedBackbone(backbone, detector, generation)

    @classmethod
    def load(cls, path: Path, *, model: str | None = None) -> "Scorer":
        """Load the detector of a run and its backbone.

        JAX compiles as the run's stages do, into the same cache on disk.

        Args:
          path: run directory.
          model: where the backbone lies, if not where the run found it.

        Raises:
          ValueError: no detector there yet, or the backbone is another one.
        """
        read_manifest(path)  # refuses what is no run
        run = RunDir(path)
        folder = run.finished_detector()
        set_compiler(run.preset)
        detector = Detector.load(folder)
        name = model or detector.facts["model"]
        generation = answer_config(run, is_recorded=False).generation
        backbone = load_backbone(
            model_path(name), dtype=detector.facts.get("model_dtype", "float32")
        )
        answering = GenerationConfig(
            max_new_tokens=generation.max_new_tokens, stop=generation.stop
        )
        return cls(backbone, detector, answering)

    def threshold(self, setting: Setting) -> Threshold | None:
        """Return at which P answers of a setting are trusted, and how often rightly."""
        head = self._probed.detector.heads.get(_HEADS[setting])
        return head.threshold if head else None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return messages as the text that the model reads, in which ranges count."""
        with self._probed.lock:
            return apply_template(self._probed.backbone.tokenizer, messages)

    def answer(self, questions: Sequence[str]) -> list[str]:
        """Return the backbone's closed-book answers, as the run's own were written."""
        probed, none = self._probed, [()] * len(questions)
        requests = probed.requests("closed_book", questions, none)
        return [answer.text for answer in probed.answer(requests)]

    def score(
        self,
        question: str | None = None,
        answer: str | None = None,
        context: str | Sequence[str | Mapping[str, str]] | None = None,
        **told: Any,
    ) -> Score:
        """Return P(the answer is correct) from one forward pass.

        Args:
          question: as the model was asked.
          answer: its answer, or anybody's; it is read as if the model had written it.
          context: the passages the model was shown, each a text or `{"title", "text"}`;
            None for closed-book.
          **told: the prompt that was really used, see `GivenAnswer`: `prompt`,
            `messages` or `prompt_ids`, and `answer_ids`, `context_range`,
            `question_range`.

        Raises:
          ValueError: an argument is of another type, a text is empty or holds control
            tokens, or is not where it is said to be; or the run has not its setting.
        """
        row = {"question": question, "answer": answer, "context": context, **told}
        return self.score_prepared([self.prepare(row)])[0]

    def score_many(
        self,
        rows: Iterable[GivenAnswer | Mapping[str, Any]],
        batch_size: int = BATCH_SIZE,
    ) -> list[Score]:
        """Return the scores of many answers, in the order of the rows.

        Answers of similar length share forward passes. Numbers are those of `score`
        up to rounding.

        Args:
          rows: each a `GivenAnswer`, or a mapping of what `score` takes.
          batch_size: most answers in one forward pass.

        Raises:
          ValueError: of a row, as `score`; the message names it, from 0.
        """
        prepared = []
        for number, row in enumerate(rows):
            try:
                prepared.append(self.prepare(row))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from None
        return self.score_prepared(prepared, batch_size)

    def results(
        self, rows: Sequence[GivenAnswer | str], batch_size: int = BATCH_SIZE
    ) -> list[dict[str, Any]]:
        """Return scores as JSON values; a row that has none says why in `error`.

        Args:
          rows: each an answer, or what is wrong with it.
          batch_size: most answers in one forward pass.
        """
        prepared, found = {}, {}
        for i, row in enumerate(rows):
            try:
                if isinstance(row, str):
                    raise ValueError(row)
                prepared[i] = self.prepare(row)
            except ValueError as error:
                found[i] = {"error": str(error)}
        scores = self.score_prepared(list(prepared.values()), batch_size)
        for i, score in zip(prepared, scores, strict=True):
            found[i] = score.as_json()
        return [found[i] for i in range(len(rows))]

    def prepare(self, row: GivenAnswer | Mapping[str, Any]) -> Prepared:
        """Check one row and make its sequence; the model is not asked.

        Raises:
          ValueError: as `score`.
        """
        if not isinstance(row, GivenAnswer):
            names = {field.name for field in dataclasses.fields(GivenAnswer)}
            if odd := sorted(map(str, row.keys() - names)):
                raise ValueError(
                    f"unknown argument {odd[0]!r}; known are {', '.join(sorted(names))}"
                )
            row = GivenAnswer(**row)
        stop = self._probed.detector.facts.get("stop_id")
        with self._probed.lock:
            prepared = prepare(
                self._probed.backbone.tokenizer,
                self._probed.template,
                row,
                answer_span=self._probed.answer_span,
                stop_id=int(stop) if stop else None,
            )
        heads = self._probed.detector.heads
        if _HEADS[prepared.asked.setting] not in heads:
            has = next(setting for setting, head in _HEADS.items() if head in heads)
            raise ValueError(
                f"this answer is {prepared.asked.setting}, and the run was trained on "
                f"{has} answers alone: score one of those, or make a run with both "
                "settings"
            )
        return prepared

    def score_prepared(
        self, prepared: Sequence[Prepared], batch_size: int = BATCH_SIZE
    ) -> list[Score]:
        """Return the scores of rows that are prepared, see `score_many`."""
        probed = self._probed
        scores: dict[int, Score] = {}
        for i, one in enumerate(prepared):
            reason = why_not(probed.backbone, one)
            if reason is not None:
                scores[i] = _abstain(one, reason, self._warn(one))
        for setting in _HEADS:
            rows = [
                i
                for i, one in enumerate(prepared)
                if one.asked.setting == setting and i not in scores
            ]
            lengths = [len(prepared[i].sequence.ids) for i in rows]
            at_once = min(batch_size, probed.rows_at_once(setting))
            for batch in self._batches(lengths, at_once):
                chosen = [rows[j] for j in batch]
                with probed.lock:
                    found = self._score(setting, [prepared[i] for i in chosen])
                scores.update(zip(chosen, found, strict=True))
        return [scores[i] for i in range(len(prepared))]

    def _warn(self, prepared: Prepared) -> list[str]:
        """Say what can be told of a row without the model."""
        return warn_before(self._probed.detector, self._probed.backbone, prepared)

    def _batches(
        self, lengths: Sequence[int], batch_size: int
    ) -> list[tuple[int, ...]]:
        """Group rows by length, within the budget of tokens and of rows."""
        return [
            batch[first : first + batch_size]
            for batch in plan_batches(lengths, self._probed.config)
            for first in range(0, len(batch), batch_size)
        ]

    def _score(self, setting: Setting, prepared: Sequence[Prepared]) -> list[Score]:
        """Score answers of one setting in one forward pass."""
        probed = self._probed
        reading = probed.read_sequences([one.sequence for one in prepared])
        features = probed.features(reading, setting)
        detector = probed.detector
        scores = (
            detector.score_single_pass(features)
            if setting == "with_context"
            else detector.score_closed_book(features)
        ).first(len(prepared))
        outside = warn_after(detector, features, len(prepared), setting)
        return [
            self._one(setting, i, scores, one, signals.prob[one.answer_tokens, 1], more)
            for i, (one, signals, more) in enumerate(
                zip(prepared, reading.signals, outside, strict=True)
            )
        ]

    def _one(
        self,
        setting: Setting,
        i: int,
        scores: Scores,
        prepared: Prepared,
        surprisal: np.ndarray,
        outside: list[str],
    ) -> Score:
        """Put together what is known of one answer."""
        warnings = [*self._warn(prepared), *outside]
        if not np.isfinite(scores.raw[i]):
            reason = "the model's signals of this answer are not finite numbers"
            return _abstain(prepared, reason, warnings)
        p_correct = float(scores.p_correct[i])
        decision, reason = _decide(p_correct, self.threshold(setting))
        own = map(float, scores.encoders[i])
        return Score(
            p_correct=p_correct,
            raw=float(scores.raw[i]),
            encoders=dict(zip(scores.encoder_names, own, strict=True)),
            decision=decision,
            reason=reason,
            warnings=tuple(warnings),
            tokens=prepared.pieces,
            log_probs=tuple(-float(x) for x in surprisal),
        )


def _decide(
    p_correct: float, threshold: Threshold | None
) -> tuple[Decision | None, str | None]:
    """Return whether an answer is trusted, and why not."""
    if threshold is None:
        return None, None
    if threshold.p_correct is None:
        return "abstain", threshold.in_words()
    if p_correct >= threshold.p_correct:
        return "trust", None
    return "abstain", (
        f"P {p_correct:.4f} is below {threshold.p_correct:.4f}, from which on "
        f"validation answers had precision {threshold.precision:.3f}"
    )


def _abstain(prepared: Prepared, reason: str, warnings: Sequence[str]) -> Score:
    """Return the score of an answer that cannot be read."""
    return Score(
        p_correct=None,
        raw=None,
        encoders={},
        decision="abstain",
        reason=reason,
        warnings=tuple(warnings),
        tokens=prepared.pieces,
        log_probs=(),
    )
