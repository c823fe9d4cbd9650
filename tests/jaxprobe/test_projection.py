import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.jaxprobe.kernels import projection
from beatrice.jaxprobe.kernels.projection import Draw, noise_factor, project

WIDE, NARROW = (3, 7), (7, 3)  # [d_projection, d_family]: noise behind, noise before
WIDEST = (3, 2048)  # a few tokens at a time
OPEN, CLOSED = jnp.array(True), jnp.array(False)


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


@pytest.mark.parametrize("shape", [WIDE, NARROW, WIDEST])
def test_without_noise_it_is_the_product_of_the_rows_drawn(shape):
    weight, tokens = weight_of(shape) * shape[1] ** -0.5, tokens_of(shape)
    expected = jnp.einsum("pd,tnd->ptn", weight, tokens)
    whole = run(weight, tokens, OPEN, None, 0.5)
    batch = run(weight, tokens, OPEN, draw_of(0), 0.0)
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    np.testing.assert_allclose(batch, expected[:, :, [4, 0, 2]], atol=1e-5)


@pytest.mark.parametrize("shape", [WIDE, NARROW, WIDEST])
def test_a_closed_gate_gives_zeros_and_no_gradient(shape):
    weight, tokens = weight_of(shape), tokens_of(shape)

    def total(weight, gate):
        return jnp.sin(run(weight, tokens, gate, draw_of(0), 0.5)).sum()

    assert not np.any(run(weight, tokens, CLOSED, draw_of(0), 0.5))
    assert not np.any(jax.grad(total)(weight, CLOSED))
    assert np.any(jax.grad(total)(weight, OPEN))


@pytest.mark.parametrize("shape", [WIDE, NARROW, WIDEST])
def test_gates_under_vmap_are_the_same_as_alone(shape):
    weight, tokens = weight_of(shape), tokens_of(shape)

    def total(gate):
        return run(weight, tokens, gate, draw_of(0), 0.5)

    both = jax.vmap(total)(jnp.array([True, False]))
    np.testing.assert_allclose(both[0], total(OPEN), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(both[1], total(CLOSED))


@pytest.mark.parametrize("shape", [WIDE, NARROW, WIDEST])
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


@pytest.mark.parametrize("shape", [WIDE, NARROW, WIDEST])
def test_expected_gradient_is_that_of_noise_on_the_inputs(shape):
    weight = weight_of(shape)
    tokens = jnp.zeros((1, 20_000, shape[1]))
    rows = jnp.arange(20_000)

    def loss(weight):
        noisy = run(weight, tokens, OPEN, draw_of(3, rows), 0.5)
        return jnp.square(noisy).sum() / 20_000

    # The mean of |Wn|^2 is 0.25 tr(WW'), whose gradient is 0.5 W.
    got = jax.grad(loss)(weight)
    np.testing.assert_allclose(got, 0.5 * weight, atol=0.05 * np.abs(weight).max())


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


def masked_product(weight, tokens, real, rows):
    y = jnp.einsum("pd,tnd->ptn", weight, tokens[:, rows])
    return jnp.where(real, y, 0.0)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_of_the_widest_family_real_tokens_alone_are_projected(share):
    weight, tokens = weight_of(WIDEST) * 2048**-0.5, tokens_of(WIDEST, n_examples=90)
    draw = draw_of(0, tuple(range(10, 90)))  # 400 positions: several chunks
    real = jax.random.bernoulli(jax.random.key(3), share, (5, 80))
    pull = jax.random.normal(jax.random.key(2), (3, 5, 80))
    hostile = tokens.at[:, 10:].set(jnp.where(real[..., None], tokens[:, 10:], jnp.nan))

    def ours(weight):
        y = run(weight, hostile, OPEN, draw, 0.0, real)
        return (y * pull).sum(), y

    def plain(weight):
        y = masked_product(weight, tokens, real, draw.rows)
        return (y * pull).sum(), y

    found, expected = (jax.grad(f, has_aux=True)(weight) for f in (ours, plain))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


def test_an_accelerator_projects_the_widest_family_to_the_same():
    weight, tokens = weight_of(WIDEST) * 2048**-0.5, tokens_of(WIDEST, n_examples=90)
    rows = jnp.arange(10, 90)
    real = jax.random.bernoulli(jax.random.key(3), 0.6, (5, 80))
    dy = jax.random.normal(jax.random.key(2), (3, 5, 80))
    given = weight, tokens, rows, real, OPEN
    there, here = (
        way("float32", *given)
        for way in (projection.project_on_accelerator, projection.project_on_cpu)
    )
    np.testing.assert_allclose(there, here, atol=1e-5)
    ways = projection.accelerator_vjp, projection.cpu_vjp
    there, here = (way("float32", dy, *given) for way in ways)
    np.testing.assert_allclose(there, here, atol=1e-4)


@pytest.mark.parametrize("shape", [WIDE, NARROW, WIDEST])
def test_outside_training_tokens_have_a_gradient_whatever_their_width(shape):
    weight, tokens = weight_of(shape) * shape[1] ** -0.5, tokens_of(shape)
    real = jax.random.bernoulli(jax.random.key(9), 0.6, tokens.shape[:2])

    def total(tokens, gate):
        y = run(weight, tokens, gate, None, 0.5, real)
        return jnp.sin(jnp.where(real[None], y, 0.0)).sum()

    def plainly(tokens):
        y = jnp.einsum("pd,tnd->ptn", weight, tokens)
        return jnp.sin(jnp.where(real[None], y, 0.0)).sum()

    found = jax.grad(total)(tokens, OPEN)
    np.testing.assert_allclose(found, jax.grad(plainly)(tokens), atol=1e-5)
    assert not np.any(jax.grad(total)(tokens, CLOSED))
