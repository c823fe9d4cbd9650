"""The benchmarks of extraction: are the signals exact, and what do they cost?"""

import dataclasses
import json

import click

from extract.console import Progress, quiet


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def oracle(as_json: bool) -> None:
    """Compare every architecture with a brute-force oracle; print the table.

    Largest absolute errors of tiny random models, fp32 and bf16; behind each bf16
    error, in brackets, how far the model's own eager attention moves that reading.

    Example: beatrice bench oracle
    """
    from benchmarks import exactness

    quiet()
    rows, every = [], list(exactness.architectures())
    with Progress().stage("oracle") as update:
        for done, (name, build) in enumerate(every, start=1):
            rows.append(exactness.measure(name, build))
            update(done, len(every))
    if as_json:
        for row in rows:
            click.echo(json.dumps(dataclasses.asdict(row)))
    else:
        click.echo(exactness.table(rows))
    exactness.require(rows)
