import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg  # noqa: F401  its OpenBLAS is the one that JAX calls
from jax.flatten_util import ravel_pytree
from scipy.stats import kstest
from threadpoolctl import threadpool_info, threadpool_limits

from beatrice.jaxprobe import projection
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import paper_dims
from beatrice.jaxprobe.grid import member_keys, seed_keys
from beatrice.jaxprobe.projection import (
    AllTokens,
    Draw,
    gather_span,
    noise_factor,
    project_span,
)
from beatrice.jaxprobe.random import dropout, hashed_bits, hashed_normal
from beatrice.jaxprobe.stored import (
    contract,
    product,
    rows_of_tokens,
    use_one_blas_thread,
)
from beatrice.jaxprobe.tokens import FamilyTokens

# Compiled as a whole: operations on their own compile one by one, which takes longer.
project = jax.jit(
    projection.project, static_argnames=("deviation", "stream", "matmul_dtype")
)
WIDE, NARROW = (3, 7), (7, 3)  # [d_projection, d_family]: noise after, before
WIDEST = (3, 2048)  # projected a few tokens at a time
OPEN, CLOSED = jnp.array(True), jnp.array(False)


@pytest.fixture(params=[WIDE, NARROW, WIDEST])
def shape(request):
    return request.param


def weight_of(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def tokens_of(shape, n_examples=6):
    return jax.random.normal(jax.random.key(1), (5, n_examples, shape[1]))


def draw_of(seed, rows=(4, 0, 2)):
    return Draw(jnp.asarray(rows), jax.random.key(seed), jax.random.key(seed + 1000))


def run(weight, tokens, gate, draw, deviation, real=None):
    if real is None:
        n_batch = tokens.shape[1] if draw is None else len(draw.rows)
        real = jnp.ones((tokens.shape[0], n_batch), bool)
    fixed = {"deviation": deviation, "stream": 1, "matmul_dtype": "float32"}
    return project(weight, tokens, real, gate, draw, **fixed)


def test_without_noise_a_projection_is_the_product_with_the_drawn_rows(shape):
    weight, tokens = weight_of(shape) * shape[1] ** -0.5, tokens_of(shape)
    expected = jnp.einsum("pd,tnd->ptn", weight, tokens)
    whole = run(weight, tokens, OPEN, None, 0.5)
    batch = run(weight, tokens, OPEN, draw_of(0), 0.0)
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    np.testing.assert_allclose(batch, expected[:, :, [4, 0, 2]], atol=1e-5)


def test_a_closed_gate_gives_zeros_and_no_gradient(shape):
    weight, tokens = weight_of(shape), tokens_of(shape)

    def total(weight, gate):
        return jnp.sin(run(weight, tokens, gate, draw_of(0), 0.5)).sum()

    assert not np.any(run(weight, tokens, CLOSED, draw_of(0), 0.5))
    assert not np.any(jax.grad(total)(weight, CLOSED))
    assert np.any(jax.grad(total)(weight, OPEN))


def test_projected_noise_has_the_covariance_of_noise_on_the_inputs(shape):
    weight, tokens = weight_of(shape), tokens_of(shape, n_examples=400)
    rows = jnp.arange(400)

    def noise(seed):
        noisy = run(weight, tokens, OPEN, draw_of(seed, rows), 0.5)
        return noisy - run(weight, tokens, OPEN, draw_of(seed, rows), 0.0)

    drawn = jax.vmap(noise)(jnp.arange(40)).transpose(1, 0, 2, 3).reshape(shape[0], -1)
    expected = 0.25 * np.asarray(weight @ weight.T)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    # 80,000 draws: a covariance's standard error is below 0.5 % of the scale.
    np.testing.assert_allclose(np.cov(drawn) / scale, expected / scale, atol=0.03)
    assert np.abs(drawn.mean(axis=1) / np.sqrt(np.diag(expected))).max() < 0.03


def test_expected_gradient_is_that_of_noise_on_the_inputs(shape):
    weight = weight_of(shape)
    tokens = jnp.zeros((1, 20_000, shape[1]))
    rows = jnp.arange(20_000)

    def loss(weight):
        noisy = run(weight, tokens, OPEN, draw_of(3, rows), 0.5)
        return jnp.square(noisy).sum() / 20_000

    # The mean of |Wn|^2 is 0.25 tr(WW'), whose gradient is 0.5 W.
    gradient = jax.grad(loss)(weight)
    np.testing.assert_allclose(gradient, 0.5 * weight, atol=0.05 * np.abs(weight).max())


@pytest.mark.parametrize("d_out", [7, 3])
def test_a_shared_span_is_projected_like_one_gathered_by_each_member(d_out):
    sizes, n_members, gates = (3, 40, 300, 300, 5), 5, jnp.array([1, 0, 1, 1, 0], bool)
    weights = [
        weight_of((n_members, d_out, d), i) * d**-0.5 for i, d in enumerate(sizes)
    ]
    tokens = [tokens_of((0, d), n_examples=200) for d in sizes]
    draw = draw_of(0, tuple(range(120, 40, -1)))
    real = jax.random.bernoulli(jax.random.key(3), 0.8, (4, 200))[:, draw.rows]
    # Tokens 1 to 4 of a span in which the last family is not read; 320 positions: two
    # chunks of broad families. Each family is read by three members.
    is_read = jnp.stack([jnp.roll(gates, i) for i in range(len(sizes))])
    fixed = {"deviation": 0.5, "span": 2}
    of_batch = 1, real, draw.rows, draw.noise
    batch = gather_span([*tokens[:-1], None], *of_batch, d_out=d_out, **fixed)
    kinds = [isinstance(family, AllTokens) for family in batch.tokens]
    assert kinds == [False, False, True, True, False]
    pull = jax.random.normal(jax.random.key(5), (n_members, d_out, 4, 80))

    def member(weights, i, draw):
        of_member = [*(weight[i] for weight in weights[:-1]), None]
        read = is_read[:, i]
        batch = of_member, tokens, 1, real, read, draw
        return project_span(*batch, matmul_dtype="float32", **fixed)

    def alone(weights):
        return jnp.stack([member(weights, i, draw) for i in range(n_members)])

    def shared(weights):
        products = batch.products_of(weights, is_read, "float32")
        draws = (draw._replace(spans=(batch.of_member(x),) * 3) for x in products)
        return jnp.stack([member(weights, i, x) for i, x in enumerate(draws)])

    def loss(project):
        def total(weights):
            y = jnp.where(real, project(weights), 0.0)
            return (y * pull).sum(), y

        return jax.jit(jax.grad(total, has_aux=True))(weights)

    (gradients, y), (expected, plain) = loss(shared), loss(alone)
    np.testing.assert_allclose(y, plain, atol=1e-5)
    assert np.abs(plain).max() > 1
    for f, pair in enumerate(zip(gradients, expected, strict=True)):
        np.testing.assert_allclose(*pair, atol=2e-4)
        assert np.any(pair[0]) == (f < 4)  # the last family is not read


def test_noise_factor_is_finite_for_a_dead_projection():
    weight = weight_of(WIDE).at[1].set(0.0)
    factor = noise_factor(weight)
    np.testing.assert_allclose(factor @ factor.T, weight @ weight.T, atol=1e-4)
    assert np.isfinite(factor).all() and np.isfinite(noise_factor(0 * weight)).all()


def test_gradient_equals_that_of_the_plain_product():
    weight, tokens = weight_of(WIDE), tokens_of(WIDE)
    plain = jax.grad(lambda w: jnp.sin(jnp.einsum("pd,tnd->ptn", w, tokens)).sum())
    rows = draw_of(0, tuple(range(6)))
    ours = jax.grad(lambda w: jnp.sin(run(w, tokens, OPEN, rows, 0.0)).sum())
    np.testing.assert_allclose(ours(weight), plain(weight), atol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_only_real_tokens_of_the_widest_family_are_projected(share):
    weight, tokens = weight_of(WIDEST) * 2048**-0.5, tokens_of(WIDEST, n_examples=90)
    draw = draw_of(0, tuple(range(10, 90)))  # 400 positions: several chunks
    real = jax.random.bernoulli(jax.random.key(3), share, (5, 80))
    pull = jax.random.normal(jax.random.key(2), (3, 5, 80))
    hostile = tokens.at[:, 10:].set(jnp.where(real[..., None], tokens[:, 10:], jnp.nan))

    def ours(weight):
        y = run(weight, hostile, OPEN, draw, 0.0, real)
        return (y * pull).sum(), y

    def plain(weight):
        y = jnp.einsum("pd,tnd->ptn", weight, tokens[:, draw.rows])
        y = jnp.where(real, y, 0.0)
        return (y * pull).sum(), y

    result, expected = (jax.grad(f, has_aux=True)(weight) for f in (ours, plain))
    np.testing.assert_allclose(result[0], expected[0], atol=1e-4)
    np.testing.assert_allclose(result[1], expected[1], atol=1e-5)


def test_the_accelerators_method_projects_the_widest_family_like_the_cpus():
    weight, tokens = weight_of(WIDEST) * 2048**-0.5, tokens_of(WIDEST, n_examples=90)
    at = rows_of_tokens(tokens, jnp.arange(10, 90))
    real = jax.random.bernoulli(jax.random.key(3), 0.6, (5, 80))
    dy = jax.random.normal(jax.random.key(2), (3, 5, 80))
    given = weight, tokens, at, real, OPEN
    ways = projection.project_on_accelerator, projection.project_on_cpu
    there, here = (way("float32", *given) for way in ways)
    np.testing.assert_allclose(there, here, atol=1e-5)
    ways = projection.accelerator_vjp, projection.cpu_vjp
    there, here = (way("float32", dy, *given) for way in ways)
    np.testing.assert_allclose(there, here, atol=1e-4)


def test_tokens_have_a_gradient_outside_training_whatever_their_width(shape):
    weight, tokens = weight_of(shape) * shape[1] ** -0.5, tokens_of(shape)
    real = jax.random.bernoulli(jax.random.key(9), 0.6, tokens.shape[:2])

    def total(tokens, gate):
        y = run(weight, tokens, gate, None, 0.5, real)
        return jnp.sin(jnp.where(real[None], y, 0.0)).sum()

    def plain_total(tokens):
        y = jnp.einsum("pd,tnd->ptn", weight, tokens)
        return jnp.sin(jnp.where(real[None], y, 0.0)).sum()

    result = jax.grad(total)(tokens, OPEN)
    np.testing.assert_allclose(result, jax.grad(plain_total)(tokens), atol=1e-5)
    assert not np.any(jax.grad(total)(tokens, CLOSED))


DIMS = paper_dims(hidden=1024, prob=5, resid=24, attn=40)  # one family is wide


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def rounded(x):
    """The nearest bfloat16, in float64."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_mixed_products_and_contractions_equal_those_of_rounded_operands():
    a, b, dy = normal(0, 7, 300), normal(1, 300, 9), normal(2, 7, 9)
    y, pull = jax.vjp(lambda a, b: product(a, b, "bfloat16"), a, b)
    da, db = pull(dy)
    np.testing.assert_allclose(y, rounded(a) @ rounded(b), atol=1e-4)
    np.testing.assert_allclose(da, rounded(dy) @ rounded(b).T, atol=1e-4)
    np.testing.assert_allclose(db, rounded(a).T @ rounded(dy), atol=1e-4)
    assert np.abs(y - a @ b).max() > 1e-2
    np.testing.assert_allclose(contract(a, b.T, 1, "bfloat16"), y, atol=1e-4)
    with pytest.raises(ValueError, match="expected float32 or bfloat16"):
        EncoderConfig(matmul_dtype="float16")


@pytest.mark.parametrize("matmul_dtype", ["float32", "bfloat16"])
def test_products_are_summed_in_float32(matmul_dtype):
    ones = jnp.ones((1, 4097))
    assert product(ones, ones.T, matmul_dtype)[0, 0] == 4097.0
    assert contract(ones, ones, 1, matmul_dtype)[0, 0] == 4097.0


def loss_and_gradient(matmul_dtype):
    """Return a compiled function of a family mask."""
    sizes = {"projection": 8, "hidden": 16, "n_blocks": 1, "n_groups": 2}
    encoder = Encoder(EncoderConfig(**sizes, matmul_dtype=matmul_dtype), DIMS)
    n_tokens, n = 9, 12
    tokens = tuple(normal(i, n_tokens, n, d) for i, d in enumerate(DIMS.sizes))
    masks = (jnp.ones((5, n), bool), jnp.ones((4, n), bool))
    features = FamilyTokens(tokens, masks)
    draw = Draw(jnp.arange(n), jax.random.key(2), jax.random.key(3))

    def loss(params, family_mask):
        logits, _ = encoder.apply(params, features, family_mask, draw)
        return jnp.square(logits - 1.0).mean()

    @jax.jit
    def at_start(family_mask):
        params = encoder.init(jax.random.key(1), features, family_mask)
        return jax.value_and_grad(loss)(params, family_mask)

    return at_start


def test_mixed_precision_has_nearly_the_loss_and_gradient_of_float32():
    whole, mixed = map(loss_and_gradient, ("float32", "bfloat16"))
    for read in ("HPRA", "P"):
        mask = jnp.array([letter in read for letter in "HPRA"])
        (loss, gradient), (mixed_loss, other) = whole(mask), mixed(mask)
        assert 0 < abs(mixed_loss - loss) < 0.02 * loss
        first, other = (ravel_pytree(x)[0] for x in (gradient, other))
        assert other.dtype == jnp.float32
        error = jnp.linalg.norm(other - first) / jnp.linalg.norm(first)
        assert 0 < error < 0.04  # measured: 0.025 and 0.023


KEY = jax.random.key(7)


def test_hashed_draws_are_uniform_or_normal_and_streams_are_uncorrelated():
    bits = np.asarray(hashed_bits(KEY, 0, (100, 400)))
    unit = bits / 2**32
    assert unit.mean() == pytest.approx(0.5, abs=0.01)
    assert unit.var() == pytest.approx(1 / 12, rel=0.02)
    other = np.asarray(hashed_bits(KEY, 1, (100, 400))) / 2**32
    assert abs(np.corrcoef(unit.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(unit.ravel()[:-1], unit.ravel()[1:])[0, 1]) < 0.02
    normal = np.asarray(hashed_normal(KEY, 2, (100, 400)))
    assert normal.mean() == pytest.approx(0, abs=0.02)
    assert normal.var() == pytest.approx(1, rel=0.03)


def test_dropout_keeps_the_mean_and_is_off_outside_training():
    x = jnp.ones((200, 100))
    y = dropout(x, 0.3, KEY, 0)
    assert float((y == 0).mean()) == pytest.approx(0.3, abs=0.01)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_array_equal(dropout(x, 0.3, None, 0), x)


def test_hashed_draws_of_consecutive_steps_are_uniform_and_uncorrelated():
    keys = jax.random.split(KEY, 2000)
    draws = jax.vmap(lambda key: hashed_bits(key, 0, (64,)))(keys)
    steps = np.asarray(draws) / 2**32
    assert kstest(steps.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(steps[:-1].ravel(), steps[1:].ravel())[0, 1]) < 0.02


def test_members_of_a_seed_share_the_key_of_batches_and_no_other():
    def numbers(subset, seed):
        keys = member_keys(seed_keys(0, (seed,))[0], subset)
        return [tuple(jax.random.key_data(key).tolist()) for key in keys]

    keys = {(k, seed): numbers(k, seed) for k in (0, 3) for seed in (0, 1)}
    assert keys[0, 0][0] == keys[3, 0][0] != keys[0, 1][0]
    assert len({key for item in keys.values() for key in item[1:]}) == 8


def blas_threads():
    libraries = threadpool_info()
    return {x["num_threads"] for x in libraries if x["user_api"] == "blas"}


def test_linear_algebra_uses_one_thread_once_training_asks_for_it():
    with threadpool_limits(2, user_api="blas"):  # restores the former number
        assert blas_threads() == {2}
        use_one_blas_thread()
        assert blas_threads() == {1}
