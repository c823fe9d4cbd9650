"""The stages that judge and reword: labels, their audit, rewritten contexts."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from extract.generate.generator import SCHEMA_VERSION, Generator
from extract.generate.replies import open_replies, reused_in_words
from extract.label.annotation import (
    HumanAgreement,
    draw_sample,
    read_annotations,
    write_sample,
)
from extract.label.audit import (
    LabelledAnswer,
    against_exact_match,
    between_judges,
    disagreements,
    join_labels,
)
from extract.label.judges import ConsensusConfig, judge_answers
from extract.label.rewrite import count_rewrites
from extract.label.rewriter import RewriteConfig, rewrite_contexts
from extract.label.rubrics import RUBRICS
from extract.label.verdicts import (
    LABEL_PRESETS,
    RULES,
    LabelConfig,
    Match,
    label_by_match,
)
from extract.records import (
    SETTINGS,
    Answer,
    Example,
    Label,
    read_records,
    to_json,
    write_lines,
)
from extract.run.console import Progress, Update
from extract.run.contents import (
    check_answered,
    count_correct,
    question_files,
    read_answers,
    read_examples,
    read_questions,
    settings_of,
    too_few_answers,
)
from extract.run.directory import RunDir
from extract.run.files import (
    sha256_json,
    write_json_atomic,
    write_new_text,
    write_text_atomic,
)
from extract.run.results import label_rule
from extract.run.share import Share
from extract.run.stages import Forecast, Stage, once, refuse_stale


def answered_questions(run: RunDir) -> list[tuple[Example, Answer]]:
    """Return every answer of a run with its question.

    Raises:
      ValueError: not all are answered yet.
    """
    check_answered(run)
    examples = {example.id: example for example in read_examples(run)}
    return [(examples[a.example_id], a) for a in read_answers(run)]


def _matched(run: RunDir, config: LabelConfig) -> list[Label]:
    return [label_by_match(*pair, config.match) for pair in answered_questions(run)]


def settle_match(run: RunDir, match: Match) -> None:
    """Let a run's answers be compared in another way; they are then labelled again."""
    asked = LabelConfig(match=match)
    if run.settle("label", LABEL_PRESETS, is_recorded=False) != asked:
        refuse_stale(run, "label", ())
        # Before the section: a process killed in between labels by the old rule again.
        run.reopen_stage("label")
    run.settle("label", LABEL_PRESETS, lambda _: asked, is_replaceable=True)


def _label(
    run: RunDir, config: LabelConfig, update: Update, progress: Progress
) -> None:
    record, rule = run.stage_record("label"), RULES[config.match]
    if record is not None and "judge" in record.inputs:
        progress.note(
            f"label: {rule} replaces the judges' labels; their replies stay in "
            f"{run.replies('judge')}"
        )
    if record is not None and "imported" in record.inputs:
        progress.note(f"label: {rule} replaces labels {record.inputs['rule']}")
    progress.note(
        f"label: by {rule}, without a judge: a right answer in words that no gold "
        "lists counts as wrong"
    )
    labels = _matched(run, config)
    # Without a record nobody has labelled here, and what is there is a person's.
    write = write_new_text if record is None else write_text_atomic
    write(run.labels, write_lines(labels))
    note_shares(run, labels, progress)


_FEW = 10  # validation answers of the rarer class, below which numbers say little


def shares_in_words(
    examples: Sequence[Example], labels: Sequence[Label]
) -> Iterator[str]:
    """Say how many answers are correct, and where too few or all of them are.

    Args:
      examples: the questions.
      labels: of answers to them.

    Yields:
      A line per setting, and one more for each of its training and validation sets
      that holds one class alone, or too few of one.
    """
    by_key = {label.key: label for label in labels}
    too_few = too_few_answers(count_correct(examples, by_key))
    split_of = {example.id: example.split for example in examples}
    for setting in SETTINGS:
        mine = [label for label in labels if label.setting == setting]
        kept = [label for label in mine if label.label is not None]
        if not mine:
            continue
        n, n_correct = len(kept), sum(bool(label.label) for label in kept)
        share = f" ({100 * n_correct / n:.1f} %)" if n else ""
        dropped = f", {len(mine) - n} without a label" if n < len(mine) else ""
        yield f"{setting}: {n_correct} of {n} answers correct{share}{dropped}"
        for split in ("train", "validation"):
            held = [bool(x.label) for x in kept if split_of[x.example_id] == split]
            where, n, n_correct = f"{setting}, {split}", len(held), sum(held)
            if not any(split_of[x.example_id] == split for x in mine):
                continue
            if n_correct in (0, n):
                yield (
                    f"{where}: {n_correct} of {n} labelled answers are correct; with "
                    "one class alone no detector can be trained, chosen or "
                    "calibrated. Look at the answers; other prompts, more questions, "
                    "--match containment or a judge may help"
                )
            elif split == "train" and setting in too_few:
                yield f"{setting}, train: {too_few[setting]}"
            elif split == "validation" and min(n_correct, n - n_correct) < _FEW:
                yield (
                    f"{where}: {n_correct} correct and {n - n_correct} incorrect "
                    "answers; what is trained or measured on so few says little"
                )


def note_shares(run: RunDir, labels: Sequence[Label], progress: Progress) -> None:
    """Print what `shares_in_words` says."""
    for line in shares_in_words(read_examples(run), labels):
        progress.note(f"label: {line}")


