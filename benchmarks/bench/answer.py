"""Waiting times of users: `beatrice bench answer` and `beatrice bench score`.

`answer`: the cost of signals compared with plain generation. Four ways take turns on
the same prompts in one process: greedy generation; the floor, which is generation that
also computes the logits of the prompt tokens that are read; one pass, which reads all
four families while it generates; and two passes, which generate first and then read.
Ratios are medians over neighbouring turns. Peak memory is measured in separate
processes, above the loaded model and its libraries. If Torch sees a GPU, Qwen3.5-9B and
Gemma 4 E4B follow on it, at full size, with random weights and random prompts.

`score`: the cost of one score, from the shell and in a warm process. Whole commands are
repeated; the minimum is shown, in wall-clock seconds, which other programs lengthen
much, and in CPU seconds, which they lengthen somewhat.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import click
import numpy as np
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from beatrice.benchmarks.bench.commands import (
    DTYPE,
    N_THREADS,
    ROUNDS,
    Row,
    RowPrinter,
    measure_fresh,
    peak_above,
    take_turns,
)
from beatrice.benchmarks.bench.oracle import Numbers
from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import EMBEDDED, ModelDtype, model_path
from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.local import TransformersGenerator, generate
from beatrice.extract.generate.prompts import (
    GenerationConfig,
    Prompt,
    Request,
    build_prompt,
)
from beatrice.extract.generate.templates import (
    SHOTS,
    TEMPLATES,
    PromptConfig,
    PromptTemplate,
)
from beatrice.extract.records import SETTINGS, Passage, Setting
from beatrice.extract.run.console import silence_transformers
from beatrice.extract.run.process import return_freed_memory
from beatrice.extract.run.verbs import AS_JSON
from beatrice.extract.signals.decode import (
    DecodeReading,
    check_decoding,
    generate_and_read,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of
from beatrice.extract.world.facts import (
    QuestionConfig,
    WorldConfig,
    make_examples,
    make_world,
)

Way = Literal["plain", "floor", "one pass", "two passes"]
WAYS: tuple[Way, ...] = get_args(Way)
N_QUESTIONS = 24
N_EMBEDDED = 240  # questions for the embedded model, half of a batch
CONFIG = GenerationConfig(stop=("\n",))


def questions_of(model: str) -> tuple[PromptTemplate, list[tuple[str, Passage]]]:
    """Return a model's prompt template, and questions with a passage each.

    As in real sets, no two questions begin alike: prompts share only worked examples.
    The embedded model is asked about its own world, without worked examples.
    """
    if model == EMBEDDED:
        config = QuestionConfig(n_train=N_EMBEDDED, n_evaluation=1, n_ood=1)
        examples = make_examples(make_world(WorldConfig()), config)[:N_EMBEDDED]
        pairs = [(example.question, example.passages[0]) for example in examples]
        return PromptConfig().prompt_template(), pairs
    passage = (
        "{code} is an international calling code, a prefix for reaching the networks "
        "of another country. It was assigned by the International Telecommunication "
        "Union, which lists it with its zone, its country and the year in which it was "
        "first used; some codes are shared by several countries of one region."
    )
    return dataclasses.replace(TEMPLATES["few-shot"], shots=SHOTS), [
        (
            f"{code} is the international calling code of which country?",
            Passage(title=f"{code}", text=passage.format(code=code)),
        )
        for code in range(30, 30 + N_QUESTIONS)
    ]


def requests_of(tokenizer: Any, model: str, setting: Setting) -> list[Request]:
    """Return a model's prompts in a setting; with context, each has a passage."""
    template, questions = questions_of(model)
    shown = setting == "with_context"
    prompts = (
        build_prompt(tokenizer, template, question, [passage] if shown else [])
        for question, passage in questions
    )
    return _requests(prompts, setting)


def _requests(prompts: Iterable[Prompt], setting: Setting) -> list[Request]:
    return [
        Request(example_id=str(i), setting=setting, variant="original", prompt=prompt)
        for i, prompt in enumerate(prompts)
    ]


