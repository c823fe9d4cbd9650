"""The stage that lets every controller answer the same questions."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

from extract.backbone.loading import open_backbone
from extract.backbone.names import backbone_of
from extract.generate.forecast import generation_bytes
from extract.generate.requests import answer_config
from extract.records import Example
from extract.run.console import Progress, Update
from extract.run.contents import read_examples, require_both_settings, row_files
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.manifest import Preset
from extract.run.results import publish, rows_file
from extract.run.stages import Forecast, Stage
from extract.signals.stage import extract_config
from jaxprobe.calibration import folds_of
from jaxprobe.detector import Detector
from jaxprobe.evaluation import bootstrap_of
from jaxprobe.settings import set_compiler
from jaxprobe.stage import N_FOLDS, fold_calibrators
from pgir.bridge import ProbedBackbone
from pgir.controllers.cases import make_cases
from pgir.controllers.policy import ControllerConfig, Trace, recalibrated
from pgir.controllers.rivals import control_rows, frontier
from pgir.controllers.traces import (
    Recalibrate,
    Tracer,
    choose_policy,
    question_sets,
)
from pgir.retrieval.choice import retrieval_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """The run's section `control`.

    Attributes:
      max_budget: most retrieval rounds traced.
      n_questions: of each set that are given to the controllers; None for all.
      max_generations: cap on the mean per question, for the search of the policy; the
        paper's run of Gemma spends 4.63.
      cross_fit: search a second policy on probabilities from isotonic maps that have
        not seen the question's own label; the paper's maps have seen it.
    """

    max_budget: int = 4
    n_questions: int | None = None
    max_generations: float = 4.0
    cross_fit: bool = False


CONTROL_PRESETS: dict[Preset, ControlConfig] = {
    "demo": ControlConfig(n_questions=250),
    "smoke": ControlConfig(max_budget=2, n_questions=8),
    "paper": ControlConfig(),
}


def _open_probed(run: RunDir) -> ProbedBackbone:
    """Load the run's backbone together with its detector."""
    config = answer_config(run)
    return ProbedBackbone(
        open_backbone(backbone_of(run)),
        Detector.load(run.detector),
        config.prompt.prompt_template(),
        config.generation,
        answer_span=extract_config(run).answer_span,
    )


def settle_search(
    run: RunDir, change: Callable[[ControlConfig], ControlConfig]
) -> None:
    """Let policies be searched in another way; what was traced stays.

    Unlike other settings these may change: nothing but tables depends on them.
    """
    held = run.settle("control", CONTROL_PRESETS, is_recorded=False)
    if change(held) != held:
        run.reopen_stage("control")
    run.settle("control", CONTROL_PRESETS, change, is_replaceable=True)


def _cross_fitted(run: RunDir) -> Recalibrate:
    """Return probabilities from maps that have not seen the question's own label."""
    closed_book = fold_calibrators(run, "closed_book")
    with_context = fold_calibrators(run, "with_context")

    def recalibrate(example: Example, trace: Trace) -> Trace:
        (fold,) = folds_of([example.id], N_FOLDS)
        return recalibrated(trace, closed_book[fold], with_context[fold])

    return recalibrate


def _control(
    run: RunDir, config: ControlConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    probed = _open_probed(run)
    searched = retrieval_of(run, progress.note)
    passages = searched.passages
    hashes = run.hash_inputs(run.examples, run.passages, run.detector).values()
    controller = ControllerConfig(
        max_budget=config.max_budget, max_generations=config.max_generations
    )
    tracer = Tracer(
        folder=run.control,
        key=hashlib.sha256(
            "\n".join([*hashes, searched.identity]).encode()
        ).hexdigest(),
        probed=probed,
        passages=passages,
        retriever=searched.retriever,
        config=controller,
    )
    examples = read_examples(run)
    sets = question_sets(examples, config.n_questions)
    asked = {one.dataset for one in sets}
    if bare := {e.dataset for e in examples if e.split != "train"} - asked:
        progress.note(
            f"control: {', '.join(sorted(bare))} left out: no question has passages, "
            "and there is nothing to find for them"
        )
    traced = tracer.trace_all(sets, update)
    policy = choose_policy(traced, controller)
    policies = {"pgir": policy}
    if config.cross_fit:
        other = choose_policy(traced, controller, _cross_fitted(run))
        policies["pgir_cross_fit"] = other
        progress.note(
            f"control: on cross-fitted probabilities threshold {other.threshold} and "
            f"budget {other.budget}, otherwise {policy.threshold} and {policy.budget}"
        )
    evaluated = [one for one in traced if one.split != "validation"]
    write_json_atomic(
        run.control / "control.json",
        {
            "tau": policy.threshold,
            "budget": policy.budget,
            "cap": controller.max_generations,
            "frontier": frontier(traced, policy, controller),
            "cases": make_cases(probed, passages, evaluated, policy),
        },
    )
    rows = control_rows(traced, policies, bootstrap_of(run))
    publish(run, "control", rows, progress)


def _forecast(run: RunDir, config: ControlConfig) -> Forecast:
    backbone = open_backbone(backbone_of(run))  # the detector's bytes are few
    sets = question_sets(read_examples(run), config.n_questions)
    n_questions = sum(len(one.examples) for one in sets)
    tokens = answer_config(run).generation.tokens_per_batch
    return Forecast(
        stage="control",
        # A draft without passages, one for each round, and plain retrieval's answer.
        n_requests=n_questions * (config.max_budget + 2),
        model_bytes=generation_bytes(backbone, tokens),
        basis=(
            f"{n_questions} questions to a budget of {config.max_budget} retrievals; "
            "requests are at most so many"
        ),
    )


def _inputs(run: RunDir) -> list[Path]:
    require_both_settings(run, "control")
    return [*row_files(run), run.passages, run.selection, run.detector]


CONTROL = Stage(
    name="control",
    inputs=_inputs,
    outputs=lambda run: [run.control, rows_file(run, "control")],
    work=_control,
    presets=CONTROL_PRESETS,
    forecast=_forecast,
)
