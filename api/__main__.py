"""`python -m beatrice`: the command line for launchers such as torchrun."""

from beatrice.cli import main

if __name__ == "__main__":
    main(prog_name="python -m beatrice")
