"""Scores of existing answers, given in any form, one or many, from any thread."""

import copy
import dataclasses
import gc
import multiprocessing
import re
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers
from tokenizers.decoders import Sequence, Strip

import beatrice
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.extract.generate.templates import SHOTS, PromptConfig, Words
from beatrice.extract.signals.reader import AnswerSignals
from beatrice.extract.signals.sequence import sequence_of
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.families import Features
from beatrice.jaxprobe.scope import Evidence, Validation
from beatrice.pgir.asking import Score
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.given import AnswerToScore, prepare
from beatrice.pgir.scorer import Scorer
from beatrice.pgir.warnings import REASONS, WARNINGS
from tests.extract.generate.test_local import byte_fallback
from tests.extract.signals.test_full_device import room_for
from tests.jaxprobe.samples import KNOWN, wide_scope
from tests.pgir.small import LAYER, PASSAGE, QUESTION, make_detector, retrained
from tests.process import ROOT

ANSWER = "Guzolt Falls"
PROMPT = f"Question: {QUESTION} Answer:"
WITH_CONTEXT = f"Context: {PASSAGE} Question: {QUESTION} Answer:"
FOREIGN = f"Read this. {PASSAGE} Now: {QUESTION} where? Answer:"
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def prepared_of(probed, **given):
    """Return what the model reads for a given answer."""
    return prepare(probed.backbone.tokenizer, probed.template, AnswerToScore(**given))


def range_of(part, text):
    """Return the range of characters of a part in a text."""
    return text.index(part), text.index(part) + len(part)


@pytest.fixture(scope="module")
def chatting(probed):
    """The same model with a chat template, through which it is asked."""
    tokenizer = copy.deepcopy(probed.backbone.tokenizer)
    tokenizer.chat_template = CHAT
    backbone = dataclasses.replace(probed.backbone, tokenizer=tokenizer)
    return ProbedBackbone(
        backbone, retrained(probed.detector, prompt=PromptConfig(chat=True))
    )


def test_a_score_has_a_one_line_repr_and_html_that_shows_tokens_effects_on_p(scorer):
    score = scorer.score(QUESTION, ANSWER)
    words = f"{ANSWER!r}: P(correct) {score.p_correct:.3f}, {score.decision}"
    assert repr(score) == f"Score({words})"
    assert len(score.effects) == len(score.tokens) > 1 and any(score.effects)
    page = score._repr_html_()
    for effect in score.effects:
        assert f"moves P by {effect:+.3f}" in page
    near, far = multiprocessing.Pipe()
    near.send(score)  # as to another process, without what computes effects
    assert far.recv().effects == score.effects
    assert not scorer.score_many([(QUESTION, ANSWER)] * 2)[0].effects
    odd = Score(p_correct=0.5, decision="trust", tokens=("<b>",), log_probs=(-0.1,))
    assert "&lt;b&gt;" in odd._repr_html_() and "moves" not in odd._repr_html_()
    bare = Score(p_correct=0.5, decision="trust", tokens=("b",))
    assert "log p" not in bare._repr_html_()


@pytest.mark.parametrize("span", ["emitting", "literal"])
@pytest.mark.parametrize("passages", [(), (PASSAGE,)])
def test_an_effect_is_how_much_p_falls_without_the_signals_of_a_token(passages, span):
    probed = beatrice.load("embedded").scorer.probed  # linear: no token has neighbours
    scorer = Scorer(probed.backbone, retrained(probed.detector, answer_span=span))
    probed, score = scorer.probed, scorer.score(QUESTION, ANSWER, passages)
    setting, head = "closed_book", "closed_book"
    if passages:
        setting, head = "with_context", "single_pass"
    given = {"question": QUESTION, "answer": ANSWER, "context": passages}
    prepared = scorer.prepare(AnswerToScore(**given))
    reading = probed.read_sequences([prepared.sequence])
    tokens, masks = reading.features(setting)
    start = prepared.sequence.spans[2, 0]
    assert len(score.effects) == len(score.tokens)
    for token, effect in enumerate(score.effects):
        place = len(prepared.prompt.ids) - 1 + token
        surprisal = reading.signals[0].prob[place - reading.signals[0].first_token, 1]
        assert score.log_probs[token] == pytest.approx(-surprisal, abs=1e-5)
        if (position := place - start) < 0:
            assert effect == 0.0
            continue
        answer = [np.delete(x[-1], position, axis=1) for x in (tokens, masks)]
        without = Features((*tokens[:-1], answer[0]), (*masks[:-1], answer[1]))
        (p_correct,) = probed.forward.score(head, {setting: without}).p_correct
        assert effect == pytest.approx(score.p_correct - p_correct, abs=1e-5)
    assert any(score.effects)


