"""The words around question and context: templates, worked examples, words of your own.

A base model that sees a bare question continues it like a web page; after a few worked
examples it answers in the same form, and ends its answer at the end of the line.
"""

import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from beatrice.extract.records import Passage, Setting, check_choices
from beatrice.extract.run.files import from_json

TemplateName = Literal["short", "paper", "few-shot"]

MAX_NEW_TOKENS = 32  # of an answer, by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shot:
    """A worked example: a question with its answer and, optionally, a context."""

    question: str
    answer: str
    context: str = ""

    def __post_init__(self) -> None:
        """Check that there is a question, and an answer of one line."""
        if not (self.question.strip() and self.answer.strip()):
            raise ValueError("a worked example needs a question and an answer")
        if "\n" in self.answer.strip():
            raise ValueError(
                f"a worked example's answer has several lines ({self.answer!r}); give "
                "one line, since answers end at the end of the line"
            )


# Widely known facts: TriviaQA asks for the last, so splits leave such questions out.
# Contexts are short, as every prompt pays for them; one answers in its second sentence.
SHOTS = tuple(
    Shot(question=question, answer=answer, context=context)
    for question, answer, context in (
        (
            "What is the capital city of Portugal?",
            "Lisbon",
            "Portugal: Portugal lies on the Atlantic coast of the Iberian Peninsula. "
            "Its capital and largest city is Lisbon.",
        ),
        (
            "Who painted The Starry Night?",
            "Vincent van Gogh",
            "The Starry Night: The Starry Night is an oil painting of June 1889 by "
            "Vincent van Gogh.",
        ),
        (
            "In what year did the Titanic sink?",
            "1912",
            "Titanic: The liner hit an iceberg on its first voyage and sank on 15 "
            "April 1912.",
        ),
        (
            "Which element has the chemical symbol K?",
            "potassium",
            "Potassium: Potassium is a soft metal with the symbol K.",
        ),
    )
)


def read_shots(path: Path) -> tuple[Shot, ...]:
    """Return the worked examples in a file: one JSON object per line.

    Each has "question", "answer" and, optionally, "context".
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path}: the worked examples cannot be read ({reason}); expected paper, "
            "short, few-shot or a file of your own"
        ) from error
    expected = 'a worked example is {"question": …, "answer": …, "context": … or none}'
    shots = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        shots.append(from_json(Shot, line, where, expected))
        if unknown := json.loads(line).keys() - vars(shots[-1]).keys():
            names = ", ".join(map(repr, sorted(unknown)))
            raise ValueError(f"{where}: unknown field {names}; {expected}")
    if not shots:
        raise ValueError(f"{path}: expected at least one worked example, found none")
    return tuple(shots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The words around question and context, such as those of your service.

    Attributes:
      closed_book: contains `{question}`; empty if no question comes without passages.
      with_context: `{context}` once, before `{question}`; empty if none has passages.
      between: separates passages.
      has_titles: whether a passage's title precedes its text. Published passages often
        name their subject only in the title ("It was released in 1994"), and a
        rewriter is shown the context as the model reads it.
      system: a chat's system message; empty for none.
    """

    closed_book: str = ""
    with_context: str = ""
    between: str = "\n\n"
    has_titles: bool = True
    system: str = ""

    def __post_init__(self) -> None:
        """Check that there are placeholders for the question and the context."""
        if not (self.closed_book or self.with_context):
            raise ValueError("expected closed_book or with_context, found neither")
        if self.closed_book and "{question}" not in self.closed_book:
            raise ValueError(f"closed_book has no {{question}}: {self.closed_book!r}")
        if "{context}" in self.closed_book:
            raise ValueError(
                "closed_book asks without passages, and has {context}; call it "
                f"with_context: {self.closed_book!r}"
            )
        _, *after = self.with_context.split("{context}")
        if self.with_context and not (len(after) == 1 and "{question}" in after[0]):
            raise ValueError(
                "with_context: expected {context} once and {question} after it, where "
                f"a probe reads the question, found {self.with_context!r}"
            )

    def of(self, setting: Setting) -> str:
        """Return the words around questions in one setting."""
        return self.closed_book if setting == "closed_book" else self.with_context

    def passage_text(self, passage: Passage) -> str:
        """Return one passage as it is shown: "Title: text", or only its text."""
        # HotpotQA's titles are escaped HTML, its texts are not.
        title = html.unescape(passage.title).strip()
        return f"{title}: {passage.text}" if self.has_titles and title else passage.text

    def context_text(self, passages: Sequence[Passage]) -> str:
        """Return the context that the model, or a rewriter, reads."""
        return self.between.join(map(self.passage_text, passages))


def read_words(path: Path) -> Words | None:
    """Return the words in a file, a JSON object; None if the file contains none."""
    try:
        value = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    names = {"closed_book", "with_context"}
    is_words = isinstance(value, dict) and not names.isdisjoint(value)
    return as_words(value, str(path)) if is_words else None


