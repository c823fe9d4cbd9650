"""What a user meets at the command line.

Most tests call the program within this process, which saves its start; those of
signals, letters and the whole demo start real processes.
"""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from beatrice.cli import HEADINGS, VERBS, main
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extras import missing_extra
from tests.extract.small_run import assert_error_sentence, beatrice
from tests.process import ROOT, call, loaded_by, run_line, start


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    beatrice("data", path, "--world", "--preset", "smoke")
    return path


def test_a_missing_package_is_reported_with_what_to_install():
    error = ImportError("Parquet: pip install pyarrow", name="pyarrow")
    assert missing_extra(error) == str(error)
    bare = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert "beatrice-probe[train]" in missing_extra(bare)


def test_help_lists_the_verbs_in_order_and_each_verb_has_an_example():
    done = beatrice("--help")
    text = done.stdout.split(f"{next(iter(HEADINGS))}:")[1]
    listed = re.findall(r"^  (\w+) ", text, re.MULTILINE)
    assert listed == list(VERBS)
    assert "..." not in text
    for verb in VERBS:
        assert "Example:" in beatrice(verb, "--help").stdout


def test_help_does_not_state_in_words_a_default_that_is_printed():
    n_printed = 0
    lines = [(verb,) for verb in VERBS]
    lines += [("bench", name) for name in main.get_command(None, "bench").commands]
    for line in lines:
        listed = beatrice(*line, "--help").stdout.partition("\nOptions:\n")[2]
        for text in re.split(r"\n  (?=-)", listed):
            words, printed, _ = " ".join(text.split()).partition("[default: ")
            n_printed += bool(printed)
            assert not (printed and "efault" in words), (line, words)
    assert n_printed > 50


def test_a_shell_completes_options_and_no_error_follows_a_mistyped_verb():
    shell = ShellComplete(main, {}, "beatrice", "_BEATRICE_COMPLETE")
    for verb, values in {"score": ["--probe"], "scor": []}.items():
        completions = shell.get_completions([verb], "--pro")
        assert [completion.value for completion in completions] == values


def every_option(command, name=""):
    """Yield the name of every option of a command and of its subcommands."""
    for option in command.params:
        if isinstance(option, click.Option):
            yield max(option.opts, key=len)
    for verb in getattr(command, "list_commands", lambda context: ())(None):
        yield from every_option(command.get_command(None, verb))


def test_there_are_few_verbs_and_options():
    assert len(VERBS) <= 25
    assert len(set(every_option(main))) <= 88


