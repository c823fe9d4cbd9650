"""Published questions through the stages: data, rewrite, answer, label; also killed.

The embedded model is generator and judge. What it writes about the real world is
nonsense; the tests check that every row is there once, and the same after any kill.
The slow test judges by a server, since a judge without any verdict ends the stage.
"""

import json
import os
import random
import time

import pytest

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.prompts import build_prompt
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Answer, Example, Label, read_records
from tests.extract.datasets import published as pub
from tests.extract.generate.loopback import served
from tests.extract.label.scripted import ScriptedGenerator, fair_verdict
from tests.extract.small_run import beatrice
from tests.process import BEATRICE, call, kill, start

# Where a verb's rows appear while it works; kills are timed by their number.
GROWS = {
    "data": "examples.jsonl",
    "rewrite": "replies/rewrite.jsonl",
    "answer": "answers/answers.jsonl",
    "label": "replies/judge.jsonl",
}
CHOSEN = ("--model", "embedded", "--preset", "smoke")
OTHERS = ("passages.jsonl", "splits.json", "rewrites.jsonl", "labels.jsonl")
COMPARED = (*GROWS.values(), *OTHERS)


def chain(run, *data_options, judge=("embedded",)):
    """Return the lines of the four stages."""
    rewriter = ("--model", "embedded", "--max-new-tokens", 24)
    return {
        "data": ["data", run, *CHOSEN, *data_options],
        "rewrite": ["rewrite", run, *rewriter, "--overlong", "skip"],
        "answer": ["answer", run],
        "label": ["label", run, "--judge", *judge],
    }


def popqa(number):
    """Return a row with paragraphs, as in copies in HippoRAG's layout."""
    gold = {"title": f"Person {number}", "text": "She was a politician."}
    other = {"title": "Other", "text": "He sang."}
    paragraphs = [gold | {"is_supporting": True}, other | {"is_supporting": False}]
    return pub.popqa(number) | {"paragraphs": paragraphs}


@pytest.fixture
def options(tmp_path):
    """Small files of two sets, and the options that read them."""
    hotpot = pub.write_array(tmp_path / "h.json", [pub.hotpot(i) for i in range(4)])
    held = pub.write_array(tmp_path / "p.json", [popqa(i) for i in range(3)])
    return (
        *("--dev", f"hotpotqa={hotpot}", "--held-out", f"popqa={held}"),
        *("--n-evaluation", 2, "--n-held-out", "popqa=3"),
    )


def rows(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def check_rows(run):
    """Check that every question is answered and judged once per setting and variant."""
    examples = {e.id: e for e in read_records(run / "examples.jsonl", Example)}
    answers = list(read_records(run / "answers" / "answers.jsonl", Answer))
    labels = list(read_records(run / "labels.jsonl", Label))
    rewrites = rows(run / "rewrites.jsonl")
    rewritten = {row["example_id"] for row in rewrites if row["text"] is not None}
    left_out = rows(run / "answers" / "left_out.jsonl")
    absent = {(row["example_id"], row["variant"]) for row in left_out}
    shown = {(e, "original") for e in examples} | {(e, "rewritten") for e in rewritten}
    wanted = {(e, "closed_book", "original") for e in examples}
    wanted |= {(e, "with_context", variant) for e, variant in shown - absent}
    keys = [answer.key for answer in answers]
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted == {label.key for label in labels}
    return examples, answers, labels


def test_the_chain_asks_published_questions_in_the_papers_words(tmp_path, options):
    run = tmp_path / "run"
    lines = chain(run, *options)
    for line in lines.values():
        beatrice(*line)
    examples, answers, labels = check_rows(run)
    assert {e.dataset for e in examples.values()} == {"hotpotqa", "popqa"}
    assert {e.split for e in examples.values()} == {"validation", "test", "ood"}
    assert all(len(label.verdicts) == 3 for label in labels)
    tokenizer = load_backbone(WEIGHTS).tokenizer
    words = PromptConfig(template="paper").prompt_template()
    for answer in answers:
        if answer.variant == "original":
            example = examples[answer.example_id]
            shown = example.passages if answer.setting == "with_context" else ()
            prompt = build_prompt(tokenizer, words, example.question, shown)
            assert answer.prompt_ids == prompt.ids
            assert answer.context_span == prompt.context_span
    assert "already done" in beatrice(*lines["data"]).stderr
    assert "already done" in beatrice(*lines["answer"]).stderr
    assert "every checksum holds" in beatrice("doctor", run, "--verify").stdout
    # With files truncated as by a kill and without stage records: the same bytes again.
    before = {name: (run / name).read_bytes() for name in COMPARED}
    for name in ("answers/answers.jsonl", "replies/judge.jsonl"):
        (run / name).write_bytes(before[name][: len(before[name]) * 3 // 5])
    for name in ("rewrite", "answer", "label"):
        (run / "stages" / f"{name}.json").unlink()
        done = beatrice(*lines[name])
        assert ("was unfinished" in done.stderr) == (name != "rewrite")
    assert {name: (run / name).read_bytes() for name in COMPARED} == before


def n_bytes(path):
    return path.stat().st_size if path.exists() else 0


def kill_at_random(line, watched, rng):
    """Kill a verb soon after some rows appeared; return False if it was faster."""
    process, seen = start(*BEATRICE, *line), n_bytes(watched)
    n_wanted = rng.randint(0, 12)  # times that rows appear; 0: a kill at any time
    if n_wanted == 0:
        time.sleep(rng.uniform(0.0, 4.0))
    while n_wanted > 0 and process.poll() is None:
        if n_bytes(watched) != seen:
            seen, n_wanted = n_bytes(watched), n_wanted - 1
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.05))
    return kill(process)


def real_sets(folder):
    """Return options for 200 HotpotQA and 200 PopQA records of the samples."""
    hotpot = folder / "hotpotqa" / "hotpot_dev_distractor_v1.sample200.json"
    held = folder / "popqa" / "neuropath.popqa.1000.with_paragraphs.json"
    for path in (hotpot, held):
        if not path.is_file():
            pytest.skip(f"no {path.name} among the samples")
    return (
        *("--dev", f"hotpotqa={hotpot}", "--held-out", f"popqa={held}"),
        *("--n-evaluation", 100, "--n-held-out", "popqa=200"),
        *("--overlong", "drop-passages"),
    )


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_one_that_was_not(tmp_path):
    options = real_sets(pub.samples())
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rng = random.Random(int(os.environ.get("BEATRICE_KILL_SEED", "0")))
    n_killed = dict.fromkeys(GROWS, 0)
    with served(ScriptedGenerator(fair_verdict)) as server:
        judge = ("big", "--server", server.url, "--set", "concurrency=1")
        for verb, line in chain(killed, *options, judge=judge).items():
            for _ in range(1 if verb == "data" else 3):
                n_killed[verb] += kill_at_random(line, killed / GROWS[verb], rng)
            call(*line)
        for line in chain(whole, *options, judge=judge).values():
            call(*line)
    print(f"\nkilled: {n_killed}")
    assert sum(n_killed.values()) >= 5, n_killed
    for name in COMPARED:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    examples, answers, labels = check_rows(killed)
    assert len(examples) == 400
    n_cut = sum(bool(answer.dropped) for answer in answers)
    print(f"{len(answers)} answers, {n_cut} to cut contexts, {len(labels)} labels")
