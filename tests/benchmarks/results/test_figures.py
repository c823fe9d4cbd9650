import itertools
import re
import xml.etree.ElementTree

import matplotlib
import msgspec
import numpy as np
import pandas
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy.stats import binomtest

from beatrice.benchmarks.results import figures
from beatrice.jaxprobe.stages import LayerCurve
from tests.benchmarks.results.sample import PARTS
from tests.process import ROOT, loaded_by

RELIABILITY = PARTS["reliability"]["closed_book"]
SELECTION = PARTS["selection"]["with_context"]
SYNERGY = {"H": 0.88, "P": 0.85, "HP": 0.9, "RA": 0.85}


def test_synergy_orders_encoders_marks_their_families_and_crops_its_axis():
    bars, dots = figures.synergy(SYNERGY, "closed_book").axes
    assert [round(p.get_height(), 3) for p in bars.patches] == [0.9, 0.88, 0.85, 0.85]
    strong = matplotlib.colors.to_rgba(figures.STRONG["closed_book"])
    is_dark = [p.get_facecolor() == strong for p in bars.patches]
    assert is_dark == [True, True, False, False]
    assert {p.get_edgecolor() for p in bars.patches} == {strong}  # pale bars too
    filled = {  # family row -> places of the encoders HP, H, P, RA
        int(line.get_ydata()[0]): list(line.get_xdata())
        for line in dots.lines
        if line.get_color() == figures.INK
    }
    assert filled == {0: [0, 1], 1: [0, 2], 2: [3], 3: [3]}
    low, high = bars.get_ylim()
    assert 0.8 < low < 0.85 and 0.9 < high < 1


def test_sweep_draws_every_seed_their_mean_and_a_ring_at_the_best_layer():
    curve = LayerCurve(
        layers=(0, 4), auroc=((0.7, 0.6), (0.8, 0.9)), best=4, n_train=1, n_validation=1
    )
    (axes,) = figures.layer_sweep({"closed_book": curve}).axes
    seeds_0, seeds_4, means, ring = axes.lines
    assert list(seeds_0.get_ydata()) == [0.7, 0.6]
    assert list(seeds_4.get_ydata()) == [0.8, 0.9]
    assert list(means.get_ydata()) == pytest.approx([0.65, 0.85])
    assert list(ring.get_xdata()) == [4]
    assert axes.get_xlabel() == "layer (0 is the embedding)"


def test_reliability_has_a_point_and_a_bar_for_every_bin():
    top, bottom = figures.reliability(RELIABILITY, "closed_book").axes
    assert len(top.lines[1].get_xdata()) == 9
    assert len(bottom.patches) == 18
    strong = figures.STRONG["closed_book"]
    assert {x.get_markeredgecolor() for x in top.lines[1:]} == {strong}
    edges = {p.get_edgecolor() for p in bottom.patches}
    assert edges == {matplotlib.colors.to_rgba(strong)}


