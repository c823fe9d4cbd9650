"""The stage that reads the four signal families of every answer into its store."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from extract.backbone.names import BackboneConfig, backbone_of
from extract.generate.forecast import cache_bytes, generation_bytes
from extract.label.labels import check_both_classes
from extract.run.console import Progress, Update
from extract.run.contents import (
    check_answered,
    question_files,
    read_answers,
    read_examples,
    read_labels,
    settings_of,
    store_files,
)
from extract.run.directory import RunDir
from extract.run.manifest import Preset
from extract.run.stages import Forecast, Stage
from extract.signals.plan import ExtractConfig
from extract.store.config import stored_bytes
from extract.store.spec import Family

if TYPE_CHECKING:
    from extract.signals.reader import SignalReader

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


def _load_reader(backbone: BackboneConfig, config: ExtractConfig) -> "SignalReader":
    from extract.backbone.loading import open_backbone
    from extract.signals.reader import SignalReader

    return SignalReader.for_config(open_backbone(backbone), config)


def _extract(
    load: Callable[[BackboneConfig, ExtractConfig], "SignalReader"],
    run: RunDir,
    config: ExtractConfig,
    update: Update,
    progress: Progress,
) -> int:
    """Read a share of the run's answers; returns how many ranges are not there yet.

    Raises:
      ValueError: other weights gave the answers, see `require_answering_model`; or the
        labels hold one class alone.
    """
    from extract.backbone.loading import (
        require_answering_model,
        require_known_tokens,
    )
    from extract.signals.extraction import extract

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
    reader = load(backbone_of(run), config)
    backbone = reader.backbone
    require_answering_model(run.answers, backbone)
    require_known_tokens(read_answers(run), backbone)
    fingerprint = {"model": backbone.revision, "dtype": str(backbone.dtype)}
    return sum(
        extract(
            reader,
            rows,
            run.features(setting),
            config,
            fingerprint=fingerprint,
            share=run.share,
            progress=update,
        ).n_missing
        for setting, rows in answers.items()
    )


def _forecast(run: RunDir, config: ExtractConfig) -> Forecast:
    """Return what extraction needs; the store's size is exact before compression."""
    from extract.backbone.loading import open_backbone
    from extract.signals.plan import first_read, sequence_of
    from extract.signals.reader import SignalReader

    backbone = open_backbone(backbone_of(run))
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
    batch = config.tokens_per_batch
    signals = sum(Family(shape=tuple(s)).row_bytes for s in reader.shapes.values())
    without_cache = generation_bytes(backbone, batch) - cache_bytes(backbone, batch)
    return Forecast(
        stage="extract",
        n_rows=n_read,
        n_prompt_tokens=n_tokens,
        model_bytes=without_cache + batch * signals,
        disk_bytes=sum(stored.values()),
        basis=(
            f"rows are tokens read of {len(sequences)} answers; memory is that of the "
            "weights and of one batch's signals"
        ),
    )


def _extract_stage(
    load: Callable[[BackboneConfig, ExtractConfig], "SignalReader"],
) -> Stage:
    return Stage(
        name="extract",
        inputs=lambda run: [*question_files(run), run.answers],
        outputs=store_files,
        work=partial(_extract, load),
        parts="ranges",
        presets=EXTRACT_PRESETS,
        forecast=_forecast,
    )


def extract_stage_kept() -> Stage:
    """Return the stage for a share: the model that did it joins all shares."""
    return _extract_stage(functools.cache(_load_reader))


EXTRACT = _extract_stage(_load_reader)
