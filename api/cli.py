"""The command line.

Everything heavy is imported inside functions, so that `--help` is instant and a user
of `jaxprobe` never loads Torch.
"""

import copy
import difflib
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import click

from beatrice import missing_extra
from beatrice.benchmarks import CHAIN, NEXT, what_to_do
from beatrice.extract.run.directory import NotWritten
from beatrice.extract.run.process import find_share
from beatrice.extract.run.verbs import alone

__all__ = ["main"]

# The module in which a verb lives, under the headings and in the order of the help.
HEADINGS = {
    "Begin here": {
        "demo": "beatrice.cli",
        "fit": "beatrice.commands",
        "score": "beatrice.commands",
        "probes": "beatrice.commands",
        "real": "beatrice.benchmarks.commands",
        "doctor": "beatrice.doctor",
    },
    "From questions to a detector, in this order": {
        "data": "beatrice.extract.datasets.commands",
        "rewrite": "beatrice.extract.commands",
        "answer": "beatrice.extract.commands",
        "label": "beatrice.extract.commands",
        "sample": "beatrice.extract.commands",
        "extract": "beatrice.extract.commands",
        "sweep": "beatrice.selection.commands",
        "train": "beatrice.jaxprobe.commands",
        "select": "beatrice.selection.commands",
        "calibrate": "beatrice.jaxprobe.commands",
    },
    "What it is worth": {
        "evaluate": "beatrice.benchmarks.commands",
        "baselines": "beatrice.benchmarks.commands",
        "anatomy": "beatrice.selection.commands",
        "report": "beatrice.benchmarks.commands",
        "export": "beatrice.commands",
    },
    "Retrieval": {
        "corpus": "beatrice.pgir.commands",
        "transfer": "beatrice.benchmarks.commands",
        "control": "beatrice.pgir.commands",
    },
    "Speed and exactness": {"bench": "beatrice.benchmarks.bench.commands"},
}
VERBS = {verb: path for verbs in HEADINGS.values() for verb, path in verbs.items()}
# What does the work of verbs that there were.
_FORMER = {
    "compare": "report RUN_A RUN_B",
    "fetch": "real --fetch NAME",
    "retrieve": "corpus FOLDER --search QUESTION",
    "verify": "doctor RUN_DIR --verify",
    "world": "data RUN_DIR --world",
}


def _set_quiet(context: click.Context, option: click.Parameter, is_quiet: bool) -> None:
    from beatrice.extract.run.console import Progress

    Progress.is_quiet = is_quiet


_QUIET = click.Option(
    ["--quiet"],
    is_flag=True,
    expose_value=False,
    callback=_set_quiet,
    help="Print results and errors alone.",
)
# What several processes may share; each other verb is the work of one.
SHARED = ("rewrite", "answer", "label", "sample", "extract", "train")


