"""Plain detectors: length, majority, TF-IDF and linear probes on pooled signals."""

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import Pipeline, make_pipeline

from beatrice.benchmarks.baselines.detector import DetectorInput
from beatrice.benchmarks.results import names
from beatrice.extract.records import IN_DOMAIN, Answer, Setting, split_words
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.extract.store.store import FeatureStore, read_family
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import ANSWER, FAMILIES, LETTERS, SPANS
from beatrice.jaxprobe.linear import fit_and_score, fit_linear
from beatrice.jaxprobe.metrics import BootstrapConfig, paired_strata
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.tokens import answer_log_probs


def linear_scores(
    blocks: Sequence[np.ndarray], rows: StoreRows
) -> tuple[np.ndarray, float]:
    """Fit a regression on a setting's training rows, and score all its rows.

    `blocks` are features `[n_rows, n_features]`, see `fit_and_score`. Returns
    `[1, n_rows]` log-odds, and the inverse penalty chosen on validation rows.
    """
    train, valid = rows.where("train"), rows.where("validation")
    scores, penalty = fit_and_score(blocks, rows.labels, train, valid)
    return scores[None], penalty


def chosen_row(
    rows: StoreRows,
    detector: Subject | str,
    metric: str,
    value: float,
    *,
    seed: str = "mean",
    split: str = "validation",
) -> ResultRow:
    """Return a result row on a detector's choice on validation rows."""
    return ResultRow(
        experiment="chosen",
        metric=metric,
        value=value,
        seed=seed,
        **Subject.of(detector)._asdict(),
        **rows.fields_of(IN_DOMAIN, split),
    )


def length_features(answers: Sequence[Answer]) -> np.ndarray:
    """Return four features of length for every answer, `[n_answers, 4]` float64.

    These are length, log(1 + length), whether the answer is empty, and whether it was
    cut, having reached the limit before it stopped. Length is in tokens, without the
    stop token. Training rows teach whether longer is better, and up to which length.
    """
    n_tokens = np.array([len(answer.token_ids) for answer in answers], float)
    is_empty = [not answer.text.strip() for answer in answers]
    was_cut = [answer.stop_id is None for answer in answers]
    return np.stack([n_tokens, np.log1p(n_tokens), is_empty, was_cut], axis=1)


def majority_scores(rows: StoreRows) -> np.ndarray:
    """Return the share of right training answers as every row's score, `[1, n_rows]`.

    A constant does not rank: its AUROC is one half, and its AUPRC is the share of wrong
    answers, the baseline for the AUPRC of other detectors.
    """
    share = rows.labels[rows.where("train")].mean()
    return np.full((1, len(rows.ids)), share)


def rows_at_equal_length(
    detectors: Sequence[DetectorScores],
    rows: StoreRows,
    n_tokens: np.ndarray,
    config: BootstrapConfig,
) -> list[ResultRow]:
    """Measure the detectors in `names.AT_EQUAL_LENGTH` among answers of equal length.

    The AUROC is over pairs of a right and a wrong answer of the same length, see
    `jaxprobe.metrics.stratified_auroc`; within terciles of length, length would still
    tell answers apart. A score that depends only on length has an AUROC of one half.

    `n_tokens` are the lengths of the answers, `[n_rows]`.

    Returns:
      Rows of the experiment "at_equal_length", with `n` the number of scored answers
      that have a counterpart of the other class; the first detector's gains over the
      others, as "at_equal_length_paired"; and for each set the share of labelled
      answers without a counterpart ("unmatched"), which do not count here.
    """
    experiment, (ours, *rivals) = "at_equal_length", names.AT_EQUAL_LENGTH
    measured = detection_rows(
        [x for x in detectors if x.subject in names.AT_EQUAL_LENGTH],
        rows,
        config,
        experiment,
        {f"{experiment}_paired": [(ours, rival) for rival in rivals]},
        strata=n_tokens,
    )
    is_scored = {x.subject: x.is_defined for x in detectors}

    def n_matched(where: np.ndarray, *subjects: Subject) -> int:
        for subject in subjects:
            where = where[is_scored[subject][where]]
        return sum(map(len, paired_strata(rows.labels[where], n_tokens[where])))

    unmatched = []
    for dataset, split in rows.evaluated_sets():
        where = rows.where(split, dataset)
        n = n_matched(where)
        row = ResultRow(
            experiment=experiment,
            detector="answers",
            metric="unmatched",
            value=1 - n / len(where) if len(where) else None,
            reason=None if len(where) else "no labelled example",
            **rows.fields_of(dataset, split),
        )
        unmatched.append(row)
    of_matched = []
    for row in measured:
        where, rival = rows.where(row.split, row.dataset), row.rival or row.subject
        n = n_matched(where, row.subject, rival)
        of_matched.append(msgspec.structs.replace(row, n=n))
    return [*of_matched, *unmatched]


def word_pairs() -> TfidfVectorizer:
    """Return an unfitted TF-IDF of words and pairs of adjacent words."""
    # Answers may be single letters or digits, which scikit-learn's default words omit.
    words = TfidfVectorizer(ngram_range=(1, 2), tokenizer=split_words)
    return words.set_params(token_pattern=None)  # avoids a warning that it is unused


