"""What a person tells of an answer that exists, and what becomes of it."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from extract.records import Passage, Setting
from extract.signals.plan import TokenSequence

Range = tuple[int, int]
_PROMPTS = ("prompt", "messages", "prompt_ids")


def _refuse(name: str, expected: str, found: Any) -> None:
    raise ValueError(f"{name}: expected {expected}, found {type(found).__name__}")


def _is_titled(value: Any) -> bool:
    """Tell whether a value is a passage with its title."""
    return isinstance(value, Mapping) and all(
        isinstance(value.get(name), str) for name in ("title", "text")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenAnswer:
    """An answer, and what the model had been asked.

    Without `prompt`, `messages` and `prompt_ids` the run's own template asks
    `question`, with the passages in `context`. With one of them that is the prompt, as
    it was really used; `question` and `context` are then looked for in its text, or
    `question_range` and `context_range` tell where they lie.

    Attributes:
      question: as the model was asked.
      answer: its answer, or anybody's; under a prompt, its exact text, with the white
        space that it began with.
      context: passages that the model was shown, each a text or `{"title", "text"}`;
        None for closed-book.
      prompt: text that was sent to be completed. Control tokens in it are read as
        such; the tokenizer's own come before it unless it begins with them.
      messages: `{"role", "content"}`, put through the model's chat template, thinking
        switched off.
      prompt_ids: the ids that the model read.
      answer_ids: the ids that it wrote; a special one at the end is the stop token.
        Without them `answer` is tokenised, and taken as ended by the stop token.
      context_range: characters `[start, stop)` of the context in the prompt's text,
        which for `messages` is what `Scorer.render` returns and for `prompt_ids` what
        they decode to.
      question_range: likewise; behind the context.
    """

    question: str | None = None
    answer: str | None = None
    context: str | Sequence[str | Mapping[str, str]] | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_ids: Sequence[int] | None = None
    answer_ids: Sequence[int] | None = None
    context_range: Range | None = None
    question_range: Range | None = None

    def __post_init__(self) -> None:
        """Refuse, by name, what is of another type or tells too much or too little."""
        if isinstance(self.context, (list, tuple)):
            for i, one in enumerate(self.context):
                if not isinstance(one, str) and not _is_titled(one):
                    kinds = "a text (str), or an object with texts title and text"
                    _refuse(f"context[{i}]", kinds, one)
        elif self.context is not None and not isinstance(self.context, str):
            kinds = "a text (str), a list of texts, or None for closed-book"
            _refuse("context", kinds, self.context)
        self._check_prompt()
        self._check_ids_and_ranges()
        needed = [] if self.answer_ids is not None else ["answer"]
        needed += ["question"] if self.is_own else []
        for name in ("question", "answer"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in needed):
                _refuse(name, "a text (str)", value)

    def _check_prompt(self) -> None:
        """Check the three ways of telling a prompt."""
        told = [name for name in _PROMPTS if getattr(self, name) is not None]
        if len(told) > 1:
            raise ValueError(f"expected one prompt, found {' and '.join(told)}")
        if self.prompt is not None and not isinstance(self.prompt, str):
            _refuse("prompt", "a text (str)", self.prompt)
        if self.messages is None:
            return
        if not isinstance(self.messages, (list, tuple)) or not self.messages:
            _refuse("messages", "a list of at least one message", self.messages)
        for i, one in enumerate(self.messages):
            is_message = isinstance(one, Mapping) and {"role", "content"} <= one.keys()
            if not is_message or not isinstance(one["content"], str):
                _refuse(f"messages[{i}]", "an object with texts role and content", one)

    def _check_ids_and_ranges(self) -> None:
        """Check token ids and character ranges, as far as they go without a model."""
        for name in ("prompt_ids", "answer_ids", "context_range", "question_range"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, np.ndarray):
                value = value.tolist()
            is_list = isinstance(value, (list, tuple)) and all(
                isinstance(n, numbers.Integral) and not isinstance(n, bool)
                for n in value
            )
            if not is_list:
                _refuse(name, "a list of whole numbers", value)
            if name.endswith("range"):
                if self.is_own:
                    raise ValueError(
                        f"{name} lies in the text of a prompt; give prompt, messages "
                        "or prompt_ids"
                    )
                if len(value) != 2 or not 0 <= value[0] < value[1]:
                    raise ValueError(
                        f"{name}: expected [start, stop) with 0 <= start < stop, found "
                        f"{list(value)}"
                    )
            object.__setattr__(self, name, tuple(int(n) for n in value))

    @property
    def is_own(self) -> bool:
        """Whether the run's own template asks."""
        return all(getattr(self, name) is None for name in _PROMPTS)

    @property
    def passages(self) -> list[Passage]:
        """The passages of the context; none for closed-book."""
        one = isinstance(self.context, str)
        every = [self.context] if one else list(self.context or ())
        return [
            Passage(title="", text=passage)
            if isinstance(passage, str)
            else Passage(title=passage["title"], text=passage["text"])
            for passage in every
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What the model had read when it began to answer.

    Attributes:
      ids: the prompt's, special tokens included.
      context_span: `[start, stop)` of the context in them; equal numbers without one.
      question_start: first token of the question span, or None where it follows the
        context, as in training.
      is_own: whether the run's own template makes the same ids.
      parts: what is in the prompt, in words, and its ids.
      text: what was asked, without the template's words where it is the run's own.
    """

    ids: tuple[int, ...]
    context_span: Range
    question_start: int | None
    is_own: bool
    parts: list[tuple[str, tuple[int, ...]]]
    text: str

    @property
    def setting(self) -> Setting:
        """Closed-book where no token is context."""
        has_context = self.context_span[0] < self.context_span[1]
        return "with_context" if has_context else "closed_book"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """An answer ready to be read.

    Attributes:
      asked: the prompt.
      sequence: prompt and answer with their spans.
      parts: of prompt and answer, in words, with their ids.
      pieces: the answer's text, a piece a token.
      text: everything that was asked and answered.
    """

    asked: Asked
    sequence: TokenSequence
    parts: list[tuple[str, tuple[int, ...]]]
    pieces: tuple[str, ...]
    text: str

    @property
    def answer_tokens(self) -> slice:
        """Positions that emitted the answer's tokens."""
        first = len(self.asked.ids) - 1
        return slice(first, first + len(self.pieces))
