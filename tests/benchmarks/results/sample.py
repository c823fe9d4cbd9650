"""A small made-up run: plausible numbers, every section filled, nothing measured."""

import itertools
import math
import zlib

import msgspec

from benchmarks.panorama.costs import Judged
from benchmarks.results.report import ReportData
from extract.records import IN_DOMAIN
from extract.run.results import (
    AT_EQUAL_LENGTH,
    FAMILY_PAIRS,
    FLOORS,
    RIVALS,
    ResultRow,
    ResultTable,
    macro_row,
)
from tests.benchmarks.results.ablation_sample import ablation_rows, ablations, rankings

SETTINGS = ("closed_book", "with_context")
PLACES = (
    ("microworld", "validation"),
    ("microworld", "test"),
    ("pursuits", "ood"),
    ("places", "ood"),
    ("rephrased", "ood"),
)
STRENGTH = {
    "champion": 0.91,
    "hidden_only": 0.88,
    "early_fusion": 0.895,
    "late_fusion_singles": 0.9,
    "late_fusion_all": 0.905,
    "without_closed_book": 0.885,
    "tfidf": 0.74,
    "perplexity": 0.84,
    "answer_length": 0.6,
    "majority": 0.5,
    "probe:H": 0.85,
    "probe:P": 0.83,
    "probe:R": 0.82,
    "probe:A": 0.81,
    "probe:HPRA": 0.88,
    "permuted_labels": 0.5,
}
SUBSETS = [
    "".join(letters)
    for size in range(1, 5)
    for letters in itertools.combinations("HPRA", size)
]
MARKUP = '<script>alert("x")</script> & co'


def wobble(*names):
    """A number in [-0.5, 0.5) that depends on the names only."""
    return zlib.crc32("/".join(map(str, names)).encode()) / 2**32 - 0.5


def row(detector, setting, place, metric, value, **changes):
    """One seed mean with an interval around it."""
    half = 0.03
    top = math.inf if metric == "generations" else 1.0
    fields = dict(
        experiment="detection",
        detector=detector,
        setting=setting,
        dataset=place[0],
        split=place[1],
        metric=metric,
        value=value,
        ci_low=None if value is None else round(value - half, 6),
        ci_high=None if value is None else round(min(value + half, top), 6),
        n=398,
        seed="mean",
    )
    return ResultRow(**(fields | changes))


def detection_rows():
    strength = dict(STRENGTH)
    for name in SUBSETS:
        strength[f"encoder:{name}"] = 0.76 + 0.03 * len(name) + 0.05 * ("H" in name)
    for detector, setting, place in itertools.product(strength, SETTINGS, PLACES):
        for metric in ("auroc", "auprc"):
            noise = 0.06 * wobble(detector, setting, place, metric)
            yield row(
                detector, setting, place, metric, round(strength[detector] + noise, 6)
            )


def answer_rows():
    for setting, place in itertools.product(SETTINGS, PLACES):
        for metric in ("cut_off", "empty", "hedged"):
            fields = dict(experiment="answers", ci_low=None, ci_high=None)
            yield row("backbone", setting, place, metric, 0.02, **fields)


PUBLISHED = "skr adaptive_rag dragin seakr probing_rag perplexity_rag".split()


def controller_rows():
    scores = {
        "no_rag": ("closed_book", 0.34, 1.0),
        "vanilla_rag": ("with_context", 0.52, 1.0),
        "draft_rag": ("both", 0.55, 2.0),
        **{name: ("both", 0.53, 1.7) for name in PUBLISHED},
        "pgir": ("both", 0.58, 2.4),
        "perfect_judge": ("both", 0.66, 2.2),
    }
    for detector, (setting, em, cost) in scores.items():
        for place in PLACES[1:]:
            shift = 0.2 * wobble(place)
            for metric, value in (
                ("em", em + shift),
                ("f1", em + shift + 0.04),
                ("generations", cost),
            ):
                yield row(
                    detector,
                    setting,
                    place,
                    metric,
                    round(value, 6),
                    experiment="controller",
                )


