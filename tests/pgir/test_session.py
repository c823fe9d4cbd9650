"""Settings are chosen on validation questions under one cap, and on nothing else."""

import pytest

from beatrice.extract.records import Passage
from beatrice.pgir.controllers.loop import (
    ControllerConfig,
    DraftScore,
    QuestionSet,
    detector_judge,
    no_rag,
    vanilla_rag,
)
from beatrice.pgir.controllers.session import (
    Session,
    all_rivals,
    question_sets,
    training_questions,
)
from beatrice.pgir.controllers.waves import CallJournal, Failed, Waves
from tests.pgir.small import reply
from tests.pgir.test_waves import PRICES
from tests.records import an_example

PASSAGES = (Passage(title="t", text="x"),)


def serve(call):
    """The passage 7 holds every answer; the question alone finds it, a draft does not.

    The score knows: .9 for an answer out of it, .3 for any other.
    """
    if call.kind == "search":
        return (7, 8, 9) if call.text.endswith("?") else (1, 2, 3)
    is_right = 7 in call.passages
    if call.kind == "score":
        return DraftScore(0.9 if is_right else 0.3, 0.5)
    return reply("yes" if is_right else "no")


class Served:
    """Serves everything at once by `serve`."""

    def __init__(self, kind, give=serve):
        self.kind, self.give = kind, give

    def batches(self, calls, done):
        yield [(i, self.give(call)) for i, call in enumerate(calls)]

    def cost(self, call, value):
        return PRICES[self.kind]


def example(i, split="validation", dataset="world", **fields):
    usual = dict(id=f"{dataset}-{split}-{i}", dataset=dataset, split=split)
    usual |= dict(question=f"{split} {i}?", golds=("yes",), passages=PASSAGES)
    return an_example(**usual | fields)


def session(tmp_path, test_golds=("yes",), **config):
    sets = [
        QuestionSet(
            dataset="world",
            split=split,
            examples=tuple(example(i, split, golds=golds) for i in range(4)),
        )
        for split, golds in (("validation", ("yes",)), ("test", test_golds))
    ]
    services = {kind: Served(kind) for kind in PRICES}
    return Session(
        waves=Waves(services, CallJournal(tmp_path / "calls.jsonl", "one")),
        sets=sets,
        training=tuple(example(i, "train") for i in range(3)),
        config=ControllerConfig(max_budget=2, **config),
        answering=None,
        encoder=lambda: None,
        stores=lambda: {},
    )


def entered(session):
    """Everything that is tuned, on the session's questions."""
    traced = session.trace("trace", session.config)
    session.run_pgir("pgir", traced, session.config)
    session.run_pgir_query("pgir", detector_judge, show_all=True)
    shared = session.config.search
    plans = {"none": no_rag, "once": lambda q: vanilla_rag(q, shared)}
    session.tune("rival", ("none", "once"), lambda s, e: plans[s](e.question))
    return session.chosen


def test_the_planted_setting_and_the_planted_query_are_found(tmp_path):
    given = session(tmp_path)
    chosen = entered(given)
    assert chosen["rival"] == "once"
    assert chosen["pgir_query"]["query"] == "question"
    assert 0.3 < chosen["pgir_query"]["threshold"] <= 0.9
    answers = given.answers[1]
    assert {done.value for done in answers["pgir"]} == {"no"}  # the wrong draft led
    assert {done.value for done in answers["pgir_query"]} == {"yes"}
    assert {done.value for done in answers["pgir:question_first"]} == {"yes"}


def test_what_is_right_on_test_changes_nothing_that_is_chosen(tmp_path):
    (tmp_path / "other").mkdir()
    first, other = session(tmp_path), session(tmp_path / "other", test_golds=("no",))
    assert entered(first) == entered(other)


def test_a_cap_keeps_out_what_costs_more(tmp_path):
    free = entered(session(tmp_path))
    (tmp_path / "other").mkdir()
    capped = entered(session(tmp_path / "other", max_generations=1.0))
    assert free["pgir_query"]["query"] == "question"
    assert capped["pgir_query"]["threshold"] <= 0.3  # every first draft is returned


def test_training_outcomes_are_those_of_training_questions(tmp_path):
    given = session(tmp_path)
    without, once = given.outcomes
    assert [done.value for done in without] == ["no"] * 3
    assert [done.value for done in once] == ["yes"] * 3
    assert all("train" in e.question for e in given.training)


def test_a_search_that_fails_is_named_and_ends_the_stage(tmp_path):
    given = session(tmp_path)
    given.waves.services["search"] = Served("search", lambda call: Failed("timed out"))
    shared = given.config.search
    with pytest.raises(ConnectionError, match="8 of 8 questions.*timed out.*again"):
        given.answer("vanilla_rag", lambda e: vanilla_rag(e.question, shared))


def test_every_rival_is_found_by_its_file_in_the_order_of_its_publication():
    names = ["perplexity_rag", "skr", "adaptive_rag", "dragin", "seakr", "probing_rag"]
    assert list(all_rivals()) == names


def test_sets_without_passages_are_left_out_and_a_limit_holds_for_each():
    examples = [example(i) for i in range(5)]
    examples += [example(i, "ood", dataset="bare", passages=()) for i in range(5)]
    examples += [example(i, "test", dataset="held") for i in range(5)]
    result = question_sets(examples, 2)
    assert [(item.dataset, len(item.examples)) for item in result] == [
        ("world", 2),
        ("held", 2),
    ]


def test_training_questions_are_taken_from_every_set_alike():
    examples = [example(i, "train", dataset=d) for d in ("a", "b") for i in range(9)]
    examples += [example(i, "train", dataset="c", passages=()) for i in range(9)]
    result = training_questions(examples, 6)
    assert [e.dataset for e in result] == ["a"] * 3 + ["b"] * 3
