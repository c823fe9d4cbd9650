import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from beatrice.extract.backbone.names import WEIGHTS, locked_folder
from beatrice.extract.records import SETTINGS, Passage, Record, to_json, write_lines
from beatrice.extract.run.contents import _shown, settings_of
from beatrice.extract.run.directory import (
    InUse,
    NewRun,
    NotWritten,
    RunDir,
    acquire_lock,
)
from beatrice.extract.run.files import (
    CHECKSUMS,
    Journal,
    JournalFiles,
    JsonLines,
    cached_result,
    lock_file,
    replaced_folder,
    sha256_file,
    sha256_once,
    temporary,
    verify_checksums,
    write_checksums,
    write_json_atomic,
    write_stream_atomic,
    write_text_atomic,
)
from beatrice.extract.run.process import Share
from beatrice.pgir.controllers.waves import CallJournal
from tests.process import ROOT, on_disk
from tests.records import an_example, flip_bit

SMOKE = NewRun(preset="smoke")


def start_owner(path):
    """Start a process that holds a run directory until it is ended."""
    code = (
        "import time; from beatrice.extract.run.directory import NewRun, RunDir\n"
        f"run = RunDir.open({str(path)!r}, {SMOKE!r})\n"
        "print('held', flush=True); time.sleep(60)"
    )
    line = [sys.executable, "-c", code]
    owner = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "held\n"
    return owner


def test_files_and_folders_have_the_permissions_of_the_users_umask(tmp_path):
    before = os.umask(0o077)
    try:
        write_json_atomic(tmp_path / "replies.json", {})
        with replaced_folder(tmp_path / "probe") as work:
            (work / "examples.jsonl").write_text("")
        os.umask(0o002)
        RunDir.open(tmp_path / "run", SMOKE).close()
    finally:
        os.umask(before)
    modes = [(tmp_path / x).stat().st_mode for x in ("replies.json", "probe")]
    assert not any(mode & 0o077 for mode in modes)
    files = [tmp_path / "run", *(tmp_path / "run").iterdir()]  # writable for the group
    assert len(files) == 3 and all(path.stat().st_mode & 0o020 for path in files)


def test_leftovers_of_a_killed_process_go_and_files_of_a_live_one_stay(tmp_path):
    file, folder = tmp_path / "x.json", tmp_path / "probe"
    names = (".x.json.0123abcd.tmp", ".x.json.4567abcd.tmp", ".y.json.0123abcd.tmp")
    killed, live, other = (tmp_path / name for name in names)
    for path in (killed, live, other):
        path.write_text("half")
    (tmp_path / ".probe.0123abcd").mkdir()
    with live.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with temporary(file) as mine, mine.open("rb") as held:
            with pytest.raises(BlockingIOError):  # locked while being written
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_text_atomic(file, "whole")
    with replaced_folder(folder) as work:
        (work / "a").write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([file, folder, live, other])


class Unmovable(type(Path())):
    """A path on a disk that fails when the new folder is renamed to its final name."""

    def rename(self, target):
        if self.name.startswith(".probe.") and target.name == "probe":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return super().rename(target)


def test_a_folder_that_cannot_be_replaced_is_restored(tmp_path):
    folder = Unmovable(tmp_path / "probe")
    folder.mkdir()
    (folder / "weights").write_text("old")
    with pytest.raises(OSError, match="Input/output"):
        with replaced_folder(folder) as work:
            (work / "weights").write_text("new")
    assert [str(path) for path in tmp_path.iterdir()] == [str(folder)]
    assert (folder / "weights").read_text() == "old"


class OfAnImage(type(Path())):
    """A path on overlayfs, which cannot rename a folder of a container's image."""

    def rename(self, target):
        if self.name == "probe":
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(self))
        return super().rename(target)


def test_a_folder_of_a_containers_image_can_be_replaced(tmp_path):
    folder = OfAnImage(tmp_path / "probe")
    (folder / ".git").mkdir(parents=True)
    for name in ("weights", "index"):
        (folder / name).write_text("old")
    with replaced_folder(folder) as work:
        (work / "weights").write_text("new")
    assert os.listdir(tmp_path) == ["probe"]
    assert sorted(os.listdir(folder)) == [".git", CHECKSUMS, "weights"]
    assert (folder / "weights").read_text() == "new"


