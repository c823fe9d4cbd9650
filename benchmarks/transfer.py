"""A run's detectors, as they are, on answers from retrieved passages.

The paper's appendix on real retrieval: k passages from a corpus, the backbone answers,
and every detector as it was trained on gold contexts: ours, those of `evaluate`, and
the published ones that `baselines` was last asked for. Labels are by comparison with
golds unless others are put in their place, and every row has their rule.

The questions with their passages are a run inside the run, which the stages of any run
answer, label and extract, so that it stops and continues as they do.
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
    BASELINES_PRESETS,
    BaselinesConfig,
    chosen_detectors,
    open_relations,
    read_again,
    run_identities,
    run_inputs,
    score_or_say,
    unmet,
)
from beatrice.benchmarks.baselines.plain import (
    length_features,
    linear_scores,
    majority_scores,
    probe_scores,
    text_scores,
)
from beatrice.benchmarks.baselines.readings import chunks_of, stacked
from beatrice.benchmarks.results.names import (
    ALL_SETS,
    CHAMPION,
    COMPARED,
    EARLY_FUSION,
    HIDDEN_ONLY,
    PERPLEXITY,
    RETRIEVED,
)
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.datasets.loading import Refusal, open_dataset
from beatrice.extract.engines import ANSWER
from beatrice.extract.generate.answers import answer_config, load_tokenizer_only
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
from beatrice.extract.run.console import Progress, Update, part_of, shell_line
from beatrice.extract.run.contents import (
    read_examples,
    require_both_settings,
    row_files,
)
from beatrice.extract.run.directory import NewRun, Preset, RunDir
from beatrice.extract.run.files import write_json_atomic, write_text_atomic
from beatrice.extract.run.rows import (
    ResultRow,
    Subject,
    label_rule,
    publish,
    rows_file,
)
from beatrice.extract.run.stages import Stage, run_stage
from beatrice.extract.signals.extract import EXTRACT, extract_config
from beatrice.extract.store.store import FeatureStore, end_to_end
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import run_bootstrap, score_store
from beatrice.jaxprobe.config import GridConfig, set_compiler
from beatrice.jaxprobe.detector import Detector, HeadName
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.families import (
    SUBSET_NAMES,
    SUBSETS,
    Standardizer,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.grid import grid_members, member_logits
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import Rows, rows_at_once
from beatrice.jaxprobe.tokens import (
    answer_log_probs,
    family_dims,
    read_features,
    split_families,
    stored_lengths,
)
from beatrice.jaxprobe.train import (
    EVERY_FAMILY,
    chosen_layer,
    encoder_folders,
    grid_config,
)
from beatrice.pgir.bridge import TorchForward
from beatrice.pgir.controllers.stage import retrieval_config, retrieval_of
from beatrice.pgir.controllers.waves import showable
from beatrice.pgir.corpus import has_answer
from beatrice.pgir.retrievers import Retrieval, RetrievalFailed

LEARNED = ("train", "validation")  # splits that detectors learn and choose on


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The run's section `transfer`."""

    # questions of each set, the first in its order; None takes all
    limit: int | None = 500
    n_passages: int = 3  # retrieved for each
    # sets that the run does not have, as (name, file); held out
    questions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check that counts are positive."""
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
    """Return the questions that are asked again, without passages.

    The test and held-out ones of a run, and those of other files whose text is not
    among the run's own. `note` is told what became of each file's records.
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
        firsts = (f", the first ({x.at}) since {x.reason}" for x in refusals)
        note(
            f"transfer: {file}: {len(pool)} questions to choose from, {n_known} in the "
            f"run already, {n_again} with the id (or, without ids, the text) of an "
            f"earlier one, {len(refusals)} refused{next(firsts, '')}"
        )
    chosen = [example for pool in pools.values() for example in pool[: config.limit]]
    if not chosen:
        raise ValueError("there are neither test nor held-out questions to ask again")
    return [msgspec.structs.replace(e, passages=(), rewritten=()) for e in chosen]


