"""A stage is done once; its parts are done in parallel."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import CancelledError

import pytest

from beatrice.extract.run.console import Estimate, Progress, in_words
from beatrice.extract.run.directory import InUse, NewRun, RunDir, read_manifest
from beatrice.extract.run.process import Share
from beatrice.extract.run.stages import (
    Forecast,
    Stage,
    do_once,
    do_share,
    forecast_stage,
    is_done,
    open_and_do,
    run_stage,
    side_by_side,
)


def test_parallel_work_counts_every_tick_once():
    calls = []

    def work(item, tick):
        for _ in range(item):
            tick()

    side_by_side(work, (3, 4), lambda *counts: calls.append(counts), 7)
    assert sorted(calls) == [(n, 7) for n in range(1, 8)]
    side_by_side(lambda n, tick: tick(n), (3, 4), lambda *x: calls.append(x), 7)
    assert calls[7:] in ([(3, 7), (7, 7)], [(4, 7), (7, 7)])


def test_the_error_of_a_failing_part_stops_the_others_and_is_raised():
    failed, ended = threading.Event(), []

    def work(item, tick):
        if item == "bad":
            failed.set()
            raise ValueError("this part is damaged")
        failed.wait()
        try:
            while True:  # until the other part fails
                tick(0)
        except CancelledError:
            ended.append(item)
            raise

    with pytest.raises(ValueError, match="damaged"):
        side_by_side(work, ("good", "bad"), lambda *_: None, 1)
    assert ended == ["good"]


def test_one_at_a_time_each_part_begins_after_the_last_has_ended():
    now, most, began = set(), [], []

    def work(item, tick):
        began.append(item)
        now.add(item)
        most.append(len(now))
        tick()
        now.remove(item)

    side_by_side(work, "abc", lambda *_: None, 3, at_once=1)
    assert began == ["a", "b", "c"] and most == [1, 1, 1]

    def fail(item, tick):
        began.append(item)
        raise ValueError("this part is damaged")

    with pytest.raises(ValueError, match="damaged"):
        side_by_side(fail, "xyz", lambda *_: None, 3, at_once=1)
    assert began[3:] == ["x"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Letters:
    """Settings of the planted stage."""

    n: int = 3


PRESETS = {"demo": Letters(n=30), "smoke": Letters(), "paper": Letters(n=300)}


def stage_of(name, source, target, work, **options):
    """Return a stage that reads one file of a run, and writes another."""
    return Stage(
        name=name,
        inputs=lambda run: [run.path / source],
        outputs=lambda run: [run.path / target],
        work=work,
        **options,
    )


def planted(done, *, forecast=None):
    """Return a stage that repeats its input's first letter and notes its config."""

    def work(run, config, update, progress):
        done.append(config)
        first = (run.path / "in").read_text()[0]
        (run.path / "out").write_text(first * config.n)

    options = {"presets": PRESETS, "section": "letters", "forecast": forecast}
    return stage_of("sweep", "in", "out", work, **options)


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke")) as run:
        (run.path / "in").write_text("a")
        yield run


def test_a_stage_is_done_once_and_again_when_its_input_or_output_changes(run):
    done = []
    stage = planted(done)
    for is_second in (False, True):
        assert is_done(run.path, stage) == is_second  # while another holds the run
        run_stage(stage, run, Progress())
    assert done == [Letters(n=3)] and (run.path / "out").read_text() == "aaa"
    (run.path / "in").write_text("b")
    assert not is_done(run.path, stage)
    run_stage(stage, run, Progress())
    assert len(done) == 2 and (run.path / "out").read_text() == "bbb"
    (run.path / "out").unlink()
    run_stage(stage, run, Progress())
    assert len(done) == 3 and (run.path / "out").read_text() == "bbb"


def test_a_stage_settles_its_section_when_it_is_first_done(run, capsys):
    done = []
    stage = planted(done)
    (run.path / "in").rename(run.path / "elsewhere")
    with pytest.raises(ValueError, match="in is missing"):
        run_stage(stage, run, Progress())
    assert read_manifest(run.path)["sections"] == {}
    (run.path / "elsewhere").rename(run.path / "in")
    run_stage(stage, run, Progress(), lambda config: Letters(n=5))
    run_stage(stage, run, Progress())
    assert done == [run.section("letters", Letters)] == [Letters(n=5)]
    assert "sweep: already done" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"letters.n=5; you asked for letters.n=6"):
        run_stage(stage, run, Progress(), lambda config: Letters(n=6))
    assert len(done) == 1


def test_a_forecast_does_and_settles_nothing_and_needs_no_lock(run):
    done, calls, before = [], [], run.manifest.read_bytes()

    def forecast(run, config):
        calls.append(config)
        return Forecast(stage="sweep", n_rows=config.n, basis="one each")

    stage = planted(done, forecast=forecast)
    output = forecast_stage(run.path, stage, lambda config: Letters(n=5))
    assert "rows                    5" in output and "one each" in output
    assert done == [] and calls == [Letters(n=5)]
    assert run.manifest.read_bytes() == before
    assert not (run.path / "out").exists()
    with pytest.raises(InUse):
        open_and_do(run.path, stage)
    run.close()
    open_and_do(run.path, stage)
    output = forecast_stage(run.path, stage)
    assert "already done, nothing is left to forecast" in output


