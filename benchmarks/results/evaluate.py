"""The stage that measures every detector on every set, with intervals."""

import collections
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorInput
from beatrice.benchmarks.baselines.judge import run_inputs
from beatrice.benchmarks.baselines.plain import (
    layer_scores,
    length_features,
    length_scores,
    majority_scores,
    perplexity_scores,
    probe_scores,
    rows_at_equal_length,
    text_scores,
)
from beatrice.benchmarks.results.annotated import annotated_rows, read_verdicts
from beatrice.benchmarks.results.names import (
    AT_EQUAL_LENGTH,
    FAMILY_PAIRS,
    FLOORS,
    RIVALS,
)
from beatrice.benchmarks.results.shown import Spell, shown_sets
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import answer_config, shares_of
from beatrice.extract.records import IN_DOMAIN, Answer, Example, Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    left_out_file,
    read_answers,
    read_examples,
    row_files,
    settings_of,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_json_atomic
from beatrice.extract.run.rows import ResultRow, publish, rows_file
from beatrice.extract.run.stages import Stage
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import (
    encoder_folders,
    grid_config,
    run_bootstrap,
    run_selection,
)
from beatrice.jaxprobe.calibration import Reliability, brier, ece, reliability
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.families import N_SUBSETS, SUBSET_NAMES
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import Rows
from beatrice.jaxprobe.train import EVERY_FAMILY
from beatrice.pgir.score_files import shown_tokens

N_BINS = 10
PAIRS = {
    "paired": [("champion", rival) for rival in RIVALS],
    "floor_paired": FLOORS.items(),
    "finding": FAMILY_PAIRS,
}


def detectors_of(
    evidence: DetectorInput,
    encoders: Mapping[str, Any],
    heads: Mapping[str, np.ndarray],
    n_seeds: int,
) -> tuple[list[Scored], list[ResultRow]]:
    """Return the scores that every detector gives to every row of a setting.

    And rows of what had to be chosen on validation for them.

    Args:
      evidence: of the setting, with its texts.
      encoders: the checkpoint of its encoders and of their control.
      heads: scores of selected sets by name, `[n_seeds, n_rows]`.
      n_seeds: of the encoders.
    """
    store, rows = evidence.store, evidence.rows
    logits = encoders["outputs"]["logits"].reshape(n_seeds, N_SUBSETS, -1)
    scores = dict(heads)
    scores |= {"hidden_only": logits[:, 0], "early_fusion": logits[:, EVERY_FAMILY]}
    for subset, name in enumerate(SUBSET_NAMES):
        scores[f"encoder:{name}"] = logits[:, subset]
    scores["tfidf"], chosen = text_scores(evidence.texts, rows)
    scores["perplexity"] = perplexity_scores(store)
    lengths = length_features(evidence.answers)
    scores["answer_length"] = length_scores(lengths, rows)
    scores["majority"] = majority_scores(rows)
    probes, of_probes = probe_scores(store, rows, evidence.layer)
    scores |= probes
    control = encoders["control"]
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


def reliability_of(
    raw: np.ndarray, calibrated: np.ndarray, labels: np.ndarray, setting: Setting
) -> tuple[dict[str, Any], list[ResultRow]]:
    """Return the reliability of the selected set as the report shows it, and its rows.

    Args:
      raw: `[n]` the head's own probability, mean over seeds, on all in-domain test
        sets.
      calibrated: `[n]` the calibrated one.
      labels: `[n]` bool.
      setting: of the answers.
    """
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
                    n=len(labels),
                )
            )
    return shown, made


def answer_rows(
    examples: Sequence[Example], answers: Sequence[Answer]
) -> list[ResultRow]:
    """Return per set, split and setting the shares of `shares_of`: no answer is out."""
    by_id = {example.id: example for example in examples}
    groups: dict[tuple[Setting, str, str], list[Answer]] = {}
    for answer in answers:
        example = by_id[answer.example_id]
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


def prompt_rows(
    examples: Sequence[Example],
    answers: Sequence[Answer],
    left_out: Sequence[Mapping[str, Any]],
) -> list[ResultRow]:
    """Return the share of cut prompts per set, split and setting.

    `n` counts the prompts that were answered, `n_failed` the questions that were not
    asked in this setting, since not even one passage fitted.

    Args:
      examples: all questions.
      answers: to them.
      left_out: the example and the setting of what was not asked.
    """
    by_id = {example.id: example for example in examples}

    def group(example_id: str, setting: Setting) -> tuple[Setting, str, str]:
        return setting, by_id[example_id].dataset, by_id[example_id].split

    n_asked = collections.Counter(group(a.example_id, a.setting) for a in answers)
    n_cut = collections.Counter(
        group(a.example_id, a.setting) for a in answers if a.dropped
    )
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


