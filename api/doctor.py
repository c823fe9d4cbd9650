"""The verb `doctor`, which checks a machine and a run without changing anything.

It checks what a run needs before hours are spent on it. Every check is a function that
yields findings; problems that it finds are reported, not raised.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from beatrice.extract.backbone.names import (
    MODELS,
    AttentionLayers,
    BackboneConfig,
    download_needed,
    model_path,
    unreachable_hub,
)
from beatrice.extract.records import SETTINGS, Answer
from beatrice.extract.run.console import printable, silence_transformers
from beatrice.extract.run.contents import settings_in_words
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.files import CHECKSUMS, JsonLines, verify_checksums
from beatrice.extract.run.process import host_bytes, n_cores
from beatrice.extract.run.stages import bytes_in_words
from beatrice.extract.run.verbs import RunPath, Text
from beatrice.extras import missing_extra

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from beatrice.extract.signals.extract import ExtractConfig
    from beatrice.extract.store.spec import StoreConfig

Status = Literal["ok", "warning", "problem"]
_DISTRIBUTION = "beatrice-probe"
_LITTLE_MEMORY = 4 << 30
_LITTLE_DISK = 10 << 30
Shapes = Mapping[str, Sequence[int]]

_WHERE = {"all": "all spans", "answer": "answer span"}
# Sizes assumed for estimates if no run is named.
_N_ANSWERS, _N_TOKENS, _N_ANSWER_TOKENS = 10_000, 400, 60


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found."""

    about: str  # what was looked at
    status: Status  # a problem would stop a run, a warning would not
    text: str  # one sentence


def _if_installed(about: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield a check's findings, or which training package is missing."""
    try:
        yield from findings
    except ImportError as error:
        if (text := missing_extra(error)) is None:
            raise
        yield Finding(about, "problem", text)


def look_at_packages() -> Iterator[Finding]:
    """Compare Python and the installed packages with the project's requirements."""
    from packaging.requirements import Requirement

    yield Finding("python", "ok", f"Python {platform.python_version()}")
    try:
        wanted = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = f"{_DISTRIBUTION} is not installed, so its requirements are unknown"
        yield Finding("packages", "warning", text)
        return
    needed = [
        r
        for r in map(Requirement, wanted)
        if r.marker is None or r.marker.evaluate({"extra": "train"})
    ]
    wrong = list(filter(None, map(_wrong_version, needed)))
    text = "; ".join(wrong) or f"all {len(needed)} are installed in a fitting version"
    yield Finding("packages", "problem" if wrong else "ok", text)


def _wrong_version(needed: "Requirement") -> str | None:
    """Return what is wrong with one package, or None."""
    name, specifier = needed.name, needed.specifier
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name}{specifier} is missing"
    if specifier.contains(version, prereleases=True):
        return None
    return f"{name} is {version}, but {specifier} is needed"


def look_at_machine(folder: Path) -> Iterator[Finding]:
    """Check cores, memory, and the disk of a run directory."""
    cores = n_cores()
    yield Finding("cores", "ok", f"{cores} cores for this process")
    available = host_bytes()
    if available is not None:
        status = "warning" if available < _LITTLE_MEMORY else "ok"
        yield Finding("memory", status, f"{bytes_in_words(available)} available")
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{bytes_in_words(free)} free at {folder}"
    if os.access(folder, os.W_OK):
        yield Finding("disk", "warning" if free < _LITTLE_DISK else "ok", text)
    else:
        yield Finding("disk", "problem", f"{text}, which is not writable")


def look_at_devices() -> Iterator[Finding]:
    """Check the GPUs that Torch sees, and the devices that JAX will train on."""
    import jax
    import torch

    if not torch.cuda.is_available():
        text = f"Torch {torch.__version__} sees no GPU; models run on the CPU"
        yield Finding("torch", "warning", text)
    for index in range(torch.cuda.device_count()):
        free, total = map(bytes_in_words, torch.cuda.mem_get_info(index))
        text = f"{torch.cuda.get_device_name(index)}, {free} of {total} free"
        is_old = torch.cuda.get_device_capability(index) < (8, 0)
        text += ", no bfloat16; use float16" if is_old else ""
        yield Finding(f"cuda:{index}", "warning" if is_old else "ok", text)
    try:
        devices = ", ".join(map(str, jax.devices()))
    except (RuntimeError, AssertionError) as error:  # a platform is missing
        text = (
            f"JAX {jax.__version__} has no device ({_shorten(error, 200)}); "
            "JAX_PLATFORMS may name a missing platform: unset it, or set it to cpu"
        ).replace(" ()", "")
        yield Finding("jax", "problem", text)
        return
    limits = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    of = "" if limits is None else f", {bytes_in_words(limits)} each for its programs"
    yield Finding("jax", "ok", f"JAX {jax.__version__} on {devices}{of}")


