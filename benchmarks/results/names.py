"""Printed names of detectors, in the order of the tables, and which are compared."""

DETECTORS = {
    "champion": "BEATRICE (selected encoders)",
    "without_closed_book": "BEATRICE, with-context pass alone",
    "hidden_only": "Hidden states only",
    "early_fusion": "One encoder, all families",
    "late_fusion_singles": "Late fusion, single families",
    "late_fusion_all": "Late fusion, all encoders",
    "tfidf": "Text only (TF-IDF)",
    "perplexity": "Answer perplexity",
    "answer_length": "Answer length",
    "majority": "Majority class",
    "probe:H": "Linear probe on hidden states",
    "probe:P": "Linear probe on probabilities",
    "probe:R": "Linear probe on the residual stream",
    "probe:A": "Linear probe on attention",
    "probe:HPRA": "Linear probe on all families",
}
# What the selected encoders are compared with, question by question.
RIVALS = {
    "perplexity": DETECTORS["perplexity"],
    "hidden_only": DETECTORS["hidden_only"],
    "encoder:P": "Probabilities only",
    "encoder:R": "Residual stream only",
    "encoder:A": "Attention only",
    "early_fusion": DETECTORS["early_fusion"],
    "tfidf": DETECTORS["tfidf"],
    "answer_length": DETECTORS["answer_length"],
    **{name: title for name, title in DETECTORS.items() if name.startswith("probe:")},
}
# What each encoder is compared with: a linear probe that reads the same signals.
FLOORS = {
    "encoder:H": "probe:H",
    "encoder:P": "probe:P",
    "encoder:R": "probe:R",
    "encoder:A": "probe:A",
    "early_fusion": "probe:HPRA",
}
# What a family has alone before perplexity, and what it adds to the other three.
FAMILY_PAIRS = (
    *((f"encoder:{family}", "perplexity") for family in "HPRA"),
    *(("early_fusion", f"encoder:{others}") for others in ("PRA", "HRA", "HPA", "HPR")),
)
# What is measured among answers of equally many tokens too; the first against the rest.
AT_EQUAL_LENGTH = {"champion": DETECTORS["champion"], **RIVALS}
CONTROLS = {"permuted_labels": "Trained on permuted labels"}
SPAN_DECISIONS = {
    "emitting": "From the position that emits the answer",
    "literal": "Answer tokens only",
}
# Printed names of settings, splits and metrics.
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
