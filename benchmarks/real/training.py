"""How encoders and heads are trained on a few thousand answers of a released model.

The paper's protocol is for ten times the rows; the demo's sizes are for minutes on an
invented world. These widths and epochs took the demo's hidden and attention encoders
above logistic regression on the same signals; on a released model they are untried.
"""

from extract.run.directory import RunDir
from jaxprobe.config import EncoderConfig, FusionConfig, TrainConfig
from jaxprobe.settings import (
    GRID_PRESETS,
    SELECT_PRESETS,
    GridConfig,
    SelectConfig,
)

GRID = GridConfig(
    encoder=EncoderConfig(
        projection=32, hidden=32, n_blocks=1, n_groups=4, dropout=0.2, input_noise=0.1
    ),
    train=TrainConfig(
        learning_rate=1e-3, batch_size=128, max_epochs=30, lr_patience=3, patience=8
    ),
)
SELECT = SelectConfig(
    head=FusionConfig(hidden=16),
    train=TrainConfig(
        learning_rate=1e-3,
        batch_size=256,
        max_epochs=15,
        lr_patience=2,
        patience=4,
        n_microbatches=1,
    ),
)


def settle_training(run: RunDir) -> None:
    """Write down how a run of the demo's preset is trained, unless it says so already.

    Args:
      run: whose manifest has no section `train` yet, or keeps the one that it has.
    """
    run.settle("train", GRID_PRESETS | {"demo": GRID})
    run.settle("select", SELECT_PRESETS | {"demo": SELECT})
