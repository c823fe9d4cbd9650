"""The stage that writes the report from a run's files.

It also writes the page's tables as Markdown and LaTeX. Also here are the comparison of
two runs and the headline of a finished run.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas

from beatrice.benchmarks import STAGES
from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.results import findings, names, rendering, rivals, tables
from beatrice.benchmarks.results.page import (
    ReportData,
    headline,
    numbers,
    render_report,
    too_few_in_words,
)
from beatrice.benchmarks.results.paper import ledger, number_text, read_ledger
from beatrice.benchmarks.results.rendering import markdown
from beatrice.benchmarks.results.shown import Control, Curves, ShownAnswer, ShownSet
from beatrice.benchmarks.results.tables import (
    EVALUATED,
    POOLED,
    Place,
    by_subject,
    in_domain_or_held_out,
    interval,
    number,
    places_of,
    results_of,
    row_value,
    where,
)
from beatrice.benchmarks.stages import STUDIES, TABLES, costs_file, read_costs
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import (
    IN_DOMAIN,
    SETTINGS,
    Example,
    Label,
    Setting,
    text_key,
)
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    read_examples,
    read_labels,
    settings_in_words,
    settings_of,
)
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.files import read_json, write_text_atomic
from beatrice.extract.run.rows import (
    ResultRow,
    Subject,
    check_evaluated,
    gather,
    label_rule,
    published,
    read_result_rows,
    read_rows,
)
from beatrice.extract.signals.extract import extract_config
from beatrice.jaxprobe.config import INTERVAL_PRESETS
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.stages import chosen_layer, grid_config, read_sweep
from beatrice.selection.stages import selection_summary

if TYPE_CHECKING:  # these load JAX, which only some reports and comparisons need
    from beatrice.jaxprobe.metrics import BootstrapConfig
    from beatrice.selection.reach import RankAgreement, Ranked

Part = TypeVar("Part")


def read_part(file: Path, kind: type[Part], verb: str) -> Part:
    """Read a file that a verb wrote for the report."""
    return read_json(file, kind, f"run `beatrice {verb}` again")


def label_rules(run: RunDir, rows: Iterable[ResultRow]) -> str:
    """Name the rule that labels answers, and any other rule of retrieved answers."""
    rule = label_rule(run)
    of_retrieved = {r.label_rule for r in rows if r.experiment == names.RETRIEVED}
    others = sorted({x for x in of_retrieved if x} - {rule})
    return "; ".join((rule, *(f"retrieved answers: {x}" for x in others)))


def _facts(run: RunDir, rows: Iterable[ResultRow]) -> dict[str, str]:
    n_questions = Counter(example.split for example in read_examples(run))
    splits = {x: names.SPLIT_LABELS[x] for x in ("train", "validation", "test", "ood")}
    extract = extract_config(run)
    return {
        "Backbone": run.section("backbone", BackboneConfig).model,
        "Preset": run.preset,
        "Seed": str(run.seed),
        "Settings": settings_in_words(run),
        "Questions": ", ".join(f"{n_questions[x]:,} {y}" for x, y in splits.items()),
        "Answers labelled by": label_rules(run, rows),
        "Layer of the hidden states": str(chosen_layer(run)),
        "Training seeds": str(grid_config(run).train.n_seeds),
        "Answer span": extract.answer_span,
        "Stored signals": extract.describe(),
    }


def report_data(run: RunDir) -> ReportData:
    """Read everything that the report shows from the run's files."""
    settings = settings_of(run)
    on_request = published(run)
    records = {n: run.stage_record(n) for n in ("data", *STAGES, *on_request)}
    control, ablations, studies = None, {}, ()
    ranking: dict[Setting, dict[str, Any]] = {}
    if run.stage_record("control") is not None:
        control = read_part(run.control / "control.json", Control, "control")
    if "exhaustive" in on_request:
        from beatrice.selection.exhaustive import ranking_summary

        ranking = {setting: ranking_summary(run, setting) for setting in settings}
    if "ablate" in on_request:
        from beatrice.selection.ablation import ablation_summary

        ablations = ablation_summary(run)
    if "anatomy" in on_request:
        from beatrice.selection.analysis import CaseStudy

        studies = read_part(run.path / STUDIES, tuple[CaseStudy, ...], "anatomy")
    # Seconds per question of each controller: a separate file, as machines differ.
    seconds = run.control / "seconds.jsonl"
    rows = [*read_result_rows(run), *(read_rows(seconds) if seconds.exists() else ())]
    return ReportData(
        facts=_facts(run, rows),
        stage_seconds={name: r.seconds for name, r in records.items() if r is not None},
        rows=rows,
        accuracy=count_correct(read_examples(run), read_labels(run)),
        sweep=read_sweep(run.sweep).settings,
        selection={setting: selection_summary(run, setting) for setting in settings},
        reliability=read_part(
            run.path / "reliability.json", dict[Setting, Curves], "evaluate"
        ),
        shown=read_part(run.path / "shown.json", tuple[ShownSet, ...], "evaluate"),
        control=control,
        ranking=ranking,
        ablations=ablations,
        studies=studies,
        judged=read_costs(costs_file(run)) if "baselines" in on_request else (),
    )


