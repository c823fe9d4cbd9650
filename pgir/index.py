"""Dense retrieval: texts to vectors, vectors to an index on disk, an index searched.

An encoder is run as E5 and the sentence transformers are: mean (or first-token) pooling
of the last hidden states, then L2 norm, so that an inner product is a cosine. E5 was
trained with "query: " and "passage: " before every text.

Encoding is nearly all of the work (hours for Wikipedia), so it is done in shards that
each appear whole or not at all: a killed build continues with the first one missing,
and the files are those of a build that was not killed. Vectors are float16, as
FlashRAG encodes them; the shards are memory-mapped for exact rescoring.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beatrice.extract.run.console import Update
from beatrice.extract.run.files import (
    read_sealed,
    seal,
    sha256_file,
    sha256_json,
    write_json_atomic,
    write_stream_atomic,
)
from beatrice.pgir.corpus import Corpus, as_document

Pooling = Literal["mean", "cls"]
Kind = Literal["query", "passage"]
_E5 = re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])", re.IGNORECASE)
_TOKENS_PER_BATCH = 8192  # padding included
# What an encoder's vectors depend on, beside its weights.
_FILES = ("config.json", "tokenizer.json", "vocab.txt", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """How an encoder is run.

    Attributes:
      path: a directory written by `save_pretrained`, weights as safetensors.
      query_prefix: put before a question.
      passage_prefix: put before a passage.
      pooling: what of the last hidden states is kept.
      max_tokens: of a text, special tokens included; the rest is cut. Passages of 100
        words have 130 to 180 tokens, so 256 lose nothing of them.
      dtype: of weights and hidden states; pooling is always in float32.
    """

    path: Path
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Pooling = "mean"
    max_tokens: int = 256
    dtype: Literal["float32", "bfloat16"] = "float32"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def encoder_config(path: Path, **given: Any) -> EncoderConfig:
    """Return how an encoder is run, as its own files say, or its name for E5.

    Args:
      path: its directory.
      **given: fields of `EncoderConfig` that a person chose; None leaves them open.

    Raises:
      ValueError: the directory holds no encoder, or says a pooling we do not know.
    """
    path = Path(path).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} is no encoder: expected a directory with config.json and "
            "model.safetensors, as `save_pretrained` writes it"
        )
    own = _json(path / "config.json")
    prompts = _json(path / "config_sentence_transformers.json").get("prompts") or {}
    names = (path.name, str(own.get("_name_or_path", "")))
    is_e5 = any(_E5.search(name) for name in names)
    pooled = _json(path / "1_Pooling" / "config.json")
    if pooled.get("pooling_mode_cls_token"):
        pooling: Pooling = "cls"
    elif pooled.get("pooling_mode_mean_tokens", True):
        pooling = "mean"
    else:
        raise ValueError(
            f"{path}: its pooling is neither mean nor the first token's, and no other "
            "is known here"
        )
    passages = prompts.get("passage", prompts.get("document"))
    found = {
        "query_prefix": prompts.get("query", "query: " if is_e5 else ""),
        "passage_prefix": "passage: " if is_e5 and passages is None else passages or "",
        "pooling": pooling,
    }
    found |= {name: value for name, value in given.items() if value is not None}
    return EncoderConfig(path=path, **found)


def encoder_identity(config: EncoderConfig) -> str:
    """Return the SHA-256 of all that an encoder's vectors depend on, but its path."""
    files = [*sorted(config.path.glob("*.safetensors"))]
    if not files:
        raise ValueError(f"{config.path} has no weights as safetensors")
    files += [config.path / name for name in _FILES if (config.path / name).is_file()]
    settings = dataclasses.asdict(config)
    del settings["path"]
    return sha256_json([settings, {file.name: sha256_file(file) for file in files}])


