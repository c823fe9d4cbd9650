"""`beatrice bench extract`: reading and storing on this CPU, and at full size on a GPU.

On a CPU, the model is random and Llama-shaped. Bare forward and reading take turns on
the same batch, so that a busy machine slows both; each peak memory is measured in its
own process, above what the loaded model and the libraries hold. Then a loop that reads
every batch of a plan and discards the readings takes turns with `extract` itself, which
on the same plan also rounds readings to the stored type and writes them with their
checksums and commit records.

On a GPU, the reading's rate is also compared with the peak, and a profile shows where
the rest of the time goes, for two backbones of the released sizes with random weights,
which do not affect the cost of a reading. With `--model`, one model answers prompts
with worked examples, and its answers are read, compared with the bare forward.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from beatrice.benchmarks.bench.answer import (
    CONFIG,
    FULL_MODELS,
    N_QUESTIONS,
    full_model,
    requests_of,
)
from beatrice.benchmarks.bench.commands import (
    DTYPE,
    N_THREADS,
    ROUNDS,
    Row,
    RowPrinter,
    measure_fresh,
    middle_and_ends,
    peak_above,
    product_rate,
    take_turns,
)
from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import EMBEDDED, ModelDtype, model_path
from beatrice.extract.generate.local import generate
from beatrice.extract.run.console import Progress, silence_transformers
from beatrice.extract.run.process import keep_freed_memory
from beatrice.extract.run.verbs import AS_JSON
from beatrice.extract.signals.extract import (
    ExtractConfig,
    plan_extraction,
    read_batches,
    run_plan,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import TokenSequence, sequence_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sizes of one batch and of the model that reads it."""

    n_tokens: int = 512  # length of every sequence
    n_examples: int = 4  # sequences of the batch
    # Question and answer tokens, at the end; the context is before them.
    n_read: int = 192
    vocab_size: int = 32000
    d_model: int = 512
    n_layers: int = 8  # decoder layers
    device: str = "cpu"  # a Torch device
    dtype: ModelDtype = "float32"  # of weights and residual stream


# Both batches hold equally many tokens; about a third are question and answer.
LENGTHS = (
    {"n_tokens": 512, "n_examples": 4, "n_read": 192},
    {"n_tokens": 2048, "n_examples": 1, "n_read": 576},
)


def batch_configs(*, has_gpu: bool) -> list[BatchConfig]:
    """Return the configs to measure: all lengths, vocabularies and devices."""
    devices: dict[str, ModelDtype] = {"cpu": "float32"}
    if has_gpu:
        devices["cuda"] = "bfloat16"
    return [
        BatchConfig(**length, vocab_size=n_words, device=device, dtype=dtype)
        for device, dtype in devices.items()
        for n_words in (32000, 248320)
        for length in LENGTHS
    ]


def make_model(config: BatchConfig) -> LlamaForCausalLM:
    """Return a random Llama-shaped model."""
    torch.manual_seed(0)
    with torch.device(config.device):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                intermediate_size=config.d_model * 11 // 4,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.d_model // 64,
                num_key_value_heads=config.d_model // 64,
                max_position_embeddings=max(length["n_tokens"] for length in LENGTHS),
            )
        )
    return model.to(getattr(torch, config.dtype)).eval().requires_grad_(False)


def random_sequence(
    rng: np.random.Generator, n_words: int, starts: tuple[int, int, int], n_tokens: int
) -> TokenSequence:
    """Return random tokens with context, question and answer starting at `starts`."""
    ids = rng.integers(3, n_words, n_tokens + 1)
    edges = np.array([*starts, n_tokens])
    spans = np.stack([edges[:-1], edges[1:]], axis=1)
    return TokenSequence(ids=ids[:-1], targets=ids[1:], spans=spans)


# The rival to beat: the four families by forward hooks on Transformers' Llama. Written
# to be fast, without code of the reader; the model attends eagerly and returns its
# attention weights. "plain" lets Transformers return all states, weights and logits and
# reduces them at the end; "tuned" reduces every layer as it runs, and logits a few
# tokens at a time. Both omit the reader's checks, above all parity with the model.

