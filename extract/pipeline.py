"""The Torch half of a run: world, answers, labels, signals, one stage each.

Every stage reads its inputs from the run directory and writes its outputs there.
Finished rows are never done again: a killed stage continues where it stopped.
"""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from extract.backbone.loading import Backbone
from extract.generate.answers import AnswerRows, answered_keys, open_answers
from extract.generate.local import generate
from extract.generate.requests import (
    GenerationConfig,
    PromptConfig,
    PromptModel,
    Request,
    Requests,
    make_requests,
    plan_batches,
)
from extract.label.rewrite import Rewrite, with_rewrites
from extract.label.verdicts import Judge, exact_match_judge, label_answer
from extract.records import (
    SETTINGS,
    Answer,
    Example,
    Label,
    Setting,
    read_records,
    to_json,
    write_lines,
)
from extract.run.directory import RunDir
from extract.run.files import JsonLines, write_text_atomic
from extract.signals.extraction import ExtractionReport, extract
from extract.signals.plan import ExtractConfig
from extract.signals.reader import SignalReader
from extract.world.facts import WorldConfig, make_world
from extract.world.questions import QuestionConfig, make_examples

Progress = Callable[[int, int], None]  # (done, total)


def write_world(run: RunDir, world: WorldConfig, questions: QuestionConfig) -> None:
    """Write the microworld's questions and passages."""
    made = make_world(world)
    write_text_atomic(run.examples, write_lines(make_examples(made, questions)))
    write_text_atomic(run.passages, write_lines(made.passages))


def answers_file(run: RunDir) -> Path:
    """Return the file of all answers."""
    return run.answers / "answers.jsonl"


def read_examples(run: RunDir) -> list[Example]:
    """Return the run's questions, with the contexts that were rewritten for it."""
    examples = list(read_records(run.examples, Example))
    if not run.rewrites.exists():
        return examples
    found = read_records(run.rewrites, Rewrite)
    return with_rewrites(examples, {rewrite.example_id: rewrite for rewrite in found})


def read_answers(run: RunDir, setting: Setting) -> list[Answer]:
    """Return one setting's answers in the order of the questions.

    The file holds them in the order of generation, which batches by length.
    """
    place = {example.id: i for i, example in enumerate(read_examples(run))}
    answers = [
        answer
        for answer in read_records(answers_file(run), Answer)
        if answer.setting == setting
    ]
    return sorted(answers, key=lambda a: (a.variant, place[a.example_id]))


def left_out_file(run: RunDir) -> Path:
    """Return the list of what was not asked; absent where everything was."""
    return run.answers / "left_out.jsonl"


def ask_run(
    run: RunDir, speaker: PromptModel, asking: PromptConfig, max_new_tokens: int
) -> Requests:
    """Return what the run asks; what it does not ask is written down.

    Raises:
      ValueError: a prompt does not fit, see `extract.generate.requests.make_requests`.
    """
    asked = make_requests(read_examples(run), speaker, asking, max_new_tokens)
    if asked.left_out:
        write_text_atomic(left_out_file(run), asked.left_out_lines())
    else:
        left_out_file(run).unlink(missing_ok=True)
    return asked


def write_answers(
    run: RunDir,
    backbone: Backbone,
    requests: Sequence[Request],
    config: GenerationConfig,
    progress: Progress,
) -> tuple[str, ...]:
    """Answer every question in every setting.

    Batches are planned over all requests, done or not, so that an answer does not
    depend on when the run was killed; a batch is skipped if all its rows are there.
    The rows end in the order of the plan, whoever wrote them.

    Returns:
      What was set aside of an earlier run, in words.
    """
    rows = open_answers(answers_file(run), requests, run.answer_parts)
    batches = _planned(requests, config)
    _answer_batches(backbone, batches, config, rows, progress)
    return _arranged(rows, batches)


