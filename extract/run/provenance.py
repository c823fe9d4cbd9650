"""When, and with which packages, something was made."""

import datetime
import importlib.metadata
import platform

_PACKAGES = (
    "beatrice-probe",
    "flax",
    "jax",
    "jaxlib",
    "numpy",
    "openai",
    "optax",
    "orbax-checkpoint",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tensorstore",
    "tokenizers",
    "torch",
    "transformers",
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def utc_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
