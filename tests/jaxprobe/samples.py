"""Made-up rows, stores, features and detectors that many tests share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.store import create_store, write_range
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.config import FusionConfig
from beatrice.jaxprobe.detector import Detector, EncoderBank, SettingHead
from beatrice.jaxprobe.encoder import COLLECTION, Encoder, apply_module
from beatrice.jaxprobe.families import SPANS, SUBSET_NAMES, Features, Standardizer
from beatrice.jaxprobe.fusion import FusionHead, PoolOutputs, head_inputs, slots_of
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.scope import Evidence, Scope, Validation
from beatrice.jaxprobe.tokens import split_families


def rows_like(labels, setting="closed_book", **fields):
    """Labelled training rows of one set, one per question; `fields` override these."""
    n = len(labels)
    rows = {
        "ids": [f"q{i}" for i in range(n)],
        "datasets": ["world"] * n,
        "splits": ["train"] * n,
        "variants": ["original"] * n,
        "labels": labels,
        "is_labelled": [True] * n,
    }
    arrays = {name: np.asarray(values) for name, values in (rows | fields).items()}
    return StoreRows(setting=setting, **arrays)


def rows_of(labels, setting="closed_book", splits=None):
    """Labelled rows of one set; by default a third in each split, train rows first."""
    if splits is None:
        thirds = np.array(["train", "validation", "test"])
        splits = thirds[np.arange(len(labels)) * 3 // len(labels)]
    return rows_like(np.asarray(labels, bool), setting, splits=splits)


def store_like(url, families, spans, values=None, **fields):
    """A store in memory; by default one range, with normal signals of all tokens.

    `spans` are `[n_examples, 3, 2]`, the answer last.
    """
    spans = np.asarray(spans, np.int64)
    fixed = {
        "keys": tuple((f"q{i}", "closed_book", "original") for i in range(len(spans))),
        "lengths": spans[:, 2, 1],
        "rows_per_shard": 1 << 11,
        "hidden_layers": (),
        "fingerprint": {},
    }
    spec = StoreSpec(families=families, spans=spans, **(fixed | fields))
    store, rng = create_store(url, spec), np.random.default_rng(len(spans))
    if values is None:
        values = {
            name: rng.standard_normal(
                (spec.family_offsets(name)[-1], *family.shape), np.float32
            )
            for name, family in families.items()
        }
    for range_id in range(spec.n_ranges):
        rows = {name: slice(*spec.range_rows(range_id, name)) for name in values}
        write_range(store, range_id, {name: values[name][rows[name]] for name in rows})
    return store


def wide_scope(total):
    """A scope of four families, so wide that no signal lies outside it."""
    ends = np.full((2, total), 1e30, np.float32)
    return Scope(-ends[0], ends[1], np.ones(4, np.float32))


# For heads whose training does not matter: enough answers, right and wrong at all P.
KNOWN = {
    "evidence": Evidence(train=(60, 60), validation=(50, 50), auroc=(0.6, 0.8)),
    "validation": Validation(np.linspace(0, 1, 100), np.arange(100) % 2 == 0),
}


def assert_same_leaves(left, right, **tolerance):
    """Check that two trees have the same arrays; without a tolerance, bit by bit."""
    check = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    jax.tree.map(lambda a, b: check(a, b, **tolerance), left, right)


def identity_of(dims):
    """A standardizer that changes nothing."""
    return Standardizer(
        np.zeros(dims.total, np.float32), np.ones(dims.total, np.float32)
    )


N_SEEDS = 2


def random_codes(n_examples, seed, knowing=(1, 4)):
    """Outputs of six encoders; those in `knowing` see the label, each with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n_examples) < 0.5
    logits = rng.standard_normal((N_SEEDS, 6, n_examples))
    for k in knowing:
        logits[:, k] = 1.5 * labels + rng.standard_normal(n_examples)
    pooled = np.repeat(logits[..., None], 4, axis=-1) * 0.3
    arrays = (jnp.asarray(x, jnp.float32) for x in (pooled, logits, labels))
    pooled, logits, labels = arrays
    rows = labels, jnp.ones(n_examples), jnp.arange(n_examples)
    return PoolOutputs(head_inputs(pooled, logits), *rows)


def ragged_features(setting, dims, n=7, seed=0):
    """Features of uneven lengths; one has an empty first span, one an empty answer."""
    rng, tokens, masks = np.random.default_rng(seed), [], []
    for span, width in enumerate((9, 6, 4)[-len(SPANS[setting]) :]):
        lengths = rng.integers(1, width + 1, n)
        lengths[0] = 0 if span == 0 else lengths[0]
        lengths[1] = 0 if span == len(SPANS[setting]) - 1 else lengths[1]
        tokens.append(rng.normal(1, 3, (n, width, dims.total)).astype(np.float32))
        masks.append(np.arange(width) < lengths[:, None])
    return Features(tuple(tokens), tuple(masks))


