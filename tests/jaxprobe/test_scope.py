import dataclasses
import json
import re
from functools import partial

import numpy as np
import pytest
from scipy.stats import beta, norm, rankdata

from beatrice.extract.backbone.names import ModelHashes
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.files import write_checksums
from beatrice.extract.run.stages import change_settings
from beatrice.jaxprobe.calibration import fit_calibrator
from beatrice.jaxprobe.checkpoint import CONFIG
from beatrice.jaxprobe.config import CALIBRATE_PRESETS, CalibrateConfig
from beatrice.jaxprobe.detector import Detector, Provenance
from beatrice.jaxprobe.families import Features, paper_dims
from beatrice.jaxprobe.scope import (
    Scope,
    Validation,
    certified,
    certify,
    fewest_decided,
    fit_scope,
    scripts_of,
    share_outside,
)
from beatrice.jaxprobe.stages import CALIBRATE
from tests.jaxprobe.test_detector import detector  # noqa: F401, a fixture

DIMS = paper_dims(hidden=3, prob=2, resid=2, attn=1)


def normal_features(rows, dims=DIMS, shift=0.0):
    """Features of two spans, whose values are normal around `shift`."""
    rng = np.random.default_rng(0)
    shape = (1 + int(np.max(rows)), 10, dims.total)
    tokens = tuple(
        rng.standard_normal(shape, np.float32)[rows] + np.float32(shift)
        for _ in range(2)
    )
    return Features(tokens, tuple(np.ones(t.shape[:2], bool) for t in tokens))


@pytest.fixture(scope="module")
def scope():
    lengths, rows = np.full(900, 20), np.arange(900)
    return fit_scope(normal_features, DIMS, lengths, rows[:800], rows[800:])


def test_two_in_a_thousand_values_lie_outside_and_all_of_a_shifted_family(scope):
    share = share_outside(normal_features(np.arange(800)), DIMS, *scope[:2])
    np.testing.assert_allclose(share.mean(axis=0), 0.002, atol=3e-4)
    features = normal_features(np.arange(50))
    for tokens in features.tokens:
        tokens[..., DIMS.slices[2]] += 10
    share = share_outside(features, DIMS, *scope[:2])
    assert (share[:, 2] == 1).all()
    # The limits come from 100 validation answers, so a few of 50 may exceed them.
    assert (share[:, [0, 1, 3]] > scope.limits[[0, 1, 3]]).mean() < 0.1
    features.tokens[1][0, 0, DIMS.slices[1]] = np.nan  # NaN counts as outside
    assert share_outside(features, DIMS, *scope[:2])[0, 1] >= 1 / 20


def test_scopes_of_long_answers_are_found_reading_a_few_at_a_time():
    rows, every, n_read = np.arange(900), normal_features(np.arange(900)), []

    def read(rows):
        n_read.append(len(rows))
        return Features(*(tuple(x[rows] for x in part) for part in every))

    for lengths in (np.full(900, 600), np.where(rows % 30, 10, 600)):
        scope = fit_scope(read, DIMS, lengths, rows[:500], rows[500:])
    assert sum(n_read) > 1300 and max(n_read) * 600 <= 2**14
    whole = fit_scope(read, DIMS, np.full(900, 10), rows[:500], rows[500:])
    np.testing.assert_array_equal(np.concatenate(scope), np.concatenate(whole))
    share = share_outside(read(rows[500:]), DIMS, *scope[:2])
    np.testing.assert_allclose(scope.limits, np.quantile(share, 0.999, axis=0))


def test_a_token_of_every_prompt_stays_inside_when_it_is_rounded_differently():
    def read(rows, factor=1.0):
        features = normal_features(rows)
        for tokens in features.tokens:
            tokens[:, 0] = 300 * np.float32(factor)
        return features

    rows = np.arange(300)
    low, high, _ = fit_scope(read, DIMS, np.full(300, 20), rows[:200], rows[200:])
    shares = [share_outside(read(rows, 1 + x), DIMS, low, high) for x in (0, 1e-6, 0.1)]
    np.testing.assert_array_equal(shares[1], shares[0])
    assert (shares[2] >= 0.1).all()


