"""The report's section on the anatomy: a figure and a table for every analysis.

Each part is made from the rows of its experiments, with the paper's comparisons next to
it. Nothing here loads JAX or Torch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pandas
from matplotlib.figure import Figure

from beatrice.benchmarks.results import figures
from beatrice.benchmarks.results.figures import Picture, picture
from beatrice.benchmarks.results.names import (
    EVERY_FAMILY,
    FAMILIES,
    FUSION_VARIANTS,
    LEARNERS,
    SETTING_LABELS,
    SPANS,
    family_name,
    probe,
)
from beatrice.benchmarks.results.paper import (
    Sign,
    better_pairs,
    read_ledger,
    signs_by_table,
)
from beatrice.benchmarks.results.tables import (
    EVALUATED,
    POOLED,
    Column,
    Key,
    Table,
    by_place,
    by_subject,
    find,
    lines_of,
    of_rival,
    pivot,
    place_columns,
    places_of,
    results_of,
    subjects_in,
    where,
)
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import Subject, encoder

if TYPE_CHECKING:  # this loads JAX
    from beatrice.selection.analysis import CaseStudy

Tables = Sequence[tuple[str, Table]]
Content = tuple[Sequence[Picture], Tables]
Make = Callable[[pandas.DataFrame], Content]  # from a run's results


class ShownAnalysis(NamedTuple):
    """How to show one analysis."""

    title: str
    look: str  # a sentence on what to look at
    make: Make
    beside: tuple[str, ...]  # tables, figures and sections of the paper to compare with


class PagePart(NamedTuple):
    """One analysis on the page."""

    title: str
    look: str
    pictures: Sequence[Picture]
    tables: Tables
    beside: Sequence[Sign]
    cases: "Sequence[CaseStudy]"


ANALYSES: list[ShownAnalysis] = []  # in the order of the page


def shown(title: str, look: str, *beside: str) -> Callable[[Make], Make]:
    """Register how to show an analysis; the arguments are those of `ShownAnalysis`."""

    def register(make: Make) -> Make:
        ANALYSES.append(ShownAnalysis(title, look, make, beside))
        return make

    return register


def rows_of(results: pandas.DataFrame, name: str, **columns: Any) -> pandas.DataFrame:
    """Return the seed-mean rows of one analysis."""
    return where(results, experiment=f"anatomy_{name}", seed="mean", **columns)


def each_setting(results: pandas.DataFrame) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Yield the rows of each setting, in the order of the tables."""
    for setting, here in results.groupby("setting"):
        yield str(setting), here


def by_setting(
    results: pandas.DataFrame, columns: Sequence[tuple[str, str, Key]]
) -> list[tuple[Column, Key]]:
    """Return the labelled columns once for each setting that the rows have."""
    return [
        (Column(SETTING_LABELS[setting], label, detail), {"setting": setting, **key})
        for setting, _ in each_setting(results)
        for label, detail, key in columns
    ]


def _matrix(results: pandas.DataFrame, index: str, columns: str) -> pandas.DataFrame:
    """Return the values as a matrix by two columns of the rows, NaN if absent."""
    laid = results.pivot(index=index, columns=columns, values="value")
    return laid.astype("float64")


def _drawn(
    figure: Figure, name: str, setting: str, caption: str, title: str = ""
) -> Picture:
    title = title or SETTING_LABELS[setting]
    return picture(figure, f"{name}-{setting}", title, caption)


_BY_CHANCE = "rights_by_chance"


def rights_by_chance(error_rate: float, right: float) -> float:
    """Return the share of another family's mistakes that a family gets right by chance.

    By chance means that given the label, the mistakes of both are independent. As many
    answers are flagged as are wrong, so half of a family's mistakes are right answers
    and half are wrong ones, whatever share of all answers is right.
    """
    return 1 - error_rate / (4 * right * (1 - right))


def _with_chance(shown: pandas.DataFrame, results: pandas.DataFrame) -> Iterator[Any]:
    """Yield the rows, and rows of what each family would get right by chance."""
    answers = rows_of(results, "flips", **POOLED, detector="answers", metric="right")
    for row in shown["row"]:
        yield row
        right = find(answers, setting=row.setting)
        if row.metric == "error_rate" and row.value and right and right.value:
            value = rights_by_chance(row.value, right.value)
            changes = {"value": value, "ci_low": None, "ci_high": None}
            yield msgspec.structs.replace(row, metric=_BY_CHANCE, **changes)


