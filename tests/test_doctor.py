"""The doctor: what it finds of machine, model, server and run."""

import json

from click.testing import CliRunner

from beatrice import main


def doctor(*arguments, code=0):
    done = CliRunner().invoke(main, ["doctor", "--json", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {found["about"]: found for found in map(json.loads, lines)}


def test_a_machine_that_runs_the_tests_has_no_problem(tmp_path):
    found = doctor(tmp_path.parent / "not" / "there" / "yet", "--model", "embedded",
                   code=1)  # fmt: skip
    assert {"python", "packages", "cores", "disk", "jax"} <= found.keys()
    assert found["packages"]["status"] == "ok"
    assert found["disk"]["status"] != "problem"
    assert "6 layers, width 160, 5 heads, window 512" in found["model"]["text"]
    assert "no chat template" in found["tokenizer"]["text"]
    assert "no run directory" in found["run"]["text"]


def test_a_model_that_is_not_there_is_a_problem(tmp_path):
    found = doctor("--model", tmp_path / "none", code=1)
    assert found["model"]["status"] == "problem"
    assert "no such directory" in found["model"]["text"]


def test_a_server_that_is_not_there_is_a_problem():
    found = doctor("--server", "http://127.0.0.1:9/v1", code=1)
    assert found["server"]["status"] == "problem"


def test_a_run_says_which_stages_are_done_and_which_are_stale(tmp_path):
    run = tmp_path / "run"
    done = CliRunner().invoke(main, ["world", str(run), "--preset", "smoke"])
    assert done.exit_code == 0, done.output
    found = doctor(run)
    assert "done are world" in found["run"]["text"]
    assert found["run"]["status"] == "ok"
    with (run / "passages.jsonl").open("a") as file:
        file.write("\n")
    found = doctor(run)
    assert found["run"]["status"] == "warning"
    assert "passages.jsonl has changed" in found["run"]["text"]
