"""The settings of a run: written down once and never changed."""

import contextlib
import dataclasses
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from beatrice.extract.run.directory import NewRun, OtherSettings, RunDir, read_manifest
from beatrice.extract.run.files import seal
from beatrice.extract.run.process import Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    layers: tuple[int, ...] = (8, 8)
    rate: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    n_seeds: int = 5
    widths: Widths = Widths()
    stop: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        if self.n_seeds < 1:
            raise ValueError(f"n_seeds: expected 1 or more, found {self.n_seeds}")


PRESETS = {
    "demo": Settings(),
    "smoke": Settings(n_seeds=1, widths=Widths(layers=(4,))),
    "paper": Settings(),
}
SMOKE = NewRun(preset="smoke", sections={"backbone": Widths()})


CHOOSE = "choose another directory, or repeat that run's options"


def changed(**fields):
    return lambda settings: dataclasses.replace(settings, **fields)


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", SMOKE) as run:
        yield run


def test_a_run_continues_with_the_settings_it_was_made_with(run):
    run.close()
    before = run.manifest.read_bytes()
    for item in (SMOKE, None):
        with RunDir.open(run.path, item) as again:
            assert (again.preset, again.seed) == ("smoke", 0)
            assert again.section("backbone", Widths) == Widths()
    assert run.manifest.read_bytes() == before
    assert read_manifest(run.path)["versions"]["numpy"]


def test_a_run_with_other_settings_is_refused_with_the_differences(tmp_path):
    RunDir.open(tmp_path, SMOKE).close()
    other = dataclasses.replace(SMOKE, seed=1, sections={"backbone": Widths(rate=0.5)})
    words = f"{tmp_path} holds a run with seed=0, backbone.rate=0.1; you asked for "
    words += f"seed=1, backbone.rate=0.5; {CHOOSE}"
    with pytest.raises(ValueError, match=f"^{words}$"):
        RunDir.open(tmp_path, other)
    other = NewRun(preset="smoke", sections={"backbone": Widths(), "data": Settings()})
    with pytest.raises(ValueError, match="with no data; you asked for one with data;"):
        RunDir.open(tmp_path, other)
    RunDir.open(tmp_path, SMOKE).close()  # the refusals released the lock


def test_settings_that_follow_from_a_preset_are_not_listed_as_different(tmp_path):
    def new_run(preset, **fields):
        sections = {"world": Widths(**fields), "extract": Widths(**fields)}
        return NewRun(preset=preset, sections=sections)

    RunDir.open(tmp_path, new_run("smoke")).close()
    with pytest.raises(ValueError, match="asked for preset='demo'; choose another"):
        RunDir.open(tmp_path, new_run("demo", rate=0.5))
    message = "asked for world.rate=0.5, extract.rate=0.5; choose another"
    with pytest.raises(ValueError, match=message):  # control: same preset
        RunDir.open(tmp_path, new_run("smoke", rate=0.5))


def test_settled_options_stay_and_other_values_are_refused_by_name(run):
    settled = run.resolve_section("train", PRESETS, changed(stop=3))
    assert settled == dataclasses.replace(PRESETS["smoke"], stop=3)
    assert run.section("train", Settings) == settled
    before = run.manifest.read_bytes()
    assert run.resolve_section("train", PRESETS) == settled  # no options given
    assert run.resolve_section("train", PRESETS, lambda saved: saved) == settled
    assert run.resolve_section("train", PRESETS, changed(stop=3)) == settled
    other = changed(precision="bfloat16", widths=Widths(layers=(4,), rate=0.5))
    words = f"{run.path} holds a run with train.widths.rate=0.1, train.precision="
    words += "'float32'; you asked for train.widths.rate=0.5, train.precision="
    with pytest.raises(ValueError, match=f"^{words}'bfloat16'; {CHOOSE}$"):
        run.resolve_section("train", PRESETS, other)
    assert run.manifest.read_bytes() == before


def test_settled_options_outlive_changed_defaults_of_a_preset(run):
    settled = run.resolve_section("train", PRESETS)
    later = {**PRESETS, "smoke": Settings(n_seeds=9)}
    assert run.resolve_section("train", later) == settled
    assert (
        run.resolve_section("select", later) == later["smoke"]
    )  # control: not recorded yet