def as_words(value: Mapping[str, Any], where: str) -> Words:
    """Return `Words` from a mapping of their fields; errors begin with `where`."""
    kinds = get_type_hints(Words)
    for name, given in value.items():
        if name not in kinds:
            raise ValueError(f"{where}: unknown {name!r}; known are {', '.join(kinds)}")
        if not isinstance(given, kinds[name]):
            raise ValueError(
                f"{where}: {name} should be of type {kinds[name].__name__}, found "
                f"{given!r:.80}"
            )
    try:
        return Words(**value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTemplate(Words):
    """Words around questions, and how they are sent."""

    chat: bool = False  # send as a user's message through the chat template
    shots: tuple[Shot, ...] = ()  # come first, in the same words

    def render(self, question: str, context: str | None) -> tuple[str, tuple[int, int]]:
        """Return a prompt's text and the characters `[start, stop)` of its context.

        Without a context, both are where the words around the question begin, after
        the examples. With one, only examples that have a context are shown.
        """
        setting: Setting = "closed_book" if context is None else "with_context"
        if not self.of(setting):
            which = "without" if context is None else "with"
            raise ValueError(
                f"the template has no words for questions {which} passages; add "
                f"{setting} to it"
            )
        if context is None:
            shown = [(shot, None) for shot in self.shots]
        else:
            shown = [(shot, shot.context) for shot in self.shots if shot.context]
            if self.shots and not shown:
                raise ValueError(
                    "none of the worked examples has a context; give one to at least "
                    "one of them, or ask closed-book only"
                )
        examples = (
            f"{self._fill(shot.question, text)[0]} {shot.answer.strip()}\n\n"
            for shot, text in shown
        )
        before = "".join(examples)
        text, (start, stop) = self._fill(question, context)
        return before + text, (start + len(before), stop + len(before))

    def _fill(self, question: str, context: str | None) -> tuple[str, tuple[int, int]]:
        """Return one question in its words, and where its context lies in them."""
        if context is None:
            return self.closed_book.replace("{question}", question), (0, 0)
        # Split first: question and context may contain the placeholders themselves.
        before, after = (
            part.replace("{question}", question)
            for part in self.with_context.split("{context}")
        )
        span = len(before), len(before) + len(context)
        return before + context + after, span


TEMPLATES: dict[TemplateName, PromptTemplate] = {
    # What the microworld's model was taught; each text names its subject, the title.
    "short": PromptTemplate(
        closed_book="Question: {question} Answer:",
        with_context="Context: {context} Question: {question} Answer:",
        between=" ",
        has_titles=False,
    ),
    # Appendix A of the paper, "Answering prompt", where the context is a "retrieved
    # passage" and titles are not mentioned.
    "paper": PromptTemplate(
        closed_book=(
            "Please answer the following question based on your knowledge.\n\n"
            "Question: {question}\n\nDirectly answer with the final answer without "
            "any explanation or reasoning process:"
        ),
        with_context=(
            "{context}\n\nPlease answer the following question based on your "
            "knowledge and the context.\n\nQuestion: {question}\n\nDirectly answer "
            "with the final answer without any explanation or reasoning process:"
        ),
        between="\n",
        has_titles=True,
    ),
    # For base models, which the paper does not use: lines like those of the examples.
    "few-shot": PromptTemplate(
        closed_book="Question: {question}\nAnswer:",
        with_context="Context: {context}\nQuestion: {question}\nAnswer:",
        between="\n",
        has_titles=True,
    ),
}


def words_of(template: TemplateName | Words) -> Words:
    """Return the words of a template, which may be a name or words itself."""
    return template if isinstance(template, Words) else TEMPLATES[template]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """How questions are put to the model."""

    template: TemplateName | Words = "short"  # the words around question and context
    chat: bool = False  # through the chat template, thinking switched off
    overlong: Literal["refuse", "drop-passages"] = "refuse"  # if a prompt is too long
    window: int | None = None  # most prompt and answer tokens; None: the model's limit
    shots: tuple[Shot, ...] = ()  # of the template "few-shot", which needs some

    def __post_init__(self) -> None:
        """Check the choices and that they fit together."""
        check_choices(self)
        has_words = isinstance(self.template, Words)
        if not has_words and self.template not in TEMPLATES:
            raise ValueError(
                f"template: expected {', '.join(TEMPLATES)} or words of your own, "
                f"found {self.template!r}"
            )
        if words_of(self.template).system and not self.chat:
            raise ValueError(
                "system: only a chat has a system message; ask through the model's "
                "chat template, or put its text into the words around the question"
            )
        if self.window is not None and self.window < 2:
            raise ValueError(f"window: expected at least 2 tokens, found {self.window}")
        if (self.template == "few-shot") != bool(self.shots):
            raise ValueError(
                f"shots: the template {self.template_name!r} has {len(self.shots)} "
                "worked examples; the template few-shot needs some, and no other takes "
                "any"
            )

    @property
    def template_name(self) -> str:
        """Return the template's name, or "own" for words of your own."""
        return "own" if isinstance(self.template, Words) else self.template

    @property
    def usual_stop(self) -> tuple[str, ...]:
        """Return the texts that end an answer by default.

        That is a line feed with worked examples, or with own words outside a chat.
        """
        is_line = self.shots or (self.template_name == "own" and not self.chat)
        return ("\n",) if is_line else ()

    def prompt_template(self) -> PromptTemplate:
        """Return the words around question and context."""
        words = vars(words_of(self.template))
        return PromptTemplate(**words | {"chat": self.chat, "shots": self.shots})