@shown(
    "Which family gets right what another gets wrong",
    "A cell near the row's “by chance” means that both families' mistakes are "
    "independent given the label; near 0, that the row repeats the column's mistakes.",
    "fig:complementarity",
)
def _complementarity(results: pandas.DataFrame) -> Content:
    shown, pictures = rows_of(results, "complementarity", **POOLED), []
    shown = results_of(_with_chance(shown, results))
    letters = list(FAMILIES)
    for setting, here in each_setting(shown):
        errors = where(here, metric="error_rate").set_index("families")["value"]
        errors = errors.astype("float64").reindex(letters)
        if errors.isna().to_numpy().any():
            continue
        rights = _matrix(where(here, metric="rights"), "families", "family")
        rights = rights.reindex(index=letters, columns=letters)
        chance = where(here, metric=_BY_CHANCE).set_index("families")["value"]
        if not chance.empty:
            rights["by chance"] = chance.astype("float64")
        caption = (
            f"All in-domain test answers ({here['n'].max():,}). Every family's encoder "
            "flags as many answers as are wrong. Right: each one's own error rate."
        )
        figure = figures.complementarity(rights, errors.tolist(), setting)
        pictures.append(_drawn(figure, "complementarity", setting, caption))
    error = ("own error rate", "share of answers", {"metric": "error_rate"})
    columns = [error] + [
        (f"of {name}", "mistakes got right", {"metric": "rights", "family": letter})
        for letter, name in FAMILIES.items()
    ]
    columns.append(("by chance", "mistakes got right", {"metric": _BY_CHANCE}))
    lines = [(name, {"families": letter}) for letter, name in FAMILIES.items()]
    table = pivot(shown, "Family", lines, by_setting(shown, columns))
    return pictures, [("Mistakes, family by family", table)]


@shown(
    "Which pairs of families are better together than apart",
    "Look for points to the right of zero. The better of the two is chosen on the same "
    "answers, which makes gains look a little smaller.",
    "fig:cross-model-synergy, bottom",
)
def _pairs(results: pandas.DataFrame) -> Content:
    better = better_pairs(results)
    if better.empty:
        return (), ()
    kinds = [
        (place, experiment)
        for experiment in better["experiment"].unique()
        for place in places_of(where(better, experiment=experiment), EVALUATED)
    ]
    pairs = {
        families: " + ".join(figures.FAMILIES[letter] for letter in families)
        for families in better["families"].unique()
    }
    lines = [(name, {"families": families}) for families, name in pairs.items()]
    gains = pandas.concat(
        where(better, experiment=experiment, **place._asdict()).assign(
            is_other=experiment == "anatomy_other_pairs"
        )
        for place, experiment in kinds
    )
    caption = (
        "A point is a test or held-out set; to the right of zero, an encoder of both "
        "families ranks answers better than the encoder of either. There is no "
        "correction for the number of comparisons."
    )
    figure = figures.pair_gains(gains, pairs)
    columns = []
    for place, experiment in kinds:
        ((column, key),) = place_columns([place])
        if experiment == "anatomy_other_pairs":
            column = column._replace(group=f"{column.group}, other backbone")
        columns.append((column, {**key, "experiment": experiment}))
    table = pivot(better, "Pair", lines, columns)
    drawn = picture(figure, "pairs", "Two families early-fused", caption)
    return [drawn], [("AUROC of the pair minus its better member", table)]


@shown(
    "Features and fusion, variant by variant",
    "Look for intervals that exclude zero (†); a larger number alone says little.",
    "ablation",
    "champion-vs-hidden",
)
def _fusion(results: pandas.DataFrame) -> Content:
    shown = rows_of(results, "fusion")
    lines = [(title, of_rival(x)) for x, title in FUSION_VARIANTS.items()]
    table = by_place(shown, "Variant", lines)
    return (), [("AUROC of the selected set minus the variant's", table)]


