"""The stage that measures every detector on every set, with intervals."""

import collections
import json
from typing import Any

import numpy as np

from benchmarks.baselines.length import (
    length_features,
    length_scores,
    majority_scores,
    rows_at_equal_length,
)
from benchmarks.baselines.perplexity import perplexity_scores
from benchmarks.baselines.probe import layer_scores, probe_scores
from benchmarks.baselines.text import text_scores
from benchmarks.results.annotated import annotated_rows, human_files
from benchmarks.results.shown import shown_sets
from extract.generate.answers import shares_of
from extract.generate.requests import answer_config
from extract.records import IN_DOMAIN, Answer, Setting
from extract.run.console import Progress, Update
from extract.run.contents import (
    left_out_file,
    read_answers,
    read_examples,
    row_files,
    settings_of,
)
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.results import (
    FAMILY_PAIRS,
    FLOORS,
    RIVALS,
    ResultRow,
    publish,
    rows_file,
)
from extract.run.stages import Stage
from extract.store.read import FeatureStore
from jaxprobe import checkpoint
from jaxprobe.calibration import Reliability, brier, ece, reliability
from jaxprobe.config import set_compiler
from jaxprobe.detector import Detector
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.rows import Rows
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.stage import EVERY_FAMILY
from jaxprobe.metrics import BootstrapConfig
from jaxprobe.stage import (
    chosen_layer,
    encoder_folders,
    grid_config,
    open_rows,
    run_bootstrap,
    run_selection,
)

N_BINS = 10


def detectors_of(run: RunDir, setting: Setting) -> tuple[list[Scored], list[ResultRow]]:
    """Return the scores that every detector gives to every row of a setting.

    And rows of what had to be chosen on validation for them.
    """
    store, rows = open_rows(run, setting)
    tree, _ = checkpoint.restore(run.encoders(setting))
    n_seeds = grid_config(run).train.n_seeds
    logits = tree["outputs"]["logits"].reshape(n_seeds, N_SUBSETS, -1)
    heads, _ = run_selection(run, setting)
    scores = {
        name: heads[name]["scores"]
        for name in ("champion", "late_fusion_singles", "late_fusion_all")
    }
    if setting == "with_context" and len(settings_of(run)) > 1:
        alone, _ = run_selection(run, "single_pass")
        scores["without_closed_book"] = alone["champion"]["scores"]
    scores |= {"hidden_only": logits[:, 0], "early_fusion": logits[:, EVERY_FAMILY]}
    for subset, name in enumerate(SUBSET_NAMES):
        scores[f"encoder:{name}"] = logits[:, subset]
    scores["tfidf"], chosen = text_scores(run, rows)
    scores["perplexity"] = perplexity_scores(store)
    scores["answer_length"] = length_scores(length_features(run, rows), rows)
    scores["majority"] = majority_scores(rows)
    probes, of_probes = probe_scores(store, rows, chosen_layer(run))
    scores |= probes
    control = tree["control"]
    permuted = Scored(
        name="permuted_labels",
        scores=control["logits"],
        labels=np.asarray(control["labels"], dtype=bool),
    )
    detectors = [Scored(name=name, scores=own) for name, own in scores.items()]
    return [*detectors, permuted], [chosen, *of_probes]


def layer_rows(
    store: FeatureStore, rows: Rows, layer: int, config: BootstrapConfig
) -> list[ResultRow]:
    """Return what the layer that is read has before the first and the last one kept.

    Each by logistic regression on the mean state of the answer, as in the sweep; but
    measured on sets that the choice of the layer has not seen.
    """
    kept = store.spec.hidden_layers
    layers = {"layer:chosen": layer, "layer:first": kept[0], "layer:last": kept[-1]}
    distinct = [n for n, x in layers.items() if n == "layer:chosen" or x != layer]
    if len(distinct) == 1:
        return []
    detectors = [
        Scored(name=name, scores=layer_scores(store, rows, layers[name]))
        for name in distinct
    ]
    pairs = {"finding": [("layer:chosen", name) for name in distinct[1:]]}
    return detection_rows(detectors, rows, config, "layer", pairs)


def _bins(curve: Reliability) -> list[dict[str, Any]]:
    """Return the bins that hold an example, as the report shows them."""
    return [
        {
            "lower": float(curve.edges[i]),
            "upper": float(curve.edges[i + 1]),
            "mean_p": float(curve.confidence[i]),
            "accuracy": float(curve.accuracy[i]),
            "n": int(n),
        }
        for i, n in enumerate(curve.count)
        if n
    ]


