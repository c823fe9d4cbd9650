"""The record that says with which files a stage was finished."""

import dataclasses
import json
from pathlib import Path
from typing import Self

from extract.run.atomic import write_json_atomic


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What a finished stage leaves behind.

    Attributes:
      inputs: SHA-256 (or another identity) of what it read, by name. A name that is
        a path in the run directory is hashed again when the stage is asked about.
      outputs: SHA-256 of the files and folders it wrote, by path in the run
        directory.
      seconds: wall time.
      finished: UTC.
      versions: of Python and packages, as they were then.
    """

    stage: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    seconds: float
    finished: str
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        """Write the record, in one step."""
        write_json_atomic(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the record at a path, or None if there is none that can be read."""
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            return None  # of an older program or damaged: the stage is done again
