"""The methods that score, answer and stream, and the results that they return.

`Probe` and `Scorer` share these methods through `AnswerScorer`; a `Probe` loads its
language model on first use. Arguments are checked before it is loaded.
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
    """The detector's judgement of one answer.

    Attributes:
      p_correct: calibrated probability that the answer is correct, in [0, 1]; None if
        the answer cannot be scored.
      raw: the fused score before calibration, in [0, 1]; None if `p_correct` is None.
      encoders: the score of each selected encoder, in [0, 1].
      decision: "trust" from a threshold on, above which nine in ten answers are right
        (or the precision given to `load`); "distrust" up to one below which as many are
        wrong, each with 90 % confidence; otherwise "unknown", also if `p_correct` is
        None or if the detector rests on too few answers, as a warning then says too
        (see `jaxprobe.scope.Evidence`).
      reason: why the answer is not trusted, in words.
      warnings: what makes the probability less reliable, in words.
      tokens: the answer's text, one piece per token.
      log_probs: log-probability of each token under the backbone, in nats, at most 0.
      text: the answer, if the model wrote it in the pass that was scored.
      masked: computes `effects`; None if many answers were scored at once.
      error: what is wrong with a row that `score_many` could not read as an answer;
        `reason` says the same.
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
        """The effect of each token on P: P minus P without the token's signals.

        Empty unless the answer was scored on its own. Computed on first access.
        """
        return () if self.masked is None else self.masked()

    def __repr__(self) -> str:
        """Return the score in one line."""
        return f"Score({self})"

    def _repr_html_(self) -> str:
        """Show the answer in a notebook, each token tinted by its effect on P."""
        from beatrice.pgir.score_files import score_html

        return score_html(self.as_json(), self.effects)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with `effects` in place of the detector."""
        return {**self.__dict__, "effects": self.effects, "masked": None}

    def __str__(self) -> str:
        """Return the answer, P(correct) and the decision, or the row's error."""
        if self.error is not None:
            return f"error: {self.error}"
        answer = self.text if self.text is not None else "".join(self.tokens).strip()
        p = "unknown" if self.p_correct is None else f"{self.p_correct:.3f}"
        return f"{answer!r}: P(correct) {p}, {self.decision}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON; `text` and `error` only if they are not None."""
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
      text: the text that the token adds to the answer; it may be empty, since one
        character can take several tokens.
      p: probability of the token under the model, before any temperature, in [0, 1].
      entropy: entropy of the model's distribution at the token, in nats.
      is_stop: whether the token ended the answer; its text ends before a stop string.
      p_correct: calibrated probability that the answer is correct if it ends after this
        token; None if it was not asked for.
      p_if_cut: the same for an answer that is cut off here, read without the signals of
        an end. It is too low as a probability, since probes are fitted on whole
        answers. Early on it ranks unfinished answers at least as well as `p_correct`.
    """

    text: str
    p: float
    entropy: float
    is_stop: bool = False
    p_correct: float | None = None
    p_if_cut: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionBatch:
    """Questions and how to answer them; the fields are the arguments of `answer`.

    Attributes:
      texts: the questions; None if `messages` ask.
      contexts: the `Passage`s of each question; no passage asks closed-book.
    """

    texts: Any = None
    contexts: Any = None
    messages: Sequence[Mapping[str, str]] | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] | None = None
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check and convert every argument."""
        texts, n, stop, limit = None, 1, None, None
        if self.messages is None or self.texts is not None:
            texts = as_texts(self.texts, "questions")
            n = len(texts)
        if self.messages is not None and n != 1:
            raise ValueError(f"messages: expected one question with a chat, found {n}")
        for i, text in enumerate(texts or ()):
            check_text(text, self.name_of(i, n))
        if self.max_new_tokens is not None:
            limit = as_count(self.max_new_tokens, "max_new_tokens")
        if self.stop is not None:
            stop = tuple(as_texts(self.stop, "stop"))
        for name, value in {
            "texts": texts,
            "contexts": as_contexts(self.contexts, n),
            "max_new_tokens": limit,
            "stop": stop,
            "temperature": as_temperature(self.temperature, "temperature"),
            "seed": as_count(self.seed, "seed", least=0),
        }.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def name_of(place: int, n: int) -> str:
        """Return the name of one of `n` questions in error messages."""
        return "the question" if n == 1 else f"question {place + 1} of {n}"


def _contexts_of_question(context: Any, name: str) -> list[Any] | None:
    """Return the contexts of one question; None if it has no passage."""
    passages = as_passages(context, name)
    return [passages] if passages else None


