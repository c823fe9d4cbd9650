"""Answer perplexity: how likely the model found its own answer."""

import numpy as np

from beatrice.extract.store.store import FeatureStore, read_family

SURPRISAL = 1  # column of a prob row: p(v), -log p(v), entropy, top p, margin


def perplexity_score(prob_rows: np.ndarray, answer_span: tuple[int, int]) -> float:
    """Return minus the mean surprisal of the answer, in nats; at most 0.

    This is the logarithm of the inverse perplexity, so higher means more likely
    correct. An answer without a token has an empty literal span; it is read where it
    was given, at the last prompt token, which emitted the end.

    Args:
      prob_rows: `[n_tokens, 5]`, the prob family of one example, any float dtype.
      answer_span: absolute `[start, stop)` into those rows.

    Raises:
      ValueError: the span is not inside the rows.
    """
    start, stop = answer_span
    if not 0 <= start <= stop <= len(prob_rows) or stop == 0:
        raise ValueError(
            f"answer span [{start}, {stop}) is outside the {len(prob_rows)} tokens of "
            "this example"
        )
    start = min(start, stop - 1)
    surprisal = np.asarray(prob_rows[start:stop, SURPRISAL], dtype=np.float64)
    return -float(surprisal.mean())


def perplexity_scores(store: FeatureStore) -> np.ndarray:
    """Return the score of every row of a store, `[1, n_rows]`."""
    ragged = read_family(store, "prob")
    spans = (store.spec.spans[:, 2] - ragged.first_tokens[:, None]).tolist()
    return np.array(
        [[perplexity_score(ragged.example(i), span) for i, span in enumerate(spans)]]
    )