def span_rows():
    for name, value in (("emitting", 0.908), ("literal", 0.871)):
        for setting, metric in itertools.product(SETTINGS, ("auroc", "auprc")):
            yield row(
                name, setting, PLACES[1], metric, value, experiment="span_decision"
            )


def bins(shift):
    edges = [i / 10 for i in range(11)]
    for lower, upper in itertools.pairwise(edges):
        middle = (lower + upper) / 2
        accuracy = min(1.0, max(0.0, middle + shift * (0.5 - middle)))
        n = 0 if lower == 0.5 else 20 + int(60 * abs(middle - 0.5))
        yield {
            "lower": lower,
            "upper": upper,
            "mean_p": middle if n else None,
            "accuracy": accuracy if n else None,
            "n": n,
        }


def reliability():
    return {
        setting: {
            "raw": list(bins(0.5)),
            "calibrated": list(bins(0.08)),
            "brier_raw": 0.161,
            "brier_calibrated": 0.139,
            "ece_raw": 0.083,
            "ece_calibrated": 0.021,
        }
        for setting in SETTINGS
    }


def sweep():
    means = {
        "closed_book": (0.74, 0.78, 0.81, 0.84, 0.862, 0.87, 0.858),
        "with_context": (0.78, 0.8, 0.83, 0.86, 0.893, 0.889, 0.88),
    }
    return {
        setting: {
            "layers": list(range(7)),
            "auroc": [[m - 0.006, m + 0.001, m + 0.005] for m in means[setting]],
            "best": max(range(7), key=means[setting].__getitem__),
            "n_train": 1200,
            "n_validation": 398,
        }
        for setting in SETTINGS
    }


def selection():
    found = {}
    for setting in SETTINGS:
        pool = [f"({name})" for name in SUBSETS]
        if setting == "with_context":
            pool = [f"[{name}]" for name in SUBSETS] + pool
        rounds, selected, level = [], [], 0.0
        for best in (0.901, 0.909, 0.911):
            left = [name for name in pool if name not in selected]
            scores = {
                name: round(best - 0.02 - 0.04 * abs(wobble(name, best)), 6)
                for name in left
            }
            added = max(scores, key=scores.get)
            scores[added] = level = best
            selected.append(added)
            rounds.append({"added": added, "auroc": level, "candidates": scores})
        last = {name: level - 0.004 for name in pool if name not in selected}
        rounds.append({"added": None, "auroc": level, "candidates": last})
        found[setting] = {
            "rounds": rounds,
            "selected": selected,
            "stop": "the best addition gains less than 0.0005",
        }
    return found


def tokens(context, question, answer):
    spans = {"context": context, "question": question, "answer": answer}
    for span, text in spans.items():
        for place, word in enumerate(text.split()):
            p = round(0.5 + 0.98 * wobble(span, place, word), 4)
            yield {
                "text": f" {word}",
                "span": span,
                "p": p,
                "surprisal": round(1.5 - p, 4),
                "entropy": round(2 * (1 - p), 4),
                "margin": round(p, 4),
            }


def draft(setting, question, answer, p_correct, is_correct):
    passages = []
    if setting == "with_context":
        passages = [
            "Belrun is a town in the north of Karvia, on the river Osk.",
            "The painter Ilmo Darre lived in Belrun until he was thirty.",
        ]
    return {
        "setting": setting,
        "answer": answer,
        "p_correct": p_correct,
        "correct": is_correct,
        "passages": passages,
        "tokens": list(tokens(" ".join(passages), question, f"{answer} <eos>")),
    }


def case(question, gold, action, verdict, closed, grounded):
    drafts = [draft("closed_book", question, *closed)]
    if grounded:
        drafts.append(draft("with_context", question, *grounded))
    return {
        "dataset": "microworld",
        "question": question,
        "golds": [gold],
        "action": action,
        "verdict": verdict,
        "drafts": drafts,
    }


