"""What may be drawn from each file, and what each file gave."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from beatrice.extract.datasets.config import BuildConfig, Context, Role, Source
from beatrice.extract.datasets.loading import DatasetFile, Loaded, Refusal, open_dataset
from beatrice.extract.datasets.readers.question import DATASETS
from beatrice.extract.datasets.splits import Candidate
from beatrice.extract.records import text_key
from beatrice.extract.run.files import sha256_file

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