def write_answer_part(
    run: RunDir,
    backbone: Backbone,
    requests: Sequence[Request],
    config: GenerationConfig,
    progress: Progress,
    worker: tuple[int, int],
) -> int:
    """Do one worker's batches of the plan, into a file of this process alone.

    The plan does not depend on the number of workers, so neither does an answer. What
    another process of any rank has answered is not answered again.

    Args:
      run: shared with the other workers.
      backbone: answers.
      requests: all of them.
      config: how.
      progress: told rows of this worker, done and to do.
      worker: rank and world size; the worker does the batches `rank::world_size`.

    Returns:
      How many answers nobody has written yet.
    """
    rank, world_size = worker
    done = answered_keys(answers_file(run), run.answer_parts, requests)
    process = f"{socket.gethostname()}.{os.getpid()}"
    name = f"{rank}-of-{world_size}@{process}.jsonl"
    lines = JsonLines.open(run.answer_parts / name)
    mine = _planned(requests, config)[rank::world_size]
    rows = AnswerRows(lines, dict.fromkeys(done), ())
    _answer_batches(backbone, mine, config, rows, progress)
    there = answered_keys(answers_file(run), run.answer_parts, requests)
    return len({request.key for request in requests} - there)


def gather_answers(
    run: RunDir, requests: Sequence[Request], config: GenerationConfig
) -> tuple[str, ...]:
    """Put what workers have answered together; returns what was set aside."""
    rows = open_answers(answers_file(run), requests, run.answer_parts)
    return _arranged(rows, _planned(requests, config))


def _arranged(
    rows: AnswerRows, batches: Sequence[Sequence[Request]]
) -> tuple[str, ...]:
    """Put the rows into the order of the plan; returns what was set aside."""
    rows.arrange([request.key for batch in batches for request in batch])
    return rows.notes


def _planned(
    requests: Sequence[Request], config: GenerationConfig
) -> list[list[Request]]:
    """Return which requests are answered together."""
    lengths = [len(request.prompt.ids) for request in requests]
    return [[requests[i] for i in batch] for batch in plan_batches(lengths, config)]


def _answer_batches(
    backbone: Backbone,
    batches: Sequence[Sequence[Request]],
    config: GenerationConfig,
    rows: AnswerRows,
    progress: Progress,
) -> None:
    """Answer, batch by batch, what has no row yet."""
    keys = {request.key for batch in batches for request in batch}
    n_answered = len(keys & rows.done.keys())
    progress(n_answered, len(keys))
    for batch in batches:
        missing = {request.key for request in batch} - rows.done.keys()
        if missing:
            answers = generate(backbone, batch, config)
            rows.append({a.key: to_json(a) for a in answers if a.key in missing})
            n_answered += len(missing)
            progress(n_answered, len(keys))


def write_labels(run: RunDir, judge: Judge = exact_match_judge) -> None:
    """Label every answer."""
    examples = {example.id: example for example in read_examples(run)}
    answers = [a for setting in SETTINGS for a in read_answers(run, setting)]
    labels = [label_answer(examples[a.example_id], a, judge) for a in answers]
    write_text_atomic(run.labels, write_lines(labels))


def read_labels(run: RunDir) -> dict[tuple[str, str, str], Label]:
    """Return the labels by example, setting and variant."""
    return {label.key: label for label in read_records(run.labels, Label)}


def write_features(
    run: RunDir,
    reader: SignalReader,
    setting: Setting,
    config: ExtractConfig,
    fingerprint: dict[str, str],
    progress: Progress,
    worker: tuple[int, int] = (0, 1),
) -> ExtractionReport:
    """Read the signals of one setting's answers into its feature store.

    Args:
      run: holds the answers.
      reader: of the backbone that gave them.
      setting: which answers.
      config: how they are read.
      fingerprint: model and precision.
      progress: told ranges done and to do.
      worker: rank and world size.
    """
    rank, world_size = worker
    return extract(
        reader,
        read_answers(run, setting),
        run.features(setting),
        config,
        fingerprint=fingerprint,
        rank=rank,
        world_size=world_size,
        progress=progress,
    )


def count_correct(
    examples: Sequence[Example], labels: dict[tuple[str, str, str], Label]
) -> list[dict[str, str | int]]:
    """Count right answers per dataset, split, setting and variant, in file order."""
    counts: dict[tuple[str, str, str, str], list[int]] = {}
    by_id = {example.id: example for example in examples}
    for label in labels.values():
        example = by_id[label.example_id]
        group = (example.dataset, example.split, label.setting, label.variant)
        tally = counts.setdefault(group, [0, 0])
        tally[0] += label.label is not None
        tally[1] += label.label is True
    names = ("dataset", "split", "setting", "variant")
    return [
        {**dict(zip(names, group, strict=True)), "n": n, "n_correct": n_correct}
        for group, (n, n_correct) in counts.items()
    ]
