"""Configurations that no preset has as it is: of published questions, of a manifest."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.stages.presets import RunConfig, make_config
from extract.datasets.pools import DataConfig
from extract.generate.requests import PromptConfig
from extract.store.config import store_config_of


def with_questions(
    config: RunConfig, data: DataConfig | None, **fields: Any
) -> RunConfig:
    """Return a configuration that asks published questions.

    Args:
      config: of a preset.
      data: which questions; None keeps the microworld's.
      **fields: of `RunConfig`, as they are to be.
    """
    if data is not None:
        fields |= {"world": None, "questions": None}
    return dataclasses.replace(config, data=data, **fields)


def _with_own(config: RunConfig, found: Mapping[str, Any]) -> RunConfig:
    """Return a preset's configuration with what a manifest has of its own.

    Raises:
      KeyError: a field is missing.
      TypeError: a field has other parts.
    """
    data = found["data"]
    return with_questions(
        config,
        None if data is None else DataConfig.from_json(data),
        prompt=PromptConfig(**found["prompt"]),
        max_new_tokens=found["max_new_tokens"],
        model_dtype=found["model_dtype"],
        device=found["device"],
    )


def config_from_manifest(found: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that a manifest holds.

    Raises:
      ValueError: this version of the program makes another one of the same options.
    """
    try:
        config = make_config(
            found["preset"],
            model=found["model"],
            seed=found["seed"],
            answer_span=found["extract"]["answer_span"],
            kept=store_config_of(found["extract"]),
            is_streamed=found["stream"] is not None,
            is_mixed=found["encoder"]["products"] != "float32",
        )
        return _with_own(config, found)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the run's manifest lacks {error}; it was made by another version of this "
            "program, start a new run directory"
        ) from None
