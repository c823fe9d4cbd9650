"""P(True): the backbone is asked whether its own answer is true."""

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.internal.choice import reading


def p_true(evidence: Evidence) -> Found:
    """Return the probability of the option "A) True".

    NaN where the question cannot be put: the tokenizer has no single token for the
    option, or the prompt is longer than the window.

    Raises:
      ValueError: it was not read.
    """
    return Found(reading(evidence, "p_true", 1)[None])


P_TRUE = Detector(
    name="p_true",
    title="P(True)",
    source="Kadavath et al. (2022), section 3; jlko/semantic_uncertainty a8d9aa8, "
    "p_true.py",
    score=p_true,
    needs=frozenset({"second_prompt"}),
    reads=("p_true",),
    variant="without the 20 worked examples, which are labelled answers to other "
    "questions; the brainstormed ideas are the drawn answers where there are any",
)
DETECTORS = (P_TRUE,)