def cases():
    wrong, right = ("Tolva", 0.22, False), ("Belrun", 0.91, True)
    kept = ("accepted without retrieval", "right")
    trusted = ("retrieved, then trusted", "right")
    flagged = ("retrieved, none trusted", "flagged, wrong")
    asked = "Where did the painter Ilmo Darre live before he was thirty?"
    return [
        case("In which land is Belrun?", "Karvia", *kept, ("Karvia", 0.88, True), None),
        case(asked, "Belrun", *trusted, wrong, right),
        case(asked, "Osk", *flagged, wrong, ("Belrun", 0.31, False)),
        case(MARKUP, "<b>Osk</b>", *kept, ("<i>Osk</i>", 0.7, True), None),
        case("Which river is it?", "Osk", *trusted, ("", 0.05, False), right),
        case("Who painted it?", "Ilmo", *flagged, ("Ann", 0.1, False), wrong),
    ]


def shown():
    """A set of each setting with an answer of each kind but one."""
    for setting in SETTINGS:
        of_kind = [
            ("right and trusted", ("Karvia", 0.97, True)),
            ("wrong and caught", ("a very long answer " * 20, 0.02, False)),
            ("wrong and missed", None),
            ("right and distrusted", ("<i>Osk</i>", 0.1, True)),
        ]
        kinds = []
        for name, said in of_kind:
            asked = {"id": f"q-{name}", "question": f"{MARKUP} {name}?"}
            asked |= {"golds": ["Karvia", "Osk"], "n_golds": 9}
            own = [asked | {"draft": draft(setting, MARKUP, *said)}] if said else []
            kinds.append({"name": name, "n": len(own), "answers": own})
        place = {"setting": setting, "dataset": "microworld", "split": "test"}
        yield {**place, "n": 398, "threshold": 0.71, "kinds": kinds}


def accuracy():
    for place, setting in itertools.product(PLACES, SETTINGS):
        for variant in ("original", "rewritten"):
            if (setting, variant) != ("closed_book", "rewritten"):
                n_correct = int(398 * (0.55 + 0.4 * wobble(place, setting, variant)))
                yield {
                    "dataset": place[0],
                    "split": place[1],
                    "setting": setting,
                    "variant": variant,
                    "n": 398,
                    "n_correct": n_correct,
                }


def frontier():
    for place, budget in itertools.product(PLACES[1:], range(5)):
        gain = 0.24 * (1 - 0.5**budget)
        yield {
            "controller": "pgir",
            "dataset": place[0],
            "budget": budget,
            "em": 0.34 + gain + 0.2 * wobble(place),
            "f1": 0.38 + gain + 0.2 * wobble(place),
            "generations": 1 + 0.6 * budget - 0.05 * budget**2,
        }


def paired_rows():
    """Differences, some of whose intervals exclude zero; the controllers' macro too."""
    for against, setting, place in itertools.product(RIVALS, SETTINGS, PLACES):
        fields = dict(experiment="paired", against=against, p_value=0.2)
        noise = round(0.05 + 0.08 * wobble(against, setting, place), 6)
        yield row("champion", setting, place, "auroc_difference", noise, **fields)
    for detector, setting, place in itertools.product(
        AT_EQUAL_LENGTH, SETTINGS, PLACES
    ):
        fields = dict(experiment="at_equal_length")
        yield row(detector, setting, place, "auroc", 0.7, **fields)
        if detector == "champion":
            yield row("answers", setting, place, "unmatched", 0.1, **fields)
            continue
        fields = dict(experiment="at_equal_length_paired", against=detector)
        yield row("champion", setting, place, "auroc_difference", 0.01, **fields)
    for encoder, setting, place in itertools.product(FLOORS, SETTINGS, PLACES):
        fields = dict(experiment="floor_paired", against=FLOORS[encoder])
        yield row(encoder, setting, place, "auroc_difference", 0.02, **fields)
    macro = ("macro", "evaluated")
    for against in ("no_rag", "vanilla_rag", "draft_rag"):
        fields = dict(experiment="controller_paired", against=against, p_value=0.01)
        for place, metric in itertools.product((*PLACES[1:], macro), ("em", "f1")):
            value = round(0.08 * wobble(against, place, metric), 6)
            yield row("pgir", "both", place, f"{metric}_difference", value, **fields)
    table, sets = ResultTable(list(controller_rows())), [name for name, _ in PLACES[1:]]
    names = dict.fromkeys(r.detector for r in table.rows)
    for name, metric in itertools.product(names, ("em", "f1", "generations")):
        mean = macro_row(table, name, metric, sets)
        fields = dict(experiment="controller_macro", split="evaluated")
        yield msgspec.structs.replace(mean, **fields)


