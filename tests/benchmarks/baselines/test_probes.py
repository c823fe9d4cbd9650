"""Detectors that learn from labels: each finds what was planted, and nothing else."""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch.nn.functional import conv1d, gelu, group_norm

from beatrice.benchmarks.baselines.detector import DetectorInput, catalogue
from beatrice.benchmarks.baselines.detectors.choice import (
    answer_lengths,
    last_steps,
    states_at,
)
from beatrice.benchmarks.baselines.detectors.gnosis import (
    ChannelConv,
    GnosisConfig,
    GnosisHead,
    Inputs,
    SpreadConv,
    fit_heads,
    gnosis_scores,
)
from beatrice.benchmarks.baselines.detectors.probes import (
    SaplmaConfig,
    SaplmaNetwork,
    before_generation,
    best_range,
    entropy_probe,
    entropy_threshold,
    official_second_last,
    saplma_logits,
    second_last,
)
from beatrice.jaxprobe.linear import both_classes
from tests.benchmarks.baselines.planted import memory_store
from tests.jaxprobe.samples import rows_of

D, LAYERS = 8, (0, 2, 5)


def noise(labels, seed=0):
    """Return states of answers of 1 to 4 tokens and of an empty one, from step 0."""
    rng = np.random.default_rng(seed)
    n_tokens = rng.integers(1, 5, len(labels))
    n_tokens[3] = 0
    sizes = [(n + 1, len(LAYERS), D) for n in n_tokens]
    return [rng.standard_normal(size).astype(np.float32) for size in sizes]


def stored(answers, answer_span="emitting"):
    """Return a store of these states, after three prompt tokens with states of 99."""
    skipped = int(answer_span == "literal")
    lengths = np.array([3 + len(states) for states in answers])
    start = 3 + skipped
    spans = np.array([[(0, 0), (0, start), (start, stop)] for stop in lengths])
    prompt = np.full((3, len(LAYERS), D), 99, np.float32)
    every = np.concatenate([x for states in answers for x in (prompt, states)])
    values = {"hidden": every}
    return memory_store(values, lengths, spans, layers=LAYERS, answer_span=answer_span)


def some_labels(n, seed=7):
    return np.random.default_rng(seed).random(n) < 0.5


def planted(labels, step, layer=1, size=3.0):
    """Return noise; right answers have a larger first channel at one step and layer."""
    answers = noise(labels)
    for answer, label in zip(answers, labels, strict=True):
        if len(answer) > 1:
            answer[step, layer, 0] += size * label
    return answers


def measured(output, rows):
    """AUROC of the first seed on the test rows that have a score."""
    test = rows.where("test")
    test = test[np.isfinite(output.scores[0, test])]
    return roc_auc_score(rows.labels[test], output.scores[0, test])


def inputs(rows, store=None, **readings):
    return DetectorInput(store=store, rows=rows, layer=2, readings=readings)


def chosen(output):
    return {row.metric: row.value for row in output.chosen}


@pytest.mark.parametrize("answer_span", ["emitting", "literal"])
def test_a_step_is_counted_from_the_token_before_the_answer(answer_span):
    answers = noise(np.zeros(30))
    store = stored(answers, answer_span)
    n_tokens = np.array([len(answer) - 1 for answer in answers])
    np.testing.assert_array_equal(last_steps(store), n_tokens)
    for step in range(-1, 6):
        result = states_at(store, np.full(30, step), LAYERS[1], n_chunk=7)
        first = int(answer_span == "literal")
        for answer, state in zip(answers, result, strict=True):
            if first <= step < len(answer):
                np.testing.assert_array_equal(state, answer[step, 1])
            else:
                assert np.isnan(state).all()


