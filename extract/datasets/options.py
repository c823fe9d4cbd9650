"""The options that say which published files are read, and how they are asked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from beatrice.extract.datasets.splits import A_NAME
from beatrice.extract.records import is_safe_name
from beatrice.extract.run.verbs import SEED, SETTINGS_OPTION, preset_option

if TYPE_CHECKING:
    from beatrice.extract.datasets.splits import BuildConfig, Source
    from beatrice.extract.generate.prompts import PromptConfig

_CONTEXTS = ("supporting", "first", "all", "none")
_ROLES = ("train", "dev", "held-out")
Command = Callable[..., None]


class SetName(click.ParamType):
    """The name of a question set, which becomes part of ids and paths."""

    name = "name"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the name, or refuse what is none."""
        if not is_safe_name(value):
            self.fail(f"expected {A_NAME}, found {value!r}", param, ctx)
        return value


def _size(text: str) -> Any:
    """Return a number of questions, or "all"."""
    if text == "all":
        return text
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"expected a whole number above 0, or all, found {text!r}")
    return int(text)


def _context(text: str) -> str:
    """Return which passages become a context."""
    if text not in _CONTEXTS:
        raise ValueError(f"expected {', '.join(_CONTEXTS)}, found {text!r}")
    return text


class _Of(click.ParamType):
    """A value, `NAME=VALUE` of one question set, or either.

    Args:
      parse: makes the value of its text; a ValueError says why it cannot.
      named: whether a name must, may or cannot stand before it.
    """

    name = "value"

    def __init__(
        self, parse: Callable[[str], Any], named: Literal["always", "maybe", "never"]
    ) -> None:
        self._parse, self._named = parse, named

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the name, or None for all sets, and the value; or the value alone."""
        if not isinstance(value, str):
            return value  # a default
        name, equals, rest = value.partition("=")
        has_name = self._named == "always" or (self._named == "maybe" and equals)
        if has_name and not (equals and rest and is_safe_name(name)):
            self.fail(
                f"expected NAME=VALUE, such as mine={rest or name}, with {A_NAME}; "
                f"found {value!r}",
                param,
                ctx,
            )
        try:
            parsed = self._parse(rest if has_name else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._named == "never":
            return parsed
        return name if has_name else None, parsed


def _by_set(
    option: str, given: Sequence[tuple[str | None, Any]], default: Any
) -> tuple[Any, dict[str, Any]]:
    """Return what holds for all sets, and for each that was named."""
    found: dict[str | None, Any] = {}
    for name, value in given:
        if name in found:
            raise click.UsageError(
                f"{option} {f'{name}=' if name else ''}{value}: another one was "
                f"given for {name or 'all sets'} before; give one"
            )
        found[name] = value
    common = found.pop(None, default)
    return common, {name: one for name, one in found.items() if name is not None}


def _files(role: str, text: str) -> Any:
    return click.option(
        f"--{role}",
        multiple=True,
        type=_Of(Path, "always"),
        metavar="NAME=FILE",
        help=text,
    )


_QUESTIONS = (
    _files("train", "Training questions; may be repeated."),
    _files("dev", "Development questions, halved into validation and test."),
    _files("held-out", "Questions never trained on (split `ood`)."),
    click.option(
        "--seed",
        default=0,
        type=SEED,
        help="Of the splits, of training and bootstrap.",
    ),
    click.option(
        "--n-train",
        multiple=True,
        type=_Of(_size, "maybe"),
        metavar="[NAME=]N",
        help="N or all; with NAME= of one set alone. Default: 10000 of each.",
    ),
    click.option(
        "--n-evaluation",
        default=500,
        type=_Of(_size, "never"),
        metavar="N",
        help="Validation and test each, of each set; all halves the questions.",
    ),
    click.option(
        "--n-held-out",
        multiple=True,
        type=_Of(_size, "always"),
        metavar="NAME=N",
        help="N or all. Default: popqa=1000, nq=1182, triviaqa=1277.",
    ),
    click.option(
        "--context",
        multiple=True,
        type=_Of(_context, "maybe"),
        metavar="[NAME=]CONTEXT",
        help="Passages of an example: supporting (the default), the first of these, "
        "all or none; questions without are left out, and counted. With NAME= of one "
        "set alone: with none, its questions are asked closed-book only. Default for a "
        "set of your own: what its files have.",
    ),
    click.option(
        "--splits",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Take the splits of this splits.json instead of drawing.",
    ),
)
_ASKING = (
    click.option(
        "--model",
        help="Backbone: a directory, a GGUF file, or a Hub id; or embedded, the small "
        "model of the microworld, which knows no real question.",
    ),
    click.option(
        "--model-dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Of the backbone's weights, where it is loaded here. Default: bfloat16 "
        "with --device cuda, else float32.",
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        help="Of the backbone; under torchrun, cuda is each process's own GPU.",
    ),
    preset_option(
        "paper",
        "Sizes of encoders and training: the paper's, or a microworld run's.",
    ),
    SETTINGS_OPTION,
    click.option(
        "--template",
        type=click.Choice(["paper", "short", "few-shot"]),
        default="paper",
        help="The prompt's words: appendix A's, what the embedded model was taught, or "
        "worked examples before the question, which a base model needs.",
    ),
    click.option(
        "--shots",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="The worked examples, JSON lines of question, answer and context; "
        "default: four of our own.",
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help=r"Ends an answer where it begins; may be given several times, \\n is a "
        "line feed. Default: a line feed with few-shot, else nothing.",
    ),
    click.option(
        "--chat/--plain",
        default=False,
        help="Through the tokenizer's chat template, thinking off; else as plain text.",
    ),
    click.option(
        "--overlong",
        type=click.Choice(["refuse", "drop-passages"]),
        default="refuse",
        help="Prompts that do not fit: refuse them, or leave out their last passages "
        "whole, listed and counted.",
    ),
    click.option(
        "--window",
        type=click.IntRange(min=2),
        help="Most tokens of prompt and answer; default: the model's own window.",
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        help="Longest answer; default: 32, of the embedded model 10.",
    ),
)


def question_options(command: Command) -> Command:
    """Add the options that say which questions are read."""
    for option in reversed(_QUESTIONS):
        command = option(command)
    return command


def asking_options(command: Command) -> Command:
    """Add the options that say which model is asked, and how."""
    for option in reversed(_ASKING):
        command = option(command)
    return command


def take_files(given: dict[str, Any]) -> list[tuple[str, str, Path]]:
    """Take the files out of a command's options, as (role, set, path)."""
    return [
        (role, *one) for role in _ROLES for one in given.pop(role.replace("-", "_"))
    ]


