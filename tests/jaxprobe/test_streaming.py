"""Rows read group by group, and tokens kept in stored precision, train the same."""

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.extract.store.spec import Family, encode, numpy_dtype
from beatrice.jaxprobe.config import (
    EncoderConfig,
    GridConfig,
    StreamConfig,
    TrainConfig,
)
from beatrice.jaxprobe.encoder import Encoder, pooled_signals
from beatrice.jaxprobe.families import paper_dims, subset_index
from beatrice.jaxprobe.grid import Block, fit_blocks, labelled, member_outputs
from beatrice.jaxprobe.rows import training_set
from beatrice.jaxprobe.stored import StoredTokens, take_rows, values_of, words_of
from beatrice.jaxprobe.tokens import FamilyTokens, empty_span, split_families, zero_span
from beatrice.jaxprobe.train import (
    Streamed,
    check_plan,
    epoch_groups,
    fit_streamed,
    prefetched,
    train_encoders,
    train_regression,
)
from tests.jaxprobe.samples import (
    assert_same_leaves,
    identity_of,
    rows_of,
    store_like,
)
from tests.jaxprobe.test_grid import DIMS, ENCODER, planted

LONGER = TrainConfig(learning_rate=1e-2, batch_size=16, max_epochs=3, patience=3)
IDENTITY = identity_of(DIMS)


def streamed(features, labels, config, counted=None):
    def read(at, weights):
        if counted is not None:
            counted.append(at)
        tokens = split_families(features.take(at), DIMS, IDENTITY)
        return labelled(tokens, labels[at], weights)

    return Streamed(n_rows=features.n_examples, read=read, config=config)


@pytest.mark.parametrize(
    ("n", "n_chunk", "n_mixed"), [(96, 8, 4), (101, 8, 4), (5, 64, 2)]
)
def test_an_epoch_has_every_example_once_in_groups_of_one_length(n, n_chunk, n_mixed):
    config = StreamConfig(n_chunk=n_chunk, n_mixed=n_mixed)
    groups = epoch_groups(n, config, (0, 1))
    real = np.concatenate([group.where[group.is_real] for group in groups])
    assert sorted(real.tolist()) == list(range(n))
    lengths = {len(group.where) for group in groups}
    assert len(lengths) == 1 and lengths.pop() <= n_chunk * n_mixed
    pairs = zip(groups, epoch_groups(n, config, (0, 2)), strict=True)
    moved = any(not np.array_equal(a.where, b.where) for a, b in pairs)
    assert moved == (n > n_chunk)


def test_only_the_next_item_is_read_while_one_is_used():
    begun = [threading.Event() for _ in range(4)]

    def read(i):
        begun[i].set()
        return i

    for i in prefetched(read, range(4)):
        if i < 3:
            assert begun[i + 1].wait(timeout=60)
        if i < 2:
            assert not begun[i + 2].wait(timeout=0.2)


def test_an_error_while_reading_ahead_is_raised():
    def read(i):
        if i == 1:
            raise ValueError("range 7 is damaged")
        return i

    items = prefetched(read, range(3))
    assert next(items) == 0
    with pytest.raises(ValueError, match="range 7"):
        next(items)


