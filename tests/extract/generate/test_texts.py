"""Texts are recorded by batch; a dry run counts those ahead and records none."""

import dataclasses
import re
import shutil
import time

import pytest

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.generator import (
    GeneratorPrompt,
    Replies,
    ReplyCounter,
    SamplingConfig,
    count_requests,
    reply_files,
)
from beatrice.extract.records import SETTINGS, Answer, read_records
from beatrice.extract.run.contents import read_answers
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import Journal, JsonLines
from beatrice.extract.run.process import Share
from beatrice.extract.signals.extract import EXTRACT, EXTRACT_PRESETS
from beatrice.extract.store.spec import model_shapes, stored_bytes
from beatrice.extract.store.store import open_store
from tests.extract.generate.loopback import open_replies
from tests.extract.label.scripted import ScriptedGenerator
from tests.extract.signals.readers import files_under
from tests.extract.small_run import beatrice, make_run, smoke

GREEDY = SamplingConfig(max_new_tokens=4)


def prompts(n):
    sizes = range(1, n + 1)
    return [GeneratorPrompt(text="x" * i, ids=tuple(range(i))) for i in sizes]


class InPairs(ScriptedGenerator):
    """A local generator with batches of two prompts."""

    def plan(self, prompts, config):
        return [(i, i + 1) for i in range(0, len(prompts), 2)]


class SlowJournal(Journal):
    """A journal on a disk that takes a while to sync."""

    n_syncs = 0

    def append(self, rows):
        super().append(rows)
        self.n_syncs += 1
        time.sleep(0.25)


def test_a_batch_is_written_at_once_and_its_time_excludes_the_writing(tmp_path):
    journal = SlowJournal(**vars(Journal.open(reply_files(tmp_path / "r.jsonl"))))
    replies = Replies(journal=journal, is_timed=True)
    texts = replies.generate(InPairs(str.lower), prompts(12), GREEDY)
    assert [text.text for text in texts] == [prompt.text for prompt in prompts(12)]
    assert journal.n_syncs == 6
    assert sum(text.seconds for text in texts) < 0.25


def test_the_progress_of_a_share_counts_only_its_own_texts(tmp_path):
    files, counts = reply_files(tmp_path / "r.jsonl", tmp_path / "parts"), []
    twice = prompts(12) + prompts(2)
    for rank in range(3):  # other workers' texts are there
        share = Share(rank, 3)
        replies = Replies(journal=Journal.open(files, share), share=share)
        replies.generate(
            InPairs(str.lower), twice, GREEDY, lambda *numbers: counts.append(numbers)
        )
    assert counts == [(0, 4), (2, 4), (4, 4)] * 3


def numbers_of(text):
    """Return the whole numbers of a forecast by name."""
    lines = re.findall(r"^  (\S.*?)  +([\d,]+)$", text, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in lines}


def test_existing_and_repeated_texts_are_not_counted(tmp_path):
    generator, run = ScriptedGenerator(lambda text: "said"), RunDir(tmp_path)
    open_replies(run.replies("judge")).generate(generator, prompts(30), GREEDY)
    before, n_generated = files_under(tmp_path), len(generator.prompts)
    counting = ReplyCounter(reply_files(run.replies("judge")), "label")
    assert counting.generate(generator, prompts(33) + prompts(32), GREEDY) is None
    forecast = counting.forecast
    assert forecast.n_requests == forecast.n_rows == 3
    assert forecast.n_prompt_tokens == 31 + 32 + 33
    assert forecast.n_new_tokens == 3 * 4
    assert files_under(tmp_path) == before and len(generator.prompts) == n_generated


def test_prompt_tokens_that_only_a_server_can_count_are_unknown():
    texts = [GeneratorPrompt(text="abc") for _ in range(20)]
    forecast = count_requests("label", texts, GREEDY, generator=ScriptedGenerator(str))
    assert forecast.n_prompt_tokens is None
    assert "does not count prompt tokens" in forecast.basis


@pytest.fixture(scope="module")
def unanswered(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("unanswered") / "run").path


@pytest.fixture(scope="module")
def answered(unanswered):
    path = shutil.copytree(unanswered, unanswered.with_name("answered"))
    beatrice("answer", path)
    return path


@pytest.mark.parametrize("changes", [{}, {"hidden_layers": (2, 4), "dtype": "int8"}])
def test_a_forecast_of_bytes_covers_all_tokens_and_answers_with_stop_tokens(
    answered, changes
):
    run, answers = RunDir(answered), read_answers(RunDir(answered))
    config = dataclasses.replace(EXTRACT_PRESETS["smoke"], **changes)
    config = dataclasses.replace(config, hidden_spans="answer", scalars="bfloat16")
    n_written = sum(len(answer.token_ids) for answer in answers)
    expected = stored_bytes(
        model_shapes(d_model=160, n_layers=6, n_attention_layers=6, n_heads=5),
        config,
        n_tokens=n_written + sum(len(answer.prompt_ids) for answer in answers),
        n_answer=n_written + sum(answer.stop_id is not None for answer in answers),
    )
    assert EXTRACT.forecast(run, config).disk_bytes == sum(expected.values())


def test_counting_the_stores_bytes_needs_no_weights(answered, tmp_path):
    model, path = tmp_path / "model", tmp_path / "run"
    shutil.copytree(WEIGHTS, model)
    (model / "model.safetensors").write_bytes(b"")
    with RunDir.open(path, smoke(model)) as run:
        shutil.copy(answered / "examples.jsonl", run.examples)
        shutil.copytree(answered / "answers", run.answers)
        config = EXTRACT_PRESETS["smoke"]
        counted = EXTRACT.forecast(run, config)
    assert counted == EXTRACT.forecast(RunDir(answered), config)


def done_by(run, verb):
    """Return how many rows and prompt tokens a verb has written."""
    if verb == "extract":
        stores = [open_store(RunDir(run).features(setting)) for setting in SETTINGS]
        return (sum(int(store.spec.offsets[-1]) for store in stores),) * 2
    if verb == "answer":
        answers = list(read_records(run / "answers" / "answers.jsonl", Answer))
        return len(answers), sum(len(answer.prompt_ids) for answer in answers)
    rows = list(JsonLines(run / "replies" / f"{verb}.jsonl").rows())
    return len(rows), sum(row["n_prompt_tokens"] for row in rows)


def test_a_dry_run_counts_what_the_real_run_takes_and_changes_nothing(
    unanswered, tmp_path
):
    run = shutil.copytree(unanswered, tmp_path / "run")
    for line in (
        ("rewrite", run, "--model", "embedded", "--max-new-tokens", 5),
        ("answer", run),
        ("extract", run),
        ("sample", run, "--n-samples", 2, "--split", "test"),
    ):
        with RunDir.open(run):  # counting only reads, so another may hold the run
            before = files_under(run)
            numbers = numbers_of(beatrice(*line, "--dry-run").stdout)
            assert files_under(run) == before, line[0]
        beatrice(*line)
        counts = numbers["rows"], numbers["prompt tokens"]
        assert counts == done_by(run, line[0]), line[0]
        done = beatrice(*line, "--dry-run").stdout
        assert numbers_of(done).get("requests", 0) == 0
        is_stage = line[0] in ("answer", "extract")
        assert ("already done, nothing is left to forecast" in done) == is_stage
