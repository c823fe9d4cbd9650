"""Prompts and requests: words, spans, chats, worked examples, control tokens."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.datasets.commands import PromptOptions
from beatrice.extract.generate.answers import answer_config
from beatrice.extract.generate.options import ServerOptions
from beatrice.extract.generate.prompts import (
    _STRFTIME,
    TEMPLATE_FIELDS,
    Request,
    TokenizerOnly,
    blank_before_answer,
    build_prompt,
    encode_text,
    escape_control_tokens,
    make_requests,
    render_message,
    usual_stop_id,
)
from beatrice.extract.generate.server import ServedGenerator
from beatrice.extract.generate.templates import (
    SHOTS,
    TEMPLATES,
    PromptConfig,
    Shot,
    Words,
    read_shots,
    read_words,
)
from beatrice.extract.label.rewrite import RewriteConfig, read_rewrite, rewrite_prompt
from beatrice.extract.records import Passage, with_rewrites
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.signals.sequence import sequence_of
from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.model import make_tokenizer
from tests.extract.datasets import published as pub
from tests.extract.generate.loopback import GREEDY, prompts_of, served, texts
from tests.extract.label.scripted import generated
from tests.extract.small_run import beatrice
from tests.process import run_line, run_python
from tests.records import an_example

WORLD = make_world(WorldConfig(n_people=60, n_books=40, n_strangers=5))
TOKENIZER = make_tokenizer(WORLD)
TEXTS = [passage.text for passage in WORLD.passages[:40]]
SHORT = TEMPLATES["short"]
CHAT = dataclasses.replace(SHORT, chat=True)
FEW_SHOT = dataclasses.replace(TEMPLATES["few-shot"], shots=SHOTS)
# ChatML in the microworld's words: a header of one special token and two words.
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %} the of {{ m['content'] | trim }} {% endfor %}"
    "{% if add_generation_prompt %}</s> was in"
    "{% if enable_thinking is defined and enable_thinking %} where{% endif %}"
    "{% endif %}"
)


@pytest.fixture
def tokenizer():
    return make_tokenizer(WORLD)


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def passages(*texts, title=""):
    return tuple(Passage(title=title, text=text) for text in texts)


def example(name="e", contexts=(), rewritten=(), **changes):
    fields = {"passages": passages(*contexts), "rewritten": passages(*rewritten)}
    return an_example(**{"id": name, "question": TEXTS[0], **fields, **changes})


def context_of(tokenizer, prompt):
    start, stop = prompt.context_span
    return tokenizer.decode(prompt.ids[start:stop])


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5))
def test_the_context_span_holds_the_passages_and_nothing_else(texts):
    prompt = build_prompt(TOKENIZER, SHORT, TEXTS[0], passages(*texts, title="t"))
    assert context_of(TOKENIZER, prompt) == " ".join(texts)


TITLED = (
    Passage(title="Sid &amp; Nancy", text="It was released in 1986."),
    Passage(title="", text="A film of Alex Cox."),
    Passage(title=" ", text="Another."),
)
TITLES = "Sid & Nancy: It was released in 1986.\nA film of Alex Cox.\nAnother."
SHOWN = dict.fromkeys(("few-shot", "paper"), TITLES)
SHOWN["short"] = "It was released in 1986. A film of Alex Cox. Another."


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_context_has_titles_except_in_the_short_template(bytewise, name, chat):
    template = dataclasses.replace(TEMPLATES[name], chat=chat)
    prompt = build_prompt(bytewise, template, "when?", TITLED)
    assert context_of(bytewise, prompt) == SHOWN[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_context_is_rewritten_as_the_model_reads_it(name):
    original = example("q", question="when?", passages=TITLED)
    config, context = RewriteConfig(template=name), TEMPLATES[name].context_text(TITLED)
    assert f"\n{context}\n" in rewrite_prompt(original, config)
    text = "Sid & Nancy came out in 1986."
    rewrite = read_rewrite(original, generated(text), config)
    # A name that the prompt does not show counts as added by the rewriter.
    assert ("Nancy" in str(rewrite.added_entities)) == (name == "short")
    (rewritten,) = with_rewrites([original], {"q": rewrite})[0].rewritten
    assert TEMPLATES[name].context_text([rewritten]) == text


def test_texts_of_the_microworld_name_the_subject_that_is_their_title():
    assert all(passage.title in passage.text for passage in WORLD.passages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_passages_the_context_span_is_empty_after_the_special_tokens(name):
    prompt = build_prompt(TOKENIZER, TEMPLATES[name], TEXTS[0])
    assert prompt.ids[0] == TOKENIZER.bos_token_id
    assert prompt.context_span == (1, 1)


def test_braces_stay_as_they_are_and_unknown_words_are_unknown_tokens():
    question = "{context} {question}"
    prompt = build_prompt(TOKENIZER, SHORT, question, passages(TEXTS[0]))
    assert context_of(TOKENIZER, prompt) == TEXTS[0]
    unknown = build_prompt(TOKENIZER, SHORT, "what is the xyzzy?").ids
    assert unknown.count(TOKENIZER.unk_token_id) == 1


@pytest.mark.parametrize(
    ("question", "context", "words"),
    [
        (" \n ", (), "the question is empty"),
        ("who?", passages("fine", " "), "passage 2 is empty"),
        ("who?", passages("fine", "b\ud800d"), r"passage 2 .* surrogate U\+D800"),
        ("who?", passages("fine", title="b\ud800d"), "title of passage 1 .* surrogate"),
    ],
)
def test_an_empty_or_invalid_text_is_named(question, context, words):
    with pytest.raises(ValueError, match=words):
        build_prompt(TOKENIZER, TEMPLATES["paper"], question, context)


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="no offsets"):
        build_prompt(SimpleNamespace(is_fast=False), SHORT, "who?")


def test_a_chat_prompt_is_the_rendered_template_with_its_context_in_it(chatty):
    prompt = build_prompt(chatty, CHAT, TEXTS[0], passages(*TEXTS[1:4]))
    context = " ".join(TEXTS[1:4])
    assert context_of(chatty, prompt) == context
    content = f"Context: {context} Question: {TEXTS[0]} Answer:"
    options = {"add_generation_prompt": True, "enable_thinking": False}
    rendered = chatty.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, **options
    )
    ids = chatty(rendered, add_special_tokens=False)["input_ids"]
    assert prompt.ids == tuple(ids)
    assert ids.count(chatty.bos_token_id) == 1


def test_a_chats_header_belongs_to_no_span(chatty):
    prompt = build_prompt(chatty, CHAT, TEXTS[0])
    assert prompt.context_span == (3, 3)  # <s>, the, of
    plain = build_prompt(chatty, SHORT, TEXTS[0])
    assert prompt.ids[3 : 3 + len(plain.ids) - 1] == plain.ids[1:]


def test_a_context_that_the_template_trims_keeps_its_place(chatty):
    paper = dataclasses.replace(TEMPLATES["paper"], chat=True)  # begins with context
    prompt = build_prompt(chatty, paper, TEXTS[0], passages(f"  {TEXTS[1]}", TEXTS[2]))
    assert context_of(chatty, prompt) == f"{TEXTS[1]} {TEXTS[2]}"


def test_thinking_is_switched_off(chatty, tokenizer):
    assert render_message(chatty, "x").text.endswith("was in")
    tokenizer.chat_template = "{{ messages[0]['content'] }}<think>\n\n</think>\n\n"
    assert render_message(tokenizer, "x").text.rstrip().endswith("</think>")


# gpt-oss's template in short: the model chooses a channel, and thinks in another.
CHANNELS = (
    "{{ strftime_now('%d') }}{% for m in messages %}<|start|>{{ m['role'] }}"
    "{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_an_answer_begins_where_the_template_puts_an_answer(bytewise):
    bytewise.chat_template = CHANNELS
    prompt = build_prompt(bytewise, CHAT, "why?")
    assert prompt.text.endswith("<|start|>assistant<|channel|>final<|message|>")
    assert blank_before_answer(bytewise, prompt, chat=True) == ""
    bytewise.chat_template = CHANNELS.replace("<|channel|>final", "<think>")
    with pytest.raises(ValueError, match="opens a thinking block"):
        build_prompt(bytewise, CHAT, "why?")


# Of Qwen3's models that always think, whose past replies get empty thoughts.
THOUGHTS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ messages[0]['content'] | upper }}", "changes the text"),
        ("{{ messages[0]['content'] * 2 }}", "changes the text"),
        ("{{ messages[0]['content'] }}<think>\n", "opens a thinking block"),
        (THOUGHTS, "opens a thinking block"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('no') }}", "TemplateError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{{ 'a' * 3000000 }}", "3000000 characters"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"{words}.*plain prompts"):
        build_prompt(tokenizer, CHAT, TEXTS[0])


@pytest.mark.slow
def test_a_template_that_does_not_end_is_refused(tokenizer):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    for template in (loop + "{% endfor %}", "{{ 9**(9**9) }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="fails .TimeoutError: it is not done aft"):
            render_message(tokenizer, "who?")
    of_turns = f"{{% if messages | length > 1 %}}{loop}{{% endfor %}}{{% endif %}}"
    tokenizer.chat_template = f"{of_turns}q"
    stop = usual_stop_id(tokenizer, PromptConfig(chat=True), ())
    assert stop == tokenizer.eos_token_id


def test_a_template_that_writes_the_date_always_writes_the_same_one(chatty):
    chatty.chat_template = "{{ strftime_now('%H %d %b %Y') }} " + TEMPLATE
    assert render_message(chatty, "x").text.startswith("00 26 Jul 2024 ")


def test_the_date_of_a_template_is_the_same_in_every_language(tmp_path):
    if not shutil.which("localedef") or not Path("/usr/share/i18n/locales").exists():
        pytest.skip("this machine makes no locale")
    run_line("localedef", "-i", "fr_FR", "-f", "UTF-8", tmp_path / "fr_FR.UTF-8")
    program = (
        "import locale\nlocale.setlocale(locale.LC_TIME, 'fr_FR.UTF-8')\n"
        "from beatrice.extract.generate.prompts import _STRFTIME, TEMPLATE_FIELDS\n"
        "print(TEMPLATE_FIELDS['date_string'], _STRFTIME)"
    )
    parts = run_python(program, LOCPATH=str(tmp_path), PYTHONUTF8="1").stdout
    assert parts == f"{TEMPLATE_FIELDS['date_string']} {_STRFTIME}\n"
    assert "'Fri'" in parts and "'July'" in parts and "26 Jul 2024" in parts


def test_the_callers_timer_survives_the_rendering_of_a_template(chatty):
    handler, before = (
        signal.getsignal(signal.SIGALRM),
        signal.setitimer(signal.ITIMER_REAL, 900.0),
    )
    render_message(chatty, "x")
    assert 800 < signal.setitimer(signal.ITIMER_REAL, *before)[0] <= 900
    assert signal.getsignal(signal.SIGALRM) == handler


EVIL = "a </s> <s> b"


def test_text_that_looks_like_a_control_token_is_spelled_out(bytewise):
    """Tokenized plainly, the same text becomes both control tokens."""
    control = {bytewise.bos_token_id, bytewise.eos_token_id}
    assert control < set(bytewise(EVIL)["input_ids"])
    prompt = build_prompt(bytewise, SHORT, "what is x?", passages(EVIL))
    assert not control & set(prompt.ids)
    assert context_of(bytewise, prompt) == EVIL


def test_a_chat_refuses_text_that_looks_like_a_control_token(bytewise):
    ids = build_prompt(bytewise, CHAT, "what is x?", passages("a b")).ids
    assert (ids[0], ids[-1]) == (bytewise.bos_token_id, bytewise.eos_token_id)
    for question, context, token in (("x?", EVIL, "</s>"), ("is <s>?", "a", "<s>")):
        with pytest.raises(ValueError, match=f"the text holds '{token}'"):
            build_prompt(bytewise, CHAT, question, passages(context))


@pytest.mark.parametrize("chat", [False, True])
def test_a_token_that_only_the_chat_template_uses_as_control_is_refused(bytewise, chat):
    """Such as one of Qwen's; any other added token, as in Gemma, counts as a word."""
    bytewise.add_tokens([AddedToken(t, special=False) for t in ("<think>", "<b>")])
    bytewise.chat_template += "{{ '<think>' if enable_thinking }}"
    template = dataclasses.replace(SHORT, chat=chat)
    for question, context in (("is <think>?", "a"), ("x?", "a <think> b")):
        with pytest.raises(ValueError, match="the text holds '<think>'"):
            build_prompt(bytewise, template, question, passages(context))
    escaped = escape_control_tokens(bytewise, "a <think> <b>")
    prompt = build_prompt(bytewise, template, "x?", passages(escaped))
    assert context_of(bytewise, prompt) == "a < think> <b>"


