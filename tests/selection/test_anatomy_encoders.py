"""Asking an encoder: what its logit is made of, and what it says without a signal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.encoder import COLLECTION, Encoder
from beatrice.jaxprobe.families import SUBSETS, paper_dims, subset_index
from beatrice.jaxprobe.grid import apply_member, member_logits
from beatrice.jaxprobe.tokens import FamilyTokens
from beatrice.selection.anatomy.analysis import (
    TOLERANCE,
    attributed,
    incompleteness,
    of_families,
    of_span,
    path_gradients,
    replaced,
)
from beatrice.selection.anatomy.places import channels_of_heads

DIMS = paper_dims(hidden=6, prob=5, resid=4, attn=16)
ENCODER = Encoder(EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2), DIMS)
LENGTHS = (7, 5, 4)
N = 24


def signals(n_spans, seed=0):
    """Signals with ragged spans, zero on padding."""
    rng = np.random.default_rng(seed)
    lengths = LENGTHS[-n_spans:]
    real = [
        np.arange(width)[:, None] < rng.integers(1, width + 1, N) for width in lengths
    ]
    mask = np.concatenate(real)[..., None]
    tokens = tuple(
        jnp.asarray(rng.normal(size=(sum(lengths), N, size)) * mask, jnp.float32)
        for size in DIMS.sizes
    )
    return FamilyTokens(tokens, tuple(map(jnp.asarray, real)))


def means(n_spans, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.normal(size=(n_spans, size)).astype(np.float32) * 0.3 for size in DIMS.sizes
    )


def weights(name, n_spans):
    """Weights far enough from their first values that every part counts."""
    mask = jnp.asarray(SUBSETS[subset_index(name)])
    params = ENCODER.init(jax.random.key(0), signals(n_spans), mask)
    leaves, shape = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        x + 0.3 * jax.random.normal(k, x.shape)
        for x, k in zip(leaves, keys, strict=True)
    ]
    return mask, jax.tree.unflatten(shape, moved)


def logits(params, mask, features):
    return np.asarray(apply_member(params, mask, features, encoder=ENCODER)[0])


def with_regression(params, n_spans, is_silent):
    """Weights with a regression beside the network, which may have no say."""
    rng = np.random.default_rng(4)
    linear = {
        f"kernel_{f}": rng.normal(size=(2 + n_spans) * size).astype(np.float32)
        for f, size in enumerate(DIMS.sizes)
    }
    network = dict(params["params"])
    if is_silent:
        network["mlp_out"] = jax.tree.map(jnp.zeros_like, network["mlp_out"])
    return {"params": network, COLLECTION: {**linear, "bias": np.float32(0.5)}}


def test_a_silent_network_is_not_run_and_the_logits_are_the_same():
    mask, params = weights("HPRA", 3)
    features = signals(3)
    every = [with_regression(params, 3, is_silent) for is_silent in (True, False)]
    result = member_logits([(p, mask) for p in every], features, encoder=ENCODER)
    expected = np.stack([logits(p, mask, features) for p in every])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(result[0] - result[1]).max() > 1e-2
    start = replaced(features, means(3), of_families(DIMS, 3, (1,)))
    parts, change = attributed(every[0], mask, start, features, ENCODER, N)
    at = (jnp.full(1, 0.5, jnp.float32), jnp.ones(1, jnp.float32))
    whole = path_gradients(every[0], mask, start, features, *at, encoder=ENCODER)
    linear = path_gradients(every[0], mask, start, features, *at, encoder=None)
    for item, other in zip(whole, linear, strict=True):
        np.testing.assert_allclose(item, other, atol=1e-5)
    added = sum(item.sum(axis=(0, 2)) for item in parts)
    assert incompleteness(added, change) <= TOLERANCE


@pytest.mark.parametrize("n_spans", [2, 3])
@pytest.mark.parametrize("families", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_attributions_sum_to_the_difference_of_logits_within_a_hundredth(
    n_spans, families
):
    mask, params = weights("HPRA", n_spans)
    end = signals(n_spans)
    gone = of_families(DIMS, n_spans, families)
    start = replaced(end, means(n_spans), gone)
    result, change = attributed(params, mask, start, end, ENCODER, N)
    np.testing.assert_allclose(
        change, logits(params, mask, end) - logits(params, mask, start), rtol=1e-5
    )
    added = sum(item.sum(axis=(0, 2)) for item in result)
    assert np.abs(change).mean() > 1e-3
    assert incompleteness(added, change) <= TOLERANCE
    for family, item in enumerate(result):
        assert np.any(item) == (family in families)


def test_attributions_that_do_not_add_up_are_seen():
    assert incompleteness(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.0
    assert incompleteness(np.zeros(2), np.array([1.0, -2.0])) == 1.0


@pytest.mark.parametrize("name", ["H", "PR", "HPA"])
def test_the_means_of_a_family_that_is_not_read_change_no_logit(name):
    mask, params = weights(name, 3)
    features = signals(3)
    intact = logits(params, mask, features)
    for family, letter in enumerate("HPRA"):
        gone = of_families(DIMS, 3, (family,))
        without = logits(params, mask, replaced(features, means(3), gone))
        assert np.array_equal(without, intact) == (letter not in name)


def test_means_stand_on_real_tokens_of_their_span_alone():
    features, span_means = signals(3), means(3)
    result = replaced(features, span_means, of_span(DIMS, 3, 1))
    real = np.asarray(features.masks[1])
    for family, tokens in enumerate(result.tokens):
        context, question, answer = (np.asarray(tokens)[s] for s in result.span_slices)
        before = [np.asarray(features.tokens[family])[s] for s in features.span_slices]
        np.testing.assert_array_equal(context, before[0])
        np.testing.assert_array_equal(answer, before[2])
        expected = np.where(real[..., None], span_means[family][1], 0.0)
        np.testing.assert_array_equal(question, expected)


def test_the_order_of_examples_changes_no_logit_and_no_attribution():
    mask, params = weights("HPRA", 2)
    end = signals(2)
    order = np.random.default_rng(3).permutation(N)
    gone = of_families(DIMS, 2, (3,))
    plain, moved = (
        attributed(params, mask, replaced(x, means(2), gone), x, ENCODER, N)
        for x in (end, end.take(jnp.asarray(order)))
    )
    np.testing.assert_allclose(moved[1], plain[1][order], atol=1e-5)
    np.testing.assert_allclose(moved[0][3], plain[0][3][:, order], atol=1e-4)


def test_the_channels_of_a_head_are_its_own_in_every_span_and_reading():
    cells = np.zeros((2, 2), bool)
    cells[1, 0] = True  # second layer, first head
    gone = channels_of_heads(DIMS, 3, cells)
    assert [item.any() for item in gone] == [False, False, False, True]
    whole = gone[3].reshape(3, 2, 2, 2, 2)  # span, other span, reading, layer, head
    assert whole[..., 1, 0].all() and whole.sum() == 3 * 4
