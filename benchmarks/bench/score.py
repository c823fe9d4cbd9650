"""`beatrice bench score`: what one score costs, from the shell to a warm process.

Whole commands run in processes of their own, some times over; of each the least is
shown, in seconds of the clock and of processors (user and system together): other
programs on the machine lengthen the former much and the latter somewhat.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch

from beatrice.benchmarks.bench.commands import AS_JSON, RowPrinter, take_turns

HEAD = ("what", "clock, s", "processors, s", "wanted, s")
_QUESTION, _ANSWER = "who wrote Dracula?", "Bram Stoker"
_LOAD = """
import os, sys, time
import beatrice
from beatrice.pgir.scorer import Scorer
from beatrice.model import LanguageModel
model = LanguageModel(sys.argv[1], dtype="float32")
began, used = time.monotonic(), sum(os.times()[:2])
beatrice.load(sys.argv[1], model=model).scorer
print(time.monotonic() - began, sum(os.times()[:2]) - used)
"""
_RATIOS = """
import sys
import beatrice
from beatrice.benchmarks.bench import score
probe, n = beatrice.load(sys.argv[1]), int(sys.argv[2])
for ratio in (score.warm_ratio, score.answer_ratio):
    print(*ratio(probe, n))
"""
# 32 tokens of SmolLM2's, whose answer is longer than eight.
_MESSAGES = (
    {"role": "system", "content": "Answer."},
    {
        "role": "user",
        "content": "Say what the capital city of France is, and what it is known for.",
    },
)
_N_NEW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCost:
    """What one thing costs."""

    what: str  # the thing
    clock: float  # seconds that it lasted
    processors: float  # seconds of processors, user and system
    wanted: float  # most seconds of the clock

    def cells(self) -> list[str]:
        """Return a row of the table."""
        numbers = (self.clock, self.processors, self.wanted)
        return [self.what, *(f"{x:.2f}" for x in numbers)]


def _least(what: str, wanted: float, measure: Callable[[], Any], n: int) -> ScoreCost:
    """Measure a thing `n` times: the least of either number."""
    costs = [measure() for _ in range(n)]
    clock, processors = map(min, zip(*costs, strict=True))
    return ScoreCost(what=what, clock=clock, processors=processors, wanted=wanted)


def _command(*words: str) -> tuple[float, float]:
    """Run Python with some words; seconds of the clock and of processors."""
    began, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after, clock = os.times(), time.monotonic() - began
    used = (after.children_user, after.children_system)
    return clock, sum(used) - before.children_user - before.children_system


def _measured_inside(*words: str) -> tuple[float, float]:
    """Run a program that prints its two numbers."""
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True)
    clock, processors = map(float, done.stdout.split())
    return clock, processors


def _ratio_in_turns(
    below: Callable[[], Any], above: Callable[[], Any], n: int
) -> tuple[float, float]:
    """Time two things in turn, by one thread, so that both see the same machine.

    Returns:
      The median of `n` ratios of the clock, and of processors.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    turns = take_turns((below, above), n)
    torch.set_num_threads(n_threads)
    clock, processors = np.median(turns[:, 1] / turns[:, 0], axis=0).tolist()
    return clock, processors


@torch.inference_mode()
def warm_ratio(probe: Any, n: int) -> tuple[float, float]:
    """Return the time of a score by that of the bare forward of the same ids."""
    from beatrice.pgir.given import AnswerToScore, prepare

    probed = probe.scorer.probed
    given = AnswerToScore(question=_QUESTION, answer=_ANSWER)
    sequence = prepare(
        probed.backbone.tokenizer,
        probed.template,
        given,
        answer_span=probed.answer_span,
        stop_id=probed.trained.stop_id,
    ).sequence
    ids = torch.tensor([list(map(int, sequence.ids))])
    return _ratio_in_turns(
        lambda: probed.backbone.model(input_ids=ids, use_cache=False),
        lambda: probe.score(_QUESTION, _ANSWER),
        n,
    )


@torch.inference_mode()
def answer_ratio(probe: Any, n: int) -> tuple[float, float]:
    """Return the time of an answer with its P by `model.generate` of the same tokens.

    A model without a chat template is asked by the probe's own.

    Raises:
      ValueError: the two write answers of different length.
    """
    from beatrice.extract.generate.local import stop_ids

    backbone = probe.scorer.probed.backbone
    if backbone.tokenizer.chat_template is None:
        inputs: dict[str, Any] = {"questions": _MESSAGES[1]["content"]}
        questions = [inputs["questions"]]
        (request,) = probe.scorer.probed.requests("closed_book", questions, [()])
        ids = request.prompt.ids
    else:
        inputs = {"messages": _MESSAGES}
        text = probe.render(_MESSAGES)
        ids = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt, stops = torch.tensor([ids]), stop_ids(backbone)
    options = {"max_new_tokens": _N_NEW, "do_sample": False, "repetition_penalty": 1.0}

    def plain() -> int:
        new = backbone.model.generate(prompt, **options)[0, len(ids) :].tolist()
        return sum(token not in stops for token in new)

    def scored() -> int:
        return len(probe.answer(**inputs, max_new_tokens=_N_NEW, stop=[]).tokens)

    if plain() != scored():
        raise ValueError(f"the probe does not write the {plain()} tokens of its model")
    return _ratio_in_turns(plain, scored, n)


@click.command()
@click.argument("probe", default="smollm2")
@click.option("--rounds", default=3, help="Times each is measured.")
@AS_JSON
def score(probe: str, rounds: int, as_json: bool) -> None:
    """Time one score with PROBE, a name of `beatrice probes`.

    Example: beatrice bench score smollm2
    """
    printer = RowPrinter(as_json)
    printer.head(HEAD)
    words = ("-m", "beatrice", "score", "--probe", probe, "--question", _QUESTION)
    _command(*words)  # fetches the model, and remembers its checks
    for what, wanted, measure in (
        ("`import beatrice`", 0.2, lambda: _command("-c", "import beatrice")),
        ("`beatrice score` of a question", 3.5, lambda: _command(*words)),
        ("`load` beside the model", 0.5, lambda: _measured_inside("-c", _LOAD, probe)),
    ):
        printer.row(_least(what, wanted, measure, rounds))
    words = (sys.executable, "-c", _RATIOS, probe, str(3 * rounds))
    done = subprocess.run(words, check=True, capture_output=True)
    for (what, wanted), ratios in zip(
        (
            ("warm score, by the bare forward of its ids (ratio)", 1.3),
            ("warm answer with P, by `model.generate` (ratio)", 1.25),
        ),
        done.stdout.splitlines(),
        strict=True,
    ):
        clock, processors = map(float, ratios.split())
        printer.row(
            ScoreCost(what=what, clock=clock, processors=processors, wanted=wanted)
        )
