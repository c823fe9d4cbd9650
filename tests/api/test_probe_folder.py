"""A probe is a folder: complete or refused, with the same numbers without JAX."""

import copy
import dataclasses
import importlib
import json
import multiprocessing
import operator
import os
import random
import re
import runpy
import shlex
import shutil
import site
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import beatrice
from beatrice.card import card
from beatrice.cli import _report_of
from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import IN_MEMORY, model_path
from beatrice.extract.run.contents import read_examples, read_labels
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import CHECKSUMS, write_checksums
from beatrice.extract.run.rows import read_result_rows, write_rows
from beatrice.jaxprobe.detector import CONFIG, OWN_PASS_HEADS, Detector
from beatrice.jaxprobe.scope import PRECISIONS, Evidence, Validation
from beatrice.pgir.given import READING, AnswerToScore
from beatrice.pgir.scorer import Scorer
from beatrice.probe import published
from tests.extract.small_run import beatrice as begin
from tests.pgir.small import LAYER, PASSAGE, QUESTION, make_detector
from tests.process import (
    ROOT,
    call,
    forked,
    little_room,
    on_disk,
    run_line,
    run_python,
)
from tests.records import flip_bit

TRAINING_ONLY = (
    "jax", "flax", "optax", "orbax", "tensorstore", "sklearn", "scikit_learn", "scipy",
    "matplotlib", "pyarrow", "pandas", "bm25s", "openai",
)  # fmt: skip
ROWS = [
    {"question": QUESTION, "answer": "Guzolt Falls"},
    {"question": QUESTION, "answer": "Guzolt Falls", "context": [PASSAGE]},
    {"question": "who employs Skiband Rugrond?", "answer": "Guzolt Falls"},
]


@pytest.fixture(scope="module")
def probe():
    backbone = load_backbone(model_path("embedded"))
    detector = make_detector(backbone)
    report = [
        {"head": "closed_book", "dataset": "world", "split": "test", "metric": "auroc",
         "value": 0.8, "ci_low": 0.7, "ci_high": 0.9, "n": 90, "n_right": 7}
    ]  # fmt: skip
    return beatrice.Probe(
        detector, report, layer=LAYER, open_scorer=lambda: Scorer(backbone, detector)
    )


def test_threads_that_use_a_new_probe_load_its_model_only_once(probe):
    opened = []

    def open_scorer():
        opened.append(probe.scorer)
        time.sleep(0.05)
        return probe.scorer

    fresh = beatrice.Probe(probe.detector, layer=LAYER, open_scorer=open_scorer)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: fresh.load_scorer(), range(8)))
    assert len(opened) == 1


@pytest.mark.filterwarnings(r"ignore:os\.fork")  # JAX warns if other tests loaded it
def test_a_process_forked_while_a_thread_loads_a_model_has_the_whole_model(probe):
    begun = threading.Event()

    def open_slowly():
        begun.set()
        time.sleep(0.3)
        return probe.scorer

    def child():
        assert fresh._scorer is probe.scorer  # loaded completely before the fork
        other = beatrice.Probe(probe.detector, layer=LAYER, open_scorer=open_slowly)
        assert other.scorer is probe.scorer

    fresh = beatrice.Probe(probe.detector, layer=LAYER, open_scorer=open_slowly)
    assert probe.scorer is not None
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(fresh.load_scorer)
        begun.wait()
        assert forked(child) == 0
        loading.result()


@pytest.fixture(scope="module")
def saved(probe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "probe"
    probe.save(folder, examples=ROWS[:2])
    return folder


def test_probes_with_a_loaded_model_score_alike_in_copies_and_in_another_process(
    saved, smoke_run
):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for probe in map(beatrice.load, (saved, smoke_run)):
            expected = probe.score(**ROWS[0]).p_correct
            there = pool.submit(probe.score, **ROWS[0]).result()
            assert there.p_correct == expected
            assert copy.deepcopy(probe).score(**ROWS[0]).p_correct == expected
            assert copy.copy(probe).scorer is probe.scorer


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "probe"))


def assert_refused(folder, message):
    """Check that a folder whose checksums are right is refused."""
    write_checksums(folder)
    with pytest.raises(ValueError, match=message):
        beatrice.load(folder)


