"""`beatrice data`: inspects files and makes runs, without replacing other files."""

import collections
import json
import re
import shlex

import pytest

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.records import Example, read_records
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import acquire_lock, read_manifest
from beatrice.extract.run.files import sha256_file
from tests.extract.datasets import published as pub
from tests.extract.small_run import assert_error_sentence, beatrice, make_run
from tests.process import call

LINES = [
    {
        "question": f"What is the capital of land {i}?",
        "golds": [f"Town {i}"],
        "passages": [{"title": f"Land {i}", "text": f"Its capital is Town {i}."}],
    }
    for i in range(40)
]
EMBEDDED = ("--model", "embedded")


@pytest.fixture
def hotpot(tmp_path):
    return pub.write_array(tmp_path / "hotpot", [pub.hotpot(i) for i in range(60)])


@pytest.fixture
def source(tmp_path):
    """Return a user's file, in a folder of its own."""
    path = tmp_path / "own" / "examples.jsonl"
    path.parent.mkdir()
    return pub.write_lines(path, LINES)


def build(run, *files, code=0, sizes=("--n-train", "all", "--n-evaluation", "all")):
    options = [word for role, file in files for word in (f"--{role}", f"mine={file}")]
    options += [*sizes, *EMBEDDED, "--context", "all"]
    return beatrice("data", run, *options, code=code)


def examples_of(run):
    return list(read_records(run / "examples.jsonl", Example))


def test_inspect_reports_what_a_file_is(hotpot):
    report = json.loads(beatrice("data", "--inspect", hotpot, "--json").stdout)
    expected = {"ok": True, "dataset": "hotpotqa", "format": "HotpotQA", "error": None}
    expected |= {"container": "json array", "refused": 0, "refusals": []}
    names = ("records", "loaded", "with_passages", "with_gold_passages")
    assert report | expected | dict.fromkeys(names, 60) == report
    assert "HotpotQA; json array" in beatrice("data", "--inspect", hotpot).stdout


def test_terminal_commands_in_a_file_or_note_are_escaped(tmp_path, capsys):
    evil = "\x1b]52;c;eA==\x07"
    path = tmp_path / "trivia.json"
    path.write_text(json.dumps(pub.trivia_file(Domain=evil)))
    shown = beatrice("data", "--inspect", path).stdout
    assert "TriviaQA" in shown and "]52;c;eA==" in shown and "\x1b" not in shown
    Progress().note(f"first\n{evil}")
    assert capsys.readouterr().err == "first\n\\x1b]52;c;eA==\\x07\n"


def test_sums_stay_apart_and_questions_equal_but_for_marks_are_reported_as_such(
    tmp_path,
):
    texts = [f"what is {a}{sign}{b}?" for a in "35" for b in "42" for sign in "+-*/"]
    texts += ["what is 3 + 4", "What is 34?", "???", "!!"]  # two repeated, and two new
    lines = [LINES[0] | {"question": text} for text in texts]
    path = pub.write_lines(tmp_path / "sums", lines)
    shown = beatrice("data", "--inspect", path).stdout
    alike = "equal to an earlier one but for case, marks and articles"
    assert f"2      questions {alike}" in " ".join(shown.splitlines()), shown
    run = tmp_path / "run"
    size = ("--n-train", "all", "--n-evaluation", "2")
    done = build(run, ("train", path), ("dev", path), sizes=size)
    assert "id or text (ignoring case, marks and articles)" in done.stdout


def test_a_refused_record_is_named_and_skip_bad_tolerates_it(tmp_path):
    records = [pub.hotpot(i) for i in range(30)]
    for record in records[2:27]:
        del record["answer"]
    path = pub.write_array(tmp_path / "a.json", records)
    done = beatrice("data", "--inspect", path, code=1)
    assert_error_sentence(done, "25 of 30 records", "record 3", "no 'answer'")
    assert "and 5 more" in done.stdout
    done = beatrice("data", "--inspect", path, "--json", "--skip_bad")
    report = json.loads(done.stdout)
    assert [r["record"] for r in report["refusals"]] == list(range(3, 28))


def test_a_refused_file_gives_one_sentence_and_still_a_json_report(tmp_path):
    path = tmp_path / "half.json"
    path.write_text(json.dumps([pub.hotpot(i) for i in range(9)])[:3000])
    done = beatrice("data", "--inspect", path, "--json", "--skip-bad", code=1)
    assert_error_sentence(done, "cut off")
    report = json.loads(done.stdout)
    assert (report["ok"], report["dataset"], report["loaded"]) == (False, "hotpotqa", 8)
    done = beatrice("data", "--inspect", tmp_path / "none.json", "--json", code=1)
    assert_error_sentence(done, "no such file")
    assert json.loads(done.stdout)["dataset"] is None


