"""A run's questions, and the controllers run on them.

The thresholds of all controllers are chosen on validation questions, by exact match
under one cap on generations, and used unchanged everywhere else. Trained controllers
learn from this backbone's outcomes on training questions. Nothing is fitted on test.
"""

import dataclasses
import functools
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from beatrice.extract.label.labels import exact_match
from beatrice.extract.records import Example, Setting
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.config import MapKind
from beatrice.jaxprobe.rows import StoreRows
from beatrice.pgir.controllers import RIVALS
from beatrice.pgir.controllers.loop import (
    ControllerConfig,
    Judge,
    Outcome,
    Plan,
    Policy,
    QuestionSet,
    TracedSet,
    best_under_cap,
    decide,
    detector_judge,
    drafts,
    no_rag,
    pgir,
    vanilla_rag,
)
from beatrice.pgir.controllers.waves import AnswerService, Waves
from beatrice.pgir.stages import Queries

Stores = Mapping[Setting, tuple[FeatureStore, StoreRows]]
PlanOf = Callable[[Example], Plan[Any]]
# Whether each question's answer is right, `[n]` bool, and its generations, `[n]`.
Tried = tuple[np.ndarray, np.ndarray]
# `[n, d]`; counted words are sparse: a question has few of a set's tens of thousands.
QuestionVectors = np.ndarray | csr_array
# Encodes questions as vectors of length 1.
QuestionEncoder = Callable[[Sequence[str]], QuestionVectors]
# What PGIR may search with, see `ControllerConfig`; the paper's query comes first.
QUERIES: dict[str, dict[str, Any]] = {
    "draft": {},
    "question": {"query": "question"},
    "question_first": {"query": "question_first"},
    **{f"sure_draft_{s}": {"query": "sure_draft", "sure": s} for s in (0.3, 0.5, 0.7)},
    "fused": {"query": "fused"},
    "both": {"query": "both"},
}


def question_sets(
    examples: Sequence[Example], limit: int | None, *, with_bare: bool = False
) -> list[QuestionSet]:
    """Return the evaluated sets, in file order; `limit` is per set.

    Sets without passages are left out unless `with_bare`: only a corpus other than the
    run's own passages can hold anything for them.
    """
    sets: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        if example.split != "train":
            sets.setdefault((example.dataset, example.split), []).append(example)
    return [
        QuestionSet(dataset=dataset, split=split, examples=tuple(of_set[:limit]))
        for (dataset, split), of_set in sets.items()
        if with_bare or any(example.passages for example in of_set)
    ]


