"""The command `beatrice`, and `python -m beatrice` for launchers such as torchrun."""

import sys


def main(prog_name: str | None = None) -> None:
    """Run the command line; Ctrl-C while it is loaded ends it without a traceback."""
    try:
        from beatrice import cli
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's code for an interrupted command
    cli.main(prog_name=prog_name)


if __name__ == "__main__":
    main("python -m beatrice")
