"""The stage `control`, in which all controllers answer the same questions.

Its results are the quality and cost of every controller as rows, and case studies: six
questions of the run with the model's probabilities at each token of their drafts.
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.backbone.loading import open_backbone
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import answer_config
from beatrice.extract.label.labels import exact_match, token_f1
from beatrice.extract.records import SETTINGS, Example
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_json_atomic, write_text_atomic
from beatrice.extract.run.rows import MACRO, ResultRow, publish, write_rows
from beatrice.jaxprobe.calibrate import N_FOLDS, fold_calibrators, run_bootstrap
from beatrice.jaxprobe.calibration import folds_of
from beatrice.jaxprobe.config import CALIBRATE_PRESETS, set_compiler
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.evaluation import difference_row, no_surer_than_signs
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    interval_of,
    resamples,
    wilson_interval,
)
from beatrice.jaxprobe.train import open_rows
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.controllers import BOUNDS, CONTROLLERS, CROSS_FIT
from beatrice.pgir.controllers.adaptive import question_encoder
from beatrice.pgir.controllers.loop import (
    COUNTED,
    Call,
    ControllerConfig,
    Decision,
    Oracle,
    Outcome,
    Plan,
    Policy,
    QuestionSet,
    Trace,
    TracedDraft,
    TracedSet,
    decide,
    detector_judge,
    draft_rag,
    no_rag,
    recalibrated,
    upper_bound,
    vanilla_rag,
)
from beatrice.pgir.controllers.probing import state_layers
from beatrice.pgir.controllers.session import (
    Session,
    all_rivals,
    question_sets,
    training_questions,
)
from beatrice.pgir.controllers.waves import (
    AnswerService,
    CallJournal,
    Waves,
    open_services,
)
from beatrice.pgir.retrievers import CachedRetriever, Retrieval, open_retrieval
from beatrice.pgir.score_files import shown_tokens
from beatrice.pgir.stages import (
    OWN_JUDGE,
    SERVED,
    ControlConfig,
    Searches,
    load_judge,
    retrieval_config,
)

QUALITY = ("em", "f1")
# Controllers with rows for their gain over every other one, and the experiment's name.
PAIRED = {"pgir": "controller_paired", "pgir_query": "controller_query_paired"}
Answers = Mapping[str, Sequence[Outcome]]  # by controller, one per question


def _quality(examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    pairs = [(text, e.golds) for e, text in zip(examples, texts, strict=True)]
    return {
        "em": np.array([exact_match(*pair) for pair in pairs], np.float64),
        "f1": np.array([token_f1(*pair) for pair in pairs], np.float64),
    }


def measures(
    examples: Sequence[Example], answers: Sequence[Outcome]
) -> dict[str, np.ndarray]:
    """Return exact match, F1 and the cost of each question, `[n_examples]` each."""
    columns = _quality(examples, [done.value for done in answers])
    for name in COUNTED:
        counts = [getattr(done.cost, name) for done in answers]
        columns[name] = np.array(counts, np.float64)
    return columns


class _ResampledMean(NamedTuple):
    """A controller's mean of one metric on one set, with its bootstrap resamples."""

    value: float
    draws: np.ndarray  # [n_resamples]
    values: np.ndarray  # [n] of the questions, of all sets

    def row(self, *, metric: str, **fields: Any) -> ResultRow:
        low, high = interval_of(self.draws)
        # Resamples are too similar if nearly all answers are right, or wrong. Answers
        # of several sets are no single sample, but a mean of 0 or 1 would be certain.
        if metric in QUALITY and (low == high or fields["dataset"] != MACRO):
            ends = wilson_interval(self.value, len(self.values))
            low, high = min(low, ends[0]), max(high, ends[1])
        fields |= {"setting": "both", "n": len(self.values), "metric": metric}
        return ResultRow(value=self.value, ci_low=low, ci_high=high, **fields)

    def minus(self, other: "_ResampledMean", **fields: Any) -> ResultRow:
        """Return the row of the difference, resampled over the same questions."""
        fields |= {"setting": "both", "n": len(self.values)}
        row = difference_row(
            self.value - other.value, self.draws - other.draws, **fields
        )
        n_differing = int(np.count_nonzero(self.values != other.values))
        return no_surer_than_signs(row, n_differing)


Drawn = dict[tuple[str, str], _ResampledMean]  # by controller and metric


def _resampled_mean(
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
        key: _ResampledMean(float(values.mean()), drawn, values)
        for (key, values), drawn in zip(measured.items(), draws, strict=True)
    }