def tables_as_text(data: ReportData) -> dict[str, str]:
    """Return the findings and the tables of detectors as texts, by name in `TABLES`."""
    results, titles = results_of(data.rows), rivals.titles_of(data.judged)
    answered = findings.findings(results, data.accuracy)
    beside = findings.facts(results, data.accuracy, data.sweep, data.selection)
    panoramas = tables.panoramas(results, titles)
    costs = rivals.costs_as_markdown(data.judged, results)
    latex = [f"% {h}\n{rendering.as_latex(t)}" for h, t in panoramas.values()]
    latex.append(rivals.leads_as_latex(results, titles))
    texts = (
        findings.as_markdown(answered, beside),
        findings.as_latex(answered),
        f"{_as_markdown(panoramas, results, titles)}\n{costs}",
        "\n".join(latex),
    )
    return dict(zip(TABLES, texts, strict=True))


def run_table(run: RunDir, name: str, width: int = 100) -> str:
    """Return a named table of a run as text with its heading, or all tables.

    Blocks of a table are at most `width` characters wide.
    """
    judged = read_costs(costs_file(run)) if "baselines" in published(run) else ()
    return rows_table(read_result_rows(run), name, rivals.titles_of(judged), width)


def rows_table(
    rows: Sequence[ResultRow],
    name: str,
    titles: tables.Titles | None = None,
    width: int = 100,
) -> str:
    """Return a named table of rows as text with its heading, or all tables.

    Without `titles`, baselines have their titles in the catalogue. Blocks of a table
    are at most `width` characters wide.
    """
    titles = _catalogue_titles() if titles is None else titles
    named = tables.named_tables(results_of(rows), titles)
    if name != "all" and name not in named:
        raise ValueError(
            f"expected a table that these rows have ({', '.join(['all', *named])}), "
            f"found {name}"
        )
    shown = named.values() if name == "all" else [named[name]]
    return "\n\n".join(f"{h}\n{rendering.as_text(t, width)}" for h, t in shown)


def _catalogue_titles() -> dict[Subject, str]:
    return {Subject(name): detector.title for name, detector in catalogue().items()}


_MARKS = """\
AUROC: how often a right answer scores above a wrong one (.500 is guessing). AUPRC: its
positive class is a wrong answer, so guessing has the share of wrong answers. The best
of a column is **bold**, the second best <u>underlined</u>.
"""


def rows_as_markdown(rows: Sequence[ResultRow]) -> str:
    """Return as Markdown the tables that can be made from rows alone."""
    results, titles = results_of(rows), _catalogue_titles()
    return _as_markdown(tables.named_tables(results, titles), results, titles)


