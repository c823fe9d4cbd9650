"""Runs of a few questions, made without their first stage."""

from click.testing import CliRunner

from beatrice.cli import main
from beatrice.extract.backbone.names import EMBEDDED, BackboneConfig
from beatrice.extract.run.directory import NewRun
from beatrice.extract.world.facts import WorldConfig, make_world
from beatrice.extract.world.questions import QuestionConfig, make_examples


def smoke(model=EMBEDDED, **sections):
    """Return a run of the smallest preset; `sections` are settled when it is made."""
    backbone = BackboneConfig(model=str(model))
    return NewRun(preset="smoke", sections={"backbone": backbone, **sections})


def questions(n_train=4, n_evaluation=4, n_ood=2):
    """Return questions of the microworld."""
    wanted = QuestionConfig(n_train=n_train, n_evaluation=n_evaluation, n_ood=n_ood)
    return make_examples(make_world(WorldConfig()), wanted)


def beatrice(*arguments, code=0, **environ):
    """Call the program within this process, which spares its start."""
    done = CliRunner(env=environ).invoke(main, [str(a) for a in arguments])
    assert code is None or done.exit_code == code, (done.output, done.exception)
    return done
