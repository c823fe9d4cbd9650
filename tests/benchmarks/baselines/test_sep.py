"""Semantic entropy probes: the published rules, and what was planted is found."""

from functools import partial

import numpy as np
import pytest

from beatrice.benchmarks.baselines.detectors.choice import last_steps, states_at
from beatrice.benchmarks.baselines.detectors.sep import (
    before_generation,
    best_range,
    entropy_probe,
    entropy_threshold,
    official_second_last,
    second_last,
)
from tests.benchmarks.baselines.test_probes import (
    LAYERS,
    chosen,
    measured,
    planted,
    rows_of,
    some_labels,
    stored,
)


def test_entropies_are_parted_where_the_published_code_parts_them():
    entropies = np.array([0, 0, 0, 0.3, 0.5, 0.69, 1.2, 1.6, 2.0, 2.3])
    assert entropy_threshold(entropies) == pytest.approx(0.6969697, abs=1e-7)


@pytest.mark.parametrize(
    ("aurocs", "expected"),
    [
        ([0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.6, 1.0], (1, 6)),  # the last is in none
        ([0.75] * 8, (0, 5)),
        ([0.1, 0.5, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 0.2], (2, 7)),
        ([0.5, 0.6, 0.7], (0, 2)),
        ([0.5], (0, 1)),
    ],
)
def test_neighbouring_layers_are_chosen_by_their_mean(aurocs, expected):
    assert best_range(aurocs) == expected


def test_the_second_last_token_and_what_the_code_reads_for_it():
    last = np.array([0, 1, 2, 3, 4])
    np.testing.assert_array_equal(official_second_last(last), [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(second_last(last), [-1, 0, 1, 2, 3])
    np.testing.assert_array_equal(before_generation(last), [0, 0, 0, 0, 0])


def disagreeing(n=900):
    """Answers on which draws agree are right; the prompt's last state shows it."""
    labels = some_labels(n)
    answers = planted(labels, step=0)
    entropies = np.random.default_rng(2).uniform(0, 0.5, n) + 1.5 * ~labels
    return rows_of(labels), answers, entropies


def probed(rows, answers, entropies, step_of):
    store = stored(answers)
    states_of = partial(states_at, store, step_of(last_steps(store)))
    return entropy_probe(states_of, LAYERS, entropies, rows, "sep")


def test_an_entropy_probe_finds_where_disagreement_was_planted_and_only_there():
    rows, answers, entropies = disagreeing()
    found = probed(rows, answers, entropies, before_generation)
    assert measured(found, rows) > 0.9
    assert 0.5 < chosen(found)["threshold"] <= 1.5
    assert {"first_layer": 0, "last_layer": 2}.items() <= chosen(found).items()
    # At the last token nothing was planted; of 300 answers, s.d. 0.033.
    elsewhere = probed(rows, answers, entropies, lambda last: last)
    assert abs(measured(elsewhere, rows) - 0.5) < 0.12


def test_permuted_entropies_teach_nothing():
    rows, answers, entropies = disagreeing()
    permuted = np.random.default_rng(3).permutation(entropies)
    found = probed(rows, answers, permuted, before_generation)
    # The probe's direction is noise, and all of it lies along one planted channel.
    aurocs = [measured(found, rows)]
    for seed in range(4, 10):
        permuted = np.random.default_rng(seed).permutation(entropies)
        found = probed(rows, answers, permuted, before_generation)
        aurocs.append(measured(found, rows))
    spread = np.std(aurocs, ddof=1) / np.sqrt(len(aurocs))
    assert abs(np.mean(aurocs) - 0.5) < 3.7 * spread  # t of 6 degrees, p = .01


def test_an_entropy_probe_learns_from_entropies_of_training_rows_alone():
    rows, answers, entropies = disagreeing(300)
    only = np.where(np.arange(300) < 100, entropies, np.nan)
    first, second = (
        probed(rows, answers, x, before_generation) for x in (entropies, only)
    )
    np.testing.assert_array_equal(first.scores, second.scores)
    with pytest.raises(ValueError, match="beatrice sample"):
        probed(rows, answers, np.full(300, np.nan), before_generation)


def test_an_answer_too_short_for_its_token_has_no_score():
    rows, answers, entropies = disagreeing(300)
    found = probed(rows, answers, entropies, second_last)
    assert np.flatnonzero(np.isnan(found.scores[0])).tolist() == [3]