def test_a_write_replaces_the_file_or_keeps_it_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "sweep.json"
    write_json_atomic(path, {"layer": 3})
    write_json_atomic(path, {"layer": 4})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"layer": float("nan")})
    assert json.loads(path.read_text()) == {"layer": 4}
    with pytest.raises(IsADirectoryError):
        write_text_atomic(path.parent, "x")
    assert os.listdir(path.parent) == ["sweep.json"]


def test_a_pipe_in_place_of_the_checksums_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / CHECKSUMS)
    with pytest.raises(ValueError, match=f"{CHECKSUMS} is not a file"):
        verify_checksums(tmp_path)


def test_a_file_or_a_foreign_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty, .* run directory.*notes.txt"):
        RunDir.open(tmp_path, SMOKE)
    with pytest.raises(ValueError, match="is a file"):
        RunDir.open(tmp_path / "notes.txt", SMOKE)
    assert os.listdir(tmp_path) == ["notes.txt"]
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "lock").write_text('{"pid": 1')  # from a run killed while being made
    (tmp_path / ".manifest.json.ab12.tmp").write_text("{")
    RunDir.open(tmp_path, SMOKE).close()


def test_a_new_file_needs_no_hard_links_and_never_replaces_another(tmp_path):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    def be_second(_, file):
        file.write_text("theirs")
        refuse()

    def write(file, **options):
        with write_stream_atomic(file, is_new=True, **options) as stream:
            stream.write(b"mine")

    first, other = tmp_path / "first", tmp_path / "other"
    for link in (refuse, os.link):
        write(first, link=link)
    with pytest.raises(ValueError, match="other is there already with other content"):
        write(other, link=be_second)
    assert (first.read_text(), other.read_text()) == ("mine", "theirs")
    assert set(tmp_path.iterdir()) == {first, other}


def test_a_run_held_by_a_live_process_is_refused_and_by_a_dead_one_is_not(tmp_path):
    owner = start_owner(tmp_path)
    try:
        with pytest.raises(ValueError, match=f"in use by process {owner.pid} on "):
            RunDir.open(tmp_path, SMOKE)
        with pytest.raises(InUse, match=f"in use by process {owner.pid} on "):
            RunDir.open(tmp_path, SMOKE, share=Share(0, 2))  # a worker of a stage
    finally:
        owner.kill()
        owner.communicate()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == owner.pid
    RunDir.open(tmp_path, SMOKE).close()


OPENED = {
    "lock": lambda run: RunDir.open(run),
    ".lock": lambda run: locked_folder(run).__enter__(),
    "calls.jsonl": lambda run: CallJournal(run / "calls.jsonl", ""),
    "rows.jsonl": lambda run: JsonLines.open(run / "rows.jsonl"),
    "more.jsonl": lambda run: JsonLines(run / "more.jsonl").append(["{}"]),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_symbolic_link_in_a_run_is_refused_and_its_target_left_alone(tmp_path, name):
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    theirs.write_text('{"a": 1}\nunfinished')
    RunDir.open(run, SMOKE).close()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(theirs)
    with pytest.raises(ValueError, match=f"{run / name} is a link"):
        OPENED[name](run)
    assert theirs.read_text() == '{"a": 1}\nunfinished'


def test_workers_share_a_directory_and_keep_others_out(tmp_path):
    first = RunDir.open(tmp_path, SMOKE, share=Share(0, 2))
    other = RunDir.open(tmp_path, SMOKE, share=Share(0, 2))
    first.close()
    with pytest.raises(InUse, match="in use by workers that a launcher started"):
        RunDir.open(tmp_path, SMOKE)
    other.close()
    other.close()  # releasing twice is harmless
    RunDir.open(tmp_path, SMOKE).close()


def test_an_owner_on_another_machine_is_believed(tmp_path):
    RunDir.open(tmp_path, SMOKE).close()
    elsewhere = {"pid": 7, "host": "node-9", "boot": "x", "started": "2026-01-01"}
    (tmp_path / "lock").write_text(json.dumps(elsewhere))
    with pytest.raises(ValueError, match="process 7 on node-9.*delete .*lock"):
        RunDir.open(tmp_path, SMOKE)
    (tmp_path / "lock").unlink()
    RunDir.open(tmp_path, SMOKE).close()


def test_a_folder_is_replaced_even_if_part_of_the_old_one_cannot_be_deleted(tmp_path):
    part = tmp_path / "folder" / "disk"  # like a file that another has open on NFS
    part.mkdir(parents=True)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from beatrice.extract.run.files import replaced_folder\n"
        "with replaced_folder(Path(sys.argv[1]).parent) as work:\n"
        "    (work / 'new').touch()"
    )
    on_disk("size=1m", part, program)
    assert {path.name for path in part.parent.iterdir()} == {"new", CHECKSUMS}


