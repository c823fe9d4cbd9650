"""Answers that are streamed, sampled, or asked for by a chat, read while written."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.local import stop_ids
from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.pgir.asking import QuestionBatch
from beatrice.pgir.scorer import Scorer
from tests.extract.generate.test_local import byte_fallback
from tests.pgir.small import LAYER, PASSAGE, QUESTION, make_detector
from tests.pgir.test_scorer import CHAT, FOREIGN


def scorer_of(backbone):
    return Scorer(backbone, make_detector(backbone), GenerationConfig(max_new_tokens=8))


def words_of(scorer, context):
    """Return the texts of the answer's tokens."""
    *tokens, _ = scorer.stream(QUESTION, context)
    return [token.text for token in tokens]


@pytest.mark.parametrize("context", [None, PASSAGE])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": np.int64(1)},
        {"temperature": 5.0, "seed": 3, "max_new_tokens": 6},
        {"stop": ["WHOLE"]},  # an answer without a token
        {"stop": ["HALF"]},  # one that ends within a token
        {"stop": ["SEVERAL"]},  # the string spans several tokens
        {"stop": ["never"], "max_new_tokens": 2},
    ],
)
def test_a_stream_is_the_answer_with_the_p_of_every_prefix_if_it_ended_there(
    backbone, scorer, context, options
):
    if "stop" in options:
        *words, _ = words_of(scorer, context)
        strings = {
            "WHOLE": words[0],
            "HALF": words[-1][2:],
            "SEVERAL": "".join(words)[2:],
            "never": words[-1] + "!",  # held back, then released
        }
        options = options | {"stop": [strings[options["stop"][0]]]}
    *tokens, score = scorer.stream(QUESTION, context, every=1, **options)
    contexts = None if context is None else [context]
    assert score == scorer.answer([QUESTION], contexts, **options)[0]
    assert "".join(token.text for token in tokens).strip() == score.text
    n_tokens = len(score.tokens)
    assert [t.is_stop for t in tokens[n_tokens:]] == [True] * (len(tokens) > n_tokens)
    log_probs = np.log([token.p for token in tokens[:n_tokens]])
    np.testing.assert_allclose(log_probs, score.log_probs, atol=1e-5)
    assert all(token.entropy >= 0 for token in tokens)
    inputs = QuestionBatch(texts=[QUESTION], contexts=contexts, **options)
    (request,) = scorer._requests(inputs)
    (answer,), _ = scorer.probed.answer_and_read([request], scorer._sampling(inputs))
    stop_id = stop_ids(backbone)[0]
    for n, token in enumerate(tokens[:n_tokens], start=1):
        if n == len(tokens):  # the answer is cut after it; the score has its P
            assert token.p_correct is token.p_if_cut is None
            continue
        ids = answer.token_ids[:n]
        ended = scorer.score(QUESTION, context=context, answer_ids=[*ids, stop_id])
        assert token.p_correct == pytest.approx(ended.p_correct, abs=1e-5)
        cut = scorer.score(QUESTION, context=context, answer_ids=ids)
        assert token.p_if_cut == pytest.approx(cut.p_correct, abs=1e-5)
        assert any(f"cut answer: it has {n} tokens" in text for text in cut.warnings)
        assert not any("cut answer" in warning for warning in ended.warnings)
    if "temperature" in options:
        assert len({token.p_correct for token in tokens[: n_tokens - 1]}) > 1
    if not options:  # the last prefix is the answer: read once
        assert tokens[-2].p_correct == score.p_correct


def reciting_model(tokenizer, text):
    """Return a model that recites a text after a colon; it must repeat no token."""
    n_words, config = len(tokenizer), {"num_attention_heads": 4, "hidden_size": 272}
    config |= {"num_hidden_layers": LAYER, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=n_words, **config))
    ids = tokenizer(f":{text}")["input_ids"]
    states = 10 * torch.eye(n_words, config["hidden_size"])
    heads = torch.zeros_like(states)
    heads[ids[1:]] = states[ids[:-1]]
    model.get_input_embeddings().weight.data, model.lm_head.weight.data = states, heads
    return Backbone.from_model(model, tokenizer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": ["。"]}, "Paré"),
        ({"stop": ["é。"]}, "Par"),
        ({"stop": ["。", "!"], "max_new_tokens": 5}, "Paré"),
    ],
)
def test_a_stream_shows_no_part_of_a_stop_string_of_several_bytes(options, text):
    scorer = scorer_of(reciting_model(byte_fallback(), "Paré。who?"))
    *tokens, score = scorer.stream(QUESTION, **options)
    assert score.text == "".join(token.text for token in tokens).strip()
    assert score.text.startswith(text)
    assert sum(not token.is_stop for token in tokens) == len(score.tokens)


def test_a_stop_token_that_is_a_plain_word_adds_no_text_to_a_stream(backbone, scorer):
    (request,) = scorer._requests(QuestionBatch(texts=[QUESTION]))
    (answer,), _ = scorer.probed.answer_and_read([request])
    model = copy.deepcopy(backbone.model)
    model.generation_config.eos_token_id = [2, answer.token_ids[-1]]
    ending = scorer_of(Backbone.from_model(model, backbone.tokenizer))
    *tokens, score = ending.stream(QUESTION, every=1)
    assert "".join(token.text for token in tokens).strip() == score.text
    assert (tokens[-1].is_stop, tokens[-1].text) == (True, "")


