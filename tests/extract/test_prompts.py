import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract.generate.prompts import TEMPLATES, build_prompt
from extract.records import Passage
from extract.world.facts import WorldConfig, make_world
from extract.world.model import make_tokenizer

WORLD = make_world(WorldConfig(n_people=60, n_books=40, n_strangers=5))
TOKENIZER = make_tokenizer(WORLD)
TEXTS = [passage.text for passage in WORLD.passages[:40]]


def passages(texts):
    return [Passage(title="t", text=text) for text in texts]


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5))
def test_the_context_span_holds_the_passages_and_nothing_else(texts):
    prompt = build_prompt(TOKENIZER, TEMPLATES["short"], TEXTS[0], passages(texts))
    start, stop = prompt.context_span
    assert TOKENIZER.decode(prompt.ids[start:stop]) == " ".join(texts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_passages_the_context_span_is_empty_after_the_special_tokens(name):
    prompt = build_prompt(TOKENIZER, TEMPLATES[name], TEXTS[0])
    assert prompt.ids[0] == TOKENIZER.bos_token_id
    assert prompt.context_span == (1, 1)


def test_braces_in_a_question_stay_as_they_are():
    prompt = build_prompt(
        TOKENIZER, TEMPLATES["short"], "{context} {question}", passages(TEXTS[:1])
    )
    start, stop = prompt.context_span
    assert TOKENIZER.decode(prompt.ids[start:stop]) == TEXTS[0]


def test_unknown_words_are_counted():
    prompt = build_prompt(TOKENIZER, TEMPLATES["short"], "what is the xyzzy?")
    assert prompt.n_unknown == 1


def test_an_empty_question_is_refused():
    with pytest.raises(ValueError, match="the question is empty"):
        build_prompt(TOKENIZER, TEMPLATES["short"], " \n ")


def test_a_lone_surrogate_is_refused_with_its_place():
    bad = passages(["fine", "b\ud800d"])
    with pytest.raises(ValueError, match=r"passage 2 has the lone surrogate U\+D800"):
        build_prompt(TOKENIZER, TEMPLATES["short"], "who?", bad)


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="no offsets"):
        build_prompt(Slow(), TEMPLATES["short"], "who?")
