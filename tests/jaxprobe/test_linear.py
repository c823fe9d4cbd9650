import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from sklearn.linear_model import LogisticRegression

from beatrice.extract.store.spec import Family
from beatrice.jaxprobe.calibrate import passing_head
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import GridConfig, TrainConfig
from beatrice.jaxprobe.encoder import Encoder, pooled_signals
from beatrice.jaxprobe.families import SUBSETS, Features, fit_standardizer, subset_index
from beatrice.jaxprobe.grid import (
    Block,
    BlockArrays,
    _stopped_without_gain,
    apply_member,
    block_learner,
    filled_block,
    fit_blocks,
    join,
    labelled,
    member_outputs,
    n_stopped_by_review,
    train_block,
)
from beatrice.jaxprobe.linear import (
    Pooled,
    drop_networks_without_gain,
    fit_linear_parts,
    fit_ridge,
    load_linear,
    n_networks_kept,
    save_linear,
    with_linear_parts,
)
from beatrice.jaxprobe.loop import FitInfo
from beatrice.jaxprobe.metrics import auroc, auroc_gain
from beatrice.jaxprobe.rows import training_set
from beatrice.jaxprobe.tokens import split_families
from beatrice.jaxprobe.train import LINEAR_ONLY, train_encoders, train_regression
from tests.jaxprobe.samples import assert_same_leaves, rows_like, store_like
from tests.jaxprobe.test_grid import CONFIG, DIMS, planted
from tests.process import interrupted_once, run_python

ENCODER = Encoder(dataclasses.replace(CONFIG, is_linear_first=True), DIMS)
TRAIN = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=3, n_seeds=1)
N_TRAIN, N_VALID = 230, 110
EVERYTHING = np.arange(N_TRAIN)  # every row is its own question


def families_of(*parts):
    """Tokens of each part, standardised by the statistics of the first part."""
    standardizer = fit_standardizer([parts[0]], DIMS)
    return [split_families(x, DIMS, standardizer) for x in parts]


def pooled(tokens, labels):
    return Pooled.of([(np.arange(len(labels)), tokens)], labels)


@pytest.fixture(scope="module")
def rows():
    """Tokens and labels of training and validation rows with a planted signal."""
    parts = planted(N_TRAIN, seed=0, strength=0.7), planted(N_VALID, 1, strength=0.7)
    features, labels = zip(*parts, strict=True)
    return list(zip(families_of(*features), labels, strict=True))


def grid_of(rows, *names, questions=EVERYTHING):
    subsets = [subset_index(name) for name in names]
    return fit_linear_parts(*(pooled(*split) for split in rows), questions, subsets)


def trained_on(rows, grid, name, config=TRAIN):
    subset = subset_index(name)
    groups = [
        [labelled(*split, offsets=offsets)]
        for split, offsets in zip(rows, (grid.train, grid.valid), strict=True)
    ]
    block = Block((subset,), (0,))
    (result,) = fit_blocks([block], *groups, encoder=ENCODER, config=config)
    return result


def test_pooled_signals_are_means_and_extremes_of_each_example():
    features, labels = planted(20, seed=3)
    masks = (features.masks[0], features.masks[1].copy())
    masks[1][4] = False  # an answer without a token
    (tokens,) = families_of(Features(features.tokens, masks))
    result = jax.jit(pooled_signals)(tokens)
    for family, token in zip(result, tokens.tokens, strict=True):
        for row in range(20):
            question, answer = (
                np.asarray(token)[at, row][np.asarray(mask)[:, row]]
                for at, mask in zip(tokens.span_slices, tokens.masks, strict=True)
            )
            if row == 4:
                answer = np.zeros((1, token.shape[2]))
            parts = answer.mean(0), answer.min(0), answer.max(0), question.mean(0)
            expected = np.concatenate(parts)
            np.testing.assert_allclose(family[:, row], expected, atol=1e-5)


