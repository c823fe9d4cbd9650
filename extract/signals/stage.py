"""The stage that reads the four signal families of every answer into its store."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.label.labels import check_both_classes
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    check_answered,
    question_files,
    read_answers,
    read_examples,
    read_labels,
    settings_of,
    store_files,
)
from beatrice.extract.run.directory import Preset, RunDir
from beatrice.extract.run.stages import Forecast, Stage
from beatrice.extract.signals.plan import ExtractConfig, Reader
from beatrice.extract.store.config import stored_bytes

_SMALL = ExtractConfig(tokens_per_batch=4096, rows_per_shard=4096)
EXTRACT_PRESETS: dict[Preset, ExtractConfig] = {
    "demo": _SMALL,
    "few": _SMALL,
    "smoke": _SMALL,
    "paper": ExtractConfig(),
}


def extract_config(run: RunDir) -> ExtractConfig:
    """Return what of a run's answers is read and kept."""
    return run.settle("extract", EXTRACT_PRESETS)


def settle_kept(run: RunDir, given: Mapping[str, Any]) -> ExtractConfig:
    """Let a run keep what is asked, as long as nothing of it is extracted.

    What is kept changes no answer and no label, so it may be chosen when the signals
    are read, and is recorded then; every later verb finds it in the manifest.

    Args:
      run: an existing run.
      given: fields of `ExtractConfig`; the others stay as the run has them.

    Raises:
      ValueError: other features are there already.
    """
    config = extract_config(run)
    asked = dataclasses.replace(config, **given)
    folders = [run.features(setting) for setting in settings_of(run)]
    if asked != config and any((f / "index.json").exists() for f in folders):
        raise ValueError(
            f"{run.path} has features already: {config.in_words()}; you asked for "
            f"{asked.in_words()}; repeat that choice, or delete {folders[0].parent} to "
            "extract again"
        )
    return run.settle("extract", EXTRACT_PRESETS, lambda _: asked, is_replaceable=True)


def open_local_reader(run: RunDir, config: ExtractConfig) -> Reader:
    """Load a run's backbone, which gave its answers, to read on this machine.

    Raises:
      ValueError: other weights gave the answers, see `require_answering_model`.
    """
    from beatrice.extract.backbone.loading import (
        open_backbone,
        require_answering_model,
        require_known_tokens,
    )
    from beatrice.extract.signals.reader import SignalReader

    backbone = open_backbone(run.section("backbone", BackboneConfig))
    require_answering_model(run.answers, backbone)
    require_known_tokens(read_answers(run), backbone)
    return SignalReader.for_config(backbone, config)


def _extract(
    open_reader: Callable[[RunDir, ExtractConfig], Reader],
    run: RunDir,
    config: ExtractConfig,
    update: Update,
    progress: Progress,
) -> int:
    """Read a share of the run's answers; returns how many ranges are not there yet."""
    from beatrice.extract.signals.extraction import extract

    check_answered(run)
    if run.labels.exists():  # hours of signals that no detector could be trained on
        check_both_classes(read_examples(run), [*read_labels(run).values()])
    answers = {setting: read_answers(run, setting) for setting in settings_of(run)}
    if empty := [setting for setting, rows in answers.items() if not rows]:
        raise ValueError(
            f"{run.answers} has no answer {empty[0]}: no passage of any question fits "
            "the model's window; give shorter passages, or make the run with "
            "--settings closed-book"
        )
    reader = open_reader(run, config)
    return sum(
        extract(
            reader,
            rows,
            run.features(setting),
            config,
            share=run.share,
            progress=update,
        ).n_missing
        for setting, rows in answers.items()
    )


def _forecast(run: RunDir, config: ExtractConfig) -> Forecast:
    """Return what extraction needs; the store's size is exact before compression."""
    from beatrice.extract.backbone.loading import open_backbone
    from beatrice.extract.signals.plan import first_read, sequence_of
    from beatrice.extract.signals.reader import SignalReader

    backbone = open_backbone(run.section("backbone", BackboneConfig))
    reader = SignalReader.for_config(backbone, config)
    sequences = [
        sequence_of(answer, answer_span=config.answer_span)
        for answer in read_answers(run)
    ]
    n_tokens = sum(len(sequence.ids) for sequence in sequences)
    n_read = n_tokens - sum(first_read(s.spans[0, 0]) for s in sequences)
    n_answer = int(sum(s.spans[2, 1] - s.spans[2, 0] for s in sequences))
    every_layer = (backbone.n_layers + 1, backbone.d_model)
    shapes = {**reader.shapes, "hidden": every_layer}
    stored = stored_bytes(shapes, config, n_tokens=n_read, n_answer=n_answer)
    return Forecast(
        stage="extract",
        n_rows=n_read,
        n_prompt_tokens=n_tokens,
        disk_bytes=sum(stored.values()),
        basis=f"rows are tokens read of {len(sequences)} answers",
    )


def extract_stage(open_reader: Callable[[RunDir, ExtractConfig], Reader]) -> Stage:
    """Return the stage that reads by what `open_reader` opens when it is needed."""
    return Stage(
        name="extract",
        inputs=lambda run: [*question_files(run), run.answers],
        outputs=store_files,
        work=partial(_extract, open_reader),
        parts="ranges",
        presets=EXTRACT_PRESETS,
        forecast=_forecast,
    )


def extract_stage_kept() -> Stage:
    """Return the stage for a share: the model that did it joins all shares."""
    return extract_stage(functools.cache(open_local_reader))


EXTRACT = extract_stage(open_local_reader)
