import dataclasses

import numpy as np
import pytest

from beatrice.extract.records import Passage
from beatrice.jaxprobe.families import SPANS
from beatrice.pgir.bridge import ProbedBackbone
from tests.pgir.small import LAYER, PASSAGE, QUESTION


def test_a_detector_of_another_backbone_is_refused(backbone, probed):
    other = dataclasses.replace(backbone, revision="0" * 64)
    with pytest.raises(ValueError, match="the probe belongs to"):
        ProbedBackbone(other, probed.detector)


def test_the_model_reads_its_answer_from_the_passage(probed):
    passages = [Passage(title="", text=PASSAGE)]
    requests = probed.requests("with_context", [QUESTION], [passages])
    assert probed.answer(requests)[0].text == "Guzolt Falls"


def closed_book_scores(probed, answers):
    return probed.score("closed_book", {"closed_book": probed.read(answers)})


def test_scores_are_probabilities_and_do_not_depend_on_the_batch(probed):
    questions = [QUESTION, "what is the genre of Skiband Rugrond?", QUESTION]
    empty = [()] * len(questions)
    answers = probed.answer(probed.requests("closed_book", questions, empty))
    together = closed_book_scores(probed, answers).p_correct
    alone = [closed_book_scores(probed, [a]).p_correct[0] for a in answers]
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
    passes = {"with_context": given, "closed_book": closed}
    whole = probed.score("with_context", passes)
    banks = {
        where: dataclasses.replace(bank, lengths=(64,) * len(SPANS[where]))
        for where, bank in probed.detector.banks.items()
    }
    bank = banks["with_context"]
    for n_bytes, at_once in ((10 * bank.row_bytes, 10), (1, 1)):
        small = ProbedBackbone(
            probed.backbone,
            dataclasses.replace(probed.detector, banks=banks),
            probed.config,
            most_bytes=n_bytes,
        )
        assert small.rows_at_once("with_context") == at_once
        parts = small.score("with_context", passes)
        assert parts.encoder_names == whole.encoder_names
        np.testing.assert_allclose(parts.raw, whole.raw, atol=1e-5)
        np.testing.assert_allclose(parts.encoders, whole.encoders, atol=1e-5)


def test_the_layer_is_the_one_the_detector_was_trained_on(probed):
    assert probed.reader.hidden_layers == (LAYER,)
