"""The verbs that generate text, against a server on this machine."""

import collections
import json
import re
import shutil

import msgspec
import pytest

from beatrice.extract.backbone.names import WEIGHTS, BackboneConfig
from beatrice.extract.generate.answers import read_drawing
from beatrice.extract.records import SETTINGS, Answer, Sample, read_records, write_lines
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
from tests.extract.generate.loopback import served
from tests.extract.label.scripted import (
    ScriptedGenerator,
    fair_verdict,
    fields_of,
    generated,
)
from tests.extract.label.test_audit import cells_of, fill
from tests.extract.small_run import (
    assert_error_sentence,
    beatrice,
    make_run,
    questions,
)


@pytest.fixture(scope="module")
def examples():
    sample = questions(n_evaluation=8)[:20]
    return [msgspec.structs.replace(e, rewritten=()) for e in sample]


@pytest.fixture
def run_dir(tmp_path, examples):
    return make_run(tmp_path / "run", examples).path


def answers_of(run_dir):
    return sorted(
        read_records(run_dir / "answers" / "answers.jsonl", Answer), key=lambda a: a.key
    )


def labels_of(run_dir):
    lines = (run_dir / "labels.jsonl").read_text().splitlines()
    return [json.loads(line)["label"] for line in lines]


def test_a_served_backbone_gives_the_answers_of_the_local_one(
    run_dir, tmp_path, examples, local
):
    other = make_run(tmp_path / "there", examples)
    beatrice("answer", run_dir)
    with served(local) as server:
        done = beatrice("answer", other.path, "--server", server.url)
        n_requests = len(server.requests)
        again = beatrice("answer", other.path, "--server", server.url)
        assert len(server.requests) == n_requests == len(answers_of(run_dir))
        assert "already done" in again.stderr
    assert answers_of(other.path) == answers_of(run_dir)
    assert "Traceback" not in done.stderr
    # Answers of two backends are never mixed.
    with (other.path / "examples.jsonl").open("a") as file:
        file.write(write_lines([msgspec.structs.replace(examples[0], id="new")]))
    done = beatrice("answer", other.path, code=1)
    assert "holds answers of a server" in done.stderr


def test_a_server_without_token_ids_cannot_answer(run_dir, local):
    with served(local) as server:
        server.is_vllm = False
        arguments = ("--server", server.url, "--set", "dialect=openai")
        done = beatrice("answer", run_dir, *arguments, code=1)
    assert "returned no token ids" in done.stderr


def test_judges_label_and_the_audit_finds_what_exact_match_misses(run_dir, tmp_path):
    beatrice("answer", run_dir)
    beatrice("label", run_dir)
    exact = labels_of(run_dir)

    def lenient(prompt):
        """Judge by exact match, but call the first wrong answer correct."""
        fields = dict(fields_of(prompt))
        key = (fields["question"], fields["model answer"])
        chosen.setdefault(fair_verdict(prompt), key)
        if key == chosen.get("Incorrect"):
            return "Correct"
        return fair_verdict(prompt)

    chosen = {}
    with served(ScriptedGenerator(lenient)) as server:
        options = ("--judge", "big", "--server", server.url)
        done = beatrice("label", run_dir, *options)
        assert "n_dropped 0" in done.stderr
        n_requests = len(server.requests)
        assert "already done" in beatrice("label", run_dir, *options).stderr
        (run_dir / "labels.jsonl").unlink()
        beatrice("label", run_dir, *options)
        assert len(server.requests) == n_requests
    judged = labels_of(run_dir)
    n_changed = sum(a != b for a, b in zip(exact, judged, strict=True))
    assert n_changed >= 1
    audit = json.loads(beatrice("label", run_dir, "--audit", "--json").stdout)
    assert audit["label_rule"] == "judges: big, unanimous"
    assert audit["n_disagreements"] == n_changed
    assert audit["exact_match"][0]["n_agree"] == len(judged) - n_changed
    assert [pair["kappa"] for pair in audit["judges"]] == [1.0] * 3
    assert labels_of(run_dir) == judged

    filled = shutil.copy(run_dir / "audit" / "sample.csv", tmp_path / "filled.csv")
    splits = {e.id: e.split for e in read_examples(RunDir(run_dir))}
    drawn_from = {splits[row["example_id"]] for row in cells_of(filled)}
    assert drawn_from and drawn_from <= {"test", "ood"}

    def decide(i, row):
        return "correct" if row["answer"] in row["golds"].split(" | ") else "incorrect"

    fill(filled, decide)
    done = beatrice("label", run_dir, "--audit", "--annotations", filled)
    assert "a person; items left empty: 0" in done.stdout
    assert re.search(r"against exact match +(\d+) of \1 agree", done.stdout)
    # Labelling by exact match again says that it replaces the judges' labels.
    done = beatrice("label", run_dir)
    assert "by exact match, without a judge" in done.stderr
    assert "replaces the judges' labels" in done.stderr
    assert labels_of(run_dir) == exact


