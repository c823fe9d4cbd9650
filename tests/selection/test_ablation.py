"""What a run does only where it is asked for: rankings and ablations."""

import numpy as np
import pytest

from beatrice.extract.records import IN_DOMAIN
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.families import (
    FAMILIES,
    FLOATS,
    N_SUBSETS,
    SUBSET_NAMES,
    paper_dims,
    subset_index,
)
from beatrice.jaxprobe.fusion import pool_outputs
from beatrice.jaxprobe.grid import Block, Member
from beatrice.jaxprobe.rows import Bucket, TrainingSet
from beatrice.jaxprobe.tokens import FamilyTokens
from beatrice.selection.ablation import (
    candidates_without,
    own_scores,
    replaced,
    rows_without,
    undefined_rows,
    variants,
)
from beatrice.selection.exhaustive import Ranking, _rank_rows, all_sets, traits
from tests.jaxprobe.samples import rows_like


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
def test_without_a_family_only_the_encoders_that_do_not_read_it_are_left(
    setting, n_pool
):
    for family, letter in zip(FAMILIES, "HPRA", strict=True):
        left = candidates_without(setting, n_pool, family)
        assert len(left) == n_pool // 15 * 7  # 2^3 - 1 subsets of the other three
        assert all(letter not in SUBSET_NAMES[i % N_SUBSETS] for i in left)


def test_the_variants_are_four_families_and_the_settings_spans():
    families = ["without_hidden", "without_prob", "without_resid", "without_attn"]

    def spans(*names):
        return [f"{way}_{x}_span" for way in ("zeroed", "without") for x in names]

    assert variants("closed_book") == families + spans("question", "answer")
    assert variants("with_context") == families + spans("context", "question", "answer")


def test_the_papers_way_zeroes_a_span_in_training_and_evaluates_it_whole():
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
    zeroed = rows_without(data, "closed_book", "zeroed_answer_span")
    ((train_data,), (valid_data,)) = zeroed.in_memory
    for trained in (train_data.tokens, zeroed.read_train(None)):
        np.testing.assert_array_equal(trained.tokens[0][:2], tokens[0][:2])
        assert not np.any(trained.tokens[0][2:]) and np.all(trained.masks[1])
    for evaluated in (valid_data.tokens, zeroed.read(None)):
        np.testing.assert_array_equal(evaluated.tokens[0], tokens[0])
    left_out = rows_without(data, "closed_book", "without_answer_span")
    held = [held.tokens for split in left_out.in_memory for held in split]
    for item in (*held, left_out.read(None), left_out.read_train(None)):
        assert np.all(item.masks[0]) and not np.any(item.masks[1])


def test_the_encoders_alone_say_the_mean_of_their_probabilities():
    logits = np.random.default_rng(0).normal(size=(2 * N_SUBSETS, 6))
    pool = pool_outputs(
        (MemberOutputs(logits, np.zeros((2 * N_SUBSETS, 6, 4))),), 2, np.ones(6, bool)
    )
    result = own_scores(pool, (3, 9))
    by_hand = 1 / (1 + np.exp(-logits.reshape(2, N_SUBSETS, 6)[:, [3, 9]]))
    np.testing.assert_allclose(result, by_hand.mean(axis=1), rtol=1e-6)


def test_the_outputs_of_retrained_encoders_take_the_place_of_the_old_ones():
    grid = np.arange(2 * N_SUBSETS, dtype=np.float32)
    outputs = MemberOutputs(np.repeat(grid[:, None], 3, 1), np.zeros((30, 3, 4)))
    subsets = (subset_index("P"), subset_index("HA"))
    new = MemberOutputs(-np.ones((4, 3)) * np.arange(1, 5)[:, None], np.ones((4, 3, 4)))
    result = replaced(outputs, new, subsets)
    at = [1, 8, 16, 23]  # P and HA of seed 0, then of seed 1
    np.testing.assert_array_equal(result.logits[at][:, 0], [-1, -2, -3, -4])
    others = np.setdiff1d(np.arange(30), at)
    np.testing.assert_array_equal(result.logits[others], outputs.logits[others])
    np.testing.assert_array_equal(result.pooled.any(axis=(1, 2)).nonzero()[0], at)
    assert not outputs.pooled.any()  # what was given is left as it was


def test_blocks_hold_every_subset_with_every_seed_once():
    members = list(Block((4, 1), (0, 1)).members)
    assert members == [Member(4, 0), Member(1, 0), Member(4, 1), Member(1, 1)]


def test_a_search_that_found_nothing_is_null_with_its_reason():
    result = undefined_rows("without_prob", some_rows())
    for dataset in (IN_DOMAIN, "microworld"):
        rows_of_set = [r for r in result if r.dataset == dataset]
        assert [(r.split, r.metric, r.n, r.n_failed) for r in rows_of_set] == [
            ("validation", "auroc", 2, 0),
            ("validation", "auprc", 2, 0),
            ("test", "auroc", 1, 1),
            ("test", "auprc", 1, 1),
        ]
    assert all(r.value is None and "better than chance" in r.reason for r in result)


def test_greedys_place_is_three_rows():
    aurocs = np.array([[0.5], [0.75], [0.875], [0.625]], np.float32)
    ranking = Ranking(all_sets(4, 3), aurocs)
    result = {r.metric: r.value for r in _rank_rows(ranking, (0, 1, 3), some_rows())}
    assert result == {"rank": 2, "n_sets": 4, "auroc_gap": 0.125}


def test_traits_part_the_pool_by_family_and_pass():
    result = traits("with_context", 30)
    assert list(result)[:2] == [("H", "closed_book"), ("H", "with_context")]
    assert {int(t.sum()) for t in result.values()} == {8}  # subsets that hold a family
    assert not (result["P", "closed_book"] & result["P", "with_context"]).any()
    assert list(traits("closed_book", 15)) == [(x, "closed_book") for x in "HPRA"]