def look_at_hub(model: str | None) -> Iterator[Finding]:
    """Check that a model's Hub can be reached; call it before loading Transformers.

    If the Hub does not answer, its client is switched to its local cache.
    """
    if model is None or model in MODELS:  # those come from the package index
        return
    if Path(os.path.expanduser(model_path(model))).exists():
        return
    if (hub := unreachable_hub()) is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        text = f"{hub} cannot be reached; only files in its local cache can be used"
        yield Finding("hub", "warning", text)


def look_at_server(url: str, *, timeout: float = 10.0) -> Iterator[Finding]:
    """Ask a server for its models; it must answer within `timeout` seconds."""
    import asyncio

    import openai

    from beatrice.extract.generate.server import (
        advice_on,
        open_client,
        reason_of,
        redacted,
        reply_before_deadline,
    )

    async def list_models(client: openai.AsyncOpenAI) -> list[str]:
        async with client:
            return [str(model.id) async for model in client.models.list()]

    try:
        client = open_client(url, timeout)
    except ValueError as error:
        yield Finding("server", "problem", f"{url} cannot be used: {error}")
        return
    try:
        names = asyncio.run(reply_before_deadline(timeout, list_models(client)))
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
        text = (
            f"{url} does not list its models "
            f"({_shorten(reason_of(error), 200)}); {advice_on(error)}"
        )
        yield Finding("server", "problem", text)
        return
    listed = redacted(", ".join(names)) or "nothing"
    yield Finding("server", "ok", f"{url} serves {listed}")


def _shorten(error: BaseException | str, n_characters: int) -> str:
    return " ".join(str(error).split())[:n_characters]


def look_at_model(
    name: str, choice: AttentionLayers = "all"
) -> Generator[Finding, None, Shapes | None]:
    """Check a backbone's config and tokenizer, without loading its weights.

    Returns:
      The shapes of its signals, or None if its config or layout cannot be used.
    """
    from beatrice.extract.backbone.layout import window_of
    from beatrice.extract.backbone.loading import (
        check_quantization_support,
        load_outline,
    )
    from beatrice.extract.signals.extract import outline_shapes
    from beatrice.extract.signals.parity import require_readable

    if (what := download_needed(name)) is not None:
        text = f"{name} has not been downloaded; a run downloads it first: {what}"
        yield Finding("model", "warning", text)
        return None
    path, shapes = model_path(name), None
    try:
        outline = load_outline(path)
        shapes = outline_shapes(outline, choice)
        check_quantization_support(path, outline)
        require_readable(name, outline)
    except (ValueError, OSError) as error:
        text = f"{name} cannot be used: {_shorten(error, 300)}"
        yield Finding("model", "problem", text)
        return shapes
    window = window_of(outline.config)
    reads = "no limit" if window is None else f"{window} tokens"
    n_layers, n_read = shapes["resid"][0] // 4, shapes["attn"][2]
    text = (
        f"{name}: {n_layers} layers, width {shapes['hidden'][1]}, "
        f"{shapes['attn'][3]} heads, window {reads}"
    )
    if n_read != n_layers:
        text += f"; attention is read in {n_read} of the layers"
    yield Finding("model", "ok", text)
    yield Finding("kept", "ok", typical_sizes(shapes))
    yield _look_at_tokenizer(outline.tokenizer)
    return shapes