@pytest.mark.parametrize(
    ("question", "answer", "context", "message"),
    [
        (QUESTION, "", None, "the answer is empty"),
        (" ", ANSWER, None, "the question is empty"),
        (QUESTION, ANSWER, "a\udc00b", "lone surrogate"),
        (QUESTION, "Guzolt </s> Falls", None, "the text holds '</s>'"),
        (QUESTION, ANSWER, "a </s> <s> b", "the text holds '</s>'"),
    ],
)
def test_bad_text_is_refused_in_one_sentence(
    scorer, question, answer, context, message
):
    with pytest.raises(ValueError, match=message):
        scorer.score(question, answer, context)


def test_a_text_has_no_p_if_more_than_half_of_its_tokens_are_unknown(scorer):
    half, more = (
        scorer.score(QUESTION, ANSWER, "Guzolt Falls" + " xyzzy" * n) for n in (2, 3)
    )
    (warning,) = half.warnings
    assert half.p_correct is not None and "2 of 4 tokens of passage 1" in warning
    assert more.p_correct is more.raw is None and more.decision == "unknown"
    assert "3 of 5 tokens of passage 1 are unknown to embedded" in more.reason


def with_end_token(tokenizer):
    """Return a copy of a tokenizer with the special token "<end>"."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([AddedToken("<end>", special=True)], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("Paris<end>\n", "the answer ends with '<end>'"),
        (" <end> Paris", "the answer begins with '<end>'"),
        ("<end>", "the answer begins with '<end>'"),
    ],
)
def test_an_answer_with_special_tokens_at_its_ends_is_refused(answer, words):
    tokenizer = with_end_token(byte_fallback())
    template = PromptConfig().prompt_template()
    with pytest.raises(ValueError, match=words):
        prepare(tokenizer, template, AnswerToScore(question=QUESTION, answer=answer))
    anothers = AnswerToScore(question=QUESTION, answer="Paris<|im_end|>")
    assert prepare(tokenizer, template, anothers).answer.text == " Paris<|im_end|>"


def test_a_special_token_spelled_out_in_a_text_gets_a_warning_that_names_it(probed):
    tokenizer = with_end_token(probed.backbone.tokenizer)
    backbone = dataclasses.replace(probed.backbone, tokenizer=tokenizer)
    scorer = Scorer(backbone, probed.detector)
    texts = {"question": QUESTION, "answer": f"{ANSWER} {ANSWER}", "context": PASSAGE}
    whats = {"question": "the question", "answer": "the answer", "context": "passage 1"}
    assert not any("special" in w for w in scorer.score(**texts).warnings)
    for name, what in whats.items():
        spelled = texts[name].replace(" ", " <end> ", 1)
        warnings = scorer.score(**{**texts, name: spelled}).warnings
        assert sum(f"{what} spells '<end>'" in w for w in warnings) == 1
        assert sum("special" in w for w in warnings) == 1
    # In a prompt given as it was sent, a special token is read as one.
    score = scorer.score(prompt=f"<s> {PROMPT}", answer=ANSWER)
    assert not any("special" in warning for warning in score.warnings)


# Prompts that were actually used.


def test_a_given_answer_is_read_as_if_the_model_had_written_it(probed):
    (request,) = probed.requests("closed_book", [QUESTION], [()])
    (answer,) = probed.answer([request])
    given = prepared_of(probed, question=QUESTION, answer=answer.text).sequence
    written = sequence_of(answer)
    for name in ("ids", "targets", "spans"):
        np.testing.assert_array_equal(getattr(given, name), getattr(written, name))


def prepending():
    """Return a tokenizer like Llama 2's and Phi 3's, which prepends a space."""
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    reply = AddedToken("<reply>", special=True, rstrip=True)
    tokenizer.add_tokens([reply], special_tokens=True)
    return tokenizer


LINES = Words(closed_book="{question}\n")
TURNS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)  # DeepSeek's
REPLY = (
    "{% for m in messages %}<{{ 'reply' if m['role'] == 'assistant' else 'ask' }}>\n"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<reply>\n{% endif %}"
)  # Phi's


@pytest.mark.parametrize("make_tokenizer", [byte_fallback, prepending])
@pytest.mark.parametrize(
    ("template", "chat_template", "written"),
    [
        ("short", None, " Paris"),
        (LINES, None, "Paris"),
        (Words(closed_book="{question} "), None, "Paris"),
        (Words(closed_book="问题：{question}\n答案："), None, "Paris"),
        (Words(closed_book="{question} 「"), None, "Paris"),
        (Words(closed_book="{question} ("), None, "Paris"),
        (Words(closed_book='{question} The answer is: "'), None, "Paris"),
        (Words(closed_book='Answer "{question}"'), None, " Paris"),
        (Words(closed_book="{question} “"), None, "Paris"),
        (Words(closed_book="Frage: „{question}“"), None, " Paris"),
        (Words(closed_book="Spørgsmål: »{question}«"), None, " Paris"),
        (Words(closed_book="{question} 답"), None, " Paris"),
        ("short", TURNS, " Paris"),
        ("short", CHAT, "Paris"),
        ("short", REPLY, "Paris"),
    ],
)
def test_a_given_answer_begins_as_the_model_would_begin_it(
    make_tokenizer, template, chat_template, written
):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    config = PromptConfig(template=template, chat=chat_template is not None)
    given = AnswerToScore(question="who?", answer=written.strip())
    prepared = prepare(tokenizer, config.prompt_template(), given)
    text, ids = prepared.prompt.text, prepared.prompt.ids
    whole = tuple(tokenizer(text + written)["input_ids"])
    assert whole == ids + prepared.answer.token_ids
    assert "".join(prepared.pieces) == prepared.answer.text == written


@pytest.mark.parametrize(
    "fields",
    [
        {"question": QUESTION, "context": PASSAGE},
        {"question": QUESTION, "context": [PASSAGE]},
        {"question": QUESTION, "context": [{"title": "", "text": PASSAGE}]},
        {
            "question_range": range_of(QUESTION, WITH_CONTEXT),
            "context_range": range_of(PASSAGE, WITH_CONTEXT),
        },
    ],
)
def test_the_runs_own_prompt_is_recognised_in_every_form(scorer, fields):
    score = scorer.score(answer=f" {ANSWER}", prompt=WITH_CONTEXT, **fields)
    assert score == scorer.score(QUESTION, ANSWER, PASSAGE)


@pytest.mark.parametrize("passages", [(), (PASSAGE,)])
def test_a_question_with_surrounding_white_space_is_found_in_the_runs_prompt(passages):
    tokenizer, template = byte_fallback(), PromptConfig().prompt_template()
    asked = {"question": f"  {QUESTION}\r\n", "context": passages}
    asked["answer"] = f" {ANSWER}"
    own = prepare(tokenizer, template, AnswerToScore(**asked))
    prompt = own.prompt.text
    given = prepare(tokenizer, template, AnswerToScore(**asked, prompt=prompt))
    assert given.prompt == own.prompt
    np.testing.assert_array_equal(given.sequence.spans, own.sequence.spans)


def test_tokens_join_to_the_answers_text_even_if_several_make_one_character():
    tokenizer, template = byte_fallback(), PromptConfig().prompt_template()
    text = " Paris é 德古拉 🦇"
    ids = tokenizer(text)["input_ids"]
    given = AnswerToScore(question=QUESTION, answer_ids=ids)
    prepared = prepare(tokenizer, template, given)
    assert prepared.answer.text == "".join(prepared.pieces) == text
    assert len(prepared.pieces) == len(ids)
    same = AnswerToScore(question=QUESTION, answer=text)
    assert prepare(tokenizer, template, same).pieces == prepared.pieces
    # A tokenizer that drops the space before the first word drops no other.
    spaces = Strip(" ", 1, 0)
    decoder = tokenizer.backend_tokenizer.decoder
    tokenizer.backend_tokenizer.decoder = Sequence([decoder, spaces])
    prepared = prepare(tokenizer, template, given)
    assert "".join(prepared.pieces) == text.strip()
    # Qwen's composes the accents of an answer; its text keeps them all.
    composing = [normalizers.NFC(), tokenizer.backend_tokenizer.normalizer]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(composing)
    for answer in ("Pa\u0301ris Pare\u0301", "\u1109\u1165\u110b\u116e\u11af"):
        given = AnswerToScore(question=QUESTION, answer=answer)
        assert prepare(tokenizer, template, given).answer.text == f" {answer}"


def test_ids_of_prompt_and_answer_give_the_same_score_as_their_texts(probed, scorer):
    (request,) = probed.requests("closed_book", [QUESTION], [()])
    (answer,) = probed.answer([request])
    score = scorer.score(
        prompt_ids=answer.prompt_ids,
        answer_ids=[*answer.token_ids, answer.stop_id],
        question=QUESTION,
    )
    assert score.raw == scorer.score(QUESTION, answer.text).raw
    assert score.warnings == ()
    assert "".join(score.tokens).replace(" ", "") == answer.text.replace(" ", "")


def test_a_control_token_without_a_name_ends_an_answer_given_as_ids():
    """Gemma's end of turn is such a token."""
    tokenizer = with_end_token(byte_fallback())
    template = PromptConfig().prompt_template()
    ids, end = tokenizer(" Paris")["input_ids"], len(tokenizer) - 1
    assert end not in tokenizer.all_special_ids
    given = AnswerToScore(question=QUESTION, answer_ids=[*ids, end])
    answer = prepare(tokenizer, template, given, stop_id=5).answer
    assert (answer.token_ids, answer.stop_id) == (tuple(ids), end)


