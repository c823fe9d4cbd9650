"""What rival detectors read beyond the four families, in passes of their own.

The exact ids of prompt and answer are read once more, batch by batch; each group of
readings (`Part`) reduces what it sees at once. The model attends with its own kernel
unless attention is read. P(True), drawn answers and swapped passages need other
sequences; their prompts and passes are defined here. A pass returns one float32 array
per answer, NaN if there is nothing to read.
"""

import functools
import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.local import cache_for_rows
from beatrice.extract.generate.prompts import PromptModel, build_prompt, encode_text
from beatrice.extract.generate.templates import PromptTemplate
from beatrice.extract.readings.batch import (
    Batch,
    Beginning,
    Part,
    begin,
    cue_length,
    final_states,
)
from beatrice.extract.readings.formulas import PARTS
from beatrice.extract.records import Answer, Example, Passage
from beatrice.extract.signals.attention import CallReading, run_decoder
from beatrice.extract.signals.batch import budget_for, pad_batch
from beatrice.extract.signals.probability import head_of, token_probabilities
from beatrice.extract.signals.sequence import batches_of
from beatrice.extract.signals.span_sums import Attention, AttentionCall, row_chunks

Ids = tuple[int, ...]
PickState = Callable[[LayerPass], torch.Tensor | None]
_OPTION = " A"


def truth_text(question: str, answer: str, ideas: Sequence[str]) -> str:
    """Return a prompt that asks whether an answer is true, up to the chosen option.

    The wording is that of jlko/semantic_uncertainty (a8d9aa8, p_true.py), after
    Kadavath et al. (2022); passages are not shown there either. It has no worked
    examples, whose labelled answers to other questions no other detector gets.
    """
    listed = "".join(f"{idea.strip()}\n" for idea in (*ideas, answer))
    return (
        f"Question: {question}\nBrainstormed Answers: {listed}"
        f"Possible answer: {answer.strip()}\nIs the possible answer:\n"
        "A) True\nB) False\nThe possible answer is:"
    )


def truth_prompt(
    model: PromptModel, question: str, answer: str, ideas: Sequence[str] = ()
) -> Ids | None:
    """Return the ids of `truth_text` followed by the option "A".

    Returns None if nothing can be read: the option is not a single known token after
    the text, the text has control tokens, or it is longer than the model's window.
    """
    text = truth_text(question, answer, ideas)
    try:
        plain, chosen = (
            encode_text(model.tokenizer, t, add_special_tokens=True).ids
            for t in (text, text + _OPTION)
        )
    except ValueError:
        return None
    if chosen[:-1] != plain or chosen[-1] == model.tokenizer.unk_token_id:
        return None
    is_too_long = model.max_length is not None and len(plain) > model.max_length
    return None if is_too_long else chosen


def _known(passages: Sequence[Passage]) -> set[str]:
    """Return identifiers of passages: their titles, or texts if there is no title."""
    names = (html.unescape(p.title).strip() or p.text for p in passages)
    return {name.strip().casefold() for name in names}


# By id: the questions of the same set, and the question's index among them.
Neighbours = Mapping[str, tuple[Sequence[Example], int]]


def neighbours_of(examples: Iterable[Example]) -> Neighbours:
    """Return the position of every question among those of its set."""
    sets: dict[str, list[Example]] = {}
    places: dict[str, tuple[Sequence[Example], int]] = {}
    for example in examples:
        same = sets.setdefault(example.dataset, [])
        places[example.id] = same, len(same)
        same.append(example)
    return places


