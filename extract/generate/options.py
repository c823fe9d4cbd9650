"""The options that say which model generates, and the backend they stand for.

Whether a model can be is told at once, and not after an hour of answers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from beatrice.extract.backbone.names import EMBEDDED, check_name, model_path

if TYPE_CHECKING:
    from beatrice.extract.backbone.names import BackboneConfig
    from beatrice.extract.generate.generator import Generator
    from beatrice.extract.run.directory import RunDir

Command = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Where a model runs and how it is asked, as given on the command line."""

    server: str | None  # URL up to /v1, or None for Transformers on this machine
    served_model: str | None = None  # what the server calls the run's backbone
    dialect: str
    revision: str  # of the weights behind the server's name; part of every key
    served_dtype: str = "unstated"  # of the same; likewise
    concurrency: int
    retries: int
    timeout: float
    price_prompt: float
    price_new: float
    max_cost: float | None  # in the currency of the prices
    device: str = "cpu"
    dtype: str | None = None  # of weights loaded here; None: the device's default
    batch_tokens: int = 16_384


_SCHEMES = ("http://", "https://")
_SERVER = (
    click.option("--server", help="OpenAI-compatible server, up to /v1."),
    click.option(
        "--dialect",
        type=click.Choice(["vllm", "openai"]),
        default="vllm",
        help="vllm: exact token ids, top-k, thinking off. openai: standard fields "
        "only, with which thinking cannot be switched off.",
    ),
    click.option(
        "--revision",
        default="unstated",
        help="Of the weights, tokenizer and chat template behind the server's model "
        "name; no server tells.",
    ),
    click.option(
        "--served-dtype",
        default="unstated",
        help="Of the server's weights, such as bfloat16; no server tells.",
    ),
    click.option(
        "--concurrency",
        default=16,
        type=click.IntRange(min=1),
        help="Most requests under way.",
    ),
    click.option(
        "--retries",
        default=5,
        type=click.IntRange(min=0),
        help="Of a request that failed, with back-off.",
    ),
    click.option(
        "--timeout",
        default=600.0,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds until a request is answered in full.",
    ),
    click.option(
        "--price-prompt",
        default=0.0,
        type=click.FloatRange(min=0),
        help="Per million prompt tokens, for --max-cost.",
    ),
    click.option(
        "--price-new",
        default=0.0,
        type=click.FloatRange(min=0),
        help="Per million generated tokens, likewise.",
    ),
    click.option(
        "--max-cost",
        type=click.FloatRange(min=0),
        help="Stop before more than this is spent on the stage, at these prices and "
        "with the texts that earlier processes kept.",
    ),
)
_LOCAL = (
    click.option("--device", default="cpu", help="Without --server: Torch's."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Without --server: of the weights. Default: bfloat16 on cuda, else "
        "float32.",
    ),
    click.option(
        "--batch-tokens",
        default=16_384,
        type=click.IntRange(min=1),
        help="Without --server: tokens per batch, padding included.",
    ),
)


SERVED_MODEL = click.option(
    "--served-model", help="What the server calls the run's backbone."
)


def server_options(command: Command) -> Command:
    """Add the options of a server; the command gets them as its `backend`."""
    return _with_backend(command, _SERVER)


def backend_options(command: Command) -> Command:
    """Add the options of a server, and of Transformers where there is none."""
    return _with_backend(command, _SERVER + _LOCAL)


def _with_backend(
    command: Command, options: Sequence[Callable[[Command], Command]]
) -> Command:
    @functools.wraps(command)
    def with_backend(**given: Any) -> None:
        names = {field.name for field in dataclasses.fields(BackendOptions)}
        taken = {name: given.pop(name) for name in names & given.keys()}
        backend = BackendOptions(**taken)
        _check_server(backend)
        command(backend=backend, **given)

    for option in reversed(options):
        with_backend = option(with_backend)
    return with_backend


def _check_server(backend: BackendOptions) -> None:
    """Refuse a server's option without a server, and a server that is no URL."""
    if backend.server is None:
        for name in ("max_cost", "served_model"):
            if getattr(backend, name) is not None:
                option = "--" + name.replace("_", "-")
                raise click.UsageError(f"{option} is for a server; give --server too")
    elif not backend.server.startswith(_SCHEMES):
        raise click.BadParameter(
            "expected a URL such as http://localhost:8000/v1, found "
            f"{backend.server!r}",
            param_hint="--server",
        )


