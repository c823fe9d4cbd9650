"""Fit a probe for one's own model in one step: answer, label, fit, measure.

Every question is asked from memory, and again with its passages if it has any. Signals
are read at the middle layer in the passes that write the answers. Half of the questions
is for training, a quarter for calibration, and a quarter is held out for testing.
"""

import contextlib
import dataclasses
import importlib
import itertools
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beatrice.extract.backbone.names import locked_folder
from beatrice.extract.datasets.fields import MISSING, check_no_passages, required
from beatrice.extract.datasets.rows import read_raw, recognise
from beatrice.extract.generate.templates import SHOTS, PromptConfig, Shot, Words
from beatrice.extract.label.labels import exact_match
from beatrice.extract.records import (
    SETTINGS,
    Answer,
    Example,
    Passage,
    Setting,
    text_key,
)
from beatrice.extract.run.console import Progress, in_words
from beatrice.extract.run.files import sha256_json
from beatrice.jaxprobe.detector import OWN_PASS_HEADS
from beatrice.jaxprobe.scope import LEAST_ANSWERS, Thresholds, n_of_classes
from beatrice.pgir.arguments import is_missing
from beatrice.pgir.given import AnswerToScore
from beatrice.pgir.score_files import record_context
from beatrice.probe import MOST_EXAMPLES, check_place

_SHARES = {"train": 0.5, "validation": 0.25, "test": 0.25}  # of the questions
_WORK = "signals-*"  # kept next to the probe's folder until the probe is saved
_TRIED = 50  # questions answered first, to estimate the time and check the labels
# So many right, and so many wrong answers give every split enough.
ENOUGH = round(LEAST_ANSWERS / min(_SHARES.values()))


class LabelledSignals(NamedTuple):
    """Answers in one setting with their signals, labels and splits."""

    questions: Sequence[str]  # of each answer
    contexts: Sequence[Sequence[Passage]]  # of each answer; empty for closed-book
    answers: Sequence[Answer]
    signals: Any
    labels: np.ndarray
    splits: np.ndarray = np.array([])  # "train", "validation" or "test" of each answer


Parts = dict[Setting, LabelledSignals]
IN_WORDS = {"closed_book": "from memory", "with_context": "with passages"}


def read_labelled(
    path: Path, note: Callable[[str], None]
) -> list[tuple[AnswerToScore, bool, str]]:
    """Return a file's answers, labels and places, leaving out unlabelled answers.

    The file has any format that questions are read from. `note` is called with the
    numbers of answers without a label or with both, and with the fields that are
    ignored.
    """
    rows, n_unlabelled, unread = [], 0, Counter[str]()
    for raw in read_raw(path, recognise(path)):
        try:
            if raw.value is None:
                raise ValueError(raw.problem or "no record")
            row, why = raw.value, "; expected 'question', 'answer' and 'label'"
            if "correct" in row and "label" not in row:
                why += "; rename 'correct' to 'label' if that is what it says"
            question = required(row, "question", str, why=why)
            answer = required(row, "answer", str, why=why)
            label = _as_label(required(row, "label", object, why=why))
            field, context = record_context(row)
            if field is None:
                check_no_passages(row)
            given = AnswerToScore(question=question, answer=answer, context=context)
        except ValueError as error:
            raise ValueError(f"{path}, {raw.at}: {error}") from None
        if label is None:
            n_unlabelled += 1
            continue
        rows.append((given, label, f"{path}, {raw.at}"))
        known_fields = {"id", "question", "answer", "label", field}
        unread.update(row.keys() - known_fields)
    if not rows:
        raise ValueError(
            f"{path}: expected labelled answers, found only answers without a label "
            f"({n_unlabelled}); label some"
        )
    if n_unlabelled:
        n = n_unlabelled + len(rows)
        note(f"answers without a label, left out: {n_unlabelled} of {n}")
    labels: dict[Any, set[bool]] = {}
    for given, label, _ in rows:
        same = given.question, given.answer, given.context
        labels.setdefault(same, set()).add(label)
    if n_both := sum(len(x) > 1 for x in labels.values()):
        note(f"answers labelled both right and wrong, with both labels used: {n_both}")
    if unread:
        names = ", ".join(f"{name!r} ({n})" for name, n in sorted(unread.items()))
        note(f"fields not read: {names}")
    return rows


def _as_label(value: Any) -> bool | None:
    """Return a label from its spelling in a file; None if it is missing."""
    text = str(value).strip()
    if is_missing(value) or text in ("", *MISSING):
        return None
    # If labels are missing, pandas turns 1 into 1.0.
    if text.lower() in ("true", "1", "1.0"):
        return True
    if text.lower() in ("false", "0", "0.0"):
        return False
    raise ValueError(
        f"'label': expected true or false (or 1 or 0), found {value!r:.40}"
    )