def other_passages(
    example: Example, answer: Answer, neighbours: Neighbours
) -> Iterator[tuple[Passage, ...]]:
    """Yield passages that may replace a question's own, best first.

    LUMINA's rule is not published. This one takes the passages of another question of
    the same set, as many as the answer was given with; none may have a title of the
    question's own passages or contain a gold answer to it, be it inside a word: "no" is
    in "known", and a gold "S" leaves hardly any. Measured results have this rule. The
    next questions in order come first, starting again at the first after the last.
    """
    context = example.context(answer.variant)
    n_read = len(context) - len(answer.dropped)
    golds = [gold.strip().casefold() for gold in example.golds if gold.strip()]
    same, at = neighbours[example.id]
    for step in range(1, len(same)):
        other = same[(at + step) % len(same)]
        passages = other.context(answer.variant)[:n_read]
        words = " ".join(f"{p.title} {p.text}" for p in passages).casefold()
        is_own = _known(passages) & _known(context) or any(g in words for g in golds)
        if len(passages) == n_read and not is_own:
            yield passages


def swapped_prompt(
    model: PromptModel,
    template: PromptTemplate,
    example: Example,
    answer: Answer,
    neighbours: Neighbours,
) -> Ids | None:
    """Return the ids of a prompt with another question's passages.

    These are the first of `other_passages` with which prompt and answer fit into the
    model's window; None if there are none.
    """
    for passages in other_passages(example, answer, neighbours):
        prompt = build_prompt(model.tokenizer, template, example.question, passages)
        n_tokens = len(prompt.ids) + len(answer.token_ids)
        if model.max_length is None or n_tokens <= model.max_length:
            return prompt.ids
    return None


def middle_entry(n_layers: int) -> int:
    """Return the index of the middle of `n_layers + 1` states, as EigenScore does.

    0 is the embedding: 16 of 32 layers, 20 of 40 (alibaba/eigenscore at ea8062a).
    """
    return (n_layers + 1) // 2


def hidden_state(backbone: Backbone, entry: int) -> PickState:
    """Return a function that picks an entry of Transformers' `hidden_states`."""

    def pick(layer_pass: LayerPass) -> torch.Tensor | None:
        is_read = layer_pass.index + 1 == entry < backbone.n_layers
        return layer_pass.h_out if is_read else None

    return pick


@torch.no_grad()
def end_states(
    backbone: Backbone,
    sequences: Sequence[Ids],
    pick: PickState,
    tokens_per_batch: int,
    behind: Beginning | None = None,
) -> torch.Tensor:
    """Return the states at the last tokens, `[n_sequences, d_model]` on the host.

    For each layer, `pick` returns states to read, `[n_examples, n_tokens, d_model]`, or
    None; if it picks none at all, the final-normed states are read. `behind` is a
    beginning of all sequences that was run before.
    """
    begun = begin(backbone.layout, sequences, behind, is_seen=False)
    n_begun = 0 if begun is None else begun.n_tokens
    room = len(sequences), backbone.d_model
    states = torch.empty(room, dtype=backbone.dtype, device="cpu")
    lengths = [len(ids) - n_begun for ids in sequences]

    def read_rows(rows: list[int]) -> torch.Tensor:
        ids = pad_batch([np.array(sequences[i]) for i in rows], backbone.device)
        at = torch.arange(len(rows)), torch.tensor([lengths[i] - 1 for i in rows])
        seen: list[torch.Tensor] = []

        def on_layer(layer_pass: LayerPass) -> None:
            if (picked := pick(layer_pass)) is not None:
                seen.append(picked[at])

        cache = None if begun is None else cache_for_rows(begun.cache, len(rows))
        rest = ids[:, n_begun:]  # what follows the beginning
        final = run_decoder(backbone.layout, rest, on_layer=on_layer, cache=cache)
        return (seen[0] if seen else final[at]).cpu()

    for batch in batches_of(lengths, tokens_per_batch, n_beside=n_begun):
        backbone.check_length(len(sequences[batch[0]]))
        parts = backbone.splitter.run(read_rows, batch, lambda i: len(sequences[i]))
        for rows, ends in parts:
            states[rows] = ends
    return states


