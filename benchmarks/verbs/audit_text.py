"""The audit of the labels as a person and as a program reads it."""

import dataclasses
import json
from typing import Any

from extract.label.annotation import HumanAgreement
from extract.label.audit import Agreement


def _words(row: dict[str, Any]) -> str:
    """Return the agreement in a row as one line."""
    names = [field.name for field in dataclasses.fields(Agreement)]
    return Agreement(**{name: row[name] for name in names}).in_words()


def audit_as_text(found: dict[str, Any], human: HumanAgreement | None) -> str:
    """Return what `audit_labels` found, line by line."""
    lines = [f"labels by {found['labels_by']}", "", "against exact match"]
    for row in found["exact_match"]:
        where = f"{row['setting']}, {row['variant']}"
        lines.append(f"  {where:<26}{_words(row)}")
        if row["n_dropped"]:
            lines.append(
                f"  {'':<26}{row['n_dropped']} of {row['n_answers']} answers without "
                f"a label, {row['n_unparsable_verdicts']} unparsable verdicts"
            )
    if found["judges"]:
        lines += ["", "between rubrics"]
    for row in found["judges"]:
        lines.append(f"  {row['first']} and {row['second']}: {_words(row)}")
    if human is not None:
        lines += ["", f"a person, {human.n_empty} items left empty"]
        lines.append(f"  {'against the labels':<26}{human.judge.in_words()}")
        lines.append(f"  {'against exact match':<26}{human.exact.in_words()}")
    lines += ["", f"{found['n_disagreements']} disagreements in"]
    lines += [f"  {found['disagreements']}", "to be judged blind"]
    return "\n".join([*lines, f"  {found['sample']}"])


def audit_as_json(found: dict[str, Any], human: HumanAgreement | None) -> str:
    """Return what `audit_labels` found on one line."""
    extra = {} if human is None else {"human": dataclasses.asdict(human)}
    return json.dumps(found | extra)
