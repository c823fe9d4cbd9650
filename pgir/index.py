"""Dense retrieval: encodes texts as vectors, builds an index on disk, and searches it.

Encoders are run like E5 and the sentence transformers: mean (or first-token) pooling
of the last hidden states, then L2 normalisation, so that an inner product is a cosine.
E5 was trained with "query: " and "passage: " before every text, its instruction-tuned
version with a task before questions only.

Encoding takes hours for Wikipedia. It is done in shards, each of which is written whole
or not at all, so a killed build continues with the first missing shard and ends with
the same files. Vectors are float16, as FlashRAG encodes them.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beatrice.extract.backbone.names import check_weights
from beatrice.extract.run.console import Update
from beatrice.extract.run.files import (
    read_json,
    read_sealed,
    seal,
    sha256_file,
    sha256_json,
    write_json_atomic,
    write_stream_atomic,
)
from beatrice.extract.signals.sequence import batches_of
from beatrice.pgir.corpus import Corpus, as_document, check_file, exclusive_folder

Pooling = Literal["mean", "cls"]
Form = Literal["flat", "sq8", "ivf_pq"]
ROWS_PER_SHARD = 16_384  # passages in a file of vectors
# Modules of sentence-transformers that are supported here.
_MODULES = re.compile(r"sentence_transformers\.(\w+\.)*(Transformer|Pooling|Normalize)")
_E5 = re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])", re.IGNORECASE)
# What instruction-tuned E5 reads before a question, with the task of its model card.
_INSTRUCTION = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the "
    "query\nQuery: "
)
_TOKENS_PER_BATCH = 8192  # padding included
# What an encoder's vectors depend on, besides its weights.
_ENCODER_FILES = ("config.json", "tokenizer.json", "vocab.txt", "tokenizer_config.json")
_N_RESCORED = 200  # candidates of a lossy index that are ranked by exact scores
_LISTS_PROBED = 0.1  # share of an inverted file's lists that a query searches
_N_TRAIN = 500_000  # vectors that quantisers are trained on, spread over the corpus
_PER_LIST = 39  # training vectors per centroid; faiss: fewer give poor centroids
_CODES = 256  # values of a product-quantised byte
_AGAIN = "delete the folder and build it again"
_DELETE = "delete it and {}, and run the same `beatrice corpus` again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageEncoderConfig:
    """How a text encoder is run."""

    path: Path  # a directory written by `save_pretrained`, weights as safetensors
    query_prefix: str = ""  # put before a question
    passage_prefix: str = ""  # put before a passage
    # Which last hidden states are averaged: all, or only the first token's.
    pooling: Pooling = "mean"
    # Longer texts are cut; special tokens count. Passages of 100 words have 130 to 180
    # tokens, so 256 are enough for them.
    max_tokens: int = 256
    # Type of weights and hidden states; pooling is always in float32.
    dtype: Literal["float32", "bfloat16"] = "float32"


_COPY = "copy the encoder again"


def _read_json(path: Path, kind: Any = dict[str, Any]) -> Any:
    return read_json(path, kind, _COPY) if path.is_file() else kind()


def _check_modules(path: Path) -> None:
    """Check that an encoder has only a Transformer, pooling and normalisation."""
    file = path / "modules.json"
    for module in _read_json(file, list[dict[str, Any]]):
        if not _MODULES.fullmatch(name := str(module.get("type"))):
            raise ValueError(
                f"{file}: expected Transformer, Pooling and Normalize of "
                f"sentence-transformers, found {name!r}, which is not supported; use "
                "another encoder"
            )


def _read_pooling(path: Path) -> Pooling:
    """Return the pooling named in an encoder's files; the mean if they name none."""
    _check_modules(path)
    file = _read_json(path / "1_Pooling" / "config.json")
    # Sentence-transformers 5.4 writes one name or several, older ones a flag for each.
    flags = [name for name in file if name.startswith("pooling_mode_")]
    modes = file.get("pooling_mode", [x for x in flags if file[x]] if flags else "mean")
    if modes in ("mean", ["mean"], ["pooling_mode_mean_tokens"]):
        return "mean"
    if modes in ("cls", ["cls"], ["pooling_mode_cls_token"]):
        return "cls"
    raise ValueError(
        f"{path}: expected a pooling by mean or first token, found {modes!r} in "
        "1_Pooling/config.json; use another encoder"
    )