def training_questions(
    examples: Sequence[Example], limit: int, *, with_bare: bool = False
) -> list[Example]:
    """Return the first training questions, equally many of each set.

    Questions without passages are left out unless `with_bare`; see `question_sets`.
    """
    sets: dict[str, list[Example]] = {}
    for example in examples:
        if example.split == "train" and (with_bare or example.passages):
            sets.setdefault(example.dataset, []).append(example)
    share = -(-limit // max(1, len(sets)))
    return [e for of_set in sets.values() for e in of_set[:share]][:limit]


Run = Callable[["Session"], None]


_RIVALS: dict[str, Run] = {}


def rival(name: str) -> Callable[[Run], Run]:
    """Register a rival of `RIVALS`; its module is found if it is in this folder.

    The function chooses the rival's setting on a session's validation questions, and
    runs it.
    """

    def register(run: Run) -> Run:
        if name not in RIVALS:
            raise ValueError(
                f"{run.__module__}: the rival {name!r} has no place among the others; "
                "add it to RIVALS in pgir/controllers/__init__.py"
            )
        if name in _RIVALS and _RIVALS[name].__module__ != run.__module__:
            raise ValueError(
                f"{run.__module__}: the rival {name!r} is already defined in "
                f"{_RIVALS[name].__module__}; choose another name"
            )
        _RIVALS[name] = run
        return run

    return register


@functools.cache
def all_rivals() -> dict[str, Run]:
    """Return what runs each rival, by name, in the order of `RIVALS`."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"beatrice.pgir.controllers.{module.name}")
    return {name: _RIVALS[name] for name in RIVALS}


@dataclasses.dataclass
class Session:
    """Question sets with what is needed to run controllers on them, and the results."""

    waves: Waves  # runs the controllers
    sets: Sequence[QuestionSet]  # validation and evaluated sets
    training: Sequence[Example]  # questions that rivals may learn from
    config: ControllerConfig  # how far PGIR searches; others share its k, depth and cap
    answering: AnswerService  # makes prompts and answers
    encoder: Callable[[], QuestionEncoder]  # loads the encoder of questions
    # Opens each setting's signals of answers and their labels.
    stores: Callable[[], Stores]
    maps: MapKind = "increasing"  # kind of the detector's maps from scores to P
    # Training questions whose outcomes are not known.
    unanswered: Sequence[Example] = ()
    n_draws: int = 20  # answers that SeaKR samples at a time
    queries: Queries = "paper"  # which of PGIR's queries to run, see `ControlConfig`
    # For each set, what every controller returned, by name.
    answers: list[dict[str, list[Outcome]]] = dataclasses.field(default_factory=list)
    # The chosen setting of every controller that was tuned.
    chosen: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Rivals that cannot learn, and why.
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    # Work to do after all rivals have run.
    deferred: list[Callable[[], object]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with no answers for each set."""
        self.answers = [{} for _ in self.sets]

    @property
    def examples(self) -> list[Example]:
        """The questions of all sets together."""
        return [example for each in self.sets for example in each.examples]

    @property
    def validation_sets(self) -> list[QuestionSet]:
        """The validation sets."""
        return [each for each in self.sets if each.split == "validation"]

    @property
    def validation(self) -> list[Example]:
        """The validation questions of all sets together."""
        return [example for each in self.validation_sets for example in each.examples]

    def run(
        self, label: str, examples: Sequence[Example], plan_of: PlanOf
    ) -> list[Outcome]:
        """Run a controller; if calls fail, keep the rest and raise ConnectionError."""
        plans = [_fitting(plan_of(e), e.question, self.answering) for e in examples]
        results = self.waves.run(label, plans)
        done = [result for result in results if isinstance(result, Outcome)]
        if len(done) < len(results):
            call, reason = next(iter(self.waves.failed.items()))
            raise ConnectionError(
                f"{len(results) - len(done)} of {len(results)} questions could not be "
                f"answered ({label}): {call.kind} of {call.text[:60]!r} failed "
                f"({reason}); the rest is kept, and the same command tries these again"
            )
        return done

    def answer(self, name: str, plan_of: PlanOf) -> None:
        """Run a controller on every set, and keep its answers."""
        done = self.run(name, self.examples, plan_of)
        for answers, of_set in zip(self.answers, _split(done, self.sets), strict=True):
            answers[name] = of_set

    def tune(
        self, name: str, grid: Sequence[Any], plan: Callable[[Any, Example], Plan[str]]
    ) -> None:
        """Choose a rival's setting on validation, and run it on every set.

        The published setting comes first in the grid, since the first of equals wins.
        """
        examples, tried = self.validation, {}
        for index, setting in enumerate(grid):
            label = f"{name}:{index}"
            done = self.run(label, examples, lambda e, s=setting: plan(s, e))
            generations = np.array([each.cost.generations for each in done])
            tried[index] = (right_of(examples, done), generations)
        best = best_under_cap(tried, self.config.max_generations)
        self.chosen[name] = grid[best]
        self.answer(name, lambda e: plan(grid[best], e))

    def trace(
        self,
        label: str,
        config: ControllerConfig,
        sets: Sequence[QuestionSet] | None = None,
        judge: Judge = detector_judge,
    ) -> list[TracedSet]:
        """Trace every question of some sets (None: all) to the full budget."""
        sets = self.sets if sets is None else sets
        examples = [example for each in sets for example in each.examples]
        done = self.run(label, examples, lambda e: drafts(e.question, config, judge))
        traces = _split([each.value for each in done], sets)
        return [
            TracedSet(**vars(each), traces=tuple(of_set))
            for each, of_set in zip(sets, traces, strict=True)
        ]

    def run_pgir(
        self, name: str, traced: Sequence[TracedSet], judge: Judge = detector_judge
    ) -> Policy:
        """Choose threshold and budget on validation traces, and run the loop."""
        policy, (_, generations) = choose_policy(traced, self.config)
        cap, least = self.config.max_generations, generations.mean()
        if name == "pgir" and least > cap:  # a rival is shown with what it spends
            raise ValueError(
                f"PGIR spends at least {least:.3g} generations per question, and the "
                f"cap is {cap:g}; raise --max-generations"
            )
        self._run_policy(name, policy, self.config, judge)
        return policy

    def run_loop(self, name: str, judge: Judge) -> None:
        """Choose PGIR's threshold and budget under another judge, and run the loop."""
        traced = self.trace(f"trace:{name}", self.config, self.validation_sets, judge)
        self.run_pgir(name, traced, judge)

    def run_pgir_query(
        self, name: str, judge: Judge, *, show_all: bool
    ) -> tuple[Policy, ControllerConfig]:
        """Also choose the query on validation, and run the best as `<name>_query`.

        Quality decides, then cost, then the order, in which the paper's query is first.
        With `show_all`, every query is also run, as `<name>:<query>`.
        """
        tried: dict[str, Tried] = {}
        settings: dict[str, tuple[Policy, ControllerConfig]] = {}
        for query, fields in QUERIES.items():
            config = dataclasses.replace(self.config, **fields)
            label = f"trace:{name}:{query}"
            traced = self.trace(label, config, self.validation_sets, judge)
            policy, tried[query] = choose_policy(traced, config)
            settings[query] = (policy, config)
            if show_all:
                self._run_policy(f"{name}:{query}", policy, config, judge)
        best = best_under_cap(tried, self.config.max_generations)
        self._run_policy(f"{name}_query", *settings[best], judge)
        self.chosen[f"{name}_query"] |= {"query": best}
        return settings[best]

    def _run_policy(
        self, name: str, policy: Policy, config: ControllerConfig, judge: Judge
    ) -> None:
        self.chosen[name] = dataclasses.asdict(policy)
        self.answer(name, lambda e: pgir(e.question, policy, config, judge))

    @functools.cached_property
    def outcomes(self) -> tuple[list[Outcome], list[Outcome]]:
        """Answers to the training questions, closed-book and after one search."""
        closed_book = self.run(
            "train:no_rag", self.training, lambda e: no_rag(e.question)
        )
        return closed_book, self.run(
            "train:vanilla_rag",
            self.training,
            lambda e: vanilla_rag(e.question, self.config),
        )


def _fitting(plan: Plan[Any], question: str, answering: AnswerService) -> Plan[Any]:
    """Run a plan on rankings without the passages that are too long for the model.

    A call with such a passage would fail in every run.
    """
    value = None
    while True:
        try:
            call = plan.send(value)
        except StopIteration as end:
            return end.value
        value = yield call
        if call.kind == "search":
            value = answering.fitting(question, value)


def _split(values: Sequence[Any], sets: Sequence[QuestionSet]) -> Iterator[list[Any]]:
    rest = iter(values)
    for each in sets:
        yield [*itertools.islice(rest, len(each.examples))]


def right_of(examples: Sequence[Example], done: Sequence[Outcome]) -> np.ndarray:
    """Return whether each answer is right by exact match, `[n]` bool."""
    pairs = zip(examples, done, strict=True)
    return np.array([exact_match(each.value, e.golds) for e, each in pairs], bool)


def choose_policy(
    traced: Sequence[TracedSet], config: ControllerConfig
) -> tuple[Policy, Tried]:
    """Choose threshold and budget by exact match on the validation traces of all sets.

    Among policies within the cap on mean generations, the highest exact match wins,
    then the fewest generations, then the lowest budget and threshold; if none is, the
    cheapest. The outcomes of the policy are returned too.
    """
    pairs = [
        (trace, [exact_match(draft.answer, example.golds) for draft in trace])
        for each in traced
        if each.split == "validation"
        for example, trace in zip(each.examples, each.traces, strict=True)
    ]
    tried: dict[Policy, Tried] = {}
    for budget in range(1, config.max_budget + 1):
        for threshold in config.thresholds:
            policy = Policy(threshold=threshold, budget=budget)
            decisions = [decide(trace, policy) for trace, _ in pairs]
            rows = zip(pairs, decisions, strict=True)
            right = [is_right[d.round] for (_, is_right), d in rows]
            generations = [d.n_generations for d in decisions]
            tried[policy] = np.array(right, bool), np.array(generations)
    best = best_under_cap(tried, config.max_generations)
    return best, tried[best]
