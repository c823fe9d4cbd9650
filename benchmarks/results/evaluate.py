"""The stage that measures every detector on every set, with intervals."""

import collections
import json
from typing import Any

import numpy as np

from benchmarks.baselines import perplexity_scores, text_scores
from extract.generate.requests import answer_config
from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.contents import (
    left_out_file,
    read_answers,
    read_examples,
    store_files,
)
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.results import ResultRow, publish, rows_file
from extract.run.stages import Stage
from jaxprobe import checkpoint
from jaxprobe.calibration import Reliability, brier, ece, reliability
from jaxprobe.settings import set_compiler
from jaxprobe.detector import Detector
from jaxprobe.evaluation import Scored, bootstrap_of, detection_rows
from jaxprobe.features.rows import load_rows
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.stage import EVERY_FAMILY
from jaxprobe.pool import read_selection
from jaxprobe.settings import grid_config

N_BINS = 10


def detectors_of(run: RunDir, setting: Setting) -> list[Scored]:
    """Return what every detector says of every row of a setting."""
    store, rows = load_rows(run, setting)
    tree, _ = checkpoint.restore(run.encoders(setting))
    n_seeds = grid_config(run).train.n_seeds
    logits = tree["outputs"]["logits"].reshape(n_seeds, N_SUBSETS, -1)
    heads, _ = read_selection(run, setting)
    control = tree["control"]
    scored = [
        Scored(name=name, scores=heads[name]["scores"])
        for name in ("champion", "late_fusion_singles", "late_fusion_all")
    ]
    if setting == "with_context":
        alone, _ = read_selection(run, "single_pass")
        name = "without_closed_book"
        scored.append(Scored(name=name, scores=alone["champion"]["scores"]))
    return [
        *scored,
        Scored(name="hidden_only", scores=logits[:, 0]),
        Scored(name="early_fusion", scores=logits[:, EVERY_FAMILY]),
        *(
            Scored(name=f"encoder:{name}", scores=logits[:, subset])
            for subset, name in enumerate(SUBSET_NAMES)
        ),
        Scored(name="tfidf", scores=text_scores(run, rows)),
        Scored(name="perplexity", scores=perplexity_scores(store)),
        Scored(
            name="permuted_labels",
            scores=control["logits"],
            labels=np.asarray(control["labels"], dtype=bool),
        ),
    ]


def _bins(found: Reliability) -> list[dict[str, Any]]:
    """Return the bins that hold an example, as the report shows them."""
    return [
        {
            "lower": float(found.edges[i]),
            "upper": float(found.edges[i + 1]),
            "mean_p": float(found.confidence[i]),
            "accuracy": float(found.accuracy[i]),
            "n": int(n),
        }
        for i, n in enumerate(found.count)
        if n
    ]


def _reliability(
    run: RunDir, setting: Setting
) -> tuple[dict[str, Any], list[ResultRow]]:
    """Return the reliability of the champion on the in-domain test set."""
    _, rows = load_rows(run, setting)
    tree, _ = read_selection(run, setting)
    detector = Detector.load(run.detector)
    where = rows.where("test")
    raw = tree["champion"]["scores"].mean(axis=0)[where]
    labels = rows.labels[where]
    found: dict[str, Any] = {}
    made = []
    calibrator = detector.heads[setting].calibrator
    for name, p_correct in (("raw", raw), ("calibrated", calibrator(raw))):
        values = {
            "brier": brier(p_correct, labels),
            "ece": ece(p_correct, labels, N_BINS),
        }
        found[name] = _bins(reliability(p_correct, labels, N_BINS))
        for metric, value in values.items():
            found[f"{metric}_{name}"] = value
            made.append(
                ResultRow(
                    experiment="calibration",
                    detector=f"champion:{name}",
                    setting=setting,
                    dataset="+".join(dict.fromkeys(map(str, rows.datasets[where]))),
                    split="test",
                    metric=metric,
                    value=value,
                    n=len(where),
                )
            )
    return found, made


def _evaluate(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    bootstrap = bootstrap_of(run)
    found, curves = [], {}
    for number, setting in enumerate(SETTINGS):
        _, rows = load_rows(run, setting)
        found += detection_rows(detectors_of(run, setting), rows, bootstrap)
        curves[setting], made = _reliability(run, setting)
        found += made
        update(number + 1, len(SETTINGS))
    if answer_config(run).prompt.overlong != "refuse":
        found += prompt_rows(run)
    write_json_atomic(run.path / "reliability.json", curves)
    publish(run, "evaluate", found, progress)


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


EVALUATE = Stage(
    name="evaluate",
    inputs=lambda run: [
        run.labels,
        run.answers,
        run.detector,
        run.path / "selection",
        *(run.encoders(setting) for setting in SETTINGS),
        *store_files(run),
    ],
    outputs=lambda run: [rows_file(run, "evaluate"), run.path / "reliability.json"],
    work=_evaluate,
)