def _macro(sets: Sequence[Drawn]) -> Drawn:
    """Return means over sets; resamples are shifted, as equal sizes have the same."""
    return {
        key: _ResampledMean(
            float(np.mean([drawn[key].value for drawn in sets])),
            np.mean([np.roll(x[key].draws, k) for k, x in enumerate(sets)], axis=0),
            np.concatenate([drawn[key].values for drawn in sets]),
        )
        for key in sets[0]
    }


def _rows(drawn: Drawn, experiment: str, **fields: str) -> list[ResultRow]:
    """Return the rows of all controllers, then those of PGIR's gain over each."""
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
            and name not in BOUNDS
            and metric in QUALITY
        ]
    return rows


def control_rows(
    sets: Sequence[QuestionSet], answers: Sequence[Answers], bootstrap: BootstrapConfig
) -> list[ResultRow]:
    """Return rows of the exact match, F1 and cost of every controller.

    They are given for every set, and as the unweighted mean over the evaluated sets
    (experiment `controller_macro`), whose interval resamples the questions of each set.
    Experiment `controller_paired` is PGIR's gain over each other controller on the same
    resamples, `controller_query_paired` that of PGIR with validation's choice of query.
    """
    rows, evaluated = [], []
    for questions, answers_of_set in zip(sets, answers, strict=True):
        drawn = _resampled_mean(questions, answers_of_set, bootstrap)
        rows += _rows(
            drawn, "controller", dataset=questions.dataset, split=questions.split
        )
        if questions.split != "validation":
            evaluated.append(drawn)
    if evaluated:
        macro = {"dataset": MACRO, "split": "evaluated"}
        rows += _rows(_macro(evaluated), "controller_macro", **macro)
    return rows


# A row for no single set, but for the unweighted mean over the evaluated sets.
_macro_row = partial(
    ResultRow,
    experiment="controller_macro",
    setting="both",
    dataset=MACRO,
    split="evaluated",
)


def left_out_rows(left_out: Mapping[str, str]) -> list[ResultRow]:
    """Return rows with a reason and no value for controllers that could not learn."""
    return [
        _macro_row(detector=name, metric=metric, value=None, n=0, reason=reason)
        for name, reason in left_out.items()
        for metric in QUALITY
    ]


def seconds_rows(
    sets: Sequence[QuestionSet], answers: Sequence[Answers]
) -> list[ResultRow]:
    """Return the mean seconds per question of every controller, over evaluated sets.

    The mean over sets is unweighted. Seconds are kept apart from the other rows, which
    are the same on every machine.
    """
    pairs = zip(sets, answers, strict=True)
    evaluated = [of_set for each, of_set in pairs if each.split != "validation"]
    rows = []
    for name in evaluated[0] if evaluated else ():
        seconds = [[done.cost.seconds for done in each[name]] for each in evaluated]
        value, n = float(np.mean([*map(np.mean, seconds)])), sum(map(len, seconds))
        rows.append(_macro_row(detector=name, metric="seconds", value=value, n=n))
    return rows


def frontier(
    name: str, traced: Sequence[TracedSet], policy: Policy, config: ControllerConfig
) -> list[dict[str, Any]]:
    """Return quality against cost for every budget at the chosen threshold."""
    points = []
    for traced_set in traced:
        if traced_set.split == "validation":
            continue
        for budget in range(1, config.max_budget + 1):
            limited = Policy(threshold=policy.threshold, budget=budget)
            decisions = [decide(trace, limited) for trace in traced_set.traces]
            texts = [decision.draft.answer for decision in decisions]
            columns = _quality(traced_set.examples, texts)
            columns["generations"] = np.array([d.n_generations for d in decisions])
            means = {metric: float(np.mean(x)) for metric, x in columns.items()}
            keys = {"controller": name, "dataset": traced_set.dataset, "budget": budget}
            points.append(keys | means)
    return points


Match = Callable[[Decision, bool, bool], bool]  # decision, draft right, final right

# The kinds of outcomes to show, successes and failures: title, text, number, test.
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
    answering: AnswerService, example: Example, draft: TracedDraft
) -> dict[str, Any]:
    """Return a draft as the report shows it, writing it again for its signals."""
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
            probed.backbone.tokenizer, answer, signals.prob, signals.first_token
        ),
    }


class ChosenCase(NamedTuple):
    """A case study: its set, its question's index there, and what happened."""

    traced: TracedSet
    example_index: int
    action: str
    verdict: str
    decision: Decision


