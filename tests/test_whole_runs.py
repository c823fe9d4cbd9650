"""Small runs up to the report: killed, of one layer, streamed, of two sets."""

import json
import os
import random
import re
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import beatrice
from beatrice.benchmarks.results.tables import results_of, where
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import read_result_rows
from beatrice.extract.world.facts import make_examples, make_world
from beatrice.extract.world.stage import WORLD_PRESETS
from beatrice.jaxprobe.calibrate import run_selection
from beatrice.jaxprobe.train import open_rows, run_outputs
from tests.process import BEATRICE, call, kill, start
from tests.records import passage_rows, question_row

pytestmark = pytest.mark.slow
N_KILLS = 10
LEAST_KILLS = 5  # a run that ends before its tenth kill has been killed often enough
LIFE = 0.05, 0.25  # processes live for these shares of a whole run's time


def test_ten_kills_change_no_row(smoke_run, tmp_path):
    killed = tmp_path / "killed"
    records = [json.loads(x.read_text()) for x in (smoke_run / "stages").iterdir()]
    seconds = sum(record["seconds"] for record in records)
    rng = random.Random(int(os.environ.get("BEATRICE_KILL_SEED", "0")))
    n_killed = 0
    while n_killed < N_KILLS:
        process = start(*BEATRICE, "demo", killed, "--preset", "smoke")
        time.sleep(seconds * rng.uniform(*LIFE))
        n_killed += kill(process)
        if process.returncode == 0:
            break
    assert n_killed >= LEAST_KILLS, "the run outran the kills; shorten LIFE"
    print(f"killed {n_killed} times")
    call("demo", killed, "--preset", "smoke")
    for name in ("results.jsonl", "selection/closed_book/config.json"):
        assert (killed / name).read_bytes() == (smoke_run / name).read_bytes()


@pytest.fixture
def copies(smoke_run, tmp_path):
    """Two copies of a finished run: one is left alone, one will be killed."""
    return [shutil.copytree(smoke_run, tmp_path / name) for name in "ab"]


def assert_page_shows(run, *sections):
    """Draw the report, and assert that these sections of it are not empty."""
    call("report", run)
    page = (run / "report.html").read_text()
    assert re.search(r">[\d,]+ training, [\d,]+ validation, .* held out<", page)
    assert "<title>Is the answer right? embedded</title>" in page
    for section in sections:
        text = re.search(rf'id="{section}">.*?</section>', page, re.DOTALL)
        assert 'class="empty"' not in text.group()


def test_kills_change_no_row_and_the_report_shows_what_was_asked_for(copies):
    whole, killed = copies
    plain = (whole / "results.jsonl").read_text()
    for verb, option, stage in (
        ("select", "--exhaustive", "exhaustive"),
        ("evaluate", "--ablations", "ablate"),
    ):
        began = time.monotonic()
        call(verb, whole, option)
        seconds = time.monotonic() - began
        n_killed = 0
        for share in (0.15, 0.3, 0.45, 0.6):  # the first early: other work may end
            process = start(*BEATRICE, verb, killed, option)
            time.sleep(share * seconds)
            n_killed += kill(process)
        assert n_killed, "the line outran the kills"
        call(verb, killed, option)
        assert f"{stage}: already done" in call(verb, whole, option).stderr
    rows = (whole / "results.jsonl").read_text()
    assert rows == (killed / "results.jsonl").read_text()
    before = dict.fromkeys(plain.splitlines())
    # Earlier rows are unchanged, and in their order.
    assert [row for row in rows.splitlines() if row in before] == list(before)
    for experiment in ("exhaustive", "ablation"):
        assert f'"experiment": "{experiment}"' in rows
        assert f'"experiment": "{experiment}"' not in plain
    assert_page_shows(killed, "exhaustive", "ablations")
    assert not (killed / "exhaustive.pieces").exists()
    assert not list(killed.glob("ablations/*.members"))
    call("doctor", killed, "--verify")


