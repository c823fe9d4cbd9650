"""What to install where a package is missing that the base installation lacks."""

import contextlib
from collections.abc import Iterator

# Packages of the extra `train`: what scores answers loads none of them.
_TRAINING = {
    *("bm25s", "flax", "jax", "jaxlib", "matplotlib", "openai", "optax", "orbax"),
    *("pandas", "pyarrow", "scipy", "sklearn", "tensorstore"),
    "threadpoolctl",
}


def missing_extra(error: ImportError) -> str | None:
    """Return what to install where a package of training is missing, or None."""
    package = (error.name or "").partition(".")[0]
    if package not in _TRAINING:
        return None
    if not isinstance(error, ModuleNotFoundError):
        return str(error)  # which says what to do
    return (
        f"{package} is not installed, which training and evaluation need: pip install "
        "'beatrice-probe[train]'"
    )


@contextlib.contextmanager
def naming_extra(what: str) -> Iterator[None]:
    """Say what needs the extra, and how to get it, where a package is missing."""
    try:
        yield
    except ImportError as error:
        if (text := missing_extra(error)) is None:
            raise
        raise ImportError(f"{what}: {text}", name=error.name) from error
