"""SelfCheckGPT: whether drawn answers bear out what the answer says, by sentence.

Manakul et al. (EMNLP 2023), as in potsawee/selfcheckgpt (19b492a): the two variants
that need no second language model, NLI and unigrams.
"""

import collections
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from functools import partial

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    Baseline,
    DetectorInput,
    DetectorOutput,
)
from beatrice.benchmarks.baselines.detectors.clustering import relations_of

# After a mark that ends a sentence, which may be followed by a quote or bracket; not
# after an initial or a title.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?…])|(?<=[.!?…]["')\]”’]))"""
    r"(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|vs)\.)(?<!\b(?:Mrs|Rev|Gen)\.)(?<!\bProf\.)"
    r"""\s+(?=["'(\[“‘]*[A-Z0-9])|\s*\n\s*"""
)
# A number, initials, what follows an apostrophe; else a word, or a single mark.
_TOKEN = re.compile(
    r"\d+(?:[.,]\d+)+|(?<!\w)[^\W\d]\.(?:[^\W\d]\.)*|['’](?:s|m|re|ve|ll|d)\b"
    r"|\w+|[^\w\s]"
)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, stripped; none of an empty one.

    The official code takes spaCy's; short answers are one sentence by both.
    """
    return [part for one in _SENTENCE_END.split(text) if (part := one.strip())]


def tokens_of(text: str) -> list[str]:
    """Return the words and marks of a text, lower-cased.

    Those of spaCy's English tokenizer, of which this spares the dependency, in all but
    27 of 3,000 answers of Gemma 3 270M; sentences were the same in all but one.
    """
    return _TOKEN.findall(unicodedata.normalize("NFC", text.lower()))


def unigram_max(sentences: Sequence[str], samples: Sequence[str]) -> float:
    """Return the mean over sentences of their rarest token's surprisal, in nats.

    Shares of tokens are counted over the answer and all samples together, so no token
    of the answer is unknown (`SelfCheckNgram(n=1)`, "avg_max_neg_logprob").

    Args:
      sentences: of the answer.
      samples: drawn answers.

    Returns:
      0 or more; NaN without a sentence.
    """
    own = [tokens_of(sentence) for sentence in sentences]
    drawn = map(tokens_of, samples)
    counts = collections.Counter(itertools.chain.from_iterable([*own, *drawn]))
    rarest = [min(counts[token] for token in one) for one in own]
    if not rarest:
        return math.nan
    return math.log(counts.total()) - math.fsum(map(math.log, rarest)) / len(rarest)


def unigram_scores(inputs: DetectorInput) -> DetectorOutput:
    """Return minus the surprisal of every row.

    NaN where nothing was drawn or the answer is empty.
    """
    rows = zip(inputs.answers, inputs.samples, strict=True)
    values = [
        -unigram_max(sentences_of(answer.text), [sample.text for sample in samples])
        if samples
        else math.nan
        for answer, samples in rows
    ]
    return DetectorOutput(np.array([values]))


def contradiction_scores(
    inputs: DetectorInput, *, sentence_first: bool
) -> DetectorOutput:
    """Return minus the mean probability that samples contradict the answer.

    The probability is that of contradiction against entailment, neutral left out (eq. 9
    of the paper); the mean is over samples, then over sentences. The question is not
    read.

    Args:
      inputs: with an NLI model.
      sentence_first: a sentence is the premise, as in the official code; in the paper
        the sample is.

    Returns:
      In [-1, 0]; NaN where nothing was drawn or the answer is empty.

    Raises:
      ValueError: there is no NLI model.
    """
    relations = relations_of(inputs)
    rows = [
        [
            (sentence, sample.text) if sentence_first else (sample.text, sentence)
            for sentence in sentences_of(answer.text)
            for sample in samples
        ]
        for answer, samples in zip(inputs.answers, inputs.samples, strict=True)
    ]
    pairs = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    p_contradicted = {}
    if pairs:
        p_entailment, _, p_contradiction = relations(pairs).T
        with np.errstate(invalid="ignore"):  # 0 / 0 of a pair that is surely neutral
            p = p_contradiction / (p_entailment + p_contradiction)
        p_contradicted = dict(zip(pairs, p.tolist(), strict=True))
    # Every sentence has as many samples: the mean of means is the mean of all.
    values = [
        -math.fsum(map(p_contradicted.get, row)) / len(row) if row else math.nan
        for row in rows
    ]
    return DetectorOutput(np.array([values]))


_SELFCHECK = (
    "Manakul et al., EMNLP 2023, section 5.{}; potsawee/selfcheckgpt 19b492a, {}"
)

_ONE = (
    Baseline(
        name="selfcheck_nli",
        title="SelfCheckGPT-NLI",
        source=_SELFCHECK.format(4, "SelfCheckNLI"),
        score=partial(contradiction_scores, sentence_first=True),
        needs=frozenset({"samples", "entailment"}),
        variant="as many samples as the run has, not 20; a pattern splits sentences",
    ),
    Baseline(
        name="selfcheck_nli:paper",
        title="SelfCheckGPT-NLI (sample first)",
        source=_SELFCHECK.format(4, "SelfCheckNLI"),
        score=partial(contradiction_scores, sentence_first=False),
        needs=frozenset({"samples", "entailment"}),
        variant="the sample is the premise and the sentence the hypothesis, as in the "
        "paper; otherwise as the other",
    ),
    Baseline(
        name="selfcheck_ngram",
        title="SelfCheckGPT-ngram",
        source=_SELFCHECK.format(3, "SelfCheckNgram, n=1, max"),
        score=unigram_scores,
        needs=frozenset({"samples"}),
        variant="as many samples as the run has, not 20; words and sentences are split "
        "by patterns, not by spaCy",
    ),
)


SAMPLE_STATES = "sample_states"  # the reading, `[n_rows, n_samples, d_model]`
_RIDGE = 1e-3


def official_eigenscore(states: np.ndarray, ridge: float = _RIDGE) -> float:
    """Return the mean log10 eigenvalue of the covariance, as the code has it.

    Args:
      states: `[n_samples, d_model]`, one per answer; each is centred over its channels.
      ridge: added to the diagonal, alpha of the paper.
    """
    return _mean_log_eigenvalue(np.cov(states), ridge) / math.log(10)


def paper_eigenscore(states: np.ndarray, ridge: float = _RIDGE) -> float:
    """Return the mean natural log eigenvalue, as the paper has it (eq. 6).

    The products are not divided by d_model - 1, beside which the same ridge weighs
    less: that changes the order of answers, and not their scale alone.

    Args:
      states: `[n_samples, d_model]`, one per answer.
      ridge: alpha of the paper.
    """
    centred = states - states.mean(axis=1, keepdims=True)
    return _mean_log_eigenvalue(centred @ centred.T, ridge)


def _mean_log_eigenvalue(gram: np.ndarray, ridge: float) -> float:
    """Return it by the log-determinant, which is positive with a ridge."""
    return float(np.linalg.slogdet(gram + ridge * np.eye(len(gram)))[1] / len(gram))


def eigen_scores(inputs: DetectorInput, *, is_official: bool) -> DetectorOutput:
    """Return minus the score of every row.

    Answers whose state was not read (NaN) are left out; where fewer than two are left,
    nothing lies apart and the score is NaN.

    Raises:
      ValueError: the states were not read, or not for these rows.
    """
    states = inputs.readings.get(SAMPLE_STATES)
    n_rows = len(inputs.rows.ids)
    if states is None or states.ndim != 3 or len(states) != n_rows:
        found = "missing" if states is None else list(states.shape)
        raise ValueError(
            f"the reading {SAMPLE_STATES!r} is {found}, expected [{n_rows}, n_samples, "
            "d_model]; read the states of the drawn answers first"
        )
    measure = official_eigenscore if is_official else paper_eigenscore
    values = []
    for row in states:
        own = row[~np.isnan(row).any(axis=1)].astype(np.float64)
        values.append(-measure(own) if len(own) > 1 else math.nan)
    return DetectorOutput(np.array([values]))


_INSIDE = "Chen et al., ICLR 2024 (INSIDE), section 3.1; alibaba/eigenscore ea8062a"

_TWO = (
    Baseline(
        name="eigenscore",
        title="EigenScore",
        source=_INSIDE,
        score=partial(eigen_scores, is_official=True),
        needs=frozenset({"samples"}),
        reads=("sample_states",),
        variant="answers are drawn at the pool's temperature, not 0.5; the last token "
        "before the stop is read whatever its id",
    ),
    Baseline(
        name="eigenscore:paper",
        title="EigenScore (paper's formula)",
        source=_INSIDE,
        score=partial(eigen_scores, is_official=False),
        needs=frozenset({"samples"}),
        reads=("sample_states",),
        variant="the covariance is not divided by d_model - 1 and the logarithm is "
        "natural, as in the paper; read as the other",
    ),
)
DETECTORS = (*_ONE, *_TWO)
