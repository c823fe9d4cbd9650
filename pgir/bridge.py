"""Where Torch and JAX meet: the backbone answers, the detector scores.

Signals leave Torch as NumPy arrays, are padded to a few fixed lengths, and go into
the jitted detector, so that JAX compiles once per length and not once per question.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from extract.backbone.loading import Backbone
from extract.generate.local import generate
from extract.generate.prompts import (
    PromptTemplate,
    build_prompt,
    check_text,
    encode_text,
)
from extract.generate.requests import GenerationConfig, Request, plan_batches
from extract.records import Answer, Passage, Setting
from extract.signals.batch import Signals
from extract.signals.plan import AnswerSpan, sequence_of
from extract.signals.reader import SignalReader
from extract.store.families import as_written
from jaxprobe.detector import Detector, Scores
from jaxprobe.features.families import Features
from jaxprobe.features.reading import SPANS, assemble
from jaxprobe.features.subsets import FAMILIES
from pgir.controllers.policy import Draft

# Padded lengths of spans longer than any in training: each rounded up to one of these,
# so a new question rarely means a new compilation.
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = (1, 8, 64, 256)  # padded numbers of examples, likewise


def fixed_length(n: int, lengths: Sequence[int] = LENGTHS) -> int:
    """Return the smallest fixed length that holds `n`; multiples of the last above."""
    for length in lengths:
        if n <= length:
            return length
    return -(-n // lengths[-1]) * lengths[-1]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Signals of some answers, as rows."""

    signals: list[Signals]
    spans: np.ndarray  # [n_examples, 3, 2]

    def features(self, setting: Setting, usual: Sequence[int] = ()) -> Features:
        """Return the padded spans, examples padded by empty ones to a fixed number.

        The first `len(signals)` examples are real.

        Args:
          setting: which spans.
          usual: lengths to pad each span to where that is enough.
        """
        lengths = [len(s.prob) for s in self.signals]
        starts = np.cumsum([0, *lengths[:-1]])
        rows = {
            "hidden": np.concatenate([s.hidden[:, 0] for s in self.signals]),
            "prob": np.concatenate([s.prob for s in self.signals]),
            "resid": np.concatenate([s.resid for s in self.signals]),
            "attn": np.concatenate([s.attn for s in self.signals]),
        }
        spans = SPANS[setting]
        usual = usual or LENGTHS[:1] * len(spans)
        widths = np.diff(self.spans)[..., 0].max(axis=0)
        n_extra = fixed_length(len(starts), ROWS) - len(starts)
        return assemble(
            rows,
            np.concatenate([starts, np.zeros(n_extra, dtype=np.int64)]),
            np.concatenate([self.spans, np.zeros((n_extra, 3, 2), dtype=np.int64)]),
            setting,
            [
                fixed_length(int(widths[s]), (first, *LENGTHS))
                for s, first in zip(spans, usual, strict=True)
            ],
        )


