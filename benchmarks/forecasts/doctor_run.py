"""What the doctor finds of a model, and of a run directory."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.forecasts.doctor import Finding
from extract.backbone.names import model_path
from extract.run.directory import RunDir

if TYPE_CHECKING:
    from benchmarks.forecasts.doctor_store import Shapes
    from benchmarks.stages.presets import RunConfig


def look_at_model(name: str) -> Generator[Finding, None, "Shapes | None"]:
    """Look at a backbone's config and tokenizer; its weights are not loaded.

    Returns:
      The shapes of its readings, or None where its config or layout cannot be used.
    """
    from benchmarks.forecasts.doctor_store import outline_shapes, typical_sizes
    from extract.backbone.checkpoint import (
        check_quantization_support,
        load_outline,
        window_of,
    )

    path, shapes = model_path(name), None
    try:
        outline = load_outline(path)
        shapes = outline_shapes(outline)
        check_quantization_support(path, outline)
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        text = f"{name} cannot be used: {said}"
        yield Finding(about="model", status="problem", text=text)
        return shapes
    window = window_of(outline.config)
    reads = "no limit" if window is None else f"{window} tokens"
    n_layers, n_read = shapes["resid"][0] // 4, shapes["attn"][2]
    yield Finding(
        about="model",
        status="ok",
        text=f"{name}: {n_layers} layers, width {shapes['hidden'][1]}, "
        f"{shapes['attn'][3]} heads, window {reads}"
        + ("" if n_read == n_layers else f"; {n_read} layers have attention"),
    )
    yield Finding(about="kept", status="ok", text=typical_sizes(shapes))
    yield _look_at_tokenizer(outline.tokenizer)
    return shapes


def _look_at_tokenizer(tokenizer: Any) -> Finding:
    """Say whether a tokenizer can be used, and for chats as well."""
    from extract.generate.prompts import render_message

    if not getattr(tokenizer, "is_fast", False):
        text = f"{type(tokenizer).__name__} has no offsets; a fast one is needed"
        return Finding(about="tokenizer", status="problem", text=text)
    try:
        render_message(tokenizer, "a question")
        text = "has a chat template, which switches thinking off; --chat can be used"
    except ValueError as error:
        text = f"plain prompts only: {error}"
    return Finding(about="tokenizer", status="ok", text=text)


def look_at_run(path: Path) -> Iterator[Finding]:
    """Say what of a run is done, and what its feature store will take."""
    from benchmarks.stages.chain import IN_ORDER
    from benchmarks.stages.configurations import config_from_manifest
    from extract.run.manifest import read_manifest

    try:
        config = config_from_manifest(read_manifest(path)["config"])
    except ValueError as error:
        yield Finding(about="run", status="problem", text=str(error))
        return
    run = RunDir(path)
    names = ["data", *IN_ORDER[:1], "rewrite", *IN_ORDER[1:]]
    done = [name for name in names if run.stage_done(name)]
    gaps = [
        gap
        for name in names
        if run.stage_record(name) is not None and (gap := run.stage_gap(name))
    ]
    yield Finding(
        about="run",
        status="warning" if gaps else "ok",
        text=f"{path}: done are {', '.join(done) or 'no stages'}"
        + "".join(f"; {gap}" for gap in gaps),
    )
    shapes = yield from look_at_model(config.model)
    if shapes is not None:
        yield from _look_at_store(run, config, shapes)


def _look_at_store(
    run: RunDir, config: "RunConfig", shapes: "Shapes"
) -> Iterator[Finding]:
    """Compare what extraction will write with the free disk."""
    import shutil

    from benchmarks.forecasts.doctor_store import count_tokens, sizes_of_choices
    from extract.store.config import as_size, stored_bytes

    counts = count_tokens(run, config.extract.answer_span)
    if counts is None or run.stage_done("extract"):
        return
    try:
        needed = sum(stored_bytes(shapes, config.extract, **counts).values())
    except ValueError:
        return  # a layer is kept that the model does not have: extraction says so
    free = shutil.disk_usage(run.path).free
    fits = needed < free
    yield Finding(
        about="features",
        status="ok" if fits else "problem",
        text=f"the answers there have {counts['n_tokens']:,} tokens, "
        f"{counts['n_answer']:,} of them in answer spans; {config.extract.in_words()} "
        f"take {as_size(needed)}; {as_size(free)} are free"
        + ("" if fits else ", so keep less, or run elsewhere")
        + "\n"
        + sizes_of_choices(shapes, config.extract, **counts),
    )
