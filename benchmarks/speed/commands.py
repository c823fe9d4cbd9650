"""`beatrice bench`: what is promised in numbers, measured again by one command.

A benchmark lives in its own module and is listed in `BENCHES`; nothing of it is
imported before it is asked for.
"""

import importlib

import click

# Subcommand -> "module:command", in the order of the help.
BENCHES = {
    "data": "benchmarks.speed.bench_data:data",
    "oracle": "benchmarks.speed.bench_extraction:oracle",
    "extract": "benchmarks.speed.bench_extraction:extract",
    "train": "benchmarks.speed.bench_training:train",
    "store": "benchmarks.speed.bench_store:store",
    "scaling": "benchmarks.speed.bench_scaling:scaling",
    "select": "benchmarks.speed.bench_selection:select",
    "resume": "benchmarks.speed.bench_resume:resume",
    "precision": "benchmarks.speed.bench_precision:precision",
    "mixed": "benchmarks.speed.bench_mixed:mixed",
}


class _Benches(click.Group):
    """Loads a benchmark's command when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the benchmarks in the order of the table."""
        return list(BENCHES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import one benchmark's command, which itself imports nothing heavy."""
        if name not in BENCHES:
            return None
        module, _, attribute = BENCHES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)


@click.group(cls=_Benches)
def bench() -> None:
    """Measure what the README claims: exactness, speed and memory.

    Example: beatrice bench oracle
    """
