"""The stage that lets every controller answer the same questions."""

from extract.generate.forecast import generation_bytes
from extract.generate.requests import answer_config
from extract.records import Passage, read_records
from extract.run.console import Progress, Update
from extract.run.contents import read_examples
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.forecast import Forecast
from extract.run.results import publish, rows_file
from extract.run.stages import Stage
from jaxprobe.settings import set_compiler
from jaxprobe.evaluation import bootstrap_of
from pgir.controllers.cases import make_cases
from pgir.controllers.rivals import control_rows, frontier
from pgir.controllers.traces import (
    CONTROL_PRESETS,
    ControlConfig,
    choose_policy,
    inputs_key,
    open_probed,
    question_sets,
    trace_all,
)


def _control(
    run: RunDir, config: ControlConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    probed = open_probed(run)
    hashes = run.hash_inputs(run.examples, run.passages, run.detector)
    passages = list(read_records(run.passages, Passage))
    key = inputs_key(*hashes.values())
    traced = trace_all(run, config, probed, passages, update, key)
    search = config.controller
    policy = choose_policy(traced, search)
    in_domain = next(t for t in traced if t.split == "test")
    write_json_atomic(
        run.control / "control.json",
        {
            "tau": policy.threshold,
            "budget": policy.budget,
            "cap": search.max_generations,
            "frontier": frontier(traced, policy, search),
            "cases": make_cases(probed, passages, in_domain, policy),
        },
    )
    publish(run, "control", control_rows(traced, policy, bootstrap_of(run)), progress)


def _forecast(run: RunDir, config: ControlConfig) -> Forecast:
    probed = open_probed(run)
    sets = question_sets(read_examples(run), config.n_questions)
    n_questions = sum(len(examples) for _, _, examples in sets)
    tokens = answer_config(run).generation.tokens_per_batch
    return Forecast(
        stage="control",
        # A draft without passages, one for each round, and plain retrieval's answer.
        n_requests=n_questions * (config.max_budget + 2),
        model_bytes=generation_bytes(probed.backbone, tokens),
        basis=(
            f"{n_questions} questions to a budget of {config.max_budget} retrievals; "
            "requests are at most so many"
        ),
    )


CONTROL = Stage(
    name="control",
    inputs=lambda run: [run.examples, run.passages, run.detector],
    outputs=lambda run: [run.control, rows_file(run, "control")],
    work=_control,
    presets=CONTROL_PRESETS,
    forecast=_forecast,
)
