"""Options that say what is kept of the answers' signals, on every verb that asks."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.verbs.opening import config_of

if TYPE_CHECKING:
    from benchmarks.stages.presets import RunConfig

_NAMES = ("hidden_layers", "hidden_spans", "dtype", "scalars")


def _layers(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, ...] | str | None:
    """Read a list of layers; `all` stays a word, since None means not given."""
    from extract.store.config import parse_layers

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
    from extract.store.families import SHORT_NAMES

    return None if name is None else SHORT_NAMES[name]


def keep_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; one that is not given is None."""
    for option in (
        click.option(
            "--scalars",
            type=click.Choice(["bf16", "fp32"]),
            callback=_dtype,
            show_default="fp32",
            help="How the other three families are written.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["bf16", "fp16", "fp32", "int8"]),
            callback=_dtype,
            show_default="bf16",
            help="How hidden states are written; int8 has a scale per token.",
        ),
        click.option(
            "--hidden-spans",
            type=click.Choice(["all", "answer"]),
            show_default="all",
            help="Tokens whose hidden states are kept.",
        ),
        click.option(
            "--hidden-layers",
            metavar="LAYERS",
            callback=_layers,
            show_default="all",
            help="Layers kept: one, some (8,16,24), or all; 0 is the embedding.",
        ),
    ):
        command = option(command)
    return command


def take_kept(options: dict[str, Any]) -> dict[str, Any]:
    """Take these options out of all; return the given fields of `StoreConfig`."""
    taken = {name: options.pop(name) for name in _NAMES}
    given = {name: value for name, value in taken.items() if value is not None}
    if given.get("hidden_layers") == "all":
        given["hidden_layers"] = None
    return given


def as_asked(run_dir: Path, given: dict[str, Any]) -> "RunConfig":
    """Return a run's configuration with these fields of `StoreConfig` changed."""
    config = config_of(run_dir)
    extract = dataclasses.replace(config.extract, **given)
    return dataclasses.replace(config, extract=extract)


def keep_as_asked(
    run_dir: Path, given: dict[str, Any], *, exclusive: bool = True
) -> "RunConfig":
    """Let a run keep what is asked, as long as nothing of it is extracted.

    What is kept changes no answer and no label, so it may be chosen when the signals
    are read, and is recorded then; every later verb finds it in the manifest.

    Args:
      run_dir: an existing run.
      given: fields of `StoreConfig`; the others stay as the run has them.
      exclusive: hold the directory meanwhile. False for the workers of a launcher,
        which all ask the same.

    Returns:
      The run's configuration from now on.

    Raises:
      ValueError: other features are there already.
    """
    from extract.run.directory import RunDir
    from extract.run.manifest import amend_manifest

    config, asked = config_of(run_dir), as_asked(run_dir, given)
    if asked == config:
        return config
    with RunDir.open(run_dir, config.as_json(), exclusive=exclusive) as run:
        _refuse_extracted(run.path, config, asked)
        amend_manifest(run.path, asked.as_json())
    return asked


def _refuse_extracted(path: Path, config: "RunConfig", asked: "RunConfig") -> None:
    """Raise if the run has features of another choice, whole or in part."""
    from extract.records import SETTINGS
    from extract.run.directory import RunDir

    folder = RunDir(path).features(SETTINGS[0]).parent
    if any((folder / setting / "index.json").exists() for setting in SETTINGS):
        raise ValueError(
            f"{path} has features already: {config.extract.in_words()}; you asked for "
            f"{asked.extract.in_words()}; repeat that choice, or delete {folder} to "
            "extract again"
        )