@pytest.mark.parametrize("n_wordings", [1, 2])
def test_calibrated_shares_have_the_intervals_of_their_numbers_of_questions(n_wordings):
    bins = [
        msgspec.structs.replace(x, n_questions=-(-x.n // n_wordings))
        for x in RELIABILITY.calibrated
    ]
    curves = msgspec.structs.replace(RELIABILITY, calibrated=tuple(bins))
    top, _ = figures.reliability(curves, "with_context").axes
    segments = top.collections[0].get_segments()
    for segment, bin in zip(segments, bins, strict=True):
        n_right = round(bin.accuracy * bin.n_questions)
        test = binomtest(n_right, bin.n_questions)
        ends = test.proportion_ci(0.95, method="wilson")
        assert segment.T.tolist() == [[bin.mean_p] * 2, pytest.approx([*ends])]


def test_selection_shows_every_candidate_and_names_the_selected():
    axes = figures.selection_path(SELECTION["rounds"], "with_context").axes[0]
    n_candidates = sum(len(r["candidates"]) for r in SELECTION["rounds"])
    soft = set(figures.SOFT.values())
    dots = [line for line in axes.lines if line.get_color() in soft]
    assert sum(len(line.get_xdata()) for line in dots) == n_candidates
    assert [text.get_text() for text in axes.texts] == SELECTION["selected"]


def test_a_search_of_a_single_round_has_no_fractions_of_rounds():
    (axes,) = figures.selection_path(SELECTION["rounds"][:1], "closed_book").axes
    assert list(axes.get_xticks()) == [1]


def test_budgets_are_readable_where_they_cost_nearly_the_same():
    costs = {0: 1.0, 1: 1.76, 2: 1.96, 3: 2.12, 4: 2.21}  # as in a demo
    points = [{"budget": b, "generations": x, "em": 0.64} for b, x in costs.items()]
    figure = figures.frontier({"PGIR": points}, {"Probing-RAG": (3.6, 0.3)}, "em", 2)
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(costs)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_loops_of_both_settings_have_neither_ones_colour_and_lines_of_their_own():
    curve = [{"budget": b, "generations": b + 1.0, "em": 0.4} for b in range(2)]
    curves = {name: curve for name in ("PGIR", "another query", "perplexity")}
    figure = figures.frontier(curves, {"SKR": (2.0, 0.3)}, "em", 1)
    loops = figure.axes[0].lines
    colours = {line.get_color() for line in loops}
    assert not colours & {*figures.STRONG.values(), *figures.SOFT.values()}
    styles = [x.get_linestyle() for x in loops if len(x.get_xdata()) == 2]
    assert len(styles) == len(set(styles)) == 3


def test_no_line_runs_through_a_detectors_number():
    points = [("probe", "trained", 0.1, 0.8), ("length", "plain", 0.2, 0.7)]
    how = {"ours": {"selected": 0.801}, "is_log": True}
    axes = figures.cost_figure(points, "closed_book", "seconds", **how).axes[0]
    for number in axes.texts:
        assert matplotlib.colors.same_color(
            number.get_bbox_patch().get_facecolor(), figures.PAPER
        )
        assert number.get_zorder() > max(line.get_zorder() for line in axes.lines)


@pytest.mark.parametrize("setting", ["closed_book", "with_context"])
def test_a_ranking_marks_greedys_rank_and_stacks_the_passes(setting):
    figure = figures.ranking(PARTS["ranking"][setting], setting)
    _, *ribbons = figure.axes
    assert len(ribbons) == 4
    n_passes = 1 if setting == "closed_book" else 2
    assert {axes.lines[-1].get_xdata()[0] for axes in figure.axes} == {7}
    assert {len(axes.collections) for axes in ribbons} == {n_passes}


def test_selected_encoders_are_emphasised_even_if_a_family_has_no_curve():
    curves = {x: [(100, 0.6), (400, 0.7)] for x in ("attention", "selected encoders")}
    (axes,) = figures.learning_curves(curves, "closed_book").axes
    family, selected = axes.lines
    assert selected.get_color() == figures.STRONG["closed_book"] != family.get_color()
    assert selected.get_linewidth() > family.get_linewidth()


def test_a_figure_has_a_label_of_any_characters():
    figure = figures.synergy(SYNERGY, "closed_book")
    label = r'a \d "set" & <b>'
    root = xml.etree.ElementTree.fromstring(figures.to_svg(figure, "x", label))
    assert root.get("aria-label") == label and root.get("role") == "img"


def test_drawing_leaves_matplotlib_as_it_was():
    before = dict(matplotlib.rcParams)
    figures.to_svg(figures.synergy(SYNERGY, "closed_book"), "x", "y")
    assert dict(matplotlib.rcParams) == before


def test_tables_and_figures_load_no_framework_and_need_no_display():
    names = "anatomy, figures, findings, paper, rivals, tables"
    draw = "figures.synergy({'H': .9, 'P': .8}, 'closed_book'), 'x', 'y'"
    code = f"from beatrice.benchmarks.results import {names}; figures.to_svg({draw})"
    loaded = loaded_by(code)
    assert not loaded & {"torch", "transformers", "jax", "matplotlib.pyplot"}


def boxes_along(labels):
    """Yield the boxes of tick labels in the direction that they are written in."""
    for label in labels:
        x, y = label.get_transform().transform(label.get_position())
        degrees = label.get_rotation()
        label.set_rotation(0)
        box = label.get_window_extent()
        turned = matplotlib.transforms.Affine2D().rotate_deg(-degrees)
        u, v = turned.transform((x, y))
        yield box.translated(u - x, v - y)


SETS = pandas.DataFrame(0.75, *2 * [[f"QUESTION SET {i:02}" for i in range(6)]])
RIGHTS = pandas.DataFrame(0.4, *2 * [[*figures.FAMILIES]]).assign(chance=0.5)


@pytest.mark.parametrize(
    ("draw", "numbers"),
    [
        (figures.matrix, (SETS, "closed_book")),
        (figures.matrix, (SETS[:3], "closed_book")),
        (figures.complementarity, (RIGHTS, [0.3, 0.4, 0.5, 0.45], "closed_book")),
        (figures.synergy, (SYNERGY, "closed_book")),
        (figures.selection_path, (SELECTION["rounds"], "with_context")),
    ],
)
def test_no_label_overlaps_another_or_is_cut_off(draw, numbers):
    figure = draw(*numbers)
    FigureCanvasAgg(figure).draw()
    all_of_it = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    whole = figure.bbox.padded(1)  # a pixel more is rounding
    assert whole.containsx(all_of_it.x0) and whole.containsx(all_of_it.x1)
    assert whole.containsy(all_of_it.y0) and whole.containsy(all_of_it.y1)
    for axes in figure.axes:
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = boxes_along(label for label in labels if label.get_text())
            for first, second in itertools.combinations(boxes, 2):
                assert not first.overlaps(second)


def test_numbers_of_bars_stand_clear_of_them_without_blanks():
    drawn = (
        figures.synergy(SYNERGY, "closed_book").axes[0],
        figures.complementarity(RIGHTS, [0.3, 0.4, 0.5, 0.45], "closed_book").axes[1],
    )
    for axes in drawn:  # browsers drop blanks at the ends of a text in SVG
        FigureCanvasAgg(axes.figure).draw()
        bars = [bar.get_window_extent() for bar in axes.patches]
        assert len(axes.texts) == len(bars) == 4
        for text in axes.texts:
            assert text.get_text() == text.get_text().strip()
            assert not any(text.get_window_extent().overlaps(bar) for bar in bars)


def brightness(colour):
    """Return the relative luminance of WCAG 2, in [0, 1]."""
    colour = np.asarray(colour[:3])
    linear = ((colour + 0.055) / 1.055) ** 2.4
    linear = np.where(colour <= 0.04045, colour / 12.92, linear)
    return linear @ (0.2126, 0.7152, 0.0722)


@pytest.mark.parametrize("scheme", [0, 1])  # light and dark
def test_numbers_on_tints_have_a_contrast_of_4_5_in_either_scheme(scheme):
    template = ROOT / "benchmarks" / "results" / "page.html.j2"
    css = template.read_text(encoding="utf-8").split("prefers-color-scheme: dark")
    of_page = dict(re.findall(r"--([\w-]+): (#\w+)", css[scheme]))
    rgb = {x: np.array(matplotlib.colors.to_rgb(y)) for x, y in of_page.items()}
    shown = {x: rgb[name] for x, name in figures.VARIABLES.items()}
    darkest = pandas.DataFrame([[1.0]], ["a"], ["b"])
    shares = np.full((4, 2), 0.25)
    drawn = [figures.matrix(darkest, x).axes[0] for x in figures.STRONG]
    drawn.append(figures.closed_book_counts(shares).axes[0])
    contrasts = []
    for axes in drawn:
        tinted = [*axes.patches, *axes.collections]
        for shape, text in zip(tinted, axes.texts, strict=True):
            *hue, alpha = np.ravel(shape.get_facecolor())
            under = alpha * shown[matplotlib.colors.to_hex(hue)]
            under = under + (1 - alpha) * rgb["card"]
            ends = brightness(under), brightness(shown[text.get_color()])
            contrasts.append((max(ends) + 0.05) / (min(ends) + 0.05))
    assert len(contrasts) == 6 and min(contrasts) >= 4.5


@pytest.mark.parametrize(
    "title", ["$\\frac{1$", "cost in $, not in $", "_own", "漢字", "lr 0.00125"]
)
def test_a_title_is_drawn_literally(title):
    point, kind = {"budget": 1, "generations": 1.0, "em": 0.5}, "plain"
    for figure in (
        figures.frontier({"PGIR": [point]}, {title: (2.0, 0.4)}, "em", 1),
        figures.cost_figure(
            [(title, kind, 1.0, 0.5)], "closed_book", "s", {}, is_log=True
        ),
    ):
        assert f"{title}</text>" in figures.to_svg(figure, "name", "what is shown")
