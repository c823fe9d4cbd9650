"""Small inputs with drawn answers, of a few records."""

import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorInput
from tests.benchmarks.rows import rows_of
from tests.records import a_sample, an_answer, an_example


def sample(text, log_probs=(-1.0, -0.5), token_ids=(7,), number=0, row=0):
    """One drawn answer of row `row`; by default a token and the stop token."""
    fields = dict(sample=number, token_ids=token_ids, log_probs=log_probs)
    return a_sample(text, example_id=f"q{row}", **fields)


def inputs(drawn, answers=None, labels=None, splits=None, **fields):
    """Return inputs of as many rows as `drawn`, whose items are texts or samples."""
    n = len(drawn)
    splits = ["train", *["test"] * (n - 1)] if splits is None else splits
    examples = [
        an_example(id=f"q{i}", split=splits[i], question=f"Q{i}?") for i in range(n)
    ]
    texts = ["Paris."] * n if answers is None else answers
    written = [an_answer(example_id=f"q{i}", text=texts[i]) for i in range(n)]
    samples = [
        sample(one, number=k, row=i)
        if isinstance(one, str)
        else sample(one.text, one.log_probs, one.token_ids, k, i)
        for i, row in enumerate(drawn)
        for k, one in enumerate(row)
    ]
    labels = np.ones(n, bool) if labels is None else labels
    rows = rows_of(labels, splits=splits)
    return DetectorInput.of(
        None, rows, questions=examples, answers=written, samples=samples, **fields
    )


def relations_by(rule):
    """Return a stand-in for an NLI model: `rule(premise, hypothesis)` gives P(...)."""
    return lambda pairs: np.array([rule(*pair) for pair in pairs]).reshape(-1, 3)


def by_last_word(premise, hypothesis):
    """Entailed where the last word is the same, else contradicted."""
    is_same = premise.split()[-1:] == hypothesis.split()[-1:]
    return (0.9, 0.08, 0.02) if is_same else (0.02, 0.08, 0.9)


def scores(detector, drawn):
    """Return the scores of the only or first seed."""
    return detector.score(drawn).scores[0]