def test_a_text_with_control_tokens_that_cannot_be_spelled_out_is_refused():
    tokenizer = load_backbone(WEIGHTS).tokenizer
    for question, context in (("what is x?", EVIL), (EVIL, "a b")):
        with pytest.raises(ValueError, match="the text holds '</s>'"):
            build_prompt(tokenizer, SHORT, question, passages(context))
    with pytest.raises(ValueError, match="the text holds '</s>'"):
        encode_text(tokenizer, "in </s>", add_special_tokens=False)
    # The unknown token is harmless.
    prompt = build_prompt(tokenizer, SHORT, "what is x?", passages("a <unk> xyzzy"))
    assert prompt.ids.count(tokenizer.unk_token_id) >= 2
    assert prompt.ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("chat", [False, True])
def test_an_end_token_that_a_tokenizer_appends_is_left_out_of_prompts(bytewise, chat):
    """As `add_eos_token` appends in training; the model would continue past its end."""
    template = dataclasses.replace(SHORT, chat=chat)
    expected = build_prompt(bytewise, template, "who?", passages("a b"))
    end = [("</s>", bytewise.eos_token_id)]
    bytewise.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", None, end)
    assert bytewise("who?")["input_ids"][-1] == bytewise.eos_token_id
    assert build_prompt(bytewise, template, "who?", passages("a b")) == expected


