"""A batch too large for a device is done in halves; a text too large is an error."""

import contextlib
import math
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from jax.errors import JaxRuntimeError

from beatrice.extract.generate.generator import SamplingConfig
from beatrice.extract.generate.local import generate
from beatrice.extract.readings.reader import read
from beatrice.extract.run.console import in_one_sentence, is_of_machine
from beatrice.extract.signals.batch import BatchSplitter, DoesNotFit
from beatrice.extract.signals.decode import generate_and_read, read_stepwise
from beatrice.extract.signals.reader import SignalReader
from tests.extract.signals.test_decode import (
    CONFIG,
    assert_unchanged,
    backbone_of,
    read_again,
    requests_of,
)

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.10 GiB of which 1.50 GiB is free. If reserved but unallocated memory is large …"
)


@contextlib.contextmanager
def room_for(backbone, n_rows=math.inf, n_tokens=math.inf):
    """Limit the rows and tokens of the decoder; yield the row counts it refused."""
    refused = []

    def check(module, args, kwargs):
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        rows, tokens = ids.shape
        if rows > n_rows or tokens > n_tokens:
            refused.append(rows)
            raise torch.OutOfMemoryError(FULL)

    decoder = backbone.layout.decoder
    with decoder.register_forward_pre_hook(check, with_kwargs=True):
        yield refused


def test_answers_and_signals_in_halves_are_those_of_the_whole_batch():
    requests = requests_of()
    reader = SignalReader(backbone_of("llama"))
    expected = generate_and_read(reader, requests, CONFIG)
    with room_for(reader.backbone, 2) as refused:
        assert_unchanged(reader, requests, expected, 1e-5)
    assert refused


def test_other_readings_in_halves_are_those_of_the_whole_batch():
    backbone, requests = backbone_of("llama"), requests_of()
    answers = generate(backbone, requests, CONFIG)
    names = ["lookback", "p_true"]
    options = {"truth_prompts": [request.prompt.ids for request in requests]}
    expected = list(read(backbone, answers, names, **options))
    with room_for(backbone, 2) as refused:
        rows = list(read(backbone, answers, names, **options))
    assert refused
    for got, wanted in zip(rows, expected, strict=True):
        for name in names:
            torch.testing.assert_close(got[name], wanted[name], equal_nan=True)


def test_a_batch_that_is_too_large_is_tried_once_and_reported_once(capsys):
    backbone = backbone_of("llama")
    reader = SignalReader(backbone)
    answers = generate(backbone, requests_of(lengths=(9,) * 8), CONFIG)
    with room_for(backbone, 4) as refused:
        for _ in range(3):
            read_again(reader, answers)
    assert refused == [8]
    (note,) = capsys.readouterr().err.splitlines()
    assert "8 texts" in note and "Tried to allocate 2.00 GiB)" in note


@pytest.mark.parametrize("how", ["written", "streamed", "read"])
def test_a_text_that_does_not_fit_is_an_error_with_its_length(how):
    backbone, requests = backbone_of("llama"), requests_of()
    reader = SignalReader(backbone)
    answers = generate(backbone, requests, CONFIG)
    message = r"one text of \d+ tokens does not fit in .*2.00 GiB\); .* use a device"
    with room_for(backbone, 0), pytest.raises(ValueError, match=message):
        if how == "written":
            generate(backbone, requests, CONFIG, SamplingConfig(max_new_tokens=3))
        elif how == "streamed":
            next(read_stepwise(reader, requests[0], SamplingConfig(max_new_tokens=3)))
        else:
            read_again(reader, answers)


def test_batches_are_whole_again_after_a_time_in_which_no_text_fitted(capsys):
    backbone, requests = backbone_of("llama"), requests_of()
    expected = generate(backbone, requests, CONFIG)
    for _ in range(3):
        with room_for(backbone, 0), pytest.raises(DoesNotFit):
            generate(backbone, requests, CONFIG)
    with room_for(backbone, len(requests) - 1) as refused:
        assert generate(backbone, requests, CONFIG) == expected
    assert refused[0] == len(requests)
    assert capsys.readouterr().err.count("are run in halves") == 1


@pytest.mark.parametrize("n_rows", [1, 4])
def test_a_batch_that_did_not_fit_is_tried_again_but_rarely(n_rows):
    splitter, passes, most = BatchSplitter(), [], n_rows

    def work(rows):
        passes.append(len(rows))
        if len(rows) > most:
            raise torch.OutOfMemoryError(FULL)

    for most, n_batches in ((n_rows, 200), (8, 300)):
        passes.clear()
        for _ in range(n_batches):
            assert [*splitter.run(work, range(8), lambda row: 9)]
        assert sum(n > most for n in passes) < 0.03 * len(passes)
    assert passes[-200:] == [8] * 200


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(FULL),
        JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 99 bytes."),
        RuntimeError("can't start new thread"),
        BrokenProcessPool("A process in the process pool was terminated abruptly."),
    ],
)
def test_running_out_of_memory_is_one_sentence_whatever_raises_it(error):
    assert is_of_machine(error)
    assert in_one_sentence(error).startswith(f"not enough memory ({error}"[:50])


def test_an_error_of_the_program_is_not_taken_for_one_of_the_machine():
    assert not is_of_machine(RuntimeError("a Tensor with 9 elements has no one value"))
    assert not is_of_machine(IndexError("out of memory"))
