"""The report's section on the anatomy: a figure and a table of every analysis.

Each part reads the rows of its experiments by their columns, and has beside it what the
paper compares. Nothing here loads JAX or Torch.
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

if TYPE_CHECKING:  # which loads JAX
    from beatrice.selection.analysis import Study

Tables = Sequence[tuple[str, Table]]
Content = tuple[Sequence[Picture], Tables]
Make = Callable[[pandas.DataFrame], Content]  # of a run's results


class ShownAnalysis(NamedTuple):
    """How one analysis is shown."""

    title: str
    look: str  # what to look at, in a sentence
    make: Make
    # The paper's tables, figures and sections whose numbers stand beside.
    beside: tuple[str, ...]


class PagePart(NamedTuple):
    """One analysis on the page."""

    title: str
    look: str
    pictures: Sequence[Picture]
    tables: Tables
    beside: Sequence[Sign]
    cases: "Sequence[Study]"


ANALYSES: list[ShownAnalysis] = []  # in the order of the page


def shown(title: str, look: str, *beside: str) -> Callable[[Make], Make]:
    """Register how an analysis is shown, see `ShownAnalysis`."""

    def register(make: Make) -> Make:
        ANALYSES.append(ShownAnalysis(title, look, make, beside))
        return make

    return register


def rows_of(results: pandas.DataFrame, name: str, **columns: Any) -> pandas.DataFrame:
    """Return the rows of one analysis, mean over seeds."""
    return where(results, experiment=f"anatomy_{name}", seed="mean", **columns)


def each_setting(results: pandas.DataFrame) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Yield the rows of each setting, in the order of the tables."""
    for setting, here in results.groupby("setting"):
        yield str(setting), here


def by_setting(
    results: pandas.DataFrame, columns: Sequence[tuple[str, str, Key]]
) -> list[tuple[Column, Key]]:
    """Return labelled columns under each setting that rows are of."""
    return [
        (Column(SETTING_LABELS[setting], label, detail), {"setting": setting, **key})
        for setting, _ in each_setting(results)
        for label, detail, key in columns
    ]


def _matrix(results: pandas.DataFrame, index: str, columns: str) -> pandas.DataFrame:
    """Return values by two columns of the rows, NaN where there is none."""
    laid = results.pivot(index=index, columns=columns, values="value")
    return laid.astype("float64")


def _drawn(
    figure: Figure, name: str, setting: str, caption: str, title: str = ""
) -> Picture:
    title = title or SETTING_LABELS[setting]
    return picture(figure, f"{name}-{setting}", title, caption)


_BY_CHANCE = "rights_by_chance"


def rights_by_chance(error_rate: float, right: float) -> float:
    """Return the share of another's mistakes that a family gets right by chance.

    By chance means that mistakes of both have nothing in common but the label. As many
    answers are flagged as are wrong, so that half of a family's mistakes are right
    answers and half wrong ones, whatever share of all answers is right.
    """
    return 1 - error_rate / (4 * right * (1 - right))


def _with_chance(shown: pandas.DataFrame, results: pandas.DataFrame) -> Iterator[Any]:
    """Yield rows of mistakes, and what each family would get right by chance."""
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
    "A cell near the row's “by chance” means mistakes that have nothing in common but "
    "which answers are right; near 0, that the row repeats the column's.",
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
            "flags as many answers as are wrong. Right: what each gets wrong itself."
        )
        figure = figures.complementarity(rights, errors.tolist(), setting)
        pictures.append(_drawn(figure, "complementarity", setting, caption))
    error = ("own error rate", "share of answers", {"metric": "error_rate"})
    columns = [error] + [
        (f"of {name}", "mistakes right", {"metric": "rights", "family": letter})
        for letter, name in FAMILIES.items()
    ]
    columns.append(("by chance", "mistakes right", {"metric": _BY_CHANCE}))
    lines = [(name, {"families": letter}) for letter, name in FAMILIES.items()]
    table = pivot(shown, "Family", lines, by_setting(shown, columns))
    return pictures, [("Mistakes, family by family", table)]


@shown(
    "Which pairs of families are worth more together",
    "Points to the right of zero; that the better of two is chosen on the same "
    "answers makes gains look smaller by a little.",
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
        "A point is a test or held-out set; to the right of zero an encoder of both "
        "ranks answers better than either alone. Nothing corrects for the number of "
        "comparisons."
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
    "Whether an interval excludes zero (†): a larger number alone says little.",
    "ablation",
    "champion-vs-hidden",
)
def _fusion(results: pandas.DataFrame) -> Content:
    shown = rows_of(results, "fusion")
    lines = [(title, of_rival(x)) for x, title in FUSION_VARIANTS.items()]
    table = by_place(shown, "Variant", lines)
    return (), [("AUROC of the selected set minus the variant's", table)]


