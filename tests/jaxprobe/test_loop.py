"""The training loop, and the checkpoints that it saves and loads."""

import dataclasses
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from beatrice.jaxprobe import checkpoint, loop
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    StreamConfig,
    TrainConfig,
)
from beatrice.jaxprobe.metrics import masked_auroc
from tests.records import flip_bit

RNG = np.random.default_rng(0)
ROWS = jnp.asarray(RNG.standard_normal((150, 3)), jnp.float32)
LABELS = jnp.asarray(RNG.random(150) < 1 / (1 + np.exp(-2 * ROWS[:, 0])), jnp.float32)


class Group(NamedTuple):
    labels: jax.Array
    weights: jax.Array


GROUP = Group(LABELS, jnp.ones(150))


def logistic(config, seeds=(0,)):
    """Fit logistic regressions side by side through the shared loop."""

    def loss(params, rows, shares, *_):
        logits = ROWS[rows] @ params["w"]
        return (optax.sigmoid_binary_cross_entropy(logits, LABELS[rows]) * shares).sum()

    @jax.jit
    def start():
        params = {"w": jnp.array([-0.1, 0.2, 0.1])}
        shape = 1, len(seeds)
        state = loop.start_fit(params, config)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), state)

    @jax.jit
    def train(states, number, group):
        def step(state, seed):
            key = jax.random.fold_in(jax.random.key(seed), number)
            batches = loop.epoch_batches(key, group.weights, config.batch_size)
            return loop.take_steps(state, loss, batches, loop.Keys(key, key), config)

        return jax.vmap(jax.vmap(step), in_axes=(0, None))(states, jnp.asarray(seeds))

    def logits(states, group):
        return states.params["w"] @ ROWS.T

    learner = loop.Learner(start, train, logits)
    (state,) = loop.fit([learner], lambda _: [GROUP], lambda: [GROUP], config)
    return jax.tree.map(lambda x: x[0], (state.best_params, state.info))


def test_training_stops_early_and_halves_the_rate():
    patience = {"lr_patience": 2, "patience": 5}
    config = TrainConfig(batch_size=64, max_epochs=60, learning_rate=0.1, **patience)
    params, info = jax.tree.map(lambda x: x[0], logistic(config))
    n_epochs, best = int(info.n_epochs), int(info.best_epoch)
    assert n_epochs < 60 and n_epochs == best + 1 + 5
    assert info.learning_rate <= 0.1 / 4 * 1.001  # halved twice since the best epoch
    assert np.isnan(info.valid_auroc[n_epochs:]).all()
    assert info.valid_auroc[best] == np.nanmax(info.valid_auroc) == info.best_auroc
    value = masked_auroc(ROWS @ params["w"], LABELS, jnp.ones(150))
    assert float(value) == pytest.approx(float(info.best_auroc), abs=1e-6)
    _, steady = logistic(dataclasses.replace(config, lr_patience=None))
    assert steady.learning_rate == np.float32(0.1)


def test_members_train_side_by_side_as_they_do_alone():
    config = TrainConfig(batch_size=64, max_epochs=30, patience=3, learning_rate=0.1)
    params, info = logistic(config, range(4))
    assert len(set(info.n_epochs.tolist())) > 1  # they stop at different epochs
    for seed in range(4):
        alone, alone_info = logistic(config, [seed])
        np.testing.assert_allclose(params["w"][seed], alone["w"][0], atol=1e-4)
        assert info.n_epochs[seed] == alone_info.n_epochs[0]


def test_steps_equal_those_of_adamw():
    config = TrainConfig(learning_rate=1e-2, weight_decay=0.1, n_microbatches=1)
    params = jnp.array([1.0, -2.0, 3.0])
    slopes = jnp.outer(jnp.arange(-2.0, 3.0), jnp.array([0.5, -1.0, 2.0]))

    def loss(params, slope, *_):  # its gradient is the slope
        return (params * slope[0]).sum()

    keys = loop.Keys(jax.random.key(0), jax.random.key(1))
    state = loop.start_fit(params, config)
    result, _ = loop.take_steps(state, loss, (slopes[:, None],), keys, config)
    with jax.numpy_dtype_promotion("standard"):
        adamw = optax.adamw(1e-2, weight_decay=0.1)
        expected, opt_state = params, adamw.init(params)
        for slope in slopes:
            updates, opt_state = adamw.update(slope, opt_state, expected)
            expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(result.params, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (TrainConfig, "max_epochs", -1),
        (TrainConfig, "n_microbatches", 0),
        (TrainConfig, "n_microbatches", -4),
        (TrainConfig, "learning_rate", math.nan),
        (TrainConfig, "learning_rate", math.inf),
        (TrainConfig, "learning_rate", 0.0),
        (TrainConfig, "learning_rate", "fast"),
        (TrainConfig, "weight_decay", math.nan),
        (TrainConfig, "weight_decay", -0.1),
        (TrainConfig, "batch_size", 2.5),
        (TrainConfig, "n_seeds", "3"),
        (EncoderConfig, "hidden", 8.0),
        (EncoderConfig, "input_noise", math.inf),
        (EncoderConfig, "n_groups", 0),
        (EncoderConfig, "hidden", 0),
        (EncoderConfig, "projection", 0),
        (EncoderConfig, "n_blocks", -1),
        (EncoderConfig, "input_noise", -0.1),
        (FusionConfig, "hidden", 0),
        (FusionConfig, "n_slots", 0),
        (StreamConfig, "n_mixed", 0),
    ],
)
def test_a_setting_out_of_its_range_is_refused_by_name(config, field, value):
    with pytest.raises(ValueError, match=f"{field} must be .* got {value!r}"):
        config(**{field: value})
    with pytest.raises(ValueError, match="equal parts"):
        TrainConfig(batch_size=100, n_microbatches=3)