def fit_tfidf(
    texts: Sequence[str],
    labels: Sequence[bool] | np.ndarray,
    valid_texts: Sequence[str],
    valid_labels: Sequence[bool] | np.ndarray,
) -> Pipeline:
    """Fit TF-IDF and a logistic regression; validation AUROC chooses the penalty.

    Texts are from `joined_text`. Words that are in no training text are ignored.
    """
    vectorizer = word_pairs()
    train = csr_matrix(vectorizer.fit_transform(texts))
    valid = csr_matrix(vectorizer.transform(valid_texts))
    regression = fit_linear(train, labels, valid, valid_labels)
    return make_pipeline(vectorizer, regression)


def text_scores(texts: Sequence[str], rows: StoreRows) -> tuple[np.ndarray, ResultRow]:
    """Return P(correct) from the rows' texts, `[1, n_rows]`, and the penalty's row."""
    train, valid = rows.where("train"), rows.where("validation")
    detector = fit_tfidf(
        [texts[int(i)] for i in train],
        rows.labels[train],
        [texts[int(i)] for i in valid],
        rows.labels[valid],
    )
    chosen = chosen_row(rows, "tfidf", "inverse_penalty", detector.steps[-1][1].C)
    return detector.predict_proba(texts)[:, 1][None], chosen


def pooled_signals(
    store: FeatureStore,
    setting: Setting,
    family: str,
    layer: int | None,
    most_bytes: int = 1 << 26,
) -> np.ndarray:
    """Return a probe's features from one family (for "hidden": one layer) of all rows.

    The store is read in chunks, so that memory holds the pooled signals and at most
    about `most_bytes` of tokens as float32.

    Returns:
      `[n_rows, n_parts * width]` float32: mean, minimum and maximum over the answer,
      then the mean of each other span in the store; zeros for empty spans.
    """
    spec = store.spec
    is_whole = spec.families[family].spans == "all"
    others = [s for s in SPANS[setting] if s != ANSWER] if is_whole else []
    shape = spec.families[family].shape[0 if layer is None else 1 :]
    width = int(np.prod(shape))
    pooled = np.zeros((len(spec.keys), 3 + len(others), width), np.float32)
    first_rows = spec.family_offsets(family)[:-1]
    chunk_ids = first_rows // max(1, most_bytes // (4 * width))
    for chunk in np.split(
        np.arange(len(chunk_ids)), np.flatnonzero(np.diff(chunk_ids)) + 1
    ):
        ragged = read_family(store, family, chunk, layer=layer)
        for i, row in enumerate(chunk):
            tokens = ragged.example(i).reshape(-1, width).astype(np.float32)
            spans = spec.spans[row] - ragged.first_tokens[i]
            x = tokens[slice(*spans[ANSWER])]
            if len(x):
                pooled[row, :3] = x.mean(axis=0), x.min(axis=0), x.max(axis=0)
            for column, span in enumerate(others, start=3):
                x = tokens[slice(*spans[span])]
                if len(x):
                    pooled[row, column] = x.mean(axis=0)
    return pooled.reshape(len(pooled), -1)


def probe_scores(
    store: FeatureStore, rows: StoreRows, layer: int
) -> tuple[dict[Subject, np.ndarray], list[ResultRow]]:
    """Return the scores of a linear probe on each family, and on all four together.

    With all four, families are scaled to equal variance whatever their width, so that
    five probabilities count as much as thousands of hidden states. In the demo, this
    has a validation AUROC of .920 closed-book and .805 with context; without scaling it
    is .915 and .796, and for the sum of the four scores .826 and .781.

    Returns scores `[1, n_rows]`, and rows of the penalties chosen on validation.
    """
    families: dict[str, np.ndarray] = {}
    for family, letter in zip(FAMILIES, LETTERS, strict=True):
        at = layer if family == "hidden" else None
        families[letter] = pooled_signals(store, rows.setting, family, at)
    scores, chosen = {}, []
    for letters in (*LETTERS, LETTERS):
        name = Subject("probe", letters)
        blocks = [families[letter] for letter in letters]
        scores[name], inverse_penalty = linear_scores(blocks, rows)
        chosen.append(chosen_row(rows, name, "inverse_penalty", inverse_penalty))
    return scores, chosen


def plain_scores(
    inputs: DetectorInput,
) -> tuple[dict[Subject, np.ndarray], list[ResultRow]]:
    """Return the scores of text, perplexity, length, majority and the linear probes.

    Returns scores `[1, n_rows]`, and rows of the penalties chosen on validation.
    """
    store, rows = inputs.store, inputs.rows
    tfidf, chosen = text_scores(inputs.texts, rows)
    probes, chosen_of_probes = probe_scores(store, rows, inputs.layer)
    scores = {
        Subject("tfidf"): tfidf,
        names.PERPLEXITY: answer_log_probs(store)[None],
        Subject("answer_length"): linear_scores(
            [length_features(inputs.answers)], rows
        )[0],
        Subject("majority"): majority_scores(rows),
        **probes,
    }
    return scores, [chosen, *chosen_of_probes]