def with_passages(
    questions: Sequence[Example],
    retrieval: Retrieval,
    n_passages: int,
    prompts: tuple[Any, PromptTemplate] | None = None,
) -> tuple[list[Example], dict[str, str]]:
    """Return the questions with passages, and why others got none, by their ids.

    With `prompts`, a tokenizer and a template, passages that hold control tokens of the
    model, which no prompt can, are escaped.
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


_ROWS_OF_A_KIND = 64  # of the longest rows, which are read by themselves


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """Detectors and, in one setting, the answers they are put to."""

    trained: DetectorInput  # the answers that taught the detectors, from gold passages
    new: DetectorInput  # those they are put to, from retrieved ones
    # the closed-book pass of the new questions; None where that is the setting
    closed_book: DetectorInput | None = None

    @property
    def setting(self) -> Setting:
        """Of the answers."""
        return self.trained.rows.setting

    def joined(self) -> Rows:
        """Return the rows of both, the run's own first; only those are trained on."""
        trained, new = self.trained.rows, self.new.rows
        fields = {
            field.name: np.concatenate(
                [getattr(trained, field.name), getattr(new, field.name)]
            )
            for field in dataclasses.fields(Rows)
            if field.name != "setting"
        }
        unseen = np.full(len(new.ids), "ood")
        fields["splits"] = np.concatenate([trained.splits, unseen])
        return Rows(setting=self.setting, **fields)


def encoder_scores(
    scene: Scenario, tree: Mapping[str, Any], config: GridConfig
) -> dict[Subject, np.ndarray]:
    """Return the logits of every encoder on the new rows, `[n_seeds, n_rows]`."""
    store, dims = scene.new.store, family_dims(scene.trained.store)
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
            # Filled up by its last row: one executable serves all parts of a group.
            full = np.pad(batch, (0, n_at_once - len(batch)), mode="edge")
            features = split(read_features(store, scene.trained.layer, full, widths))
            logits = member_logits(trained, features, encoder=encoder)
            every[:, batch] = logits[:, : len(batch)]
    by_seed = every.reshape(config.train.n_seeds, dims.n_subsets, -1)  # as members are
    scores = {Subject("encoder", x): by_seed[:, i] for i, x in enumerate(SUBSET_NAMES)}
    return {
        **scores,
        HIDDEN_ONLY: by_seed[:, 0],
        EARLY_FUSION: by_seed[:, EVERY_FAMILY],
    }


def selected_scores(scene: Scenario, detector: Detector) -> dict[Subject, np.ndarray]:
    """Return the raw scores of the selected heads, `[n_seeds, n_rows]` of the new rows.

    Each seed by itself, as its rivals are: the mean of the seeds' scores, which a
    deployed detector gives, ranks better than the seeds do on average.
    """
    stores: dict[Setting, FeatureStore] = {scene.setting: scene.new.store}
    heads: dict[str, HeadName] = {"champion": scene.setting}
    if scene.closed_book is not None:
        stores["closed_book"] = scene.closed_book.store
        if "single_pass" in detector.heads:
            heads["without_closed_book"] = "single_pass"
    layer, device = scene.trained.layer, "cuda" if torch.cuda.is_available() else "cpu"
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
    """Return the detector of each training seed."""

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


def rival_scores(scene: Scenario) -> dict[Subject, np.ndarray]:
    """Return the scores of probes, length, text and perplexity on the new rows.

    And of the commoner class, whose AUPRC is that of guessing. They are fitted as in
    `evaluate`, on the run's own training and validation rows.
    """
    trained, new = scene.trained, scene.new
    rows, n_trained = scene.joined(), len(trained.rows.ids)
    stores = trained.store, new.store
    scores, _ = probe_scores(stores, rows, trained.layer)
    length = length_features([*trained.answers, *new.answers])
    scores[Subject("answer_length")], _ = linear_scores([length], rows)
    scores[Subject("majority")] = majority_scores(rows)
    scores[Subject("tfidf")], _ = text_scores([*trained.texts, *new.texts], rows)
    scores = {name: x[:, n_trained:] for name, x in scores.items()}
    scores[PERPLEXITY] = answer_log_probs(new.store)[None]
    return scores


