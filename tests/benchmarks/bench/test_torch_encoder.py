import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from beatrice.benchmarks.bench.grid import made_up_features
from beatrice.benchmarks.bench.torch_encoder import (
    TorchEncoder,
    apply_encoder,
    project,
    weights_of,
)
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import SUBSETS, Standardizer, paper_dims, subset_index
from beatrice.jaxprobe.family_tokens import split_families
from beatrice.jaxprobe.memory import Workload, families_of

SPANS = ((0, 5), (3, 7), (1, 4))  # the first one is empty for some examples
WORK = Workload(
    encoder=EncoderConfig(projection=4, hidden=8, n_blocks=2, n_groups=2),
    dims=paper_dims(hidden=6, prob=5, resid=4, attn=3),
    spans=SPANS,
    batch_size=10,
    n_steps=1,
)
FEATURES, LABELS = made_up_features(WORK, 10, seed=1)


def flat(tree):
    return flax.traverse_util.flatten_dict(jax.device_get(tree)["params"], sep="/")


@functools.cache
def in_jax(name):
    """Weights, with biases and scales moved to take part; logits; gradients."""
    dims = WORK.dims
    identity = Standardizer(
        np.zeros(dims.total, np.float32), np.ones(dims.total, np.float32)
    )
    families = split_families(FEATURES, dims, identity)
    mask = jnp.asarray(SUBSETS[subset_index(name)])
    encoder = Encoder(WORK.encoder, dims)
    params = encoder.init(jax.random.key(3), families, mask)
    params = jax.tree.map(lambda x: x + 0.02, params)

    def loss(params):
        logits, pooled = encoder.apply(params, families, mask)
        losses = optax.sigmoid_binary_cross_entropy(
            logits, jnp.asarray(LABELS, jnp.float32)
        )
        return losses.mean(), (logits, pooled)

    grads, outputs = jax.jit(jax.grad(loss, has_aux=True))(params)
    return flat(params), outputs, flat(grads)


def torch_inputs(families):
    tokens = np.concatenate(FEATURES.tokens, axis=1)
    real = np.concatenate(FEATURES.masks, axis=1).astype(np.float32)
    slices = WORK.dims.slices
    return {
        f: torch.from_numpy(tokens[..., slices[f]].copy()) for f in families
    }, torch.from_numpy(real)


@pytest.mark.parametrize("name", ["P", "HA", "HPRA"])
def test_both_encoders_have_the_same_logits_and_gradients(name):
    params, (logits, pooled), grads = in_jax(name)
    encoder = TorchEncoder(
        config=WORK.encoder,
        families=families_of((subset_index(name), 0)),
        widths=tuple(most for _, most in SPANS),
    )
    weights = {
        key: torch.from_numpy(x).requires_grad_()
        for key, x in weights_of(params, encoder).items()
    }
    ours, vectors = apply_encoder(
        weights, *torch_inputs(encoder.families), encoder, training=False
    )
    labels = torch.from_numpy(LABELS.astype(np.float32))
    torch.nn.functional.binary_cross_entropy_with_logits(ours, labels).backward()
    close = {"rtol": 1e-4, "atol": 1e-5}  # fp32, sums in another order
    np.testing.assert_allclose(ours.detach(), logits, **close)
    np.testing.assert_allclose(vectors.detach(), pooled, **close)
    expected = weights_of(grads, encoder)
    assert set(expected) == set(weights)
    for key, gradient in expected.items():
        np.testing.assert_allclose(weights[key].grad, gradient, **close, err_msg=key)
    assert max(np.abs(x).max() for x in expected.values()) > 0.01


def test_noise_behind_the_projection_has_the_distribution_of_noise_at_the_inputs():
    torch.manual_seed(0)
    n = 20000
    kernel = torch.randn(6, 3)
    weights = {"projection_0": kernel, "projection_bias": torch.zeros(3)}
    tokens, real = {0: torch.zeros(n, 2, 6)}, torch.tensor([[1.0, 0.0]]).repeat(n, 1)
    encoder = TorchEncoder(config=WORK.encoder, families=(0,), widths=(2,))
    rows = project(weights, tokens, real, encoder, 0.5)
    assert not rows[:, 1].any()  # padding stays zero
    expected = 0.25 * kernel.T @ kernel
    # Deviation of a covariance of n draws: about its size times sqrt(2 / n) = 0.01.
    found = torch.cov(rows[:, 0].T)
    torch.testing.assert_close(found, expected, rtol=0.06, atol=0.06)
