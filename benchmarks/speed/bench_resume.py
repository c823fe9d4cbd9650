"""`beatrice bench resume`: does a killed extraction end with the same bytes?"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.verbs.keepoptions import keep_options, take_kept
from benchmarks.verbs.opening import SEED
from extract.run.console import Progress, quiet


@click.command()
@click.option(
    "--examples",
    default=5000,
    type=click.IntRange(min=1),
    help="Of the store: a question in one setting and wording is one.",
)
@click.option(
    "--kills",
    default=20,
    type=click.IntRange(min=1),
    help="SIGKILLs at random moments.",
)
@click.option("--seed", default=0, type=SEED, help="Of the moments.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@keep_options
def resume(examples: int, kills: int, seed: int, as_json: bool, **options: Any) -> None:
    """Kill `beatrice extract` at random and resume it; compare every stored byte.

    Fails if a file differs from that of an uninterrupted run, or if fewer kills hit.

    Example: beatrice bench resume --examples 600 --kills 5
    """
    from benchmarks.speed.resume_proof import ResumeConfig, prove
    from extract.store.config import StoreConfig

    quiet()
    config = ResumeConfig(
        n_examples=examples,
        n_kills=kills,
        seed=seed,
        kept=StoreConfig(**take_kept(options)),
    )
    with tempfile.TemporaryDirectory() as folder:
        with Progress().stage("resume") as update:
            found = prove(Path(folder), config, update)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    else:
        click.echo(
            f"{found.n_examples} examples in {found.n_ranges} ranges; {found.n_kills} "
            f"kills, {found.n_torn} of them with a range half written; {found.n_files} "
            f"files, {found.n_bytes} bytes, {len(found.differing)} files differ; "
            f"{found.whole_seconds:.0f} s uninterrupted, {found.killed_seconds:.0f} s "
            "killed"
        )
    if found.differing:
        raise click.ClickException(f"{found.differing[0]} differs after resuming")
    if found.n_kills < kills:
        raise click.ClickException(
            f"only {found.n_kills} of {kills} kills came before the end; use more "
            "examples"
        )
