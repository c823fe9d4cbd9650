"""The command line, and the public Python names.

Everything heavy is imported inside functions, so that `--help` is instant and a user
of `jaxprobe` never loads Torch.
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pgir.scorer import Scorer

__all__ = ["load", "main"]

# The module in which a verb lives, in the order of the data, which is that of the help.
VERBS = {
    "demo": "benchmarks.verbs.commands",
    "data": "benchmarks.verbs.datacommands",
    "world": "benchmarks.verbs.commands",
    "rewrite": "benchmarks.verbs.commands",
    "answer": "benchmarks.verbs.commands",
    "label": "benchmarks.verbs.commands",
    "sample": "benchmarks.verbs.commands",
    "extract": "benchmarks.verbs.commands",
    "verify": "benchmarks.verbs.commands",
    "sweep": "benchmarks.verbs.commands",
    "train": "benchmarks.verbs.commands",
    "select": "benchmarks.verbs.commands",
    "calibrate": "benchmarks.verbs.commands",
    "evaluate": "benchmarks.verbs.commands",
    "control": "benchmarks.verbs.commands",
    "report": "benchmarks.verbs.commands",
    "score": "pgir.commands",
    "doctor": "benchmarks.verbs.doctorcommand",
    "bench": "benchmarks.speed.commands",
}


def load(path: str | Path, *, model: str | None = None) -> "Scorer":
    """Return the scorer of a finished run.

    Args:
      path: a run directory whose detector is calibrated.
      model: where the run's backbone lies, if it has moved.

    Returns:
      An object whose `score(question, answer, context=None)` gives the calibrated
      probability that the answer is right.

    Raises:
      ValueError: the run has no detector yet, or the backbone is another one.
    """
    from pgir.scorer import Scorer

    return Scorer.load(Path(path), model=model)


class _Verbs(click.Group):
    """Lists verbs in data-flow order; a user's mistake is one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the data."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Load a verb from its module, which imports nothing heavy."""
        if name not in VERBS:
            return None
        module = importlib.import_module(VERBS[name])
        return getattr(module, name.replace("-", "_"))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an expected failure becomes one sentence and exit code 1."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            message = " ".join(str(error).split())
            # A path or a text given by a user may hold what no terminal can show.
            safe = message.encode("utf-8", "backslashreplace").decode()
            raise click.ClickException(safe) from error


@click.group(
    cls=_Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 88,
    },
)
@click.version_option(package_name="beatrice-probe")
def main() -> None:
    """Is a frozen language model's answer right? Ask its own internal signals.

    Every verb reads its inputs from RUN_DIR and writes its outputs there; the same
    line again continues where it stopped. `demo` runs them all.
    """
    # Progress of weight loading and the like is Transformers' own; ours is above.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Spinning workers of one library starve the other's on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    main()