def test_the_kernels_lock_counts_whatever_machine_the_lock_file_names(tmp_path):
    """As on a Mac, whose name follows its network. A deleted file would admit two."""
    with RunDir.open(tmp_path, SMOKE):
        elsewhere = {"pid": 7, "host": "old-name", "boot": "", "started": "2026-01-01"}
        (tmp_path / "lock").write_text(json.dumps(elsewhere))
        with pytest.raises(InUse, match="process 7 on old-name since .*; wait or end"):
            RunDir.open(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_disk_without_locks_one_process_may_work_but_no_shares(tmp_path, number):
    def no_locks(file, kind):
        raise OSError(number, "no locks")

    lock = tmp_path / "lock"
    with acquire_lock(lock, flock=no_locks):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    with pytest.raises(ValueError, match="a disk without locks.*another disk, or let"):
        acquire_lock(lock, shared=True, flock=no_locks)
    assert not lock_file(0, fcntl.LOCK_EX, no_locks)


def test_a_stage_is_done_until_its_input_or_output_changes(tmp_path):
    run = RunDir(tmp_path)
    for path in (run.examples, run.answers / "a.jsonl", run.sweep):
        write_text_atomic(path, "{}\n")
    assert run.stage_gap("sweep") == "stage sweep has no record yet"
    inputs = run.hash_inputs(run.examples, run.answers) | {"model": "abc123"}
    run.mark_stage("sweep", inputs, 1.5, outputs=[run.sweep])
    record = run.stage_record("sweep")
    assert record.seconds == 1.5
    assert record.outputs == {"sweep.json": sha256_file(run.sweep)}
    assert run.stage_done("sweep")
    assert run.stage_done("sweep", inputs)
    gap = run.stage_gap("sweep", inputs | {"model": "def"})
    assert gap == "stage sweep: its input model has changed since"
    other = {k: v for k, v in inputs.items() if k != "model"} | {"examples.jsonl": "0"}
    gap = run.stage_gap("sweep", other | {"added": "1"})
    assert gap == "stage sweep: its input examples.jsonl has changed since"
    write_text_atomic(run.answers / "b.jsonl", "{}\n")
    assert run.stage_gap("sweep") == "stage sweep: its input answers has changed since"
    (run.answers / "b.jsonl").unlink()
    assert run.stage_done("sweep")
    run.sweep.write_text("[]")
    gap = "stage sweep: its output sweep.json has changed since"
    assert run.stage_gap("sweep") == gap


def test_questions_are_read_for_the_settings_once_and_again_after_a_change(tmp_path):
    with RunDir.open(tmp_path / "run", SMOKE) as run:
        n_before = _shown.cache_info().misses
        shown = an_example(passages=(Passage(title="", text="x"),))
        for example, settings in ((shown, SETTINGS), (an_example(), SETTINGS[:1])):
            write_text_atomic(run.examples, write_lines([example]))
            assert [settings_of(run) for _ in range(3)] == [settings] * 3
        assert _shown.cache_info().misses == n_before + 2


DAMAGE = {
    "a piece": lambda text: text[:8],
    "another type": lambda text: text.replace('"seconds": 0.1', '"seconds": "0.1"'),
    "another number": lambda text: text.replace("0.1", "0.2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_stage_with_a_damaged_record_is_not_done(tmp_path, damage):
    run = RunDir(tmp_path)
    run.mark_stage("sweep", {}, 0.1)
    file = run.stages / "sweep.json"
    file.write_text(DAMAGE[damage](file.read_text()))
    assert not run.stage_done("sweep")


def test_a_file_changed_since_its_stage_or_with_a_damaged_record_is_no_input(tmp_path):
    run = RunDir(tmp_path)
    write_text_atomic(run.labels, "{}\n")
    run.mark_stage("label", {}, 0.1, [run.labels])
    inputs = run.hash_inputs(run.labels)
    write_text_atomic(run.labels, "[]\n")
    words = f"{run.labels} has changed since stage label wrote it; restore it, or run "
    with pytest.raises(ValueError, match=f"^{words}`beatrice label` again$"):
        run.hash_inputs(run.labels)
    write_text_atomic(run.labels, "{}\n")
    assert run.hash_inputs(run.labels) == inputs
    (run.stages / "label.json").write_text("{}")
    with pytest.raises(ValueError, match="label.json is damaged, .* labels.jsonl was"):
        run.hash_inputs(run.labels)


@pytest.mark.parametrize(
    "name", [".DS_Store", "._label.json", ".nfs0123", "label.json"]
)
def test_files_that_operating_systems_put_into_a_folder_are_ignored(tmp_path, name):
    run = RunDir(tmp_path)
    write_text_atomic(run.answers / "a" / "rows.jsonl", "{}\n")
    write_checksums(run.answers)
    run.mark_stage("answer", {}, 0.1, [run.answers])
    for folder in (run.answers, run.answers / "a", run.stages):
        (folder / name).write_bytes(b"\0\5\x16\7")
    is_part = name == "label.json"
    assert run.stage_done("answer") != is_part
    assert (None in run.stage_records().values()) == is_part
    with pytest.raises(ValueError) if is_part else contextlib.nullcontext():
        verify_checksums(run.answers)


def test_a_missing_input_of_a_stage_is_named(tmp_path):
    with pytest.raises(NotWritten) as caught:
        RunDir(tmp_path).hash_inputs("labels.jsonl")
    assert (caught.value.run, caught.value.name) == (tmp_path, "labels.jsonl")


@pytest.mark.parametrize("tail", [b'{"a": 3', b'{"a": 3}', b'{"a": \n', b"\0\0\n"])
def test_a_torn_last_line_is_set_aside(tmp_path, tail):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + tail)
    lines = JsonLines.open(path)
    assert "last line was unfinished" in lines.truncated
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    aside = (tmp_path / "a.jsonl.truncated").read_bytes()
    assert aside.rstrip(b"\n") == tail.rstrip(b"\n")
    assert JsonLines.open(path).truncated is None
    assert [row["a"] for row in lines.rows()] == [1, 2]


def test_every_cut_of_a_file_keeps_its_complete_rows(tmp_path):
    whole = b'{"a": 1}\n{"b": "\xc3\xa9"}\n'
    path = tmp_path / "a.jsonl"
    for n_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:n_bytes])
        JsonLines.open(path)
        assert path.read_bytes() == whole[: whole[:n_bytes].rfind(b"\n") + 1]


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 2: not a JSON object"):
        list(lines.rows())


