import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.jaxprobe import fusion
from beatrice.jaxprobe.config import FusionConfig, TrainConfig
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.fusion import PoolOutputs
from beatrice.jaxprobe.metrics import auroc
from tests.jaxprobe.samples import N_SEEDS, random_codes

TRAIN = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=6)
SLOTS, EVERY = jnp.arange(3), jnp.ones(3, bool)
HEAD = fusion.FusionHead(FusionConfig(hidden=8, n_slots=3))
APPLY = jax.jit(HEAD.apply)
CODES = random_codes(200, 0, [2]), random_codes(100, 1, [2])  # encoder 2 knows


def train(sets, n_slots=4, codes=CODES, protocol=TRAIN, root_seed=0, **config):
    slots, masks = zip(*(fusion.slots_of(s, n_slots) for s in sets), strict=True)
    head = fusion.FusionHead(FusionConfig(hidden=8, n_slots=n_slots, **config))
    arrays = np.stack(slots), np.stack(masks), *codes
    config = dataclasses.replace(protocol, root_seed=root_seed)
    return fusion.fit_heads(*arrays, head=head, config=config)


def auroc_of_the_mean(members, seed, codes=CODES):
    """The validation AUROC of the mean logit of some encoders."""
    p = np.asarray(codes[1].outputs)[seed, list(members), -1]
    mean = (np.log(p) - np.log1p(-p)).mean(axis=0)
    return auroc(mean, np.asarray(codes[1].labels) > 0).value


def started(outputs):
    """Initial weights of a head of three slots, whose correction is zero."""
    return jax.jit(HEAD.init)(jax.random.key(2), outputs, SLOTS, EVERY)


def test_a_head_finds_the_encoder_that_knows_the_answer():
    _, info = train([(2,), (0,), (0, 2)])
    assert (info.best_auroc[0] > 0.75).all() and (info.best_auroc[2] > 0.7).all()
    assert (info.best_auroc[1] < 0.65).all()  # 100 rows: s.e. 0.06


def test_a_head_depends_only_on_its_set_and_seed():
    _, info = train([(1, 2), (0,), (2, 1)])
    _, alone = train([(0, 3), (2,), (1, 2)])
    np.testing.assert_array_equal(info.valid_auroc[0], info.valid_auroc[2])
    np.testing.assert_array_equal(info.valid_auroc[0], alone.valid_auroc[2])
    assert not np.array_equal(info.valid_auroc[0, 0], info.valid_auroc[0, 1])
    n_traces = fusion.train_heads._cache_size()
    _, other = train([(1, 2), (0,), (2, 1)], root_seed=1)
    assert fusion.train_heads._cache_size() == n_traces
    assert not np.array_equal(info.train_loss, other.train_loss)
    fewer = [c._replace(outputs=c.outputs[:1]) for c in CODES]
    _, first = train([(1, 2), (0,), (2, 1)], codes=fewer)
    np.testing.assert_allclose(first.valid_auroc[0, 0], info.valid_auroc[0, 0])


def test_the_best_auroc_of_a_head_is_the_highest_of_its_start_and_its_epochs():
    sets = [(2,), (0,), (0, 2), (1, 3), (4,)]
    _, info = train(sets, protocol=dataclasses.replace(TRAIN, patience=1))
    n_epochs = np.isfinite(info.valid_auroc).sum(axis=-1)
    np.testing.assert_array_equal(info.n_epochs, n_epochs)
    assert n_epochs.min() < n_epochs.max()  # some heads finish earlier than others
    mean = [[auroc_of_the_mean(s, seed) for seed in range(N_SEEDS)] for s in sets]
    best = np.maximum(mean, np.nanmax(info.valid_auroc, axis=-1))
    np.testing.assert_allclose(info.best_auroc, best, rtol=0, atol=1e-6)


def test_a_head_leaves_the_mean_logit_only_for_a_gain_beyond_chance():
    sets = [(0, 1), (0, 1, 2)]  # only noise; noise and the encoder that knows
    codes = random_codes(800, 0, [2]), random_codes(800, 1, [2])
    _, free = train(sets, codes=codes)
    params, info = train(sets, codes=codes, is_mean_first=True)
    output = np.abs(params["params"]["out_kernel"]).sum(axis=-1)
    assert (output[0] == 0).all() and (output[1] > 0).all()
    np.testing.assert_array_equal(info.best_auroc[1], free.best_auroc[1])
    assert (free.best_auroc[0] > info.best_auroc[0]).any()
    for seed in range(N_SEEDS):
        expected = auroc_of_the_mean((0, 1), seed, codes)
        assert info.best_auroc[0, seed] == pytest.approx(expected, abs=1e-6)


