"""What the doctor finds of a model, and of a run directory."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.doctor import Finding
from benchmarks.forecast import bytes_in_words
from extract.embedded import model_path
from extract.jsonlines import JsonLines
from extract.rundir import RunDir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, from its config alone."""

    n_layers: int
    d_model: int
    n_heads: int
    window: int | None

    def row_bytes(self, n_hidden: int, hidden_bytes: int) -> int:
        """Return the bytes of one token in the feature store, every layer's attention.

        Args:
          n_hidden: kept entries of the resid axis.
          hidden_bytes: of one stored number of `hidden`.
        """
        hidden = n_hidden * self.d_model * hidden_bytes
        resid, attn = 4 * self.n_layers, 2 * 2 * self.n_layers * self.n_heads
        return hidden + 4 * (5 + resid + attn)


def _shape(name: str) -> tuple[Shape, Any]:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    shape = Shape(
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        window=getattr(config, "max_position_embeddings", None),
    )
    return shape, tokenizer


def look_at_model(name: str) -> Iterator[Finding]:
    """Look at a backbone's config and tokenizer; its weights are not loaded."""
    from extract.chat import render_message
    from extract.modelname import check_name

    path = model_path(name)
    try:
        check_name(path)
        shape, tokenizer = _shape(path)
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        text = f"{name} cannot be used: {said}"
        yield Finding(about="model", status="problem", text=text)
        return
    window = "no limit" if shape.window is None else f"{shape.window} tokens"
    yield Finding(
        about="model",
        status="ok",
        text=f"{name}: {shape.n_layers} layers, width {shape.d_model}, "
        f"{shape.n_heads} heads, window {window}; one token is "
        f"{bytes_in_words(shape.row_bytes(shape.n_layers + 1, 2))} in the feature "
        "store (every hidden layer, 16 bits)",
    )
    if not getattr(tokenizer, "is_fast", False):
        text = f"{type(tokenizer).__name__} has no offsets; a fast one is needed"
        yield Finding(about="tokenizer", status="problem", text=text)
        return
    try:
        render_message(tokenizer, "a question")
        text = "has a chat template, which switches thinking off; --chat can be used"
    except ValueError as error:
        text = f"plain prompts only: {error}"
    yield Finding(about="tokenizer", status="ok", text=text)


def look_at_run(path: Path) -> Iterator[Finding]:
    """Say what of a run is done, and what its feature store will take."""
    from benchmarks.opening import config_of
    from benchmarks.stages import IN_ORDER

    try:
        config = config_of(path)
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
    yield from look_at_model(config.model)
    yield from _look_at_store(run, config)


def _look_at_store(run: RunDir, config: Any) -> Iterator[Finding]:
    """Compare what extraction will write with the free disk."""
    import shutil

    n_tokens = sum(
        len(row["prompt_ids"]) + len(row["token_ids"])
        for row in JsonLines(run.answers / "answers.jsonl").whole_rows()
    )
    if not n_tokens or run.stage_done("extract"):
        return
    shape, _ = _shape(config.model_path)
    kept = config.extract.hidden_layers
    n_hidden = shape.n_layers + 1 if kept is None else len(kept)
    itemsize = 4 if config.extract.dtype == "float32" else 2
    needed = n_tokens * shape.row_bytes(n_hidden, itemsize)
    free = shutil.disk_usage(run.path).free
    fits = needed < free
    yield Finding(
        about="features",
        status="ok" if fits else "problem",
        text=f"the answers there have {n_tokens:,} tokens, which take at most "
        f"{bytes_in_words(needed)}; {bytes_in_words(free)} are free"
        + ("" if fits else ", so keep fewer layers, or run elsewhere"),
    )
