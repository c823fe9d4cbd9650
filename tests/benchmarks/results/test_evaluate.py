import numpy as np

from beatrice.benchmarks.results.evaluate import choose_answers
from beatrice.pgir.score_files import shown_tokens
from tests.records import an_answer

P = np.array([0.9, 0.1, 0.8, 0.2, 0.9, 0.9, 0.9, 0.4])
LABELS = np.array([1, 0, 0, 1, 1, 1, 1, 0], bool)
IDS = ["h", "b", "c", "d", "e", "f", "g", "a"]


def chosen(p_correct=P, labels=LABELS, ids=IDS, threshold=0.5):
    found = choose_answers(p_correct, labels, ids, threshold)
    return {kind.name: (n, [ids[i] for i in places]) for kind, n, places in found}


def test_of_each_kind_the_surest_are_shown():
    found = chosen()
    assert found["wrong and caught"] == (2, ["b", "a"])  # the lowest P first
    assert found["wrong and missed"] == (1, ["c"])
    assert found["right and distrusted"] == (1, ["d"])


def test_of_equals_the_smaller_id_is_shown_whatever_the_order():
    assert chosen()["right and trusted"] == (4, ["e", "f", "g"])
    order = np.random.default_rng(0).permutation(len(P))
    mixed = chosen(P[order], LABELS[order], [IDS[i] for i in order])
    assert mixed == chosen()


def test_an_answer_at_the_threshold_is_trusted():
    found = chosen(threshold=0.8)
    assert found["wrong and missed"] == (1, ["c"])
    assert chosen(threshold=0.81)["wrong and missed"] == (0, [])


def test_the_four_kinds_share_out_all_answers():
    assert sum(n for n, _ in chosen().values()) == len(P)


def test_tokens_are_shown_with_their_own_numbers_where_the_first_rows_are_spared():
    ids = dict(prompt_ids=tuple(range(10)), token_ids=(10, 11), context_span=(6, 6))
    answer = an_answer(**ids)
    prob = np.arange(12 * 5, dtype=float).reshape(12, 5)
    whole = shown_tokens(str, answer, prob)
    spared = shown_tokens(str, answer, prob[6:], 6)
    assert [token["text"] for token in whole] == [f"[{i}]" for i in (6, 7, 8, 10, 11)]
    assert spared == whole[1:]  # what emitted the first one was not kept