class ProbedBackbone:
    """A backbone with its detector: answers questions and scores answers.

    Args:
      backbone: the frozen model.
      detector: trained on this backbone's signals.
      template: the prompt's words, as in training.
      config: how answers are generated.
      answer_span: as in training.

    Raises:
      ValueError: the detector was trained on another model.
    """

    def __init__(
        self,
        backbone: Backbone,
        detector: Detector,
        template: PromptTemplate,
        config: GenerationConfig,
        *,
        answer_span: AnswerSpan = "emitting",
    ) -> None:
        """Check that the two belong together."""
        trained_on = detector.facts["revision"]
        if trained_on != backbone.revision:
            raise ValueError(
                f"the detector belongs to a backbone of revision {trained_on[:12]}, "
                f"but {backbone.name} is {backbone.revision[:12]}; load that backbone, "
                "or train a detector for this one"
            )
        self.backbone = backbone
        self.detector = detector
        self._template = template
        self._config = config
        self._answer_span = answer_span
        self.reader = SignalReader(backbone, (int(detector.facts["layer"]),))

    def requests(
        self, setting: Setting, questions: Sequence[str], contexts: Sequence
    ) -> list[Request]:
        """Return one request per question, named by its place."""
        return [
            Request(
                example_id=str(i),
                setting=setting,
                variant="original",
                prompt=build_prompt(
                    self.backbone.tokenizer, self._template, question, context
                ),
            )
            for i, (question, context) in enumerate(
                zip(questions, contexts, strict=True)
            )
        ]

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Return greedy answers in the order of the requests."""
        return generate(self.backbone, requests, self._config)

    def given(self, request: Request, text: str) -> Answer:
        """Return an answer that already exists, as if the model had written it.

        Raises:
          ValueError: the answer is empty, no text, or does not fit the window.
        """
        check_text(text, "the answer")
        prompt = request.prompt
        ids = self._continuation(text)
        n_tokens = len(prompt.ids) + len(ids)
        limit = self.backbone.max_length
        if limit is not None and n_tokens > limit:
            raise ValueError(
                f"prompt and answer have {n_tokens} tokens, but {self.backbone.name} "
                f"has a window of {limit}; give fewer or shorter passages"
            )
        stop = self.backbone.tokenizer.eos_token_id
        return Answer(
            example_id=request.example_id,
            setting=request.setting,
            variant=request.variant,
            text=text,
            prompt_ids=prompt.ids,
            token_ids=ids,
            stop_id=stop,
            context_span=prompt.context_span,
        )

    def _continuation(self, text: str) -> tuple[int, ...]:
        """Return an answer's ids, without special tokens, as after a prompt's end."""
        space = "" if self._template.chat else " "  # a chat's reply begins a line
        encoded = encode_text(
            self.backbone.tokenizer, space + text.strip(), add_special_tokens=False
        )
        return tuple(encoded["input_ids"])

    def count_unknown(self, text: str) -> tuple[int, int]:
        """Return how many of a text's tokens stand for unknown words, and all."""
        ids = self._continuation(text)
        unknown = self.backbone.tokenizer.unk_token_id
        return sum(token == unknown for token in ids), len(ids)

    def read(self, answers: Sequence[Answer]) -> Reading:
        """Return the signals of answers, one forward pass per batch."""
        sequences = [sequence_of(a, answer_span=self._answer_span) for a in answers]
        signals: list[Signals | None] = [None] * len(sequences)
        for batch in plan_batches([len(s.ids) for s in sequences], self._config):
            for i, one in zip(
                batch, self.reader.read([sequences[i] for i in batch]), strict=True
            ):
                signals[i] = one
        return Reading(
            [self._as_trained(one) for one in signals if one is not None],
            np.stack([s.spans for s in sequences]),
        )

    def _as_trained(self, signals: Signals) -> Signals:
        """Round signals as the store that the detector was trained on does.

        So a score is that of the evaluation, also where the store keeps 8 bits.
        """
        facts = self.detector.facts
        kinds = dict.fromkeys(FAMILIES, facts.get("scalars", "float32"))
        kinds["hidden"] = facts.get("dtype", "float32")
        rounded = {
            name: as_written(getattr(signals, name), kind)
            for name, kind in kinds.items()
            if kind != "float32"
        }
        return dataclasses.replace(signals, **rounded)

    def _features(self, reading: Reading, setting: Setting) -> Features:
        """Return a reading's spans, padded as in training where that is enough."""
        bank = self.detector.banks.get(setting)
        return reading.features(setting, bank.lengths if bank else ())

    def score_closed_book(self, reading: Reading) -> Scores:
        """Return the detector's scores of closed-book answers, `[n]` each."""
        features = self._features(reading, "closed_book")
        return self.detector.score_closed_book(features).first(len(reading.signals))

    def score_with_context(self, reading: Reading, closed_book: Reading) -> Scores:
        """Return the scores of with-context answers, `[n]` each.

        Args:
          reading: of the with-context answers.
          closed_book: of the closed-book answers to the same questions.
        """
        return self.detector.score_with_context(
            self._features(reading, "with_context"),
            self._features(closed_book, "closed_book"),
        ).first(len(reading.signals))

    def score_single_pass(self, reading: Reading) -> Scores:
        """Return the scores of with-context answers from their own pass alone."""
        features = self._features(reading, "with_context")
        return self.detector.score_single_pass(features).first(len(reading.signals))


def _drafts(answers: Sequence[Answer], scores: Scores) -> list[Draft]:
    return [
        Draft(answer=answer.text, p_correct=float(p_correct), raw=float(raw))
        for answer, p_correct, raw in zip(
            answers, scores.p_correct, scores.raw, strict=True
        )
    ]


class ProbedReader:
    """The controller's view of a probed backbone, over one list of questions."""

    def __init__(self, probed: ProbedBackbone, questions: Sequence[str]) -> None:
        """Take the questions; their closed-book reading is cached for later rounds."""
        self._probed = probed
        self._questions = list(questions)
        self._reading: Reading | None = None

    def closed_book(self, questions: Sequence[str]) -> list[Draft]:
        """Return one closed-book draft per question."""
        probed = self._probed
        empty: list[Sequence[Passage]] = [()] * len(questions)
        answers = probed.answer(probed.requests("closed_book", questions, empty))
        self._reading = probed.read(answers)
        return _drafts(answers, probed.score_closed_book(self._reading))

    def with_context(
        self, rows: Sequence[int], contexts: Sequence[Sequence[Passage]]
    ) -> list[Draft]:
        """Return a draft for each of the questions with these indices."""
        if self._reading is None:
            raise ValueError("with_context needs the closed-book drafts first")
        if not rows:
            return []
        probed = self._probed
        questions = [self._questions[i] for i in rows]
        answers = probed.answer(probed.requests("with_context", questions, contexts))
        cached = Reading(
            [self._reading.signals[i] for i in rows],
            self._reading.spans[np.asarray(rows)],
        )
        return _drafts(answers, probed.score_with_context(probed.read(answers), cached))
