"""The stages that judge and reword: labels, their audit, rewritten contexts."""

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from beatrice.extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    Texts,
    TextStage,
)
from beatrice.extract.label.audit import (
    HumanAgreement,
    LabelledAnswer,
    against_exact_match,
    between_judges,
    disagreements,
    draw_sample,
    join_labels,
    read_annotations,
    write_sample,
)
from beatrice.extract.label.judges import (
    RUBRICS,
    ConsensusConfig,
    Judgements,
    Rubric,
    judge_answers,
)
from beatrice.extract.label.labels import (
    LABEL_PRESETS,
    RULES,
    LabelConfig,
    Match,
    class_counts,
    count_correct,
    import_labels,
    label_by_match,
    label_with,
    shares_in_words,
)
from beatrice.extract.label.rewrite import (
    RewriteConfig,
    count_rewrites,
    rewrite_contexts,
)
from beatrice.extract.plugs import load_plug
from beatrice.extract.records import (
    Answer,
    Example,
    Label,
    Rewrite,
    read_records,
    write_lines,
)
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    check_answered,
    question_files,
    read_answers,
    read_examples,
    read_questions,
    settings_of,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import (
    sha256_file,
    sha256_json,
    write_json_atomic,
    write_new_text,
    write_text_atomic,
)
from beatrice.extract.run.rows import label_rule
from beatrice.extract.run.stages import Stage, check_current, once, run_stage

JUDGES = "beatrice.judges"  # entry points of people's own judges of labels


def _answered(run: RunDir) -> tuple[list[Answer], list[Example]]:
    """Return every answer of a run, and the questions; all must be answered."""
    check_answered(run)
    return read_answers(run), read_examples(run)


def label_run(run: RunDir, match: Match | None, progress: Progress) -> None:
    """Label the run's answers by comparison with golds; writes `labels.jsonl`.

    Another way to compare labels them again; None leaves it as the run has it.
    """
    if match is not None:
        config = LabelConfig(match=match)
        if run.settle("label", LABEL_PRESETS, is_recorded=False) != config:
            check_current(run, "label", ())
        run.settle("label", LABEL_PRESETS, lambda _: config, is_replaceable=True)
    run_stage(LABEL, run, progress)


def _label(
    run: RunDir, config: LabelConfig, update: Update, progress: Progress
) -> None:
    record, rule = run.stage_record("label"), RULES[config.match]
    before = record.inputs if record else {}
    if "judge" in before:
        progress.note(
            f"label: {rule} replaces the judges' labels; their replies stay in "
            f"{run.replies('judge')}"
        )
    elif "rule" in before:
        progress.note(f"label: {rule} replaces the labels of before: {before['rule']}")
    progress.note(
        f"label: by {rule}, without a judge: a right answer in words that no gold "
        "lists counts as wrong"
    )
    labels = label_by_match(*_answered(run), config.match)
    # Without a record nobody has labelled here, and what is there is a person's.
    write = write_new_text if record is None else write_text_atomic
    _write_labels(run, labels, progress, write)


def _write_labels(
    run: RunDir,
    labels: Sequence[Label],
    progress: Progress,
    write: Callable[[Path, str], None] = write_text_atomic,
) -> None:
    """Write labels; print how many are correct, and an answer where all are alike."""
    write(run.labels, write_lines(labels))
    examples = read_examples(run)
    for line in shares_in_words(examples, labels):
        progress.note(f"label: {line}")
    counts = count_correct(examples, {label.key: label for label in labels})
    for (setting, _), (n, n_correct) in class_counts(counts).items():
        if n_correct in (0, n):
            answer = read_answers(run, setting)[0]
            example = next(e for e in examples if e.id == answer.example_id)
            progress.note(
                f"label: for instance, {example.question!r} is answered "
                f"{answer.text!r}, its golds are {', '.join(map(repr, example.golds))}"
            )
            return


def _label_inputs(run: RunDir) -> dict[str, str]:
    """Return the identities of the files that every way of labelling reads."""
    return run.hash_inputs(*question_files(run), run.answers)