@contextlib.contextmanager
def open_generator(
    model: str,
    options: BackendOptions,
    *,
    stop_ids: Sequence[int] = (),
    log_probs: bool = False,
    tokenizer: Any = None,
    earlier: tuple[int, int] = (0, 0),
) -> Iterator["Generator"]:
    """Open the backend of a model.

    Args:
      model: a directory or Hub id, or the name that the server gives it.
      options: where it runs.
      stop_ids: of the model, where token ids are wanted from a server.
      log_probs: ask a server for them; on this machine they cost nothing.
      tokenizer: of the model that a server holds, where it is known here.
      earlier: prompt and new tokens that count towards the spending cap already.
    """
    if options.server is None:
        import torch

        from beatrice.extract.backbone.loading import load_backbone
        from beatrice.extract.backbone.names import default_dtype, own_device
        from beatrice.extract.generate.local import TransformersGenerator

        device = own_device(options.device, torch.cuda.device_count())
        dtype = options.dtype or default_dtype(options.device)
        backbone = load_backbone(model_path(model), dtype=dtype, device=device)
        yield TransformersGenerator(
            backbone=backbone, tokens_per_batch=options.batch_tokens
        )
        return
    from beatrice.extract.generate.generator import tokenizer_identity
    from beatrice.extract.generate.server import Prices, ServedGenerator, ServerConfig

    config = ServerConfig(
        url=options.server,
        model=model,
        revision=options.revision,
        dialect=options.dialect,
        dtype=options.served_dtype,
        **tokenizer_identity(tokenizer),
        log_probs=log_probs,
        n_concurrent=options.concurrency,
        n_retries=options.retries,
        timeout=options.timeout,
        prices=Prices(
            prompt=options.price_prompt, new=options.price_new, cap=options.max_cost
        ),
    )
    with ServedGenerator(config, stop_ids, earlier, tokenizer) as generator:
        yield generator


def check_model_option(name: str, option: str = "--model") -> None:
    """Refuse a name that no model can have here.

    Raises:
      click.BadParameter: no such directory, and no Hub id.
    """
    try:
        check_name(model_path(name))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def check_backbone(
    config: "BackboneConfig", hidden_layers: Sequence[int] | None = None
) -> None:
    """Refuse a backbone that cannot be loaded or read, and layers that it has not.

    Otherwise it is found when the model is loaded, after an hour of answers. A Hub id
    is not looked at: nothing is downloaded before it is needed.

    Raises:
      click.BadParameter: there is no such model, or no such layer.
      ValueError: the model's config or tokenizer cannot be used.
    """
    check_model_option(config.model)
    if config.device != "cpu":
        _note_device(config.device)
    path = Path(config.path).expanduser()
    if not path.exists() or (config.model == EMBEDDED and hidden_layers is None):
        return
    from beatrice.extract.backbone.loading import load_outline
    from beatrice.extract.run.console import quiet
    from beatrice.extract.signals.parity import require_readable

    quiet()
    outline = load_outline(str(path))
    require_readable(config.model, outline)
    n_layers = outline.config.num_hidden_layers
    wrong = [layer for layer in hidden_layers or () if layer > n_layers]
    if wrong:
        raise click.BadParameter(
            f"{config.model} has layers 0 (the embedding) to {n_layers}, not "
            f"{wrong[0]}",
            param_hint="--hidden-layers",
        )


def _note_device(device: str) -> None:
    """Say that a device is not here; a run is often made where its GPUs are not."""
    from beatrice.extract.backbone.loading import check_device

    try:
        check_device(device)
    except ValueError as error:
        click.echo(f"note: {error}", err=True)


Opened = TypeVar("Opened")


@contextlib.contextmanager
def opened_once(
    open_in: Callable[["RunDir"], contextlib.AbstractContextManager[Opened]],
) -> Iterator[Callable[["RunDir"], Opened]]:
    """Yield what opens a model at its first call, and returns it at every call.

    A model is opened in a run that is held already, and stays open where a share of a
    stage is done first and all shares are joined afterwards.
    """
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda run: stack.enter_context(open_in(run)))


@contextlib.contextmanager
def open_asking(
    run: "RunDir",
    stage: str,
    model: str,
    options: BackendOptions,
    **known: Any,
) -> Iterator["Generator"]:
    """Open a stage's backend.

    Args:
      run: of the stage; texts that it has already count towards the spending cap.
      stage: as on the command line.
      model: see `open_generator`.
      options: where it runs.
      **known: of the model, see `open_generator`.
    """
    paid = _paid_tokens(run, stage)
    with open_generator(model, options, earlier=paid, **known) as generator:
        yield generator


class _Spent(msgspec.Struct, frozen=True):
    """What is counted of a reply; its other fields are passed over."""

    n_prompt_tokens: int | None
    n_new_tokens: int | None


def _paid_tokens(run: "RunDir", stage: str) -> tuple[int, int]:
    """Return prompt and new tokens of the texts that are there of a stage.

    All of them, whichever backend wrote them: a cap errs on the side of the purse.
    What a server did not count is not known.
    """
    from beatrice.extract.generate.answers import answer_files
    from beatrice.extract.records import Answer
    from beatrice.extract.run.contents import answers_file
    from beatrice.extract.run.files import JsonLines

    if stage == "answer":
        files = answer_files(answers_file(run), run.parts("answer"))
        counts = (
            (len(r.prompt_ids), len(r.token_ids) + (r.stop_id is not None))
            for file in (files.path, *files.part_files())
            for r in JsonLines(file).intact_rows(Answer)
        )
    else:
        replies = JsonLines(run.replies({"label": "judge"}.get(stage, stage)))
        counts = (
            (row.n_prompt_tokens or 0, row.n_new_tokens or 0)
            for row in replies.intact_rows(_Spent)
        )
    n_prompt = n_new = 0
    for prompt, new in counts:
        n_prompt, n_new = n_prompt + prompt, n_new + new
    return n_prompt, n_new