@pytest.mark.parametrize(
    ("name", "step", "size"),
    [("saplma_last", -1, 3.0), ("saplma_mean", slice(None), 2)],
)
def test_saplma_reads_the_planted_layer_and_step(name, step, size):
    labels = some_labels(900)
    rows, store = rows_of(labels), stored(planted(labels, step, size=size))
    result = catalogue()[name].score(inputs(rows, store))
    assert result.scores.shape == (3, 900) and chosen(result) == {"layer": 2}
    assert measured(result, rows) > 0.9
    # The fourth answer is empty, and has no last token.
    missing = [[i, 3] for i in range(3)] if name == "saplma_last" else []
    assert np.argwhere(np.isnan(result.scores)).tolist() == missing


@pytest.mark.parametrize("name", ["saplma_mean", "linear_probe"])
def test_an_empty_answer_has_no_mean_state_in_a_literal_span(name):
    labels = some_labels(900)
    answers = planted(labels, slice(None), size=2)
    rows, store = rows_of(labels), stored(answers, "literal")
    result = catalogue()[name].score(inputs(rows, store))
    assert measured(result, rows) > 0.9
    assert {*np.argwhere(np.isnan(result.scores))[:, 1]} == {3}


def test_saplma_of_the_last_token_reads_no_other_step():
    labels = some_labels(900)
    rows, store = rows_of(labels), stored(planted(labels, step=0))
    result = catalogue()["saplma_last"].score(inputs(rows, store))
    assert abs(measured(result, rows) - 0.5) < 0.12  # of 300 answers, s.d. 0.033


def test_the_layer_is_chosen_on_validation_not_on_training_rows():
    labels = some_labels(600)
    answers = planted(labels, slice(None))
    for answer, label in zip(answers[:200], labels, strict=False):
        answer[:, 2, 1] += 9 * label  # perfect in training, absent after it
    result = catalogue()["linear_probe"].score(inputs(rows_of(labels), stored(answers)))
    assert chosen(result)["layer"] == LAYERS[1]


def test_saplma_is_the_published_network_fitted_as_torch_would():
    states = np.random.default_rng(0).standard_normal((70, D)).astype(np.float32)
    labels, config = states[:, 0] > 0, SaplmaConfig(n_seeds=2, n_epochs=2)
    key = jax.random.fold_in(jax.random.key(config.root_seed), 1)
    init_key, *epoch_keys = jax.random.split(key, 1 + config.n_epochs)
    params = SaplmaNetwork().init(init_key, states[:1])["params"]
    layers = []
    for number in range(4):
        dense = params[f"Dense_{number}"]
        layers += [torch.nn.Linear(*dense["kernel"].shape), torch.nn.ReLU()]
        layers[-2].weight.data = torch.tensor(np.asarray(dense["kernel"]).T.copy())
        layers[-2].bias.data = torch.tensor(np.asarray(dense["bias"]))
    assert [layer.out_features for layer in layers[::2]] == [256, 128, 64, 1]
    network = torch.nn.Sequential(*layers[:-1])
    adam = torch.optim.Adam(network.parameters(), 1e-3, eps=1e-7)
    inputs, targets = torch.tensor(states), torch.tensor(labels, dtype=torch.float32)
    for epoch_key in epoch_keys:
        order = np.asarray(jax.random.permutation(epoch_key, len(states)))
        for batch in torch.tensor(order).split(32):
            adam.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(
                network(inputs[batch])[:, 0], targets[batch]
            ).backward()
            adam.step()
    with torch.no_grad():
        expected = network(inputs)[:, 0].numpy()
    result = saplma_logits(states, labels, states, config)
    # Adam divides gradients by their own size, so rounding of tiny ones shows.
    np.testing.assert_allclose(result[1], expected, atol=1e-4)
    assert np.abs(result[1] - result[0]).max() > 1e-2


def test_labels_of_only_one_class_are_refused():
    store = stored(noise(np.ones(60)))
    for labels in (np.ones(60), np.arange(60) < 20, np.arange(60) % 20 < 40):
        with pytest.raises(ValueError, match="are of one class"):
            catalogue()["linear_probe"].score(inputs(rows_of(labels), store))
    with pytest.raises(ValueError, match="there are no training labels"):
        both_classes([], 0, "training")


