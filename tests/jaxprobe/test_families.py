import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.jaxprobe.families import (
    Features,
    paper_dims,
    standardizer_of,
    subset_index,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.grid import (
    Block,
    fit_blocks,
    labelled,
    member_outputs,
    train_block,
)
from beatrice.jaxprobe.rows import rows_at_once
from beatrice.jaxprobe.tokens import all_but, keep_spans, split_families
from tests.jaxprobe.test_grid import (
    CONFIG,
    DIMS,
    ENCODER,
    TRAIN,
    planted,
    planted_parts,
    train,
)

QUESTION, ANSWER = 0, 1
BLOCK = Block((subset_index("PR"),), (0,))


@pytest.fixture(scope="module")
def plain():
    """Features, labels and standardisation; the signal lies in the answer span."""
    features, labels = planted(230, seed=0)
    valid, valid_labels = planted(110, seed=1)
    return (features, labels), (valid, valid_labels), standardizer_of([features])


def without(plain, span=None):
    """Both parts with a span left out by its mask."""
    *parts, standardizer = plain
    spans = np.ones(2, bool) if span is None else all_but(span, 2)
    return tuple(
        labelled(keep_spans(split_families(x, DIMS, standardizer), spans), y)
        for x, y in parts
    )


def best(trained):
    return float(trained.info.best_auroc[0])


def test_without_the_span_of_the_signal_nothing_is_found(plain):
    assert best(train([BLOCK], without(plain, QUESTION))[0]) > 0.8
    chance = best(train([BLOCK], without(plain, ANSWER))[0])
    assert abs(chance - 0.5) < 0.2  # best of three epochs, 110 rows: s.e. 0.06


def test_a_span_left_out_is_a_span_that_was_never_there(plain):
    """Another way to the same: features whose span is empty and holds zeros."""
    *parts, standardizer = plain

    def emptied(features):
        tokens, masks = list(features.tokens), list(features.masks)
        tokens[QUESTION] = np.zeros_like(tokens[QUESTION])
        masks[QUESTION] = np.zeros_like(masks[QUESTION])
        return Features(tuple(tokens), tuple(masks))

    never = tuple(
        labelled(split_families(emptied(x), DIMS, standardizer), y) for x, y in parts
    )
    masked, absent = (train([BLOCK], p)[0] for p in (without(plain, QUESTION), never))
    np.testing.assert_allclose(
        masked.info.valid_auroc, absent.info.valid_auroc, atol=1e-6
    )


def test_what_is_left_out_has_no_influence(plain):
    train_data, valid_data = without(plain, ANSWER)
    trained = train([BLOCK], (train_data, valid_data))[0]
    features = valid_data.features
    answer = features.span_slices[ANSWER]
    moved = features._replace(
        tokens=tuple(jnp.asarray(t).at[answer].add(7.0) for t in features.tokens)
    )
    here, there = (
        member_outputs(trained, f, encoder=ENCODER) for f in (features, moved)
    )
    np.testing.assert_array_equal(here.logits, there.logits)
    np.testing.assert_array_equal(here.pooled, np.zeros((1, 110, CONFIG.d_pooled)))


def test_every_choice_of_spans_trains_in_one_executable(plain):
    train([BLOCK], without(plain))
    n_traces = train_block._cache_size()
    for span in (QUESTION, ANSWER):
        train([BLOCK], without(plain, span), TRAIN)
    assert train_block._cache_size() == n_traces


def test_long_texts_and_wide_models_are_read_fewer_at_a_time():
    wide = paper_dims(hidden=4096, prob=5, resid=128, attn=2048)
    for widths in ((300, 40, 16), (4000, 100, 50), (40_000, 100, 50)):
        n = rows_at_once(widths, wide)
        assert n == 1 or 4 * n * sum(widths) * wide.total <= 2**29
        assert n & (n - 1) == 0  # so that few executables serve all
    assert rows_at_once((60, 15, 8), DIMS) == 1024


def test_wrong_masks_are_refused(plain):
    features = without(plain)[0].features
    for wrong in (np.ones(3, bool), np.ones(2)):
        with pytest.raises(ValueError, match="one boolean for each of 2 spans"):
            keep_spans(features, wrong)
    with pytest.raises(ValueError, match="nothing remains"):
        keep_spans(features, np.zeros(2, bool))


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


def take(data, rows):
    weights = np.asarray(data.weights)[rows]
    return labelled(
        data.features.take(rows), np.asarray(data.labels)[rows] > 0, weights
    )


def test_encoders_find_what_is_planted_in_rows_of_several_groups():
    train, valid = planted_parts()
    n = len(train.labels)
    groups = [take(train, np.arange(0, n // 2)), take(train, np.arange(n // 2, n))]
    rows = np.arange(len(valid.labels))
    halves = [take(valid, rows[: len(rows) // 3]), take(valid, rows[len(rows) // 3 :])]
    (result,) = fit_blocks(
        [Block((subset_index("R"),), (0,))],
        groups,
        halves,
        encoder=ENCODER,
        config=TRAIN,
    )
    assert result.info.best_auroc[0] > 0.85
    outputs = jax.device_get(member_outputs(result, valid.features, encoder=ENCODER))
    labels = np.asarray(valid.labels) > 0
    right, wrong = outputs.logits[0][labels], outputs.logits[0][~labels]
    by_hand = (right[:, None] > wrong[None]).mean()
    np.testing.assert_allclose(result.info.best_auroc[0], by_hand, atol=1e-5)
