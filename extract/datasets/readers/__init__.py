"""All layouts in which question sets are published, in the order they are tried in."""

import collections
from collections.abc import Iterable

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import Record
from beatrice.extract.datasets.question import Format, Question
from beatrice.extract.datasets.readers import multihop, neutral, single_hop, triviaqa


def _read_document(record: Record) -> Question | None:
    """Read the source record inside a log; None where it is of no layout."""
    layout = recognise_record(record)
    if layout is None or layout.read is None:
        return None
    if layout.is_weak and not fields.has_answers(record):
        return None  # the log's `target` then holds the answer
    return layout.read(record)


def _fits_log(record: Record) -> bool:
    marks = {"target", "resps", "filtered_resps", "doc_id"}
    return "doc" in record and not marks.isdisjoint(record)


def _read_log(record: Record) -> Question:
    return neutral.read_lm_eval(record, read_document=_read_document)


FORMATS: tuple[Format, ...] = (
    Format("lm-eval samples", _fits_log, _read_log),
    *triviaqa.FORMATS,
    *single_hop.POPQA_FORMATS,
    *single_hop.DPR_FORMATS,
    *single_hop.NQ_FORMATS,
    *neutral.FORMATS,
    *multihop.FORMATS,
    *neutral.OTHER_FORMATS,
    *multihop.WEAK_FORMATS,
    *neutral.WEAK_FORMATS,
)
_STRONG_FIRST = sorted(FORMATS, key=lambda layout: layout.is_weak)


def recognise_record(record: Record) -> Format | None:
    """Return the layout of one record: the first strong one that fits, or a weak."""
    return next((layout for layout in _STRONG_FIRST if layout.fits(record)), None)


def choose_format(records: Iterable[Record]) -> Format | None:
    """Return the layout of a file from its first records.

    The most frequent one, where a layout that any damaged record fits (a question and
    an answer) only counts if there is no other.
    """
    counts = collections.Counter(map(recognise_record, records))
    del counts[None]
    return min(
        (layout for layout in counts if layout is not None),
        key=lambda x: (x.is_weak, -counts[x], _STRONG_FIRST.index(x)),
        default=None,
    )
