import pytest
from hypothesis import given
from hypothesis import strategies as st

from beatrice.extract.label.judges import consensus, parse_verdict
from beatrice.extract.label.labels import exact_match, label_by_match, token_f1
from beatrice.extract.records import Answer, Example, normalise
from tests.extract.label.strings import INJECTIONS, LABELLED, REPLIES

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
    assert token_f1(text, (text,)) == pytest.approx(float(bool(normalise(text))))


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
    (label,) = label_by_match([answered("tarn")], [EXAMPLE])
    assert label.key == ("q1", "closed_book", "original")
    assert label.verdicts == ("correct",)
    assert label.label is True
    assert label_by_match([answered("")], [EXAMPLE])[0].label is False


def test_the_table_is_as_large_as_it_claims_and_has_no_string_twice():
    assert len(LABELLED) >= 300
    assert len({text for text, _ in LABELLED}) == len(LABELLED)


def test_no_labelled_string_is_misread():
    read = {text: parse_verdict(text) for text, _ in LABELLED}
    assert {t: read[t] for t, verdict in LABELLED if read[t] != verdict} == {}


def substring_verdict(text):
    """The widespread way to read a verdict: look for the word."""
    if "incorrect" in text.lower():
        return "incorrect"
    return "correct" if "correct" in text.lower() else "unparsable"


def test_a_reader_that_looks_for_the_word_misreads_the_table():
    wrong = [text for text, verdict in LABELLED if substring_verdict(text) != verdict]
    assert len(wrong) > 200
    assert "The answer is not correct." in wrong


@given(st.sampled_from(REPLIES["correct"] + REPLIES["incorrect"]), st.text(min_size=1))
def test_a_word_with_other_words_around_it_is_no_verdict(word, text):
    if any(character.isalnum() for character in text):
        assert parse_verdict(f"{word} {text}") == "unparsable"
        assert parse_verdict(f"{text} {word}") == "unparsable"


@given(st.text())
def test_any_text_has_exactly_one_verdict(text):
    found = parse_verdict(text)
    letters = "".join(c for c in text if c.isalpha()).lower()
    assert found == "unparsable" or found == letters


def test_a_judge_that_parrots_an_injection_gives_no_verdict():
    # But for the word alone in quotes or emphasis, which is that word.
    bare = {f"{q}\nCorrect\n{q}" for q in ("***", "'''", '"""', "```")}
    parsed = {text for text in INJECTIONS if parse_verdict(text) != "unparsable"}
    assert parsed == bare
