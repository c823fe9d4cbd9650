"""The words around a question: templates, and the worked examples before it.

A base model that sees a bare question writes on as if it were a web page. After a few
questions with their answers it answers in kind, and ends its answer with a line.
"""

import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from beatrice.extract.records import Passage

TemplateName = Literal["short", "paper", "few-shot"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shot:
    """A worked example: a question with its answer, and a context where it has one."""

    question: str
    answer: str
    context: str = ""

    def __post_init__(self) -> None:
        """Refuse what would show the model a wrong form."""
        if not (self.question.strip() and self.answer.strip()):
            raise ValueError("a worked example needs a question and an answer")
        if "\n" in self.answer.strip():
            raise ValueError(
                f"a worked example's answer has several lines ({self.answer!r}); the "
                "answer ends with its line"
            )


# Facts that no question set asks for in these words. Contexts are short, for every
# prompt pays for them, and one does not say what is asked in its first words.
SHOTS = (
    Shot(
        question="What is the capital city of Portugal?",
        answer="Lisbon",
        context=(
            "Portugal: Portugal lies on the Atlantic coast of the Iberian Peninsula. "
            "Its capital and largest city is Lisbon."
        ),
    ),
    Shot(
        question="Who painted The Starry Night?",
        answer="Vincent van Gogh",
        context=(
            "The Starry Night: The Starry Night is an oil painting of June 1889 by "
            "Vincent van Gogh."
        ),
    ),
    Shot(
        question="In what year did the Titanic sink?",
        answer="1912",
        context=(
            "Titanic: The liner hit an iceberg on its first voyage and sank on 15 "
            "April 1912."
        ),
    ),
    Shot(
        question="Which element has the chemical symbol K?",
        answer="potassium",
        context="Potassium: Potassium is a soft metal with the symbol K.",
    ),
)


def read_shots(path: Path) -> tuple[Shot, ...]:
    """Return the worked examples of a file: one JSON object per line.

    Args:
      path: of lines with "question", "answer" and, where there is one, "context".

    Raises:
      ValueError: there is no such file, no line, or one that is no example.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the worked examples cannot be read: {error}") from (
            error
        )
    decode = msgspec.json.Decoder(Shot).decode
    shots = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            shots.append(decode(line))
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"question": …, "answer": …, '
                f'"context": … or none}}: {error}'
            ) from None
    if not shots:
        raise ValueError(f"{path}: expected at least one worked example, found none")
    return tuple(shots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """The words around question and context."""

    closed_book: str  # holds `{question}`
    with_context: str  # holds `{context}` once, before `{question}`
    between: str  # separates passages
    # Whether a passage's title stands before its text. Published passages often leave
    # their subject to the title ("It was released in 1994"), and whoever rewrites a
    # context reads what the model reads.
    has_titles: bool
    chat: bool = False  # send as a user's message through the chat template
    shots: tuple[Shot, ...] = ()  # stand first, in the same words

    def passage_text(self, passage: Passage) -> str:
        """Return one passage as it is shown: "Title: text", or its text alone."""
        # HotpotQA's titles are escaped HTML, its texts are not.
        title = html.unescape(passage.title).strip()
        return f"{title}: {passage.text}" if self.has_titles and title else passage.text

    def context_text(self, passages: Sequence[Passage]) -> str:
        """Return the context as the model reads it, and as it is rewritten."""
        return self.between.join(map(self.passage_text, passages))

    def render(self, question: str, context: str | None) -> tuple[str, tuple[int, int]]:
        """Return a prompt's text and the characters `[start, stop)` of its context.

        Without a context both are where the words around the question begin, behind
        the examples. With one, the examples are those that have a context.

        Raises:
          ValueError: there are examples, but none with a context where one is asked.
        """
        if context is None:
            shown = [(shot, None) for shot in self.shots]
        else:
            shown = [(shot, shot.context) for shot in self.shots if shot.context]
            if self.shots and not shown:
                raise ValueError(
                    "none of the worked examples has a context; give one to at least "
                    "one of them (--shots), or ask closed-book only"
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
        before, after = self.with_context.split("{context}")
        text = before + context + after.replace("{question}", question)
        return text, (len(before), len(before) + len(context))


TEMPLATES: dict[TemplateName, PromptTemplate] = {
    # What the microworld's model was taught. Every text of it names its subject, which
    # is its title.
    "short": PromptTemplate(
        closed_book="Question: {question} Answer:",
        with_context="Context: {context} Question: {question} Answer:",
        between=" ",
        has_titles=False,
    ),
    # Appendix A of the paper, "Answering prompt"; it says "retrieved passage", and
    # nothing of titles.
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
    # For base models, which the paper does not use: lines that the examples begin and
    # end in the same way.
    "few-shot": PromptTemplate(
        closed_book="Question: {question}\nAnswer:",
        with_context="Context: {context}\nQuestion: {question}\nAnswer:",
        between="\n",
        has_titles=True,
    ),
}


Overlong = Literal["refuse", "drop-passages"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """How questions are put."""

    template: TemplateName = "short"  # the words around question and context
    chat: bool = False  # through the chat template, thinking switched off
    overlong: Overlong = "refuse"  # what happens to a prompt that does not fit
    window: int | None = None  # most tokens with the answer; None: the model's own
    shots: tuple[Shot, ...] = ()  # of the template "few-shot", which needs some

    def __post_init__(self) -> None:
        """Refuse choices that do not exist."""
        for name, choices in (("template", TemplateName), ("overlong", Overlong)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name}: expected one of {', '.join(get_args(choices))}, found "
                    f"{getattr(self, name)!r}"
                )
        if self.window is not None and self.window < 2:
            raise ValueError(f"window: expected at least 2 tokens, found {self.window}")
        if (self.template == "few-shot") != bool(self.shots):
            raise ValueError(
                f"shots: the template {self.template!r} has {len(self.shots)} worked "
                "examples; the template few-shot needs some, and no other takes any"
            )

    def prompt_template(self) -> PromptTemplate:
        """Return the words around question and context."""
        return dataclasses.replace(
            TEMPLATES[self.template], chat=self.chat, shots=self.shots
        )
