"""Which other sequences are read: a question about the answer, and swapped passages.

Nothing here loads Torch.
"""

import html
from collections.abc import Iterator, Sequence
from typing import Any

from beatrice.extract.generate.prompts import build_prompt, encode_text
from beatrice.extract.generate.requests import PromptModel
from beatrice.extract.generate.templates import PromptTemplate
from beatrice.extract.records import Answer, Example, Passage

_OPTION = " A"


def truth_text(question: str, answer: str, ideas: Sequence[str]) -> str:
    """Return the question whether an answer is true, up to where an option stands.

    The words are those of jlko/semantic_uncertainty (a8d9aa8, p_true.py), after
    Kadavath et al. (2022), without worked examples: those need answers of other
    questions, labelled, which no other detector gets. Passages are not shown, there
    either.

    Args:
      question: that was asked.
      answer: the one that is judged.
      ideas: drawn answers; without any, the answer stands alone among the ideas.
    """
    listed = "".join(f"{idea.strip()}\n" for idea in (*ideas, answer))
    return (
        f"Question: {question}\nBrainstormed Answers: {listed}"
        f"Possible answer: {answer.strip()}\nIs the possible answer:\n"
        "A) True\nB) False\nThe possible answer is:"
    )


def truth_prompt(
    model: PromptModel, question: str, answer: str, ideas: Sequence[str] = ()
) -> tuple[int, ...] | None:
    """Return the ids of `truth_text` and of the option "A" behind it.

    Returns:
      None where nothing can be read: the option is not one known token behind the
      text, the text holds control tokens, or it is longer than the model's window.
    """
    text = truth_text(question, answer, ideas)
    try:
        plain, chosen = (
            tuple(encode_text(model.tokenizer, t, add_special_tokens=True)["input_ids"])
            for t in (text, text + _OPTION)
        )
    except ValueError:
        return None
    n_plain = _without_end(model.tokenizer, plain)
    n_chosen = _without_end(model.tokenizer, chosen)
    is_one = n_chosen == n_plain + 1 and chosen[:n_plain] == plain[:n_plain]
    if not is_one or chosen[n_plain] == model.tokenizer.unk_token_id:
        return None
    is_too_long = model.max_length is not None and n_plain > model.max_length
    return None if is_too_long else chosen[:n_chosen]


def _without_end(tokenizer: Any, ids: tuple[int, ...]) -> int:
    """Return how many ids there are before an end that the tokenizer adds."""
    is_ended = len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
    return len(ids) - int(is_ended)


def _known(passages: Sequence[Passage]) -> set[str]:
    """Return what tells passages apart: titles, or texts where there is no title."""
    names = (html.unescape(p.title).strip() or p.text for p in passages)
    return {name.strip().casefold() for name in names}


def other_passages(
    example: Example, answer: Answer, others: Sequence[Example]
) -> Iterator[tuple[Passage, ...]]:
    """Yield the passages that may stand for a question's own, best first.

    LUMINA's rule is not published. Here: those of another question of the same set, as
    many as the answer was given behind, none with a title of the question's own
    passages and none that holds a gold answer of it; the next question in order comes
    first, and behind the last the first.

    Args:
      example: the question.
      answer: to it, which says how many passages the model read.
      others: questions in a fixed order, the example among them.
    """
    own = example.context(answer.variant)
    n_read = len(own) - len(answer.dropped)
    golds = [gold.strip().casefold() for gold in example.golds if gold.strip()]
    same = [other for other in others if other.dataset == example.dataset]
    at = next(i for i, other in enumerate(same) if other.id == example.id)
    for other in (*same[at + 1 :], *same[:at]):
        passages = other.context(answer.variant)[:n_read]
        words = " ".join(f"{p.title} {p.text}" for p in passages).casefold()
        is_foreign = not _known(passages) & _known(own)
        if (
            len(passages) == n_read
            and is_foreign
            and not any(g in words for g in golds)
        ):
            yield passages


def swapped_prompt(
    model: PromptModel,
    template: PromptTemplate,
    example: Example,
    answer: Answer,
    others: Sequence[Example],
) -> tuple[int, ...] | None:
    """Return the prompt of a question behind another question's passages.

    Args:
      model: gives the tokenizer and the window.
      template: as the answer was asked for.
      example: the question.
      answer: to it.
      others: as in `other_passages`.

    Returns:
      Ids of the first of `other_passages` with which prompt and answer fit the model's
      window, or None where there is none.
    """
    for passages in other_passages(example, answer, others):
        prompt = build_prompt(model.tokenizer, template, example.question, passages)
        n_tokens = len(prompt.ids) + len(answer.token_ids)
        if model.max_length is None or n_tokens <= model.max_length:
            return prompt.ids
    return None
