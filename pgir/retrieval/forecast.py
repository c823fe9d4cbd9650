"""What a dense index will take: bytes by formula, seconds by trying a few passages."""

import time
from collections.abc import Sequence

import numpy as np

from extract.records import Passage
from extract.run.stages import bytes_in_words
from pgir.retrieval.corpus import as_document
from pgir.retrieval.encoder import TextEncoder
from pgir.retrieval.index import FORMS, Form, IndexConfig, import_faiss

WIKIPEDIA = 21_015_324  # passages of `psgs_w100.tsv`
_TRIED, _TRIED_QUERIES, _TRIED_ROWS = 128, 16, 20_000


def index_bytes(form: Form, n_passages: int, d_model: int, config: IndexConfig) -> int:
    """Return the memory that an index takes, which is also its file (none of `flat`).

    Flat 4 bytes a channel, SQ8 one, IVF-PQ its codes and 8 for the passage's number,
    besides the centroids (faiss's documentation).
    """
    if form == "flat":
        return 4 * n_passages * d_model
    if form == "sq8":
        return n_passages * d_model + 2 * 4 * d_model
    codes, lists = config.codes(d_model), config.lists(n_passages)
    return n_passages * (codes + 8) + 4 * d_model * (lists + 256)


def vector_bytes(n_passages: int, d_model: int) -> int:
    """Return the disk that the shards of float16 vectors take, their headers apart."""
    return 2 * n_passages * d_model


def _search_seconds(form: Form, n_passages: int, d_model: int, config: IndexConfig):
    """Return seconds a query, from a search in unit vectors drawn at random."""
    faiss = import_faiss()
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((_TRIED_ROWS, d_model)).astype(np.float32)
    if form == "flat":
        index = faiss.IndexFlatIP(d_model)
    else:
        kind = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexScalarQuantizer(d_model, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(rows)
    index.add(rows)
    began = time.perf_counter()
    index.search(rows[:_TRIED_QUERIES], config.n_rescored)
    return (time.perf_counter() - began) / _TRIED_QUERIES * n_passages / _TRIED_ROWS


def forecast(
    encoder: TextEncoder,
    sample: Sequence[Passage],
    n_passages: int,
    config: IndexConfig,
) -> str:
    """Return in words what indexing takes, in disk, memory and time on this machine.

    Args:
      encoder: is tried on the sample.
      sample: passages of the corpus; the first `_TRIED` are encoded.
      n_passages: of the corpus, or of one that is thought of.
      config: of the index; its form does not matter.
    """
    texts = [as_document(passage) for passage in sample[:_TRIED]]
    encoder.encode(texts[:8], "passage")  # what is done once is not counted
    began = time.perf_counter()
    encoder.encode(texts, "passage")
    rate = len(texts) / (time.perf_counter() - began)
    d_model = encoder.d_model
    lines = [
        f"{n_passages:,} passages, {encoder.config.path.name}, {d_model} channels: a "
        "dry run, nothing is written",
        f"  encoding  {rate:,.0f} passages a second here (tried on {len(texts)}): "
        f"{n_passages / rate / 3600:,.2f} hours",
        f"  vectors   {bytes_in_words(vector_bytes(n_passages, d_model))} of disk",
    ]
    for form in FORMS:
        size = bytes_in_words(index_bytes(form, n_passages, d_model, config))
        text = f"  {form:<9} {size} of memory"
        if form != "flat":
            text += ", as much of disk"
        if form == "ivf_pq":
            text += f", {config.lists(n_passages):,} lists"
        else:
            seconds = _search_seconds(form, n_passages, d_model, config)
            text += f", {seconds:.3g} s a question in batches"
        lines.append(text)
    return "\n".join(lines)