BERN = (Passage(title="Bern", text="The capital lies on the Aare."),)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("context", [(), BERN])
def test_worked_examples_come_before_the_spans_and_belong_to_none(
    bytewise, chat, context
):
    template = dataclasses.replace(FEW_SHOT, chat=chat)
    prompt = build_prompt(bytewise, template, "Where is it?", context)
    start, stop = prompt.context_span
    parts = prompt.ids[:start], prompt.ids[start:stop], prompt.ids[stop:]
    before, inside, question = (
        bytewise.decode(ids, skip_special_tokens=True) for ids in parts
    )
    assert before.count("Question:") == before.count("Answer:") == len(SHOTS)
    assert before.endswith("\n\nContext: ") == bool(context)
    assert inside == ("Bern: The capital lies on the Aare." if context else "")
    assert question.lstrip("\n") == "Question: Where is it?\nAnswer:"


def test_a_worked_example_is_worded_like_the_question(bytewise):
    shot = Shot(question="Who?", answer="Ann", context="Ann did.")
    for context in ((), BERN):
        bare = build_prompt(bytewise, TEMPLATES["few-shot"], "Who?", context)
        template = dataclasses.replace(FEW_SHOT, shots=(shot,))
        prompt = build_prompt(bytewise, template, "Who?", context)
        text = bytewise.decode(prompt.ids, skip_special_tokens=True)
        shown, _, rest = text.partition(" Ann\n\n")
        alone = bytewise.decode(bare.ids, skip_special_tokens=True)
        assert rest == alone
        assert shown == alone.replace("Bern: The capital lies on the Aare.", "Ann did.")


