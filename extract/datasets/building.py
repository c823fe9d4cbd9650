"""From published files to one folder of examples with fixed splits.

Files are read twice, so that memory holds ids and the drawn questions of one set, not
a file: once to draw, once to write what was drawn.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from beatrice.extract.datasets.loading import DatasetFile, Loaded, Refusal, open_dataset
from beatrice.extract.datasets.question import DATASETS
from beatrice.extract.datasets.splits import (
    BuildConfig,
    Candidate,
    Context,
    DataConfig,
    Draw,
    Role,
    Source,
    draw_splits,
    questions_digest,
    read_splits,
    seal,
)
from beatrice.extract.records import Passage, Split, text_key, to_json
from beatrice.extract.run.files import (
    sha256_file,
    write_json_atomic,
    write_stream_atomic,
)

MAX_LISTED = 1000  # refusals named one by one in the manifest; all are counted
_WANTED = {
    "supporting": "a supporting passage",
    "first": "a supporting passage",
    "all": "a passage",
    "none": "an answer",
}


@dataclasses.dataclass
class SourceReport:
    """What one file gave."""

    source: Source
    format: str
    sha256: str
    context: Context
    records: int = 0
    usable: int = 0
    left_out: int = 0
    elsewhere: int = 0
    repeats: list[Refusal] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return what the manifest says of the file."""
        listed = self.refusals[:MAX_LISTED]
        return {
            "dataset": self.source.dataset,
            "role": self.source.role,
            "file": self.source.path.name,
            "sha256": self.sha256,
            "format": self.format,
            "records": self.records,
            "usable": self.usable,
            "context": self.context,
            "without_passages": self.left_out,
            "of_another_split": self.elsewhere,
            "repeated": len(self.repeats),
            "repeats": [dataclasses.asdict(one) for one in self.repeats[:MAX_LISTED]],
            "refused": len(self.refusals),
            "refusals": [dataclasses.asdict(refusal) for refusal in listed],
            "refusals_not_listed": len(self.refusals) - len(listed),
        }


def _accepted(
    file: DatasetFile, report: SourceReport, config: BuildConfig
) -> Iterator[Loaded]:
    """Yield the questions of a file that can be used; count the others."""
    splits = config.splits.sizes(report.source.dataset, report.source.role)
    for found in file.read():
        report.records += 1
        if isinstance(found, Refusal):
            if not config.skip_bad:
                raise ValueError(
                    f"{file.path}, record {found.number} ({found.at}): {found.reason}; "
                    "--skip-bad leaves such records out and lists them"
                )
            report.refusals.append(found)
        elif found.question.split not in (None, *splits):
            report.elsewhere += 1
        elif is_usable(found, report.context):
            report.usable += 1
            yield found
        else:
            report.left_out += 1


def is_usable(found: Loaded, context: Context) -> bool:
    """Tell whether a question has the passages that are asked for."""
    passages = found.question.passages
    if context in ("supporting", "first"):
        return any(passage.is_supporting for passage in passages)
    return context == "none" or bool(passages)


N_LOOKED_AT = 256  # questions of a file, by which a set's default context is chosen


def with_contexts_of_files(
    sources: Sequence[Source], config: BuildConfig
) -> BuildConfig:
    """Choose the context of every set that is none of the published ones.

    Where nothing else is asked for: its supporting passages if any are marked, all of
    them if none is, and no context where none came with the questions.

    Raises:
      ValueError: a file is refused.
    """
    if config.context is not None:
        return config
    contexts = dict(config.contexts)
    for dataset in dict.fromkeys(source.dataset for source in sources):
        if dataset in DATASETS or dataset in contexts:
            continue
        rows = (
            row
            for source in sources
            if source.dataset == dataset
            for row in itertools.islice(open_source(source, config).read(), N_LOOKED_AT)
        )
        found = [r.question.passages for r in rows if isinstance(r, Loaded)]
        marks = [p.is_supporting for passages in found for p in passages]
        contexts[dataset] = "supporting" if any(marks) else "all" if marks else "none"
    return dataclasses.replace(config, contexts=contexts)


def open_source(source: Source, config: BuildConfig) -> DatasetFile:
    """Recognise a file; it must be of the set it was given for."""
    return open_dataset(source.path, dataset=source.dataset, evidence=config.evidence)


def _read_pool(
    source: Source, config: BuildConfig, pool: dict[str, Candidate], others: set[str]
) -> SourceReport:
    """Add what may be drawn from one file to a pool; returns what the file gave.

    Args:
      source: the file.
      config: what counts as usable.
      pool: by id; grows.
      others: ids that came from other files of the same set and role.
    """
    file = open_source(source, config)
    context = config.context_of(source.dataset)
    report = SourceReport(source, file.format.name, sha256_file(source.path), context)
    first: dict[str, int] = {}
    for found in _accepted(file, report, config):
        question, name = found.question, str(found.question.id)
        if question.has_made_id and name in pool:
            # The same text again: the first one stands for both.
            where = f"record {first[name]}" if name in first else "another file"
            reason = f"the question of {where} again, without an id of its own"
            report.repeats.append(Refusal(found.number, found.at, reason))
            continue
        if name in others:
            raise ValueError(
                f"{source.path} has the id {name!r}, as another {source.role} file of "
                f"{source.dataset} does; give one of the two files"
            )
        if question.has_made_id:
            first[name] = found.number
        pool[name] = Candidate(name, text_key(question.question), question.split)
    if report.records and report.elsewhere == report.records:
        raise ValueError(
            f"{source.path}: all {report.records} records name another split than "
            f"--{source.role} is for; give them under another option, or take their "
            "field 'split' out to have splits drawn"
        )
    if not report.usable:
        raise ValueError(
            f"{source.path}: none of {report.records} records has "
            f"{_WANTED[context]}; give a file that has, or "
            f"--context {source.dataset}=none to ask them closed-book only"
        )
    return report


