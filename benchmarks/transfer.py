"""A run's detectors, unchanged, on answers from retrieved passages.

This is the paper's appendix on real retrieval: the backbone answers with k passages
from a corpus, and every detector scores the answers as it was trained on gold contexts:
ours, those of `evaluate`, and the published ones that `baselines` last judged. Labels
are by comparison with golds unless others replace them, and every row names their rule.

The questions with their passages form a run inside the run. The usual stages answer,
label and extract it, so it can be interrupted and resumed as they can.
"""

import collections
import dataclasses
import itertools
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import msgspec
import numpy as np
import torch

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput, Relations
from beatrice.benchmarks.baselines.judge import (
    chosen_detectors,
    open_relations,
    read_again,
    run_identities,
    run_inputs,
    score_or_explain,
    unmet,
)
from beatrice.benchmarks.baselines.plain import plain_scores
from beatrice.benchmarks.baselines.readings import chunks_of, stacked
from beatrice.benchmarks.results import names
from beatrice.benchmarks.stages import BASELINES_PRESETS, BaselinesConfig
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.datasets.loading import Refusal, open_dataset
from beatrice.extract.engines import ANSWER
from beatrice.extract.generate.answers import (
    answer_config,
    load_tokenizer_only,
    read_drawing,
)
from beatrice.extract.generate.templates import PromptTemplate
from beatrice.extract.label.labels import LABEL_PRESETS, RULES
from beatrice.extract.label.stage import label_run
from beatrice.extract.records import (
    IN_DOMAIN,
    SETTINGS,
    Answer,
    Example,
    Passage,
    Setting,
    read_records,
    text_key,
    to_json,
)
from beatrice.extract.run.console import Progress, Update, shell_line, update_for_part
from beatrice.extract.run.contents import (
    read_examples,
    require_both_settings,
    row_files,
)
from beatrice.extract.run.directory import NewRun, Preset, RunDir
from beatrice.extract.run.files import write_json_atomic, write_text_atomic
from beatrice.extract.run.rows import ResultRow, Subject, label_rule, publish, rows_file
from beatrice.extract.run.stages import Stage, run_stage
from beatrice.extract.signals.extract import EXTRACT, extract_config
from beatrice.extract.store.store import FeatureStore, end_to_end
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import run_bootstrap, score_store
from beatrice.jaxprobe.config import INTERVAL_FORMAT, GridConfig, set_compiler
from beatrice.jaxprobe.detector import Detector, HeadName
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import (
    SUBSET_NAMES,
    SUBSETS,
    Standardizer,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.grid import grid_members, member_logits
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import StoreRows, rows_at_once
from beatrice.jaxprobe.stages import chosen_layer, encoder_folders, grid_config
from beatrice.jaxprobe.tokens import (
    family_dims,
    read_features,
    split_families,
    stored_lengths,
)
from beatrice.jaxprobe.train import EVERY_FAMILY
from beatrice.pgir.controllers.stage import retrieval_of
from beatrice.pgir.controllers.waves import showable
from beatrice.pgir.corpus import has_answer
from beatrice.pgir.forward import TorchForward
from beatrice.pgir.retrievers import Retrieval, RetrievalFailed
from beatrice.pgir.stages import retrieval_config

LEARNED = ("train", "validation")  # splits that detectors are fitted and chosen on


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The run's section `transfer`."""

    limit: int | None = 500  # questions per set, the first ones; None takes all
    n_passages: int = 3  # retrieved for each question
    # Held-out sets that the run does not have, as (name, file).
    questions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check that the limit and the number of passages are positive."""
        for name in ("limit", "n_passages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")


TRANSFER_PRESETS: dict[Preset, TransferConfig] = {
    **dict.fromkeys(get_args(Preset), TransferConfig()),
    "smoke": TransferConfig(limit=20),
}


def asked_questions(
    examples: Sequence[Example],
    config: TransferConfig,
    note: Callable[[str], None] = lambda line: None,
) -> list[Example]:
    """Return the questions to ask again, without passages.

    These are the run's test and held-out questions, and those of the other files whose
    text is not among the run's own. `note` gets a line on each file's records.
    """
    known = {text_key(example.question) for example in examples}
    ids = {example.id for example in examples}
    pools: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        if example.split in ("test", "ood"):
            pools.setdefault((example.dataset, example.split), []).append(example)
    for name, file in config.questions:
        pool, refusals, n_known, n_again = [], [], 0, 0
        for row in open_dataset(Path(file), dataset=name).read():
            if isinstance(row, Refusal):
                refusals.append(row)
            elif text_key(row.question.question) in known:
                n_known += 1
            elif (example := row.question.as_example("ood", ())).id in ids:
                n_again += 1
            else:
                ids.add(example.id)
                pool.append(example)
        pools.setdefault((name, "ood"), []).extend(pool)
        firsts = (f" (the first, {x.at}: {x.reason})" for x in refusals)
        note(
            f"transfer: {file}: {len(pool)} questions to choose from, {n_known} in the "
            f"run already, {n_again} with the id (or, without ids, the text) of an "
            f"earlier one, {len(refusals)} refused{next(firsts, '')}"
        )
    chosen = [example for pool in pools.values() for example in pool[: config.limit]]
    if not chosen:
        raise ValueError("the run has no test or held-out questions to ask again")
    return [msgspec.structs.replace(e, passages=(), rewritten=()) for e in chosen]


def with_passages(
    questions: Sequence[Example],
    retrieval: Retrieval,
    n_passages: int,
    prompts: tuple[Any, PromptTemplate] | None = None,
) -> tuple[list[Example], dict[str, str]]:
    """Return the questions with passages, and by id the reason why others got none.

    With `prompts` (a tokenizer and a template), the model's control tokens in passages
    are escaped, because a prompt must not contain them.
    """
    queries = [example.question for example in questions]
    try:
        rows = enumerate(retrieval.retriever.search(queries, n_passages))
        ranked, reasons = dict(rows), {}
    except RetrievalFailed as error:
        ranked, reasons = error.rankings, error.reasons
    empty = {i: "the search found none" for i, row in ranked.items() if not len(row)}

    examples = []
    for i in sorted(ranked.keys() - empty.keys()):
        every = (retrieval.passages[int(number)] for number in ranked[i])
        passages = [Passage(title=p.title, text=p.text) for p in every]
        if prompts is not None:
            passages = showable(*prompts, queries[i], passages)
        replaced = msgspec.structs.replace(questions[i], passages=tuple(passages))
        examples.append(replaced)
    return examples, {questions[i].id: why for i, why in (reasons | empty).items()}


_ROWS_OF_A_KIND = 64  # how many of the longest rows form a group of their own


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """In one setting, the answers that detectors learned from and the new answers."""

    trained: DetectorInput  # answers of the run, from gold passages
    new: DetectorInput  # answers to score, from retrieved passages
    # The closed-book pass of the new questions; None if that is the setting.
    closed_book: DetectorInput | None = None

    @property
    def setting(self) -> Setting:
        """The setting of the answers."""
        return self.trained.rows.setting


def encoder_scores(
    scenario: Scenario, tree: Mapping[str, Any], config: GridConfig
) -> dict[Subject, np.ndarray]:
    """Return the logits of every encoder on the new rows, `[n_seeds, n_rows]`."""
    store, dims = scenario.new.store, family_dims(scenario.trained.store)
    standardizer = Standardizer(**tree["standardizer"])
    members = grid_members(config.train.n_seeds, dims.n_subsets)
    trained = [
        (jax.tree.map(lambda x, i=i: x[i], tree["params"]), SUBSETS[member.subset])
        for i, member in enumerate(members)
    ]
    split = jax.jit(lambda features: split_families(features, dims, standardizer))
    encoder, lengths = Encoder(config.encoder, dims), stored_lengths(store)
    every = np.empty((len(members), len(lengths)))
    for group in width_groups(lengths, _ROWS_OF_A_KIND):
        widths = widths_of(lengths[group])
        n_at_once = min(len(group), rows_at_once(widths, dims))
        for start in range(0, len(group), n_at_once):
            batch = group[start : start + n_at_once]
            # Padded with its last row: one compiled shape serves all of a group.
            full = np.pad(batch, (0, n_at_once - len(batch)), mode="edge")
            features = split(read_features(store, scenario.trained.layer, full, widths))
            logits = member_logits(trained, features, encoder=encoder)
            every[:, batch] = logits[:, : len(batch)]
    by_seed = every.reshape(config.train.n_seeds, dims.n_subsets, -1)  # seed-major
    scores = {Subject("encoder", x): by_seed[:, i] for i, x in enumerate(SUBSET_NAMES)}
    return {
        **scores,
        names.HIDDEN_ONLY: by_seed[:, 0],
        names.EARLY_FUSION: by_seed[:, EVERY_FAMILY],
    }


def selected_scores(
    scenario: Scenario, detector: Detector
) -> dict[Subject, np.ndarray]:
    """Return the raw scores of the selected heads on the new rows, `[n_seeds, n_rows]`.

    Seeds stay separate, as they do for the rivals: the mean of the seeds' scores, which
    a deployed detector returns, ranks better than the seeds do on average.
    """
    stores: dict[Setting, FeatureStore] = {scenario.setting: scenario.new.store}
    heads: dict[str, HeadName] = {"champion": scenario.setting}
    if scenario.closed_book is not None:
        stores["closed_book"] = scenario.closed_book.store
        if "single_pass" in detector.heads:
            heads["without_closed_book"] = "single_pass"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = scenario.trained.layer
    seeds = [TorchForward(each, device) for each in _seeds_of(detector)]
    return {
        Subject(name): np.stack(
            [
                score_store(x.detector, head, stores, layer=layer, score=x.score).raw
                for x in seeds
            ]
        )
        for name, head in heads.items()
    }


def _seeds_of(detector: Detector) -> list[Detector]:
    """Split a detector into one for each training seed."""

    def of_seed(part: Any, seed: int) -> Any:
        params = jax.tree.map(lambda x: x[seed : seed + 1], part.params)
        return dataclasses.replace(part, params=params)

    head = next(iter(detector.heads.values()))
    return [
        dataclasses.replace(
            detector,
            banks={name: of_seed(bank, i) for name, bank in detector.banks.items()},
            heads={name: of_seed(head, i) for name, head in detector.heads.items()},
        )
        for i in range(len(jax.tree.leaves(head.params)[0]))
    ]


def rival_scores(scenario: Scenario) -> dict[Subject, np.ndarray]:
    """Return the `plain_scores` of the new rows, fitted as in `evaluate`."""
    scores, _ = plain_scores(joined_inputs(scenario))
    n_trained = len(scenario.trained.rows.ids)
    return {name: x[:, n_trained:] for name, x in scores.items()}


_MARK = "retrieved: "  # prefix of new ids, since the run's own may be equal


def joined_inputs(scenario: Scenario) -> DetectorInput:
    """Return all answers as one input, the run's own first, without readings.

    New rows count as held out, so detectors are fitted and chosen on the run's training
    and validation rows. Samples drawn for the run's other rows are left out, because
    those scores are not needed.
    """
    trained, new = scenario.trained, scenario.new
    marked = ((f"{_MARK}{i}", *rest) for i, *rest in new.store.spec.keys)
    keys = [*trained.store.spec.keys, *marked]
    questions = (msgspec.structs.replace(e, id=f"{_MARK}{e.id}") for e in new.questions)
    rows = {
        field.name: np.concatenate(
            [getattr(x.rows, field.name) for x in (trained, new)]
        )
        for field in dataclasses.fields(StoreRows)
        if field.name != "setting"
    }
    unseen = np.full(len(new.rows.ids), "ood")
    rows |= {
        "ids": np.array([key[0] for key in keys]),
        "splits": np.concatenate([trained.rows.splits, unseen]),
    }
    is_learned = np.isin(trained.rows.splits, LEARNED)
    drawn = zip(trained.samples, is_learned, strict=True)
    return dataclasses.replace(
        trained,
        store=end_to_end(trained.store, new.store, keys),
        rows=dataclasses.replace(trained.rows, **rows),
        questions=[*trained.questions, *questions],
        answers=[*trained.answers, *new.answers],
        samples=[*(x if is_used else () for x, is_used in drawn), *new.samples],
    )


def published_scores(
    scenario: Scenario,
    detectors: Sequence[Baseline],
    readings: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]] = ({}, {}),
    tick: Callable[[], None] = lambda: None,
) -> list[DetectorScores]:
    """Return the published detectors' scores of the new rows, `[n_seeds, n_rows]` each.

    They are fitted as in `baselines`, on the run's training rows. `readings` are those
    of the run's own rows and those of the new ones, by name. `tick` is called after
    each detector.
    """
    old, new = readings
    together = {name: stacked([*old[name], *new[name]]) for name in new}
    inputs = dataclasses.replace(joined_inputs(scenario), readings=together)
    n_own = len(scenario.trained.rows.ids)
    scored = []
    for detector in detectors:
        judged = score_or_explain(detector, inputs)[0].scored(detector.name)
        scored.append(judged.take(np.arange(n_own, len(inputs.rows.ids))))
        tick()
    return scored


def _answer_rows(examples: Sequence[Example], rows: StoreRows) -> list[ResultRow]:
    """Return how often answers are right, and how often a passage contains a gold."""
    has_gold = {
        e.id: has_answer(np.arange(len(e.passages)), e.passages, e.golds, (99,))[99]
        for e in examples
    }
    result = []
    for dataset, split in rows.evaluated_sets():
        where = rows.where(split, dataset)
        values = {"right": rows.labels[where]}  # by the rule of the labels
        if rows.setting == "with_context":
            values["answer_found"] = np.array([has_gold[i] for i in rows.ids[where]])
        for metric, x in values.items():
            row = ResultRow(
                experiment=names.RETRIEVED,
                detector="backbone",
                metric=metric,
                value=float(x.mean()) if len(x) else None,
                reason=None if len(x) else "no labelled answer",
                **rows.fields_of(dataset, split),
            )
            result.append(row)
    return result


def _count_missing(
    result: Sequence[ResultRow], rows: StoreRows, questions: Sequence[Example]
) -> list[ResultRow]:
    """Count the questions without an answer to score as failures of each row."""
    answered = set(rows.ids)
    missing = [example for example in questions if example.id not in answered]
    n_missing = collections.Counter((e.dataset, e.split) for e in missing)
    n_missing += collections.Counter((IN_DOMAIN, e.split) for e in missing)
    n_missing[names.ALL_SETS, "ood"] = len(missing)

    def n_failed(row: ResultRow) -> int:
        return row.n_failed + n_missing[row.dataset, row.split]

    return [msgspec.structs.replace(row, n_failed=n_failed(row)) for row in result]


def scenario_rows(
    scenario: Scenario,
    scores: Mapping[Subject, np.ndarray],
    questions: Sequence[Example],
    intervals: BootstrapConfig,
    published: Sequence[DetectorScores] = (),
) -> list[ResultRow]:
    """Return the result rows of a setting, for each set and for all sets together.

    `scores` are `[n_seeds, n_rows]` of the new rows, by detector. `questions` are all
    that were asked; those without an answer are counted as failed.
    """
    rows = scenario.new.rows
    ours = [DetectorScores(name=name, scores=x) for name, x in scores.items()]
    detectors = [*ours, *published]
    rivals = [*names.COMPARED, *(x.subject for x in published)]
    pairs = {f"{names.RETRIEVED}_paired": [(names.CHAMPION, rival) for rival in rivals]}
    everything = np.full(len(rows.ids), names.ALL_SETS)
    unseen = np.full(len(rows.ids), "ood")
    together = dataclasses.replace(rows, datasets=everything, splits=unseen)
    result = []
    for each in (rows, together):
        result += detection_rows(detectors, each, intervals, names.RETRIEVED, pairs)
        result += _answer_rows(scenario.new.questions, each)
    return _count_missing(result, rows, questions)


NAME = "transfer"


def _inner(run: RunDir) -> RunDir:
    """Return the run inside a run, which may not exist yet."""
    return RunDir(run.path / "retrieved")


def _counts_file(run: RunDir) -> Path:
    """Return the file with the numbers of questions asked and failed, and the rule."""
    return _inner(run).path / "asked.json"


def open_inner(run: RunDir) -> RunDir:
    """Open the run inside a run, with the same model, prompts, labels and layers.

    Retrieved passages may be too long for the prompt; the last ones are then dropped.
    """
    answer = answer_config(run)
    prompt = dataclasses.replace(answer.prompt, overlong="drop-passages")
    sections: Mapping[str, object] = {
        "backbone": run.section("backbone", BackboneConfig),
        "answer": dataclasses.replace(answer, settings=SETTINGS, prompt=prompt),
        "extract": extract_config(run),
    }
    new = NewRun(preset=run.preset, seed=run.seed, sections=sections)
    return RunDir.open(_inner(run).path, new)


def write_questions(
    inner: RunDir, run: RunDir, examples: Sequence[Example], note: Callable[[str], None]
) -> None:
    """Write questions into an inner run, with the run's closed-book answers to them."""
    content = "".join(f"{to_json(example)}\n" for example in examples)
    if inner.examples.exists() and inner.examples.read_text("utf-8") == content:
        return
    if inner.examples.exists():
        note("retrieved: passages or questions have changed; answering again")
        shutil.rmtree(inner.path / "features", ignore_errors=True)
        for stage in ("answer", "label", "extract"):
            inner.reopen_stage(stage)
    elif run.answers_file.exists():
        ids = {example.id for example in examples}
        lines = [
            f"{to_json(answer)}\n"
            for answer in read_records(run.answers_file, Answer)
            if answer.setting == "closed_book" and answer.example_id in ids
        ]
        inner.answers_file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(inner.answers_file, "".join(lines))
    write_text_atomic(inner.examples, content)


def run_scenario(
    run: RunDir,
    inner: RunDir,
    setting: Setting,
    config: BaselinesConfig | None = None,
    relations: Relations | None = None,
) -> Scenario:
    """Return a run's own answers and those of its inner run, in one setting."""
    evidence = partial(run_inputs, inner, layer=chosen_layer(run))
    closed_book = None if setting == "closed_book" else evidence("closed_book")
    return Scenario(
        trained=run_inputs(run, setting, config, relations),
        new=evidence(setting),
        closed_book=closed_book,
    )


def baselines_config(run: RunDir) -> BaselinesConfig:
    """Return which published detectors last judged a run, and with which models."""
    return run.resolve_section("baselines", BASELINES_PRESETS, is_recorded=False)


def run_published(
    run: RunDir,
    scenario: Scenario,
    detectors: Sequence[Baseline],
    config: BaselinesConfig,
    update: Update,
) -> list[DetectorScores]:
    """Return the `published_scores` of a run; readings are cached in both runs."""
    here = _inner(run)
    detectors = [x for x in detectors if scenario.setting in x.settings]
    chunks = (len(chunks_of(len(x.rows.ids))) for x in (scenario.trained, scenario.new))
    total = len(detectors) + sum(chunks) * any(x.reads for x in detectors)
    ticks = itertools.count(1)

    def tick() -> None:
        update(next(ticks), total)

    of_run, trained = run_identities(run, config.models), scenario.trained
    # The answers that a detector learned from and the new ones are cut at the same cue.
    of_new = run_identities(here, config.models) | {"cue": of_run["answers"]}
    readings = (
        read_again(run, trained, detectors, of_run, tick, splits=LEARNED),
        read_again(here, scenario.new, detectors, of_new, tick, cue_like=trained),
    )
    values = readings[0].values, readings[1].values
    return published_scores(scenario, detectors, values, tick)


def labelling_options(rule: str) -> str | None:
    """Return the `beatrice label` options that give a rule; None if it was a file."""
    for match, words in RULES.items():
        if rule == words:
            return f"--match {match}"
    kind, _, name = rule.partition(" ")
    if kind == "judges:":
        model, _, vote = name.rpartition(", ")
        return f"--judge {shlex.quote(model)} --set vote={vote}"
    return f"--judge {name}" if kind == "judge" else None


def published_rivals(
    run: RunDir, config: BaselinesConfig, note: Callable[[str], None]
) -> list[Baseline]:
    """Return the detectors that `baselines` last judged and that can score new answers.

    What the others lack is noted. Raises ValueError if the new answers' samples were
    drawn with other options than the run's.
    """
    inner, rivals = _inner(run), []
    draws = [read_drawing(x).get("draws") for x in (run, inner)]
    if None not in draws and draws[0] != draws[1]:
        raise ValueError(
            f"{inner.samples} was drawn with other options than {run.samples}; draw "
            "again with those in the latter's config.json"
        )
    for rival in chosen_detectors(config):
        lack = unmet(rival, run, config)
        # A detector trained on drawn answers has the run's, and needs no new ones.
        if not (lack or rival.draws_for) and (lack := unmet(rival, inner, config)):
            lack += ", with the options of the run's own samples"
        if lack:
            note(f"transfer: {rival.name} {lack}")
        else:
            rivals.append(rival)
    return rivals


def _transfer(
    run: RunDir, config: TransferConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    detector, intervals = Detector.load(run.detector), run_bootstrap(run)
    questions, rows = asked_questions(read_examples(run), config), []
    how = baselines_config(run)
    detectors = published_rivals(run, how, progress.note)
    relations = open_relations(run, how, detectors, progress)
    for index, setting in enumerate(SETTINGS):
        scenario = run_scenario(run, _inner(run), setting, how, relations)
        encoders, _ = checkpoint.restore(run.encoders(setting))
        scores = selected_scores(scenario, detector)
        scores |= encoder_scores(scenario, encoders, grid_config(run))
        scores |= rival_scores(scenario)
        setting_update = update_for_part(update, index, len(SETTINGS))
        published = run_published(run, scenario, detectors, how, setting_update)
        rows += scenario_rows(scenario, scores, questions, intervals, published)
    rule, of_run = label_rule(_inner(run)), label_rule(run)
    # No note if only the retrieved answers have judges: a deliberate, costly choice.
    if rule != of_run and (rule in RULES.values() or of_run not in RULES.values()):
        options = labelling_options(of_run)
        line = f"{shell_line('label', _inner(run).path)} {options}"
        progress.note(
            f"transfer: the retrieved answers are labelled by {rule}, but those that "
            f"detectors learned from by {of_run}"
            + (f"; to label both alike, run `{line}`" if options else "")
        )
    publish(run, NAME, rows, progress, rule)


TRANSFER = Stage(
    name=NAME,
    inputs=lambda run: [
        *row_files(run),
        *row_files(_inner(run)),
        run.detector,
        run.sweep,
        *encoder_folders(run),
        _counts_file(run),
        # The published detectors that score the new answers, and their drawn answers.
        *filter(
            Path.exists,
            (rows_file(run, "baselines"), run.samples, _inner(run).samples),
        ),
    ],
    outputs=lambda run: [rows_file(run, NAME)],
    work=_transfer,
    presets=TRANSFER_PRESETS,
    identity=lambda config: {"interval format": str(INTERVAL_FORMAT)},
)


def transfer_run(run: RunDir, config: TransferConfig, progress: Progress) -> None:
    """Do every step that is not done yet, in a run that the caller has locked.

    Raises:
      ValueError: the run has no detector, or some questions got no passages; results
        of the others are published, and the same call again searches for the rest.
    """
    require_both_settings(run, NAME)
    run.require(run.detector)
    if not run.stage_done(NAME):  # refuse unnamed plugs here, not hours later
        chosen_detectors(baselines_config(run))
    questions = asked_questions(read_examples(run), config, progress.note)
    retrieval = retrieval_of(run, progress.note, "transfer_retrieval")
    model, _ = load_tokenizer_only(run)
    prompts = model.tokenizer, answer_config(run).prompt.prompt_template()
    examples, failed = with_passages(questions, retrieval, config.n_passages, prompts)
    progress.note(
        f"transfer: {len(examples)} of {len(questions)} questions have passages, found "
        f"by {retrieval_config(run, 'transfer_retrieval').retriever} among "
        f"{len(retrieval.passages):,}"
    )
    if not examples:
        raise ValueError(f"no question got passages: {next(iter(failed.values()))}")
    del retrieval  # free its index and encoder before the backbone is loaded
    match = run.resolve_section("label", LABEL_PRESETS, is_recorded=False)
    with open_inner(run) as inner:
        write_questions(inner, run, examples, progress.note)
        run_stage(ANSWER, inner, progress)
        if not inner.stage_done("label"):  # keep labels that judges have given
            label_run(inner, match.match, progress)
        elif label_rule(inner) in RULES.values():  # match again if out of date
            label_run(inner, None, progress)
        run_stage(EXTRACT, inner, progress)
        # Rows name the rule, and two rules may give the same labels: record it too.
        counts = {"n_asked": len(questions), "n_failed": len(failed)}
        rule = {"label_rule": label_rule(inner)}
        write_json_atomic(_counts_file(run), counts | rule)
        run_stage(TRANSFER, run, progress)
    if failed:
        raise ValueError(
            f"no passages for {len(failed)} of {len(questions)} questions, which count "
            f"as failed (the first: {next(iter(failed.values()))}); run the same "
            "command again to search for them"
        )
