"""A detector of one's own, as the README shows it: checked, judged, in a notebook."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from beatrice.benchmarks.baselines.detector import (
    Baseline,
    DetectorOutput,
    catalogue,
    find_detector,
)
from beatrice.benchmarks.baselines.judge import (
    BaselinesConfig,
    chosen_detectors,
    judge,
    read_costs,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import read_result_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from tests.benchmarks.baselines import planted
from tests.extract.small_run import beatrice

README = Path(__file__).parents[3] / "benchmarks" / "README.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", README.read_text(), re.S))
COMMANDS = re.findall(
    r"^beatrice baselines RUN (--\w+ hedges\S+)", README.read_text(), re.M
)
FEW = BootstrapConfig(n_resamples=50)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the README's file, in which a person stands."""
    (tmp_path / "hedges.py").write_text(BLOCKS["hedges"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("hedges", None)


def test_the_readmes_detector_runs_into_the_same_tables(here, smoke_run):
    run = shutil.copytree(smoke_run, here / "run")
    check, only = (command.split() for command in COMMANDS)
    said = beatrice("baselines", run, *check).output
    assert "hedges:hedging: nothing wrong was found" in said
    before = read_result_rows(RunDir(run))
    beatrice("baselines", run, *only)
    rows = read_result_rows(RunDir(run))
    own = [row for row in rows if "hedging" in (row.detector, row.against)]
    assert {row.experiment for row in own} == {"detection", "paired"}
    assert {row.setting for row in own} == {"closed_book", "with_context"}
    assert [row for row in rows if row not in own] == before
    judged = read_costs(run / "baselines" / "detectors.json")
    assert [x.title for x in judged].count("Hedging") == 2
    # Asked for another, the run still knows it.
    beatrice("baselines", run, "--only", "saplma_last")
    assert read_result_rows(RunDir(run)) == rows
    (here / "hedges.py").unlink()
    del sys.modules["hedges"]
    done = beatrice("baselines", run, "--only", "saplma_mean")
    assert "hedges:hedging is left out" in done.stderr
    names = {row.detector for row in read_result_rows(RunDir(run))}
    assert "hedging" not in names and "saplma_last" in names


def test_an_entry_point_goes_by_its_name(here, monkeypatch):
    folder = here / "installed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\n")
    (folder / "entry_points.txt").write_text(
        "[beatrice.baselines]\nhedges_of_theirs = hedges:hedging\n"
    )
    monkeypatch.syspath_prepend(here)
    assert find_detector("hedges_of_theirs").name == "hedging"
    (found,) = chosen_detectors(BaselinesConfig(only=("hedges_of_theirs",)))
    assert found.name == "hedging"


@pytest.mark.parametrize("name", ["champion", "perplexity", "probe", "encoder"])
def test_the_name_of_another_row_is_refused(here, name):
    file = here / "hedges.py"
    file.write_text(file.read_text().replace('"hedging"', f'"{name}"'))
    with pytest.raises(ValueError, match=f"the name '{name}' is that of another row"):
        find_detector("hedges:hedging")
    file.write_text(file.read_text().replace(f'"{name}"', '"p_true"'))
    sys.modules.pop("hedges")
    with pytest.raises(ValueError, match="'p_true'"):
        find_detector("hedges:hedging")


def oracle(inputs):
    return DetectorOutput(inputs.rows.labels[None].astype(float))


ORACLE = Baseline(name="oracle", title="Oracle", source="here", score=oracle)


def refuse(_):
    raise ValueError("it has no idea")


def test_detectors_are_judged_without_a_run():
    given = planted.inputs()
    names = []
    table = judge(
        given.store,
        given.rows.labels,
        [ORACLE, catalogue()["linear_probe"]],
        splits=given.rows.splits,
        intervals=FEW,
        on_score=names.append,
    )
    assert names == ["oracle", "linear_probe"]
    aurocs = table[(table.metric == "auroc") & (table.split == "test")]
    values = aurocs.groupby("detector").value.min()
    assert values["oracle"] == 1 and values["linear_probe"] > 0.9
    (layer,) = table[table.metric == "layer"].value
    assert layer == planted.LAYER


def test_what_refuses_has_rows_with_its_reason():
    given = planted.inputs()
    mute = Baseline(name="mute", title="Mute", source="here", score=refuse)
    table = judge(given.store, given.rows, [mute], intervals=FEW)
    assert table.value.isna().all() and set(table.reason) == {"it has no idea"}


def test_labels_that_do_not_fit_are_refused():
    given = planted.inputs()
    told = "a label and a split for each of 150 answers, found 3 labels and none splits"
    with pytest.raises(ValueError, match=told):
        judge(given.store, [True, False, True], [ORACLE])


def test_an_unlabelled_answer_is_counted_as_failed():
    given = planted.inputs()
    labels = given.rows.labels.tolist()
    test = np.flatnonzero(given.rows.splits == "test")
    labels[test[0]] = None
    splits = given.rows.splits
    table = judge(given.store, labels, [ORACLE], splits=splits, intervals=FEW)
    own = table[(table.metric == "auroc") & (table.split == "test")]
    assert set(own.n) == {len(test) - 1} and set(own.n_failed) == {1}