def read_pools(
    sources: Sequence[Source], config: BuildConfig, note: Callable[[str], None]
) -> tuple[dict[tuple[str, Role], dict[str, Candidate]], list[SourceReport]]:
    """Read every file once; returns what may be drawn, and what each file gave."""
    pools: dict[tuple[str, Role], dict[str, Candidate]] = {}
    reports = []
    for source in sources:
        pool = pools.setdefault((source.dataset, source.role), {})
        report = _read_pool(source, config, pool, set(pool))
        reports.append(report)
        context = report.context
        note(
            f"{source.dataset} {source.role}: {report.usable} of {report.records} "
            f"records can be used ({len(report.refusals)} refused, "
            f"{report.left_out} without {_WANTED[context]}, {len(report.repeats)} "
            f"repeated, {report.elsewhere} of another split)"
            f"{'' if context != 'none' else '; closed-book only'}"
        )
    return pools, reports


def _has_other_things(folder: Path) -> bool:
    """Tell whether a folder holds what is neither ours nor a run's that was killed."""
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    if "manifest.json" in names:
        names -= {"manifest.json", "lock", "examples.jsonl", "passages.jsonl"}
    return bool(names)


class _Row(NamedTuple):
    """A drawn question as it is written down."""

    line: str
    text_key: bytes
    passages: list[str]


def _drawn_rows(
    sources: Iterable[Source], config: BuildConfig, order: Mapping[str, Split]
) -> dict[str, _Row]:
    """Return by id the drawn questions of one set; `order` names their splits.

    Raises:
      ValueError: one is not in the files.
    """
    rows: dict[str, _Row] = {}
    for source in sources:
        context = config.context_of(source.dataset)
        for found in open_source(source, config).read():
            if isinstance(found, Refusal) or not is_usable(found, context):
                continue  # counted when the file was read to draw
            question, name = found.question, str(found.question.id)
            if name not in order or name in rows:
                continue
            example = question.as_example(order[name], question.context(context))
            bare = (Passage(title=p.title, text=p.text) for p in question.passages)
            rows[name] = _Row(
                to_json(example), text_key(question.question), list(map(to_json, bare))
            )
    missing = [name for name in order if name not in rows]
    if missing:
        raise ValueError(
            f"{source.dataset}: {len(missing)} questions of the splits are not in the "
            f"files given (or cannot be used), the first is {missing[0]!r}; give the "
            "files that the splits were drawn from"
        )
    return rows


def _write_examples(
    folder: Path,
    sources: Sequence[Source],
    splits: Mapping[Split, Mapping[str, Sequence[str]]],
    config: BuildConfig,
) -> dict[str, dict[str, str]]:
    """Write examples and passages; returns digests of the questions of each split."""
    digests: dict[str, dict[str, str]] = {}
    seen: set[bytes] = set()
    with (
        write_stream_atomic(folder / "examples.jsonl", is_new=True) as examples,
        write_stream_atomic(folder / "passages.jsonl", is_new=True) as passages,
    ):
        for dataset in dict.fromkeys(source.dataset for source in sources):
            names = {split: sets.get(dataset, ()) for split, sets in splits.items()}
            order = {name: split for split, those in names.items() for name in those}
            rows = _drawn_rows(
                (one for one in sources if one.dataset == dataset), config, order
            )
            for name in order:
                examples.write(f"{rows[name].line}\n".encode())
                for line in rows[name].passages:
                    key = hashlib.blake2b(line.encode(), digest_size=16).digest()
                    if key not in seen:  # no earlier question brought it
                        seen.add(key)
                        passages.write(f"{line}\n".encode())
            for split, those in names.items():
                keys = ((name, rows[name].text_key) for name in those)
                digests.setdefault(split, {})[dataset] = questions_digest(keys)
    return digests