class Floor(DecodeReading):
    """Computes the logits of the tokens that are read, but reads no signals."""

    @contextlib.contextmanager
    def watching(self, rows: Sequence[int], n_cached: int) -> Iterator[None]:
        """Watch only the decoder's final states."""
        self._begin_run(rows, n_cached)
        with self._layout.decoder.register_forward_hook(self._after_decoder):
            yield

    def _after_decoder(self, module: Any, inputs: Any, output: Any) -> None:
        states = output.last_hidden_state
        self._n_step = states.shape[1]
        if self._n_step - self._first > 1:
            is_read = self._is_read()[self._index, self._columns()]
            self._layout.head(states[:, self._first :][is_read])

    def on_choice(self, ids: torch.Tensor, is_done: torch.Tensor) -> None:
        """Go on to the next step."""
        self._begin_step(ids.shape[1] - 1)


# The two backbones of the paper at full size, with random weights.

# Differences from the classes' defaults; a test counts parameters.
_QWEN = {
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,  # the class's default is 1e4
        "partial_rotary_factor": 0.25,
    },
}
_GEMMA = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "global_head_dim": 512,
    "num_kv_shared_layers": 18,
    "final_logit_softcapping": 30.0,
}
# Name -> model class, config class, and differences from the defaults.
FULL_MODELS: Mapping[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "Qwen3.5-9B": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _QWEN),
    "Gemma 4 E4B": (Gemma4ForCausalLM, Gemma4TextConfig, _GEMMA),
}


