"""Questions of one's own become a run, and nothing that a person wrote is replaced."""

import collections
import json
import re

import pytest

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.records import Example, read_records, write_lines
from beatrice.extract.run.directory import RunDir, read_manifest
from tests.extract.small_run import beatrice, questions, smoke

LINES = [
    {
        "question": f"What is the capital of land {i}?",
        "golds": [f"Town {i}"],
        "passages": [{"title": f"Land {i}", "text": f"Its capital is Town {i}."}],
    }
    for i in range(40)
]


@pytest.fixture
def own(tmp_path):
    """Return a person's file, in a folder of its own."""
    path = tmp_path / "own" / "examples.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def build(run, *files, code=0, context="all"):
    options = [word for role, file in files for word in (f"--{role}", f"mine={file}")]
    sizes = ("--n-train", "all", "--n-evaluation", "all", "--model", "embedded")
    return beatrice("data", run, *options, *sizes, "--context", context, code=code)


def examples_of(run):
    return list(read_records(run / "examples.jsonl", Example))


def test_a_set_of_any_name_becomes_a_run_with_all_its_questions(own, tmp_path):
    before = own.read_bytes()
    build(tmp_path / "run", ("train", own))
    found = examples_of(tmp_path / "run")
    assert {(e.dataset, e.split) for e in found} == {("mine", "train")}
    assert sorted(e.question for e in found) == sorted(x["question"] for x in LINES)
    assert all(e.id.startswith("mine-") and len(e.passages) == 1 for e in found)
    assert own.read_bytes() == before


def test_one_file_serves_as_training_and_development_set_without_a_leak(own, tmp_path):
    line = ("--n-evaluation", 5, "--n-train", "all", "--context", "all")
    files = ("--train", f"mine={own}", "--dev", f"mine={own}")
    beatrice("data", tmp_path / "run", *files, *line, "--model", "embedded")
    found = examples_of(tmp_path / "run")
    sizes = [sum(e.split == s for e in found) for s in ("train", "validation", "test")]
    assert sizes == [30, 5, 5]
    assert len({e.question for e in found}) == 40


def test_splits_that_a_runs_own_file_names_are_kept(own, tmp_path):
    build(tmp_path / "run", ("dev", own))
    first = tmp_path / "run" / "examples.jsonl"
    build(tmp_path / "again", ("dev", first))
    assert (tmp_path / "again" / "examples.jsonl").read_text() == first.read_text()
    said = build(tmp_path / "train", ("train", first), code=1).output
    assert "all 40 records name another split than --train is for" in said


def test_all_of_a_development_file_is_halved(own, tmp_path):
    build(tmp_path / "run", ("dev", own))
    splits = [example.split for example in examples_of(tmp_path / "run")]
    assert splits == ["validation"] * 20 + ["test"] * 20


def test_a_real_question_never_meets_the_embedded_model_in_silence(own, tmp_path):
    line = ("data", tmp_path / "run", "--train", f"mine={own}", "--n-train", "all")
    said = beatrice(*line, code=2).output
    assert "--model is missing" in said and "--model embedded" in said
    assert not (tmp_path / "run").exists()
    beatrice(*line, "--model", "embedded")


PASSAGE = {"title": "T", "text": "x", "is_supporting": True}


@pytest.mark.parametrize(
    ("passages", "context", "n_shown"),
    [
        ([PASSAGE, PASSAGE | {"is_supporting": False}], "supporting", 1),
        (["x", "y"], "supporting mine=all", 2),
        ([], "supporting mine=none", 0),
    ],
)
def test_a_set_of_ones_own_has_the_context_that_its_files_have(
    own, tmp_path, passages, context, n_shown
):
    lines = [json.dumps(line | {"passages": passages}) for line in LINES]
    own.write_text("\n".join(lines))
    line = ("--train", f"mine={own}", "--n-train", "all", "--model", "embedded")
    said = beatrice("data", tmp_path / "run", *line).stderr
    assert {len(e.passages) for e in examples_of(tmp_path / "run")} == {n_shown}
    sections = read_manifest(tmp_path / "run")["sections"]
    assert sections["data"]["context"] == context
    chosen = context.removeprefix("supporting ")
    assert (f"--context {chosen}, since no passage" in said) == (" " in context)


@pytest.mark.parametrize(
    "sizes", [(), ("--n-evaluation", "all"), ("--n-evaluation", 20)]
)
def test_sizes_that_one_file_cannot_have_are_refused_with_sizes_that_it_can(
    own, tmp_path, sizes
):
    line = ["data", tmp_path / "run", "--model", "embedded"]
    line += ["--train", f"mine={own}", "--dev", f"mine={own}"]
    said = beatrice(*line, *sizes, code=1).output
    assert not (tmp_path / "run").exists()
    advised = re.search(r"--n-evaluation \d+ --n-train all", said)[0].split()
    assert "leaves 24 to train on" in said
    beatrice(*line, *advised)
    splits = collections.Counter(e.split for e in examples_of(tmp_path / "run"))
    assert splits == {"train": 24, "validation": 8, "test": 8}


