"""Fit a probe for one's own model in one step: answer, label, fit, measure.

Nothing is to be decided: a question is asked closed-book, its signals are read in the
pass that answers, the layer is the middle one, half of the answers is trained on, a
quarter calibrates and a quarter is held back and measures.
"""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.backbone.names import locked
from beatrice.extract.records import Answer, Example
from beatrice.extract.run.console import Progress, in_words
from beatrice.extract.run.files import sha256_json
from beatrice.jaxprobe.scope import LEAST_ANSWERS

_SHARES = {"train": 0.5, "validation": 0.25, "test": 0.25}  # of the questions
_WORK = "signals-*"  # what is kept beside a probe until it is saved
_TRIED = 50  # questions that are answered first, timed and looked at
# Right answers, and wrong ones, of which every part has enough.
ENOUGH = round(LEAST_ANSWERS / min(_SHARES.values()))


class Labelled(NamedTuple):
    """Answers with their signals and labels, and the part that each belongs to."""

    questions: Sequence[str]  # of each answer
    answers: Sequence[Answer]
    signals: Any
    labels: np.ndarray
    splits: np.ndarray


def read_labelled(
    path: Path, note: Callable[[str], None]
) -> list[tuple[str, str, bool]]:
    """Return question, answer and label of each record of a file.

    Args:
      path: of JSON lines, or another kind of file that questions are read from.
      note: called with which fields are not read.
    """
    from beatrice.extract.datasets.rows import read_raw, recognise

    rows, unread = [], Counter[str]()
    for raw in read_raw(path, recognise(path)):
        row = {} if raw.value is None else raw.value
        values = row.get("question"), row.get("answer"), row.get("label")
        if [type(x) for x in values] != [str, str, bool]:
            raise ValueError(
                f'{path}, {raw.at}: expected {{"question": text, "answer": text, '
                f'"label": true or false}}, found {raw.problem or f"{row!r:.60}"}'
            )
        rows.append(values)
        unread.update(row.keys() - {"id", "question", "answer", "label"})
    if unread:
        names = ", ".join(f"{name!r} ({n})" for name, n in sorted(unread.items()))
        note(f"fields not read: {names}; every answer is taken as given from memory")
    return rows


def split_answers(labels: np.ndarray, questions: Sequence[str]) -> np.ndarray:
    """Return "train", "validation" or "test" of each answer.

    Answers to one question stay together: what is held back would else be seen. Parts
    are alike in questions that are mostly answered right.

    Args:
      labels: `[n_answers]` bool.
      questions: of each answer.
    """
    numbers: dict[str, int] = {}
    group = np.array([numbers.setdefault(text, len(numbers)) for text in questions])
    is_right = 2 * np.bincount(group, labels) >= np.bincount(group)
    rng, splits = np.random.default_rng(0), np.full(len(numbers), "validation")
    for of_kind in (np.flatnonzero(is_right), np.flatnonzero(~is_right)):
        where = rng.permutation(of_kind)
        *ends, _ = np.ceil(np.cumsum([*_SHARES.values()]) * len(where)).astype(int)
        for name, part in zip(_SHARES, np.split(where, ends), strict=True):
            splits[part] = name
    of_answers = splits[group]
    if len({*zip(of_answers.tolist(), labels.tolist(), strict=True)}) < 6:
        n_right = int(labels.sum())
        raise ValueError(
            f"too few to fit: {n_right} right and {len(labels) - n_right} wrong "
            f"answers to {len(numbers)} questions; {ENOUGH} of each would do"
        )
    return of_answers


