"""Bad input from users gives a sentence and an exit code, and does so early."""

import errno
import os
import sys
from functools import partial

import numpy as np
import pytest
import tensorstore
import torch

from beatrice.benchmarks.bench.tiny_models import tiny_model
from beatrice.benchmarks.results.report import Control, Curves, read_part
from beatrice.doctor import look_at_run
from beatrice.extract.backbone.loading import (
    Backbone,
    check_device,
    require_known_tokens,
)
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.datasets.fields import parse_nested
from beatrice.extract.generate.options import check_backbone
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import write_lines
from beatrice.extract.run.console import in_one_sentence
from beatrice.extract.run.contents import read_labels
from beatrice.extract.run.directory import RunDir
from beatrice.extract.store.store import as_url
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.stages import read_sweep
from tests.extract.small_run import beatrice, make_run, questions
from tests.process import BEATRICE, little_room, on_disk, unshare
from tests.records import a_label, an_answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_run_can_be_made_without_its_gpu_but_its_model_is_not_loaded(
    tmp_path, capsys
):
    config = BackboneConfig(device="cuda")
    check_backbone(config)
    assert "note: device 'cuda'" in capsys.readouterr().err
    path = make_run(tmp_path / "run", backbone=config).path
    done = beatrice("answer", path, code=1)
    assert "device 'cuda:0': no such GPU here (Torch" in done.output
    assert "sees none); run where Torch sees it" in done.output
    assert "or choose the cpu (for a run: " in done.output
    rows = {row.about: row for row in look_at_run(path)}
    assert rows["device"].status == "problem"
    assert "no such GPU here" in rows["device"].text


@pytest.mark.parametrize("device", ["tpu", "hpu"])  # unknown to Torch; known but absent
def test_a_device_that_torch_does_not_have_is_refused(device):
    with pytest.raises(ValueError, match=f"device '{device}': expected a Torch device"):
        check_device(device)


@pytest.mark.parametrize(
    "changes",
    [{"prompt_ids": (1, 10**9)}, {"token_ids": (-1,)}, {"stop_id": 10**9}],
)
def test_a_token_that_the_model_does_not_know_is_named(changes):
    backbone = Backbone.from_model(tiny_model("llama"))
    require_known_tokens([an_answer()], backbone)
    with pytest.raises(ValueError, match=r"\('q', .*has the token id (10{9}|-1), but"):
        require_known_tokens([an_answer(), an_answer(**changes)], backbone)


def test_a_second_label_or_one_of_an_unknown_question_is_named(tmp_path):
    run = RunDir(tmp_path)
    run.labels.write_text(write_lines([a_label(True)] * 2))
    with pytest.raises(ValueError, match="labels.jsonl, line 2: a second label of"):
        read_labels(run)
    labels = {item.key: item for item in [a_label(True, example_id="nowhere")]}
    with pytest.raises(ValueError, match="question 'nowhere', which is not in"):
        count_correct(questions(), labels)


CURVES = dict[str, Curves]


@pytest.mark.parametrize("content", ["{}", "0", "2.5", "true", "[]", "{", "", "[" * 99])
def test_a_file_of_a_stage_that_holds_something_else_is_named(tmp_path, content):
    run = RunDir(tmp_path)
    run.control.mkdir()
    for path, verb, read in (
        (run.sweep, "sweep", lambda path, verb: read_sweep(path)),
        (run.path / "reliability.json", "evaluate", partial(read_part, kind=CURVES)),
        (run.control / "control.json", "control", partial(read_part, kind=Control)),
    ):
        if (path.name, content) == ("reliability.json", "{}"):
            continue  # a run without in-domain test questions
        path.write_text(content)
        with pytest.raises(ValueError, match=f"^{path}.*run `beatrice {verb}` again$"):
            read(path, verb=verb)


def test_a_literal_that_would_fill_the_memory_is_not_parsed():
    assert parse_nested("[" + "'a', " * 9 + "]", "golds") == ["a"] * 9
    with pytest.raises(ValueError, match="'golds': expected a list as JSON"):
        parse_nested("[" + "'a', " * 300_000 + "]", "golds")


def test_a_full_disk_is_reported_in_a_sentence_with_advice(tmp_path):
    with little_room():
        words = ("data", tmp_path / "run", "--world", "--preset", "smoke")
        done = beatrice(*words, code=1)
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("Error: a file cannot grow, as on a full disk (")
    assert last.endswith("make room and run the same command again: it continues")


def test_a_full_disk_under_a_store_gives_the_same_sentence(tmp_path):
    spec = {"driver": "zarr3", "kvstore": as_url(tmp_path / "x")}
    spec["metadata"] = {"shape": [1 << 16], "data_type": "float32"}
    array = tensorstore.open(spec, create=True).result()
    with pytest.raises(ValueError) as caught, little_room():
        array.write(np.ones(1 << 16, np.float32)).result()
    output = in_one_sentence(caught.value)
    assert output.startswith("a file cannot grow, as on a full disk (")
    assert "tensorstore_spec" not in output and "[" not in output


def test_encoders_on_a_full_disk_give_one_error_and_leave_nothing(tmp_path, capfd):
    with pytest.raises(OSError, match="File too large"), little_room():
        checkpoint.save(tmp_path / "x", {"w": np.ones((99, 99, 9))}, {})
    assert capfd.readouterr().err == "" and not list(tmp_path.iterdir())


def test_results_are_not_written_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = tmp_path / "answers.jsonl"
    file.write_text('{"question": "who?", "answer": "me"}')
    for words in (
        ("--question", "who?", "--html", pipe),
        ("--file", file, "--out", pipe),
    ):
        done = beatrice("score", "--probe", "gone", *words, code=2)
        assert "is a device or a pipe" in done.output
    assert pipe.is_fifo()


def test_a_removed_current_folder_is_named(working_folder):
    working_folder.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        RunDir("run")
    assert in_one_sentence(caught.value).startswith("the current folder: No such file")
    error = FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
    assert in_one_sentence(error).startswith("a file: No usable temporary")


def test_a_user_without_a_home_needs_one_only_for_the_hub():
    homeless = ("--user", "--map-user=12345", "env", "--unset=HOME")
    done = unshare(*homeless, *BEATRICE, "probes", code=1)
    assert "set HOME" in done.stderr and "Traceback" not in done.stderr
    program = "from beatrice.extract.run.files import user_cache as c; print(c('x'))"
    line = (*homeless, "--unset=XDG_CACHE_HOME", sys.executable, "-c", program)
    assert unshare(*line).stdout == "/.cache/beatrice/x\n"


def test_encoders_on_a_disk_without_free_inodes_give_one_error(tmp_path):
    done = on_disk(
        "nr_inodes=9",
        tmp_path,
        "import sys, pathlib, numpy\n"
        "from beatrice.jaxprobe import checkpoint\n"
        "x = pathlib.Path(sys.argv[1], 'x')\n"
        "try: checkpoint.save(x, {'w': numpy.ones(9)}, {})\n"
        "except OSError as error: print(error)",
    )
    assert "No space left" in done.stdout and done.stderr == ""


def test_messages_name_files_without_errno_and_escape_terminal_commands():
    error = FileNotFoundError(2, "No such file or directory", "runs/gone")
    words = "No such file or directory; check that it exists and may be read and"
    assert in_one_sentence(error) == f"runs/gone: {words} written"
    error = ValueError("a\x1b]52;c;eA==\x07 \x9b2J \udcff é")
    assert in_one_sentence(error) == r"a\x1b]52;c;eA==\x07 \x9b2J \udcff é"
