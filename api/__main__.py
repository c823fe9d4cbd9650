"""`python -m beatrice`: the command line, as a launcher such as torchrun starts it."""

from beatrice.cli import main

if __name__ == "__main__":
    main(prog_name="python -m beatrice")
