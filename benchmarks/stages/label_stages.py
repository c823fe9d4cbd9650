"""Labels by judges, rewritten contexts, drawn answers: the work of other models."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.stage import Progress, Update, once
from extract.generate.answers import append_answers, open_answers, record_backend
from extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    SamplingConfig,
    stop_ids_of,
)
from extract.generate.replies import Replies
from extract.generate.requests import TokenizerOnly, make_requests
from extract.generate.sampling import DrawConfig, draw_answers
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
from extract.label.rewrite import RewriteConfig, count_rewrites, rewrite_contexts
from extract.label.rubrics import RUBRICS
from extract.pipeline import (
    answers_file,
    ask_run,
    read_answers,
    read_examples,
)
from extract.records import SETTINGS, Answer, Example, Label, read_records, write_lines
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic, write_text_atomic


def _sha(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _open_replies(run: RunDir, role: str, progress: Progress) -> Replies:
    replies = Replies.open(run.replies(role))
    if replies.truncated:
        progress.note(replies.truncated)
    return replies


def _say_reused(name: str, replies: Replies, progress: Progress) -> None:
    progress.note(
        f"{name}: {replies.n_new} texts generated, {replies.n_reused} found in "
        f"{replies.lines.path.name}"
    )


def _all_answers(run: RunDir) -> list[Answer]:
    return [answer for setting in SETTINGS for answer in read_answers(run, setting)]


def label_by_judges(
    run: RunDir, generator: Generator, config: ConsensusConfig, progress: Progress
) -> None:
    """Label every answer by the consensus of the rubrics.

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
        examples = {example.id: example for example in read_examples(run)}
        pairs = [(examples[a.example_id], a) for a in _all_answers(run)]
        replies = _open_replies(run, "judge", progress)
        found = judge_answers(pairs, generator, replies, config, update)
        _say_reused("label", replies, progress)
        write_text_atomic(run.labels, write_lines(found.labels))
        counts = {
            "n_retried": found.n_retried,
            "n_unparsable_verdicts": found.n_unparsable,
            "counts": found.counts(),
        }
        write_json_atomic(summary, identity | counts)
        for row in found.counts():
            progress.note("label: " + ", ".join(f"{k} {v}" for k, v in row.items()))
        progress.note(
            f"label: {found.n_retried} replies asked for again, {found.n_unparsable} "
            "verdicts stayed unparsable"
        )

    inputs = run.hash_inputs(run.examples, run.answers) | {"judge": _sha(identity)}
    once(run, "label", inputs, [run.labels, summary], progress, work)


def _labelled(run: RunDir) -> list[LabelledAnswer]:
    run.hash_inputs(run.examples, run.answers, run.labels)  # says what is missing
    labels = read_records(run.labels, Label)
    return join_labels(read_examples(run), _all_answers(run), labels)


def labelled_by(run: RunDir) -> str:
    """Say in words how the run's labels came about."""
    record = run.stage_record("label")
    is_judged = record is not None and "judge" in record.inputs
    return "judge consensus" if is_judged else "normalised exact match"


def audit_labels(run: RunDir, *, n_sample: int, seed: int) -> dict[str, Any]:
    """Write what is known about the labels' quality into `audit/`, and return it."""
    rows = _labelled(run)
    listed = disagreements(rows)
    found = {
        "labels_by": labelled_by(run),
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
    run: RunDir, generator: Generator, config: RewriteConfig, progress: Progress
) -> dict[str, int]:
    """Rewrite the contexts of a run; returns the counts.

    The questions' file stays as it is; `read_examples` joins the two.
    """
    identity = {
        "schema": SCHEMA_VERSION,
        "rewriter": dict(generator.identity),
        "config": dataclasses.asdict(config),
    }
    summary = run.replies("rewrite").with_suffix(".json")

    def work(update: Update) -> None:
        examples = list(read_records(run.examples, Example))
        replies = _open_replies(run, "rewrite", progress)
        rewrites = rewrite_contexts(examples, generator, replies, config, update)
        _say_reused("rewrite", replies, progress)
        counts = count_rewrites(rewrites) | {
            "n_without_passages": sum(not e.passages for e in examples),
            "n_rewritten_before": sum(bool(e.rewritten) for e in examples),
        }
        write_text_atomic(run.rewrites, write_lines(rewrites))
        write_json_atomic(summary, identity | {"counts": counts})

    inputs = run.hash_inputs(run.examples) | {"rewriter": _sha(identity)}
    once(run, "rewrite", inputs, [run.rewrites, summary], progress, work)
    return json.loads(summary.read_text(encoding="utf-8"))["counts"]


