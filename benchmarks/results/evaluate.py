"""The stage that measures every detector on every set, with intervals.

Besides rows, it writes the reliability of the selected set, and example answers: the
surest right and wrong ones of every set, selected by a fixed rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorInput
from beatrice.benchmarks.baselines.judge import run_inputs
from beatrice.benchmarks.baselines.plain import (
    length_features,
    linear_scores,
    plain_scores,
    rows_at_equal_length,
)
from beatrice.benchmarks.results import names
from beatrice.benchmarks.results.shown import (
    Bin,
    Curves,
    ShownAnswer,
    ShownDraft,
    ShownKind,
    ShownSet,
    Token,
)
from beatrice.benchmarks.stages import human_files
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import answer_config, answer_shares
from beatrice.extract.generate.prompts import UnaskedQuestion
from beatrice.extract.records import IN_DOMAIN, Answer, Example, Setting, read_records
from beatrice.extract.run.console import Progress, Update, shell_line
from beatrice.extract.run.contents import read_answers, read_examples, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import read_json, write_json_atomic
from beatrice.extract.run.rows import ResultRow, Subject, encoder, publish
from beatrice.extract.store.store import FeatureStore, read_family
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import run_bootstrap, run_selection
from beatrice.jaxprobe.calibration import (
    Reliability,
    brier,
    ece,
    ece_by_chance,
    reliability,
)
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.detector import Detector, SettingHead
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import N_SUBSETS, SUBSET_NAMES
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    resamples,
    weighted_metrics,
    wider_interval,
    wilson_interval,
)
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.scope import PRECISIONS, Threshold
from beatrice.jaxprobe.tokens import mean_answer_states
from beatrice.jaxprobe.train import EVERY_FAMILY
from beatrice.pgir.score_files import shown_tokens

ANNOTATED = "annotated"  # set and split of the answers that a person judged
PAIRS = {
    "paired": [(names.CHAMPION, rival) for rival in names.COMPARED],
    "floor_paired": names.FLOORS.items(),
    "finding": names.FAMILY_PAIRS,
}


def run_detectors(
    run: RunDir, evidence: DetectorInput
) -> tuple[list[DetectorScores], list[ResultRow]]:
    """Return every detector's scores in a setting, and rows of validation's choices."""
    rows = evidence.rows
    encoders, _ = checkpoint.restore(run.encoders(rows.setting))
    logits = encoders["outputs"]["logits"].reshape(-1, N_SUBSETS, len(rows.ids))
    plain, chosen = plain_scores(evidence)
    scores: dict[Subject | str, np.ndarray] = {
        **run_heads(run, rows.setting),
        names.HIDDEN_ONLY: logits[:, 0],
        names.EARLY_FUSION: logits[:, EVERY_FAMILY],
        **{encoder(name): logits[:, i] for i, name in enumerate(SUBSET_NAMES)},
        **plain,
    }
    control = encoders["control"]
    permuted = DetectorScores(
        name="permuted_labels",
        scores=control["logits"],
        labels=np.asarray(control["labels"], dtype=bool),
    )
    detectors = [
        DetectorScores(name=name, scores=values) for name, values in scores.items()
    ]
    return [*detectors, permuted], chosen


def layer_rows(
    store: FeatureStore, rows: StoreRows, layer: int, config: BootstrapConfig
) -> list[ResultRow]:
    """Return rows that compare the chosen layer with the first and last stored ones.

    Layers are read by logistic regression on the answer's mean state, as in the sweep,
    but also evaluated on sets that the choice of the layer has not seen.
    """
    chosen, *others = names.LAYER_PROBES
    stored_layers = store.spec.hidden_layers
    ends = zip(others, (stored_layers[0], stored_layers[-1]), strict=True)
    layers = {chosen: layer} | {name: end for name, end in ends if end != layer}
    if len(layers) == 1:
        return []
    every, detectors = np.arange(len(rows.ids)), []
    for name, x in layers.items():
        states = mean_answer_states(store, every, x)
        detectors.append(
            DetectorScores(name=name, scores=linear_scores([states], rows)[0])
        )
    pairs = {"finding": [(chosen, name) for name in layers if name != chosen]}
    return detection_rows(detectors, rows, config, "layer", pairs)


def _bins(curve: Reliability, questions: np.ndarray) -> tuple[Bin, ...]:
    return tuple(
        Bin(
            lower=float(curve.edges[i]),
            upper=float(curve.edges[i + 1]),
            mean_p=float(curve.confidence[i]),
            accuracy=float(curve.accuracy[i]),
            n=int(n),
            n_questions=len(set(questions[curve.bins == i].tolist())),
        )
        for i, n in enumerate(curve.n_examples)
        if n
    )


def reliability_of(
    raw: np.ndarray, calibrated: np.ndarray, rows: StoreRows
) -> tuple[Curves, list[ResultRow]]:
    """Return the reliability on all in-domain test sets, as curves and as rows.

    `raw` `[n]` is the head's probability, mean over seeds; `calibrated` is from it.
    """
    labels, chance = rows.labels, ece_by_chance(calibrated, rows.ids)
    curves: dict[str, Any] = {"ece_by_chance": chance}
    result = []
    at: dict[str, Any] = {"experiment": "calibration", "detector": "champion"}
    at |= rows.fields_of(IN_DOMAIN, "test")
    for kind, p_correct in (("raw", raw), ("calibrated", calibrated)):
        curves[kind] = _bins(reliability(p_correct, labels), rows.ids)
        values = {
            "brier": brier(p_correct, labels),
            "ece": ece(p_correct, labels),
        }
        for metric, value in values.items():
            curves[f"{metric}_{kind}"] = value
            result.append(ResultRow(kind=kind, metric=metric, value=value, **at))
    return Curves(**curves), result


Key = tuple[str, str]  # the id of a question, and the setting of its answer


def _by_set(
    examples: Sequence[Example], keyed: Iterable[tuple[Key, Any]]
) -> dict[tuple[str, str, str], list[Any]]:
    """Group values by the setting, dataset and split of their questions."""
    by_id = {example.id: example for example in examples}
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for (id_, setting), value in keyed:
        set_key = setting, by_id[id_].dataset, by_id[id_].split
        groups.setdefault(set_key, []).append(value)
    return groups


def _backbone_row(
    experiment: str, set_key: tuple[str, str, str], **fields: Any
) -> ResultRow:
    fields |= dict(zip(("setting", "dataset", "split"), set_key, strict=True))
    return ResultRow(experiment=experiment, detector="backbone", **fields)


def answer_rows(
    examples: Sequence[Example], answers: Sequence[Answer]
) -> list[ResultRow]:
    """Return the `answer_shares` of all answers as rows, by set, split and setting."""
    groups = _by_set(examples, (((a.example_id, a.setting), a) for a in answers))
    return [
        _backbone_row("answers", set_key, metric=metric, value=value, n=len(group))
        for set_key, group in groups.items()
        for metric, value in answer_shares(group).items()
    ]


def prompt_rows(
    examples: Sequence[Example],
    answers: Sequence[Answer],
    left_out: Iterable[UnaskedQuestion],
) -> list[ResultRow]:
    """Return the shares of prompts with dropped passages, by set, split and setting.

    `n` counts the prompts that were answered, `n_failed` the questions that were not
    asked in this setting because not even one passage fitted.
    """
    keyed: list[tuple[Key, bool | None]] = [
        *(((a.example_id, a.setting), bool(a.dropped)) for a in answers),
        *(((row.example_id, row.setting), None) for row in left_out),
    ]
    rows = []
    for set_key, cuts in sorted(_by_set(examples, keyed).items()):
        flags = [is_cut for is_cut in cuts if is_cut is not None]
        share = sum(flags) / len(flags) if flags else None
        reason = None if flags else "no passage of any question fitted"
        fields = {"n": len(flags), "n_failed": len(cuts) - len(flags)}
        fields |= {"metric": "cut", "value": share, "reason": reason}
        rows.append(_backbone_row("prompts", set_key, **fields))
    return rows


def annotated_rows(
    verdicts: Mapping[str, Any],
    detectors: Sequence[DetectorScores],
    rows: StoreRows,
    config: BootstrapConfig,
) -> list[ResultRow]:
    """Return the shares of labels that a person disputes, and AUROC on the sample.

    The sample has as many right labels as wrong ones; every answer is weighted by the
    number of answers that it represents.

    Returns:
      Rows of the experiment "label_noise": for each label the share that is disputed
      (Wilson's interval; `kind` is "right" or "wrong"). Rows of the experiment
      "annotated": the AUROC of detectors, where `kind` names the truth: "labels",
      "undisputed labels" (without the disputed answers), or "a person".
    """
    noise = [x for x in verdicts["noise"] if x["setting"] == rows.setting]
    human = {(x[0], x[2]): x[3] for x in verdicts["verdicts"] if x[1] == rows.setting}
    keys = list(zip(rows.ids.tolist(), rows.variants.tolist(), strict=True))
    is_evaluated = np.isin(rows.splits, ("test", "ood")) & rows.is_labelled
    where = np.array([i for i in np.flatnonzero(is_evaluated) if keys[i] in human], int)
    labels = rows.labels[where]
    judged = np.array([human[keys[i]] for i in where], bool)
    counts = {x["label"]: x["n_all"] / max(1, x["n"]) for x in noise}
    weights = np.array([counts[label] for label in labels.tolist()], np.float32)
    everyone = np.arange(len(where))
    truths = {
        "labels": (everyone, labels),
        "undisputed labels": (np.flatnonzero(labels == judged), labels),
        "a person": (everyone, judged),
    }
    at: dict[str, Any] = {"setting": rows.setting}
    at |= {"dataset": ANNOTATED, "split": ANNOTATED}
    result = []
    for label in noise:
        fields = at | {name: label[name] for name in ("n", "ci_low", "ci_high")}
        fields |= {"experiment": "label_noise", "detector": "labels"}
        fields |= {"kind": "right" if label["label"] else "wrong", "metric": "disputed"}
        fields["value"] = label["n_disputed"] / label["n"] if label["n"] else None
        reason = None if label["n"] else "no answer with this label was annotated"
        result.append(ResultRow(reason=reason, **fields))
    measured = [x for x in detectors if x.subject in names.AT_EQUAL_LENGTH]
    for kind, (some, truth) in truths.items():
        fields = {"experiment": ANNOTATED, "metric": "auroc", "n": len(some), **at}
        is_defined = 0 < truth[some].sum() < len(some)
        draws = [np.ones((len(some), 1), np.float32)]
        draws += resamples(rows.ids[where[some]], config) if is_defined else []
        drawn = np.concatenate(draws, axis=1) * weights[some, None]
        for detector in measured:
            fields |= detector.subject._replace(kind=kind)._asdict()
            if is_defined:
                scores = detector.scores[:, where[some]]
                by_seed = [weighted_metrics(x, truth[some], drawn) for x in scores]
                value, *resampled = np.mean([x["auroc"] for x in by_seed], axis=0)
                # Placements take no weights. These cancel in an AUROC by the labels; by
                # a person's verdicts, placements only widen the interval of the
                # weighted resamples, which alone is too narrow in simulations.
                of_sample = scores, truth[some], rows.ids[where[some]]
                low, high = wider_interval(np.array(resampled), *of_sample)
                fields |= {"value": float(value), "ci_low": low, "ci_high": high}
            else:
                reason = "the annotated answers are of one class only"
                fields |= {"value": None, "reason": reason}
            result.append(ResultRow(**fields))
    return result


def decision_rows(
    head: SettingHead, p_correct: np.ndarray, rows: StoreRows
) -> list[ResultRow]:
    """Return the coverage and precision of trusting and distrusting answers.

    There are rows of the experiment "decision" for every precision of
    `scope.PRECISIONS`: the share of a set's answers that is decided ("coverage"), and
    the share of these that is decided correctly ("precision", with Wilson's 95 %
    interval). Thresholds come from validation answers, and other sets are measured.
    Only contexts in their original wording count, so a question has one answer.

    Args:
      head: the selected head of the setting.
      p_correct: `[n_rows]` calibrated.
      rows: the answers.
    """
    originals = np.flatnonzero(rows.variants == "original")
    rows, p_correct = rows.take(originals), p_correct[originals]
    thresholds = [x for wanted in PRECISIONS for x in head.thresholds(wanted)]
    result = []
    for dataset, split in rows.evaluated_sets():
        where = rows.where(split, dataset)
        if split == "validation" or not len(where):
            continue
        for threshold in thresholds:
            is_decided = np.array([threshold.holds(p) for p in p_correct[where]])
            is_right = rows.labels[where] == (threshold.decision == "trust")
            n, n_right = int(is_decided.sum()), int((is_decided & is_right).sum())
            coverage = {"n": len(where), "metric": "coverage", "value": n / len(where)}
            precision: dict[str, Any] = {"n": n, "metric": "precision", "value": None}
            if threshold.p_correct is None:
                reason = "no P holds this precision on validation answers"
                precision["reason"] = threshold.doubt or reason
            elif not n:
                precision["reason"] = "no answer lies beyond the threshold"
            else:
                low, high = wilson_interval(n_right / n, n)
                precision |= {"value": n_right / n, "ci_low": low, "ci_high": high}
            fields = rows.fields_of(dataset, split)
            fields |= {"experiment": "decision", "detector": "champion"}
            fields |= {"kind": threshold.decision, "wanted": threshold.wanted}
            result += [ResultRow(**fields | x) for x in (coverage, precision)]
    return result


# The kind of an answer, by its label and whether its P is at least the threshold.
KINDS = {
    (True, True): "right and trusted",
    (False, False): "wrong and caught",
    (False, True): "wrong and missed",
    (True, False): "right and not trusted",
}


def choose_answers(
    p_correct: np.ndarray, labels: np.ndarray, ids: Sequence[str], threshold: float
) -> list[tuple[str, int, list[int]]]:
    """Return for each kind its name, its count and the indices of answers to show.

    Of each kind, `N_SHOWN` answers are shown: those with the highest P if the kind is
    trusted, else those with the lowest. Ties, which isotonic regression makes frequent,
    go to the smaller id.

    Args:
      p_correct: `[n]` calibrated.
      labels: `[n]` bool.
      ids: `n` different ids.
      threshold: answers with at least this P are trusted.
    """
    chosen = []
    for (is_correct, is_trusted), kind in KINDS.items():
        is_kind = (labels == is_correct) & ((p_correct >= threshold) == is_trusted)
        where, sign = np.flatnonzero(is_kind), -1.0 if is_trusted else 1.0
        ranked = sorted(where.tolist(), key=lambda i: (sign * p_correct[i], ids[i]))
        chosen.append((kind, len(where), ranked[: names.N_SHOWN]))
    return chosen


SpellTokens = Callable[[Answer, np.ndarray, int], list[dict[str, Any]]]


def shown_sets(
    evidence: DetectorInput,
    p_correct: np.ndarray,
    threshold: Threshold,
    spell: SpellTokens | None,
) -> list[ShownSet]:
    """Return the answers to show of every test and held-out set of a setting.

    Only contexts in their original wording are shown.

    Args:
      evidence: the setting's answers, and the store with their tokens' probabilities.
      p_correct: `[n_rows]` calibrated.
      threshold: the one for the requested precision.
      spell: spells the tokens of an answer, or None.
    """
    rows, wanted = evidence.rows, threshold.p_correct
    trusted_from = 0.5 if wanted is None else float(wanted)
    sets = []
    for dataset, split in rows.evaluated_sets():
        if split == "validation" or dataset == IN_DOMAIN:
            continue
        where = rows.where(split, dataset)
        where = where[rows.variants[where] == "original"]
        of_set = p_correct[where], rows.labels[where], rows.ids[where].tolist()
        kinds = []
        for kind, n, best in choose_answers(*of_set, trusted_from):
            answers = (_shown(evidence, p_correct, where[i], spell) for i in best)
            kinds.append(ShownKind(name=kind, n=n, answers=tuple(answers)))
        shown = ShownSet(
            setting=rows.setting,
            dataset=dataset,
            split=split,
            n=len(where),
            threshold=trusted_from,
            is_certified=wanted is not None,
            wanted=threshold.wanted,
            kinds=tuple(kinds),
        )
        sets.append(shown)
    return sets


def _shown(
    evidence: DetectorInput, p_correct: np.ndarray, row: int, spell: SpellTokens | None
) -> ShownAnswer:
    """Return an answer as the page shows it, without the context's tokens."""
    answer, example = evidence.answers[row], evidence.examples[row]
    passages = example.passages if answer.setting == "with_context" else ()
    tokens: list[dict[str, Any]] = []
    if spell is not None:
        prob = read_family(evidence.store, "prob", np.array([row]))
        tokens = spell(answer, prob.example(0), int(prob.first_tokens[0]))
    return ShownAnswer(
        id=example.id,
        question=example.question,
        golds=example.golds[:4],
        n_golds=len(example.golds),
        draft=ShownDraft(
            setting=answer.setting,
            answer=answer.text,
            p_correct=float(p_correct[row]),
            correct=bool(evidence.rows.labels[row]),
            passages=tuple(
                p.text for i, p in enumerate(passages) if i not in answer.dropped
            ),
            tokens=tuple(Token(**x) for x in tokens if x["span"] != "context"),
        ),
    )


def run_heads(run: RunDir, setting: Setting) -> dict[str, np.ndarray]:
    """Return the scores of the fused heads on the rows of a setting, by name."""
    heads, _ = run_selection(run, setting)
    fused = ("champion", "late_fusion_singles", "late_fusion_all")
    scores = {name: heads[name]["scores"] for name in fused}
    if setting == "with_context" and len(settings_of(run)) > 1:
        alone, _ = run_selection(run, "single_pass")
        scores["without_closed_book"] = alone["champion"]["scores"]
    return scores


def _speller(run: RunDir, progress: Progress) -> SpellTokens | None:
    """Return what spells tokens, or None if the run's backbone is not available."""
    # This loads Torch, which tables and figures do not need.
    from beatrice.extract.backbone.loading import commit_of, load_outline

    config = run.section("backbone", BackboneConfig)
    try:
        outline = load_outline(config.path, commit_of(config, run.answers))
    except (ValueError, OSError) as error:
        progress.note(
            "evaluate: the example answers have no tokens, because the tokenizer could "
            f"not be loaded: {str(error).splitlines()[0]}"
        )
        return None
    return partial(shown_tokens, outline.tokenizer)


def _verdicts(run: RunDir, progress: Progress) -> list[dict[str, Any]]:
    """Return a person's verdicts on the current labels, if there are any."""
    again = "run `beatrice label --audit` again"
    verdicts = [read_json(x, dict[str, Any], again) for x in human_files(run)]
    judged = run.hash_inputs(run.answers, run.labels)
    current = [x for x in verdicts if x.get("read") == judged]
    if current != verdicts:
        why = "the annotations are of other answers or labels than the run's"
        if "read" not in verdicts[0]:  # an earlier version wrote it
            why = "it is unknown which answers and labels the annotations are of"
        line = shell_line("label", run.path, "--audit", "--annotations", "FILE")
        progress.note(f"evaluate: {why}; to read annotations again, run `{line}`")
    if any(not x["noise"] for x in current):
        progress.note(
            "evaluate: the annotated sample was drawn by other labels, so it is left "
            f"out; move {run.audit / 'sample.csv'} away, then draw and annotate a new "
            f"one: `{shell_line('label', run.path, '--audit')}`"
        )
    return [x for x in current if x["noise"]]


def evaluate_run(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    """Measure a run's detectors; write the rows, and what the report shows."""
    set_compiler(run.preset)
    bootstrap, spell = run_bootstrap(run), _speller(run, progress)
    verdicts = _verdicts(run, progress)
    calibrated = Detector.load(run.detector)
    result, curves, shown = [], {}, []
    settings = settings_of(run)
    for n_done, setting in enumerate(settings, start=1):
        evidence = run_inputs(run, setting)
        rows = evidence.rows
        detectors, chosen = run_detectors(run, evidence)
        result += chosen
        result += detection_rows(detectors, rows, bootstrap, pairs=PAIRS)
        result += layer_rows(evidence.store, rows, evidence.layer, bootstrap)
        n_tokens = length_features(evidence.answers)[:, 0]
        result += rows_at_equal_length(detectors, rows, n_tokens, bootstrap)
        head = calibrated.heads[setting]
        raw = run_heads(run, setting)["champion"].mean(axis=0)
        p_correct, trust = head.calibrator(raw), head.thresholds().trust
        shown += shown_sets(evidence, p_correct, trust, spell)
        result += decision_rows(head, p_correct, rows)
        for judged in verdicts:
            result += annotated_rows(judged, detectors, rows, bootstrap)
        if len(where := rows.where("test")):
            tested = raw[where], p_correct[where], rows.take(where)
            curves[setting], calibration = reliability_of(*tested)
            result += calibration
        else:
            progress.note(f"evaluate: {setting}: no reliability without test answers")
        update(n_done, len(settings))
    examples, answers = read_examples(run), read_answers(run)
    result += answer_rows(examples, answers)
    if answer_config(run).prompt.overlong != "refuse":
        path = run.left_out_file
        left_out = read_records(path, UnaskedQuestion) if path.exists() else ()
        result += prompt_rows(examples, answers, left_out)
    write_json_atomic(run.path / "reliability.json", msgspec.to_builtins(curves))
    write_json_atomic(run.path / "shown.json", msgspec.to_builtins(shown))
    publish(run, "evaluate", result, progress)
