"""What the verbs of every room share: arguments, options, and stages named by place."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.records import SETTINGS
from beatrice.extract.run.directory import PRESETS
from beatrice.extract.run.share import Share, find_share

if TYPE_CHECKING:
    from beatrice.extract.run.stages import Stage

Command = Callable[..., None]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class RunPath(click.Path):
    """A path on this machine; a URL would become a local folder of that name."""

    def __init__(self) -> None:
        """Convert to `Path`."""
        super().__init__(path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path, or refuse a URL."""
        if _URL.match(str(value)):
            self.fail(
                f"a run directory is a folder on this machine, found {str(value)!r}; "
                "give a local or mounted path (only a feature store can lie at a URL, "
                "through beatrice.extract.signals.extract.extract)",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


RUN_DIR = click.argument("run_dir", type=RunPath())
SEED = click.IntRange(0, 2**31 - 1)  # what every generator of draws takes
MODEL = click.option(
    "--model",
    default="embedded",
    help="Backbone: a directory, a GGUF file, a Hub id, or the embedded one.",
)
SETTINGS_ASKED = {
    "both": SETTINGS,
    "closed-book": ("closed_book",),
    "with-context": ("with_context",),
}
SETTINGS_OPTION = click.option(
    "--settings",
    type=click.Choice(list(SETTINGS_ASKED)),
    default="both",
    callback=lambda context, option, name: SETTINGS_ASKED[name],
    help="How every question is asked; with context those that have passages.",
)
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Count what all would need; ask no model and write nothing.",
)


# What presets are of encoders; a test holds it against their configurations.
SIZES = (
    "few (for some hundred answers): encoders begin as regressions, width 16, batches "
    "of 32, 12 epochs at 0.003; demo: width 16, batches of 128, 12 epochs at 0.002; "
    "paper: width 128, batches of 512, 60 epochs at 0.0002; smoke: width 8, batches of "
    "64, 2 epochs at 0.003, one seed, which means nothing. Three seeds else."
)


def preset_option(
    default: str | None, text: str, sizes: str = SIZES
) -> Callable[[Command], Command]:
    """Return the option that chooses sizes, which its help lists."""
    return click.option(
        "--preset",
        type=click.Choice(PRESETS),
        default=default,
        help=f"{text} {sizes}",
    )


def load_stage(place: str) -> "Stage":
    """Return the stage at a place such as `beatrice.selection.sweep:SWEEP`."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def do_or_forecast(
    run_dir: Path,
    stage: "Stage",
    dry_run: bool,
    change: Callable | None = None,
    share: Share = Share(),
) -> None:
    """Do a stage of an existing run, or a share, or say what it would need."""
    from beatrice.extract.run.stages import do, forecast_stage

    if dry_run:
        click.echo(forecast_stage(run_dir, stage, change))
    else:
        do(run_dir, stage, change=change, share=share)


def _checked(
    context: click.Context, option: click.Parameter, shard: str | None
) -> str | None:
    """Validate --shard before anything is opened."""
    try:
        if shard is not None:
            find_share(shard)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    return shard


SHARD = click.option(
    "--shard",
    metavar="I/N",
    callback=_checked,
    help="Do part I (from 0) of N; each part is a process of its own. Torchrun, srun "
    "and mpirun say this by themselves.",
)


def share_of(shard: str | None, dry_run: bool) -> Share:
    """Return this process's share of a verb; a dry run counts the work of all."""
    return Share() if dry_run else find_share(shard)


def alone(what: str, share: Share) -> None:
    """Check that a verb was started as one process.

    Raises:
      click.UsageError: several processes were launched.
    """
    if share.world_size > 1:
        raise click.UsageError(
            f"{what} is one process's work, and {share.world_size} were launched "
            f"({share.source}); start this once (with --server, --concurrency says how "
            "many requests are under way); verbs that workers share have --shard"
        )
