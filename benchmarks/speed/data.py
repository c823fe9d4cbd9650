"""`beatrice bench data`: what reading a published file costs, of two sizes.

The file is made up, and a fresh process reads it. Its records are of HotpotQA's
distractor format and of its size (about 6 kB: ten paragraphs of some four sentences);
words and titles are invented.
"""

import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path

import click

from benchmarks.speed.commands import AS_JSON, MIB, RowPrinter, measure_fresh
from extract.run.console import Progress
from extract.run.memory import peak_bytes

HEAD = ("MB", "records", "refused", "s", "CPU s", "records/s", "MB/s", "peak MiB")
_SMALLER = 10  # the other row's file, to show whether memory grows with size
_N_PARAGRAPHS = 4000  # made once; records are drawn from them
_PER_RECORD = 10
_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu né ør".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCost:
    """What one file cost, from recognising it to its last record.

    Records count refused ones too; `peak_rss` is in bytes, of the whole process with
    interpreter and libraries.
    """

    n_bytes: int
    n_records: int
    n_refused: int
    seconds: float
    cpu_seconds: float
    peak_rss: int

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `HEAD`."""
        return [
            f"{self.n_bytes / 1e6:.0f}",
            str(self.n_records),
            str(self.n_refused),
            f"{self.seconds:.1f}",
            f"{self.cpu_seconds:.1f}",
            f"{self.n_records / self.seconds:.0f}",
            f"{self.n_bytes / 1e6 / self.seconds:.1f}",
            f"{self.peak_rss / MIB:.0f}",
        ]


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))


def _sentence(rng: random.Random) -> str:
    words = [_word(rng) for _ in range(rng.randint(10, 28))]
    return " " + words[0].capitalize() + " " + " ".join(words[1:]) + "."


def _paragraph(rng: random.Random, number: int) -> tuple[str, str]:
    """Return a title and the paragraph as JSON, escaped as in the published files."""
    title = f"{_word(rng).capitalize()} {_word(rng).capitalize()} ({number})"
    sentences = [_sentence(rng) for _ in range(rng.randint(2, 6))]
    return title, json.dumps([title, sentences])


def write_hotpot(path: Path, n_bytes: int, *, seed: int = 0) -> int:
    """Write a made-up file in HotpotQA's format; returns its number of records.

    Args:
      path: of the file.
      n_bytes: at least so many; the last record goes beyond.
      seed: of the words.
    """
    rng = random.Random(seed)
    pool = [_paragraph(rng, number) for number in range(_N_PARAGRAPHS)]
    n_records, n_written = 0, 1
    with path.open("w", encoding="ascii") as stream:
        stream.write("[")
        while n_written < n_bytes:
            drawn = rng.sample(pool, _PER_RECORD)
            rest = json.dumps(
                {
                    "_id": f"{n_records:024x}",
                    "answer": _word(rng),
                    "question": f"Which {_word(rng)} of {_word(rng)} {n_records}?",
                    "supporting_facts": [[title, 0] for title, _ in drawn[:2]],
                    "type": "bridge",
                    "level": "hard",
                }
            )
            context = ", ".join(text for _, text in drawn)
            comma = ", " if n_records else ""
            n_written += stream.write(f'{comma}{rest[:-1]}, "context": [{context}]}}')
            n_records += 1
        stream.write("]")
    return n_records


def read_file(path: Path) -> DataCost:
    """Stream a file through the loader, and drop it; for a fresh process."""
    from extract.datasets.loading import Refusal, open_dataset

    began, worked = time.perf_counter(), time.process_time()
    n_records = n_refused = 0
    for found in open_dataset(path).read():
        n_records += 1
        n_refused += isinstance(found, Refusal)
    return DataCost(
        n_bytes=path.stat().st_size,
        n_records=n_records,
        n_refused=n_refused,
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - worked,
        peak_rss=peak_bytes(),
    )


@click.command()
@click.option(
    "--megabytes",
    default=500,
    type=click.IntRange(min=1),
    help="Size of the made-up file.",
)
@AS_JSON
def data(megabytes: int, as_json: bool) -> None:
    """Stream made-up HotpotQA files through the loader; print rate and peak memory.

    Two files, the second ten times the first, each in TMPDIR and read by a fresh
    process.

    Example: beatrice bench data --megabytes 500
    """
    printer = RowPrinter(as_json)
    printer.head(HEAD)
    sizes = (megabytes * 1_000_000 // _SMALLER, megabytes * 1_000_000)
    with Progress().stage("data") as update:
        for done, n_bytes in enumerate(sizes, start=1):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "hotpot_made_up.json"
                write_hotpot(path, n_bytes)
                printer.row(measure_fresh("the loader", read_file, path))
            update(done, len(sizes))
