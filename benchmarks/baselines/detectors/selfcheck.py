"""SelfCheckGPT and EigenScore: agreement of sampled answers.

SelfCheckGPT (Manakul et al., EMNLP 2023), as in potsawee/selfcheckgpt (19b492a): the
two variants that need no second language model, NLI and unigrams, by sentence.

EigenScore, INSIDE (Chen et al., ICLR 2024), as in alibaba/eigenscore (ea8062a,
func/metric.py, `getEigenIndicator_v0`), with ten answers. It reads the state of each
answer's last token before the stop, at entry floor((n_layers + 1) / 2) of the resid
axis. The official code finds that token by ids above 2, which is correct only for
LLaMA-1/2 and OPT, and reads the prompt's first token for answers of one token. The
paper's feature clipping is not in its code, and not here.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.choice import reading
from beatrice.benchmarks.baselines.detectors.clustering import relations_by_row
from beatrice.extract.records import spaced
from beatrice.jaxprobe.tokens import mean_log_eigenvalue

# After a mark that ends a sentence, perhaps with a quote or bracket, but not after an
# initial or a title. No space follows the full stops of Chinese and Japanese.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?…؟۔।])|(?<=[.!?…؟۔।]["')\]”’»]))"""
    r"(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|vs)\.)(?<!\b(?:Mrs|Rev|Gen)\.)(?<!\bProf\.)"
    r"""\s+(?=["'(\[“‘«¿¡]*[A-Z\d])|\n|(?<=[。！？])(?![。！？」』”’）])"""
)
# A number, initials or a contraction after an apostrophe; else a word or a mark.
_TOKEN = re.compile(
    r"\d+(?:[.,]\d+)+|(?<!\w)[^\W\d]\.(?:[^\W\d]\.)*|['’](?:s|m|re|ve|ll|d)\b"
    r"|\w+|[^\w\s]"
)


def sentences_of(text: str) -> list[str]:
    """Return the stripped sentences of a text (the official code uses spaCy's)."""
    # Letters of other alphabets can start a sentence like "A", unless lower-case.
    latin = (
        "A" if not c.isascii() and c.isalpha() and not c.islower() else c for c in text
    )
    ends = (end.span() for end in _SENTENCE_END.finditer("".join(latin)))
    edges = [0, *itertools.chain.from_iterable(ends), len(text)]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    sentences = (text[start:stop].strip() for start, stop in pairs)
    return [sentence for sentence in sentences if sentence]


def tokens_of(text: str) -> list[str]:
    """Return the words and marks of a text, lower-cased.

    They agree with spaCy's English tokenizer, which would be another dependency, in all
    but 27 of 3,000 answers of Gemma 3 270M; sentences agree in all but one. See
    `spaced` for scripts without spaces.
    """
    return _TOKEN.findall(spaced(text.lower()))


def unigram_max(sentences: Sequence[str], samples: Sequence[str]) -> float:
    """Return the mean over sentences of their rarest token's surprisal, in nats.

    Token frequencies are counted over the answer and all samples, so no token of the
    answer is unknown (`SelfCheckNgram(n=1)`, "avg_max_neg_logprob"). Sentences without
    tokens (zero-width characters) are ignored. At least 0; NaN without any tokens.
    """
    tokens = [*filter(None, map(tokens_of, sentences))]
    drawn = map(tokens_of, samples)
    counts = collections.Counter(itertools.chain.from_iterable([*tokens, *drawn]))
    rarest = [min(counts[token] for token in sentence) for sentence in tokens]
    if not rarest:
        return math.nan
    return math.log(counts.total()) - math.fsum(map(math.log, rarest)) / len(rarest)


def _contradictions(
    inputs: DetectorInput, pair_of: Callable[[str, str], tuple[str, str]]
) -> DetectorOutput:
    """Return minus the mean probability that samples contradict the answer, in [-1, 0].

    The probability is of contradiction against entailment, without neutral (eq. 9 of
    the paper); the mean is over samples, then sentences. The question is not read. NaN
    for rows without samples or with an empty answer.
    """
    rows = [
        [pair_of(x, s.text) for x in sentences_of(answer.text) for s in samples]
        for answer, samples in zip(inputs.known_answers, inputs.samples, strict=True)
    ]
    values = np.full(len(rows), np.nan)
    for i, relations in enumerate(relations_by_row(inputs, rows)):
        p_entailment, _, p_contradiction = relations.T
        with np.errstate(invalid="ignore"):  # 0 / 0 for a surely neutral pair
            p = p_contradiction / (p_entailment + p_contradiction)
        # Sentences have equally many samples, so the mean of means is the mean.
        if len(p):
            values[i] = -math.fsum(p) / len(p)
    return DetectorOutput(values[None])