def test_a_foreign_prompt_is_read_unchanged_and_gets_a_warning(probed, scorer):
    prompt = {"prompt": FOREIGN, "answer": f" {ANSWER}"}
    texts = {"question": QUESTION, "context": PASSAGE}
    score = scorer.score(**prompt, **texts)
    assert any("another prompt than the probe's own" in w for w in score.warnings)
    sequence = prepared_of(probed, **prompt, **texts).sequence
    decode = probed.backbone.tokenizer.decode
    context, question, _ = (decode(sequence.ids[a:b]) for a, b in sequence.spans)
    assert context.replace(" ", "") == PASSAGE.replace(" ", "")
    assert question.replace(" ", "") == QUESTION.replace(" ", "") + "where?"
    ranges = {
        "context_range": range_of(PASSAGE, FOREIGN),
        "question_range": range_of(QUESTION, FOREIGN),
    }
    assert scorer.score(**prompt, **ranges) == score


def test_messages_go_through_the_chat_template(chatting):
    scorer = Scorer(chatting.backbone, chatting.detector)
    expected = scorer.score(QUESTION, ANSWER)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "answer": ANSWER}
    assert scorer.score(**chat, question=QUESTION) == expected
    chat["messages"].insert(0, {"role": "system", "content": PASSAGE})
    named = prepared_of(chatting, **chat, question=QUESTION, context=PASSAGE)
    assert named.prompt.setting == "with_context"
    assert not named.prompt.is_templates
    text = scorer.render(chat["messages"])
    assert text.startswith(f"<s>system: {PASSAGE}") and text.endswith("assistant: ")
    ranged = prepared_of(chatting, **chat, context_range=range_of(PASSAGE, text))
    np.testing.assert_array_equal(ranged.sequence.spans[0], named.sequence.spans[0])