def test_an_encoder_begins_as_logistic_regression_on_its_pooled_signals(rows):
    (tokens, labels), (valid_tokens, _) = rows
    grid = grid_of(rows, "PR")
    still = dataclasses.replace(TRAIN, learning_rate=1e-12, max_epochs=1)  # untrained
    member = with_linear_parts(trained_on(rows, grid, "PR", still), grid)
    output = member_outputs(member, valid_tokens, encoder=ENCODER).logits[0]

    x, y = [], []
    pool = jax.jit(pooled_signals)
    signals = (pool(part)[1:3] for part in (tokens, valid_tokens))
    for family in zip(*signals, strict=True):
        item, other = (np.asarray(part).T for part in family)
        mean, scale = item.mean(0), item.std(0) * item.shape[1] ** 0.5
        x.append((item - mean) / scale)
        y.append((other - mean) / scale)
    penalty = grid.inverse_penalty[subset_index("PR")]
    regression = LogisticRegression(C=penalty, max_iter=2000, tol=1e-6)
    regression.fit(np.concatenate(x, axis=1), labels)
    expected = regression.decision_function(np.concatenate(y, axis=1))
    np.testing.assert_allclose(output, expected, atol=2e-2)
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(output, grid.valid[subset_index("PR")], atol=1e-3)


def test_outputs_of_several_members_equal_each_encoder_applied_by_itself(rows):
    grid, tokens = grid_of(rows, "PR", "H"), rows[1][0]
    blocks = [
        with_linear_parts(trained_on(rows, grid, name), grid) for name in ("PR", "H")
    ]
    members = [block.members[0] for block in blocks]
    result = member_outputs(join(blocks, members), tokens, encoder=ENCODER)
    for row, (subset, _) in enumerate(members):
        alone = jax.tree.map(lambda x: x[0], blocks[row].params)
        mask = jnp.asarray(SUBSETS[subset])
        logits, _ = jax.jit(ENCODER.apply)(alone, tokens, mask)
        np.testing.assert_allclose(result.logits[row], logits, atol=1e-4)


def test_a_family_that_is_not_read_has_no_weight(rows):
    grid = grid_of(rows, "PR")
    subset = subset_index("PR")
    for family, kernel in enumerate(grid.parts[f"kernel_{f}"] for f in range(4)):
        assert kernel[subset].any() == SUBSETS[subset][family]
        assert not np.delete(kernel, subset, axis=0).any()


def chance_gain(linear, labels, n_errors):
    """What to add to the logits for a gain of just over `n_errors` standard errors."""

    def errors(weight):
        gain, error = auroc_gain(linear + weight * labels, linear, labels)
        return gain / (error or np.inf)

    return next(w for w in np.geomspace(1e-3, 1, 200) if errors(w) > n_errors) * labels


def test_a_network_that_gains_nothing_is_silenced_and_one_that_gains_is_not(rows):
    grid, subset = grid_of(rows, "R"), subset_index("R")
    still = dataclasses.replace(TRAIN, max_epochs=1)
    member = with_linear_parts(trained_on(rows, grid, "R", still), grid)
    tokens, labels = rows[1]
    linear = grid.valid[subset]
    noise = 0.05 * np.random.default_rng(0).standard_normal(len(labels))
    chance = chance_gain(linear, labels, 2.5)
    for added, is_silent in ((noise, True), (chance, True), (3.0 * labels, False)):
        inputs = member, linear[None] + added, grid, labels, np.arange(len(labels))
        result = drop_networks_without_gain(*inputs)
        assert is_silent == (not result.params["params"]["mlp_out"]["kernel"].any())
        assert n_networks_kept(result) == (not is_silent)
        if is_silent:
            output = member_outputs(result, tokens, encoder=ENCODER).logits[0]
            np.testing.assert_allclose(output, grid.valid[subset], atol=1e-4)
            expected = auroc(grid.valid[subset], labels).value
            assert result.info.best_auroc[0] == pytest.approx(expected)
    doubled = grid._replace(valid=np.tile(grid.valid, 2))  # two wordings each
    rows = linear + chance, labels, np.arange(len(labels))
    logits, labels, questions = (np.tile(x, 2) for x in rows)
    again = drop_networks_without_gain(member, logits[None], doubled, labels, questions)
    assert n_networks_kept(again) == 0


