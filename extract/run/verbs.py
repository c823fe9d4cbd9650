"""What all verbs share: options from dataclasses, arguments, stages.

A class of options is a frozen dataclass whose fields are made by `option`: the only
place for name, type, default and help of an option. A `rare` field has no option of
its own: `--set NAME=VALUE` sets it, and the help of `--set` lists all rare fields.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import click

from beatrice.extract.records import SETTINGS, Setting
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import PRESETS, Preset, RunDir
from beatrice.extract.run.process import Share, find_share
from beatrice.extract.run.stages import Change, Stage, change_settings, run_stage

Command = Callable[..., Any]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return an end for a message on an unknown name, or "" if no name is close."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


@contextlib.contextmanager
def checking(flag: str) -> Iterator[None]:
    """Turn a ValueError about an option's value into a usage error."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=flag) from error


class _Option(click.Option):
    """An option; the help of a verb without a default shows `otherwise` instead."""

    def __init__(
        self, *names: Any, otherwise: str | None = None, **settings: Any
    ) -> None:
        super().__init__(*names, **settings)
        self.otherwise = otherwise

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if self.otherwise is not None:
            extra.setdefault("default", self.otherwise)
        return extra


def option(
    text: str,
    default: Any = None,
    *,
    flag: str | None = None,
    rare: bool = False,
    type: click.ParamType | None = None,
    min: float | None = None,
    max: float | None = None,
    is_above: bool = False,
    **settings: Any,
) -> Any:
    """Return a field of a class of options.

    `text` is the option's help. Values are parsed by the field's annotation, or by
    `type`; with `is_above`, `min` itself is excluded. A `rare` option is only given by
    `--set NAME=VALUE`. Other `settings` go to click, except `otherwise`: what the help
    says in place of a default in a verb that has none.
    """
    bounds = {"min": min, "max": max, "min_open": is_above}
    about = {"text": text, "flag": flag, "rare": rare, "type": type, "bounds": bounds}
    return dataclasses.field(default=default, metadata=about | {"settings": settings})


class _Given(click.ParamType):
    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail(
                f"expected a {self.name}, found an empty one; was a shell variable "
                "not set?"
            )
        return super().convert(value, param, ctx)


class Text(_Given, click.types.StringParamType):
    """A text that is not empty, as an empty one would count as not given."""


class GivenPath(_Given, click.Path):
    """A path that is not empty, as an empty one would mean the current folder."""

    def __init__(self, **settings: Any) -> None:
        """Convert to `Path`; settings are click's."""
        super().__init__(path_type=Path, **settings)


class NewPath(GivenPath):
    """A path to write to, below a folder that the user may write in."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path."""
        path = super().convert(value, param, ctx)
        folder = next((x for x in path.absolute().parents if x.exists()), path)
        is_writable = folder.is_dir() and os.access(folder, os.W_OK)
        if not is_writable and not path.exists():
            what = "is not writable" if folder.is_dir() else "is not a folder"
            self.fail(f"{path} cannot be written: {folder} {what}")
        # A file is written by replacing it, which, if permitted, replaces devices too.
        if path.exists() and not (path.is_file() or path.is_dir()):
            self.fail(f"{path} is a device or a pipe, expected a file or a new path")
        return path


class _Number(click.FloatRange):
    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number")
        return number


def _type_of(field: dataclasses.Field, hint: Any) -> click.ParamType:
    if field.metadata["type"] is not None:
        return field.metadata["type"]
    arguments = [a for a in typing.get_args(hint) if a is not types.NoneType]
    if typing.get_origin(hint) is Literal:
        return click.Choice(arguments)
    if arguments:
        return _type_of(field, arguments[0])  # `X | None`, `tuple[X, ...]`
    bounds = field.metadata["bounds"]
    return {
        int: click.IntRange(**bounds),
        float: _Number(**bounds),
        bool: click.BOOL,
        Path: GivenPath(),
    }.get(hint, Text())


def _click_option(field: dataclasses.Field, hint: Any) -> Callable[[Command], Command]:
    about = field.metadata
    flag = about["flag"] or f"--{field.name.replace('_', '-')}"
    settings = {"cls": _Option, "help": about["text"], **about["settings"]}
    if field.default is not None:
        settings["default"] = field.default
    if typing.get_origin(hint) is tuple:
        settings.setdefault("multiple", True)
    is_flag = bool in (hint, *typing.get_args(hint))
    settings |= {"is_flag": True} if is_flag else {"type": _type_of(field, hint)}
    return click.option(*flag.split(" "), field.name, **settings)