def judge_stage(
    run: RunDir,
    generator: Generator,
    config: ConsensusConfig,
    progress: Progress,
    *,
    name: str,
    rubrics: Sequence[Rubric] = RUBRICS,
) -> TextStage[Judgements]:
    """Return the stage that labels by the consensus of rubrics of the judge `name`.

    Writes `labels.jsonl` and, beside the judge's replies, `replies/judge.json` with
    the judge's identity and the counts.
    """
    identity = {
        "schema": SCHEMA_VERSION,
        "judge": dict(generator.identity),
        "rubrics": [dataclasses.asdict(rubric) for rubric in rubrics],
        "config": dataclasses.asdict(config),
    }
    summary = run.replies("judge").with_suffix(".json")

    def make(replies: Texts, update: Update) -> Judgements | None:
        judging = (*_answered(run), generator, replies, config, update)
        return judge_answers(*judging, rubrics=rubrics)

    def write(judgements: Judgements) -> None:
        counts: dict[str, Any] = {
            "n_retried": judgements.n_retried,
            "n_unparsable_verdicts": judgements.n_unparsable,
            "counts": judgements.counts(),
        }
        write_json_atomic(summary, identity | counts)
        for row in counts["counts"]:
            progress.note("label: " + ", ".join(f"{k} {v}" for k, v in row.items()))
        _write_labels(run, judgements.labels, progress)
        progress.note(
            f"label: {judgements.n_retried} replies asked for again, "
            f"{judgements.n_unparsable} verdicts stayed unparsable"
        )

    rule = f"judges: {name}, {config.vote}"
    return TextStage(
        run=run,
        name="label",
        role="judge",
        reads=[*question_files(run), run.answers],
        settings={"judge": sha256_json(identity), "rule": rule},
        outputs=[run.labels, summary],
        make=make,
        write=write,
    )


def label_run_with(run: RunDir, spec: str, progress: Progress) -> None:
    """Label answers by a person's judge, see `load_plug`; writes `labels.jsonl`."""
    judge = load_plug(spec, JUDGES)

    def work(update: Update) -> None:
        labels = label_with(*_answered(run), judge, name=spec, progress=update)
        _write_labels(run, labels, progress)

    inputs = _label_inputs(run) | {"rule": f"judge {spec}"}
    defined = judge if inspect.isroutine(judge) else type(judge)
    # The answers are judged again where the file of the judge has changed.
    with contextlib.suppress(TypeError, OSError):  # built-in, or in no file
        inputs["judge_with"] = sha256_file(Path(inspect.getfile(defined)))
    once(run, "label", inputs, [run.labels], progress, work)


def label_run_by_import(run: RunDir, path: Path, progress: Progress) -> None:
    """Label the run's answers by a person's file; writes `labels.jsonl`."""

    def work(update: Update) -> None:
        imported = import_labels(path, *_answered(run))
        progress.note(
            f"label: {imported.n_lines} lines of {path}; {imported.n_other_question} "
            f"are about other questions, {imported.n_other_answer} about other answers "
            "than this run's"
        )
        _write_labels(run, imported.labels, progress)

    inputs = _label_inputs(run) | {
        "imported": sha256_file(path),
        "rule": f"imported from {path.name}",
    }
    once(run, "label", inputs, [run.labels], progress, work)


def _labelled(run: RunDir) -> list[LabelledAnswer]:
    run.hash_inputs(run.examples, run.answers, run.labels)  # says what is missing
    labels = read_records(run.labels, Label)
    return join_labels(read_examples(run), read_answers(run), labels)


def audit_labels(run: RunDir, *, n_sample: int, seed: int) -> dict[str, Any]:
    """Write what is known about the labels' quality into `audit/`, and return it."""
    rows = _labelled(run)
    listed = disagreements(rows)
    report = {
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
    write_json_atomic(run.audit / "audit.json", report)
    return report


def compare_annotations(run: RunDir, path: Path, *, seed: int) -> HumanAgreement:
    """Compare a person's annotations with the labels; writes `audit/human.json`."""
    human = read_annotations(path, _labelled(run), seed=seed)
    write_json_atomic(run.audit / "human.json", dataclasses.asdict(human))
    return human


def rewrite_stage(
    run: RunDir, generator: Generator, config: RewriteConfig
) -> TextStage[list[Rewrite]]:
    """Return the stage that rewrites the contexts of a run.

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

    def make(replies: Texts, update: Update) -> list[Rewrite] | None:
        return rewrite_contexts(read_questions(run), generator, replies, config, update)

    def write(rewrites: list[Rewrite]) -> None:
        examples = read_questions(run)
        counts = count_rewrites(rewrites) | {
            "n_without_passages": sum(not e.passages for e in examples),
            "n_rewritten_before": sum(bool(e.rewritten) for e in examples),
        }
        write_text_atomic(run.rewrites, write_lines(rewrites))
        write_json_atomic(summary, identity | {"counts": counts})

    return TextStage(
        run=run,
        name="rewrite",
        role="rewrite",
        reads=[run.examples],
        settings={"rewriter": sha256_json(identity)},
        outputs=[run.rewrites, summary],
        make=make,
        write=write,
    )


def rewrite_counts(run: RunDir) -> dict[str, int]:
    """Return what the stage `rewrite` counted."""
    summary = run.replies("rewrite").with_suffix(".json")
    return json.loads(summary.read_text(encoding="utf-8"))["counts"]


LABEL = Stage(
    name="label",
    inputs=lambda run: [*question_files(run), run.answers],
    outputs=lambda run: [run.labels],
    work=_label,
    presets=LABEL_PRESETS,
    identity=lambda config: {"rule": RULES[config.match]},
)
