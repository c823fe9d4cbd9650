"""Which published questions a folder or a run holds, apart from where the files lay."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extract.datasets.pools import BuildConfig, Source
from extract.datasets.splits import SplitConfig, read_splits
from extract.run.atomic import sha256_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the questions depend on.

    Attributes:
      splits: how they were drawn, or None where the splits were given.
      fixed: SHA-256 of the manifest that the splits were taken from, or None.
      context: which passages an example has: "supporting", or with the sets that
        differ, "supporting popqa=none".
      skip_bad: whether refused records were left out.
      sources: (set, role, SHA-256) of each file, sorted.
    """

    splits: SplitConfig | None
    fixed: str | None
    context: str
    skip_bad: bool
    sources: tuple[tuple[str, str, str], ...]

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, lists for tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self), sort_keys=True))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "DataConfig":
        """Return what `as_json` gave.

        Raises:
          KeyError: a field is missing.
          TypeError: the splits have other fields.
        """
        splits = found["splits"]
        return cls(
            splits=None if splits is None else SplitConfig(**splits),
            fixed=found["fixed"],
            context=found["context"],
            skip_bad=found["skip_bad"],
            sources=tuple((name, role, sha) for name, role, sha in found["sources"]),
        )


def data_config(
    sources: Sequence[Source], config: BuildConfig, fixed: Path | None
) -> DataConfig:
    """Return what a build depends on.

    Args:
      sources: at least one file.
      config: what is built.
      fixed: a manifest whose splits are used, or None.

    Raises:
      ValueError: a file is missing, the manifest is none, or a set has a context of
        its own and no file.
    """
    for dataset in sorted(config.contexts.keys() - {s.dataset for s in sources}):
        raise ValueError(
            f"--context {dataset}={config.contexts[dataset]}: no file of {dataset} is "
            "given; leave it out, or give one"
        )
    for source in sources:
        if not source.path.is_file():
            raise ValueError(f"{source.path}: no such file")
    return DataConfig(
        splits=config.splits if fixed is None else None,
        fixed=None if fixed is None else read_splits(fixed)["sha256"],
        context=config.contexts_as_text(),
        skip_bad=config.skip_bad,
        sources=tuple(
            sorted((s.dataset, s.role, sha256_file(s.path)) for s in sources)
        ),
    )