def choose_cases(traced: Sequence[TracedSet], policy: Policy) -> list[ChosenCase]:
    """Return questions that show each kind of outcome, from all sets.

    No case is picked by hand: for each kind, in the order of KINDS, it is the first
    fitting question of the set with the fewest cases so far, the first of equal sets.
    """
    outcomes: dict[tuple[int, int], tuple[Decision, bool, bool]] = {}
    for s, each in enumerate(traced):
        pairs = zip(each.traces, each.examples, strict=True)
        for i, (trace, example) in enumerate(pairs):
            decision = decide(trace, policy)
            is_right = partial(exact_match, golds=example.golds)
            both = is_right(trace[0].answer), is_right(decision.draft.answer)
            outcomes[s, i] = (decision, *both)
    shown: dict[tuple[int, int], ChosenCase] = {}
    for action, verdict, n_wanted, matches in KINDS:
        for _ in range(n_wanted):
            n_shown = collections.Counter(s for s, _ in shown)
            fitting = [x for x in outcomes.keys() - shown if matches(*outcomes[x])]
            if fitting:
                s, i = min(fitting, key=lambda x: (n_shown[x[0]], x))
                decision = outcomes[s, i][0]
                shown[s, i] = ChosenCase(traced[s], i, action, verdict, decision)
    return list(shown.values())


def make_cases(
    answering: AnswerService, traced: Sequence[TracedSet], policy: Policy
) -> list[dict[str, Any]]:
    """Return the case studies of the evaluated sets as the report shows them."""
    cases = []
    for case in choose_cases(traced, policy):
        of_set, at = case.traced, case.example_index
        example, trace = of_set.examples[at], of_set.traces[at]
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


# The bounds, and which decision each makes with the gold answers.
ORACLES: dict[str, Oracle] = {
    "perfect_judge": "judge",
    "perfect_gate": "gate",
    "perfect_choice": "choice",
}


def retrieval_of(
    run: RunDir,
    note: Callable[[str], None] = lambda text: None,
    section: Searches = "retrieval",
) -> Retrieval:
    """Open the retriever that a run has chosen."""
    config = retrieval_config(run, section)
    return open_retrieval(config, run.passages, run.path / "searches", note)


def _cross_fitted(run: RunDir, traced: Sequence[TracedSet]) -> list[TracedSet]:
    """Return validation traces with P from maps that have not seen their labels."""
    closed_book = fold_calibrators(run, "closed_book")
    with_context = fold_calibrators(run, "with_context")

    def recalibrate(example: Example, trace: Trace) -> Trace:
        (fold,) = folds_of([example.id], N_FOLDS)
        return recalibrated(trace, closed_book[fold], with_context[fold])

    return [
        dataclasses.replace(
            each, traces=tuple(map(recalibrate, each.examples, each.traces))
        )
        for each in traced
        if each.split == "validation"
    ]


def _open_answering(
    run: RunDir, retrieval: Retrieval, config: ControlConfig
) -> AnswerService:
    probed = ProbedBackbone(
        open_backbone(run.section("backbone", BackboneConfig), run.answers),
        Detector.load(run.detector),
        answer_config(run).generation,
    )
    parts = [*run.hash_inputs(run.passages, run.detector).values(), retrieval.identity]
    parts.append(f"served {SERVED}")
    if (window := probed.trained.prompt.window) is not None:
        parts.append(f"window {window}")  # calls under a key without it ignored it
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    calls = run.control / "calls.jsonl"
    is_growing = isinstance(retrieval.retriever, CachedRetriever)
    journal = CallJournal(calls, key, retrieval.passages if is_growing else None)
    layers = ()
    if "probing_rag" in config.rivals:
        layers = state_layers(probed.backbone.n_layers)
    return AnswerService(probed, retrieval.passages, journal, layers)


def _open_session(
    examples: Sequence[Example],
    run: RunDir,
    answering: AnswerService,
    retrieval: Retrieval,
    config: ControlConfig,
) -> Session:
    services = open_services(answering, retrieval.retriever)
    with_bare = not retrieval_config(run).searches_own_passages
    training = training_questions(examples, config.n_training, with_bare=with_bare)
    training_ids = {example.id for example in training}
    questions = [example.question for example in training]
    checkpoint = Path(config.encoder) if config.encoder else None
    return Session(
        waves=Waves(services, answering.journal),
        sets=question_sets(examples, config.n_questions, with_bare=with_bare),
        training=training,
        answering=answering,
        unanswered=[
            e for e in examples if e.split == "train" and e.id not in training_ids
        ],
        encoder=functools.cache(lambda: question_encoder(questions, checkpoint)),
        n_draws=config.n_draws,
        stores=lambda: {setting: open_rows(run, setting) for setting in SETTINGS},
        maps=run.resolve_section("calibrate", CALIBRATE_PRESETS).maps,
        queries=config.queries,
        config=ControllerConfig(
            max_budget=config.max_budget, max_generations=config.max_generations
        ),
    )