def test_a_killed_anatomy_ends_with_the_same_rows_and_the_report_shows_it(copies):
    whole, killed = copies

    def n_members(run):
        return len(list((run / "anatomy").glob("[!.]*.safetensors")))

    def assert_same_rows():
        rows = [(run / "rows" / "anatomy.jsonl").read_text() for run in copies]
        assert rows[0] == rows[1]

    call("anatomy", whole)
    for n_before in (3, 9):  # of thirteen
        process = start(*BEATRICE, "anatomy", killed)
        while n_members(killed) < n_before and process.poll() is None:
            time.sleep(0.2)
        kill(process)
    assert 9 <= n_members(killed) < n_members(whole) == 13
    call("anatomy", killed)
    assert_same_rows()
    assert "anatomy: already done" in call("anatomy", killed).stderr
    call("anatomy", killed, "--only", "flips")  # earlier rows stay
    assert_same_rows()
    assert_page_shows(killed, "anatomy")
    assert not (killed / "anatomy" / "members").exists()


@pytest.fixture(scope="module")
def layer_run(tmp_path_factory):
    """A run on one layer of the answers' states in 8 bits."""
    path = tmp_path_factory.mktemp("one_layer") / "run"
    words = "--hidden-layers 4 --set hidden_spans=answer --set dtype=int8"
    words += " --set scalars=bf16"
    done = call("demo", path, "--preset", "smoke", *words.split())
    assert "the store keeps only layer 4" in done.stderr
    return path


def test_the_sweep_of_a_one_layer_run_finds_that_layer_and_all_verifies(layer_run):
    sweep = json.loads((layer_run / "sweep.json").read_text())
    assert sweep["layer"] == 4
    assert [choice["layers"] for choice in sweep["settings"].values()] == [[4], [4]]
    assert "int8" in (layer_run / "report.html").read_text()
    call("doctor", layer_run, "--verify")


def test_a_live_score_equals_the_score_in_the_evaluation(layer_run):
    directory = RunDir(layer_run)
    _, rows = open_rows(directory, "closed_book")
    tree, _ = run_selection(directory, "closed_book")
    stored = tree["champion"]["scores"].mean(axis=0)
    questions = {e.id: e.question for e in read_examples(directory)}
    answers = {a.example_id: a for a in read_answers(directory, "closed_book")}
    scorer = beatrice.load(layer_run)
    test = rows.where("test")
    chosen = [i for i in test if answers[rows.ids[i]].stop_id is not None][:20]
    texts = [(questions[x], answers[x].text) for x in rows.ids[chosen]]
    live = [scorer.score(*pair).raw for pair in texts]
    # A sum's last bit depends on the batch, and may be one step of 8-bit states.
    np.testing.assert_allclose(live, stored[chosen], atol=2e-3)
    assert np.ptp(live) > 0.01


def test_the_ledger_compares_the_run_with_the_paper_and_names_differences(layer_run):
    ledger = call("report", layer_run, "--ledger").stdout
    assert "## tab:pgir-application (Qwen3.5-9B)" in ledger
    assert "of 1,500" not in ledger and "1,500 questions in the paper" in ledger
    page = (layer_run / "panorama.md").read_text()
    assert "| Random AUPRC (error rate) |" in page
    assert "### Against the strongest rival of each column" in page
    assert page.count("| p | Holm |") == 2


def test_a_table_is_printed_while_another_process_holds_the_run(layer_run):
    with RunDir.open(layer_run):
        assert "BEATRICE" in call("report", layer_run, "--print", "detectors").stdout
        assert "in use" in call("report", layer_run, code=1).stderr


def linear_first(path, *options):
    """Make a run whose encoders begin as regressions, on signals pooled either way."""
    call("demo", path, "--preset", "smoke", "--set", "linear_first=true", *options)
    return RunDir(path)


