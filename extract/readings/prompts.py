"""Readings of other sequences than the answer's: P(True), drawn answers, swaps.

The prompts of these sequences, and the passes that read a question about the answer and
the states of drawn answers. A pass returns one float32 array per answer, NaN where
there is nothing to read.
"""

import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from beatrice.extract.backbone.layout import LayerPass, watch_layers
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.prompts import (
    PromptModel,
    PromptTemplate,
    build_prompt,
    encode_text,
)
from beatrice.extract.readings.batch import Beginning, begin, final_states
from beatrice.extract.records import Answer, Example, Passage
from beatrice.extract.signals.batch import budget_for, pad_batch
from beatrice.extract.signals.probability import head_of, token_probabilities
from beatrice.extract.signals.sequence import batches_of

_OPTION = " A"


def truth_text(question: str, answer: str, ideas: Sequence[str]) -> str:
    """Return the question whether an answer is true, up to where an option stands.

    The words are those of jlko/semantic_uncertainty (a8d9aa8, p_true.py), after
    Kadavath et al. (2022), without worked examples: those need answers of other
    questions, labelled, which no other detector gets. Passages are not shown, there
    either.
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
    is_single_token = n_chosen == n_plain + 1 and chosen[:n_plain] == plain[:n_plain]
    if not is_single_token or chosen[n_plain] == model.tokenizer.unk_token_id:
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
    first, and behind the last the first. The question is among the others.
    """
    context = example.context(answer.variant)
    n_read = len(context) - len(answer.dropped)
    golds = [gold.strip().casefold() for gold in example.golds if gold.strip()]
    same = [other for other in others if other.dataset == example.dataset]
    at = next(i for i, other in enumerate(same) if other.id == example.id)
    for other in (*same[at + 1 :], *same[:at]):
        passages = other.context(answer.variant)[:n_read]
        words = " ".join(f"{p.title} {p.text}" for p in passages).casefold()
        is_foreign = not _known(passages) & _known(context)
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

    Returns:
      Ids, with the first of `other_passages` with which prompt and answer fit the
      model's window, or None.
    """
    for passages in other_passages(example, answer, others):
        prompt = build_prompt(model.tokenizer, template, example.question, passages)
        n_tokens = len(prompt.ids) + len(answer.token_ids)
        if model.max_length is None or n_tokens <= model.max_length:
            return prompt.ids
    return None


Ids = tuple[int, ...]


def middle_entry(n_layers: int) -> int:
    """Return the middle of the `n_layers + 1` states, as EigenScore's code does.

    0 is the embedding: 16 of 32 layers, 20 of 40 (alibaba/eigenscore at ea8062a).
    """
    return (n_layers + 1) // 2


def _end_states(
    backbone: Backbone,
    sequences: Sequence[Ids],
    entry: int,
    tokens_per_batch: int,
    behind: Beginning | None = None,
) -> torch.Tensor:
    """Return the states at the last tokens, `[n_sequences, d_model]` on the host.

    `entry` is of Transformers' `hidden_states`, the last of which is final-normed;
    `behind` is a beginning of all sequences, which was run before.
    """
    begun = begin(backbone.layout, sequences, behind)
    n_begun = 0 if begun is None else begun.n_tokens
    states = torch.empty((len(sequences), backbone.d_model), dtype=backbone.dtype)
    lengths = [len(ids) - n_begun for ids in sequences]
    for batch in batches_of(lengths, tokens_per_batch, n_beside=n_begun):
        backbone.check_length(len(sequences[batch[0]]))
        rows = [np.array(sequences[i]) for i in batch]
        ids = pad_batch(rows, backbone.device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=ids.device)
        every = torch.arange(len(rows), device=ids.device)
        seen: list[torch.Tensor] = []

        def on_layer(layer_pass: LayerPass) -> None:
            if layer_pass.index + 1 == entry:
                seen.append(layer_pass.h_out[every, ends - n_begun])  # noqa: B023

        with watch_layers(backbone.layout, on_layer):
            final = final_states(backbone.layout, ids, begun)
        if entry == backbone.n_layers:
            seen = [final[every, ends]]
        states[batch] = seen[0].cpu()
    return states


def truth_probabilities(
    backbone: Backbone,
    answers: Sequence[Answer],
    prompts: Sequence[Ids | None],
    tokens_per_batch: int,
) -> list[np.ndarray]:
    """Return P(True) of every answer, a scalar in [0, 1].

    Prompts are ids that end with the token of the option "A"; its probability behind
    the others is read, not renormalised against "B", as the code of semantic
    uncertainty does (jlko/semantic_uncertainty at a8d9aa8).
    """
    result = [np.array(np.nan, np.float32) for _ in answers]
    read = [(i, ids) for i, ids in enumerate(prompts) if ids is not None]
    sequences = [ids[:-1] for _, ids in read]
    if not read:
        return result
    states = _end_states(backbone, sequences, backbone.n_layers, tokens_per_batch)
    budget = budget_for(backbone.device)
    # All at once: what multiplies a state converts the head's weights to do so.
    scalars = token_probabilities(
        states.to(backbone.device),
        torch.tensor([ids[-1] for _, ids in read], device=backbone.device),
        head_of(backbone.model),
        n_tokens_per_chunk=budget.n_tokens_per_chunk,
        n_words_per_block=budget.n_words_per_block,
    )
    for (index, _), value in zip(read, scalars[:, 0].cpu().numpy(), strict=True):
        result[index] = np.array(value)
    return result


def sample_states(
    backbone: Backbone,
    answers: Sequence[Answer],
    drawn: Sequence[Sequence[Ids | None]],
    tokens_per_batch: int,
) -> list[np.ndarray]:
    """Return the middle state at the last token of every drawn answer.

    The last token that is not the stop token: the official code looks for the last id
    above 2, which is the same for its models, and of an answer of one token reads the
    first token of the prompt. Equal draws are read once.

    Returns:
      Per answer `[n_samples, d_model]`; a row of NaN for a draw without tokens, or
      whose ids are not known.
    """
    entry = middle_entry(backbone.n_layers)
    shapes = [(len(draws), backbone.d_model) for draws in drawn]
    result = [np.full(shape, np.nan, np.float32) for shape in shapes]
    prompts = [answer.prompt_ids for answer in answers]
    common = begin(backbone.layout, prompts)
    for rows, prompt, draws in zip(result, prompts, drawn, strict=True):
        # A question at a time: its prompt is run once for all its draws.
        index_of = {ids: i for i, ids in enumerate(dict.fromkeys(filter(None, draws)))}
        sequences = [(*prompt, *ids) for ids in index_of]
        states = _end_states(backbone, sequences, entry, tokens_per_batch, common)
        for draw, ids in enumerate(draws):
            if ids:
                rows[draw] = states[index_of[ids]].float().numpy()
    return result


SECOND_PASSES: dict[str, Callable[..., list[np.ndarray]]] = {
    "p_true": truth_probabilities,
    "sample_states": sample_states,
}
