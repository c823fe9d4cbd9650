"""Fusion by reciprocal rank, and how retrieval is judged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beatrice.extract.records import Passage
from beatrice.pgir.retrieval.corpus import Gold
from beatrice.pgir.retrieval.recall import agreement, gold_recall, has_answer, measure
from beatrice.pgir.retrieval.retrievers import FusedRetriever, fuse


class Fixed:
    """A retriever that ranks as it is told, whatever is asked."""

    def __init__(self, ranking):
        self.ranking = np.array(ranking)

    def search(self, queries, depth):
        return np.tile(self.ranking[:depth], (len(queries), 1))


def test_the_fused_score_is_the_sum_of_reciprocal_ranks():
    # 4: 1/61 + 1/63; 7: 1/62 + 1/61; 9: 1/63; 2: 1/62
    assert fuse([np.array([4, 7, 9]), np.array([7, 2, 4])]).tolist() == [7, 4, 2, 9]


@given(st.permutations(range(8)))
def test_a_ranking_fused_with_itself_is_itself(ranking):
    assert fuse([np.array(ranking)] * 2).tolist() == list(ranking)


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_fusion_does_not_depend_on_the_order_of_the_retrievers(one, other):
    a, b = np.array(one), np.array(other)
    assert fuse([a, b]).tolist() == fuse([b, a]).tolist()


def test_a_passage_that_one_retriever_misses_can_still_be_found():
    fused = FusedRetriever([Fixed([0, 1, 2, 3]), Fixed([9, 0, 8, 7])])
    assert fused.search(["a", "b"], 2).tolist() == [[0, 9], [0, 9]]
    assert fused.search([], 2).shape == (0, 2)


def test_fusion_needs_two_retrievers():
    with pytest.raises(ValueError, match="two retrievers, found 1"):
        FusedRetriever([Fixed([0])])


def test_recall_is_the_share_of_gold_passages_among_the_first():
    ranking = np.array([5, 1, 8, 2, 9, 3])
    assert gold_recall(ranking, [1, 3], (1, 2, 6)) == {1: 0.0, 2: 0.5, 6: 1.0}


def test_an_answer_is_held_by_whole_words_whatever_case_and_articles():
    passages = [
        Passage(title="Rome", text="A parish."),
        Passage(title="", text="Paris"),
    ]
    found = has_answer(np.array([0, 1]), passages, ["the paris"], (1, 2))
    assert found == {1: 0.0, 2: 1.0}
    assert has_answer(np.array([0, 1]), passages, ["The"], (2,)) == {2: 0.0}


def test_means_are_per_question_set():
    golds = [
        Gold(dataset=name, id=str(i), question="q", golds=("x",), passages=(place,))
        for i, (name, place) in enumerate([("a", 0), ("a", 25), ("b", 4)])
    ]
    passages = [Passage(title="", text=str(i)) for i in range(30)]
    found, counts = measure(np.tile(np.arange(30), (3, 1)), passages, golds)
    assert counts == {"a": 2, "b": 1}
    assert found["a", "recall"] == {3: 0.5, 5: 0.5, 20: 0.5}
    assert found["b", "recall"] == {3: 0.0, 5: 1.0, 20: 1.0}
    assert found["a", "answer"] == {3: 0.0, 5: 0.0, 20: 0.0}


def test_agreement_is_one_with_itself_and_half_where_half_is_missing():
    exact = np.tile(np.arange(20), (3, 1))
    assert set(agreement(exact, exact).values()) == {1.0}
    half = np.where(np.arange(20) % 2, exact, 99)
    assert agreement(half, exact)[20] == 0.5