_MARK = "retrieved: "  # before an id: the question is asked with gold passages too


def joined_inputs(scene: Scenario) -> DetectorInput:
    """Return all answers as one input, the run's own first, without readings.

    Detectors learn and choose on the run's training and validation rows. What was drawn
    for its other rows is left out, since nobody asks for their scores.
    """
    trained, new = scene.trained, scene.new
    ids = [*trained.rows.ids.tolist(), *(f"{_MARK}{i}" for i in new.rows.ids)]
    marked = ((f"{_MARK}{i}", *rest) for i, *rest in new.store.spec.keys)
    keys = [*trained.store.spec.keys, *marked]
    asked = (msgspec.structs.replace(e, id=f"{_MARK}{e.id}") for e in new.questions)
    is_learned = np.isin(trained.rows.splits, LEARNED)
    drawn = zip(trained.samples, is_learned, strict=True)
    return dataclasses.replace(
        trained,
        store=end_to_end(trained.store, new.store, keys),
        rows=dataclasses.replace(scene.joined(), ids=np.array(ids)),
        questions=[*trained.questions, *asked],
        answers=[*trained.answers, *new.answers],
        samples=[*(x if is_used else () for x, is_used in drawn), *new.samples],
    )


def published_scores(
    scene: Scenario,
    detectors: Sequence[Baseline],
    readings: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]] = ({}, {}),
    tick: Callable[[], None] = lambda: None,
) -> list[Scored]:
    """Return what published detectors give the new rows, `[n_seeds, n_rows]` each.

    Args:
      scene: of a setting.
      detectors: fitted as `baselines` does, on the run's training rows.
      readings: of the run's own rows and of the new ones, by name.
      tick: called for each detector.
    """
    own, new = readings
    together = {name: stacked([*own[name], *new[name]]) for name in new}
    inputs = dataclasses.replace(joined_inputs(scene), readings=together)
    n_own = len(scene.trained.rows.ids)
    scored = []
    for detector in detectors:
        judged = score_or_say(detector, inputs)[0].scored(detector.name)
        scored.append(judged.take(np.arange(n_own, len(inputs.rows.ids))))
        tick()
    return scored


def _answer_rows(examples: Sequence[Example], rows: Rows) -> list[ResultRow]:
    """Return how often answers are right, and how often a passage holds a gold."""
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
                experiment=RETRIEVED,
                detector="backbone",
                metric=metric,
                value=float(x.mean()) if len(x) else None,
                reason=None if len(x) else "no labelled answer",
                **rows.fields_of(dataset, split),
            )
            result.append(row)
    return result


def _count_missing(
    result: Sequence[ResultRow], rows: Rows, questions: Sequence[Example]
) -> list[ResultRow]:
    """Add to each row's failures the questions that have no answer to be scored."""
    answered = set(rows.ids)
    missing = [example for example in questions if example.id not in answered]
    n_missing = collections.Counter((e.dataset, e.split) for e in missing)
    n_missing += collections.Counter((IN_DOMAIN, e.split) for e in missing)
    n_missing[ALL_SETS, "ood"] = len(missing)

    def n_failed(row: ResultRow) -> int:
        return row.n_failed + n_missing[row.dataset, row.split]

    return [msgspec.structs.replace(row, n_failed=n_failed(row)) for row in result]