def _run_pgir(
    session: Session, run: RunDir, config: ControlConfig
) -> tuple[list[TracedSet], Policy]:
    """Run PGIR, its simpler variants, and its bounds."""
    controller = session.config
    traced = session.trace("trace", controller)
    session.answer("no_rag", lambda e: no_rag(e.question))
    session.answer("vanilla_rag", lambda e: vanilla_rag(e.question, controller))
    session.answer("draft_rag", lambda e: draft_rag(e.question, controller))
    policy = session.run_pgir("pgir", traced)
    if config.cross_fit:
        session.run_pgir(CROSS_FIT, _cross_fitted(run, traced))
    for name, oracle in ORACLES.items():

        def bound(example: Example, oracle: Oracle = oracle) -> Plan[str]:
            is_right = partial(exact_match, golds=example.golds)
            return upper_bound(example.question, policy, controller, oracle, is_right)

        session.answer(name, bound)
    return traced, policy


def _expected_calls(session: Session, config: ControlConfig) -> int:
    """Return a rough number of calls to come, by ratios measured on the demo."""
    trace = len(session.examples) * (2 + 3 * config.max_budget)
    more = 0.1 + 0.6 * (config.queries != "paper") + 0.15 * len(config.rivals)
    return round(trace * (1 + more))


def _run_rivals(session: Session, config: ControlConfig) -> None:
    for name, run_rival in all_rivals().items():
        if name in config.rivals:
            run_rival(session)
    for work in session.deferred:
        work()
    for name in config.rivals:
        if name.startswith(OWN_JUDGE):
            judge = session.waves.add_judge(name, load_judge(name))
            session.run_loop(name, judge)


def control_run(
    run: RunDir, config: ControlConfig, update: Update, progress: Progress
) -> None:
    """Run PGIR and its rivals on a run's questions, and write what they did."""
    set_compiler(run.preset)
    retrieval, examples = retrieval_of(run, progress.note), read_examples(run)
    answering = _open_answering(run, retrieval, config)
    session = _open_session(examples, run, answering, retrieval, config)
    expected = _expected_calls(session, config)
    session.waves.journal.on_calls = lambda n: update(n, expected)
    datasets = {each.dataset for each in session.sets}
    if bare := {e.dataset for e in examples if e.split != "train"} - datasets:
        progress.note(
            f"control: {', '.join(sorted(bare))} left out, as no question came with "
            "passages and only the run's own passages are searched; --corpus or --url "
            "search elsewhere"
        )
    traced, policy = _run_pgir(session, run, config)
    curve = frontier("pgir", traced, policy, session.config)
    if config.queries != "paper":
        show_all = config.queries == "all"
        best, with_query = session.run_pgir_query(
            "pgir", detector_judge, show_all=show_all
        )
        evaluated = [each for each in session.sets if each.split != "validation"]
        retraced = session.trace("trace:query", with_query, evaluated)
        curve += frontier("pgir_query", retraced, best, with_query)
    _run_rivals(session, config)
    if note := _note_of_passages(retrieval, answering):
        progress.note(f"control: {note}")
    progress.note(f"control: chosen on validation: {_in_words(session.chosen)}")
    evaluated = [each for each in traced if each.split != "validation"]
    write_json_atomic(
        run.control / "control.json",
        {
            "tau": policy.threshold,
            "budget": policy.budget,
            "cap": session.config.max_generations,
            "frontier": curve,
            "cases": make_cases(answering, evaluated, policy),
        },
    )
    seconds = seconds_rows(session.sets, session.answers)
    write_text_atomic(run.control / "seconds.jsonl", write_rows(seconds))
    for name, reason in session.left_out.items():
        progress.note(f"control: {name} left out: {reason}")
    rows = control_rows(session.sets, session.answers, run_bootstrap(run))
    publish(run, "control", rows + left_out_rows(session.left_out), progress)


def _in_words(chosen: Mapping[str, Any]) -> str:
    texts = []
    for name, fields in chosen.items():
        fields = fields if isinstance(fields, dict) else {"": fields}
        words = (
            f"{x} {y if isinstance(y, str) else f'{y:.3g}'}" for x, y in fields.items()
        )
        texts.append(f"{CONTROLLERS.get(name, name)}: {', '.join(words).strip()}")
    return "; ".join(texts)


def _note_of_passages(retrieval: Retrieval, answering: AnswerService) -> str:
    """Return how many passages could not be shown unchanged, or an empty text."""
    split = "passages with control tokens of the model, split by a blank"
    counts = {
        "passages without a word, left out": getattr(retrieval.retriever, "n_empty", 0),
        "passages too long for the model, left out": len(answering.overlong),
        split: answering.n_escaped,
    }
    return "; ".join(f"{text}: {n}" for text, n in counts.items() if n)
