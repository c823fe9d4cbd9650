import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.encoder import (
    Encoder,
    convolve_on_accelerator,
    token_convolution,
)
from beatrice.jaxprobe.families import (
    N_SUBSETS,
    SUBSET_NAMES,
    SUBSETS,
    Features,
    paper_dims,
    subset_index,
)
from beatrice.jaxprobe.fusion import FusionHead, head_inputs
from beatrice.jaxprobe.projection import Draw
from beatrice.jaxprobe.tokens import FamilyTokens, split_families
from tests.jaxprobe.samples import assert_same_leaves, identity_of, ragged_features

DIMS = paper_dims(hidden=6, prob=5, resid=4, attn=3)
CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)


def random_features():
    return ragged_features("closed_book", DIMS, n=6)


def plain(features, dims=DIMS):
    return split_families(features, dims, identity_of(dims))


ENCODER = Encoder(CONFIG, DIMS)
INIT = jax.jit(ENCODER.init)


def weights(name):
    """Initial weights, all shifted so that biases and scales take part too."""
    mask = jnp.asarray(SUBSETS[subset_index(name)])
    families = plain(random_features())
    return jax.tree.map(lambda x: x + 0.02, INIT(jax.random.key(3), families, mask))


def test_all_fifteen_subsets_have_names():
    assert SUBSETS.shape == (15, 4) and SUBSETS.any(axis=1).all()
    assert len(set(SUBSET_NAMES)) == N_SUBSETS
    assert SUBSET_NAMES[:3] == ("H", "P", "HP") and SUBSET_NAMES[-1] == "HPRA"
    assert [subset_index(name) for name in SUBSET_NAMES] == list(range(15))
    with pytest.raises(ValueError, match="unknown subset"):
        subset_index("HX")


def test_empty_spans_give_finite_scores_and_gradients():
    features = random_features()
    masks = (np.zeros_like(features.masks[0]), features.masks[1])
    families = plain(Features(features.tokens, masks))
    mask = jnp.asarray(SUBSETS[14])

    def total(params):
        return ENCODER.apply(params, families, mask)[0].sum()

    value, grads = jax.jit(jax.value_and_grad(total))(weights("HPRA"))
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("spans", ["answer", "all"])
def test_a_span_whose_states_are_not_read_gets_no_noise_in_training(spans):
    dims = dataclasses.replace(DIMS, spans=(spans, *DIMS.spans[1:]))
    config = dataclasses.replace(CONFIG, dropout=0.0, input_noise=1.0)
    encoder = Encoder(config, dims)
    features = random_features()
    no_answer = (features.masks[0], np.zeros_like(features.masks[1]))
    families = plain(Features(features.tokens, no_answer), dims)
    mask, everyone = jnp.asarray(SUBSETS[subset_index("H")]), jnp.arange(6)

    def logits(draw):
        return jax.jit(encoder.apply)(weights("H"), families, mask, draw)[0]

    draw = Draw(everyone, jax.random.key(1), jax.random.key(2))
    # With "all", the question's states and their noise are read; otherwise nothing is.
    assert np.allclose(logits(draw), logits(None), atol=1e-6) == (spans == "answer")


def test_initial_weights_are_scaled_by_the_fan_in_of_the_families_read():
    config = EncoderConfig(projection=64, hidden=64, n_blocks=1)
    families, encoder = plain(random_features()), Encoder(config, DIMS)
    init = jax.jit(lambda mask: encoder.init(jax.random.key(0), families, mask))
    whole = init(jnp.ones(4, bool))["params"]
    for name, n_read in (("H", 1), ("HA", 2), ("HPRA", 4)):
        mask = SUBSETS[subset_index(name)]
        params = init(jnp.asarray(mask))["params"]
        kernel = params["span_0"].pop("entry_kernel")
        read = np.repeat(mask, 64)
        assert np.all(kernel[:, ~read] == 0)
        # The fan-in counts what is read; the draws are the same for every subset.
        expected = whole["span_0"]["entry_kernel"] * (4 / n_read) ** 0.5
        np.testing.assert_allclose(kernel[:, read], expected[:, read], rtol=1e-5)
        assert np.std(kernel[:, read]) == pytest.approx((64 * n_read) ** -0.5, rel=0.05)
        for f, size in enumerate(DIMS.sizes):
            deviation = np.std(params[f"projection_{f}"])
            assert deviation == pytest.approx(size**-0.5, rel=0.2)
        conv = params["span_0"]["conv_0_0"]["kernel"]
        assert np.std(conv) == pytest.approx((3 * 64) ** -0.5, rel=0.05)


@pytest.mark.parametrize("n_tokens", [1, 8, 9])  # full windows, or not
@pytest.mark.parametrize("where", ["here", "on an accelerator"])
def test_token_convolution_and_its_gradient_equal_those_of_jax(where, n_tokens):
    x = jax.random.normal(jax.random.key(0), (3, n_tokens, 5))
    kernel = jax.random.normal(jax.random.key(1), (4, 3, 3))

    def reference(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), [(1, 1)], dimension_numbers=("CWN", "OWI", "CWN")
        )

    def ours(x, kernel):
        if where == "on an accelerator":
            return convolve_on_accelerator("float32", x, kernel)
        return token_convolution(x, kernel, jnp.array(True), "float32")

    def total(f):
        return lambda *operands: jnp.sin(f(*operands)).sum()

    np.testing.assert_allclose(ours(x, kernel), reference(x, kernel), atol=1e-5)
    grads = (jax.grad(total(f), argnums=(0, 1)) for f in (ours, reference))
    assert_same_leaves(*(jax.jit(f)(x, kernel) for f in grads), atol=1e-5)


def count(name, n_spans, dims):
    """The number of parameters of an encoder, without those of families not read."""
    encoder, mask = Encoder(EncoderConfig(), dims), SUBSETS[subset_index(name)]
    tokens = tuple(jnp.zeros((3 * n_spans, 1, size)) for size in dims.sizes)
    features = FamilyTokens(tokens, (jnp.ones((3, 1), bool),) * n_spans)
    inputs = jax.random.key(0), features, jnp.asarray(mask)
    shapes = jax.eval_shape(encoder.init, *inputs)
    total = sum(x.size for x in jax.tree.leaves(shapes))
    d = EncoderConfig().projection
    for f in np.flatnonzero(~mask):
        total -= dims.sizes[f] * d + d + n_spans * d * EncoderConfig().hidden
    return total


def test_champions_have_the_sizes_of_the_paper():
    closed = paper_dims(hidden=4096, prob=5, resid=128, attn=512)
    outputs = head_inputs(jnp.zeros((3, 1, 256)), jnp.zeros((3, 1)))
    inputs = jax.random.key(0), outputs, jnp.arange(3), jnp.ones(3, bool)
    shapes = jax.eval_shape(FusionHead(FusionConfig(n_slots=3)).init, *inputs)
    n_head = sum(x.size for x in jax.tree.leaves(shapes))
    closed_book = n_head + sum(count(s, 2, closed) for s in ("HR", "HPA", "HA"))
    context = n_head + count("HPA", 3, closed) + count("HPR", 3, closed)
    with_context = context + count("HA", 2, closed)
    assert closed_book == pytest.approx(3.1e6, rel=0.04)
    assert with_context == pytest.approx(4.1e6, rel=0.04)
