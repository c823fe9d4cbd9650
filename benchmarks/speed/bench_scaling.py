"""`beatrice bench scaling`: how the time of training grows."""

import dataclasses
import json
import os
from pathlib import Path

import click

from extract.run.console import Progress, quiet


@click.command()
@click.option("--rounds", default=3, help="Epochs timed of each.")
@click.option("--steps", default=4, help="Of each encoder, at 1x.")
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figure there, as SVG.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def scaling(rounds: int, steps: int, figure: Path | None, as_json: bool) -> None:
    """Time training against examples, members and width, and fit exponents.

    Example: beatrice bench scaling --figure scaling.svg
    """
    from benchmarks.speed.bench_training import machine, microworld
    from benchmarks.stages.presets import WHOLE_OPERATIONS
    from benchmarks.verbs.opening import set_compiler

    if min(rounds, steps) < 1:
        raise click.UsageError("--rounds and --steps must be at least 1")
    if figure is not None and figure.suffix != ".svg":
        raise click.UsageError(f"--figure is written as SVG, found {figure.name!r}")
    set_compiler(WHOLE_OPERATIONS)
    from benchmarks.speed.scaling_cost import exponents, measure

    quiet()
    with Progress().stage("scaling") as update:
        points = measure(microworld(steps), rounds, os.cpu_count() or 1, update)
    fitted = exponents(points)
    if figure is not None:
        _write(figure, points, fitted)
    if as_json:
        for point in points:
            row = {**dataclasses.asdict(point), "exponent": fitted[point.axis]}
            click.echo(json.dumps(row))
        return
    click.echo("| axis | sizes | seconds an epoch | GFLOP/s | exponent |")
    click.echo("|---|---|---|---|---|")
    for axis, exponent in fitted.items():
        own = [point for point in points if point.axis == axis]
        cells = (
            ", ".join(str(p.size) for p in own),
            ", ".join(f"{p.seconds:.2f}" for p in own),
            ", ".join(f"{p.gflops:.1f}" for p in own),
        )
        click.echo(f"| {axis} | {' | '.join(cells)} | {exponent:.2f} |")
    click.echo(f"\n{machine()}; {rounds} rounds, the median.")


def _write(path: Path, points: list, fitted: dict[str, float]) -> None:
    """Write the figure as a file of its own."""
    from benchmarks.results.figures import to_svg
    from benchmarks.speed.scalingfigure import scaling as draw
    from extract.run.files import write_text_atomic

    said = ", ".join(f"{axis} {value:.2f}" for axis, value in fitted.items())
    svg = to_svg(draw(points, fitted), "scaling", f"Exponents of training time: {said}")
    write_text_atomic(
        path, svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    )
