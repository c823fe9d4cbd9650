"""Fitting a probe on signals, saving it, and the verb `fit` for a model of your own."""

import dataclasses
import json
import shutil
import threading

import jax
import numpy as np
import pandas
import pyarrow
import pytest
import torch

import beatrice
from beatrice.extract.backbone.names import locked_folder
from beatrice.extract.run.contents import read_examples, read_labels
from beatrice.extract.store.store import read_family
from beatrice.fitting import metric_rows
from beatrice.jaxprobe.config import CALIBRATE_PRESETS
from beatrice.jaxprobe.metrics import BootstrapConfig, auroc
from beatrice.own_model import clear_work, fit_own
from tests.extract import small_run
from tests.extract.datasets.published import write_lines
from tests.process import run_python
from tests.records import a_label, labelled_rows, passage_rows, question_row

SETTINGS = ("closed_book", "with_context")
pytestmark = pytest.mark.filterwarnings("ignore:too few to", "ignore:the probe is not")
SMALL = beatrice.FitConfig.preset("smoke")


@pytest.fixture(scope="module")
def signals(run):
    return {setting: beatrice.Signals(run.features(setting)) for setting in SETTINGS}


@pytest.fixture(scope="module")
def probe(run, signals):
    labels = list(read_labels(run).values())
    split_of = {e.id: e.split.replace("ood", "") for e in read_examples(run)}
    return beatrice.fit(
        signals,
        dict.fromkeys(SETTINGS, labels),
        splits={s: [split_of[name] for name in x.ids] for s, x in signals.items()},
        recipe="paper",
        config="smoke",
        seed=run.seed,
        progress=False,
    )


def test_fit_on_signals_of_a_run_gives_the_detector_of_its_verbs(run, signals, probe):
    verbs = beatrice.load(run.path)
    assert verbs.detector.provenance.layer == probe.layer
    for name, head in probe.detector.heads.items():
        assert head.evidence == verbs.detector.heads[name].evidence
    both = {"signals": signals["with_context"], "closed_book": signals["closed_book"]}
    for case in (*({"signals": alone} for alone in signals.values()), both):
        p_correct = probe.predict(**case)
        np.testing.assert_allclose(verbs.predict(**case), p_correct, atol=1e-6)
        assert np.ptp(p_correct) > 0.05  # the predictions differ


def test_maps_of_a_run_tell_most_answers_apart_and_those_of_the_paper_do_not(
    run, signals, tmp_path
):
    paper = shutil.copytree(run.path, tmp_path / "run")
    small_run.beatrice("calibrate", paper, "--set", "maps=isotonic")
    n_distinct = [
        len(np.unique(beatrice.load(folder).predict(signals["closed_book"])))
        for folder in (run.path, paper)
    ]
    assert n_distinct[1] < n_distinct[0] / 2
    assert n_distinct[0] > 0.9 * len(signals["closed_book"])
    assert CALIBRATE_PRESETS["paper"].maps == "isotonic"


def test_a_saved_probe_predicts_the_same(signals, probe, tmp_path):
    folder = tmp_path / "probe"
    probe.save(folder, untrustworthy=True)
    probe.save(folder, untrustworthy=True)  # saving again replaces it
    some = signals["closed_book"][:20]
    again = beatrice.load(folder)
    assert np.array_equal(again.predict(some), probe.predict(some))
    assert again.report.equals(probe.report)


def test_a_report_has_every_head_split_and_metric_with_its_interval(probe):
    report = probe.report
    assert set(report["head"]) == {*SETTINGS, "single_pass"}
    assert set(report["split"]) == {"validation", "test"}
    assert set(report["metric"]) == {"auroc", "auprc", "ece", "brier"}
    assert (report["ci_low"] <= report["value"]).all()
    assert (report["value"] <= report["ci_high"]).all()


def test_three_right_answers_on_top_do_not_make_the_ranking_certain():
    p, labels = np.linspace(0.01, 0.99, 100), np.arange(100) > 96
    config = BootstrapConfig(n_resamples=20)
    rows = metric_rows(p, p, labels, np.arange(100), config)[:2]
    for row, metric, low in zip(rows, ("auroc", "auprc"), (0.5, 0.9), strict=True):
        assert row["metric"] == metric and low < row["ci_low"] < low + 0.4
        assert row["ci_high"] == row["value"] == 1.0 > row["ci_low"] + 0.05


def test_the_interval_of_the_calibration_error_contains_the_true_error():
    rng, config, n_held = np.random.default_rng(0), BootstrapConfig(n_resamples=60), 0
    for true in (0.0, 0.15):
        for _ in range(10):
            p = rng.uniform(0.2, 0.8, 200)
            labels = rng.random(200) < p + true
            row = metric_rows(p, p, labels, np.arange(200), config)[2]
            n_held += row["ci_low"] <= true <= row["ci_high"]
    assert row["metric"] == "ece" and n_held >= 18


