import json

from beatrice.benchmarks.bench.commands import measure_fresh
from beatrice.extract.run.memory import peak_bytes

RECORD = {
    "answer": "Ulm",
    "supporting_facts": [["Title 0", 0], ["Title 1", 0]],
    "type": "bridge",
    "level": "hard",
    "context": [[f"Title {i}", ["Words of a sentence. " * 20]] for i in range(10)],
}


def write_hotpot(path, n_records):
    with path.open("w") as stream:
        for i in range(n_records):
            record = {"_id": f"{i:024x}", "question": f"Which town is {i}?", **RECORD}
            stream.write(", " if i else "[")
            json.dump(record, stream)
        stream.write("]")


def read_file(path):
    """Return how many questions are loaded, and the peak of the process."""
    from beatrice.extract.datasets.loading import Loaded, open_dataset

    n_loaded = sum(isinstance(row, Loaded) for row in open_dataset(path).read())
    return n_loaded, peak_bytes()


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for n_records in (200, 4000):
        path = tmp_path / str(n_records)
        write_hotpot(path, n_records)
        n_loaded, peak = measure_fresh("the loader", read_file, path)
        assert n_loaded == n_records
        peaks.append(peak)
    # A list of all records would take several times the 18 MB of the larger file.
    assert path.stat().st_size > 15_000_000
    assert peaks[1] - peaks[0] < 10_000_000
    assert peaks[1] < 300 * 2**20