def test_a_local_judge_without_verdicts_drops_every_label_and_says_so(run_dir):
    """The embedded model writes no verdict: its replies are counted as unparsable."""
    examples = list(read_examples(RunDir(run_dir)))[:2]
    (run_dir / "examples.jsonl").write_text(write_lines(examples))
    beatrice("answer", run_dir)
    n = len(answers_of(run_dir))
    line = ("label", run_dir, "--judge", WEIGHTS)
    assert "next:" not in beatrice(*line, "--dry-run").stderr
    done = beatrice(*line)
    assert f"{3 * n} verdicts stayed unparsable" in done.stderr
    assert f"{6 * n} replies asked for again" in done.stderr
    assert labels_of(run_dir) == [None] * n
    audit = json.loads(beatrice("label", run_dir, "--audit", "--json").stdout)
    assert audit["exact_match"][0]["n_dropped"] == n
    assert audit["exact_match"][0]["kappa"] is None
    assert audit["exact_match"][0]["n_unparsable_verdicts"] == 3 * n


def test_rewrites_are_answered_besides_the_originals_and_again_if_changed(run_dir):
    beatrice("answer", run_dir)
    before = answers_of(run_dir)

    def copies(prompt):
        context = dict(fields_of(prompt))["context"]
        sentence = context.split(".")[which]
        return f"Normalized Context: {sentence}. In 1999."

    which = 0

    with served(ScriptedGenerator(copies)) as server:
        options = ("--model", "big", "--server", server.url, "--json")
        counts = json.loads(beatrice("rewrite", run_dir, *options).stdout)
        n_requests = len(server.requests)
        assert json.loads(beatrice("rewrite", run_dir, *options).stdout) == counts
        assert len(server.requests) == n_requests == counts["n"] > 0
    assert counts["n_with_added_number"] == counts["n_flagged"] == counts["n"]
    beatrice("answer", run_dir)
    after = answers_of(run_dir)
    added = [a for a in after if a.variant == "rewritten"]
    assert [a for a in after if a.variant == "original"] == before
    assert len(added) == counts["n"]
    assert beatrice("doctor", run_dir, "--verify")
    which = 1  # another text, under other settings
    with served(ScriptedGenerator(copies)) as server:
        options = ("--model", "big", "--server", server.url, "--max-new-tokens", 99)
        beatrice("rewrite", run_dir, *options)
    assert "no longer asked" in beatrice("answer", run_dir).stderr
    again = answers_of(run_dir)
    changed = [a.key for a in after if a not in again]
    assert changed == [a.key for a in added] and len(again) == len(after)


@pytest.mark.parametrize("counts_tokens", [True, False])
def test_a_process_that_continues_does_not_spend_the_cap_again(run_dir, counts_tokens):
    beatrice("answer", run_dir)
    replies = run_dir / "replies" / "judge.jsonl"
    # One unit per new token; without a count, a verdict's limit of eight is booked.
    prices = "--set price_new=1e6 --set max_cost=40".split()

    def wordy(prompt):
        return msgspec.structs.replace(generated(fair_verdict(prompt)), n_new_tokens=2)

    with served(ScriptedGenerator(wordy)) as server:
        server.counts_tokens = counts_tokens
        options = ("--judge", "big", "--server", server.url, *prices)
        done = beatrice("label", run_dir, *options, code=1)
        assert "spending cap of 40" in done.stderr
        assert n_lines(replies) > 1
        beatrice("label", run_dir, *options, code=1)
        assert n_lines(replies) * (2 if counts_tokens else 8) <= 40
        replies.rename(run_dir / "elsewhere.jsonl")
        beatrice("label", run_dir, *options, code=1)
        assert n_lines(replies) > 1  # control: without kept replies all is left


class Thinking(ScriptedGenerator):
    """A judge that thinks for some forty tokens, which its server removes."""

    def stream(self, prompts, config, done=()):
        for i, reply in super().stream(prompts, config, done):
            is_whole = config.max_new_tokens > 40
            yield i, reply if is_whole else generated("", "length")


