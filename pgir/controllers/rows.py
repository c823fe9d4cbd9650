"""What every controller answered, at what cost, and how good that is, as rows.

And six questions of the run, with what the model showed at each token of their drafts.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.label.labels import exact_match, token_f1
from beatrice.extract.records import Example
from beatrice.extract.run.rows import MACRO, ResultRow
from beatrice.jaxprobe.evaluation import difference_row
from beatrice.jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from beatrice.pgir.controllers import CONTROLLERS
from beatrice.pgir.controllers.loop import (
    COUNTED,
    Call,
    ControllerConfig,
    Decision,
    Done,
    Policy,
    QuestionSet,
    Traced,
    TracedDraft,
    decide,
)
from beatrice.pgir.controllers.waves import Answering
from beatrice.pgir.score_files import shown_tokens

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
    columns = _quality(examples, [done.value for done in answers])
    for name in COUNTED:
        counts = [getattr(done.cost, name) for done in answers]
        columns[name] = np.array(counts, np.float64)
    return columns


class _Drawn(NamedTuple):
    """A controller's mean of one metric on one set, with its resamples."""

    value: float
    draws: np.ndarray  # [n_resamples]
    n: int

    def row(self, **fields: Any) -> ResultRow:
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
        draws = self.draws - other.draws
        value = self.value - other.value
        return difference_row(value, draws, setting="both", n=self.n, **fields)


Drawn = dict[tuple[str, str], _Drawn]  # by controller and metric


def _drawn(
    questions: QuestionSet, answers: Answers, bootstrap: BootstrapConfig
) -> Drawn:
    measured = {
        (name, metric): values
        for name, answered in answers.items()
        for metric, values in measures(questions.examples, answered).items()
    }
    every = np.stack(list(measured.values()))
    ids = np.array([example.id for example in questions.examples])
    parts = [every @ weights for weights in resamples(ids, bootstrap)]
    draws = np.concatenate(parts, axis=1) / len(ids)
    return {
        key: _Drawn(float(values.mean()), drawn, len(ids))
        for (key, values), drawn in zip(measured.items(), draws, strict=True)
    }


def _macro(sets: Sequence[Drawn]) -> Drawn:
    """Return the unweighted mean over sets, each resampled by itself."""
    return {
        key: _Drawn(
            float(np.mean([drawn[key].value for drawn in sets])),
            np.mean([drawn[key].draws for drawn in sets], axis=0),
            sum(drawn[key].n for drawn in sets),
        )
        for key in sets[0]
    }