def build_examples(
    folder: Path,
    sources: Sequence[Source],
    config: BuildConfig,
    *,
    fixed: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write `examples.jsonl`, `passages.jsonl` and `splits.json` into a folder.

    Args:
      folder: created if absent; refused if it holds anything else.
      sources: at least one file.
      config: what is built.
      fixed: a manifest whose splits are used instead of drawing.
      note: told of each file when it was read.

    Returns:
      The manifest, as in `splits.json`.

    Raises:
      ValueError: a file is refused or too small, or does not fit the fixed splits.
    """
    asked = data_config(sources, config, fixed).as_json()
    if (folder / "splits.json").exists():
        return _continue(folder, asked)
    if folder.exists() and _has_other_things(folder):
        raise ValueError(
            f"{folder} is not empty and has no splits.json; choose another directory"
        )
    pools, reports = read_pools(sources, config, note)
    drawn = _drawn(pools, config, fixed)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    own = [folder / name for name in ("examples.jsonl", "passages.jsonl")]
    ours = [path for path in own if not path.exists()]
    try:
        digests = _write_examples(folder, sources, drawn.splits, config)
        if fixed is not None:
            _check_texts(fixed, digests)
    except BaseException:
        for path in ours:
            path.unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
    manifest = seal(_manifest(folder, asked, reports, drawn, digests))
    write_json_atomic(folder / "splits.json", manifest)
    return manifest


def data_config(
    sources: Sequence[Source], config: BuildConfig, fixed: Path | None
) -> DataConfig:
    """Return what a build depends on.

    Args:
      sources: at least one file.
      config: what is built.
      fixed: a manifest whose splits are used, or None.

    Raises:
      ValueError: a file is missing, the manifest is none, or a set has a context or a
        size of its own and no file.
    """
    for dataset in sorted(config.contexts.keys() - {s.dataset for s in sources}):
        raise ValueError(
            f"--context {dataset}={config.contexts[dataset]}: no file of {dataset} is "
            "given; leave it out, or give one"
        )
    trained = {s.dataset for s in sources if s.role == "train"}
    for dataset in sorted(config.splits.n_train_of.keys() - trained):
        raise ValueError(
            f"--n-train {dataset}={config.splits.n_train_of[dataset]}: no training "
            f"file of {dataset} is given; leave it out, or give one"
        )
    for source in sources:
        if not source.path.is_file():
            raise ValueError(f"{source.path}: no such file")
    return DataConfig(
        splits=config.splits if fixed is None else None,
        fixed=None if fixed is None else read_splits(fixed)["sha256"],
        context=config.contexts_as_text(),
        skip_bad=config.skip_bad,
        sources=tuple(
            sorted((s.dataset, s.role, sha256_file(s.path)) for s in sources)
        ),
    )


def _continue(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a folder that is finished, if it is what is asked for."""
    manifest = check_folder(folder)
    if manifest["config"] != asked:
        differ = ", ".join(
            key for key in asked if manifest["config"].get(key) != asked[key]
        )
        raise ValueError(
            f"{folder} was built with other {differ}; choose another directory"
        )
    return manifest


def _drawn(
    pools: Mapping[tuple[str, Role], Mapping[str, Candidate]],
    config: BuildConfig,
    fixed: Path | None,
) -> Draw:
    """Draw, or take the splits of a manifest for the sets that were given."""
    if fixed is None:
        return draw_splits({k: v.values() for k, v in pools.items()}, config.splits)
    given = {dataset for dataset, _ in pools}
    held = read_splits(fixed)["splits"]
    absent = given - {dataset for sets in held.values() for dataset in sets}
    if absent:
        raise ValueError(f"{fixed} has no splits of {', '.join(sorted(absent))}")
    return Draw(
        {s: {d: n for d, n in sets.items() if d in given} for s, sets in held.items()},
        [],
        [],
    )


def _check_texts(fixed: Path, digests: Mapping[str, Mapping[str, str]]) -> None:
    """Raise if the ids of fixed splits now stand for other questions."""
    held = read_splits(fixed)["questions_sha256"]
    for split, sets in digests.items():
        for dataset, digest in sets.items():
            if held.get(split, {}).get(dataset, digest) != digest:
                raise ValueError(
                    f"{fixed}: the questions of {dataset} in {split} are not those the "
                    "splits were drawn from, though their ids are; give those files"
                )


def _manifest(
    folder: Path,
    asked: Mapping[str, Any],
    reports: Sequence[SourceReport],
    drawn: Draw,
    digests: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Return what is written down about a folder."""
    files = ("examples.jsonl", "passages.jsonl")
    return {
        "format": "beatrice-splits",
        "version": 1,
        "config": asked,
        "sources": [report.as_json() for report in reports],
        "splits": drawn.splits,
        "sizes": {s: {d: len(n) for d, n in sets.items()}
                  for s, sets in drawn.splits.items()},
        "questions_sha256": digests,
        "files": {name: sha256_file(folder / name) for name in files},
        "passed_over": [dataclasses.asdict(one) for one in drawn.conflicts],
        "repeated_within_a_split": [list(one) for one in drawn.repeated],
    }  # fmt: skip


def check_folder(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder whose files are those it names.

    Raises:
      ValueError: the manifest or a file was changed.
    """
    manifest = read_splits(folder / "splits.json")
    for name, expected in manifest["files"].items():
        path = folder / name
        found = sha256_file(path) if path.is_file() else "missing"
        if found != expected:
            raise ValueError(
                f"{path} is not the file that splits.json names (SHA-256 "
                f"{expected[:12]}…, found {found[:12]}…); restore it, or build again "
                "in another directory"
            )
    return manifest
