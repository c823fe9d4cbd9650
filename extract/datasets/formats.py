"""Every known layout, the most telling first, and which of them a record is of."""

import collections
import functools
from collections.abc import Sequence

from extract.datasets.readers import (
    community,
    dpr,
    multihop,
    neutral,
    nq,
    popqa,
    triviaqa,
)
from extract.datasets.readers.fields import has_answers
from extract.datasets.readers.question import Format, Question, Record


def _read_document(record: Record) -> Question | None:
    """Read the source record inside a log; None where it is of no layout."""
    found = recognise_record(record)
    if found is None or found.read is None:
        return None
    if found.is_weak and not has_answers(record):
        return None  # the log's `target` then holds the answer
    return found.read(record)


LM_EVAL = Format(
    name="lm-eval samples",
    fits=lambda r: (
        "doc" in r and bool({"target", "resps", "filtered_resps", "doc_id"} & r.keys())
    ),
    read=functools.partial(neutral.read_lm_eval, read_document=_read_document),
)

FORMATS: tuple[Format, ...] = (
    LM_EVAL,
    *triviaqa.FORMATS,
    *popqa.FORMATS,
    *dpr.FORMATS,
    *nq.FORMATS,
    *neutral.FORMATS,
    *multihop.FORMATS,
    *community.FORMATS,
    *multihop.WEAK_FORMATS,
    *neutral.WEAK_FORMATS,
)


def recognise_record(record: Record) -> Format | None:
    """Return the layout of one record: the first strong one that fits, or a weak."""
    fitting = [known for known in FORMATS if known.fits(record)]
    strong = [known for known in fitting if not known.is_weak]
    return next(iter(strong or fitting), None)


def choose_format(records: Sequence[Record]) -> Format | None:
    """Return the layout of a file from its first records.

    The most frequent one, where a layout that any damaged record fits (a question and
    an answer) only counts if there is no other.
    """
    found = [known for record in records if (known := recognise_record(record))]
    strong = [known for known in found if not known.is_weak]
    counts = collections.Counter(FORMATS.index(known) for known in strong or found)
    if not counts:
        return None
    index, _ = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return FORMATS[index]