def full_model(name: str, device: str) -> PreTrainedModel:
    """Create a model of `FULL_MODELS` on a device, in bfloat16 with random weights."""
    model_class, config_class, sizes = FULL_MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(config_class(**sizes), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = 1  # released models have one, too
    # Gemma norms queries and keys but does not scale their products: with random
    # weights, each query would pick a single key, and rounding another one.
    for path, weights in model.named_parameters():
        if path.endswith("q_norm.weight"):
            weights.mul_(weights.numel() ** -0.5)
    return model


# Tokens of random prompts: in the shared beginning, the context and the question.
N_TOKENS = 128, 300, 40


def random_requests(
    n_words: int, setting: Setting, n: int, n_tokens: tuple[int, int, int]
) -> list[Request]:
    """Return `n` prompts of random tokens; with context, each has a context."""
    rng = np.random.default_rng(0)
    n_shared, n_context, n_question = n_tokens
    if setting == "closed_book":
        n_context = 0
    start = rng.integers(3, n_words, n_shared).tolist()
    ends = (rng.integers(3, n_words, n_context + n_question) for _ in range(n))
    context = n_shared, n_shared + n_context
    return _requests(
        (Prompt((*start, *end.tolist()), context) for end in ends), setting
    )


class AnswerBench:
    """A model and prompts, which it answers in four ways."""

    def __init__(self, backbone: Backbone, requests: Sequence[Request]) -> None:
        """Take a model and its prompts; callers warm up each way themselves."""
        self.backbone, self.requests = backbone, requests
        self.reader = SignalReader(backbone, (backbone.n_layers // 2,))

    @classmethod
    def of(cls, model: str, dtype: ModelDtype, setting: Setting) -> "AnswerBench":
        """Load a model by name, with its prompts for a setting."""
        silence_transformers()
        backbone = load_backbone(model_path(model), dtype=dtype)
        return cls(backbone, requests_of(backbone.tokenizer, model, setting))

    def peak(self, way: Way) -> float | None:
        """Return the peak memory of one way, see `peak_above`."""
        return peak_above(lambda: self.run(way), self.backbone.device.type)

    def run(self, way: Way) -> None:
        """Answer all prompts in one way."""
        if way == "one pass":
            generate_and_read(self.reader, self.requests, CONFIG)
        elif way == "floor":
            self._floor()
        else:
            answers = generate(self.backbone, self.requests, CONFIG)
            if way == "two passes":
                self.reader.forget_beginning()  # other ways recompute it
                self.reader.read([sequence_of(answer) for answer in answers])

    def _floor(self) -> None:
        generator = TransformersGenerator(backbone=self.backbone)
        sampling = SamplingConfig(
            max_new_tokens=CONFIG.max_new_tokens, stop=CONFIG.stop
        )
        prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in self.requests]
        for batch in generator.plan(prompts, sampling):
            watch = Floor(
                self.reader,
                [self.requests[i].prompt for i in batch],
                CONFIG.max_new_tokens,
            )
            generator.write([prompts[i] for i in batch], sampling, watch)


def measure_peak(
    model: str, dtype: ModelDtype, setting: Setting, way: Way
) -> float | None:
    """Return one way's peak memory above the loaded model; call it in a new process."""
    torch.set_num_threads(N_THREADS)  # only this measurement uses the process
    bench = AnswerBench.of(model, dtype, setting)
    return_freed_memory()  # memory kept by glibc after loading would hide the need
    # The first pass brings the weights, which are pages of a file, into memory.
    generate_and_read(bench.reader, bench.requests[:1], CONFIG)
    return bench.peak(way)


def measure_setting(
    bench: AnswerBench, n_rounds: int, peak: Callable[[Way], float | None]
) -> Row:
    """Time the four ways in turns on one setting's prompts; `peak` gives a way's MiB.

    Ratios are medians over neighbouring turns, of wall-clock and (those named
    "processors") of CPU time, which other programs affect less.
    """
    if (reason := check_decoding(bench.reader)) is not None:
        raise ValueError(reason)
    turns = take_turns([lambda way=way: bench.run(way) for way in WAYS], n_rounds)
    # Medians of ratios within a round, [clock or CPU, denominator, numerator].
    ratios = np.median(turns[:, :, None] / turns[:, None], axis=0).T.tolist()
    plain, floor, single, double = range(len(WAYS))
    answers = generate(bench.backbone, bench.requests, CONFIG)
    return {
        "setting": bench.requests[0].setting,
        "prompt tokens": sum(len(answer.prompt_ids) for answer in answers),
        "new tokens": sum(len(answer.token_ids) for answer in answers),
        "plain s": float(np.median(turns[:, plain, 0])),
        "floor ÷ plain": ratios[0][plain][floor],
        "one pass ÷ floor": ratios[0][floor][single],
        "one pass ÷ plain": ratios[0][plain][single],
        "two passes ÷ plain": ratios[0][plain][double],
        "one pass ÷ floor, processors": ratios[1][floor][single],
        "one pass ÷ plain, processors": ratios[1][plain][single],
        "MiB plain": peak("plain"),
        "MiB one pass": peak("one pass"),
    }


def measure_model(
    name: str,
    model: PreTrainedModel,
    n_rounds: int,
    *,
    n_requests: int = 48,
    n_tokens: tuple[int, int, int] = N_TOKENS,
) -> Iterator[Row]:
    """Measure a model on its device in both settings; for `n_tokens` see `N_TOKENS`."""
    backbone = Backbone.from_model(model, Numbers(), revision="random")
    n_words = backbone.layout.head.out_features
    for setting in SETTINGS:
        requests = random_requests(n_words, setting, n_requests, n_tokens)
        bench = AnswerBench(backbone, requests)
        yield {"model": name, **measure_setting(bench, n_rounds, bench.peak)}


@click.command()
@click.option("--model", default="embedded", help="A path, a GGUF file or a Hub id.")
@DTYPE
@ROUNDS
@AS_JSON
def answer(model: str, dtype: ModelDtype, rounds: int, as_json: bool) -> None:
    """Time answers with their signals against plain generation; print a table.

    With a GPU, also time Qwen3.5-9B and Gemma 4 E4B at full size with random weights.

    Example: beatrice bench answer --model embedded
    """
    torch.set_num_threads(N_THREADS)
    printer = RowPrinter(as_json)
    for setting in SETTINGS:
        bench = AnswerBench.of(model, dtype, setting)
        about = "the peak of a way", measure_peak, model, dtype, setting
        printer.row(measure_setting(bench, rounds, partial(measure_fresh, *about)))
    for name in FULL_MODELS if torch.cuda.is_available() else ():
        for row in measure_model(name, full_model(name, "cuda"), rounds):
            printer.row(row)


_QUESTION, _ANSWER = "who wrote Dracula?", "Bram Stoker"
# 32 tokens for SmolLM2, whose answer is longer than `_N_NEW` tokens.
_MESSAGES = (
    {"role": "system", "content": "Answer."},
    {
        "role": "user",
        "content": "Say what the capital city of France is, and what it is known for.",
    },
)
_N_NEW = 8


def _command(*words: str) -> tuple[float, float]:
    """Run Python with some arguments; return wall-clock and CPU seconds."""
    began, before = time.monotonic(), os.times()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    after, clock = os.times(), time.monotonic() - began
    if done.returncode:
        message = done.stderr.strip().rpartition("\n")[2].removeprefix("Error: ")
        raise ValueError(f"the timed command has failed: {message}")
    used = (after.children_user, after.children_system)
    return clock, sum(used) - before.children_user - before.children_system


def _load_times(name: str) -> tuple[float, float]:
    """Load a probe for a loaded model; return wall-clock and CPU seconds."""
    import beatrice
    import beatrice.pgir.scorer  # so that importing libraries is not timed
    from beatrice.model import LanguageModel

    model = LanguageModel(name, dtype="float32")
    began, used = time.monotonic(), time.process_time()
    _ = beatrice.load(name, model=model).scorer
    return time.monotonic() - began, time.process_time() - used


def _ratio_in_turns(
    below: Callable[[], Any], above: Callable[[], Any], n: int
) -> tuple[float, float]:
    """Return the median of `n` ratios of clock and of CPU time, on one thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = take_turns((below, above), n)
    finally:
        torch.set_num_threads(n_threads)
    clock, processors = np.median(turns[:, 1] / turns[:, 0], axis=0).tolist()
    return clock, processors


@torch.inference_mode()
def warm_ratio(probe: Any, n: int, *, is_first: bool) -> tuple[float, float]:
    """Return the time of a score divided by that of a bare forward of all its ids.

    A first score (`is_first`) also runs them all; a later one runs only the ids after
    the beginning that all questions share, whose states the reader keeps.
    """
    from beatrice.pgir.given import AnswerToScore

    given = AnswerToScore(question=_QUESTION, answer=_ANSWER)
    probed = probe.scorer.probed
    ids = torch.tensor([probe.scorer.prepare(given).sequence.ids.tolist()])

    def score() -> None:
        if is_first:
            probed.reader.forget_beginning()
        probe.score(_QUESTION, _ANSWER)

    return _ratio_in_turns(
        lambda: probed.backbone.model(input_ids=ids, use_cache=False), score, n
    )


@torch.inference_mode()
def answer_ratio(probe: Any, n: int) -> tuple[float, float]:
    """Return the time of an answer with P by `model.generate`'s for the same tokens."""
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

    if (n_tokens := plain()) != scored():
        raise ValueError(f"the probe does not generate its model's {n_tokens} tokens")
    return _ratio_in_turns(plain, scored, n)


def warm_ratios(name: str, n: int) -> list[tuple[float, float]]:
    """Return a probe's time ratios: of a first score, a later one, and an answer."""
    import beatrice

    probe = beatrice.load(name)
    scores = [warm_ratio(probe, n, is_first=x) for x in (True, False)]
    return [*scores, answer_ratio(probe, n)]


@click.command()
@click.argument("probe", default="smollm2")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, help="Runs of each measurement."
)
@AS_JSON
def score(probe: str, rounds: int, as_json: bool) -> None:
    """Time one score with PROBE, a name of `beatrice probes`.

    Example: beatrice bench score smollm2
    """
    printer = RowPrinter(as_json)

    def show(
        what: str, wanted: float | None, costs: Sequence[tuple[float, float]]
    ) -> None:
        clock, processors = map(min, zip(*costs, strict=True))
        numbers = {"clock, s": clock, "processors, s": processors, "wanted, s": wanted}
        printer.row({"what": what, **numbers})

    words = ("-m", "beatrice", "score", "--probe", probe, "--question", _QUESTION)
    _command(*words)  # downloads the model, and caches its checks
    load = partial(measure_fresh, "a load", _load_times, probe)
    for what, wanted, measure in (
        ("`import beatrice`", 0.2, lambda: _command("-c", "import beatrice")),
        ("`beatrice score` of a question", 3.5, lambda: _command(*words)),
        ("`load` with the model in memory", 0.5, load),
    ):
        show(what, wanted, [measure() for _ in range(rounds)])
    first, later, answered = measure_fresh(
        "warm scores", warm_ratios, probe, 3 * rounds
    )
    show("warm score, by the bare forward of its ids (ratio)", 1.3, [first])
    show("the same after a score that begins alike (ratio)", None, [later])
    show("warm answer with P, by `model.generate` (ratio)", 1.25, [answered])
