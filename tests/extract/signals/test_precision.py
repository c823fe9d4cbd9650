"""Whose float32 products are rounded: nobody's beside those of bfloat16 numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from beatrice.extract.generate.local import generate
from beatrice.extract.signals.precision import (
    exact_products,
    float32_precision,
    products_of_bfloat16,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of
from tests.extract.signals.test_decode import CONFIG, backbone_of, requests_of

HOST = torch.device("cpu")
matmul = torch.backends.mkldnn.matmul


def precision_within(products):
    with products():
        return matmul.fp32_precision


def precision_beside():
    """What another thread sets while it multiplies bfloat16 numbers."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(precision_within, products_of_bfloat16).result()


def test_products_of_others_stay_in_float32_after_two_threads_took_logits():
    before = matmul.fp32_precision
    entered, left = threading.Event(), threading.Event()

    def second():
        with products_of_bfloat16():
            entered.set()
            left.wait(10)

    with ThreadPoolExecutor() as pool:
        with products_of_bfloat16():
            pool.submit(second)
            entered.wait(0.5)  # in vain where the setting is of one thread at a time
        left.set()
    assert matmul.fp32_precision == before


@pytest.mark.parametrize(
    "look",
    [lambda: float32_precision(HOST), lambda: precision_within(exact_products)],
    ids=["the precision is", "exact products begin"],
)
def test_while_a_thread_rounds_others_wait_and_do_not_see_it(look):
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
        with products_of_bfloat16():  # its own thread knows what it does
            assert matmul.fp32_precision == "bf16"
    assert precision_beside() == "bf16"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_no_device_of_a_model_rounds_by_autocast(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        with exact_products():
            assert not torch.is_autocast_enabled(device)
        assert torch.is_autocast_enabled(device)


def test_the_highest_precision_of_a_process_is_left_as_it_is():
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