def scene_rows(
    scene: Scenario,
    scores: Mapping[Subject, np.ndarray],
    questions: Sequence[Example],
    intervals: BootstrapConfig,
    published: Sequence[Scored] = (),
) -> list[ResultRow]:
    """Return the rows of a setting, of each set and of all sets together.

    Args:
      scene: of the setting.
      scores: by detector, `[n_seeds, n_rows]` of the new rows.
      questions: all of them; those without an answer are counted as failed.
      intervals: of the rows.
      published: detectors of others.
    """
    rows = scene.new.rows
    ours = [Scored(name=name, scores=x) for name, x in scores.items()]
    detectors = [*ours, *published]
    rivals = [*COMPARED, *(x.subject for x in published)]
    pairs = {f"{RETRIEVED}_paired": [(CHAMPION, rival) for rival in rivals]}
    everything = np.full(len(rows.ids), ALL_SETS)
    unseen = np.full(len(rows.ids), "ood")
    together = dataclasses.replace(rows, datasets=everything, splits=unseen)
    result = []
    for each in (rows, together):
        result += detection_rows(detectors, each, intervals, RETRIEVED, pairs)
        result += _answer_rows(scene.new.questions, each)
    return _count_missing(result, rows, questions)


NAME = "transfer"


def _inner(run: RunDir) -> RunDir:
    """Return the run inside a run; it may not be there."""
    return RunDir(run.path / "retrieved")


def _counts_file(run: RunDir) -> Path:
    """Return the file of how many were asked, how many failed, and the rule."""
    return _inner(run).path / "asked.json"


def open_inner(run: RunDir) -> RunDir:
    """Open the run inside a run, of the same model, prompts, labels and layers.

    Passages that do not fit are left out from the last on, since nobody chose them for
    their length.
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
    """Put questions into an inner run, with the closed-book answers there are."""
    content = "".join(f"{to_json(example)}\n" for example in examples)
    if inner.examples.exists() and inner.examples.read_text("utf-8") == content:
        return
    if inner.examples.exists():
        note("retrieved: other passages or questions than before")
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


def run_scene(
    run: RunDir,
    inner: RunDir,
    setting: Setting,
    config: BaselinesConfig | None = None,
    relations: Relations | None = None,
) -> Scenario:
    """Return a run's own answers in a setting, and those of an inner run."""
    evidence = partial(run_inputs, inner, layer=chosen_layer(run))
    closed_book = None if setting == "closed_book" else evidence("closed_book")
    return Scenario(
        trained=run_inputs(run, setting, config, relations),
        new=evidence(setting),
        closed_book=closed_book,
    )


def baselines_config(run: RunDir) -> BaselinesConfig:
    """Return which published detectors a run was last judged by, and their models."""
    return run.settle("baselines", BASELINES_PRESETS, is_recorded=False)


def run_published(
    run: RunDir,
    scene: Scenario,
    detectors: Sequence[Baseline],
    config: BaselinesConfig,
    update: Update,
) -> list[Scored]:
    """Return `published_scores` in a run; what they read beside is cached in both."""
    detectors, here = [x for x in detectors if scene.setting in x.settings], _inner(run)
    chunks = (len(chunks_of(len(x.rows.ids))) for x in (scene.trained, scene.new))
    total = len(detectors) + sum(chunks) * any(x.reads for x in detectors)
    ticks = itertools.count(1)

    def tick() -> None:
        update(next(ticks), total)

    of_run, trained = run_identities(run, config.models), scene.trained
    # Answers that a detector learned from and is put to are cut at one cue.
    of_new = run_identities(here, config.models) | {"cue": of_run["answers"]}
    readings = (
        read_again(run, trained, detectors, of_run, tick, splits=LEARNED),
        read_again(here, scene.new, detectors, of_new, tick, cue_like=trained),
    )
    values = readings[0].values, readings[1].values
    return published_scores(scene, detectors, values, tick)


def labelling_options(rule: str) -> str | None:
    """Return the options of `beatrice label` that label by a rule; None of a file."""
    for match, words in RULES.items():
        if rule == words:
            return f"--match {match}"
    kind, _, name = rule.partition(" ")
    if kind == "judges:":
        model, _, vote = name.rpartition(", ")
        return f"--judge {shlex.quote(model)} --set vote={vote}"
    return f"--judge {name}" if kind == "judge" else None


