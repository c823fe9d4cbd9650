"""The card of a probe: its `README.md`, written for people and for the Hub."""

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
# Key: what a head judges, question set, split. Value: the report's rows by metric.
_Groups = dict[tuple[str, str, str], dict[str, Mapping[str, Any]]]


def answers_of(detector: Detector, head: HeadName) -> str:
    """Describe what a head judges; heads that read the same passes share a text."""
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
    """Return a probe's `README.md`: the Hub's front matter, use, metrics, limits.

    `report` holds metric rows as in `Probe.report`.
    """
    groups, model = _groups(detector, report), _name_of(detector) or _UNNAMED
    return "\n".join(
        (
            _front_matter(detector, groups),
            f"# P(correct) of answers of {model}",
            "",
            f"A probe for {model}, made with beatrice (`pip install .` in a checkout): "
            "it reads the model's internal signals in the pass that writes an answer, "
            "and returns a calibrated probability that the answer is correct.",
            "",
            "```python",
            "import beatrice",
            "",
            *_example(detector),
            "```",
            "",
            "## Metrics",
            "",
            *_table(groups),
            "",
            "AUROC: higher is better, .5 is chance. AUPRC, whose positive class is a "
            "wrong answer: higher is better, chance is the share of wrong answers. ECE "
            "and Brier: lower is better. Intervals are 95 %. Rows of the split "
            "`validation` are optimistic, since it chose encoders and calibration.",
            "",
            *_decisions(detector),
            "## Scope and limits",
            "",
            *_scope(detector),
            "",
        )
    )


def _name_of(detector: Detector) -> str | None:
    """Return the name that loads the model; None for arrays or a model in memory."""
    trained = detector.provenance
    return None if trained is None or trained.model == IN_MEMORY else trained.model


def _example(detector: Detector) -> list[str]:
    """Return the lines of Python that load the folder and score answers."""
    lines = ['probe = beatrice.load("this folder")']
    if detector.provenance is None:
        predict = "probe.predict(signals)  # `beatrice.Signals`, read as for the fit"
        return [*lines, predict]
    if _name_of(detector) is None:
        lines = [
            "# The Transformers model and tokenizer that it was fitted on:",
            "model = beatrice.LanguageModel(model, tokenizer)",
            'probe = beatrice.load("this folder", model=model)',
        ]
    context = ', context="Dracula is a novel by Bram Stoker."'
    context = "" if "closed_book" in detector.heads else context
    return [
        *lines,
        f'probe.answer("who wrote Dracula?"{context})  # answers and scores',
        f'probe.score("who wrote Dracula?", "Bram Stoker"{context})',
    ]


def _front_matter(detector: Detector, groups: _Groups) -> str:
    """Return the front matter that the Hub reads; JSON values are valid YAML."""
    datasets = sorted({dataset for _, dataset, _ in groups if dataset})
    model, trained = _name_of(detector), detector.provenance
    # Without a commit, the name may be someone else's model on the Hub.
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
    """Return the report as a table with a line for every head, set and split."""
    if not groups:
        return ["It has not been measured on held-out answers."]
    names = [n for n in _METRICS if any(n in rows for rows in groups.values())]
    lines = [
        "| answers | set | split | n | right | "
        f"{' | '.join(_METRICS[name] for name in names)} |",
        f"|---|---|---|---:|---:|{'---|' * len(names)}",
    ]
    for (answers, dataset, split), rows in groups.items():
        first = next(iter(rows.values()))
        n_right = first.get("n_right")  # older reports lack it
        counts = (str(first["n"]), "–" if n_right is None else str(n_right))
        values = (cell_of(rows.get(name)) for name in names)
        cells = (answers, dataset, split, *counts, *values)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cell_of(row: Mapping[str, Any] | None) -> str:
    """Return a row's value and interval as text, or – if it has no value."""
    if row is None or row["value"] is None:
        return "–"
    text = f"{row['value']:.3f}"
    if None not in (row.get("ci_low"), row.get("ci_high")):
        text += f" [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
    return text


def _decisions(detector: Detector) -> list[str]:
    """Return the section on decisions: the thresholds on P at several precisions."""
    lines, heads = [], sorted(detector.heads.items())
    tried = sorted({head.evidence.n_tried for _, head in heads} - {1})
    numbers = " or ".join(map(str, tried))
    chosen = f" after a choice among {numbers} encoders" if tried else ""
    for name, head in heads:
        for precision in PRECISIONS:
            cells = [
                "–"
                if threshold.p_correct is None
                else f"{threshold.digits} ({threshold.coverage:.1%})"
                for threshold in head.thresholds(precision)
            ]
            line = [answers_of(detector, name), str(precision), *cells]
            lines.append(f"| {' | '.join(line)} |")
    return [
        "## Decisions",
        "",
        'With `load(…, precision=0.8)`, a decision is "trust" from a P above which '
        '.8 of the answers are right, and "distrust" up to a P below which .8 are '
        f"wrong, each with {CONFIDENCE:.0%} confidence{chosen}; otherwise it is "
        '"unknown". In brackets: the share of validation answers decided so; –: no '
        "such P.",
        "",
        "| answers | precision | trusted from | distrusted up to |",
        "|---|---|---|---|",
        *dict.fromkeys(lines),
        "",
    ]


def _scope(detector: Detector) -> list[str]:
    """Return which model, prompts and answers the numbers hold for."""
    lines = [f"* **{doubt}**" for doubt in detector.doubts]
    trained = detector.provenance
    if trained is not None:
        prompt = trained.prompt
        n_shots = len(prompt.shots)
        chat = "its chat template" if prompt.chat else "no chat template"
        words = vars(prompt.template) if prompt.template_name == "own" else {}
        lines += [
            f"* It belongs to {_name_of(detector) or _UNNAMED}, revision "
            f"`{trained.revision}`, in {trained.dtype}, and refuses any other.",
            f"* It reads the hidden states after block {trained.layer} (0: the "
            f"embedding). Prompts: template {prompt.template_name!r}, {chat}, "
            f"{n_shots} worked examples; other prompts give a warning.",
            *(f"* Its {name}: `{json.dumps(text)}`" for name, text in words.items()),
        ]
    lines += [
        "* P holds for questions like those of the fit. It is less reliable for other "
        "kinds of questions and for other scripts; scores warn if this is detected.",
        "* It judges whether the answer is right, not whether it is harmless.",
    ]
    return lines