def answer_and_label(
    model: Any, questions: Sequence[Example], work: Path, note: Callable[[str], None]
) -> Labelled:
    """Answer with signals in one pass, and label by exact match with the golds.

    A chat model sees worked examples of short answers, which a gold can match.

    Args:
      model: a `LanguageModel`.
      questions: with golds.
      work: a folder for answers and signals, where the same call continues.
      note: called with what takes how long, and with what looks wrong.
    """
    from beatrice.extract.generate.prompts import SHOTS, PromptConfig
    from beatrice.extract.label.labels import exact_match

    if model.prompt.chat:
        # In a chat SmolLM2 answers in sentences, of which 0 of 301 match a gold.
        model.prompt = PromptConfig(template="few-shot", shots=SHOTS)
    if not any(work.glob(_WORK)):
        tried = questions[:_TRIED]
        written = _forecast(lambda q: model.answer(q, read=True), questions, note)
        pairs = list(zip(written[0], tried, strict=True))
        labels = [exact_match(a.text, q.golds) for a, q in pairs]
        if len(set(labels)) == 1 and len(labels) > 1:
            note(_class_advice(pairs, labels[0]))
    digest = sha256_json([[q.id, q.question] for q in questions])  # others begin anew
    store = work / f"signals-{digest[:12]}"
    answers, signals = model.answer(questions, read=True, store=store)
    pairs = zip(answers, questions, strict=True)
    labels = np.array([exact_match(a.text, q.golds) for a, q in pairs])
    texts = [q.question for q in questions]
    return Labelled(texts, answers, signals, labels, split_answers(labels, texts))


def _forecast(
    work: Callable[[Sequence[Any]], Any],
    items: Sequence[Any],
    note: Callable[[str], None],
) -> Any:
    """Say how long work on all items will take, by the first; return their result."""
    tried = items[:_TRIED]
    work(tried[:1])  # what is done once is no measure of the rest
    began = time.monotonic()
    result = work(tried)
    seconds = (time.monotonic() - began) * len(items) / len(tried)
    note(
        f"{len(items)} answers with their signals: at most {in_words(seconds)} by the "
        f"first {len(tried)} (larger batches are faster), then a minute or two to fit"
    )
    return result


def _class_advice(pairs: Sequence[tuple[Answer, Example]], is_right: bool) -> str:
    """Return what to do where the first answers are all right, or all wrong."""
    if is_right:
        return (
            f"warning: all of the first {len(pairs)} answers are right; a probe needs "
            "wrong ones too: stop (Ctrl-C) and give harder questions, unless some are "
            "still to come"
        )
    shown = "; ".join(
        f"{q.question!r}: {a.text!r}, expected {q.golds[0]!r}" for a, q in pairs[:3]
    )
    return (
        f"warning: none of the first {len(pairs)} answers is right ({shown}). If these "
        "should count, stop (Ctrl-C): add what the model writes to the golds, or label "
        "the answers yourself and give them with --labelled; if they are wrong, give "
        "easier questions, unless some are still to come"
    )


def read_given(
    model: Any, rows: Sequence[tuple[str, str, bool]], note: Callable[[str], None]
) -> Labelled:
    """Read the signals of answers that somebody has labelled."""
    from beatrice.pgir.given import AnswerToScore, prepare

    tokenizer, template = model.backbone.tokenizer, model.prompt.prompt_template()
    answers = []
    for number, (question, answer, _) in enumerate(rows):
        given = AnswerToScore(question=question, answer=answer)
        prepared = prepare(tokenizer, template, given, example_id=str(number))
        answers.append(prepared.answer)
    labels, texts = np.array([row[2] for row in rows]), [row[0] for row in rows]
    splits = split_answers(labels, texts)
    _forecast(model.read, answers, note)
    return Labelled(texts, answers, model.read(answers), labels, splits)


def text_scores(labelled: Labelled) -> np.ndarray:
    """Return P(correct) of answers by the words of question and answer alone, `[n]`."""
    from beatrice.benchmarks.baselines.plain import fit_tfidf, joined_text

    pairs = zip(labelled.questions, labelled.answers, strict=True)
    texts = [joined_text(question, answer.text) for question, answer in pairs]
    rows = []
    for split in ("train", "validation"):
        where = np.flatnonzero(labelled.splits == split)
        rows += [[texts[i] for i in where], labelled.labels[where]]
    return fit_tfidf(*rows).predict_proba(texts)[:, 1]


