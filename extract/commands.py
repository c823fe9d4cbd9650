"""The verb that reads published question sets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from extract.datasets.pools import BuildConfig, Source

_SETS = ("hotpotqa", "musique", "2wikimultihopqa", "popqa", "nq", "triviaqa")
_ROLES = ("train", "dev", "held-out")
_N_SHOWN = 20  # refused records named one by one on the terminal; --json has more


class _Named(click.ParamType):
    """`NAME=VALUE`, where the name is one of the six sets."""

    name = "set=value"

    def __init__(self, *, is_size: bool) -> None:
        self._is_size = is_size

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Return the name and the path or the number."""
        if isinstance(value, tuple):
            return value
        name, equals, rest = str(value).partition("=")
        if not equals or not rest or name not in _SETS:
            self.fail(
                f"expected NAME=VALUE with a name of {', '.join(_SETS)}, found "
                f"{value!r}",
                param,
                ctx,
            )
        if not self._is_size:
            return name, Path(rest)
        if not rest.isascii() or not rest.isdigit() or int(rest) < 1:
            self.fail(f"expected a whole number above 0, found {rest!r}", param, ctx)
        return name, int(rest)


def _files(role: str, text: str) -> Any:
    return click.option(
        f"--{role}",
        multiple=True,
        type=_Named(is_size=False),
        metavar="NAME=FILE",
        help=text,
    )


