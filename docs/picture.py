"""Draw docs/picture.svg: one answer, its signals, and how each token moves P.

`python docs/picture.py runs/demo` draws it from a run of `beatrice demo`.
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from beatrice.benchmarks.results.figures import GRID, INK, MUTED, STRONG, styled
from beatrice.jaxprobe.families import Features
from beatrice.pgir.scorer import Scorer

QUESTION = "what is the seat of the employer of Drozut Grigis?"
FAMILIES = ("hidden states", "probabilities", "residual stream", "attention")
N_CHANNELS = 12  # shown per family, at even distances; probabilities have five
BLUE, ORANGE = STRONG["closed_book"], STRONG["with_context"]


def read(scorer):
    """Return the answer, its tokens, their signals, and how each token moves P.

    The move of a token is P minus the P of the answer with this token masked.
    """
    probed = scorer.probed
    requests = probed.requests("closed_book", [QUESTION], [()])
    (answer,), reading = probed.answer_and_read(requests)
    features = reading.features("closed_book")
    detector = probed.detector

    def p_of(features):
        passes = {"closed_book": features}
        return float(probed.forward.score("closed_book", passes).p_correct[0])

    p = p_of(features)
    rows, effects = [], []
    for span, (tokens, mask) in enumerate(
        zip(features.tokens, features.masks, strict=True)
    ):
        for place in np.flatnonzero(mask[0]):
            masks = [np.array(x) for x in features.masks]
            masks[span][0, place] = False
            effects.append(p - p_of(Features(features.tokens, tuple(masks))))
            rows.append(np.asarray(tokens[0, place], np.float32))
    # An answer's signals are of the positions that emit its tokens, one before each.
    decode = probed.backbone.tokenizer.decode
    start, stop = map(int, reading.spans[0, 1])
    n_question = stop - start
    texts = [decode([i]) for i in answer.prompt_ids[start:stop]]
    texts += [decode([i]) for i in answer.token_ids]
    texts += ["(end)"] * (len(rows) - len(texts))  # the position that ends the answer
    dims = detector.banks["closed_book"].dims
    strips = [np.stack(rows)[:, channels].T for channels in dims.slices]
    return answer.text, p, texts, n_question, strips, np.array(effects)


def draw(run, scorer):
    """Return the figure."""
    text, p, tokens, n_question, strips, effects = read(scorer)
    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    heights = (1.5, *(1.0 for _ in strips))
    left, right = figure.subfigures(1, 2, width_ratios=(2.3, 1))
    bars, *heats = left.subplots(5, 1, sharex=True, height_ratios=heights)
    x = np.arange(len(tokens))
    bars.bar(x, effects, width=0.7, color=np.where(effects >= 0, BLUE, ORANGE))
    bars.axhline(0, color=MUTED, linewidth=0.8)
    bars.set_ylabel("moves P by", rotation=0, ha="right", va="center")
    bars.set_title(f"{QUESTION} → {text}", fontsize=9.5, color=INK, loc="left")
    for axes, name, channels in zip(heats, FAMILIES, strips, strict=True):
        some = np.linspace(0, len(channels) - 1, min(N_CHANNELS, len(channels)))
        shown = channels[some.astype(int)]
        spread = shown.std(axis=1, keepdims=True)
        shown = (shown - shown.mean(axis=1, keepdims=True)) / np.maximum(spread, 1e-6)
        axes.imshow(shown, aspect="auto", cmap="PuOr", vmin=-2.5, vmax=2.5)
        axes.set(yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.grid(False)
        axes.spines[:].set_visible(False)
    for axes in (bars, *heats[:-1]):
        axes.tick_params(axis="x", length=0)
    for axes in (bars, *heats):
        axes.axvline(n_question - 0.5, color=INK, linewidth=1.2)
    heats[-1].set_xticks(x, [token.strip() for token in tokens], rotation=60)
    for label in heats[-1].get_xticklabels():
        label.set(ha="right", rotation_mode="anchor", color=INK)
    curve = right.subplots()
    bins = json.loads((run / "reliability.json").read_text())["closed_book"]
    known = [b for b in bins["calibrated"] if b["n"]]
    means, shares = ([b[name] for b in known] for name in ("mean_p", "accuracy"))
    curve.plot((0, 1), (0, 1), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    areas = [max(6, b["n"] / 2) for b in known]  # bins with few answers are small
    curve.scatter(means, shares, areas, color=BLUE, linewidths=0, zorder=3)
    thresholds = scorer.thresholds("closed_book")
    for threshold, end in zip(thresholds or (), (1, 0), strict=False):
        if threshold.p_correct is not None:
            span = (threshold.p_correct, end)
            curve.axvspan(*span, color=GRID, alpha=0.7, linewidth=0, zorder=0)
            middle = (threshold.p_correct + end) / 2
            words = f"{threshold.decision}ed"
            curve.text(middle, 0.5, words, rotation=90, color=MUTED).set(
                ha="center", va="center"
            )
    here = np.interp(p, means, shares)
    curve.plot([p], [here], "o", color=ORANGE, markersize=11, zorder=4)
    curve.annotate(
        f"this answer\nP = {p:.2f}",
        (p, here),
        xytext=(-12, -14),
        textcoords="offset points",
        ha="right",
        va="top",
        color=ORANGE,
        fontweight="bold",
    )
    curve.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="P(correct); area: answers")
    curve.set(ylabel="share that is right (test)")
    return figure


def main():
    """Draw the picture of a run, and save it next to this file."""
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    path = Path(__file__).with_name("picture.svg")
    with styled():
        figure = draw(run, Scorer.load(run))
        figure.patch.set_facecolor("#ffffff")
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
