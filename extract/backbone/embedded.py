"""Where the language model lies that ships with the repository."""

from pathlib import Path

EMBEDDED = "embedded"  # its name on the command line and in manifests
WEIGHTS = Path(__file__).parent.parent / "world" / "weights"


def model_path(name: str) -> str:
    """Return what Transformers loads: a directory, or a Hub id as it is."""
    return str(WEIGHTS) if name == EMBEDDED else name
