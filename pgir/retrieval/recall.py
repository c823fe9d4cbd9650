"""How well retrievers find: gold passages per set, and an index against Flat."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from beatrice.extract.records import Passage, normalise
from beatrice.pgir.retrieval.corpus import Gold

DEPTHS = (3, 5, 20)
# By (question set, measure): the mean at each depth; None of a set is its count.
Measured = dict[tuple[str, str], dict[int, float]]


def gold_recall(
    ranking: np.ndarray, golds: Sequence[int], depths: Sequence[int] = DEPTHS
) -> dict[int, float]:
    """Return the share of a question's gold passages among the first of a ranking.

    Args:
      ranking: `[n]` indices, best first.
      golds: at least one index.
      depths: how many count as the first.
    """
    return {
        depth: len(set(golds) & set(ranking[:depth].tolist())) / len(golds)
        for depth in depths
    }


def has_answer(
    ranking: np.ndarray,
    passages: Sequence[Passage],
    golds: Sequence[str],
    depths: Sequence[int] = DEPTHS,
) -> dict[int, float]:
    """Return 1 where one of the first passages contains a gold answer, else 0.

    Words of the normalised answer, in order, as whole words of the normalised passage
    (DPR's "has answer", under SQuAD's normalisation).
    """
    wanted = [f" {words} " for gold in golds if (words := normalise(gold))]

    def holds(place: int) -> bool:
        passage = passages[place]
        text = f" {normalise(f'{passage.title} {passage.text}')} "
        return any(words in text for words in wanted)

    held = [holds(int(place)) for place in ranking[: max(depths)]]
    return {depth: float(any(held[:depth])) for depth in depths}


def measure(
    found: np.ndarray, passages: Sequence[Passage], golds: Sequence[Gold]
) -> tuple[Measured, dict[str, int]]:
    """Return recall and has-answer per question set, and how many questions each has.

    Args:
      found: `[n_questions, n]` indices, best first.
      passages: what the indices mean.
      golds: the questions, with their gold passages.
    """
    sums: dict[tuple[str, str], collections.Counter[int]] = {}
    counts: collections.Counter[str] = collections.Counter()
    for gold, ranking in zip(golds, found, strict=True):
        counts[gold.dataset] += 1
        values = {
            "recall": gold_recall(ranking, gold.passages),
            "answer": has_answer(ranking, passages, gold.golds),
        }
        for name, own in values.items():
            total = sums.setdefault((gold.dataset, name), collections.Counter())
            for depth, value in own.items():
                total[depth] += value
    measured = {
        (dataset, name): {d: total[d] / counts[dataset] for d in DEPTHS}
        for (dataset, name), total in sums.items()
    }
    return measured, dict(counts)


def agreement(found: np.ndarray, exact: np.ndarray) -> dict[int, float]:
    """Return the share of the exact ranking's first passages that another one has.

    Args:
      found: `[n_queries, n]` of a lossy index.
      exact: `[n_queries, n]` of the flat one.
    """
    pairs = list(zip(found, exact, strict=True))
    return {
        depth: float(np.mean([gold_recall(a, b[:depth], (depth,))[depth]
                              for a, b in pairs]))
        for depth in DEPTHS
    }  # fmt: skip


def recall_table(measured: Mapping[str, Measured], counts: Mapping[str, int]) -> str:
    """Return a Markdown table: a line per set and retriever, recall then has-answer."""
    heads = [f"recall@{d}" for d in DEPTHS] + [f"answer@{d}" for d in DEPTHS]
    lines = ["| set | n | retriever | " + " | ".join(heads) + " |"]
    lines.append("|" + "---|" * (3 + len(heads)))
    for dataset, n in counts.items():
        for name, own in measured.items():
            values = [
                own[dataset, kind][depth]
                for kind in ("recall", "answer")
                for depth in DEPTHS
            ]
            cells = [dataset, f"{n:,}", name, *(f"{v:.3f}".lstrip("0") for v in values)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
