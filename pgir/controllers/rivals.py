"""What every controller answers, at what cost, and how good that is.

All of them are read off the traces; see `pgir.controllers.traces`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from extract.label.verdicts import exact_match, token_f1
from extract.records import Example
from extract.run.results import CONTROLLERS, DIFFERENCE, MACRO, ResultRow
from jaxprobe.evaluation import difference_row
from jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from pgir.controllers.policy import ControllerConfig, Policy, Trace, Traced, decide

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


Policies = Mapping[str, Policy]  # "pgir", and others that were searched beside it


def _answers(traced: Traced, policies: Policies) -> dict[str, list[Answered]]:
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
        **{
            name: [_by_pgir(t, policy) for t in traces]
            for name, policy in policies.items()
        },
        "perfect_judge": [
            _by_perfect_judge(trace, policies["pgir"], example.golds)
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


class _Drawn(NamedTuple):
    """A controller's mean of one metric on one set, with its resamples."""

    value: float
    draws: np.ndarray  # [n_resamples]
    n: int

    def row(self, **fields: Any) -> ResultRow:
        """Return the row of the mean."""
        low, high = interval_of(self.draws)
        return ResultRow(
            setting="both",
            value=self.value,
            ci_low=low,
            ci_high=high,
            n=self.n,
            **fields,
        )

    def minus(self, other: "_Drawn", **fields: Any) -> ResultRow:
        """Return the row of the difference, resampled over the same questions."""
        fields["metric"] += DIFFERENCE
        draws = self.draws - other.draws
        value = self.value - other.value
        return difference_row(value, draws, setting="both", n=self.n, **fields)


Drawn = dict[tuple[str, str], _Drawn]  # by controller and metric


def _drawn(one: Traced, policies: Policies, bootstrap: BootstrapConfig) -> Drawn:
    """Measure every controller on a set."""
    measured = {
        (name, metric): values
        for name, answered in _answers(one, policies).items()
        for metric, values in _measures(one.examples, answered).items()
    }
    every = np.stack(list(measured.values()))
    ids = np.array([example.id for example in one.examples])
    parts = [every @ weights for weights in resamples(ids, bootstrap)]
    draws = np.concatenate(parts, axis=1) / len(ids)
    return {
        key: _Drawn(float(values.mean()), own, len(ids))
        for (key, values), own in zip(measured.items(), draws, strict=True)
    }


def _macro(sets: Sequence[Drawn]) -> Drawn:
    """Return the unweighted mean over sets, each resampled by itself."""
    return {
        key: _Drawn(
            float(np.mean([one[key].value for one in sets])),
            np.mean([one[key].draws for one in sets], axis=0),
            sum(one[key].n for one in sets),
        )
        for key in sets[0]
    }


def _rows(drawn: Drawn, experiment: str, **place: str) -> list[ResultRow]:
    """Return the rows of all controllers, then how much more PGIR has than each."""
    rows = [
        one.row(experiment=experiment, detector=name, metric=metric, **place)
        for (name, metric), one in drawn.items()
    ]
    place |= {"experiment": "controller_paired", "detector": "pgir"}
    return rows + [
        drawn["pgir", metric].minus(one, against=name, metric=metric, **place)
        for (name, metric), one in drawn.items()
        if name != "pgir" and name in CONTROLLERS and metric != "generations"
    ]


def control_rows(
    traced: Sequence[Traced], policies: Policies, bootstrap: BootstrapConfig
) -> list[ResultRow]:
    """Return exact match, F1 and generations of every controller.

    On every set, and as the unweighted mean over the evaluated sets (experiment
    `controller_macro`), whose interval resamples the questions of each set. How much
    more PGIR has than each other controller, on the same resamples, is the experiment
    `controller_paired`.
    """
    rows, evaluated = [], []
    for one in traced:
        drawn = _drawn(one, policies, bootstrap)
        rows += _rows(drawn, "controller", dataset=one.dataset, split=one.split)
        if one.split != "validation":
            evaluated.append(drawn)
    if evaluated:
        place = {"dataset": MACRO, "split": "evaluated"}
        rows += _rows(_macro(evaluated), "controller_macro", **place)
    return rows


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