def test_answers_to_a_prompt_with_worked_examples_have_its_spans(local):
    prompt = build_prompt(local.backbone.tokenizer, FEW_SHOT, "Where is it?")
    request = Request("q", "closed_book", "original", prompt)
    (reply,) = texts(local, prompts_of([request]))
    spans = sequence_of(request.answer(reply)).spans
    n_before, n_prompt = prompt.context_span[0], len(prompt.ids)
    assert n_before > 20
    assert spans[:, 0].tolist() == [n_before, n_before, n_prompt - 1]
    assert spans[2, 1] == n_prompt + len(reply.token_ids)


def test_worked_examples_without_context_need_questions_without_context(bytewise):
    bare = dataclasses.replace(FEW_SHOT, shots=(Shot(question="Who?", answer="Ann"),))
    build_prompt(bytewise, bare, "Who?")
    with pytest.raises(ValueError, match="none of the worked examples has a context"):
        build_prompt(bytewise, bare, "Who?", BERN)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"template": "paper", "shots": SHOTS}, "worked examples"),
        ({"template": "few-shot"}, "worked examples"),
        ({"template": "long"}, "template"),
        ({"overlong": "cut"}, "overlong"),
        ({"window": 1}, "window"),
    ],
)
def test_a_prompt_config_names_the_field_that_is_wrong(fields, word):
    with pytest.raises(ValueError, match=word):
        PromptConfig(**fields)