def _forecast(run: RunDir, config: LabelConfig) -> Forecast:
    labels = _matched(run, config)
    return Forecast(
        stage="label",
        n_rows=len(labels),
        disk_bytes=sum(len(to_json(label)) + 1 for label in labels),
        basis=f"by {RULES[config.match]}, no requests",
    )


def label_inputs(run: RunDir) -> dict[str, str]:
    """Return the identities of the files that every way of labelling reads."""
    return run.hash_inputs(*question_files(run), run.answers)


def label_by_judges(
    run: RunDir,
    generator: Generator,
    config: ConsensusConfig,
    progress: Progress,
    *,
    name: str,
    worker: Share | None = None,
) -> None:
    """Label every answer by the consensus of the rubrics of the judge called `name`.

    Writes `labels.jsonl` and, beside the judge's replies, `replies/judge.json` with
    the judge's identity and the counts.
    """
    identity = {
        "schema": SCHEMA_VERSION,
        "judge": dict(generator.identity),
        "rubrics": [dataclasses.asdict(rubric) for rubric in RUBRICS],
        "config": dataclasses.asdict(config),
    }
    summary = run.replies("judge").with_suffix(".json")

    def work(update: Update) -> None:
        replies = open_replies(run, "judge", progress, worker)
        found = judge_answers(
            answered_questions(run), generator, replies, config, update
        )
        progress.note(f"label: {reused_in_words(replies)}")
        write_text_atomic(run.labels, write_lines(found.labels))
        counted = {
            "n_retried": found.n_retried,
            "n_unparsable_verdicts": found.n_unparsable,
            "counts": found.counts(),
        }
        write_json_atomic(summary, identity | counted)
        for row in counted["counts"]:
            progress.note("label: " + ", ".join(f"{k} {v}" for k, v in row.items()))
        note_shares(run, found.labels, progress)
        progress.note(
            f"label: {found.n_retried} replies asked for again, {found.n_unparsable} "
            "verdicts stayed unparsable"
        )

    inputs = label_inputs(run)
    inputs["judge"] = sha256_json(identity)
    inputs["rule"] = f"judges: {name}, {config.vote}"
    once(run, "label", inputs, [run.labels, summary], progress, work)


def _labelled(run: RunDir) -> list[LabelledAnswer]:
    run.hash_inputs(run.examples, run.answers, run.labels)  # says what is missing
    labels = read_records(run.labels, Label)
    return join_labels(read_examples(run), read_answers(run), labels)


def audit_labels(run: RunDir, *, n_sample: int, seed: int) -> dict[str, Any]:
    """Write what is known about the labels' quality into `audit/`, and return it."""
    rows = _labelled(run)
    listed = disagreements(rows)
    found = {
        "label_rule": label_rule(run),
        "exact_match": against_exact_match(rows, seed=seed),
        "judges": between_judges(rows, seed=seed),
        "n_disagreements": len(listed),
        "disagreements": str(run.audit / "disagreements.jsonl"),
        "sample": str(run.audit / "sample.csv"),
    }
    lines = "".join(json.dumps(row) + "\n" for row in listed)
    write_text_atomic(run.audit / "disagreements.jsonl", lines)
    write_sample(run.audit / "sample.csv", draw_sample(rows, n_sample, seed=seed))
    write_json_atomic(run.audit / "audit.json", found)
    return found


def compare_annotations(run: RunDir, path: Path, *, seed: int) -> HumanAgreement:
    """Compare a person's annotations with the labels; writes `audit/human.json`."""
    found = read_annotations(path, _labelled(run), seed=seed)
    write_json_atomic(run.audit / "human.json", dataclasses.asdict(found))
    return found


def rewrite_run(
    run: RunDir,
    generator: Generator,
    config: RewriteConfig,
    progress: Progress,
    *,
    worker: Share | None = None,
) -> dict[str, int]:
    """Rewrite the contexts of a run; returns the counts.

    The questions' file stays as it is; `read_examples` joins the two.
    """
    if "with_context" not in settings_of(run):
        raise ValueError(
            f"{run.path} has closed_book alone, so there is no context to rewrite"
        )
    identity = {
        "schema": SCHEMA_VERSION,
        "rewriter": dict(generator.identity),
        "config": dataclasses.asdict(config),
    }
    summary = run.replies("rewrite").with_suffix(".json")

    def work(update: Update) -> None:
        examples = read_questions(run)
        replies = open_replies(run, "rewrite", progress, worker)
        rewrites = rewrite_contexts(examples, generator, replies, config, update)
        progress.note(f"rewrite: {reused_in_words(replies)}")
        counts = count_rewrites(rewrites) | {
            "n_without_passages": sum(not e.passages for e in examples),
            "n_rewritten_before": sum(bool(e.rewritten) for e in examples),
        }
        write_text_atomic(run.rewrites, write_lines(rewrites))
        write_json_atomic(summary, identity | {"counts": counts})

    inputs = run.hash_inputs(run.examples) | {"rewriter": sha256_json(identity)}
    once(run, "rewrite", inputs, [run.rewrites, summary], progress, work)
    return json.loads(summary.read_text(encoding="utf-8"))["counts"]


LABEL = Stage(
    name="label",
    inputs=lambda run: [*question_files(run), run.answers],
    outputs=lambda run: [run.labels],
    work=_label,
    presets=LABEL_PRESETS,
    forecast=_forecast,
)