TREE = {"a": {"b": np.arange(600.0, dtype=np.float32)}, "c": np.ones((2, 3), np.int32)}


def test_a_checkpoint_is_restored_unchanged_and_leaves_no_other_files(tmp_path):
    checkpoint.save(tmp_path / "x", {"old": np.zeros(2)}, {"version": 0})
    checkpoint.save(tmp_path / "x", TREE, {"version": 1})
    tree, config = checkpoint.restore(tmp_path / "x")
    np.testing.assert_array_equal(tree["a"]["b"], TREE["a"]["b"])
    assert tree["c"].dtype == np.int32 and config == {"version": 1}
    with pytest.raises(TypeError):  # a save that fails keeps the old one
        checkpoint.save(tmp_path / "x", TREE, {"version": object()})
    assert checkpoint.restore(tmp_path / "x")[1] == {"version": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_disk_that_cannot_reserve_room_is_checked_for_free_space(tmp_path):
    checkpoint._check_room(tmp_path, [np.ones(9)], reserve=None)
    with pytest.raises(OSError, match="No space left"):
        endless = np.broadcast_to(np.int8(0), (1 << 62,))
        checkpoint._check_room(tmp_path, [endless], reserve=None)


def test_a_flipped_bit_in_any_file_is_refused(tmp_path):
    checkpoint.save(tmp_path / "x", TREE, {"version": 1})
    files = [p for p in (tmp_path / "x").rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 3
    for path in files:
        whole = path.read_bytes()
        flip_bit(path, len(whole) // 2)
        with pytest.raises(ValueError, match="is damaged"):
            checkpoint.restore(tmp_path / "x")
        path.write_bytes(whole)
    checkpoint.restore(tmp_path / "x")


def test_missing_and_added_files_are_refused(tmp_path):
    checkpoint.save(tmp_path / "x", TREE, {})
    (tmp_path / "x" / "extra").write_text("")
    with pytest.raises(ValueError, match="extra is not in checksums.json"):
        checkpoint.restore(tmp_path / "x")
    (tmp_path / "x" / "extra").unlink()
    (tmp_path / "x" / checkpoint.CONFIG).unlink()
    with pytest.raises(ValueError, match="config.json is missing"):
        checkpoint.restore(tmp_path / "x")
    with pytest.raises(ValueError, match="checksums.json is missing; copy the folder"):
        checkpoint.restore(tmp_path / "nowhere")


def test_parts_load_only_under_their_key_and_a_damaged_one_is_missing(tmp_path):
    cache = Cache(tmp_path / "parts", "data 1")
    names = ["grid/0-0", "grid/1-0", "linear"]
    cache.save("grid/0-0", {"w": np.arange(6.0).reshape(2, 3), "n": np.int32(4)})
    assert cache.missing(names) == names[1:]
    arrays = cache.load("grid/0-0")
    assert arrays["n"] == 4 and arrays["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert Cache(cache.folder, "data 2").missing(names) == names
    path = cache.path("grid/0-0")
    whole = path.read_bytes()
    for at in (len(whole) // 3, len(whole) - 1):
        flip_bit(path, at)
        assert cache.load("grid/0-0") is None
        path.write_bytes(whole)
    cache.clear()
    assert not list(tmp_path.iterdir())


def test_the_temporary_file_of_a_writer_with_the_same_process_id_is_kept(tmp_path):
    temporary = tmp_path / f".linear.safetensors.{os.getpid()}.tmp"
    temporary.write_bytes(b"half of a part")
    Cache(tmp_path, "data").save("linear", {"x": np.zeros(3)})
    assert temporary.read_bytes() == b"half of a part"


def test_a_checkpoint_counts_as_saved_only_under_its_key_and_undamaged(tmp_path):
    assert not checkpoint.is_saved(tmp_path / "x", "a")
    checkpoint.save(tmp_path / "x", TREE, {"key": "a"})
    assert checkpoint.is_saved(tmp_path / "x", "a")
    assert not checkpoint.is_saved(tmp_path / "x", "b")
    flip_bit(next((tmp_path / "x" / checkpoint.ARRAYS).rglob("manifest.ocdbt")), 9)
    assert not checkpoint.is_saved(tmp_path / "x", "a")


def test_a_cache_without_a_folder_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Cache()
    cache.save("a", {"w": np.zeros(2)})
    cache.clear()
    assert cache.missing(["a"]) == ["a"] and not list(tmp_path.iterdir())
