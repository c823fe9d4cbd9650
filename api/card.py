"""The card of a probe: what people and the Hub read of it, its `README.md`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from beatrice.extract.backbone.names import IN_MEMORY
from beatrice.jaxprobe.detector import Detector, HeadName
from beatrice.jaxprobe.scope import CONFIDENCE, PRECISIONS

_METRICS = {
    "auroc": "AUROC",
    "auroc of perplexity": "perplexity's",
    "auroc of text alone": "of text alone",
    "auprc": "AUPRC",
    "ece": "ECE",
    "brier": "Brier",
}
_OF_PROBE = ("auroc", "auprc", "ece", "brier")
_UNNAMED = "an unnamed model"
# By what a head judges, the data set and the split: rows of a report by metric.
_Groups = dict[tuple[str, str, str], dict[str, Mapping[str, Any]]]


def answers_of(detector: Detector, head: HeadName) -> str:
    """Say what a head judges; two that read the same encoders are one in words."""
    if head == "closed_book":
        return "closed-book answers"
    reads = detector.heads[head].reads if head in detector.heads else ()
    passes = {where for where, _ in reads}
    which = "the closed-book pass" if passes == {"closed_book"} else "their own pass"
    which = "both passes" if len(passes) == 2 else which
    return f"answers with context, read in {which}"


def _groups(detector: Detector, report: Sequence[Mapping[str, Any]]) -> _Groups:
    groups: _Groups = {}
    for row in report:
        answers = answers_of(detector, row["head"])
        key = (answers, str(row.get("dataset") or ""), row["split"])
        groups.setdefault(key, {})[row["metric"]] = row
    return groups


def card(detector: Detector, report: Sequence[Mapping[str, Any]]) -> str:
    """Return a probe's `README.md`: front matter of the Hub, use, numbers, limits.

    The report is rows of what it is worth, as `Probe.report` has them.
    """
    groups, model = _groups(detector, report), _name_of(detector) or _UNNAMED
    return "\n".join(
        (
            _front_matter(detector, groups),
            f"# P(correct) of answers of {model}",
            "",
            "A probe of beatrice (`pip install .` in a checkout of it): it reads the "
            f"internal signals of {model} in the pass that writes an answer, and "
            "returns a calibrated probability that the answer is correct.",
            "",
            "```python",
            "import beatrice",
            "",
            *_example(detector),
            "```",
            "",
            "## What it is worth",
            "",
            *_table(groups),
            "",
            "AUROC: higher is better, .5 is chance. AUPRC, whose positive class is a "
            "wrong answer: higher is better, the share of wrong answers is chance. ECE "
            "and Brier: lower is better. Intervals are 95 %. Rows of the split "
            "`validation` flatter, since it chose encoders and maps.",
            "",
            *_decisions(detector),
            "## Scope and limits",
            "",
            *_scope(detector),
            "",
        )
    )


def _name_of(detector: Detector) -> str | None:
    """Return the name by which the model is loaded; None of arrays and in memory."""
    trained = detector.provenance
    return None if trained is None or trained.model == IN_MEMORY else trained.model


def _example(detector: Detector) -> list[str]:
    """Return the lines of Python that load the folder and judge answers."""
    if detector.provenance is None:
        return [
            'probe = beatrice.load("this folder")',
            "probe.predict(signals)  # `beatrice.Signals` read as those of the fit",
        ]
    lines = ['probe = beatrice.load("this folder")']
    if _name_of(detector) is None:
        lines = [
            "# Of Transformers: the model and the tokenizer that it was fitted on.",
            "model = beatrice.LanguageModel(model, tokenizer)",
            'probe = beatrice.load("this folder", model=model)',
        ]
    context = ', context="Dracula is a novel by Bram Stoker."'
    context = "" if "closed_book" in detector.heads else context
    return [
        *lines,
        f'probe.answer("who wrote Dracula?"{context})  # answers, and says P(correct)',
        f'probe.score("who wrote Dracula?", "Bram Stoker"{context})',
    ]


def _front_matter(detector: Detector, groups: _Groups) -> str:
    """Return the block that the Hub reads; JSON values are YAML."""
    datasets = sorted({dataset for _, dataset, _ in groups if dataset})
    model, trained = _name_of(detector), detector.provenance
    # Any other name may be that of somebody else's model on the Hub.
    is_of_hub = trained is not None and trained.commit is not None
    base = {"base_model": model, "base_model_relation": "adapter"} if is_of_hub else {}
    fields: dict[str, Any] = {
        "library_name": "beatrice",
        **base,
        "pipeline_tag": "text-classification",
        "tags": ["beatrice", "answer-correctness", "calibration", "probing"],
        "datasets": datasets,
        "metrics": ["roc_auc", "brier_score"],
    }
    results = [
        {
            "task": {"type": "text-classification", "name": answers},
            "dataset": {
                "type": dataset or "own",
                "name": dataset or "own",
                "split": split,
            },
            "metrics": [{"type": metric, "value": row["value"]}],
        }
        for (answers, dataset, split), rows in groups.items()
        for metric, row in rows.items()
        if split != "validation" and row["value"] is not None and metric in _OF_PROBE
    ]
    if results:
        name = f"{model or _UNNAMED} probe"
        fields["model-index"] = [{"name": name, "results": results}]
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(("---", *lines, "---", ""))


def _table(groups: _Groups) -> list[str]:
    """Return the report as a table: a line for every head, set and split."""
    if not groups:
        return ["Nobody has measured it on answers that did not choose it."]
    names = [n for n in _METRICS if any(n in rows for rows in groups.values())]
    lines = [
        f"| answers | set | split | n | {' | '.join(_METRICS[n] for n in names)} |",
        f"|---|---|---|---:|{'---|' * len(names)}",
    ]
    for (answers, dataset, split), rows in groups.items():
        n = next(iter(rows.values()))["n"]
        cells = [cell_of(rows.get(name)) for name in names]
        lines.append(f"| {answers} | {dataset} | {split} | {n} | {' | '.join(cells)} |")
    return lines


def cell_of(row: Mapping[str, Any] | None) -> str:
    """Return a row's number and its interval; – where there is none."""
    if row is None or row["value"] is None:
        return "–"
    text = f"{row['value']:.3f}"
    if None not in (row.get("ci_low"), row.get("ci_high")):
        text += f" [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
    return text


