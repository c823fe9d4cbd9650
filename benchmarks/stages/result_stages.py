"""The stages that say what came out: calibrate, evaluate, control, report."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stages.cases import make_cases
from benchmarks.stages.control import (
    choose_policy,
    controller_config,
    inputs_key,
    open_probed,
    trace_all,
)
from benchmarks.stages.controllers import control_rows, frontier
from benchmarks.stages.evaluation import Scored, detection_rows
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.prompt_rows import prompt_rows
from benchmarks.stages.publishing import publish, rows_file
from benchmarks.stages.rows import Rows, load_rows
from benchmarks.stages.select_stage import (
    BRANCHES,
    branch_setting,
    read_selection,
    reads,
)
from benchmarks.stages.stage import Progress, Stage, Update
from benchmarks.stages.sweep_stage import chosen_layer, stored
from benchmarks.stages.textonly import fit_tfidf, joined_text, perplexity_score
from benchmarks.stages.train_stage import EVERY_FAMILY
from extract.generate.requests import variants_of
from extract.pipeline import read_answers, read_examples
from extract.records import SETTINGS, Answer, Example, Passage, Setting, read_records
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.results import ResultRow
from extract.store.read import FeatureStore, read_family
from jaxprobe import checkpoint
from jaxprobe.calibration import (
    Reliability,
    brier,
    ece,
    fit_calibrator,
    reliability,
)
from jaxprobe.detector import Detector, EncoderBank, HeadName, SettingHead
from jaxprobe.features.families import Standardizer
from jaxprobe.features.reading import longest_spans
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES, FamilyDims
from jaxprobe.fit.grid import Trained, grid_members
from jaxprobe.metrics import BootstrapConfig

N_BINS = 10


def _head(run: RunDir, config: RunConfig, branch: HeadName) -> SettingHead:
    """Return a calibrated head; calibration sees validation rows alone."""
    tree, story = read_selection(run, branch)
    _, rows = load_rows(run, branch_setting(branch))
    where = rows.where("validation")
    raw = tree["champion"]["scores"].mean(axis=0)
    return SettingHead(
        reads=reads(branch, story["members"]),
        config=dataclasses.replace(config.fusion, n_slots=story["n_slots"]),
        params=tree["champion"]["params"],
        calibrator=fit_calibrator(raw[where], rows.labels[where]),
    )


def _bank(
    run: RunDir,
    config: RunConfig,
    setting: Setting,
    heads: Mapping[HeadName, SettingHead],
) -> EncoderBank | None:
    """Return the encoders of a pass that some head reads, or None."""
    read = {name for h in heads.values() for where, name in h.reads if where == setting}
    names = [name for name in SUBSET_NAMES if name in read]
    if not names:
        return None
    tree, facts = checkpoint.restore(run.encoders(setting))
    store, _ = load_rows(run, setting)
    members = grid_members(config.train.n_seeds)
    return EncoderBank.from_trained(
        Trained(members, tree["params"], tree["info"]),
        names,
        dims=FamilyDims(**facts["dims"]),
        config=config.encoder,
        standardizer=Standardizer(**tree["standardizer"]),
        lengths=longest_spans(store.spec.spans, setting),
    )


def _calibrate(run: RunDir, config: RunConfig, update: Update, progress: Progress):
    store, _ = load_rows(run, SETTINGS[0])
    heads = {branch: _head(run, config, branch) for branch in BRANCHES}
    banks = {setting: _bank(run, config, setting, heads) for setting in SETTINGS}
    Detector(
        banks={setting: bank for setting, bank in banks.items() if bank is not None},
        heads=heads,
        facts={
            "revision": str(store.spec.fingerprint["model"]),
            "layer": str(chosen_layer(run)),
            "template": config.prompt.template,
            "chat": "yes" if config.prompt.chat else "no",
            "model_dtype": config.model_dtype,
            "model": config.model,
            "answer_span": config.extract.answer_span,
            "dtype": store.spec.families["hidden"].dtype,
            "scalars": store.spec.families["prob"].dtype,
        },
    ).save(run.detector)


def _text(example: Example, answer: Answer) -> str:
    """Return question, answer, and the passages that the model was shown."""
    passages = dict(variants_of(answer.setting, example))[answer.variant]
    kept = [p.text for i, p in enumerate(passages) if i not in answer.dropped]
    return joined_text(example.question, answer.text, kept)


def _text_scores(run: RunDir, rows: Rows) -> np.ndarray:
    """Return the text-only detector's scores of every row, `[1, n_rows]`."""
    examples = {example.id: example for example in read_examples(run)}
    answers = {a.key: a for a in read_answers(run, rows.setting)}
    texts = [
        _text(examples[example_id], answers[example_id, rows.setting, variant])
        for example_id, variant in zip(rows.ids, rows.variants, strict=True)
    ]
    where = rows.where("train")
    detector = fit_tfidf([texts[i] for i in where], rows.labels[where])
    return detector.score(texts)[None]