def _look_at_tokenizer(tokenizer: Any) -> Finding:
    """Check that a tokenizer can be used, and whether it supports chats."""
    from beatrice.extract.generate.prompts import render_message

    if not getattr(tokenizer, "is_fast", False):
        text = f"{type(tokenizer).__name__} has no offsets; a fast one is needed"
        return Finding("tokenizer", "problem", text)
    try:
        render_message(tokenizer, "a question")
        text = "has a chat template; --chat can be used, with thinking switched off"
    except ValueError as error:
        text = f"plain prompts only: {error}"
    return Finding("tokenizer", "ok", text)


def look_at_run(path: Path) -> Iterator[Finding]:
    """Report which stages of a run are done, and the size of its feature store."""
    from beatrice.extract.backbone.loading import check_device
    from beatrice.extract.signals.extract import EXTRACT_PRESETS

    run = RunDir(path)
    try:
        config = run.section("backbone", BackboneConfig)
        storage = run.resolve_section("extract", EXTRACT_PRESETS, is_recorded=False)
        has = [settings_in_words(run)] if run.examples.exists() else []
    except ValueError as error:
        yield Finding("run", "problem", str(error))
        return
    try:
        check_device(config.device)
    except ValueError as error:
        yield Finding("device", "problem", str(error))
    gap_of = {name: run.stage_gap(name) for name in run.stage_records()}
    gaps = list(filter(None, gap_of.values()))
    done = ", ".join(name for name, gap in gap_of.items() if gap is None)
    text = "; ".join([f"{path}: stages done: {done or 'none'}", *has, *gaps])
    yield Finding("run", "warning" if gaps else "ok", text)
    shapes = yield from look_at_model(config.model, config.attention_layers)
    if shapes is not None:
        yield from _look_at_store(run, storage, shapes)


def _look_at_store(
    run: RunDir, config: "ExtractConfig", shapes: Shapes
) -> Iterator[Finding]:
    """Compare the size of what `extract` will write with the free disk space."""
    from beatrice.extract.store.spec import stored_bytes

    counts = _count_tokens(run, config.answer_span)
    if not counts["n_tokens"] or run.stage_done("extract"):
        return
    try:
        needed = sum(stored_bytes(shapes, config, **counts).values())
    except ValueError as error:  # the model lacks a layer to keep
        yield Finding("features", "problem", str(error))
        return
    free = shutil.disk_usage(run.path).free
    fits = needed < free
    text = (
        f"the existing answers have {counts['n_tokens']:,} tokens, "
        f"{counts['n_answer']:,} of them in answer spans; {config.describe()} "
        f"take {bytes_in_words(needed)}; {bytes_in_words(free)} are free"
        + ("" if fits else ", so keep less, or use another disk")
    )
    table = sizes_of_choices(shapes, config, **counts)
    yield Finding("features", "ok" if fits else "problem", f"{text}\n{table}")


def _count_tokens(run: RunDir, answer_span: str) -> dict[str, int]:
    """Count the tokens to read in a run's answers, and those in answer spans."""
    from beatrice.extract.signals.sequence import first_read_token

    n_tokens = n_answer = 0
    for row in JsonLines(run.answers_file).intact_rows(Answer):
        n_tokens += len(row.prompt_ids) + len(row.token_ids)
        n_tokens -= first_read_token(row.context_span[0])
        n_answer += len(row.token_ids) + (answer_span == "emitting")
        n_answer -= row.stop_id is None  # what the last token emitted is unknown
    return {"n_tokens": n_tokens, "n_answer": n_answer}


