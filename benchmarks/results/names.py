"""What rows measure, by stable id: printed names in the order of tables, and pairs.

Ids never change and are never split; titles are printed. Controllers have theirs in
`beatrice.pgir.controllers`.
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
METRIC_LABELS = {"auroc": "AUROC", "auprc": "AUPRC", "em": "EM", "f1": "F1"}
FAMILIES = {
    "H": "hidden states",
    "P": "probabilities",
    "R": "residual stream",
    "A": "attention",
}
EVERY_FAMILY = "HPRA"
N_SHOWN = 3  # answers of each kind of each set
RETRIEVED = "real_retrieval"  # experiment of the rows of `transfer`
ALL_SETS = "all_sets"  # its questions of all sets together, the paper's column "All"


def probe(families: str) -> Subject:
    """Return the linear probe of some families."""
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
    Subject("without_closed_book"): "BEATRICE, with-context pass alone",
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
# What the page shows at once; the other detectors are behind a fold.
MAIN = (
    CHAMPION,
    HIDDEN_ONLY,
    probe(EVERY_FAMILY),
    PERPLEXITY,
    Subject("tfidf"),
)
# What the selected encoders are compared with, question by question.
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
# What each encoder is compared with: a linear probe that reads the same signals.
FLOORS = {
    **{encoder(letter): probe(letter) for letter in FAMILIES},
    EARLY_FUSION: probe(EVERY_FAMILY),
}
# What a family has alone before perplexity, and what it adds to the other three.
FAMILY_PAIRS = (
    *((encoder(family), PERPLEXITY) for family in FAMILIES),
    *((EARLY_FUSION, encoder(others)) for others in ("PRA", "HRA", "HPA", "HPR")),
)
# What is measured among answers of equally many tokens too; the first against the rest.
AT_EQUAL_LENGTH = {CHAMPION: DETECTORS[CHAMPION], **COMPARED}
CONTROLS = {Subject("permuted_labels"): "Trained on permuted labels"}
SPAN_DECISIONS = {
    Subject("emitting"): "From the position that emits the answer",
    Subject("literal"): "Answer tokens only",
}
# The seven variants of the paper's table, in its order.
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
REFERENCE = Subject("late_fusion_all")  # where fusion saturates; the paper ranks it not
FAMILY_VARIANTS = {
    WITHOUT_HIDDEN: "Without hidden states",
    Subject("without_family", "HRA"): "Without probabilities",
    Subject("without_family", "HPA"): "Without residual stream",
    Subject("without_family", "HPR"): "Without attention",
    CHAMPION: "Full: all four families",
}
_WAYS = {"zeroed_span": "zeroed in training", "without_span": "left out of both"}
SPANS = ("context", "question", "answer")
_WITH_HEAD = {
    CHAMPION: "None: all spans",
    **{
        Subject(way, span=span): f"{span.capitalize()}, {words}"
        for way, words in _WAYS.items()
        for span in SPANS
    },
}
# A head reads the answer span's vector: what the encoders say without one.
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
# Of `beatrice anatomy`: who reads fewer labels, in the order of the figure.
LEARNERS = {
    **{encoder(letter): name for letter, name in FAMILIES.items()},
    Subject("selected"): "selected encoders",
    encoder(EVERY_FAMILY): "encoder of all four",
    probe(EVERY_FAMILY): "regression on all four",
}
# What a controller spends on a question, as its rows name it, and the unit.
COSTS = {
    "generations": "per question",
    "sequences": "texts written",
    "tokens": "read, written",
    "retrievals": "per question",
    "forwards": "over text",
    "seconds": "this machine, signals read for all",
}


def family_name(families: str, setting: str) -> str:
    """Return an encoder's printed name: [HP] reads the passages too, (HP) does not."""
    return f"({families})" if setting == "closed_book" else f"[{families}]"