def _perplexity_scores(store: FeatureStore) -> np.ndarray:
    ragged = read_family(store, "prob")
    spans = store.spec.spans[:, 2].tolist()
    return np.array(
        [[perplexity_score(ragged.example(i), span) for i, span in enumerate(spans)]]
    )


def detectors_of(run: RunDir, config: RunConfig, setting: Setting) -> list[Scored]:
    """Return what every detector says of every row of a setting."""
    store, rows = load_rows(run, setting)
    tree, _ = checkpoint.restore(run.encoders(setting))
    n_seeds = config.train.n_seeds
    logits = tree["codes"]["logits"].reshape(n_seeds, N_SUBSETS, -1)
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
        Scored(name="tfidf", scores=_text_scores(run, rows)),
        Scored(name="perplexity", scores=_perplexity_scores(store)),
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


def _evaluate(run: RunDir, config: RunConfig, update: Update, progress: Progress):
    bootstrap = BootstrapConfig(n_resamples=config.n_bootstrap, seed=config.seed)
    found, curves = [], {}
    for number, setting in enumerate(SETTINGS):
        _, rows = load_rows(run, setting)
        found += detection_rows(detectors_of(run, config, setting), rows, bootstrap)
        curves[setting], made = _reliability(run, setting)
        found += made
        update(number + 1, len(SETTINGS))
    if config.prompt.overlong != "refuse":
        found += prompt_rows(run)
    write_json_atomic(run.path / "reliability.json", curves)
    publish(run, "evaluate", found, progress)


def _control(run: RunDir, config: RunConfig, update: Update, progress: Progress):
    probed = open_probed(run, config)
    hashes = run.hash_inputs(run.examples, run.passages, run.detector)
    passages = list(read_records(run.passages, Passage))
    key = inputs_key(*hashes.values())
    traced = trace_all(run, config, probed, passages, update, key)
    search = controller_config(config)
    policy = choose_policy(traced, search)
    in_domain = next(t for t in traced if t.split == "test")
    write_json_atomic(
        run.control / "control.json",
        {
            "tau": policy.threshold,
            "budget": policy.budget,
            "cap": search.max_generations,
            "frontier": frontier(traced, policy, search),
            "cases": make_cases(probed, passages, in_domain, policy),
        },
    )
    publish(run, "control", control_rows(traced, policy, config), progress)


def read_json(path: Path) -> Any:
    """Return a JSON file's value."""
    return json.loads(path.read_text())


CALIBRATE = Stage(
    name="calibrate",
    inputs=lambda run: [
        run.labels,
        run.sweep,
        run.path / "selection",
        *(run.encoders(setting) for setting in SETTINGS),
    ],
    outputs=lambda run: [run.detector],
    work=_calibrate,
)
EVALUATE = Stage(
    name="evaluate",
    inputs=lambda run: [
        run.labels,
        run.answers,
        run.detector,
        run.path / "selection",
        *(run.encoders(setting) for setting in SETTINGS),
        *stored(run),
    ],
    outputs=lambda run: [rows_file(run, "evaluate"), run.path / "reliability.json"],
    work=_evaluate,
)
CONTROL = Stage(
    name="control",
    inputs=lambda run: [run.examples, run.passages, run.detector],
    outputs=lambda run: [run.control, rows_file(run, "control")],
    work=_control,
)
