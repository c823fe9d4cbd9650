"""The verb `data` and its stage: published question sets become a run."""

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
from beatrice.extract.run.stages import current_inputs, once, run_stage
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
    """Take a new run directory away again if its questions cannot be read."""
    try:
        yield
    except BaseException:
        if {path.name for path in run.path.iterdir()} <= {MANIFEST, "lock"}:
            for name in (MANIFEST, "lock"):
                (run.path / name).unlink(missing_ok=True)
            run.close()
            if not was_there:
                with contextlib.suppress(OSError):  # another process begins there
                    run.path.rmdir()
        raise


def make_data_run(
    path: Path, build: BuildConfig, new_run: NewRun, progress: Progress
) -> dict[str, Any]:
    """Make a run directory of published questions, or continue making it.

    The run's section `data` says the same of the files. Returns the splits' manifest.
    """
    from beatrice.extract.datasets import building

    was_there = path.exists()
    # What another process holds (`InUse`) is that one's to take away.
    with (
        RunDir.open(path, new_run) as run,
        _removed_on_failure(run, was_there=was_there),
    ):

        def work(update: Update) -> None:
            building.build_examples(run.path, build, progress.note)
            try:
                progress.note(f"data: {settings_in_words(run)}")
            except ValueError:  # not with these questions, of which nothing is left
                for path in outputs:
                    path.unlink()
                raise

        current_inputs(run, "data")  # what a person has changed is not replaced
        inputs: dict[str, str] = {}
        for dataset, role, digest in building.data_config(build).sources:
            name = f"{dataset} {role}"  # of one file or of several
            inputs[name] = " ".join(filter(None, (inputs.get(name), digest)))
        outputs = [run.examples, run.passages, run.splits_file]
        once(run, "data", inputs, outputs, progress, work)
        return building.check_folder(run.path)


File = tuple[str, Path]  # the set's name, and where it lies


class _Size(click.IntRange):
    name = "whole number, or all"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value == "all" else super().convert(value, param, ctx)


_SIZE, _CONTEXT = _Size(min=1), click.Choice(get_args(Context))


