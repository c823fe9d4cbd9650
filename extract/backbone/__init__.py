"""A frozen decoder: names, files, loading, where it adds to its residual stream."""