def planted_signals(rng, n_answers=300):
    """Return signals of three own families, and labels; only `sae` depends on them."""
    lengths = rng.integers(1, 6, n_answers)
    labels = rng.random(n_answers) < 0.5
    at = np.repeat(np.arange(n_answers), lengths)
    families = {
        "activations": rng.normal(size=(lengths.sum(), 2, 3)),
        "sae": rng.normal(size=(lengths.sum(), 8)),
        "logits": rng.normal(size=lengths.sum()),
    }
    families["sae"][:, 2] += 2.0 * labels[at]
    return beatrice.Signals.from_arrays(families, lengths=lengths), labels


def small_config():
    train = dataclasses.replace(SMALL.encoders.train, max_epochs=8)
    encoders = dataclasses.replace(SMALL.encoders, train=train).linear_first()
    return dataclasses.replace(SMALL, encoders=encoders, n_resamples=20)


def held_out_auroc(rng, labels_of, recipe):
    signals, truth = planted_signals(rng)
    labels = labels_of(truth)
    splits = ["train"] * 160 + ["validation"] * 60 + ["test"] * 80
    how = {"recipe": recipe, "config": small_config(), "progress": False}
    probe = beatrice.fit(signals, labels, splits=splits, **how)
    report = probe.report.query("split == 'test' and metric == 'auroc'")
    p_correct = probe.predict(signals)[220:]
    assert auroc(p_correct, labels[220:]).value == pytest.approx(
        report["value"].item(), abs=1e-6
    )
    return report["value"].item(), probe


@pytest.mark.parametrize("recipe", ["linear", "encoder", "paper"])
def test_probes_on_families_of_your_own_find_only_what_is_planted(rng, recipe):
    value, probe = held_out_auroc(rng, lambda truth: truth, recipe)
    assert value > 0.85
    (head,) = probe.detector.heads.values()
    assert any("S" in subset for _, subset in head.reads)
    assert not probe.detector.doubts
    value, probe = held_out_auroc(rng, rng.permutation, recipe)
    assert 0.3 < value < 0.7  # 80 answers: two standard errors are .13
    if recipe == "linear":  # it chooses nothing by its validation rows
        assert "not shown to be better than chance" in probe.detector.doubts[0]
    dims = {"activations": (2, 3), "sae": (8,), "logits": (1,)}
    far = {name: np.full((8, *shape), 3e38) for name, shape in dims.items()}
    far = beatrice.Signals.from_arrays(far, ids=["a", "b"], lengths=[4, 4])
    with pytest.raises(ValueError, match="of 2 of 2 answers overflow .* of 'a'"):
        probe.predict(far)  # their sums overflow


def test_a_doubtful_probe_is_saved_only_as_untrustworthy_and_stays_so(rng, tmp_path):
    signals, _ = planted_signals(rng, 60)
    labels = np.arange(60) % 20 == 0  # 3 right: 2 to train on, 1 to calibrate on
    probe = beatrice.fit(signals, labels, progress=False)
    with pytest.raises(ValueError, match="too few to trust: 2 right and .* 10 of each"):
        probe.save(tmp_path / "probe")
    assert not (tmp_path / "probe").exists()
    probe.save(tmp_path / "probe", untrustworthy=True)
    again = beatrice.load(tmp_path / "probe")
    assert again.detector.doubts == probe.detector.doubts
    with pytest.warns(UserWarning, match="1 right and 17 wrong validation answers"):
        again.predict(signals)


