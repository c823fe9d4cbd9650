import math

import numpy as np
import pytest

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.detectors.selfcheck import (
    sentences_of,
    tokens_of,
    unigram_max,
)
from tests.benchmarks.baselines.drawn import (
    by_last_word,
    inputs,
    relations_by,
    scores,
)

OPENING = "Michael Alan Weiner (born {}) is {} American radio host. "
BORN = "March 31, 1942"
PASSAGE = OPENING.format(BORN, "an") + "He is the host of The Savage Nation."
SAMPLES = [
    OPENING.format(BORN, "an") + "He is the host of The Savage Country.",
    "Michael Alan Weiner (born January 13, 1960) is a Canadian radio host. "
    "He works at The New York Times.",
    OPENING.format(BORN, "an") + "He obtained his PhD from MIT.",
]
NLI, PAPER, NGRAM = (
    catalogue()[f"selfcheck_{name}"] for name in ("nli", "nli:paper", "ngram")
)


def test_unigrams_of_the_packages_own_example():
    first, second = sentences_of(PASSAGE)
    assert sum(len(tokens_of(text)) for text in [PASSAGE, *SAMPLES]) == 97
    one, both = unigram_max([first, second], SAMPLES), [first, second]
    assert one == pytest.approx(4.025405, abs=1e-6)
    for sentence, golden in zip(both, (3.476099, 4.574711), strict=True):
        # The corpus is the whole passage's; what it has more is put among the samples.
        rest = [*SAMPLES, *(other for other in both if other != sentence)]
        assert unigram_max([sentence], rest) == pytest.approx(golden, abs=1e-6)


def test_an_answer_that_all_samples_repeat_is_as_likely_as_its_tokens():
    assert unigram_max(["Paris"], ["paris"] * 10) == 0
    assert unigram_max(["Paris."], ["Paris."] * 10) == pytest.approx(math.log(2))


def test_a_token_that_no_sample_has_decides():
    # Once among 11 answers of two tokens.
    found = unigram_max(["Rome."], ["Paris."] * 10)
    assert found == pytest.approx(math.log(22))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("  \n ", []),
        ("Paris", ["Paris"]),
        (
            "It is Paris. I know!  Really? Yes",
            ["It is Paris.", "I know!", "Really?", "Yes"],
        ),
        ("J. K. Rowling wrote it.", ["J. K. Rowling wrote it."]),
        ("Dr. No met Mrs. Smith. Good.", ["Dr. No met Mrs. Smith.", "Good."]),
        ("It is 3.5 km. 4 of them.", ["It is 3.5 km.", "4 of them."]),
        ('He said "No." Then left.', ['He said "No."', "Then left."]),
        ("one line\nanother", ["one line", "another"]),
        ("e.g. this one", ["e.g. this one"]),
    ],
)
def test_text_is_split_into_sentences(text, sentences):
    assert sentences_of(text) == sentences


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It's (the) U.S.", ["it", "'s", "(", "the", ")", "u.s."]),
        ("1,000.5 km.", ["1,000.5", "km", "."]),
        ("Well-known 'x'", ["well", "-", "known", "'", "x", "'"]),
        ("Gu\u0308n", ["g\u00fcn"]),
    ],
)
def test_text_is_split_into_tokens(text, tokens):
    assert tokens_of(text) == tokens


def test_no_word_is_lost_between_sentences():
    words = [word for one in sentences_of(PASSAGE) for word in tokens_of(one)]
    assert words == tokens_of(PASSAGE)


def test_the_sentence_comes_first_and_in_the_papers_order_the_sample():
    asked = []

    def rule(premise, hypothesis):
        asked.append((premise, hypothesis))
        return 0.5, 0.0, 0.5

    drawn = inputs([["x"]], ["A b. C d."], relations=relations_by(rule))
    NLI.score(drawn)
    assert asked == [("A b.", "x"), ("C d.", "x")]
    PAPER.score(drawn)
    assert asked[2:] == [("x", "A b."), ("x", "C d.")]


def test_a_score_is_minus_the_mean_contradiction_without_neutral():
    chances = {"x": (0.1, 0.8, 0.1), "y": (0.3, 0.6, 0.1), "z": (0.0, 0.5, 0.5)}
    drawn = inputs(
        [["x", "y", "z", "x"]],
        relations=relations_by(lambda p, h: chances[h]),
    )
    expected = -(0.5 + 0.25 + 1.0 + 0.5) / 4
    assert scores(NLI, drawn) == pytest.approx([expected])


def test_sentences_count_alike():
    drawn = inputs(
        [["we know x", "so x"]],
        ["Surely x. Perhaps y. Or z."],
        relations=relations_by(lambda p, h: by_last_word(p.rstrip("."), h.rstrip("."))),
    )
    low, high = 0.02 / 0.92, 0.9 / 0.92
    assert scores(NLI, drawn) == pytest.approx([-(low + 2 * high) / 3])


@pytest.mark.parametrize("detector", (NLI, PAPER, NGRAM), ids=lambda one: one.name)
def test_an_empty_answer_and_no_samples_are_undefined(detector):
    drawn = inputs(
        [["a", "b"], ["a"], [], ["", "a"]],
        ["a", " ", "a", "a"],
        relations=relations_by(by_last_word),
    )
    assert np.isfinite(scores(detector, drawn)).tolist() == [True, False, False, True]


def test_a_pair_that_is_surely_neutral_is_undefined():
    drawn = inputs([["a"]], relations=relations_by(lambda p, h: (0, 1, 0)))
    assert np.isnan(scores(NLI, drawn)).all()


def test_without_an_nli_model_the_contradiction_is_refused():
    with pytest.raises(ValueError, match="expected an NLI model, found none"):
        NLI.score(inputs([["a"]]))