def test_a_loaded_probe_scores_like_the_saved_one_and_saves_the_same_files(
    probe, saved, tmp_path
):
    loaded = beatrice.load(saved)
    for row in ROWS:
        scores = probe.score(**row), loaded.score(**row)
        assert scores[0].raw == pytest.approx(scores[1].raw, abs=1e-6)
    assert loaded.report.to_dict("records") == probe.report.to_dict("records")
    loaded.save(tmp_path / "again")
    names = sorted(path.name for path in saved.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("eval.json", '{"report": []}'),
        ("eval.json", '{"layer": 2, "report": null}'),
        ("eval.json", '{"layer": 2, "report": [{"head": "open_book"}]}'),
        ("examples.jsonl", "[" * 100_000),
        ("examples.jsonl", '{"question": "q", "answer": "a"}'),
        ("examples.jsonl", '{"question": "q", "p_correct": 0.5, "raw": 0}\n' * 6),
    ],
)
def test_a_file_with_wrong_content_but_a_right_checksum_is_named(folder, name, content):
    (folder / name).write_text(content)
    assert_refused(folder, f"{name}.*save the probe again")


@pytest.mark.parametrize("names", [["banks", "banks/x"], ["banks"]])
def test_arrays_whose_names_make_no_tree_are_refused(folder, names):
    arrays = {name: np.zeros(1, "float32") for name in names}
    save_file(arrays, folder / "probe.safetensors")
    assert_refused(folder, "is not a detector of this version")


def test_a_head_with_too_many_slots_is_refused(folder):
    text = re.sub(r'"n_slots": \d+', '"n_slots": 60000', (folder / CONFIG).read_text())
    (folder / CONFIG).write_text(text)
    assert_refused(folder, "n_slots must be at most")


def test_a_card_has_the_numbers_of_the_report_and_may_be_edited(folder):
    card = folder / "README.md"
    text = card.read_text()
    front, _, body = text.removeprefix("---\n").partition("---\n")
    fields = dict(line.split(": ", 1) for line in front.strip().splitlines())
    assert json.loads(fields["datasets"]) == ["world"]
    assert "closed-book answers | world | test | 90 | 7 | 0.800 [0.700, 0.900]" in body
    card.write_text(text + "\nMore words.\n")
    beatrice.load(folder)


@pytest.mark.parametrize("case", ["named", "in memory", "context alone", "arrays"])
def test_the_code_of_a_card_runs_for_every_kind_of_model_and_probe(
    probe, tmp_path, case
):
    backbone, detector = probe.scorer.probed.backbone, probe.detector
    values = {"model": backbone.model, "tokenizer": backbone.tokenizer}
    if case == "in memory":
        known = beatrice.LanguageModel(**values).backbone
        about = {"model": IN_MEMORY, "revision": known.revision}
        trained = dataclasses.replace(detector.provenance, **about)
        detector = dataclasses.replace(detector, provenance=trained)
    if case == "context alone":
        heads = {"single_pass": detector.heads["single_pass"]}
        detector = dataclasses.replace(detector, heads=heads)
    ours = beatrice.Probe(detector, layer=LAYER)
    if case == "arrays":
        labels = np.arange(90) % 2 == 0
        values["signals"] = beatrice.Signals.from_arrays({"a": labels[:, None] * 1.0})
        ours = beatrice.fit(values["signals"], labels, progress=False)
    ours.save(tmp_path / "probe")
    text = (tmp_path / "probe" / "README.md").read_text()
    *lines, last = text.split("```python\n")[1].split("```")[0].splitlines()
    program = "\n".join([*lines, f"result = {last}"])
    exec(program.replace("this folder", str(tmp_path / "probe")), values)
    assert values["result"] is not None
    assert "beatrice-probe" not in text and "of in memory" not in text