@pytest.mark.parametrize("named", [{}, {"question": "assistant"}])
def test_a_question_is_not_looked_for_in_a_templates_words_after_its_message(
    chatting, named
):
    chat = {"messages": [{"role": "user", "content": "assistant"}], "answer": ANSWER}
    text = Scorer(chatting.backbone, chatting.detector).render(chat["messages"])
    assert text.count("assistant") == 2  # once in the header after the message
    place = {"question_range": range_of("assistant", text)}
    spans = prepared_of(chatting, **chat, **named).sequence.spans
    np.testing.assert_array_equal(
        spans, prepared_of(chatting, **chat, **place).sequence.spans
    )


def test_the_last_message_is_the_question_unless_one_is_named(chatting):
    texts = {"system": "short", "user": PROMPT}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    prepared = prepared_of(chatting, messages=messages, answer=ANSWER)
    start, stop = prepared.sequence.spans[1]
    words = chatting.backbone.tokenizer.decode(prepared.sequence.ids[start:stop])
    assert words.replace(" ", "").startswith(PROMPT.replace(" ", ""))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": PROMPT, "messages": []},
            "expected one prompt, found prompt and mess",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "no chat template; .*instead of messages=, question and context",
        ),
        ({"prompt_ids": [1, 10**9]}, "prompt_ids: expected token ids .* 1000000000"),
        ({"prompt_ids": [-1, 2]}, "prompt_ids: expected token ids .* found -1"),
        ({"prompt_ids": []}, "prompt_ids: expected token ids .* found none"),
        ({"prompt": PROMPT, "answer_ids": [10**9]}, "answer_ids: expected token ids"),
        ({"context_range": (0, 2)}, "context_range refers to the text of a prompt"),
        ({"prompt": PROMPT, "context_range": (0, 9999)}, "at most 49, the length"),
        ({"prompt": PROMPT, "context": "not there"}, "passage 1 is not in the prompt"),
        ({"prompt": PROMPT, "context": "e"}, "in the prompt's text twice"),
        ({"prompt": PROMPT, "question": "why?"}, "the question is not in the prompt"),
        (
            {"prompt": PROMPT, "context_range": (10, 20), "question_range": (0, 5)},
            "before the context's end",
        ),
        ({"prompt": PROMPT, "context_range": (0, 49)}, "before the last token"),
    ],
)
def test_a_wrongly_described_prompt_is_refused_in_one_sentence(scorer, fields, message):
    fields = {"answer": ANSWER, **fields}
    if not fields.keys() & {"prompt", "messages", "prompt_ids"}:
        fields["question"] = QUESTION
    with pytest.raises(ValueError, match=message):
        scorer.score(**fields)


