"""Prompts, and which of their tokens are context.

The span comes from the tokenizer's offsets over the exact ids that the model reads,
never from tokenising a part again: a part alone may split differently.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from extract.generate.chat import render_message
from extract.generate.plaintext import encode_text, refuse_control_tokens
from extract.records import Passage

TemplateName = Literal["short", "paper"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """The words around question and context.

    Attributes:
      closed_book: holds `{question}`.
      with_context: holds `{context}` once, before `{question}`.
      between: separates passages.
      chat: send the words as a user's message through the tokenizer's chat template.
    """

    closed_book: str
    with_context: str
    between: str
    chat: bool = False


TEMPLATES: dict[TemplateName, PromptTemplate] = {
    # What the microworld's model was taught.
    "short": PromptTemplate(
        closed_book="Question: {question} Answer:",
        with_context="Context: {context} Question: {question} Answer:",
        between=" ",
    ),
    # Appendix A of the paper, "Answering prompt".
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
    ),
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The ids the model reads and where the context lies in them.

    Attributes:
      ids: special tokens included.
      context_span: `[start, stop)`; equal numbers, after the leading special
        tokens and a chat's header, where there is no context.
      n_unknown: tokens that stand for text the tokenizer has no word for.
    """

    ids: tuple[int, ...]
    context_span: tuple[int, int]
    n_unknown: int


def check_text(text: str, what: str) -> None:
    """Refuse text that is empty or that no encoding can hold.

    Raises:
      ValueError: `what` is empty or has a lone surrogate.
    """
    if not text.strip():
        raise ValueError(f"{what} is empty; give at least one word")
    for position, character in enumerate(text):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise ValueError(
                f"{what} has the lone surrogate U+{ord(character):04X} at character "
                f"{position}, which is no text; decode the source as UTF-8"
            )


def _render(
    template: PromptTemplate, question: str, context: str | None
) -> tuple[str, tuple[int, int]]:
    """Return the prompt's text and the characters of the context in it."""
    if context is None:
        return template.closed_book.replace("{question}", question), (0, 0)
    before, after = template.with_context.split("{context}")
    start = len(before)
    text = before + context + after.replace("{question}", question)
    return text, (start, start + len(context))


def _token_span(
    offsets: Sequence[tuple[int, int]], characters: tuple[int, int], begin: int
) -> tuple[int, int]:
    """Return the tokens that overlap a range of characters.

    An empty range gives the empty span at the first token behind character `begin`.
    """
    n_leading = next(
        (i for i, (a, b) in enumerate(offsets) if b > a and b > begin), len(offsets)
    )
    inside = [
        i for i, (a, b) in enumerate(offsets)
        if b > a and a < characters[1] and b > characters[0]
    ]  # fmt: skip
    return (inside[0], inside[-1] + 1) if inside else (n_leading, n_leading)


def build_prompt(
    tokenizer: Any,
    template: PromptTemplate,
    question: str,
    passages: Sequence[Passage] = (),
) -> Prompt:
    """Return the prompt of one question.

    Args:
      tokenizer: a fast tokenizer, which can tell offsets.
      template: the words around.
      question: not empty.
      passages: the context; none means closed-book.

    Raises:
      ValueError: a text is empty or no text, the tokenizer has no offsets, or a chat
        is asked for and its template is missing or hides where the message lies, or
        a control token stands in a text of a chat.
    """
    check_text(question, "the question")
    for number, passage in enumerate(passages, start=1):
        check_text(passage.text, f"passage {number}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} has no offsets; "
            "use a model with a fast tokenizer (tokenizer.json)"
        )
    context = template.between.join(p.text for p in passages) if passages else None
    text, characters = _render(template, question, context)
    begin = 0
    if template.chat:
        rendered = render_message(tokenizer, text)
        begin, end = rendered.start, rendered.start + len(text) - rendered.n_cut
        text = rendered.text
        if context is not None:
            start, stop = (max(0, c - rendered.n_trimmed) for c in characters)
            characters = (start + begin, stop + begin)
        # The template writes its own special tokens, as text.
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        refuse_control_tokens(tokenizer, text, encoded, (begin, end))
    else:
        encoded = encode_text(tokenizer, text, add_special_tokens=True)
    ids = tuple(encoded["input_ids"])
    return Prompt(
        ids=ids,
        context_span=_token_span(encoded["offset_mapping"], characters, begin),
        n_unknown=sum(token == tokenizer.unk_token_id for token in ids)
        if tokenizer.unk_token_id is not None
        else 0,
    )