def test_only_networks_without_a_gain_are_stopped(rows):
    grid, subset = grid_of(rows, "R"), subset_index("R")
    _, (tokens, labels) = rows
    linear = grid.valid[subset]
    noise = 0.02 * np.random.default_rng(0).standard_normal(len(labels))
    filled = filled_block(Block((subset,), (0,)), ENCODER, TRAIN)
    block = BlockArrays(*(x[:1] for x in filled))
    learner = block_learner(block, tokens, encoder=ENCODER, config=TRAIN)
    group = labelled(tokens, labels, offsets=grid.valid)
    learner.train(learner.start(), np.int32(0), group)
    n_traces = train_block._cache_size()
    # Two groups: every row of the second is another wording of one in the first.
    for added, is_stopped in (
        (noise, True),
        (chance_gain(linear, labels, 1.2), True),
        (3.0 * labels, False),
    ):

        def logits(state, group, added=added):
            return (linear + added)[None, None]

        inputs = learner.start(), block, iter([group, group])
        state = _stopped_without_gain(*inputs, logits, TRAIN.patience)
        assert bool(state.is_active(TRAIN).all()) == (not is_stopped)
        trained, _ = learner.train(state, np.int32(1), group)
        weights = [ravel_pytree(x.params)[0] for x in (state, trained)]
        assert np.array_equal(*weights) == is_stopped
    assert train_block._cache_size() == n_traces  # a review compiles nothing new
    # Some ran out of patience and were not stopped by the review.
    best, last = np.array([2, 5, 7, 5]), np.array([8, 8, 8, 11])
    info = FitInfo(*[None] * 3, best_epoch=best, n_epochs=last, learning_rate=None)
    assert n_stopped_by_review(info, 8, dataclasses.replace(TRAIN, patience=5)) == 2


def test_the_network_finds_what_no_weight_on_pooled_signals_can():
    def split(n, seed):
        features, _ = planted(n, seed, strength=0.0)
        features.masks[-1][:] = True
        rng = np.random.default_rng(seed + 10)
        labels = rng.random(n) < 0.5
        # Two neighbouring tokens agree in sign or differ; each alone tells nothing.
        signs = rng.choice([-2.0, 2.0], n)
        column = DIMS.slices[2].start
        features.tokens[-1][:, :2, column] = signs[:, None]
        features.tokens[-1][:, 1, column] *= np.where(labels, 1, -1)
        features.tokens[-1][:, 2, column] = rng.choice([-2.0, 2.0], n)
        return features, labels

    parts = split(1500, 0), split(400, 1)
    features, labels = zip(*parts, strict=True)
    rows = list(zip(families_of(*features), labels, strict=True))
    grid = grid_of(rows, "R", questions=np.arange(1500))
    alone = auroc(grid.valid[subset_index("R")], labels[1]).value
    longer = dataclasses.replace(TRAIN, max_epochs=12, patience=12)
    assert trained_on(rows, grid, "R", longer).info.best_auroc[0] > alone + 0.05


def test_two_wordings_of_a_question_do_not_leak_labels_to_each_other(rows):
    (tokens, labels), valid = rows
    questions = EVERYTHING // 2
    twice = tokens.take(jnp.asarray(questions * 2))
    coins = np.random.default_rng(1).random(len(labels)) < 0.5
    parts = [(twice, coins[questions]), valid]
    subset = subset_index("HPRA")
    apart = grid_of(parts, "HPRA", questions=questions).train[subset]
    leaking = grid_of(parts, "HPRA").train[subset]
    assert auroc(leaking, parts[0][1]).value > 0.65
    assert abs(auroc(apart, parts[0][1]).value - 0.5) < 0.15


