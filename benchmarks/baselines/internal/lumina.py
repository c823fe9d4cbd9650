"""LUMINA: what the model adds by itself against what the passages change, untrained."""

from functools import partial

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.internal.choice import reading

_LAMBDA = 0.5  # of the paper, for every model; the two are not scaled


def lumina(evidence: Evidence, *, rate: str | None, discrepancy: bool) -> Found:
    """Return LUMINA's score, or one of its two halves alone.

    Args:
      evidence: with the readings.
      rate: the reading of the processing rate that counts, or None; a high one means
        that the answer comes from the model's own knowledge.
      discrepancy: whether the discrepancy counts; a high one means that the passages
        decided the answer.

    Raises:
      ValueError: they were not read.
    """
    terms = []
    if rate is not None:
        terms.append(-_LAMBDA * reading(evidence, rate, 1))
    if discrepancy:
        terms.append((1 - _LAMBDA) * reading(evidence, "lumina_mmd", 1))
    return Found(sum(terms)[None])


_SOURCE = "Yeh et al. (2026), arXiv 2509.21875; deeplearning-wisc/LUMINA c43ff41"
_SWAP = (
    "the other passages are those of the next question of the set that shares no title "
    "with the own ones and whose passages hold no gold answer: the rule is unpublished"
)
_INNER = "the last layer is left out, as in the paper; the code norms its state twice"
# Detector: title, the reading of the rate, whether it reads the discrepancy, variant.
_KINDS = {
    "lumina": ("LUMINA", "lumina_ipr", True, _SWAP),
    "lumina:paper": (
        "LUMINA (paper's sum)",
        "lumina_ipr_inner",
        True,
        f"{_SWAP}; {_INNER}",
    ),
    "lumina_mmd": ("LUMINA-MMD", None, True, _SWAP),
    "lumina_ipr": ("LUMINA-IPR", "lumina_ipr", False, ""),
    "lumina_ipr:paper": (
        "LUMINA-IPR (paper's sum)",
        "lumina_ipr_inner",
        False,
        _INNER,
    ),
}
DETECTORS = tuple(
    Detector(
        name=name,
        title=title,
        source=_SOURCE,
        score=partial(lumina, rate=rate, discrepancy=discrepancy),
        needs=frozenset({"swapped"} if discrepancy else ()),
        reads=(*((rate,) if rate else ()), *(("lumina_mmd",) if discrepancy else ())),
        variant=variant,
        settings=("with_context",),
    )
    for name, (title, rate, discrepancy, variant) in _KINDS.items()
)