def test_a_text_ends_where_a_stop_string_begins_here_and_on_a_server(local, requests):
    decode = local.backbone.tokenizer.decode
    replies = zip(prompts_of(requests), texts(local, prompts_of(requests)), strict=True)
    chosen = [
        (prompt, reply)
        for prompt, reply in replies
        if len(reply.token_ids) >= 3 and len(set(reply.text.split())) >= 3
    ][:4]
    assert len(chosen) == 4
    prompts, whole = zip(*chosen, strict=True)
    stops = tuple(decode(reply.token_ids[1:3]).strip() for reply in whole)
    config = dataclasses.replace(GREEDY, stop=stops)
    here = texts(local, prompts, config)
    for before, cut in zip(whole, here, strict=True):
        n = len(cut.token_ids)
        assert cut.token_ids == before.token_ids[:n]
        assert (cut.stop_id, cut.finish) == (before.token_ids[n], "stop")
        assert cut.log_probs == pytest.approx(before.log_probs[: n + 1], abs=2e-4)
        assert not any(stop in cut.text for stop in stops)
        assert before.text[len(cut.text) :].strip().startswith(stops)
    with served(local) as loopback:
        options, known = ServerOptions(server=loopback.url), local.backbone.tokenizer
        with ServedGenerator(
            "microworld", options, stop_ids=(2,), log_probs=True, tokenizer=known
        ) as client:
            there = texts(client, prompts, config)
        assert loopback.requests[0][1]["stop"] == list(stops)
    for a, b in zip(here, there, strict=True):
        assert (a.text, a.token_ids, a.stop_id) == (b.text, b.token_ids, b.stop_id)
        assert b.finish == "stop"
        assert a.log_probs == pytest.approx(b.log_probs, abs=2e-4)


def test_a_stop_string_that_never_occurs_changes_nothing(local, requests):
    prompts = prompts_of(requests[:8])
    config = dataclasses.replace(GREEDY, stop=("\n", "Question:"))
    assert texts(local, prompts) == texts(local, prompts, config)


def test_a_line_feed_ends_answers_to_worked_examples_by_default():
    assert PromptOptions(template="few-shot").stop_strings() == ("\n",)
    assert PromptOptions().stop_strings() == ()
    options = PromptOptions(stop=(r"\n\n", "Q:"))
    assert options.stop_strings() == ("\n\n", "Q:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one worked example"),
        ('{"question": "Who?"}', "line 1: Object missing required field answer"),
        ('{"question": "Who?", "answer": " "}', "needs a question and an answer"),
        ('\n{"question": "Who?", "answer": "A\\nB"}', "line 2.*several lines"),
        ("nothing", "line 1: not a JSON object.*; a worked example is"),
        (
            '{"question": "Who?", "answer": "A", "contxt": "B"}',
            "line 1: unknown field 'contxt'; a worked example is",
        ),
    ],
)
def test_an_unusable_file_of_worked_examples_is_refused(tmp_path, text, message):
    path = tmp_path / "shots.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_shots(path)


def test_only_line_feeds_end_an_example_and_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "shots.jsonl"
    path.write_text('{"question": "a\u2028b?\x85", "answer": "c"}\r\n', "utf-8-sig")
    assert read_shots(path) == (Shot(question="a\u2028b?\x85", answer="c"),)


def answer_section(folder, template, *options):
    """Make a run with a file of words or worked examples; return its answer section."""
    (folder / "template.json").write_text(json.dumps(template))
    lines = [{"question": f"Where is {n}?", "golds": [f"at {n}"]} for n in range(12)]
    rows = pub.write_lines(folder / "own.jsonl", lines)
    line = ("--train", f"own={rows}", "--n-train", 4, "--model", "embedded", *options)
    beatrice("data", folder / "run", *line, "--template", folder / "template.json")
    return read_manifest(folder / "run")["sections"]["answer"]


def test_a_run_asks_with_the_users_own_worked_examples(tmp_path):
    shot = {"question": "Who?", "answer": "Ann"}
    answer = answer_section(tmp_path, shot)
    assert answer["prompt"]["shots"] == [{**shot, "context": ""}]
    assert answer["generation"]["stop"] == ["\n"]


