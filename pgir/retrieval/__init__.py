"""Finding passages: corpora, retrievers over them, and how well they find.

Nothing here loads Torch, JAX or faiss before something is searched.
"""

from pgir.retrieval.bm25 import Bm25Retriever, Retriever

__all__ = ["Bm25Retriever", "Retriever"]