@shown(
    "What the best sets of three encoders contain",
    "In the ranking of all sets by validation AUROC: what the ten best sets contain "
    "more of than the average set, and whether closed-book encoders are at the top.",
    "fig:combination-search",
    "fig:gemma-combination-search",
)
def _combinations(results: pandas.DataFrame) -> Content:
    shown, pictures = rows_of(results, "combinations"), []
    counts = [(f"{k} closed-book", {"n_closed_book": k, "bin": None}) for k in range(4)]
    for setting, along in each_setting(where(shown, metric="share")):
        shares = _matrix(along, "n_closed_book", "bin").fillna(0.0).to_numpy()
        figure = figures.closed_book_counts(shares)
        caption = (
            "Sets of three from best to worst by validation AUROC; wedges: how many of "
            "the three encoders read the closed-book pass."
        )
        title = f"{SETTING_LABELS[setting]}: closed-book encoders along the ranking"
        pictures.append(_drawn(figure, "counts", setting, caption, title))
    traits = [
        (f"{name}, {SETTING_LABELS[x].lower()}", {"family": letter, "kind": x})
        for letter, name in FAMILIES.items()
        for x in SETTINGS
    ]
    of_sets = [
        ("in the ten best", "of three encoders", {"metric": "encoders_in_best_set"}),
        ("in all sets", "of three encoders", {"metric": "encoders_in_set"}),
    ]
    best = by_setting(shown, [("ten best", "sets", {"metric": "best_sets"})])
    return pictures, [
        ("Families in sets", pivot(shown, "Reads", traits, by_setting(shown, of_sets))),
        ("Encoders in the ten best sets", pivot(shown, "Encoders", counts, best)),
    ]


@shown(
    "Whether the same combinations win on another backbone",
    "If points rise from left to right, the ranking is a property of the families and "
    "not of one model.",
    "fig:cross-model-synergy, top",
)
def _backbones(results: pandas.DataFrame) -> Content:
    shown = rows_of(results, "backbones", **POOLED)
    aurocs = where(shown, metric="auroc")
    points, names = {}, {}
    for setting, here in each_setting(aurocs):
        names |= dict(zip(here["kind"], here["source"], strict=True))
        both = _matrix(here, "families", "kind").dropna()
        if not both.empty:
            points[setting] = both
    if not points:
        return (), ()
    figure = figures.two_backbones(points, names)
    caption = "A point is an encoder of one subset of the families, mean over seeds."
    drawn = picture(figure, "backbones", "The same combinations?", caption)
    line = ("Spearman's correlation", {"detector": "two_backbones"})
    columns = by_setting(shown, [("fifteen encoders", "test AUROC", {})])
    return [drawn], [("Both rankings", pivot(shown, "Test answers", [line], columns))]


_FLIPS = (
    ("flip rate", "share", {"metric": "flip_rate"}),
    ("flip precision", "share", {"metric": "flip_precision"}),
    ("precision by chance", "share", {"metric": "flip_precision_by_chance"}),
    ("flips within one logit", "share", {"metric": "flips_near_boundary"}),
    ("answers within one logit", "share", {"metric": "answers_near_boundary"}),
)


@shown(
    "Which family decides, and when the others act",
    "A family is replaced by its means inside a deployed encoder. A family with a high "
    "flip rate decides; a family with a high precision and flips near the boundary "
    "corrects where the others are undecided. Compare precision with the precision by "
    "chance: that of the same decisions on answers drawn at random.",
    "anatomy-flip-profile",
    "fig:boundary-band",
)
def _flips(results: pandas.DataFrame) -> Content:
    shown, band = rows_of(results, "flips"), rows_of(results, "boundary", **POOLED)
    pictures, tables = [], []
    band = where(band.loc[band["value"].notna()], families=EVERY_FAMILY)
    for setting, here in each_setting(band):
        name, width = family_name(EVERY_FAMILY, setting), here["bin_width"].max()
        caption = (
            f"{name} on in-domain test answers, all seeds, in cells of {width:g} "
            "logits; larger marks are more answers. In the shaded wedges the family "
            "changes the decision; squares are flips."
        )
        figure = figures.boundary_band(here, setting)
        pictures.append(_drawn(figure, "boundary", setting, caption))
    places = places_of(shown, EVALUATED)
    for place in places:
        here = where(shown, **place._asdict())
        lines = [
            (
                f"{FAMILIES[family]} in {family_name(families, place.setting)}",
                {"families": families, "family": family},
            )
            for families in here["families"].dropna().unique()
            for family in families
        ]
        table = pivot(here, "Family", lines, by_setting(here, _FLIPS))
        tables.append((f"{SETTING_LABELS[place.setting]}, {place.title}", table))
    right = [("Right answers", {"detector": "answers", "metric": "right"})]
    table = by_place(shown, "Share", right)
    return pictures, [*tables, ("How often answers are right", table)]