@pytest.mark.parametrize("n_passes", [1, 2])
def test_a_card_mentions_both_passes_only_if_a_head_reads_both(probe, n_passes):
    heads = dict(probe.detector.heads)
    if n_passes == 1:  # as with every recipe except "paper"
        heads["with_context"] = heads["single_pass"]
    detector = dataclasses.replace(probe.detector, heads=heads)
    assert len(detector.passes_of("with_context")) == n_passes
    text = card(detector, [{**probe.rows[0], "head": name} for name in heads])
    n_lines = 1 + len(PRECISIONS)  # of its metrics, and of its decisions
    for which, n in (("their own pass", 1), ("both passes", n_passes - 1)):
        line = f"\n| answers with context, read in {which} |"
        result = f'"name": "answers with context, read in {which}"'
        assert (text.count(line), text.count(result)) == (n * n_lines, n)


def test_a_card_rounds_thresholds_to_the_side_of_the_decided_answers(probe):
    p, labels = np.repeat([0.1, 0.43351, 0.56649, 0.9], 100), np.arange(400) >= 200
    labels[100:300] = np.arange(200) % 2 == 0
    evidence = Evidence(train=(99, 99), validation=(99, 99), auroc=(0.6, 0.9))
    head, validation = probe.detector.heads["closed_book"], Validation(p, labels)
    head, heads = dataclasses.replace(head, validation=validation), {}
    for tried, among in (((1, 1), ""), ((15, 30), "15 or 30")):
        for name, n in zip(("closed_book", "single_pass"), tried, strict=True):
            chosen = dataclasses.replace(evidence, n_tried=n)
            heads[name] = dataclasses.replace(head, evidence=chosen)
        text = card(dataclasses.replace(probe.detector, heads=heads), [])
        assert "| 0.9 | 0.5665 (25.0%) | 0.4335 (25.0%) |" in text
        promise = f" after a choice among {among} encoders" if among else ""
        assert f"each with 90% confidence{promise}; otherwise" in text


@pytest.mark.parametrize("name", ["config.json", "probe.safetensors", "eval.json"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda p: flip_bit(p, 40),
        lambda p: p.write_bytes(p.read_bytes()[:-9]),
    ],
    ids=["missing", "flipped", "cut"],
)
def test_a_damaged_folder_is_refused_and_the_file_named(folder, name, damage):
    damage(folder / name)
    with pytest.raises(ValueError, match=name):
        beatrice.load(folder)


@pytest.mark.parametrize("name", ["weights.pkl", "modeling.py", "more/x.json"])
def test_a_file_that_does_not_belong_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match=name):
        beatrice.load(folder)


def test_another_format_and_an_edited_config_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(ValueError, match=r"config\.json does not match its SHA-256"):
        beatrice.load(folder)
    assert_refused(folder, f"{folder}.*format 99 of a newer.*; install")
    (folder / "config.json").write_text(json.dumps({**config, "format": 7}))
    assert_refused(folder, f"{folder}.*format.*again")


def objects_of(value, at=()):
    """Yield every object in a config, and its path."""
    if isinstance(value, dict):
        yield at, value
        for name, part in value.items():
            yield from objects_of(part, (*at, name))


def test_extra_config_fields_and_missing_ones_of_heads_and_banks_are_refused(folder):
    file, n_refused = folder / "config.json", 0
    config = json.loads(file.read_text())
    for at, fields in [*objects_of(config)]:
        is_whole = len(at) > 1 and at[0] != "provenance"
        for name in ["new", *(fields if is_whole else ())]:
            before = dict(fields)
            if fields.pop(name, fields) is fields:
                fields[name] = 1
            file.write_text(json.dumps(config))
            assert_refused(folder, rf"\b{name}\b.*; fit the probe again")
            fields.clear()
            fields |= before
            n_refused += 1
    assert n_refused > 50


@pytest.mark.parametrize("at", [("provenance",), ("heads", "closed_book")])
def test_fields_of_another_version_are_named_in_order(folder, at):
    config = json.loads((folder / "config.json").read_text())
    dict(objects_of(config))[at] |= dict.fromkeys("gfedcba", 1)
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(folder, "unknown.*fields: a, b, c, d, e, f, g")


