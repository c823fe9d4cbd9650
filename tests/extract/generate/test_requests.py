import dataclasses

import pytest

from beatrice.extract.generate.prompts import (
    TEMPLATES,
    PromptConfig,
    build_prompt,
    render_message,
)
from beatrice.extract.generate.requests import TokenizerOnly, make_requests
from beatrice.extract.records import Example, Passage
from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.model import make_tokenizer

WORLD = make_world(WorldConfig(n_people=60, n_books=40, n_strangers=5))
TEXTS = [passage.text for passage in WORLD.passages[:40]]
# ChatML in the microworld's words: a header of one special token and two words.
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %} the of {{ m['content'] | trim }} {% endfor %}"
    "{% if add_generation_prompt %}</s> was in"
    "{% if enable_thinking is defined and enable_thinking %} where{% endif %}"
    "{% endif %}"
)
CHAT = dataclasses.replace(TEMPLATES["short"], chat=True)


@pytest.fixture
def tokenizer():
    return make_tokenizer(WORLD)


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def passages(*texts):
    return tuple(Passage(title="", text=text) for text in texts)


def example(name="e", texts=(), rewritten=()):
    return Example(
        id=name,
        dataset="d",
        split="test",
        question=TEXTS[0],
        golds=("g",),
        passages=passages(*texts),
        rewritten=passages(*rewritten),
    )


def test_a_chat_prompt_is_the_rendered_template_with_the_context_found_in_it(chatty):
    prompt = build_prompt(chatty, CHAT, TEXTS[0], passages(*TEXTS[1:4]))
    start, stop = prompt.context_span
    assert chatty.decode(prompt.ids[start:stop]) == " ".join(TEXTS[1:4])
    rendered = chatty.apply_chat_template(
        [
            {
                "role": "user",
                "content": f"Context: {' '.join(TEXTS[1:4])} Question: {TEXTS[0]} "
                "Answer:",
            }
        ],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    ids = chatty(rendered, add_special_tokens=False)["input_ids"]
    assert prompt.ids == tuple(ids)
    assert ids.count(chatty.bos_token_id) == 1


def test_a_chats_header_belongs_to_no_span(chatty):
    prompt = build_prompt(chatty, CHAT, TEXTS[0])
    assert prompt.context_span == (3, 3)  # <s>, the, of
    plain = build_prompt(chatty, TEMPLATES["short"], TEXTS[0])
    assert prompt.ids[3 : 3 + len(plain.ids) - 1] == plain.ids[1:]


def test_a_context_that_the_template_trims_keeps_its_place(chatty):
    paper = dataclasses.replace(TEMPLATES["paper"], chat=True)  # begins with context
    prompt = build_prompt(chatty, paper, TEXTS[0], passages(f"  {TEXTS[1]}", TEXTS[2]))
    start, stop = prompt.context_span
    assert chatty.decode(prompt.ids[start:stop]) == f"{TEXTS[1]} {TEXTS[2]}"


def test_thinking_is_switched_off(chatty):
    assert render_message(chatty, "x").text.endswith("was in")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ messages[0]['content'] | upper }}", "changes the text"),
        ("{{ messages[0]['content'] * 2 }}", "changes the text"),
        ("{{ messages[0]['content'] }}<think>\n", "opens a thinking block"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        build_prompt(tokenizer, CHAT, TEXTS[0])


def test_a_closed_thinking_block_is_none(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}<think>\n\n</think>\n\n"
    assert render_message(tokenizer, "x").text.rstrip().endswith("</think>")


def test_every_setting_and_variant_is_asked_once(tokenizer):
    both = example("both", TEXTS[1:3], TEXTS[3:4])
    asked = make_requests(
        [both, example("bare")], TokenizerOnly(tokenizer), PromptConfig(), 5
    )
    assert [request.key for request in asked.requests] == [
        ("both", "closed_book", "original"),
        ("bare", "closed_book", "original"),
        ("both", "with_context", "original"),
        ("both", "with_context", "rewritten"),
    ]
    assert asked.note is None


def length(tokenizer, texts):
    return len(
        build_prompt(tokenizer, TEMPLATES["short"], TEXTS[0], passages(*texts)).ids
    )


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_asked(tokenizer):
    room = length(tokenizer, TEXTS[1:3])
    words = TokenizerOnly(tokenizer, max_length=room + 5, name="little")
    fits, long = example("fits", TEXTS[1:3]), example("long", TEXTS[1:6])
    assert len(make_requests([fits], words, PromptConfig(), 5).requests) == 2
    with pytest.raises(ValueError, match="1 prompts do not fit.*'long'.*little"):
        make_requests([fits, long], words, PromptConfig(), 5)
    with pytest.raises(ValueError, match="do not fit"):  # one token more to answer
        make_requests([fits], words, PromptConfig(), 6)


def test_whole_passages_are_dropped_from_the_end_and_named(tokenizer):
    room = length(tokenizer, TEXTS[1:4])
    words = TokenizerOnly(tokenizer, max_length=1000)
    config = PromptConfig(overlong="drop-passages", window=room + 5)
    asked = make_requests([example("long", TEXTS[1:6])], words, config, 5)
    closed, cut = asked.requests
    assert (closed.dropped, cut.dropped) == ((), (3, 4))
    kept = build_prompt(tokenizer, TEMPLATES["short"], TEXTS[0], passages(*TEXTS[1:4]))
    assert cut.prompt == kept
    assert "1 of 2 prompts lack passages" in asked.note


def test_a_question_of_which_no_passage_fits_is_listed(tokenizer):
    words = TokenizerOnly(tokenizer, max_length=1000)
    room = length(tokenizer, ()) + 1
    config = PromptConfig(overlong="drop-passages", window=room + 5)
    asked = make_requests([example("long", TEXTS[1:6])], words, config, 5)
    assert [request.setting for request in asked.requests] == ["closed_book"]
    (left,) = asked.left_out
    assert (left.example_id, left.setting, left.room) == ("long", "with_context", room)
    assert left.n_tokens == length(tokenizer, TEXTS[1:2])
    # Without a passage there is nothing to leave out.
    config = dataclasses.replace(config, window=7)
    with pytest.raises(ValueError, match="do not fit"):
        make_requests([example("bare")], words, config, 5)


def test_a_text_that_is_none_is_named_with_its_question(tokenizer):
    with pytest.raises(ValueError, match="question 'bad': passage 2 is empty"):
        make_requests(
            [example("bad", ["fine", " "])], TokenizerOnly(tokenizer), PromptConfig(), 5
        )


@pytest.mark.parametrize(
    "fields", [{"template": "long"}, {"overlong": "cut"}, {"window": 1}]
)
def test_a_choice_there_is_not_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        PromptConfig(**fields)
