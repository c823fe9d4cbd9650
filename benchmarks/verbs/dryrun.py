"""`--dry-run` of every verb: what it would need, shown and kept, and nothing done."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.verbs.backends import BackendOptions, open_generator
from benchmarks.verbs.opening import config_of, opened, set_compiler

if TYPE_CHECKING:
    from benchmarks.stages.forecast import Forecast
    from benchmarks.stages.presets import RunConfig
    from extract.generate.generator import Generator
    from extract.run.directory import RunDir

dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Do ten rows and say what all would need; write nothing but that forecast.",
)


def show_forecast(run: "RunDir", forecast: "Forecast") -> None:
    """Print a forecast, and keep it for the end of the real stage."""
    from benchmarks.stages.forecast import keep_forecast

    keep_forecast(run, forecast)
    click.echo(forecast.as_text())


@contextlib.contextmanager
def rehearsing(
    run: "RunDir",
    stage: str,
    model: str,
    backend: BackendOptions,
    *,
    dry_run: bool,
    stop_ids: Sequence[int] = (),
    log_probs: bool = False,
    tokenizer: Any = None,
) -> Iterator["Generator"]:
    """Open a stage's backend; in a dry run one that ends the block with a forecast."""
    from benchmarks.stages.tallies import paid_tokens

    began = time.monotonic()
    with open_generator(
        model,
        backend,
        stop_ids=stop_ids,
        log_probs=log_probs,
        tokenizer=tokenizer,
        earlier=paid_tokens(run, stage),
    ) as generator:
        if not dry_run:
            yield generator
            return
        from benchmarks.forecasts.rehearsal import Rehearsal, Rehearsed

        actor = Rehearsal(
            generator,
            stage,
            load_seconds=time.monotonic() - began,
            gpu_bytes=_memory(generator),
        )
        try:
            yield actor
        except Rehearsed as found:
            show_forecast(run, found.forecast)


def _memory(generator: Any) -> int | None:
    """Return what a backend needs here; a server's memory is not ours to know."""
    from extract.generate.local import TransformersGenerator

    if not isinstance(generator, TransformersGenerator):
        return None
    from benchmarks.forecasts.modelmemory import generation_bytes

    return generation_bytes(generator.backbone, generator.tokens_per_batch)


def dry_run_stage(run_dir: Path, name: str, config: "RunConfig | None" = None) -> None:
    """Forecast a stage that needs nothing but its run directory.

    Args:
      run_dir: an existing run.
      name: of the stage.
      config: what it would be done with, if not with what the run was made with.
    """
    from benchmarks.forecasts.forecast_stages import FORECASTS, forecast_arrays
    from benchmarks.stages.chain import ON_REQUEST, STAGES
    from extract.run.console import Progress, quiet

    quiet()
    made_with = config_of(run_dir)
    config = made_with if config is None else config
    set_compiler(config.xla_flags)
    with opened(run_dir, made_with) as run:
        stage = {**STAGES, **ON_REQUEST}[name]
        inputs = stage.inputs(run)
        is_there = all(path.exists() for path in inputs)
        if is_there and run.stage_done(name, run.hash_inputs(*inputs)):
            Progress().note(f"{name}: already done, nothing is left to forecast")
            return
        forecast: Callable[[RunDir, RunConfig], Forecast] | None = FORECASTS.get(name)
        found = (
            forecast(run, config)
            if forecast is not None
            else forecast_arrays(run, name, inputs)
        )
        show_forecast(run, found)
