"""Options that make a run what it is, whatever its questions."""

import click

MODEL = click.option(
    "--model",
    default="embedded",
    show_default=True,
    help="Backbone: a directory, a Hub id, or the embedded one.",
)
ENCODING = (
    click.option(
        "--answer-span",
        type=click.Choice(["emitting", "literal"]),
        default="emitting",
        show_default=True,
        help="Positions that emit the answer, or the answer tokens alone.",
    ),
    click.option(
        "--streamed",
        "is_streamed",
        is_flag=True,
        help="Train from the store in groups, not in memory.",
    ),
    click.option(
        "--mixed",
        "is_mixed",
        is_flag=True,
        help="Round the operands of the encoders' products to bfloat16.",
    ),
)
