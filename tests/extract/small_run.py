"""Runs of a few questions, made without running their first stage."""

import functools
import os

import torch
from click.testing import CliRunner

from beatrice.cli import main
from beatrice.extract.backbone.names import EMBEDDED, BackboneConfig
from beatrice.extract.records import write_lines
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.world.facts import (
    QuestionConfig,
    WorldConfig,
    make_examples,
    make_world,
)


def smoke(model=EMBEDDED, **sections):
    """Return a run of the smallest preset; `sections` are settled when it is made."""
    backbone = BackboneConfig(model=str(model))
    return NewRun(preset="smoke", sections={"backbone": backbone, **sections})


embedded_world = functools.cache(lambda: make_world(WorldConfig()))


def questions(n_train=4, n_evaluation=4, n_ood=2):
    """Return questions of the microworld."""
    wanted = QuestionConfig(n_train=n_train, n_evaluation=n_evaluation, n_ood=n_ood)
    return make_examples(embedded_world(), wanted)


def make_run(path, examples=None, model=EMBEDDED, **sections):
    """Make a run of the smallest preset as its first stage would; no passages file."""
    with RunDir.open(path, smoke(model, **sections)) as run:
        run.examples.write_text(write_lines(examples or questions()))
        run.passages.write_text("")
    return run


def beatrice(*arguments, code=0, **environ):
    """Call the program within this process, which saves its start-up time."""
    n_threads, names = torch.get_num_threads(), {*os.environ}
    done = CliRunner(env=environ).invoke(main, [str(a) for a in arguments])
    torch.set_num_threads(n_threads)  # a verb asks for two, other tests for one
    for name in os.environ.keys() - names:  # set for JAX
        del os.environ[name]
    assert code is None or done.exit_code == code, (done.output, done.exception)
    return done


def assert_error_sentence(done, *words):
    """Check that a call ended with one sentence that contains these words."""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in last, last
