"""What every controller answers, at what cost, and how good that is.

All of them are read off the traces; see `pgir.controllers.traces`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from extract.label.verdicts import exact_match, token_f1
from extract.records import Example
from extract.run.results import ResultRow
from jaxprobe.metrics import BootstrapConfig, cluster_weights, interval_of
from pgir.controllers.policy import ControllerConfig, Policy, Trace, decide
from pgir.controllers.traces import Traced

Answered = tuple[str, int]  # the answer to a question, and how many were generated


def _by_pgir(trace: Trace, policy: Policy) -> Answered:
    decision = decide(trace, policy)
    return trace[decision.round].answer, decision.n_generations


def _by_perfect_judge(trace: Trace, policy: Policy, golds: Sequence[str]) -> Answered:
    """Return the first right answer within the budget, else the last."""
    pool = trace[: policy.budget + 1]
    for n_generations, draft in enumerate(pool, start=1):
        if exact_match(draft.answer, golds):
            return draft.answer, n_generations
    return pool[-1].answer, len(pool)


def _answers(traced: Traced, policy: Policy) -> dict[str, list[Answered]]:
    """Return what every controller answers to every question.

    `draft_rag` asks as PGIR asks and judges nothing: what it gains over `vanilla_rag`
    is the query's, what PGIR gains over it is the detector's.
    """
    traces = traced.traces
    return {
        "no_rag": [(trace[0].answer, 1) for trace in traces],
        "vanilla_rag": [(answer, 1) for answer in traced.vanilla],
        # A trace has one draft alone where retrieval found nothing.
        "draft_rag": [(trace[:2][-1].answer, len(trace[:2])) for trace in traces],
        "pgir": [_by_pgir(trace, policy) for trace in traces],
        "perfect_judge": [
            _by_perfect_judge(trace, policy, example.golds)
            for trace, example in zip(traces, traced.examples, strict=True)
        ],
    }


def _measures(
    examples: Sequence[Example], answered: Sequence[Answered]
) -> dict[str, np.ndarray]:
    """Return exact match, F1 and generations per question, `[n_examples]` each."""
    pairs = [(a, e.golds) for e, (a, _) in zip(examples, answered, strict=True)]
    return {
        "em": np.array([exact_match(*pair) for pair in pairs], np.float64),
        "f1": np.array([token_f1(*pair) for pair in pairs], np.float64),
        "generations": np.array([n for _, n in answered], np.float64),
    }


def control_rows(
    traced: Sequence[Traced], policy: Policy, bootstrap: BootstrapConfig
) -> list[ResultRow]:
    """Return exact match, F1 and generations of every controller.

    On every set, and as the unweighted mean over the evaluated sets (experiment
    `controller_macro`), whose interval resamples the questions of each set.
    """
    rows = []
    evaluated: dict[tuple[str, str], list[tuple[ResultRow, np.ndarray]]] = {}
    for one in traced:
        ids = np.array([example.id for example in one.examples])
        weights = cluster_weights(ids, bootstrap)
        for name, answered in _answers(one, policy).items():
            for metric, values in _measures(one.examples, answered).items():
                draws = values @ weights / len(values)
                row = _row(
                    draws,
                    experiment="controller",
                    detector=name,
                    dataset=one.dataset,
                    split=one.split,
                    metric=metric,
                    value=float(values.mean()),
                    n=len(values),
                )
                rows.append(row)
                if one.split != "validation":
                    evaluated.setdefault((name, metric), []).append((row, draws))
    for (name, metric), parts in evaluated.items():
        rows.append(
            _row(
                np.mean([draws for _, draws in parts], axis=0),
                experiment="controller_macro",
                detector=name,
                dataset="macro",
                split="evaluated",
                metric=metric,
                value=float(np.mean([row.value for row, _ in parts])),
                n=sum(row.n for row, _ in parts),
            )
        )
    return rows


def _row(draws: np.ndarray, **fields: Any) -> ResultRow:
    """Return a row with the interval of its resampled values, `[n_resamples]`."""
    low, high = interval_of(draws)
    return ResultRow(setting="both", ci_low=low, ci_high=high, **fields)


def frontier(
    traced: Sequence[Traced], policy: Policy, config: ControllerConfig
) -> list[dict[str, Any]]:
    """Return quality against cost for every budget at the chosen threshold."""
    points = []
    for one in traced:
        if one.split == "validation":
            continue
        for budget in range(1, config.max_budget + 1):
            limited = Policy(threshold=policy.threshold, budget=budget)
            answered = [_by_pgir(trace, limited) for trace in one.traces]
            measures = _measures(one.examples, answered)
            means = {name: float(values.mean()) for name, values in measures.items()}
            points.append({"dataset": one.dataset, "budget": budget, **means})
    return points
