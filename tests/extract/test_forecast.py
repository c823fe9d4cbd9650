"""Forecasts: what is counted is what is then done, and a dry run does nothing."""

import pytest
from benchmarks.forecasts.rehearsal import Rehearsal, Rehearsed, spread
from benchmarks.stages.forecast import Forecast, Tally, Watch, compare
from click.testing import CliRunner

from beatrice import main
from extract.generate.generator import GeneratorPrompt, SamplingConfig
from extract.generate.replies import Replies
from extract.run.files import JsonLines
from tests.extract import published as pub
from tests.extract.scripted import ScriptedGenerator

GREEDY = SamplingConfig(max_new_tokens=4)


def prompts(n):
    return [
        GeneratorPrompt(text="x" * (i + 1), ids=tuple(range(i + 1))) for i in range(n)
    ]


def beatrice(*arguments, code=0):
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_a_rehearsal_does_ten_rows_of_all_lengths_and_counts_all():
    inner = ScriptedGenerator(lambda text: "said")
    with pytest.raises(Rehearsed) as found:
        Rehearsal(inner, "label").stream(prompts(100), GREEDY)
    forecast = found.value.forecast
    assert forecast.n_requests == forecast.n_rows == 100
    assert forecast.n_prompt_tokens == sum(range(1, 101))
    assert forecast.n_new_tokens == 400
    sizes = [len(text) for text in inner.asked]
    assert sizes == [6] + [6, 16, 26, 36, 46, 56, 66, 76, 86, 96]


def test_what_is_there_is_not_forecast(tmp_path):
    inner = ScriptedGenerator(lambda text: "said")
    replies = Replies.open(tmp_path / "replies.jsonl")
    replies.generate(inner, prompts(30), GREEDY)
    with pytest.raises(Rehearsed) as found:
        replies.generate(Rehearsal(inner, "label"), prompts(33), GREEDY)
    assert found.value.forecast.n_requests == 3
    assert found.value.forecast.n_prompt_tokens == 31 + 32 + 33
    assert len(list(JsonLines(tmp_path / "replies.jsonl").rows())) == 30


def test_prompts_that_only_a_server_can_count_are_told_as_unknown():
    texts = [GeneratorPrompt(text="abc") for _ in range(20)]
    forecast = Rehearsal(ScriptedGenerator(str), "label").forecast(texts, GREEDY)
    assert forecast.n_prompt_tokens is None
    assert "tells no numbers" in forecast.basis


@pytest.mark.parametrize("n", [0, 1, 9, 10, 11, 57])
def test_the_probed_are_different_and_as_many_as_can_be(n):
    chosen = spread([i % 7 for i in range(n)], 10)
    assert len(chosen) == len(set(chosen)) == min(n, 10)


def test_a_stage_is_extrapolated_once_from_the_rows_after_the_first():
    told, now = [], [0.0]
    watch = Watch(lambda done, total: told.append((done, total)), lambda: now[0])
    now[0] = 30.0  # loading, compiling
    for done in range(40, 60):  # forty were there before
        watch(done, 100)
        now[0] += 0.5 if done < 50 else 9.0  # what comes later changes no promise
    assert watch.promised == 30.0 + 60 * 0.5
    assert told == [(done, 100) for done in range(40, 60)]


def test_a_stage_of_few_rows_promises_nothing():
    watch = Watch(lambda done, total: None)
    for done in range(1, 10):
        watch(done, 9)
    assert watch.promised is None


def test_predicted_stands_beside_actual():
    forecast = Forecast(stage="answer", n_rows=10, seconds=5.0, basis="b")
    line = compare("answer", forecast, None, Tally(n_rows=9, n_new_tokens=7), 6.0)
    assert "rows 10 → 9" in line
    assert "time 5.0 s → 6.0 s" in line
    assert "new tokens 7" in line
    assert "not predicted" in compare("answer", None, None, Tally(), 6.0)


@pytest.fixture
def run(tmp_path):
    path = pub.write_array(tmp_path / "h.json", [pub.hotpot(i) for i in range(14)])
    made = tmp_path / "run"
    line = ("data", made, "--dev", f"hotpotqa={path}", "--n-evaluation", 7)
    line += ("--preset", "smoke", "--max-new-tokens", 3)
    dry = beatrice(*line, "--dry-run").stdout
    assert "rows" in dry and "14" in dry
    assert not made.exists()
    beatrice(*line)
    return made


def files_of(run):
    return {
        path.relative_to(run): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != "forecasts" and path.name != "lock"
    }


def test_a_dry_run_counts_what_the_real_one_then_takes_and_changes_nothing(run):
    for line in (
        ("rewrite", run, "--model", "embedded", "--max-tokens", 5),
        ("answer", run),
        ("label", run, "--judge", "embedded"),
        ("sample", run, "--n-samples", 2, "--split", "test"),
        ("extract", run),
    ):
        before = files_of(run)
        dry = beatrice(*line, "--dry-run").stdout
        assert files_of(run) == before, line[0]
        assert "time" in dry and "memory of the model" in dry
        real = beatrice(*line).stderr
        (said,) = [text for text in real.splitlines() if "a dry run) → actual" in text]
        for part in ("rows", "prompt tokens"):
            if line[0] in ("rewrite", "answer", "sample"):  # judges are asked again
                predicted, actual = (
                    said.split(f"{part} ")[1].split(", ")[0].split(" → ")
                )
                assert predicted == actual, said
        assert "already done" in beatrice(*line, "--dry-run").stderr
    exact = beatrice("label", run, "--dry-run").stdout
    assert "by exact match, no requests" in exact
    assert "no time is given" in beatrice("sweep", run, "--dry-run", code=0).stdout
    dry = beatrice("world", run / "none", "--preset", "smoke", "--dry-run").stdout
    assert "rows" in dry
    assert not (run / "none").exists()
