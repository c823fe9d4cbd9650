"""The questions of a run, and every controller run on them.

Thresholds of all controllers are chosen on validation questions, by exact match under
one cap on generations, and used unchanged everywhere else. What is trained learns from
this backbone's own outcomes on training questions. Nothing is fitted on test.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from beatrice.extract.label.labels import exact_match
from beatrice.extract.records import Example, Setting
from beatrice.extract.run.console import Update
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.rows import Rows
from beatrice.pgir.controllers.loop import (
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
from beatrice.pgir.controllers.plans import (
    Done,
    Plan,
    best_under_cap,
    no_rag,
    vanilla_rag,
)
from beatrice.pgir.controllers.waves import Answering, Waves

Queries = Literal["paper", "choose", "all"]
Stores = Mapping[Setting, tuple[FeatureStore, Rows]]
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


Run = Callable[["Session"], None]


class RivalEntry(NamedTuple):
    """A controller that PGIR is compared with.

    Attributes:
      name: in rows and on the command line.
      since: month in which it was first published; rivals run in this order, those of
        one month by name, and what nobody published first.
      needs: attributes of a session that it cannot run without.
      run: chooses its setting on a session's validation questions, and runs it.
    """

    name: str
    since: str
    needs: tuple[str, ...]
    run: Run


_RIVALS: dict[str, RivalEntry] = {}


def rival(name: str, since: str, *needs: str) -> Callable[[Run], Run]:
    """Enter a controller; that its module lies in this folder is all else it takes."""

    def enter(run: Run) -> Run:
        _RIVALS[name] = RivalEntry(name, since, needs, run)
        return run

    return enter


@functools.cache
def all_rivals() -> dict[str, RivalEntry]:
    """Return every rival of this folder by name, in the order in which they run."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"beatrice.pgir.controllers.{module.name}")
    entries = sorted(_RIVALS.values(), key=lambda entry: (entry.since, entry.name))
    return {entry.name: entry for entry in entries}


class QuestionEncoder(NamedTuple):
    """Questions as vectors of length 1, and what makes them, in words."""

    name: str
    vectors: Callable[[Sequence[str]], np.ndarray]


@dataclasses.dataclass
class Session:
    """Controllers on questions.

    Attributes:
      waves: runs them.
      sets: validation and evaluated sets.
      training: questions that rivals may learn from.
      config: how far PGIR searches; others share its k, depth and cap.
      update: called with how many questions were put to a controller, and how many
        will be.
      answering: what makes prompts and answers; None where no rival needs it.
      unanswered: training questions whose outcomes are not known.
      encoder: of questions; None where no rival reads them alone.
      n_draws: answers that SeaKR draws at a time.
      stores: opens the signals of answers with their labels, of each setting.
      queries: which of PGIR's queries are run, see `ControlConfig`.
      total: questions that will be put to controllers, as far as it is known.
      deferred: what is left for when all rivals have run.
      answers: by set's place and controller, what it returned.
      chosen: the setting of every controller that was tuned.
    """

    waves: Waves
    sets: Sequence[QuestionSet]
    training: Sequence[Example]
    config: ControllerConfig
    update: Update
    answering: Answering | None = None
    unanswered: Sequence[Example] = ()
    encoder: Callable[[], QuestionEncoder] | None = None
    n_draws: int = 20
    stores: Callable[[], Stores] | None = None
    queries: Queries = "paper"
    total: int = 0
    n_done: int = 0
    answers: list[dict[str, list[Done]]] = dataclasses.field(default_factory=list)
    chosen: dict[str, Any] = dataclasses.field(default_factory=dict)
    deferred: list[Callable[[], None]] = dataclasses.field(default_factory=list)

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

    def run_rival(self, name: str) -> None:
        """Run a rival of this folder by name.

        Raises:
          ValueError: the session lacks what it needs.
        """
        entry = all_rivals()[name]
        if missing := [need for need in entry.needs if getattr(self, need) is None]:
            raise ValueError(
                f"{name} needs a session with {' and '.join(missing)}; give them when "
                "it is made"
            )
        entry.run(self)

    def tune(
        self,
        name: str,
        grid: Sequence[Any],
        plan: Callable[[Any, Example], Plan[str]],
    ) -> None:
        """Choose a rival's setting on validation, and run it on every set.

        Args:
          name: of the controller.
          grid: settings tried, the published one first; the first of equals is taken.
          plan: what it does with a question under a setting.
        """
        examples, tried = self.validation, {}
        for place, setting in enumerate(grid):
            done = self.run(
                f"{name}:{place}", examples, lambda e, s=setting: plan(s, e)
            )
            tried[place] = (
                right_of(examples, done),
                np.array([one.cost.generations for one in done]),
            )
        best = best_under_cap(tried, self.config.max_generations)
        self.chosen[name] = grid[best]
        self.answer(name, lambda e: plan(grid[best], e))

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

    def run_loop(self, name: str, judge: Judge) -> None:
        """Choose PGIR's threshold and budget under another judge, and run the loop."""
        traced = self.trace(f"trace:{name}", self.config, self.validation_sets, judge)
        self.enter(name, traced, self.config, judge)

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