def test_a_group_in_two_splits_is_refused(rng):
    signals, labels = planted_signals(rng, 60)
    splits = ["train"] * 40 + ["validation"] * 20
    how = {"splits": splits, "progress": False}
    beatrice.fit(signals, labels, groups=np.arange(60) // 2, **how)
    with pytest.raises(ValueError, match="'4' are in 'train' and in 'validation'"):
        beatrice.fit(signals, labels, groups=np.arange(60) % 36, **how)
    some = ["" if i >= 36 and i < 40 else x for i, x in enumerate(splits)]
    with pytest.raises(ValueError, match="splits: the answers of '4' are"):
        beatrice.fit(
            signals, labels, groups=np.arange(60) % 36, **how | {"splits": some}
        )


@pytest.mark.parametrize("unit", [1e-8, 1e-25, 1e30])
def test_the_unit_of_signals_does_not_change_the_auroc(rng, unit):
    labels = np.arange(200) % 2 == 0
    rows, large = rng.normal(size=(2, 200, 2)) + labels[:, None]

    def auroc_of(rows):
        signals = beatrice.Signals.from_arrays({"a": rows, "large": 10 * large})
        return beatrice.fit(signals, labels, progress=False).rows[0]["value"]

    assert auroc_of(unit * rows) == pytest.approx(auroc_of(rows), abs=1e-6)
    assert auroc_of(rows) > auroc_of(0 * rows) + 0.02


def test_about_three_tenths_validate_even_if_no_two_groups_are_alike(rng):
    n_right = np.arange(20)  # in each group of 20 answers
    labels = np.concatenate([np.arange(20) < n for n in n_right])
    groups = np.repeat(n_right, 20)
    rows = rng.normal(size=(400, 2)) + labels[:, None]
    signals = beatrice.Signals.from_arrays({"a": rows})
    probe = beatrice.fit(signals, labels, groups=groups, progress=False)
    assert 80 <= probe.rows[0]["n"] <= 140
    named = "there are no labelled training answers; .* in more groups"
    with pytest.raises(ValueError, match=named):
        beatrice.fit(signals, labels, groups=["a"] * 400, progress=False)
    with pytest.raises(ValueError, match="another prompt, .*for a run, with --set"):
        beatrice.fit(signals, labels | True, groups=groups, progress=False)


def test_a_fit_adds_no_root_log_handlers_and_no_xla_variables():
    code = (
        "import logging, os; del os.environ['XLA_FLAGS'];"
        "import numpy as np, beatrice; y = np.arange(60) % 2 > 0;"
        "signals = beatrice.Signals.from_arrays({'a': y + np.random.rand(60)});"
        "beatrice.fit(signals, y, progress=False).predict(signals);"
        "print(logging.root.handlers, [x for x in os.environ if x[:3] == 'XLA'])"
    )
    assert run_python(code).stdout == "[] []\n"


@pytest.fixture
def settings_of_the_user():
    """Yield a function that changes settings of JAX for all threads, as users might."""
    values = {
        "jax_enable_x64": True,
        "jax_debug_nans": True,
        "jax_transfer_guard": "disallow",
        "jax_default_prng_impl": "rbg",
    }
    before = {name: getattr(jax.config, name) for name in values}

    def update(values):
        for name, value in values.items():
            jax.config.update(name, value)

    yield lambda: update(values)
    update(before)


@pytest.mark.parametrize("recipe", ["linear", "paper"])
def test_a_probe_depends_on_no_setting_of_jax_and_changes_none(
    rng, recipe, settings_of_the_user
):
    signals, labels = planted_signals(rng, 80)

    def predicted():
        how = {"recipe": recipe, "config": "smoke", "progress": False}
        return beatrice.fit(signals, labels, **how).predict(signals)

    usual = predicted()
    settings_of_the_user()
    settings = jax.config.values
    assert np.array_equal(predicted(), usual)
    assert jax.config.values == settings


def test_answers_are_matched_with_closed_book_ones_to_the_same_question(rng):
    lengths = np.full(200, 2)
    spans = np.tile([[0, 1], [1, 1], [1, 2]], (200, 1, 1))
    labels = np.repeat(rng.random(100) < 0.5, 2)  # two contexts per question
    rows = rng.normal(size=(2, 400, 3)) + 0.8 * np.repeat(labels, 2)[:, None]
    from_arrays, names = beatrice.Signals.from_arrays, np.array([*map(str, range(100))])
    ids = [f"{n}{again}" for n in range(100) for again in ("", "-2")]
    stored = from_arrays({"a": rows[0]}, lengths=lengths, spans=spans, ids=ids)
    # In another order, and only for the questions that are fitted on.
    order = rng.permutation(80)
    closed_book = rows[1, ::4][order]
    passes = {
        "with_context": stored[:160],
        "closed_book": from_arrays({"a": closed_book}, ids=names[order]),
    }
    groups = {"with_context": np.arange(160) // 4, "closed_book": order // 2}
    verdicts = {"with_context": labels[:160], "closed_book": labels[::2][order]}
    how = {"recipe": "paper", "config": small_config(), "progress": False}
    splits = {s: np.where(x < 25, "train", "validation") for s, x in groups.items()}
    probe = beatrice.fit(passes, verdicts, groups=groups, splits=splits, **how)
    where = np.arange(100, 160)
    p = probe.predict(stored[where], closed_book=passes["closed_book"])
    with pytest.raises(ValueError, match="has no closed-book answer"):
        probe.predict(stored[where], closed_book=passes["closed_book"][:1])
    report = probe.report.query("head == 'with_context' and metric == 'brier'")
    assert np.square(p - labels[where]).mean() == pytest.approx(
        report["value"].item(), abs=1e-6
    )
    (head,) = (x for name, x in probe.detector.heads.items() if name == "with_context")
    assert {where for where, _ in head.reads} == {*SETTINGS}


def test_settings_may_have_other_families_unless_a_head_reads_both(rng):
    labels, n = np.arange(160) % 4 < 2, np.full(160, 2)
    rows = (
        rng.normal(size=(2, 320, 3)) + np.outer([1, 0], np.repeat(labels, 2))[..., None]
    )
    spans = np.tile([[0, 1], [1, 1], [1, 2]], (160, 1, 1))
    families = (
        {"a": rows[0], "b": rows[1]},
        {"b": rows[1], "a": rows[0]},
        {"a": rows[0]},
    )
    with_context, *others = (
        beatrice.Signals.from_arrays(x, lengths=n, spans=s)
        for x, s in zip(families, (spans, None, None), strict=True)
    )
    splits = dict.fromkeys(SETTINGS, ["train", "validation"] * 80)
    how = {"splits": splits, "config": small_config(), "progress": False}
    for other, named in zip(others, ("b, a", "a"), strict=True):
        given = dict(zip(SETTINGS, (other, with_context), strict=True))
        verdicts = dict.fromkeys(SETTINGS, labels)
        with pytest.raises(ValueError, match=f"has {named}; with_context has a, b;"):
            beatrice.fit(given, verdicts, recipe="paper", **how)
        probe = beatrice.fit(given, verdicts, **how)
        for setting, signals in given.items():
            report = probe.report.query(f"head == '{setting}' and metric == 'auroc'")
            value = auroc(probe.predict(signals)[1::2], labels[1::2]).value
            assert (
                value == pytest.approx(report["value"].item(), abs=1e-6) and value > 0.8
            )


ROWS = np.ones((6, 2))
LAYERS = ROWS.reshape(6, 2, 1)


def test_signals_and_labels_of_another_setting_or_layer_are_refused(
    run, signals, probe
):
    closed_book, with_context = (signals[setting] for setting in SETTINGS)
    labels, right = list(read_labels(run).values()), [True] * len(closed_book)
    both, ids = dict.fromkeys(SETTINGS, labels), {SETTINGS[0]: closed_book.ids}
    other = beatrice.Signals.from_arrays({"hidden": ROWS[:, None]}, layers=[99])
    assert other.layers == (99,)
    for call_it, named in (
        (lambda: probe.predict(other), f"{probe.layer}, but these hold only 99"),
        (lambda: probe.predict(closed_book, closed_book=closed_book), "with with-con"),
        (lambda: beatrice.fit({SETTINGS[0]: with_context}, right), "with_context ans"),
        (lambda: beatrice.fit(signals, right), "settings, labels, groups and splits"),
        (lambda: beatrice.fit(signals, both, groups=ids), "groups: missing for the w"),
        (lambda: beatrice.fit(with_context, labels[:9]), "labels: missing for the ans"),
    ):
        with pytest.raises(ValueError, match=named):
            call_it()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"families": {}}, "families: expected a mapping .* found dict"),
        ({"families": ROWS}, "families: expected a mapping .* found ndarray"),
        ({"families": {"a": "text"}}, "family 'a': expected arrays of numbers"),
        ({"families": {"a": ROWS, "b": ROWS[:5]}}, "different numbers"),
        ({"lengths": [2, 2]}, "6 rows, .* lengths sum to 4"),
        ({"families": {"a": ROWS * np.nan}}, "12 values are not finite"),
        ({"spans": np.zeros((6, 2))}, "spans: expected whole"),
        ({"ids": ["x"]}, "ids: expected one for each of 6"),
        ({"ids": ["x"] * 6}, "ids: expected each id once"),
        ({"ids": [None, *"abcde"]}, "ids.0.: expected a name"),
        ({"ids": "abcdef"}, "ids: expected a list"),
        ({"ids": 6}, "ids: expected a list"),
        ({"lengths": [2.5, 3.5]}, "lengths: expected whole"),
        ({"lengths": [-1, 7]}, "lengths: expected whole"),
        ({"lengths": "two"}, "lengths: expected whole"),
        ({"families": {"a": [ROWS, ROWS]}, "lengths": [4, 8]}, "arrays differ from"),
        ({"families": {"a": ROWS.tolist()}}, "answer 0 is a vector.*tokens.*channels"),
        ({"families": {"a": pandas.Series([*ROWS])}}, "answer 0 is a vector"),
        ({"spans": {}}, "spans: expected whole"),
        ({"layers": [1]}, "layers: expected a family 'hidden'"),
        ({"families": {"hidden": ROWS}, "layers": [1]}, "layers: expected a family"),
        ({"families": {"hidden": ROWS}, "layers": 1}, "layers: expected whole"),
        ({"families": {"hidden": ROWS}, "layers": [[1]]}, "layers: expected whole"),
        ({"lengths": np.ones((6, 1))}, "lengths: expected"),
        ({"families": {"a": ROWS * 1e300}}, "not finite in float32"),
        ({"families": {7: ROWS}}, "families: expected names"),
        ({"families": {"../a": ROWS}}, "families: expected names"),
        ({"families": {"a b": ROWS, "a%20b": ROWS}}, "families: expected names"),
        ({"families": {"a?": ROWS}}, "families: expected names"),
        ({"families": {"a": ROWS + 1j}}, "complex128 values"),
        ({"families": {"a": torch.tensor(ROWS + 1j)}}, "complex128 values"),
        ({"families": {"a": np.ma.masked_less(ROWS, 2)}}, "some are masked"),
        ({"families": {"a": ROWS.astype("M8[D]")}}, "datetime64"),
        ({"lengths": [0, 6]}, "answer 0 has no tokens"),
        ({"families": {"a": [ROWS, ROWS[:0]]}}, "answer 1 has no tokens"),
        ({"families": {"hidden": LAYERS}, "layers": [1, 1]}, "layers: expected each l"),
        ({"families": {"a": ROWS, "a_scale": ROWS}}, "'a_scale'"),
        ({"store": __file__}, "cannot be written"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(given, named):
    with pytest.raises(ValueError, match=named):
        beatrice.Signals.from_arrays(**{"families": {"a": ROWS}, **given})


KINDS = {
    "tensor": torch.tensor,
    "bfloat16": lambda rows: torch.tensor(rows).bfloat16(),
    "with a gradient": lambda rows: torch.tensor(rows, requires_grad=True),
    "data frame": pandas.DataFrame,
    "pyarrow table": lambda rows: pyarrow.table([*rows.T], ["x", "y"]),
    "float16": lambda rows: rows.astype(np.float16),
    "not contiguous": lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
    "objects": lambda rows: rows.astype(object),
    "series of arrays": lambda rows: pandas.Series([row[None] for row in rows]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_table_is_read_like_an_array_of_its_rows(kind):
    rows = np.arange(12.0).reshape(6, 2)
    signals = beatrice.Signals.from_arrays({"a": KINDS[kind](rows)})
    assert len(signals) == 6
    assert [signals[i]["a"].tolist() for i in range(6)] == [[r.tolist()] for r in rows]
    named = beatrice.Signals.from_arrays({"a": ROWS}, ids=torch.arange(6))
    assert named.ids == ("0", "1", "2", "3", "4", "5")  # a tensor's numbers
    named = beatrice.Signals.from_arrays({"a": ROWS}, ids=np.arange(6.0))
    assert named.ids == ("0", "1", "2", "3", "4", "5")


def test_a_store_of_other_arrays_is_not_overwritten(tmp_path):
    def save(rows):
        return beatrice.Signals.from_arrays({"a": rows}, store=tmp_path / "store")

    save(ROWS)
    with pytest.raises(ValueError, match="holds another store"):
        save(2 * ROWS)
    assert save(ROWS)[0]["a"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"signals": None}, "signals"),
        ({"signals": {"closed": 1}}, "signals"),
        ({"labels": "right"}, "labels"),
        ({"labels": [True]}, "labels"),
        ({"labels": np.ones((20, 1))}, r"labels\[0\]: expected True, False or None"),
        ({"labels": ["yes"] * 20}, "labels"),
        ({"labels": [True] * 20}, "class"),
        ({"groups": ["a"]}, "groups"),
        ({"splits": ["train"]}, "splits"),
        ({"splits": ["dev"] * 20}, "splits"),
        ({"splits": 3}, "splits: expected a list"),
        ({"groups": "a" * 20}, "groups: expected a list"),
        ({"groups": ["a", None] * 10}, r"groups\[1\]: expected a name"),
        ({"groups": [*range(19), np.nan]}, r"groups\[19\]: expected a name"),
        ({"config": "huge"}, "config"),
        ({"config": {"n_seeds": 3}}, "config: expected a FitConfig"),
        ({"recipe": "best"}, "recipe"),
        ({"precision": 1.5}, "precision"),
        ({"precision": "0.9"}, "precision"),
        ({"seed": "1"}, "seed"),
    ],
)
def test_arguments_that_fit_cannot_use_are_refused_in_one_sentence(rng, change, named):
    signals, labels = planted_signals(rng, 20)
    given = {"signals": signals, "labels": labels, "config": "smoke", **change}
    with pytest.raises(ValueError, match=named):
        beatrice.fit(**given, progress=False)