_N_LOGITS = 128  # tokens whose logits are in memory at once
Readings = dict[str, torch.Tensor]


def _probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the five scalars (see `AnswerSignals`) of logits `[n, vocab_size]`."""
    log_p = logits.float().log_softmax(-1)
    chosen, p = log_p.gather(-1, targets[:, None])[:, 0], log_p.exp()
    top = p.topk(2, -1).values
    entropy = -(p * log_p).sum(-1)
    return torch.stack(
        [chosen.exp(), -chosen, entropy, top[:, 0], top[:, 0] - top[:, 1]], -1
    )


def _entropy_and_mass(mass: torch.Tensor, plogp: torch.Tensor) -> torch.Tensor:
    safe = mass.clamp_min(1e-30)
    entropy = torch.where(mass > 1e-30, safe.log() - plogp / safe, 0.0).clamp_min(0)
    return torch.stack([entropy, mass], -1)


class Hooked:
    """Reads a batch of sequences of equal length by hooks.

    Readings are `[n_examples, n_tokens, …]` for each family, with every hidden layer.
    """

    def __init__(
        self, model: LlamaForCausalLM, sequences: Sequence[TokenSequence]
    ) -> None:
        """Prepare everything that does not depend on the forward pass."""
        self.model, device = model, model.device
        self.ids, self.targets = (
            torch.tensor([getattr(s, name).tolist() for s in sequences], device=device)
            for name in ("ids", "targets")
        )
        spans = torch.tensor([s.spans.tolist() for s in sequences], device=device)
        at = torch.arange(self.ids.shape[1], device=device)
        self.members = (at >= spans[..., :1]) & (at < spans[..., 1:])
        self.first_row = int(spans[:, 1, 0].min())  # only later rows look back
        self.directions = model.lm_head.weight[self.targets]

    def _hooks(self, hooks: Sequence[tuple[Any, Any]]) -> contextlib.ExitStack:
        """Attend eagerly, with `(module, hook)` pairs, until the stack is closed."""
        stack, config = contextlib.ExitStack(), self.model.config
        before: Any = config._attn_implementation
        for module, hook in hooks:
            stack.enter_context(module.register_forward_hook(hook))
        self.model.set_attn_implementation("eager")
        stack.callback(self.model.set_attn_implementation, before)
        return stack

    @torch.no_grad()
    def plain(self) -> Readings:
        """Let the model return everything, then reduce it."""
        atts: list[torch.Tensor] = []
        ffns: list[torch.Tensor] = []
        hooks = []
        for block in self.model.model.layers:
            hooks.append((block.self_attn, lambda *call: atts.append(call[-1][0])))
            hooks.append((block.mlp, lambda *call: ffns.append(call[-1])))
        with self._hooks(hooks):
            out = self.model(
                input_ids=self.ids,
                use_cache=False,
                output_hidden_states=True,
                output_attentions=True,
            )
        # Transformers applies the final norm to the last state; recompute it as a sum.
        states = list(out.hidden_states)
        states[-1] = states[-2] + atts[-1] + ffns[-1]
        pairs = zip(states, atts, ffns, strict=False)
        logits = out.logits.flatten(0, 1).split(_N_LOGITS)
        return self._readings(
            states,
            [self._contributions(*parts) for parts in pairs],
            [self._attention(weights) for weights in out.attentions],
            list(logits),
        )

    @torch.no_grad()
    def tuned(self) -> Readings:
        """Reduce every layer's outputs as it runs."""
        states: list[torch.Tensor] = []
        resid: list[torch.Tensor] = []
        attention: list[torch.Tensor] = []
        now: dict[str, torch.Tensor] = {}

        def keep(module: Any, inputs: Any, output: Any) -> None:
            states.append(output)

        def attend(module: Any, inputs: Any, output: Any) -> None:
            now["att"] = output[0]
            attention.append(self._attention(output[1]))

        def feed(module: Any, inputs: Any, output: Any) -> None:
            resid.append(self._contributions(states[-1], now["att"], output))

        decoder = self.model.model
        hooks = [(decoder.embed_tokens, keep)]
        for block in decoder.layers:
            hooks += [(block.self_attn, attend), (block.mlp, feed), (block, keep)]
        with self._hooks(hooks):
            final = decoder(input_ids=self.ids, use_cache=False).last_hidden_state
        chunks = final.flatten(0, 1).split(_N_LOGITS)
        logits = map(self.model.lm_head, chunks)
        return self._readings(states, resid, attention, logits)

    def _readings(self, states, resid, attention, logits) -> Readings:
        targets = self.targets.flatten().split(_N_LOGITS)
        prob = torch.cat(
            [_probabilities(x, t) for x, t in zip(logits, targets, strict=True)]
        )
        return {
            "hidden": torch.stack(states, 2),
            "prob": prob.view(*self.ids.shape, 5),
            "resid": torch.cat(resid, -1),
            "attn": torch.stack(attention, -2),
        }

    def _contributions(self, before, att, ffn) -> torch.Tensor:
        """Return `[n_examples, n_tokens, 4]`: norms and pushes of attention and MLP."""
        norm, middle = self.model.model.norm, before + att
        normed = [norm(x) for x in (before, middle, middle + ffn)]
        pushes = [
            ((b - a) * self.directions).sum(-1)
            for a, b in zip(normed, normed[1:], strict=False)
        ]
        return torch.stack(
            [att.norm(dim=-1), pushes[0], ffn.norm(dim=-1), pushes[1]], -1
        )

    def _attention(self, weights: torch.Tensor) -> torch.Tensor:
        """Reduce a layer's weights to `[n_examples, n_tokens, 2, 2, n_heads]`."""
        first, n_heads = self.first_row, weights.shape[1]
        rows = weights[:, :, first:].float()
        terms = torch.xlogy(rows, rows)
        members = self.members[:, None].float()
        later = members[:, :, 1:, first:]
        shape = len(rows), n_heads, 2, first
        to = [
            torch.cat([x.new_zeros(shape), members[:, :, :2] @ x.mT], -1)
            for x in (rows, terms)
        ]
        to_spans = _entropy_and_mass(*to)
        from_spans = _entropy_and_mass(later @ rows, later @ terms)
        context, question, answer = self.members[:, None, :, :, None].unbind(2)
        is_any = context | question | answer
        first_partner = torch.where(context, from_spans[:, :, 0], to_spans[:, :, 0])
        second = torch.where(answer, to_spans[:, :, 1], from_spans[:, :, 1])
        both = torch.stack([first_partner, second], 3) * is_any[..., None]
        return both.permute(0, 2, 3, 4, 1)


