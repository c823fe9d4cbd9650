"""The verb that looks whether a run can work here."""

import dataclasses
import json
from pathlib import Path

import click

from extract.run.console import RunPath


@click.command()
@click.argument("run_dir", required=False, type=RunPath())
@click.option("--model", help="Also look at a backbone: directory, Hub id, embedded.")
@click.option("--server", help="Also ask an OpenAI-compatible server, up to /v1.")
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON lines.")
def doctor(
    run_dir: Path | None, model: str | None, server: str | None, as_json: bool
) -> None:
    """Look whether a run can work here: packages, GPUs, disk, model, server, run.

    Nothing is loaded, generated or written. Exit code 1 if something would stop a run.

    Example: beatrice doctor runs/paper --model Qwen/Qwen3.5-9B
    """
    from benchmarks.forecasts import doctor as checks
    from extract.run.console import quiet

    quiet()
    findings = [
        *checks.look_at_packages(),
        *checks.look_at_machine((run_dir or Path.cwd()).absolute()),
        *checks.look_at_devices(),
    ]
    if model is not None or run_dir is not None:
        from benchmarks.forecasts.doctor_run import look_at_model, look_at_run

        findings += look_at_model(model) if model is not None else ()
        findings += look_at_run(run_dir) if run_dir is not None else ()
    if server is not None:
        findings += checks.look_at_server(server)
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
