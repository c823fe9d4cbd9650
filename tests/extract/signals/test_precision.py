"""When float32 products are rounded: only in the thread that multiplies bfloat16."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from beatrice.extract.generate.local import generate
from beatrice.extract.signals.precision import (
    exact_products,
    float32_precision,
    loading_weights,
    products_of_bfloat16,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of
from tests.extract.signals.test_decode import CONFIG, backbone_of, requests_of
from tests.process import forked

HOST = torch.device("cpu")
matmul = torch.backends.mkldnn.matmul


def precision_within(products):
    with products():
        return matmul.fp32_precision


def precision_beside():
    """Return the setting in another thread while it multiplies bfloat16 numbers."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(precision_within, products_of_bfloat16).result()


def test_the_precision_is_restored_after_two_threads_multiplied_bfloat16():
    before = matmul.fp32_precision
    entered, left = threading.Event(), threading.Event()

    def second():
        with products_of_bfloat16():
            entered.set()
            left.wait(10)

    with ThreadPoolExecutor() as pool:
        with products_of_bfloat16():
            pool.submit(second)
            entered.wait(0.5)  # times out if only one thread may enter
        left.set()
    assert matmul.fp32_precision == before


@pytest.mark.parametrize(
    "look",
    [lambda: float32_precision(HOST), lambda: precision_within(exact_products)],
    ids=["the precision is", "exact products begin"],
)
def test_while_a_thread_rounds_others_wait_and_never_see_the_setting(look):
    before = matmul.fp32_precision
    assert before == float32_precision(HOST)
    with ThreadPoolExecutor() as pool:
        with products_of_bfloat16():
            assert matmul.fp32_precision == "bf16"
            seen = pool.submit(look)
            wait([seen], timeout=0.2)
        assert seen.result() == before


def test_no_other_thread_rounds_until_the_last_exact_products_end():
    before = matmul.fp32_precision
    with exact_products():
        with exact_products():
            assert precision_beside() == before
        assert precision_beside() == before
        with products_of_bfloat16():  # allowed in the same thread
            assert matmul.fp32_precision == "bf16"
    assert precision_beside() == "bf16"
    block = exact_products()
    with exact_products():
        block.__enter__()  # an interrupt may leave its end to the garbage collector
    block.__exit__(None, None, None)
    assert precision_beside() == "bf16"


def dtype_within():
    with exact_products():
        return torch.zeros(1).dtype


def load_half():
    with loading_weights(torch.bfloat16):
        return True


def test_while_a_thread_loads_half_precision_no_other_computes_in_its_default_dtype():
    with ThreadPoolExecutor() as pool:
        with loading_weights(torch.bfloat16):
            torch.set_default_dtype(torch.bfloat16)  # as Transformers does
            dtype = pool.submit(dtype_within)
            wait([dtype], timeout=0.2)
            torch.set_default_dtype(torch.float32)
        assert dtype.result() == torch.float32


def test_half_precision_is_loaded_after_the_products_of_other_threads():
    with ThreadPoolExecutor() as pool:
        with exact_products():
            loading = pool.submit(load_half)
            wait([loading], timeout=0.2)
            assert not loading.done() and dtype_within() == torch.float32
        assert loading.result()


def test_a_process_forked_while_a_thread_computed_can_load_half_precision():
    began, ended = threading.Event(), threading.Event()

    def compute():
        with exact_products():
            began.set()
            ended.wait()

    def child():
        with warnings.catch_warnings(action="ignore"):  # about the threads of Torch
            load_half()

    with ThreadPoolExecutor() as pool:
        pool.submit(compute)
        began.wait()
        with exact_products():  # else the fork waits until the thread has ended
            code = forked(child)
        ended.set()
    assert code == 0


def test_a_fork_while_a_load_waits_for_the_products_of_a_thread_waits_for_both():
    began, loads = threading.Event(), []

    def compute():
        with exact_products():
            began.set()
            time.sleep(0.3)

    def child():  # which a signal ends if it waits for ever
        with (
            warnings.catch_warnings(action="ignore"),
            ThreadPoolExecutor() as pool,
        ):
            pool.submit(compute)
            began.wait()
            pool.submit(lambda: loads.append(load_half()))
            time.sleep(0.1)
            assert forked(lambda: None) == 0 and loads == [True]

    assert forked(child) == 0


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_exact_products_switch_autocast_off(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        with exact_products():
            assert not torch.is_autocast_enabled(device)
        assert torch.is_autocast_enabled(device)


def test_the_highest_precision_set_by_a_process_is_kept():
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        assert precision_beside() == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("is_written", [True, False])
def test_while_a_model_writes_or_is_read_no_other_thread_rounds(is_written):
    backbone, requests, seen = backbone_of("llama"), requests_of(), []
    reader = SignalReader(backbone)
    answers = generate(backbone, requests, CONFIG)
    with backbone.layout.decoder.register_forward_hook(
        lambda *_: seen.append(precision_beside())
    ):
        if is_written:
            generate(backbone, requests, CONFIG)
        else:
            reader.read([sequence_of(answer) for answer in answers])
    assert set(seen) == {matmul.fp32_precision}
