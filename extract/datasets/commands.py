"""The verb `data` and its stage: published question sets become a run.

What comes out is what `world` writes, and a manifest of the splits beside it; from
there on a run does not know where its questions came from.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from beatrice.extract.datasets.options import (
    SetName,
    asking_options,
    build_config,
    prompt_config,
    question_options,
    sources_of,
    stop_strings,
    take_files,
)
from beatrice.extract.datasets.splits import BuildConfig, Source
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import splits_file
from beatrice.extract.run.directory import NewRun, RunDir, manifest_file
from beatrice.extract.run.files import sha256_file
from beatrice.extract.run.stages import once
from beatrice.extract.run.verbs import RunPath
from beatrice.extract.signals.commands import kept_options, take_kept


@contextlib.contextmanager
def _nothing_half_made(path: Path) -> Iterator[None]:
    """Take a new run directory away again if its questions cannot be read."""
    was_there, was_run = path.exists(), manifest_file(path).exists()
    try:
        yield
    except BaseException:
        if not was_run and path.is_dir():
            for name in ("manifest.json", "lock"):
                (path / name).unlink(missing_ok=True)
            if not was_there and not any(path.iterdir()):
                path.rmdir()
        raise


def make_data_run(
    path: Path,
    sources: Sequence[Source],
    build: BuildConfig,
    asked: NewRun,
    progress: Progress,
    *,
    fixed: Path | None = None,
) -> dict[str, Any]:
    """Make a run directory of published questions, or continue making it.

    Args:
      path: the directory; created if absent, taken if empty.
      sources: the files.
      build: which of their questions, and what of them.
      asked: the run; its section `data` says the same of the files as `sources`.
      progress: shows the stage.
      fixed: a manifest whose splits are used instead of drawing.

    Returns:
      The manifest of the splits.

    Raises:
      ValueError: a file is refused or too small, or the directory holds another run.
    """
    from beatrice.extract.datasets.building import build_examples, check_folder
    from beatrice.extract.run.contents import settings_in_words

    with _nothing_half_made(path), RunDir.open(path, asked) as run:
        for left in run.path.glob(".*.tmp"):  # of a run that was killed; we hold it
            left.unlink()

        def work(update: Update) -> None:
            build_examples(run.path, sources, build, fixed=fixed, note=progress.note)
            try:
                progress.note(f"data: {settings_in_words(run)}")
            except ValueError:  # not with these questions, of which nothing is left
                for path in outputs:
                    path.unlink()
                raise

        inputs = {f"{s.dataset} {s.role}": sha256_file(s.path) for s in sources}
        outputs = [run.examples, run.passages, splits_file(run)]
        once(run, "data", inputs, outputs, progress, work)
        return check_folder(run.path)


_FEW = 1000  # training questions; the paper has 10,000 of each set
_N_SHOWN = 20  # refused records named one by one on the terminal; --json has more
_NOTES = (
    ("repeated_questions", "questions whose text occurred before"),
    ("golds_without_words", "answers of which normalising leaves nothing"),
    ("empty_passages", "passages without text, left out"),
    ("missing_titles", "questions with a gold title that has no paragraph"),
    ("missing_documents", "evidence files that are not there"),
)


@click.command()
@click.argument("run_dir", required=False, type=RunPath())
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
    type=SetName(),
    help="With --inspect: the set, where the content does not tell.",
)
@click.option(
    "--evidence",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="TriviaQA's folder `evidence`; else looked for beside the file.",
)
@click.option(
    "--check", is_flag=True, help="Compare the files in RUN_DIR with its splits.json."
)
@question_options
@asking_options
@kept_options
def data(run_dir: Path | None, **options: Any) -> None:
    """Read published question sets: say what a file is, or make a run of them.

    Six sets are read in the formats in which they are published, and any set, under a
    NAME of its own, as FlashRAG's or lm-eval's JSON lines, as plain lines of "question"
    and "golds" (and "passages": texts, or objects of "title" and "text"), as a table of
    question, answer and context, or as the examples.jsonl of a run, whose splits are
    then kept; a file is recognised by its content. One file may serve as --train and as
    --dev: no question is in two splits. RUN_DIR becomes a
    run directory as `world` makes one, with splits.json and its SHA-256 sums beside;
    `answer`, `rewrite`, `label`, `extract` and the rest go on from there.

    --inspect --json prints one object: dataset, dataset_from (what told it), format,
    container, records, loaded, with_passages, with_gold_passages, refused, refusals
    (record, at, reason; the first 1000), refusals_not_listed, reasons (counts), ok, and
    error, the sentence for which the whole file is refused, or null. It is printed for
    a refused file too; records is null where the file was not read through, as for
    passages.

    Exit codes: 0 every record can be used (or, with --skip-bad, some can); 1 the file
    or one of its records is refused; 2 wrong usage.

    Example: beatrice data --inspect hotpot_dev_distractor_v1.json

    Example: beatrice data runs/mine --train capitals=own.jsonl --dev
    capitals=own.jsonl --n-train all --n-evaluation 50 --model Qwen/Qwen3-0.6B --chat

    Example: beatrice data runs/paper --train hotpotqa=hotpot_train_v1.1.json --dev
    hotpotqa=hotpot_dev_distractor_v1.json --held-out nq=nq-open-oracle.jsonl.gz
    --model Qwen/Qwen3.5-9B --device cuda --chat
    """
    files = take_files(options)
    inspected: Path | None = options["inspect"]
    if (inspected is None) == (run_dir is None):
        raise click.UsageError("give either RUN_DIR, or --inspect FILE")
    if inspected is not None:
        if files or options["splits"] or options["check"]:
            raise click.UsageError("--inspect goes with no other work")
        _inspect(inspected, options)
    elif options["check"]:
        if files or options["splits"]:
            raise click.UsageError("--check goes with RUN_DIR alone")
        _check(Path(run_dir or "."), options["as_json"])
    elif not files:
        raise click.UsageError("give files with --train, --dev or --held-out")
    else:
        make_run(Path(run_dir or "."), files, options)


def _inspect(path: Path, options: Mapping[str, Any]) -> None:
    """Print what a file is; raise if it or a record is refused."""
    from beatrice.extract.datasets.loading import inspect_file

    report = inspect_file(
        path, dataset=options["dataset"], evidence=options["evidence"]
    )
    is_tolerated = report["refused"] == 0 or options["skip_bad"]
    report = {"ok": report["error"] is None and is_tolerated, **report}
    if options["as_json"]:
        click.echo(json.dumps(report))
    elif shown := _inspection_as_text(report):
        click.echo(shown)
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


def _check(run_dir: Path, as_json: bool) -> None:
    """Verify a folder."""
    from beatrice.extract.datasets.building import check_folder

    manifest = check_folder(run_dir)
    click.echo(
        json.dumps({"ok": True, "sha256": manifest["sha256"]})
        if as_json
        else f"{run_dir}: every checksum holds"
    )


def make_run(
    run_dir: Path, files: list[tuple[str, str, Path]], options: dict[str, Any]
) -> None:
    """Draw the splits, make the run directory, and print what was drawn.

    Args:
      run_dir: created if absent; the same call again continues.
      files: (role, set, path) of each.
      options: of the verb `data`, without the files.

    Raises:
      ValueError: see `make_data_run`.
    """
    import dataclasses

    from beatrice.extract.backbone.names import EMBEDDED, BackboneConfig, default_dtype
    from beatrice.extract.datasets.building import data_config, with_contexts_of_files
    from beatrice.extract.generate.options import check_backbone
    from beatrice.extract.generate.requests import ANSWER_PRESETS
    from beatrice.extract.run.console import Progress
    from beatrice.extract.run.directory import NewRun
    from beatrice.extract.signals.extract import EXTRACT_PRESETS

    if options["model"] is None:
        raise click.UsageError(
            "--model is missing: say which model answers these questions, by a "
            "directory, a GGUF file or a Hub id such as Qwen/Qwen3-0.6B (--model "
            "embedded is the small model of the microworld, which knows none of them)"
        )
    sources, build = sources_of(files), build_config(options)
    build, given = with_contexts_of_files(sources, build), build
    fixed: Path | None = options["splits"]
    preset, kept = options["preset"], take_kept(options)
    backbone = BackboneConfig(
        model=options["model"],
        dtype=options["model_dtype"] or default_dtype(options["device"]),
        device=options["device"],
    )
    check_backbone(backbone, kept.get("hidden_layers"))
    generation = ANSWER_PRESETS[preset].generation
    # The embedded model answers with a name; a preset says nothing of other models.
    longest = preset if options["model"] == EMBEDDED else "paper"
    n_longest = ANSWER_PRESETS[longest].generation.max_new_tokens
    generation = dataclasses.replace(
        generation,
        max_new_tokens=options["max_new_tokens"] or n_longest,
        stop=stop_strings(options),
    )
    asked = NewRun(
        preset=preset,
        seed=options["seed"],
        sections={
            "backbone": backbone,
            "data": data_config(sources, build, fixed),
            "answer": dataclasses.replace(
                ANSWER_PRESETS[preset],
                settings=options["settings"],
                prompt=prompt_config(options),
                generation=generation,
            ),
            "extract": dataclasses.replace(EXTRACT_PRESETS[preset], **kept),
        },
    )
    progress = Progress()
    for name in build.contexts.keys() - given.contexts.keys():
        if (context := build.contexts[name]) != "supporting":
            progress.note(
                f"data: --context {name}={context}, since no passage in its files is "
                "marked as supporting"
            )
    if all(source.role != "dev" for source in sources):
        progress.note(
            "data: without --dev there is nothing to choose and calibrate a detector on"
        )
    manifest = make_data_run(run_dir, sources, build, asked, progress, fixed=fixed)
    n_train = sum(manifest["sizes"].get("train", {}).values())
    if preset == "paper" and 0 < n_train < _FEW:
        progress.note(
            f"data: {n_train} training questions are few for the sizes of the preset "
            "paper; `beatrice train RUN --preset few` is made for them"
        )
    _show_splits(run_dir, manifest, options["as_json"])


def _show_splits(run_dir: Path, manifest: Mapping[str, Any], as_json: bool) -> None:
    """Print what was drawn."""
    if as_json:
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
    click.echo(str(run_dir / "splits.json"))


def _inspection_as_text(report: Mapping[str, Any]) -> str:
    """Return a report in lines; empty where the file was not read through."""
    if report["records"] is None:
        return ""  # the sentence that follows says what is known
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
        lines.append(
            f"  and {n_more} more; --json lists the first 1000 of all"
            + (
                f", {left} are counted only"
                if (left := report["refusals_not_listed"])
                else ""
            )
        )
    # A file's name may hold what no terminal can show.
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()