def read_encoder_config(path: Path, **chosen: Any) -> PassageEncoderConfig:
    """Return how to run an encoder: as chosen, else by its files or its name (E5)."""
    given = Path(os.path.expanduser(path))
    path = given.resolve()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} is no encoder: expected a directory with config.json and "
            "model.safetensors, as `save_pretrained` writes it"
        )
    model = _read_json(path / "config.json")
    of_library = _read_json(path / "config_sentence_transformers.json")
    prompts = of_library.get("prompts") or {}
    # In the Hub's cache the folder is named after the commit, a parent after the model.
    of_hub = (part for part in path.parts if part.startswith("models--"))
    names = (given.name, path.name, *of_hub, str(model.get("_name_or_path", "")))
    prefixes = "", ""
    if e5_names := [name.lower() for name in names if _E5.search(name)]:
        is_instructed = any("instruct" in name for name in e5_names)
        prefixes = (_INSTRUCTION, "") if is_instructed else ("query: ", "passage: ")
    # Sentence-transformers 5 writes empty prompts for models without known ones.
    of_passages = prompts.get("passage") or prompts.get("document")
    fields = {
        "query_prefix": prompts.get("query") or prefixes[0],
        "passage_prefix": of_passages or prefixes[1],
        "pooling": _read_pooling(path),
    }
    fields |= {name: value for name, value in chosen.items() if value is not None}
    pooling = _read_json(path / "1_Pooling" / "config.json")
    has_prefix = fields["query_prefix"] or fields["passage_prefix"]
    if has_prefix and pooling.get("include_prompt") is False:
        raise ValueError(
            f"{path}: expected a pooling over the prefix too, found include_prompt "
            "false in 1_Pooling/config.json; use another encoder"
        )
    return PassageEncoderConfig(path=path, **fields)


def encoder_identity(config: PassageEncoderConfig) -> str:
    """Return the SHA-256 of all that an encoder's vectors depend on, but its path."""
    files = [*sorted(config.path.glob("*.safetensors"))]
    if not files:
        raise ValueError(f"{config.path} has no weights as safetensors; convert them")
    files += [path for n in _ENCODER_FILES if (path := config.path / n).is_file()]
    settings = dataclasses.asdict(config)
    del settings["path"]
    return sha256_json([settings, {file.name: sha256_file(file) for file in files}])


