"""Greedy search looks better where it searched, and what was fixed before does not."""

import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.calibrate import Pool
from beatrice.jaxprobe.config import FusionConfig, SelectConfig, TrainConfig
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.fusion import pool_outputs
from beatrice.selection.stage import gaps, halves, searched_on
from tests.jaxprobe.samples import rows_like

CONFIG = SelectConfig(
    head=FusionConfig(hidden=4, n_slots=4),
    train=TrainConfig(batch_size=64, max_epochs=2, n_seeds=1, n_microbatches=1),
)


def rows_of(n_questions, variants=("original", "rewritten")):
    """Two sets of questions, each in two wordings; a third of each are training."""
    n = n_questions * len(variants)
    question = np.repeat(np.arange(n_questions), len(variants))
    return rows_like(
        np.random.default_rng(0).random(n) < 0.5,
        ids=[f"q{i}" for i in question],
        datasets=np.array(["one", "two"])[question // 3 % 2],
        splits=np.array(["train", "validation", "test"])[question % 3],
        variants=np.tile(variants, n_questions),
    )


def pool_of(rows, signal):
    """Encoders of noise, which say the label as loudly as `signal`."""
    rng = np.random.default_rng(1)
    n = len(rows.ids)
    logits = rng.normal(size=(N_SUBSETS, n)) + signal * rows.labels
    pooled = np.zeros((N_SUBSETS, n, 2))

    def take(where):
        outputs = MemberOutputs(logits[:, where], pooled[:, where])
        return pool_outputs((outputs,), 1, rows.labels[where])

    return Pool(
        train=take(rows.where("train")),
        valid=take(rows.where("validation")),
        all_rows=take(np.arange(n)),
        rows=rows,
        n_subsets=N_SUBSETS,
    )


def test_halves_part_every_set_evenly_and_keep_wordings_together():
    rows = rows_of(60)
    seen, unseen = halves(rows, 0, 7)
    assert not set(rows.ids[seen]) & set(rows.ids[unseen])
    together = np.sort(np.concatenate([seen, unseen]))
    held = np.flatnonzero(rows.splits != "train")
    np.testing.assert_array_equal(together, held)
    for name in ("one", "two"):
        sizes = [int((rows.datasets[half] == name).sum()) for half in (seen, unseen)]
        assert sizes[0] == sizes[1]
    assert set(seen) != set(halves(rows, 1, 7)[0])


def test_a_search_sees_its_half_alone_in_a_shape_that_all_halves_share():
    rows = rows_of(60)
    pool = pool_of(rows, 1.0)
    first, second = (searched_on(pool, halves(rows, i, 7)[0]).valid for i in (0, 1))
    assert first.outputs.shape == second.outputs.shape
    where = np.concatenate([rows.where("validation"), rows.where("test")])
    np.testing.assert_array_equal(where[first.weights > 0], halves(rows, 0, 7)[0])
    np.testing.assert_array_equal(jnp.asarray(first.labels), rows.labels[where])


def test_the_best_of_fifteen_noises_is_too_good_where_it_was_chosen():
    rows = rows_of(240, variants=("original",))
    pool = pool_of(rows, 0.0)
    result = [gaps(pool, CONFIG, *halves(rows, i, 7)) for i in range(6)]
    champion, control = (
        float(np.mean([item[name] for item in result]))
        for name in ("champion", "early_fusion")
    )
    assert champion > 0.05  # noise: best of 15 on 80 rows, s.e. .065 each
    assert abs(control) < 0.05
