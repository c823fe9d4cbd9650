"""The verb `data` and its stage: make a run of published question sets."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click

from beatrice.extract.backbone.names import (
    AttentionLayers,
    BackboneConfig,
    Device,
    ModelDtype,
    default_dtype,
)
from beatrice.extract.commands import StorageOptions
from beatrice.extract.datasets.splits import (
    HELD_OUT_SIZES,
    N_FIRST,
    BuildConfig,
    Context,
    Role,
    Size,
    Source,
    SplitConfig,
)
from beatrice.extract.generate.options import answer_preset, new_run
from beatrice.extract.generate.templates import (
    SHOTS,
    TEMPLATES,
    PromptConfig,
    TemplateName,
    Words,
    read_shots,
    read_words,
)
from beatrice.extract.records import NAME_IN_WORDS, is_safe_name, text_key
from beatrice.extract.run.console import Progress, Update, printable
from beatrice.extract.run.contents import settings_in_words
from beatrice.extract.run.directory import MANIFEST, NewRun, RunDir
from beatrice.extract.run.stages import current_inputs, do_once, run_stage
from beatrice.extract.run.verbs import (
    AS_JSON,
    FILE,
    FOLDER,
    RunOptions,
    RunPath,
    checking,
    given,
    option,
    options,
)


@contextlib.contextmanager
def _removed_on_failure(run: RunDir, *, was_there: bool) -> Iterator[None]:
    """Remove a new run directory if its questions cannot be read."""
    try:
        yield
    except BaseException:
        files = list(run.path.iterdir())
        if {path.name for path in files} <= {MANIFEST, "lock"}:
            for path in files:
                path.unlink(missing_ok=True)
            run.close()
            if not was_there:
                with contextlib.suppress(OSError):  # another process starts a run there
                    run.path.rmdir()
        raise


def make_data_run(
    path: Path, build: BuildConfig, new_run: NewRun, progress: Progress
) -> dict[str, Any]:
    """Make a run directory of published questions, or continue making it.

    Returns the splits' manifest. `new_run` needs a section `data` of the same files.
    """
    from beatrice.extract.datasets import building

    was_there = path.exists()
    # Opened first: a run that another process holds (`InUse`) must not be removed.
    with (
        RunDir.open(path, new_run) as run,
        _removed_on_failure(run, was_there=was_there),
    ):

        def work(update: Update) -> None:
            building.build_examples(run.path, build, progress.note)
            try:
                progress.note(f"data: {settings_in_words(run)}")
            except ValueError:  # these questions allow no setting: undo the build
                for path in outputs:
                    path.unlink()
                raise

        current_inputs(run, "data")  # fails if the user has changed the files
        inputs: dict[str, str] = {}
        for dataset, role, digest in building.data_config(build).sources:
            name = f"{dataset} {role}"  # one file or several
            inputs[name] = " ".join(filter(None, (inputs.get(name), digest)))
        outputs = [run.examples, run.passages, run.splits_file]
        do_once(run, "data", inputs, outputs, progress, work)
        return building.check_folder(run.path)


File = tuple[str, Path]  # a question set's name and file


class _Size(click.IntRange):
    name = "whole number, or all"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value == "all" else super().convert(value, param, ctx)


_SIZE, _CONTEXT = _Size(min=1), click.Choice(get_args(Context))


@dataclasses.dataclass(frozen=True)
class NamedValue(click.ParamType):
    """A value for one question set, `NAME=VALUE`, or for all sets, `VALUE`."""

    name = "value"
    kind: click.ParamType  # type of the value
    has_name: bool = True  # whether the name is required, or optional
    example: str = "questions.jsonl"  # an example value for the error message

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the name (None for all sets) and the value."""
        name, equals, rest = value.partition("=")
        if not self.has_name and not equals:
            return None, self.kind.convert(value, param, ctx)
        if not (equals and rest and is_safe_name(name)):
            example = rest or ("" if equals else name) or self.example
            self.fail(
                f"expected NAME=VALUE, such as mine={example}, with a "
                f"{NAME_IN_WORDS}; found {value!r}"
            )
        return name, self.kind.convert(rest, param, ctx)


