"""Compare the recipes of `beatrice.fit` at several numbers of answers.

`python docs/recipes.py RUN [SETTING]` fits each recipe on the same training and
validation answers of a run, three tenths of them for calibration. It prints the AUROC
on the test and held-out answers, and its difference from the regression's on the same
answers with a 95 % interval (DeLong).
"""

import dataclasses
import sys
import time
from pathlib import Path

import numpy as np

import beatrice
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.contents import settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.jaxprobe.metrics import auroc, auroc_gain
from beatrice.jaxprobe.train import open_rows

SIZES = 300, 1000, 3000
FEW = beatrice.FitConfig.preset("few")
HEADS = FEW.heads
TRAINED = dataclasses.replace(HEADS.head, is_mean_first=False)
RECIPES = {
    "linear": ("linear", FEW),
    "encoder": ("encoder", FEW),
    "greedy, mean logit": (
        "paper",
        dataclasses.replace(FEW, heads=HEADS.resized(epochs=0)),
    ),
    "greedy, heads trained": (
        "paper",
        dataclasses.replace(FEW, heads=dataclasses.replace(HEADS, head=TRAINED)),
    ),
}


def compare(run, setting):
    """Print a row for every size and recipe."""
    signals = beatrice.Signals(run.features(setting))
    rows = open_rows(run, setting)[1]
    is_known = np.isin(rows.splits, ["train", "validation"]) & rows.is_labelled
    order = np.random.default_rng(0).permutation(np.flatnonzero(is_known))
    held = {
        dataset: rows.where(split, dataset)
        for dataset, split in rows.evaluated_sets()
        if split == "ood" or (split == "test" and dataset == IN_DOMAIN)
    }
    for n in (n for n in SIZES if n <= len(order)):
        some, regression = np.sort(order[:n]), {}
        for name, (recipe, config) in RECIPES.items():
            start = time.perf_counter()
            probe = beatrice.fit(
                signals[some],
                rows.labels[some],
                recipe=recipe,
                config=config,
                progress=False,
            )
            minutes = (time.perf_counter() - start) / 60
            cells = []
            for dataset, where in held.items():
                labels, p = rows.labels[where], probe.predict(signals[where])
                regression.setdefault(dataset, p)
                cell = f"{auroc(p, labels).value:.3f}"
                if name != "linear":
                    both = p, regression[dataset]
                    gain, error = auroc_gain(*both, labels, rows.ids[where])
                    low, high = gain - 1.96 * error, gain + 1.96 * error
                    cell += f" ({gain:+.3f} [{low:.3f}, {high:.3f}])"
                cells.append(cell)
            row = (setting, f"{n:,}", name, *cells, f"{minutes:.1f}")
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    run = RunDir(Path(sys.argv[1]))
    for setting in sys.argv[2:] or settings_of(run):
        compare(run, setting)
