"""The stage that puts a run's detectors to answers from retrieved passages.

The questions with their passages are a run inside the run. It is answered, labelled and
extracted by the stages of any run, so it stops and continues as they do, and `beatrice
label RUN/retrieved --judge …` puts judges in the place of exact match.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from beatrice.benchmarks.baselines.stage import run_evidence
from beatrice.benchmarks.retrieved.detectors import (
    Scenario,
    encoder_scores,
    rival_scores,
    scene_rows,
    selected_scores,
)
from beatrice.benchmarks.retrieved.questions import (
    TRANSFER_PRESETS,
    TransferConfig,
    asked_questions,
    with_passages,
)
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import ANSWER, answer_config, load_tokenizer_only
from beatrice.extract.label.labels import LABEL_PRESETS
from beatrice.extract.label.stage import LABEL
from beatrice.extract.records import (
    SETTINGS,
    Answer,
    Example,
    Setting,
    read_records,
    to_json,
)
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    answers_file,
    read_examples,
    require_both_settings,
    row_files,
)
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.files import write_json_atomic, write_text_atomic
from beatrice.extract.run.rows import publish, rows_file
from beatrice.extract.run.stages import Stage, run_stage
from beatrice.extract.signals.extract import EXTRACT, extract_config
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.stage import (
    chosen_layer,
    encoder_folders,
    grid_config,
    run_bootstrap,
)
from beatrice.pgir.controllers.stage import retrieval_config, retrieval_of

NAME = "transfer"


def _inner(run: RunDir) -> RunDir:
    """Return the run inside a run; it may not be there."""
    return RunDir(run.path / "retrieved")


def _counts_file(run: RunDir) -> Path:
    """Return where it is written how many questions were asked, and got no passages."""
    return _inner(run).path / "asked.json"


def open_inner(run: RunDir) -> RunDir:
    """Open the run inside a run, of the same model, prompts and labels.

    One layer of hidden states is kept: the one that the detectors read. Passages that
    do not fit are left out from the last on, since nobody chose them for their length.
    """
    answer, extract = answer_config(run), extract_config(run)
    prompt = dataclasses.replace(answer.prompt, overlong="drop-passages")
    sections: Mapping[str, object] = {
        "backbone": run.section("backbone", BackboneConfig),
        "answer": dataclasses.replace(answer, settings=SETTINGS, prompt=prompt),
        "extract": dataclasses.replace(extract, hidden_layers=(chosen_layer(run),)),
    }
    new = NewRun(preset=run.preset, seed=run.seed, sections=sections)
    return RunDir.open(_inner(run).path, new)


def write_questions(
    inner: RunDir, run: RunDir, examples: Sequence[Example], note: Callable[[str], None]
) -> None:
    """Put questions into an inner run; what other passages were shown is done again.

    Closed-book answers that the run has to the same questions are taken over.
    """
    content = "".join(f"{to_json(example)}\n" for example in examples)
    if inner.examples.exists() and inner.examples.read_text("utf-8") == content:
        return
    if inner.examples.exists():
        note("retrieved: other passages or questions than before")
        shutil.rmtree(inner.path / "features", ignore_errors=True)
        for stage in ("answer", "label", "extract"):
            inner.reopen_stage(stage)
    elif answers_file(run).exists():
        ids = {example.id for example in examples}
        lines = [
            f"{to_json(answer)}\n"
            for answer in read_records(answers_file(run), Answer)
            if answer.setting == "closed_book" and answer.example_id in ids
        ]
        answers_file(inner).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(answers_file(inner), "".join(lines))
    write_text_atomic(inner.examples, content)


def run_scene(run: RunDir, inner: RunDir, setting: Setting) -> Scenario:
    """Return a run's own answers in a setting, and those of an inner run."""
    evidence = partial(run_evidence, inner, layer=chosen_layer(run))
    closed_book = None if setting == "closed_book" else evidence("closed_book")
    return Scenario(
        own=run_evidence(run, setting),
        new=evidence(setting),
        closed_book=closed_book,
    )


def _transfer(
    run: RunDir, config: TransferConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    detector, intervals = Detector.load(run.detector), run_bootstrap(run)
    asked, made = asked_questions(read_examples(run), config), []
    for n_done, setting in enumerate(SETTINGS, start=1):
        scene = run_scene(run, _inner(run), setting)
        encoders, _ = checkpoint.restore(run.encoders(setting))
        scores = selected_scores(scene, detector)
        scores |= encoder_scores(scene, encoders, grid_config(run))
        scores |= rival_scores(scene)
        made += scene_rows(scene, scores, asked, intervals)
        update(n_done, len(SETTINGS))
    publish(run, NAME, made, progress)


TRANSFER = Stage(
    name=NAME,
    inputs=lambda run: [
        *row_files(run),
        *row_files(_inner(run)),
        run.detector,
        run.sweep,
        *encoder_folders(run),
        _counts_file(run),
    ],
    outputs=lambda run: [rows_file(run, NAME)],
    work=_transfer,
    presets=TRANSFER_PRESETS,
)


def transfer_run(run: RunDir, config: TransferConfig, progress: Progress) -> None:
    """Do everything that is not done, in a run that is held by the caller.

    Raises:
      ValueError: the run has no detector, or questions got no passages; what the
        others gave is published, and the same call again asks for the rest.
    """
    require_both_settings(run, NAME)
    run.require(run.detector)
    asked = asked_questions(read_examples(run), config)
    retrieval = retrieval_of(run, progress.note)
    model, _ = load_tokenizer_only(run)
    prompts = model.tokenizer, answer_config(run).prompt.prompt_template()
    examples, failed = with_passages(asked, retrieval, config.n_passages, prompts)
    progress.note(
        f"transfer: {len(examples)} of {len(asked)} questions have passages, by "
        f"{retrieval_config(run).retriever} over {len(retrieval.passages):,}"
    )
    if not examples:
        raise ValueError(f"no question got passages: {next(iter(failed.values()))}")
    del retrieval  # an index and its encoder; the backbone comes next
    match = run.settle("label", LABEL_PRESETS, is_recorded=False)
    with open_inner(run) as inner:
        write_questions(inner, run, examples, progress.note)
        run_stage(ANSWER, inner, progress)
        if not inner.stage_done("label"):  # judges may have labelled
            run_stage(LABEL, inner, progress, lambda _: match)
        run_stage(EXTRACT, inner, progress)
        counts = {"n_asked": len(asked), "n_failed": len(failed)}
        write_json_atomic(_counts_file(run), counts)
        run_stage(TRANSFER, run, progress)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(asked)} questions got no passages and are counted "
            f"as failed, the first since {next(iter(failed.values()))}; the same line "
            "again asks for them"
        )
