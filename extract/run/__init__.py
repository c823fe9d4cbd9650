"""A run directory: paths, manifest, stages, lock, and files written whole."""