def sizes_of_choices(
    shapes: Shapes, config: "StoreConfig", *, n_tokens: int, n_answer: int
) -> str:
    """Return a table of store sizes, with a line for each dtype of hidden states.

    `shapes` come from `outline_shapes`; `config` says how other families are stored.
    `n_tokens` counts all sequences, including prompts; `n_answer` all answer spans.
    """
    from beatrice.extract.commands import STORED_TYPES
    from beatrice.extract.store.spec import Spans, stored_bytes

    columns = list(itertools.product((None, (0,)), get_args(Spans)))
    heads = [
        f"{'every layer' if layers is None else 'one layer'}, {_WHERE[spans]}"
        for layers, spans in columns
    ]
    lines = ["      " + "".join(f"{head:>26}" for head in heads)]
    for short, dtype in STORED_TYPES.items():
        cells = []
        for layers, spans in columns:
            choice = dataclasses.replace(
                config, hidden_layers=layers, hidden_spans=spans, dtype=dtype
            )
            sizes = stored_bytes(shapes, choice, n_tokens=n_tokens, n_answer=n_answer)
            cells.append(bytes_in_words(sum(sizes.values())))
        lines.append(f"  {short:<4}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def typical_sizes(shapes: Shapes) -> str:
    """Return the table of store sizes for a run of typical size."""
    from beatrice.extract.store.spec import StoreConfig

    table = sizes_of_choices(
        shapes,
        StoreConfig(),
        n_tokens=_N_ANSWERS * _N_TOKENS,
        n_answer=_N_ANSWERS * _N_ANSWER_TOKENS,
    )
    return (
        f"feature store of {_N_ANSWERS:,} answers of {_N_TOKENS} tokens, "
        f"{_N_ANSWER_TOKENS} of them in the answer span, by the hidden states kept "
        f"(--hidden-layers, --set hidden_spans, --set dtype):\n{table}"
    )


def verify_run(path: Path) -> list[str]:
    """Return all problems of a run directory, one sentence each.

    Checks the recorded inputs and outputs of every finished stage, every chunk of the
    feature stores, and every file of the trained weights.
    """
    from beatrice.extract.store.store import open_store
    from beatrice.extract.store.store import verify as verify_store

    read_manifest(path)
    run = RunDir(path)
    problems = [gap for name in run.stage_records() if (gap := run.stage_gap(name))]
    for setting in SETTINGS:
        if run.features(setting).exists():
            try:
                problems += verify_store(open_store(run.features(setting)))
            except ValueError as error:
                problems.append(str(error))
    for sums in sorted(path.rglob(CHECKSUMS)):
        try:
            verify_checksums(sums.parent)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _verify(run_dir: Path, as_json: bool) -> None:
    """Print all problems of a run directory; raise if there are any."""
    problems = verify_run(run_dir)
    for problem in problems:
        finding = Finding("run", "problem", problem)
        shown = json.dumps(dataclasses.asdict(finding)) if as_json else problem
        click.echo(printable(shown))
    if problems:
        raise click.ClickException(f"problems in {run_dir}: {len(problems)}")
    if not as_json:
        click.echo(f"{run_dir}: every checksum holds")


@click.command()
@click.argument("run_dir", required=False, type=RunPath())
@click.option(
    "--model",
    type=Text(),
    help="Also check a model: directory, GGUF file, Hub id, or embedded.",
)
@click.option(
    "--server", type=Text(), help="Also check an OpenAI-compatible server (URL to /v1)."
)
@click.option(
    "--verify",
    is_flag=True,
    help="Only verify all checksums of RUN_DIR: stages, stores and weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON lines.")
def doctor(
    run_dir: Path | None,
    model: str | None,
    server: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Check whether a run can work here: packages, GPUs, disk, model, server, run.

    It loads no weights and generates or writes nothing, but downloads the config and
    tokenizer of a Hub id into the cache. Exit code 1 if something would stop a run.

    Example: beatrice doctor runs/paper --model Qwen/Qwen3.5-9B

    Example: beatrice doctor runs/paper --verify
    """
    if server is not None:
        from beatrice.extract.generate.options import check_server

        check_server(server)
    if verify:
        if run_dir is None:
            raise click.UsageError("--verify checks a run; give RUN_DIR too")
        _verify(run_dir, as_json)
        return
    hub = list(look_at_hub(model))
    if model is not None or run_dir is not None:  # else it loads Transformers in vain
        silence_transformers()
    findings = [
        *look_at_packages(),
        *look_at_machine((run_dir or Path.cwd()).absolute()),
        *_if_installed("jax", look_at_devices()),
        *hub,
        *_if_installed("model", look_at_model(model) if model is not None else ()),
        *_if_installed("run", look_at_run(run_dir) if run_dir is not None else ()),
        *_if_installed("server", look_at_server(server) if server is not None else ()),
    ]
    for finding in findings:
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(finding)))
        else:
            line = f"{finding.status:<8} {finding.about:<10} {finding.text}"
            click.echo(printable(line))
    n_problems = sum(finding.status == "problem" for finding in findings)
    if n_problems:
        raise click.ClickException(
            f"{n_problems} of {len(findings)} findings would stop a run"
        )