def test_no_corrupted_folder_is_read_with_other_numbers(saved, tmp_path):
    """Two hundred folders with a few bytes changed, cut, doubled or moved."""
    rng = random.Random(0)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    names = sorted(set(before) - {"README.md"})
    n_refused = 0
    for number in range(200):
        folder = Path(shutil.copytree(saved, tmp_path / str(number)))
        path = folder / rng.choice(names)
        whole = before[path.name]
        at = rng.randrange(len(whole))
        bits, digit = whole[at] ^ 1 << rng.randrange(8), rng.choice(b"0123456789")
        doubled, rest = whole[at : at + 7], whole[at + 1 :]
        ends = b"", doubled + whole[at:], bytes([bits]) + rest, bytes([digit]) + rest
        path.write_bytes(whole[:at] + rng.choice(ends))
        if path.read_bytes() == whole:
            continue
        try:
            beatrice.load(folder)
        except ValueError:
            n_refused += 1
        else:  # only the file of checksums may differ: all others are checked
            same = {k: v for k, v in before.items() if k != CHECKSUMS}
            assert path.name == CHECKSUMS
            assert all((folder / k).read_bytes() == v for k, v in same.items())
        shutil.rmtree(folder)
    assert n_refused > 150


@pytest.mark.parametrize(
    ("reading", "remedy"),
    [(READING, "check that the model"), (1, "an earlier version saved it.*again")],
)
def test_an_example_whose_p_differs_here_is_refused_with_both_numbers(
    folder, reading, remedy
):
    lines = (folder / "examples.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert row["reading"] == READING
    row |= {"raw": row["raw"] - 0.02, "p_correct": 0.12345, "reading": reading}
    (folder / "examples.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]))
    write_checksums(folder)
    with pytest.raises(ValueError, match=rf"P 0\.\d+ here, but had 0\.12345.*{remedy}"):
        beatrice.load(folder).score(**ROWS[0])
    beatrice.load(folder, strict=False).score(**ROWS[0])


@pytest.mark.parametrize("what", ["revision", "config", "tokenizer"])
def test_another_model_or_tokenizer_is_refused_or_named_in_a_warning(folder, what):
    config = folder / "config.json"
    trained = json.loads(config.read_text())["provenance"]
    digest = trained[what] if what in trained else trained["hashes"][what]
    config.write_text(config.read_text().replace(digest, "f" * 64))
    write_checksums(folder)
    with pytest.raises(ValueError, match=f"{what}.*ffffffffffff.*strict=False"):
        beatrice.load(folder).score(**ROWS[0])
    score = beatrice.load(folder, strict=False).score(**ROWS[0])
    assert "ffffffffffff" in score.warnings[0]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("nowhere/at/all", "nowhere/at/all"),
        ("hf://no one/x", "no one/x: expected hf://owner/name"),
        ("hf://x/not-there", "x/not-there: (not in the local cache|cannot be fetched)"),
        (".", "no manifest.json"),
        ("", "path: expected a path .* found ''"),
        (3, "path"),
        (None, "path"),
    ],
)
def test_a_path_that_is_no_probe_and_no_run_is_refused(working_folder, path, named):
    with pytest.raises(ValueError, match=named):
        beatrice.load(path)
    assert not any(working_folder.iterdir())


def test_a_probe_is_not_saved_over_something_else(probe, working_folder):
    note = working_folder / "mine" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    for path, named in (
        (note.parent, "holds something else"),
        (note, "note.txt is a file"),
        (".", "is the current folder"),
    ):
        with pytest.raises(ValueError, match=named):
            probe.save(path)
    assert note.exists()


def test_a_tilde_in_the_path_of_a_probe_means_the_home_folder(
    probe, working_folder, monkeypatch
):
    monkeypatch.setenv("HOME", str(working_folder / "home"))
    probe.save("~/probe")
    assert os.listdir() == ["home"]
    assert beatrice.load("~/probe").rows == probe.rows