def test_a_question_without_a_p_has_none_anywhere_in_its_stream(scorer):
    *tokens, score = scorer.stream("xyzzy plugh qwerty?", every=1)
    assert len(tokens) > 1 and "are unknown to" in score.reason
    assert {token.p_correct for token in tokens} == {None}
    assert {token.p_if_cut for token in tokens} == {None}


def test_p_comes_every_so_many_tokens_and_only_if_asked_for(scorer):
    long = {"temperature": 3.0, "seed": 1, "max_new_tokens": 5, "stop": []}
    *tokens, _ = scorer.stream(QUESTION, every=2, **long)
    assert [t.p_correct is not None for t in tokens] == [
        (n % 2 == 0) and n < 5 and not t.is_stop for n, t in enumerate(tokens, start=1)
    ]
    *tokens, _ = scorer.stream(QUESTION, **long)
    assert all(token.p_correct is None for token in tokens)


def test_the_model_can_answer_other_questions_between_two_tokens(scorer):
    alone = list(scorer.stream(QUESTION, PASSAGE, every=1))
    between = []
    for item in scorer.stream(QUESTION, PASSAGE, every=1):
        between.append(item)
        scorer.answer([QUESTION])
    assert between == alone


def test_an_abandoned_stream_leaves_the_model_as_it_was(scorer):
    def n_hooks():
        modules = scorer.probed.backbone.model.modules()
        return sum(len(module._forward_hooks) for module in modules)

    before, n_before = scorer.answer([QUESTION]), n_hooks()
    next(iter(scorer.stream(QUESTION, every=1)))
    assert scorer.answer([QUESTION]) == before
    assert n_hooks() == n_before


def test_a_sampled_answer_depends_on_the_seed_and_not_on_its_batch(scorer):
    questions = [QUESTION, "where was Guzolt Falls born?"]
    options = {"temperature": 3.0, "max_new_tokens": 4}
    drawn = [scorer.answer(questions, seed=n, **options) for n in range(4)]
    assert len({score.text for score, _ in drawn}) > 1
    (alone,) = scorer.answer(questions[:1], seed=2, **options)
    assert alone.text == drawn[2][0].text
    assert alone.p_correct == pytest.approx(drawn[2][0].p_correct, abs=1e-5)


@pytest.mark.parametrize("named", [{}, {"question": QUESTION, "context": PASSAGE}])
def test_an_answer_to_a_chat_has_the_score_that_it_gets_afterwards(backbone, named):
    tokenizer = copy.deepcopy(backbone.tokenizer)
    tokenizer.chat_template = CHAT
    chatting = scorer_of(dataclasses.replace(backbone, tokenizer=tokenizer))
    messages = [{"role": "user", "content": FOREIGN}]
    *_, score = chatting.stream(*named.values(), messages=messages)
    question, context = named.get("question"), named.get("context")
    assert score == chatting.answer(question, context, messages=messages)
    inputs = QuestionBatch(
        texts=None if question is None else [question],
        contexts=None if context is None else [context],
        messages=messages,
    )
    (request,) = chatting._requests(inputs)
    (answer,), _ = chatting.probed.answer_and_read([request])
    ids = [i for i in (*answer.token_ids, answer.stop_id) if i is not None]
    again = chatting.score(messages=messages, answer_ids=ids, **named)
    assert score.p_correct == pytest.approx(again.p_correct, abs=1e-5)
    assert again.warnings == score.warnings
    assert "another prompt than the probe's own" in "".join(score.warnings)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"question": None}, "^question: expected a text"),
        ({"context": 3}, "context: expected"),
        ({"context": " ".join([PASSAGE] * 90)}, "window of 512"),
        ({"max_new_tokens": 600}, "window of 512"),
        ({"every": 0}, "every"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop": "text"}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 0.5}, "seed"),
        ({"messages": "hello"}, "messages"),
        ({"question": None, "messages": []}, "messages: expected a list of at least"),
    ],
)
def test_bad_arguments_of_stream_are_refused_in_one_sentence(scorer, arguments, named):
    with pytest.raises(ValueError, match=named):
        list(scorer.stream(**{"question": QUESTION, **arguments}))


def test_logits_that_are_not_finite_are_reported_in_one_sentence(backbone):
    model = copy.deepcopy(backbone.model)
    scorer = scorer_of(Backbone.from_model(model, backbone.tokenizer))
    assert scorer.probed.why_read_again is None
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, states: states * torch.nan)
    for ask in (scorer.stream, lambda question: scorer.answer([question])):
        with pytest.raises(ValueError, match="logits that are not finite"):
            list(ask(QUESTION))


def test_a_model_that_needs_a_second_pass_cannot_be_streamed(backbone):
    sizes = {"vocab_size": len(backbone.tokenizer), "hidden_size": 16, "n_head": 2}
    bloom = BloomForCausalLM(BloomConfig(**sizes, n_layer=LAYER))
    scorer = scorer_of(Backbone.from_model(bloom, backbone.tokenizer))
    with pytest.raises(ValueError, match="use `answer`, which reads the whole"):
        scorer.stream(QUESTION)
    (score,) = scorer.answer([QUESTION])
    assert 0 <= score.p_correct <= 1
