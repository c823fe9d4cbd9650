"""Every detector of the catalogue finds what is planted, and nothing else.

And four ways to break it are each caught.
"""

import dataclasses

import numpy as np
import pytest

from beatrice.benchmarks.baselines.check import violations
from beatrice.benchmarks.baselines.detector import DetectorOutput, catalogue
from beatrice.jaxprobe.metrics import auroc
from tests.benchmarks.baselines import planted

# The encoder is a model of its own, and tested with one (`test_ladder`); a head that
# JAX fits is slow.
KNOWN = {n: x for n, x in catalogue().items() if "encoder" not in x.needs}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name == "gnosis" else name
    for name in KNOWN
]
# Those that choose on validation alone read no training answers.
LEARNS = {name for name, x in KNOWN.items() if x.is_trained}
# What says at which layer validation found the signal, counted from the embedding.
LAYERED = ("saplma_mean", "saplma_last", "linear_probe")
SAMPLED = [
    name
    for name, x in KNOWN.items()
    if "samples" in x.needs and not x.is_trained and not x.reads
]


@pytest.fixture(scope="module")
def given():
    return planted.inputs()


def broken(name, score):
    """The detector with another score, `score(its own, inputs)`."""
    own = KNOWN[name]
    return dataclasses.replace(own, score=lambda inputs: score(own.score, inputs))


def measured(found, rows):
    test = rows.where("test")
    scores = np.nan_to_num(found.scores[0, test])
    return auroc(scores, rows.labels[test]).value


@pytest.mark.parametrize("name", NAMES)
def test_a_detector_of_the_catalogue_has_no_fault_and_finds_what_is_planted(
    given, name
):
    assert violations(KNOWN[name], given) == []
    assert measured(KNOWN[name].score(given), given.rows) > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_permuted_labels_teach_nothing(given, name):
    labels = np.random.default_rng(1).permutation(given.rows.labels)
    rows = dataclasses.replace(given.rows, labels=labels)
    scores = KNOWN[name].score(dataclasses.replace(given, rows=rows))
    # Of 50 test answers: s.d. 0.08.
    assert abs(measured(scores, rows) - 0.5) < 0.3


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_which_nothing_is_known_is_undefined_and_the_others_are_not(
    given, name
):
    (gone, *others) = given.rows.where("test")
    readings = {key: values.copy() for key, values in given.readings.items()}
    for values in readings.values():
        values[gone] = np.nan
    samples = [() if i == gone else own for i, own in enumerate(given.samples)]
    less = dataclasses.replace(given, readings=readings, samples=samples)
    scores = KNOWN[name].score(less).scores
    needs_it = KNOWN[name].reads or (
        "samples" in KNOWN[name].needs and not KNOWN[name].is_trained
    )
    assert np.isnan(scores[:, gone]).all() == bool(needs_it)
    assert np.isfinite(scores[:, others]).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_sign_that_is_turned_is_caught(given, name):
    turned = broken(name, lambda own, e: DetectorOutput(-own(e).scores))
    assert any("is the sign turned?" in fault for fault in violations(turned, given))


@pytest.mark.parametrize("name", sorted(LEARNS - {"gnosis"}))
def test_learning_from_the_test_answers_is_caught(given, name):
    def exchanged(own, inputs):
        names = {"train": "test", "test": "train", "validation": "validation"}
        splits = np.array([names[split] for split in inputs.rows.splits])
        rows = dataclasses.replace(inputs.rows, splits=splits)
        return own(dataclasses.replace(inputs, rows=rows))

    # By their labels, or by what was read or drawn of them.
    assert violations(broken(name, exchanged), given) != []


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_of_the_next_question_are_caught(given, name):
    def shifted(own, inputs):
        drawn = inputs.samples
        return own(dataclasses.replace(inputs, samples=[*drawn[1:], drawn[0]]))

    faults = violations(broken(name, shifted), given)
    assert any("drawn to other test questions" in fault for fault in faults)


@pytest.mark.parametrize("name", LAYERED)
def test_a_layer_that_is_off_by_one_is_caught_by_the_one_that_is_chosen(given, name):
    def layer_of(inputs):
        found = KNOWN[name].score(inputs)
        return next(row.value for row in found.chosen if row.metric == "layer")

    spec = given.store.spec
    off = tuple(layer + 1 for layer in spec.hidden_layers)
    wrong = dataclasses.replace(spec, hidden_layers=off)
    store = dataclasses.replace(given.store, spec=wrong)
    assert layer_of(given) == planted.LAYER
    assert layer_of(dataclasses.replace(given, store=store)) != planted.LAYER