def test_a_store_streamed_in_one_group_trains_like_rows_held_in_memory():
    rows, families = rows_of(np.arange(144) % 3 == 0), {"a": Family(shape=(6,))}
    families["b"] = Family(shape=(4,))
    rng = np.random.default_rng(0)
    moved = np.repeat(rows.labels, 5)[:, None] * np.float32(0.5)
    values = {
        name: rng.standard_normal((720, *family.shape), np.float32) + moved
        for name, family in families.items()
    }
    spans = [[(0, 0), (0, 2), (2, 5)]] * 144
    store = store_like("memory://streamed/", families, spans, values)
    encoder = EncoderConfig(
        projection=4, hidden=8, n_blocks=1, n_groups=2, is_linear_first=True
    )
    protocol = dataclasses.replace(LONGER, n_seeds=2)
    results = []
    for stream in (None, StreamConfig(n_chunk=16, n_mixed=4)):
        is_streamed = stream is not None
        data = training_set(store, rows, layer=None, n_batch=16, streamed=is_streamed)
        config = GridConfig(encoder=encoder, train=protocol, stream=stream)
        results.append(train_encoders(data, config))
    (trained, outputs), (resident, expected) = results
    assert trained.members == resident.members and len(trained.members) == 6
    np.testing.assert_allclose(*(x.info.train_loss for x in (trained, resident)), 1e-5)
    aurocs = [x.info.valid_auroc for x in (trained, resident)]
    np.testing.assert_allclose(*aurocs, atol=1e-6)
    assert_same_leaves(trained.params, resident.params, rtol=1e-3, atol=1e-5)
    assert_same_leaves(outputs, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def read_many():
    """Reads 12288 rows; the 4096 for training are four times those encoded together."""
    rows, spans = rows_of(np.arange(12288) % 3 == 0), [[(0, 0), (0, 1), (1, 2)]] * 12288
    store = store_like("memory://many/", {"a": Family(shape=(32,))}, spans)
    return partial(training_set, store, rows, layer=None, n_batch=16)


def test_a_streamed_regression_equals_one_of_held_rows_and_holds_two_batches(read_many):
    data, alive, n_alive = read_many(streamed=True), [], []

    def read(where, *widths):
        tokens = data.read(where, *widths)
        alive.append(weakref.ref(tokens.tokens[0]))
        n_alive.append(sum(batch() is not None for batch in alive))
        return tokens

    counted = dataclasses.replace(data, read=read, read_train=read)
    (trained, outputs), (other, expected) = map(
        train_regression, (counted, read_many())
    )
    assert len(n_alive) == 4 + 1 + 12 and max(n_alive) <= 2  # one to read the widths
    assert_same_leaves(trained.params, other.params, rtol=1e-4, atol=1e-6)
    assert_same_leaves(outputs, expected, rtol=1e-4, atol=1e-5)


def test_held_rows_are_standardised_a_few_at_a_time(read_many):
    streamed = read_many(streamed=True)
    tracemalloc.start()
    held = read_many()
    n_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_same_leaves(held.standardizer, streamed.standardizer)
    # The peak is 2.6 times the stored training rows, of which 2 are copies for the
    # device; it was 6.6 times when they were standardised all at once.
    assert n_bytes < 4 * (4096 * 2 * 32 * 4)


def test_rows_are_read_into_one_array_a_part_at_a_time(read_many):
    data, n_stored = read_many(streamed=True), 12288 * 2 * 32 * 4
    tracemalloc.start()
    rows = data.read(np.arange(12288))
    n_bytes = tracemalloc.get_traced_memory()[1]
    jax.block_until_ready(rows)
    gc.collect()  # JAX then lets go of what it has copied
    n_held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    parts = [data.read(part) for part in np.split(np.arange(12288), 12)]
    each = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
    assert_same_leaves(rows, each)
    # In addition to the rows: a part (a twelfth), and what it is padded from.
    # On a CPU the device shares the host's memory: a copy would double the peak.
    assert n_stored < n_held < n_bytes < 1.5 * n_stored


def test_a_plan_that_exceeds_memory_is_refused_before_a_row_is_read():
    rows, spans = rows_of(np.arange(48) % 3 == 0), [[(0, 0), (0, 2), (2, 5)]] * 48
    store = store_like("memory://unread/", {"a": Family(shape=(4096,))}, spans)
    unread = dataclasses.replace(store, arrays={})  # nothing can be read from it
    small = GridConfig(device_memory=1 << 20)
    with pytest.raises(ValueError, match="the device's 1.0 MiB; .*streamed=true"):
        check_plan(unread, rows, small)
    check_plan(unread, rows, dataclasses.replace(small, device_memory=1 << 30))


def test_streaming_finds_the_planted_signal_and_reads_rows_once_per_epoch():
    config = StreamConfig(n_chunk=16, n_mixed=4)
    longer = dataclasses.replace(LONGER, learning_rate=2e-2, max_epochs=6, patience=6)
    aurocs = {}
    for shift in (0.0, 2.0):
        counted = []
        train = streamed(*planted(256, 3, family=0, strength=shift), config, counted)
        valid = streamed(*planted(400, 4, family=0, strength=shift), config)
        blocks = [Block((subset_index("H"), subset_index("HPRA")), (0,))]
        (result,) = fit_streamed(blocks, train, valid, encoder=ENCODER, config=longer)
        aurocs[shift] = result.info.best_auroc
        # Four groups per epoch, whatever the number of encoders, and one sample.
        assert len(counted) == 1 + 4 * longer.max_epochs
        assert max(len(where) for where in counted) == 64
    assert (aurocs[2.0] > 0.85).all()
    # A chance AUROC of 400 answers has s.d. 0.03; this is the best of six epochs.
    assert (np.abs(aurocs[0.0] - 0.5) < 0.12).all()


# Other tests compile without fusion emitters: bits are then equal up to rounding.
AS_USERS_COMPILE = "--xla_backend_optimization_level=0"
bit_by_bit = pytest.mark.skipif(
    os.environ["XLA_FLAGS"] != AS_USERS_COMPILE, reason="compiled as users compile"
)
WIDTHS = (4, 3)
# Hidden states that are copied before they are projected, or read in place.
NARROW, WIDE = (paper_dims(hidden=n, prob=2, resid=3, attn=2) for n in (12, 1024))
DTYPES = ("bfloat16", "float16", "int8")
CONFIG = TrainConfig(learning_rate=1e-2, batch_size=16, max_epochs=2, patience=2)
ALONE = Block((subset_index("HPRA"),), (0,))
TOGETHER = Block((subset_index("H"), subset_index("PA")), (0,))


def stored_tokens(dims, dtype, n=48, seed=0):
    """Stored signals that shift with the label, in every family, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.5
    masks = tuple(
        np.arange(width)[:, None] < rng.integers(1, width + 1, n) for width in WIDTHS
    )
    real = np.concatenate(masks)[..., None]
    families = []
    for size in dims.sizes:
        mean, std = 3 * rng.standard_normal(size), rng.uniform(0.5, 2.0, size)
        x = rng.standard_normal((sum(WIDTHS), n, size)) + labels[:, None]
        x = ((mean + std * x) * real).astype(np.float32)
        encoded = encode(x, dtype)
        family = StoredTokens(
            codes=words_of(encoded.codes),
            dtype=dtype,
            scales=encoded.scales,
            mean=mean.astype(np.float32),
            std=std.astype(np.float32),
        )
        families.append(family)
    return jax.device_put(FamilyTokens(tuple(families), masks)), labels


def widened(features):
    """The same values as standardised float32, zero on padding."""
    real = jnp.concatenate(features.masks)[..., None]
    tokens = (jnp.where(real, values_of(x), 0.0) for x in features.tokens)
    return FamilyTokens(tuple(tokens), features.masks)


def encoder_of(dims, **sizes):
    config = EncoderConfig(projection=3, hidden=4, n_blocks=1, n_groups=2, **sizes)
    return Encoder(config, dims)


def assert_same(params, other, dtype):
    # A product with an int8 scale and the difference from a mean may be rounded once
    # or twice; after two epochs of AdamW that is a few units of the sixth digit.
    tolerance = {"rtol": 2e-3, "atol": 2e-4} if dtype == "int8" else {}
    assert_same_leaves(params, other, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_values_equal_codes_decoded_and_standardised_by_hand(dtype):
    features, _ = stored_tokens(NARROW, dtype)
    for stored in features.tokens:
        codes = np.asarray(stored.codes)
        if dtype != "int8":
            codes = codes.view(numpy_dtype(dtype))
        codes = codes.astype(np.float32)
        mean, std = np.asarray(stored.mean), np.asarray(stored.std)
        scale = 1.0 if stored.scales is None else np.asarray(stored.scales)[..., None]
        wanted = (codes * scale - mean) / std
        np.testing.assert_allclose(values_of(stored), wanted, rtol=1e-5, atol=1e-5)
        at = np.array([[5, 0], [300, 7]])
        result = take_rows(stored, jnp.asarray(at))
        flat = wanted.reshape(-1, wanted.shape[-1])
        np.testing.assert_allclose(result, flat[at], rtol=1e-5, atol=1e-5)


@bit_by_bit
@pytest.mark.parametrize(
    ("block", "dims", "dtype"),
    [
        (ALONE, NARROW, "bfloat16"),
        pytest.param(ALONE, WIDE, "bfloat16", marks=pytest.mark.slow),
        (ALONE, WIDE, "int8"),
        (TOGETHER, WIDE, "float16"),
    ],
)
def test_training_as_stored_equals_training_on_widened_values(block, dims, dtype):
    parts = [stored_tokens(dims, dtype, seed=seed) for seed in (0, 1)]
    encoder, results = encoder_of(dims), []
    for change in (lambda x: x, widened):
        train, valid = ([labelled(change(x), labels)] for x, labels in parts)
        trained = list(
            fit_blocks([block], train, valid, encoder=encoder, config=CONFIG)
        )
        outputs = [
            member_outputs(item, valid[0].features, encoder=encoder) for item in trained
        ]
        results.append(([(x.params, x.info) for x in trained], outputs))
    assert_same(*results, dtype)


@pytest.mark.parametrize(
    ("which", "n_cases"),
    [("not slow", 4), pytest.param("slow", 1, marks=pytest.mark.slow)],
)
def test_bits_are_equal_if_compiled_as_for_users(which, n_cases):
    line = [sys.executable, "-m", "pytest", "-q", "-k", "as_stored", __file__]
    environ = {**os.environ, "XLA_FLAGS": AS_USERS_COMPILE}
    run = subprocess.run(
        [*line, "-m", which], env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[-1].startswith(f"{n_cases} passed")


@bit_by_bit
def test_streaming_as_stored_equals_streaming_widened_values():
    parts = [stored_tokens(NARROW, "bfloat16", seed=seed) for seed in (0, 1)]
    config = StreamConfig(n_chunk=8, n_mixed=3)
    results = []

    def read(change, x, labels, at, weights):
        return labelled(change(x.take(jnp.asarray(at))), labels[at], weights)

    for change in (lambda x: x, widened):
        streams = (
            Streamed(n_rows=48, read=partial(read, change, *part), config=config)
            for part in parts
        )
        encoder = encoder_of(NARROW)
        (trained,) = fit_streamed([ALONE], *streams, encoder=encoder, config=CONFIG)
        results.append((trained.params, trained.info))
    assert_same(*results, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_span_is_zeroed_or_left_out_alike_in_stored_and_widened_tokens(dtype):
    features, _ = stored_tokens(NARROW, dtype)
    first = features.span_slices[0]
    zeroed = zero_span(features, 0), zero_span(widened(features), 0)
    for token, other in zip(widened(zeroed[0]).tokens, zeroed[1].tokens, strict=True):
        np.testing.assert_array_equal(token, other)
        assert not np.any(token[first]) and np.any(token[first.stop :])
    assert not any(map(np.any, widened(zero_span(zeroed[0], 1)).tokens))
    left_out = empty_span(features, 0)
    assert_same(*map(pooled_signals, (left_out, widened(left_out))), dtype)
