"""Fit a probe for one's own model in one step: answer, label, fit, measure.

Nothing is to be decided: a question is asked closed-book, its signals are read in the
pass that answers, the layer is the middle one, half of the answers is trained on, a
quarter calibrates and a quarter is held back and measures.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.records import Answer, Example
from beatrice.extract.run.console import Progress, in_words
from beatrice.jaxprobe.scope import LEAST_ANSWERS

_SHARES = {"train": 0.5, "validation": 0.25, "test": 0.25}
_TRIED = 10  # questions that are timed before the rest
# Right answers, and wrong ones, of which every part has enough.
ENOUGH = round(LEAST_ANSWERS / min(_SHARES.values()))


class Labelled(NamedTuple):
    """Answers with their signals and labels, and the part that each belongs to."""

    answers: Sequence[Answer]
    signals: Any
    labels: np.ndarray
    splits: np.ndarray


def read_labelled(path: Path) -> list[tuple[str, str, bool]]:
    """Return question, answer and label of each line of a file of JSON lines.

    Raises:
      ValueError: a line is no object with "question", "answer" and a true or false
        "label", or there is none.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            values = row["question"], row["answer"], row["label"]
        except (json.JSONDecodeError, KeyError, TypeError):
            values = (None, None, None)
        if [type(x) for x in values] != [str, str, bool]:
            raise ValueError(
                f'{path}, line {number}: expected {{"question": text, "answer": text, '
                f'"label": true or false}}, found {line[:60]!r}'
            )
        rows.append(values)
    if not rows:
        raise ValueError(f"{path} has no line; give answers with their labels")
    return rows


