"""Several drawn answers per question, for the detectors that measure their agreement.

Temperature, top-p and top-k are always written down: left to a checkpoint's defaults,
the published numbers of the same detector differ.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from beatrice.extract.generate.generator import (
    Generator,
    GeneratorPrompt,
    SamplingConfig,
)
from beatrice.extract.generate.options import MAX_SAMPLES
from beatrice.extract.generate.replies import Texts
from beatrice.extract.generate.requests import Request
from beatrice.extract.records import Sample, Setting
from beatrice.extract.run.console import Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """How answers are drawn; defaults follow Farquhar et al. (Nature, 2024)."""

    n_samples: int = 10  # per question, setting and variant
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=0.9, top_k=50)

    def __post_init__(self) -> None:
        """Refuse no draws, and greedy ones."""
        if not 1 <= self.n_samples <= MAX_SAMPLES:
            raise ValueError(
                f"n_samples: expected 1 to {MAX_SAMPLES}, found {self.n_samples}"
            )
        if self.sampling.is_greedy:
            raise ValueError(
                "temperature: expected above 0 for drawn answers, found 0; a greedy "
                "answer would be the same every time"
            )


class Drawn(NamedTuple):
    """Drawn answers, and what they cost.

    Attributes:
      samples: in the order of the requests, those of one together.
      seconds: by setting, a drawn answer's, of one worker and over all starts; None
        where some were drawn before they were timed.
    """

    samples: list[Sample]
    seconds: dict[Setting, float | None]


def request_prompt(
    tokenizer: Any, request: Request, *, as_text: bool = False
) -> GeneratorPrompt:
    """Return a request as a prompt with its exact ids.

    Args:
      tokenizer: of the backbone.
      request: the question.
      as_text: the backend takes text alone and will tokenize it itself.

    Raises:
      ValueError: with `as_text`, the text would become other ids.
    """
    ids = request.prompt.ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if as_text and tuple(tokenizer(text)["input_ids"]) != ids:
        raise ValueError(
            f"question {request.example_id!r}: its text would be read as other tokens "
            "than its prompt has; use a server that takes token ids (vLLM)"
        )
    return GeneratorPrompt(text=text, ids=ids)


def draw_answers(
    requests: Sequence[Request],
    generator: Generator,
    tokenizer: Any,
    replies: Texts,
    config: DrawConfig,
    progress: Update = lambda done, total: None,
    *,
    as_text: bool = False,
) -> Drawn | None:
    """Draw `n_samples` answers to every request, the draws of one request together.

    Returns:
      None where these replies are a share of the texts.
    """
    cells = [(r, k) for r in requests for k in range(config.n_samples)]
    prompts = [
        dataclasses.replace(prompt, sample=k)
        for prompt in (request_prompt(tokenizer, r, as_text=as_text) for r in requests)
        for k in range(config.n_samples)
    ]
    found = replies.generate(generator, prompts, config.sampling, progress)
    if found is None:
        return None
    written = ("text", "token_ids", "stop_id", "log_probs", "finish")
    samples = [
        Sample(
            example_id=request.example_id,
            setting=request.setting,
            variant=request.variant,
            sample=k,
            **{name: getattr(reply, name) for name in written},
        )
        for (request, k), reply in zip(cells, found, strict=True)
    ]
    timed: dict[Setting, list[float | None]] = {}
    for sample, reply in zip(samples, found, strict=True):
        timed.setdefault(sample.setting, []).append(reply.seconds)
    return Drawn(samples, {setting: _mean(each) for setting, each in timed.items()})


def _mean(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) / len(known) if len(known) == len(seconds) else None
