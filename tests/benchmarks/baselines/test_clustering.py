import numpy as np
import pytest

from beatrice.benchmarks.baselines.detectors.clustering import (
    by_entailment,
    by_words,
    clusters_of,
    distinct_clusters,
    official_clusters,
    paper_clusters,
)
from tests.benchmarks.baselines.drawn import by_last_word, inputs, relations_by


def matrix(n, *pairs):
    """The symmetric matrix of `n` texts in which these pairs are equivalent."""
    found = np.eye(n, dtype=bool)
    for i, j in pairs:
        found[i, j] = found[j, i] = True
    return found


def test_a_text_that_matches_two_first_members_ends_with_the_last():
    both = matrix(3, (0, 2), (1, 2))
    assert official_clusters("abc", both).tolist() == [0, 1, 1]
    assert paper_clusters("abc", both).tolist() == [0, 1, 0]


def test_a_cluster_is_compared_by_its_first_member_only():
    chain = matrix(3, (0, 1), (1, 2))
    for rule in (official_clusters, paper_clusters, distinct_clusters):
        assert rule("abc", chain).tolist() == [0, 0, 1]


def test_where_meaning_the_same_is_transitive_all_rules_agree():
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = rng.integers(4, size=8)
        texts = [f"{kind}{rng.integers(2)}" for kind in kinds]
        _, ids = np.unique(kinds, return_inverse=True)
        for rule in (official_clusters, paper_clusters, distinct_clusters):
            found = rule(texts, kinds[:, None] == kinds)
            assert len(set(zip(found, ids, strict=True))) == len(set(ids))
            assert len(set(found)) == len(set(ids)) == found.max() + 1


def test_equal_texts_may_part_in_the_official_code_and_nowhere_else():
    texts, apart = ["x", "x"], matrix(2)
    assert official_clusters(texts, apart).tolist() == [0, 1]
    assert paper_clusters(texts, apart).tolist() == [0, 0]
    assert distinct_clusters(texts, apart).tolist() == [0, 0]


def test_distinct_texts_are_clustered_in_sorted_order():
    # Sorted, "a" and "b" open clusters and "c", which matches both, ends with "b".
    assert distinct_clusters(["c", "b", "a", "c"], matrix(4, (0, 1), (0, 2))).tolist()[
        0
    ] == (distinct_clusters(["b"], matrix(1))[0] + 1)
    found = distinct_clusters(["c", "b", "a"], matrix(3, (0, 1), (0, 2)))
    assert found.tolist() == [1, 1, 0]


def test_no_texts_have_no_clusters():
    for rule in (official_clusters, paper_clusters, distinct_clusters):
        assert rule([], np.zeros((0, 0), bool)).tolist() == []


@pytest.mark.parametrize(
    ("forth", "back", "same"),
    [
        ((0.5, 0.3, 0.2), (0.5, 0.3, 0.2), True),
        ((0.5, 0.3, 0.2), (0.3, 0.5, 0.2), False),  # entailed in one direction
        ((0.4, 0.6, 0.0), (0.4, 0.6, 0.0), False),  # not the likeliest
    ],
)
def test_entailment_is_the_likeliest_relation_in_both_directions(forth, back, same):
    one = inputs(
        [["a", "b"]],
        relations=relations_by(lambda p, h: forth if p < h else back),
    )
    assert by_entailment(one)[0].tolist() == [[True, same], [same, True]]


def test_the_question_is_put_before_both_texts():
    asked = []

    def rule(premise, hypothesis):
        asked.append((premise, hypothesis))
        return 1, 0, 0

    by_entailment(inputs([["a", "b"], ["a"]], relations=relations_by(rule)))
    assert sorted(asked) == [("Q0? a", "Q0? b"), ("Q0? b", "Q0? a")]


def test_equal_texts_are_asked_of_the_model_too():
    never = relations_by(lambda p, h: (0, 1, 0))
    one = inputs([["a", "a"]], relations=never)
    assert by_entailment(one)[0].tolist() == [[True, False], [False, True]]


def test_without_an_nli_model_entailment_is_refused():
    with pytest.raises(ValueError, match="expected an NLI model, found none"):
        by_entailment(inputs([["a"]]))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("The Paris!", "paris", True),
        ("Ann and Bob", "Bob and Ann", True),
        ("Paris, France", "Paris", False),  # included in one direction
        ("Paris", "Rome", False),
        ("", "", True),
        ("", "Paris", False),
        ("The", "", False),  # nothing is left of it, but it is not empty
        ("ｃａｆé", "Café", True),
    ],
)
def test_words_are_included_in_both_directions(first, second, same):
    one = inputs([[first, second]])
    assert by_words(one)[0].tolist() == [[True, same], [same, True]]


def test_rows_are_clustered_each_by_its_own_samples():
    drawn = [["a x", "b x", "a y"], [], ["a x"]]
    one = inputs(drawn, relations=relations_by(by_last_word))
    for equivalences, expected in (
        (by_entailment, [[0, 0, 1], [], [0]]),
        (by_words, [[0, 1, 2], [], [0]]),
    ):
        found = clusters_of(one, equivalences, official_clusters)
        assert [ids.tolist() for ids in found] == expected
