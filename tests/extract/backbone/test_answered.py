"""Answers are read with the weights that gave them."""

import json
import types

import pytest

from beatrice.extract.backbone.loading import require_answering_model
from beatrice.extract.run.directory import RunDir

HERE, OTHER = "a" * 40, "b" * 40


def answered_by(path, **found):
    run = RunDir(path)
    run.answers.mkdir()
    (run.answers / "backend.json").write_text(json.dumps(found))
    return run


def loaded(revision):
    return types.SimpleNamespace(name="m", revision=revision)


@pytest.mark.parametrize(
    "found",
    [
        {"backend": "transformers", "revision": "f" * 64},
        {"backend": "served", "revision": OTHER},
    ],
)
def test_other_weights_than_answered_are_refused(tmp_path, found):
    run = answered_by(tmp_path, **found)
    with pytest.raises(ValueError, match="answered by revision .* m is now a{12};"):
        require_answering_model(run.answers, loaded(HERE))


@pytest.mark.parametrize(
    "found",
    [
        {"backend": "transformers", "revision": HERE},
        {"backend": "served", "revision": HERE},
        {"backend": "served", "revision": "unstated"},
        {"backend": "served", "revision": "my-tuned-v2"},
    ],
)
def test_the_same_weights_and_a_server_that_tells_nothing_are_accepted(tmp_path, found):
    require_answering_model(answered_by(tmp_path, **found).answers, loaded(HERE))


def test_answers_that_do_not_say_who_gave_them_are_accepted(tmp_path):
    require_answering_model(RunDir(tmp_path).answers, loaded(HERE))