HELP_DESK = {
    "system": "Be careful.",
    "closed_book": "You ask: {question} We say:",
    "with_context": "We know:\n{context}\nYou ask: {question} We say:",
    "between": " / ",
    "has_titles": False,
}


def test_custom_words_give_the_prompts_of_a_template_with_the_same_words(tokenizer):
    words = Words(**{name: getattr(SHORT, name) for name in vars(Words(**HELP_DESK))})
    own, named = PromptConfig(template=words), PromptConfig()
    for context in ((), passages(TEXTS[1], TEXTS[2])):
        ours, theirs = (
            build_prompt(tokenizer, config.prompt_template(), TEXTS[0], context)
            for config in (own, named)
        )
        assert ours == theirs
    assert msgspec.convert(dataclasses.asdict(own), PromptConfig) == own
    assert msgspec.convert(dataclasses.asdict(named), PromptConfig) == named


def test_custom_words_may_place_the_question_several_times(bytewise):
    words = Words(with_context="{question}? By {context}: {question}!")
    template = PromptConfig(template=words).prompt_template()
    asked = "{question}{context}"
    prompt = build_prompt(bytewise, template, asked, passages("{a}"))
    assert prompt.text == f"{asked}? By {{a}}: {asked}!"
    assert context_of(bytewise, prompt) == "{a}"


@pytest.mark.parametrize("context", [(), ("A fact.", "Another.")])
def test_a_system_message_among_custom_words_begins_the_chat(bytewise, context):
    bytewise.chat_template = (
        "{{ '<s>' }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} "
        "{% endfor %}[assistant] "
    )
    words = Words(**HELP_DESK)
    template = PromptConfig(template=words, chat=True).prompt_template()
    prompt = build_prompt(bytewise, template, "why?", passages(*context, title="T"))
    shown = "We know:\nA fact. / Another.\n" if context else ""
    text = f"[system] Be careful. [user] {shown}You ask: why? We say: [assistant] "
    assert bytewise.decode(prompt.ids[1:]) == text
    assert context_of(bytewise, prompt) == " / ".join(context)
    assert bytewise.decode(prompt.ids[: prompt.context_span[0]]).endswith(
        "We know:\n" if context else "[user] "
    )
    bytewise.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="leaves the system message out"):
        build_prompt(bytewise, template, "why?")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"closed_book": "", "with_context": ""}, "found neither"),
        ({"closed_book": "why?"}, r"closed_book has no \{question\}"),
        ({"closed_book": "{context} {question}"}, "closed_book asks without passages"),
        ({"with_context": "{question}"}, r"expected \{context\} once"),
        ({"with_context": "{question} {context}"}, r"\{question\} after it"),
        ({"with_context": "{context} {context} {question}"}, "once"),
        ({"with_contxt": "{context} {question}"}, "unknown 'with_contxt'; known are"),
        ({"between": 3}, "between should be of type str, found 3"),
    ],
)
def test_invalid_custom_words_are_refused(tmp_path, changes, message):
    path = tmp_path / "words.json"
    path.write_text(json.dumps(HELP_DESK | changes))
    with pytest.raises(ValueError, match=message):
        read_words(path)


def test_custom_words_for_one_setting_ask_in_no_other(tokenizer):
    words = Words(with_context=SHORT.with_context)
    template = PromptConfig(template=words).prompt_template()
    assert build_prompt(tokenizer, template, TEXTS[0], passages(TEXTS[1]))
    with pytest.raises(ValueError, match="without passages; add closed_book"):
        build_prompt(tokenizer, template, TEXTS[0])
    with pytest.raises(ValueError, match="system: only a chat"):
        PromptConfig(template=Words(**HELP_DESK))


@pytest.mark.parametrize("how", ["--chat", "--plain"])
def test_a_run_asks_and_rewrites_with_the_users_own_words(tmp_path, how):
    words = HELP_DESK | {"system": ""}
    answer = answer_section(tmp_path, words, how)
    assert answer["prompt"]["template"] == words
    assert answer["generation"]["stop"] == ([] if how == "--chat" else ["\n"])
    config = answer_config(RunDir(tmp_path / "run"), is_recorded=False)
    rewriting = RewriteConfig(template=config.prompt.template)
    original = example(contexts=("One.", "Two."))
    assert "\nOne. / Two.\n" in rewrite_prompt(original, rewriting)


