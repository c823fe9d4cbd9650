"""Fit a probe for the package from the questions of a run.

`python docs/packaged_probe.py RUN MODEL FOLDER [closed_book] [with_context]` uses the
run's answers and signals if MODEL (a name that `beatrice.LanguageModel` knows) wrote
them in float32; otherwise it asks the run's questions again and reads signals in the
passes that write the answers. Hidden states are of the layer that the sweep chose. It
labels by exact match, fits with the default recipe on the splits "train" and
"validation", and measures on the others.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

import beatrice
from beatrice.extract.generate.templates import SHOTS, PromptConfig
from beatrice.extract.label.labels import exact_match
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.store.store import open_store
from beatrice.fitting import metric_rows
from beatrice.jaxprobe.detector import OWN_PASS_HEADS
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.probe import MOST_EXAMPLES

MOST_TOKENS = 16  # of an answer
SPLITS = {"test": "test", "ood": "held out"}  # measured, with their names in the report


def stored(run, model, setting, selected):
    """Return the run's answers and signals, or None if not of this model and dtype."""
    if not run.features(setting).exists():
        return None
    store = open_store(run.features(setting))
    backbone, facts = model.backbone, store.spec.fingerprint
    if (facts["model"], facts["dtype"]) != (backbone.revision, str(backbone.dtype)):
        return None
    originals = [a for a in read_answers(run, setting) if a.variant == "original"]
    by_id = {a.example_id: a for a in originals}
    answers = [by_id[example.id] for example in selected]
    places = {key: i for i, key in enumerate(store.spec.keys)}
    about = {**facts, **model._about(answers, None)}
    spec = dataclasses.replace(store.spec, fingerprint=about)
    where = np.array([places[answer.key] for answer in answers])
    signals = beatrice.Signals(
        dataclasses.replace(store, spec=spec), where, model=model
    )
    return answers, signals


def main(run, name, folder, settings):
    """Fit, measure and save."""
    opened = RunDir(Path(run))
    examples = read_examples(opened)
    layers = [json.loads(opened.sweep.read_text())["layer"]]
    model = beatrice.LanguageModel(name, dtype="float32")
    if name != "embedded":  # short answers, which a gold can match
        model.prompt = PromptConfig(template="few-shot", shots=SHOTS)
    signals, labels, splits, answers, questions = {}, {}, {}, {}, {}
    for setting in settings:
        has_context = setting == "with_context"
        selected = [e for e in examples if e.passages or not has_context]
        contexts = [e.passages for e in selected] if has_context else None
        answers[setting], signals[setting] = stored(
            opened, model, setting, selected
        ) or model.answer(
            selected, contexts, max_new_tokens=MOST_TOKENS, read=True, layers=layers
        )
        questions[setting] = selected
        pairs = zip(answers[setting], selected, strict=True)
        labels[setting] = [exact_match(a.text, e.golds) for a, e in pairs]
        splits[setting] = ["" if e.split == "ood" else e.split for e in selected]
    probe = beatrice.fit(signals, labels, splits=splits)
    report = []
    for setting, selected in questions.items():
        p_correct, truth = probe.predict(signals[setting]), np.array(labels[setting])
        sets = [(e.dataset, e.split) for e in selected]
        ids = np.array([e.id for e in selected])
        for dataset, split in sorted({x for x in sets if x[1] in SPLITS}):
            where = np.flatnonzero([x == (dataset, split) for x in sets])
            p, config = p_correct[where], BootstrapConfig(n_resamples=2000)
            about = {"head": OWN_PASS_HEADS[setting], "dataset": dataset}
            about["split"] = SPLITS[split]
            rows = metric_rows(p, p, truth[where], ids[where], config)
            report += [about | row for row in rows]
    first = settings[0]
    shown = [
        {"question": e.question, "answer": a.text}
        for a, e in zip(answers[first], questions[first], strict=True)
        if e.split == "test" and a.text.strip() and first == "closed_book"
    ]
    probe.with_report(report).save(folder, examples=shown[:MOST_EXAMPLES])
    print(probe.with_report(report).report.to_string())


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:] or ["closed_book"])
