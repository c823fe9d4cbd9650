"""The verbs that search and that act on the score: corpus, retrieve, control, score."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.verbs import RUN_DIR

if TYPE_CHECKING:
    from beatrice.extract.run.directory import RunDir
    from beatrice.pgir.controllers.stage import ControlConfig
    from beatrice.pgir.corpus import Corpus
    from beatrice.pgir.index import TextEncoder

_FORMS = ("flat", "sq8", "ivf_pq")
_FOLDER = click.Path(file_okay=False, path_type=Path)
_ENCODER = ("query_prefix", "passage_prefix", "max_tokens", "dtype")


def encoder_options(
    verb: "Callable[..., None]", flag: str = "--encoder"
) -> "Callable[..., None]":
    """Add the options that say by which encoder passages are found.

    Args:
      verb: takes them.
      flag: the first of them, where the verb knows other encoders.
    """
    for option in reversed(
        (
            click.option(
                flag,
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="Directory of a text encoder, such as E5 or MiniLM.",
            ),
            click.option("--query-prefix", help="Of questions.  [default: its own]"),
            click.option("--passage-prefix", help="Of passages.  [default: its own]"),
            click.option("--max-tokens", type=click.IntRange(min=8), help="Of a text."
                         "  [default: 256]"),
            click.option(
                "--encoder-dtype",
                "dtype",
                type=click.Choice(["float32", "bfloat16"]),
                help="Of the encoder's weights.  [default: float32]",
            ),
        )
    ):  # fmt: skip
        verb = option(verb)
    return verb


def load_encoder(options: dict[str, Any]) -> "TextEncoder | None":
    """Return the encoder that the options name, or None."""
    if options["encoder"] is None:
        return None
    from beatrice.pgir.index import TextEncoder, encoder_config

    quiet()
    given = {name: options[name] for name in _ENCODER}
    return TextEncoder(encoder_config(options["encoder"], **given))


def retrieval_options(verb: "Callable[..., None]") -> "Callable[..., None]":
    """Add the options that say where a run's questions find passages."""
    for option in reversed(
        (
            click.option(
                "--corpus",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="A corpus, as `beatrice corpus` built it.",
            ),
            click.option(
                "--retriever",
                help="With --corpus bm25, dense or fused; or one's own, as MODULE:NAME "
                "or an entry point.  [default: bm25]",
            ),
            click.option(
                "--index", "form", type=click.Choice(_FORMS), help="Dense index."
                "  [default: flat]"
            ),
            click.option(
                "--url",
                help="A retrieval server's, up to /retrieve or /batch_search.",
            ),
            partial(encoder_options, flag="--retriever-encoder"),
        )
    ):  # fmt: skip
        verb = option(verb)
    return verb


def take_retrieval(options: dict[str, Any]) -> dict[str, Any]:
    """Take what `retrieval_options` added out of a verb's options."""
    names = ("corpus", "retriever", "form", "url", "retriever_encoder")
    return {name: options.pop(name) for name in (*names, *_ENCODER) if name in options}


