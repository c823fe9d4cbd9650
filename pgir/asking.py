"""What a person asks about answers, and is told: a `Score`.

These signatures stand here, and nowhere else.
A `Probe` loads its language model when it is first asked, a `Scorer` has it; both are
asked alike. Arguments are checked before a model is loaded.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from beatrice.extract.generate.prompts import check_text
from beatrice.jaxprobe.scope import Decision
from beatrice.pgir.arguments import (
    as_contexts,
    as_count,
    as_passages,
    as_rows,
    as_temperature,
    as_text,
    as_texts,
)
from beatrice.pgir.given import ARGUMENTS, AnswerToScore

BATCH_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Score:
    """What the detector says of one answer.

    Attributes:
      p_correct: calibrated probability that the answer is correct, in [0, 1]; None
        where the answer cannot be read to any use.
      raw: the fused score before calibration, in [0, 1]; None likewise.
      encoders: each selected encoder's own score, in [0, 1].
      decision: "trust" from the P on where nine in ten answers are right (or the
        precision that `load` was given), "distrust" up to the P where as many are
        wrong, each with 90 % confidence; else "unknown", as where `p_correct` is None
        or the detector rests on too few answers (`jaxprobe.scope.Evidence`), of which
        a warning is too.
      reason: why it is not trusted, in words.
      warnings: what makes the number less reliable, in words.
      tokens: the answer's text, a piece a token.
      log_probs: of each token, log p in nats under the backbone, at most 0.
      text: the answer, where the model wrote it in the pass that was scored.
      masked: computes `effects`; None where many answers were scored at once.
      error: what is wrong with the row, where `score_many` could not read it as an
        answer at all; `reason` says the same.
    """

    p_correct: float | None = None
    raw: float | None = None
    encoders: dict[str, float] = dataclasses.field(default_factory=dict)
    decision: Decision = "unknown"
    reason: str | None = None
    warnings: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    log_probs: tuple[float, ...] = ()
    text: str | None = None
    error: str | None = None
    masked: Callable[[], tuple[float, ...]] | None = dataclasses.field(
        default=None, compare=False
    )

    @functools.cached_property
    def effects(self) -> tuple[float, ...]:
        """What each token does to P: P minus P of the answer without its signals.

        Of an answer that was scored alone; else empty. Computed when first asked for.
        """
        return () if self.masked is None else self.masked()

    def __repr__(self) -> str:
        """Say it in one line."""
        return f"Score({self})"

    def _repr_html_(self) -> str:
        """Show the answer in a notebook, each token tinted by its effect on P."""
        from beatrice.pgir.score_files import score_html

        return score_html(self.as_json(), self.effects)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; what computes `effects` holds the detector."""
        return {**self.__dict__, "effects": self.effects, "masked": None}

    def __str__(self) -> str:
        """Return the answer, P(correct) and the decision, or the row's error."""
        if self.error is not None:
            return f"error: {self.error}"
        answer = self.text if self.text is not None else "".join(self.tokens).strip()
        p = "unknown" if self.p_correct is None else f"{self.p_correct:.3f}"
        return f"{answer!r}: P(correct) {p}, {self.decision}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON; `text` and `error` only where there is one."""
        fields = dataclasses.asdict(dataclasses.replace(self, masked=None))
        del fields["masked"]
        for name in ("text", "error"):
            if fields[name] is None:
                del fields[name]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedToken:
    """One token of an answer that is being written.

    Attributes:
      text: what it adds to the answer, which may be nothing: one character can take
        several tokens.
      p: its probability under the model, before any temperature, in [0, 1].
      entropy: of the distribution that it was chosen from, in nats.
      is_stop: whether it ended the answer; its text is what stands before a stop
        string.
      p_correct: calibrated P(the answer is correct if it ends behind this token); None
        where it was not asked for.
      p_if_cut: the same of the answer read as one that is cut here, without a last
        token's signals. No probability: a probe is fitted on whole answers, so it is
        too low. It ranks answers that still go on, early, as well as `p_correct` or
        better.
    """

    text: str
    p: float
    entropy: float
    is_stop: bool = False
    p_correct: float | None = None
    p_if_cut: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionBatch:
    """Questions, and how they are answered; every field is as in `answer`.

    Attributes:
      texts: the questions; None where `messages` ask.
      contexts: of each question, held as `Passage`s; none closed-book.
    """

    texts: Any = None
    contexts: Any = None
    messages: Sequence[Mapping[str, str]] | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] | None = None
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every argument, and hold what it was converted to."""
        texts, n, stop = None, 1, None
        if self.messages is None or self.texts is not None:
            texts = as_texts(self.texts, "questions")
            n = len(texts)
        if self.messages is not None and n != 1:
            raise ValueError(f"messages: expected one question with a chat, found {n}")
        for i, text in enumerate(texts or ()):
            check_text(text, self.name_of(i, n))
        if self.max_new_tokens is not None:
            as_count(self.max_new_tokens, "max_new_tokens")
        if self.stop is not None:
            stop = tuple(as_texts(self.stop, "stop"))
        for name, value in {
            "texts": texts,
            "contexts": as_contexts(self.contexts, n),
            "stop": stop,
            "temperature": as_temperature(self.temperature, "temperature"),
            "seed": as_count(self.seed, "seed", least=0),
        }.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def name_of(place: int, n: int) -> str:
        """Return what messages call one of `n` questions."""
        return "the question" if n == 1 else f"question {place + 1} of {n}"


def _contexts_of_one(context: Any, name: str) -> list[Any] | None:
    """Return the contexts of one question; None where it is shown no passage."""
    passages = as_passages(context, name)
    return [passages] if passages else None


class AnswerScorer(abc.ABC):
    """Answers questions, and says how likely an answer is right."""

    @abc.abstractmethod
    def load_scorer(self) -> Any:
        """Return the `Scorer`: the detector beside its model, loaded now if need be."""

    def score(
        self,
        question: str | None = None,
        answer: str | None = None,
        context: Any = None,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt_ids: Sequence[int] | None = None,
        answer_ids: Sequence[int] | None = None,
        context_range: tuple[int, int] | None = None,
        question_range: tuple[int, int] | None = None,
    ) -> Score:
        """Return P(the answer is correct) from one forward pass.

        Args:
          question: as the model was asked.
          answer: its answer, or anybody's; it is read as if the model had written it.
          context: the passages that the model was shown: a text, a mapping with `text`
            and `title`, a document with `page_content`, or a list of these; None, or
            no passage, for closed-book.
          prompt: the text that was really sent to be completed.
          messages: the chat that was really sent, each with `role` and `content`.
          prompt_ids: the ids that the model really read.
          answer_ids: the ids that it wrote; `answer` is not read beside them.
          context_range: characters `[start, stop)` of the context in the prompt's text.
          question_range: likewise of the question. See `AnswerToScore` for all.

        Raises:
          ValueError: an argument is of another type, a text is empty, holds control
            tokens that the model would read as such, or is not where it is said to be;
            the answer begins or ends with the text of a special token; or the detector
            was trained on arrays or in another setting.
        """
        given = AnswerToScore(
            question=question,
            answer=answer,
            context=context,
            prompt=prompt,
            messages=messages,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            context_range=context_range,
            question_range=question_range,
        )
        return self.load_scorer().score_given(given)

    def score_many(self, rows: Any, batch_size: int = BATCH_SIZE) -> list[Score]:
        """Return the scores of many answers, in the order of the rows.

        Answers of similar length share forward passes. Numbers are those of `score`
        up to rounding.

        Args:
          rows: a list or a data frame. A row is a mapping of what `score` takes, or a
            tuple of question, answer and perhaps context. One that `score` would refuse
            has no P, the decision "unknown" and the reason in `error`. Other columns of
            a data frame are not read, as a warning (`UserWarning`) says, except of
            `id`.
          batch_size: most answers in one forward pass.

        Raises:
          ValueError: there is no list of rows, or the batch size is no such number.
        """
        read = as_rows(rows, ARGUMENTS)
        batch_size = as_count(batch_size, "batch_size")
        return self.load_scorer().score_rows(read, batch_size)

    @overload
    def answer(
        self,
        questions: str | None = None,
        contexts: Any = None,
        *,
        context: Any = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Score: ...
    @overload
    def answer(
        self,
        questions: Sequence[str],
        contexts: Sequence[Any] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Score]: ...

    def answer(
        self,
        questions: Any = None,
        contexts: Any = None,
        *,
        context: Any = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Any:
        """Answer questions, and score the answers in the passes that write them.

        The language model is asked as in the fit.

        Args:
          questions: a text, or several.
          contexts: what is shown with the question, as `score` takes it; or of several
            questions a list of that, at least a passage for each. None, or no passage
            of one question, asks closed-book.
          context: of one question, the same as `contexts`.
          messages: one chat that asks instead, each with `role` and `content`; a
            question and its context are then looked for in it.
          max_new_tokens: most tokens of an answer; None is as in the fit.
          stop: texts that end an answer; None is as in the fit.
          temperature: of draws; 0 takes the likeliest tokens.
          seed: of draws. A draw depends on its prompt and the seed, on nothing else.

        Returns:
          A score with the answer's `text`; of several questions a list of scores.

        Raises:
          ValueError: an argument is of another type, a text is empty or holds control
            tokens, a prompt does not fit the model's window, the model's logits are not
            finite, or the detector was trained in another setting.
        """
        is_single = questions is None or isinstance(questions, str)
        if context is not None:
            if contexts is not None or not is_single:
                raise ValueError(
                    "context: expected one question without contexts beside it; of "
                    "several give contexts, an entry a question"
                )
            contexts = context
        if is_single:
            name = "contexts" if context is None else "context"
            contexts = _contexts_of_one(contexts, name)
            questions = None if questions is None else [questions]
        batch = QuestionBatch(
            texts=questions,
            contexts=contexts,
            messages=messages,
            max_new_tokens=max_new_tokens,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )
        scores = self.load_scorer().answer_batch(batch)
        return scores[0] if is_single else scores

    def stream(
        self,
        question: str | None = None,
        context: Any = None,
        *,
        every: int | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[StreamedToken | Score]:
        """Answer a question token by token, and score the answer in the same passes.

            ``*tokens, score = probe.stream("where was it?", every=4)``

        Args:
          question: a text.
          context: what is shown with it, as `score` takes it; None, or no passage,
            asks closed-book.
          every: so many tokens apart a token has `p_correct`, which is what `score`
            gives the text that ends there, and `p_if_cut`; None is nowhere. Both are
            mostly low until the answer is whole. As ranks of unfinished answers both
            are worth something from the first token on, early `p_if_cut` as much or
            more (docs/measurements.md). They cost a small part of a step, and the token
            comes with the next one. The last token of an answer that is cut has
            neither: there is the score.
          messages: as in `answer`.
          max_new_tokens: most tokens of an answer; None is as in the fit.
          stop: texts that end an answer; None is as in the fit.
          temperature: of draws; 0 takes the likeliest tokens.
          seed: of draws.

        Returns:
          Every token as it comes, with its text, probability and entropy, the stop
          token too; last the score, which is that of `answer`.

        Raises:
          ValueError: as `answer`, or the model cannot be read while it writes.
        """
        if every is not None:
            every = as_count(every, "every")
        is_chat = question is None and messages
        batch = QuestionBatch(
            texts=None if is_chat else [as_text(question, "question")],
            contexts=_contexts_of_one(context, "context"),
            messages=messages,
            max_new_tokens=max_new_tokens,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )
        return self.load_scorer().stream_question(batch, every)
