"""Answers from a server, with the exact ids that the extraction reads afterwards."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from extract.generate.answers import AnswerRows
from extract.generate.generator import Generated, Generator, SamplingConfig
from extract.generate.replies import Progress
from extract.generate.requests import Request
from extract.generate.sampling import request_prompt
from extract.records import Answer, to_json
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic


@dataclasses.dataclass(frozen=True)
class TokenizerOnly:
    """A tokenizer alone, where requests are made and a server does the rest.

    Attributes:
      max_length: the model's window in tokens, or None where it sets no limit.
      name: of the model, for messages.
    """

    tokenizer: Any
    max_length: int | None = None
    name: str = "the model"


def claim_answers(run: RunDir, identity: Mapping[str, Any]) -> None:
    """Write down which backend answers, or check that it is still the same.

    Raises:
      ValueError: the answers that are there are of another backend; never mixed.
    """
    path = run.answers / "backend.json"
    # Through JSON, so that tuples and lists compare alike.
    wanted = json.loads(json.dumps(dict(identity)))
    if path.exists():
        # Before the file named a schema there was one only.
        found = {"schema": 1, **json.loads(path.read_text(encoding="utf-8"))}
        differing = [
            name
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{run.answers} holds answers with {name}={found.get(name)!r}, asked "
                f"was {wanted.get(name)!r}; start another run directory, or delete "
                "this folder to answer again"
            )
        return
    if (run.answers / "answers.jsonl").exists() and wanted["backend"] == "served":
        raise ValueError(
            f"{run.answers} holds answers of an earlier version, which did not say who "
            "answered; start another run directory to answer by a server"
        )
    write_json_atomic(path, wanted)


def served_answer(request: Request, found: Generated) -> Answer:
    """Return a served text as an answer.

    Raises:
      ValueError: the server tells no token ids; a text split again may be other ids
        than were written, and the signals those of another answer.
    """
    if found.token_ids is None or (found.finish == "stop" and found.stop_id is None):
        raise ValueError(
            f"the server tells no token ids for question {request.example_id!r}; use "
            "vLLM with the dialect 'vllm' (return_token_ids), or answer on this machine"
        )
    return Answer(
        example_id=request.example_id,
        setting=request.setting,
        variant=request.variant,
        text=found.text,
        prompt_ids=request.prompt.ids,
        token_ids=found.token_ids,
        stop_id=found.stop_id,
        context_span=request.prompt.context_span,
        dropped=request.dropped,
    )


def append_answers(
    rows: AnswerRows,
    requests: Sequence[Request],
    generator: Generator,
    tokenizer: Any,
    config: SamplingConfig,
    progress: Progress = lambda done, total: None,
) -> None:
    """Answer what has no row yet; each row is appended when it exists."""
    done = {i for i, request in enumerate(requests) if request.key in rows.done}
    prompts = [request_prompt(tokenizer, request) for request in requests]
    n_done = len(done)
    progress(n_done, len(requests))
    for i, found in generator.stream(prompts, config, done):
        answer = served_answer(requests[i], found)
        rows.append({answer.key: to_json(answer)})
        n_done += 1
        progress(n_done, len(requests))