def finding_rows():
    """What families have before perplexity, and add to the others; and the layers."""
    pairs = (*FAMILY_PAIRS, ("layer:chosen", "layer:first"))
    for (name, against), setting, place in itertools.product(pairs, SETTINGS, PLACES):
        fields = dict(experiment="finding", against=against, p_value=0.2)
        noise = round(0.05 + 0.08 * wobble(name, against, setting, place), 6)
        yield row(name, setting, place, "auroc_difference", noise, **fields)


def with_pool(rows):
    """Add what one in-domain set gives for all of them."""
    pooled = (
        msgspec.structs.replace(r, dataset=IN_DOMAIN)
        for r in rows
        if r.split in ("validation", "test") and "controller" not in r.experiment
    )
    return [*rows, *pooled]


def sample_rows():
    """The rows, one of them undefined and one with failed examples."""
    rows = [
        *detection_rows(),
        *controller_rows(),
        *span_rows(),
        *answer_rows(),
        *paired_rows(),
    ]
    rows += finding_rows()
    rows += ablation_rows(row, PLACES)
    gone = row(
        "tfidf", "with_context", PLACES[3], "auroc", None, reason="one class only"
    )
    shaky = row(
        "perplexity", "closed_book", PLACES[1], "auroc", 0.8371, n=395, n_failed=3
    )
    changed = {r.where: r for r in (gone, shaky)}
    return with_pool([changed.get(r.where, r) for r in rows])


def judged():
    """Costs of three rivals that have rows."""
    kinds = {"perplexity": (0.0001, 0), "tfidf": (0.002, 0), "answer_length": (0.3, 2)}
    return [
        Judged(
            name=name,
            title=f"Rival {name}",
            setting=setting,
            source="a paper",
            variant=MARKUP,
            needs=("samples",) if n_forwards else (),
            is_trained=name == "tfidf",
            seconds=seconds,
            peak_bytes=2**30 if n_forwards else None,
            n_forwards=n_forwards,
            n_new_tokens=float(n_forwards),
            n_rows=100,
        )
        for setting in ("closed_book", "with_context")
        for name, (seconds, n_forwards) in kinds.items()
    ]


def sample_report(**changes):
    """The whole made-up run."""
    fields = dict(
        facts={
            "model": "microworld-6x192, 4.2M parameters",
            "seed": "0 (world), 0–2 (training)",
            "preset": "quick",
            "questions": "1,992 in 4 datasets",
            "answers": "5,976",
            "note": MARKUP,
        },
        stage_seconds={
            "world": 41.2,
            "answer": 22.9,
            "extract": 31.4,
            "train": 57.8,
            "select": 20.1,
            "control": 12.6,
        },
        rows=sample_rows(),
        accuracy=list(accuracy()),
        sweep=sweep(),
        selection=selection(),
        reliability=reliability(),
        control={"tau": 0.6, "budget": 3, "cap": 4.0, "frontier": list(frontier())},
        cases=cases(),
        shown=list(shown()),
        ranking=rankings(),
        ablations=ablations(),
        judged=judged(),
    )
    return ReportData(**(fields | changes))