WRONG_USAGE = [
    ("scor RUN", "`beatrice score`"),
    ("verify RUN", "`beatrice doctor RUN_DIR --verify`"),
    ("world RUN", "`beatrice data RUN_DIR --world`"),
    ("demo RUN --sed 1", "--seed"),
    ("label RUN --set max_costs=3", "max_cost?"),
    ("data", "give either RUN_DIR, or --inspect FILE"),
    ("data RUN", "give files with --train, --dev or --held-out; or --world"),
    ("data RUN --inspect x", "give either RUN_DIR, or --inspect FILE"),
    ("data --inspect x --n-train 5", "--inspect cannot be combined"),
    ("data --inspect ../squad=x", "before the =, found '../squad'"),
    ("data RUN --train x=x --set train_model=true", "train_model is for --world"),
    ("data RUN --train x.json", "such as mine=x.json"),
    ("data RUN --world --train nq=x", "--world has its own questions"),
    ("data RUN --train nq=x --n-held-out nq=many", "--n-held-out"),
    ("data RUN --train x=x --model embedded --template nowhere", "few-shot or a file"),
    *((f"data RUN --train {x}=x", "a name (") for x in ("../x", ".x", "a" * 65)),
    ("demo RUN --preset smoke --model /no/model", "no such directory"),
    ("demo RUN --hidden_layers sideways", "sideways"),  # an underscore is accepted
    ("data RUN --train nq=x.json --n-train -5", "--n-train"),
    ("data RUN --train nq=", "expected NAME=VALUE"),
    ("data RUN --train n/q=x.json", "expected NAME=VALUE"),
    ("data RUN --train nq=x.json --n-evaluation 0", "--n-evaluation"),
    ("data RUN --world --seed -1", "--seed"),
    ("data RUN --world --seed 2147483648", "--seed"),
    ("data RUN --world --hidden-layers 99", "layers 0 (the embedding) to 6, not 99"),
    ("data gs://bucket/run --world", "folder on this machine, found 'gs://bucket/run'"),
    ("extract s3://bucket/run", "folder on this machine"),
    ("score file:///run --question q --answer a", "folder on this machine"),
    ("doctor gs://bucket/run", "folder on this machine"),
    ("answer RUN --shard 4/4", "rank 4 of 4 workers"),
    ("extract RUN --shard x/2", "expected a whole number, found 'x'"),
    ("sample RUN --n-samples 1000000000", "is not in the range 1<=x<=1000"),
    ("sample RUN --set top_p=2", "top_p"),
    ("sample RUN --set temperature=-1", "temperature"),
    ("sample RUN --set topk=5", "did you mean top_k?"),
    ("sample RUN --set served_model=x", "served_model is for a server"),
    ("answer RUN --set served_model=x", "served_model is for a server"),
    ("answer RUN --server not-a-url", "expected a URL"),
    ("label RUN --server not-a-url --judge x", "expected a URL"),
    ("answer RUN --server http://me:secret@x/v1", "OPENAI_API_KEY"),
    ("answer RUN --server me:secret@x/v1", "OPENAI_API_KEY"),
    ("answer RUN --server http://x/v1?key=secret", "without a name, password or query"),
    ("label RUN --server http://x/v1", "--server"),
    ("label RUN --n-samples 5", "--n-samples is for --audit"),
    ("rewrite RUN --model /no/model", "--model"),
    ("label RUN --annotations HERE", "give both"),
    ("label RUN --set vote=majority", "model as --judge"),
    ("label RUN --judge m --set max_cost=1", "give --server too"),
    ("data RUN --train x=", "such as mine=questions.jsonl"),
    ("data RUN --train x=HERE --splits nowhere.json", "does not exist"),
    ("demo RUN --set streamed=", "streamed: expected true or false"),
    ("sample RUN --set temperature=nan", "nan is not a finite number"),
    ("control RUN --max-generations inf", "inf is not a finite number"),
    ("train RUN --set device_memory=much", "device_memory: expected a number of bytes"),
    ("xyzzy RUN", "No such command 'xyzzy'"),
    ("bench xyzzy", "No such command 'xyzzy'"),
    ("score --question q?", "give either RUN_DIR or --probe"),
    ("score RUN --probe embedded --question q?", "give either RUN_DIR"),
    ("doctor --verify", "--verify checks a run; give RUN_DIR too"),
    ("doctor --server http://me:secret@x/v1", "OPENAI_API_KEY"),
    ("baselines", "missing argument 'RUN_DIR'"),
    ("real --preset smoke", "give DATA_DIR and RUN_DIR, or --fetch"),
    ("bench survey gpt_os", "no model type is called 'gpt_os'; did you mean gpt_oss?"),
    ("bench extract --model-dtype bfloat16", "bfloat16 needs --model"),
    ("baselines WORLD --only nope", "no detector"),
    ("baselines WORLD --check nope", "MODULE:NAME"),
    ("anatomy WORLD --only nope", "no analysis 'nope'"),
    ("control WORLD --only nope", "no rival is called 'nope'"),
    ("extract WORLD --hidden-layers 99", "layers 0 (the embedding) to 6, not 99"),
    ("label WORLD --judge /no", "--judge"),
    ("report WORLD WORLD --ledger", "--ledger and --print take one run"),
    ("report WORLD --out HERE.md", "--out is for a comparison; give RUN_B too"),
]
# Lines with an empty value.
EMPTY = (
    "data EMPTY --world --preset smoke",
    "data --inspect EMPTY",
    "export WORLD EMPTY",
    "report WORLD EMPTY",
    "report WORLD WORLD --out EMPTY",
    "report WORLD --print EMPTY",
    "fit EMPTY HERE PROBE",
    "fit embedded HERE EMPTY",
    "score --probe EMPTY --question q?",
    "score WORLD --question EMPTY",
    "score WORLD --question q? --model EMPTY",
    "score WORLD --file HERE --out EMPTY",
    "control WORLD --retriever EMPTY",
    "control WORLD --url EMPTY",
    "corpus FOLDER --serve --set host=EMPTY",
)
# Lines whose output would be inside of a file.
INSIDE = (
    "export WORLD HERE/probe",
    "fit embedded HERE HERE/probe",
    "score WORLD --file HERE --out HERE/scores.jsonl",
    "score WORLD --file HERE --html HERE/page.html",
    "report WORLD WORLD --out HERE/comparison.md",
    "corpus HERE/corpus --source HERE",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *WRONG_USAGE,
        *((words, "found an empty one") for words in EMPTY),
        *((words, f"{__file__} is not a folder") for words in INSIDE),
    ],
)
def test_wrong_usage_is_reported_at_once_and_leaves_nothing_behind(
    small_run, working_folder, words, message
):
    places = {"RUN": "run", "WORLD": small_run, "HERE": __file__, "EMPTY": ""}
    line = words.split()
    for name, place in places.items():
        line = [word.replace(name, str(place)) for word in line]
    assert message in beatrice(*line, code=2).output
    assert not list(working_folder.iterdir())


