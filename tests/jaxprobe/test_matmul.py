import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import FamilyTokens, paper_dims
from beatrice.jaxprobe.kernels.projection import Draw
from beatrice.jaxprobe.kernels.stored import contract, product

DIMS = paper_dims(hidden=1024, prob=5, resid=24, attn=40)  # one is wide


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def rounded(x):
    """The nearest bfloat16, in float64."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_a_mixed_product_is_that_of_the_rounded_operands():
    a, b, dy = normal(0, 7, 300), normal(1, 300, 9), normal(2, 7, 9)
    y, pull = jax.vjp(lambda a, b: product(a, b, "bfloat16"), a, b)
    da, db = pull(dy)
    np.testing.assert_allclose(y, rounded(a) @ rounded(b), atol=1e-4)
    np.testing.assert_allclose(da, rounded(dy) @ rounded(b).T, atol=1e-4)
    np.testing.assert_allclose(db, rounded(a).T @ rounded(dy), atol=1e-4)
    assert np.abs(y - a @ b).max() > 1e-2


def test_a_mixed_contraction_is_that_of_the_rounded_operands():
    a, b = normal(0, 7, 300), normal(1, 9, 300)
    y = contract(a, b, 1, "bfloat16")
    np.testing.assert_allclose(y, rounded(a) @ rounded(b).T, atol=1e-4)


@pytest.mark.parametrize("matmul_dtype", ["float32", "bfloat16"])
def test_sums_are_float32(matmul_dtype):
    ones = jnp.ones((1, 4097))
    assert product(ones, ones.T, matmul_dtype)[0, 0] == 4097.0
    assert contract(ones, ones, 1, matmul_dtype)[0, 0] == 4097.0


def loss_and_gradient(matmul_dtype, family_mask):
    config = EncoderConfig(
        projection=8, hidden=16, n_blocks=1, n_groups=2, matmul_dtype=matmul_dtype
    )
    encoder = Encoder(config, DIMS)
    n_tokens, n = 9, 12
    tokens = tuple(normal(i, n_tokens, n, d) for i, d in enumerate(DIMS.sizes))
    masks = (jnp.ones((5, n), bool), jnp.ones((4, n), bool))
    features = FamilyTokens(tokens, masks)
    params = encoder.init(jax.random.key(1), features, family_mask)
    draw = Draw(jnp.arange(n), jax.random.key(2), jax.random.key(3))

    def loss(params):
        logits, _ = encoder.apply(params, features, family_mask, draw)
        return jnp.square(logits - 1.0).mean()

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("read", ["HPRA", "P"])
def test_a_mixed_step_is_close_to_the_single_one_and_leaves_float32_weights(read):
    mask = jnp.array([letter in read for letter in "HPRA"])
    loss, gradient = loss_and_gradient("float32", mask)
    mixed_loss, mixed = loss_and_gradient("bfloat16", mask)
    assert 0 < abs(mixed_loss - loss) < 0.02 * loss
    one, other = (ravel_pytree(x)[0] for x in (gradient, mixed))
    assert other.dtype == jnp.float32
    cosine = one @ other / jnp.linalg.norm(one) / jnp.linalg.norm(other)
    assert 0.999 < cosine < 1.0


def test_products_of_another_type_are_refused():
    with pytest.raises(ValueError, match="expected float32 or bfloat16"):
        EncoderConfig(matmul_dtype="float16")
