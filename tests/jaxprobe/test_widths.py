import jax
import numpy as np

from beatrice.jaxprobe.families import subset_index, width_groups, widths_of
from beatrice.jaxprobe.grid import Block, fit_blocks, labelled, member_outputs
from tests.jaxprobe.test_grid import ENCODER, TRAIN, planted_parts


def test_rows_of_like_length_are_one_group():
    lengths = np.random.default_rng(0).integers(8, 13, (500, 2))
    (group,) = width_groups(lengths, 32)
    np.testing.assert_array_equal(group, np.arange(500))


def test_a_few_long_rows_are_batches_of_their_own_and_no_row_is_lost():
    lengths = np.full((500, 2), (20, 5))
    lengths[[3, 77, 400], 0] = (900, 700, 300)
    groups = width_groups(lengths, 32)
    np.testing.assert_array_equal(np.sort(np.concatenate(groups)), np.arange(500))
    assert all((np.diff(group) > 0).all() for group in groups)
    assert {3, 77, 400} <= set(groups[-1].tolist())
    assert [len(group) for group in groups] == [500 - 7 * 32, 4 * 32, 2 * 32, 32]
    assert [widths_of(lengths[group])[0] for group in groups] == [20, 20, 20, 900]


def test_fewer_rows_than_a_batch_are_one_group_however_long():
    assert len(width_groups(np.array([[5, 1], [900, 1]]), 32)) == 1


def test_an_empty_span_is_padded_to_one_token():
    assert widths_of(np.array([[0, 3], [0, 2]])) == (1, 3)


def take(part, rows):
    weights = np.asarray(part.weights)[rows]
    return labelled(
        part.features.take(rows), np.asarray(part.labels)[rows] > 0, weights
    )


def test_encoders_find_what_is_planted_in_rows_of_several_groups():
    train, valid = planted_parts()
    n = len(train.labels)
    groups = [take(train, np.arange(0, n // 2)), take(train, np.arange(n // 2, n))]
    rows = np.arange(len(valid.labels))
    halves = [take(valid, rows[: len(rows) // 3]), take(valid, rows[len(rows) // 3 :])]
    (found,) = fit_blocks(
        [Block((subset_index("R"),), (0,))],
        groups,
        halves,
        encoder=ENCODER,
        config=TRAIN,
    )
    assert found.info.best_auroc[0] > 0.85
    outputs = jax.device_get(member_outputs(found, valid.features, encoder=ENCODER))
    labels = np.asarray(valid.labels) > 0
    right, wrong = outputs.logits[0][labels], outputs.logits[0][~labels]
    by_hand = (right[:, None] > wrong[None]).mean()
    np.testing.assert_allclose(found.info.best_auroc[0], by_hand, atol=1e-5)
