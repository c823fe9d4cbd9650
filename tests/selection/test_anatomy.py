"""Laws of the analyses, and of the attribution of a logit to its signals."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest

from beatrice.benchmarks.results.anatomy import rights_by_chance
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.label.labels import stands_in_context
from beatrice.extract.records import Passage
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.encoder import COLLECTION, Encoder
from beatrice.jaxprobe.families import SUBSETS, paper_dims, subset_index
from beatrice.jaxprobe.grid import apply_member, member_logits
from beatrice.jaxprobe.metrics import BootstrapConfig, wilson_interval
from beatrice.jaxprobe.tokens import split_families
from beatrice.selection.analysis import (
    TOLERANCE,
    Ratio,
    attributed,
    draw_rows,
    incompleteness,
    judged_sets,
    of_families,
    of_span,
    path_gradients,
    ratio_rows,
    replaced,
)
from beatrice.selection.anatomy import ANALYSES, AnatomyConfig, chosen_analyses
from beatrice.selection.decisions import (
    boundary,
    flip_ratios,
    kinds_of,
    mistakes,
    surest_questions,
)
from beatrice.selection.places import (
    TokenAttribution,
    channels_of_heads,
    linear_scores,
    position_ratios,
)
from beatrice.selection.reach import (
    _half,
    candidates,
    sources_of,
    teachers_of,
    train_valid_split,
)
from tests.jaxprobe.samples import identity_of, ragged_features, rows_like
from tests.records import an_answer, an_example
from tests.selection.test_analyses import WHOLE, values_in

CONFIG = BootstrapConfig(n_resamples=400, seed=0)
SET_FIELDS = {"setting": "closed_book", "dataset": "one", "split": "test"}


def values(ratios, n, ids=None):
    ids = np.arange(n) if ids is None else ids
    result = ratio_rows("anatomy_flips", ratios, ids, SET_FIELDS, CONFIG)
    return {(row.metric, row.kind) if row.kind else row.metric: row for row in result}


def planted(n=400):
    """Labels and two families: one decides, the other adds half a logit to the truth.

    If the first is sure, it is right; near the boundary, it is right half of the time.
    """
    i = np.arange(n)
    sign = np.where(i % 2, -1.0, 1.0)
    is_near = i % 4 < 2
    decider = np.where(is_near, np.where(i % 8 < 4, 0.3, -0.3), 1.5) * sign
    return sign > 0, decider, 0.5 * sign, is_near


def test_a_deciding_family_and_one_that_corrects_at_the_boundary_differ():
    labels, decider, corrector, is_near = planted()
    n = len(labels)
    both = (decider + corrector)[None]
    result = values(flip_ratios("HP", "P", both, decider[None], labels), n)
    was_wrong = ((decider > 0) != labels).mean()
    assert result["flip_rate"].value == pytest.approx(was_wrong)
    assert result["flip_precision"].value == 1.0
    assert result["flips_near_boundary"].value == 1.0
    assert result["answers_near_boundary"].value == pytest.approx(is_near.mean())
    assert result["mean_contribution"].value == pytest.approx(0.5)
    # Without the decider a constant is left, and half of the decisions change.
    result = values(flip_ratios("HP", "H", both, np.full((1, n), -0.01), labels), n)
    assert result["flip_rate"].value == pytest.approx(0.5)
    # What adds nothing flips nothing, and its precision is undefined.
    result = values(flip_ratios("H", "P", decider[None], decider[None], labels), n)
    assert result["flip_rate"].value == result["mean_contribution"].value == 0.0
    assert result["flip_precision"].value is None and result["flip_precision"].reason


@pytest.mark.parametrize(("reach", "width"), [(0.0, 0.5), (6.0, 0.5), (40.0, 4.0)])
def test_boundary_cells_hold_every_answer_however_far_from_the_boundary(reach, width):
    rest = reach * np.linspace(-1, 1, 50)[None]
    added = np.where(np.arange(50) % 2, 0.3, -0.3)[None] * (reach > 0)
    deployed = SimpleNamespace(
        rows=SimpleNamespace(where=lambda split: np.arange(50)),
        judged=np.arange(50),
        queried=("P",),
        set_fields=lambda *_: SET_FIELDS,
        intact=lambda name: rest + added,
        without=lambda name, letter: rest,
    )
    rows = boundary(deployed)
    assert sum(row.value for row in rows) == 50
    flips = sum(row.value for row in rows if row.metric == "flips")
    assert flips == ((rest > 0) != (rest + added > 0)).sum()
    assert {row.bin_width for row in rows} == {width}
    farthest = max(abs(row.bin_x) for row in rows)
    assert abs(farthest - reach) <= width / 2
    deployed.rows.where = lambda split: np.arange(0)  # no labelled test row
    assert boundary(deployed) == []


@pytest.mark.parametrize("right", [0.08, 0.5, 0.92])
def test_flips_of_logits_that_know_nothing_are_as_precise_as_by_chance(right):
    rng = np.random.default_rng(0)
    labels = rng.random(20_000) < right
    rest = rng.normal(loc=2 * right - 1, size=(2, 20_000))
    noise = rng.normal(size=(2, 20_000))
    result = values(flip_ratios("HP", "P", rest + noise, rest, labels), 20_000)
    chance = result["flip_precision_by_chance"].value
    assert result["flip_precision"].value == pytest.approx(chance, abs=0.02)
    if right == 0.08:  # far from the share of right answers
        assert chance > right + 0.1


def test_a_ratio_over_no_answers_is_undefined_with_its_reason():
    none = np.zeros((3, 0), bool)
    row = values([Ratio("x", "share", none, none)], 0)["share"]
    assert (row.value, row.ci_low, row.n) == (None, None, 0)
    assert row.reason == "no answer of this kind"


def test_an_interval_equals_that_of_resampling_questions_by_hand():
    ids = np.repeat(np.arange(60), 2)  # two wordings of each
    hits = 1.0 * (np.random.default_rng(1).random((3, 120)) < 0.3)
    ratio = Ratio("x", "share", hits, np.ones_like(hits))
    row = values([ratio], 120, ids)["share"]
    assert row.value == pytest.approx(hits.mean())
    by_question = hits.sum(axis=0).reshape(60, 2).sum(axis=1)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(60, size=60) for _ in range(CONFIG.n_resamples)]
    draws = [by_question[questions].sum() / (60 * 2 * 3) for questions in drawn]
    low, high = np.percentile(draws, (2.5, 97.5))
    assert (row.ci_low, row.ci_high) == pytest.approx((low, high), abs=1e-6)
    assert row.n == 120


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_no_share_has_an_interval_narrower_than_wilsons_of_its_questions(share):
    ids = np.repeat(np.arange(60), 2)  # two wordings of each
    hits = np.tile(ids < share * 10, (3, 1))  # three seeds that agree
    counted = np.broadcast_to(ids < 10, hits.shape)
    row = values([Ratio("x", "share", hits, counted)], 120, ids)["share"]
    expected = binomtest(round(share * 10), 10).proportion_ci(0.95, method="wilson")
    assert row.value == pytest.approx(share) and row.n == 20
    assert row.ci_low <= expected.low + 1e-9 and row.ci_high >= expected.high - 1e-9
    assert wilson_interval(share, 10) == pytest.approx([*expected])


@pytest.mark.parametrize("right", [0.08, 0.4, 0.78])
@pytest.mark.parametrize("strength", [0.0, 1.5])  # scores know nothing, or much
def test_mistakes_that_share_only_the_label_are_corrected_as_if_by_chance(
    right, strength
):
    rng, names = np.random.default_rng(2), np.arange(20_000)
    labels = rng.random(20_000) < right
    ours, theirs = (
        mistakes(rng.normal(size=20_000) + x * labels, labels, names)
        for x in (strength, 1.5)
    )
    corrected = (theirs & ~ours).sum() / theirs.sum()
    chance = rights_by_chance(ours.mean(), labels.mean())
    assert corrected == pytest.approx(chance, abs=0.03)
    if right == 0.08:  # far from the share of answers that the family gets right
        assert corrected < 1 - ours.mean() - 0.1


def test_as_many_answers_are_flagged_as_are_wrong_and_names_break_ties():
    labels = np.array([True, False, True, False, True])
    names = np.array(["e", "d", "c", "b", "a"])
    wrong = mistakes(np.zeros(5), labels, names)
    is_flagged = wrong == labels
    assert is_flagged.sum() == 2
    assert set(names[is_flagged]) == {"a", "b"}
    order = np.array([3, 0, 4, 1, 2])
    again = mistakes(np.zeros(5), labels[order], names[order])
    np.testing.assert_array_equal(again, wrong[order])


def rows_of(datasets, splits, ids=None):
    fields = {} if ids is None else {"ids": ids}
    labels = np.arange(len(datasets)) % 2 == 0
    return rows_like(labels, datasets=datasets, splits=splits, **fields)


def test_the_same_answers_are_drawn_whatever_their_order():
    where = np.arange(50)
    rows = rows_of(["one"] * 50, ["test"] * 50)
    moved_ids = rows.ids[np.random.default_rng(0).permutation(50)]
    moved = rows_of(["one"] * 50, ["test"] * 50, moved_ids)

    def drawn(rows, seed=7):
        return set(rows.ids[draw_rows(rows, where, 10, seed)].tolist())

    assert drawn(moved) == drawn(rows) != drawn(rows, seed=8)
    small, large = (draw_rows(rows, where, n, 7).tolist() for n in (10, 30))
    assert large[:10] == small  # larger draws contain smaller ones


def test_only_original_wordings_of_up_to_four_times_the_median_length_may_teach():
    splits, variants = ["train"] * 6 + ["test"], ["original"] * 7
    variants[5] = "rewritten"
    rows = rows_like(np.ones(7, bool), splits=splits, variants=variants)
    lengths = np.array([[1, 3], [2, 2], [3, 1], [8, 8], [8, 9], [2, 2], [2, 2]])
    deployed = SimpleNamespace(rows=rows, data=SimpleNamespace(lengths=lengths))
    assert candidates(deployed, "train").tolist() == [0, 1, 2, 3]


def test_a_single_in_domain_set_is_not_judged_twice():
    rows = rows_of(["one", "held"], ["test", "ood"])
    assert judged_sets(rows) == [("all in-domain", "test"), ("held", "ood")]
    rows = rows_of(["one", "two", "held"], ["test", "test", "ood"])
    names = [name for name, _ in judged_sets(rows)]
    assert names == ["all in-domain", "one", "two", "held"]


@pytest.mark.parametrize(
    ("text", "stands"),
    [
        ("Guzolt Falls", True),
        ("the guzolt falls.", True),
        ("olt", False),
        ("", False),
        ("北京", True),
    ],
)
def test_an_answer_stands_in_the_passages_as_whole_words(text, stands):
    texts = {"Guzolt": "Falls of the north", "B": "它在北京。"}
    passages = tuple(Passage(title=title, text=text) for title, text in texts.items())
    answer = an_answer(setting="with_context", text=text)
    assert stands_in_context(an_example(passages=passages), answer) == stands


def test_shares_of_spans_and_positions_find_the_token_that_moves_the_logit():
    n, lengths = 30, np.tile([5, 1, 3], (30, 1))
    answer = np.tile([0.0, 2.0, 0.0], (n, 1))  # only the second token
    families = np.zeros((n, 3, 4))
    families[:, 2, 3] = 2.0  # through attention
    families[:, 1, 0] = 0.5
    moved = TokenAttribution(families, answer, lengths, 0.0)
    ratios = position_ratios("HPRA", moved, ("context", "question", "answer"))
    results = results_of(ratio_rows("x", ratios, np.arange(n), SET_FIELDS, CONFIG))
    value = values_in(results, **WHOLE)
    assert value("share", span="answer") == pytest.approx(0.8)
    assert value("share", span="question") == pytest.approx(0.2)
    assert value("share", span="answer", family="A") == pytest.approx(0.8)
    assert value("token_share", span="answer") == pytest.approx(1 / 3)
    assert [value("share", position=k) for k in (1, 2, 3)] == [0.0, 1.0, 0.0]
    assert value("share", kind="last") == 0.0
    assert value("even_share", position=1) == pytest.approx(1 / 3)


def test_if_all_tokens_move_the_logit_alike_shares_equal_even_shares():
    n, lengths = 100, np.tile([0, 3, 2], (100, 1))
    lengths[50:, 2] = 10
    answer = 1.0 * (np.arange(10) < lengths[:, 2:])
    families = np.zeros((n, 3, 4))
    families[:, :, 0] = lengths  # one logit per token
    moved = TokenAttribution(families, answer, lengths, 0.0)
    ratios = position_ratios("H", moved, ("c", "q", "a"))
    rows = ratio_rows("x", ratios, np.arange(n), SET_FIELDS, CONFIG)
    by_metric = {
        metric: {(r.span, r.position, r.kind): r.value for r in rows if is_of(r)}
        for metric, is_of in (
            ("share", lambda r: r.metric == "share" and not r.family),
            ("even", lambda r: r.metric in ("even_share", "token_share")),
        )
    }
    assert by_metric["share"] == pytest.approx(by_metric["even"])
    assert len(by_metric["share"]) == 3 + 8 + 1


def test_a_regression_finds_planted_features_but_nothing_in_permuted_ones():
    rng = np.random.default_rng(0)
    labels = rng.random(600) < 0.5
    wide = rng.normal(size=(600, 200))
    informative = rng.normal(size=(600, 2)) + 3.0 * labels[:, None]
    train, valid, rest = np.arange(300), np.arange(300, 400), np.arange(400, 600)

    def auroc_of(blocks):
        scores = linear_scores(blocks, labels, train, valid)[rest]
        right, wrong = scores[labels[rest]], scores[~labels[rest]]
        return (right[:, None] > wrong[None]).mean()

    assert auroc_of([wide, informative]) > 0.97  # two features among two hundred
    assert abs(auroc_of([wide, rng.permutation(informative)]) - 0.5) < 0.12
    undefined = linear_scores([informative], labels, np.flatnonzero(labels)[:50], valid)
    assert np.isnan(undefined).all()


def test_a_fifth_validates_and_only_part_of_a_held_out_set_is_a_source():
    train, valid = train_valid_split(np.arange(100))
    assert (len(train), len(valid)) == (80, 20)
    assert not set(train) & set(valid)
    splits = ["train"] * 20 + ["validation"] * 10 + ["ood"] * 40
    rows = rows_of(["one"] * 30 + ["held"] * 40, splits)
    pools = {split: np.flatnonzero(rows.splits == split) for split in set(splits)}
    sources = sources_of(rows, pools)
    np.testing.assert_array_equal(sources["one"], np.arange(30))
    is_source = np.isin(np.arange(30, 70), sources.pop("held"))
    np.testing.assert_array_equal(is_source, _half(rows.ids[30:]))  # the rest: judged
    assert set(sources) == {"one"} and 8 < is_source.sum() < 32


@pytest.mark.parametrize(
    ("sizes", "teachers"), [((9, 10, 40), [1, 2]), ((3, 9, 8), [1]), ((7, 7), [0, 1])]
)
def test_sets_of_ten_answers_teach_or_the_largest_if_there_are_none(sizes, teachers):
    sources = {str(i): np.arange(n) for i, n in enumerate(sizes)}
    assert [*map(int, teachers_of(sources))] == teachers


def test_a_case_is_the_surest_of_its_kind_and_ties_go_to_the_smaller_id():
    thresholds = np.array([0.6, 0.6])
    p = np.array([[0.9, 0.9, 0.7, 0.1, 0.5, 0.2], [0.1, 0.2, 0.9, 0.9, 0.61, 0.1]]).T
    assert kinds_of(p, thresholds).tolist() == [0, 0, 0, 1, 1, 2]
    ids = np.array([*"bacdef"])
    assert surest_questions(ids, p, thresholds) == {0: 1, 1: 3, 2: 5}


def test_an_unknown_analysis_is_refused_by_name():
    assert chosen_analyses(AnatomyConfig()) == list(ANALYSES)
    assert chosen_analyses(AnatomyConfig(only=("flips",))) == ["flips"]
    with pytest.raises(ValueError, match="no analysis 'flip'; there are comp"):
        chosen_analyses(AnatomyConfig(only=("flip",)))


DIMS = paper_dims(hidden=6, prob=5, resid=4, attn=16)
ENCODER = Encoder(EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2), DIMS)
N = 24


def signals(n_spans):
    """Signals with ragged spans, zero on padding."""
    setting = ("closed_book", "with_context")[n_spans - 2]
    scale = identity_of(DIMS)._replace(std=np.full(DIMS.total, 3, np.float32))
    return split_families(ragged_features(setting, DIMS, n=N), DIMS, scale)


def means(n_spans, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.normal(size=(n_spans, size)).astype(np.float32) * 0.3 for size in DIMS.sizes
    )


def weights(name, n_spans):
    """Weights moved so far from their initial values that every part counts."""
    mask = jnp.asarray(SUBSETS[subset_index(name)])
    params = ENCODER.init(jax.random.key(0), signals(n_spans), mask)
    leaves, shape = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    moved = jax.tree.map(lambda x, y: x + 0.3 * y, leaves, noise)
    return mask, jax.tree.unflatten(shape, moved)


def logits(params, mask, features):
    return np.asarray(apply_member(params, mask, features, encoder=ENCODER)[0])


def with_regression(params, n_spans, is_silent):
    """Weights with a regression and a network, whose last layer may be zero."""
    rng = np.random.default_rng(4)
    linear = {
        f"kernel_{f}": rng.normal(size=(2 + n_spans) * size).astype(np.float32)
        for f, size in enumerate(DIMS.sizes)
    }
    network = dict(params["params"])
    if is_silent:
        network["mlp_out"] = jax.tree.map(jnp.zeros_like, network["mlp_out"])
    return {"params": network, COLLECTION: {**linear, "bias": np.float32(0.5)}}


def test_a_silent_network_is_not_run_and_the_logits_are_the_same():
    mask, params = weights("HPRA", 3)
    features = signals(3)
    every = [with_regression(params, 3, is_silent) for is_silent in (True, False)]
    network = jax.tree.map(lambda x: x * jnp.nan, every[0]["params"])  # NaN if run
    network["mlp_out"] = every[0]["params"]["mlp_out"]
    silent = every[0] | {"params": network}
    members = (silent, mask), (every[1], mask)
    result = member_logits(members, features, encoder=ENCODER)
    expected = np.stack([logits(p, mask, features) for p in every])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(result[0] - result[1]).max() > 1e-2
    start = replaced(features, means(3), of_families(DIMS, 3, (1,)))
    parts, change = attributed(silent, mask, start, features, ENCODER, N)
    at = (jnp.full(1, 0.5, jnp.float32), jnp.ones(1, jnp.float32))
    whole = path_gradients(every[0], mask, start, features, *at, encoder=ENCODER)
    linear = path_gradients(every[0], mask, start, features, *at, encoder=None)
    for item, other in zip(whole, linear, strict=True):
        np.testing.assert_allclose(item, other, atol=1e-5)
    added = sum(item.sum(axis=(0, 2)) for item in parts)
    assert incompleteness(added, change) <= TOLERANCE
    assert incompleteness(added, added) == 0.0 and incompleteness(0, added) == 1.0


@pytest.mark.parametrize("n_spans", [2, 3])
@pytest.mark.parametrize("families", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_attributions_sum_to_the_difference_of_logits_within_a_hundredth(
    n_spans, families
):
    mask, params = weights("HPRA", n_spans)
    end = signals(n_spans)
    start = replaced(end, means(n_spans), of_families(DIMS, n_spans, families))
    result, change = attributed(params, mask, start, end, ENCODER, N)
    first, last = (logits(params, mask, features) for features in (start, end))
    np.testing.assert_allclose(change, last - first, rtol=1e-5)
    added = sum(item.sum(axis=(0, 2)) for item in result)
    assert np.abs(change).mean() > 1e-3
    assert incompleteness(added, change) <= TOLERANCE
    for family, item in enumerate(result):
        assert np.any(item) == (family in families)


@pytest.mark.parametrize("name", ["H", "PR", "HPA"])
def test_the_means_of_a_family_that_is_not_read_change_no_logit(name):
    mask, params = weights(name, 3)
    features = signals(3)
    intact = logits(params, mask, features)
    for family, letter in enumerate("HPRA"):
        gone = of_families(DIMS, 3, (family,))
        without = logits(params, mask, replaced(features, means(3), gone))
        assert np.array_equal(without, intact) == (letter not in name)


def test_means_replace_only_real_tokens_of_their_span():
    features, span_means = signals(3), means(3)
    result = replaced(features, span_means, of_span(DIMS, 3, 1))
    real = np.asarray(features.masks[1])
    for family, tokens in enumerate(result.tokens):
        context, question, answer = (np.asarray(tokens)[s] for s in result.span_slices)
        before = [np.asarray(features.tokens[family])[s] for s in features.span_slices]
        np.testing.assert_array_equal(context, before[0])
        np.testing.assert_array_equal(answer, before[2])
        expected = np.where(real[..., None], span_means[family][1], 0.0)
        np.testing.assert_array_equal(question, expected)


def test_the_order_of_examples_changes_no_logit_and_no_attribution():
    mask, params = weights("HPRA", 2)
    end = signals(2)
    order = np.random.default_rng(3).permutation(N)
    gone = of_families(DIMS, 2, (3,))
    plain, moved = (
        attributed(params, mask, replaced(x, means(2), gone), x, ENCODER, N)
        for x in (end, end.take(jnp.asarray(order)))
    )
    np.testing.assert_allclose(moved[1], plain[1][order], atol=1e-5)
    np.testing.assert_allclose(moved[0][3], plain[0][3][:, order], atol=1e-4)


def test_a_heads_channels_are_found_in_every_span_and_reading():
    cells = np.zeros((2, 2), bool)
    cells[1, 0] = True  # second layer, first head
    gone = channels_of_heads(DIMS, 3, cells)
    assert [item.any() for item in gone] == [False, False, False, True]
    whole = gone[3].reshape(3, 2, 2, 2, 2)  # span, other span, reading, layer, head
    assert whole[..., 1, 0].all() and whole.sum() == 3 * 4
