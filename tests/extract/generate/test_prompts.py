import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beatrice.extract.generate.generator import Generated
from beatrice.extract.generate.prompts import TEMPLATES, build_prompt
from beatrice.extract.label.rewrite import read_rewrite, rewrite_prompt
from beatrice.extract.records import Example, Passage, with_rewrites
from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.model import make_tokenizer

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


TITLED = [
    Passage(title="Sid &amp; Nancy", text="It was released in 1986."),
    Passage(title="", text="A film of Alex Cox."),
    Passage(title=" ", text="Another."),
]
SHOWN = {
    "few-shot": "Sid & Nancy: It was released in 1986.\nA film of Alex Cox.\nAnother.",
    "paper": "Sid & Nancy: It was released in 1986.\nA film of Alex Cox.\nAnother.",
    "short": "It was released in 1986. A film of Alex Cox. Another.",
}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_context_has_its_titles_in_the_papers_words_alone(bytewise, name, chat):
    template = dataclasses.replace(TEMPLATES[name], chat=chat)
    prompt = build_prompt(bytewise, template, "when?", TITLED)
    start, stop = prompt.context_span
    assert bytewise.decode(prompt.ids[start:stop]) == SHOWN[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_context_is_rewritten_as_the_model_reads_it(name):
    example = Example(
        id="q",
        dataset="d",
        split="train",
        question="when?",
        golds=("1986",),
        passages=tuple(TITLED),
    )
    context = TEMPLATES[name].context_text(TITLED)
    assert f"\n{context}\n" in rewrite_prompt(example, template=name)
    reply = Generated(
        text="Sid & Nancy came out in 1986.",
        token_ids=None,
        stop_id=None,
        log_probs=None,
        finish="stop",
        n_prompt_tokens=None,
        n_new_tokens=None,
    )
    rewrite = read_rewrite(example, reply, template=name)
    # A name that the prompt does not show is an addition of the rewriter's.
    assert ("Nancy" in str(rewrite.added_entities)) == (name == "short")
    (rewritten,) = with_rewrites([example], {"q": rewrite})[0].rewritten
    assert TEMPLATES[name].context_text([rewritten]) == reply.text


def test_texts_of_the_microworld_name_the_subject_that_is_their_title():
    assert all(passage.title in passage.text for passage in WORLD.passages)


def test_a_surrogate_in_a_title_that_is_shown_is_refused():
    bad = [Passage(title="b\ud800d", text="fine")]
    with pytest.raises(ValueError, match="the title of passage 1 has the lone"):
        build_prompt(TOKENIZER, TEMPLATES["paper"], "who?", bad)


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