def test_a_run_given_by_a_relative_path_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("run")
    with RunDir.open("run", SMOKE) as run:
        run.examples.write_text("{}\n")
        run.mark_stage("world", {}, 0.1, [run.examples])
        assert run.stage_done("world", run.hash_inputs())
    assert run == RunDir(tmp_path / "run")
    RunDir.open("link").close()  # a link to the whole run is no danger


class Counted(Record, frozen=True):
    name: str
    n: int


def counts_in(folder, **options):
    return JournalFiles(folder / "a.jsonl", Counted, lambda row: row.name, **options)


def lines_of(**counts):
    return {name: to_json(Counted(name, n)) for name, n in counts.items()}


def text_of(**counts):
    return "".join(f"{line}\n" for line in lines_of(**counts).values())


def test_an_arranged_journal_has_the_order_on_disk_and_finds_its_rows(tmp_path):
    Journal.open(counts_in(tmp_path)).append(lines_of(b=20, a=1))
    journal = Journal.open(counts_in(tmp_path))
    journal.append(lines_of(c=300))
    assert list(journal) == ["b", "a", "c"] and "d" not in journal
    journal.arrange("abc")
    assert journal.lines.path.read_text() == text_of(a=1, b=20, c=300)
    journal.append(lines_of(d=4))
    assert [journal[name].n for name in "abcd"] == [1, 20, 300, 4]