def test_every_kind_of_row_can_be_an_example_and_a_failed_save_changes_none(
    probe, tmp_path
):
    passage = beatrice.Passage(title="", text=PASSAGE)
    row = {"question": QUESTION, "answer": "Guzolt Falls"}
    rows = [(QUESTION, "Guzolt Falls", passage), AnswerToScore(**row), row]
    rows.append({"prompt": f"Question: {QUESTION} Answer:", "answer": " Guzolt Falls"})
    rows.append({"prompt_ids": [5, 6, 7], "answer_ids": [8, 9]})
    ours = copy.copy(probe)
    ours.save(tmp_path / "probe", examples=rows)
    scores = [score.raw for score in probe.score_many(rows)]
    loaded = beatrice.load(tmp_path / "probe")
    assert loaded.score(QUESTION, "Guzolt Falls")  # the examples were checked too
    lines = (tmp_path / "probe" / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["raw"] for line in lines] == scores
    for wrong in ([(QUESTION, " ")], [3]):
        with pytest.raises(ValueError, match="has no P"):
            ours.save(tmp_path / "other", examples=wrong)
    ours.save(tmp_path / "other")
    assert (tmp_path / "other" / "examples.jsonl").read_text().splitlines() == lines


def test_a_doubtful_probe_is_not_pushed_unless_declared_untrustworthy(probe):
    few = Evidence(train=(2, 60), validation=(1, 30), auroc=(0.4, 0.99))
    heads = {
        name: dataclasses.replace(head, evidence=few)
        for name, head in probe.detector.heads.items()
    }
    doubtful = dataclasses.replace(probe.detector, heads=heads)
    doubtful = beatrice.Probe(doubtful, layer=LAYER)
    with pytest.raises(ValueError, match="too few to trust"):
        doubtful.push("no/such/name")
    with pytest.raises(ValueError, match="hf://no/such/name: Repo id"):
        doubtful.push("no/such/name", untrustworthy=True)


def renamed(detector, **changes):
    """Return a detector with changes to its provenance."""
    trained = dataclasses.replace(detector.provenance, **changes)
    return dataclasses.replace(detector, provenance=trained)


def test_a_published_probe_names_no_folder_of_its_authors_machine(probe, tmp_path):
    names = {name: name for name in ("smollm2", IN_MEMORY)}
    paths = "../acme/tiny", "~/acme/tiny", "./tiny", "models/tiny", tmp_path / "tiny"
    for model, name in (names | {str(path): "tiny" for path in paths}).items():
        here = published(renamed(probe.detector, model=model))
        assert here.provenance.model == name
    of_hub = renamed(probe.detector, model="owner/name", revision="c" * 40)
    assert published(of_hub) == of_hub


@pytest.mark.parametrize("model", ["smollm2", "owner/name", "/a folder/gpt2"])
def test_a_card_names_a_base_model_only_if_its_revision_is_a_commit(probe, model):
    here = renamed(probe.detector, model=model)
    assert "base_model" not in card(here, probe.rows)
    text = card(renamed(here, revision="c" * 40), probe.rows)
    assert f'\nbase_model: "{model}"\nbase_model_relation: "adapter"\n' in text


@pytest.fixture
def copied_run(smoke_run, tmp_path):
    """A copy of the run's small files."""
    large = shutil.ignore_patterns("features", "encoders", "selection")
    return RunDir(shutil.copytree(smoke_run, tmp_path / "run", ignore=large))


def test_the_probe_of_a_run_makes_model_paths_absolute_but_not_hub_names(
    probe, copied_run, working_folder
):
    Path("models/tiny").mkdir(parents=True)
    names = {"c" * 64: str(working_folder / "models/tiny"), "c" * 40: "models/tiny"}
    for revision, name in names.items():
        ours = renamed(probe.detector, model="models/tiny", revision=revision)
        ours.save(copied_run.detector)
        assert beatrice.load(copied_run.path).detector.provenance.model == name


def test_a_save_replaces_only_a_probes_files_and_leaves_those_of_git(probe, tmp_path):
    folder = tmp_path / "clone"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("theirs")
    (folder / ".DS_Store").write_bytes(b"a Mac's")
    (folder / "eval.json").write_text("{}")
    with pytest.raises(ValueError, match="holds something else"):
        probe.save(folder)
    (folder / "eval.json").unlink()
    probe.save(tmp_path / "new")
    shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
    probe.save(folder)
    assert (folder / ".git" / "HEAD").read_text() == "theirs"
    assert beatrice.load(folder).rows == probe.rows
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else .*notes.txt"):
        probe.save(folder)


