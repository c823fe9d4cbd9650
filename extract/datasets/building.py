"""Build one folder of examples with fixed splits from published files.

Files are read twice, once to draw questions and once to write the drawn ones, so that
memory never holds a whole file, only ids and the drawn questions of one set.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from beatrice.extract.datasets.fields import DATASETS, Question
from beatrice.extract.datasets.loading import (
    MAX_LISTED,
    DatasetFile,
    Loaded,
    Refusal,
    none_usable,
    open_dataset,
    unread_in_words,
)
from beatrice.extract.datasets.splits import (
    HELD_OUT_SIZES,
    N_FIRST,
    SPLITS_OF,
    VERSION,
    BuildConfig,
    Candidate,
    Context,
    DataConfig,
    DrawnSplits,
    Role,
    Source,
    draw_splits,
    questions_digest,
    read_splits,
)
from beatrice.extract.records import Example, Passage, Split, text_key, to_json
from beatrice.extract.run.files import (
    seal,
    sha256_file,
    write_json_atomic,
    write_stream_atomic,
)

_FILES = ("examples.jsonl", "passages.jsonl")
_WANTED: dict[Context, str] = {
    "supporting": "a supporting passage",
    "first": "a supporting passage",
    "all": "a passage",
    "none": "an answer",
}
Pools = dict[tuple[str, Role], dict[str, Candidate]]  # by set and role, then by id
Report = dict[str, Any]  # counts and refusals of one file, as in the manifest


def is_usable(row: Loaded, context: Context) -> bool:
    """Return whether a question has the passages that the context needs."""
    return context == "none" or bool(row.question.context(context))


def open_source(source: Source, config: BuildConfig) -> DatasetFile:
    """Recognise a file, which must be of the question set it was given for."""
    return open_dataset(source.path, dataset=source.dataset, evidence=config.evidence)


def with_contexts_of_files(config: BuildConfig) -> BuildConfig:
    """Choose the context of every set of the user's own, unless one was given.

    It is `supporting` if a passage of a file's first questions is marked as supporting,
    `all` if none is marked, and `none` if they have no passages.
    """
    if config.context is not None:
        return config
    contexts, unmarked = dict(config.contexts), set[str]()
    for dataset in dict.fromkeys(source.dataset for source in config.sources):
        if dataset in DATASETS or dataset in contexts:
            continue
        marks = [
            passage.is_supporting
            for source in config.sources
            if source.dataset == dataset
            for row in itertools.islice(open_source(source, config).read(), N_FIRST)
            if isinstance(row, Loaded)
            for passage in row.question.passages
        ]
        contexts[dataset] = "supporting" if any(marks) else "all" if marks else "none"
        if not any(marks):
            unmarked.add(dataset)
    return dataclasses.replace(config, contexts=contexts, unmarked=frozenset(unmarked))


def _counted_name(row: Loaded, source: Source, config: BuildConfig) -> str:
    """Return the name under which a question of a file is counted.

    If its set's context was chosen because the first questions had no marked passage, a
    later mark is an error: the distractors of that question would be shown.
    """
    if row.question.split not in (None, *SPLITS_OF[source.role]):
        return "of_another_split"
    name, passages = source.dataset, row.question.passages
    if name in config.unmarked and any(p.is_supporting for p in passages):
        raise ValueError(
            f"{source.path}, record {row.number} ({row.at}): a passage is marked as "
            f"supporting, unlike those of the first {N_FIRST} records; choose with "
            f"--context {name}=supporting, --context {name}=all or --context "
            f"{name}=none"
        )
    if config.fixed is None and text_key(row.question.question) in config.shots:
        return "worked_example"
    is_fit = is_usable(row, config.context_of(source.dataset))
    return "usable" if is_fit else "without_passages"


def _read_pool(
    source: Source, config: BuildConfig, pool: dict[str, Candidate]
) -> Report:
    """Add the usable questions of one file to its set's pool; return its report."""
    file = open_source(source, config)
    context = config.context_of(source.dataset)
    names = "records usable without_passages of_another_split worked_example".split()
    counts: dict[str, int] = dict.fromkeys(names, 0)
    repeats, refusals = list[Refusal](), list[Refusal]()
    unread = collections.Counter[str]()
    numbers: dict[str, int] = {}  # of this file's questions, by id
    for row in file.read():
        counts["records"] += 1
        if isinstance(row, Refusal):
            if not config.skip_bad:
                raise ValueError(
                    f"{file.path}, record {row.number} ({row.at}): {row.reason}; "
                    "use --skip-bad to leave such records out and list them"
                )
            refusals.append(row)
            continue
        unread.update(row.unread)
        counts[(use := _counted_name(row, source, config))] += 1
        if use != "usable":
            continue
        question, name = row.question, str(row.question.id)
        if question.has_made_id and name in pool:
            # The same text again: the first one stands for both.
            where = f"record {numbers[name]}" if name in numbers else "another file"
            reason = f"repeats the question of {where}, without an id of its own"
            repeats.append(Refusal(row.number, row.at, reason))
            continue
        if name in pool:  # a file's own ids are unique
            raise ValueError(
                f"{source.path} and another {source.role} file of {source.dataset} "
                f"both have the id {name!r}; give one of the two files"
            )
        numbers[name] = row.number
        pool[name] = Candidate(name, text_key(question.question), question.split)
    n = counts["records"]
    if len(refusals) == n:
        raise ValueError(none_usable(source.path, n, refusals[0]))
    if counts["of_another_split"] == n:
        raise ValueError(
            f"{source.path}: all {n} records name a split that --{source.role} does "
            "not fill; give the file under another option, or remove the field 'split' "
            "to have splits drawn"
        )
    if not counts["usable"]:
        raise ValueError(
            f"{source.path}: none of {n} records has {_WANTED[context]}; give another "
            f"file, or --context {source.dataset}=none to ask closed-book only"
        )
    return {
        "dataset": source.dataset,
        "role": source.role,
        "file": source.path.name,
        "sha256": sha256_file(source.path),
        "format": file.format.name,
        "context": context,
        **counts,
        "repeated": len(repeats),
        "repeats": [dataclasses.asdict(row) for row in repeats[:MAX_LISTED]],
        "refused": len(refusals),
        "refusals": [dataclasses.asdict(row) for row in refusals[:MAX_LISTED]],
        "refusals_not_listed": max(0, len(refusals) - MAX_LISTED),
        "unread": dict(unread),
    }


