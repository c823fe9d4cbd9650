"""What `beatrice data --inspect` shows of a file to a person."""

from collections.abc import Mapping
from typing import Any

_N_SHOWN = 20  # refused records named one by one on the terminal; --json has more
_NOTES = (
    ("repeated_questions", "questions whose text occurred before"),
    ("golds_without_words", "answers of which normalising leaves nothing"),
    ("twice_encoded", "questions with text that was encoded twice"),
    ("empty_passages", "passages without text, left out"),
    ("missing_titles", "questions with a gold title that has no paragraph"),
    ("missing_documents", "evidence files that are not there"),
)


def inspection_as_text(report: Mapping[str, Any]) -> str:
    """Return a report in lines; empty where the file was not read through."""
    if report["records"] is None:
        return ""  # the sentence that follows says what is known
    packed = "gzip, " if report["gzipped"] else ""
    source = f" (told by: {report['dataset_from']})" if report["dataset_from"] else ""
    lines = [
        f"{report['file']}: {report['dataset'] or 'unknown set'}{source}",
        f"  format             {report['format']}; {packed}{report['container']}",
        f"  records            {report['records']}",
        f"  loaded             {report['loaded']}",
        f"  with passages      {report['with_passages']}",
        f"  with gold passages {report['with_gold_passages']}",
        f"  refused            {report['refused']}",
    ]
    lines += [f"  {report[key]:<6} {text}" for key, text in _NOTES if report[key]]
    shown = report["refusals"][:_N_SHOWN]
    lines += [f"  record {r['record']} ({r['at']}): {r['reason']}" for r in shown]
    if report["refused"] > len(shown):
        n_more = report["refused"] - len(shown)
        lines.append(
            f"  and {n_more} more; --json lists the first 1000 of all"
            + (
                f", {left} are counted only"
                if (left := report["refusals_not_listed"])
                else ""
            )
        )
    # A file's name may hold what no terminal can show.
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()