# Many answers at once.

PLACES = ("Guzolt", "Guzolt Falls", "the city of Guzolt Falls", "Rugrond", "Falls")


def mixed_rows(n):
    """Yield rows of several lengths, closed-book and with one or two passages."""
    for i in range(n):
        yield {
            "question": QUESTION,
            "answer": PLACES[i % len(PLACES)],
            "context": [PASSAGE] * (i % 3) or None,
        }


def test_many_scores_equal_those_computed_one_by_one(scorer):
    rows = list(mixed_rows(40))
    for score, row in zip(scorer.score_many(rows), rows, strict=True):
        alone = scorer.score(**row)
        # Sums of float32 in another order.
        assert score.raw == pytest.approx(alone.raw, abs=1e-5)
        assert score.p_correct == pytest.approx(alone.p_correct, abs=1e-5)
        assert score.tokens == alone.tokens
        assert score.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


@pytest.mark.parametrize(
    "prompt", [PromptConfig(), PromptConfig(template="few-shot", shots=SHOTS * 2)]
)  # so many worked examples have no signals
def test_log_probabilities_are_those_of_the_untouched_model(probed, prompt):
    import torch

    scorer = Scorer(probed.backbone, retrained(probed.detector, prompt=prompt))
    score = scorer.score(QUESTION, ANSWER)
    sequence = prepared_of(scorer.probed, question=QUESTION, answer=ANSWER).sequence
    with torch.no_grad():
        logits = probed.backbone.model(torch.from_numpy(sequence.ids)[None]).logits[0]
    n = len(score.tokens)
    rows = logits.log_softmax(-1)[-n - 1 : -1]
    expected = rows[torch.arange(n), torch.from_numpy(sequence.ids)[-n:]]
    np.testing.assert_allclose(score.log_probs, expected.numpy(), atol=1e-4)
    assert "".join(score.tokens) == f" {ANSWER}"


