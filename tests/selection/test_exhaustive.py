"""What a run does only on request: rankings and ablations."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from beatrice.extract.records import IN_DOMAIN
from beatrice.jaxprobe.config import SelectConfig
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.families import (
    FAMILIES,
    FLOATS,
    N_SUBSETS,
    SUBSET_NAMES,
    paper_dims,
    subset_index,
)
from beatrice.jaxprobe.fusion import pool_outputs, train_heads
from beatrice.jaxprobe.rows import Bucket, TrainingSet
from beatrice.jaxprobe.tokens import FamilyTokens
from beatrice.selection import ablation
from beatrice.selection.exhaustive import (
    Enumeration,
    Ranking,
    _greedy_members,
    _rank_rows,
    all_sets,
    n_with_trait,
    traits,
)
from tests.jaxprobe.samples import random_codes, rows_like
from tests.records import flip_bit
from tests.selection.test_greedy import FUSION, TRAIN, search, trainer

KNOWING = (0, 2, 5)
CODES = random_codes(600, 0, KNOWING), random_codes(500, 1, KNOWING)


def enumeration(folder, codes=CODES, protocol=TRAIN):
    config = SelectConfig(head=FUSION, train=protocol)
    return Enumeration(trainer(*codes, config), folder)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory):
    return enumeration(tmp_path_factory.mktemp("pieces")).run()


def brute_force():
    """The mean AUROC of every set of three, by scikit-learn on the encoders' scores.

    In the planted codes, everything that an encoder knows is in its score.
    """
    train, valid = CODES
    result = {}
    for members in itertools.combinations(range(6), 3):
        aurocs = []
        for seed in range(2):
            rows, valid_rows = (
                np.asarray(block.outputs)[seed, list(members), -1].T for block in CODES
            )
            model = LogisticRegression().fit(rows, np.asarray(train.labels))
            scores = model.decision_function(valid_rows)
            aurocs.append(roc_auc_score(np.asarray(valid.labels), scores))
        result[members] = np.mean(aurocs)
    return result


def test_the_best_set_is_the_one_found_by_brute_force_with_scikit_learn(ranking):
    theirs = brute_force()
    ours = dict(zip(map(tuple, ranking.sets.tolist()), ranking.means, strict=True))
    assert ours.keys() == theirs.keys()
    assert max(ours, key=ours.get) == max(theirs, key=theirs.get) == KNOWING
    both = [(ours[s], theirs[s]) for s in ours]
    assert spearmanr(both).statistic > 0.8  # 10 of 20 sets tie but for noise
    assert max(abs(a - b) for a, b in both) < 0.06  # 500 rows: s.e. 0.02


def test_greedy_and_the_enumeration_share_one_executable_per_setting(tmp_path):
    for number, n_rows in enumerate((320, 360)):  # two settings: two shapes
        codes = random_codes(n_rows, 3), random_codes(200, 4)
        before = train_heads._cache_size()
        search(*codes, max_encoders=2)
        assert train_heads._cache_size() == before + 1
        enumeration(tmp_path / str(number), codes).run()
        assert train_heads._cache_size() == before + 1


def test_greedy_search_and_the_enumeration_score_sets_alike(ranking):
    result = search(*CODES, margin=-1.0, max_encoders=3)
    assert result.members == KNOWING
    heads = trainer(*CODES)
    assert _greedy_members(heads, (5,)) == KNOWING  # stopped early, so searched on
    assert _greedy_members(heads, (4, 1, 3, 0)) == (1, 3, 4)
    assert ranking.rank_of(result.members) == 1 and ranking.gap_of(result.members) == 0
    assert ranking.means[ranking.row_of(result.members)] == pytest.approx(
        result.auroc, abs=1e-6
    )
    third = result.path[-1]
    for candidate, aurocs in zip(third.candidates, third.aurocs, strict=True):
        two = set(result.members) - {third.best}
        row = ranking.row_of(tuple(two | {candidate}))
        np.testing.assert_array_equal(ranking.aurocs[row], aurocs)


def test_a_rank_counts_the_better_sets_and_ties_share_a_rank():
    aurocs = np.array([[5, 7], [6, 6], [7, 7], [4, 4]], np.float32) / 8
    ranking = Ranking(all_sets(4, 3), aurocs)
    theirs = rankdata(-aurocs.mean(axis=1), method="min")
    sets = [tuple(s) for s in ranking.sets.tolist()]
    assert [ranking.rank_of(s) for s in sets] == theirs.tolist() == [2, 2, 1, 4]
    assert ranking.order.tolist() == [2, 0, 1, 3]
    assert ranking.gap_of(sets[3]) == 0.375
    assert ranking.rank_of(sets[1][::-1]) == 2
    rows = _rank_rows(ranking, (0, 1, 3), some_rows())  # the greedy set
    expected = {"rank": 2, "n_sets": 4, "auroc_gap": 0.125}
    assert {row.metric: row.value for row in rows} == expected


class Stopped(Exception):
    """The run was killed here."""


def test_a_killed_enumeration_continues_after_its_last_finished_call(tmp_path, ranking):
    calls = []

    def stop_at_the_second(n_heads):
        calls.append(n_heads)
        if len(calls) == 2:
            raise Stopped

    search = enumeration(tmp_path)
    assert search.n_missing() == 20 * 2
    with pytest.raises(Stopped):
        search.run(stop_at_the_second)
    again = enumeration(tmp_path)
    assert calls == [12, 12] and again.n_missing() == 16
    rest = []
    result = again.run(rest.append)
    assert rest == [12, 4] and again.n_missing() == 0
    np.testing.assert_array_equal(result.aurocs, ranking.aurocs)
    assert enumeration(tmp_path).run(pytest.fail).aurocs.shape == (20, 2)


def test_a_damaged_or_foreign_piece_is_trained_again(tmp_path, ranking):
    search = enumeration(tmp_path)
    search.run()
    flip_bit(sorted(tmp_path.iterdir())[1], -3)
    assert enumeration(tmp_path).n_missing() == 12
    np.testing.assert_array_equal(enumeration(tmp_path).run().aurocs, ranking.aurocs)
    other = dataclasses.replace(TRAIN, max_epochs=7)
    assert enumeration(tmp_path, protocol=other).n_missing() == 40
    flipped = CODES[1]._replace(labels=1 - CODES[1].labels)
    assert enumeration(tmp_path, (CODES[0], flipped)).n_missing() == 40


def test_parts_of_a_ranking_count_the_encoders_that_have_a_trait():
    assert len(all_sets(15, 3)) == 455 and len(all_sets(30, 3)) == 4060  # the paper's
    assert len({tuple(s) for s in all_sets(7, 3)}) == math.comb(7, 3)
    sets = all_sets(4, 3)  # 012, 013, 023, 123
    aurocs = np.array([[0.1], [0.4], [0.3], [0.2]], np.float32)
    traits = np.array([[False, False, False, True], [True, True, False, False]])
    result = n_with_trait(Ranking(sets, aurocs), traits, n_bins=4)
    np.testing.assert_array_equal(result, [[1, 1, 1, 0], [2, 1, 1, 2]])
    halves = n_with_trait(Ranking(sets, aurocs), traits, n_bins=2)
    np.testing.assert_array_equal(halves, [[1, 0.5], [1.5, 1.5]])
    assert n_with_trait(Ranking(sets, aurocs), traits, n_bins=60).shape == (2, 4)


def some_rows():
    return rows_like(
        [True, False, True, False],
        setting="with_context",
        datasets=["microworld"] * 4,
        splits=["validation", "validation", "test", "test"],
        is_labelled=[True, True, True, False],
    )


@pytest.mark.parametrize(
    ("setting", "n_pool"), [("closed_book", 15), ("with_context", 30)]
)
def test_without_a_family_only_the_encoders_that_do_not_read_it_remain(setting, n_pool):
    for family, letter in zip(FAMILIES, "HPRA", strict=True):
        left = ablation.candidates_without(setting, n_pool, family)
        assert len(left) == n_pool // 15 * 7  # 2^3 - 1 subsets of the other three
        assert all(letter not in SUBSET_NAMES[i % N_SUBSETS] for i in left)


def test_the_variants_remove_each_family_and_each_span_of_the_setting():
    families = ["without_hidden", "without_prob", "without_resid", "without_attn"]

    def spans(*names):
        return [f"{way}_{x}_span" for way in ("zeroed", "without") for x in names]

    assert ablation.variants("closed_book") == families + spans("question", "answer")
    assert ablation.variants("with_context") == families + spans(
        "context", "question", "answer"
    )


def test_the_papers_ablation_zeroes_a_span_in_training_and_not_in_evaluation():
    rng = np.random.default_rng(0)
    masks = tuple(np.ones((2, n), bool) for n in (5, 4))
    tokens = (rng.normal(size=(4, 5, 3)).astype(np.float32),)

    def read(where):
        return FamilyTokens(tokens, masks)

    data = TrainingSet(
        rows=some_rows(),
        layer=0,
        dims=paper_dims(hidden=3, prob=0, resid=0, attn=0),
        standardizer=None,
        device_dtypes=FLOATS,
        n_batch=2,
        read=read,
        read_train=read,
        lengths=np.full((4, 2), (5, 4)),
        where=(np.arange(2), np.arange(2)),
        in_memory=((Bucket(np.arange(2), read(None)),),) * 2,
    )
    zeroed = ablation.rows_without(data, "closed_book", "zeroed_answer_span")
    ((train_data,), (valid_data,)) = zeroed.in_memory
    for trained in (train_data.tokens, zeroed.read_train(None)):
        np.testing.assert_array_equal(trained.tokens[0][:2], tokens[0][:2])
        assert not np.any(trained.tokens[0][2:]) and np.all(trained.masks[1])
    for evaluated in (valid_data.tokens, zeroed.read(None)):
        np.testing.assert_array_equal(evaluated.tokens[0], tokens[0])
    left_out = ablation.rows_without(data, "closed_book", "without_answer_span")
    held = [held.tokens for split in left_out.in_memory for held in split]
    for item in (*held, left_out.read(None), left_out.read_train(None)):
        assert np.all(item.masks[0]) and not np.any(item.masks[1])


def test_own_scores_are_the_mean_probability_of_the_encoders():
    logits = np.random.default_rng(0).normal(size=(2 * N_SUBSETS, 6))
    outputs = MemberOutputs(logits, np.zeros((2 * N_SUBSETS, 6, 4)))
    pool = pool_outputs((outputs,), 2, np.ones(6, bool), np.arange(6))
    result = ablation.own_scores(pool, (3, 9))
    by_hand = 1 / (1 + np.exp(-logits.reshape(2, N_SUBSETS, 6)[:, [3, 9]]))
    np.testing.assert_allclose(result, by_hand.mean(axis=1), rtol=1e-6)


def test_the_outputs_of_retrained_encoders_replace_the_old_ones():
    grid = np.arange(2 * N_SUBSETS, dtype=np.float32)
    outputs = MemberOutputs(np.repeat(grid[:, None], 3, 1), np.zeros((30, 3, 4)))
    subsets = (subset_index("P"), subset_index("HA"))
    new = MemberOutputs(-np.ones((4, 3)) * np.arange(1, 5)[:, None], np.ones((4, 3, 4)))
    result = ablation.replaced(outputs, new, subsets)
    at = [1, 8, 16, 23]  # P and HA of seed 0, then of seed 1
    np.testing.assert_array_equal(result.logits[at][:, 0], [-1, -2, -3, -4])
    others = np.setdiff1d(np.arange(30), at)
    np.testing.assert_array_equal(result.logits[others], outputs.logits[others])
    np.testing.assert_array_equal(result.pooled.any(axis=(1, 2)).nonzero()[0], at)
    assert not outputs.pooled.any()  # the input is unchanged


def test_a_search_that_found_nothing_gives_null_rows_with_the_reason():
    result = ablation.undefined_rows("without_prob", some_rows())
    assert [(r.dataset, r.split, r.metric, r.n, r.n_failed) for r in result] == [
        (dataset, split, metric, *counts)
        for dataset in (IN_DOMAIN, "microworld")
        for split, counts in (("validation", (2, 0)), ("test", (1, 1)))
        for metric in ("auroc", "auprc")
    ]
    assert all(r.value is None and "better than chance" in r.reason for r in result)


def test_traits_split_the_pool_by_family_and_pass():
    result = traits("with_context", 30)
    assert list(result)[:2] == [("H", "closed_book"), ("H", "with_context")]
    assert {int(t.sum()) for t in result.values()} == {8}  # subsets that hold a family
    assert not (result["P", "closed_book"] & result["P", "with_context"]).any()
    assert list(traits("closed_book", 15)) == [(x, "closed_book") for x in "HPRA"]
