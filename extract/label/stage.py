"""The stages that label answers, and audits of how far the labels can be trusted.

A person judges a sample of answers blind: a CSV is written, and read back with its
column `human` filled in with correct or incorrect. Half of the sample is labelled right
and half wrong, so that each kind of mistake gets an interval; estimates for all answers
are weighted by how many have either label.
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.extract.datasets.rows import allow_long_cells
from beatrice.extract.generate.generator import (
    SCHEMA_VERSION,
    Generator,
    Texts,
    TextStage,
)
from beatrice.extract.generate.prompts import variants_of
from beatrice.extract.label.labels import (
    LABEL_PRESETS,
    RUBRICS,
    RULES,
    ConsensusConfig,
    Judge,
    Judgements,
    LabelConfig,
    Match,
    Rubric,
    class_counts,
    count_correct,
    exact_match,
    import_labels,
    judge_answers,
    label_by_match,
    label_with,
    parse_verdict,
    shares_in_words,
)
from beatrice.extract.plugs import load_plug, sha256_of_code
from beatrice.extract.records import (
    Answer,
    Example,
    Key,
    Label,
    Record,
    read_records,
    to_json,
    write_lines,
)
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    check_answered,
    question_files,
    read_answers,
    read_examples,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import (
    Journal,
    JournalFiles,
    sha256_file,
    sha256_json,
    write_json_atomic,
    write_text_atomic,
)
from beatrice.extract.run.rows import label_rule
from beatrice.extract.run.stages import (
    Stage,
    change_settings,
    current_inputs,
    do_once,
    run_stage,
)

COLUMNS = tuple(
    "item example_id setting variant question golds passages answer check human".split()
)
N_BOOTSTRAP = 10_000  # bootstrap resamples for an interval of kappa
# Of the comparison with golds. Version 1 deleted only ASCII punctuation; to version 2,
# an empty answer was right if a gold was only an article or marks; version 3 took
# digits of other scripts for letters.
_FORMAT = "4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two raters agree on the same items."""

    n: int  # items that both rated
    n_agree: int  # items that both rated alike
    kappa: float | None  # in [-1, 1], or None if undefined
    ci_low: float | None  # bounds of the 95 % interval, see `agreement`
    ci_high: float | None
    n_bootstrap: int  # resamples drawn
    n_undefined: int  # resamples without a kappa (one class), left out of the interval
    reason: str | None  # why kappa is undefined

    def in_words(self) -> str:
        """Return a one-line summary."""
        if not self.n:
            return "nothing to compare"
        share = 100 * self.n_agree / self.n
        line = f"{self.n_agree} of {self.n} agree ({share:.1f} %), kappa "
        if self.kappa is None:
            return f"{line}undefined: {self.reason}"
        return f"{line}{self.kappa:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"


def kappas(tables: np.ndarray) -> np.ndarray:
    """Return Cohen's kappa (Cohen 1960) of many tables.

    Args:
      tables: `[n_tables, 4]` counts: both yes, only the first, only the second, both
        no.

    Returns:
      `[n_tables]` float64; NaN if both raters put every item into the same class.
    """
    both, first, second, neither = tables.T.astype(np.float64)
    n = both + first + second + neither
    chance = (both + first) * (both + second) + (neither + second) * (neither + first)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return (n * (both + neither) - chance) / (n * n - chance)