def settle_options(run_dir: Path, options: "Mapping[str, Any]", *stages: str) -> None:
    """Write down in a run where it searches, if any of its options was given.

    Args:
      run_dir: an existing run.
      options: those of `retrieval_options`, see `take_retrieval`.
      *stages: that search, and are done again where the choice has changed.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return
    from beatrice.extract.run.directory import RunDir
    from beatrice.pgir.controllers.stage import settle_retrieval
    from beatrice.pgir.retrievers import (
        KINDS,
        RetrievalConfig,
        load_retriever,
    )

    own = {name: given[name] for name in _ENCODER if name in given}
    paths = {
        name: str(given[key].resolve()) if key in given else None
        for name, key in (("corpus", "corpus"), ("encoder", "retriever_encoder"))
    }
    chosen = RetrievalConfig(
        retriever="served" if "url" in given else given.get("retriever", "bm25"),
        form=given.get("form", "flat"),
        url=given.get("url"),
        encoder_options=own,
        **paths,
    )
    if chosen.retriever not in KINDS:
        load_retriever(chosen.retriever)  # what cannot be found is not written down
    with RunDir.open(run_dir) as run:
        settle_retrieval(run, lambda _: chosen, *stages)


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Passages or questions with passages; a folder for all below it; repeatable.",
)
@encoder_options
@click.option(
    "--index",
    "forms",
    multiple=True,
    type=click.Choice(_FORMS),
    help="Form of the dense index; repeatable.  [default: flat]",
)
def corpus(
    folder: Path, sources: tuple[Path, ...], forms: tuple[str, ...], **options: Any
) -> None:
    """Gather passages into a corpus, each once, and index it for dense retrieval.

    psgs_w100.tsv, JSON lines of wiki18 and HippoRAG's lists are read as published, and
    so are the contexts of question sets, whose gold passages are then known. FOLDER
    holds everything; the same line again continues, after any kill. An index is of
    one encoder, whose folder's name it has, and of this corpus.

    Example: beatrice corpus corpora/wiki --source psgs_w100.tsv --encoder e5-base-v2
    --index ivf_pq
    """
    from beatrice.pgir.corpus import Corpus, build_corpus

    progress = Progress()
    encoder = load_encoder(options)
    if sources:
        made = build_corpus(folder, sources, progress.note)
    else:
        made = Corpus(folder)
    click.echo(f"{folder}: {len(made):,} passages, {len(made.golds()):,} questions "
               "with gold passages")  # fmt: skip
    if encoder is not None:
        _index(made, encoder, forms or ("flat",), progress)


def _index(
    corpus: "Corpus",
    encoder: "TextEncoder",
    forms: tuple[Any, ...],
    progress: Progress,
) -> None:
    """Encode a corpus and build its indexes."""
    from beatrice.pgir.index import (
        IndexConfig,
        build_index,
        build_vectors,
        import_faiss,
        index_folder,
    )

    import_faiss()  # hours of encoding would be in vain without it
    folder = index_folder(corpus, encoder.config.path.name)
    with progress.stage("encode") as update:
        vectors = build_vectors(folder, corpus, encoder, IndexConfig(), update)
    for form in forms:
        path = build_index(vectors, IndexConfig(form=form)) or folder
        click.echo(f"{form}: {path}")


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--retriever",
    type=click.Choice(["bm25", "dense", "fused"]),
    default="bm25",
    help="By words, by vectors, or both fused by reciprocal rank.",
)
@encoder_options
@click.option(
    "--index", "form", type=click.Choice(_FORMS), default="flat", help="Dense index."
)
@click.option("--question", multiple=True, help="To find passages for; repeatable.")
@click.option("-k", "depth", type=click.IntRange(1), default=3, help="How many.")
@click.option(
    "--recall",
    is_flag=True,
    help="Measure on the corpus's own questions: BM25, and with --encoder dense, fused "
    "and what a lossy --index loses.",
)
@click.option("--serve", is_flag=True, help="Answer over HTTP, until stopped.")
@click.option("--host", default="127.0.0.1", help="With --serve.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Likewise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def retrieve(
    folder: Path,
    retriever: Any,
    form: Any,
    question: tuple[str, ...],
    depth: int,
    recall: bool,
    serve: bool,
    host: str,
    port: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Search a corpus: for a question, over HTTP, or to see how well it is searched.

    --serve speaks the protocols of Search-R1 (POST /retrieve) and FlashRAG (POST
    /search and /batch_search), for whoever has the index elsewhere.

    Example: beatrice retrieve corpora/wiki --question "who wrote Emma?"
    """
    if sum((bool(question), recall, serve)) != 1:
        raise click.UsageError("give one of --question, --recall and --serve")
    from beatrice.pgir.corpus import Corpus
    from beatrice.pgir.retrievers import open_corpus_retrieval

    made, encoder = Corpus(folder), load_encoder(options)
    if recall:
        _recall(made, encoder, form, as_json)
        return
    search = open_corpus_retrieval(made, retriever, encoder, form)
    if serve:
        _serve(search, made, host, port, depth)
        return
    for text, row in zip(question, search.search(question, depth), strict=True):
        found = [made[int(place)] for place in row]
        if as_json:
            shown = [{"title": p.title, "text": p.text} for p in found]
            click.echo(json.dumps({"question": text, "passages": shown}))
        else:
            click.echo(text)
            for rank, passage in enumerate(found, start=1):
                click.echo(f"  {rank}. {passage.title}: {passage.text}")


def _recall(
    corpus: "Corpus", encoder: "TextEncoder | None", form: Any, as_json: bool
) -> None:
    """Print how many gold passages each retriever finds."""
    from beatrice.pgir.corpus import DEPTHS, agreement, measure, recall_table
    from beatrice.pgir.index import DenseRetriever
    from beatrice.pgir.retrievers import LEAST_DEPTH, Bm25Retriever, fuse_all

    golds = corpus.golds()
    if not golds:
        raise ValueError(
            f"{corpus.folder} has no question with gold passages: build it with a "
            "--source of questions too"
        )
    questions = [gold.question for gold in golds]
    rankings = {"BM25": Bm25Retriever(corpus).search(questions, LEAST_DEPTH)}
    lost: dict[int, float] = {}
    if encoder is not None:
        queries = encoder.encode(questions, "query")
        dense = DenseRetriever(corpus, encoder, form)
        found = dense.search_vectors(queries, LEAST_DEPTH)
        fused = fuse_all([rankings["BM25"], found], max(DEPTHS))
        rankings |= {encoder.config.path.name: found, "fused": fused}
        if form != "flat":
            flat = DenseRetriever(corpus, encoder)
            lost = agreement(found, flat.search_vectors(queries, max(DEPTHS)))
    measured, counts = {}, {}
    for name, own in rankings.items():
        measured[name], counts = measure(own, corpus, golds)
    if as_json:
        rows = [
            {"dataset": dataset, "n": counts[dataset], "retriever": name,
             "measure": kind, "depth": depth, "value": value}
            for name, own in measured.items()
            for (dataset, kind), values in own.items()
            for depth, value in values.items()
        ]  # fmt: skip
        click.echo(json.dumps({"rows": rows, "against_flat": lost}))
        return
    click.echo(recall_table(measured, counts))
    if lost:
        parts = ", ".join(f"{value:.4f} of its {k}" for k, value in lost.items())
        click.echo(f"{form} finds of what flat finds first: {parts}")


