"""How encoders and heads are trained on a few thousand answers of a released model.

The paper's protocol is for ten times the rows; the demo's sizes are for minutes on an
invented world. What is chosen here, Gemma 3 270M's validation answers chose, and each
figure is a validation AUROC, unless it says otherwise.

A network alone fell below logistic regression on its own signals, with context by .017
in the residual contributions, and by more on PopQA, which it had never seen (HPRA .718,
the regression .796). So the regression comes first (`jaxprobe.fit.linear`). What a
network adds to it comes slowly: with context, of two seeds averaged, at a rate that
stays, P has .736 from the regression and .769 after 24 epochs, A .835 and .841, R .806
and .811, HPRA .865 and .863. With the rate halved after three epochs and an end after
six without a gain, nothing was found.

Noise and dropout were chosen for networks alone: with .1 and .2 all four families had
.821 closed-book, with .5 and .2 .834, with 1 and .5 .847. A running mean of weights,
and a linear path from the projected signals to the logit, trained with the rest, did no
better.

Heads that keep whatever epoch validation likes best gained nothing on the mean logit of
their encoders (test, sets selected with them, two models: +.001, −.002 closed-book,
.000, +.002 with context), and on PopQA −.089, −.038, −.004 and +.032. So they stay the
mean logit where the gain may be chance.
"""

from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    GridConfig,
    SelectConfig,
    TrainConfig,
)

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