@pytest.mark.parametrize(("model", "n_longest"), [("embedded", 10), (str(WEIGHTS), 32)])
@pytest.mark.parametrize("is_world", [False, True])
def test_a_preset_shortens_the_answers_of_the_embedded_model_alone(
    own, tmp_path, model, n_longest, is_world
):
    files = ("--train", f"mine={own}", "--n-train", "all")
    options = ("--model", model, "--preset", "demo")
    beatrice("data", tmp_path / "run", *(("--world",) if is_world else files), *options)
    answer = read_manifest(tmp_path / "run")["sections"]["answer"]
    assert answer["generation"]["max_new_tokens"] == n_longest


def test_a_run_without_a_detector_says_which_verb_is_next(own, tmp_path):
    run = tmp_path / "run"
    build(run, ("train", own))
    answer = ("--question", "where?", "--answer", "here")
    said = beatrice("score", run, *answer, code=1).output
    assert f"run `beatrice answer {run}` first, then label, extract, sweep" in said
    assert "demo" not in said


@pytest.mark.parametrize("name", ["../x", "x/../../../ESCAPED/pwn", ".x", "a" * 65])
def test_a_name_that_could_be_a_path_is_wrong_usage(own, tmp_path, name):
    done = beatrice("data", tmp_path / "run", "--train", f"{name}={own}", code=2)
    assert "expected NAME=VALUE" in done.output
    assert not (tmp_path / "run").exists()


def test_a_name_of_ones_own_is_no_claim_to_be_a_published_set(own, tmp_path):
    tagged = [line | {"dataset": "squad"} for line in LINES]
    own.write_text("".join(json.dumps(line) + "\n" for line in tagged))
    build(tmp_path / "run", ("train", own))
    assert {e.dataset for e in examples_of(tmp_path / "run")} == {"mine"}
    line = ("data", tmp_path / "nq", "--model", "embedded")
    done = beatrice(*line, "--train", f"nq={own}", code=1)
    assert "none of the six question sets" in done.output


@pytest.mark.parametrize("line", ["demo", "data --world", "data"])
def test_a_folder_with_a_persons_files_is_refused_and_left_alone(own, line):
    verb, *options = line.split()
    if line == "data":
        options = ["--train", f"mine={own}", "--n-train", "all", "--model", "embedded"]
    said = beatrice(verb, own.parent, "--preset", "smoke", *options, code=1).output
    assert "it holds 'examples.jsonl'" in said
    assert "`beatrice data NEW_RUN --train NAME=FILE` makes a run of them" in said
    assert [path.name for path in own.parent.iterdir()] == ["examples.jsonl"]


def test_a_file_whose_name_begins_like_ours_is_a_persons(tmp_path):
    (tmp_path / "lockdown.txt").write_text("mine")
    assert "'lockdown.txt'" in beatrice("data", tmp_path, "--world", code=1).output


@pytest.mark.parametrize("line", ["demo", "data --world"])
def test_questions_in_a_run_that_nobody_recorded_are_not_replaced(tmp_path, line):
    line = (*line.split(), tmp_path / "run", "--preset", "smoke")
    beatrice("data", tmp_path / "run", "--preset", "smoke", "--world")
    (tmp_path / "run" / "stages" / "world.json").unlink()
    mine = write_lines(questions())
    (tmp_path / "run" / "examples.jsonl").write_text(mine)
    said = beatrice(*line, code=1).output
    assert "examples.jsonl is there already with other content" in said
    assert (tmp_path / "run" / "examples.jsonl").read_text() == mine


def swap_validation_and_test(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    other = {"validation": "test", "test": "validation"}
    rows = [row | {"split": other.get(row["split"], row["split"])} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("line", ["demo", "data --world", "answer"])
def test_questions_that_were_changed_are_neither_read_nor_replaced(tmp_path, line):
    run = tmp_path / "run"
    options = ("--preset", "smoke")
    beatrice("data", run, "--world", *options)
    swap_validation_and_test(run / "examples.jsonl")
    changed = (run / "examples.jsonl").read_bytes()
    rest = () if line == "answer" else options
    said = beatrice(*line.split(), run, *rest, code=1).output
    assert "examples.jsonl was changed since it was written, and is neither" in said
    assert "put it back, or start a new run" in said
    assert (run / "examples.jsonl").read_bytes() == changed
    assert (
        "examples.jsonl has changed since"
        in beatrice("doctor", run, "--verify", code=1).output
    )


def test_half_of_the_answers_are_not_labelled(tmp_path):
    with RunDir.open(tmp_path / "run", smoke()) as run:
        run.examples.write_text(write_lines(questions()))
        run.passages.write_text("")
    beatrice("answer", run.path)
    (run.stages / "answer.json").unlink()  # as if it had been killed before the end
    said = beatrice("label", run.path, code=1).output
    assert "are not finished: run `beatrice answer` first" in said
    beatrice("answer", run.path)
    beatrice("label", run.path)


def test_labels_of_swapped_splits_are_not_taken_for_done(tmp_path):
    """Where no stage recorded who made the questions, the others still notice."""
    with RunDir.open(tmp_path / "run", smoke()) as run:
        run.examples.write_text(write_lines(questions()))
        run.passages.write_text("")
    beatrice("answer", run.path)
    beatrice("label", run.path)
    swap_validation_and_test(run.examples)
    said = beatrice("label", run.path, code=1).output
    assert "label reads" in said and "input examples.jsonl has changed" in said
    assert "its input examples.jsonl has changed since; it is done again" in (
        beatrice("answer", run.path).output
    )
    assert "it is done again" in beatrice("label", run.path).output
    assert "already done" in beatrice("label", run.path).output