def _by_set(
    flag: str, values: Sequence[tuple[str | None, Any]], default: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the value for all sets, and the values of the sets given by name."""
    by_name: dict[str | None, Any] = {}
    for name, value in values:
        if name in by_name:
            raise click.UsageError(
                f"{flag} {f'{name}=' if name else ''}{value}: a value for "
                f"{name or 'all sets'} was already given; give one"
            )
        by_name[name] = value
    common = by_name.pop(None, default)
    return common, {str(name): value for name, value in by_name.items()}


def _files(text: str) -> Any:
    kind = NamedValue(click.Path(path_type=Path))
    return option(text, (), type=kind, metavar="NAME=FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which published questions to read, and how to split them."""

    train: tuple[File, ...] = _files("Training questions; may be repeated.")
    dev: tuple[File, ...] = _files(
        "Development questions, halved into validation and test."
    )
    held_out: tuple[File, ...] = _files("Questions never trained on (split `ood`).")
    n_train: tuple[tuple[str | None, Size], ...] = option(
        "Training questions per set, N or all; with NAME= for one set only.",
        (),
        otherwise="10000 of each",
        type=NamedValue(_SIZE, has_name=False, example="1000"),
        metavar="[NAME=]N",
    )
    n_evaluation: Size = option(
        "Questions per set in validation and in test; all splits them in half.",
        SplitConfig.n_evaluation,
        type=_SIZE,
        metavar="N",
    )
    n_held_out: tuple[tuple[str, Size], ...] = option(
        "Held-out questions, N or all. Default: popqa=1000, nq=1182, triviaqa=1277.",
        (),
        type=NamedValue(_SIZE, example="1000"),
        metavar="NAME=N",
    )
    context: tuple[tuple[str | None, Context], ...] = option(
        "Passages of an example: the supporting ones, the first of these, all or none. "
        "Questions without such passages are left out and counted; with none, all are "
        "asked closed-book only. With NAME= for one set only.",
        (),
        otherwise="supporting; for a set of your own, what its files have",
        type=NamedValue(_CONTEXT, has_name=False, example="first"),
        metavar="[NAME=]CONTEXT",
    )
    splits: Path | None = option(
        "Take the splits from this splits.json instead of drawing them.",
        type=FILE,
        metavar="FILE",
    )
    skip_bad: bool = option(
        "Leave out, count and list refused records instead of failing.", False
    )
    evidence: Path | None = option(
        "TriviaQA's folder `evidence`; by default looked for next to the file.",
        rare=True,
        type=FOLDER,
    )

    def files(self) -> list[Source]:
        """Return the files with their sets and roles."""
        return [
            Source(dataset=name, role=role, path=path)
            for role in get_args(Role)
            for name, path in getattr(self, role.replace("-", "_"))
        ]

    def build_config(self, sources: Iterable[Source], seed: int) -> BuildConfig:
        """Return what to build from some files."""
        n_train, n_train_of = _by_set("--n-train", self.n_train, SplitConfig.n_train)
        context, contexts = _by_set("--context", self.context, None)
        _, n_held_out = _by_set("--n-held-out", self.n_held_out, None)
        return BuildConfig(
            sources=tuple(sources),
            fixed=self.splits,
            splits=SplitConfig(
                seed=seed,
                n_train=n_train,
                n_train_of=n_train_of,
                n_evaluation=self.n_evaluation,
                n_held_out=HELD_OUT_SIZES | n_held_out,
            ),
            context=context,
            contexts=contexts,
            skip_bad=self.skip_bad,
            evidence=self.evidence,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How the questions are put to the run's model."""

    model_dtype: ModelDtype | None = option(
        "Number type of the backbone's weights, if loaded here. Default: bfloat16 with "
        "--device cuda, and in `real` if the processor has units for it, else float32."
    )
    device: Device = option(
        "Device of the backbone; under torchrun, cuda is each process's own GPU.", "cpu"
    )
    attention_layers: AttentionLayers | None = option(
        "Layers whose attention is read: all, or only those without a window (full, as "
        "in the paper and the default of --preset paper).",
        rare=True,
    )
    template: str = option(
        "The prompt's words: paper (appendix A's), short (what the embedded model was "
        "taught), few-shot (four worked examples before the question, which a base "
        "model needs), or a file of your own: JSON lines of question, answer and "
        "context as worked examples, or a JSON object of closed_book and with_context.",
        "paper",
        metavar="NAME|FILE",
    )
    stop: tuple[str, ...] = option(
        r"Text before which an answer ends; may be given several times, \n is a line "
        "feed. Default: a line feed with worked examples, and with words of your own "
        "as plain text; else none.",
        (),
        metavar="TEXT",
    )
    chat: bool = option(
        "Use the tokenizer's chat template, thinking off; or ask in plain text.",
        False,
        flag="--chat/--plain",
    )
    overlong: Literal["refuse", "drop-passages"] = option(
        "Prompts that do not fit: refuse them, or drop whole passages from their end, "
        "listed and counted.",
        "refuse",
    )
    window: int | None = option(
        "Most tokens of prompt and answer together; default: the model's window.",
        rare=True,
        min=2,
    )
    max_new_tokens: int | None = option(
        "Longest answer, in tokens.", min=1, otherwise="32; embedded model: 10"
    )

    def prompt_config(self) -> PromptConfig:
        """Return the configuration of the prompts."""
        named: list[TemplateName] = [x for x in TEMPLATES if x == self.template]
        template: TemplateName | Words = named[0] if named else "few-shot"
        shots: tuple[Any, ...] = SHOTS if template == "few-shot" else ()
        with checking("--template"):
            if not named and (words := read_words(Path(self.template))):
                template, shots = words, ()
            elif not named:
                shots = read_shots(Path(self.template))
            return PromptConfig(
                shots=shots,
                template=template,
                chat=self.chat,
                overlong=self.overlong,
                window=self.window,
            )

    def stop_strings(self) -> tuple[str, ...]:
        r"""Return the texts that end an answer; `\n` stands for a line feed."""
        texts = tuple(text.replace(r"\n", "\n") for text in self.stop)
        return texts or self.prompt_config().usual_stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What else `data` does besides making a run of published questions."""

    inspect: str | None = option(
        "Report what one file is, and build nothing; NAME= names its set, if the file "
        "does not.",
        metavar="[NAME=]FILE",
    )
    world: bool = option(
        "Make a run of the microworld's questions, which the embedded model knows.",
        False,
    )
    train_model: bool = option(
        "With --world, also train its model from scratch, into RUN_DIR/model.",
        False,
        rare=True,
    )


_N_TRAIN_ADVISED = 1000  # training questions; the paper has 10,000 of each set
_N_SHOWN = 20  # refused records listed on the terminal; --json has more
_NOTES = (
    (
        "repeated_questions",
        "questions equal to an earlier one but for case, marks and articles",
    ),
    ("golds_without_words", "answers that are empty once normalised"),
    ("empty_passages", "passages without text, left out"),
    ("missing_titles", "questions with a gold title that has no paragraph"),
    ("missing_documents", "evidence files that are missing"),
)


@click.command()
@click.argument("run_dir", required=False, type=RunPath())
@options(
    what=DataOptions,
    questions=QuestionOptions,
    run=RunOptions,
    asking=PromptOptions,
    storage=StorageOptions,
)
@AS_JSON
def data(
    run_dir: Path | None,
    what: DataOptions,
    questions: QuestionOptions,
    run: RunOptions,
    asking: PromptOptions,
    storage: StorageOptions,
    as_json: bool,
) -> None:
    """Make a run of published question sets, or report what a file of questions is.

    Six sets are read in their published formats. Any other set, under a NAME you
    choose, is read from FlashRAG's or lm-eval's JSON lines, plain lines of "question"
    and "golds" (and "passages": texts, or objects of "title" and "text"), a table of
    question, answer and context, or the examples.jsonl of a run, whose splits are then
    kept. A file is recognised by its content. One file may serve as both --train and
    --dev: no question is in two splits. RUN_DIR becomes a run directory that includes
    splits.json with SHA-256 sums, which `doctor RUN_DIR --verify` compares; `answer`,
    `rewrite`, `label`, `extract` and the rest continue from there. With --world the
    questions are about an invented world, whose small model ships with this package.

    --inspect --json prints one object: dataset, dataset_from (how it was recognised),
    format, container, records, loaded, with_passages, with_gold_passages, refused,
    refusals (record, at, reason; the first 1000), refusals_not_listed, reasons
    (counts), ok, and error: why the whole file is refused, or null. It is printed for
    a refused file, too; records is null if it was not read, as with files of passages.

    Exit codes: 0 every record can be used (or, with --skip-bad, some can); 1 the file
    or one of its records is refused; 2 wrong usage.

    Example: beatrice data --inspect hotpot_dev_distractor_v1.json

    Example: beatrice data runs/mine --train capitals=own.jsonl --dev
    capitals=own.jsonl --n-train all --n-evaluation 50 --model Qwen/Qwen3-0.6B --chat

    Example: beatrice data runs/paper --train hotpotqa=hotpot_train_v1.1.json --dev
    hotpotqa=hotpot_dev_distractor_v1.json --held-out nq=nq-open-oracle.jsonl.gz
    --model Qwen/Qwen3.5-9B --device cuda --chat
    """
    if (what.inspect is None) == (run_dir is None):
        raise click.UsageError("give either RUN_DIR, or --inspect FILE")
    if what.train_model and not what.world:
        raise click.UsageError("--set train_model is for --world; give both")
    if run_dir is None:
        reading = QuestionOptions(
            skip_bad=questions.skip_bad, evidence=questions.evidence
        )
        if what.world or (questions, asking) != (reading, PromptOptions()):
            raise click.UsageError("--inspect cannot be combined with other work")
        _inspect(what.inspect or "", questions, as_json)
    elif what.world:
        if (questions, asking) != (QuestionOptions(), PromptOptions()):
            raise click.UsageError("--world has its own questions and prompts")
        make_world_run(run_dir, run, storage, train_model=what.train_model)
    elif not (files := questions.files()):
        raise click.UsageError(
            "give files with --train, --dev or --held-out; or --world"
        )
    else:
        make_run(run_dir, files, questions, run, asking, storage, as_json=as_json)


def make_world_run(
    run_dir: Path, run: RunOptions, storage: StorageOptions, *, train_model: bool
) -> None:
    """Make a run of the microworld, and train its model if asked."""
    from beatrice.extract.world.stage import WORLD, new_world, train_world_model

    settings, progress = new_world(**given(run), storage=storage.fields()), Progress()
    with RunDir.open(run_dir, settings) as opened:
        run_stage(WORLD, opened, progress)
        if train_model:
            with progress.stage("model") as update:
                click.echo(str(train_world_model(opened, update, progress)))


def _inspect(named_file: str, questions: QuestionOptions, as_json: bool) -> None:
    from beatrice.extract.datasets.loading import inspect_file

    dataset, path = None, Path(named_file)
    if "=" in named_file and not path.exists():
        dataset, _, file = named_file.partition("=")
        path = Path(file)
        if not is_safe_name(dataset):
            words = f"expected a {NAME_IN_WORDS} before the =, found {dataset!r}"
            raise click.BadParameter(words, param_hint="--inspect")
    report = inspect_file(path, dataset=dataset, evidence=questions.evidence)
    is_tolerated = report["refused"] == 0 or questions.skip_bad
    report = {"ok": report["error"] is None and is_tolerated, **report}
    if as_json:
        click.echo(json.dumps(report))
    elif shown := _inspection_as_text(report):
        click.echo(printable(shown))
    if report["error"] is not None:
        raise ValueError(report["error"])
    if not report["ok"]:
        first = report["refusals"][0]
        raise ValueError(
            f"{path}: {report['refused']} of {report['records']} records are refused, "
            f"the first is record {first['record']} ({first['at']}): {first['reason']}"
            "; use --skip-bad to leave such records out and list them"
        )


def make_run(
    run_dir: Path,
    sources: list[Source],
    questions: QuestionOptions,
    run: RunOptions,
    asking: PromptOptions,
    storage: StorageOptions,
    *,
    n_threads: int = BackboneConfig.n_threads,
    as_json: bool = False,
) -> None:
    """Draw the splits, make the run directory, and print what was drawn."""
    from beatrice.extract.datasets.building import data_config, with_contexts_of_files

    if run.model is None:
        raise click.UsageError(
            "--model is missing: give the model that answers these questions, as a "
            "directory, a GGUF file or a Hub id such as Qwen/Qwen3-0.6B (--model "
            "embedded is the small model of the microworld, which knows none of them)"
        )
    chosen = questions.build_config(sources, run.seed)
    prompt = asking.prompt_config()
    shots = frozenset(text_key(shot.question) for shot in prompt.shots)
    build = dataclasses.replace(with_contexts_of_files(chosen), shots=shots)
    preset = run.preset or "paper"
    backbone = BackboneConfig(
        model=run.model,
        dtype=asking.model_dtype or default_dtype(asking.device),
        device=asking.device,
        n_threads=n_threads,
        attention_layers=asking.attention_layers
        or ("full" if preset == "paper" else "all"),
    )
    answer = answer_preset(preset, run.model)
    n_longest = asking.max_new_tokens or answer.generation.max_new_tokens
    generation = dataclasses.replace(
        answer.generation, max_new_tokens=n_longest, stop=asking.stop_strings()
    )
    answer = dataclasses.replace(
        answer, settings=run.settings, prompt=prompt, generation=generation
    )
    section, stored = data_config(build), storage.fields()
    settings = new_run(preset, run.seed, backbone, answer, stored, data=section)
    progress = Progress()
    for note in _notes_before(chosen, build):
        progress.note(f"data: {note}")
    manifest = make_data_run(run_dir, build, settings, progress)
    n_train = sum(manifest["sizes"].get("train", {}).values())
    if preset == "paper" and 0 < n_train < _N_TRAIN_ADVISED:
        progress.note(
            f"data: {n_train} training questions are few for the model sizes of the "
            "preset paper; use `beatrice train RUN --preset few`"
        )
    _show_splits(run_dir, manifest, as_json)


def _notes_before(chosen: BuildConfig, build: BuildConfig) -> Iterator[str]:
    """Yield notes on choices made for the user and on missing dev files."""
    for name in build.contexts.keys() - chosen.contexts.keys():
        if (context := build.contexts[name]) != "supporting":
            mark = "" if context == "none" else " marked as supporting"
            yield (
                f"using --context {name}={context}, since the first {N_FIRST} records "
                f"of its files have no passage{mark}"
            )
    if build.fixed is not None and build.shots:
        yield (
            f"the splits of {build.fixed} are used unchanged, even if they contain a "
            "worked example of the prompt"
        )
    if all(source.role != "dev" for source in build.sources):
        yield "without --dev no detector can be chosen and calibrated"


def _show_splits(run_dir: Path, manifest: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        keys = ("sizes", "sources", "passed_over", "repeated_within_a_split", "sha256")
        click.echo(json.dumps({key: manifest[key] for key in keys}))
        return
    for split, sets in manifest["sizes"].items():
        click.echo(f"{split}: {', '.join(f'{name} {n}' for name, n in sets.items())}")
    click.echo(
        f"{len(manifest['passed_over'])} questions passed over because another split "
        "has their id or text (ignoring case, marks and articles); "
        f"{len(manifest['repeated_within_a_split'])} repeat a text of their own split"
    )
    click.echo(str(run_dir / "splits.json"))


def _inspection_as_text(report: Mapping[str, Any]) -> str:
    """Return a report as lines of text; empty if the file was not read."""
    from beatrice.extract.datasets.loading import unread_in_words

    if report["records"] is None:
        return ""  # the error that follows says what is known
    packed = "gzip, " if report["gzipped"] else ""
    rule = report["dataset_from"]
    source = f" (recognised by: {rule})" if rule else ""
    lines = [
        f"{report['file']}: {report['dataset'] or 'unknown set'}{source}",
        f"  format             {report['format']}; {packed}{report['container']}",
    ]
    for name in ("records", "loaded", "with passages", "with gold passages", "refused"):
        lines.append(f"  {name:<19}{report[name.replace(' ', '_')]}")
    lines += [f"  {report[key]:<6} {text}" for key, text in _NOTES if report[key]]
    if report["unread"]:
        lines.append(f"  {unread_in_words(report['unread'])}")
    shown = report["refusals"][:_N_SHOWN]
    lines += [f"  record {r['record']} ({r['at']}): {r['reason']}" for r in shown]
    if n_more := report["refused"] - len(shown):
        n_left = report["refusals_not_listed"]
        left = f", {n_left} are only counted" if n_left else ""
        lines.append(f"  and {n_more} more; --json lists the first 1000 of all{left}")
    # A file's name may hold characters that no terminal can show.
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()
