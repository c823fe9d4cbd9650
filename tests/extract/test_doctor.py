"""The doctor's findings about the machine, the model, the server and the run."""

import json
import os
import shutil
import socket
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from packaging.requirements import Requirement

from beatrice.benchmarks.bench.tiny_models import tiny_model
from beatrice.doctor import (
    _wrong_version,
    look_at_devices,
    look_at_hub,
    look_at_machine,
)
from beatrice.extract.backbone.loading import load_outline
from beatrice.extract.backbone.names import WEIGHTS, unreachable_hub
from beatrice.extract.records import write_lines
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_text_atomic
from beatrice.extract.run.stages import bytes_in_words
from beatrice.extract.signals.extract import ExtractConfig, outline_shapes
from tests.extract.backbone.test_loading import edit, save
from tests.extract.small_run import beatrice, smoke
from tests.pretended_gpu import PretendedGpu
from tests.process import on_disk, run_python
from tests.records import an_answer


def doctor(*arguments, code=0):
    done = beatrice("doctor", "--json", *arguments, code=code)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {item["about"]: item for item in map(json.loads, lines)}


def test_the_doctor_describes_machine_model_tokenizer_and_run(tmp_path):
    nowhere = tmp_path.parent / "not" / "there" / "yet"
    result = doctor(nowhere, "--model", "embedded", code=1)
    assert {"python", "packages", "cores", "disk", "jax"} <= result.keys()
    assert result["packages"]["status"] == "ok"
    assert result["disk"]["status"] != "problem"
    assert "6 layers, width 160, 5 heads, window 512" in result["model"]["text"]
    assert "no chat template" in result["tokenizer"]["text"]
    assert "not a run directory" in result["run"]["text"]


def test_a_missing_or_too_old_package_is_named():
    wanted = map(Requirement, ("click>=1", "click>=99", "no-such-package>=2"))
    none, old, missing = map(_wrong_version, wanted)
    assert none is None and missing == "no-such-package>=2 is missing"
    assert old == f"click is {version('click')}, but >=99 is needed"


def test_a_machine_without_linuxs_counters_can_be_examined(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity")  # as on a Mac
    findings = {finding.about: finding for finding in look_at_machine(tmp_path)}
    assert findings["cores"].text == f"{os.cpu_count()} cores for this process"


@pytest.mark.parametrize(("missing", "status"), [(0, "ok"), (1024, "warning")])
def test_too_little_memory_or_disk_is_a_warning(monkeypatch, tmp_path, missing, status):
    n_memory, n_disk = (4 << 30) - missing, (10 << 30) - missing
    meminfo = f"MemTotal: 99999999 kB\nMemAvailable: {n_memory // 1024} kB\n"
    usage = SimpleNamespace(free=n_disk)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path: meminfo)  # of /proc/meminfo
        patch.setattr(shutil, "disk_usage", lambda folder: usage)
        findings = {finding.about: finding for finding in look_at_machine(tmp_path)}
    assert findings["memory"].status == findings["disk"].status == status
    assert findings["memory"].text == f"{bytes_in_words(n_memory)} available"


def test_a_disk_that_cannot_be_written_to_is_a_problem(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from beatrice.doctor import look_at_machine\n"
        "print(*look_at_machine(Path(sys.argv[1])), sep='\\n')"
    )
    for options, status in (("ro", "problem"), ("rw", "warning")):  # 1 MiB of room
        lines = on_disk(f"{options},size=1m", tmp_path, program).stdout.splitlines()
        (disk,) = (line for line in lines if "'disk'" in line)
        assert f"status={status!r}" in disk
        assert ("is not writable" in disk) == (options == "ro")


def test_in_a_base_installation_missing_packages_are_named():
    program = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'openai', 'tensorstore'):\n"
        "    sys.modules[name] = None\n"
        "from beatrice.cli import main\n"
        "main(['doctor', '--model', 'embedded', '--server', 'http://127.0.0.1:1/v1'])"
    )
    lines = run_python(program, code=1).stdout.splitlines()
    of = {line.split()[1]: line for line in lines}
    assert of["disk"] and of["memory"]
    for name, package in (
        ("jax", "jax"),
        ("model", "tensorstore"),
        ("server", "openai"),
    ):
        assert of[name].startswith("problem")
        assert f"{package} is not installed" in of[name]


def test_a_model_that_a_run_would_fetch_is_named_and_not_fetched(tmp_path):
    program = (
        "from beatrice.doctor import look_at_hub, look_at_model\n"
        "print(*look_at_hub('smollm2'), *look_at_model('smollm2'))"
    )
    shown = run_python(program, XDG_CACHE_HOME=str(tmp_path)).stdout
    assert "status='warning'" in shown and "a run downloads it first" in shown
    assert not list(tmp_path.rglob("*.gguf*"))


def test_a_gpu_that_only_emulates_bfloat16_is_a_warning():
    with PretendedGpu([(9, 0), (7, 5)]):
        first, second, _ = look_at_devices()
    assert (first.about, first.status) == ("cuda:0", "ok")
    assert (second.about, second.status) == ("cuda:1", "warning")
    assert "no bfloat16; use float16" in second.text