@dataclasses.dataclass(frozen=True)
class NamedValue(click.ParamType):
    """A value of a kind of one question set, `NAME=VALUE`; perhaps of all, `VALUE`."""

    name = "value"
    kind: click.ParamType  # of the value
    has_name: bool = True  # a name has to stand before; else one may
    example: str = "questions.jsonl"  # of a value, for the message

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the name, or None for all sets, and the value."""
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
    """Return what holds for all sets, and for each that was named."""
    by_name: dict[str | None, Any] = {}
    for name, value in values:
        if name in by_name:
            raise click.UsageError(
                f"{flag} {f'{name}=' if name else ''}{value}: another one was "
                f"given for {name or 'all sets'} before; give one"
            )
        by_name[name] = value
    common = by_name.pop(None, default)
    return common, {str(name): value for name, value in by_name.items()}


def _files(text: str) -> Any:
    kind = NamedValue(click.Path(path_type=Path))
    return option(text, (), type=kind, metavar="NAME=FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which published questions are read, and how they are split."""

    train: tuple[File, ...] = _files("Training questions; may be repeated.")
    dev: tuple[File, ...] = _files(
        "Development questions, halved into validation and test."
    )
    held_out: tuple[File, ...] = _files("Questions never trained on (split `ood`).")
    n_train: tuple[tuple[str | None, Size], ...] = option(
        "N or all; with NAME= of one set alone.",
        (),
        otherwise="10000 of each",
        type=NamedValue(_SIZE, has_name=False, example="1000"),
        metavar="[NAME=]N",
    )
    n_evaluation: Size = option(
        "Validation and test each, of each set; all halves the questions.",
        SplitConfig.n_evaluation,
        type=_SIZE,
        metavar="N",
    )
    n_held_out: tuple[tuple[str, Size], ...] = option(
        "N or all. Default: popqa=1000, nq=1182, triviaqa=1277.",
        (),
        type=NamedValue(_SIZE, example="1000"),
        metavar="NAME=N",
    )
    context: tuple[tuple[str | None, Context], ...] = option(
        "Passages of an example: supporting, the first of these, all or none; "
        "questions without are left out, and counted. With NAME= of one set alone: "
        "with none, its questions are asked closed-book only.",
        (),
        otherwise="supporting; of a set of your own, what its files have",
        type=NamedValue(_CONTEXT, has_name=False, example="first"),
        metavar="[NAME=]CONTEXT",
    )
    splits: Path | None = option(
        "Take the splits of this splits.json instead of drawing.",
        type=FILE,
        metavar="FILE",
    )
    skip_bad: bool = option(
        "Leave refused records out, counted and listed, instead of failing.", False
    )
    evidence: Path | None = option(
        "TriviaQA's folder `evidence`; else looked for beside the file.",
        rare=True,
        type=FOLDER,
    )

    def files(self) -> list[Source]:
        """Return the files with what they are for."""
        return [
            Source(dataset=name, role=role, path=path)
            for role in get_args(Role)
            for name, path in getattr(self, role.replace("-", "_"))
        ]

    def build_config(self, sources: Iterable[Source], seed: int) -> BuildConfig:
        """Return what is to be built of some files."""
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
class AskingOptions:
    """How the questions are put to the run's model."""

    model_dtype: ModelDtype | None = option(
        "Of the backbone's weights, where it is loaded here. Default: bfloat16 with "
        "--device cuda, and of `real` where the processor multiplies it, else float32."
    )
    device: Device = option(
        "Of the backbone; under torchrun, cuda is each process's own GPU.", "cpu"
    )
    attention_layers: AttentionLayers | None = option(
        "Whose attention is read: of all layers, or of those without a window (full, "
        "the default of --preset paper, as the paper reads).",
        rare=True,
    )
    template: str = option(
        "The prompt's words: paper (appendix A's), short (what the embedded model was "
        "taught), few-shot (four worked examples before the question, which a base "
        "model needs), or a file: worked examples, JSON lines of question, answer and "
        "context; or words, a JSON object of closed_book and with_context.",
        "paper",
        metavar="NAME|FILE",
    )
    stop: tuple[str, ...] = option(
        r"Ends an answer where it begins; may be given several times, \n is a line "
        "feed. Default: a line feed with worked examples, and with words of your own "
        "as plain text; else nothing.",
        (),
        metavar="TEXT",
    )
    chat: bool = option(
        "Through the tokenizer's chat template, thinking off; else as plain text.",
        False,
        flag="--chat/--plain",
    )
    overlong: Literal["refuse", "drop-passages"] = option(
        "Prompts that do not fit: refuse them, or leave out their last passages whole, "
        "listed and counted.",
        "refuse",
    )
    window: int | None = option(
        "Most tokens of prompt and answer; default: the model's own window.",
        rare=True,
        min=2,
    )
    max_new_tokens: int | None = option(
        "Longest answer.", min=1, otherwise="32, of the embedded model 10"
    )

    def prompt_config(self) -> PromptConfig:
        """Return how the questions are put."""
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
    """What `data` does beside making a run of published questions."""

    inspect: str | None = option(
        "Say what one file is, and build nothing; NAME= is the set, where the content "
        "does not tell.",
        metavar="[NAME=]FILE",
    )
    world: bool = option(
        "Make a run of the microworld's questions, which the embedded model knows.",
        False,
    )
    train_model: bool = option(
        "With --world, also train its model from nothing, into RUN_DIR/model.",
        False,
        rare=True,
    )


_N_TRAIN_ADVISED = 1000  # training questions; the paper has 10,000 of each set
_N_SHOWN = 20  # refused records named one by one on the terminal; --json has more
_NOTES = (
    (
        "repeated_questions",
        "questions like an earlier one without case, marks and articles",
    ),
    ("golds_without_words", "answers of which normalising leaves nothing"),
    ("empty_passages", "passages without text, left out"),
    ("missing_titles", "questions with a gold title that has no paragraph"),
    ("missing_documents", "evidence files that are not there"),
)