def agreement(
    pairs: Sequence[tuple[bool, bool]], questions: Sequence[str] = (), *, seed: int = 0
) -> Agreement:
    """Return the agreement of two raters (Cohen's kappa) from pairs of their ratings.

    Each item has its question in `questions`, or one of its own. Questions are drawn as
    counts of their kinds, which has the same distribution as drawing them one by one.
    If nearly all items agree, resamples are too similar, so the interval also covers
    Wilson's of the share that agrees, with the observed agreement by chance.
    """
    n = len(pairs)
    a, b = np.array(pairs, dtype=bool).reshape(n, 2).T
    items = np.stack([a & b, a & ~b, ~a & b, ~a & ~b], axis=1).astype(np.int64)
    cells = items.sum(axis=0)
    kappa, low, high, drawn = None, None, None, np.empty(0)
    if len(np.unique(pairs)) > 1:
        kappa = float(kappas(cells[None])[0])
        _, numbers = np.unique(questions or range(n), return_inverse=True)
        tables = np.zeros((numbers.max() + 1, 4), np.int64)
        np.add.at(tables, numbers, items)
        kinds, counts = np.unique(tables, axis=0, return_counts=True)
        draws = np.random.default_rng(seed).multinomial(
            len(tables), counts / len(tables), size=N_BOOTSTRAP
        )
        drawn = kappas(draws @ kinds)
        low, high = _kappa_interval(drawn, cells, len(tables))
    undefined = "both raters put every item into one class" if n else "no items"
    return Agreement(
        n=n,
        n_agree=int(cells[0] + cells[3]),
        kappa=kappa,
        ci_low=low,
        ci_high=high,
        n_bootstrap=len(drawn),
        n_undefined=int(np.isnan(drawn).sum()),
        reason=undefined if kappa is None else None,
    )


def _kappa_interval(
    drawn: np.ndarray, cells: np.ndarray, n_questions: int
) -> tuple[float, float]:
    """Return kappa's 95 % interval: the union of the resamples' and Wilson's."""
    both, first, second, neither = (cells / cells.sum()).tolist()
    chance = (both + first) * (both + second) + (neither + second) * (neither + first)
    shares = _wilson(round((both + neither) * n_questions), n_questions)
    ends = [(share - chance) / (1 - chance) for share in shares]
    # Some resamples are always defined: even with two items that differ, about half.
    ends += np.nanquantile(drawn, (0.025, 0.975)).tolist()
    return min(ends), max(ends)