def random_stack(shapes, rng, *n):
    """Random weights `[*n, *shape]`, none of them zero, so that each one counts."""
    return jax.tree.map(
        lambda x: rng.normal(0, 0.5, (*n, *x.shape)).astype(np.float32), shapes
    )


def random_bank(setting, dims, config, seed):
    """Random encoders of all subsets, with two seeds."""
    rng = np.random.default_rng(seed)
    standardizer = Standardizer(
        rng.normal(1, 1, dims.total).astype(np.float32),
        rng.uniform(1, 3, dims.total).astype(np.float32),
    )
    families = split_families(ragged_features(setting, dims), dims, standardizer)
    encoder = Encoder(config, dims)
    shapes = jax.eval_shape(
        encoder.init, jax.random.key(0), families, jnp.ones(dims.n_families, bool)
    )
    names, n_parts = SUBSET_NAMES, 2 + len(SPANS[setting])
    params = dict(random_stack(shapes, rng, N_SEEDS, len(names)))
    for row, reads in enumerate(dims.subset_masks):
        for span in range(len(SPANS[setting])):  # unread weights are 0 after training
            kernel = params["params"][f"span_{span}"]["entry_kernel"]
            kernel[:, row] *= np.repeat(reads, config.projection)
    if config.is_linear_first:
        linear = {
            f"kernel_{f}": rng.normal(0, 0.05, (N_SEEDS, len(names), n_parts * size))
            for f, size in enumerate(dims.sizes)
        }
        linear["bias"] = rng.normal(size=(N_SEEDS, len(names)))
        params[COLLECTION] = {k: x.astype(np.float32) for k, x in linear.items()}
    return EncoderBank(
        dims=dims,
        config=config,
        names=names,
        spans=SPANS[setting],
        standardizer=standardizer,
        params=params,
        lengths=(64,) * len(SPANS[setting]),
        scope=wide_scope(dims.total),
    )


def random_head(reads, n_slots, config, is_mean=False):
    """A random head of two seeds that reads the encoders in `reads`."""
    rng = np.random.default_rng(7)
    fusion = FusionConfig(hidden=8, n_slots=n_slots)
    shapes = jax.eval_shape(
        FusionHead(fusion).init,
        jax.random.key(0),
        head_inputs(jnp.zeros((n_slots, 1, config.d_pooled)), jnp.zeros((n_slots, 1))),
        jnp.arange(n_slots),
        jnp.arange(n_slots) < len(reads),
    )
    params = random_stack(shapes, rng, N_SEEDS)
    if is_mean:
        for name in ("out_kernel", "out_bias"):
            params["params"][name] *= 0
    rising = Calibrator(name="isotonic", scores=(0.0, 1.0), p_correct=(0.05, 0.95))
    fixed = {"config": fusion, "params": params, "calibrator": rising}
    return SettingHead(reads=reads, **fixed, **KNOWN)


def random_detector(dims, config, reads, n_slots, is_mean=False):
    """A random detector of two passes with heads for `reads`; `dims` are by pass."""
    return Detector(
        banks={s: random_bank(s, dims[s], config, i) for i, s in enumerate(SPANS)},
        heads={
            setting: random_head(pairs, n_slots, config, is_mean)
            for setting, pairs in reads.items()
        },
    )


@partial(jax.jit, static_argnames="encoder")
def _encode(params, families, masks, *, encoder):
    apply = partial(apply_module, encoder)
    of_seed = jax.vmap(apply, in_axes=(0, None, 0))
    return jax.vmap(of_seed, in_axes=(0, None, None))(params, families, masks)


@partial(jax.jit, static_argnames="head")
def _fuse(params, inputs, slots, mask, *, head):
    apply = partial(apply_module, head)
    return jax.vmap(apply, in_axes=(0, 0, None, None))(params, inputs, slots, mask)


def score_as_trained(detector, branch, passes):
    """A head's scores by the JAX modules, which `TorchForward` reimplements."""

    def encode(where, features):
        bank = detector.banks[where]
        masks = bank.dims.subset_masks[list(map(bank.dims.subset_index, bank.names))]
        families = split_families(features, bank.dims, bank.standardizer)
        encoder = Encoder(bank.config, bank.dims)
        return _encode(bank.params, families, jnp.asarray(masks), encoder=encoder)

    def fuse(head, logits, pooled):
        logits, pooled = (jnp.stack(x, axis=1) for x in (logits, pooled))
        slots = slots_of(tuple(range(logits.shape[1])), head.config.n_slots)
        inputs = head_inputs(pooled, logits), *slots
        fused = _fuse(head.params, *inputs, head=FusionHead(head.config))
        means = (jax.nn.sigmoid(x).mean(0) for x in (fused, logits))
        raw, encoders = (np.asarray(x, np.float64) for x in means)
        return raw, encoders.T

    return detector.score(branch, passes, encode, fuse)
