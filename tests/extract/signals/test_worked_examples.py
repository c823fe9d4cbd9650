"""Worked examples before the spans: the model reads them, their signals nobody."""

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.tiny_models import make_sequence, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.probability import Head
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import first_read

SMALL = ReadingBudget(
    n_attention_weights=1000, n_tokens_per_chunk=7, n_words_per_block=13
)


def mixed_batch():
    """Examples of two lengths before the spans, none, and an answer alone."""
    return [
        make_sequence(1, 90, [60, 60], [60, 80], [80, 90]),
        make_sequence(2, 70, [50, 58], [58, 66], [66, 69]),
        make_sequence(3, 26, [2, 15], [15, 22], [22, 26]),
        make_sequence(4, 52, [51, 51], [51, 51], [51, 52]),
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "gpt2", "bloom"])
@pytest.mark.parametrize("n_spared", [2, 4])
def test_rows_behind_worked_examples_are_those_of_the_oracle(name, n_spared):
    model = tiny_model(name)
    reader = SignalReader(Backbone.from_model(model), budget=SMALL)
    twin = oracle.copy_with_attention(model, "eager")
    batch = mixed_batch()[:n_spared]
    for sequence, found in zip(batch, reader.read(batch), strict=True):
        first = first_read(sequence.spans[0, 0])
        assert found.first_token == first
        for family, expected in oracle.oracle_signals(twin, sequence).items():
            rows = getattr(found, family)
            assert len(rows) == len(sequence.ids) - first
            np.testing.assert_allclose(rows, expected[first:], atol=oracle.TOLERANCE)


def test_a_short_beginning_is_read_and_a_long_one_is_not():
    assert [first_read(n) for n in (0, 1, 30, 47)] == [0, 0, 0, 0]
    assert [first_read(n) for n in (48, 200)] == [48, 200]


def random_head(dtype, n_words=3000, d_model=192):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((n_words, d_model), generator=generator).to(dtype)
    states = torch.randn((200, d_model), generator=generator).to(dtype)
    return Head(weight=weight, bias=None, softcap=None), states


def test_logits_of_bfloat16_are_sums_in_float32():
    head, states = random_head(torch.bfloat16)
    found = head.logits(states, 100, 3000)
    exact = states.double() @ head.weight[100:].double().T
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6


def test_logits_of_float32_are_the_plain_product_bit_by_bit():
    head, states = random_head(torch.float32)
    assert torch.equal(head.logits(states, 0, 3000), torch.mm(states, head.weight.T))


def test_products_of_others_stay_in_float32_after_logits_of_bfloat16():
    own = torch.backends.mkldnn.matmul.fp32_precision
    head, states = random_head(torch.float32)
    before = torch.mm(states, head.weight.T)
    half, half_states = random_head(torch.bfloat16)
    half.logits(half_states, 0, 3000)
    assert torch.backends.mkldnn.matmul.fp32_precision == own
    assert torch.equal(torch.mm(states, head.weight.T), before)