_SELFCHECK = (
    "Manakul et al., EMNLP 2023, section 5.{}; potsawee/selfcheckgpt 19b492a, {}"
)


@baseline(
    "selfcheck_nli",
    title="SelfCheckGPT-NLI",
    source=_SELFCHECK.format(4, "SelfCheckNLI"),
    needs={"samples", "entailment"},
    variant="as many samples as the run has, not 20; a pattern splits sentences",
)
def selfcheck_nli(inputs: DetectorInput) -> DetectorOutput:
    """Score by contradiction, with a sentence as premise, as in the official code."""
    return _contradictions(inputs, lambda sentence, sample: (sentence, sample))


@baseline(
    "selfcheck_nli:paper",
    title="SelfCheckGPT-NLI (sample first)",
    source=_SELFCHECK.format(4, "SelfCheckNLI"),
    needs={"samples", "entailment"},
    variant="the sample is the premise and the sentence the hypothesis, as in the "
    "paper; otherwise as the other",
)
def selfcheck_nli_paper(inputs: DetectorInput) -> DetectorOutput:
    """Score by contradiction, with a sample as premise."""
    return _contradictions(inputs, lambda sentence, sample: (sample, sentence))


@baseline(
    "selfcheck_ngram",
    title="SelfCheckGPT-ngram",
    source=_SELFCHECK.format(3, "SelfCheckNgram, n=1, max"),
    needs={"samples"},
    variant="as many samples as the run has, not 20; words and sentences are split "
    "by patterns, not by spaCy",
)
def selfcheck_ngram(inputs: DetectorInput) -> DetectorOutput:
    """Return minus `unigram_max`; NaN without samples or for an empty answer."""
    values = [
        -unigram_max(sentences_of(answer.text), [sample.text for sample in samples])
        if samples
        else math.nan
        for answer, samples in zip(inputs.known_answers, inputs.samples, strict=True)
    ]
    return DetectorOutput(np.array([values]))


_RIDGE = 1e-3


def official_eigenscore(states: np.ndarray) -> float:
    """Return the mean log10 eigenvalue of the covariance, as in the official code.

    The paper (`mean_log_eigenvalue`) does not divide products by d_model - 1, so the
    same ridge weighs less: this changes the order of answers, and not only the scale.
    `states` is `[n_samples, d_model]`; each state is centred over its channels.
    """
    covariance = np.cov(states) + _RIDGE * np.eye(len(states))
    return float(np.linalg.slogdet(covariance)[1] / len(states)) / math.log(10)


def _eigenscores(
    inputs: DetectorInput, eigenscore: Callable[[np.ndarray], float]
) -> DetectorOutput:
    """Return minus the EigenScore of every row; NaN with fewer than two states."""
    values = []
    for states in reading(inputs, "sample_states", 3, dtype=None):
        states = states[~np.isnan(states).any(axis=1)].astype(np.float64)
        values.append(-eigenscore(states) if len(states) > 1 else math.nan)
    return DetectorOutput(np.array([values]))


_INSIDE = "Chen et al., ICLR 2024 (INSIDE), section 3.1; alibaba/eigenscore ea8062a"


@baseline(
    "eigenscore",
    title="EigenScore",
    source=_INSIDE,
    needs={"samples"},
    reads=("sample_states",),
    variant="answers are drawn as the pool's, at temperature 1, top-p .9 and top-k 50, "
    "not at .5, .99 and 10; the last token before the stop is read whatever its id",
)
def eigenscore_official(inputs: DetectorInput) -> DetectorOutput:
    """Score by the official code's formula."""
    return _eigenscores(inputs, official_eigenscore)


@baseline(
    "eigenscore:paper",
    title="EigenScore (paper's formula)",
    source=_INSIDE,
    needs={"samples"},
    reads=("sample_states",),
    variant="the covariance is not divided by d_model - 1 and the logarithm is "
    "natural, as in the paper; read as the other",
)
def eigenscore_paper(inputs: DetectorInput) -> DetectorOutput:
    """Score by the paper's formula."""
    return _eigenscores(inputs, mean_log_eigenvalue)
