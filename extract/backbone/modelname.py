"""Whether a name can be a backbone's, told before Torch is loaded."""

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _check_directory(directory: Path) -> None:
    """Say in one sentence what a directory lacks to be a checkpoint."""
    if not directory.is_dir():
        raise ValueError(
            f"backbone {str(directory)!r}: expected a model directory, found a file"
        )
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"backbone {str(directory)!r}: expected a directory written by "
            "save_pretrained, found no config.json in it"
        )
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"backbone {str(directory)!r}: expected safetensors weights, found no "
            "*.safetensors file; save the model with safe serialization"
        )
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"backbone {str(directory)!r}: expected a tokenizer beside the weights, "
            f"found none of {', '.join(_TOKENIZER_FILES)}"
        )


def check_name(name: str) -> None:
    """Check that a name is a checkpoint directory or could be a Hub id."""
    path = Path(name).expanduser()
    if path.exists():
        _check_directory(path)
    elif not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"backbone {name!r}: no such directory, and not a Hub id of the form "
            "owner/model"
        )
