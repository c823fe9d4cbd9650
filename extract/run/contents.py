"""Read the contents of a run directory without Torch: questions, answers, labels."""

import collections
import functools
import warnings
from pathlib import Path

from beatrice.extract.records import (
    SETTINGS,
    Answer,
    Example,
    Key,
    Label,
    Rewrite,
    Setting,
    read_records,
    text_key,
    with_rewrites,
)
from beatrice.extract.run.directory import MAKE_A_RUN, RunDir, read_manifest
from beatrice.extract.run.files import sha256_file


def question_files(run: RunDir) -> list[Path]:
    """Return the files that the questions are read from."""
    return [run.examples, *([run.rewrites] if run.rewrites.exists() else [])]


def settings_of(run: RunDir) -> tuple[Setting, ...]:
    """Return the settings of a run: those requested that its questions allow.

    With context, a training and a validation question, if there are any, need passages:
    answering only test and held-out questions would be in vain.
    """
    # The section `answer` as JSON: its class would import prompts and templates.
    section = read_manifest(run.path)["sections"].get("answer", {})
    chosen: tuple[Setting, ...] = tuple(section.get("settings", SETTINGS))
    if "with_context" not in chosen or not run.examples.exists():
        return chosen  # missing questions are an error elsewhere
    shown = _shown(run.examples, sha256_file(run.examples))
    taught = {split for split, _ in shown} & {"train", "validation"}
    if any(has for _, has in shown) and all((split, True) in shown for split in taught):
        return chosen
    if chosen == ("with_context",):
        raise ValueError(
            f"{run.path} is to be answered only with context, but no training or no "
            "validation question has passages: give such questions (`beatrice data "
            "--context all`), or choose other --settings"
        )
    return ("closed_book",)


# A verb needs the settings a dozen times, and reading all questions may take seconds.
@functools.lru_cache(maxsize=16)
def _shown(questions: Path, sha256: str) -> frozenset[tuple[str, bool]]:
    """Return pairs: a question's split, and whether the question has passages."""
    del sha256  # of the file, which is read again if it changes
    examples = read_records(questions, Example)
    return frozenset((example.split, bool(example.passages)) for example in examples)


def require_both_settings(run: RunDir, verb: str) -> None:
    """Check that a run has both settings, for a verb that compares them."""
    if (settings := settings_of(run)) != SETTINGS:
        raise ValueError(
            f"{verb} needs answers without and with context, but {run.path} has only "
            f"{settings[0]}; make a run with --settings both, of questions with "
            "passages"
        )


def settings_in_words(run: RunDir) -> str:
    """Return in words a run's settings, with the number of questions of each set."""
    settings, parts = settings_of(run), []
    sets = [(e.dataset, bool(e.passages)) for e in read_records(run.examples, Example)]
    n_all = collections.Counter(name for name, _ in sets)
    n_with = collections.Counter(name for name, has_passages in sets if has_passages)
    for setting, counts in zip(SETTINGS, (n_all, n_with), strict=True):
        if setting in settings:
            each = ", ".join(f"{name} {counts[name] or '–'}" for name in n_all)
            parts.append(f"{setting}: {counts.total()} questions ({each})")
        else:
            parts.append(f"{setting}: not in this run")
    return "; ".join(parts)


def store_files(run: RunDir) -> list[Path]:
    """Return the files that identify the feature stores: indices and commit records.

    They hold the checksums of the arrays, which `beatrice doctor RUN --verify` checks.
    """
    folders = [run.features(setting) for setting in settings_of(run)]
    return [folder / name for folder in folders for name in ("index.json", "commits")]


def row_files(run: RunDir) -> list[Path]:
    """Return the files that decide what the stores' rows and their labels are."""
    return [*question_files(run), run.labels, *store_files(run)]


def read_questions(run: RunDir) -> list[Example]:
    """Return the run's questions without rewritten contexts.

    A duplicate id is a ValueError, and so is a question in two splits, since training
    on it would leak into the test. In splits drawn by an earlier version, which took
    more questions for different ones, the latter is a warning.
    """
    examples = list(read_records(run.examples, Example))
    if not examples:
        raise ValueError(f"{run.examples} holds no questions; {MAKE_A_RUN}")
    lines: dict[str, int] = {}
    first_of: dict[bytes, Example] = {}
    leaks: list[str] = []
    for number, example in enumerate(examples, start=1):
        where = f"{run.examples}, line {number}: the"
        if (line := lines.setdefault(example.id, number)) != number:
            raise ValueError(
                f"{where} id {example.id!r} is already that of line {line}; give every "
                "question an id of its own"
            )
        first = first_of.setdefault(text_key(example.question), example)
        if first.split != example.split:
            leaks.append(
                f"{where} question {example.question[:80]!r} is in the split "
                f"{example.split}, and as {first.id!r} in {first.split} too (ignoring "
                "case, marks and articles)"
            )
    if leaks and not _is_drawn(run):
        raise ValueError(
            f"{leaks[0]}; leave one of the two out, or let the splits be drawn: "
            f"{MAKE_A_RUN}"
        )
    if leaks:  # an earlier version ignored fewer marks, and the run rests on its splits
        count = f"the first of {len(leaks)} such questions"
        warnings.warn(
            f"{leaks[0]}, as an earlier version drew them; {count}", stacklevel=2
        )
    return examples


def _is_drawn(run: RunDir) -> bool:
    """Return whether a stage wrote the questions, and nobody has changed them."""
    name = run.examples.name
    records = filter(None, run.stage_records().values())
    written = {record.outputs[name] for record in records if name in record.outputs}
    return sha256_file(run.examples) in written


def read_examples(run: RunDir) -> list[Example]:
    """Return the run's questions, with rewritten contexts if there are any."""
    examples = read_questions(run)
    if not run.rewrites.exists():
        return examples
    rewrites = read_records(run.rewrites, Rewrite)
    return with_rewrites(examples, {x.example_id: x for x in rewrites})


def check_answered(run: RunDir) -> None:
    """Check that a run's answers, if any, are complete."""
    if (run.answers / "backend.json").exists() and run.stage_record("answer") is None:
        raise ValueError(
            f"the answers in {run.answers} are not finished: run `beatrice answer` "
            "first, which continues them"
        )


def read_answers(run: RunDir, *settings: Setting) -> list[Answer]:
    """Return answers in some settings (default: all), in the order of the questions.

    The file has them in the order of generation, in batches of similar length.
    """
    order = {example.id: i for i, example in enumerate(read_examples(run))}
    answers = list(read_records(run.answers_file, Answer))
    unknown = next((a for a in answers if a.example_id not in order), None)
    if unknown is not None:
        raise ValueError(
            f"{run.answers_file} answers the question {unknown.example_id!r}, which "
            f"is not in {run.examples}; run `beatrice answer` again"
        )
    answers.sort(key=lambda a: (a.variant, order[a.example_id]))
    return [
        a for setting in settings or SETTINGS for a in answers if a.setting == setting
    ]


def read_labels(run: RunDir) -> dict[Key, Label]:
    """Return the labels by example, setting and variant."""
    labels: dict[Key, Label] = {}
    for number, label in enumerate(read_records(run.labels, Label), start=1):
        if labels.setdefault(label.key, label) is not label:
            raise ValueError(
                f"{run.labels}, line {number}: a second label of {label.key}, expected "
                "one; run `beatrice label` again"
            )
    return labels