def test_a_judge_that_gives_no_verdict_is_stopped_early_and_labels_stay(run_dir):
    beatrice("answer", run_dir)
    beatrice("label", run_dir)
    labels = run_dir / "labels.jsonl"
    before = labels.read_bytes()
    with served(Thinking(fair_verdict)) as server:
        options = ("--judge", "big", "--server", server.url, "--set", "concurrency=2")
        done = beatrice("label", run_dir, *options, code=1)
        assert_error_sentence(done, "none of the first 64 replies is a verdict")
        assert len(server.requests) <= 64 + 2
        assert labels.read_bytes() == before
        done = beatrice("label", run_dir, *options, "--set", "max_new_tokens=99")
        assert "0 verdicts stayed unparsable" in done.stderr


def test_drawn_answers_are_the_same_twice_and_carry_log_probs(run_dir):
    arguments = ("sample", run_dir, "--n-samples", 3, "--split", "train")
    beatrice(*arguments)
    path = run_dir / "samples" / "samples.jsonl"
    first = path.read_bytes()
    samples = list(read_records(path, Sample))
    train = [e for e in read_examples(RunDir(run_dir)) if e.split == "train"]
    assert len(samples) == 3 * len(train) * 2
    for sample in samples:
        n_stop = sample.stop_id is not None
        assert len(sample.log_probs) == len(sample.token_ids) + n_stop
        assert max(sample.log_probs) <= 0
    replies = run_dir / "replies" / "sample.jsonl"
    # After a kill in the middle of a line the same command gives the same bytes.
    content = replies.read_bytes()
    replies.write_bytes(content[: len(content) * 2 // 3])
    path.unlink()
    assert "was unfinished" in beatrice(*arguments).stderr
    assert path.read_bytes() == first
    # The seconds of the answers include those of both starts.
    lines = replies.read_text().splitlines()
    took = sum(json.loads(line)["seconds"] for line in lines)
    each = json.loads((run_dir / "samples" / "seconds.json").read_text())
    n_each = collections.Counter(sample.setting for sample in samples)
    assert took == pytest.approx(sum(each[s] * n for s, n in n_each.items()))
    assert took > 0 and set(each) == set(SETTINGS)
    sampling = {"max_new_tokens": 10, "temperature": 1.0, "top_p": 0.9, "top_k": 50}
    config = json.loads((run_dir / "samples" / "config.json").read_text())
    assert config["draws"]["n_samples"] == 3
    assert config["draws"]["sampling"] == sampling | {"seed": 0, "stop": []}


def test_a_split_drawn_later_joins_splits_with_equally_many_draws(tmp_path):
    run = make_run(tmp_path / "run", questions(1, 1, 1))
    splits = {e.id: e.split for e in read_examples(run)}

    def drawn_after(n_samples, *names):
        names = [x for name in names for x in ("--split", name)]
        beatrice("sample", run.path, "--n-samples", n_samples, *names)
        samples = read_records(run.samples_file, Sample)
        return {splits[sample.example_id] for sample in samples}

    assert drawn_after(1, "validation", "ood", "ood") == {"validation", "ood"}
    assert read_drawing(run)["splits"] == ["validation", "ood"]
    replies = run.path / "replies" / "sample.jsonl"
    before = replies.read_text()
    assert drawn_after(1, "train") == {"train", "validation", "ood"}
    assert replies.read_text().startswith(before)  # none of these is drawn again
    # The others have only one draw.
    done = beatrice("sample", run.path, "--n-samples", 2, "--split", "train", code=1)
    assert_error_sentence(done, "1 draws per question of validation and ood")
    anew = re.findall(r"--split (\w+)", done.stderr)
    assert drawn_after(2, *anew) == {"train", "validation", "ood"}


def test_answers_are_drawn_in_the_runs_dtype_unless_another_is_given(tmp_path):
    backbone = BackboneConfig(dtype="bfloat16")
    run = make_run(tmp_path / "run", questions(1, 1, 1), backbone=backbone)
    for options, dtype in ((), "bfloat16"), (("--model-dtype", "float32"), "float32"):
        beatrice("sample", run.path, "--n-samples", 1, "--split", "ood", *options)
        drawn = json.loads((run.samples / "config.json").read_text())
        assert drawn["backend"]["dtype"] == dtype


def test_samples_come_from_a_server_with_and_without_token_ids(run_dir, local):
    arguments = ("--n-samples", 2, "--split", "train")
    with served(local) as server:
        beatrice("sample", run_dir, *arguments, "--server", server.url)
        path = run_dir / "samples" / "samples.jsonl"
        assert all(s.log_probs for s in read_records(path, Sample))
        server.is_vllm = False
        plain = ("--server", server.url, "--set", "dialect=openai", "--set", "top_k=0")
        done = beatrice("sample", run_dir, *arguments, *plain)
        assert all(s.token_ids is None for s in read_records(path, Sample))
        assert "0 without log-probabilities" in done.stderr


def n_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0
