"""The formula of each reading: golden values, closed forms, float64 row by row."""

import math

import numpy as np
import pytest
import torch

from beatrice.extract.readings import formulas
from beatrice.extract.readings.batch import Batch
from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.probability import Head
from tests.extract.readings.loops import mmd, shannon

FIELDS = {"n_cue": 1, "budget": ReadingBudget()}


def test_the_hidden_score_has_its_golden_value():
    states = torch.tensor([i**1.5 for i in range(12)], dtype=torch.float64)
    scores = formulas.hidden_scores(states.reshape(1, 3, 4), [(0, 3)])
    assert scores.tolist() == pytest.approx([-0.93214521812], abs=1e-9)


def test_the_entropies_have_their_golden_values():
    logits = torch.tensor([[2.0, 1, 0, -1], [0, 0, 0, 0]]).double()
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    window = formulas.window_entropy
    assert float(window(entropies, 4)) == pytest.approx(0.34657359, abs=1e-8)
    top = formulas.top_entropies(logits, 2).mean()
    assert float(top) == pytest.approx(0.31883757, abs=1e-8)


def test_divergences_of_a_large_vocabulary_in_chunks_are_those_of_float64():
    n_words, n_rows = 2**18 + 5, 260  # two chunks of rows, uneven blocks of words
    torch.manual_seed(0)
    weight = (torch.randn(n_words, 8) * 2).bfloat16()
    states = torch.randn(n_rows, 8).bfloat16()
    states[1::2] = states[::2] + 0.1 * states[1::2]

    class HeadBatch(Batch):
        head = Head(weight=weight, bias=None, softcap=None)

    batch = HeadBatch(backbone=None, answers=(), swapped=(), **FIELDS)
    rows, result = [], torch.empty((n_rows // 2, 2))
    for chunk, log_probs in batch.log_probs(states, is_normed=True):
        rows += range(chunk.start, chunk.stop)
        result[chunk.start // 2 : chunk.stop // 2] = formulas.divergences(
            log_probs[::2], log_probs[1::2]
        )
    assert rows == list(range(n_rows))
    for pair in (0, 127, 128, 129):  # on both sides of the chunks' border
        logits = states[2 * pair : 2 * pair + 2].double() @ weight.double().T
        exact = logits.softmax(-1)
        for column, is_swapped in enumerate((False, True)):
            wanted = shannon(*exact, is_swapped)
            assert float(result[pair, column]) == pytest.approx(wanted, rel=1e-4)


def test_the_hidden_score_is_exact_for_more_tokens_than_features_of_many_sizes():
    """Rounding makes their Gram matrix indefinite; their singular values are known."""
    rng, n_tokens, width = np.random.default_rng(0), 60, 12
    left = np.linalg.qr(rng.standard_normal((n_tokens, width - 1)))[0]
    # Orthogonal to the vector of ones, so that centring the rows changes nothing.
    ones = np.ones((width, 1))
    basis = np.linalg.qr(np.hstack([ones, rng.standard_normal((width, width - 1))]))[0]
    sizes = np.geomspace(1e-2, 3e7, width - 1)
    states = torch.tensor(left * sizes @ basis[:, 1:].T)
    ridged = states @ states.T + 1e-3 * torch.eye(n_tokens, dtype=torch.double)
    assert torch.linalg.cholesky_ex(ridged).info > 0
    n_null = n_tokens - len(sizes)
    expected = (np.log(sizes**2 + 1e-3).sum() + n_null * np.log(1e-3)) / n_tokens
    edges = [(0, n_tokens), (0, 3)]
    result = formulas.hidden_scores(torch.stack([states, states]), edges)
    assert result[0].item() == pytest.approx(expected, abs=1e-6)
    alone = formulas.hidden_scores(states[None], [(0, 3)])
    assert result[1].item() == pytest.approx(alone.item(), abs=1e-9)


def test_disjoint_distributions_diverge_by_log_two_and_equal_ones_by_zero():
    sure = torch.tensor([[0.0, -80.0]]).log_softmax(-1)
    result = formulas.divergences(sure, sure.flip(-1))[0]
    assert float(result[0]) == pytest.approx(math.log(2), abs=1e-6)
    # With exchanged arguments there is no bound: half of 80 nats, less log 2.
    assert float(result[1]) == pytest.approx(40 - math.log(2), abs=1e-4)
    assert formulas.divergences(sure, sure).abs().max() < 1e-6


def test_the_discrepancy_is_the_double_sum_over_the_most_probable_words():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn((2, 9), generator=generator).double().softmax(-1)
    table = torch.randn((9, 5), generator=generator).double()

    def cut(values):
        return torch.where(values >= values.sort().values[-4], values, 0.0)

    result = formulas.discrepancy(p.log()[None], q.log()[None], table, n_top=4)
    # The function takes embeddings in float32.
    assert float(result) == pytest.approx(mmd(cut(p), cut(q), table), rel=1e-5)
    same = formulas.discrepancy(p.log()[None], p.log()[None], table)
    assert float(same) == pytest.approx(0.0, abs=1e-12)
