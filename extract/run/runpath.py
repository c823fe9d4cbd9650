"""The argument that names a run directory."""

import re
from pathlib import Path
from typing import Any

import click

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class RunPath(click.Path):
    """A path on this machine; a URL would become a local folder of that name."""

    def __init__(self) -> None:
        """Convert to `Path`."""
        super().__init__(path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path, or refuse a URL."""
        if _URL.match(str(value)):
            self.fail(
                f"a run directory is a folder on this machine, found {str(value)!r}; "
                "give a local or mounted path (only a feature store can lie at a URL, "
                "through extract.signals.extraction.extract)",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)