_GROUNDING = {
    "Right answers, closed-book": ("right_closed_book", None),
    "Right answers, with the passages": ("right_with_context", None),
    "Wrong answers that are in the passages": ("wrong_in_passage", None),
    "Right answers that are in the passages": ("right_in_passage", None),
    "Precision of attention's flips": ("flip_precision", None),
    "· answer in a passage, but wrong": ("flip_precision", "in_passage_but_wrong"),
    "· answer right, but in no passage": ("flip_precision", "right_not_in_passage"),
}


@shown(
    "What attention responds to",
    "If precision is lower when the answer is in a passage but wrong, attention "
    "endorses support, not truth. Titles and texts are searched for the whole words of "
    "the normalised answer.",
    "anatomy-grounding",
)
def _grounding(results: pandas.DataFrame) -> Content:
    shown, tables = rows_of(results, "grounding"), []
    for families in shown["families"].dropna().unique():
        of = {"flip_precision": families}  # the other metrics do not depend on encoders
        lines = [
            (label, {"metric": metric, "kind": kind, "families": of.get(metric)})
            for label, (metric, kind) in _GROUNDING.items()
        ]
        heading = f"Attention in {family_name(families, 'with_context')}"
        tables.append((heading, by_place(shown, "Share", lines)))
    return (), tables


@shown(
    "Whether a few heads carry attention's signal",
    "If the map is flat, and the eight largest heads move the encoder no more than "
    "eight random ones, no head is privileged.",
    "fig:attention-heads",
)
def _heads(results: pandas.DataFrame) -> Content:
    shown, pictures = rows_of(results, "heads", **POOLED), []
    cells = where(shown, metric="share", families=(EVERY_FAMILY, "A"))
    cells = cells.loc[cells["head"].notna() & cells["value"].notna()]
    for setting, here in each_setting(cells):
        caption = (
            "Absolute integrated gradients of the logit, from attention at its means, "
            f"over all channels, tokens and spans of {here['n'].max():,} test answers; "
            "the line on the scale is an even share."
        )
        figure = figures.head_map(here, setting)
        pictures.append(_drawn(figure, "heads", setting, caption))
    lines = [
        (family_name(families, setting), {"setting": setting, "families": families})
        for setting, here in each_setting(shown)
        for families in here["families"].unique()
    ]
    columns = [
        (Column("The eight largest heads", label, unit), {"metric": metric})
        for label, unit, metric in (
            ("attribution", "share", "share_of_top_heads"),
            ("in an even map", "share", "even_share_of_top_heads"),
            ("change without them", "logits", "moved_by_top_heads"),
            ("change without eight random ones", "logits", "moved_by_random_heads"),
            ("difference", "logits", "moved_more_by_top_heads"),
        )
    ]
    return pictures, [("Eight heads", pivot(shown, "Encoder", lines, columns))]


def _hidden_note(results: pandas.DataFrame) -> str:
    """Return a note if hidden states move the logit only in the answer's span.

    They are then stored for the answer only, which has four families while the other
    spans have three, so shares and losses of the spans are not comparable.
    """
    rows = rows_of(results, "positions", family="H", span=SPANS, metric="share")["row"]
    of_answer = [row.value for row in rows if row.span == "answer"]
    elsewhere = [row.value for row in rows if row.span != "answer"]
    is_noted = any(of_answer) and elsewhere and not any(elsewhere)
    return " (hidden states are of the answer only)" if is_noted else ""


