"""The made-up run's ablations and rankings: nothing measured, every cell filled."""

import itertools

from benchmarks.results.tables import FAMILY_VARIANTS, RANKED, SPAN_VARIANTS
from selection.ranking import traits

SETTINGS = ("closed_book", "with_context")
N_POOL = {"closed_book": 15, "with_context": 30}
N_SETS = {"closed_book": 455, "with_context": 4060}


def is_there(name, setting):
    return setting != "closed_book" or "context_span" not in name


def ablation_rows(row, places):
    """Rows of what `ablate` and `exhaustive` make; `row` makes one of them."""
    made = [name for name in (*FAMILY_VARIANTS, *SPAN_VARIANTS) if name != "champion"]
    for name, setting, place in itertools.product(made, SETTINGS, places):
        for metric in ("auroc", "auprc"):
            if is_there(name, setting):
                value = 0.7 + 0.01 * len(name) / 2
                yield row(name, setting, place, metric, value, experiment="ablation")
    for name, setting, place in itertools.product(RANKED, SETTINGS, places):
        for metric in ("auroc", "auprc"):
            yield row(name, setting, place, metric, 0.9, experiment="exhaustive")
    no_interval = dict(experiment="exhaustive", ci_low=None, ci_high=None)
    for setting in SETTINGS:
        found = {"rank": 7.0, "n_sets": float(N_SETS[setting]), "auroc_gap": 0.0012}
        for metric, value in found.items():
            yield row("greedy_three", setting, places[0], metric, value, **no_interval)


def rankings():
    """Per setting what the report shows of a ranking."""
    return {
        setting: {
            "n_sets": N_SETS[setting],
            "rank": 7,
            "gap": 0.0012,
            "greedy": ["(HP)", "(PR)", "(A)"],
            "best": ["(HP)", "(PR)", "(HRA)"],
            "means": [0.9 - 0.002 * i for i in range(80)],
            "ribbon": {
                name: [0.5 + 0.005 * i for i in range(80)]
                for name in traits(setting, N_POOL[setting])
            },
        }
        for setting in SETTINGS
    }


def ablations():
    """Per setting and variant the encoders that are read."""
    names = [*FAMILY_VARIANTS, *SPAN_VARIANTS]
    made = {
        setting: {
            name: ["(PR)", "(A)"]
            for name in names
            if name != "champion" and is_there(name, setting)
        }
        for setting in SETTINGS
    }
    made["with_context"]["without_closed_book"] = ["[PR]", "[A]"]
    return made
