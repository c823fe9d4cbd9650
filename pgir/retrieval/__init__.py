"""Finding passages: corpora, retrievers over them, and how well they find.

Nothing here loads Torch, JAX or faiss before something is searched.
"""
