import dataclasses

import numpy as np
import pytest

from beatrice.extract.records import Passage
from beatrice.jaxprobe.detector import bank_outputs
from beatrice.jaxprobe.families import SPANS
from beatrice.pgir.bridge import ProbedBackbone, fixed_length
from tests.pgir.small import LAYER, PASSAGE, QUESTION


def test_lengths_are_rounded_up_to_a_few():
    assert [fixed_length(n) for n in (1, 8, 9, 500, 8193)] == [8, 8, 16, 512, 16384]


def test_a_detector_of_another_backbone_is_refused(backbone, probed):
    other = dataclasses.replace(backbone, revision="0" * 64)
    with pytest.raises(ValueError, match="belongs to a backbone of revision"):
        ProbedBackbone(other, probed.detector)


def test_the_model_reads_its_answer_from_the_passage(probed):
    passages = [Passage(title="", text=PASSAGE)]
    requests = probed.requests("with_context", [QUESTION], [passages])
    assert probed.answer(requests)[0].text == "Guzolt Falls"


def test_scores_are_probabilities_and_do_not_depend_on_the_batch(probed):
    questions = [QUESTION, "what is the genre of Skiband Rugrond?", QUESTION]
    empty = [()] * len(questions)
    answers = probed.answer(probed.requests("closed_book", questions, empty))
    together = probed.score_closed_book(probed.read(answers)).p_correct
    alone = [probed.score_closed_book(probed.read([a])).p_correct[0] for a in answers]
    assert np.all((together >= 0) & (together <= 1))
    # Isotonic steps turn rounding into jumps only at a knot; none lies here.
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_scores_do_not_depend_on_how_many_answers_the_memory_holds(probed):
    questions = [QUESTION, "what is the genre of Skiband Rugrond?"] * 6
    passages = [[Passage(title="", text=PASSAGE)]] * len(questions)
    closed, given = (
        probed.read(probed.answer(probed.requests(setting, questions, context)))
        for setting, context in (
            ("closed_book", [()] * len(questions)),
            ("with_context", passages),
        )
    )
    whole = probed.score_with_context(given, closed)
    banks = {
        where: dataclasses.replace(bank, lengths=(64,) * len(SPANS[where]))
        for where, bank in probed.detector.banks.items()
    }
    bank = banks["with_context"]
    for n_bytes, at_once in ((10 * bank.row_bytes, 8), (1, 1)):
        small = ProbedBackbone(
            probed.backbone,
            dataclasses.replace(probed.detector, banks=banks),
            probed.config,
            most_bytes=n_bytes,
        )
        assert small.rows_at_once("with_context") == at_once
        parts = small.score_with_context(given, closed)
        assert parts.encoder_names == whole.encoder_names
        np.testing.assert_allclose(parts.raw, whole.raw, atol=1e-5)
        np.testing.assert_allclose(parts.encoders, whole.encoders, atol=1e-5)


def test_another_question_of_similar_length_compiles_nothing_new(probed):
    def score(question):
        (answer,) = probed.answer(probed.requests("closed_book", [question], [()]))
        return probed.score_closed_book(probed.read([answer]))

    score(QUESTION)
    n_compiled = bank_outputs._cache_size()
    score("who employs Skiband Rugrond?")
    score("what is the hometown of Skiband Rugrond?")
    assert bank_outputs._cache_size() == n_compiled


def test_spans_are_padded_as_in_training_and_further_only_where_they_are_longer(probed):
    (answer,) = probed.answer(probed.requests("closed_book", [QUESTION], [()]))
    reading = probed.read([answer])
    question, words = np.diff(reading.spans)[0, 1:, 0]
    usual = reading.features("closed_book", (question + 5, words))
    assert [len(mask[0]) for mask in usual.masks] == [question + 5, words]
    longer = reading.features("closed_book", (question - 1, words + 3))
    assert len(longer.masks[0][0]) == fixed_length(question)
    assert len(longer.masks[1][0]) == words + 3


def test_the_layer_is_the_one_the_detector_was_trained_on(probed):
    assert probed.reader.hidden_layers == (LAYER,)