def split_answers(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return "train", "validation" or "test" of each answer, alike in right ones.

    Raises:
      ValueError: some part would lack right or wrong answers.
    """
    n_right, n = int(labels.sum()), len(labels)
    if min(n_right, n - n_right) < 4:
        raise ValueError(
            f"too few to fit: {n_right} right and {n - n_right} wrong answers; "
            f"{ENOUGH} of each would do"
        )
    rng, splits = np.random.default_rng(seed), np.full(n, "validation")
    for of_class in (np.flatnonzero(labels), np.flatnonzero(~labels)):
        where = rng.permutation(of_class)
        ends = np.ceil(np.cumsum([0.5, 0.25]) * len(where)).astype(int)
        splits[where[: ends[0]]], splits[where[ends[1] :]] = "train", "test"
    return splits


def answer_and_label(
    model: Any, questions: Sequence[Example], note: Callable[[str], None]
) -> Labelled:
    """Answer with signals in one pass, and label by exact match with the golds.

    A chat model sees worked examples of short answers, which a gold can match.
    """
    from beatrice.extract.generate.prompts import SHOTS
    from beatrice.extract.generate.requests import PromptConfig
    from beatrice.extract.label.labels import exact_match

    if model.prompt.chat:
        # In a chat SmolLM2 answers in sentences, of which 0 of 301 match a gold.
        model.prompt = PromptConfig(template="few-shot", shots=SHOTS)
    _forecast(lambda tried: model.answer(tried, read=True), questions, note)
    answers, signals = model.answer(questions, read=True)
    pairs = zip(answers, questions, strict=True)
    labels = np.array([exact_match(a.text, q.golds) for a, q in pairs])
    return Labelled(answers, signals, labels, split_answers(labels))


def _forecast(
    work: Callable[[Sequence[Any]], Any],
    items: Sequence[Any],
    note: Callable[[str], None],
) -> None:
    """Say how long work on all items will take, by the first of them."""
    tried = items[:_TRIED]
    work(tried[:1])  # what is done once is no measure of the rest
    began = time.monotonic()
    work(tried)
    seconds = (time.monotonic() - began) * len(items) / len(tried)
    note(
        f"{len(items)} answers with their signals: at most {in_words(seconds)} by the "
        f"first {len(tried)} (larger batches are faster), then a minute or two to fit"
    )


def read_given(
    model: Any, rows: Sequence[tuple[str, str, bool]], note: Callable[[str], None]
) -> Labelled:
    """Read the signals of answers that somebody has labelled."""
    from beatrice.pgir.given import AnswerToScore, answer_as_read

    tokenizer, template = model.backbone.tokenizer, model.prompt.prompt_template()
    answers = [
        answer_as_read(
            tokenizer,
            template,
            AnswerToScore(question=question, answer=answer),
            example_id=str(number),
        )[1]
        for number, (question, answer, _) in enumerate(rows)
    ]
    labels = np.array([label for *_, label in rows])
    splits = split_answers(labels)  # before anything is read
    _forecast(model.read, answers, note)
    return Labelled(answers, model.read(answers), labels, splits)


def worth_in_words(probe: Any, labelled: Labelled) -> list[str]:
    """Say what a probe is worth on the answers that were held back, a line each."""
    from beatrice.jaxprobe.metrics import auroc, auroc_interval
    from beatrice.pgir.controllers.adaptive import answer_log_probs

    where = labelled.splits == "test"
    labels, signals = labelled.labels[where], labelled.signals
    p_correct = probe.predict(signals[np.flatnonzero(where)])
    lengths = np.array([len(answer.token_ids) for answer in labelled.answers])
    order = {key: at for at, key in enumerate(signals.store.spec.keys)}
    at = [order[answer.key] for answer in labelled.answers]
    log_probs = answer_log_probs(signals.store)[at]
    lines = [f"{len(labels)} answers held back, {int(labels.sum())} of them right:"]
    for name, scores in (
        ("probe", p_correct),
        ("perplexity", log_probs[where]),
        ("length alone", -lengths[where].astype(float)),
    ):
        low, high = auroc_interval(scores, labels)
        value = auroc(scores, labels).value
        lines.append(f"  {name:<14}AUROC {value:.3f} [{low:.3f}, {high:.3f}]")
    report = probe.report.query("split == 'test' and metric == 'ece'")
    brier = ((p_correct - labels) ** 2).mean()
    base = labels.mean() * (1 - labels.mean())
    lines.append(
        f"  calibration   ECE {report['value'].item():.3f}, Brier score {brier:.3f} "
        f"(of the share of right answers alone {base:.3f})"
    )
    return lines


def check_folder(path: Path) -> None:
    """Check that a probe can be written, before hours are spent on it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already; give a new folder")


def fit_own(
    model: str,
    rows: Sequence[Any],
    folder: Path,
    *,
    is_labelled: bool,
    untrustworthy: bool,
    say: Callable[[str], None],
) -> None:
    """Answer and label questions, or read labelled answers; fit, measure and save.

    Args:
      model: a Hub id, a path, or a released model's name.
      rows: questions with golds, or of `read_labelled`.
      folder: of the probe.
      is_labelled: rows are labelled answers.
      untrustworthy: save a probe that rests on too few answers.
      say: called with each line of what the probe is worth.

    Raises:
      ValueError: the folder holds something else, no row can be used, or there are too
        few answers and not `untrustworthy`.
    """
    from beatrice.model import LanguageModel

    progress = Progress()
    language_model, began = LanguageModel(model), time.monotonic()
    if is_labelled:
        data = read_given(language_model, rows, progress.note)
    else:
        data = answer_and_label(language_model, rows, progress.note)
    answered = time.monotonic()
    from beatrice.fitting import fit as fit_probe

    probe = fit_probe(
        data.signals, data.labels.tolist(), splits=data.splits.tolist(), progress=False
    )
    say("\n".join(worth_in_words(probe, data)))
    took = [(b - a) / 60 for a, b in ((began, answered), (answered, time.monotonic()))]
    say(f"{took[0]:.1f} minutes to answer and read, {took[1]:.1f} to fit")
    n_right, n = int(data.labels.sum()), len(data.labels)
    doubts = probe.detector.doubts
    if doubts and not untrustworthy:
        share = min(n_right, n - n_right) / n
        raise ValueError(
            f"{doubts[0]}; of {n_right} right and {n - n_right} wrong answers in all, "
            f"{ENOUGH} of each would do, at this share {round(ENOUGH / share)} "
            "questions; nothing is saved (--untrustworthy saves it, and each of its "
            "scores says so)"
        )
    probe.save(folder, untrustworthy=untrustworthy)
    say(f"{folder}: load it with beatrice.load({str(folder)!r})")
