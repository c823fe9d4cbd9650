"""The questions of a run, and every controller run on them.

Thresholds of all controllers are chosen on validation questions, by exact match under
one cap on generations, and used unchanged everywhere else. What is trained learns from
this backbone's own outcomes on training questions. Nothing is fitted on test.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from extract.label.verdicts import exact_match
from extract.records import Example
from extract.run.console import Update
from pgir.controllers.calls import Done, Plan, best_under_cap, no_rag, vanilla_rag
from pgir.controllers.policy import (
    ControllerConfig,
    Judge,
    Policy,
    QuestionSet,
    Trace,
    Traced,
    beatrice,
    decide,
    drafts,
    pgir,
    search_policy,
)
from pgir.controllers.waves import Waves

Recalibrate = Callable[[Example, Trace], Trace]
PlanOf = Callable[[Example], Plan[Any]]
# What PGIR may search with, see `ControllerConfig`; the paper's is the first.
QUERIES: dict[str, dict[str, Any]] = {
    "draft": {},
    "question": {"query": "question"},
    "question_first": {"query": "question_first"},
    **{f"sure_draft_{s}": {"query": "sure_draft", "sure": s} for s in (0.3, 0.5, 0.7)},
    "fused": {"query": "fused"},
    "both": {"query": "both"},
}


def question_sets(examples: Sequence[Example], limit: int | None) -> list[QuestionSet]:
    """Return the evaluated sets that have passages, in file order, validation first.

    Of a set without, the corpus that is searched has none either.

    Args:
      examples: of the run, of all splits.
      limit: most questions of each set; None for all.
    """
    sets: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        if example.split != "train":
            sets.setdefault((example.dataset, example.split), []).append(example)
    return [
        QuestionSet(dataset=dataset, split=split, examples=tuple(own[:limit]))
        for (dataset, split), own in sets.items()
        if any(example.passages for example in own)
    ]


def training_questions(examples: Sequence[Example], limit: int) -> list[Example]:
    """Return the first training questions that have passages, as many of each set.

    Args:
      examples: of the run, of all splits.
      limit: how many at most, of all sets together.
    """
    sets: dict[str, list[Example]] = {}
    for example in examples:
        if example.split == "train" and example.passages:
            sets.setdefault(example.dataset, []).append(example)
    share = -(-limit // max(1, len(sets)))
    return [example for own in sets.values() for example in own[:share]][:limit]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rival:
    """A controller with a setting that is chosen on validation.

    Attributes:
      grid: settings tried, the published one first; the first of equals is taken.
      plan: what it does with a question under a setting.
    """

    grid: Sequence[Any]
    plan: Callable[[Any, Example], Plan[str]]


@dataclasses.dataclass
class Session:
    """Controllers on questions.

    Attributes:
      waves: runs them.
      sets: validation and evaluated sets.
      training: questions that rivals may learn from.
      config: how far PGIR searches; others share its k, depth and cap.
      update: told how many questions were put to a controller, and how many will be.
      total: the latter, as far as it is known.
      answers: by set's place and controller, what it returned.
      chosen: the setting of every controller that was tuned.
    """

    waves: Waves
    sets: Sequence[QuestionSet]
    training: Sequence[Example]
    config: ControllerConfig
    update: Update
    total: int = 0
    n_done: int = 0
    answers: list[dict[str, list[Done]]] = dataclasses.field(default_factory=list)
    chosen: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with no answers."""
        self.answers = [{} for _ in self.sets]

    def run(
        self, label: str, examples: Sequence[Example], plan_of: PlanOf
    ) -> list[Done]:
        """Run a controller on questions.

        Args:
          label: its own; it names the waves.
          examples: the questions.
          plan_of: what it does with one.

        Raises:
          ConnectionError: calls failed; they are made again by the next run, and
            everything else is kept.
        """
        before = self.n_done
        self.total = max(self.total, before + len(examples))

        def on_done(n: int) -> None:
            self.n_done = before + n
            self.update(self.n_done, self.total)

        found = self.waves.run(label, [plan_of(e) for e in examples], on_done)
        if None in found:
            call, reason = next(iter(self.waves.failed.items()))
            raise ConnectionError(
                f"{found.count(None)} of {len(found)} questions could not be done "
                f"({label}): {call.kind} of {call.text[:60]!r} failed ({reason}); run "
                "the same line again, which tries these and keeps everything else"
            )
        return found

    @property
    def validation(self) -> list[Example]:
        """Return the validation questions of all sets together."""
        return [example for one in self.validation_sets for example in one.examples]

    def answer(self, name: str, plan_of: PlanOf) -> None:
        """Run a controller on every set, and keep what it answers."""
        examples = [example for one in self.sets for example in one.examples]
        found = self.run(name, examples, plan_of)
        for answers, own in zip(self.answers, _split(found, self.sets), strict=True):
            answers[name] = own

    def tune(self, name: str, rival: Rival) -> None:
        """Choose a rival's setting on validation, and run it on every set."""
        examples, tried = self.validation, {}
        for place, setting in enumerate(rival.grid):
            found = self.run(
                f"{name}:{place}", examples, lambda e, s=setting: rival.plan(s, e)
            )
            tried[place] = (
                right_of(examples, found),
                np.array([done.cost.generations for done in found]),
            )
        best = best_under_cap(tried, self.config.max_generations)
        self.chosen[name] = rival.grid[best]
        self.answer(name, lambda e: rival.plan(rival.grid[best], e))

    def trace(
        self,
        label: str,
        config: ControllerConfig,
        sets: Sequence[QuestionSet] | None = None,
        judge: Judge = beatrice,
    ) -> list[Traced]:
        """Trace every question of some sets (None: all) to the full budget."""
        sets = self.sets if sets is None else sets
        examples = [example for one in sets for example in one.examples]
        found = self.run(label, examples, lambda e: drafts(e.question, config, judge))
        traces = _split([done.value for done in found], sets)
        return [
            Traced(**vars(one), traces=tuple(own))
            for one, own in zip(sets, traces, strict=True)
        ]

    def enter(
        self,
        name: str,
        traced: Sequence[Traced],
        config: ControllerConfig,
        judge: Judge = beatrice,
        recalibrate: Recalibrate = lambda example, trace: trace,
    ) -> Policy:
        """Choose threshold and budget on validation traces, and run the loop.

        Args:
          name: of the controller.
          traced: validation sets, at least.
          config: that the traces were made with.
          judge: of drafts, where the loop is run.
          recalibrate: gives a trace the probabilities to search on.
        """
        policy = choose_policy(traced, config, recalibrate)
        self._run_policy(name, policy, config, judge)
        return policy

    @property
    def validation_sets(self) -> list[QuestionSet]:
        """Return the validation sets alone."""
        return [one for one in self.sets if one.split == "validation"]

    def enter_query(
        self, name: str, judge: Judge, *, show_all: bool
    ) -> tuple[Policy, ControllerConfig]:
        """Choose PGIR's query on validation too, and run it as `<name>_query`.

        Quality decides, then cost; the paper's query is tried first and keeps a tie.

        Args:
          name: of the controller.
          judge: of drafts.
          show_all: also run those that were not chosen, as `<name>:<query>`.
        """
        tried, entered = {}, {}
        for query, fields in QUERIES.items():
            config = dataclasses.replace(self.config, **fields)
            label = f"trace:{name}:{query}"
            traced = self.trace(label, config, self.validation_sets, judge)
            policy = choose_policy(traced, config)
            traces = [trace for one in traced for trace in one.traces]
            decisions = [decide(trace, policy) for trace in traces]
            kept = zip(self.validation, traces, decisions, strict=True)
            right = [exact_match(t[d.round].answer, e.golds) for e, t, d in kept]
            spent = np.array([d.n_generations for d in decisions])
            tried[query], entered[query] = (np.array(right), spent), (policy, config)
            if show_all:
                self._run_policy(f"{name}:{query}", policy, config, judge)
        best = best_under_cap(tried, self.config.max_generations)
        self._run_policy(f"{name}_query", *entered[best], judge)
        self.chosen[f"{name}_query"] |= {"query": best}
        return entered[best]

    def _run_policy(
        self, name: str, policy: Policy, config: ControllerConfig, judge: Judge
    ) -> None:
        self.chosen[name] = dataclasses.asdict(policy)
        self.answer(name, lambda e: pgir(e.question, policy, config, judge))

    @functools.cached_property
    def outcomes(self) -> tuple[list[Done], list[Done]]:
        """Return what training questions get closed-book, and after one retrieval."""
        shared = self.config.search
        return (
            self.run("train:no_rag", self.training, lambda e: no_rag(e.question)),
            self.run(
                "train:vanilla_rag",
                self.training,
                lambda e: vanilla_rag(e.question, shared),
            ),
        )


def _split(values: Sequence[Any], sets: Sequence[QuestionSet]) -> Iterator[list[Any]]:
    """Yield the values of each set, in order."""
    start = 0
    for one in sets:
        yield list(values[start : start + len(one.examples)])
        start += len(one.examples)


def right_of(examples: Sequence[Example], found: Sequence[Done]) -> np.ndarray:
    """Return whether each answer is right by exact match, `[n]` bool."""
    pairs = zip(examples, found, strict=True)
    return np.array([exact_match(done.value, e.golds) for e, done in pairs], bool)


def choose_policy(
    traced: Sequence[Traced],
    config: ControllerConfig,
    recalibrate: Recalibrate = lambda example, trace: trace,
) -> Policy:
    """Choose threshold and budget on the validation traces of all sets together.

    Args:
      traced: of all sets.
      config: what is searched.
      recalibrate: gives each question's trace its probabilities for the search.
    """
    validation = [one for one in traced if one.split == "validation"]
    examples = [example for one in validation for example in one.examples]
    traces = [trace for one in validation for trace in one.traces]
    return search_policy(
        tuple(map(recalibrate, examples, traces)),
        lambda i, answer: exact_match(answer, examples[i].golds),
        config,
    )