@click.command()
@click.argument("run_dir", required=False, type=RunPath())
@options(
    what=DataOptions,
    questions=QuestionOptions,
    run=RunOptions,
    asking=AskingOptions,
    storage=StorageOptions,
)
@AS_JSON
def data(
    run_dir: Path | None,
    what: DataOptions,
    questions: QuestionOptions,
    run: RunOptions,
    asking: AskingOptions,
    storage: StorageOptions,
    as_json: bool,
) -> None:
    """Read published question sets: say what a file is, or make a run of them.

    Six sets are read in the formats in which they are published, and any set, under a
    NAME of its own, as FlashRAG's or lm-eval's JSON lines, as plain lines of "question"
    and "golds" (and "passages": texts, or objects of "title" and "text"), as a table of
    question, answer and context, or as the examples.jsonl of a run, whose splits are
    then kept; a file is recognised by its content. One file may serve as --train and as
    --dev: no question is in two splits. RUN_DIR becomes a run directory, with
    splits.json and its SHA-256 sums beside, which `doctor RUN_DIR --verify` compares;
    `answer`, `rewrite`, `label`, `extract` and the rest go on from there. With --world
    the questions are those of an invented world, whose small model ships with this.

    --inspect --json prints one object: dataset, dataset_from (what told it), format,
    container, records, loaded, with_passages, with_gold_passages, refused, refusals
    (record, at, reason; the first 1000), refusals_not_listed, reasons (counts), ok, and
    error, the sentence for which the whole file is refused, or null. It is printed for
    a refused file too; records is null where the file was not read through, as for
    passages.

    Exit codes: 0 every record can be used (or, with --skip-bad, some can); 1 the file
    or one of its records is refused; 2 wrong usage.

    Example: beatrice data --inspect hotpot_dev_distractor_v1.json

    Example: beatrice data runs/mine --train capitals=own.jsonl --dev
    capitals=own.jsonl --n-train all --n-evaluation 50 --model Qwen/Qwen3-0.6B --chat

    Example: beatrice data runs/paper --train hotpotqa=hotpot_train_v1.1.json --dev
    hotpotqa=hotpot_dev_distractor_v1.json --held-out nq=nq-open-oracle.jsonl.gz
    --model Qwen/Qwen3.5-9B --device cuda --chat
    """
    files = questions.files()
    if (what.inspect is None) == (run_dir is None):
        raise click.UsageError("give either RUN_DIR, or --inspect FILE")
    if what.train_model and not what.world:
        raise click.UsageError("--set train_model is for --world; give both")
    if run_dir is None:
        reading = QuestionOptions(
            skip_bad=questions.skip_bad, evidence=questions.evidence
        )
        if what.world or (questions, asking) != (reading, AskingOptions()):
            raise click.UsageError("--inspect goes with no other work")
        _inspect(what.inspect or "", questions, as_json)
    elif what.world:
        if files or questions != QuestionOptions() or asking != AskingOptions():
            raise click.UsageError("--world has its own questions, asked in its way")
        make_world_run(run_dir, run, storage, train_model=what.train_model)
    elif not files:
        raise click.UsageError(
            "give files with --train, --dev or --held-out; or --world"
        )
    else:
        make_run(run_dir, files, questions, run, asking, storage, as_json=as_json)


def make_world_run(
    run_dir: Path, run: RunOptions, storage: StorageOptions, *, train_model: bool
) -> None:
    """Make a run of the microworld, and its model from nothing where asked."""
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
            "; --skip-bad leaves such records out and lists them"
        )