def sources_of(files: list[tuple[str, str, Path]]) -> "list[Source]":
    """Return the files with what they are for."""
    from beatrice.extract.datasets.splits import Source

    return [Source(dataset=name, role=role, path=path) for role, name, path in files]


def build_config(options: dict[str, Any]) -> "BuildConfig":
    """Return what is to be built."""
    from beatrice.extract.datasets.splits import (
        HELD_OUT_SIZES,
        BuildConfig,
        SplitConfig,
    )

    n_train, n_train_of = _by_set("--n-train", options["n_train"], 10_000)
    splits = SplitConfig(
        seed=options["seed"],
        n_train=n_train,
        n_train_of=n_train_of,
        n_evaluation=options["n_evaluation"],
        n_held_out=HELD_OUT_SIZES | dict(options["n_held_out"]),
    )
    common, contexts = _by_set("--context", options["context"], None)
    return BuildConfig(
        splits=splits,
        context=common,
        contexts=contexts,
        skip_bad=options["skip_bad"],
        evidence=options["evidence"],
    )


def prompt_config(options: dict[str, Any]) -> "PromptConfig":
    """Return how the questions are put."""
    from beatrice.extract.generate.prompts import SHOTS, PromptConfig, read_shots

    is_shown = options["template"] == "few-shot"
    if options["shots"] is not None and not is_shown:
        raise click.UsageError("--shots is for --template few-shot; give both")
    given = SHOTS if options["shots"] is None else read_shots(options["shots"])
    return PromptConfig(
        shots=given if is_shown else (),
        template=options["template"],
        chat=options["chat"],
        overlong=options["overlong"],
        window=options["window"],
    )


def stop_strings(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts that end an answer; a shell cannot easily give a line feed."""
    given = tuple(text.replace(r"\n", "\n") for text in options["stop"])
    if not all(given):
        raise click.BadParameter("expected a text, found none", param_hint="--stop")
    return given or (("\n",) if options["template"] == "few-shot" else ())
