"""Greedy search, and how much too good it looks on the rows that it searched."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from beatrice.jaxprobe.calibrate import Pool, pool_of
from beatrice.jaxprobe.config import FusionConfig, SelectConfig, TrainConfig
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.fusion import train_heads
from beatrice.selection.greedy import (
    HeadTrainer,
    _gap_rows,
    _summary,
    fused_probability,
    gaps,
    pool_with_validation,
    select_heads,
    slots_for,
    split_in_halves,
)
from tests.jaxprobe.samples import N_SEEDS, random_codes, rows_like

TRAIN = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=8)
FUSION = FusionConfig(hidden=8, n_slots=4)
N_POOL, D_POOLED = 6, 4


SEARCH = SelectConfig(head=FUSION, train=TRAIN)


def trainer(train, valid, config=SEARCH):
    rows = rows_like(np.asarray(valid.labels) > 0)
    pool = Pool(train, valid, all_rows=valid, rows=rows, n_subsets=N_POOL)
    return HeadTrainer(pool, config)


def search(*codes, **options):
    return trainer(*codes).search(**options)


def test_greedy_finds_the_planted_encoders_and_stops():
    # On 300 rows, half a point of AUROC is noise.
    selection = search(random_codes(400, 0), random_codes(300, 1), margin=0.01)
    assert set(selection.members) == {1, 4}
    assert not selection.path[-1].accepted and len(selection.path) == 3
    assert selection.path[0].aurocs.shape == (N_POOL, N_SEEDS)
    assert selection.path[1].auroc > selection.path[0].auroc + 0.01
    summary, gain = _summary(selection, 0.01), selection.path[2].auroc - selection.auroc
    added = [x["added"] for x in summary["rounds"]]
    assert added == [x.best for x in selection.path[:2]]
    assert summary["stop"] == f"the best addition gains {gain:+.4f}, not more than 0.01"
    test = random_codes(300, 2)
    p = fused_probability(selection, test)
    assert p.shape == (N_SEEDS, 300)
    assert roc_auc_score(test.labels, p.mean(axis=0)) > 0.85


def test_the_returned_head_is_the_one_that_was_scored():
    parts = random_codes(400, 0), random_codes(300, 1)
    selection = search(*parts, max_encoders=1)
    p = fused_probability(selection, parts[1])
    aurocs = [roc_auc_score(parts[1].labels, row) for row in p]
    assert np.mean(aurocs) == pytest.approx(selection.auroc, abs=1e-5)


def test_slots_grow_by_doubling_and_validation_rows_of_one_class_are_refused():
    assert slots_for(FUSION, 4) == FUSION
    assert slots_for(FUSION, 5).n_slots == 8 and slots_for(FUSION, 9).n_slots == 16
    codes = random_codes(50, 0)
    with pytest.raises(ValueError, match="one class"):
        search(codes, codes._replace(labels=jnp.ones(50)))


def test_only_the_candidates_are_searched_and_nothing_is_compiled_again():
    parts = random_codes(400, 0), random_codes(300, 1)
    assert search(*parts, max_encoders=1).members[0] in (1, 4)
    n_traces = train_heads._cache_size()
    left = search(*parts, margin=0.01, candidates=[4, 0, 2])
    assert left.members == (4,) and left.path[0].candidates == (0, 2, 4)
    assert train_heads._cache_size() == n_traces


def outputs_of_two_families(labels, knowing, seed):
    """Outputs of three encoders per seed, one of which sees the label with noise."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((N_SEEDS * 3, len(labels)))
    logits[knowing::3] = 1.5 * labels + rng.standard_normal(len(labels))
    pooled = np.repeat(logits[..., None], D_POOLED, axis=-1) * 0.3
    return MemberOutputs(*(x.astype(np.float32) for x in (logits, pooled)))


def test_outputs_of_two_passes_give_every_branch_its_selection():
    labels = np.random.default_rng(0).random(900) < 0.5
    splits = np.where(np.arange(900) % 3 < 2, "train", "validation")
    outputs = {
        "closed_book": outputs_of_two_families(labels, 0, 1),
        "with_context": outputs_of_two_families(labels, 2, 2),
    }
    rows = {s: rows_like(labels, setting=s, splits=splits) for s in outputs}
    config = SelectConfig(head=FUSION, train=TRAIN, margin=0.01)
    pools = {s: pool_of(outputs, rows, s, N_SEEDS) for s in rows}
    assert len(np.unique(pools["with_context"].valid.questions)) == 300
    result = select_heads(pools, config)
    # With context the pool is the pass's three encoders, then the closed-book ones.
    assert {branch: greedy.members for branch, greedy in result.items()} == {
        "closed_book": (0,),
        "with_context": (2, 3),
        "single_pass": (2,),
    }
    alone = select_heads({"closed_book": pools["closed_book"]}, config)
    assert alone.keys() == {"closed_book"}