def question_names(questions: Iterable[str]) -> list[str]:
    """Return names that ignore case, punctuation and articles of questions."""
    return [text_key(question).hex() for question in questions]


def split_answers(labels: np.ndarray, questions: Sequence[str]) -> np.ndarray:
    """Return "train", "validation" or "test" of each answer.

    Answers to the same question, in any spelling, stay together, so that no held-out
    question is trained on. The splits have equal shares of questions of which all,
    some or none of the answers are right.

    Args:
      labels: `[n_answers]` bool.
      questions: the question of each answer.
    """
    numbers: dict[str, int] = {}
    names = question_names(questions)
    group = np.array([numbers.setdefault(name, len(numbers)) for name in names])
    n_right, n = np.bincount(group, labels), np.bincount(group)
    rng, splits = np.random.default_rng(0), np.full(len(numbers), "validation")
    for is_kind in (n_right == n, (n_right > 0) & (n_right < n), n_right == 0):
        where = rng.permutation(np.flatnonzero(is_kind))
        *ends, _ = np.ceil(np.cumsum([*_SHARES.values()]) * len(where)).astype(int)
        for name, part in zip(_SHARES, np.split(where, ends), strict=True):
            splits[part] = name
    return splits[group]


def split_settings(parts: Parts, note: Callable[[str], None]) -> Parts:
    """Split the answers of all settings, and leave out a setting that has too few.

    A question has the same split in both settings, because one head may read both.
    `note` is called if a setting is left out.
    """
    labels = np.concatenate([part.labels for part in parts.values()])
    questions = [text for part in parts.values() for text in part.questions]
    ends = np.cumsum([len(part.labels) for part in parts.values()])
    splits = np.split(split_answers(labels, questions), ends[:-1])
    split_parts: Parts = {
        setting: part._replace(splits=split)
        for (setting, part), split in zip(parts.items(), splits, strict=True)
    }
    n_least = {setting: _least_of(part) for setting, part in split_parts.items()}
    most = max(n_least.values())
    for setting, part in parts.items():
        n_right, n = int(part.labels.sum()), len(part.labels)
        counts = (
            f"{n_right} right and {n - n_right} wrong answers {IN_WORDS[setting]} to "
            f"{len(set(question_names(part.questions)))} questions"
        )
        if not most:
            raise ValueError(f"too few to fit: {counts}; {ENOUGH} of each are enough")
        if not n_least[setting] or n_least[setting] < LEAST_ANSWERS <= most:
            (other,) = (words for x, words in IN_WORDS.items() if x != setting)
            note(
                f"warning: {counts} are too few to fit ({ENOUGH} of each are enough); "
                f"the probe only judges answers {other}"
            )
            del split_parts[setting]
    return split_parts


def _least_of(part: LabelledSignals) -> int:
    """Return, for the poorest split, how many questions its rarer class has."""
    questions = np.array(question_names(part.questions))
    in_splits = (part.splits == name for name in _SHARES)
    return min(min(n_of_classes(part.labels[x], questions[x])) for x in in_splits)


def answer_and_label(
    model: Any, questions: Sequence[Example], work: Path, note: Callable[[str], None]
) -> Parts:
    """Answer and read signals in one pass, and label by exact match with the golds.

    A question with passages is asked from memory and with them, if the prompt template
    supports both. A chat model sees worked examples with short answers, which golds can
    match, unless the user gave their own prompts.

    `model` is a `LanguageModel`. Answers and signals are kept in `work`, from which the
    same call resumes; `note` is called with time estimates and warnings.
    """
    if model.prompt.chat and not isinstance(model.prompt.template, Words):
        # In a chat, SmolLM2 answers in sentences: 0 of 301 matched a gold.
        model.prompt = PromptConfig(template="few-shot", shots=SHOTS)
    questions = without_worked_examples(questions, model.prompt.shots, note)
    questions_of = _asked(questions, model.prompt.prompt_template(), note)

    stores = {}
    for x, part in questions_of.items():
        pairs = zip(part, _shown(part, x), strict=True)
        rows = ([q.id, q.question, *([p.title, p.text] for p in y)] for q, y in pairs)
        about = [dataclasses.asdict(model.prompt), *rows]
        stores[x] = work / _store_name(model, about)

    def answered(
        some: Sequence[Example], setting: Setting, is_ahead: bool = False
    ) -> LabelledSignals:
        shown, store, signals = _shown(some, setting), stores[setting], None
        contexts = shown if setting == "with_context" else None
        if is_ahead:
            answers = model.answer_ahead(some, contexts, store)
        else:
            answers, signals = model.answer(
                some, contexts, read=True, store=store, progress=True
            )
        pairs = zip(answers, some, strict=True)
        labels = np.array([exact_match(a.text, q.golds) for a, q in pairs])
        texts = [q.question for q in some]
        return LabelledSignals(texts, shown, answers, signals, labels)

    is_new = not any(any(work.glob(f"{x.name}*")) for x in stores.values())
    for setting, part in questions_of.items() if is_new else ():
        ahead = partial(answered, setting=setting, is_ahead=True)
        first = _with_forecast(ahead, part, setting, note)
        if len(first.labels) > 1 and len(set(first.labels)) == 1:
            note(_class_advice(first, part, setting))
    parts: Parts = {x: answered(part, x) for x, part in questions_of.items()}
    return split_settings(parts, note)