def _transfer(
    run: RunDir, config: TransferConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    detector, intervals = Detector.load(run.detector), run_bootstrap(run)
    questions, rows = asked_questions(read_examples(run), config), []
    how, detectors = baselines_config(run), []
    for rival in chosen_detectors(how):
        # Who learns from draws has those of the run, and needs none of new answers.
        places = (run,) if rival.draws_for else (run, _inner(run))
        if lack := next(filter(None, (unmet(rival, x, how) for x in places)), None):
            progress.note(f"transfer: {rival.name} {lack}")
        else:
            detectors.append(rival)
    relations = open_relations(run, how, detectors, progress)
    for index, setting in enumerate(SETTINGS):
        scene = run_scene(run, _inner(run), setting, how, relations)
        encoders, _ = checkpoint.restore(run.encoders(setting))
        scores = selected_scores(scene, detector)
        scores |= encoder_scores(scene, encoders, grid_config(run))
        scores |= rival_scores(scene)
        setting_update = part_of(update, index, len(SETTINGS))
        published = run_published(run, scene, detectors, how, setting_update)
        rows += scene_rows(scene, scores, questions, intervals, published)
    rule, of_run = label_rule(_inner(run)), label_rule(run)
    # Judges of the retrieved answers alone are a choice, and were paid for.
    if rule != of_run and (rule in RULES.values() or of_run not in RULES.values()):
        options = labelling_options(of_run)
        line = f"{shell_line('label', _inner(run).path)} {options}"
        progress.note(
            f"transfer: the retrieved answers are labelled by {rule}, those that "
            f"detectors learned from by {of_run}"
            + (f"; `{line}` labels the retrieved ones so too" if options else "")
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
        # Whose detectors, with what was drawn for them, are put to the new answers.
        *filter(
            Path.exists,
            (rows_file(run, "baselines"), run.samples, _inner(run).samples),
        ),
    ],
    outputs=lambda run: [rows_file(run, NAME)],
    work=_transfer,
    presets=TRANSFER_PRESETS,
)


def transfer_run(run: RunDir, config: TransferConfig, progress: Progress) -> None:
    """Do everything that is not done, in a run that is held by the caller.

    Raises:
      ValueError: the run has no detector, or questions got no passages; what the
        others gave is published, and the same call again asks for the rest.
    """
    require_both_settings(run, NAME)
    run.require(run.detector)
    if not run.stage_done(NAME):  # before hours of answers, whether its code is named
        chosen_detectors(baselines_config(run))
    questions = asked_questions(read_examples(run), config, progress.note)
    retrieval = retrieval_of(run, progress.note, "transfer_retrieval")
    model, _ = load_tokenizer_only(run)
    prompts = model.tokenizer, answer_config(run).prompt.prompt_template()
    examples, failed = with_passages(questions, retrieval, config.n_passages, prompts)
    progress.note(
        f"transfer: {len(examples)} of {len(questions)} questions have passages, by "
        f"{retrieval_config(run, 'transfer_retrieval').retriever} over "
        f"{len(retrieval.passages):,}"
    )
    if not examples:
        raise ValueError(f"no question got passages: {next(iter(failed.values()))}")
    del retrieval  # an index and its encoder; the backbone comes next
    match = run.settle("label", LABEL_PRESETS, is_recorded=False)
    with open_inner(run) as inner:
        write_questions(inner, run, examples, progress.note)
        run_stage(ANSWER, inner, progress)
        if not inner.stage_done("label"):  # judges may have labelled
            label_run(inner, match.match, progress)
        elif label_rule(inner) in RULES.values():  # given anew where it has changed
            label_run(inner, None, progress)
        run_stage(EXTRACT, inner, progress)
        # With the rule, which rows have: another may give the same labels.
        counts = {"n_asked": len(questions), "n_failed": len(failed)}
        rule = {"label_rule": label_rule(inner)}
        write_json_atomic(_counts_file(run), counts | rule)
        run_stage(TRANSFER, run, progress)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(questions)} questions got no passages and are "
            f"counted as failed, the first since {next(iter(failed.values()))}; the "
            "same line again asks for them"
        )