def test_a_dry_run_settles_nothing(run):
    before = run.manifest.read_bytes()
    result = run.resolve_section("train", PRESETS, changed(stop=3), is_recorded=False)
    assert result.stop == 3
    assert run.manifest.read_bytes() == before
    with pytest.raises(ValueError, match="no settings of train yet; run `beatrice tr"):
        run.section("train", Settings)
    run.resolve_section("train", PRESETS)
    with pytest.raises(ValueError, match="train.stop=3"):  # the real run would refuse
        run.resolve_section("train", PRESETS, changed(stop=3), is_recorded=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda saved: saved.update(n_seed=3), "its field 'n_seed' is unknown"),
        (lambda saved: saved.pop("stop"), "its field 'stop' is missing"),
        (lambda saved: saved["widths"].update(depth=3), "its field 'widths.depth' is"),
        (lambda saved: saved.update(n_seeds="5"), "Expected `int`, got `str`"),
        (lambda saved: saved.update(precision="int8"), "Invalid enum value 'int8'"),
        (lambda saved: saved.update(n_seeds=0), "n_seeds: expected 1 or more, found 0"),
        (lambda saved: saved["widths"].update(layers=4), "Expected `array`, got `int`"),
    ],
)
def test_a_section_that_cannot_be_read_is_refused_with_the_reason(run, change, reason):
    run.resolve_section("train", PRESETS)
    manifest = read_manifest(run.path)
    change(manifest["sections"]["train"])
    run.manifest.write_text(json.dumps(seal(manifest)))
    words = re.escape(f"{run.manifest}, section 'train': {reason}")
    for read, value in ((run.section, Settings), (run.resolve_section, PRESETS)):
        with pytest.raises(ValueError, match=f"^{words}.*start a new run directory$"):
            read("train", value)


@pytest.mark.parametrize(
    "content",
    [
        '{"format": "beatrice-run", "version": 1, "config": {"preset": "smoke"}}',
        '{"format": "beatrice-run", "version": 2, "preset": "smoke", "seed": 0}',
        '{"name": "web app"}',
    ],
)
def test_a_missing_manifest_or_another_version_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match="is not a run directory: it has no manifest"):
        RunDir.open(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    words = rf"^{tmp_path / 'manifest.json'} is not a manifest this program reads "
    words += r"\(beatrice-run, version 4\); another version made it: start a new run"
    for item in (SMOKE, None):
        with pytest.raises(ValueError, match=words):
            RunDir.open(tmp_path, item)
    assert (tmp_path / "manifest.json").read_text() == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff", "not a JSON object (byte 0xff at position 0 is not UTF-8)"),
        (b"[" * 200_000, "not a JSON object (nested too deeply)"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "not a JSON object (Exceeds the limit"),
    ],
    ids=["bytes", "200,000 brackets", "5,000 digits"],
)
def test_a_manifest_that_is_not_an_object_is_refused(tmp_path, content, words):
    (tmp_path / "manifest.json").write_bytes(content)
    words = re.escape(f"{tmp_path / 'manifest.json'}: {words}")
    with pytest.raises(ValueError, match=f"^{words}.*restore it, or start a new run"):
        RunDir.open(tmp_path)


BY_HAND = "its own SHA-256 does not match; restore it"


@pytest.mark.parametrize(
    ("change", "is_sealed", "words"),
    [
        (lambda manifest: manifest.update(seed=5), False, BY_HAND),
        (lambda x: x["sections"]["train"].update(n_seeds=3), False, BY_HAND),
        (lambda manifest: manifest.pop("sha256"), False, BY_HAND),
        (lambda x: x.update(seed="5"), True, "Expected `int`, got `str`"),
        (lambda x: x.update(preset="big"), True, "Invalid enum value 'big'"),
        (lambda x: x.update(sections=None), True, "Expected `object`, got `null`"),
        (lambda x: x["sections"].update(a=None), True, "Expected `object`"),
        (lambda x: x.update(seeds=1), True, "unknown field `seeds`"),
    ],
)
def test_a_manifest_edited_by_hand_or_with_wrong_types_is_refused(
    run, change, is_sealed, words
):
    run.resolve_section("train", PRESETS)
    path = run.manifest
    manifest = read_manifest(run.path) if is_sealed else json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(seal(manifest) if is_sealed else manifest))
    with pytest.raises(ValueError, match=words):
        run.resolve_section("train", PRESETS)


def test_workers_that_settle_simultaneously_write_the_same_bytes(run):
    barrier = threading.Barrier(2)

    def record(settings):
        barrier.wait()  # both have found nothing recorded
        return dataclasses.replace(settings, stop=3)

    def work(_):
        settled = RunDir(run.path).resolve_section("train", PRESETS, record)
        return settled, run.manifest.read_bytes()

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(work, range(2))
    assert first == other
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []


def test_workers_that_make_a_run_simultaneously_make_only_one(tmp_path):
    path, barrier = tmp_path / "run", threading.Barrier(4)

    def work(seed):
        barrier.wait()
        with contextlib.suppress(OtherSettings):
            wanted = dataclasses.replace(SMOKE, seed=seed)
            RunDir.open(path, wanted, share=Share(0, 2)).close()
            return seed

    with ThreadPoolExecutor(4) as pool:
        seeds = list(pool.map(work, (5, 6, 5, 6)))
    first = RunDir(path).seed
    assert seeds == [seed if seed == first else None for seed in (5, 6, 5, 6)]
    assert sorted(p.name for p in path.iterdir()) == ["lock", "manifest.json"]