def test_a_row_too_large_for_the_device_costs_no_other_row_its_score(probed, scorer):
    rows = [*mixed_rows(3), {"question": QUESTION, "answer": ANSWER}]
    rows[1] = {**rows[1], "context": [PASSAGE] * 9}
    expected = scorer.score_many(rows)
    assert all(score.p_correct is not None for score in expected)
    with room_for(probed.backbone, n_tokens=60):
        scores = scorer.score_many(rows)
        assert scorer.score(**rows[1]) == scores[1]
    assert (scores[1].p_correct, scores[1].decision) == (None, "unknown")
    assert "does not fit in the device's memory" in scores[1].reason
    for score, whole in zip(scores, expected, strict=True):
        if score is not scores[1]:
            assert score.raw == pytest.approx(whole.raw, abs=1e-5)


def test_many_questions_never_have_more_signals_in_memory_than_one_group(probed):
    config = GenerationConfig(max_new_tokens=1, tokens_per_batch=1024)
    scorer = Scorer(probed.backbone, probed.detector, config)
    questions = [f"where was Skiband Rugrond {i} born?" for i in range(600)]
    n_alive = []

    def count(*_):
        n_alive.append(sum(type(x) is AnswerSignals for x in gc.get_objects()))

    with probed.backbone.layout.decoder.register_forward_pre_hook(count):
        scores = scorer.answer(questions)
    assert len(scores) == 600 and 0 < max(n_alive) <= 256
    for i in (0, 300, 599):
        alone = scorer.answer(questions[i])
        assert scores[i].text == alone.text
        assert scores[i].raw == pytest.approx(alone.raw, abs=1e-5)


def test_eight_threads_get_the_same_scores_as_one(scorer):
    rows = list(mixed_rows(8)) * 2
    alone = [scorer.score(**row) for row in rows]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda row: scorer.score(**row), rows))
    # Threads may split a product differently from the main thread.
    np.testing.assert_allclose(
        [s.raw for s in together], [s.raw for s in alone], atol=1e-6
    )


FEW = Evidence(train=(2, 60), validation=(1, 30), auroc=(0.4, 0.99))


def scorer_with_head(probed, precision=None, **changes):
    """Return a scorer with the same backbone and another closed-book head."""
    head = dataclasses.replace(probed.detector.heads["closed_book"], **changes)
    heads = {**probed.detector.heads, "closed_book": head}
    detector = dataclasses.replace(probed.detector, heads=heads)
    return Scorer(probed.backbone, detector, precision=precision)


def scoped(probed, **changes):
    """Return a scorer whose with-context signals had these bounds in training."""
    bank = probed.detector.banks["with_context"]
    scope = wide_scope(bank.dims.total)._replace(limits=np.zeros(4), **changes)
    bank = dataclasses.replace(bank, scope=scope, lengths=(12, 30, 9))
    banks = {**probed.detector.banks, "with_context": bank}
    detector = dataclasses.replace(probed.detector, banks=banks)
    return Scorer(probed.backbone, retrained(detector, scripts=("LATIN",)))