class _Verbs(click.Group):
    """Lists verbs in data-flow order; a user's mistake is one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb from its module, which imports nothing heavy."""
        if cmd_name not in VERBS:
            return None
        if cmd_name == "demo":
            return _for_people("demo", make_demo())
        module = importlib.import_module(VERBS[cmd_name])
        return _for_people(cmd_name, getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; of one that does not exist, name what may be meant."""
        name = args[0]
        close = difflib.get_close_matches(name, VERBS, 1)
        meant = _FORMER.get(name, close[0] if close else None)
        if name not in VERBS and meant is not None:
            ctx.fail(f"no verb is called {name!r}; did you mean `beatrice {meant}`?")
        return super().resolve_command(ctx, args)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the verbs under their headings, each with its whole first sentence."""
        for heading, verbs in HEADINGS.items():
            rows = []
            for verb in verbs:
                command = self.get_command(ctx, verb)
                text = (command.help or "") if command else ""
                rows.append((verb, text.partition("\n\n")[0]))
            with formatter.section(heading):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an expected failure becomes one sentence and exit code 1.

        Ctrl-C ends it with the code that a shell gives to what was interrupted.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `| head` has enough: click ends without a word
        # Any other error is the program's own mistake, and shows where it was made.
        except (ValueError, OSError, MemoryError) as error:
            from beatrice.extract.run.console import in_one_sentence

            do = f"; {what_to_do(error)}" if isinstance(error, NotWritten) else ""
            raise click.ClickException(in_one_sentence(error) + do) from error
        except ImportError as error:
            if (text := missing_extra(error)) is None:
                raise
            raise click.ClickException(text) from error
        except KeyboardInterrupt:
            click.echo("Stopped; the same line again continues.", err=True)
            raise click.exceptions.Exit(130) from None


def _for_people(verb: str, command: click.Command) -> click.Command:
    """Return a verb that has --quiet, and says at its end which verb comes next."""
    verb_command = copy.copy(command)
    verb_command.params = [*command.params, _QUIET]
    work, after = command.callback, NEXT.get(verb)

    def callback(**values: Any) -> Any:
        assert work is not None
        result = work(**values)
        how = values.get("how") or values.get("work")
        is_share = getattr(how, "shard", None) or find_share().world_size > 1
        if after and not is_share and not getattr(how, "dry_run", False):
            from beatrice.extract.run.console import Progress

            Progress().note(f"next: beatrice {after} {values['run_dir']}")
        return result

    verb_command.callback = callback
    return verb_command


_AFTER_ANSWERS = 6.5  # times what the answers of the demo took (42 of 318 seconds)


def make_demo() -> click.Command:
    """Return the verb that does everything."""
    from beatrice.extract.commands import KeptOptions
    from beatrice.extract.run.verbs import (
        AS_JSON,
        RUN_DIR,
        RunOptions,
        given,
        load_stage,
        options,
    )
    from beatrice.jaxprobe.commands import TrainingOptions

    @click.command()
    @RUN_DIR
    @AS_JSON
    @options(run=RunOptions, kept=KeptOptions, training=TrainingOptions)
    def demo(
        run_dir: Path,
        as_json: bool,
        run: RunOptions,
        kept: KeptOptions,
        training: TrainingOptions,
    ) -> None:
        """Do everything, from questions to the report.

        Example: beatrice demo runs/demo
        """
        from beatrice.extract.records import SETTINGS
        from beatrice.extract.run.console import Progress, in_words
        from beatrice.extract.run.contents import settings_of
        from beatrice.extract.run.directory import RunDir
        from beatrice.extract.run.stages import run_stage
        from beatrice.extract.world.stage import new_world

        settings, progress = new_world(**given(run), kept=kept.fields()), Progress()
        began = time.monotonic()
        with RunDir.open(run_dir, settings) as opened:
            for stage_path in CHAIN:
                stage = load_stage(stage_path)
                if stage.name == "control" and settings_of(opened) != SETTINGS:
                    continue  # it needs both, and the report says so
                change = training.change if stage.name == "train" else None
                done = run_stage(stage, opened, progress, change)
                if stage.name == "answer" and done is not None:
                    left = _AFTER_ANSWERS * (time.monotonic() - began)
                    progress.note(f"demo: about {in_words(left)} left for all stages")
        progress.note(f"demo: done in {in_words(time.monotonic() - began)}")
        from beatrice.benchmarks.results.report import summary

        page = summary(run_dir)
        click.echo(json.dumps(page["headline"]) if as_json else page["text"])

    return demo


@click.group(
    cls=_Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 88,
        "show_default": True,
    },
)
@click.version_option(package_name="beatrice-probe")
@click.pass_context
def main(context: click.Context) -> None:
    """Is a frozen language model's answer right? Ask its own internal signals.

    Every verb reads its inputs from RUN_DIR and writes its outputs there; the same
    line again continues where it stopped. `demo` runs them all.
    """
    verb = context.invoked_subcommand
    if verb is not None and verb not in SHARED:
        alone(verb, find_share())
    # Progress of weight loading and the like is Transformers' own; ours is above.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Spinning workers of one library starve the other's on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    main()