@shown(
    "Where in the text the read-out comes from",
    "How much each span and each token of the answer moves the logit, compared with "
    "its share of the tokens; and what a deployed encoder loses without a span.",
    "sec:anatomy",
    "app:span",
    "span-ablation",
)
def _positions(results: pandas.DataFrame) -> Content:
    shown = rows_of(results, "positions", **POOLED, families=EVERY_FAMILY, family=None)
    ends = [str(x) for x in sorted(shown["position"].dropna().unique())]
    of_token = {x: {"position": int(x), "kind": None, "span": None} for x in ends}
    of_token["last"] = {"position": None, "kind": "last", "span": None}
    of_span = {x: {"span": x, "position": None, "kind": None} for x in SPANS}
    pictures, note = [], _hidden_note(results)
    for setting, here in each_setting(shown):
        spans, tokens = {}, {}
        for name, key in of_span.items():
            share, n_tokens = (
                find(here, metric=x, **key) for x in ("share", "token_share")
            )
            if share and n_tokens and None not in (share.value, n_tokens.value):
                spans[name] = share.value, n_tokens.value
        for name, key in of_token.items():
            share, even = (find(here, metric=x, **key) for x in ("share", "even_share"))
            if share and even and None not in (share.value, share.ci_low, even.value):
                tokens[name] = share.value, share.ci_low, share.ci_high, even.value
        if spans and tokens:
            caption = (
                f"{family_name(EVERY_FAMILY, setting)} on {here['n'].max()} test "
                "answers: size of integrated gradients, from all signals at their "
                f"means{note}. Right: answers that have such a token; error bars are "
                "95 % intervals, dashes an even share. The first position emits the "
                "first token."
            )
            figure = figures.shares_of_text(spans, tokens, setting)
            pictures.append(_drawn(figure, "positions", setting, caption))
    shares = ("share", "of the logit's change", {"metric": "share"})
    tables = []
    for heading, corner, keys, other, metric in (
        (f"Spans{note}", "Span", of_span, "tokens", "token_share"),
        ("Tokens of the answer", "Token", of_token, "even", "even_share"),
    ):
        columns = by_setting(shown, [shares, (other, "share", {"metric": metric})])
        tables.append((heading, pivot(shown, corner, [*keys.items()], columns)))
    return pictures, [*tables, *_without_spans(results, note)]


def _without_spans(results: pandas.DataFrame, note: str) -> list[tuple[str, Table]]:
    """Return tables of what encoders lose when a span is replaced by its means."""
    tables = []
    gone = rows_of(results, "spans", metric="auroc")
    for setting, here in each_setting(gone.loc[gone["against"].notna()]):
        lines = [
            (f"{family_name(x.families or '', setting)} without {x.span}", x._asdict())
            for x in subjects_in(here)
        ]
        heading = "AUROC with a span at its means, minus AUROC intact"
        heading = f"{SETTING_LABELS[setting]}: {heading}{note}"
        tables.append((heading, by_place(here, "Encoder", lines)))
    return tables


@shown(
    "Which layer is best, on every answer",
    "Whether the curve peaks in the middle, and whether the peak is clear of the other "
    "layers' intervals.",
)
def _layers(results: pandas.DataFrame) -> Content:
    shown = rows_of(results, "layers", dataset=IN_DOMAIN, split=("validation", "test"))
    curves, best = {}, {}
    known = shown.loc[shown["value"].notna() & shown["ci_low"].notna()]
    for setting, here in each_setting(known):
        valid, test = (
            where(here, split=name).set_index("layer").sort_index()
            for name in ("validation", "test")
        )
        if valid.empty or list(valid.index) != list(test.index):
            continue
        best[setting] = int(valid.index[valid["value"].to_numpy(float).argmax()])
        curves[setting] = test[["value", "ci_low", "ci_high"]]
    if not curves:
        return (), ()
    caption = (
        "Logistic regression on the answer's mean state, with every labelled answer; "
        "bands are 95 % intervals, rings the best layers on validation."
    )
    figure = figures.layer_curves(curves, best)
    lines = [(f"layer {x}", {"layer": x}) for x in sorted(shown["layer"].unique())]
    table = by_place(shown, "Layer", lines, ("validation", "test"))
    drawn = picture(figure, "anatomy-layers", "Every layer on every answer", caption)
    return [drawn], [("AUROC by layer", table)]


@shown(
    "How much data it takes",
    "Where the curves flatten, and whether encoders need more labels than logistic "
    "regression on the same signals.",
)
def _labels(results: pandas.DataFrame) -> Content:
    shown, pictures = rows_of(results, "labels", **POOLED), []
    for setting, here in each_setting(shown):
        curves = _learning_curves(results, here, setting)
        if curves:
            caption = (
                "A fifth of the n labels is used to stop training or choose the "
                "penalty. Encoders: one seed and one sample of labels at three sizes; "
                "rightmost, all labels of the run with all its seeds, and the selected "
                "encoders with their head."
            )
            figure = figures.learning_curves(curves, setting)
            pictures.append(_drawn(figure, "labels", setting, caption))
    sizes = sorted(shown["n_labels"].dropna().unique())
    columns = by_setting(shown, [(f"{n:,}", "labels", {"n_labels": n}) for n in sizes])
    table = pivot(shown, "Detector", lines_of(LEARNERS), columns)
    return pictures, [("AUROC, in-domain test", table)]


