"""Prints the rows of a benchmark as they are measured.

At once: a run that is stopped has shown what it measured.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import click

from extract.run.console import table_head, table_row


class Lines:
    """Prints rows under headings, or as JSON lines."""

    def __init__(self, as_json: bool) -> None:
        """Print for a person, or for a program."""
        self._as_json = as_json
        self._is_first = True

    def head(self, names: Sequence[str]) -> None:
        """Begin a table."""
        if not self._is_first:
            self.text("")
        self._is_first = False
        self.text(table_head(names))

    def row(self, found: Any) -> None:
        """Print one measurement."""
        as_json = json.dumps(dataclasses.asdict(found)) if self._as_json else None
        click.echo(as_json or table_row(found.cells()))

    def not_measured(self, first: list[str], head: Sequence[str]) -> None:
        """Say what this machine could not measure."""
        self.text(table_row([*first, *["not measured"] * (len(head) - len(first))]))

    def text(self, text: str) -> None:
        """Print what is for people alone."""
        if not self._as_json:
            click.echo(text)