CONFIG = SelectConfig(
    head=FusionConfig(hidden=4, n_slots=4),
    train=TrainConfig(batch_size=64, max_epochs=2, n_seeds=1, n_microbatches=1),
)


def rows_of(n_questions, variants=("original", "rewritten")):
    """Questions of two sets, by default in two wordings; a third of each set trains."""
    n = n_questions * len(variants)
    question = np.repeat(np.arange(n_questions), len(variants))
    return rows_like(
        np.random.default_rng(0).random(n) < 0.5,
        ids=[f"q{i}" for i in question],
        datasets=np.array(["one", "two"])[question // 3 % 2],
        splits=np.array(["train", "validation", "test"])[question % 3],
        variants=np.tile(variants, n_questions),
    )


def pool_of_noise(rows, signal):
    """A pool of encoders of noise, to which `signal` times the label is added."""
    n = len(rows.ids)
    noise = np.random.default_rng(1).normal(size=(N_SUBSETS, n))
    outputs = MemberOutputs(noise + signal * rows.labels, np.zeros((N_SUBSETS, n, 2)))
    return pool_of({"closed_book": outputs}, {"closed_book": rows}, "closed_book", 1)


def test_halves_split_every_set_evenly_and_keep_wordings_together():
    rows = rows_of(60)
    seen, unseen = split_in_halves(rows, 0, 7)
    assert not set(rows.ids[seen]) & set(rows.ids[unseen])
    together = np.sort(np.concatenate([seen, unseen]))
    held = np.flatnonzero(rows.splits != "train")
    np.testing.assert_array_equal(together, held)
    for name in ("one", "two"):
        sizes = [int((rows.datasets[half] == name).sum()) for half in (seen, unseen)]
        assert sizes[0] == sizes[1]
    assert set(seen) != set(split_in_halves(rows, 1, 7)[0])


def test_a_search_sees_only_its_half_in_a_shape_that_all_halves_share():
    rows = rows_of(60)
    pool = pool_of_noise(rows, 1.0)
    first, second = (
        pool_with_validation(pool, split_in_halves(rows, i, 7)[0]).valid for i in (0, 1)
    )
    assert first.outputs.shape == second.outputs.shape
    where = np.concatenate([rows.where("validation"), rows.where("test")])
    np.testing.assert_array_equal(
        where[first.weights > 0], split_in_halves(rows, 0, 7)[0]
    )
    np.testing.assert_array_equal(jnp.asarray(first.labels), rows.labels[where])
    assert len(np.unique(first.questions)) == 40  # of two wordings


def test_the_best_of_fifteen_noises_looks_too_good_on_the_half_that_chose_it():
    rows = rows_of(240, variants=("original",))
    pool = pool_of_noise(rows, 0.0)
    result = [gaps(pool, CONFIG, *split_in_halves(rows, i, 7)) for i in range(6)]
    # Noise: best of 15 on 80 rows, s.e. .065 each.
    assert np.mean([item["champion"] for item in result]) > 0.05
    assert abs(np.mean([item["early_fusion"] for item in result])) < 0.05


def test_a_split_without_a_defined_gap_is_left_out_and_counted():
    rows = rows_of(40)
    split = split_in_halves(rows, 0, 7)
    unranked = gaps(pool_of_noise(rows, -9.0), CONFIG.resized(epochs=0), *split)
    assert np.isnan(unranked["champion"]) and np.isfinite(unranked["early_fusion"])
    rows.labels[split[0]] = True
    of_one_class = gaps(pool_of_noise(rows, 1.0), CONFIG, *split)
    assert all(np.isnan(x) for x in of_one_class.values())
    some, none = np.array([0.1, np.nan, 0.3]), np.full(2, np.nan)
    some, none = _gap_rows({"champion": some, "early_fusion": none}, rows, 5)
    ends = some.value, some.ci_low, some.ci_high
    assert ends == pytest.approx((0.2, 0.105, 0.295)) and "1 of 3 splits" in some.reason
    assert none.value is None and "2 of 2 splits" in none.reason