def _as_markdown(
    named: tables.Named, results: pandas.DataFrame, titles: tables.Titles
) -> str:
    """Format tables as Markdown, with the leads over rivals below."""
    parts = [f"### {h}\n\n{rendering.as_markdown(t)}" for h, t in named.values()]
    return "\n".join([_MARKS, *parts, rivals.leads_as_markdown(results, titles)])


def report_run(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    """Gather a run's rows, and write its report and tables."""
    gather(run, progress)
    data = report_data(run)
    for name, text in tables_as_text(data).items():
        write_text_atomic(run.path / name, text)
    write_text_atomic(run.report, render_report(data))


# Comparing two runs: do the same combinations win, do the answers agree?


# The questions that a run is measured on, by setting and set: (dataset, text key).
Asked = Mapping[tuple[str, str], Set[tuple[str, bytes]]]


class Side(NamedTuple):
    """One of two evaluated runs, and its encoders' scores of its validation answers."""

    name: str
    results: pandas.DataFrame
    answered: Sequence[findings.PaperAnswer]
    validation: "Mapping[Setting, Ranked]"
    intervals: "BootstrapConfig"
    questions: Asked


def correlation(alike: "RankAgreement") -> str:
    """Format a correlation and its interval."""
    if not np.isfinite(alike.value):
        return "undefined: only one class, or all subsets are equally good"
    return f"{number(alike.value)} [{number(alike.low)} to {number(alike.high)}]"


def _set_of(place: Place) -> str:
    """Name a set; in-domain test sets share one name, whatever a run's questions."""
    return IN_DOMAIN if place.split == "test" else place.title


def _in_domain(sides: Sequence[Side], setting: Setting) -> list[str]:
    """Return " of" and each run's in-domain sets; empty texts if they are the same."""
    datasets = []
    for side in sides:
        shown = where(side.results, experiment="detection", setting=setting)
        tested = {place.dataset for place in places_of(shown, ("test",))} - {IN_DOMAIN}
        datasets.append(f" of {', '.join(sorted(tested))}" if tested else "")
    return datasets if len(set(datasets)) > 1 else ["", ""]


def _shared(sides: Sequence[Side], setting: Setting, sets: Sequence[str]) -> str:
    """List how many questions of each set both runs are measured on."""
    lines = []
    if all(of := _in_domain(sides, setting)):
        lines.append(
            f"{IN_DOMAIN}: A's questions are{of[0]}, B's{of[1]}, so their numbers "
            "cannot be compared"
        )
    for name in sets:
        a, b = (side.questions.get((setting, name), set()) for side in sides)
        n = f"{len(a):,}" if len(a) == len(b) else f"{len(a):,} (A) and {len(b):,} (B)"
        line = f"{name}: {len(a & b):,} of {n} labelled test questions are in both"
        if a != b and a and b:
            line += "; A and B are not measured on the same questions"
        lines.append(line)
    return "".join(f"* {line}\n" for line in lines)


def _headline(sides: Sequence[Side], setting: Setting) -> str:
    """Return a table of both runs' AUROC on in-domain test and held-out sets."""
    by_set: list[dict[str, dict[Subject, ResultRow]]] = []
    for side in sides:
        at = {"experiment": "detection", "metric": "auroc", "setting": setting}
        shown = in_domain_or_held_out(where(side.results, **at))
        places = places_of(shown, EVALUATED)
        by_set.append({_set_of(x): by_subject(shown, **x._asdict()) for x in places})
    sets = list(dict.fromkeys(name for rows in by_set for name in rows))
    lines = []
    for subject, label in {**names.DETECTORS, **names.COMPARED}.items():
        cells = [x.get(s, {}).get(subject) for s in sets for x in by_set]
        if any(cells):
            lines.append([label, *map(_text, cells)])
    both = list(zip("AB", _in_domain(sides, setting), strict=True))
    heads = [
        f"{name}{of if name == IN_DOMAIN else ''}, {side}"
        for name in sets
        for side, of in both
    ]
    return f"{_shared(sides, setting, sets)}\n{markdown(['AUROC', *heads], lines)}"


def _text(row: ResultRow | None) -> str:
    if row is None:
        return "–"
    return row_value(row) + (f" [{interval(row)}]" if row.value is not None else "")


def _answers(sides: Sequence[Side], setting: Setting) -> str:
    """Return tables of both runs' answers to the paper's questions on shared sets."""
    both: list[dict[tuple[str, str], findings.PaperAnswer]] = [{}, {}]
    for side, answers in zip(sides, both, strict=True):
        for x in side.answered:  # the pooled test sets come first, and are kept
            if x.place.setting == setting and x.answer is not None:
                answers.setdefault((x.question, _set_of(x.place)), x)
    shared = [key for key in both[0] if key in both[1]]
    pairs = [(both[0][key].answer, both[1][key].answer) for key in shared]
    n_unsure = sum(a == b == "cannot conclude" for a, b in pairs)
    counts = [
        ("questions of the paper, per set, answered in both", len(pairs)),
        ("same answer", sum(a == b for a, b in pairs)),
        ("of these, cannot conclude in both", n_unsure),
        ("yes or no in both", sum({a, b} <= {"yes", "no"} for a, b in pairs)),
        ("opposite answers", sum({a, b} == {"yes", "no"} for a, b in pairs)),
    ]
    of = _in_domain(sides, setting)
    apart = f" (A{of[0]}, B{of[1]})" if any(of) else ""
    wordings, lines = findings.questions_of(None), []
    for question, name in shared:
        a, b = (answers[question, name] for answers in both)
        cells = [f"**{x.answer}** {findings.difference_text(x)}" for x in (a, b)]
        same = "same" if a.answer == b.answer else "differs"
        on = f"{name}{apart}" if name == IN_DOMAIN else name
        lines.append([wordings[question].text, on, *cells, same])
    summary = markdown(("Findings", "n"), [(text, str(n)) for text, n in counts])
    return f"{summary}\n{markdown(('Question', 'Set', 'A', 'B', ''), lines)}"


def comparison(first: Side, second: Side) -> str:
    """Return the comparison of two evaluated runs as Markdown."""
    from beatrice.selection.reach import agreement

    sides = (first, second)
    both = first.validation.keys() & second.validation.keys()
    shared: list[Setting] = [setting for setting in SETTINGS if setting in both]
    if not shared:
        raise ValueError(
            f"{first.name} and {second.name} have no setting in common; expected two "
            "runs answered closed-book, or two answered with context"
        )
    of_paper = {
        cell.setting: number_text(cell, cell.value)
        for cell in read_ledger()
        if cell.metric == "spearman"
    }
    parts = [f"A: {first.name}\n\nB: {second.name}\n"]
    for setting in shared:
        left, right = first.validation[setting], second.validation[setting]
        alike = agreement(left, right, first.intervals)
        n_answers = f"{len(left.ids)} and {len(right.ids)}"
        parts.append(
            f"## {names.SETTING_LABELS[setting]}\n\n"
            "Spearman's correlation between the fifteen subsets' validation AUROCs: "
            f"**{correlation(alike)}** ({n_answers} answers, resampled by question; "
            f"the paper has {of_paper[setting]} between its two models' test AUROCs)."
            "\n"
        )
        parts += [_headline(sides, setting), _answers(sides, setting)]
    return "\n".join(parts)


def run_side(run: RunDir) -> Side:
    """Return what a comparison needs from an evaluated run."""
    from beatrice.jaxprobe.calibrate import run_bootstrap

    check_evaluated(run)
    results = results_of(read_result_rows(run))
    counts = count_correct(read_examples(run), read_labels(run))
    return Side(
        name=str(run.path),
        results=results,
        answered=findings.findings(results, counts),
        validation={setting: _ranked(run, setting) for setting in settings_of(run)},
        intervals=run_bootstrap(run),
        questions=_asked(read_examples(run), read_labels(run).values()),
    )


def _asked(questions: Iterable[Example], labels: Iterable[Label]) -> Asked:
    """Return the labelled questions of a run's test and held-out sets."""
    examples = {example.id: example for example in questions}
    by_set: dict[tuple[str, str], set[tuple[str, bytes]]] = {}
    for label in labels:
        example = examples[label.example_id]
        if label.label is not None and example.split in EVALUATED:
            place = Place(label.setting, example.dataset, example.split)
            question = example.dataset, text_key(example.question)
            by_set.setdefault((label.setting, _set_of(place)), set()).add(question)
    return by_set


def _ranked(run: RunDir, setting: Setting) -> "Ranked":
    """Return the encoders' scores of a run's validation answers in a setting."""
    from beatrice.jaxprobe.train import open_rows, run_outputs
    from beatrice.selection.reach import Ranked

    _, rows = open_rows(run, setting)
    where, logits = rows.where("validation"), run_outputs(run, setting).logits
    seeds = np.asarray(logits).reshape(-1, N_SUBSETS, len(rows.ids))
    return Ranked(rows.ids[where], rows.labels[where], seeds[:, :, where])


def run_ledger(run: RunDir) -> str:
    """Return the paper's tables next to an evaluated run's numbers, as Markdown."""
    rows, labels, examples = read_result_rows(run), read_labels(run), read_examples(run)
    reworded = {
        e.split for e in examples if (e.id, "with_context", "rewritten") in labels
    }
    wordings = "two wordings" if reworded else "one wording"
    if reworded and "ood" not in reworded:
        wordings += " where in-domain"
    data = read_manifest(run.path)["sections"].get("data", {})
    passages = data.get("context", "of the embedded world")
    n_resamples = run.resolve_section("intervals", INTERVAL_PRESETS).n_resamples
    here = {
        "Backbone": Path(run.section("backbone", BackboneConfig).model).name,
        "Answers judged by": label_rules(run, rows),
        "Passages": f"{passages}, in {wordings}",
        "Training seeds": str(grid_config(run).train.n_seeds),
        "Resamples": f"{n_resamples:,}",
    }
    return ledger(rows, here, examples, labels)


def summary(path: Path) -> dict[str, Any]:
    """Return the headline of a finished run, as numbers and as text."""
    run = RunDir(path)
    data = report_data(run)
    results, at = results_of(data.rows), {**POOLED, "seed": "mean"}
    champion = where(results, experiment="detection", **names.CHAMPION._asdict(), **at)
    macro = where(results, experiment="controller_macro", metric="em")
    values = {f"{row.setting}/{row.metric}": row.value for row in champion["row"]}
    values |= {f"{row.detector}/em": row.value for row in macro["row"]}
    lines = [*headline(results, data.shown), too_few_in_words(data.accuracy)]
    for label, value, detail in numbers(results, data.reliability):
        lines.append(f"{label}: {value} ({detail})")
    chosen = [f"{x} {' '.join(y['selected'])}" for x, y in data.selection.items()]
    lines.append(f"Selected: {'; '.join(chosen)}")
    lines += ["", f"The page:   {run.report}", *next_steps(path, data.shown)]
    return {"headline": values, "text": "\n".join(lines)}


def next_steps(path: Path, shown: Sequence[ShownSet]) -> list[str]:
    """Return suggested commands for a finished run, as lines for a shell."""
    run = shlex.quote(str(path))
    lines = [f"Its tables: beatrice report {run} --print detectors"]
    if (answer := surest(shown)) is not None:
        words = ["--question", answer.question, "--answer", answer.draft.answer]
        lines += [f"Next:       beatrice score {run} \\", " " * 14 + shlex.join(words)]
    return lines


def surest(shown: Sequence[ShownSet]) -> ShownAnswer | None:
    """Return the first closed-book answer that is right and trusted, or None."""
    answers = (
        answer
        for shown_set in shown
        if shown_set.setting == "closed_book"
        for kind in shown_set.kinds
        if kind.name == "right and trusted"
        for answer in kind.answers
    )
    return next(answers, None)
