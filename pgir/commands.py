"""The verbs `corpus` and `control`, which search and act on the score."""

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from beatrice.extract.run.console import Progress, printable, silence_transformers
from beatrice.extract.run.verbs import (
    AS_JSON,
    FOLDER,
    RUN_DIR,
    NewPath,
    checking,
    do_again_if_changed,
    given,
    option,
    options,
)
from beatrice.pgir.controllers import RIVALS

if TYPE_CHECKING:
    from beatrice.pgir.corpus import Corpus
    from beatrice.pgir.index import TextEncoder
    from beatrice.pgir.stages import ControlConfig, Searches

Form = Literal["flat", "sq8", "ivf_pq"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """How a text encoder reads; None takes the encoder's own setting."""

    query_prefix: str | None = option("For questions.", rare=True, type=click.STRING)
    passage_prefix: str | None = option("For passages.", rare=True, type=click.STRING)
    max_tokens: int | None = option("Per text, else 256.", rare=True, min=8)
    encoder_dtype: Literal["float32", "bfloat16"] | None = option(
        "Type of the encoder's weights, else float32.", rare=True
    )

    def settings(self) -> dict[str, Any]:
        """Return what was given, by the names of `read_encoder_config`."""
        names = [field.name for field in dataclasses.fields(EncoderSettings)]
        values = {name: getattr(self, name) for name in names}
        values["dtype"] = values.pop("encoder_dtype")
        return {name: value for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalOptions(EncoderSettings):
    """Where to search passages for a run's questions."""

    corpus: Path | None = option("A corpus built by `beatrice corpus`.", type=FOLDER)
    retriever: str | None = option(
        "bm25; with --corpus also dense or fused; without it also your own retriever, "
        "as MODULE:NAME or an entry point.  [default: bm25]"
    )
    index: Form | None = option("Form of the dense index.  [default: flat]")
    url: str | None = option("URL of a server, ending in /retrieve or /batch_search.")
    retriever_encoder: Path | None = option(
        "Directory of a text encoder, such as E5 or MiniLM.", type=FOLDER
    )

    def __post_init__(self) -> None:
        """Check that every option given has an effect."""
        is_dense = self.retriever in ("dense", "fused")
        of_corpus = (self.corpus, self.retriever, self.index, self.retriever_encoder)
        if self.url is not None and any(of_corpus):
            raise click.UsageError(
                "--url searches a server; leave out --corpus, --retriever, --index and "
                "--retriever-encoder"
            )
        if not is_dense and (self.index or self.retriever_encoder or self.settings()):
            raise click.UsageError(
                "--index, --retriever-encoder and encoder settings need vectors; give "
                "--retriever dense or fused too"
            )

    def write(self, run_dir: Path, section: "Searches" = "retrieval") -> None:
        """Record in a run where it searches, if any of these options was given."""
        if not given(self):
            return
        from beatrice.extract.run.directory import RunDir
        from beatrice.pgir.retrievers import KINDS, RetrievalConfig, check_retrieval
        from beatrice.pgir.stages import record_retrieval

        chosen = RetrievalConfig(
            retriever="served" if self.url else self.retriever or "bm25",
            form=self.index or "flat",
            url=self.url,
            corpus=_absolute(self.corpus),
            encoder=_absolute(self.retriever_encoder),
            encoder_options=self.settings(),
        )
        is_plug = chosen.retriever not in KINDS
        flag = "--url" if self.url else "--retriever" if is_plug else None
        # A choice is recorded only after it was found to exist.
        with checking(flag) if flag else contextlib.nullcontext():
            check_retrieval(chosen)
        with RunDir.open(run_dir) as run:
            record_retrieval(run, chosen, section)


def _absolute(path: Path | str | None) -> str | None:
    # Links are not resolved: E5 is recognised by the name of its folder.
    return None if path is None else os.path.abspath(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusOptions(EncoderSettings):
    """What to build a corpus from, and what to do with it."""

    source: tuple[Path, ...] = option(
        "File of passages or of questions with passages, or a folder of them; "
        "repeatable.",
        (),
        type=click.Path(exists=True, path_type=Path),
    )
    encoder: Path | None = option(
        "Directory of a text encoder, such as E5 or MiniLM.", type=FOLDER
    )
    index: tuple[Form, ...] = option(
        "Form of the dense index; repeatable when building.  [default: flat]", ()
    )
    search: tuple[str, ...] = option("Find passages for this question; repeatable.", ())
    recall: bool = option(
        "Measure recall on the corpus's own questions: of BM25, and with --encoder of "
        "dense and fused retrieval and the loss of a lossy --index.",
        False,
    )
    serve: bool = option("Serve searches over HTTP until stopped.", False)
    retriever: Literal["bm25", "dense", "fused"] = option(
        "Search by words, by vectors, or by both, fused by reciprocal rank.", "bm25"
    )
    depth: int = option("Number of passages to find.", 3, flag="-k", min=1)
    host: str = option("Address that --serve listens on.", "127.0.0.1", rare=True)
    port: int = option("Port of --serve.", 8000, rare=True, min=0, max=65535)

    def __post_init__(self) -> None:
        """Check that every option given has an effect."""
        if blank := [text for text in self.search if not any(map(str.isalnum, text))]:
            raise click.UsageError(
                f"--search: expected a question, found {blank[0]!r}; give at least one "
                "word to search for"
            )
        uses = sum((bool(self.search), self.recall, self.serve))
        if uses > 1 or (uses and (self.source or len(self.index) > 1)):
            raise click.UsageError(
                "give only one of --source, --search, --recall and --serve, and only "
                "one --index to search"
            )
        if self.encoder is None and (self.index or self.settings()):
            raise click.UsageError(
                "--index and encoder settings need vectors; give --encoder too"
            )
        if self.encoder and self.retriever == "bm25" and (self.search or self.serve):
            raise click.UsageError(
                "--retriever bm25 uses no encoder; give dense or fused, or leave out "
                "--encoder"
            )

    def load_encoder(self) -> "TextEncoder | None":
        """Return the encoder named by --encoder, or None."""
        if self.encoder is None:
            return None
        from beatrice.pgir.index import TextEncoder, read_encoder_config

        silence_transformers()
        return TextEncoder(read_encoder_config(self.encoder, **self.settings()))


@click.command()
@click.argument("folder", type=NewPath(file_okay=False))
@AS_JSON
@options(how=CorpusOptions)
def corpus(folder: Path, as_json: bool, how: CorpusOptions) -> None:
    """Gather passages into a corpus, index it for dense retrieval, or search it.

    psgs_w100.tsv, JSON lines of wiki18 and HippoRAG's lists are read as published, and
    so are texts without a title and question sets, whose contexts become passages and
    whose gold passages are recorded. Each passage is kept once. FOLDER holds
    everything; after a kill, the same command continues. An index belongs to this
    corpus and one encoder, and is named after the encoder's folder. --search, --recall
    and --serve use a finished corpus; --serve speaks the protocols of Search-R1 (POST
    /retrieve) and FlashRAG (POST /search and /batch_search), for other machines.

    Example: beatrice corpus corpora/wiki --source psgs_w100.tsv --encoder e5-base-v2
    --index ivf_pq

    Example: beatrice corpus corpora/wiki --search "who wrote Emma?"
    """
    from beatrice.pgir.corpus import Corpus, build_corpus

    encoder = how.load_encoder()
    if how.search or how.recall or how.serve:
        _search(Corpus(folder), encoder, how, as_json)
        return
    progress = Progress()
    if how.source:
        corpus = build_corpus(folder, how.source, progress.note)
    else:
        corpus = Corpus(folder)
    n_passages, n_questions = len(corpus), len(corpus.golds())
    if as_json:
        counts = {"n_passages": n_passages, "n_questions": n_questions}
        click.echo(json.dumps({"folder": str(folder), **counts}))
    else:
        click.echo(
            f"{folder}: {n_passages:,} passages, {n_questions:,} questions with gold "
            "passages"
        )
    if encoder is not None:
        _index(corpus, encoder, how.index or ("flat",), progress, as_json)


def _search(
    corpus: "Corpus", encoder: "TextEncoder | None", how: CorpusOptions, as_json: bool
) -> None:
    from beatrice.pgir.retrievers import open_corpus_retrieval

    form = how.index[0] if how.index else "flat"
    note = Progress().note
    if how.recall:
        _recall(corpus, encoder, form, note, as_json)
        return
    retriever = open_corpus_retrieval(corpus, how.retriever, encoder, form, note)
    if how.serve:
        _serve(retriever, corpus, how.host, how.port, how.depth)
        return
    rows = retriever.search(how.search, how.depth)
    for text, row in zip(how.search, rows, strict=True):
        passages = [corpus[int(index)] for index in row]
        if as_json:
            shown = [{"title": p.title, "text": p.text} for p in passages]
            click.echo(json.dumps({"question": text, "passages": shown}))
        else:
            click.echo(text if passages else f"{text}\n  no passage shares a word")
            for rank, passage in enumerate(passages, start=1):
                click.echo(printable(f"  {rank}. {passage.title}: {passage.text}"))


def _index(
    corpus: "Corpus",
    encoder: "TextEncoder",
    forms: tuple[Any, ...],
    progress: Progress,
    as_json: bool,
) -> None:
    from beatrice.pgir.index import (
        build_index,
        build_vectors,
        import_faiss,
        index_folder,
    )

    import_faiss()  # fail before the hours of encoding, not after
    folder = index_folder(corpus, encoder.config.path.name)
    with progress.stage("encode") as update:
        vectors = build_vectors(folder, corpus, encoder, update)
    if n_cut := sum(vectors.facts.get("n_cut", {}).values()):
        progress.note(
            f"encode: {n_cut} passages have more than "
            f"{encoder.config.max_tokens} tokens, and only their beginnings are "
            "encoded; --set max_tokens=N encodes more"
        )
    for form in forms:
        path = build_index(vectors, form) or folder
        row = {"index": form, "path": str(path)}
        click.echo(json.dumps(row) if as_json else f"{form}: {path}")


def _recall(
    corpus: "Corpus",
    encoder: "TextEncoder | None",
    form: Any,
    note: Callable[[str], None],
    as_json: bool,
) -> None:
    from beatrice.pgir.bm25 import open_bm25
    from beatrice.pgir.corpus import DEPTHS, agreement, measure, recall_table
    from beatrice.pgir.index import DenseRetriever
    from beatrice.pgir.retrievers import LEAST_DEPTH, fuse

    golds = corpus.golds()
    if not golds:
        raise ValueError(
            f"{corpus.folder} has no question with gold passages; build the corpus "
            "with a --source of questions too"
        )
    questions = [gold.question for gold in golds]
    rankings = {"BM25": open_bm25(corpus, note).search(questions, LEAST_DEPTH)}
    lost: dict[int, float] = {}
    if encoder is not None:
        queries = encoder.encode(questions, "query")
        dense = DenseRetriever(corpus, encoder, form)
        hits = dense.search_vectors(queries, LEAST_DEPTH)
        fused = [*map(fuse, zip(rankings["BM25"], hits, strict=True))]
        rankings |= {encoder.config.path.name: hits, "fused": fused}
        if form != "flat":
            flat = DenseRetriever(corpus, encoder)
            lost = agreement(hits, flat.search_vectors(queries, max(DEPTHS)))
    measured, counts = {}, {}
    for name, ranking in rankings.items():
        measured[name], counts = measure(ranking, corpus, golds)
    if as_json:
        rows = [
            {"dataset": dataset, "n": counts[dataset], "retriever": name,
             "measure": kind, "depth": depth, "value": value}
            for name, ranking in measured.items()
            for (dataset, kind), values in ranking.items()
            for depth, value in values.items()
        ]  # fmt: skip
        click.echo(json.dumps({"rows": rows, "against_flat": lost}))
        return
    click.echo(recall_table(measured, counts))
    if lost:
        parts = ", ".join(f"{value:.4f} of the top {k}" for k, value in lost.items())
        click.echo(f"share of flat's passages that {form} finds: {parts}")


def _serve(search: Any, corpus: "Corpus", host: str, port: int, depth: int) -> None:
    from beatrice.pgir.retrieval_server import RetrievalServer

    def stop(*_: Any) -> None:  # service managers send SIGTERM; Ctrl-C does the same
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    with RetrievalServer(search, corpus, host=host, port=port, depth=depth) as server:
        name = f"[{host}]" if ":" in host else host
        click.echo(
            f"{len(corpus):,} passages at http://{name}:{server.server_port}/retrieve "
            "and /batch_search; press Ctrl-C to stop"
        )
        server.serve_forever()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Fields of `ControlConfig`; None leaves a field as it is."""

    max_generations: float | None = option(
        "Cap on mean generations when choosing settings.  [default: 4]", min=1
    )
    rivals: tuple[str, ...] = option(
        "Rival to run, or none or all; repeatable.", (), flag="--only"
    )
    n_questions: int | None = option(
        "Most questions of each set.", flag="--limit", min=1
    )
    n_training: int | None = option(
        "Number of training questions for rivals that learn.", flag="--n-train", min=1
    )
    encoder: str | None = option(
        "Folder of a sentence encoder, for rivals that read only the question.",
        type=click.Path(exists=True, file_okay=False),
    )
    judge: tuple[str, ...] = option(
        "Your own judge of drafts, to run PGIR's loop with; repeatable.",
        (),
        metavar="MODULE:NAME",
    )
    cross_fit: bool | None = option(
        "Also choose PGIR's settings on probabilities from calibration maps fitted on "
        "other questions (true or false).",
        rare=True,
    )
    queries: Literal["paper", "choose", "all"] | None = option(
        "Search with the paper's query, also with the best one on validation, or with "
        "every one (paper, choose, all).",
        rare=True,
    )

    def change(self, config: "ControlConfig") -> "ControlConfig":
        """Return a run's configuration with the options given applied to it."""
        from beatrice.pgir.stages import OWN_JUDGE

        fields = given(self)
        judges = tuple(f"{OWN_JUDGE}{spec}" for spec in fields.pop("judge", ()))
        if self.encoder is not None:
            fields["encoder"] = _absolute(self.encoder)
        rivals = config.rivals
        if names := fields.pop("rivals", ()):
            rivals = tuple(n for n in RIVALS if n in names or "all" in names)
        rivals = tuple(dict.fromkeys((*rivals, *judges)))
        return dataclasses.replace(config, **fields, rivals=rivals)


@click.command()
@RUN_DIR
@options(how=ControlOptions, retrieval=RetrievalOptions)
def control(run_dir: Path, how: ControlOptions, retrieval: RetrievalOptions) -> None:
    """Run PGIR and its rivals; choose their settings on validation.

    By default the passages that came with the questions are searched. The run keeps
    the last --corpus, --url or --retriever that was given.

    Example: beatrice control runs/paper --max-generations 4.63 --only all
    """
    from beatrice.extract.plugs import load_plug
    from beatrice.pgir.index import read_encoder_config
    from beatrice.pgir.stages import CONTROL, JUDGES, as_judge

    known = ("none", "all", *RIVALS)
    if unknown := [name for name in how.rivals if name not in known]:
        raise click.UsageError(
            f"--only: no rival is called {unknown[0]!r}; expected {', '.join(known)}"
        )
    retrieval.write(run_dir)
    # A choice is recorded only after it was found to exist.
    with checking("--judge"):
        for spec in how.judge:
            as_judge(load_plug(spec, JUDGES), spec)
    if how.encoder is not None:
        with checking("--encoder"):
            read_encoder_config(Path(how.encoder))
    do_again_if_changed(run_dir, CONTROL, how.change)
