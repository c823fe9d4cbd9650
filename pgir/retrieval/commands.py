"""The verbs `corpus` and `retrieve`: building what is searched, and searching it."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.run.console import Progress, quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from beatrice.extract.run.directory import RunDir
    from beatrice.pgir.retrieval.corpus import Corpus
    from beatrice.pgir.retrieval.encoder import TextEncoder
    from beatrice.pgir.retrieval.retrievers import Retrieval, RetrievalConfig

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
    from beatrice.pgir.retrieval.encoder import TextEncoder, encoder_config

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
    from beatrice.pgir.retrieval.retrievers import (
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


def retrieval_config(run: "RunDir") -> "RetrievalConfig":
    """Return a run's choice; BM25 over its own passages where it made none."""
    from beatrice.pgir.retrieval.retrievers import RETRIEVAL_PRESETS

    return run.settle("retrieval", RETRIEVAL_PRESETS, is_recorded=False)


def settle_retrieval(
    run: "RunDir",
    change: "Callable[[RetrievalConfig], RetrievalConfig]",
    *stages: str,
) -> None:
    """Let a run search elsewhere; stages that searched are done again.

    No answer, label or weight of the run itself depends on it.
    """
    from beatrice.pgir.retrieval.retrievers import RETRIEVAL_PRESETS

    held = retrieval_config(run)
    if change(held) != held:
        for stage in stages:
            run.reopen_stage(stage)
    run.settle("retrieval", RETRIEVAL_PRESETS, change, is_replaceable=True)


def retrieval_of(
    run: "RunDir", note: "Callable[[str], None]" = lambda text: None
) -> "Retrieval":
    """Open the retriever that a run has chosen."""
    from beatrice.pgir.retrieval.retrievers import open_retrieval, served_cache

    config, searches = retrieval_config(run), run.path / "searches"
    # Where an earlier version kept a server's replies, and in the way of `transfer`,
    # whose run that folder is.
    earlier = run.path / "retrieved" / "served.jsonl"
    if config.url is not None and earlier.exists():
        searches.mkdir(exist_ok=True)
        earlier.replace(served_cache(searches, config.url))
    return open_retrieval(config, run.passages, searches, note)


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
    from beatrice.pgir.retrieval.corpus import Corpus, build_corpus

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
    from beatrice.pgir.retrieval.index import (
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
    from beatrice.pgir.retrieval.corpus import Corpus
    from beatrice.pgir.retrieval.retrievers import open_corpus_retrieval

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
    from beatrice.pgir.retrieval.index import DenseRetriever
    from beatrice.pgir.retrieval.recall import DEPTHS, agreement, measure, recall_table
    from beatrice.pgir.retrieval.retrievers import LEAST_DEPTH, Bm25Retriever, fuse_all

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
    from beatrice.pgir.retrieval.server import RetrievalServer

    with RetrievalServer(search, corpus, host=host, port=port, depth=depth) as server:
        click.echo(
            f"{len(corpus):,} passages at http://{host}:{server.server_port}/retrieve "
            "and /batch_search; Ctrl-C stops"
        )
        server.serve_forever()
