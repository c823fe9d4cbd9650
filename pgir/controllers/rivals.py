"""What every controller answers, at what cost, and how good that is.

All of them are read off the traces; see `pgir.controllers.traces`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from extract.label.verdicts import exact_match, token_f1
from extract.records import Example
from extract.run.results import ResultRow
from jaxprobe.metrics import BootstrapConfig, cluster_weights, interval_of
from pgir.controllers.policy import ControllerConfig, Draft, Policy, Trace, decide
from pgir.controllers.traces import Traced


def _pgir_answers(traced: Traced, policy: Policy) -> tuple[list[str], list[int]]:
    decisions = [decide(trace, policy) for trace in traced.traces]
    answers = [
        trace[decision.round].answer
        for trace, decision in zip(traced.traces, decisions, strict=True)
    ]
    return answers, [decision.n_generations for decision in decisions]


def _after_one_round(trace: Trace) -> Draft:
    """Return the draft of the first retrieval, or the only one there is."""
    return trace[:2][-1]


def _judged_rightly(example: Example, trace: Trace, policy: Policy) -> tuple[str, int]:
    """Return the first right answer within the budget, else the last, and its cost."""
    pool = trace[: policy.budget + 1]
    for number, draft in enumerate(pool, start=1):
        if exact_match(draft.answer, example.golds):
            return draft.answer, number
    return pool[-1].answer, len(pool)


def _answers(
    traced: Traced, policy: Policy
) -> dict[str, tuple[Sequence[str], Sequence[int]]]:
    """Return every controller's answers and generations, `[n_examples]` each.

    `draft_rag` asks as PGIR asks and judges nothing: what it gains over `vanilla_rag`
    is the query's, what PGIR gains over it is the detector's.
    """
    drafts = [trace[0].answer for trace in traced.traces]
    single = [1] * len(drafts)
    asked = [_after_one_round(trace).answer for trace in traced.traces]
    judged = [
        _judged_rightly(example, trace, policy)
        for example, trace in zip(traced.examples, traced.traces, strict=True)
    ]
    return {
        "no_rag": (drafts, single),
        "vanilla_rag": (traced.vanilla, single),
        "draft_rag": (asked, [len(trace[:2]) for trace in traced.traces]),
        "pgir": _pgir_answers(traced, policy),
        "perfect_judge": ([a for a, _ in judged], [n for _, n in judged]),
    }


def _quality(examples: Sequence[Example], answers: Sequence[str]) -> np.ndarray:
    """Return exact match and F1 per question, `[2, n_examples]`."""
    return np.array(
        [
            (exact_match(answer, example.golds), token_f1(answer, example.golds))
            for example, answer in zip(examples, answers, strict=True)
        ],
        dtype=np.float64,
    ).T


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
        for name, (answers, cost) in _answers(one, policy).items():
            quality = _quality(one.examples, answers)
            measures = {
                "em": quality[0],
                "f1": quality[1],
                "generations": np.asarray(cost, dtype=np.float64),
            }
            for metric, values in measures.items():
                draws = values @ weights / len(values)
                row = _row(
                    "controller", name, metric, values.mean(), draws, len(values)
                )
                row = msgspec.structs.replace(row, dataset=one.dataset, split=one.split)
                rows.append(row)
                if one.split != "validation":
                    evaluated.setdefault((name, metric), []).append((row, draws))
    for (name, metric), found in evaluated.items():
        value = np.mean([row.value for row, _ in found])
        draws = np.mean([draws for _, draws in found], axis=0)
        n = sum(row.n for row, _ in found)
        rows.append(_row("controller_macro", name, metric, value, draws, n))
    return rows


def _row(
    experiment: str, name: str, metric: str, value: float, draws: np.ndarray, n: int
) -> ResultRow:
    """Return a mean over sets with its interval; of one set, say which."""
    low, high = interval_of(draws)
    return ResultRow(
        experiment=experiment,
        detector=name,
        setting="both",
        dataset="macro",
        split="evaluated",
        metric=metric,
        value=float(value),
        ci_low=low,
        ci_high=high,
        n=n,
    )


def frontier(
    traced: Sequence[Traced], policy: Policy, config: ControllerConfig
) -> list[dict[str, Any]]:
    """Return quality against cost for every budget at the chosen threshold."""
    points = []
    for one in traced:
        if one.split == "validation":
            continue
        for budget in range(1, config.max_budget + 1):
            answers, cost = _pgir_answers(
                one, Policy(threshold=policy.threshold, budget=budget)
            )
            quality = _quality(one.examples, answers).mean(axis=1)
            points.append(
                {
                    "dataset": one.dataset,
                    "budget": budget,
                    "em": float(quality[0]),
                    "f1": float(quality[1]),
                    "generations": float(np.mean(cost)),
                }
            )
    return points