def compare(probe: Any, labelled: Labelled) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare a probe with its baselines on the answers that were held back.

    Returns:
      Rows as `Probe.report` has them, of the baselines, and a line each for people.
    """
    from beatrice.jaxprobe.metrics import auroc, auroc_interval
    from beatrice.jaxprobe.tokens import answer_log_probs

    where = labelled.splits == "test"
    labels, signals = labelled.labels[where], labelled.signals
    p_correct = probe.predict(signals[np.flatnonzero(where)])
    lengths = np.array([len(answer.token_ids) for answer in labelled.answers])
    order = {key: at for at, key in enumerate(signals.store.spec.keys)}
    at = [order[answer.key] for answer in labelled.answers]
    log_probs = answer_log_probs(signals.store)[at]
    lines = [f"{len(labels)} answers held back, {int(labels.sum())} of them right:"]
    rows = []
    for name, scores in (
        ("probe", p_correct),
        ("perplexity", log_probs[where]),
        ("text alone", text_scores(labelled)[where]),
        ("length alone", -lengths[where].astype(float)),
    ):
        low, high = auroc_interval(scores, labels)
        value = auroc(scores, labels).value
        lines.append(f"  {name:<14}AUROC {value:.3f} [{low:.3f}, {high:.3f}]")
        row = {"head": "closed_book", "split": "test", "metric": f"auroc of {name}"}
        interval = {"value": value, "ci_low": low, "ci_high": high}
        rows.append({**row, **interval, "n": len(labels), "n_right": int(labels.sum())})
    metrics = {r["metric"]: r["value"] for r in probe.rows if r["split"] == "test"}
    base = labels.mean() * (1 - labels.mean())
    lines.append(
        f"  calibration   ECE {metrics['ece']:.3f}, Brier score {metrics['brier']:.3f} "
        f"(of the share of right answers alone {base:.3f})"
    )
    return rows[1:], lines


def examples_of(probe: Any, labelled: Labelled) -> list[dict[str, str]]:
    """Return some held-back answers that `Probe.save` can score, for a self-test."""
    from beatrice.probe import MOST_EXAMPLES

    where = np.flatnonzero(labelled.splits == "test")[: 4 * MOST_EXAMPLES]
    rows = [
        {"question": labelled.questions[i], "answer": labelled.answers[i].text}
        for i in where
    ]
    scores = probe.score_many(rows)
    pairs = zip(rows, scores, strict=True)
    return [row for row, score in pairs if score.p_correct is not None][:MOST_EXAMPLES]


def check_folder(path: Path) -> None:
    """Check that a probe can be written, before hours are spent on it."""
    from beatrice.probe import check_place

    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already; give a new folder")
    check_place(path)


def clear_work(work: Path) -> None:
    """Remove what a fit kept beside its probe; what a person put there stays."""
    for path in work.glob(_WORK):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        (work / ".lock").unlink()
        work.rmdir()


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
    """
    from beatrice.model import LanguageModel

    note, work = Progress().note, folder.with_name(f"{folder.name}.work")
    language_model, began = LanguageModel(model), time.monotonic()
    if is_labelled:
        data = read_given(language_model, rows, note)
        _fit_and_save(data, folder, began, untrustworthy, say)
        return
    with locked(work):
        check_folder(folder)  # another that was waited for may have written it
        data = answer_and_label(language_model, rows, work, note)
        _fit_and_save(data, folder, began, untrustworthy, say)
        clear_work(work)  # the probe is all that is needed


def _fit_and_save(
    data: Labelled,
    folder: Path,
    began: float,
    untrustworthy: bool,
    say: Callable[[str], None],
) -> None:
    """Fit a probe on labelled answers, which `began` to be read, measure and save."""
    answered = time.monotonic()
    from beatrice.fitting import fit as fit_probe

    probe = fit_probe(
        data.signals, data.labels.tolist(), splits=data.splits.tolist(), progress=False
    )
    baselines, lines = compare(probe, data)
    say("\n".join(lines))
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
    examples = examples_of(probe, data)
    probe = probe.with_report([*probe.rows, *baselines])
    probe.save(folder, examples=examples, untrustworthy=untrustworthy)
    say(f"{folder}: load it with beatrice.load({str(folder)!r})")
