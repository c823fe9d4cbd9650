import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract.label.verdicts import parse_verdict
from tests.extract.injections import INJECTIONS
from tests.extract.verdict_strings import CORRECT, INCORRECT, LABELLED


def test_the_table_is_as_large_as_it_claims_and_has_no_string_twice():
    assert len(LABELLED) >= 300
    assert len({text for text, _ in LABELLED}) == len(LABELLED)


@pytest.mark.parametrize(("text", "verdict"), LABELLED)
def test_no_labelled_string_is_misread(text, verdict):
    assert parse_verdict(text) == verdict


def substring_verdict(text):
    """The widespread way to read a verdict: look for the word."""
    if "incorrect" in text.lower():
        return "incorrect"
    return "correct" if "correct" in text.lower() else "unparsable"


def test_a_reader_that_looks_for_the_word_misreads_the_table():
    wrong = [text for text, verdict in LABELLED if substring_verdict(text) != verdict]
    assert len(wrong) > 200
    assert "The answer is not correct." in wrong


@given(st.sampled_from(CORRECT + INCORRECT), st.text(min_size=1))
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