@click.command()
@click.argument("out_dir", required=False, type=click.Path(path_type=Path))
@click.option(
    "--inspect",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Say what one file is, and build nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option(
    "--skip-bad",
    is_flag=True,
    help="Leave refused records out, counted and listed, instead of failing.",
)
@click.option(
    "--dataset",
    type=click.Choice(_SETS),
    help="With --inspect: the set, where the content does not tell.",
)
@click.option(
    "--evidence",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="TriviaQA's folder `evidence`; else looked for beside the file.",
)
@_files("train", "Training questions; may be repeated.")
@_files("dev", "Development questions, halved into validation and test.")
@_files("held-out", "Questions never trained on (split `ood`).")
@click.option("--seed", default=0, show_default=True, help="Of the splits.")
@click.option("--n-train", default=10_000, show_default=True, help="Of each set.")
@click.option(
    "--n-evaluation",
    default=500,
    show_default=True,
    help="Validation and test each, of each set.",
)
@click.option(
    "--n-held-out",
    multiple=True,
    type=_Named(is_size=True),
    metavar="NAME=N",
    help="Default: popqa=1000, nq=1182, triviaqa=1277.",
)
@click.option(
    "--context",
    type=click.Choice(["supporting", "all", "none"]),
    default="supporting",
    show_default=True,
    help="Passages of an example; questions without are left out, and counted.",
)
@click.option(
    "--splits",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Take the splits of this splits.json instead of drawing.",
)
@click.option(
    "--check", is_flag=True, help="Compare the files in OUT_DIR with its splits.json."
)
def data(out_dir: Path | None, **options: Any) -> None:
    """Read published question sets: say what a file is, or draw the splits.

    The six sets are read in the formats in which they are published, and FlashRAG's
    and lm-eval's JSON lines; a file is recognised by its content. OUT_DIR gets
    examples.jsonl, passages.jsonl and splits.json with SHA-256 sums.

    --inspect --json prints one object: dataset, dataset_from (what told it), format,
    container, records, loaded, with_passages, with_gold_passages, refused, refusals
    (record, at, reason; the first 1000), reasons (counts), ok, and error, the sentence
    for which the whole file is refused, or null. It is printed for a refused file too;
    records is null where the file was not read through, as for passages.

    Exit codes: 0 every record can be used (or, with --skip-bad, some can); 1 the file
    or one of its records is refused; 2 wrong usage.

    Example: beatrice data --inspect hotpot_dev_distractor_v1.json

    Example: beatrice data sets --train hotpotqa=hotpot_train_v1.1.json --dev
    hotpotqa=hotpot_dev_distractor_v1.json --held-out nq=nq-open-oracle.jsonl.gz
    """
    sources = [(role, *given) for role in _ROLES
               for given in options[role.replace("-", "_")]]  # fmt: skip
    inspected: Path | None = options["inspect"]
    if (inspected is None) == (out_dir is None):
        raise click.UsageError("give either OUT_DIR, or --inspect FILE")
    if inspected is not None:
        if sources or options["splits"] or options["check"]:
            raise click.UsageError("--inspect goes with no other work")
        _inspect(inspected, options)
    elif options["check"]:
        if sources or options["splits"]:
            raise click.UsageError("--check goes with OUT_DIR alone")
        _check(out_dir, options["as_json"])
    elif not sources:
        raise click.UsageError("give files with --train, --dev or --held-out")
    else:
        _build(out_dir, sources, options)


def _inspect(path: Path, options: Mapping[str, Any]) -> None:
    """Print what a file is; raise if it or a record is refused."""
    from extract.datasets.inspection import inspect_file

    report = inspect_file(
        path, dataset=options["dataset"], evidence=options["evidence"]
    )
    is_tolerated = report["refused"] == 0 or options["skip_bad"]
    report = {"ok": report["error"] is None and is_tolerated, **report}
    if options["as_json"]:
        click.echo(json.dumps(report))
    else:
        _show(report)
    if report["error"] is not None:
        raise ValueError(report["error"])
    if not report["ok"]:
        first = report["refusals"][0]
        raise ValueError(
            f"{path}: {report['refused']} of {report['records']} records are refused, "
            f"the first is record {first['record']} ({first['at']}): "
            f"{first['reason']}; "
            "--skip-bad leaves such records out and lists them"
        )


def _show(report: Mapping[str, Any]) -> None:
    """Print a report for a person."""
    if report["records"] is None:
        return  # the sentence that follows says what is known
    packed = "gzip, " if report["gzipped"] else ""
    source = f" (told by: {report['dataset_from']})" if report["dataset_from"] else ""
    lines = [
        f"{report['file']}: {report['dataset'] or 'unknown set'}{source}",
        f"  format             {report['format']}; {packed}{report['container']}",
        f"  records            {report['records']}",
        f"  loaded             {report['loaded']}",
        f"  with passages      {report['with_passages']}",
        f"  with gold passages {report['with_gold_passages']}",
        f"  refused            {report['refused']}",
    ]
    lines += [f"  {report[key]:<6} {text}" for key, text in _NOTES if report[key]]
    shown = report["refusals"][:_N_SHOWN]
    lines += [f"  record {r['record']} ({r['at']}): {r['reason']}" for r in shown]
    if report["refused"] > len(shown):
        n_more = report["refused"] - len(shown)
        lines.append(f"  and {n_more} more; --json lists the first 1000")
    click.echo("\n".join(line.encode("utf-8", "backslashreplace").decode()
                         for line in lines))  # fmt: skip


_NOTES = (
    ("repeated_questions", "questions whose text occurred before"),
    ("golds_without_words", "answers of which normalising leaves nothing"),
    ("twice_encoded", "questions with text that was encoded twice"),
    ("empty_passages", "passages without text, left out"),
    ("missing_titles", "questions with a gold title that has no paragraph"),
    ("missing_documents", "evidence files that are not there"),
)


def _check(out_dir: Path | None, as_json: bool) -> None:
    """Verify a folder."""
    from extract.datasets.building import check_folder

    manifest = check_folder(Path(out_dir or "."))
    click.echo(
        json.dumps({"ok": True, "sha256": manifest["sha256"]})
        if as_json
        else f"{out_dir}: every checksum holds"
    )


def _build(
    out_dir: Path | None,
    sources: list[tuple[str, str, Path]],
    options: Mapping[str, Any],
) -> None:
    """Draw the splits and write the folder."""
    from extract.console import Progress
    from extract.datasets.building import build_examples

    manifest = build_examples(
        Path(out_dir or "."),
        _sources(sources),
        _config(options),
        fixed=options["splits"],
        note=Progress().note,
    )
    if options["as_json"]:
        keys = ("sizes", "sources", "passed_over", "repeated_within_a_split", "sha256")
        click.echo(json.dumps({key: manifest[key] for key in keys}))
        return
    for split, sets in manifest["sizes"].items():
        counts = ", ".join(f"{name} {size}" for name, size in sets.items())
        click.echo(f"{split}: {counts}")
    click.echo(
        f"{len(manifest['passed_over'])} questions passed over for a text in another "
        f"split, {len(manifest['repeated_within_a_split'])} repeated within a split"
    )
    click.echo(f"{Path(out_dir or '.') / 'splits.json'}")


def _sources(given: list[tuple[str, str, Path]]) -> "list[Source]":
    """Return the files with what they are for."""
    from extract.datasets.pools import Source

    return [Source(dataset=name, role=role, path=path) for role, name, path in given]


def _config(options: Mapping[str, Any]) -> "BuildConfig":
    """Return what is to be built."""
    from extract.datasets.pools import BuildConfig
    from extract.splits import HELD_OUT_SIZES, SplitConfig

    splits = SplitConfig(
        seed=options["seed"],
        n_train=options["n_train"],
        n_evaluation=options["n_evaluation"],
        n_held_out=HELD_OUT_SIZES | dict(options["n_held_out"]),
    )
    return BuildConfig(
        splits=splits,
        context=options["context"],
        skip_bad=options["skip_bad"],
        evidence=options["evidence"],
    )