@pytest.mark.parametrize("right", [[0, 5], [3, 7, 8]])
def test_two_right_answers_suffice_for_folds_and_a_single_one_is_refused(rows, right):
    n, questions = 12, np.arange(12)
    train = pooled(*rows[0])
    few = Pooled(tuple(x[:n] for x in train.families), np.isin(questions, right))
    subset, valid = subset_index("P"), pooled(*rows[1])
    for _, unseen in (
        fit_ridge(few, questions),
        (None, fit_linear_parts(few, valid, questions, [subset]).train[subset]),
    ):
        assert np.isfinite(unseen).all() and unseen.any()
    of_one = few._replace(labels=questions == 3)
    for fit in (fit_ridge, lambda *x: fit_linear_parts(x[0], valid, x[1], [subset])):
        with pytest.raises(ValueError, match="got 1 and .* more questions"):
            fit(of_one, questions)
        fit(few._replace(labels=questions % 2 == 0), questions // 3)  # four questions


def test_saved_parts_load_only_under_their_own_key_and_for_their_subsets(
    rows, tmp_path
):
    cache, subsets = Cache(tmp_path, "key"), [subset_index("P")]
    grid = grid_of(rows, "P")
    save_linear(cache, grid)
    assert_same_leaves(grid, load_linear(cache, subsets))
    assert load_linear(Cache(tmp_path, "another"), subsets) is None
    assert load_linear(cache, [*subsets, subset_index("PR")]) is None


def test_a_ridge_generalises_and_its_training_logits_have_not_seen_their_row(rows):
    train, valid = (pooled(*ridge) for ridge in rows)
    ridge, unseen = fit_ridge(train, EVERYTHING)
    logits = sum(x @ ridge[f"kernel_{f}"] for f, x in enumerate(train.families))
    seen = auroc(logits + ridge["bias"], train.labels).value
    of_valid = sum(x @ ridge[f"kernel_{f}"] for f, x in enumerate(valid.families))
    assert seen > auroc(unseen, train.labels).value > 0.5
    assert auroc(of_valid, valid.labels).value > 0.6
    # Labels that mean nothing teach the base rate, and little else.
    mixed = np.random.default_rng(0).permutation(train.labels)
    _, of_nothing = fit_ridge(train._replace(labels=mixed), EVERYTHING)
    assert of_nothing.std() < unseen.std() / 2
    base = np.log(mixed.mean() / (1 - mixed.mean()))
    assert abs(of_nothing.mean() - base) < 0.2


@pytest.mark.parametrize("constant", [-0.1, -0.37, 3.3])
@pytest.mark.parametrize("n", [97, 3000])
def test_a_constant_feature_is_not_divided_by_its_rounding_error(constant, n):
    rng = np.random.default_rng(n)
    labels = rng.random(n) < 0.5
    family = rng.normal(size=(n, 4)).astype(np.float32) + labels[:, None]
    family[:, 0] = constant
    ridge, _ = fit_ridge(Pooled((family,), labels), np.arange(n))
    assert abs(ridge["kernel_0"][0]) < 1e-3  # logits per unit of the feature
    assert np.abs(ridge["kernel_0"][1:]).min() > 0.1


def test_a_ridge_does_not_change_if_every_row_is_repeated_ten_times():
    rng = np.random.default_rng(0)
    labels, family = rng.random(400) < 0.5, rng.normal(size=(400, 6))
    family[:, 0] += 0.7 * labels
    rows = family.astype(np.float32), labels, np.arange(400)
    kernels = []
    for n in (1, 10):  # ten times the rows call for ten times the penalty
        x, y, questions = (np.repeat(row, n, axis=0) for row in rows)
        ridge, _ = fit_ridge(Pooled((x,), y), questions)
        kernels.append(ridge["kernel_0"])
    np.testing.assert_allclose(*kernels, rtol=0.02)


class WatchedLabels(np.ndarray):
    """Labels that call `on_look_up` whenever some of them are looked up."""

    def __getitem__(self, where):
        self.on_look_up()
        return np.asarray(self)[where]


def fit_parts(train, questions):
    return fit_linear_parts(train, train, questions, range(len(SUBSETS)))


@pytest.mark.parametrize("fit", [fit_ridge, fit_parts])
def test_an_interrupt_ends_regressions_before_the_next_fold(rows, fit):
    train = pooled(*rows[0])
    labels = np.asarray(train.labels).view(WatchedLabels)
    with interrupted_once() as labels.on_look_up:
        fit(train._replace(labels=labels), EVERYTHING)


N_EPOCHS = 24  # enough for networks to be reviewed
PROTOCOL = TrainConfig(
    learning_rate=1e-2, batch_size=64, max_epochs=N_EPOCHS, patience=N_EPOCHS, n_seeds=3
)
GRID = GridConfig(encoder=ENCODER.config, train=PROTOCOL)


def noise(n_wordings):
    """Training rows of signals that have nothing to do with the labels.

    Validation questions come in `n_wordings` wordings, each with the same answer.
    """
    rng = np.random.default_rng(0)
    labels, values = rng.random(340) < 0.5, rng.standard_normal((340, 2, 24))
    n_times = np.repeat([1, n_wordings], [230, 110])
    of_row = np.repeat(np.arange(340), n_times)
    store = store_like(
        f"memory://noise-{n_wordings}",
        {"noise": Family(shape=(24,))},
        np.tile([[0, 0], [0, 0], [0, 2]], (len(of_row), 1, 1)),
        {"noise": values[of_row].reshape(-1, 24).astype(np.float32)},
    )
    splits = np.where(of_row < 230, "train", "validation")
    rows = rows_like(labels[of_row], ids=of_row, splits=splits)
    return training_set(store, rows, layer=None, n_batch=PROTOCOL.batch_size)


@pytest.mark.parametrize("n_wordings", [1, 25])
def test_nothing_is_learned_from_noise_whatever_the_number_of_wordings(n_wordings):
    data = noise(n_wordings)
    trained, outputs = train_encoders(data, GRID)
    assert n_networks_kept(trained) == 0 and (trained.info.n_epochs < N_EPOCHS).all()
    train, encoder = data.where[0], Encoder(GRID.encoder, data.dims)
    seen = member_outputs(trained, data.read(train), encoder=encoder).logits[0]
    labels = data.rows.labels[train]
    assert auroc(seen, labels).value > 0.7  # the regression knows these labels
    for unseen in outputs.logits[:, train]:  # out-of-fold logits do not
        assert abs(auroc(unseen, labels).value - 0.5) < 0.12


def test_training_only_a_regression_compiles_no_network(caplog):
    data = noise(1)
    jax.clear_caches()
    with jax.log_compiles():
        trained, outputs = train_regression(data)
        passing_head(0, outputs)
    compiled = [x for x in caplog.messages if x.startswith("Finished XLA compilation")]
    assert len(compiled) <= 15, compiled
    encoder = Encoder(LINEAR_ONLY, data.dims)
    params = jax.tree.map(lambda x: x[0], trained.params)
    train, valid = data.where
    tokens, mask = data.read(valid), jnp.ones(1, bool)
    logits, vectors = apply_member(params, mask, tokens, encoder=encoder)
    np.testing.assert_allclose(outputs.logits[0, valid], logits, atol=1e-5)
    assert not np.any(vectors) and not outputs.pooled.any()


def test_a_regression_has_the_same_bits_whatever_ran_before_in_the_process():
    program = """
import numpy as np
from threadpoolctl import threadpool_info
from beatrice.jaxprobe.linear import fit_linear
x, y = np.eye(8), np.arange(8) % 2 > 0
fit_linear(x, y, x, y)
print({lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"})
"""
    assert run_python(program, OPENBLAS_NUM_THREADS="2").stdout == "{1}\n"