class TextEncoder:
    """A text encoder in memory, on a GPU if there is one; vectors are `d_model` wide.

    `identity` is what `encoder_identity` returns.
    """

    def __init__(self, config: PassageEncoderConfig) -> None:
        """Load the weights."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        from beatrice.extract.signals.precision import loading_weights

        self.config, self.identity = config, encoder_identity(config)
        self.n_cut = 0  # texts so far of which only the beginning was encoded
        about = _read_json(config.path / "config.json")
        check_weights(str(config.path), config.path, about)
        # If trust_remote_code is not given, Transformers may prompt for it.
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.path, trust_remote_code=False
        )
        dtype = getattr(torch, config.dtype)
        with loading_weights(dtype):
            model = AutoModel.from_pretrained(
                config.path, use_safetensors=True, trust_remote_code=False, dtype=dtype
            )
        has_gpu = torch.cuda.is_available()
        device = f"cuda:{torch.cuda.current_device()}" if has_gpu else "cpu"
        self._model = model.eval().to(device)
        self.d_model = int(model.config.hidden_size)
        n_positions = getattr(model.config, "max_position_embeddings", None)
        embeddings = getattr(model, "embeddings", None)
        table: Any = getattr(embeddings, "position_embeddings", None)
        if getattr(table, "padding_idx", None) is not None:
            # RoBERTa and its like count from the row after that of padding.
            n_positions = table.num_embeddings - table.padding_idx - 1
        if n_positions is not None and config.max_tokens > n_positions:
            raise ValueError(
                f"{config.path} reads texts of at most {n_positions} tokens, not "
                f"{config.max_tokens}; give max_tokens={n_positions} or less"
            )

    def encode(
        self, texts: Sequence[str], kind: Literal["query", "passage"]
    ) -> np.ndarray:
        """Return unit vectors `[n_texts, d_model]` float32.

        Texts of similar length share a batch. Batches depend only on the texts, so the
        same list gives the same bytes on the same machine.
        """
        config = self.config
        prefix = config.query_prefix if kind == "query" else config.passage_prefix
        encoded = self._tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=config.max_tokens,
            return_attention_mask=False,
        )
        ids = encoded["input_ids"]
        self.n_cut += sum(bool(x.overflowing) for x in encoded.encodings or ())
        vectors = np.empty((len(ids), self.d_model), np.float32)
        for batch in batches_of([*map(len, ids)], _TOKENS_PER_BATCH):
            vectors[batch] = self._encode_batch([ids[i] for i in batch])
        return vectors

    def _encode_batch(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        import torch

        from beatrice.extract.signals.precision import exact_products

        padded = np.zeros((len(ids), max(map(len, ids))), np.int64)
        mask = np.zeros_like(padded)
        for row, text_ids in enumerate(ids):
            padded[row, : len(text_ids)], mask[row, : len(text_ids)] = text_ids, 1
        inputs = torch.from_numpy(padded).to(self._model.device)
        attended = torch.from_numpy(mask).to(self._model.device)
        with torch.inference_mode(), exact_products():
            states = self._model(
                input_ids=inputs, attention_mask=attended
            ).last_hidden_state.float()
            if self.config.pooling == "mean":
                weights = attended[..., None].float()
                vectors = (states * weights).sum(1) / weights.sum(1)
            else:
                vectors = states[:, 0]
            return torch.nn.functional.normalize(vectors, dim=-1).cpu().numpy()


def import_faiss() -> Any:
    """Return faiss, or raise a ValueError that says how to install it."""
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "dense retrieval needs faiss: pip install 'beatrice-probe[dense]'"
        ) from None
    return faiss


class Vectors:
    """The vectors of a corpus, `[n_passages, d_model]`, memory-mapped.

    `facts`, sealed in `vectors.json`, says from what they were made.
    """

    def __init__(self, folder: Path) -> None:
        """Open finished vectors; every shard is checked against its SHA-256."""
        if not (folder / "vectors.json").is_file():
            raise ValueError(
                f"{folder} has no finished vectors; run `beatrice corpus` with this "
                "--encoder to make or complete them"
            )
        self.folder = folder
        self.facts = read_sealed(folder / "vectors.json", _AGAIN)
        for name, sha256 in self.facts["shards"].items():
            check_file(folder / name, sha256, _DELETE.format("vectors.json"))
        names = sorted(self.facts["shards"])
        self._paths = [folder / name for name in names]
        shapes = [self._shard(number).shape for number in range(len(names))]
        self._starts = np.cumsum([0, *(n for n, _ in shapes)])
        self.shape = (int(self._starts[-1]), shapes[0][1])

    def _shard(self, number: int) -> np.ndarray:
        """Map a shard anew on each use: one that stays open costs a file descriptor."""
        return np.load(self._paths[number], mmap_mode="r")

    def shards(self) -> Iterator[np.ndarray]:
        """Yield the shards in order, `[n, d_model]` float32 each."""
        for number in range(len(self._paths)):
            yield np.asarray(self._shard(number), np.float32)

    def whole(self) -> np.ndarray:
        """Return all vectors, float32, in memory."""
        vectors = np.empty(self.shape, np.float32)
        parts = np.split(vectors, self._starts[1:-1])
        for rows, shard in zip(parts, self.shards(), strict=True):
            rows[:] = shard
        return vectors

    def take(self, places: np.ndarray) -> np.ndarray:
        """Return the vectors at some indices, `[n, d_model]` float32."""
        vectors = np.empty((len(places), self.shape[1]), np.float32)
        owner = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(owner):
            where = owner == number
            rows = places[where] - self._starts[number]
            vectors[where] = self._shard(number)[rows]
        return vectors


def index_folder(corpus: Corpus, encoder_name: str) -> Path:
    """Return the folder of vectors and indexes, named after the encoder's folder."""
    return corpus.folder / "index" / encoder_name