def _decisions(detector: Detector) -> list[str]:
    """Return from which P on answers are trusted, for several precisions."""
    lines = []
    for name, head in sorted(detector.heads.items()):
        for precision in PRECISIONS:
            cells = [
                "–"
                if threshold.p_correct is None
                else f"{threshold.p_correct:.3f} ({threshold.coverage:.1%})"
                for threshold in head.thresholds(precision)
            ]
            line = [answers_of(detector, name), str(precision), *cells]
            lines.append(f"| {' | '.join(line)} |")
    return [
        "## Decisions",
        "",
        'With `load(…, precision=0.8)` a score says "trust" from the P on where .8 of '
        'the answers are right, "distrust" up to the P where .8 are wrong, each with '
        f'{CONFIDENCE:.0%} confidence, and else "unknown". In brackets stands the '
        "share of the validation answers that is decided so; – where no P holds it.",
        "",
        "| answers | precision | trusted from | distrusted up to |",
        "|---|---|---|---|",
        *dict.fromkeys(lines),
        "",
    ]


def _scope(detector: Detector) -> list[str]:
    """Say which model, prompts and answers the numbers hold for."""
    lines = [f"* **{doubt}**" for doubt in detector.doubts]
    trained = detector.provenance
    if trained is not None:
        prompt = trained.prompt
        n_shots = len(prompt.shots)
        chat = "its chat template" if prompt.chat else "no chat template"
        words = vars(prompt.template) if prompt.template_name == "own" else {}
        lines += [
            f"* It belongs to {_name_of(detector) or _UNNAMED}, revision "
            f"`{trained.revision}`, in {trained.dtype}, and is refused for any other.",
            f"* Hidden states are those behind block {trained.layer} (0: the "
            f"embedding). Prompts: template {prompt.template_name!r}, {chat}, "
            f"{n_shots} worked examples; other prompts give a warning.",
            *(f"* Its {name}: `{json.dumps(text)}`" for name, text in words.items()),
        ]
    lines += [
        "* P holds for questions like those of the fit. On other kinds, and in scripts "
        "that the fit did not have, it says less; scores warn where they can tell.",
        "* It judges whether the answer is right, not whether it is harmless.",
    ]
    return lines