def logits_without_spans(run):
    """Return the logits of the champions' encoders that were trained without a span.

    Keys are the file and the chosen encoders: the choice may depend on last bits.
    """
    logits = {}
    for path in (run.path / "ablations").glob("*.without_*_span.safetensors"):
        chosen = load_file(path.with_suffix(".scores.safetensors"))["members"]
        logits[path.name, tuple(chosen)] = load_file(path)["logits"]
    return logits


def test_a_streamed_run_of_one_group_gives_the_logits_of_a_run_in_memory(tmp_path):
    held = linear_first(tmp_path / "held")
    streamed = linear_first(tmp_path / "streamed", "--set", "streamed=true")
    manifest = json.loads((streamed.path / "manifest.json").read_text())
    assert manifest["sections"]["train"]["stream"] is not None
    for setting in SETTINGS:  # both are whole chunks of 64 rows: no step is padded
        logits, others = (run_outputs(run, setting).logits for run in (held, streamed))
        np.testing.assert_allclose(logits, others, atol=1e-3)
        assert np.ptp(logits) > 0.1
    for run in (held, streamed):
        call("evaluate", run.path, "--ablations")
    logits, others = map(logits_without_spans, (held, streamed))
    assert logits.keys() & others.keys()
    for name in logits.keys() & others.keys():
        np.testing.assert_allclose(logits[name], others[name], atol=1e-3)


def hotpot_form(example):
    """Return a microworld question as HotpotQA publishes one."""
    titles = [f"{p.title} {i}" for i, p in enumerate(example.passages)]
    return {
        "_id": example.id,
        "question": example.question,
        "answer": example.golds[0],
        "supporting_facts": [[title, 0] for title in titles],
        "context": [
            [title, [passage.text]]
            for title, passage in zip(titles, example.passages, strict=True)
        ],
        "type": "bridge",
        "level": "hard",
    }


def test_a_run_of_two_sets_reaches_the_report_and_pools_them(tmp_path):
    """Both ask what the embedded model knows, so that some answers are right."""
    config = WORLD_PRESETS["smoke"]
    options = []
    for is_plain, name in enumerate(("hotpotqa", "mine")):
        by_role = {"train": [], "dev": []}
        examples = make_examples(make_world(config.world), config.questions)
        for example in [e for e in examples if e.split != "ood"][is_plain::2]:
            role = "train" if example.split == "train" else "dev"
            plain = question_row(example, passages=passage_rows(example))
            by_role[role].append(plain if is_plain else hotpot_form(example))
        for role, records in by_role.items():
            path = tmp_path / f"{name}.{role}"
            lines = [json.dumps(record) + "\n" for record in records]
            path.write_text("".join(lines) if is_plain else json.dumps(records))
            options += [f"--{role}", f"{name}={path}"]
    run = tmp_path / "run"
    call(
        *("data", run, "--model", "embedded", "--preset", "smoke", *options),
        *("--n-train", "all", "--n-evaluation", "all", "--context", "all"),
        *("--template", "short", "--overlong", "drop-passages"),
    )
    verbs = "answer label extract sweep train select calibrate evaluate control report"
    for verb in verbs.split():
        assert f"{verb}: done in" in call(verb, run).stderr
    results = results_of(read_result_rows(RunDir(run)))
    assert set(results["dataset"]) == {"hotpotqa", "mine", IN_DOMAIN, "macro"}
    about = dict(detector="champion", metric="auroc", seed="mean", split="test")
    for setting in SETTINGS:
        shown = where(results, setting=setting, experiment="detection", **about)
        n = dict(zip(shown["dataset"], shown["n"], strict=True))
        assert n[IN_DOMAIN] == n["hotpotqa"] + n["mine"]
    cut = where(results, experiment="prompts")
    assert len(cut) and (cut["value"] == 0).all()
    assert IN_DOMAIN in (run / "report.html").read_text()
    assert "every checksum holds" in call("doctor", run, "--verify").stdout
