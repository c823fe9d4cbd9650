"""The benchmark of the dataset readers: records a second, and flat memory."""

import dataclasses
import json
import tempfile
from pathlib import Path

import click

from extract.run.console import Progress, table_head, table_row

_HEAD = "MB", "records", "refused", "s", "CPU s", "records/s", "MB/s", "peak MiB"
_SMALLER = 10  # the other row's file, to show whether memory grows with size


@click.command()
@click.option(
    "--megabytes",
    default=500,
    type=click.IntRange(min=1),
    help="Size of the made-up file.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where it is written and removed again; default: the system's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def data(megabytes: int, folder: Path | None, as_json: bool) -> None:
    """Stream made-up HotpotQA files through the loader; print rate and peak memory.

    Two files, the second ten times the first, each read by a fresh process.

    Example: beatrice bench data --megabytes 500
    """
    from benchmarks.speed.data_cost import measure_file, write_hotpot

    if not as_json:
        click.echo(table_head(_HEAD))
    sizes = (megabytes * 1_000_000 // _SMALLER, megabytes * 1_000_000)
    with Progress().stage("data") as update:
        for done, n_bytes in enumerate(sizes, start=1):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                path = Path(place) / "hotpot_made_up.json"
                write_hotpot(path, n_bytes)
                cost = measure_file(path)
            row = table_row(cost.cells())
            click.echo(json.dumps(dataclasses.asdict(cost)) if as_json else row)
            update(done, len(sizes))
