"""docs/results: what is committed as rows is what is printed, and columns are named."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from beatrice.benchmarks.commands import report
from beatrice.extract.run.rows import ResultRow

FOLDER = Path(__file__).parents[3] / "docs" / "results"


@pytest.mark.parametrize(
    ("name", "n_tables"), [("demo", 8), ("gemma", 6), ("smoke", 8)]
)
def test_the_tables_are_those_of_the_committed_rows(name, n_tables):
    done = CliRunner().invoke(report, [str(FOLDER / f"{name}.jsonl")])
    assert done.exit_code == 0, done.output
    assert done.stdout == (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert done.stdout.count("###") == n_tables


def test_the_schema_names_every_column_in_the_order_of_the_type():
    text = (FOLDER / "schema.md").read_text(encoding="utf-8")
    columns = re.findall(r"^\| `(\w+)` \| (?:text|number|whole) \|", text, re.MULTILINE)
    assert sorted(columns) == sorted(ResultRow.__struct_fields__)


def test_the_schema_names_every_experiment_of_the_committed_rows():
    text = (FOLDER / "schema.md").read_text(encoding="utf-8")
    lines = "".join(x.read_text(encoding="utf-8") for x in FOLDER.glob("*.jsonl"))
    experiments = set(re.findall(r'"experiment": "(\w+)"', lines))
    assert len(experiments) == 14
    assert all(f"`{name}`" in text for name in experiments)
