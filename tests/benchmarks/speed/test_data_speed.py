import json

from click.testing import CliRunner

from beatrice.cli import main
from benchmarks.speed.commands import measure_fresh
from benchmarks.speed.data import read_file, write_hotpot
from extract.datasets.loading import Loaded, open_dataset


def test_the_made_up_file_is_hotpotqa_of_its_usual_size(tmp_path):
    path = tmp_path / "x"
    n_records = write_hotpot(path, 300_000)
    assert 300_000 <= path.stat().st_size < 320_000
    file = open_dataset(path)
    assert file.dataset == "hotpotqa"
    found = list(file.read())
    assert len(found) == n_records == len({one.question.id for one in found})
    assert all(isinstance(one, Loaded) for one in found)
    assert all(len(one.question.passages) == 10 for one in found)
    assert all(
        sum(p.is_supporting for p in one.question.passages) == 2 for one in found
    )
    assert 4_000 < 300_000 / n_records < 9_000
    assert len(json.loads(path.read_text())) == n_records


def test_memory_does_not_grow_with_the_file(tmp_path):
    costs = []
    for n_bytes in (1_000_000, 20_000_000):
        path = tmp_path / str(n_bytes)
        n_records = write_hotpot(path, n_bytes)
        costs.append(measure_fresh("the loader", read_file, path))
        assert costs[-1].n_records == n_records
        assert costs[-1].n_refused == 0
    # A whole list of these records would take several times the file's size.
    assert costs[1].peak_rss - costs[0].peak_rss < 10_000_000
    assert costs[1].peak_rss < 300 * 2**20


def test_the_benchmark_prints_a_row_for_each_size():
    done = CliRunner().invoke(main, ["bench", "data", "--megabytes", "2", "--json"])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [round(row["n_bytes"] / 1e6, 1) for row in rows] == [0.2, 2.0]