def test_a_folder_that_is_not_a_run_is_refused_and_not_recorded(small_run, tmp_path):
    before = (small_run / "manifest.json").read_bytes()
    for verb in ("anatomy", "report"):
        done = beatrice(verb, small_run, tmp_path, code=2)
        assert f"{tmp_path} is not a run directory" in done.stderr
    assert (small_run / "manifest.json").read_bytes() == before


LEFT = "answer, label, extract, sweep, train, select, calibrate"  # verbs left to run
NOT_THERE = [
    (
        "data RUN --world --preset smoke --seed 5",
        ["seed=0;", "seed=5;", "choose another directory"],
    ),
    ("label RUN", ["answers is missing", "run `beatrice answer "]),
    ("score RUN --question q? --answer a", ["detector is missing", *LEFT.split(", ")]),
    ("export RUN /", ["detector is missing"]),
    ("answer NOTHING", ["nothing"]),
    ("doctor --verify NOTHING", ["nothing"]),
]


@pytest.mark.parametrize(("words", "sentence"), NOT_THERE)
def test_what_a_run_lacks_is_reported_in_one_sentence(small_run, words, sentence):
    places = {"RUN": small_run, "NOTHING": small_run.with_name("nothing")}
    line = (places.get(word, word) for word in words.split())
    assert_error_sentence(beatrice(*line, code=1), *sentence)


