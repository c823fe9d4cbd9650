import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract.records import Passage
from extract.run.directory import RunDir
from extract.run.manifest import NewRun
from pgir.commands import with_options
from pgir.controllers.policy import (
    ControllerConfig,
    Draft,
    Policy,
    decide,
    fresh_passages,
    recalibrated,
    search_policy,
    trace_questions,
)
from pgir.controllers.stage import (
    CONTROL,
    CONTROL_PRESETS,
    ControlConfig,
    settle_search,
)
from pgir.retrieval.bm25 import Bm25Retriever

CORPUS = [Passage(title=f"t{i}", text=f"word{i} shared") for i in range(12)]


def trace_of(*scores):
    return tuple(
        Draft(answer=f"a{i}", p_correct=p, raw=p) for i, p in enumerate(scores)
    )


def test_a_confident_closed_book_draft_is_returned_without_retrieval():
    decision = decide(trace_of(0.9, 0.99), Policy(threshold=0.6, budget=4))
    assert (decision.round, decision.n_generations) == (0, 1)
    assert decision.is_accepted


def test_the_first_draft_to_clear_the_threshold_wins_over_a_later_better_one():
    decision = decide(trace_of(0.1, 0.7, 0.9), Policy(threshold=0.6, budget=4))
    assert (decision.round, decision.n_generations) == (1, 2)


def test_without_an_accepted_draft_the_best_of_the_pool_is_returned_unaccepted():
    decision = decide(trace_of(0.1, 0.5, 0.3), Policy(threshold=0.6, budget=2))
    assert (decision.round, decision.n_generations) == (1, 3)
    assert not decision.is_accepted


def test_a_budget_of_one_sees_no_second_retrieval():
    decision = decide(trace_of(0.1, 0.2, 0.99), Policy(threshold=0.6, budget=1))
    assert decision.round == 1


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(1, 5),
)
def test_a_decision_never_costs_more_than_its_budget(scores, threshold, budget):
    decision = decide(trace_of(*scores), Policy(threshold=threshold, budget=budget))
    assert decision.round < decision.n_generations <= budget + 1


def test_a_page_without_news_is_skipped_for_a_deeper_one():
    assert fresh_passages([1, 2, 3, 4, 5, 6], frozenset({1, 2, 3}), 3) == (4, 5, 6)
    assert fresh_passages([1, 2, 3, 4], frozenset({1, 3}), 3) == (2,)
    assert fresh_passages([1, 2], frozenset({1, 2}), 3) == ()


class PlantedReader:
    """Right once it is shown passage `wanted`; its score says so."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.shown = []

    def closed_book(self, questions):
        return [Draft(answer="guess", p_correct=0.1, raw=0.1) for _ in questions]

    def with_context(self, rows, contexts):
        titles = [tuple(p.title for p in context) for context in contexts]
        self.shown += list(zip(rows, titles, strict=True))
        found = [any(p.title == self.wanted for p in c) for c in contexts]
        named = [("right", 0.9) if f else ("guess", 0.2) for f in found]
        return [Draft(answer=a, p_correct=p, raw=p) for a, p in named]


def test_no_passage_is_shown_twice_and_every_round_shows_something_new():
    reader = PlantedReader("none")
    config = ControllerConfig(max_budget=4, depth=12)
    traces = trace_questions(
        ["word1 shared"], reader, Bm25Retriever(CORPUS), CORPUS, config
    )
    shown = [title for _, titles in reader.shown for title in titles]
    assert len(shown) == len(set(shown)) == 12
    assert len(traces[0]) == 5


def test_a_used_up_corpus_ends_the_trace_early():
    reader = PlantedReader("none")
    config = ControllerConfig(max_budget=4, depth=12)
    traces = trace_questions(
        ["word1"], reader, Bm25Retriever(CORPUS[:4]), CORPUS[:4], config
    )
    assert len(traces[0]) == 3


def test_the_draft_is_part_of_the_next_query():
    queries = []

    class Recorder:
        def search(self, texts, depth):
            queries.append(list(texts))
            return np.arange(depth)[None, :].repeat(len(texts), axis=0)

    trace_questions(
        ["who?"],
        PlantedReader("none"),
        Recorder(),
        CORPUS,
        ControllerConfig(max_budget=1, depth=6),
    )
    assert queries == [["who? guess"]]


def test_the_search_finds_the_planted_policy_and_obeys_the_cap():
    # Closed-book scores are worthless here; the second retrieval is right.
    traces = [trace_of(0.5, 0.4, 0.9) for _ in range(10)]
    right = lambda i, answer: answer == "a2"  # noqa: E731
    free = search_policy(traces, right, ControllerConfig(max_budget=2))
    assert free.budget == 2
    assert 0.5 < free.threshold <= 0.9
    with pytest.raises(ValueError, match="no policy stays under"):
        search_policy(traces, right, ControllerConfig(max_generations=0.5))


def test_other_maps_change_probabilities_by_pass_and_nothing_else():
    found = recalibrated(trace_of(0.5, 0.4, 0.9), lambda x: x / 2, lambda x: 1 - x)
    assert [draft.p_correct for draft in found] == pytest.approx([0.25, 0.6, 0.1])
    assert [(d.answer, d.raw) for d in found] == [("a0", 0.5), ("a1", 0.4), ("a2", 0.9)]


def test_a_higher_cap_admits_a_policy_that_costs_more():
    # Only the fourth retrieval is right, and it is the fifth generation.
    traces = [trace_of(0.5, 0.4, 0.3, 0.3, 0.9) for _ in range(10)]
    right = lambda i, answer: answer == "a4"  # noqa: E731
    budgets = {}
    for cap in (4.0, 5.0):
        config = with_options(
            CONTROL_PRESETS["paper"], max_generations=cap, cross_fit=False
        )
        searched = ControllerConfig(max_generations=config.max_generations)
        budgets[cap] = search_policy(traces, right, searched).budget
    assert budgets[5.0] == 4 > budgets[4.0]


def test_the_cap_is_a_setting_of_the_run(tmp_path):
    change = partial(with_options, max_generations=4.63, cross_fit=False)
    with RunDir.open(tmp_path / "run", NewRun(preset="paper")) as run:
        assert CONTROL.settle(run, change).max_generations == 4.63
        section = json.loads((run.path / "manifest.json").read_text())["sections"]
        assert section["control"]["max_generations"] == 4.63
        assert CONTROL.settle(run).max_generations == 4.63
        other = partial(with_options, max_generations=None, cross_fit=True)
        settle_search(run, other)  # another search of the policy may follow
        settled = ControlConfig(max_generations=4.63, cross_fit=True)
        assert CONTROL.settle(run) == settled


def test_bm25_ranks_the_passage_with_the_rare_word_first():
    found = Bm25Retriever(CORPUS).search(["where is word7", "word3"], 3)
    assert found[:, 0].tolist() == [7, 3]
    assert found.shape == (2, 3)


def test_an_empty_corpus_is_refused():
    with pytest.raises(ValueError, match="at least one passage"):
        Bm25Retriever([])