def _read_pools(
    config: BuildConfig, note: Callable[[str], None]
) -> tuple[Pools, list[Report]]:
    """Read every file once; return what can be drawn and a report of each file."""
    pools: Pools = {}
    reports = []
    for source in config.sources:
        pool = pools.setdefault((source.dataset, source.role), {})
        report = _read_pool(source, config, pool)
        reports.append(report)
        note(
            f"{source.dataset} {source.role}: {report['usable']} of "
            f"{report['records']} records can be used ({report['refused']} refused, "
            f"{report['without_passages']} without {_WANTED[report['context']]}, "
            f"{report['repeated']} repeated, {report['of_another_split']} of another "
            f"split, {report['worked_example']} worked examples of the prompt)"
            f"{'; closed-book only' if report['context'] == 'none' else ''}"
        )
        if report["unread"]:
            note(f"{source.dataset} {source.role}: {unread_in_words(report['unread'])}")
    return pools, reports


def _drawn_rows(
    dataset: str, config: BuildConfig, order: Mapping[str, Split]
) -> dict[str, tuple[Example, Question]]:
    """Return the drawn questions of one set by id; `order` has their splits."""
    rows: dict[str, tuple[Example, Question]] = {}
    context = config.context_of(dataset)
    for source in config.sources:
        if source.dataset != dataset:
            continue
        for row in open_source(source, config).read():
            if isinstance(row, Refusal) or not is_usable(row, context):
                continue  # counted when the file was read to draw
            question, name = row.question, str(row.question.id)
            # If files of two roles have the same id, take it from the split's own file.
            if order.get(name) not in SPLITS_OF[source.role] or name in rows:
                continue
            example = question.as_example(order[name], question.context(context))
            rows[name] = example, question
    if missing := [name for name in order if name not in rows]:
        raise ValueError(
            f"{dataset}: {len(missing)} questions of the splits are not in the files "
            f"given or cannot be used, the first is {missing[0]!r}; give the files "
            "that the splits were drawn from"
        )
    return rows


def _write_examples(
    folder: Path,
    splits: Mapping[Split, Mapping[str, Sequence[str]]],
    config: BuildConfig,
    expected: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, str]]:
    """Write all examples and passages, or nothing; return digests of each split.

    Digests that are `expected` are those of the questions that splits were drawn from.
    """
    digests: dict[str, dict[str, str]] = {}
    written: set[bytes] = set()  # passages
    with (
        write_stream_atomic(folder / _FILES[1], is_new=True) as passages,
        write_stream_atomic(folder / _FILES[0], is_new=True) as examples,
    ):
        for dataset in dict.fromkeys(source.dataset for source in config.sources):
            order: dict[str, Split] = {
                name: split
                for split, sets in splits.items()
                for name in sets.get(dataset, ())
            }
            rows = _drawn_rows(dataset, config, order)
            for name in order:
                example, question = rows[name]
                examples.write(f"{to_json(example)}\n".encode())
                for passage in question.passages:
                    line = to_json(Passage(title=passage.title, text=passage.text))
                    key = hashlib.blake2b(line.encode(), digest_size=16).digest()
                    if key not in written:
                        written.add(key)
                        passages.write(f"{line}\n".encode())
            for split, sets in splits.items():
                ids = sets.get(dataset, ())
                digest = questions_digest((x, rows[x][0].question) for x in ids)
                if expected.get(split, {}).get(dataset, digest) != digest:
                    raise ValueError(
                        f"{config.fixed}: the questions of {dataset} in {split} are "
                        "not those the splits were drawn from, though their ids are; "
                        "give those files"
                    )
                digests.setdefault(split, {})[dataset] = digest
    return digests