def _wilson(n_hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    from scipy.stats import binomtest  # imported here, since it takes a second

    low, high = binomtest(n_hits, n).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledAnswer:
    """An answer with its question and its label."""

    example: Example
    answer: Answer
    label: Label

    @property
    def exact(self) -> bool:
        """Return whether the answer matches a gold exactly, after normalising."""
        return exact_match(self.answer.text, self.example.golds)

    @property
    def group(self) -> tuple[str, str]:
        """Return setting and variant."""
        return (self.label.setting, self.label.variant)

    @property
    def check(self) -> str:
        """Return a digest of the question, its golds and the answer."""
        content = [self.example.question, list(self.example.golds), self.answer.text]
        # A letter comes first, or a spreadsheet might take it for a number.
        return f"c{sha256_json(content)[:12]}"


def join_labels(
    examples: Iterable[Example], answers: Iterable[Answer], labels: Iterable[Label]
) -> list[LabelledAnswer]:
    """Return every labelled answer with its question, in the order of the keys."""
    by_id = {example.id: example for example in examples}
    by_key = {answer.key: answer for answer in answers}
    label_of = {label.key: label for label in labels}
    lone = sorted(by_key.keys() ^ label_of.keys())
    if lone:
        what = "label" if lone[0] in by_key else "answer"
        raise ValueError(
            f"{lone[0]} has no {what}; run `beatrice label` again before the audit"
        )
    return [
        LabelledAnswer(example=by_id[key[0]], answer=by_key[key], label=label_of[key])
        for key in sorted(label_of)
    ]


def disagreements(rows: Sequence[LabelledAnswer]) -> list[dict[str, Any]]:
    """List the answers that the judges dropped, or labelled unlike exact match."""
    listed = []
    for row in rows:
        if row.label.label is None:
            kind = "unparsable" if "unparsable" in row.label.verdicts else "dropped"
        elif row.label.label != row.exact:
            kind = "judge_only" if row.label.label else "exact_match_only"
        else:
            continue
        listed.append(
            {
                "kind": kind,
                "example_id": row.example.id,
                "setting": row.label.setting,
                "variant": row.label.variant,
                "question": row.example.question,
                "golds": list(row.example.golds),
                "answer": row.answer.text,
                "verdicts": list(row.label.verdicts),
                "exact_match": row.exact,
                "reason": row.label.reason,
            }
        )
    return listed


def against_exact_match(
    rows: Sequence[LabelledAnswer], *, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare the labels with exact match, overall and per setting and variant."""
    compared = []
    for group in [("all", "all"), *sorted({row.group for row in rows})]:
        members = [row for row in rows if group in (("all", "all"), row.group)]
        kept = [x for x in members if x.label.label is not None]
        pairs = [(bool(x.label.label), x.exact) for x in kept]
        questions = [x.example.id for x in kept]
        unparsable = [x.label.verdicts.count("unparsable") for x in members]
        compared.append(
            {
                "setting": group[0],
                "variant": group[1],
                "n_answers": len(members),
                "n_dropped": len(members) - len(pairs),
                "n_unparsable_verdicts": sum(unparsable),
                **dataclasses.asdict(agreement(pairs, questions, seed=seed)),
            }
        )
    return compared


def between_judges(
    rows: Sequence[LabelledAnswer],
    *,
    seed: int = 0,
    rubrics: Sequence[Rubric] = RUBRICS,
) -> list[dict[str, Any]]:
    """Compare the rubrics pairwise, on answers for which both gave a verdict."""
    if {len(row.label.verdicts) for row in rows} != {len(rubrics)}:
        return []
    compared = []
    for i, j in itertools.combinations(range(len(rubrics)), 2):
        pairs = [(row.label.verdicts[i], row.label.verdicts[j]) for row in rows]
        parsed = [k for k, pair in enumerate(pairs) if "unparsable" not in pair]
        rated = [(pairs[k][0] == "correct", pairs[k][1] == "correct") for k in parsed]
        questions = [rows[k].example.id for k in parsed]
        compared.append(
            {
                "first": rubrics[i].name,
                "second": rubrics[j].name,
                "n_unparsable": len(pairs) - len(parsed),
                **dataclasses.asdict(agreement(rated, questions, seed=seed)),
            }
        )
    return compared


def draw_sample(
    rows: Sequence[LabelledAnswer], n: int, *, seed: int = 0
) -> list[LabelledAnswer]:
    """Draw at most n labelled answers, evenly over the settings (paper: 50 and 50).

    Also evenly over right and wrong, and only from test and held-out questions, which
    detectors are measured on, if there are any. If one kind has too few, the others
    give more. `rows` are all answers, in the order of their keys.
    """
    rng = np.random.default_rng(seed)
    piles = [
        [pile[i] for i in reversed(rng.permutation(len(pile)))]
        for _, pile in sorted(_by_label(rows).items())
    ]
    rounds = itertools.zip_longest(*piles)
    sample = [row for drawn in rounds for row in drawn if row is not None][:n]
    return [sample[i] for i in rng.permutation(len(sample))]


def _drawing_of(rows: Sequence[LabelledAnswer]) -> str:
    """Return a digest of all labels, on which the draw of a sample depends."""
    return sha256_json([(*row.label.key, row.label.label) for row in rows])[:8]


def _by_label(
    rows: Sequence[LabelledAnswer],
) -> dict[tuple[str, bool], list[LabelledAnswer]]:
    labelled = [row for row in rows if row.label.label is not None]
    evaluated = [row for row in labelled if row.example.split in ("test", "ood")]
    groups: dict[tuple[str, bool], list[LabelledAnswer]] = {}
    for row in evaluated or labelled:
        groups.setdefault((row.label.setting, bool(row.label.label)), []).append(row)
    return groups


def _cell(text: str) -> str:
    """Return a text quoted so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _passages(row: LabelledAnswer) -> str:
    """Return the titles and texts that the model saw, one passage per line."""
    shown = dict(variants_of(row.label.setting, row.example)).get(row.label.variant)
    seen = [p for i, p in enumerate(shown or ()) if i not in row.answer.dropped]
    return "\n".join(f"{passage.title}: {passage.text}" for passage in seen)


def write_sample(
    path: Path, sample: Sequence[LabelledAnswer], rows: Sequence[LabelledAnswer]
) -> None:
    """Write the CSV of a sample of the rows, but never over another sample.

    The existing one may be filled in. A cell of `check` has the answer's digest and,
    after a hyphen, one of all labels; the labels themselves are not shown.
    """
    if path.exists():
        checks = [row["check"].split("-")[0] for row in _read_rows(path)]
        if checks != [row.check for row in sample]:
            raise ValueError(
                f"{path} holds another sample, perhaps with annotations; move it away "
                "to draw a new one"
            )
        return
    stream = io.StringIO()
    writer = csv.writer(stream)  # lines end in \r\n, so cells with either are quoted
    writer.writerow(COLUMNS)
    drawing = _drawing_of(rows)
    for item, row in enumerate(sample, start=1):
        question = (row.example.question, " | ".join(row.example.golds), _passages(row))
        checks = (row.answer.text, f"{row.check}-{drawing}")
        cells = (row.example.id, *row.group, *question, *checks)
        writer.writerow((item, *map(_cell, cells), ""))
    # Excel recognises UTF-8 by this mark; without it, "São" would show as "SÃ£o".
    write_text_atomic(path, f"\ufeff{stream.getvalue()}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelNoise:
    """How often a person disputes one label in one setting."""

    setting: str
    label: bool  # what the labels say
    n_all: int  # evaluated answers with this label
    n: int  # those of them that were annotated
    n_disputed: int  # annotated answers where the person disagrees
    ci_low: float | None  # Wilson's 95 % interval of the share; None if n is 0
    ci_high: float | None

    def in_words(self) -> str:
        """Return a one-line summary."""
        names = ("right", "wrong") if self.label else ("wrong", "right")
        ci = f" [{self.ci_low:.3f}, {self.ci_high:.3f}]" if self.n else ""
        n_disputed = f"{self.n_disputed} of {self.n}"
        return f"{self.setting}: {n_disputed} labelled {names[0]} are {names[1]}{ci}"


def label_noise(
    rows: Sequence[LabelledAnswer], human: Mapping[Key, bool]
) -> tuple[LabelNoise, ...]:
    """Count the labels that a person disputes, per setting and label."""
    noise = []
    for (setting, label), group in sorted(_by_label(rows).items()):
        verdicts = [human[row.label.key] for row in group if row.label.key in human]
        n, n_disputed = len(verdicts), sum(verdict != label for verdict in verdicts)
        low, high = _wilson(n_disputed, n) if n else (None, None)
        noise.append(
            LabelNoise(
                setting=setting,
                label=label,
                n_all=len(group),
                n=n,
                n_disputed=n_disputed,
                ci_low=low,
                ci_high=high,
            )
        )
    return tuple(noise)


def noise_in_words(noise: Sequence[LabelNoise]) -> list[str]:
    """Return a line per setting and label, and one per setting for all its answers."""
    lines = []
    for setting in dict.fromkeys(row.setting for row in noise):
        rows = [row for row in noise if row.setting == setting]
        lines += [row.in_words() for row in rows]
        if all(row.n for row in rows):
            share = sum(row.n_all * row.n_disputed / row.n for row in rows)
            share /= sum(row.n_all for row in rows)
            lines.append(f"{setting}: of all answers, {100 * share:.1f} % mislabelled")
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanAgreement:
    """What a person's annotations say about the labels."""

    judge: Agreement  # of the person with the labels
    exact: Agreement  # of the person with exact match
    n_empty: int  # items that were not annotated
    n_dropped: int  # items that have lost their label, annotated or not
    noise: tuple[LabelNoise, ...]  # empty if the sample was drawn under other labels
    verdicts: tuple[tuple[str, str, str, bool], ...]  # key, and whether it is correct


def _read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a sample's CSV, separated by commas or semicolons."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: expected a CSV in UTF-8; save it from the spreadsheet as "
            "'CSV UTF-8'"
        ) from None
    header = text.split("\n", 1)[0]
    separator = ";" if header.count(";") > header.count(",") else ","
    allow_long_cells()  # for passages
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(
            f"{path}: expected the columns {', '.join(COLUMNS)}; found no "
            f"{missing[0]!r}"
        )
    return [{name: row[name] or "" for name in COLUMNS} for row in reader]


def read_annotations(
    path: Path, rows: Sequence[LabelledAnswer], *, seed: int = 0
) -> HumanAgreement:
    """Compare a person's annotations, in a sample's CSV, with the labels.

    Every item must be an answer of the current run and occur once. A sample drawn under
    other labels does not tell how many of all answers are mislabelled.
    """
    # Keyed as shown: the CSV may have an apostrophe before an id.
    by_key = {tuple(map(_cell, row.label.key)): row for row in rows}
    rated: list[tuple[bool, LabelledAnswer]] = []
    seen: set[tuple[str, ...]] = set()
    drawings: set[str] = set()
    n_dropped = 0
    for number, cells in enumerate(_read_rows(path), start=1):
        key = (cells["example_id"], cells["setting"], cells["variant"])
        row = by_key.get(key)
        verdict = parse_verdict(cells["human"]) if cells["human"].strip() else None
        check, _, drawing = cells["check"].partition("-")
        problem = None
        if row is None:
            problem = f"{key} is not an answer of this run"
        elif key in seen:
            problem = f"{key} occurs twice; keep one of them"
        elif check != row.check:
            problem = (
                f"{key} was annotated for another question, gold or answer than the "
                "run's; draw a new sample"
            )
        elif verdict == "unparsable":
            problem = (
                "expected correct, incorrect or nothing in the column human, found "
                f"{cells['human'][:40]!r}"
            )
        if row is None or problem is not None:
            raise ValueError(f"{path}, row {number}: {problem}")
        seen.add(key)
        drawings.add(drawing)
        if row.label.label is None:
            n_dropped += 1
        elif verdict is not None:
            rated.append((verdict == "correct", row))
    labels = [(human, bool(row.label.label)) for human, row in rated]
    exact = [(human, row.exact) for human, row in rated]
    questions = [row.example.id for _, row in rated]
    verdicts = {row.label.key: human for human, row in rated}
    # Older files lack the digest of the labels under which they were drawn.
    is_of_these = not n_dropped and drawings <= {"", _drawing_of(rows)}
    return HumanAgreement(
        judge=agreement(labels, questions, seed=seed),
        exact=agreement(exact, questions, seed=seed),
        n_empty=len(seen) - len(rated) - n_dropped,
        n_dropped=n_dropped,
        noise=label_noise(rows, verdicts) if is_of_these else (),
        verdicts=tuple((*key, human) for key, human in verdicts.items()),
    )


JUDGES = "beatrice.judges"  # entry points of users' own judges


def _answered(run: RunDir) -> tuple[list[Answer], list[Example]]:
    """Return the answers and questions of a run, after checking that it is complete."""
    check_answered(run)
    return read_answers(run), read_examples(run)


def label_run(run: RunDir, match: Match | None, progress: Progress) -> None:
    """Label the run's answers by comparison with golds; None keeps the run's rule."""
    if match is not None:
        current_inputs(run, "label")  # fails if the user has changed the labels
        change_settings(run, LABEL, lambda _: LabelConfig(match=match))
    run_stage(LABEL, run, progress)


def _label(
    run: RunDir, config: LabelConfig, update: Update, progress: Progress
) -> None:
    record, rule = run.stage_record("label"), RULES[config.match]
    before = record.inputs if record else {}
    if "judge" in before:
        progress.note(
            f"label: {rule} replaces the judges' labels; their replies stay in "
            f"{run.replies('judge')}"
        )
    elif "rule" in before:
        is_earlier = before["rule"] == rule and before.get("format") != _FORMAT
        of_before = "an earlier " * is_earlier + before["rule"]
        progress.note(f"label: {rule} replaces the earlier labels: {of_before}")
    progress.note(
        f"label: by {rule}, without a judge: right answers in other words than their "
        "golds count as wrong"
    )
    _write_labels(run, label_by_match(*_answered(run), config.match), progress)


def _write_labels(run: RunDir, labels: Sequence[Label], progress: Progress) -> None:
    """Write labels; note how many are correct, and an example if all are alike."""
    # Without a record no stage has labelled yet, so an existing file is the user's.
    is_new = run.stage_record("label") is None
    write_text_atomic(run.labels, write_lines(labels), is_new=is_new)
    examples = read_examples(run)
    for line in shares_in_words(examples, labels):
        progress.note(f"label: {line}")
    counts = count_correct(examples, {label.key: label for label in labels})
    for (setting, _), (n, n_correct) in class_counts(counts).items():
        if n_correct in (0, n):
            answer = read_answers(run, setting)[0]
            example = next(e for e in examples if e.id == answer.example_id)
            progress.note(
                f"label: for instance, {example.question!r} is answered "
                f"{answer.text!r}; its golds are {', '.join(map(repr, example.golds))}"
            )
            return


def _label_inputs(run: RunDir) -> list[Path]:
    """Return the files that every way of labelling reads."""
    return [*question_files(run), run.answers]


def judge_stage(
    run: RunDir,
    generator: Generator,
    config: ConsensusConfig,
    progress: Progress,
    *,
    name: str,
) -> TextStage[Judgements]:
    """Return the stage that labels by the consensus of the judge `name`'s rubrics."""
    identity = {
        "schema": SCHEMA_VERSION,
        "judge": dict(generator.identity),
        "rubrics": [dataclasses.asdict(rubric) for rubric in RUBRICS],
        "config": dataclasses.asdict(config),
    }
    summary = run.replies("judge").with_suffix(".json")

    def make(replies: Texts, update: Update) -> Judgements | None:
        return judge_answers(*_answered(run), generator, replies, config, update)

    def write(judgements: Judgements) -> None:
        n_again, n_lost = judgements.n_retried, judgements.n_unparsable
        numbers = {"n_retried": n_again, "n_unparsable_verdicts": n_lost}
        counts = judgements.counts()
        write_json_atomic(summary, identity | numbers | {"counts": counts})
        for row in counts:
            progress.note("label: " + ", ".join(f"{k} {v}" for k, v in row.items()))
        _write_labels(run, judgements.labels, progress)
        progress.note(
            f"label: {n_again} replies asked for again, {n_lost} verdicts stayed "
            "unparsable"
        )

    rule = f"judges: {name}, {config.vote}"
    return TextStage(
        run=run,
        name="label",
        role="judge",
        reads=_label_inputs(run),
        settings={"judge": sha256_json(identity), "rule": rule},
        outputs=[run.labels, summary],
        make=make,
        write=write,
    )


class _Verdict(Record, frozen=True, kw_only=True):
    """The verdict of a user's judge on an answer."""

    key: str  # digest of judge, question and answer
    label: bool | None


@contextlib.contextmanager
def _saved_verdicts(
    run: RunDir, judge: Judge, identity: Mapping[str, str], progress: Progress
) -> Iterator[Judge]:
    """Yield a judge that saves its verdicts once a second and judges nothing twice."""
    path = run.replies("judge_with")
    journal = Journal.open(JournalFiles(path, _Verdict, lambda row: row.key))
    again = f"label: answers with this judge's verdict in {path} are not judged again"
    for note in (*journal.notes, *[again] * bool(journal)):
        progress.note(note)
    new: dict[str, str] = {}
    due = time.monotonic() + 1

    def write() -> None:
        nonlocal due
        journal.append(new)
        new.clear()
        due = time.monotonic() + 1

    def saved(example: Example, answer: Answer) -> bool | None:
        key = sha256_json([dict(identity), to_json(example), to_json(answer)])
        if key in journal:
            return journal[key].label
        label = judge(example, answer)
        if label is None or isinstance(label, bool | np.bool_):
            verdict = _Verdict(key=key, label=None if label is None else bool(label))
            new[key] = to_json(verdict)
            if time.monotonic() > due:
                write()
        return label

    try:
        yield saved
    finally:
        write()


def label_run_with(run: RunDir, spec: str, progress: Progress) -> None:
    """Label answers by a user's judge, see `load_plug`; writes `labels.jsonl`."""
    judge = load_plug(spec, JUDGES)
    identity = {"rule": f"judge {spec}"}
    if code := sha256_of_code(judge):  # judge again if the file changes
        identity["judge_with"] = code
    is_saved = all((code, callable(judge)))  # code without a file may change unseen

    def make() -> list[Label]:
        verdicts = contextlib.nullcontext(judge)
        if is_saved:
            verdicts = _saved_verdicts(run, judge, identity, progress)
        with progress.stage("judge") as update, verdicts as saved:
            return label_with(*_answered(run), saved, name=spec, progress=update)

    _label_by(run, identity, make, progress)


def label_run_by_import(run: RunDir, path: Path, progress: Progress) -> None:
    """Label the run's answers from a user's file; writes `labels.jsonl`."""

    def make() -> Sequence[Label]:
        imported = import_labels(path, *_answered(run))
        progress.note(
            f"label: {imported.n_lines} lines of {path}; {imported.n_other_question} "
            f"are about other questions, {imported.n_other_answer} about other answers "
            f"than this run's, {imported.n_undecided} leave the answer undecided"
        )
        if imported.n_unchecked:
            progress.note(
                f"label: warning: {imported.n_unchecked} lines are of an older version "
                "and lack a digest of question or answer; they label this run's "
                "answer to the question with their id, even if it differs"
            )
        return imported.labels

    rule = f"imported from {path.name}"
    _label_by(run, {"imported": sha256_file(path), "rule": rule}, make, progress)


def _label_by(
    run: RunDir,
    identity: Mapping[str, str],
    make: Callable[[], Sequence[Label]],
    progress: Progress,
) -> None:
    """Write the labels of a user's judge or file, unless they are already there."""
    inputs = {**current_inputs(run, "label", _label_inputs(run)), **identity}
    # Made before the stage starts over, since the judge or the file may fail.
    labels = [] if run.stage_done("label", inputs) else make()

    def work(update: Update) -> None:
        _write_labels(run, labels, progress)

    do_once(run, "label", inputs, [run.labels], progress, work)


def _labelled(run: RunDir) -> list[LabelledAnswer]:
    run.hash_inputs(run.examples, run.answers, run.labels)  # fails if one is missing
    labels = read_records(run.labels, Label)
    return join_labels(read_examples(run), read_answers(run), labels)


def audit_labels(run: RunDir, n_sample: int | None) -> dict[str, Any]:
    """Write a report on the labels' quality into `audit/`, and return it.

    Also write a sample for a person; without `n_sample`, one of 100, if there is none.
    """
    rows, seed = _labelled(run), run.seed
    listed = disagreements(rows)
    file, sample = run.audit / "disagreements.jsonl", run.audit / "sample.csv"
    report = {
        "label_rule": label_rule(run),
        "exact_match": against_exact_match(rows, seed=seed),
        "judges": between_judges(rows, seed=seed),
        "n_disagreements": len(listed),
        "disagreements": str(file),
        "sample": str(sample),
    }
    write_text_atomic(file, "".join(json.dumps(row) + "\n" for row in listed))
    write_json_atomic(run.audit / "audit.json", report)
    if n_sample is not None or not sample.exists():
        write_sample(sample, draw_sample(rows, n_sample or 100, seed=seed), rows)
    # Its bytes are searched, not parsed, since a person may be editing the file.
    is_current = _drawing_of(rows).encode() in sample.read_bytes()
    return report | {"sample_is_current": is_current}


def compare_annotations(run: RunDir, path: Path) -> HumanAgreement:
    """Compare a person's annotations with the labels; writes `audit/human.json`."""
    human = read_annotations(path, _labelled(run), seed=run.seed)
    about = {"read": run.hash_inputs(run.answers, run.labels)}  # what they apply to
    write_json_atomic(run.audit / "human.json", dataclasses.asdict(human) | about)
    return human


LABEL = Stage(
    name="label",
    inputs=_label_inputs,
    outputs=lambda run: [run.labels],
    work=_label,
    presets=LABEL_PRESETS,
    identity=lambda config: {"rule": RULES[config.match], "format": _FORMAT},
)
