"""The verb `extract`, and the options that say what is kept of the signals."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import click

from beatrice.extract.records import AnswerSpan
from beatrice.extract.run.verbs import (
    RUN_DIR,
    WorkOptions,
    do_or_forecast,
    given,
    option,
    options,
)

_LONG_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "int8": "int8",
}


class _Layers(click.ParamType):
    """A list of layers; `all` stays a word, since None means not given."""

    name = "layers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | str:
        from beatrice.extract.store.spec import parse_layers

        try:
            return parse_layers(str(value)) or "all"
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _StoredType(click.Choice):
    """A type of numbers by its short name."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        return _LONG_NAMES[super().convert(value, param, ctx)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptOptions:
    """Fields of `ExtractConfig`; None leaves a field as it is."""

    hidden_layers: tuple[int, ...] | Literal["all"] | None = option(
        "Layers kept: one, some (8,16,24), or all; 0 is the embedding.",
        metavar="LAYERS",
        show_default="all",
        type=_Layers(),
    )
    hidden_spans: Literal["all", "answer"] | None = option(
        "Tokens whose hidden states are kept.", show_default="all"
    )
    dtype: str | None = option(
        "How hidden states are written; int8 has a scale per token.",
        show_default="bf16",
        type=_StoredType(list(_LONG_NAMES)),
    )
    scalars: str | None = option(
        "How the other three families are written, bf16 or fp32 (the default).",
        rare=True,
        type=_StoredType(["bf16", "fp32"]),
    )
    answer_span: AnswerSpan | None = option(
        "Positions that emit the answer (emitting, the default), or the answer tokens "
        "alone (literal).",
        rare=True,
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ExtractConfig` that were given."""
        fields = given(self)
        if fields.get("hidden_layers") == "all":
            fields["hidden_layers"] = None
        return fields


@click.command()
@RUN_DIR
@options(kept=KeptOptions, work=WorkOptions)
def extract(run_dir: Path, kept: KeptOptions, work: WorkOptions) -> None:
    """Read the four signal families of every answer into the feature store.

    What is kept may be chosen here as long as nothing is extracted; by default it is
    what the run was made with. Under torchrun or srun, or with --shard, every process
    does its part.

    Example: torchrun --nproc-per-node 2 -m beatrice extract runs/demo
    """
    from beatrice.extract.backbone.names import BackboneConfig
    from beatrice.extract.generate.options import check_backbone
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.signals.extract import (
        EXTRACT,
        extract_stage_kept,
        record_kept,
    )

    fields = kept.fields()
    if fields.get("hidden_layers") is not None:
        config = RunDir(run_dir).section("backbone", BackboneConfig)
        check_backbone(config, fields["hidden_layers"])
    if work.dry_run:

        def change(config: Any) -> Any:
            return dataclasses.replace(config, **fields)

        do_or_forecast(run_dir, EXTRACT, True, change if fields else None)
        return
    if fields:
        with RunDir.open(run_dir, share=work.share) as run:
            record_kept(run, fields)
    # A share's model is the one that joins all of them.
    stage = EXTRACT if work.share.is_whole else extract_stage_kept()
    do_or_forecast(run_dir, stage, False, share=work.share)