def test_a_mount_point_is_not_replaced_and_nothing_is_left_next_to_it(tmp_path):
    (tmp_path / "disk").mkdir()
    done = on_disk(
        "size=1m",
        tmp_path / "disk",
        "import beatrice, pathlib, sys\n"
        "from beatrice.extract.run.files import replaced_folder\n"
        "try: beatrice.load('embedded').save(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "with replaced_folder(pathlib.Path(sys.argv[1])): print('written')",
        code=1,
    )
    assert "is a mount point; give a new folder in it\nwritten" in done.stdout
    assert "busy" in done.stderr and os.listdir(tmp_path) == ["disk"]


def test_a_probe_that_does_not_fit_on_the_disk_leaves_nothing_behind(probe, tmp_path):
    with pytest.raises(OSError, match="too large"), little_room():
        probe.save(tmp_path / "probe", untrustworthy=True)
    assert not any(tmp_path.iterdir())


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_probe_is_saved_as_the_same_bytes_in_an_ascii_locale(tmp_path):
    line = "import beatrice, sys; beatrice.load('embedded').save(sys.argv[1])"
    run_python(line, tmp_path / "here")
    run_python(line, tmp_path / "there", **ASCII)
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes()


@pytest.fixture(scope="module")
def base_installation(tmp_path_factory):
    """The packages that `pip install beatrice-probe` without extras would install."""
    packages = tmp_path_factory.mktemp("base")
    for entry in Path(site.getsitepackages()[0]).iterdir():
        is_editable = entry.suffix == ".pth" or entry.name.startswith("__editable__")
        if not is_editable and not entry.name.lower().startswith(TRAINING_ONLY):
            (packages / entry.name).symlink_to(entry)
    package = packages / "beatrice"  # wherever its folders are on this machine
    package.mkdir()
    for entry in Path(beatrice.__file__).parent.iterdir():
        (package / entry.name).symlink_to(entry)
    for room in ("extract", "jaxprobe", "selection", "pgir", "benchmarks"):
        module_file = importlib.import_module(f"beatrice.{room}").__file__
        if not (package / room).exists():
            (package / room).symlink_to(Path(module_file).parent)
    return packages


@pytest.fixture
def bare(base_installation):
    """Return a function that runs Python with these packages and nothing else."""
    python = (os.path.realpath(sys.executable), "-S")
    return partial(run_line, *python, PYTHONPATH=str(base_installation))


PROGRAM = """
import json, sys
import beatrice
probe = beatrice.load(sys.argv[1])
rows = json.loads(sys.argv[2])
raw = [score.raw for score in probe.score_many(rows)]
heavy = [n for n in sys.modules if n.split(".")[0] in json.loads(sys.argv[3])]
print(json.dumps([raw, probe.answer(rows[0]["question"]).text, heavy]))
"""


def snapshot_folder(cache, name):
    """Make a repository in a cache of the Hub; return the folder for its files."""
    commit, repository = "a" * 40, cache / f"models--owner--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


@pytest.fixture
def hub_cache(saved, tmp_path):
    """A cache of the Hub with the probe, as `snapshot_download` would leave it."""
    shutil.copytree(saved, snapshot_folder(tmp_path / "hub", "name"))
    return tmp_path / "hub"


def test_a_cached_probe_scores_alike_without_any_package_for_training(
    probe, bare, hub_cache
):
    words = ["hf://owner/name", json.dumps(ROWS), json.dumps(TRAINING_ONLY)]
    nobody = "http://127.0.0.1:9"
    cache = str(hub_cache)
    done = bare("-c", PROGRAM, *words, HF_HUB_CACHE=cache, HF_ENDPOINT=nobody)
    raw, text, heavy = json.loads(done.stdout)
    expected = [score.raw for score in probe.score_many(ROWS)]
    np.testing.assert_allclose(raw, expected, atol=1e-5)
    assert text and not heavy


def test_a_base_installation_shows_its_names_and_says_what_it_lacks(bare):
    program = """
import inspect, pydoc, beatrice
from beatrice import *
assert inspect.getmembers(beatrice) and LanguageModel
print(pydoc.plain(pydoc.render_doc(beatrice)))
beatrice.fit
"""
    done = bare("-c", program, code=1)
    assert "class LanguageModel" in done.stdout and "class Signals" not in done.stdout
    assert "ImportError: beatrice.fit: tensorstore is not installed" in done.stderr