def _check_origin(
    facts: dict[str, Any], corpus: Corpus, encoder: TextEncoder, folder: Path
) -> None:
    if facts["corpus"] != corpus.identity:
        raise ValueError(
            f"{folder} was built on another corpus ({facts['corpus'][:12]}…; this one "
            f"is {corpus.identity[:12]}…); {_AGAIN}"
        )
    if facts["encoder"] != encoder.identity:
        raise ValueError(
            f"{folder} was built by another encoder ({facts['encoder_name']}, "
            f"{facts['encoder'][:12]}…; this one is {encoder.config.path.name}, "
            f"{encoder.identity[:12]}…, a hash of weights, prefixes, pooling and "
            f"types); use that one, or {_AGAIN}"
        )


def build_vectors(
    folder: Path,
    corpus: Corpus,
    encoder: TextEncoder,
    update: Update,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> Vectors:
    """Encode a corpus, shard by shard, keeping the shards that exist."""
    plan = folder / "plan.json"
    facts: dict[str, Any] = {
        "corpus": corpus.identity,
        "encoder": encoder.identity,
        "encoder_name": encoder.config.path.name,
        "rows_per_shard": rows_per_shard,
    }
    if plan.exists():
        facts = read_sealed(plan, _AGAIN)
        _check_origin(facts, corpus, encoder, folder)
    if (folder / "vectors.json").exists():
        return Vectors(folder)
    step, n = facts["rows_per_shard"], len(corpus)
    shards, n_cut = {}, dict(facts.get("n_cut", {}))  # by shard
    with exclusive_folder(folder):
        write_json_atomic(plan, seal(facts))
        for number, start in enumerate(range(0, n, step)):
            path, stop = folder / f"vectors-{number:05d}.npy", min(n, start + step)
            if path.name not in n_cut or not path.exists():
                before = encoder.n_cut
                texts = [as_document(corpus[i]) for i in range(start, stop)]
                vectors = encoder.encode(texts, "passage").astype(np.float16)
                with write_stream_atomic(path) as stream:
                    np.save(stream, vectors)
                n_cut[path.name] = encoder.n_cut - before
                write_json_atomic(plan, seal(facts | {"n_cut": n_cut}))
            shards[path.name] = sha256_file(path)
            update(stop, n)
        facts |= {"n_cut": n_cut, "shards": shards}
        write_json_atomic(folder / "vectors.json", seal(facts))
    return Vectors(folder)


def index_recipe(form: Form, n_passages: int, d_model: int) -> str:
    """Return the `index_factory` string of faiss for a form.

    "flat" keeps float32 vectors in memory and is exact. "sq8" keeps a byte per channel.
    "ivf_pq" keeps a byte for 8 channels, in as many lists as the square root of the
    number of passages, as in Atlas, but no more than training can fill.
    """
    if form == "flat":
        return "Flat"
    if form == "sq8":
        return "SQ8"
    if n_passages < _CODES:
        raise ValueError(
            f"an ivf_pq index learns {_CODES} codes and needs at least as many "
            f"passages, found {n_passages}; use --index flat"
        )
    n_lists = min(math.isqrt(n_passages), min(n_passages, _N_TRAIN) // _PER_LIST)
    return f"IVF{max(1, n_lists)},PQ{max(1, d_model // 8)}"


def build_index(vectors: Vectors, form: Form) -> Path | None:
    """Write the faiss index of one form; return its file, or None for "flat".

    A flat index is the vectors themselves, and is filled from them when it is opened. A
    lossy one is written in one piece. That takes minutes, not hours like encoding, so a
    killed build starts it again, with the same result.
    """
    if form == "flat":
        return None
    (n, d_model), folder = vectors.shape, vectors.folder
    path, about = folder / f"{form}.faiss", folder / f"{form}.json"
    facts = {
        "vectors": sha256_file(folder / "vectors.json"),
        "recipe": index_recipe(form, n, d_model),
    }
    if about.exists() and facts.items() <= read_sealed(about, _AGAIN).items():
        return path
    faiss = import_faiss()
    with exclusive_folder(folder):
        about.unlink(missing_ok=True)
        recipe, metric = facts["recipe"], faiss.METRIC_INNER_PRODUCT
        index = faiss.index_factory(d_model, recipe, metric)
        if form == "ivf_pq":
            index.verbose = index.pq.cp.verbose = index.cp.verbose = False
            # Else faiss warns on stdout of few passages, which the user knows.
            index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        trained_on = np.linspace(0, n - 1, min(n, _N_TRAIN)).astype(np.int64)
        index.train(vectors.take(trained_on))
        for shard in vectors.shards():
            index.add(shard)
        with write_stream_atomic(path) as stream:
            faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))
        write_json_atomic(about, seal(facts | {"file": sha256_file(path)}))
    return path


