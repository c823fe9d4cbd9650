"""The verbs that look and change nothing: `verify` and `doctor`."""

import dataclasses
import json
from pathlib import Path

import click

from extract.run.verbs import RUN_DIR, RunPath


@click.command()
@RUN_DIR
def verify(run_dir: Path) -> None:
    """Read every checksum of a run again: stages, stores, weights.

    Example: beatrice verify runs/demo
    """
    problems = verify_run(run_dir)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.ClickException(f"{len(problems)} problems found in {run_dir}")
    click.echo(f"{run_dir}: every checksum holds")


def verify_run(path: Path) -> list[str]:
    """Return every problem of a run directory, one sentence each.

    Checks what each finished stage recorded of its inputs and outputs, every chunk of
    the feature stores, and every file of the trained weights.

    Raises:
      ValueError: the path is no run directory.
    """
    from extract.records import SETTINGS
    from extract.run.directory import RunDir
    from extract.run.files import CHECKSUMS, verify_checksums
    from extract.run.manifest import read_manifest
    from extract.store.read import open_store
    from extract.store.write import verify as verify_store

    read_manifest(path)
    run = RunDir(path)
    problems = [gap for name in run.stage_records() if (gap := run.stage_gap(name))]
    for setting in SETTINGS:
        if run.features(setting).exists():
            try:
                problems += verify_store(open_store(run.features(setting)))
            except ValueError as error:
                problems.append(str(error))
    for sums in sorted(path.rglob(CHECKSUMS)):
        try:
            verify_checksums(sums.parent)
        except ValueError as error:
            problems.append(str(error))
    return problems


@click.command()
@click.argument("run_dir", required=False, type=RunPath())
@click.option(
    "--model", help="Also look at a backbone: directory, GGUF file, Hub id, embedded."
)
@click.option("--server", help="Also ask an OpenAI-compatible server, up to /v1.")
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON lines.")
def doctor(
    run_dir: Path | None, model: str | None, server: str | None, as_json: bool
) -> None:
    """Look whether a run can work here: packages, GPUs, disk, model, server, run.

    Nothing is loaded, generated or written. Exit code 1 if something would stop a run.

    Example: beatrice doctor runs/paper --model Qwen/Qwen3.5-9B
    """
    from extract import doctor as checks
    from extract.run.console import quiet

    hub = list(checks.look_at_hub(model))
    quiet()
    findings = [
        *checks.look_at_packages(),
        *checks.look_at_machine((run_dir or Path.cwd()).absolute()),
        *checks.look_at_devices(),
        *hub,
        *(checks.look_at_model(model) if model is not None else ()),
        *(checks.look_at_run(run_dir) if run_dir is not None else ()),
        *(checks.look_at_server(server) if server is not None else ()),
    ]
    for found in findings:
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(found)))
        else:
            click.echo(f"{found.status:<8} {found.about:<10} {found.text}")
    n_problems = sum(found.status == "problem" for found in findings)
    if n_problems:
        raise click.ClickException(
            f"{n_problems} of {len(findings)} findings would stop a run"
        )
