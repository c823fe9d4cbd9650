"""Made-up rows of every analysis of the anatomy: plausible, and measured nowhere."""

import itertools

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from tests.benchmarks.results.sample import wobble

SETTINGS = ("closed_book", "with_context")
PLACES = ((IN_DOMAIN, "test"), ("pursuits", "ood"), ("places", "ood"))
TEST = PLACES[0]
SUBSETS = [
    "".join(letters)
    for size in range(1, 5)
    for letters in itertools.combinations("HPRA", size)
]


def made(experiment, detector, setting, place, metric, level, **changes):
    """One row with an interval, its value moved a little by its own name."""
    value = level + 0.04 * wobble(experiment, detector, setting, place, metric)
    fields = dict(
        experiment=f"anatomy_{experiment}",
        detector=detector,
        setting=setting,
        dataset=place[0],
        split=place[1],
        metric=metric,
        value=round(value, 6),
        ci_low=round(value - 0.05, 6),
        ci_high=round(value + 0.05, 6),
        n=300,
    )
    return ResultRow(**(fields | changes))


def printed(setting, name):
    return f"({name})" if setting == "closed_book" else f"[{name}]"


def decisions(setting):
    for place in PLACES:
        for x in "HPRA":
            yield made(
                "complementarity", f"encoder:{x}", setting, place, "error_rate", 0.3
            )
            for of in "HPRA".replace(x, ""):
                yield made(
                    "complementarity",
                    f"encoder:{x}",
                    setting,
                    place,
                    f"rights:{of}",
                    0.5,
                )
        yield made("flips", "answers", setting, place, "right", 0.4)
        for x, metric in itertools.product(
            "HPRA",
            (
                "flip_rate",
                "flip_precision",
                "flips_near_boundary",
                "answers_near_boundary",
            ),
        ):
            name = f"{printed(setting, 'HPRA')}-{x}"
            yield made("flips", name, setting, place, metric, 0.3)
    for x, (at, n) in itertools.product(
        "HPRA", (("-2.5 0.5 in 1", 40), ("0.5 -1.5 in 1", 9))
    ):
        name = f"{printed(setting, 'HPRA')}-{x}"
        kind = "answers" if n > 9 else "flips"
        fields = dict(ci_low=None, ci_high=None, value=float(n))
        yield made("boundary", name, setting, TEST, f"{kind} at {at}", 0, **fields)


def grounding():
    from benchmarks.anatomy.decisions import GROUNDING

    for place, (metric, (of, _)) in itertools.product(PLACES, GROUNDING.items()):
        name = of or "[HPRA]"
        yield made("grounding", name, "with_context", place, metric, 0.4)


def places(setting):
    for letters in ("HPRA", "A"):
        name = printed(setting, letters)
        for layer, head in itertools.product(range(3), range(4)):
            metric = f"share at {layer} {head}"
            yield made("heads", name, setting, TEST, metric, 1 / 12)
        for metric in (
            "share of 8",
            "moved by 8",
            "moved by random 8",
            "moved more by 8",
        ):
            yield made("heads", name, setting, TEST, metric, 0.7)
        even = dict(ci_low=None, ci_high=None)
        yield made("heads", name, setting, TEST, "even share of 8", 0.66, **even)
    name = printed(setting, "HPRA")
    for span in ("question", "answer"):
        for metric in (f"share in {span}", f"tokens in {span}"):
            yield made("positions", name, setting, TEST, metric, 0.5)
        for place in PLACES:
            fields = dict(metric="auroc_difference", against=name)
            detector = f"{name} without {span}"
            yield made("spans", detector, setting, place, level=-0.1, **fields)
    for at in ("1", "2", "last"):
        for metric in (f"share at {at}", f"even share at {at}"):
            yield made("positions", name, setting, TEST, metric, 0.4)
    for layer, split in itertools.product(range(4), ("validation", "test")):
        place = (IN_DOMAIN, split)
        yield made("layers", f"layer {layer}", setting, place, "auroc", 0.7)


def combining(setting):
    difference = dict(metric="auroc_difference")
    for place in PLACES:
        for experiment in ("pairs", "other_pairs"):
            for pair in itertools.combinations("HPRA", 2):
                for member in pair:
                    fields = difference | {"against": f"encoder:{member}"}
                    name = f"encoder:{''.join(pair)}"
                    yield made(experiment, name, setting, place, level=0.01, **fields)
        for variant in ("hidden_only", "early_fusion", "late_fusion_all"):
            fields = difference | {"against": variant}
            yield made("fusion", "champion", setting, place, level=0.02, **fields)
    plain = dict(ci_low=None, ci_high=None)
    for which, name in itertools.product(("first", "second"), SUBSETS):
        yield made("backbones", f"{which} {name}", setting, TEST, "auroc", 0.8)
    yield made("backbones", "gemma | smollm2", setting, TEST, "spearman", 0.6)
    ranked = (IN_DOMAIN, "validation")
    for own, x in itertools.product(SETTINGS, "HPRA"):
        for metric, value in (
            ("encoders in a best set", 2.1),
            ("encoders in a set", 1.6),
        ):
            yield made(
                "combinations", f"{x}:{own}", setting, ranked, metric, value, **plain
            )
    if setting == "with_context":
        for k in range(4):
            name = f"{k} closed-book"
            fields = plain | {"value": 10.0 * (k == 1)}
            yield made("combinations", name, setting, ranked, "best sets", 0, **fields)
            for part in range(1, 6):
                fields = plain | {"value": 0.25}
                metric = f"share in part {part}"
                yield made("combinations", name, setting, ranked, metric, 0, **fields)


def reach(setting):
    for name in (
        *(f"encoder:{x}" for x in "HPRA"),
        "encoder:HPRA",
        "selected",
        "probe:HPRA",
    ):
        for n, value in ((100, 0.7), (400, 0.75)):
            yield made("labels", f"{name} at {n}", setting, TEST, "auroc", value)
    fields = dict(value=3600.0, ci_low=None, ci_high=None)
    yield made("labels", "run", setting, TEST, "labels", 0, **fields)
    sets = (("microworld", "test"), *PLACES[1:])
    for reader, (source, _), place in itertools.product(
        ("encoder:HPRA", "probe:HPRA"), sets, sets
    ):
        name = f"{reader} from {source}"
        yield made("transfer", name, setting, place, "auroc", 0.7)


def anatomy_rows():
    """All of them."""
    rows = list(grounding())
    for setting in SETTINGS:
        for part in (decisions, places, combining, reach):
            rows += part(setting)
    for kind in ("accepted closed-book", "trusted with context", "both flagged"):
        for metric in ("share", "right"):
            rows.append(made("cases", kind, "both", TEST, metric, 0.3))
    return rows


def studies():
    """A case with what a page must escape."""
    return (
        {
            "dataset": "places",
            "split": "ood",
            "kind": "both flagged",
            "question": '<script>alert("x")</script>?',
            "gold": "Guzolt",
            "closed_book": "",
            "p_closed_book": 0.1,
            "is_closed_book_right": False,
            "with_context": "Falls",
            "p_with_context": 0.2,
            "is_with_context_right": False,
        },
    )
