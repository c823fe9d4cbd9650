"""The second prompt and the swapped passages."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from beatrice.extract.generate.prompts import TokenizerOnly, build_prompt
from beatrice.extract.generate.templates import TEMPLATES
from beatrice.extract.readings.reader import (
    neighbours_of,
    other_passages,
    read,
    swapped_prompt,
    truth_prompt,
    truth_text,
)
from beatrice.extract.records import Passage
from tests.extract.small_run import questions
from tests.records import an_answer, an_example

SHORT = TEMPLATES["short"]


@pytest.fixture(scope="module")
def wordwise():
    """A tokenizer of words separated by white space, which knows the word "A"."""
    words = truth_text("who?", "Ann", ("Bob",)).replace("\n", " \n ").split(" ")
    known = dict.fromkeys(["<s>", "[UNK]", "\n", *words, "A", "B", ":"])
    result = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, "[UNK]"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=result, bos_token="<s>", unk_token="[UNK]"
    )


def test_the_truth_question_is_that_of_the_official_code():
    assert truth_text("Who?", " Ann", ("Bob\n", "Ann")) == (
        "Question: Who?\nBrainstormed Answers: Bob\nAnn\nAnn\nPossible answer: Ann\n"
        "Is the possible answer:\nA) True\nB) False\nThe possible answer is:"
    )
    alone = "Brainstormed Answers: Ann\nPossible answer: Ann\n"
    assert alone in truth_text("Who?", "Ann", ())


def test_a_truth_prompt_is_the_text_followed_by_the_option(wordwise):
    model = TokenizerOnly(wordwise)
    ids = truth_prompt(model, "who?", "Ann", ("Bob",))
    text = truth_text("who?", "Ann", ("Bob",))
    assert ids[:-1] == tuple(wordwise(text)["input_ids"])
    assert wordwise.convert_ids_to_tokens(ids[-1]) == "A"
    assert truth_prompt(TokenizerOnly(wordwise, len(ids)), "who?", "Ann", ("Bob",))
    short = TokenizerOnly(wordwise, len(ids) - 2)
    assert truth_prompt(short, "who?", "Ann", ("Bob",)) is None


def test_without_one_known_token_for_the_option_there_is_no_truth_prompt(
    bytewise, local
):
    assert truth_prompt(TokenizerOnly(bytewise), "who?", "Ann") is None
    # The embedded model has no token "A".
    assert truth_prompt(local.backbone, "who?", "Ann") is None


def example(number, titles, golds=("gold",), dataset="d", texts=None):
    texts = [f"text {number} {title}" for title in titles] if texts is None else texts
    pairs = zip(titles, texts, strict=True)
    passages = tuple(Passage(title=title, text=text) for title, text in pairs)
    fields = dict(dataset=dataset, golds=golds, passages=passages)
    return an_example(id=f"q{number}", question=f"question {number}?", **fields)


def answered(other, **fields):
    usual = dict(setting="with_context", context_span=(0, 1))
    return an_answer(example_id=other.id, **usual | fields)


def titles_lent(example, every, **fields):
    groups = other_passages(example, answered(example, **fields), neighbours_of(every))
    return [[passage.title for passage in passages] for passages in groups]


def test_the_next_questions_of_the_set_lend_equally_many_passages():
    titles = {0: "ab", 1: "cd", 2: "efg", 3: "h", 4: "ij"}
    sets = {1: "other"}
    every = [example(i, x, dataset=sets.get(i, "d")) for i, x in titles.items()]
    assert titles_lent(every[0], every) == [["e", "f"], ["i", "j"]]
    # After the last comes the first.
    assert titles_lent(every[4], every) == [["a", "b"], ["e", "f"]]
    assert titles_lent(every[2], every, dropped=(1, 2)) == [["h"], ["i"], ["a"]]


def test_passages_with_the_same_title_or_a_gold_answer_are_not_lent():
    every = [
        example(0, ["Sid &amp; Nancy"], golds=("Paris",)),
        example(1, ["sid & nancy"]),
        example(2, ["x"], texts=["It is in PARIS."]),
        example(3, ["Paris"]),
        example(4, ["y"]),
    ]
    assert titles_lent(every[0], every) == [["y"]]


def test_passages_without_titles_are_told_apart_by_their_texts():
    every = [example(i, [""], texts=[t]) for i, t in enumerate(["same", "same", "b"])]
    result = other_passages(every[0], answered(every[0]), neighbours_of(every))
    assert [passages[0].text for passages in result] == ["b"]


def test_a_swapped_prompt_asks_the_same_question_after_other_passages(bytewise):
    every = [example(0, "a"), example(1, "b"), example(2, "c")]
    answer = answered(every[0])
    model = TokenizerOnly(bytewise)
    ids = swapped_prompt(model, SHORT, every[0], answer, neighbours_of(every))
    expected = build_prompt(bytewise, SHORT, "question 0?", every[1].passages)
    assert ids == expected.ids
    assert (
        swapped_prompt(model, SHORT, every[0], answer, neighbours_of(every[:1])) is None
    )
    # Passages too long for the window with the answer are passed over.
    window = dataclasses.replace(model, max_length=len(ids) + 1)
    lent = [every[0], example(1, "b", texts=["much longer " * 9]), every[2]]
    result = swapped_prompt(window, SHORT, every[0], answer, neighbours_of(lent))
    assert result == build_prompt(bytewise, SHORT, "question 0?", lent[2].passages).ids


def test_other_passages_change_the_embedded_models_distributions(local):
    """A discrepancy of zero would mean that the swap has no effect."""
    every = [item for item in questions(12, 0, 0) if item.passages]
    backbone, answers = local.backbone, []
    for item in every:
        x = build_prompt(backbone.tokenizer, SHORT, item.question, item.passages)
        ids = {"prompt_ids": x.ids, "token_ids": x.ids[-4:-2]}
        answers.append(answered(item, context_span=x.context_span, **ids))

    def discrepancies(swapped):
        rows = read(backbone, answers, ["lumina_mmd"], swapped=swapped)
        return np.array([row["lumina_mmd"] for row in rows])

    swapped = [
        swapped_prompt(backbone, SHORT, item, answer, neighbours_of(every))
        for item, answer in zip(every, answers, strict=True)
    ]
    assert None not in swapped
    same = discrepancies([answer.prompt_ids for answer in answers])
    assert np.abs(same).max() < 1e-6
    assert discrepancies(swapped).mean() > 1e-3