def test_splits_are_drawn_checked_and_refused_when_changed(hotpot, tmp_path):
    out = tmp_path / "out"
    line = ("data", out, "--train", f"hotpotqa={hotpot}", "--n-train", 20, *EMBEDDED)
    done = beatrice(*line, "--json")
    assert json.loads(done.stdout)["sizes"] == {"train": {"hotpotqa": 20}}
    beatrice(*line)  # finished already
    beatrice("doctor", out, "--verify")
    splits = out / "splits.json"
    splits.write_text(splits.read_text().replace('"seed": 0', '"seed": 1'))
    verified = beatrice("doctor", out, "--verify", code=1)
    assert "splits.json has changed since" in verified.stdout


def test_a_file_whose_name_is_not_utf8_can_be_inspected(tmp_path):
    path = tmp_path / "caf\udce9.json"
    path.write_text(json.dumps([pub.hotpot(i) for i in range(3)]))
    for options in ((), ("--json",)):
        stdout = call("data", "--inspect", path, *options).stdout
        assert r"caf\udce9.json" in stdout and "HotpotQA" in stdout


def test_one_set_may_have_a_context_of_its_own(hotpot, tmp_path):
    table = pub.write_table(tmp_path / "p.tsv", [pub.popqa(i) for i in range(20)])
    command = ["data", tmp_path / "run", "--dev", f"hotpotqa={hotpot}", *EMBEDDED]
    command += ["--held-out", f"popqa={table}", "--n-held-out", "popqa=5"]
    command += ["--n-evaluation", "5", "--context", "supporting"]
    assert_error_sentence(beatrice(*command, code=1), "--context popqa=none")
    for again in (("--context", "all"), ("--n-held-out", "popqa=5")):
        twice = beatrice(*command, *again, code=2)
        assert "was already given" in twice.stderr
    command += ["--context", "popqa=none"]
    for option, file in (
        (("--n-train", "popqa=3"), "training file of popqa"),
        (("--n-held-out", "nq=3"), "held-out file of nq"),
        (("--context", "nq=none"), "file of nq"),
    ):
        unknown = beatrice(*command, *option, code=1)
        assert_error_sentence(unknown, f"no {file} is given")
    done = beatrice(*command, "--json")
    assert done.stderr.count("closed-book only") == 1
    sources = json.loads(done.stdout)["sources"]
    assert [s["context"] for s in sources] == ["supporting", "none"]
    pairs = {(e.dataset, bool(e.passages)) for e in examples_of(tmp_path / "run")}
    assert pairs == {("hotpotqa", True), ("popqa", False)}
    section = read_manifest(tmp_path / "run")["sections"]["data"]
    assert section["context"] == "supporting popqa=none"


def test_a_set_of_any_name_becomes_a_run_with_all_its_questions(source, tmp_path):
    before = source.read_bytes()
    # Under a name of the user's own, a published set's tag is no reason to refuse.
    tagged = pub.write_lines(tmp_path / "x", [x | {"dataset": "squad"} for x in LINES])
    for file in (source, tagged):
        run = tmp_path / f"run of {file.name}"
        build(run, ("train", file))
        examples = examples_of(run)
        assert {(e.dataset, e.split) for e in examples} == {("mine", "train")}
        texts = sorted(example.question for example in examples)
        assert texts == sorted(line["question"] for line in LINES)
        assert all(e.id.startswith("mine-") and len(e.passages) == 1 for e in examples)
    assert source.read_bytes() == before
    line = ("data", tmp_path / "nq", *EMBEDDED, "--train", f"nq={tagged}")
    assert "none of the six question sets" in beatrice(*line, code=1).output


def test_several_files_of_a_set_are_all_inputs_of_its_run(source, tmp_path):
    halves = [
        pub.write_lines(tmp_path / name, part)
        for name, part in (("a", LINES[:20]), ("b", LINES[20:]))
    ]
    build(tmp_path / "run", *(("train", half) for half in halves))
    assert len(examples_of(tmp_path / "run")) == len(LINES)
    inputs = json.loads((tmp_path / "run" / "stages" / "data.json").read_text())
    digests = inputs["inputs"]["mine train"].split()
    assert sorted(digests) == sorted(map(sha256_file, halves))


