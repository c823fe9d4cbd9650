"""A run whose questions are published ones: what its configuration has besides."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from extract.asking import AskConfig
from extract.datasets.dataconfig import DataConfig

if TYPE_CHECKING:
    from benchmarks.presets import RunConfig


def with_questions(
    config: "RunConfig", data: DataConfig | None, **fields: Any
) -> "RunConfig":
    """Return a configuration that asks published questions.

    Args:
      config: of a preset.
      data: which questions; None keeps the microworld's.
      **fields: of `RunConfig`, as they are to be.
    """
    if data is not None:
        fields |= {"world": None, "questions": None}
    return dataclasses.replace(config, data=data, **fields)


def from_manifest(config: "RunConfig", found: Mapping[str, Any]) -> "RunConfig":
    """Return a preset's configuration with what a manifest has of its own.

    Raises:
      KeyError: a field is missing.
      TypeError: a field has other parts.
    """
    data = found["data"]
    return with_questions(
        config,
        None if data is None else DataConfig.from_json(data),
        prompt=AskConfig(**found["prompt"]),
        max_new_tokens=found["max_new_tokens"],
        model_dtype=found["model_dtype"],
        device=found["device"],
    )
