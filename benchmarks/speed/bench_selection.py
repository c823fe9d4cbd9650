"""`beatrice bench select`: how many fusion heads a second."""

import json

import click

WIDTHS = {
    "microworld": {},
    "paper": {
        "d_pooled": 256,
        "hidden": 128,
        "n_train": 6000,
        "n_pool": 15,
        "n_torch": 6,
        "n_epochs": 4,
        "n_turns": 2,
    },
}


@click.command()
@click.option(
    "--widths",
    type=click.Choice(list(WIDTHS)),
    default="microworld",
    help="Of encoders and heads.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def select(widths: str, as_json: bool) -> None:
    """Train the heads of one search round, beside a PyTorch loop over the same heads.

    Both sides must give the same logits from the same weights before they are timed.

    Example: beatrice bench select --widths paper
    """
    from benchmarks.stages.presets import WHOLE_OPERATIONS
    from benchmarks.verbs.opening import set_compiler

    set_compiler(WHOLE_OPERATIONS)  # as a run does
    from benchmarks.speed.select_cost import SelectCost, measure

    found = measure(SelectCost(**WIDTHS[widths]))
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo("| widths | heads/s | PyTorch loop, heads/s | ratio | AUROC, both |")
    click.echo("|---|---|---|---|---|")
    click.echo(
        f"| {widths} | {found['heads_per_second']:.1f} | "
        f"{found['torch_heads_per_second']:.2f} ({found['torch_threads']} threads) | "
        f"{found['ratio']:.1f} | {found['auroc']:.4f} / {found['torch_auroc']:.4f} |"
    )