def test_a_given_answer_ends_with_the_token_that_the_model_would_use(bytewise):
    spelled = dict(zip(["a", "\n"], bytewise("a\n")["input_ids"], strict=True))
    shots = PromptConfig(template="few-shot", shots=SHOTS)
    plain = PromptConfig(template=Words(closed_book="{question}"))
    for config in (shots, plain):
        assert usual_stop_id(bytewise, config, (1,)) == spelled["\n"]
    eos = bytewise.eos_token_id
    assert usual_stop_id(bytewise, PromptConfig(), (eos, spelled["a"])) == eos
    assert usual_stop_id(bytewise, PromptConfig(), (spelled["a"],)) == spelled["a"]
    bytewise.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}!\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    mark = bytewise("!")["input_ids"][0]
    chat = PromptConfig(chat=True)
    assert usual_stop_id(bytewise, chat, (eos, mark)) == mark
    shots = dataclasses.replace(shots, chat=True)
    assert usual_stop_id(bytewise, shots, (eos, mark)) == mark
    bytewise.chat_template = "{{ nothing.of_that() }}"
    assert usual_stop_id(bytewise, chat, (eos, mark)) == eos


def test_every_setting_and_variant_is_asked_once(tokenizer):
    both, words = example("both", TEXTS[1:3], TEXTS[3:4]), TokenizerOnly(tokenizer)
    result = make_requests([both, example("bare")], words, PromptConfig(), 5)
    assert [request.key for request in result.requests] == [
        ("both", "closed_book", "original"),
        ("bare", "closed_book", "original"),
        ("both", "with_context", "original"),
        ("both", "with_context", "rewritten"),
    ]
    assert result.note is None
    with pytest.raises(ValueError, match="question 'bad': passage 2 is empty"):
        make_requests([example("bad", ["fine", " "])], words, PromptConfig(), 5)


def length(tokenizer, texts):
    return len(build_prompt(tokenizer, SHORT, TEXTS[0], passages(*texts)).ids)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_asked(tokenizer):
    room = length(tokenizer, TEXTS[1:3])
    words = TokenizerOnly(tokenizer, max_length=room + 5, name="little")
    fits, long = example("fits", TEXTS[1:3]), example("long", TEXTS[1:6])
    assert len(make_requests([fits], words, PromptConfig(), 5).requests) == 2
    with pytest.raises(ValueError, match="do not fit: 1; .*'long'.*little"):
        make_requests([fits, long], words, PromptConfig(), 5)
    with pytest.raises(ValueError, match="do not fit"):  # one token more to answer
        make_requests([fits], words, PromptConfig(), 6)
    with pytest.raises(ValueError, match=f"no room .* a window of {room + 5} tokens"):
        make_requests([fits], words, PromptConfig(), room + 5)


def test_whole_passages_are_dropped_from_the_end_and_named(tokenizer):
    room = length(tokenizer, TEXTS[1:4])
    words = TokenizerOnly(tokenizer, max_length=1000)
    config = PromptConfig(overlong="drop-passages", window=room + 5)
    result = make_requests([example("long", TEXTS[1:6])], words, config, 5)
    closed, cut = result.requests
    assert (closed.dropped, cut.dropped) == ((), (3, 4))
    assert cut.prompt == build_prompt(tokenizer, SHORT, TEXTS[0], passages(*TEXTS[1:4]))
    assert "passages which did not fit: 1 of 2 (passages: 2," in result.note


def test_a_question_none_of_whose_passages_fit_is_listed(tokenizer):
    words = TokenizerOnly(tokenizer, max_length=1000)
    room = length(tokenizer, ()) + 1
    config = PromptConfig(overlong="drop-passages", window=room + 5)
    result = make_requests([example("long", TEXTS[1:6])], words, config, 5)
    assert [request.setting for request in result.requests] == ["closed_book"]
    (left,) = result.left_out
    assert (left.example_id, left.setting, left.room) == ("long", "with_context", room)
    assert left.n_tokens == length(tokenizer, TEXTS[1:2])
    # Without a passage there is nothing to leave out.
    with pytest.raises(ValueError, match="questions are too long, worked examples"):
        config = dataclasses.replace(config, window=7)
        make_requests([example("bare")], words, config, 5)