def _learning_curves(
    results: pandas.DataFrame, shown: pandas.DataFrame, setting: str
) -> dict[str, list[tuple[float, float]]]:
    """Return (number of labels, AUROC) of every detector, with all labels last."""
    at = {"setting": setting, **POOLED, "metric": "auroc"}
    detection = by_subject(results, experiment="detection", **at)
    alone = Subject("without_closed_book")  # reads one pass, as with fewer labels
    every = Subject("champion") if alone not in detection else alone
    of_all_labels = {
        Subject("selected"): every,
        encoder(EVERY_FAMILY): Subject("early_fusion"),
    }
    n_all = find(shown, metric="labels")
    curves = {}
    for reader, title in LEARNERS.items():
        rows = where(shown, detector=reader.detector, families=reader.families)["row"]
        points = [
            (r.n_labels, r.value) for r in rows if r.n_labels and r.value is not None
        ]
        last = detection.get(of_all_labels.get(reader, reader))
        if points and last and last.value is not None and n_all and n_all.value:
            points.append((n_all.value, last.value))
        if points:
            curves[title] = points
    return curves


@shown(
    "Transfer from one question set to another",
    "Detectors whose rows are as dark as the diagonal transfer well. All were trained "
    "on equally many labels; of a held-out set, half of the questions are used for "
    "training and the other half for testing.",
)
def _transfer(results: pandas.DataFrame) -> Content:
    shown, pictures, tables = rows_of(results, "transfer", metric="auroc"), [], []
    for setting, of_setting in each_setting(shown):
        for reader in (encoder(EVERY_FAMILY), probe(EVERY_FAMILY)):
            here = where(of_setting, detector=reader.detector)
            sources = list(here["source"].unique())
            if len(sources) < 2:
                continue
            # A name may be that of a training set and of a held-out one.
            is_twice = here.duplicated(["source", "dataset"], keep=False)
            columns = here["dataset"].mask(
                is_twice & (here["split"] == "ood"), here["dataset"] + ", held out"
            )
            read = dict.fromkeys([*sources, *columns.unique()])
            targets = [x for x in read if x in set(columns)]
            laid = here.assign(dataset=columns)
            values = _matrix(laid, "source", "dataset").reindex(
                sources, columns=targets
            )
            title = f"{SETTING_LABELS[setting]}, {LEARNERS[reader]}"
            figure = figures.matrix(values, setting)
            name = f"transfer-{reader.detector}"
            caption = "A dash is undefined: only one class, or no training answer."
            if n_labels := here["n_labels"].dropna().to_list():  # old rows lack it
                caption = f"Labels for each: {max(n_labels):,}. {caption}"
            pictures.append(_drawn(figure, name, setting, caption, title))
            lines = [(source, {"source": source}) for source in sources]
            tables.append((title, by_place(here, "Trained on", lines)))
    return pictures, tables


@shown(
    "Cases: two passes, two decisions",
    "Selected by a fixed rule: for every set and kind, the question with the surest "
    "decisions; ties go to the smaller id.",
)
def _cases(results: pandas.DataFrame) -> Content:
    shown = rows_of(results, "cases")
    lines = [(kind, {"kind": kind}) for kind in shown["kind"].unique()]
    columns = [
        (column._replace(group=title), {**key, "metric": metric})
        for title, metric in (("Share of questions", "share"), ("Right", "right"))
        for column, key in place_columns(places_of(shown, EVALUATED))
    ]
    return (), [("Decisions", pivot(shown, "Decision", lines, columns))]


def anatomy_parts(
    results: pandas.DataFrame, studies: "Sequence[CaseStudy]" = ()
) -> list[PagePart]:
    """Return the page parts of the analyses that a run has rows of, in order."""
    if not results["experiment"].str.startswith("anatomy_").any():
        return []
    compared, parts = signs_by_table(read_ledger(), results), []
    for analysis in ANALYSES:
        pictures, tables = analysis.make(results)
        tables = [(heading, table) for heading, table in tables if table.lines]
        cases = studies if analysis.make is _cases else ()
        if pictures or tables or cases:
            beside = [sign for x in analysis.beside for sign in compared.get(x, ())]
            about = analysis.title, analysis.look
            parts.append(PagePart(*about, pictures, tables, beside, cases))
    return parts
