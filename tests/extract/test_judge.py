import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract.label.verdicts import (
    consensus,
    exact_label,
    exact_match,
    normalise,
    token_f1,
)
from extract.records import Answer, Example

EXAMPLE = Example(
    id="q1",
    dataset="d",
    split="test",
    question="where?",
    golds=("Tarn Falls", "Tarn"),
)


def answered(text):
    return Answer(
        example_id="q1",
        setting="closed_book",
        variant="original",
        text=text,
        prompt_ids=(1, 2),
        token_ids=(3,),
        stop_id=0,
        context_span=(1, 1),
    )


@pytest.mark.parametrize("text", ["tarn falls", "the Tarn Falls.", "Tarn,", " TARN "])
def test_case_articles_and_punctuation_do_not_make_an_answer_wrong(text):
    assert exact_match(text, EXAMPLE.golds)


@pytest.mark.parametrize("text", ["", "Tarn River", "Tarn Falls or Vole Falls"])
def test_more_or_less_than_the_gold_is_wrong(text):
    assert not exact_match(text, EXAMPLE.golds)


def test_f1_counts_common_words_once_each():
    assert token_f1("Tarn River", ("Tarn Falls",)) == pytest.approx(0.5)
    assert token_f1("x x x", ("x",)) == pytest.approx(0.5)
    assert token_f1("", ("x",)) == 0.0


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(min_size=1))
def test_every_text_matches_itself(text):
    assert exact_match(text, (text,))
    assert token_f1(text, (text,)) == pytest.approx(1.0)


def test_unanimous_verdicts_make_a_label():
    assert consensus(("correct",) * 3)[0] is True
    assert consensus(("incorrect",) * 3)[0] is False


def test_disagreement_and_unparsable_verdicts_make_none_with_a_reason():
    label, reason = consensus(("correct", "incorrect", "correct"))
    assert label is None
    assert "2 of 3" in reason
    label, reason = consensus(("correct", "unparsable", "correct"))
    assert label is None
    assert "unparsable" in reason


def test_no_verdict_is_refused():
    with pytest.raises(ValueError, match="at least one verdict"):
        consensus(())


def test_label_carries_key_and_verdicts_of_its_answer():
    label = exact_label(EXAMPLE, answered("tarn"))
    assert label.key == ("q1", "closed_book", "original")
    assert label.verdicts == ("correct",)
    assert label.label is True
    assert exact_label(EXAMPLE, answered("")).label is False
