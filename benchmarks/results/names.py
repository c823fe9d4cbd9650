"""Printed names of what rows measure, by stable id, in table order; compared pairs.

Ids never change and are never split; only titles are printed. The titles of controllers
are in `beatrice.pgir.controllers`.
"""

from beatrice.extract.run.rows import Subject, encoder

SETTING_LABELS = {
    "closed_book": "Closed-book",
    "with_context": "With context",
    "both": "Both settings",
}
SPLIT_LABELS = {
    "train": "training",
    "validation": "validation",
    "test": "test",
    "ood": "held out",
    "evaluated": "mean of sets",
    "annotated": "annotated by a person",
}
FAMILIES = {
    "H": "hidden states",
    "P": "probabilities",
    "R": "residual stream",
    "A": "attention",
}
EVERY_FAMILY = "HPRA"
N_SHOWN = 3  # answers shown per kind and set
RETRIEVED = "real_retrieval"  # the experiment of the rows of `transfer`
ALL_SETS = "all_sets"  # in `transfer`: all sets pooled, the paper's column "All"


def probe(families: str) -> Subject:
    """Return the id of the linear probe on the given families."""
    return Subject("probe", families)


CHAMPION = Subject("champion")
HIDDEN_ONLY = Subject("hidden_only")
EARLY_FUSION = Subject("early_fusion")
PERPLEXITY = Subject("perplexity")
LAYER_PROBES = tuple(map(Subject, ("chosen_layer", "first_layer", "last_layer")))
PROBES = {
    **{probe(letter): f"Linear probe on {name}" for letter, name in FAMILIES.items()},
    probe("R"): "Linear probe on the residual stream",
    probe(EVERY_FAMILY): "Linear probe on all families",
}
DETECTORS = {
    CHAMPION: "BEATRICE (selected encoders)",
    Subject("without_closed_book"): "BEATRICE, with-context pass only",
    HIDDEN_ONLY: "Hidden states only",
    EARLY_FUSION: "One encoder, all families",
    Subject("late_fusion_singles"): "Late fusion, single families",
    Subject("late_fusion_all"): "Late fusion, all encoders",
    Subject("tfidf"): "Text only (TF-IDF)",
    PERPLEXITY: "Answer perplexity",
    Subject("answer_length"): "Answer length",
    Subject("majority"): "Majority class",
    **PROBES,
}
# Detectors that the page shows first; the others are folded away.
MAIN = (
    CHAMPION,
    HIDDEN_ONLY,
    probe(EVERY_FAMILY),
    PERPLEXITY,
    Subject("tfidf"),
)
# Detectors that the selected encoders are compared with in paired differences.
COMPARED = {
    PERPLEXITY: DETECTORS[PERPLEXITY],
    HIDDEN_ONLY: DETECTORS[HIDDEN_ONLY],
    encoder("P"): "Probabilities only",
    encoder("R"): "Residual stream only",
    encoder("A"): "Attention only",
    EARLY_FUSION: DETECTORS[EARLY_FUSION],
    Subject("tfidf"): DETECTORS[Subject("tfidf")],
    Subject("answer_length"): DETECTORS[Subject("answer_length")],
    **PROBES,
}
# Each encoder is compared with the linear probe that reads the same signals.
FLOORS = {
    **{encoder(letter): probe(letter) for letter in FAMILIES},
    EARLY_FUSION: probe(EVERY_FAMILY),
}
# Pairs that show a family's lead over perplexity, and what it adds to the other three.
FAMILY_PAIRS = (
    *((encoder(family), PERPLEXITY) for family in FAMILIES),
    *((EARLY_FUSION, encoder(others)) for others in ("PRA", "HRA", "HPA", "HPR")),
)
# Also measured among answers of equal token count; the first is compared with the rest.
AT_EQUAL_LENGTH = {CHAMPION: DETECTORS[CHAMPION], **COMPARED}
CONTROLS = {Subject("permuted_labels"): "Trained on permuted labels"}
# The seven variants of the paper's ablation table, in its order.
WITHOUT_HIDDEN = Subject("without_family", "PRA")
FEATURES = {
    HIDDEN_ONLY: "Hidden states only",
    WITHOUT_HIDDEN: "Without hidden states",
    EARLY_FUSION: "Early fusion: one encoder, all families",
    Subject("late_fusion_singles"): "Late fusion: single families",
    Subject("late_fusion_all"): "Late fusion: all encoders (not ranked)",
    Subject("without_closed_book"): "Without closed-book encoders",
    CHAMPION: "Full: the selected encoders",
}
REFERENCE = Subject("late_fusion_all")  # where fusion saturates; unranked in the paper
FAMILY_VARIANTS = {
    WITHOUT_HIDDEN: "Without hidden states",
    Subject("without_family", "HRA"): "Without probabilities",
    Subject("without_family", "HPA"): "Without residual stream",
    Subject("without_family", "HPR"): "Without attention",
    CHAMPION: "Full: all four families",
}
_WAYS = {"zeroed_span": "zeroed in training", "without_span": "left out throughout"}
SPANS = ("context", "question", "answer")
_WITH_HEAD = {
    CHAMPION: "None: all spans",
    **{
        Subject(way, span=span): f"{span.capitalize()}, {words}"
        for way, words in _WAYS.items()
        for span in SPANS
    },
}
# A head reads the answer span's vector, so variants without a head are measured too.
SPAN_VARIANTS = {
    **_WITH_HEAD,
    **{
        subject._replace(kind="encoders"): f"{title} · no head"
        for subject, title in _WITH_HEAD.items()
    },
}
RANKED = {
    Subject("best_three"): "Best of all sets of three",
    Subject("greedy_three"): "Greedy search after three rounds",
}
FUSION_VARIANTS = {
    subject: DETECTORS.get(subject, "Search without hidden states")
    for subject in FEATURES
    if subject != CHAMPION
}
# Detectors of `beatrice anatomy` that are trained on fewer labels, in figure order.
LEARNERS = {
    **{encoder(letter): name for letter, name in FAMILIES.items()},
    Subject("selected"): "selected encoders",
    encoder(EVERY_FAMILY): "encoder of all four",
    probe(EVERY_FAMILY): "regression on all four",
}
# What a controller spends on a question: the metric of its rows, and the unit.
COSTS = {
    "generations": "per question",
    "sequences": "texts written",
    "tokens": "read and written",
    "retrievals": "per question",
    "forwards": "over given text",
    "seconds": "this machine, signals read for all",
}


def family_name(families: str, setting: str) -> str:
    """Return an encoder's printed name: [HP] if it reads the passages, else (HP)."""
    return f"({families})" if setting == "closed_book" else f"[{families}]"