def test_ranges_ignore_hidden_states_that_a_store_did_not_keep():
    dims = dataclasses.replace(DIMS, spans=("answer", *DIMS.spans[1:]))

    def read(rows):
        features = normal_features(rows, dims, shift=5.0)
        features.tokens[0][..., dims.slices[0]] = 0.0
        return features

    rows = np.arange(100)
    scope = fit_scope(read, dims, np.full(100, 20), rows, rows)
    assert (scope.low[:3] > 0).all()
    live = normal_features(rows, dims, shift=5.0)  # has all states
    shares = (share_outside(x, dims, *scope[:2]) for x in (live, read(rows)))
    np.testing.assert_array_equal(*shares)


def test_scripts_are_those_of_the_letters_without_stray_ones():
    assert scripts_of(["where?", "wo ist Köln? 42"]) == ("LATIN",)
    assert scripts_of(["\uff21\uff22\uff23", "\uff71"]) == ("KATAKANA", "LATIN")
    assert scripts_of(["где", "where"]) == ("CYRILLIC", "LATIN")
    assert scripts_of(["a" * 5000, "α"]) == ("LATIN",)
    assert scripts_of(["42"]) == ()
    asked = ["Question: где?", "Question: когда?"]
    assert scripts_of(asked, "Question: ?", 2) == ("CYRILLIC",)
    assert scripts_of([*asked, "Moscow"], "Question: ?", 2) == ("CYRILLIC", "LATIN")


def test_the_fewest_decided_answers_match_a_table_of_binomial_bounds():
    """The table of Clopper-Pearson bounds at 90 % confidence was made separately."""
    table = {0.8: (11, 18, 25, 45), 0.9: (22, 38, 52, 91)}
    table |= {0.95: (45, 77, 105, 184), 0.99: (230, 388, 531, 926)}
    for wanted, row in table.items():
        assert tuple(fewest_decided(wanted, e) for e in (0, 1, 2, 5)) == row
    assert fewest_decided(1 - 1e-9) == pytest.approx(2.302585e9, rel=1e-6)
    assert fewest_decided(0.01) == fewest_decided(1e-17) == 1


def trust(p, labels, wanted=0.9, decision="trust", n_tried=1):
    """The threshold from which answers to different questions are trusted."""
    validation = Validation(np.asarray(p), np.asarray(labels))
    return certify(validation, wanted, decision, n_tried)


distrust = partial(trust, decision="distrust")  # up to which answers are distrusted


@pytest.mark.parametrize(("n_tried", "fewest"), [(1, 22), (15, 48)])
def test_trust_needs_many_answers_without_an_error_and_more_after_a_choice(
    n_tried, fewest
):
    p, n_right = np.linspace(0.99, 0.51, 60), np.arange(60)
    decide = partial(trust, n_tried=n_tried)
    certified = decide(p, n_right < fewest)
    assert (certified.n_decided, certified.n_errors) == (fewest, 0)
    assert p[fewest] < certified.p_correct < p[fewest - 1]
    low = (0.1 / n_tried) ** (1 / fewest)  # closed form for no errors
    assert certified.low == pytest.approx(low)
    words = f"90% confidence after a choice among {n_tried} encoders"
    assert (words in certified.in_words()) == (n_tried > 1)
    never = decide(p, n_right < fewest - 1)
    assert never.p_correct is None and never.coverage == 0
    assert f"{fewest} validation answers without an error" in never.in_words()
    assert f"1 of the {fewest} most probable are wrong" in never.in_words()
    few = decide(p[: fewest - 1], np.ones(fewest - 1, bool))
    assert few.p_correct is None and f"fewer of the {fewest - 1}" in few.in_words()
    assert decide(p, np.ones(60, bool), wanted=1.0).p_correct is None


def test_one_error_among_the_surest_does_not_prevent_trust_in_many_answers():
    assert trust(np.linspace(0.99, 0.51, 120), np.arange(120) != 3).n_decided == 120


def test_to_distrust_is_to_trust_that_an_answer_is_wrong():
    rng = np.random.default_rng(0)
    p = np.sort(rng.random(500).round(3) + 1e-5)  # some are equal, none is 0.5
    labels = rng.random(500) < p**2
    for wanted in (0.7, 0.9):
        low = distrust(p, labels, wanted)
        high = trust(1 - p[::-1], ~labels[::-1], wanted)
        assert low.p_correct == pytest.approx(1 - high.p_correct, abs=1e-12)
        for name in ("n_decided", "n_errors", "low", "n"):
            assert getattr(low, name) == getattr(high, name)
        decided = p <= low.p_correct
        assert decided.sum() == low.n_decided > 50
        assert labels[decided].sum() == low.n_errors