def truth_probabilities(
    backbone: Backbone,
    answers: Sequence[Answer],
    prompts: Sequence[Ids | None],
    tokens_per_batch: int,
) -> list[np.ndarray]:
    """Return P(True) of every answer, a scalar in [0, 1].

    `prompts` are ids that end with the token of the option "A". Its probability is read
    without renormalising against "B", as in the code of semantic uncertainty
    (jlko/semantic_uncertainty at a8d9aa8).
    """
    result = [np.array(np.nan, np.float32) for _ in answers]
    read = [(i, ids) for i, ids in enumerate(prompts) if ids is not None]
    sequences = [ids[:-1] for _, ids in read]
    if not read:
        return result
    states = end_states(backbone, sequences, lambda _: None, tokens_per_batch)
    # All at once, since the product with the states converts the head's weights.
    scalars = token_probabilities(
        states.to(backbone.device),
        torch.tensor([ids[-1] for _, ids in read], device=backbone.device),
        head_of(backbone.model),
        budget_for(backbone.device),
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

    That is the last token before the stop token. The official code looks for the last
    id above 2, which is the same for its models; for an answer of one token, it reads
    the prompt's first token. Equal draws are read once. Returns `[n_samples, d_model]`
    per answer; NaN for draws without tokens or with unknown ids.
    """
    pick = hidden_state(backbone, middle_entry(backbone.n_layers))
    width = backbone.d_model
    result = [np.full((len(draws), width), np.nan, np.float32) for draws in drawn]
    prompts = [answer.prompt_ids for answer in answers]
    common = begin(backbone.layout, prompts, is_seen=False)
    for rows, prompt, draws in zip(result, prompts, drawn, strict=True):
        # One question at a time: its prompt is run once for all its draws.
        index_of = {ids: i for i, ids in enumerate(dict.fromkeys(filter(None, draws)))}
        sequences = [(*prompt, *ids) for ids in index_of]
        states = end_states(backbone, sequences, pick, tokens_per_batch, common)
        for draw, ids in enumerate(draws):
            if ids:
                rows[draw] = states[index_of[ids]].float().numpy()
    return result


SECOND_PASSES: dict[str, Callable[..., list[np.ndarray]]] = {
    "p_true": truth_probabilities,
    "sample_states": sample_states,
}
READINGS = tuple(n for part in PARTS for n in part.names) + tuple(SECOND_PASSES)
# Answers in memory at once; those of similar length among them are read together.
_N_AHEAD = 256
_TOKENS_PER_BATCH = 4096


def _show_weights(
    batch: Batch, parts: Sequence[Part], first: int, layer: int, call: Attention
) -> None:
    """Pass a layer's log attention weights to parts, in chunks of rows from `first`."""
    if isinstance(call, AttentionCall) and batch.beginning is not None:
        call = batch.beginning.before_call(layer, call)
    call = call.prepared()
    n_examples, n_heads, n_tokens = call.shape
    per_row, budget = n_examples * n_heads * n_tokens, batch.budget.n_attention_weights
    for start, stop in row_chunks((first, n_tokens), per_row, budget):
        log_weights = call.log_weights(start, stop)
        for part in parts:
            part.on_weights(layer, log_weights, start)


def read(
    backbone: Backbone,
    answers: Sequence[Answer],
    names: Sequence[str],
    *,
    swapped: Sequence[Ids | None] | None = None,
    truth_prompts: Sequence[Ids | None] | None = None,
    drawn: Sequence[Sequence[Ids | None]] | None = None,
    n_cue: int | None = None,
    tokens_per_batch: int = _TOKENS_PER_BATCH,
) -> Iterator[dict[str, np.ndarray]]:
    """Read the answers again and reduce what is seen to the requested readings.

    Args:
      backbone: the model that gave the answers.
      answers: answers of one setting.
      names: some of `READINGS`, each explained at the part that returns it.
      swapped: for "lumina_mmd", one per answer: the ids of the same prompt with other
        passages, see `swapped_prompt`.
      truth_prompts: for "p_true", one per answer, see `truth_prompt`.
      drawn: for "sample_states", the token ids of each answer's draws.
      n_cue: for "lookback", see `cue_length`; None derives it from these answers, so
        pass it if answers are read in several calls.
      tokens_per_batch: most tokens per batch, with padding; a longer sequence forms a
        batch by itself. Readings do not depend on it, up to rounding.

    Yields:
      For each answer, in order, float32 arrays by name; NaN if a reading is undefined,
      such as for an answer without tokens.
    """
    wanted = frozenset(names)
    if unknown := sorted(wanted - set(READINGS)):
        raise ValueError(
            f"unknown readings: {', '.join(unknown)}; known: {', '.join(READINGS)}"
        )
    given = {"lumina_mmd": swapped, "p_true": truth_prompts, "sample_states": drawn}
    for name in wanted & set(given):
        if given[name] is None or len(given[name]) != len(answers):
            n_given = "none" if given[name] is None else len(given[name])
            raise ValueError(
                f"the reading {name!r} needs its argument for each of {len(answers)} "
                f"answers, found {n_given}; see `extract.readings.reader.read`"
            )
    cue = cue_length(answers) if n_cue is None else n_cue
    for start in range(0, len(answers), _N_AHEAD):
        ahead = slice(start, start + _N_AHEAD)
        inputs = {name: given[name][ahead] for name in wanted & set(given)}
        yield from _read_some(
            backbone, answers[ahead], wanted, inputs, cue, tokens_per_batch
        )


@torch.no_grad()
def _read_some(
    backbone: Backbone,
    answers: Sequence[Answer],
    wanted: frozenset[str],
    inputs: dict[str, Any],
    n_cue: int,
    tokens_per_batch: int,
) -> list[dict[str, np.ndarray]]:
    readings: list[dict[str, np.ndarray]] = [{} for _ in answers]
    swapped = inputs.get("lumina_mmd", [None] * len(answers))
    kinds = [kind for kind in PARTS if wanted & set(kind.names)]
    lengths = [
        max(len(answer.prompt_ids), len(other or ())) + len(answer.token_ids)
        for answer, other in zip(answers, swapped, strict=True)
    ]
    prompts = [answer.prompt_ids for answer in answers]
    prompts += [other for other in swapped if other is not None]
    begun = begin(backbone.layout, prompts) if kinds else None
    n_begun = 0 if begun is None else begun.n_tokens
    behind = [n - n_begun for n in lengths] if kinds else []

    def read_rows(rows: list[int]) -> dict[str, list[torch.Tensor]]:
        batch = Batch(
            backbone=backbone,
            answers=[answers[i] for i in rows],
            swapped=[swapped[i] for i in rows],
            n_cue=n_cue,
            budget=budget_for(backbone.device),
            beginning=begun,
        )
        return _read_batch(batch, kinds, wanted)

    for indices in batches_of(behind, tokens_per_batch, n_beside=n_begun):
        backbone.check_length(lengths[indices[0]])
        parts = backbone.splitter.run(read_rows, indices, lengths.__getitem__)
        for rows, by_name in parts:
            for name, values in by_name.items():
                for index, value in zip(rows, values, strict=True):
                    readings[index][name] = value.float().cpu().numpy()
    for name, second_pass in SECOND_PASSES.items():
        if name in wanted:
            values = second_pass(backbone, answers, inputs[name], tokens_per_batch)
            for index, value in enumerate(values):
                readings[index][name] = value
    return readings


def _read_batch(
    batch: Batch, kinds: Sequence[type[Part]], wanted: frozenset[str]
) -> dict[str, list[torch.Tensor]]:
    parts, reading = [kind(batch, wanted) for kind in kinds], None
    layout, begun = batch.backbone.layout, batch.beginning

    def on_layer(layer_pass: LayerPass) -> None:
        if begun is not None:
            layer_pass = begun.before_pass(layer_pass)
        for part in parts:
            part.on_layer(layer_pass)

    if readers := [part for part in parts if part.reads_weights]:
        first = max(0, min(part.first_row() for part in readers))
        show = functools.partial(_show_weights, batch, readers, first)
        n_tokens, budget = batch.ids.shape[1], batch.budget.n_attention_weights
        reading = CallReading(n_tokens, layout.attention_layers, budget, see=show)
    final = final_states(layout, batch.ids, begun, on_layer, reading)
    readings: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        readings |= part.finish(final)
    return readings
