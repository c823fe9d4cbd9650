"""Answering by a launcher's workers: each its share, the last puts all together."""

import time
from pathlib import Path

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.stage import Progress, once
from benchmarks.stages.tallies import count_stage
from benchmarks.stages.torch_stages import ANSWER, ask_backbone, generation_config
from extract import pipeline
from extract.run.directory import RunDir
from extract.run.lock import InUse

_PATIENCE = 120.0  # seconds; who puts together, or looks whether to, takes less


def answer_part(
    run_dir: Path, config: RunConfig, worker: tuple[int, int], progress: Progress
) -> None:
    """Do one worker's part of the answers; put all together if none is missing.

    A worker that finds answers missing leaves: the one that writes the last of them
    finds none missing, and so does a later process, alone or with others.

    Args:
      run_dir: of all workers.
      config: of the run.
      worker: rank and world size.
      progress: shows it.

    Raises:
      InUse: a process that works alone holds the run.
      ValueError: an input is missing, or has changed meanwhile.
    """
    rank, world_size = worker
    name = f"answer {rank}/{world_size}"
    began = time.monotonic()
    with _open_patiently(run_dir, config, exclusive=False) as run:
        inputs = run.hash_inputs(*ANSWER.inputs(run))
        if run.stage_done("answer", inputs):
            progress.note(f"{name}: already done")
            return
        before = count_stage(run, "answer", [run.answers])
        backbone, requests = ask_backbone(run, config, progress)
        how = generation_config(config)
        with progress.stage(name) as update:
            n_missing = pipeline.write_answer_part(
                run, backbone, requests, how, update, worker
            )
    if n_missing:
        progress.note(
            f"{name}: {n_missing} answers of other workers are missing; whoever writes "
            f"the last puts all together, and so does `beatrice answer {run_dir}`"
        )
        return
    try:
        held = _open_patiently(run_dir, config, exclusive=True)
    except InUse:
        progress.note(f"{name}: another process puts the answers together")
        return
    with held as run:
        if run.hash_inputs(*ANSWER.inputs(run)) != inputs:
            raise ValueError(
                f"the questions in {run_dir} have changed while they were answered; "
                "run the same line again"
            )

        def gather(update: object) -> None:
            for note in pipeline.gather_answers(run, requests, how):
                progress.note(note)

        since = (began, before)
        once(run, "answer", inputs, [run.answers], progress, gather, since)


def _open_patiently(run_dir: Path, config: RunConfig, *, exclusive: bool) -> RunDir:
    """Hold a run, after others that hold it for a moment."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return RunDir.open(run_dir, config.as_json(), exclusive=exclusive)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