def without_worked_examples(
    questions: Sequence[Example], shots: Sequence[Shot], note: Callable[[str], None]
) -> Sequence[Example]:
    """Return the questions that are not worked examples of the prompt.

    `note` is called with how many are left out.
    """
    shown = set(question_names(shot.question for shot in shots))
    names = question_names(question.question for question in questions)
    others = [q for q, x in zip(questions, names, strict=True) if x not in shown]
    if n_shown := len(questions) - len(others):
        words = "worked examples in the prompt, with their answers"
        if not others:
            raise ValueError(f"all questions ({n_shown}) are {words}; give others")
        note(f"questions left out as {words}: {n_shown} of {len(questions)}")
    return others


def _store_name(model: Any, content: Sequence[Any]) -> str:
    """Return a name that changes with anything that the signals depend on."""
    from beatrice.extract.generate.local import stop_ids

    backbone = model.backbone
    about = [backbone.revision, str(backbone.dtype), backbone.attention]
    about += [list(stop_ids(backbone)), *content]
    return f"signals-{sha256_json(about)[:12]}"


def _asked(
    questions: Sequence[Example], words: Words, note: Callable[[str], None]
) -> dict[Setting, Sequence[Example]]:
    """Return the questions to ask in each setting that the template supports."""
    with_passages = [q for q in questions if q.passages]
    questions_of: dict[Setting, Sequence[Example]] = {}
    if words.closed_book:
        questions_of["closed_book"] = questions
    if words.with_context and with_passages:
        questions_of["with_context"] = with_passages
    if not questions_of:
        raise ValueError(
            "the template is only for questions with passages, but no question has "
            "any; add closed_book to it"
        )
    if with_passages:
        how = " and ".join(IN_WORDS[setting] for setting in questions_of)
        note(
            f"questions with passages: {len(with_passages)} of {len(questions)}; they "
            f"are asked {how}"
        )
    return questions_of


def _shown(questions: Sequence[Example], setting: Setting) -> list[Sequence[Passage]]:
    """Return the passages to show with each question."""
    return [q.passages if setting == "with_context" else () for q in questions]


def _with_forecast(
    work: Callable[[Sequence[Any]], Any],
    items: Sequence[Any],
    setting: Setting,
    note: Callable[[str], None],
) -> Any:
    """Note how long all items will take, judging by the first; return their result."""
    tried = items[:_TRIED]
    work(tried[:1])  # do not time work that is only done once
    began = time.monotonic()
    result = work(tried)  # without the first if work resumes
    seconds = (time.monotonic() - began) * len(items) / max(1, len(tried) - 1)
    note(
        f"{len(items)} answers {IN_WORDS[setting]} with their signals: at most "
        f"{in_words(seconds)}, judging by the first {len(tried)} (larger batches are "
        "faster), then a minute or two to fit"
    )
    return result


def _class_advice(
    tried: LabelledSignals, questions: Sequence[Example], setting: Setting
) -> str:
    """Return advice for the case that the first answers are all right or all wrong."""
    first = f"of the first {len(tried.answers)} answers {IN_WORDS[setting]}"
    if tried.labels[0]:
        return (
            f"warning: all {first} are right, but a probe needs wrong ones too: stop "
            "(Ctrl-C) and give harder questions, unless some are still to come"
        )
    shown = "; ".join(
        f"{q.question!r}: {a.text!r}, expected {q.golds[0]!r}"
        for a, q in zip(tried.answers[:3], questions, strict=False)
    )
    return (
        f"warning: none {first} is right ({shown}). If these "
        "should count, stop (Ctrl-C): add what the model writes to the golds, or label "
        "the answers yourself and give them with --labelled; if they are wrong, give "
        "easier questions, unless some are still to come"
    )