def test_no_answer_below_one_half_is_trusted_and_no_other_is_distrusted():
    p, right = np.linspace(0.01, 0.99, 200), np.ones(200, bool)
    below_half = np.nextafter(0.5, 0)
    for decided in (trust(p, right), distrust(p, ~right)):
        assert decided.p_correct == (0.5 if decided.decision == "trust" else below_half)
        assert (decided.n_decided, decided.coverage) == (100, 0.5)
    even = np.full(200, 0.5)
    assert trust(even, right).n_decided == 200
    assert distrust(even, ~right).p_correct is None


def test_certified_bounds_agree_with_scipy():
    rng = np.random.default_rng(1)
    for n in (30, 400, 3000):
        p = np.sort(rng.random(n) / 2 + 0.5)[::-1]
        labels = rng.random(n) < p
        threshold = trust(p, labels, wanted=0.6)
        right, wrong = threshold.n_decided - threshold.n_errors, threshold.n_errors
        assert threshold.low == pytest.approx(beta.ppf(0.1, right, wrong + 1), abs=1e-9)


def test_equal_probabilities_are_decided_together_or_not_at_all():
    p, labels = np.repeat([0.9, 0.6], 30), np.repeat([True, False], 30)
    assert trust(p, labels).n_decided == 30
    assert trust(np.full(60, 0.9), labels).p_correct is None
    assert distrust(1 - p, ~labels).n_decided == 30
    assert distrust(np.full(60, 0.1), ~labels).p_correct is None