class TextEncoder:
    """An encoder in memory.

    Attributes:
      config: how it is run.
      identity: see `encoder_identity`.
      d_model: width of its vectors.
    """

    def __init__(self, config: EncoderConfig, *, device: str = "cpu") -> None:
        """Load the weights."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.config, self.identity = config, encoder_identity(config)
        self._tokenizer = AutoTokenizer.from_pretrained(config.path)
        model = AutoModel.from_pretrained(
            config.path, use_safetensors=True, dtype=getattr(torch, config.dtype)
        )
        self._model = model.to(device).eval()
        self._device = device
        self.d_model = int(model.config.hidden_size)

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """Return unit vectors `[n_texts, d_model]` float32.

        Texts of similar length share a batch; batches depend on the texts alone, so
        the same list gives the same bytes on the same machine.

        Args:
          texts: at least one.
          kind: which prefix they get.
        """
        config = self.config
        prefix = config.query_prefix if kind == "query" else config.passage_prefix
        ids = self._tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=config.max_tokens,
            return_attention_mask=False,
        )["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
        found = np.empty((len(ids), self.d_model), np.float32)
        start = 0
        while start < len(order):
            stop = start + 1
            while (
                stop < len(order)
                and (stop + 1 - start) * len(ids[order[stop]]) <= _TOKENS_PER_BATCH
            ):
                stop += 1
            batch = order[start:stop]
            found[batch] = self._encode([ids[i] for i in batch])
            start = stop
        return found

    def _encode(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the vectors of one batch."""
        import torch

        width = max(map(len, ids))
        padded = np.zeros((len(ids), width), np.int64)
        mask = np.zeros((len(ids), width), np.int64)
        for row, own in enumerate(ids):
            padded[row, : len(own)], mask[row, : len(own)] = own, 1
        keep = torch.from_numpy(mask).to(self._device)
        with torch.inference_mode():
            states = self._model(
                input_ids=torch.from_numpy(padded).to(self._device),
                attention_mask=keep,
            ).last_hidden_state.float()
            if self.config.pooling == "mean":
                weights = keep[..., None].float()
                vectors = (states * weights).sum(1) / weights.sum(1)
            else:
                vectors = states[:, 0]
            unit = torch.nn.functional.normalize(vectors, dim=-1)
        return unit.cpu().numpy()