def read_given(
    model: Any,
    rows: Sequence[tuple[AnswerToScore, bool, str]],
    work: Path,
    note: Callable[[str], None],
) -> Parts:
    """Read the signals of labelled answers.

    They are kept in `work`, from which the same call resumes.
    """
    every, _, names = zip(*rows, strict=True)
    answers, parts = model.as_answers(every, names=names), Parts()
    for setting in SETTINGS:
        is_here = [answer.setting == setting for answer in answers]
        if not any(is_here):
            continue
        given, labels, _ = zip(*itertools.compress(rows, is_here), strict=True)
        texts, contexts = [x.question for x in given], [x.context for x in given]
        here = list(itertools.compress(answers, is_here))
        parts[setting] = LabelledSignals(texts, contexts, here, None, np.array(labels))
    parts = split_settings(parts, note)  # before reading, which takes longer
    for setting, part in parts.items():
        about = [[*x.key, *x.prompt_ids, *x.token_ids] for x in part.answers]
        store = work / _store_name(model, about)
        if not store.exists():
            _with_forecast(model.read, part.answers, setting, note)
        signals = model.read(part.answers, store=store, progress=True)
        parts[setting] = part._replace(signals=signals)
    return parts


def text_scores(labelled: LabelledSignals) -> np.ndarray:
    """Return P(correct), `[n]`, from only the words of question and answer."""
    from beatrice.benchmarks.baselines.detector import joined_text
    from beatrice.benchmarks.baselines.plain import fit_tfidf

    pairs = zip(labelled.questions, labelled.answers, strict=True)
    texts = [joined_text(question, answer.text) for question, answer in pairs]
    rows = []
    for split in ("train", "validation"):
        where = np.flatnonzero(labelled.splits == split)
        rows += [[texts[i] for i in where], labelled.labels[where]]
    return fit_tfidf(*rows).predict_proba(texts)[:, 1]


def compare(
    probe: Any, labelled: LabelledSignals, setting: Setting
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare a probe with baselines on the held-out answers.

    Returns report rows of the baselines (as in `Probe.report`), and printable lines.
    """
    from beatrice.jaxprobe.metrics import auroc, auroc_interval
    from beatrice.jaxprobe.tokens import answer_log_probs

    where = labelled.splits == "test"
    labels, signals = labelled.labels[where], labelled.signals
    questions = np.array(question_names(labelled.questions))[where]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of doubts, which `fit_own` reports
        p_correct = probe.predict(signals[np.flatnonzero(where)])
    lengths = np.array([len(answer.token_ids) for answer in labelled.answers])
    head = OWN_PASS_HEADS[setting]
    lines = [
        f"held-out answers {IN_WORDS[setting]}: {len(labels)}, of them right: "
        f"{int(labels.sum())}"
    ]
    rows = []
    for name, scores in (
        ("probe", p_correct),
        ("perplexity", answer_log_probs(signals.store)[where]),
        ("text alone", text_scores(labelled)[where]),
        ("length alone", -lengths[where].astype(float)),
    ):
        low, high = auroc_interval(scores, labels, questions)
        value = auroc(scores, labels).value
        lines.append(f"  {name:<14}AUROC {value:.3f} [{low:.3f}, {high:.3f}]")
        row = {"head": head, "split": "test", "metric": f"auroc of {name}"}
        interval = {"value": value, "ci_low": low, "ci_high": high}
        rows.append({**row, **interval, "n": len(labels), "n_right": int(labels.sum())})
    measured = [x for x in probe.rows if (x["head"], x["split"]) == (head, "test")]
    metrics = {row["metric"]: row["value"] for row in measured}
    base = labels.mean() * (1 - labels.mean())
    lines.append(
        f"  calibration   ECE {metrics['ece']:.3f}, Brier score {metrics['brier']:.3f} "
        f"({base:.3f} for a constant P, the share of right answers)"
    )
    thresholds = probe.detector.heads[head].thresholds()
    decided = decisions_in_words(thresholds, p_correct, labels)
    lines.append(f"  decisions     {decided}")
    return rows[1:], lines


def decisions_in_words(
    both: Thresholds, p_correct: np.ndarray, labels: np.ndarray
) -> str:
    """Say how many answers are trusted and distrusted, and how many of them rightly.

    `p_correct` and `labels` are `[n]`, one entry per answer; True is a right answer.
    """
    texts = []
    for threshold, are_right, word in (
        (both.trust, labels, "right"),
        (both.distrust, ~labels, "wrong"),
    ):
        is_decided = np.array([threshold.holds(float(p)) for p in p_correct])
        text = f"{is_decided.sum()} {threshold.decision}ed"
        if is_decided.any():
            text += f", of them {word}: {are_right[is_decided].sum()}"
        texts.append(text)
    return f"at precision {both.trust.wanted:g}: {'; '.join(texts)}"


def examples_of(probe: Any, parts: Parts) -> list[tuple[Any, ...]]:
    """Return some held-out answers that `Probe.save` stores for its self-test."""
    rows = []
    for labelled in parts.values():
        where = np.flatnonzero(labelled.splits == "test")[: 4 * MOST_EXAMPLES]
        given = [
            (labelled.questions[i], labelled.answers[i].text, labelled.contexts[i])
            for i in where
        ]
        scored = zip(given, probe.score_many(given), strict=True)
        rows.append([row for row, score in scored if score.p_correct is not None])
    in_turn = itertools.chain(*itertools.zip_longest(*rows))
    return list(itertools.islice(filter(None, in_turn), MOST_EXAMPLES))


def check_folder(path: Path) -> None:
    """Check that a probe can be written, before hours are spent on fitting it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists; give a new folder")
    check_place(path)


def clear_work(work: Path) -> None:
    """Remove the files that a fit kept in `work`; files of the user stay."""
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
    words: Mapping[str, Any] | None = None,
) -> None:
    """Answer and label questions, or read labelled answers; fit, measure and save.

    `rows` are questions with golds, or answers from `read_labelled`. `say` is called
    with the lines of the report. `LanguageModel` takes `model` and `words` (its
    prompt), `Probe.save` takes `folder` and `untrustworthy`.
    """
    from beatrice.model import LanguageModel

    # First, so that a missing package is reported before a model is downloaded.
    importlib.import_module("beatrice.fitting")
    note, work = Progress().note, folder.with_name(f"{folder.name}.work")
    language_model, began = LanguageModel(model, prompt=words), time.monotonic()
    read = read_given if is_labelled else answer_and_label
    with locked_folder(work):
        check_folder(folder)  # a process that held the lock may have written it
        parts = read(language_model, rows, work, note)
        _fit_and_save(parts, folder, began, untrustworthy, say)
        clear_work(work)  # only the probe is needed


