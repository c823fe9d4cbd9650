"""What reading a published file costs: a made-up one of any size, and a fresh process.

The records are of HotpotQA's distractor format and of its size (about 6 kB: ten
paragraphs of some four sentences); words and titles are invented.
"""

import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path

_N_PARAGRAPHS = 4000  # made once; records are drawn from them
_PER_RECORD = 10
_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu né ør".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCost:
    """What one file cost.

    Attributes:
      n_bytes: of the file.
      n_records: read, refused ones included.
      seconds: of wall time, from recognising the file to its last record.
      cpu_seconds: of the processor in that time; other work does not change it much.
      peak_rss: bytes, of the whole process, interpreter and libraries included.
    """

    n_bytes: int
    n_records: int
    n_refused: int
    seconds: float
    cpu_seconds: float
    peak_rss: int

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            f"{self.n_bytes / 1e6:.0f}",
            str(self.n_records),
            str(self.n_refused),
            f"{self.seconds:.1f}",
            f"{self.cpu_seconds:.1f}",
            f"{self.n_records / self.seconds:.0f}",
            f"{self.n_bytes / 1e6 / self.seconds:.1f}",
            f"{self.peak_rss / 2**20:.0f}",
        )


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
            gold = [[title, 0] for title, _ in drawn[:2]]
            rest = json.dumps(
                {
                    "_id": f"{n_records:024x}",
                    "answer": _word(rng),
                    "question": f"Which {_word(rng)} of {_word(rng)} {n_records}?",
                    "supporting_facts": gold,
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


def peak_rss() -> int:
    """Return the most memory this program has held, in bytes.

    Not `ru_maxrss`: after a fork that counts the parent's memory too.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("this system tells no peak of memory; expected Linux with /proc")


def read_file(path: Path) -> DataCost:
    """Stream a file through the loader in this process."""
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
        peak_rss=peak_rss(),
    )


def measure_file(path: Path) -> DataCost:
    """Stream a file through the loader in a fresh process.

    Raises:
      ValueError: the process failed; its last line says why.
    """
    command = [sys.executable, "-m", "benchmarks.speed.data_cost", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"reading {path} failed in a fresh process: {last}")
    return DataCost(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(read_file(Path(sys.argv[1])))))
