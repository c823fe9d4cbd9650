"""Scoring an answer that exists: the call for a user who has question and answer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extract.backbone.loading import load_backbone
from extract.backbone.names import model_path
from extract.generate.requests import GenerationConfig, PromptConfig
from extract.records import Passage
from extract.run.directory import RunDir
from extract.run.manifest import read_manifest
from jaxprobe.detector import Detector
from pgir.bridge import ProbedBackbone


def _check_arguments(question: Any, answer: Any, context: Any) -> None:
    """Refuse arguments that are no text, by name.

    Raises:
      ValueError: says what was expected and what came.
    """
    parts = [("question", question), ("answer", answer)]
    if isinstance(context, (list, tuple)):
        parts += [(f"context[{i}]", text) for i, text in enumerate(context)]
    elif context is not None and not isinstance(context, str):
        raise ValueError(
            "context: expected a text (str), a list of texts, or None for "
            f"closed-book, found {type(context).__name__}"
        )
    for name, text in parts:
        if not isinstance(text, str):
            raise ValueError(
                f"{name}: expected a text (str), found {type(text).__name__}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What the detector says of one answer.

    Attributes:
      p_correct: calibrated probability that the answer is correct, in [0, 1].
      raw: the fused score before calibration, in [0, 1].
      encoders: each selected encoder's own score, in [0, 1].
      warnings: what makes the number less reliable, in words.
    """

    p_correct: float
    raw: float
    encoders: dict[str, float]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**dataclasses.asdict(self), "warnings": list(self.warnings)}


class Scorer:
    """A run's backbone and detector, for one answer at a time."""

    def __init__(self, probed: ProbedBackbone) -> None:
        """Take a backbone with its detector; see `load`."""
        self._probed = probed

    @classmethod
    def load(cls, path: Path, *, model: str | None = None) -> "Scorer":
        """Load the detector of a run and its backbone.

        Args:
          path: run directory.
          model: where the backbone lies, if not where the run found it.

        Raises:
          ValueError: no detector there yet, or the backbone is another one.
        """
        read_manifest(path)  # refuses what is no run
        run = RunDir(path)
        detector = Detector.load(run.finished_detector())
        name = model or detector.facts["model"]
        asking = PromptConfig(
            template=detector.facts["template"],
            chat=detector.facts.get("chat", "no") == "yes",
        )
        probed = ProbedBackbone(
            load_backbone(
                model_path(name), dtype=detector.facts.get("model_dtype", "float32")
            ),
            detector,
            asking.prompt_template(),
            GenerationConfig(),
            answer_span=detector.facts["answer_span"],
        )
        return cls(probed)

    def score(
        self,
        question: str,
        answer: str,
        context: str | Sequence[str] | None = None,
    ) -> Score:
        """Return P(the answer is correct) from one forward pass.

        Args:
          question: as the model was asked.
          answer: its answer, or anybody's; it is read as if the model had written it.
          context: the passages the model was shown, or None for closed-book.

        Raises:
          ValueError: an argument is no text, a text is empty, is longer than the
            model's window, or holds mostly words that the model has no token for.
        """
        _check_arguments(question, answer, context)
        texts = [context] if isinstance(context, str) else list(context or ())
        passages = [Passage(title="", text=text) for text in texts]
        setting = "with_context" if passages else "closed_book"
        (request,) = self._probed.requests(setting, [question], [passages])
        given = self._probed.given(request, answer)
        warnings = self._check_words(question, answer, texts)
        reading = self._probed.read([given])
        scores = (
            self._probed.score_single_pass(reading)
            if passages
            else self._probed.score_closed_book(reading)
        )
        return Score(
            p_correct=float(scores.p_correct[0]),
            raw=float(scores.raw[0]),
            encoders=dict(
                zip(scores.encoder_names, map(float, scores.encoders[0]), strict=True)
            ),
            warnings=warnings,
        )

    def _check_words(
        self, question: str, answer: str, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Refuse what the tokenizer cannot represent; warn of what it half can."""
        parts = [("the question", question), ("the answer", answer)]
        parts += [(f"passage {i}", text) for i, text in enumerate(texts, start=1)]
        warnings = []
        for what, text in parts:
            n_unknown, n_tokens = self._probed.count_unknown(text)
            if 2 * n_unknown > n_tokens:
                raise ValueError(
                    f"{what} has {n_unknown} of {n_tokens} tokens that "
                    f"{self._probed.backbone.name} does not know, so its signals mean "
                    "nothing; use a backbone that reads this script or vocabulary"
                )
            if n_unknown:
                warnings.append(
                    f"{what} has {n_unknown} of {n_tokens} tokens unknown to the model"
                )
        return tuple(warnings)