def test_more_wordings_of_questions_make_no_head_leave_the_mean_logit():
    train_codes, once = random_codes(200, 0, []), random_codes(100, 1, [])
    often = PoolOutputs(*(jnp.tile(x, 25) for x in once))
    sets = [(0, 1), (2, 3, 4), (1, 5)]
    for codes in (once, often):
        params, _ = train(sets, codes=(train_codes, codes), is_mean_first=True)
        assert not params["params"]["out_kernel"].any()


def test_a_head_of_no_epochs_is_untrained_and_has_the_mean_logits_auroc():
    sets = [(0, 1), (0, 1, 2)]
    params, info = train(sets, protocol=dataclasses.replace(TRAIN, max_epochs=0))
    assert not info.n_epochs.any()
    assert not any(params["params"][name].any() for name in fusion.OUTPUT)
    expected = [[auroc_of_the_mean(s, seed) for seed in range(N_SEEDS)] for s in sets]
    np.testing.assert_allclose(info.best_auroc, expected, rtol=0, atol=1e-6)


def test_a_head_begins_as_the_mean_logit():
    logits = jax.random.normal(jax.random.key(1), (3, 50))
    outputs = fusion.head_inputs(
        jax.random.normal(jax.random.key(0), (3, 50, 4)), logits
    )
    first = APPLY(started(outputs), outputs, SLOTS, EVERY)
    np.testing.assert_allclose(first, logits.mean(axis=0), atol=1e-5)


def test_more_slots_change_nothing():
    _, three = train([(1, 2), (0,), (3,)])
    _, many = train([(1, 2), (0,), (3,)], n_slots=6)
    np.testing.assert_allclose(three.valid_auroc, many.valid_auroc, atol=2e-3)  # sums


def test_encoder_dropout_hides_whole_encoders_but_never_all():
    mask = jnp.array([True, True, True, False])
    keep = np.asarray(fusion.keep_encoders(jax.random.key(0), 20000, mask, 0.3))
    assert not keep[3].any() and keep.any(axis=0).all()
    hidden = 0.3 - 0.3**3 / 3  # if all three are hidden, a random one stays
    np.testing.assert_allclose(1 - keep[:3].mean(axis=1), hidden, atol=0.015)
    alone = fusion.keep_encoders(jax.random.key(1), 100, jnp.array([True, False]), 0.3)
    assert np.asarray(alone)[0].all()


def test_dropout_acts_only_in_training():
    outputs = fusion.head_inputs(jnp.ones((3, 50, 4)), jnp.ones((3, 50)))
    params = jax.tree.map(lambda x: x + 0.1, started(outputs))
    assert np.ptp(APPLY(params, outputs, SLOTS, EVERY)) < 1e-6
    moved = APPLY(params, outputs, SLOTS, EVERY, None, jax.random.key(1))
    assert np.ptp(moved) > 1e-3


@pytest.mark.parametrize("slots", [(0,), (0, 2), (0, 1, 2)])
def test_initial_variance_is_one_over_the_inputs_of_the_filled_slots(slots):
    mask = jnp.isin(jnp.arange(4), jnp.array(slots))
    kernel = fusion.kernel_init(jax.random.key(0), 2048, 3, mask).reshape(4, 3, -1)
    n_inputs = 3 * len(slots) + len(slots) * (len(slots) - 1) / 2  # 3 a slot, 1 a pair
    np.testing.assert_allclose(kernel[mask].var(axis=-1), 1 / n_inputs, rtol=0.2)
    assert not kernel[~mask].any()