def make_run(
    run_dir: Path,
    sources: list[Source],
    questions: QuestionOptions,
    run: RunOptions,
    asking: AskingOptions,
    storage: StorageOptions,
    *,
    as_json: bool = False,
) -> None:
    """Draw the splits, make the run directory, and print what was drawn."""
    from beatrice.extract.datasets.building import data_config, with_contexts_of_files

    if run.model is None:
        raise click.UsageError(
            "--model is missing: say which model answers these questions, by a "
            "directory, a GGUF file or a Hub id such as Qwen/Qwen3-0.6B (--model "
            "embedded is the small model of the microworld, which knows none of them)"
        )
    chosen = questions.build_config(sources, run.seed)
    prompt = asking.prompt_config()
    shots = frozenset(text_key(shot.question) for shot in prompt.shots)
    build = dataclasses.replace(with_contexts_of_files(chosen), shots=shots)
    preset = run.preset or "paper"
    dtype = asking.model_dtype or default_dtype(asking.device)
    attention_layers = asking.attention_layers or (
        "full" if preset == "paper" else "all"
    )
    backbone = BackboneConfig(
        model=run.model,
        dtype=dtype,
        device=asking.device,
        attention_layers=attention_layers,
    )
    answer = answer_preset(preset, run.model)
    n_longest = asking.max_new_tokens or answer.generation.max_new_tokens
    generation = dataclasses.replace(
        answer.generation, max_new_tokens=n_longest, stop=asking.stop_strings()
    )
    answer = dataclasses.replace(
        answer,
        settings=run.settings,
        prompt=prompt,
        generation=generation,
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
            f"data: {n_train} training questions are few for the sizes of the preset "
            "paper; `beatrice train RUN --preset few` is made for them"
        )
    _show_splits(run_dir, manifest, as_json)


def _notes_before(chosen: BuildConfig, build: BuildConfig) -> Iterator[str]:
    """Yield what a person did not choose, and what a run without dev files lacks."""
    for name in build.contexts.keys() - chosen.contexts.keys():
        if (context := build.contexts[name]) != "supporting":
            yield (
                f"--context {name}={context}, since no passage of the first {N_FIRST} "
                "questions in its files is marked as supporting"
            )
    if build.fixed is not None and build.shots:
        yield (
            f"{build.fixed} is taken as it is; a question of it that is a worked "
            "example of the prompt stays"
        )
    if all(source.role != "dev" for source in build.sources):
        yield "without --dev there is nothing to choose and calibrate a detector on"


def _show_splits(run_dir: Path, manifest: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        keys = ("sizes", "sources", "passed_over", "repeated_within_a_split", "sha256")
        click.echo(json.dumps({key: manifest[key] for key in keys}))
        return
    for split, sets in manifest["sizes"].items():
        click.echo(f"{split}: {', '.join(f'{name} {n}' for name, n in sets.items())}")
    click.echo(
        f"{len(manifest['passed_over'])} questions passed over for an id or a text "
        "(without case, marks and articles) in another split, "
        f"{len(manifest['repeated_within_a_split'])} repeated so within a split"
    )
    click.echo(str(run_dir / "splits.json"))


def _inspection_as_text(report: Mapping[str, Any]) -> str:
    """Return a report in lines; empty where the file was not read through."""
    if report["records"] is None:
        return ""  # the sentence that follows says what is known
    packed = "gzip, " if report["gzipped"] else ""
    source = f" (told by: {report['dataset_from']})" if report["dataset_from"] else ""
    lines = [
        f"{report['file']}: {report['dataset'] or 'unknown set'}{source}",
        f"  format             {report['format']}; {packed}{report['container']}",
    ]
    for name in ("records", "loaded", "with passages", "with gold passages", "refused"):
        lines.append(f"  {name:<19}{report[name.replace(' ', '_')]}")
    lines += [f"  {report[key]:<6} {text}" for key, text in _NOTES if report[key]]
    shown = report["refusals"][:_N_SHOWN]
    lines += [f"  record {r['record']} ({r['at']}): {r['reason']}" for r in shown]
    if n_more := report["refused"] - len(shown):
        n_left = report["refusals_not_listed"]
        left = f", {n_left} are counted only" if n_left else ""
        lines.append(f"  and {n_more} more; --json lists the first 1000 of all{left}")
    # A file's name may hold what no terminal can show.
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()