Form = Literal["flat", "sq8", "ivf_pq"]
FORMS: tuple[Form, ...] = ("flat", "sq8", "ivf_pq")
# faiss: fewer training vectors than these per centroid make poor ones.
_PER_LIST, _PER_CODE = 39, 39
_CODES = 256  # of a PQ byte
_AGAIN = "delete the folder and build it again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How vectors are stored and searched.

    Attributes:
      form: "flat" keeps float32 vectors in memory and is exact; "sq8" a byte per
        channel; "ivf_pq" `n_codes` bytes, and looks only into lists nearby.
      rows_per_shard: passages encoded between two files.
      n_lists: of an inverted file; None takes the root of the number of passages, as
        Atlas does, and no more than training can fill.
      n_codes: bytes of a product-quantised vector; None takes one for 8 channels.
      probed: share of the lists that a query looks into.
      n_rescored: candidates of a lossy index whose exact score decides.
      n_train: vectors that quantisers are trained on, spread evenly over the corpus.
    """

    form: Form = "flat"
    rows_per_shard: int = 16_384
    n_lists: int | None = None
    n_codes: int | None = None
    probed: float = 0.1
    n_rescored: int = 200
    n_train: int = 500_000

    def lists(self, n_passages: int) -> int:
        """Return the number of inverted lists for a corpus of some size."""
        most = max(1, min(n_passages, self.n_train) // _PER_LIST)
        return min(self.n_lists or math.isqrt(n_passages), most)

    def codes(self, d_model: int) -> int:
        """Return the bytes of a product-quantised vector of some width."""
        return self.n_codes or max(1, d_model // 8)


def import_faiss() -> Any:
    """Return faiss.

    Raises:
      ValueError: it is not installed; the message says how to get it.
    """
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "dense retrieval needs faiss: pip install 'beatrice-probe[dense]'"
        ) from None
    return faiss


def _shard(folder: Path, number: int) -> Path:
    return folder / f"vectors-{number:05d}.npy"


class Vectors:
    """The vectors of a corpus, memory-mapped.

    Attributes:
      facts: what they were made of, as sealed in `vectors.json`.
      shape: `(n_passages, d_model)`.
    """

    def __init__(self, folder: Path) -> None:
        """Open finished vectors; every shard is checked against its SHA-256.

        Raises:
          ValueError: they are not there or not finished, or a shard is damaged.
        """
        if not (folder / "vectors.json").is_file():
            raise ValueError(
                f"{folder} holds no finished vectors: run `beatrice corpus` with this "
                "--encoder, which makes them or continues"
            )
        self.folder = folder
        self.facts = read_sealed(folder / "vectors.json", _AGAIN)
        for name, expected in self.facts["shards"].items():
            path = folder / name
            if not path.is_file() or sha256_file(path) != expected:
                raise ValueError(
                    f"{path} is damaged: it does not match its SHA-256; delete it and "
                    "vectors.json, and the same `beatrice corpus` makes it again"
                )
        self._shards = [np.load(folder / name, mmap_mode="r") for name in self._names]
        self._starts = np.cumsum([0, *map(len, self._shards)])
        self.shape = (int(self._starts[-1]), self._shards[0].shape[1])

    @property
    def _names(self) -> list[str]:
        return sorted(self.facts["shards"])

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the shards in order, `[n, d_model]` float32 each."""
        for shard in self._shards:
            yield np.asarray(shard, np.float32)

    def take(self, places: np.ndarray) -> np.ndarray:
        """Return some vectors, `[n, d_model]` float32."""
        found = np.empty((len(places), self.shape[1]), np.float32)
        owner = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(owner):
            where = owner == number
            rows = places[where] - self._starts[number]
            found[where] = self._shards[number][rows]
        return found


def index_folder(corpus: Corpus, encoder_name: str) -> Path:
    """Return where the vectors and indexes of an encoder lie, by its folder's name."""
    return corpus.folder / "index" / encoder_name


def _made_of(corpus: Corpus, encoder: TextEncoder, config: IndexConfig) -> dict:
    return {
        "corpus": corpus.identity,
        "encoder": encoder.identity,
        "encoder_name": encoder.config.path.name,
        "rows_per_shard": config.rows_per_shard,
    }


def check_made_of(
    facts: dict[str, Any], corpus: Corpus, encoder: TextEncoder, folder: Path
) -> None:
    """Refuse vectors of another corpus or of another encoder.

    Raises:
      ValueError: names which of the two differs.
    """
    if facts["corpus"] != corpus.identity:
        raise ValueError(
            f"{folder} was built on another corpus ({facts['corpus'][:12]}…, this one "
            f"is {corpus.identity[:12]}…); {_AGAIN}"
        )
    if facts["encoder"] != encoder.identity:
        raise ValueError(
            f"{folder} was built by another encoder ({facts['encoder_name']}, "
            f"{facts['encoder'][:12]}…; this one is {encoder.config.path.name}, "
            f"{encoder.identity[:12]}…: weights, prefixes, pooling and types); "
            f"use that one, or {_AGAIN}"
        )