def _counts_in_all(probe: Any, parts: Parts) -> str:
    """Return the numbers of answers, and how many are enough if there are too few."""
    labels = np.concatenate([part.labels for part in parts.values()])
    n_right, n = int(labels.sum()), len(labels)
    text = f"there are {n_right} right and {n - n_right} wrong answers in all"
    heads = [head.evidence for head in probe.detector.heads.values()]
    first = next(evidence for evidence in heads if evidence.doubts)
    if min(*first.train, *first.validation) >= LEAST_ANSWERS:
        return text
    share = min(n_right, n - n_right) / n
    return (
        f"{text}, and {ENOUGH} of each are enough, at this rate from about "
        f"{round(ENOUGH / share)} questions"
    )


def _fit_and_save(
    parts: Parts,
    folder: Path,
    began: float,
    untrustworthy: bool,
    say: Callable[[str], None],
) -> None:
    """Fit, measure and save a probe on answers that were read since `began`."""
    answered = time.monotonic()
    from beatrice.fitting import fit as fit_probe

    probe = fit_probe(
        {setting: part.signals for setting, part in parts.items()},
        {setting: part.labels.tolist() for setting, part in parts.items()},
        groups={
            setting: question_names(part.questions) for setting, part in parts.items()
        },
        splits={setting: part.splits.tolist() for setting, part in parts.items()},
        progress=False,
    )
    baselines = []
    for setting, part in parts.items():
        rows, lines = compare(probe, part, setting)
        baselines += rows
        say("\n".join(lines))
    took = [(b - a) / 60 for a, b in ((began, answered), (answered, time.monotonic()))]
    say(f"{took[0]:.1f} minutes to answer and read, {took[1]:.1f} to fit")
    doubts = probe.detector.doubts
    if doubts and not untrustworthy:
        raise ValueError(
            f"{doubts[0]}; {_counts_in_all(probe, parts)}; nothing was saved "
            "(untrustworthy=True, on the command line --untrustworthy, saves the "
            "probe, and each of its scores then says so)"
        )
    examples = examples_of(probe, parts)
    probe = probe.with_report([*probe.rows, *baselines])
    probe.save(folder, examples=examples, untrustworthy=untrustworthy)
    say(f"{folder}: load it with beatrice.load({str(folder)!r})")