def _serve(search: Any, corpus: "Corpus", host: str, port: int, depth: int) -> None:
    """Answer over HTTP until stopped."""
    from beatrice.pgir.retrievers import RetrievalServer

    with RetrievalServer(search, corpus, host=host, port=port, depth=depth) as server:
        click.echo(
            f"{len(corpus):,} passages at http://{host}:{server.server_port}/retrieve "
            "and /batch_search; Ctrl-C stops"
        )
        server.serve_forever()


_ASKED = ("question", "prompt")  # shown of a row on the page: the first that is there
Results = Sequence[tuple[str | None, Mapping[str, Any]]]


def with_options(
    config: "ControlConfig", judges: tuple[str, ...] | None = None, **given: Any
) -> "ControlConfig":
    """Return how the controllers are run, as the options say; None leaves a field."""
    chosen = {name: value for name, value in given.items() if value is not None}
    rivals = (*chosen.pop("rivals", config.rivals), *(judges or ()))
    return dataclasses.replace(config, **chosen, rivals=tuple(dict.fromkeys(rivals)))


@click.command()
@RUN_DIR
@click.option(
    "--max-generations",
    type=click.FloatRange(min=1),
    help="Cap on their mean, in choosing settings on validation.  [default: 4]",
)
@click.option(
    "--cross-fit",
    is_flag=True,
    default=None,
    help="Also choose PGIR's on probabilities from maps fitted on other questions.",
)
@click.option(
    "--only",
    "rivals",
    multiple=True,
    help="A rival to run, or none or all; repeatable.",
)
@click.option(
    "--limit",
    "n_questions",
    type=click.IntRange(min=1),
    help="Most questions of each set.",
)
@click.option(
    "--training",
    "n_training",
    type=click.IntRange(min=1),
    help="Training questions that trained rivals learn from.",
)
@click.option(
    "--encoder",
    type=click.Path(exists=True, file_okay=False),
    help="A sentence encoder's folder, for rivals that read questions alone.",
)
@click.option(
    "--queries",
    type=click.Choice(["paper", "choose", "all"]),
    help="Search as the paper, also as is best on validation, or in all ways.",
)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="MODULE:NAME",
    help="A judge of drafts of one's own, to run PGIR's loop with; repeatable.",
)
@retrieval_options
def control(
    run_dir: Path, rivals: tuple[str, ...], judges: tuple[str, ...], **given: Any
) -> None:
    """Run PGIR and its rivals; choose their settings on validation.

    Without --corpus or --url the passages that came with the questions are searched.

    Example: beatrice control runs/paper --max-generations 4.63 --only all
    """
    from beatrice.extract.plugs import load_plug
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import do
    from beatrice.pgir.controllers.stage import (
        CONTROL,
        EVERY_RIVAL,
        OWN_JUDGE,
        settle_search,
    )
    from beatrice.pgir.controllers.waves import JUDGES

    settle_options(run_dir, take_retrieval(given), "control")
    known = {"none": (), "all": EVERY_RIVAL} | {name: (name,) for name in EVERY_RIVAL}
    if unknown := [name for name in rivals if name not in known]:
        raise click.UsageError(
            f"--only: no rival is called {unknown[0]!r}; expected {', '.join(known)}"
        )
    named = {one for name in rivals for one in known[name]}
    for spec in judges:
        load_plug(spec, JUDGES)  # what cannot be found is not written down
    given["rivals"] = tuple(n for n in EVERY_RIVAL if n in named) if rivals else None
    given["judges"] = tuple(f"{OWN_JUDGE}{spec}" for spec in judges) or None
    if any(value is not None for value in given.values()):
        with RunDir.open(run_dir) as run:
            settle_search(run, partial(with_options, **given))
    do(run_dir, CONTROL)


