"""The journal of answers, which of them still hold, and what is said of them.

An answer holds if it is to the very prompt that is asked now. Others (of a context that
was rewritten again since) are moved to a file beside, never mixed in.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from beatrice.extract.generate.generator import (
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    plan_of,
)
from beatrice.extract.generate.requests import Request
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Answer, to_json
from beatrice.extract.run.console import Update
from beatrice.extract.run.files import (
    Journal,
    JournalFiles,
    read_json,
    write_json_atomic,
)
from beatrice.extract.run.share import Share

Key = tuple[str, str, str]  # example, setting, variant


def answer_files(
    path: Path, parts: Path, requests: Sequence[Request] | None = None
) -> JournalFiles[Key, Answer]:
    """Return where answers lie.

    Args:
      path: the file of all answers.
      parts: folder of what workers wrote.
      requests: an answer holds if it is to the very prompt of one of them; None takes
        all answers.
    """
    prompts = {request.key: request.prompt.ids for request in requests or ()}
    return JournalFiles(
        path,
        Answer,
        lambda answer: answer.key,
        parts,
        lambda answer: requests is None or prompts.get(answer.key) == answer.prompt_ids,
    )


# How an answer says that it is none; read at its start, after small words are lowered.
# A short list on purpose: it counts what is plainly no answer, and drops nothing.
_HEDGE = re.compile(
    r"\W*((i|we) (do not|don't|don’t|cannot|can't|can’t|am not|am unable|have no)\b"
    r"|i'm (not sure|unable|sorry)|i’m (not sure|unable|sorry)|sorry\b"
    r"|as an? (ai|language model|large language model)\b|it depends\b"
    r"|(it is |this is |the answer is )?"
    r"(not known|unknown|unclear|uncertain|not (mentioned|stated|given|specified)"
    r"|impossible to (say|tell|know))\b"
    r"|there is (no|not enough) (information|answer|context)\b"
    r"|(no|not enough) (information|answer|context)\b|(none|n/a)\W*$)",
    re.IGNORECASE,
)


def is_hedge(text: str) -> bool:
    """Return whether an answer begins by refusing, or by saying that it is unknown.

    By a list of English words: "I don't know", "unknown", "I cannot", "as an AI", "it
    depends", "not mentioned", "no information", and their like. An empty text is none.
    """
    return _HEDGE.match(text) is not None


def shares_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the shares of answers that are cut off, empty, and hedges or refusals.

    Args:
      answers: at least one.
    """
    counts = {
        "cut_off": sum(answer.stop_id is None for answer in answers),
        "empty": sum(not answer.text.strip() for answer in answers),
        "hedged": sum(is_hedge(answer.text) for answer in answers),
    }
    return {name: n / len(answers) for name, n in counts.items()}


_MANY_CUT = 0.1  # of the answers of a setting


def _against_cuts(prompt: PromptConfig, limit: int) -> str:
    """Say how the next run can have whole answers; what this one did is left out."""
    ways = [f"--max-new-tokens above {limit}"]
    if prompt.template != "few-shot":
        ways.append("--template few-shot, whose worked examples have short answers")
    if not prompt.chat:
        ways.append("--chat, if the model is instruction-tuned")
    return "; or ".join(ways)


def answers_in_words(
    answers: Iterable[Answer], limit: int, prompt: PromptConfig
) -> list[str]:
    """Say per setting how many answers were cut at the length limit or are empty.

    Args:
      answers: all of a run.
      limit: most tokens of an answer.
      prompt: how the questions were put.

    Raises:
      ValueError: every answer is empty, so that nothing can be concluded.
    """
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.setting, []).append(answer)
    n_all, lines = sum(map(len, found.values())), []
    if n_all and not any(answer.text for mine in found.values() for answer in mine):
        raise ValueError(
            f"all {n_all} answers are empty: the model ends or cannot go on where its "
            "answer should begin; ask in other words (--template, --chat), look at the "
            "model's weights, and start another run directory"
        )
    for setting, mine in found.items():
        n_cut = sum(answer.stop_id is None for answer in mine)
        n_empty = sum(not answer.text for answer in mine)
        line = f"{setting}: {len(mine)} answers, {n_cut} cut at {limit} tokens, "
        n_hedges = sum(is_hedge(answer.text) for answer in mine)
        lines.append(f"{line}{n_empty} empty, {n_hedges} hedges or refusals")
        if n_cut > _MANY_CUT * len(mine):
            lines[-1] += (
                ". A cut answer is half a text, and mostly labelled wrong: the model "
                "explains or never stops. Make another run with "
                f"{_against_cuts(prompt, limit)}"
            )
    return lines


def record_backend(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write down in a folder of answers which backend answers, or check that it did.

    Raises:
      ValueError: the answers that are there are of another backend; never mixed.
    """
    path = folder / "backend.json"
    # Through JSON, so that tuples and lists compare alike.
    wanted = json.loads(json.dumps(dict(identity)))
    if path.exists():
        # Before the file named a schema there was one only.
        again = "restore it, or delete the folder to answer again"
        found = {"schema": 1, **read_json(path, dict[str, Any], again)}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"{folder} holds answers with {name}={found.get(name)!r}, "
                    f"asked was {wanted.get(name)!r}; start another run directory, or "
                    "delete this folder to answer again"
                )
        return
    if (folder / "answers.jsonl").exists() and wanted["backend"] == "served":
        raise ValueError(
            f"{folder} holds answers of an earlier version, which did not say who "
            "answered; start another run directory to answer by a server"
        )
    write_json_atomic(path, wanted)


def generate(
    generator: Generator, requests: Sequence[Request], sampling: SamplingConfig
) -> Iterator[Answer]:
    """Answer requests; yields each answer as soon as it exists.

    Args:
      generator: any, as long as it tells the ids that it wrote.
      requests: of `make_requests`.
      sampling: greedy in a run; longest answer and stop strings.

    Raises:
      ValueError: the generator tells no ids, or cannot answer.
    """
    for i, reply in generator.stream(prompts_of(requests), sampling):
        yield requests[i].answer(reply)


def prompts_of(requests: Sequence[Request]) -> list[GeneratorPrompt]:
    """Return requests as prompts with their exact ids."""
    prompts = (request.prompt for request in requests)
    return [GeneratorPrompt(text=prompt.text, ids=prompt.ids) for prompt in prompts]


def append_answers(
    journal: Journal[Key, Answer],
    generator: Generator,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    update: Update,
    share: Share = Share(),
) -> None:
    """Answer what has no row yet; a whole share of it in the generator's order.

    Args:
      journal: where the answers go, batch by batch.
      generator: see `plan_of`.
      requests: all of them, also those that are answered: batches are planned over all.
      sampling: as in `generate`.
      update: told rows done and to do.
      share: of the batches.
    """
    prompts = prompts_of(requests)
    batches = plan_of(generator, prompts, sampling)
    batch_of = {i: batch for batch in share.mine(batches) for i in batch}
    todo = {i for i in batch_of if requests[i].key not in journal}
    update(len(batch_of) - len(todo), len(batch_of))
    waiting: dict[int, Answer] = {}
    for i, reply in generator.stream(prompts, sampling, {*range(len(prompts))} - todo):
        if i in todo:
            waiting[i] = requests[i].answer(reply)
            todo.discard(i)
        batch = batch_of.get(i, ())
        if todo.isdisjoint(batch):
            answers = [waiting.pop(k) for k in batch if k in waiting]
            journal.append({answer.key: to_json(answer) for answer in answers})
            update(len(batch_of) - len(todo), len(batch_of))
    if share.is_whole:
        journal.arrange([requests[i].key for batch in batches for i in batch])