@dataclasses.dataclass(eq=False)
class _Settings(click.ParamType):
    """`NAME=VALUE` of a rare option."""

    name = "setting"
    kinds: dict[str, click.ParamType]  # of the values, by name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, text = value.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in self.kinds:
            self.fail(
                f"expected NAME=VALUE with a NAME of {', '.join(self.kinds)}, found "
                f"{value!r}{did_you_mean(name, self.kinds)}"
            )
        if not text and self.kinds[name] is click.BOOL:
            self.fail(f"{name}: expected true or false, found nothing")
        try:
            return name, self.kinds[name].convert(text, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{name}: {error.message}")


def _set_option(rare: dict[str, tuple[dataclasses.Field, Any]]) -> Any:
    texts = []
    for name, (field, _) in rare.items():
        default = "" if field.default is None else f" (default {field.default})"
        texts.append(f"{name}: {field.metadata['text'].rstrip('.')}{default}.")
    return click.option(
        "--set",
        "rare_settings",
        multiple=True,
        metavar="NAME=VALUE",
        type=_Settings({name: _type_of(*pair) for name, pair in rare.items()}),
        help=f"Settings that are seldom needed; repeatable. {' '.join(texts)}",
    )


def options(**kinds: type) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of some classes to a command."""
    pairs = [
        (field, typing.get_type_hints(kind)[field.name])
        for kind in kinds.values()
        for field in dataclasses.fields(kind)
    ]
    rare = {f.name: (f, h) for f, h in pairs if f.metadata["rare"]}
    usual = [(f, h) for f, h in pairs if not f.metadata["rare"]]

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            # A verb's own defaults, which click applies only to options.
            defaults = click.get_current_context().default_map or {}
            chosen = {}
            for name, value in values.pop("rare_settings", ()):
                if name in chosen:
                    raise click.UsageError(f"--set {name}: give it once")
                chosen[name] = value
            values |= {n: defaults[n] for n in rare if n in defaults} | chosen
            for name, kind in kinds.items():
                names = [f.name for f in dataclasses.fields(kind) if f.name in values]
                values[name] = kind(**{n: values.pop(n) for n in names})
            return command(**values)

        with_options: Command = call
        if rare:
            with_options = _set_option(rare)(with_options)
        for field, hint in reversed(usual):
            with_options = _click_option(field, hint)(with_options)
        return with_options

    return add


def given(values: Any) -> dict[str, Any]:
    """Return the options that were given, by name: neither None nor empty."""
    pairs = ((f.name, getattr(values, f.name)) for f in dataclasses.fields(values))
    return {name: value for name, value in pairs if value not in (None, ())}


class RunPath(GivenPath):
    """A path on this machine; a URL, which would become a local folder, is an error."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path; a URL is a usage error."""
        if _URL.match(str(value)):
            self.fail(
                f"a run directory is a folder on this machine, found {str(value)!r}; "
                "give a local or mounted path (only a feature store can be at a URL, "
                "with beatrice.extract.signals.extract.extract)"
            )
        return super().convert(value, param, ctx)


RUN_DIR = click.argument("run_dir", type=RunPath())
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
# What presets mean for encoders; a test compares it with their configurations.
SIZES = (
    "few (for some hundred answers): encoders begin as regressions, width 16, batches "
    "of 32, 12 epochs at 0.003; demo: width 16, batches of 128, 12 epochs at 0.002; "
    "paper: width 128, batches of 512, 60 epochs at 0.0002; smoke: width 8, batches of "
    "64, 2 epochs at 0.003, one seed (its results mean nothing); all others: 3 seeds."
)
PRESET = click.Choice(PRESETS)


class _SettingChoice(click.Choice):
    def __init__(self) -> None:
        super().__init__(["both", "closed-book", "with-context"])

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        name = str(super().convert(value, param, ctx)).replace("-", "_")
        return SETTINGS if name == "both" else (typing.cast(Setting, name),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of every new run, wherever its questions come from."""

    model: str | None = option(
        "Backbone: a directory, a GGUF file, a Hub id, or embedded, the small model of "
        "the microworld, which knows no real question."
    )
    preset: Preset | None = option(
        f"Sizes of encoders and training. {SIZES}",
        type=PRESET,
        otherwise="paper; for the world, demo",
    )
    settings: tuple[Setting, ...] = option(
        "How questions are asked; with context, only those that have passages.",
        "both",
        type=_SettingChoice(),
        multiple=False,
    )
    seed: int = option(
        "Seed of the splits (the world's are fixed), of training and bootstrap.",
        0,
        min=0,
        max=2**31 - 1,
    )


def do_again_if_changed(run_dir: Path, stage: Stage, change: Change) -> None:
    """Do a stage whose settings may change at any time, again if they do."""
    with RunDir.open(run_dir) as run:
        change_settings(run, stage, change)
        run_stage(stage, run, Progress())


class Parsed(click.types.FuncParamType):
    """What a function makes of a text; its ValueErrors become usage errors."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value."""
        try:
            return self.func(value)
        except ValueError as error:
            self.fail(str(error))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareOptions:
    """Which part of a stage a process does."""

    shard: Share | None = option(
        "Do part I (from 0) of N, with one process for each part. Torchrun, srun and "
        "mpirun set this by themselves.",
        metavar="I/N",
        type=Parsed(find_share),
    )

    @property
    def share(self) -> Share:
        """This process's share of the work."""
        return self.shard or find_share()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkOptions(ShareOptions):
    """Which part of a stage a process does, or whether it only counts the work."""

    dry_run: bool = option(
        "Only count the work of all parts; ask no model and write nothing.", False
    )

    @property
    def share(self) -> Share:
        """This process's share of the work; a dry run counts all of it."""
        return Share() if self.dry_run else super().share


def check_alone(what: str, share: Share) -> None:
    """Check that a verb was started as one process."""
    if share.world_size > 1:
        raise click.UsageError(
            f"{what} runs in one process, but {share.world_size} were launched "
            f"({share.source}); start it once (if the verb has --server, --set "
            "concurrency=N sets the number of requests at a time); only verbs with "
            "--shard can be shared by workers"
        )