@shown(
    "What the best sets of three encoders hold",
    "Of the ranking of all sets by validation AUROC: what the ten best carry more "
    "of than sets at large, and whether closed-book encoders gather at the top.",
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
            "Sets of three from best to worst by validation AUROC; the wedges are how "
            "many of the three read the closed-book pass."
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
        ("What sets carry", pivot(shown, "Reads", traits, by_setting(shown, of_sets))),
        ("What the ten best sets hold", pivot(shown, "Encoders", counts, best)),
    ]


@shown(
    "Whether the same combinations win on another backbone",
    "Points that rise from left to right: the ranking belongs to the families, not "
    "to one model.",
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
    caption = "A point is an encoder of a subset of the families, mean over seeds."
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
    "A family is replaced by its means inside a deployed encoder. A high flip rate "
    "is a family that decides; a high precision with flips near the boundary is "
    "one that corrects where the rest is undecided. A precision is to be read beside "
    "that by chance, of the same decisions on answers drawn at random.",
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
            f"Of {name}, in-domain test answers, all seeds, in cells of {width:g} "
            "logits; a larger mark is more answers. In the shaded wedge the family "
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
    return pictures, [*tables, ("How often answers are right at all", table)]


_GROUNDING = {
    "Right answers, closed-book": ("right_closed_book", None),
    "Right answers, with the passages": ("right_with_context", None),
    "Wrong answers that stand there": ("wrong_in_passage", None),
    "Right answers that stand there": ("right_in_passage", None),
    "Precision of attention's flips": ("flip_precision", None),
    "· answer stands there, but is wrong": ("flip_precision", "in_passage_but_wrong"),
    "· answer right, but not there": ("flip_precision", "right_not_in_passage"),
}


@shown(
    "What attention responds to",
    "If precision falls where an answer stands in the passage and is wrong, "
    "attention endorses support, not truth. Whole words of the normalised answer "
    "are looked for in titles and texts.",
    "anatomy-grounding",
)
def _grounding(results: pandas.DataFrame) -> Content:
    shown, tables = rows_of(results, "grounding"), []
    for families in shown["families"].dropna().unique():
        of = {"flip_precision": families}  # the others are of the answers alone
        lines = [
            (label, {"metric": metric, "kind": kind, "families": of.get(metric)})
            for label, (metric, kind) in _GROUNDING.items()
        ]
        heading = f"Attention in {family_name(families, 'with_context')}"
        tables.append((heading, by_place(shown, "Share", lines)))
    return (), tables


@shown(
    "Whether a few heads carry what attention says",
    "A flat map, and eight largest heads that move the encoder no more than eight "
    "random ones, mean that no head is privileged.",
    "fig:attention-heads",
)
def _heads(results: pandas.DataFrame) -> Content:
    shown, pictures = rows_of(results, "heads", **POOLED), []
    cells = where(shown, metric="share", families=(EVERY_FAMILY, "A"))
    cells = cells.loc[cells["head"].notna() & cells["value"].notna()]
    for setting, here in each_setting(cells):
        caption = (
            "Integrated gradients of the logit from attention at its means, absolute, "
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
            ("of an even map", "share", "even_share_of_top_heads"),
            ("moved without them", "logits", "moved_by_top_heads"),
            ("without eight random ones", "logits", "moved_by_random_heads"),
            ("difference", "logits", "moved_more_by_top_heads"),
        )
    ]
    return pictures, [("Eight heads", pivot(shown, "Encoder", lines, columns))]


def _hidden_note(results: pandas.DataFrame) -> str:
    """Return a note if hidden states move nothing but in the answer's span.

    They are then stored of the answer alone, which so has four families, and another
    span three: neither tokens nor a loss without a span compares them evenly.
    """
    rows = rows_of(results, "positions", family="H", span=SPANS, metric="share")["row"]
    of_answer = [row.value for row in rows if row.span == "answer"]
    elsewhere = [row.value for row in rows if row.span != "answer"]
    is_noted = any(of_answer) and elsewhere and not any(elsewhere)
    return " (hidden states are of the answer alone)" if is_noted else ""


@shown(
    "Where in the text the read-out comes from",
    "How much each span and each token of the answer moves the logit, beside its "
    "share of the tokens; and what a deployed encoder loses without a span.",
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
                f"Of {family_name(EVERY_FAMILY, setting)}, {here['n'].max()} test "
                "answers: size of integrated gradients from all signals at their "
                f"means{note}. Right: of the answers that have such a token; bars are "
                "95 % intervals, dashes an even share. The first position emits the "
                "first token."
            )
            figure = figures.shares_of_text(spans, tokens, setting)
            pictures.append(_drawn(figure, "positions", setting, caption))
    shares = ("share", "of what moves the logit", {"metric": "share"})
    tables = []
    for heading, corner, keys, other, metric in (
        (f"Spans{note}", "Span", of_span, "tokens", "token_share"),
        ("Tokens of the answer", "Token", of_token, "even", "even_share"),
    ):
        columns = by_setting(shown, [shares, (other, "share", {"metric": metric})])
        tables.append((heading, pivot(shown, corner, [*keys.items()], columns)))
    return pictures, [*tables, *_without_spans(results, note)]