def test_every_listed_probe_loads_without_a_network(bare, hub_cache):
    away = {"HF_HUB_CACHE": str(hub_cache), "HF_ENDPOINT": "http://127.0.0.1:9"}
    program = """
import beatrice
from beatrice.probe import local_probes
print(*[name for name in local_probes() if beatrice.load(name)])
"""
    done = bare("-c", program, **away)
    assert "embedded" in done.stdout and f"hf://owner/name@{'a' * 40}" in done.stdout


def test_the_list_of_probes_is_sorted_and_survives_other_cached_files(probe, hub_cache):
    row = {"head": "single_pass", "split": "test\x1b[2J", "metric": "auroc"}
    row |= {"value": None, "ci_low": None, "ci_high": None, "n": 30, "n_right": 2}
    undefined = probe.with_report([row])  # as for a set with only right answers
    place = snapshot_folder(hub_cache, "undefined")
    undefined.save(place)
    for name in "fdaceb":
        shutil.copytree(place, snapshot_folder(hub_cache, name))
    foreign = snapshot_folder(hub_cache, "foreign")
    foreign.mkdir(parents=True)
    (foreign / "eval.json").write_text('{"accuracy": 1}')
    unknown = snapshot_folder(hub_cache, "unknown")
    shutil.copytree(place, unknown)
    about = (unknown / "eval.json").read_text()
    (unknown / "eval.json").write_text(about.replace("single_pass", "other_pass"))
    write_checksums(unknown)
    damaged = hub_cache / "models--owner--name" / "snapshots" / ("a" * 40)
    (damaged / CHECKSUMS).unlink()
    done = call("probes", HF_HUB_CACHE=str(hub_cache))
    assert "embedded: for embedded" in done.stdout
    assert re.findall(r"^hf://owner/(\w)@", done.stdout, re.M) == [*"abcdef"]
    assert "owner/unknown" not in done.stdout and "other_pass" in done.stderr
    assert "hf://owner/foreign" not in done.stdout + done.stderr
    assert (
        "  answers with context, read in their own pass, own (test\\x1b[2J): AUROC – "
        "of 30 answers, 2 right" in done.stdout
    )
    assert "hf://owner/name" not in done.stdout and CHECKSUMS in done.stderr


def test_an_exported_probe_scores_like_its_run_without_jax(bare, smoke_run, tmp_path):
    script = ROOT / "docs" / "probe_equality.py"
    runpy.run_path(script)["write"](smoke_run, tmp_path, 40)
    result = json.loads(bare(script, tmp_path).stdout)
    assert result.pop("loaded") == []
    assert set(result) == {"closed_book", "with_context", "single_pass"}
    for n, raw, p_correct in result.values():
        assert n == 40 and raw < 1e-6
        assert p_correct < 1e-3  # a step of the isotonic map has a slope of hundreds


def test_an_exported_report_has_only_the_means_over_seeds(copied_run):
    run = copied_run
    heads = {("champion", s): s for s in ("closed_book", "with_context")}
    heads["without_closed_book", "with_context"] = "single_pass"
    rows = [r for r in read_result_rows(run) if (r.detector, r.setting) in heads]
    ours = [r for r in rows if r.experiment == "detection" or r.kind == "calibrated"]
    seeds = [replace(r, seed="0", value=0.0) for r in ours if r.kind is None]
    run.results.write_text(write_rows([*rows, *seeds]))
    report, examples = _report_of(run, Detector.load(run.detector))
    expected = {
        (heads[r.detector, r.setting], r.dataset, r.split, r.metric): r.value
        for r in ours
    }
    at = operator.itemgetter("head", "dataset", "split", "metric")
    assert len(report) == len(expected) > 20
    assert {at(row): row["value"] for row in report} == expected
    held_back = {e.question for e in read_examples(run) if e.split == "test"}
    assert len({x["question"] for x in examples} & held_back) == 5


