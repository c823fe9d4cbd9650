"""Every detector of the catalogue finds a planted signal; broken ones are caught."""

import dataclasses

import numpy as np
import pytest

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
    catalogue,
    find_detector,
)
from beatrice.benchmarks.baselines.faults import violations
from beatrice.benchmarks.results.names import CONTROLS, DETECTORS
from beatrice.extract.readings.reader import READINGS
from tests.benchmarks.baselines import planted
from tests.benchmarks.baselines.test_probes import measured
from tests.jaxprobe.samples import rows_of

# Detectors with an encoder need a model, and are tested in `test_plain`. `gnosis` is
# slow, as JAX fits its head.
KNOWN = {n: x for n, x in catalogue().items() if "encoder" not in x.needs}
QUICK = [name for name in KNOWN if name != "gnosis"]
NAMES = [*QUICK, pytest.param("gnosis", marks=pytest.mark.slow)]
SAMPLED = [
    name
    for name, x in KNOWN.items()
    if "samples" in x.needs and not x.is_trained and not x.reads
]


@pytest.fixture(scope="module")
def given():
    return planted.inputs()


def broken(name, score):
    """Return the detector with another score: `score(its own score, inputs)`."""
    whole = KNOWN[name]
    return dataclasses.replace(whole, score=lambda inputs: score(whole.score, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_a_detector_of_the_catalogue_has_no_fault_and_finds_what_is_planted(
    given, name
):
    assert violations(KNOWN[name], given) == []
    assert measured(KNOWN[name].score(given), given.rows) > 0.95


@pytest.mark.parametrize("name", NAMES)
def test_permuted_labels_teach_nothing(given, name):
    labels = np.random.default_rng(1).permutation(given.rows.labels)
    rows = dataclasses.replace(given.rows, labels=labels)
    scores = KNOWN[name].score(dataclasses.replace(given, rows=rows))
    assert abs(measured(scores, rows) - 0.5) < 3 * 0.08  # s.d. of 50 test answers


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_without_its_readings_or_draws_is_undefined_and_others_not(
    given, name
):
    (gone, *others) = given.rows.where("test")
    readings = {key: values.copy() for key, values in given.readings.items()}
    for values in readings.values():
        values[gone] = np.nan
    samples = [() if i == gone else texts for i, texts in enumerate(given.samples)]
    less = dataclasses.replace(given, readings=readings, samples=samples)
    scores = KNOWN[name].score(less).scores
    assert np.isnan(scores[:, gone]).all() == bool(KNOWN[name].reads or name in SAMPLED)
    assert np.isfinite(scores[:, others]).all()


# One of each kind: what is caught depends on `violations`, not on the detector.
@pytest.mark.parametrize("name", ["linear_probe", "p_true", "semantic_entropy"])
def test_a_reversed_sign_is_caught(given, name):
    turned = broken(name, lambda f, e: DetectorOutput(-f(e).scores))
    assert any("is the sign reversed?" in fault for fault in violations(turned, given))


@pytest.mark.parametrize("name", ["linear_probe", "tfidf_svm", "redeep", "sep:words"])
def test_learning_from_the_test_answers_is_caught(given, name):
    def exchanged(score, inputs):
        names = {"train": "test", "test": "train", "validation": "validation"}
        splits = np.array([names[split] for split in inputs.rows.splits])
        rows = dataclasses.replace(inputs.rows, splits=splits)
        return score(dataclasses.replace(inputs, rows=rows))

    # It may learn from labels, or from what was read or drawn.
    assert violations(broken(name, exchanged), given) != []


@pytest.mark.parametrize("name", ["semantic_entropy", "selfcheck_ngram"])
def test_samples_of_the_next_question_are_caught(given, name):
    def shifted(score, inputs):
        drawn = inputs.samples
        return score(dataclasses.replace(inputs, samples=[*drawn[1:], drawn[0]]))

    faults = violations(broken(name, shifted), given)
    assert any("drawn for other test questions" in fault for fault in faults)


@pytest.mark.parametrize("name", [n for n in QUICK if KNOWN[n].reads])
def test_a_detector_reads_exactly_the_readings_that_it_declares(given, name):
    detector = KNOWN[name]
    read = {key: given.readings[key] for key in detector.reads}
    assert set(read) <= set(READINGS)
    detector.score(dataclasses.replace(given, readings=read))
    for missing in read:
        rest = {key: values for key, values in read.items() if key != missing}
        with pytest.raises((ValueError, KeyError), match=missing):
            detector.score(dataclasses.replace(given, readings=rest))


@pytest.mark.parametrize("name", QUICK)
def test_only_trained_detectors_use_training_labels(given, name):
    rows = given.rows
    labels = np.where(rows.splits == "train", ~rows.labels, rows.labels)
    other = dataclasses.replace(given, rows=dataclasses.replace(rows, labels=labels))
    pair = [KNOWN[name].score(x).scores for x in (given, other)]
    is_same = bool(np.array_equal(*pair, equal_nan=True))
    learns_labels = KNOWN[name].is_trained and not name.startswith("sep")
    assert is_same != learns_labels


def test_word_based_detectors_need_no_nli_model_and_say_so():
    for name, detector in KNOWN.items():
        if name.startswith(("semantic_entropy", "sep")):
            is_words = name.endswith(":words")
            assert ("no NLI model" in detector.variant) == is_words
            assert ("entailment" in detector.needs) != is_words


N = 240
_LABELS = np.random.default_rng(0).random(N) < 0.5
SIGNAL = 2 * _LABELS + np.random.default_rng(1).normal(size=N)
SPLITS = np.repeat(["train", "validation", "test", "ood"], N // 4)


def signals():
    rows = rows_of(_LABELS, splits=SPLITS)
    readings = {"signal": SIGNAL.astype(np.float32)}
    return DetectorInput(store=None, rows=rows, layer=0, readings=readings)


def faults_of(score, reads=("signal",)):
    def output(given):
        return DetectorOutput(np.asarray(score(given)))

    return violations(planted.baseline_of(output, reads=reads), signals())


def signal(given):
    return given.readings["signal"].astype(float)


WRONG = {
    "shape": (signal, "expected floats [n_seeds, 240]"),
    "kind": (lambda e: (signal(e) > 0)[None], "scores are bool"),
    "infinite": (lambda e: np.where(signal(e) > 3, np.inf, signal(e))[None], "NaN"),
    "nothing": (lambda e: np.full((1, N), np.nan), "no answer has a score"),
    "raising": (lambda e: e.readings["sign"], "KeyError: 'sign' (test_catalogue.py, "),
    "raising at a gap": (
        lambda e: np.asarray_chkfinite(signal(e))[None],
        "scoring ends in ValueError: array must not contain infs or NaNs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_fault_of_a_detector_is_reported(name):
    score, words = WRONG[name]
    faults = faults_of(score)
    assert any(words in fault for fault in faults), faults


@pytest.mark.parametrize("split", ["test", "ood"])
@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda e: e.rows.labels, "the detector reads them"),
        (lambda e: np.nan_to_num(signal(e)), "not read has a score"),
        (lambda e: signal(e) / np.nanstd(signal(e)), "which other test answers"),
    ],
)
def test_a_fault_on_only_one_evaluated_split_is_reported(score, words, split):
    faults = faults_of(lambda e: np.where(SPLITS == split, score(e), signal(e))[None])
    assert any(words in fault for fault in faults), faults


def test_a_random_detector_is_not_accused_of_reading_labels_or_other_answers():
    random = np.random.default_rng(5)
    faults = faults_of(lambda e: signal(e)[None] + random.normal(size=N))
    assert faults == ["the same inputs give different scores the second time"]


def test_a_random_score_is_not_accused_of_a_reversed_sign():
    noise = np.random.default_rng(3).normal(size=(1, N))
    assert faults_of(lambda e: noise, reads=()) == []


def test_a_detector_is_found_by_its_path_or_the_fault_is_named():
    assert find_detector("p_true").name == "p_true"
    path = "beatrice.benchmarks.baselines.detectors.context:p_true"
    assert find_detector(path).name == "p_true"
    with pytest.raises(ValueError, match="expected a Baseline"):
        find_detector("beatrice.benchmarks.baselines.detectors.context:reading")
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        find_detector("no_such_module:X")


def test_no_rival_has_the_name_of_another_row():
    known = catalogue()
    assert not set(known) & {x.detector for x in (*DETECTORS, *CONTROLS)}
    assert len({detector.title for detector in known.values()}) == len(known)
    assert all(detector.source for detector in known.values())


def test_unknown_needs_and_duplicate_names_of_detectors_are_refused():
    named = {"title": "A", "source": "here"}
    for needs in ("samples", ["sample"]):
        with pytest.raises(ValueError, match="needs: expected some of"):
            baseline("a", **named, needs=needs)

    baseline("same", **named)(planted.inputs)
    with pytest.raises(ValueError, match="has two detectors called 'same'"):
        baseline("same", **named)(planted.drawn_inputs)