def build_vectors(
    folder: Path,
    corpus: Corpus,
    encoder: TextEncoder,
    config: IndexConfig,
    update: Update,
) -> Vectors:
    """Encode a corpus, shard by shard; what is there is kept.

    Args:
      folder: of one encoder.
      corpus: what is encoded.
      encoder: encodes it.
      config: only `rows_per_shard` counts here.
      update: told passages done and to do.

    Raises:
      ValueError: the folder holds vectors of another corpus or encoder.
    """
    made_of, plan = _made_of(corpus, encoder, config), folder / "plan.json"
    if plan.exists():
        held = read_sealed(plan, _AGAIN)
        check_made_of(held, corpus, encoder, folder)
        made_of = held  # shards of one size, whatever is asked for now
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(plan, seal(made_of))
    if (folder / "vectors.json").exists():
        return Vectors(folder)
    step, n = made_of["rows_per_shard"], len(corpus)
    names = []
    for number, start in enumerate(range(0, n, step)):
        path, stop = _shard(folder, number), min(n, start + step)
        if not path.exists():
            texts = [as_document(corpus[i]) for i in range(start, stop)]
            vectors = encoder.encode(texts, "passage").astype(np.float16)
            with write_stream_atomic(path) as stream:
                np.save(stream, vectors)
        names.append(path.name)
        update(stop, n)
    shards = {name: sha256_file(folder / name) for name in names}
    write_json_atomic(folder / "vectors.json", seal(made_of | {"shards": shards}))
    return Vectors(folder)


def _training_rows(vectors: Vectors, config: IndexConfig) -> np.ndarray:
    """Return what quantisers are trained on, `[n, d_model]`."""
    n = vectors.shape[0]
    places = np.linspace(0, n - 1, min(n, config.n_train)).astype(np.int64)
    return vectors.take(places)


def _empty_index(vectors: Vectors, config: IndexConfig) -> Any:
    """Return a trained faiss index without vectors."""
    faiss = import_faiss()
    n, d_model = vectors.shape
    if config.form == "flat":
        return faiss.IndexFlatIP(d_model)
    if config.form == "sq8":
        kind = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexScalarQuantizer(d_model, kind, faiss.METRIC_INNER_PRODUCT)
    else:
        if n < _CODES:
            raise ValueError(
                f"an ivf_pq index learns {_CODES} codes and needs as many passages, "
                f"found {n}; use --index flat"
            )
        recipe = f"IVF{config.lists(n)},PQ{config.codes(d_model)}"
        index = faiss.index_factory(d_model, recipe, faiss.METRIC_INNER_PRODUCT)
        index.verbose = index.pq.cp.verbose = index.cp.verbose = False
        # Few passages are warned of on stdout; who builds so small an index knows.
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
    index.train(_training_rows(vectors, config))
    return index


def build_index(vectors: Vectors, config: IndexConfig) -> Path | None:
    """Write the faiss index of one form; returns its file, or None for `flat`.

    A flat index is the vectors themselves and is filled from them when it is opened. A
    lossy one is written in one piece: it takes minutes where encoding takes hours, so
    a build that is killed here begins it again, with the same result.
    """
    if config.form == "flat":
        return None
    folder, name = vectors.folder, f"{config.form}.faiss"
    of_vectors = sha256_file(folder / "vectors.json")
    about = folder / f"{config.form}.json"
    settings = dataclasses.asdict(config)
    if about.exists():
        held = read_sealed(about, _AGAIN)
        if (held["vectors"], held["config"]) == (of_vectors, settings):
            return folder / name
        about.unlink()
    faiss = import_faiss()
    index = _empty_index(vectors, config)
    for part in vectors.parts():
        index.add(part)
    with write_stream_atomic(folder / name) as stream:
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))
    sha256 = sha256_file(folder / name)
    facts = {"vectors": of_vectors, "config": settings, "file": sha256}
    write_json_atomic(about, seal(facts))
    return folder / name


