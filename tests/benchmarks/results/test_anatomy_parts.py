"""The anatomy on the page: sentences, figures and tables from rows alone."""

import dataclasses
import re
import subprocess
import sys

import msgspec
import pytest

from beatrice.benchmarks.anatomy.parts import PARTS as ANALYSES
from beatrice.benchmarks.anatomy.parts import anatomy_parts
from beatrice.benchmarks.anatomy.rows import spelled
from beatrice.benchmarks.results.report import render_report
from beatrice.extract.run.rows import ResultTable
from tests.benchmarks.results.sample import PARTS, anatomy_rows, sample_report

ROWS = anatomy_rows()


@pytest.fixture(scope="module")
def parts():
    return anatomy_parts(ROWS, PARTS["studies"])


def test_every_analysis_has_what_to_look_at_and_what_was_found(parts):
    assert len(parts) == len(ANALYSES) + 1  # and the cases
    for part in parts:
        assert part.look and part.found, part.title
        assert part.pictures or part.tables or part.cases, part.title


def test_what_was_found_is_said_with_its_interval(parts):
    for part in parts:
        text = " ".join(part.found)
        if "best sets" not in text:  # counts of a ranking have none
            assert re.search(r"\d \[[-+]?\.\d+, [-+]?\d?\.\d+\]", text), text


def test_a_sentence_names_the_family_with_the_highest_flip_rate(parts):
    table = ResultTable(ROWS)
    where = dict(
        experiment="anatomy_flips", dataset="all in-domain", metric="flip_rate"
    )
    rows = table.select(setting="with_context", **where)
    first = max(rows, key=lambda row: row.value)
    names = {
        "H": "hidden states",
        "P": "probabilities",
        "R": "residual",
        "A": "attention",
    }
    (sentence,) = (
        s
        for p in parts
        for s in p.found
        if s.startswith("With context") and "decide" in s
    )
    assert names[first.detector[-1]] in sentence.split("decide")[0]
    assert spelled(first) in sentence


def test_undefined_numbers_are_said_to_be_undefined_and_break_nothing():
    hollow = [
        msgspec.structs.replace(
            row, value=None, ci_low=None, ci_high=None, reason="one class only"
        )
        for row in ROWS
    ]
    for part in anatomy_parts(hollow, PARTS["studies"]):
        assert "nan" not in " ".join(part.found)


def test_a_run_without_the_anatomy_has_none_and_one_setting_is_enough():
    assert anatomy_parts([]) == []
    alone = [row for row in ROWS if row.setting == "closed_book"]
    titles = [part.title for part in anatomy_parts(alone)]
    assert "What attention responds to" not in titles and len(titles) > 8


def test_the_page_shows_it_and_escapes_the_cases():
    data = sample_report()
    data = dataclasses.replace(data, rows=[*data.rows, *ROWS], studies=PARTS["studies"])
    page = render_report(data)
    section = re.search(r'<section id="anatomy">.*?</section>', page, re.DOTALL).group()
    assert 'class="empty"' not in section
    assert section.count("<svg") == 18
    assert "<script>" not in section and "&lt;script&gt;" in section


def test_a_boundary_of_an_earlier_version_is_refused_and_says_what_to_do():
    old = [
        msgspec.structs.replace(row, metric=row.metric.removesuffix(" in 1"))
        for row in ROWS
    ]
    with pytest.raises(ValueError, match="an earlier version; delete anatomy/boundary"):
        anatomy_parts(old, PARTS["studies"])


def test_nothing_of_it_loads_jax_or_torch():
    code = "import sys, beatrice.benchmarks.anatomy.parts; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"jax", "torch"} & set(done.stdout.split())
