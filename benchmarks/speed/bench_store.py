"""`beatrice bench store`: training from a store beside training on resident data."""

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.run.console import Progress, quiet

if TYPE_CHECKING:
    from benchmarks.speed.store_cost import StoreCost


def microworld(n_train: int, n_epochs: int) -> "StoreCost":
    """Return the demo's encoders and widths, an eighth as many validated on."""
    from benchmarks.speed.bench_training import microworld as workload
    from benchmarks.speed.store_cost import StoreCost
    from jaxprobe.config import StreamConfig

    return StoreCost(
        work=workload(1),
        # Short sequences: a chunk of fewer rows reads much that it does not want.
        stream=StreamConfig(n_chunk=128),
        n_train=n_train,
        n_valid=n_train // 8,
        n_epochs=n_epochs,
    )


@click.command()
@click.option("--examples", default=16384, help="Trained on.")
@click.option("--epochs", default=3, help="Of each training.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def store(examples: int, epochs: int, as_json: bool) -> None:
    """Train from a store of one and of two sizes, and with everything in memory.

    Five encoders at microworld widths, on a store that is made up in a temporary
    folder (TMPDIR); reads start from the disk, not from the system's cache.

    Example: beatrice bench store --examples 65536
    """
    from benchmarks.speed.store_cost import make_store, measure_in_process
    from benchmarks.stages.presets import WHOLE_OPERATIONS

    if examples < 1024 or epochs < 1:
        raise click.UsageError("--examples must be at least 1024, --epochs at least 1")
    quiet()
    os.environ.setdefault("XLA_FLAGS", WHOLE_OPERATIONS)  # of what it runs
    note = Progress().note
    once = microworld(examples, epochs)
    twice = dataclasses.replace(once, n_train=2 * examples, n_valid=2 * once.n_valid)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for size, config in (("once", once), ("twice", twice)):
            where = Path(name) / size
            note(f"writes {config.n_train + config.n_valid} examples")
            make_store(where, config, config.n_train + config.n_valid)
            for mode in ("streamed", "resident"):
                note(f"{mode}, data {size}")
                found[mode, size] = measure_in_process(mode, where, config)
        note("reading")
        found["reading", "twice"] = measure_in_process("reading", where, twice)
    if as_json:
        rows = {" ".join(key): row for key, row in found.items()}
        click.echo(json.dumps(rows))
        return
    _print(found)


def _print(found: dict[tuple[str, str], dict[str, float]]) -> None:
    streamed, resident = (
        [found[mode, size] for size in ("once", "twice")]
        for mode in ("streamed", "resident")
    )
    click.echo("| | streamed | resident | streamed / resident |")
    click.echo("|---|---|---|---|")
    for i, size in enumerate(("1x", "2x")):
        for name, field, digits in (
            ("encoder-steps/s", "steps_per_second", 1),
            ("peak memory of the process, MiB", "peak_mib", 0),
            ("validation AUROC", "auroc", 4),
        ):
            ours, theirs = streamed[i][field], resident[i][field]
            click.echo(
                f"| {name}, {size} the data | {ours:.{digits}f} | {theirs:.{digits}f} "
                f"| {ours / theirs:.3f} |"
            )
    grown = [two["peak_mib"] / one["peak_mib"] - 1 for one, two in (streamed, resident)]
    click.echo(f"| growth of memory, 1x to 2x | {grown[0]:+.1%} | {grown[1]:+.1%} | |")
    rates = found["reading", "twice"]
    raw = rates["raw_mib_per_second"]
    click.echo(
        f"\nReading alone: files in order {raw:.0f} MiB/s, families of shuffled chunks "
        f"{rates['chunks_mib_per_second']:.0f} MiB/s "
        f"({rates['chunks_mib_per_second'] / raw:.0%}), padded spans as trained on "
        f"{rates['padded_mib_per_second']:.0f} MiB/s "
        f"({rates['padded_mib_per_second'] / raw:.0%})."
    )