def test_a_head_reads_the_gap_of_every_pair_of_filled_slots_and_no_other():
    pooled = jax.random.normal(jax.random.key(0), (3, 5, 4))
    outputs = fusion.head_inputs(pooled, jnp.zeros((3, 5)))
    arrays = started(outputs)["params"] | {"out_kernel": jnp.arange(1.0, 9.0)}
    assert arrays["gaps"].shape == (3, 8) and not arrays["gaps"].any()

    def change_by_pair(pair, scores, mask):
        gaps = arrays["gaps"].at[pair, 0].set(5.0)
        apart = outputs.at[:, -1].set(jnp.asarray(scores)[:, None])
        logits = [
            APPLY({"params": {**arrays, "gaps": g}}, apart, SLOTS, mask)
            for g in (arrays["gaps"], gaps)
        ]
        return float(jnp.abs(logits[0] - logits[1]).max())

    # Pairs in order: 0 and 1, 0 and 2, 1 and 2.
    assert change_by_pair(0, (0.1, 0.9, 0.1), EVERY) > 1e-3
    assert change_by_pair(1, (0.1, 0.9, 0.1), EVERY) == 0.0
    assert change_by_pair(2, (0.1, 0.9, 0.1), EVERY) > 1e-3
    assert change_by_pair(2, (0.1, 0.9, 0.1), jnp.array([True, True, False])) == 0.0


def test_an_empty_set_trains_nothing_and_sets_that_do_not_fit_are_refused():
    _, info = train([(), (), (1,)])
    assert not info.n_epochs[:2].any() and info.n_epochs[2].all()
    for members, n_slots in (((0, 1, 2), 2), ((1, 1), 4)):
        with pytest.raises(ValueError, match="distinct members"):
            fusion.slots_of(members, n_slots)


def test_one_executable_lays_out_a_pool(caplog):
    logits, pooled = np.ones((6, 11)), np.ones((6, 11, 5))
    outputs = MemberOutputs(logits.astype(np.float32), pooled.astype(np.float32))
    with jax.log_compiles():
        fusion.pool_outputs((outputs, outputs), 3, np.ones(11, bool), np.arange(11))
    compiled = [x for x in caplog.messages if x.startswith("Finished XLA compilation")]
    assert len(compiled) == 1, compiled


N_SLOTS, D, HIDDEN, N = 4, 5, 3, 6
MEMBERS, START, N_FILLED = jnp.array([6, 1, 3, 0]), 2, 3


def operands():
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((N_SLOTS, D, HIDDEN)).astype(np.float32)
    pool = rng.standard_normal((7, D, 10)).astype(np.float32)
    keep = (rng.random((N_SLOTS, N)) < 0.7).astype(np.float32)
    return tuple(map(jnp.asarray, (kernel, pool, keep)))


def ours(kernel, pool, keep, n_filled=N_FILLED):
    counts = jnp.int32(START), keep, jnp.int32(n_filled)
    return fusion.slot_products(kernel, pool, MEMBERS, *counts)


def plain(kernel, pool, keep, n_filled=N_FILLED):
    outputs = pool[MEMBERS, :, START : START + N] * keep[:, None]
    return jnp.einsum("sdh,sdn->hn", kernel[:n_filled], outputs[:n_filled])


def test_slot_products_equal_one_product_over_the_filled_slots():
    for n_filled in range(N_SLOTS + 1):
        result = jax.jit(ours)(*operands(), n_filled)
        np.testing.assert_allclose(result, plain(*operands(), n_filled), atol=1e-5)
    kernel, pool, keep = operands()
    pools = np.stack([pool, -2 * pool])  # each gives its own product
    result = jax.vmap(lambda p: ours(kernel, p, keep))(pools)
    np.testing.assert_allclose(result[1], -2 * result[0], atol=1e-5)


def test_the_gradient_equals_that_of_one_product_and_is_zero_on_empty_slots():
    kernel, pool, keep = operands()

    def loss(products):
        return lambda k: jnp.sin(products(k, pool, keep)).sum()

    result, expected = (jax.grad(loss(f))(kernel) for f in (ours, plain))
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert not result[N_FILLED:].any() and result[:N_FILLED].any()


def test_each_set_of_a_pool_has_its_own_keys_whatever_the_order_of_its_slots():
    def keys(members, n_pool):
        slots, mask = np.zeros(3, np.int32), np.arange(3) < len(members)
        slots[: len(members)] = members
        fused = fusion._Set(jnp.asarray(slots), jnp.asarray(mask))
        keys = fusion._head_keys(jax.random.key(0), fused, n_pool)
        data = jax.random.key_data(keys)
        return tuple(np.asarray(data).ravel().tolist())

    # A pool of more than 32, as of five families in two passes, needs two words.
    for n_pool, sets in ((30, [(1,), (29,), (1, 29)]), (62, [(1,), (33,), (1, 33)])):
        assert len({keys(members, n_pool) for members in sets}) == 3
        assert keys(sets[2][::-1], n_pool) == keys(sets[2], n_pool)
    assert keys((1, 3), 30) == keys((1, 3), 15)
