"""`module:NAME` or an entry point becomes the object that a person plugs in."""

import sys

import pytest

from beatrice.extract.plugs import load_plug

GROUP = "beatrice.judges"


@pytest.fixture
def folder(working_folder):
    """The current folder; what it adds to the modules goes again."""
    before = set(sys.modules)
    yield working_folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_in_the_current_folder_is_loaded_with_those_beside_it(folder):
    (folder / "its_words.py").write_text("WORD = 'yes'\n")
    (folder / "strict_judge.py").write_text(
        "class Judges:\n"
        "    @staticmethod\n"
        "    def strict(text):\n"
        "        import its_words\n"
        "        return text == its_words.WORD\n"
    )
    strict = load_plug("strict_judge:Judges.strict", GROUP)
    assert strict("yes")
    assert not strict("no")


def test_a_file_here_does_not_stand_in_for_an_installed_package(folder):
    (folder / "numpy.py").write_text("array = None\n")
    (folder / "json.py").write_text("loads = None\n")
    assert load_plug("numpy:array", GROUP) is not None
    assert load_plug("json:loads", GROUP)("[1]") == [1]


def test_an_entry_point_of_the_group_is_loaded_by_its_name(folder):
    info = folder / "site" / "their_judges-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-judges\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nlenient = their_judges:lenient\nwhole = their_judges\n"
        "[beatrice.retrievers]\nother = their_judges:other\n"
    )
    (folder / "site" / "their_judges.py").write_text("lenient = 'a judge'\n")
    sys.path.append(str(folder / "site"))
    assert load_plug("lenient", GROUP) == "a judge"
    assert load_plug("whole", GROUP).lenient == "a judge"
    with pytest.raises(ValueError, match=r"'other'.*lenient"):
        load_plug("other", GROUP)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nobody", ["nobody", GROUP]),
        ("no_such_module:judge", ["no_such_module", "no_such_module.py"]),
        ("no_such_package.inner:judge", ["no_such_package", "no_such_package.py"]),
        ("flawed:judge", ["flawed", "ModuleNotFoundError", "absent_library"]),
        ("failing:judge", ["failing", "ZeroDivisionError"]),
        ("sound:jugde", ["sound", "jugde", "judge"]),
        ("sound:judge.inner", ["sound", "judge.inner"]),
        ("sound:", ["sound:"]),
        ("runs/my judge:judge", ["runs/my judge:judge"]),
        (":judge", [":judge"]),
        (None, ["NoneType", GROUP]),
    ],
)
def test_what_cannot_be_loaded_is_named_in_a_sentence(folder, spec, named):
    (folder / "flawed.py").write_text("import absent_library\n")
    (folder / "failing.py").write_text("judge = 1 / 0\n")
    (folder / "sound.py").write_text("judge = len\n")
    with pytest.raises(ValueError) as error:
        load_plug(spec, GROUP)
    for name in named:
        assert name in str(error.value)