def run_heads(run: RunDir, setting: Setting) -> dict[str, np.ndarray]:
    """Return the scores of selected sets on the rows of a setting, by name."""
    heads, _ = run_selection(run, setting)
    names = ("champion", "late_fusion_singles", "late_fusion_all")
    scores = {name: heads[name]["scores"] for name in names}
    if setting == "with_context" and len(settings_of(run)) > 1:
        alone, _ = run_selection(run, "single_pass")
        scores["without_closed_book"] = alone["champion"]["scores"]
    return scores


def run_detectors(
    run: RunDir, evidence: DetectorInput
) -> tuple[list[Scored], list[ResultRow]]:
    """Return `detectors_of` a setting of a run."""
    setting = evidence.rows.setting
    encoders, _ = checkpoint.restore(run.encoders(setting))
    n_seeds = grid_config(run).train.n_seeds
    return detectors_of(evidence, encoders, run_heads(run, setting), n_seeds)


def _speller(run: RunDir, progress: Progress) -> Spell | None:
    """Return what spells tokens, or None where the run's backbone is not there."""
    # Loads Torch, which the tables and figures do without.
    from beatrice.extract.backbone.loading import load_outline

    try:
        decode = load_outline(
            run.section("backbone", BackboneConfig).path
        ).tokenizer.decode
    except (ValueError, OSError) as error:
        progress.note(
            "evaluate: the answers to look at have no tokens, since the tokenizer "
            f"could not be loaded: {str(error).splitlines()[0]}"
        )
        return None
    return partial(shown_tokens, decode)


def _human_files(run: RunDir) -> list[Path]:
    """Return the file of a person's verdicts, if `label --audit` has read some."""
    path = run.audit / "human.json"
    return [path] if path.exists() else []


def _evaluate(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    bootstrap, spell = run_bootstrap(run), _speller(run, progress)
    verdicts = [read_verdicts(path) for path in _human_files(run)]
    calibrated = Detector.load(run.detector)
    made, curves, shown = [], {}, []
    settings = settings_of(run)
    for n_done, setting in enumerate(settings, start=1):
        evidence = run_inputs(run, setting)
        rows = evidence.rows
        detectors, chosen = run_detectors(run, evidence)
        made += chosen
        made += detection_rows(detectors, rows, bootstrap, pairs=PAIRS)
        made += layer_rows(evidence.store, rows, evidence.layer, bootstrap)
        n_tokens = length_features(evidence.answers)[:, 0]
        made += rows_at_equal_length(
            detectors, rows, n_tokens, bootstrap, list(AT_EQUAL_LENGTH)
        )
        head = calibrated.heads[setting]
        raw = run_heads(run, setting)["champion"].mean(axis=0)
        shown += shown_sets(evidence, head.calibrator(raw), head.threshold, spell)
        for own in verdicts:
            made += annotated_rows(own, detectors, rows, bootstrap)
        if len(where := rows.where("test")):
            curves[setting], calibration = reliability_of(
                raw[where], head.calibrator(raw[where]), rows.labels[where], setting
            )
            made += calibration
        else:
            progress.note(f"evaluate: {setting}: no test answer, so no reliability")
        update(n_done, len(settings))
    examples, answers = read_examples(run), read_answers(run)
    made += answer_rows(examples, answers)
    if answer_config(run).prompt.overlong != "refuse":
        path = left_out_file(run)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        made += prompt_rows(examples, answers, [json.loads(line) for line in lines])
    write_json_atomic(run.path / "reliability.json", curves)
    write_json_atomic(run.path / "shown.json", shown)
    publish(run, "evaluate", made, progress)


EVALUATE = Stage(
    name="evaluate",
    inputs=lambda run: [
        *row_files(run),
        run.answers,
        run.detector,
        run.selection,
        *encoder_folders(run),
        *_human_files(run),
    ],
    outputs=lambda run: [
        rows_file(run, "evaluate"),
        run.path / "reliability.json",
        run.path / "shown.json",
    ],
    work=_evaluate,
)