@pytest.mark.parametrize(
    ("name", "reading", "shape", "max_iter", "features_of"),
    [
        # The default regression on the best block.
        ("llms_know", "mlp_exact_answer", (4, D), 100, lambda x: x[:, 2]),
        # One regression on the ratios of all heads.
        ("lookback_lens", "lookback", (4, 2), 1000, lambda x: x.reshape(600, 8)),
    ],
)
def test_a_published_regression_is_scikit_learns_on_what_was_read(
    name, reading, shape, max_iter, features_of
):
    labels = some_labels(600)
    rows = rows_of(labels, "with_context")
    values = np.random.default_rng(1).standard_normal((600, *shape)).astype(np.float32)
    values[:, 2, 0] += 3 * labels
    values[5, 0, 0] = np.nan
    values[5, 2, 0] = np.nan
    output = catalogue()[name].score(inputs(rows, **{reading: values}))
    assert chosen(output) == ({"layer": 3} if name == "llms_know" else {})
    assert measured(output, rows) > 0.9
    assert np.flatnonzero(np.isnan(output.scores[0])).tolist() == [5]
    features, others = features_of(values), np.arange(600) != 5
    train = np.delete(rows.where("train"), 5)
    official = LogisticRegression(max_iter=max_iter).fit(features[train], labels[train])
    expected = official.decision_function(features[others].astype(float))
    np.testing.assert_allclose(output.scores[0, others], expected, rtol=1e-3)


def test_entropies_split_at_the_published_threshold():
    entropies = np.array([0, 0, 0, 0.3, 0.5, 0.69, 1.2, 1.6, 2.0, 2.3])
    assert entropy_threshold(entropies) == pytest.approx(0.6969697, abs=1e-7)


@pytest.mark.parametrize(
    ("aurocs", "expected"),
    [
        ([0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.6, 1.0], (1, 6)),  # the last is in no range
        ([0.75] * 8, (0, 5)),
        ([0.1, 0.5, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 0.2], (2, 7)),
        ([0.5, 0.6, 0.7], (0, 2)),
        ([0.5], (0, 1)),
    ],
)
def test_neighbouring_layers_are_chosen_by_their_mean(aurocs, expected):
    assert best_range(aurocs) == expected


