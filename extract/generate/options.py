"""The options that choose the model that generates, and the settings of a new run.

Whether a model can be read is checked at once, not after an hour of answers.
"""

import dataclasses
import os
import re
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import click

from beatrice.extract.backbone.names import (
    EMBEDDED,
    BackboneConfig,
    ModelDtype,
    check_name,
    model_path,
)
from beatrice.extract.generate.prompts import ANSWER_PRESETS, AnswerConfig
from beatrice.extract.run.console import silence_transformers
from beatrice.extract.run.directory import NewRun, Preset
from beatrice.extract.run.verbs import option


def check_server(url: str) -> None:
    """Check that a server's address is a URL that every message may show."""
    if "@" in url.split("//", 1)[-1].split("/")[0] or re.search("[?#]", url):
        raise click.BadParameter(
            "expected a URL without a name, password or query; a key is read from the "
            "environment variable OPENAI_API_KEY",
            param_hint="--server",
        )
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(
            f"expected a URL such as http://localhost:8000/v1, found {url!r}",
            param_hint="--server",
        )


def seconds_asked_for(retry_after: str) -> float:
    """Return the seconds that a server's header Retry-After asks to wait, at least 0.

    It holds seconds or a date; an invalid one asks for nothing.
    """
    try:
        if retry_after.endswith("GMT"):
            until = parsedate_to_datetime(retry_after).timestamp()
            return max(0.0, until - time.time())
        return max(0.0, float(retry_after))  # of NaN too
    except (ValueError, OverflowError):
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server that has a model, and how requests are sent to it."""

    server: str | None = option("URL of an OpenAI-compatible server, up to /v1.")
    dialect: Literal["vllm", "openai", "openai-reasoning"] = option(
        "vllm: exact token ids, top-k, thinking off; openai: standard fields only, "
        "which cannot switch thinking off; openai-reasoning: the fields of OpenAI's "
        "reasoning models, which can only judge and rewrite.",
        "vllm",
        rare=True,
    )
    revision: str = option(
        "Revision of the server's weights, tokenizer and chat template, which servers "
        "do not report.",
        "unstated",
        rare=True,
    )
    served_dtype: str = option(
        "Type of the server's weights, such as bfloat16; servers do not report it.",
        "unstated",
        rare=True,
    )
    concurrency: int = option("Most requests at a time.", 16, rare=True, min=1)
    retries: int = option("Most retries of a failed request.", 5, rare=True, min=0)
    timeout: float = option(
        "Seconds to wait for the whole reply to a request.",
        600.0,
        rare=True,
        min=0,
        is_above=True,
    )
    price_prompt: float = option(
        "Price per million prompt tokens, for max_cost.", 0.0, rare=True, min=0
    )
    price_new: float = option(
        "Price per million generated tokens, likewise.", 0.0, rare=True, min=0
    )
    max_cost: float | None = option(
        "Stop before the stage costs more than this at these prices; what earlier "
        "processes paid for its texts counts too.",
        rare=True,
        min=0,
    )

    def __post_init__(self) -> None:
        """Check that server settings come with a server, and a cap with prices."""
        if self.server is None:
            for name in ("max_cost", "served_model"):
                if getattr(self, name, None) is not None:
                    raise click.UsageError(f"{name} is for a server; give --server too")
            return
        check_server(self.server)
        if self.max_cost is not None and self.price_prompt == self.price_new == 0:
            raise click.UsageError(
                "max_cost needs prices, or nothing counts towards it; give "
                "price_prompt and price_new, per million tokens"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunServerOptions(ServerOptions):
    """A server that has the run's own backbone."""

    served_model: str | None = option(
        "The server's name for the run's backbone.", rare=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendOptions(ServerOptions):
    """A server, or Transformers on this machine if none is given."""

    device: str | None = option("Without --server: Torch device.", show_default="cpu")
    model_dtype: ModelDtype | None = option(
        "Without --server: weight type. Default: bfloat16 on cuda, else float32."
    )
    batch_tokens: int = option(
        "Without --server: tokens per batch, padding included.",
        16_384,
        rare=True,
        min=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBackendOptions(RunServerOptions, BackendOptions):
    """Where answers are sampled from the run's own backbone."""

    device: str | None = option("Without --server: Torch device. Default: the run's.")
    model_dtype: ModelDtype | None = option(
        "Without --server: type of the weights. Default: the run's."
    )


def check_model_option(name: str, flag: str = "--model") -> None:
    """Check that a name can be a model's: a directory, or a Hub id."""
    try:
        check_name(model_path(name))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=flag) from None


def check_backbone(
    config: BackboneConfig, hidden_layers: Sequence[int] | None = None
) -> None:
    """Check that a backbone can be loaded and read, and has the layers asked for.

    A Hub id is not looked up: nothing is downloaded before it is needed.
    """
    check_model_option(config.model)
    if config.device != "cpu":  # a run is often created on a machine without its GPUs
        from beatrice.extract.backbone.loading import check_device

        try:
            check_device(config.device)
        except ValueError as error:
            click.echo(f"note: {error}", err=True)
    path = Path(os.path.expanduser(config.path))
    if not path.exists() or (config.model == EMBEDDED and hidden_layers is None):
        return
    from beatrice.extract.backbone.loading import load_outline
    from beatrice.extract.signals.parity import require_readable

    silence_transformers()
    outline = load_outline(str(path))
    require_readable(config.model, outline)
    n_layers = outline.config.num_hidden_layers
    if wrong := [layer for layer in hidden_layers or () if layer > n_layers]:
        raise click.BadParameter(
            f"{config.model} has layers 0 (the embedding) to {n_layers}, not "
            f"{wrong[0]}",
            param_hint="--hidden-layers",
        )


def answer_preset(preset: Preset, model: str) -> AnswerConfig:
    """Return how a model answers in a new run; the embedded one only gives names."""
    config = ANSWER_PRESETS[preset]
    if model == EMBEDDED:
        return config
    most = ANSWER_PRESETS["paper"].generation.max_new_tokens
    generation = dataclasses.replace(config.generation, max_new_tokens=most)
    return dataclasses.replace(config, generation=generation)


def new_run(
    preset: Preset,
    seed: int,
    backbone: BackboneConfig,
    answer: AnswerConfig,
    storage: dict[str, Any],
    **questions: Any,
) -> NewRun:
    """Return the settings of a new run, after checking its model.

    `storage` holds the fields of `ExtractConfig` that differ from the preset's, and
    `questions` the section that says where the run's questions come from.
    """
    from beatrice.extract.signals.extract import EXTRACT_PRESETS

    check_backbone(backbone, storage.get("hidden_layers"))
    extract = dataclasses.replace(EXTRACT_PRESETS[preset], **storage)
    common = {"backbone": backbone, "answer": answer, "extract": extract}
    return NewRun(preset=preset, seed=seed, sections=common | questions)