def test_contradictory_labels_and_repeated_answers_are_refused(rng):
    signals, truth = planted_signals(rng, 20)
    named = zip(signals.ids, truth.tolist(), strict=True)
    labels = [a_label(is_right, example_id=name) for name, is_right in named]
    beatrice.fit(signals, [*labels, *labels], progress=False)  # two labels that agree
    other = a_label(not truth[3], example_id="3")
    for change, named in (
        ({"labels": [*labels, other]}, "labels: the answer .'3'.* has two"),
        ({"signals": signals[[*range(20), 3]]}, "expected each answer once.* 21 rows"),
    ):
        with pytest.raises(ValueError, match=named):
            beatrice.fit(**{"signals": signals, "labels": labels, **change})


def test_a_fit_shows_its_progress_unless_told_not_to(rng, capsys):
    signals, labels = planted_signals(rng, 60)
    for progress in (True, False):
        probe = beatrice.fit(signals, labels, config="smoke", progress=progress)
        assert ("fit closed_book" in capsys.readouterr().err) == progress
    assert probe.predict(signals[[]]).shape == (0,)  # without answers there is no P


def test_a_missing_label_in_a_table_or_tensor_is_an_unknown_label(rng):
    signals, truth = planted_signals(rng, 60)
    labels = pandas.array(truth.tolist(), dtype="boolean")
    labels[:20] = pandas.NA
    numbers = np.where(np.arange(60) < 20, np.nan, truth)
    probes = [
        beatrice.fit(signals, values, config="smoke", progress=False)
        for values in (
            labels,
            torch.tensor(numbers),
            jax.numpy.asarray(numbers),
            np.ma.masked_array(truth, np.arange(60) < 20),
            [None] * 20 + truth[20:].tolist(),
        )
    ]
    first, *others = (probe.predict(signals) for probe in probes)
    assert all(np.array_equal(first, p_correct) for p_correct in others)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"encoders": 5}, "encoders: expected a GridConfig"),
        ({"sweep": None}, "sweep: expected a SweepSection"),
        ({"heads": "demo"}, "heads: expected a SelectConfig"),
        ({"n_resamples": 2.5}, "n_resamples: expected a whole number"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_when_the_config_is_made(fields, named):
    with pytest.raises(ValueError, match=named):
        beatrice.FitConfig(**fields)


def test_predicting_answers_of_any_length_and_number_compiles_nothing(rng, caplog):
    signals, labels = planted_signals(rng, 60)
    probe = beatrice.fit(signals, labels, config="smoke", progress=False)
    shapes = {"activations": (2, 3), "sae": (8,), "logits": ()}
    lengths = range(1, 41)
    values = {k: rng.normal(size=(sum(lengths), *x)) for k, x in shapes.items()}
    answers = beatrice.Signals.from_arrays(values, lengths=lengths)
    jax.clear_caches()
    with jax.log_compiles():
        p_correct = np.concatenate([probe.predict(x) for x in (answers, answers[:3])])
        alone = [probe.predict(answers[[i]]).item() for i in range(40)]
    assert not [x for x in caplog.messages if "Finished XLA compilation" in x]
    np.testing.assert_allclose(p_correct, [*alone, *alone[:3]], atol=2e-6)


def test_a_probe_of_arrays_predicts_one_setting_at_a_time_and_has_no_model(
    signals, probe
):
    with pytest.raises(ValueError, match="signals: expected Signals of one setting"):
        probe.predict(signals)
    with pytest.raises(ValueError, match="arrays"):
        probe.score("a question", "an answer")


def fit_verb(*words, code=0):
    return small_run.beatrice("fit", *words, code=code)


@pytest.fixture(scope="module")
def examples(run):
    return read_examples(run)


@pytest.fixture
def questions(examples, tmp_path):
    return write_lines(tmp_path / "questions.jsonl", map(question_row, examples))


def test_a_model_and_questions_become_a_probe_that_reports_its_quality(
    questions, tmp_path
):
    done = fit_verb("embedded", questions, tmp_path / "probe", "--untrustworthy")
    for words in ("text alone", "length alone", "ECE", "decisions", "minutes"):
        assert words in done.output
    for verb in ("answer", "read"):
        assert done.output.count(f"{verb} closed_book: done in") == 1
    lines = (tmp_path / "probe" / "examples.jsonl").read_text().splitlines()
    assert len(lines) == 5  # their P is checked when the probe is loaded
    card = (tmp_path / "probe" / "README.md").read_text()
    assert "| perplexity's | of text alone |" in card
    assert not (tmp_path / "probe.work").exists()
    probe = beatrice.load(tmp_path / "probe")
    score = probe.answer("where was Skiband Rugrond born?")
    assert 0 < score.p_correct < 1
    assert "another script" not in "".join(score.warnings)
    foreign = probe.score("где родился Скибанд Ругронд?", "Guzolt Falls")
    assert "CYRILLIC, but training had LATIN" in "".join(foreign.warnings)


def test_a_probe_from_questions_with_passages_judges_both_kinds_of_answer(
    examples, tmp_path
):
    rows = [question_row(e, passages=passage_rows(e)) for e in examples]
    path = write_lines(tmp_path / "questions.jsonl", rows)
    done = fit_verb("embedded", path, tmp_path / "probe", "--untrustworthy")
    assert f"questions with passages: {len(rows)} of {len(rows)};" in done.output
    assert "held-out answers from memory" in done.output
    assert "held-out answers with passages" in done.output
    probe = beatrice.load(tmp_path / "probe")
    assert {*probe.report["head"]} == {"closed_book", "with_context", "single_pass"}
    saved = (tmp_path / "probe" / "examples.jsonl").read_text().splitlines()
    assert {bool(json.loads(line).get("context")) for line in saved} == {True, False}
    question, golds, passages = rows[0].values()
    assert 0 < probe.score(question, golds[0], passages).p_correct < 1

    shown = [row["passages"][: i < 4] for i, row in enumerate(rows)]
    pairs = zip(rows, shown, strict=True)
    some = [{**row, "passages": passages, "alias": "x"} for row, passages in pairs]
    write_lines(path, some)
    done = fit_verb("embedded", path, tmp_path / "other", "--untrustworthy")
    assert f"fields not read: 'alias' ({len(rows)})" in done.output
    assert "warning: " in done.output and "with passages to 4 questions" in done.output
    assert "the probe only judges answers from memory" in done.output
    with pytest.raises(ValueError, match="was fitted only on closed_book answers"):
        beatrice.load(tmp_path / "other").score(question, golds[0], passages)


def test_labelled_answers_to_passages_become_a_probe_that_reads_passages(
    examples, tmp_path
):
    rows = [
        row
        for e in examples[:150]
        for row in labelled_rows(e, context=[p.text for p in e.passages])
    ]
    path, folder = write_lines(tmp_path / "labelled.jsonl", rows), tmp_path / "probe"
    done = fit_verb("embedded", "--labelled", path, folder, "--untrustworthy")
    assert "fields not read" not in done.output
    assert done.output.count("read with_context: done in") == 1
    probe = beatrice.load(folder)
    question, answer, _, context = rows[0].values()
    right, wrong = (probe.score(question, x, context) for x in (answer, "Guzolt Falls"))
    assert right.p_correct > wrong.p_correct
    with pytest.raises(ValueError, match="was fitted only on with_context answers"):
        probe.score(question, answer)


def test_a_probe_with_a_template_of_your_own_recognises_only_its_prompts(
    examples, tmp_path
):
    words = {"with_context": "Known: {context} Asked: {question} Answer:"}
    (tmp_path / "words.json").write_text(json.dumps(words))
    examples = examples[:150]
    rows = [
        row for e in examples for row in labelled_rows(e, context=e.passages[0].text)
    ]
    path = write_lines(tmp_path / "labelled.jsonl", rows)
    options = ("--template", tmp_path / "words.json", "--untrustworthy")
    fit_verb("embedded", "--labelled", path, tmp_path / "probe", *options)
    probe = beatrice.load(tmp_path / "probe")
    for row in rows:
        del row["label"]
    right, wrong = (probe.score(**row) for row in rows[:2])
    assert right.p_correct > wrong.p_correct
    context, question = rows[0]["context"], rows[0]["question"]
    sent = f"Known: {context} Asked: {question} Answer:"
    same = probe.score(**rows[0], prompt=sent)
    assert same.p_correct == right.p_correct
    assert not any("another prompt" in text for text in same.warnings)
    other = probe.score(**rows[0], prompt=sent.replace("Known", "Context"))
    assert any("another prompt" in text and "'own'" in text for text in other.warnings)
    card = (tmp_path / "probe" / "README.md").read_text()
    assert json.dumps(words["with_context"]) in card

    model = beatrice.LanguageModel("embedded", prompt=words)
    (answer,) = model.as_answers(rows[:1])
    assert answer.prompt_ids == same_ids(model, sent)
    given = [question_row(e, passages=[context]) for e in examples]
    questions = write_lines(tmp_path / "questions.jsonl", given)
    done = fit_verb("embedded", questions, tmp_path / "other", *options, code=None)
    assert "they are asked with passages" in done.output
    write_lines(questions, [{"question": "who?", "golds": ["a"]}])
    done = fit_verb("embedded", questions, tmp_path / "none", *options, code=1)
    assert "add closed_book to it" in done.output
    words = ("embedded", questions, tmp_path / "none", "--template", path)
    assert "expected a JSON object" in fit_verb(*words, code=2).output


def same_ids(model, text):
    return tuple(model.backbone.tokenizer(text)["input_ids"])


def test_too_few_or_only_wrong_answers_are_refused_with_how_many_suffice(tmp_path):
    lines = [
        {"question": f"where is place {i}?", "answer": "here", "label": i < 5}
        for i in range(24)
    ]
    path = write_lines(tmp_path / "answers.jsonl", lines)
    words = ("embedded", "--labelled", path, tmp_path / "probe")
    assert "40 of each are enough" in fit_verb(*words, code=1).output
    assert not (tmp_path / "probe").exists()
    write_lines(path, lines[5:])
    assert "too few to fit: 0 right and 19 wrong" in fit_verb(*words, code=1).output


def test_answers_that_match_no_gold_are_reported_at_once_with_advice(
    questions, tmp_path
):
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    rows = [{**row, "golds": ["nothing like it"]} for row in rows]
    write_lines(questions, rows[:60])
    done = fit_verb("embedded", questions, tmp_path / "probe", code=1)
    assert "none of the first 50 answers from memory is right ('" in done.output
    assert "expected 'nothing like it'" in done.output and "--labelled" in done.output
    # Another prompt starts over, next to the answers already written.
    (tmp_path / "words.json").write_text('{"closed_book": "Asked: {question} Answer:"}')
    words = ("--template", tmp_path / "words.json")
    done = fit_verb("embedded", questions, tmp_path / "probe", *words, code=1)
    assert "too few to fit" in done.output
    assert "none of the first 50 answers from memory is right ('" in done.output


def test_interrupted_answering_resumes_from_the_answers_already_written(tmp_path):
    model = beatrice.LanguageModel("embedded")
    questions = [f"where was Skiband {word} born?" for word in "abcdefghij" * 30]
    store = tmp_path / "signals"
    whole, expected = model.answer(questions, max_new_tokens=4, read=True, store=store)
    files = tmp_path / "signals.written"
    lines = (files / "answers.jsonl").read_text().splitlines()
    marked = [lines[0].replace(whole[0].text, "marked", 1), *lines[1:256]]
    (files / "answers.jsonl").write_text("\n".join(marked) + '\n{"exam')
    second = max(files.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    second.unlink()
    shutil.rmtree(store)
    again, signals = model.answer(questions, max_new_tokens=4, read=True, store=store)
    assert again[0].text == "marked" and again[1:] == whole[1:]
    assert second.exists()
    prob = [
        read_family(x.store, "prob", np.arange(300)).values for x in (expected, signals)
    ]
    np.testing.assert_allclose(*prob, atol=1e-5)
    with pytest.raises(ValueError, match="other content"):
        model.answer(questions, max_new_tokens=5, read=True, store=store)


def test_the_verb_refuses_bad_files_in_one_sentence_before_loading_a_model(
    questions, tmp_path
):
    empty = write_lines(tmp_path / "empty.jsonl", [])
    odd = {"question": "q", "answer": "a", "label": "yes"}
    odd = write_lines(tmp_path / "odd.jsonl", [odd])
    nothing = tmp_path / "nothing"
    nothing.symlink_to("gone")
    goldless = write_lines(tmp_path / "goldless.jsonl", [{"question": "who?"}])
    cases = [
        ((questions,), "QUESTIONS and PROBE_FOLDER"),
        ((questions, tmp_path), "already exists"),
        ((questions, nothing), "is a broken link"),
        ((empty, tmp_path / "p"), "the file is empty"),
        ((goldless, tmp_path / "p"), "no answer field"),
        (("--labelled", empty, tmp_path / "p"), "empty"),
        (("--labelled", odd, tmp_path / "p"), "line 1"),
    ]
    for words, named in cases:
        done = fit_verb("nowhere/no-model", *words, code=None)
        assert done.exit_code in (1, 2)
        small_run.assert_error_sentence(done, named)
        assert "no-model" not in done.output


def test_clearing_a_work_folder_removes_only_what_the_fit_wrote(tmp_path):
    for name in ("mine", "empty"):
        (tmp_path / name / "signals-0123456789ab.written").mkdir(parents=True)
        (tmp_path / name / ".lock").touch()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name in ("mine", "empty"):
        clear_work(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_a_second_fit_waits_for_the_first_and_then_finds_its_probe(tmp_path):
    folder, errors = tmp_path / "probe", []

    def fit():
        options = {"is_labelled": False, "untrustworthy": False, "say": print}
        try:
            fit_own("embedded", [], folder, **options)
        except ValueError as error:
            errors.append(str(error))

    with locked_folder(tmp_path / "probe.work"):
        other = threading.Thread(target=fit)
        other.start()
        other.join(0.2)
        assert other.is_alive()
        folder.mkdir()
        (folder / "eval.json").write_text("{}")
    other.join()
    assert errors == [f"{folder} already exists; give a new folder"]