def test_the_official_code_reads_another_token_than_the_second_last():
    last = lengths = np.array([0, 1, 2, 3, 4])
    np.testing.assert_array_equal(official_second_last(lengths, last), [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(second_last(lengths, last), [-1, 0, 1, 2, 3])
    np.testing.assert_array_equal(before_generation(lengths, last), [0, 0, 0, 0, 0])


@pytest.mark.parametrize("answer_span", ["emitting", "literal"])
def test_a_token_is_counted_from_the_answers_end_even_if_it_was_cut(answer_span):
    # Three answers of three tokens, the second of which was cut: what its last token
    # emitted is unknown, so that its span ends a token earlier.
    start = 2 + int(answer_span == "literal")
    spans = np.array([[(0, 0), (0, start), (start, stop)] for stop in (6, 5, 6)])
    values = {"hidden": np.zeros((18, 1, D), np.float32)}
    store = memory_store(values, [6, 6, 6], spans, layers=(0,), answer_span=answer_span)
    lengths = answer_lengths(store)
    np.testing.assert_array_equal(lengths, [3, 3, 3])
    last = last_steps(store)
    np.testing.assert_array_equal(last, [3, 2, 3])
    np.testing.assert_array_equal(official_second_last(lengths, last), [1, 1, 1])
    np.testing.assert_array_equal(second_last(lengths, last), [2, 2, 2])


def disagreeing(n=900):
    """Answers on which draws agree are right; the prompt's last state shows it."""
    labels = some_labels(n)
    answers = planted(labels, step=0)
    entropies = np.random.default_rng(2).uniform(0, 0.5, n) + 1.5 * ~labels
    return rows_of(labels), answers, entropies


def probed(rows, answers, entropies, step_of, answer_span="emitting"):
    store = stored(answers, answer_span)
    steps = step_of(answer_lengths(store), last_steps(store))
    states_of = partial(states_at, store, steps)
    return entropy_probe(states_of, LAYERS, entropies, rows, "sep")


def test_an_entropy_probe_finds_disagreement_only_where_it_was_planted():
    rows, answers, entropies = disagreeing()
    result = probed(rows, answers, entropies, before_generation)
    assert measured(result, rows) > 0.9
    assert 0.5 < chosen(result)["threshold"] <= 1.5
    assert {"first_layer": 0, "last_layer": 2}.items() <= chosen(result).items()
    # At the last token nothing was planted; of 300 answers, s.d. 0.033.
    elsewhere = probed(rows, answers, entropies, lambda lengths, last: last)
    assert abs(measured(elsewhere, rows) - 0.5) < 0.12


def test_an_entropy_probe_learns_only_from_entropies_of_training_rows():
    rows, answers, entropies = disagreeing(300)
    only = np.where(np.arange(300) < 100, entropies, np.nan)
    first, second = (
        probed(rows, answers, x, before_generation) for x in (entropies, only)
    )
    np.testing.assert_array_equal(first.scores, second.scores)
    with pytest.raises(ValueError, match="beatrice sample RUN --split train"):
        probed(rows, answers, np.full(300, np.nan), before_generation)
    with pytest.raises(ValueError, match="literal answer span lacks the last prompt"):
        probed(rows, answers, entropies, before_generation, "literal")


N_READ = 300
# All fits of one seed share what is compiled: shapes and this configuration.
SMALL = GnosisConfig(
    width=16, head_widths=(16,), n_grid=1, n_seeds=1, n_epochs=8, batch_size=16
)


NOT_READ = (3, 4, N_READ - 1)  # two training answers, and one test answer


def gnosis_inputs(labels, where):
    """Noise, but for one statistic of every head, or one channel of one step."""
    rng = np.random.default_rng(1)
    maps = rng.standard_normal((N_READ, 2, 3, 23)).astype(np.float32)
    states = rng.standard_normal((N_READ, 8, 6)).astype(np.float32)
    if where == "maps":
        maps[:, :, :, 4] += 4 * labels[:, None, None]
    else:
        states[:, 5, 2] += 4 * labels
    maps[NOT_READ[0], 0, 0, 0] = states[NOT_READ[1]] = maps[NOT_READ[2]] = np.nan
    return maps, states


@pytest.mark.parametrize("where", ["maps", "states"])
def test_either_stream_suffices_to_tell_right_from_wrong(where):
    labels = some_labels(N_READ)
    result = gnosis_scores(*gnosis_inputs(labels, where), rows_of(labels), SMALL)
    assert measured(result, rows_of(labels)) > 0.85
    (chosen,) = result.chosen
    assert chosen.metric == "epoch" and 1 <= chosen.value <= SMALL.n_epochs
    assert result.scores.shape == (1, N_READ) and result.scores.dtype == np.float64
    assert tuple(np.flatnonzero(np.isnan(result.scores[0]))) == NOT_READ


@pytest.mark.parametrize("work", ["saplma", "gnosis"])
def test_a_published_detector_depends_on_no_setting_of_jax(work):
    labels = some_labels(N_READ)
    rows, store = rows_of(labels), stored(planted(labels, step=-1))

    def scores():
        if work == "saplma":
            return catalogue()["saplma_last"].score(inputs(rows, store)).scores
        return gnosis_scores(*gnosis_inputs(labels, "maps"), rows, SMALL).scores

    usual = scores()
    numbers = jax.enable_x64(True), jax.default_prng_impl("rbg")
    with numbers[0], numbers[1], jax.transfer_guard("disallow"), jax.debug_nans(True):
        np.testing.assert_array_equal(scores(), usual)


TRAIN, VALID = np.arange(5, 103), np.arange(150, 250)  # as many as above, all read


APPLY = jax.jit(GnosisHead(SMALL).apply)


@cache
def fitted(**changes):
    """Return weights and epochs fitted to the maps, what is read, and the labels."""
    labels = some_labels(N_READ)
    inputs = Inputs(*gnosis_inputs(labels, "maps"))
    config = dataclasses.replace(SMALL, **changes)
    rows = inputs.at(TRAIN), labels[TRAIN], inputs.at(VALID), labels[VALID]
    return *fit_heads(*rows, config), inputs, labels


def of_seed(tree, seed):
    return jax.tree.map(lambda x: x[seed], tree)


def test_a_seed_among_several_is_fitted_as_it_is_alone():
    several, epochs, *_ = fitted(n_seeds=2, patience=1)
    alone, epochs_alone, *_ = fitted(patience=1)
    assert epochs[0] == epochs_alone[0]
    pairs = map(jax.tree.leaves, (several, alone))
    for leaf, other in zip(*pairs, strict=True):
        # Adam divides gradients by their own size, so rounding of tiny ones shows.
        np.testing.assert_allclose(leaf[0], other[0], atol=1e-3)
    kernels = jax.tree.leaves(several)
    assert max(float(np.abs(x[1] - x[0]).max()) for x in kernels) > 0.05


def test_a_head_keeps_the_epoch_that_is_best_on_validation():
    _, epochs, inputs, labels = fitted(patience=6)
    values = []
    for patience in (6, 1):
        params = of_seed(fitted(patience=patience)[0], 0)
        values.append(roc_auc_score(labels[VALID], APPLY(params, *inputs.at(VALID))))
    assert 1 <= epochs[0] <= SMALL.n_epochs and values[0] >= values[1] > 0.5


def test_the_order_of_steps_and_heads_matters_and_rows_do_not_mix():
    several, _, inputs, _ = fitted(patience=1)
    params, (maps, states) = of_seed(several, 0), inputs.at(VALID)
    plain = APPLY(params, maps, states)
    for moved in ((maps[:, ::-1], states), (maps[:, :, ::-1], states)):
        assert np.abs(APPLY(params, *moved) - plain).max() > 1e-5
    turned = APPLY(params, maps, states[:, ::-1])
    assert np.abs(turned - plain).max() > 1e-5
    is_first = np.arange(len(maps)) == 0
    others = (x * is_first.reshape(-1, *[1] * (x.ndim - 1)) for x in (maps, states))
    np.testing.assert_allclose(APPLY(params, *others)[0], plain[0], atol=1e-5)


def test_sums_of_shifted_steps_are_convolutions():
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((2, 9, 16)).astype(np.float32)
    channels = torch.from_numpy(steps).mT

    params = ChannelConv(1).init(jax.random.key(0), steps)
    kernel = torch.tensor(np.array(params["params"]["kernel"])).reshape(3, 16)
    expected = conv1d(channels, kernel.mT[:, None], padding=1, groups=16)
    np.testing.assert_allclose(
        ChannelConv(1).apply(params, steps), expected.mT, atol=1e-5
    )

    params = SpreadConv(3).init(jax.random.key(0), steps)
    kernel = torch.tensor(np.array(params["params"]["kernel"]))
    n_groups = kernel.shape[1]
    weights = kernel.permute(1, 3, 2, 0).flatten(0, 1)
    expected = conv1d(channels, weights, padding=6, dilation=3, groups=n_groups)
    expected = gelu(group_norm(expected, n_groups, eps=1e-6), approximate="tanh")
    np.testing.assert_allclose(
        SpreadConv(3).apply(params, steps), expected.mT, atol=1e-5
    )
