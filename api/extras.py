"""Tell users what to install if a package of the extra `train` is missing."""

import contextlib
from collections.abc import Iterator

# Packages of the extra `train`, none of which is needed to score answers.
_TRAINING = {
    *("bm25s", "flax", "jax", "jaxlib", "matplotlib", "openai", "optax", "orbax"),
    *("pandas", "pyarrow", "scipy", "sklearn", "tensorstore"),
    "threadpoolctl",
}


def missing_extra(error: ImportError) -> str | None:
    """Return what to install if a training package caused the error, else None."""
    if error.name is None:
        return str(error)  # of a library that says what to install
    package = error.name.partition(".")[0]
    if package not in _TRAINING:
        return None
    if not isinstance(error, ModuleNotFoundError):
        return str(error)  # it already says what to do
    return (
        f"{package} is not installed, but training and evaluation need it: pip "
        "install 'beatrice-probe[train]'"
    )


@contextlib.contextmanager
def naming_extra(what: str) -> Iterator[None]:
    """Raise an error that names `what` and the extra if a package is missing."""
    try:
        yield
    except ImportError as error:
        if (text := missing_extra(error)) is None:
            raise
        raise ImportError(f"{what}: {text}", name=error.name) from error