def test_only_signals_outside_the_range_of_training_get_a_warning(probed):
    assert scoped(probed).score(QUESTION, ANSWER, PASSAGE).warnings == ()
    dims = probed.detector.banks["with_context"].dims
    high = np.full(dims.total, 1e9, np.float32)
    high[dims.slices[1]] = -1e9
    (warning,) = scoped(probed, high=high).score(QUESTION, ANSWER, PASSAGE).warnings
    assert "100.0% of the prob signals lie outside" in warning


def test_only_a_context_longer_than_any_in_training_gets_a_warning(probed):
    longest = f"{PASSAGE} Guzolt Falls Skiband Rugrond"
    assert scoped(probed).score(QUESTION, ANSWER, longest).warnings == ()
    (warning,) = scoped(probed).score(QUESTION, ANSWER, f"{longest} Falls").warnings
    assert "the context has 13 tokens, but at most 12 in training" in warning


def test_words_in_a_new_script_get_a_warning_and_a_single_letter_does_not(probed):
    warnings = [
        [w for w in score.warnings if "another script" in w]
        for letters in ("π", "где родился")
        for score in [scoped(probed).score(f"{QUESTION} {letters}", ANSWER, PASSAGE)]
    ]
    assert warnings[0] == [] and "are CYRILLIC" in warnings[1][0]


def test_one_long_passage_does_not_pad_the_signals_of_other_answers(scorer):
    peaks, long = [], " ".join([PASSAGE] * 50)
    for contexts in ([PASSAGE] * 32, [PASSAGE] * 31 + [long]):
        scorer.answer([QUESTION] * 32, contexts)
        tracemalloc.start()
        scores = scorer.answer([QUESTION] * 32, contexts)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 3 * peaks[0]
    (alone,) = scorer.answer([QUESTION], [long])
    assert scores[-1].p_correct == pytest.approx(alone.p_correct, abs=1e-4)
    assert scores[0].tokens and len({score.p_correct for score in scores}) > 1


@pytest.mark.parametrize(("dtype", "n"), [("float32", 0), ("bfloat16", 1)])
def test_reading_in_a_second_pass_gets_a_warning_if_the_dtype_rounds(dtype, n):
    probe = beatrice.load("embedded", dtype=dtype, strict=False)
    assert set(probe.detector.provenance.paths.values()) == {"decode"}
    warnings = probe.score(QUESTION, ANSWER).warnings
    assert sum(f"{dtype} rounds the two differently" in text for text in warnings) == n


def test_of_answers_written_together_only_those_read_again_get_a_warning():
    probe = beatrice.load("embedded", dtype="bfloat16", strict=False)
    questions = [QUESTION, "what is the genre of Skiband Rugrond?"]
    first, _ = probe.answer(questions)
    stop = "".join(first.tokens[-2:])[1:]  # it begins before the last token
    scores = probe.answer(questions, stop=[stop])
    *_, streamed = probe.stream(QUESTION, stop=[stop])
    assert scores[0].text != first.text
    assert [
        sum("rounds the two differently" in text for text in score.warnings)
        for score in (*scores, streamed)
    ] == [1, 0, 1]


def test_an_answer_whose_states_overflow_has_no_p_and_affects_no_other(probed):
    model = copy.deepcopy(probed.backbone.model)
    backbone = Backbone.from_model(model, probed.backbone.tokenizer)
    stored_as = ("bfloat16", *["float32"] * 3)  # as `fit` stores them
    scorer = Scorer(backbone, retrained(make_detector(backbone), stored_as=stored_as))
    rows = [(QUESTION, ANSWER)] * 2
    _, expected = scorer.score_many(rows)

    def overflow(layer, _, states):
        states[0, 3, 0] = np.inf

    model.model.layers[LAYER - 1].register_forward_hook(overflow)
    score, other = scorer.score_many(rows)
    assert (score.p_correct, score.decision) == (None, "unknown")
    assert "not finite" in score.reason
    assert other.p_correct == expected.p_correct