class AnswerScorer(abc.ABC):
    """Answers questions, and estimates how likely answers are to be right."""

    @abc.abstractmethod
    def load_scorer(self) -> Any:
        """Return the `Scorer` (the detector with its model), loading it if need be."""

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
        """Return the probability that an answer is correct, from one forward pass.

        Args:
          question: the question that the model was asked.
          answer: its answer, or anybody's; it is read as if the model had written it.
          context: the passages that the model was shown: a text, a mapping with `text`
            and `title`, a document with `page_content`, or a list of these; None, or
            no passage, for closed-book.
          prompt: the text that was really sent for completion.
          messages: the chat that was really sent, each with `role` and `content`.
          prompt_ids: the token ids that the model really read.
          answer_ids: the token ids that the model wrote; they replace `answer`.
          context_range: characters `[start, stop)` of the context in the prompt's text.
          question_range: likewise of the question; see `pgir.given.AnswerToScore`.

        Raises:
          ValueError: an argument has the wrong type; a text is empty, is not where it
            should be in the prompt, or has control tokens that the model would read as
            such; the answer begins or ends with the text of a special token; or the
            detector was trained on arrays or only in the other setting.
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

        Answers of similar length share forward passes. Numbers equal `score`'s up to
        rounding.

        Args:
          rows: a list or a data frame. A row is a mapping of the arguments of `score`,
            or a tuple of question, answer and perhaps context. A row that `score` would
            refuse has no P, the decision "unknown" and the reason in `error`. Other
            columns of a data frame are ignored; a `UserWarning` names all except `id`.
          batch_size: most answers in one forward pass.

        Raises:
          ValueError: `rows` is no list or frame, or `batch_size` no positive integer.
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
        """Answer questions and score the answers in the passes that write them.

        The prompts are those that the probe was fitted with, unless `messages` ask.

        Args:
          questions: one question, or a list of them.
          contexts: the passages of one question, as in `score`; for a list of
            questions, a list with at least one passage for each. None, or no passage
            for a single question, asks closed-book.
          context: another name for `contexts` with a single question.
          messages: a chat to send instead, each with `role` and `content`; a question
            and its context are then searched for in it.
          max_new_tokens: most tokens of an answer; None takes the fit's.
          stop: texts that end an answer; None takes the fit's.
          temperature: sampling temperature; 0 always takes the likeliest token.
          seed: seed of the sampling. A sample depends only on its prompt and the seed.

        Returns:
          A score with the answer's `text`; for a list of questions, a list of scores.

        Raises:
          ValueError: an argument has the wrong type, a text is empty or has control
            tokens, a prompt does not fit the model's window, the model's logits are not
            finite, or the detector was trained only in the other setting.
        """
        is_single = questions is None or isinstance(questions, str)
        if context is not None:
            if contexts is not None or not is_single:
                raise ValueError(
                    "context: expected a single question and no contexts argument; for "
                    "several questions give contexts, one entry for each"
                )
            contexts = context
        if is_single:
            name = "contexts" if context is None else "context"
            contexts = _contexts_of_question(contexts, name)
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
        """Answer a question token by token and score the answer in the same passes.

            ``*tokens, score = probe.stream("where was it?", every=4)``

        Args:
          question: the question.
          context: its passages, as in `score`; None, or no passage, asks closed-book.
          every: give every n-th token `p_correct`, the score of the text that ends
            there, and `p_if_cut`; None gives them to no token. Both are mostly low
            until the answer is complete, but they help to rank unfinished answers from
            the first token on; early in an answer `p_if_cut` ranks as well or better
            (docs/measurements.md). They delay the token until the next one, and encode
            the signals of the whole prompt: a third of a step with 200 tokens, more
            than a step with 1,200 (SmolLM2 on a CPU). The last token of an answer that
            is cut off has neither, since the score follows.
          messages: as in `answer`.
          max_new_tokens: most tokens of an answer; None takes the fit's.
          stop: texts that end an answer; None takes the fit's.
          temperature: sampling temperature; 0 always takes the likeliest token.
          seed: seed of the sampling.

        Returns:
          An iterator over the tokens as they are written, with text, probability and
          entropy, the stop token included. The last item is the score, as in `answer`.

        Raises:
          ValueError: as for `answer`, or the model cannot be read while it writes.
        """
        if every is not None:
            every = as_count(every, "every")
        is_chat = question is None and messages is not None
        batch = QuestionBatch(
            texts=None if is_chat else [as_text(question, "question")],
            contexts=_contexts_of_question(context, "context"),
            messages=messages,
            max_new_tokens=max_new_tokens,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )
        return self.load_scorer().stream_question(batch, every)
