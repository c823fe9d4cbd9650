"""Which retriever a run searches with, and over which passages."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from extract.records import Passage, read_records
from extract.run.directory import RunDir
from extract.run.files import sha256_file, sha256_json
from extract.run.manifest import Preset
from pgir.retrieval.bm25 import Bm25Retriever, Retriever
from pgir.retrieval.corpus import Corpus
from pgir.retrieval.dense import DenseRetriever
from pgir.retrieval.encoder import TextEncoder, encoder_config
from pgir.retrieval.fused import FusedRetriever
from pgir.retrieval.index import Form
from pgir.retrieval.served import ServedRetriever

Kind = Literal["bm25", "dense", "fused", "served"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """The run's section `retrieval`.

    Attributes:
      retriever: "bm25"; "dense"; "fused", which is both; or "served", a server's.
      corpus: folder of a corpus that `beatrice corpus` built; None searches the
        passages that came with the run's questions, by BM25 alone.
      encoder: directory of the encoder that the corpus was indexed with.
      encoder_options: fields of its `EncoderConfig` that are not its own, as then.
      form: of the dense index.
      url: of a server, with the path of its protocol.
    """

    retriever: Kind = "bm25"
    corpus: str | None = None
    encoder: str | None = None
    encoder_options: dict[str, str | int] = dataclasses.field(default_factory=dict)
    form: Form = "flat"
    url: str | None = None

    def __post_init__(self) -> None:
        """Refuse a retriever that lacks something, or is given too much."""
        if self.retriever not in KINDS:
            raise ValueError(
                f"retriever: expected one of {', '.join(KINDS)}, found "
                f"{self.retriever!r}"
            )
        is_dense = self.retriever in ("dense", "fused")
        if is_dense and (self.corpus is None or self.encoder is None):
            raise ValueError(
                f"the {self.retriever} retriever needs a corpus and the encoder that "
                "it was indexed with (--corpus, --retriever-encoder)"
            )
        if (self.retriever == "served") != (self.url is not None):
            raise ValueError("a URL goes with the served retriever, and with no other")


RETRIEVAL_PRESETS: dict[Preset, RetrievalConfig] = {
    "demo": RetrievalConfig(),
    "smoke": RetrievalConfig(),
    "paper": RetrievalConfig(),
}


class Retrieval(NamedTuple):
    """A retriever with what its indices mean.

    Attributes:
      retriever: ranks `passages`.
      passages: a served retriever's grow as it finds new ones.
      identity: SHA-256 of all that its rankings depend on; of a server, its URL.
    """

    retriever: Retriever
    passages: Sequence[Passage]
    identity: str


def open_corpus_retrieval(
    corpus: Corpus,
    retriever: Kind,
    encoder: TextEncoder | None = None,
    form: Form = "flat",
) -> Retriever:
    """Return a retriever over a corpus.

    Raises:
      ValueError: its index is missing, damaged, or of another encoder or corpus.
    """
    if retriever == "bm25":
        return Bm25Retriever(corpus)
    if encoder is None:
        raise ValueError(f"the {retriever} retriever needs an encoder (--encoder)")
    dense = DenseRetriever(corpus, encoder, form)
    if retriever == "dense":
        return dense
    return FusedRetriever([Bm25Retriever(corpus), dense])


def open_retrieval(
    config: RetrievalConfig,
    own: Path,
    cache: Path,
    note: Callable[[str], None] = lambda text: None,
) -> Retrieval:
    """Return the retriever that a run has chosen, with its passages.

    Args:
      config: the run's choice.
      own: file of the passages that came with its questions.
      cache: where a server's replies are kept.
      note: told of a server's failures.
    """
    if config.retriever == "served":
        served = ServedRetriever(str(config.url), cache, note=note)
        return Retrieval(served, served.passages, sha256_json(config.url))
    if config.corpus is None:
        passages = list(read_records(own, Passage))
        identity = sha256_json(["bm25", sha256_file(own)])
        return Retrieval(Bm25Retriever(passages), passages, identity)
    corpus = Corpus(Path(config.corpus))
    encoder, parts = None, [config.retriever, corpus.identity]
    if config.encoder is not None and config.retriever != "bm25":
        options: dict[str, Any] = config.encoder_options
        encoder = TextEncoder(encoder_config(Path(config.encoder), **options))
        parts += [encoder.identity, config.form]
    retriever = open_corpus_retrieval(corpus, config.retriever, encoder, config.form)
    return Retrieval(retriever, corpus, sha256_json(parts))


def retrieval_config(run: RunDir) -> RetrievalConfig:
    """Return a run's choice; BM25 over its own passages where it made none."""
    return run.settle("retrieval", RETRIEVAL_PRESETS, is_recorded=False)


def settle_retrieval(
    run: RunDir, change: Callable[[RetrievalConfig], RetrievalConfig], *stages: str
) -> None:
    """Let a run search elsewhere; stages that searched are done again.

    No answer, label or weight of the run itself depends on it.
    """
    held = retrieval_config(run)
    if change(held) != held:
        for stage in stages:
            run.reopen_stage(stage)
    run.settle("retrieval", RETRIEVAL_PRESETS, change, is_replaceable=True)


def retrieval_of(
    run: RunDir, note: Callable[[str], None] = lambda text: None
) -> Retrieval:
    """Open the retriever that a run has chosen."""
    cache = run.path / "retrieved" / "served.jsonl"
    return open_retrieval(retrieval_config(run), run.passages, cache, note)