class ReadingBench:
    """A model and a batch, ready to run."""

    def __init__(self, config: BatchConfig, reader: SignalReader | None = None) -> None:
        """Build the batch, and the model and reader unless given (all layers kept)."""
        if config.device == "cpu":
            keep_freed_memory()  # as `load_backbone` does, for both runs
        if reader is None:
            backbone = Backbone.from_model(make_model(config), revision="random")
            reader = SignalReader(backbone)
        self.config = config
        self.reader = reader
        self.model = reader.backbone.model
        n, rng = config.n_tokens, np.random.default_rng(0)
        starts = (8, n - config.n_read, n - config.n_read // 3)
        self.sequences = [
            random_sequence(rng, config.vocab_size, starts, n)
            for _ in range(config.n_examples)
        ]
        ids = np.stack([sequence.ids for sequence in self.sequences])
        self.ids = torch.from_numpy(ids).to(config.device)

    @torch.no_grad()
    def bare(self) -> None:
        """Run the bare forward with its logits."""
        self._wait(self.model(input_ids=self.ids, use_cache=False).logits)

    def read(self) -> None:
        """Read all four families."""
        self._wait(self.reader.read(self.sequences))

    def _wait(self, readings: object) -> None:
        if self.config.device != "cpu":
            torch.cuda.synchronize()

    def time(self, n_rounds: int) -> Row:
        """Return median seconds of bare forward and reading, and their median ratio.

        Ratios are of neighbouring runs. For a Llama, also returns the ratios of the
        times of `Hooked` to the reading's, with minimum and maximum.
        """
        hooks: dict[str, Callable[[], object]] = {}
        if isinstance(self.model, LlamaForCausalLM):
            hooked = Hooked(self.model, self.sequences)
            self.require_same(hooked)
            hooks = {
                "plain Transformers / reading": lambda: self._wait(hooked.plain()),
                "tuned hooks / reading": lambda: self._wait(hooked.tuned()),
            }
        runs = [self.bare, self.read, *hooks.values()]
        bare, read, *others = take_turns(runs, n_rounds)[..., 0].T
        over_reading = (middle_and_ends(x / read) for x in others)
        return {
            "bare s": float(np.median(bare)),
            "reading s": float(np.median(read)),
            "time ratio": float(np.median(read / bare)),
            **dict(zip(hooks, over_reading, strict=True)),
        }

    def require_same(self, hooked: Hooked) -> None:
        """Check that hooks and reader give the same readings, before they are timed."""
        tolerance = 1e-3 if self.config.dtype == "float32" else 0.1
        rows = self.reader.read(self.sequences)
        for readings in (hooked.plain(), hooked.tuned()):
            for name, values in readings.items():
                ours = np.stack([getattr(signals, name) for signals in rows])
                theirs = values.float().cpu().numpy()
                gap = np.linalg.norm(ours - theirs) / np.linalg.norm(ours)
                if not gap <= tolerance:  # so that NaN fails
                    raise ValueError(
                        f"hooks and reader give different {name} readings, {gap:.1e} "
                        "of their norm apart, so their times cannot be compared"
                    )


def measure_reading(config: BatchConfig, n_rounds: int) -> Row:
    """Measure times here, and both peaks above the model in separate processes."""
    times = ReadingBench(config).time(n_rounds)
    bare, read = (
        measure_fresh(f"the memory of {mode}", measure_peak, config, mode)
        for mode in ("bare", "read")
    )
    return {
        "device": config.device,
        "dtype": config.dtype,
        "tokens": f"{config.n_examples} x {config.n_tokens}",
        "vocabulary": config.vocab_size,
        **times,
        "bare MiB": bare,
        "reading MiB": read,
        "memory ratio": read / bare if read is not None and bare else None,
    }


def measure_peak(config: BatchConfig, mode: Literal["bare", "read"]) -> float | None:
    """Return a run's peak memory above the model; call it in a new process."""
    torch.set_num_threads(N_THREADS)
    bench = ReadingBench(config)
    # A run on a short batch first allocates the libraries' own buffers.
    short = dataclasses.replace(config, n_tokens=32, n_examples=1, n_read=12)
    getattr(ReadingBench(short, bench.reader), mode)()
    return peak_above(getattr(bench, mode), config.device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The sequences to extract, of `shortest` to `longest` tokens."""

    n_examples: int
    shortest: int
    longest: int
    n_answer: int  # last tokens of each sequence
    extract: ExtractConfig


# Like the demo's questions with a passage, and the demo's extraction; enough of them
# that writing the last unit, which overlaps no reading, takes a small part of the time.
DEMO_LIKE = LoopConfig(
    n_examples=1600,
    shortest=33,
    longest=49,
    n_answer=4,
    extract=ExtractConfig(tokens_per_batch=4096, rows_per_shard=4096),
)
# As long as the shorter of `LENGTHS`, for the same model.
LLAMA_LIKE = LoopConfig(
    n_examples=24,
    shortest=448,
    longest=512,
    n_answer=64,
    extract=ExtractConfig(tokens_per_batch=2048, rows_per_shard=4096),
)


class StoreBench:
    """A reader and a plan, to run with and without the store."""

    def __init__(self, reader: SignalReader, config: LoopConfig) -> None:
        """Build sequences and plan; the reader must fit `config.extract`."""
        self.reader = reader
        n_words = reader.backbone.model.get_input_embeddings().num_embeddings
        rng = np.random.default_rng(0)
        self.sequences = []
        for n in rng.integers(config.shortest, config.longest + 1, config.n_examples):
            answer = int(n) - config.n_answer
            starts = (2, answer - (answer - 2) // 3, answer)
            self.sequences.append(random_sequence(rng, n_words, starts, int(n)))
        keys = [(str(i),) for i in range(config.n_examples)]
        self.plan = plan_extraction(self.sequences, keys, reader, config.extract, {})
        self.batches = [batch for unit in self.plan.units for batch in unit.batches]

    def read(self) -> None:
        """Read every batch, and discard the readings."""
        for _ in read_batches(self.reader, self.sequences, self.batches):
            pass

    def extract(self) -> None:
        """Run the plan into a temporary store."""
        with tempfile.TemporaryDirectory() as folder:
            run_plan(self.reader, self.sequences, self.plan, Path(folder))

    def measure(self, name: str, n_rounds: int) -> Row:
        """Time both in turns; return medians, the ratio's over neighbouring runs."""
        rounds = take_turns([self.read, self.extract], n_rounds)[..., 0]
        loop, end_to_end = np.median(rounds, axis=0).tolist()
        n_tokens = int(self.plan.spec.lengths.sum())
        backbone = self.reader.backbone
        return {
            "model": name,
            "device": str(backbone.device),
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "tokens": n_tokens,
            "batches": len(self.batches),
            "reading tokens/s": n_tokens / loop,
            "with the store tokens/s": n_tokens / end_to_end,
            "end to end / reading": float(np.median(rounds[:, 0] / rounds[:, 1])),
        }


def measure_loops(n_rounds: int, *, is_small: bool = False) -> Iterator[Row]:
    """Measure the embedded model and that of `make_model` on the CPU."""
    embedded = load_backbone(model_path(EMBEDDED))
    llama = Backbone.from_model(make_model(BatchConfig()), revision="random")
    for name, backbone, config in (
        (EMBEDDED, embedded, DEMO_LIKE),
        ("llama, d=512", llama, LLAMA_LIKE),
    ):
        work = dataclasses.replace(config, n_examples=4) if is_small else config
        reader = SignalReader.for_config(backbone, work.extract)
        yield StoreBench(reader, work).measure(name, n_rounds)


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the floating-point operations of one token's forward with logits.

    Counts two per weight of every linear module, including the head. Lookups, norms,
    products within attention and recurrent scans (together a few percent at 400 tokens)
    are left out, so shares of the peak are slightly too low.
    """
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return 2.0 * sum(linear.weight.numel() for linear in linears)


def profile_of(run: Callable[[], None]) -> str:
    """Return a table of the kernels that take most of a run's time."""
    order = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
    with torch.profiler.profile(acc_events=True) as profile:
        run()
    averages = profile.key_averages()
    return averages.table(sort_by=order, row_limit=12, max_name_column_width=60)


def measure_gpu(
    name: str,
    model: PreTrainedModel,
    n_rounds: int,
    peak: float,
    *,
    n_examples: int = 40,
    n_tokens: int = 400,
    n_batches: int = 24,
) -> Iterator[Row | str]:
    """Measure a model on its device, keeping one middle layer.

    `peak` is the FLOP/s to compare the reading with; of its 400 tokens, 107 are
    question and 53 answer. `n_batches` are extracted with and without the store, with
    60 answer tokens each.

    Yields:
      The rows of the reading and of the store, and `profile_of` the reading, each as
      soon as it is measured, since the next one may fail.
    """
    backbone = Backbone.from_model(model, revision="random")
    layers = (backbone.n_layers // 2,)
    reader = SignalReader(backbone, layers)
    shape = BatchConfig(
        n_tokens=n_tokens,
        n_examples=n_examples,
        n_read=n_tokens * 2 // 5,
        vocab_size=backbone.layout.head.out_features,
        device=backbone.device.type,
        dtype="bfloat16",
    )
    bench = ReadingBench(shape, reader)
    times = bench.time(n_rounds)
    budget = n_examples * n_tokens
    work = LoopConfig(
        n_examples=n_batches * n_examples,
        shortest=n_tokens * 7 // 8,
        longest=n_tokens * 9 // 8,
        n_answer=max(1, n_tokens * 3 // 20),
        extract=ExtractConfig(tokens_per_batch=budget, hidden_layers=layers),
    )
    flops = flops_per_token(backbone.model) * budget / times["reading s"]
    yield {
        "model": name,
        "tokens": f"{n_examples} x {n_tokens}",
        **times,
        "TFLOP/s": flops / 1e12,
        "GEMM peak TFLOP/s": peak / 1e12,
        "share of the peak": flops / peak,
    }
    yield StoreBench(reader, work).measure(name, max(1, n_rounds // 2))
    yield profile_of(bench.read)


def measure_with_examples(
    backbone: Backbone, n_rounds: int, n_questions: int = N_QUESTIONS
) -> Row:
    """Time bare forward, greedy generation and reading in turns on one batch."""
    # No model name: this way, even the embedded model is shown worked examples.
    requests = requests_of(backbone.tokenizer, "", "closed_book")[:n_questions]
    reader = SignalReader(backbone)
    answers = generate(backbone, requests, CONFIG)
    sequences = [sequence_of(answer) for answer in answers]
    n_tokens = sum(len(sequence.ids) for sequence in sequences)
    longest = max(sequences, key=lambda sequence: len(sequence.ids)).ids
    ids = torch.from_numpy(longest).repeat(len(requests), 1).to(backbone.device)

    @torch.inference_mode()
    def bare() -> None:
        backbone.model(input_ids=ids, use_cache=False)

    def read() -> None:
        reader.forget_beginning()  # the other two recompute it
        reader.read(sequences)

    runs = [bare, lambda: generate(backbone, requests, CONFIG), read]
    seconds = np.median(take_turns(runs, n_rounds)[..., 0], axis=0)
    rates = np.array([ids.numel(), n_tokens, n_tokens]) / seconds
    bare_rate, answer_rate, extract_rate = rates.tolist()
    return {
        "model": backbone.name,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "tokens": n_tokens,
        "of them read": sum(len(signals.prob) for signals in reader.read(sequences)),
        "bare tokens/s": bare_rate,
        "answer tokens/s": answer_rate,
        "answer / bare": answer_rate / bare_rate,
        "extract tokens/s": extract_rate,
        "extract / bare": extract_rate / bare_rate,
    }


@click.command()
@click.option(
    "--model", help="Measure only this model, on prompts with worked examples."
)
@DTYPE
@ROUNDS
@AS_JSON
def extract(model: str | None, dtype: ModelDtype, rounds: int, as_json: bool) -> None:
    """Time a full reading against the bare forward with logits; print the tables.

    The model is Llama-shaped: d=512, 8 layers, fp32 readings, all hidden layers kept.
    Bare forward, reading, and the same readings by hooks on Transformers (without the
    reader's checks) take turns on one batch; peak memory is above the loaded model.
    Then extraction into a store is timed against reading only. On a GPU, both are also
    timed and profiled for Qwen3.5-9B and Gemma 4 E4B, full-size with random weights.

    With --model, compare tokens per second of `answer` and `extract` with the bare
    forward, for that model on prompts with worked examples.

    Example: beatrice bench extract --rounds 7
    """
    if model is None and dtype != "float32":
        raise click.UsageError(
            f"--model-dtype {dtype} needs --model; without it, weights are float32 on "
            "a CPU and bfloat16 on a GPU"
        )
    silence_transformers()
    torch.set_num_threads(N_THREADS)
    if model is not None:
        printer = RowPrinter(as_json)
        backbone = load_backbone(model_path(model), dtype=dtype)
        printer.row(measure_with_examples(backbone, rounds))
        return
    has_gpu = torch.cuda.is_available()
    configs = batch_configs(has_gpu=has_gpu)
    printer = RowPrinter(as_json)
    with Progress().stage("extract") as update:
        for done, config in enumerate(configs, start=1):
            printer.row(measure_reading(config, rounds))
            update(done, len(configs) + 2)
        if not has_gpu:
            printer.text("\nGPU: not measured")
        for done, row in enumerate(measure_loops(rounds), start=len(configs) + 1):
            printer.row(row)
            update(done, len(configs) + 2)
    if not has_gpu:
        printer.text(f"\n{', '.join(FULL_MODELS)}: not measured without a GPU")
        return
    peak = product_rate(torch.rand(8192, 8192).cuda().bfloat16())
    for name in FULL_MODELS:
        for part in measure_gpu(name, full_model(name, "cuda"), rounds, peak):
            printer.text(part) if isinstance(part, str) else printer.row(part)