@pytest.mark.parametrize("platform", ["cuda", "no_such_platform"])
def test_a_jax_without_a_device_is_a_problem(platform):
    program = (
        "from beatrice.doctor import look_at_devices\n"
        "print(*look_at_devices(), sep='\\n')"
    )
    hidden = {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    shown = run_python(program, **hidden).stdout.splitlines()
    assert "about='jax', status='problem'" in shown[-1]
    assert "has no device" in shown[-1] and "unset it, or set it to cpu" in shown[-1]


def test_the_bytes_of_every_choice_of_kept_signals_are_listed():
    rows = doctor("--model", "embedded")["kept"]["text"].splitlines()
    assert [row.split()[0] for row in rows[2:]] == ["bf16", "fp16", "fp32", "int8"]
    # 7 entries of 160 numbers; 5 + 4 * 6 scalars and 2 * 2 * 6 * 5 of attention.
    others = 4 * (5 + 24 + 120)
    n_tokens, n_answer = 10_000 * 400, 10_000 * 60
    for row, n_bytes, scale in zip(rows[2:], (2, 2, 4, 1), (0, 0, 0, 4), strict=True):
        entry = 160 * n_bytes + scale
        expected = [
            n_tokens * others + n_rows * n_entries * entry
            for n_entries in (7, 1)
            for n_rows in (n_tokens, n_answer)
        ]
        assert row.split()[1:] == " ".join(map(bytes_in_words, expected)).split()


def test_only_layers_that_have_attention_are_counted(tmp_path):
    model = save(tiny_model("qwen3_5"), tmp_path / "model")
    result = doctor("--model", model)
    assert "4 layers" in result["model"]["text"]
    assert "attention is read in 1 of the layers" in result["model"]["text"]
    shapes = outline_shapes(load_outline(str(model)))
    assert shapes["attn"] == (2, 2, 1, 4)


def test_a_model_that_asks_for_code_is_a_problem(tmp_path):
    model = shutil.copytree(WEIGHTS, tmp_path / "model")
    for auto_map, status in (({}, "ok"), ({"AutoConfig": "evil.Config"}, "problem")):
        edit(model, auto_map=auto_map)
        result = doctor("--model", model, code=int(status == "problem"))
        assert result["model"]["status"] == status
    assert "evil.Config" in result["model"]["text"]


def test_the_bytes_of_an_answered_run_follow_from_what_it_keeps(tmp_path):
    answer = an_answer(prompt_ids=(1, 2, 3), token_ids=(4, 5))
    cut = msgspec.structs.replace(answer, setting="with_context", stop_id=None)

    def features(layer, code):
        config = ExtractConfig(hidden_layers=(layer,), hidden_spans="answer")
        with RunDir.open(tmp_path / str(layer), smoke(extract=config)) as run:
            write_text_atomic(run.answers_file, write_lines([answer, cut]))
        return doctor(run.path, code=code)["features"]

    text = features(2, code=0)["text"]
    assert "10 tokens, 5 of them in answer spans" in text  # the second answer is cut
    assert "layer 2 on the answer span as bfloat16" in text
    needed = 10 * 4 * (5 + 24 + 120) + 5 * 160 * 2
    assert f"take {bytes_in_words(needed)};" in text
    row = features(99, code=1)  # a layer that the model does not have
    assert row["status"] == "problem" and "0 (embedding) to 6" in row["text"]


def test_a_missing_model_and_a_missing_server_are_problems(tmp_path):
    for name in (tmp_path / "none", "~no-such-user/none"):
        model = doctor("--model", name, code=1)["model"]
        assert model["status"] == "problem" and "no such directory" in model["text"]
    server = doctor("--server", "http://127.0.0.1:9/v1", code=1)["server"]
    assert server["status"] == "problem"


def test_a_runs_stages_are_reported_as_done_stale_or_unreadable(tmp_path):
    run = tmp_path / "run"
    beatrice("data", run, "--world", "--preset", "smoke")
    result = doctor(run)
    assert "stages done: world" in result["run"]["text"]
    assert result["run"]["status"] == "ok"
    with (run / "passages.jsonl").open("a") as file:
        file.write("\n")
    result = doctor(run)
    assert result["run"]["status"] == "warning"
    assert "passages.jsonl has changed" in result["run"]["text"]
    (run / "examples.jsonl").write_text("{}\n")
    result = doctor(run, "--model", "embedded", code=1)
    assert result["run"]["status"] == "problem" and "line 1" in result["run"]["text"]
    assert result["model"]["status"] == "ok"


def test_an_unreachable_hub_is_recognised_unless_a_proxy_is_set():
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert unreachable_hub(nobody) == "http://127.0.0.1:9"
    secret = {"HF_ENDPOINT": "http://user:token@127.0.0.1:9"}
    assert unreachable_hub(secret) == "http://127.0.0.1:9"
    offline = unreachable_hub({**secret, "HF_HUB_OFFLINE": "1"})
    assert offline == "http://127.0.0.1:9 (HF_HUB_OFFLINE)"
    assert unreachable_hub({**nobody, "HTTPS_PROXY": "http://proxy:3128"}) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert unreachable_hub({"HF_ENDPOINT": f"http://127.0.0.1:{port}"}) is None
    assert list(look_at_hub("embedded")) == list(look_at_hub(None)) == []