def test_a_development_file_is_halved_and_splits_that_a_file_names_are_kept(
    source, tmp_path
):
    build(tmp_path / "run", ("dev", source))
    path = tmp_path / "run" / "examples.jsonl"
    splits = [example.split for example in examples_of(path.parent)]
    assert splits == ["validation"] * 20 + ["test"] * 20
    build(tmp_path / "again", ("dev", path))
    assert (tmp_path / "again" / "examples.jsonl").read_text() == path.read_text()
    shown = build(tmp_path / "train", ("train", path), code=1).output
    assert "all 40 records name a split that --train does not fill" in shown


def test_real_questions_need_an_explicit_model(source, tmp_path):
    run = tmp_path / "my run"
    line = ("data", run, "--train", f"mine={source}", "--n-train", "all")
    shown = beatrice(*line, code=2).output
    assert "--model is missing" in shown and "--model embedded" in shown
    assert not run.exists()
    beatrice(*line, *EMBEDDED)
    # Scoring in a run without a detector names the next verb.
    answer = ("--question", "where?", "--answer", "here")
    shown = beatrice("score", run, *answer, code=1).output
    assert "` first, then label, extract, sweep" in shown
    assert shlex.split(shown.split("`")[1]) == ["beatrice", "answer", str(run)]
    assert "demo" not in shown


PASSAGE = {"title": "T", "text": "x", "is_supporting": True}


@pytest.mark.parametrize(
    ("passages", "context", "n_shown"),
    [
        ([PASSAGE, PASSAGE | {"is_supporting": False}], "supporting", 1),
        (["x", "y"], "supporting mine=all", 2),
        ([], "supporting mine=none", 0),
    ],
)
def test_the_context_of_a_users_own_set_follows_from_its_passages(
    source, tmp_path, passages, context, n_shown
):
    pub.write_lines(source, [line | {"passages": passages} for line in LINES])
    line = ("--train", f"mine={source}", "--n-train", "all", *EMBEDDED)
    shown = beatrice("data", tmp_path / "run", *line).stderr
    assert {len(e.passages) for e in examples_of(tmp_path / "run")} == {n_shown}
    sections = read_manifest(tmp_path / "run")["sections"]
    assert sections["data"]["context"] == context
    chosen = context.removeprefix("supporting ")
    assert (f"--context {chosen}, since the first" in shown) == (" " in context)
    assert ("have no passage marked" in shown) == (chosen == "mine=all")


def test_a_question_among_the_worked_examples_is_drawn_into_no_split(source, tmp_path):
    shot = {"question": LINES[0]["question"].upper(), "answer": "Town 0"}
    shots = pub.write_lines(tmp_path / "shots.jsonl", [shot | {"context": "Town 0."}])
    files = [w for role in ("train", "dev") for w in (f"--{role}", f"mine={source}")]
    sizes = ("--n-train", "all", "--n-evaluation", 9, "--template", shots, *EMBEDDED)
    shown = beatrice("data", tmp_path / "run", *files, *sizes).stderr
    assert shown.count("1 worked examples of the prompt") == 2
    texts = {example.question for example in examples_of(tmp_path / "run")}
    assert texts == {line["question"] for line in LINES[1:]}
    given = tmp_path / "given"
    assert "stays" not in shown
    build(given, ("train", source))
    again = ("--splits", given / "splits.json", *sizes)
    shown = beatrice("data", tmp_path / "again", *files[:2], *again).stderr
    assert "even if they contain a worked example" in " ".join(shown.split())
    assert len(examples_of(tmp_path / "again")) == len(LINES)


@pytest.mark.parametrize("first", [["x"], []])
def test_a_gold_mark_after_the_questions_that_set_the_context_is_refused(
    source, tmp_path, first
):
    lines = [{"question": f"q {i}?", "golds": ["x"], "passages": []} for i in range(9)]
    lines = [line | {"passages": first} for line in lines] * 32
    pub.write_lines(source, [*lines, lines[0] | {"passages": [PASSAGE, "y"]}])
    line = ("data", tmp_path / "run", "--train", f"mine={source}", "--n-train", "all")
    shown = beatrice(*line, *EMBEDDED, code=1).output
    assert "record 289" in shown and "--context mine=supporting" in shown
    beatrice(*line, *EMBEDDED, "--context", "mine=supporting", "--n-train", "mine=1")


