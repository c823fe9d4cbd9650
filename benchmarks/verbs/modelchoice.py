"""Whether the backbone of a run, and what is kept of it, can be: told at once.

Otherwise it is found when the model is loaded, after an hour of answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.backbone.names import EMBEDDED, check_name, model_path

if TYPE_CHECKING:
    from benchmarks.stages.presets import RunConfig
    from benchmarks.verbs.backends import BackendOptions


def check_model_option(name: str, option: str = "--model") -> str:
    """Return a model's name if it can be one.

    Raises:
      click.BadParameter: no such directory, and no Hub id.
    """
    try:
        check_name(model_path(name))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
    return name


def check_local_model(name: str, backend: "BackendOptions", option: str) -> None:
    """Refuse a model that is to run on this machine and cannot be there.

    Raises:
      click.BadParameter: no such directory, and no Hub id.
    """
    if backend.server is None:
        check_model_option(name, option)


def check_choices(config: "RunConfig") -> None:
    """Refuse a backbone that cannot be loaded, and layers that it does not have.

    A Hub id is not looked at: nothing is downloaded before it is needed.

    Raises:
      click.BadParameter: there is no such model, or no such layer.
      ValueError: the model's config or tokenizer cannot be used.
    """
    check_model_option(config.model)
    layers = config.extract.hidden_layers
    is_here = Path(config.model_path).expanduser().exists()
    if not is_here or (config.model == EMBEDDED and layers is None):
        return
    from extract.backbone.checkpoint import load_outline
    from extract.run.console import quiet

    quiet()
    outline = load_outline(str(Path(config.model_path).expanduser()))
    check_layers(layers, outline.config.num_hidden_layers, config.model)


def check_layers(layers: Sequence[int] | None, n_layers: int, model: str) -> None:
    """Refuse entries of the resid axis that a model does not have.

    Raises:
      click.BadParameter: names the layers there are.
    """
    wrong = [layer for layer in layers or () if layer > n_layers]
    if wrong:
        raise click.BadParameter(
            f"{model} has layers 0 (the embedding) to {n_layers}, not {wrong[0]}",
            param_hint="--hidden-layers",
        )