def _rows(drawn: Drawn, experiment: str, **fields: str) -> list[ResultRow]:
    """Return the rows of all controllers, then how much more PGIR has than each."""
    rows = [
        draws.row(experiment=experiment, detector=name, metric=metric, **fields)
        for (name, metric), draws in drawn.items()
    ]
    for ours, paired in PAIRED.items():
        fields |= {"experiment": paired, "detector": ours}
        rows += [
            drawn[ours, metric].minus(draws, against=name, metric=metric, **fields)
            for (name, metric), draws in drawn.items()
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
    """
    rows, evaluated = [], []
    for questions, answers_of_set in zip(sets, answers, strict=True):
        drawn = _drawn(questions, answers_of_set, bootstrap)
        rows += _rows(
            drawn, "controller", dataset=questions.dataset, split=questions.split
        )
        if questions.split != "validation":
            evaluated.append(drawn)
    if evaluated:
        macro = {"dataset": MACRO, "split": "evaluated"}
        rows += _rows(_macro(evaluated), "controller_macro", **macro)
    return rows


def _mean_seconds(answers: Sequence[Done]) -> float:
    return float(np.mean([done.cost.seconds for done in answers]))


def seconds_rows(
    sets: Sequence[QuestionSet], answers: Sequence[Answers]
) -> list[ResultRow]:
    """Return the mean seconds of a question, of every controller.

    The unweighted mean over evaluated sets. Kept apart from the other rows, which are
    the same wherever they are measured.
    """
    pairs = zip(sets, answers, strict=True)
    evaluated = [of_set for each, of_set in pairs if each.split != "validation"]
    return [
        ResultRow(
            experiment="controller_macro",
            detector=name,
            setting="both",
            dataset=MACRO,
            split="evaluated",
            metric="seconds",
            value=float(np.mean([_mean_seconds(of_set[name]) for of_set in evaluated])),
            n=sum(len(of_set[name]) for of_set in evaluated),
        )
        for name in (evaluated[0] if evaluated else ())
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
    for traced_set in traced:
        if traced_set.split == "validation":
            continue
        for budget in range(1, config.max_budget + 1):
            limited = Policy(threshold=policy.threshold, budget=budget)
            decisions = [decide(trace, limited) for trace in traced_set.traces]
            pairs = zip(traced_set.traces, decisions, strict=True)
            texts = [trace[decision.round].answer for trace, decision in pairs]
            columns = _quality(traced_set.examples, texts)
            columns["generations"] = np.array([d.n_generations for d in decisions])
            means = {metric: float(np.mean(x)) for metric, x in columns.items()}
            keys = {"controller": name, "dataset": traced_set.dataset, "budget": budget}
            points.append(keys | means)
    return points


Match = Callable[[Decision, bool, bool], bool]  # decision, draft right, final right

# What a reader should see, successes and failures alike.
KINDS: tuple[tuple[str, str, int, Match], ...] = (
    (
        "Accept, no retrieval",
        "The closed-book draft cleared the threshold and is right.",
        1,
        lambda d, first, last: d.round == 0 and d.is_accepted and last,
    ),
    (
        "Retrieve, then trust",
        "The draft was wrong and scored low; the grounded answer is right.",
        2,
        lambda d, first, last: d.round > 0 and d.is_accepted and last and not first,
    ),
    (
        "Retrieve again, then trust",
        "It took more than one round to find an answer that is trusted, and right.",
        1,
        lambda d, first, last: d.round > 1 and d.is_accepted and last,
    ),
    (
        "Retrieve; all flagged, none trusted",
        "No draft cleared the threshold; the best is returned without trust.",
        1,
        lambda d, first, last: not d.is_accepted and not last,
    ),
    (
        "Trusted, and wrong",
        "A failure: the accepted answer is wrong.",
        1,
        lambda d, first, last: d.is_accepted and not last,
    ),
)


def _shown_draft(
    answering: Answering, example: Example, draft: TracedDraft
) -> dict[str, Any]:
    """Return a draft as the report shows it; it is written again for its signals."""
    probed = answering.probed
    request, _ = answering.request(Call("answer", example.question, draft.passages))
    (answer,), reading = probed.answer_and_read([request])
    (signals,) = reading.signals
    return {
        "setting": request.setting,
        "answer": answer.text,
        "p_correct": draft.p_correct,
        "correct": exact_match(answer.text, example.golds),
        "passages": [answering.passages[p].text for p in draft.passages],
        "tokens": shown_tokens(
            probed.backbone.tokenizer.decode, answer, signals.prob, signals.first_token
        ),
    }


class Chosen(NamedTuple):
    """A question that is shown: its set, its place there, and what happened."""

    traced: Traced
    example_index: int
    action: str
    verdict: str
    decision: Decision


def choose_cases(traced: Sequence[Traced], policy: Policy) -> list[Chosen]:
    """Return questions that show each kind of outcome, from all sets.

    For each case, in the order of KINDS: the first question of its kind in the set that
    has been shown least, of equals the earlier one. Nobody picks.
    """
    outcomes: list[list[tuple[Decision, bool, bool]]] = []
    for traced_set in traced:
        outcomes.append([])
        for trace, example in zip(traced_set.traces, traced_set.examples, strict=True):
            decision = decide(trace, policy)
            first, last = (
                exact_match(trace[r].answer, example.golds) for r in (0, decision.round)
            )
            outcomes[-1].append((decision, first, last))
    shown: dict[tuple[int, int], Chosen] = {}
    for action, verdict, n_wanted, matches in KINDS:
        for _ in range(n_wanted):
            n_shown = collections.Counter(set_index for set_index, _ in shown)
            fitting = (
                (n_shown[s], s, i)
                for s, values in enumerate(outcomes)
                for i, outcome in enumerate(values)
                if (s, i) not in shown and matches(*outcome)
            )
            best = min(fitting, default=None)
            if best is not None:
                _, s, i = best
                decision = outcomes[s][i][0]
                shown[s, i] = Chosen(traced[s], i, action, verdict, decision)
    return list(shown.values())


def make_cases(
    answering: Answering, traced: Sequence[Traced], policy: Policy
) -> list[dict[str, Any]]:
    """Return the case studies of the evaluated sets as the report shows them."""
    cases = []
    for case in choose_cases(traced, policy):
        example, trace = (
            case.traced.examples[case.example_index],
            case.traced.traces[case.example_index],
        )
        drafts = [trace[r] for r in sorted({0, case.decision.round})]
        cases.append(
            {
                "dataset": example.dataset,
                "question": example.question,
                "golds": list(example.golds[:2]),
                "action": case.action,
                "verdict": case.verdict,
                "drafts": [_shown_draft(answering, example, d) for d in drafts],
            }
        )
    return cases