def test_more_parts_than_may_be_open_at_once_are_joined_in_order(tmp_path):
    names = [f"n{i:03}" for i in range(150)]
    files = counts_in(tmp_path, parts=tmp_path / "parts")
    Journal.open(files).append(lines_of(**{name: 0 for name in names[::2]}))
    (tmp_path / "parts").mkdir()
    for i, name in enumerate(names[1::2]):
        (tmp_path / "parts" / f"{i}.jsonl").write_text(text_of(**{name: i}))
    joined = Journal.open(files)
    joined.arrange(names)
    expected = {name: 0 if i % 2 == 0 else i // 2 for i, name in enumerate(names)}
    assert joined.lines.path.read_text() == text_of(**expected)


def test_rows_that_are_not_wanted_or_are_repeated_are_set_aside(tmp_path):
    first = Journal.open(counts_in(tmp_path))
    first.append(lines_of(a=1, b=2))
    first.append(lines_of(a=7))
    again = Journal.open(counts_in(tmp_path, holds=lambda row: row.n != 2))
    assert [(row.name, row.n) for row in again.values()] == [("a", 1)]
    assert (tmp_path / "a.jsonl.stale").read_text() == text_of(b=2, a=7)
    (note,) = again.notes
    assert "no longer asked for" in note and note.endswith("a.jsonl.stale: 2")


def test_a_share_writes_a_part_and_a_single_process_joins_all_parts(tmp_path):
    files = counts_in(tmp_path, parts=tmp_path / "parts")
    Journal.open(files).append(lines_of(a=1))
    first, other = (Journal.open(files, Share(rank, 2)) for rank in range(2))
    first.append(lines_of(b=2))
    other.append(lines_of(c=3, b=2))
    assert set(files.places()) == set("abc")
    other.append(lines_of(a=7, c=7))  # the first row of a key counts, also for a share
    again = Journal.open(files, Share(0, 2))
    assert (again["a"].n, again["c"].n) == (1, 3)
    assert files.path.read_text().count("\n") == 1
    whole = Journal.open(files)
    assert [whole[name].n for name in "abc"] == [1, 2, 3] and whole.notes == []
    assert not files.parts.exists()
    Journal.open(files, Share(0, 2)).append(lines_of(d=1, e=2))
    (file,) = files.part_files()
    file.write_bytes(file.read_bytes()[:-3])  # as a killed share leaves it
    assert set(files.places()) == set(Journal.open(files)) == set("abcd")


@pytest.fixture
def remembered_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BEATRICE_REMEMBERED", str(tmp_path / "remembered"))
    return tmp_path / "remembered"


def test_a_result_is_remembered_only_under_its_own_kind_and_key(remembered_folder):
    find = iter(range(9)).__next__
    assert cached_result("check", {"a": 1}, find) == 0
    assert cached_result("check", {"a": 1}, find) == 0
    assert cached_result("check", {"a": 2}, find) == 1
    assert cached_result("other", {"a": 1}, find) == 2
    for path in remembered_folder.iterdir():  # an edited file is computed again
        path.write_text(path.read_text().replace('"value": 0', '"value": 7'))
    assert cached_result("check", {"a": 1}, find) == 3


def test_neither_an_error_nor_a_result_of_none_is_remembered(remembered_folder):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cached_result("check", {}, lambda: 1 / 0)
        assert cached_result("check", {}, lambda: None) is None
    assert cached_result("check", {}, lambda: 5) == 5


def test_the_digest_of_a_models_file_is_remembered_until_the_file_changes(
    remembered_folder, tmp_path
):
    weights = WEIGHTS / "model.safetensors"
    assert sha256_once(weights) == sha256_file(weights)
    assert len(list(remembered_folder.iterdir())) == 1  # old, so remembered
    path = Path(shutil.copy(weights, tmp_path))
    old = path.stat().st_mtime_ns - 10**12
    os.utime(path, ns=(old, old))  # sets mtime but not ctime
    before = sha256_once(path)
    flip_bit(path, -7)
    os.utime(path, ns=(old, old))
    assert before != sha256_once(path)
    # Not remembered, as it could change again within a clock tick.
    assert len(list(remembered_folder.iterdir())) == 1