@pytest.mark.parametrize(
    "sizes", [(), ("--n-evaluation", "all"), ("--n-evaluation", 20)]
)
def test_impossible_sizes_for_one_file_are_refused_with_possible_ones(
    source, tmp_path, sizes
):
    files = (("train", source), ("dev", source))
    shown = build(tmp_path / "run", *files, sizes=sizes, code=1).output
    assert not (tmp_path / "run").exists()
    advised = re.search(r"--n-evaluation \d+ --n-train all", shown)[0].split()
    assert "leaves 24 to train on" in shown
    build(tmp_path / "run", *files, sizes=advised)
    splits = collections.Counter(e.split for e in examples_of(tmp_path / "run"))
    assert splits == {"train": 24, "validation": 8, "test": 8}


OWN = "--train OWN --n-train all"
LAYERS, DTYPE = "backbone.attention_layers", "backbone.dtype"


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (OWN, LAYERS, "full"),  # the default preset, paper
        (f"{OWN} --set attention_layers=all", LAYERS, "all"),
        (f"{OWN} --preset demo", LAYERS, "all"),
        (OWN, DTYPE, "float32"),
        (f"{OWN} --device cuda", DTYPE, "bfloat16"),
        (f"{OWN} --device cuda --model-dtype float32", DTYPE, "float32"),
        (f"{OWN} --model-dtype bfloat16", DTYPE, "bfloat16"),
        # A preset shortens only the answers of the embedded model.
        *(
            (f"{kind} --preset demo {model}", "answer.generation.max_new_tokens", n)
            for kind in (OWN, "--world")
            for model, n in (("", 10), ("--model WEIGHTS", 32))
        ),
    ],
)
def test_a_runs_manifest_records_what_follows_from_the_options(
    source, tmp_path, words, field, value
):
    places = {"OWN": f"mine={source}", "WEIGHTS": WEIGHTS}
    line = (places.get(word, word) for word in words.split())
    beatrice("data", tmp_path / "run", *EMBEDDED, *line)
    settings = read_manifest(tmp_path / "run")["sections"]
    for name in field.split("."):
        settings = settings[name]
    assert settings == value


# Files that a user wrote or changed are neither replaced nor silently read.


@pytest.mark.parametrize("line", ["demo", "data --world", "data"])
def test_a_folder_with_a_users_files_is_refused_and_left_alone(source, line):
    verb, *options = line.split()
    if line == "data":
        options = ["--train", f"mine={source}", "--n-train", "all", *EMBEDDED]
    shown = beatrice(verb, source.parent, "--preset", "smoke", *options, code=1).output
    assert "it has 'examples.jsonl'" in shown
    assert "`beatrice data NEW_RUN --train NAME=FILE` makes a run of them" in shown
    assert [path.name for path in source.parent.iterdir()] == ["examples.jsonl"]
    source.rename(source.with_name("lockdown.txt"))  # begins like a run's lock
    shown = beatrice("data", source.parent, "--world", code=1).output
    assert "'lockdown.txt'" in shown


def test_a_run_that_another_process_is_making_is_left_to_it(source, tmp_path):
    lock = tmp_path / "run" / "lock"
    lock.parent.mkdir()
    with acquire_lock(lock):
        holder = lock.read_text()
        shown = build(lock.parent, ("train", source), code=1).output
        assert "is in use by process" in shown and lock.read_text() == holder


def test_changed_or_unrecorded_questions_are_neither_read_nor_replaced(tmp_path):
    run, options = tmp_path / "run", ("--preset", "smoke")
    path = run / "examples.jsonl"
    beatrice("data", run, "--world", *options)
    path.write_text(path.read_text().replace('"validation"', '"test"'))
    changed = path.read_bytes()
    lines = (("demo", run, *options), ("data", "--world", run, *options))
    for line in (*lines, ("answer", run)):
        shown = beatrice(*line, code=1).output
        assert "examples.jsonl was changed since it was written, and is nei" in shown
        assert "put it back, or start a new run" in shown
    verified = beatrice("doctor", run, "--verify", code=1).output
    assert "examples.jsonl has changed since" in verified
    (run / "stages" / "world.json").unlink()
    for line in lines:
        shown = beatrice(*line, code=1).output
        assert "examples.jsonl is there already with other content" in shown
    assert path.read_bytes() == changed


def test_unfinished_answers_are_not_labelled(tmp_path):
    run = make_run(tmp_path / "run")
    beatrice("answer", run.path)
    (run.stages / "answer.json").unlink()  # as if it had been killed before the end
    shown = beatrice("label", run.path, code=1).output
    assert "are not finished: run `beatrice answer` first" in shown
    beatrice("answer", run.path)
    beatrice("label", run.path)
