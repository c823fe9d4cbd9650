"""`beatrice bench`: what is promised in numbers, measured again by one command.

A benchmark lives in its own module and is listed in `BENCHES`; nothing of it is
imported before it is asked for.
"""

import importlib

import click

# Subcommand -> "module:command", in the order of the help.
BENCHES = {
    "data": "benchmarks.benches.bench_data:data",
    "oracle": "benchmarks.benches.bench_extraction:oracle",
    "extract": "benchmarks.benches.bench_extraction:extract",
    "train": "benchmarks.benches.bench_training:train",
    "store": "benchmarks.benches.bench_store:store",
    "scaling": "benchmarks.benches.bench_scaling:scaling",
    "select": "benchmarks.benches.bench_selection:select",
    "resume": "benchmarks.benches.bench_resume:resume",
    "precision": "benchmarks.benches.bench_precision:precision",
    "mixed": "benchmarks.benches.bench_mixed:mixed",
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