def score_with_p(probed, p_correct, evidence=KNOWN["evidence"], precision=None):
    """Score an answer with this P; validation is all wrong to .3, all right from .8."""
    p = np.linspace(0, 1, 301)
    labels = np.where(p < 0.3, False, np.where(p > 0.8, True, np.arange(301) % 2 == 0))
    changes = {"validation": Validation(p, labels), "evidence": evidence}
    flat = Calibrator(name="isotonic", scores=(0, 1), p_correct=(p_correct, p_correct))
    scorer = scorer_with_head(probed, precision, calibrator=flat, **changes)
    return scorer.score(QUESTION, ANSWER)


def test_an_answer_is_trusted_above_one_threshold_and_distrusted_below_another(probed):
    for p, decision, reason in (
        (0.9, "trust", None),
        (0.1, "distrust", "up to which at least 0.9 of all answers are wrong"),
        (0.5, "unknown", "lies between"),
    ):
        score = score_with_p(probed, p)
        assert (score.p_correct, score.decision) == (p, decision)
        assert score.reason is None if reason is None else reason in score.reason


def test_decisions_follow_the_precision_that_the_caller_asks_for(probed):
    assert score_with_p(probed, 0.6).decision == "unknown"
    assert score_with_p(probed, 0.6, precision=0.6).decision == "trust"
    never = score_with_p(probed, 0.99, precision=0.99)
    assert never.decision == "unknown" and "no threshold to trust" in never.reason
    with pytest.raises(ValueError, match="precision: expected"):
        score_with_p(probed, 0.6, precision=60)


def test_a_detector_trained_on_two_right_answers_trusts_nothing_and_warns(probed):
    score = score_with_p(probed, 0.9, FEW)
    assert score.decision == "unknown" and score.p_correct == 0.9
    assert score.reason == score.warnings[0]
    assert "too few to trust: 2 right and 60 wrong training answers" in score.reason
    score = score_with_p(probed, 0.9)  # fitted on enough answers
    assert score.decision == "trust" and not any("few" in w for w in score.warnings)


def test_the_page_of_warnings_lists_exactly_the_warnings_and_doubts_of_the_code():
    text = (ROOT / "docs" / "warnings.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^### (\w+)\n\n> (.*)$", text, re.MULTILINE))
    assert listed == WARNINGS | REASONS
    for section in text.split("### ")[1:]:
        for words in ("**Meaning.**", "**Cause.**", "**What to do.**"):
            assert words in section
    few = Evidence(train=(2, 60), validation=(20, 30), auroc=(0.6, 0.9))
    chance = Evidence(train=(20, 60), validation=(20, 30), auroc=(0.4, 0.8))
    for evidence in (few, chance):
        (doubt,) = evidence.doubts
        assert f"> {doubt}" in text.splitlines()


def test_an_empty_context_means_closed_book_in_every_call(scorer):
    scored = scorer.score(QUESTION, ANSWER, context=[])
    assert scored.p_correct == scorer.score(QUESTION, ANSWER).p_correct
    asked = scorer.answer(QUESTION)
    assert scorer.answer(QUESTION, context=[]) == asked
    assert scorer.answer(QUESTION, ()) == asked
    assert [*scorer.stream(QUESTION, [])][-1].text == asked.text
    with pytest.raises(ValueError, match=r"contexts\[1\]: expected at least one"):
        scorer.answer([QUESTION, QUESTION], [PASSAGE, []])


def test_a_score_that_is_kept_does_not_keep_the_language_model():
    probe = beatrice.load("embedded")
    score = probe.answer(QUESTION)
    model = weakref.ref(probe.scorer.probed.backbone.model)
    del probe
    gc.collect()
    assert model() is None and len(score.effects) == len(score.tokens)


def test_a_score_without_its_signals_loses_only_its_effects(scorer):
    score = scorer.score(QUESTION, ANSWER, [PASSAGE])
    light = dataclasses.replace(score, masked=None)
    assert light == score and light.as_json() == score.as_json()
    assert score.effects and light.effects == ()
    row = {"question": QUESTION, "answer": ANSWER}  # among many rows, even if alone
    many = [*scorer.score_many(list(mixed_rows(3)), 1), *scorer.score_many([row])]
    assert [score.masked for score in many] == [None] * 4