def build_examples(
    folder: Path, config: BuildConfig, note: Callable[[str], None]
) -> dict[str, Any]:
    """Write `examples.jsonl`, `passages.jsonl` and `splits.json`; return the last."""
    settings = data_config(config).as_json()
    pools, reports = _read_pools(config, note)
    expected: Mapping[str, Mapping[str, str]] = {}
    if config.fixed is None:
        drawn = draw_splits({k: v.values() for k, v in pools.items()}, config.splits)
    else:
        given = read_splits(config.fixed)
        drawn = _given_splits(
            config.fixed, given["splits"], {name for name, _ in pools}
        )
        known = given["config"]["sources"]
        # Digests of version 1 depend on how the version that wrote them folded texts.
        if given["version"] == VERSION:
            expected = given["questions_sha256"]
        elif any(source not in known for source in settings["sources"]):
            note(
                f"{config.fixed} was drawn by an earlier version from other files, so "
                "only ids tell whether the questions are the same"
            )
    digests = _write_examples(folder, drawn.splits, config, expected)
    manifest = seal(
        {
            "format": "beatrice-splits",
            "version": VERSION,
            "config": settings,
            "sources": reports,
            "splits": drawn.splits,
            "sizes": {
                split: {dataset: len(ids) for dataset, ids in sets.items()}
                for split, sets in drawn.splits.items()
            },
            "questions_sha256": digests,
            "files": {name: sha256_file(folder / name) for name in _FILES},
            "passed_over": [dataclasses.asdict(row) for row in drawn.conflicts],
            "repeated_within_a_split": [list(row) for row in drawn.repeated],
        }
    )
    write_json_atomic(folder / "splits.json", manifest)
    return manifest


def data_config(config: BuildConfig) -> DataConfig:
    """Check a configuration, and return what a build depends on."""
    sources, fixed = config.sources, config.fixed
    n_held_out = dict(config.splits.n_held_out.items() - HELD_OUT_SIZES.items())
    for option, values, roles, kind in (
        ("--context", config.contexts, get_args(Role), "file"),
        ("--n-train", config.splits.n_train_of, ("train",), "training file"),
        ("--n-held-out", n_held_out, ("held-out",), "held-out file"),
    ):
        datasets = {source.dataset for source in sources if source.role in roles}
        for dataset in sorted(values.keys() - datasets):
            raise ValueError(
                f"{option} {dataset}={values[dataset]}: no {kind} of {dataset} is "
                "given; give one, or leave the option out"
            )
    for source in sources:
        if not source.path.is_file():
            raise ValueError(f"{source.path}: no such file")
        if fixed is None:
            config.splits.size(source.dataset, source.role)  # fails if there is none
    return DataConfig(
        splits=config.splits if fixed is None else None,
        fixed=None if fixed is None else read_splits(fixed)["sha256"],
        context=config.contexts_as_text(),
        skip_bad=config.skip_bad,
        sources=tuple(
            sorted((s.dataset, s.role, sha256_file(s.path)) for s in sources)
        ),
    )


def _given_splits(
    fixed: Path, splits: Mapping[Split, Mapping[str, list[str]]], datasets: set[str]
) -> DrawnSplits:
    """Return a manifest's splits of the question sets whose files are given."""
    if absent := datasets.difference(*splits.values()):
        raise ValueError(f"{fixed} has no splits of {', '.join(sorted(absent))}")
    chosen: dict[Split, dict[str, list[str]]] = {
        split: {dataset: ids for dataset, ids in sets.items() if dataset in datasets}
        for split, sets in splits.items()
    }
    return DrawnSplits(chosen, [], [])


def check_folder(folder: Path) -> dict[str, Any]:
    """Return a folder's manifest after checking that its files are unchanged."""
    manifest = read_splits(folder / "splits.json")
    for name, expected in manifest["files"].items():
        path = folder / name
        digest = sha256_file(path) if path.is_file() else "missing"
        if digest != expected:
            raise ValueError(
                f"{path} is not the file that splits.json names (expected SHA-256 "
                f"{expected[:12]}…, found {digest[:12]}…); restore it, or build again "
                "in another directory"
            )
    return manifest
