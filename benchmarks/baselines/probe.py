"""Linear probes: logistic regression on pooled signals, the floor of any encoder.

An encoder that reads the same signals and ranks answers worse than this, by more than
noise, is at fault. Of the answer span the mean, the least and the largest value of each
channel are read, of the question and the passages the mean.
"""

import numpy as np

from beatrice.benchmarks.baselines.linear import chosen_row, scores_of, standardise
from beatrice.extract.records import Setting
from beatrice.extract.run.rows import ResultRow
from beatrice.extract.store.store import FeatureStore, read_family
from beatrice.jaxprobe.features.families import ANSWER, SPANS
from beatrice.jaxprobe.features.reading import mean_answer_states
from beatrice.jaxprobe.features.rows import Rows
from beatrice.jaxprobe.features.subsets import FAMILIES, LETTERS


def pooled_signals(
    store: FeatureStore,
    setting: Setting,
    family: str,
    layer: int | None,
    most_bytes: int = 1 << 26,
) -> np.ndarray:
    """Return what a probe reads of one family of every row.

    The store is read in parts: what is in memory is the pooled signals alone.

    Args:
      store: an extracted setting.
      setting: decides which spans are read.
      family: one of `FAMILIES`.
      layer: of the hidden family; None for the others.
      most_bytes: of the family's tokens in memory together, as float32.

    Returns:
      `[n_rows, n_parts * width]` float32: mean, least and largest of the answer, then
      the mean of each other span that the store keeps; zeros where a span is empty.
    """
    spec = store.spec
    is_whole = spec.families[family].spans == "all"
    others = [s for s in SPANS[setting] if s != ANSWER] if is_whole else []
    shape = spec.families[family].shape[0 if layer is None else 1 :]
    width = int(np.prod(shape))
    pooled = np.zeros((len(spec.keys), 3 + len(others), width), np.float32)
    first_rows = spec.family_offsets(family)[:-1]
    part = first_rows // max(1, most_bytes // (4 * width))
    for chunk in np.split(np.arange(len(part)), np.flatnonzero(np.diff(part)) + 1):
        ragged = read_family(store, family, chunk, layer=layer)
        for i, row in enumerate(chunk):
            tokens = ragged.example(i).reshape(-1, width).astype(np.float32)
            spans = spec.spans[row] - ragged.first_tokens[i]
            for place, span in enumerate((ANSWER, *others)):
                own = tokens[slice(*spans[span])]
                if not len(own):
                    continue
                if span == ANSWER:
                    pooled[row, :3] = own.mean(axis=0), own.min(axis=0), own.max(axis=0)
                else:
                    pooled[row, 2 + place] = own.mean(axis=0)
    return pooled.reshape(len(pooled), -1)


def probe_scores(
    store: FeatureStore, rows: Rows, layer: int
) -> tuple[dict[str, np.ndarray], list[ResultRow]]:
    """Return the scores of a linear probe on each family, and on all four.

    Args:
      store: an extracted setting.
      rows: what its rows are.
      layer: from which the hidden states are read.

    Returns:
      `[1, n_rows]` by name: "probe:H" and so on, and "probe:HPRA", one regression on
      the four families side by side; and rows of the penalties that validation chose.
      Every family has the same variance there, whatever its width, so that five
      probabilities count beside thousands of hidden states: validation AUROC in the
      demo .920 closed-book and .805 with context, without it .915 and .796, of the sum
      of the four scores .826 and .781.

    Raises:
      ValueError: training or validation rows hold one class only.
    """
    families: dict[str, np.ndarray] = {}
    for family, letter in zip(FAMILIES, LETTERS, strict=True):
        at = layer if family == "hidden" else None
        families[letter] = pooled_signals(store, rows.setting, family, at)
        standardise(families[letter], rows.where("train"))
    scores, chosen = {}, []
    for letters in (*LETTERS, LETTERS):
        features = np.concatenate([families[x] for x in letters], axis=1)
        name = f"probe:{letters}"
        scores[name], inverse_penalty = scores_of(features, rows)
        chosen.append(chosen_row(rows, name, "inverse_penalty", inverse_penalty))
    return scores, chosen


def layer_scores(store: FeatureStore, rows: Rows, layer: int) -> np.ndarray:
    """Return the scores of a probe on the mean hidden state of the answer.

    Args:
      store: an extracted setting.
      rows: what its rows are.
      layer: from which the states are read (0 is the embedding).

    Returns:
      `[1, n_rows]` log-odds.
    """
    states = mean_answer_states(store, np.arange(len(rows.ids)), layer)
    standardise(states, rows.where("train"))
    return scores_of(states, rows)[0]
