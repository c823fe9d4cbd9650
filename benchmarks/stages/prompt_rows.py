"""How many prompts were cut to fit the model's window, as rows of the results."""

import collections
import json

from extract.pipeline import left_out_file, read_answers, read_examples
from extract.records import SETTINGS
from extract.run.directory import RunDir
from extract.run.results import ResultRow


def prompt_rows(run: RunDir) -> list[ResultRow]:
    """Return the share of cut prompts per set, split and setting.

    `n` counts the prompts that were answered, `n_failed` the questions that were not
    asked in this setting, since not even one passage fitted.
    """
    examples = {example.id: example for example in read_examples(run)}
    n_asked: collections.Counter[tuple[str, str, str]] = collections.Counter()
    n_cut, n_left_out = n_asked.copy(), n_asked.copy()
    for setting in SETTINGS:
        for answer in read_answers(run, setting):
            example = examples[answer.example_id]
            group = (setting, example.dataset, example.split)
            n_asked[group] += 1
            n_cut[group] += bool(answer.dropped)
    path = left_out_file(run)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for row in map(json.loads, lines):
        example = examples[row["example_id"]]
        n_left_out[row["setting"], example.dataset, example.split] += 1
    return [
        ResultRow(
            experiment="prompts",
            detector="backbone",
            setting="closed_book" if setting == "closed_book" else "with_context",
            dataset=dataset,
            split=split,
            metric="cut",
            value=n_cut[group] / n_asked[group] if n_asked[group] else None,
            n=n_asked[group],
            n_failed=n_left_out[group],
            reason=None if n_asked[group] else "no passage of any question fitted",
        )
        for group in sorted(n_asked.keys() | n_left_out.keys())
        for setting, dataset, split in (group,)
    ]