def test_ctrl_c_while_libraries_are_imported_ends_without_a_traceback(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert call("probes", code=130, PYTHONPATH=places).stderr == ""


@pytest.mark.parametrize(("asked", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stopped_process_releases_the_run_and_ends_with_the_signals_code(
    tmp_path, asked, code
):
    # A process that a shell starts in the background ignores Ctrl-C.
    listening = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        "; runpy.run_module('beatrice', run_name='__main__')"
    )
    words = (sys.executable, "-c", listening, "demo", tmp_path, "--preset", "smoke")
    process = start(*words)
    for line in process.stderr:
        if line.startswith("world: done"):
            assert (tmp_path / "lock").read_text()
            process.send_signal(signal.Signals[asked])
            break
    _, output = process.communicate()
    assert process.returncode == code and not (tmp_path / "lock").read_text()
    assert ("Stopped; repeat the same command to continue." in output) == (code == 130)
    assert "Traceback" not in output


def test_unknown_letters_are_escaped_and_a_closed_input_is_reported():
    rows = ROOT / "docs" / "results" / "demo.jsonl"
    words = ("report", rows, "--print", "detectors")
    escaped = call(*words, PYTHONIOENCODING="latin-1").stdout
    assert "─" in beatrice(*words).stdout and "\\u2500" in escaped
    line = f"exec {sys.executable} -m beatrice score --probe embedded --file - <&-"
    done = run_line("sh", "-c", line, code=2)
    assert_error_sentence(done, "standard input is closed")


def test_report_prints_one_table_of_a_file_of_rows_or_refuses_the_option():
    rows = ROOT / "docs" / "results" / "demo.jsonl"
    shown = beatrice("report", rows, "--print", "decisions", COLUMNS="60").stdout
    assert shown.startswith("Decisions\n") and "Detecting" not in shown
    assert max(map(len, shown.splitlines())) <= 60  # as wide as the terminal
    failed = beatrice("report", rows, "--print", "foo", code=2)
    assert_error_sentence(failed, "found foo", "detectors")
    beatrice("report", rows, "--ledger", code=2)


def test_a_verb_names_the_next_verb_and_prints_nothing_when_quiet(small_run, tmp_path):
    run = shutil.copytree(small_run, tmp_path / "my run")
    line = ("data", run, "--world", "--preset", "smoke")
    *_, last = beatrice(*line).stderr.splitlines()
    assert shlex.split(last) == ["next:", "beatrice", "answer", str(run)]
    assert beatrice(*line, "--quiet").stderr == ""
    shown = beatrice("data", "--inspect", small_run / "examples.jsonl").stderr
    assert "next:" not in shown
    assert not Progress.is_quiet  # later calls in this process may print


@pytest.mark.slow
def test_the_demo_forecasts_its_time_only_if_it_wrote_all_answers(tmp_path):
    beatrice("data", tmp_path, "--world", "--preset", "smoke")
    run = RunDir(tmp_path)
    run.labels.mkdir()  # where a file is expected: the demo fails after its answers
    line = ("demo", tmp_path, "--preset", "smoke")
    assert "left for all stages" in beatrice(*line, code=1).stderr
    answers = run.answers_file.read_bytes().splitlines(keepends=True)
    run.answers_file.write_bytes(b"".join(answers[:-1]))
    (tmp_path / "stages" / "answer.json").unlink()  # as if it was killed
    stderr = beatrice(*line, code=1).stderr
    assert "answer: done" in stderr and "left for all stages" not in stderr


@pytest.mark.slow
def test_the_smoke_demo_is_the_same_twice_and_scores(smoke_run, tmp_path):
    """Also `score` answers, and `doctor` and `sweep` notice a damaged store."""
    runs = [tmp_path / "run", smoke_run]
    done = call("demo", runs[0], "--preset", "smoke", "--json")
    assert "closed_book/auroc" in json.loads(done.stdout.splitlines()[0])
    assert len(done.stderr.splitlines()) <= 45
    again = call("demo", runs[0], "--preset", "smoke").stdout.splitlines()
    assert len(again) <= 15
    assert f"Its tables: beatrice report {runs[0]} --print detectors" in again
    first, second = ((run / "results.jsonl").read_bytes() for run in runs)
    assert first == second
    assert "<svg" in (runs[0] / "report.html").read_text()
    question = ("--question", "where was Skiband Rugrond born?")
    done = call("score", runs[0], *question, "--answer", "Guzolt Falls", "--json")
    assert 0 <= json.loads(done.stdout)["p_correct"] <= 1
    done = call("score", runs[0], *question, "--answer", "", code=2)
    assert_error_sentence(done, "empty")
    call("doctor", runs[0], "--verify")
    files = (runs[0] / "features" / "closed_book" / "hidden").rglob("*")
    chunk = max(filter(Path.is_file, files), key=lambda file: file.stat().st_size)
    chunk.write_bytes(chunk.read_bytes()[:-100])
    (runs[0] / "sweep.json").unlink()
    done = call("sweep", runs[0], code=1)
    assert_error_sentence(done, "features/closed_book")
    call("doctor", runs[0], "--verify", code=1)


def test_a_finished_run_is_continued_without_the_libraries_of_its_stages(
    smoke_run, tmp_path
):
    run = shutil.copytree(smoke_run, tmp_path / "run")
    words = ["demo", str(run), "--preset", "smoke"]
    code = f"from beatrice.cli import main\nmain({words}, standalone_mode=False)"
    assert not {"jax", "orbax", "sklearn", "torch", "transformers"} & loaded_by(code)