def open_index(vectors: Vectors, form: Form) -> tuple[Any, IndexConfig]:
    """Return a faiss index over vectors, and its settings.

    Raises:
      ValueError: it is not built, damaged, or of other vectors.
    """
    faiss = import_faiss()
    if form == "flat":
        index = faiss.IndexFlatIP(vectors.shape[1])
        for part in vectors.parts():
            index.add(part)
        return index, IndexConfig()
    folder, path = vectors.folder, vectors.folder / f"{form}.faiss"
    if not (folder / f"{form}.json").is_file():
        raise ValueError(
            f"{folder} has no {form} index: run `beatrice corpus` with --index {form}"
        )
    held = read_sealed(folder / f"{form}.json", _AGAIN)
    if held["vectors"] != sha256_file(folder / "vectors.json"):
        raise ValueError(f"{path} was built of other vectors; build it again")
    if not path.is_file() or sha256_file(path) != held["file"]:
        raise ValueError(
            f"{path} is damaged: it does not match its SHA-256; delete it and "
            f"{form}.json, and the same `beatrice corpus` makes it again"
        )
    config = IndexConfig(**held["config"])
    index = faiss.read_index(str(path))
    if form == "ivf_pq":
        index.nprobe = max(1, math.ceil(config.probed * index.nlist))
    return index, config


def exact_best(
    vectors: Vectors, queries: np.ndarray, candidates: np.ndarray, depth: int
) -> np.ndarray:
    """Return the best of each query's candidates by exact inner product.

    Args:
      vectors: of the corpus.
      queries: `[n_queries, d_model]`.
      candidates: `[n_queries, n]` places, none twice in a row.
      depth: at most `n`.

    Returns:
      `[n_queries, depth]` places, best first; of equal scores the first place.
    """
    best = np.empty((len(queries), depth), np.int64)
    for i, (query, own) in enumerate(zip(queries, candidates, strict=True)):
        own = np.sort(own)
        order = np.argsort(-(vectors.take(own) @ query), kind="stable")
        best[i] = own[order[:depth]]
    return best


class DenseRetriever:
    """Ranks the passages of a corpus by inner product with the encoded question."""

    def __init__(
        self, corpus: Corpus, encoder: TextEncoder, form: Form = "flat"
    ) -> None:
        """Open the index that was built for this corpus and encoder.

        Raises:
          ValueError: it is not there, damaged, of another encoder or another corpus.
        """
        folder = index_folder(corpus, encoder.config.path.name)
        self._vectors = Vectors(folder)
        check_made_of(self._vectors.facts, corpus, encoder, folder)
        self._index, self._config = open_index(self._vectors, form)
        self._encoder, self._form = encoder, form

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, min(depth, n_passages)]` places, best first."""
        return self.search_vectors(self._encoder.encode(queries, "query"), depth)

    def search_vectors(self, queries: np.ndarray, depth: int) -> np.ndarray:
        """Return the same for encoded questions, `[n_queries, d_model]` float32.

        A lossy index gives candidates, whose exact scores decide.
        """
        n_passages = self._vectors.shape[0]
        depth = min(depth, n_passages)
        if self._form == "flat":
            return self._index.search(queries, depth)[1]
        n = min(n_passages, max(depth, self._config.n_rescored))
        found = self._index.search(queries, n)[1]
        best = np.empty((len(queries), depth), np.int64)
        # The lists a query looked into may hold fewer than were asked for.
        short = np.flatnonzero((found < 0).any(axis=1))
        for i in short:
            own = found[i][found[i] >= 0]
            if len(own) < depth:
                own = self._look_everywhere(queries[i : i + 1], n)
            best[i] = exact_best(self._vectors, queries[i : i + 1], own[None], depth)[0]
        whole = np.setdiff1d(np.arange(len(queries)), short)
        best[whole] = exact_best(self._vectors, queries[whole], found[whole], depth)
        return best

    def _look_everywhere(self, query: np.ndarray, n: int) -> np.ndarray:
        """Return the candidates of one query from all inverted lists."""
        faiss_parameters: Any = self._index
        n_probed = faiss_parameters.nprobe
        faiss_parameters.nprobe = faiss_parameters.nlist
        try:
            return faiss_parameters.search(query, n)[1][0]
        finally:
            faiss_parameters.nprobe = n_probed