def test_another_answer_to_the_same_question_is_no_new_evidence():
    p, labels = np.full(30, 0.9), np.ones(30, bool)
    assert trust(*Validation.of_answers(p, p, labels, np.arange(30))).p_correct == 0.5
    some = Validation.of_answers(p, p, labels, np.arange(30) // 2)
    assert trust(*some).p_correct is None and len(some.p_correct) == 15


@pytest.mark.parametrize("where", [0, 3])
def test_the_answer_kept_for_each_question_is_at_no_fixed_place(where):
    questions, labels = np.repeat(np.arange(400), 4), np.arange(1600) % 4 == where
    p = np.full(1600, 0.5)
    kept = Validation.of_answers(p, p, labels, questions).labels
    assert kept.mean() == pytest.approx(0.25, abs=3 * (0.25 * 0.75 / 400) ** 0.5)


def test_a_decision_is_trust_distrust_or_unknown_with_a_reason():
    p, labels = np.linspace(0.999, 0.001, 1000), np.arange(1000) < 500
    decided = certified(Validation(p, labels), 0.9)
    assert decided.decide(0.7) == ("trust", None)
    assert decided.decide(0.2)[0] == "distrust"
    labels[300:700] = np.arange(400) % 2 == 0
    decided = certified(Validation(p, labels), 0.9)
    decision, reason = decided.decide(0.52)
    assert decision == "unknown" and "lies between" in reason
    nothing = certified(Validation(p, np.arange(1000) % 2 == 0), 0.9)
    assert nothing.decide(0.9) == ("unknown", nothing.trust.in_words())
    below = certified(Validation(p, np.arange(1000) < 990), 0.9)
    assert "no threshold to distrust" in below.decide(0.01)[1]


def test_a_reason_never_shows_p_equal_to_a_threshold_that_it_misses():
    p = np.repeat([2 / 15, 13 / 30, 17 / 30, 13 / 15], 100)  # the steps of a map
    labels = np.arange(400) >= 200
    labels[100:300] = np.arange(200) % 2 == 0
    both = certified(Validation(p, labels), 0.9)  # each lies just beyond a step
    alone = both._replace(distrust=distrust(p, labels, 0.99))
    shown = [
        re.findall(r"0\.\d{4}", decided.decide(value)[1])
        for decided, value in ((both, 13 / 30), (both, 17 / 30), (alone, 17 / 30))
    ]
    assert shown == [
        ["0.4334", "0.4333", "0.5667"],
        ["0.5666", "0.4333", "0.5667"],
        ["0.5666", "0.5667"],
    ]


def lowest_at_precision(p, labels, wanted):
    """The former rule: the lowest P from which these same answers are precise."""
    order = np.argsort(-p)
    reached = np.cumsum(labels[order]) / np.arange(1, len(p) + 1) >= wanted
    return float(p[order][np.flatnonzero(reached)[-1]]) if reached.any() else None


def breaks_its_promise(base, shift, decide, wanted, p, centre=0.0):
    """Whether too few decisions are right, for normal classes around 0 and `shift`.

    Decisions begin at P = `p`, or never; P is one half where a score is `centre`.
    """
    if p is None:
        return False
    z = np.log(max(p, 1e-9)) - np.log1p(-p) + centre
    shares = base * norm.sf(z - shift), (1 - base) * norm.sf(z)
    if decide is distrust:
        shares = (1 - base) * norm.cdf(z), base * norm.cdf(z - shift)
    return shares[0] < wanted * sum(shares)


@pytest.mark.parametrize(("base", "shift"), [(0.5, 1.81), (0.8, 1.9), (0.5, 1.045)])
@pytest.mark.parametrize("n", [200, 600])
@pytest.mark.parametrize("decide", [trust, distrust])
def test_a_threshold_breaks_its_promise_in_at_most_one_draw_of_ten(
    base, shift, n, decide
):
    """Two normal classes, whose precision at a threshold is known exactly."""
    rng, n_draws = np.random.default_rng(n), 200
    is_broken = partial(breaks_its_promise, base, shift, decide, 0.9)
    n_broken, n_broken_before = 0, 0
    for _ in range(n_draws):
        labels = rng.random(n) < base
        z = rng.standard_normal(n) + shift * labels - shift / 2
        p = 1 / (1 + np.exp(-z - shift / 2))
        n_broken += is_broken(decide(p, labels).p_correct)
        if decide is trust:
            before = lowest_at_precision(p, labels, 0.9)
        else:
            before = lowest_at_precision(1 - p, ~labels, 0.9)
            before = None if before is None else 1 - before
        n_broken_before += is_broken(before)
    most = 0.1 + 3 * (0.1 * 0.9 / n_draws) ** 0.5
    assert n_broken <= most * n_draws < n_broken_before


@pytest.mark.parametrize("decide", [trust, distrust])
def test_the_threshold_of_the_best_of_fifteen_heads_keeps_its_promise(decide):
    """The heads are equally good, so that the best is so by chance alone."""
    rng, n_draws, shift, n_broken = np.random.default_rng(0), 300, 1.045, {1: 0, 15: 0}
    for _ in range(n_draws):
        labels = rng.random(300) < 0.5
        noise = rng.standard_normal(300), rng.standard_normal((15, 300))
        scores = shift * labels + sum(noise) / 2**0.5
        best = scores[rankdata(scores, axis=1)[:, labels].sum(axis=1).argmax()]
        p = 1 / (1 + np.exp(shift / 2 - best))
        for n_tried in n_broken:
            at = decide(p, labels, 0.7, n_tried=n_tried).p_correct
            about = 0.5, shift, decide, 0.7, at, shift / 2
            n_broken[n_tried] += breaks_its_promise(*about)
    most = 0.1 + 3 * (0.1 * 0.9 / n_draws) ** 0.5
    assert n_broken[15] <= most * n_draws < n_broken[1]


@pytest.mark.parametrize("n", [200, 600])
@pytest.mark.parametrize("decide", [trust, distrust])
def test_an_isotonic_map_rarely_certifies_a_score_that_tells_nothing(n, decide):
    rng, n_decided = np.random.default_rng(n), 0
    for _ in range(200):  # the score tells nothing: any threshold is wrong
        scores, labels = rng.random(n), rng.random(n) < 0.89
        if decide is distrust:
            labels = ~labels
        p = fit_calibrator(scores, labels)(scores)
        validation = Validation.of_answers(scores, p, labels, np.arange(n))
        n_decided += decide(*validation).p_correct is not None
    assert n_decided <= 0.1 * 200


def test_a_saved_detector_keeps_its_scope_and_validation_answers(detector, tmp_path):  # noqa: F811
    validation = Validation(np.linspace(1, 0, 99) ** 2, np.arange(99) < 50)
    dims = detector.banks["closed_book"].dims
    scope = Scope(*np.ones((2, dims.total), np.float32), np.ones(4, np.float32))
    banks, heads = dict(detector.banks), dict(detector.heads)
    for parts, change in (
        (banks, {"scope": scope}),
        (heads, {"validation": validation}),
    ):
        parts["closed_book"] = dataclasses.replace(parts["closed_book"], **change)
    changed = dataclasses.replace(detector, banks=banks, heads=heads)
    changed.save(tmp_path / "detector")
    loaded = Detector.load(tmp_path / "detector")
    for precision in (None, 0.8):
        thresholds = loaded.heads["closed_book"].thresholds(precision)
        assert thresholds == certified(validation, precision or 0.9)
        assert thresholds.trust.p_correct is not None
    with pytest.raises(ValueError, match="a share in .0, 1., got 0"):
        loaded.heads["closed_book"].thresholds(0)
    np.testing.assert_array_equal(loaded.banks["closed_book"].scope.low, scope.low)


def test_a_detector_saved_in_format_8_certifies_nothing(
    detector,  # noqa: F811
    tmp_path,
):
    i = np.arange(400)  # for either P, its 12 errors are tested last
    labels = (i >= 212) | ((i >= 188) & (i < 200))
    validation = Validation(np.repeat([0.05, 0.95], 200), labels)
    head = dataclasses.replace(detector.heads["closed_book"], validation=validation)
    dataclasses.replace(detector, heads={"closed_book": head}).save(tmp_path)
    decided = Detector.load(tmp_path).heads["closed_book"].thresholds(0.9)
    assert decided == head.thresholds(0.9)
    assert None not in (decided.trust.p_correct, decided.distrust.p_correct)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"format": 8}))
    write_checksums(tmp_path)
    decided = Detector.load(tmp_path).heads["closed_book"].thresholds(0.9)
    assert decided.trust.p_correct is decided.distrust.p_correct is None


