"""The verb `extract`, and the options that say what is kept of the signals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from beatrice.extract.run.verbs import (
    RUN_DIR,
    SHARD,
    do_or_forecast,
    dry_run_option,
    share_of,
)

_NAMES = ("hidden_layers", "hidden_spans", "dtype", "scalars", "answer_span")


def _layers(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, ...] | str | None:
    """Read a list of layers; `all` stays a word, since None means not given."""
    from beatrice.extract.store.families import parse_layers

    if text is None:
        return None
    try:
        layers = parse_layers(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    return "all" if layers is None else layers


def _dtype(
    context: click.Context, option: click.Parameter, name: str | None
) -> str | None:
    """Return the type's long name."""
    from beatrice.extract.store.families import SHORT_NAMES

    return None if name is None else SHORT_NAMES[name]


_KEPT = (
    click.option(
        "--hidden-layers",
        metavar="LAYERS",
        callback=_layers,
        show_default="all",
        help="Layers kept: one, some (8,16,24), or all; 0 is the embedding.",
    ),
    click.option(
        "--hidden-spans",
        type=click.Choice(["all", "answer"]),
        show_default="all",
        help="Tokens whose hidden states are kept.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bf16", "fp16", "fp32", "int8"]),
        callback=_dtype,
        show_default="bf16",
        help="How hidden states are written; int8 has a scale per token.",
    ),
    click.option(
        "--scalars",
        type=click.Choice(["bf16", "fp32"]),
        callback=_dtype,
        show_default="fp32",
        help="How the other three families are written.",
    ),
    click.option(
        "--answer-span",
        type=click.Choice(["emitting", "literal"]),
        show_default="emitting",
        help="Positions that emit the answer, or the answer tokens alone.",
    ),
)


def kept_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; one that is not given is None."""
    for option in reversed(_KEPT):
        command = option(command)
    return command


def take_kept(options: dict[str, Any]) -> dict[str, Any]:
    """Take these options out of all; return the fields of `ExtractConfig` given."""
    taken = {name: options.pop(name) for name in _NAMES}
    given = {name: value for name, value in taken.items() if value is not None}
    if given.get("hidden_layers") == "all":
        given["hidden_layers"] = None
    return given


@click.command()
@RUN_DIR
@kept_options
@SHARD
@dry_run_option
def extract(run_dir: Path, shard: str | None, dry_run: bool, **options: Any) -> None:
    """Read the four signal families of every answer into the feature store.

    What is kept may be chosen here as long as nothing is extracted; by default it is
    what the run was made with. Under torchrun or srun, or with --shard, every process
    does its part.

    Example: torchrun --nproc-per-node 2 -m beatrice extract runs/demo
    """
    import dataclasses

    from beatrice.extract.backbone.names import BackboneConfig
    from beatrice.extract.generate.options import check_backbone
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.signals.extract import (
        EXTRACT,
        extract_stage_kept,
        settle_kept,
    )

    given, share = take_kept(options), share_of(shard, dry_run)
    if given.get("hidden_layers") is not None:
        check_backbone(
            RunDir(run_dir).section("backbone", BackboneConfig), given["hidden_layers"]
        )
    if dry_run:
        asked = given and (lambda config: dataclasses.replace(config, **given))
        do_or_forecast(run_dir, EXTRACT, True, asked or None)
        return
    if given:
        with RunDir.open(run_dir, share=share) as run:
            settle_kept(run, given)
    # A share's model is the one that joins all of them.
    extracting = EXTRACT if share.is_whole else extract_stage_kept()
    do_or_forecast(run_dir, extracting, False, share=share)