def _without_spans(results: pandas.DataFrame, note: str) -> list[tuple[str, Table]]:
    """What encoders lose, by the span that stands at its means."""
    tables = []
    gone = rows_of(results, "spans", metric="auroc")
    for setting, here in each_setting(gone.loc[gone["against"].notna()]):
        lines = [
            (f"{family_name(x.families or '', setting)} without {x.span}", x._asdict())
            for x in subjects_in(here)
        ]
        heading = "AUROC with a span at its means, minus intact"
        heading = f"{SETTING_LABELS[setting]}: {heading}{note}"
        tables.append((heading, by_place(here, "Encoder", lines)))
    return tables


@shown(
    "Which layer knows, on every answer",
    "Whether the curve peaks in the middle, and whether the peak stands out of the "
    "intervals.",
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
        "Logistic regression on the mean state of the answer, on every labelled "
        "answer; bands are 95 % intervals, rings the layers that validation chooses."
    )
    figure = figures.layer_curves(curves, best)
    lines = [(f"layer {x}", {"layer": x}) for x in sorted(shown["layer"].unique())]
    table = by_place(shown, "Layer", lines, ("validation", "test"))
    drawn = picture(figure, "anatomy-layers", "Every layer on every answer", caption)
    return [drawn], [("AUROC by layer", table)]


@shown(
    "How much data it takes",
    "Where the curves begin to flatten, and whether encoders need more labels than "
    "logistic regression on the same signals.",
)
def _labels(results: pandas.DataFrame) -> Content:
    shown, pictures = rows_of(results, "labels", **POOLED), []
    for setting, here in each_setting(shown):
        curves = _learning_curves(results, here, setting)
        if curves:
            caption = (
                "Of n labels a fifth stops the training or chooses the penalty. "
                "Encoders: one seed and one drawing, three sizes; rightmost, all "
                "labels of the run with all its seeds, and the selected encoders "
                "under their head."
            )
            figure = figures.learning_curves(curves, setting)
            pictures.append(_drawn(figure, "labels", setting, caption))
    sizes = sorted(shown["n_labels"].dropna().unique())
    columns = by_setting(shown, [(f"{n:,}", "labels", {"n_labels": n}) for n in sizes])
    table = pivot(shown, "Reader", lines_of(LEARNERS), columns)
    return pictures, [("AUROC, in-domain test", table)]


def _learning_curves(
    results: pandas.DataFrame, shown: pandas.DataFrame, setting: str
) -> dict[str, list[tuple[float, float]]]:
    """Return number of labels and AUROC of every reader, all labels last."""
    at = {"setting": setting, **POOLED, "metric": "auroc"}
    detection = by_subject(results, experiment="detection", **at)
    alone = Subject("without_closed_book")  # of this pass alone, as fewer labels are
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
    "What one question set teaches about another",
    "Rows that stay as dark as the diagonal carry over. Every detector had as many "
    "labels as every other; held-out sets teach with half of their questions and "
    "are read on the other.",
)
def _transfer(results: pandas.DataFrame) -> Content:
    shown, pictures, tables = rows_of(results, "transfer", metric="auroc"), [], []
    for setting, of_setting in each_setting(shown):
        for reader in (encoder(EVERY_FAMILY), probe(EVERY_FAMILY)):
            here = where(of_setting, detector=reader.detector)
            sources = list(here["source"].unique())
            if len(sources) < 2:
                continue
            read = dict.fromkeys([*sources, *here["dataset"].unique()])
            targets = [x for x in read if x in set(here["dataset"])]
            values = _matrix(here, "source", "dataset").reindex(
                sources, columns=targets
            )
            title = f"{SETTING_LABELS[setting]}, {LEARNERS[reader]}"
            figure = figures.matrix(values, setting)
            name = f"transfer-{reader.detector}"
            caption = "A dash is undefined: one class only, or no answer to learn from."
            if n_labels := here["n_labels"].dropna().to_list():  # earlier rows lack it
                caption = f"Labels of each: {max(n_labels):,}. {caption}"
            pictures.append(_drawn(figure, name, setting, caption, title))
            lines = [(source, {"source": source}) for source in sources]
            tables.append((title, by_place(here, "Trained on", lines)))
    return pictures, tables


@shown(
    "Cases: two passes, two decisions",
    "Of every set and kind the question that is surest of its decisions, of equals "
    "the smaller id; nobody picked.",
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
    results: pandas.DataFrame, studies: "Sequence[Study]" = ()
) -> list[PagePart]:
    """Return the analyses that a run has rows of, in order."""
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