def _reliability(
    run: RunDir, setting: Setting
) -> tuple[dict[str, Any], list[ResultRow]]:
    """Return the reliability of the champion on all in-domain test sets, and its rows.

    Both of the head's own probability ("raw") and of the calibrated one.
    """
    _, rows = open_rows(run, setting)
    tree, _ = run_selection(run, setting)
    where = rows.where("test")
    raw = tree["champion"]["scores"].mean(axis=0)[where]
    calibrated = Detector.load(run.detector).heads[setting].calibrator(raw)
    labels = rows.labels[where]
    shown: dict[str, Any] = {}
    made = []
    for name, p_correct in (("raw", raw), ("calibrated", calibrated)):
        shown[name] = _bins(reliability(p_correct, labels, N_BINS))
        values = {
            "brier": brier(p_correct, labels),
            "ece": ece(p_correct, labels, N_BINS),
        }
        for metric, value in values.items():
            shown[f"{metric}_{name}"] = value
            made.append(
                ResultRow(
                    experiment="calibration",
                    detector=f"champion:{name}",
                    setting=setting,
                    dataset=IN_DOMAIN,
                    split="test",
                    metric=metric,
                    value=value,
                    n=len(where),
                )
            )
    return shown, made


def _evaluate(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    bootstrap = run_bootstrap(run)
    made, curves, shown = [], {}, []
    settings = settings_of(run)
    for n_done, setting in enumerate(settings, start=1):
        store, rows = open_rows(run, setting)
        pairs = {
            "paired": [("champion", rival) for rival in RIVALS],
            "floor_paired": FLOORS.items(),
            "finding": FAMILY_PAIRS,
        }
        detectors, chosen = detectors_of(run, setting)
        made += chosen
        made += detection_rows(detectors, rows, bootstrap, pairs=pairs)
        made += layer_rows(store, rows, chosen_layer(run), bootstrap)
        n_tokens = length_features(run, rows)[:, 0]
        made += rows_at_equal_length(detectors, rows, n_tokens, bootstrap)
        shown += shown_sets(run, store, rows, progress)
        made += annotated_rows(run, detectors, rows, bootstrap)
        if len(rows.where("test")):
            curves[setting], calibration = _reliability(run, setting)
            made += calibration
        else:
            progress.note(f"evaluate: {setting}: no test answer, so no reliability")
        update(n_done, len(settings))
    made += answer_rows(run)
    if answer_config(run).prompt.overlong != "refuse":
        made += prompt_rows(run)
    write_json_atomic(run.path / "reliability.json", curves)
    write_json_atomic(run.path / "shown.json", shown)
    publish(run, "evaluate", made, progress)


def answer_rows(run: RunDir) -> list[ResultRow]:
    """Return per set, split and setting the shares of `shares_of`: no answer is out."""
    examples = {example.id: example for example in read_examples(run)}
    groups: dict[tuple[Setting, str, str], list[Answer]] = {}
    for answer in read_answers(run):
        example = examples[answer.example_id]
        place = answer.setting, example.dataset, example.split
        groups.setdefault(place, []).append(answer)
    return [
        ResultRow(
            experiment="answers",
            detector="backbone",
            setting=setting,
            dataset=dataset,
            split=split,
            metric=metric,
            value=value,
            n=len(own),
        )
        for (setting, dataset, split), own in groups.items()
        for metric, value in shares_of(own).items()
    ]


def prompt_rows(run: RunDir) -> list[ResultRow]:
    """Return the share of cut prompts per set, split and setting.

    `n` counts the prompts that were answered, `n_failed` the questions that were not
    asked in this setting, since not even one passage fitted.
    """
    examples = {example.id: example for example in read_examples(run)}

    def group(example_id: str, setting: Setting) -> tuple[Setting, str, str]:
        return setting, examples[example_id].dataset, examples[example_id].split

    answers = read_answers(run)
    n_asked = collections.Counter(group(a.example_id, a.setting) for a in answers)
    n_cut = collections.Counter(
        group(a.example_id, a.setting) for a in answers if a.dropped
    )
    path = left_out_file(run)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    left_out = map(json.loads, lines)
    n_left_out = collections.Counter(
        group(row["example_id"], row["setting"]) for row in left_out
    )
    return [
        ResultRow(
            experiment="prompts",
            detector="backbone",
            setting=setting,
            dataset=dataset,
            split=split,
            metric="cut",
            value=n_cut[place] / n_asked[place] if n_asked[place] else None,
            n=n_asked[place],
            n_failed=n_left_out[place],
            reason=None if n_asked[place] else "no passage of any question fitted",
        )
        for place in sorted(n_asked.keys() | n_left_out.keys())
        for setting, dataset, split in (place,)
    ]


EVALUATE = Stage(
    name="evaluate",
    inputs=lambda run: [
        *row_files(run),
        run.answers,
        run.detector,
        run.selection,
        *encoder_folders(run),
        *human_files(run),
    ],
    outputs=lambda run: [
        rows_file(run, "evaluate"),
        run.path / "reliability.json",
        run.path / "shown.json",
    ],
    work=_evaluate,
)
