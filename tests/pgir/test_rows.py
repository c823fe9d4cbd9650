import dataclasses

import numpy as np
import pytest

from beatrice.jaxprobe.metrics import BootstrapConfig, drawn_clusters, interval_of
from beatrice.pgir.controllers.loop import (
    ControllerConfig,
    Cost,
    Done,
    DraftScore,
    Policy,
    Traced,
    TracedDraft,
    draft_rag,
    no_rag,
    pgir,
    upper_bound,
    vanilla_rag,
)
from beatrice.pgir.controllers.stage import choose_cases, control_rows, frontier
from tests.pgir.small import played, reply
from tests.records import an_example

POLICY = Policy(threshold=0.5, budget=2)


RANKED = ("no_rag", "vanilla_rag", "draft_rag", "pgir", "perfect_judge")


def trace(*drafts):
    return tuple(
        TracedDraft(answer=a, p_correct=p, raw=p, log_prob=-1.0) for a, p in drafts
    )


def traced():
    """Four questions, "yes" always right; the plain retrieval helps one of them."""
    traces = (
        trace(("yes", 0.9)),  # kept; the ranking was used up
        trace(("no", 0.2), ("yes", 0.7), ("no", 0.1)),  # asked again, and trusted
        trace(("no", 0.8), ("yes", 0.9), ("yes", 0.9)),  # trusted, and wrong
        trace(("no", 0.1), ("no", 0.3), ("yes", 0.2), ("yes", 0.9)),  # the wrong kept
    )
    examples = tuple(
        an_example(
            id=f"q{i}", dataset="world", question=f"question {i}?", golds=("yes",)
        )
        for i in range(len(traces))
    )
    return Traced(dataset="world", split="test", examples=examples, traces=traces)


PLAIN = (90, 91, 92)  # what the question alone finds


def serve_from(replies, vanilla):
    """Give the drafts of a trace, round by round of three passages."""

    def serve(call):
        if call.kind == "search":
            is_plain = call.text.endswith("?")
            return PLAIN if is_plain else range(3 * (len(replies) - 1))
        if call.passages == PLAIN:
            return reply(vanilla)
        draft = replies[call.passages[0] // 3 + 1] if call.passages else replies[0]
        if call.kind == "score":
            return DraftScore(draft.p_correct, draft.raw)
        return reply(draft.answer)

    return serve


def answers_of(loop, vanilla=("no", "no", "yes", "no")):
    """What every controller answers, its cost counted from its calls."""
    config = ControllerConfig()
    result = {name: [] for name in RANKED}
    for example, item, plain in zip(loop.examples, loop.traces, vanilla, strict=True):
        requests = example.question
        plans = (
            no_rag(requests),
            vanilla_rag(requests, config.search),
            draft_rag(requests, config),
            pgir(requests, POLICY, config),
            upper_bound(requests, POLICY, config, "judge", lambda a: a == "yes"),
        )
        for name, plan in zip(RANKED, plans, strict=True):
            value, calls = played(plan, serve_from(item, plain))
            kinds = [call.kind for call in calls]
            cost = Cost(
                generations=kinds.count("answer"),
                retrievals=kinds.count("search"),
                forwards=kinds.count("score"),
            )
            result[name].append(Done(value, cost))
    return result


def measured(metric):
    questions = traced()
    rows = control_rows(
        [questions], [answers_of(questions)], BootstrapConfig(n_resamples=20)
    )
    return {
        row.detector: row
        for row in rows
        if row.metric == metric and row.experiment == "controller"
    }


def test_the_query_is_told_apart_from_the_judgement():
    em = {name: row.value for name, row in measured("em").items()}
    assert em == {
        "no_rag": 0.25,
        "vanilla_rag": 0.25,
        "draft_rag": 0.75,  # round one of every trace, or all there is
        "pgir": 0.5,
        "perfect_judge": 1.0,
    }


def test_every_answer_that_was_generated_is_paid_for():
    cost = {name: row.value for name, row in measured("generations").items()}
    assert cost == {
        "no_rag": 1.0,
        "vanilla_rag": 1.0,
        "draft_rag": (1 + 2 + 2 + 2) / 4,
        "pgir": (1 + 2 + 1 + 3) / 4,
        "perfect_judge": (1 + 2 + 2 + 3) / 4,
    }


def test_searches_and_passes_over_written_text_are_paid_for_too():
    searches = {name: row.value for name, row in measured("retrievals").items()}
    assert searches["no_rag"] == 0 and searches["vanilla_rag"] == 1
    # Of the first question the ranking is used up, which a search has to find out.
    assert searches["pgir"] == (0 + 1 + 0 + 2) / 4
    passes = {name: row.value for name, row in measured("forwards").items()}
    assert passes["draft_rag"] == 0 and passes["pgir"] == (1 + 2 + 1 + 3) / 4


def test_intervals_hold_the_mean():
    for row in measured("em").values():
        assert row.ci_low <= row.value <= row.ci_high


def test_a_larger_budget_never_asks_less():
    points = frontier("pgir", [traced()], POLICY, ControllerConfig(max_budget=3))
    assert [point["budget"] for point in points] == [1, 2, 3]
    costs = [point["generations"] for point in points]
    assert costs == sorted(costs) and costs[-1] == pytest.approx(8 / 4)


def test_pgir_is_compared_with_each_controller_on_the_same_questions():
    first = traced()
    other = dataclasses.replace(first, dataset="held", split="ood")
    rows = control_rows(
        [first, other],
        [answers_of(first), answers_of(other, ("yes",) * 4)],
        BootstrapConfig(n_resamples=500),
    )
    paired = [r for r in rows if r.experiment == "controller_paired"]
    assert {r.detector for r in paired} == {"pgir"}
    assert {r.against for r in paired} == {"no_rag", "vanilla_rag", "draft_rag"}
    by_set = {
        r.dataset: r for r in paired if (r.metric, r.against) == ("em", "vanilla_rag")
    }
    assert {d: r.value for d, r in by_set.items()} == {
        "world": 0.25,
        "held": -0.5,
        "macro": -0.125,
    }
    for row in by_set.values():
        assert row.ci_low <= row.value <= row.ci_high and 0 < row.p_value <= 1
    config = BootstrapConfig(n_resamples=500)
    gain = np.array([1, 1, -1, 0])  # of pgir over plain retrieval, question by question
    means = [gain[drawn].mean() for drawn in drawn_clusters(4, config)]
    row = by_set["world"]
    assert (row.ci_low, row.ci_high) == pytest.approx(interval_of(np.array(means)))


def test_cases_are_taken_from_every_set_by_one_rule():
    given = traced()
    others = [
        dataclasses.replace(given, dataset=d, split="ood") for d in ("nq", "popqa")
    ]
    result = choose_cases([given, *others], POLICY)
    shown = [(c.traced.dataset, c.example_index, c.action) for c in result]
    assert shown == [
        ("world", 0, "Accept, no retrieval"),
        ("nq", 1, "Retrieve, then trust"),
        ("popqa", 1, "Retrieve, then trust"),
        ("world", 3, "Retrieve; all flagged, none trusted"),
        ("nq", 2, "Trusted, and wrong"),
    ]  # none of the questions was trusted in a second round
    alone = [c.example_index for c in choose_cases([given], POLICY)]
    assert alone == [0, 1, 3, 2]