@click.command()
@RUN_DIR
@click.option("--question", default=None, help="As the model was asked.")
@click.option("--answer", default=None, help="The answer to be judged.")
@click.option(
    "--context", multiple=True, help="A passage the model was shown; repeatable."
)
@click.option(
    "--file",
    "answers",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Answers, a row each: own, lm-eval's or FlashRAG's.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where a file's results go; continued if it is there.  [default: stdout]",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with the answers' tokens tinted by their probability.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=64,
    help="Most rows of a file in one forward pass.",
)
@click.option("--model", default=None, help="Where the backbone lies, if moved.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def score(
    run_dir: Path,
    question: str | None,
    answer: str | None,
    context: tuple[str, ...],
    answers: Path | None,
    out: Path | None,
    html: Path | None,
    batch_size: int,
    model: str | None,
    as_json: bool,
) -> None:
    """Score answers that exist: one, or a file of them; P(correct) back.

    A file's results are JSON lines in its order; a row that cannot be scored is named
    in its place, and the exit code is then 1.

    Example: beatrice score runs/demo --question "who wrote X?" --answer "Y"
    """
    if answers is None and (question is None or answer is None):
        raise click.UsageError("give --question and --answer, or --file")
    if answers is not None and (question, answer, context) != (None, None, ()):
        raise click.UsageError("a --file has its own questions, answers and contexts")
    if answers is None and out is not None:
        raise click.UsageError("--out is for the results of a --file")
    _refuse_same({"--file": answers, "--out": out, "--html": html})
    quiet()
    from beatrice.extract.run.directory import RunDir, read_manifest

    read_manifest(run_dir)  # what is no run, or not finished, is refused at once
    run = RunDir(run_dir)
    run.require(run.detector)
    if answers is not None:
        _score_file(RunDir(run_dir), model, answers, out, html, batch_size)
        return
    from beatrice.pgir.scorer import Scorer

    found = Scorer.load(run_dir, model=model).score(question, answer, context or None)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(": ".join(filter(None, (found.decision, found.reason))), err=True)
    if html is not None:
        _write_page(
            html, f"{run_dir.name}: one answer", "", [(question, found.as_json())]
        )
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        p_correct = found.p_correct
        click.echo("unknown" if p_correct is None else f"{p_correct:.3f}")


def _refuse_same(files: Mapping[str, Path | None]) -> None:
    """Refuse to write a file over another that the same line names."""
    named = [(name, path) for name, path in files.items() if path is not None]
    for (one, path), (other, same) in itertools.combinations(named, 2):
        is_link = path.exists() and same.exists() and path.samefile(same)
        if is_link or path.resolve() == same.resolve():
            raise click.UsageError(
                f"{one} and {other} are the same file, {path}; give two names"
            )


def _write_page(html: Path, title: str, summary: str, results: Results) -> None:
    """Write the page of some results."""
    from beatrice.extract.run.files import write_text_atomic
    from beatrice.pgir.score_files import page

    write_text_atomic(html, page(title, summary, results))


def _score_file(
    run: "RunDir",
    model: str | None,
    answers: Path,
    out: Path | None,
    html: Path | None,
    batch_size: int,
) -> None:
    """Score a file's rows; raise at the end if any of them could not be scored."""
    from beatrice.extract.records import SETTINGS
    from beatrice.extract.run.files import CHECKSUMS, JsonLines, sha256_file
    from beatrice.pgir.score_files import Tally, count_rows, read_rows, score_rows

    progress, tally, shown = Progress(), Tally(), []
    total = count_rows(answers)  # a file that cannot be read is refused at once
    from beatrice.pgir.scorer import Scorer

    scorer = Scorer.load(run.path, model=model)
    lines = JsonLines.open(out) if out else None
    if lines and lines.truncated:
        progress.note(lines.truncated)
    with progress.stage("score") as update:

        def each(row: Any, result: Mapping[str, Any]) -> None:
            tally.add(row, result)
            update(tally.n_done, total)
            if html is not None:
                asked = (getattr(row.given, name, None) for name in _ASKED)
                shown.append((next(filter(None, asked), None), result))

        score_rows(
            lambda rows: scorer.score_many(rows, batch_size),
            read_rows(answers),
            sha256_file(run.require(run.detector) / CHECKSUMS),
            lines,
            lines.append if lines else lambda some: click.echo("\n".join(some)),
            each,
        )
    for setting in SETTINGS:
        threshold = scorer.threshold(setting)
        if threshold is not None:
            progress.note(f"{setting}: trusted is {threshold.in_words()}")
    progress.note(tally.in_words())
    if html is not None:
        _write_page(
            html, f"{answers.name}, read by {run.path.name}", tally.in_words(), shown
        )
    if tally.bad:
        raise click.ClickException(
            f"{len(tally.bad)} of {tally.n_done} rows could not be scored; the first, "
            f"{tally.bad[0]}"
        )