def load_tokenizer_only(config: RunConfig) -> tuple[TokenizerOnly, tuple[int, ...]]:
    """Load a backbone's tokenizer and stop tokens, without its weights."""
    from transformers import GenerationConfig as Defaults

    from extract.backbone.checkpoint import load_outline, window_of

    found = load_outline(config.model_path)
    defaults = Defaults.from_pretrained(config.model_path)
    words = TokenizerOnly(
        found.tokenizer, max_length=window_of(found.config), name=config.model
    )
    return words, stop_ids_of(defaults.eos_token_id, config.model)


def asking_identity(config: RunConfig) -> dict[str, Any]:
    """Return what changes the prompts and the length of the answers."""
    return dataclasses.asdict(config.prompt) | {
        "schema": SCHEMA_VERSION,
        "max_new_tokens": config.max_new_tokens,
    }


def answer_by_server(
    run: RunDir,
    config: RunConfig,
    generator: Generator,
    words: TokenizerOnly,
    progress: Progress,
) -> None:
    """Answer every question by asking a server, with the exact token ids."""
    identity = dict(generator.identity) | asking_identity(config)

    def work(update: Update) -> None:
        record_backend(run, identity)
        asked = ask_run(run, words, config.prompt, config.max_new_tokens)
        if asked.note:
            progress.note(f"answer: {asked.note}")
        rows = open_answers(answers_file(run), asked.requests, run.answer_parts)
        for note in rows.notes:
            progress.note(note)
        append_answers(
            rows,
            asked.requests,
            generator,
            words.tokenizer,
            SamplingConfig(max_new_tokens=config.max_new_tokens),
            update,
        )

    inputs = run.hash_inputs(*question_files(run)) | {"server": _sha(identity)}
    once(run, "answer", inputs, [run.answers], progress, work)


def question_files(run: RunDir) -> list[Path]:
    """Return the files that the questions are read from."""
    return [run.examples, *([run.rewrites] if run.rewrites.exists() else [])]


def draw_run(
    run: RunDir,
    config: RunConfig,
    generator: Generator,
    words: TokenizerOnly,
    draws: DrawConfig,
    splits: tuple[str, ...],
    progress: Progress,
    *,
    as_text: bool = False,
) -> Path:
    """Draw answers to the questions of some splits; returns the file of samples."""
    identity = {
        "schema": SCHEMA_VERSION,
        "backend": dict(generator.identity),
        "prompt": dataclasses.asdict(config.prompt),
        "splits": list(splits),
        "draws": dataclasses.asdict(draws),
    }
    path = run.samples / "samples.jsonl"

    def work(update: Update) -> None:
        replies = _open_replies(run, "sample", progress)
        examples = [e for e in read_examples(run) if e.split in splits]
        asked = make_requests(
            examples, words, config.prompt, draws.sampling.max_new_tokens
        )
        if asked.note:
            progress.note(f"sample: {asked.note}")
        samples = draw_answers(
            asked.requests,
            generator,
            words.tokenizer,
            replies,
            draws,
            update,
            as_text=as_text,
        )
        _say_reused("sample", replies, progress)
        n_bare = sum(sample.log_probs is None for sample in samples)
        n_cut = sum(sample.finish == "length" for sample in samples)
        progress.note(
            f"sample: {len(samples)} drawn, {n_bare} without log-probabilities, "
            f"{n_cut} cut at {draws.sampling.max_new_tokens} tokens"
        )
        write_text_atomic(path, write_lines(samples))
        write_json_atomic(run.samples / "config.json", identity)

    inputs = run.hash_inputs(*question_files(run)) | {"sampler": _sha(identity)}
    once(run, "sample", inputs, [run.samples], progress, work)
    return path