def check_index(vectors: Vectors, form: Form) -> None:
    """Check that an index of a form was built on the vectors; "flat" needs none."""
    if form != "flat" and not (vectors.folder / f"{form}.json").is_file():
        raise ValueError(
            f"{vectors.folder} has no {form} index; run `beatrice corpus` with "
            f"--index {form}"
        )


def open_index(vectors: Vectors, form: Form) -> Any:
    """Return the faiss index of vectors; for "flat" a search function `(queries, k)`.

    A flat index of faiss grows by doubling as shards are added, and takes up to three
    times the memory of its vectors. Searching one array is as exact, and does not.
    """
    faiss = import_faiss()
    if form == "flat":
        inner_product = faiss.METRIC_INNER_PRODUCT
        return functools.partial(faiss.knn, xb=vectors.whole(), metric=inner_product)
    folder, path = vectors.folder, vectors.folder / f"{form}.faiss"
    check_index(vectors, form)
    facts = read_sealed(folder / f"{form}.json", _AGAIN)
    if facts["vectors"] != sha256_file(folder / "vectors.json"):
        raise ValueError(f"{path} was built from other vectors; build it again")
    check_file(path, facts["file"], _DELETE.format(f"{form}.json"))
    index = faiss.read_index(str(path))
    if form == "ivf_pq":
        index.nprobe = max(1, math.ceil(_LISTS_PROBED * index.nlist))
    return index


class DenseRetriever:
    """Ranks the passages of a corpus by inner product with the encoded question."""

    def __init__(
        self, corpus: Corpus, encoder: TextEncoder, form: Form = "flat"
    ) -> None:
        """Open the index that was built for this corpus and encoder."""
        folder = index_folder(corpus, encoder.config.path.name)
        self._vectors = Vectors(folder)
        _check_origin(self._vectors.facts, corpus, encoder, folder)
        self._index = open_index(self._vectors, form)
        self._encoder, self._form = encoder, form

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, min(depth, n_passages)]` indices, best first."""
        return self.search_vectors(self._encoder.encode(queries, "query"), depth)

    def search_vectors(self, queries: np.ndarray, depth: int) -> np.ndarray:
        """Return the same for encoded questions, `[n_queries, d_model]` float32.

        The candidates of a lossy index are ranked by exact scores; the lower index
        comes first at equal scores.
        """
        n_passages = self._vectors.shape[0]
        depth = min(depth, n_passages)
        if self._form == "flat":
            scores, places = self._index(queries, k=depth)
            order = np.lexsort((places, -scores))
            return np.take_along_axis(places, order, axis=1)
        n = min(n_passages, max(depth, _N_RESCORED))
        candidates = self._index.search(queries, n)[1]
        best = np.empty((len(queries), depth), np.int64)
        for i, query in enumerate(queries):
            places = candidates[i][candidates[i] >= 0]
            if len(places) < depth:  # the nearest lists have fewer: search them all
                n_probed, self._index.nprobe = self._index.nprobe, self._index.nlist
                places = self._index.search(query[None], n)[1][0]
                self._index.nprobe = n_probed
            places = np.sort(places)
            order = np.argsort(-(self._vectors.take(places) @ query), kind="stable")
            best[i] = places[order[:depth]]
        return best