@pytest.mark.parametrize("is_without_closed_book", [False, True])
def test_an_exported_report_has_test_rows_of_the_head_that_scores_each_setting(
    copied_run, is_without_closed_book
):
    run = copied_run
    detector, settings = Detector.load(run.detector), [*OWN_PASS_HEADS]
    if is_without_closed_book:  # then both heads read one pass
        single = detector.heads["single_pass"]
        heads = {"single_pass": single, "with_context": single}
        detector, settings = dataclasses.replace(detector, heads=heads), settings[1:]
        rows = [r for r in read_result_rows(run) if r.detector == "champion"]
        run.results.write_text(write_rows(rows))
    report, _ = _report_of(run, detector)
    labels = [x for x in read_labels(run).values() if "-test-" in x.example_id]
    for setting in settings:
        at = (OWN_PASS_HEADS[setting], "test")
        tested = {r["metric"]: r for r in report if (r["head"], r["split"]) == at}
        n = sum(x.label for x in labels if x.setting == setting)
        n_right = None if is_without_closed_book else n
        assert tested["auroc"]["n_right"] == n_right and "auprc" in tested


def test_one_answer_is_scored_alike_by_a_run_and_by_its_exported_folder(
    smoke_run, tmp_path
):
    folder, page = tmp_path / "my probe", tmp_path / "page.html"
    _, line = begin("export", smoke_run, folder, "--untrustworthy").stdout.split("; ")
    assert shlex.split(line) == ["beatrice", "score", str(folder), "--question", "…"]
    row = json.loads((folder / "examples.jsonl").read_text().splitlines()[0])
    asked, texts = ("--question", row["question"]), set()
    for source in (smoke_run, folder):
        words = ("score", source, *asked, "--answer", row["answer"], "--html", page)
        shown = json.loads(begin(*words, "--json").stdout)
        assert shown["p_correct"] == pytest.approx(row["p_correct"], abs=1e-6)
        assert begin(*words).stdout == f"{row['p_correct']:.3f}\n"
        assert row["question"] in page.read_text()
        text, p_correct = begin("score", source, *asked).stdout.splitlines()
        again = begin("score", source, *asked, "--answer", text).stdout
        texts.add(text)
        assert float(again) == pytest.approx(float(p_correct), abs=2e-3)
    assert len(texts) == 1


TRAIN = "beatrice-probe[train]'"
OF_ANSWERS = f"""
import beatrice; model = beatrice.LanguageModel("embedded")
try: model.answer(["where?"], read=True)
except ImportError as error: assert "{TRAIN}" in str(error)
else: raise SystemExit("nothing is missing")
model.read(model.answer(["where was Skiband Rugrond born?"]))
"""
OF_FEW = """
import numpy as np; from beatrice.jaxprobe import scope
few = scope.Validation(np.ones(9), np.ones(9, bool))
print(scope.certify(few, 0.9, "trust").in_words())
"""
OF_A_FIT = """
import tempfile; from beatrice.cli import main
file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
file.write('{"question": "who?", "golds": ["me"]}'); file.flush()
main(["fit", "no/such-model", file.name, "nowhere"])
"""
OF_PARQUET = """
import beatrice, tempfile
file = tempfile.NamedTemporaryFile()
file.write(b"PAR1" * 9); file.flush()
beatrice.read_questions(file.name)
"""
CASES = {
    "a score without a threshold": (["-c", OF_FEW], 0, "22 validation answers"),
    "a function": (["-c", "import beatrice; beatrice.fit"], 1, TRAIN),
    "a fit, before its model is looked for": (["-c", OF_A_FIT], 1, TRAIN),
    "answers with signals, and signals of answers": (["-c", OF_ANSWERS], 1, TRAIN),
    "P of signals": (
        ["-c", "import beatrice; beatrice.load('embedded').predict(None)"], 1, TRAIN
    ),
    "a Parquet file": (["-c", OF_PARQUET], 1, "pip install pyarrow"),
    "a verb": (["-m", "beatrice", "demo", "nowhere", "--preset", "smoke"], 1, TRAIN),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_calls_that_need_training_say_what_to_install_and_others_work(bare, case):
    words, code, shown = CASES[case]
    done = bare(*words, code=code)
    assert shown in (done.stderr if code else done.stdout).splitlines()[-1]