def chain(done):
    """Return three stages, each of which doubles the text of the one before."""

    def copies(source, target, name):
        def work(run, config, update, progress):
            done.append(name)
            (run.path / target).write_text((run.path / source).read_text() * 2)

        return stage_of(name, source, target, work)

    return (
        copies("in", "sweep.json", "sweep"),
        copies("sweep.json", "selection", "select"),
        copies("selection", "detector", "calibrate"),
    )


def do_all(stages, run):
    for stage in stages:
        run_stage(stage, run, Progress())


def test_outputs_that_are_out_of_date_or_unfinished_are_not_read(run, capsys):
    done = []
    stages = chain(done)
    do_all(stages, run)
    (run.path / "in").write_text("b")
    words = r"calibrate reads .* its input in has changed since\); run `beatrice sweep`"
    with pytest.raises(ValueError, match=words):
        run_stage(stages[2], run, Progress())  # its own input is unchanged
    assert done == ["sweep", "select", "calibrate"]
    do_all(stages, run)  # in order, each is done again
    assert (run.path / "detector").read_text() == "b" * 8
    output = capsys.readouterr().err
    assert "stage sweep: its input in has changed since; it is done again" in output
    run.reopen_stage("sweep")
    gap = "stage sweep is not finished with its current settings"
    assert run.stage_gap("sweep") == gap
    with pytest.raises(ValueError, match="is not finished.*run `beatrice sweep` first"):
        run_stage(stages[1], run, Progress())
    do_all(stages, run)
    assert done == ["sweep", "select", "calibrate"] * 2 + ["sweep"]


def test_a_record_holds_how_many_seconds_a_stage_took(run):
    began = time.monotonic()
    do_once(run, "wait", {}, [], Progress(), lambda update: time.sleep(0.2))
    elapsed = time.monotonic() - began
    assert 0.2 <= run.stage_record("wait").seconds <= elapsed + 0.05


def test_a_worker_that_cannot_join_the_parts_fails_unless_they_are_joined(run):
    run.close()
    share, last = Share(1, 2), lambda run: 0  # no part is missing

    def join():
        do_share(run.path, "sweep", share, last, Progress(), "parts", patience=0.1)

    with RunDir.open(run.path, share=Share(0, 2)):  # a worker of another stage
        with pytest.raises(InUse, match="all there, but not joined.* in one process"):
            join()
        do_once(run, "sweep", {}, [], Progress(), lambda update: None)
        join()
    join()


def label_stage(text):
    def work(run, config, update, progress):
        run.labels.write_text(text)

    return stage_of("label", "in", "labels.jsonl", work)


def test_a_file_corrected_by_hand_is_neither_read_nor_replaced(run):
    reader = dataclasses.replace(chain([])[0], inputs=lambda run: [run.labels])
    run_stage(label_stage("ours"), run, Progress())
    run.labels.write_text("corrected by hand")
    for stage in (label_stage("ours"), reader):
        with pytest.raises(ValueError, match="labels.jsonl was changed since it was"):
            run_stage(stage, run, Progress())
    (run.path / "in").write_text("b")  # out of date, still not replaced
    with pytest.raises(ValueError, match="labels.jsonl was changed since it was wri"):
        run_stage(label_stage("ours"), run, Progress())
    assert run.labels.read_text() == "corrected by hand"
    run.labels.unlink()
    run_stage(label_stage("ours"), run, Progress())
    assert run.labels.read_text() == "ours"


def test_an_estimate_never_falls_and_its_speed_ignores_earlier_work():
    now = [0.0]
    estimate = Estimate(lambda: now[0])
    for n_done, now[0] in ((1, -0.5), (600, 0.0)):  # by an earlier process
        estimate.add(n_done, 1000)
        assert estimate.left is None
    now[0] = 100.0
    estimate.add(700, 1000)
    assert (estimate.share, estimate.left) == (0.7, pytest.approx(300.0))
    estimate.add(10, 1000)  # a part that counts from 0
    assert estimate.share == 0.7
    assert [in_words(x) for x in (39.6, 545.9, 7800)] == ["40 s", "9 min", "2 h 10 min"]


class Log:
    """Stands in for stderr in programs whose messages go to a log."""

    def __init__(self):
        self.text, self.flush = "", lambda: None

    def write(self, text):
        self.text += text


def test_a_stage_reports_its_time_to_a_log_and_to_nobody_without_stderr(capsys):
    log = Log()
    for stream in (log, None):
        with contextlib.redirect_stderr(stream), Progress().stage("fit") as update:
            update(1, 2)
    assert log.text == "fit: done in 0 s\n" and capsys.readouterr().out == ""


def test_a_stage_of_days_prints_its_progress_once_an_hour(capsys):
    now = [0.0]
    update = Progress().plain_lines("answer", lambda: now[0])
    for minute in range(3 * 24 * 60):
        now[0] = 60.0 * minute
        update(minute, 3 * 24 * 60)
    lines = capsys.readouterr().err.splitlines()
    assert 72 <= len(lines) <= 78 and lines[-1].startswith("answer: 9")
