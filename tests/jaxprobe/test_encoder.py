import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.encoder import Encoder, token_convolution
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
from tests.jaxprobe.samples import assert_same_leaves, identity_of

DIMS = paper_dims(hidden=6, prob=5, resid=4, attn=3)
CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)
LENGTHS = (7, 5, 4)


def random_features(n_examples=6, n_spans=2, seed=0):
    """Random tokens with ragged masks, behind which is garbage."""
    rng = np.random.default_rng(seed)
    tokens, masks = [], []
    for length in LENGTHS[-n_spans:]:
        real = rng.integers(1, length + 1, n_examples)
        x = rng.standard_normal((n_examples, length, DIMS.total)).astype(np.float32)
        tokens.append(np.pad(x, ((0, 0), (0, 2), (0, 0)), constant_values=9.0))
        masks.append(np.arange(length + 2)[None] < real[:, None])
    return Features(tuple(tokens), tuple(masks))


def plain(features, dims=DIMS):
    return split_families(features, dims, identity_of(dims))


ENCODER = Encoder(CONFIG, DIMS)
APPLY = jax.jit(ENCODER.apply)
INIT = jax.jit(ENCODER.init)


def weights(name, n_spans=2):
    """Initial weights with biases and scales moved, so that they take part."""
    mask = jnp.asarray(SUBSETS[subset_index(name)])
    families = plain(random_features(n_spans=n_spans))
    return jax.tree.map(lambda x: x + 0.02, INIT(jax.random.key(3), families, mask))


def run(name, features):
    mask = jnp.asarray(SUBSETS[subset_index(name)])
    return APPLY(weights(name, features.n_spans), plain(features), mask)


def test_subsets_are_all_fifteen_and_named():
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
        return encoder.apply(weights("H"), families, mask, draw)[0]

    draw = Draw(everyone, jax.random.key(1), jax.random.key(2))
    # Nothing is left to be read but, with "all", the question's states and their noise.
    assert np.allclose(logits(draw), logits(None), atol=1e-6) == (spans == "answer")


def naive(params, features, families):
    """A stand-alone encoder of some families, in NumPy, one example and span."""
    p = jax.tree.map(np.asarray, params)["params"]
    gelu = lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))  # noqa: E731

    def group_norm(x, weights):
        groups = x.reshape(len(x), CONFIG.n_groups, -1)
        mean = groups.mean(axis=(0, 2), keepdims=True)
        std = np.sqrt(groups.var(axis=(0, 2), keepdims=True) + 1e-5)
        scaled = ((groups - mean) / std).reshape(x.shape) * weights["scale"]
        return scaled + weights["bias"]

    def conv(x, weights):
        wide = np.pad(x, ((1, 1), (0, 0)))
        taps = (wide[k : k + len(x)] @ weights["kernel"][:, k].T for k in range(3))
        return sum(taps) + weights["bias"]

    def span_vector(x, cnn):
        d = CONFIG.projection
        h = cnn["entry_bias"]
        for f in families:
            projected = x[:, DIMS.slices[f]] @ p[f"projection_{f}"].T
            projected = projected + p["projection_bias"][f]
            h = h + projected @ cnn["entry_kernel"][:, f * d : (f + 1) * d].T
        for b in range(CONFIG.n_blocks):
            y = gelu(group_norm(conv(h, cnn[f"conv_{b}_0"]), cnn[f"norm_{b}_0"]))
            y = group_norm(conv(y, cnn[f"conv_{b}_1"]), cnn[f"norm_{b}_1"])
            h = gelu(h + y)
        return np.concatenate([h.max(axis=0), h.mean(axis=0)])

    logits = []
    for i in range(features.n_examples):
        vectors = [
            span_vector(features.tokens[s][i][features.masks[s][i]], p[f"span_{s}"])
            for s in range(features.n_spans)
        ]
        pairs = [a - b for a, b in itertools.combinations(vectors, 2)]
        x = p["mlp_in"]["kernel"] @ np.concatenate(vectors + pairs)
        x = x + p["mlp_in"]["bias"]
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
        x = gelu(x * p["mlp_norm"]["scale"] + p["mlp_norm"]["bias"])
        logits.append(p["mlp_out"]["kernel"][0] @ x + p["mlp_out"]["bias"][0])
    return np.asarray(logits)


@pytest.mark.parametrize(("name", "n_spans"), [("P", 2), ("HRA", 3), ("HPRA", 3)])
def test_masked_encoder_equals_a_stand_alone_one(name, n_spans):
    features = random_features(n_spans=n_spans)
    got, _ = run(name, features)
    families = np.flatnonzero(SUBSETS[subset_index(name)])
    expected = naive(weights(name, n_spans), features, families)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)  # float32 sums


def test_initial_weights_are_those_of_an_encoder_of_the_subset_alone():
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


def test_token_convolution_equals_jax_and_so_does_its_gradient():
    x = jax.random.normal(jax.random.key(0), (3, 9, 5))
    kernel = jax.random.normal(jax.random.key(1), (4, 3, 3))

    def reference(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), [(1, 1)], dimension_numbers=("CWN", "OWI", "CWN")
        )

    def ours(x, kernel):
        return token_convolution(x, kernel, jnp.array(True), "float32")

    def total(f):
        return lambda *operands: jnp.sin(f(*operands)).sum()

    np.testing.assert_allclose(ours(x, kernel), reference(x, kernel), atol=1e-5)
    grads = (jax.grad(total(f), argnums=(0, 1))(x, kernel) for f in (ours, reference))
    assert_same_leaves(*grads, atol=1e-5)


def count(name, n_spans, dims):
    """Parameters of an encoder, counting only the families that it reads."""
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