def test_a_saved_head_knows_how_many_were_tried_and_in_format_10_it_is_alone(
    detector,  # noqa: F811
    tmp_path,
):
    validation = Validation(np.linspace(0.51, 0.99, 40), np.ones(40, bool))
    head = dataclasses.replace(detector.heads["closed_book"], validation=validation)
    evidence = dataclasses.replace(head.evidence, n_tried=15)
    chosen = dataclasses.replace(head, evidence=evidence)
    dataclasses.replace(detector, heads={"closed_book": chosen}).save(tmp_path)
    loaded = Detector.load(tmp_path).heads["closed_book"]
    assert loaded.thresholds() == certified(validation, 0.9, n_tried=15)
    assert loaded.thresholds().trust.p_correct is None
    config = json.loads((tmp_path / CONFIG).read_text())
    del config["heads"]["closed_book"]["evidence"]["n_tried"]
    (tmp_path / CONFIG).write_text(json.dumps(config | {"format": 10}))
    write_checksums(tmp_path)
    loaded = Detector.load(tmp_path).heads["closed_book"]
    assert loaded.thresholds() == certified(validation, 0.9)
    assert loaded.thresholds().trust.p_correct is not None


def test_a_detector_saved_in_format_12_has_no_hash_of_its_config(
    detector,  # noqa: F811
    tmp_path,
):
    hashes = ModelHashes(config="c" * 64, tokenizer="t" * 64)
    provenance = Provenance(model="m", revision="r", layer=1, hashes=hashes)
    dataclasses.replace(detector, provenance=provenance).save(tmp_path)
    assert Detector.load(tmp_path).provenance == provenance
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"format": 12}))
    write_checksums(tmp_path)
    stored = Detector.load(tmp_path).provenance.hashes
    assert stored == dataclasses.replace(hashes, config="")


def test_another_precision_calibrates_again_and_the_same_one_does_not(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke", seed=0)) as run:
        run.mark_stage("calibrate", {}, 0.0)
        change_settings(run, CALIBRATE, lambda _: CalibrateConfig())
        assert run.stage_done("calibrate")
        change_settings(run, CALIBRATE, lambda _: CalibrateConfig(precision=0.8))
        assert not run.stage_done("calibrate")
        assert run.resolve_section("calibrate", CALIBRATE_PRESETS).precision == 0.8
    for no_share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="expected a share in"):
            CalibrateConfig(precision=no_share)
