"""What every controller answered, at what cost, and how good that is, as rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.label.labels import exact_match, token_f1
from beatrice.extract.records import Example
from beatrice.extract.run.rows import DIFFERENCE, MACRO, ResultRow
from beatrice.jaxprobe.evaluation import difference_row
from beatrice.jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from beatrice.pgir.controllers.calls import COUNTED, Done
from beatrice.pgir.controllers.policy import (
    ControllerConfig,
    Policy,
    QuestionSet,
    Traced,
    decide,
)
from beatrice.pgir.controllers.titles import CONTROLLERS

QUALITY = ("em", "f1")
# Whose gain over every other controller is a row, and of which experiment.
PAIRED = {"pgir": "controller_paired", "pgir_query": "controller_query_paired"}
Answers = Mapping[str, Sequence[Done]]  # by controller, one per question


def _quality(examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    pairs = [(text, e.golds) for e, text in zip(examples, texts, strict=True)]
    return {
        "em": np.array([exact_match(*pair) for pair in pairs], np.float64),
        "f1": np.array([token_f1(*pair) for pair in pairs], np.float64),
    }


def measures(
    examples: Sequence[Example], answers: Sequence[Done]
) -> dict[str, np.ndarray]:
    """Return exact match, F1 and what was spent per question, `[n_examples]` each."""
    found = _quality(examples, [done.value for done in answers])
    for name in COUNTED:
        own = [getattr(done.cost, name) for done in answers]
        found[name] = np.array(own, np.float64)
    return found


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


def _drawn(one: QuestionSet, answers: Answers, bootstrap: BootstrapConfig) -> Drawn:
    """Measure every controller on a set."""
    measured = {
        (name, metric): values
        for name, answered in answers.items()
        for metric, values in measures(one.examples, answered).items()
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
    for ours, paired in PAIRED.items():
        place |= {"experiment": paired, "detector": ours}
        rows += [
            drawn[ours, metric].minus(one, against=name, metric=metric, **place)
            for (name, metric), one in drawn.items()
            if (ours, metric) in drawn
            and name != ours
            and name in CONTROLLERS
            and metric in QUALITY
        ]
    return rows


def control_rows(
    sets: Sequence[QuestionSet], answers: Sequence[Answers], bootstrap: BootstrapConfig
) -> list[ResultRow]:
    """Return exact match, F1 and cost of every controller.

    On every set, and as the unweighted mean over the evaluated sets (experiment
    `controller_macro`), whose interval resamples the questions of each set. How much
    more PGIR has than each other controller, on the same resamples, is the experiment
    `controller_paired`, and of PGIR with the query that validation chose
    `controller_query_paired`.

    Args:
      sets: of questions.
      answers: of every controller to each set.
      bootstrap: how often questions are resampled.
    """
    rows, evaluated = [], []
    for one, own in zip(sets, answers, strict=True):
        drawn = _drawn(one, own, bootstrap)
        rows += _rows(drawn, "controller", dataset=one.dataset, split=one.split)
        if one.split != "validation":
            evaluated.append(drawn)
    if evaluated:
        place = {"dataset": MACRO, "split": "evaluated"}
        rows += _rows(_macro(evaluated), "controller_macro", **place)
    return rows


def seconds_rows(
    sets: Sequence[QuestionSet], answers: Sequence[Answers]
) -> list[ResultRow]:
    """Return the mean seconds of a question, of every controller.

    The unweighted mean over evaluated sets. Kept apart from the other rows, which are
    the same wherever they are measured.
    """
    pairs = zip(sets, answers, strict=True)
    own = [one for asked, one in pairs if asked.split != "validation"]
    return [
        ResultRow(
            experiment="controller_macro",
            detector=name,
            setting="both",
            dataset=MACRO,
            split="evaluated",
            metric="seconds",
            value=float(
                np.mean([np.mean([d.cost.seconds for d in one[name]]) for one in own])
            ),
            n=sum(len(one[name]) for one in own),
        )
        for name in (own[0] if own else ())
    ]


def frontier(
    name: str, traced: Sequence[Traced], policy: Policy, config: ControllerConfig
) -> list[dict[str, Any]]:
    """Return quality against cost for every budget at the chosen threshold.

    Args:
      name: of the controller.
      traced: to the full budget.
      policy: its threshold is kept.
      config: what was searched.
    """
    points = []
    for one in traced:
        if one.split == "validation":
            continue
        for budget in range(1, config.max_budget + 1):
            limited = Policy(threshold=policy.threshold, budget=budget)
            decisions = [decide(trace, limited) for trace in one.traces]
            pairs = zip(one.traces, decisions, strict=True)
            texts = [trace[decision.round].answer for trace, decision in pairs]
            found = _quality(one.examples, texts)
            found["generations"] = [d.n_generations for d in decisions]
            means = {name: float(np.mean(values)) for name, values in found.items()}
            place = {"controller": name, "dataset": one.dataset, "budget": budget}
            points.append(place | means)
    return points
