"""The command line, and the public Python names.

Everything heavy is imported inside functions, so that `--help` is instant and a user
of `jaxprobe` never loads Torch.
"""

import importlib
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.benchmarks.recipes import CHAIN, what_to_do
from beatrice.extract.run.directory import NotWritten
from beatrice.extract.run.share import find_share
from beatrice.extract.run.verbs import alone

if TYPE_CHECKING:
    pass

__all__ = ["main"]

# The module in which a verb lives, in the order of the data, which is that of the help.
VERBS = {
    "demo": "beatrice.cli",
    "real": "beatrice.benchmarks.recipes.commands",
    "data": "beatrice.extract.datasets.commands",
    "world": "beatrice.extract.world.commands",
    "rewrite": "beatrice.extract.label.commands",
    "answer": "beatrice.extract.generate.commands",
    "label": "beatrice.extract.label.commands",
    "sample": "beatrice.extract.generate.commands",
    "extract": "beatrice.extract.signals.commands",
    "verify": "beatrice.doctor",
    "sweep": "beatrice.selection.commands",
    "train": "beatrice.jaxprobe.commands",
    "select": "beatrice.selection.commands",
    "calibrate": "beatrice.jaxprobe.commands",
    "evaluate": "beatrice.benchmarks.commands",
    "baselines": "beatrice.benchmarks.commands",
    "anatomy": "beatrice.selection.commands",
    "corpus": "beatrice.pgir.commands",
    "retrieve": "beatrice.pgir.commands",
    "transfer": "beatrice.benchmarks.recipes.commands",
    "control": "beatrice.pgir.commands",
    "report": "beatrice.benchmarks.commands",
    "compare": "beatrice.benchmarks.commands",
    "score": "beatrice.pgir.commands",
    "fetch": "beatrice.benchmarks.recipes.commands",
    "doctor": "beatrice.doctor",
    "bench": "beatrice.benchmarks.bench.commands",
}
# What several processes may share; each other verb is the work of one.
SHARED = ("rewrite", "answer", "label", "sample", "extract", "train")


class _Verbs(click.Group):
    """Lists verbs in data-flow order; a user's mistake is one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the data."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Load a verb from its module, which imports nothing heavy."""
        if name not in VERBS:
            return None
        if name == "demo":
            return make_demo()
        module = importlib.import_module(VERBS[name])
        return getattr(module, name.replace("-", "_"))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an expected failure becomes one sentence and exit code 1.

        Ctrl-C ends it with the code that a shell gives to what was interrupted.
        """
        try:
            return super().invoke(ctx)
        # Any other error is the program's own mistake, and shows where it was made.
        except (ValueError, OSError, MemoryError) as error:
            from beatrice.extract.run.console import in_one_sentence

            do = f"; {what_to_do(error)}" if isinstance(error, NotWritten) else ""
            raise click.ClickException(in_one_sentence(error) + do) from error
        except KeyboardInterrupt:
            click.echo("Stopped; the same line again continues.", err=True)
            raise click.exceptions.Exit(130) from None


def make_demo() -> click.Command:
    """Return the verb that does everything."""
    from beatrice.extract.run.verbs import RUN_DIR, load_stage
    from beatrice.extract.world.commands import new_world, new_world_options
    from beatrice.jaxprobe.commands import training_options, with_options

    @click.command()
    @RUN_DIR
    @new_world_options
    @training_options
    @click.option("--json", "as_json", is_flag=True, help="Print the headline as JSON.")
    def demo(
        run_dir: Path,
        is_streamed: bool,
        is_mixed: bool,
        is_linear_first: bool,
        as_json: bool,
        **options: Any,
    ) -> None:
        """Do everything, from questions to the report.

        Example: beatrice demo runs/demo
        """
        from beatrice.extract.records import SETTINGS
        from beatrice.extract.run.console import Progress
        from beatrice.extract.run.contents import settings_of
        from beatrice.extract.run.directory import RunDir
        from beatrice.extract.run.stages import run_stage

        asked, progress = new_world(options), Progress()
        with RunDir.open(run_dir, asked) as run:
            for place in CHAIN:
                stage = load_stage(place)
                if stage.name == "control" and settings_of(run) != SETTINGS:
                    continue  # it needs both, and the report says so
                change = None
                if stage.name == "train":
                    change = partial(
                        with_options,
                        is_streamed=is_streamed,
                        is_mixed=is_mixed,
                        is_linear_first=is_linear_first,
                    )
                run_stage(stage, run, progress, change)
        from beatrice.benchmarks.results.stage import summary

        found = summary(run_dir)
        click.echo(json.dumps(found["headline"]) if as_json else found["text"])
        click.echo(str(run_dir / "report.html"), err=as_json)

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
    if context.invoked_subcommand not in SHARED:
        alone(context.invoked_subcommand, find_share())
    # Progress of weight loading and the like is Transformers' own; ours is above.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Spinning workers of one library starve the other's on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    main()
