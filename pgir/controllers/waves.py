"""Runs controllers on many questions at once, so that the model works in batches.

All questions are advanced until each waits for a call. The kind of call that most of
them wait for is served in batches, and so on: all first drafts, then all first
searches. Such a round is a wave. Every call is kept in a journal with its value. A run
that resumes after a kill plans the batches of the interrupted wave over the same calls
and skips those that are done, so its numbers are those of an uninterrupted run.
"""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import html
import math
import numbers
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from beatrice.extract.generate.generator import Generated, GeneratorPrompt
from beatrice.extract.generate.local import TransformersGenerator
from beatrice.extract.generate.prompts import (
    Request,
    build_prompt,
    escape_control_tokens,
)
from beatrice.extract.generate.templates import PromptTemplate
from beatrice.extract.plugs import sha256_of_code
from beatrice.extract.records import Answer, Passage, Setting
from beatrice.extract.run.files import JsonLines, open_unlinked, sha256_json
from beatrice.extract.signals.batch import DoesNotFit
from beatrice.extract.signals.decode import ReadingGenerator
from beatrice.extract.signals.reader import AnswerSignals, SignalReader
from beatrice.extract.signals.sequence import sequence_of
from beatrice.pgir.arguments import argument_error
from beatrice.pgir.bridge import (
    MOST_ROWS,
    ProbedBackbone,
    Reading,
    emissions,
    run_fitting,
)
from beatrice.pgir.controllers.loop import (
    VALUES,
    Call,
    Cost,
    DraftScore,
    Judge,
    Outcome,
    Plan,
    Reply,
    judge_by,
)
from beatrice.pgir.retrievers import RetrievalFailed, Retriever
from beatrice.pgir.stages import DraftJudge, as_judge

GROUP_SIZE = 256  # questions advanced together, with their signals in memory
_MOST_CACHED = 2 * MOST_ROWS  # closed-book answers, twice as many as a group has
_MOST_BYTES = 2**29  # of signals, and of states; without them answers are written again
ENTROPY = 2  # column of a prob row, in nats
# Each batch is pairs of a call's index and its value or `Failed`.
Batches = Generator[list[tuple[int, Any]], None, None]


class Failed(msgspec.Struct, frozen=True):
    """A call that failed, or its question; the next run tries it again."""

    reason: str
    cost: Cost = Cost()  # for a question, what it had cost until then


class Service(abc.ABC):
    """Serves the calls of one kind."""

    price = Cost()  # of each call, without seconds

    @abc.abstractmethod
    def batches(self, calls: Sequence[Call], done: Collection[int]) -> Batches:
        """Serve calls in batches; those with an index in `done` may be left out."""

    def cost(self, call: Call, value: Any) -> Cost:
        """Return the cost of a call, without seconds."""
        return self.price


class BatchedService(Service):
    """Serves calls of the same `group` together, at most `size` in a batch, or all.

    `is_joint` means that a value depends, by rounding, on the rest of its batch.
    """

    size: int | None = None
    is_joint = True

    def group(self, call: Call) -> Any:
        """Return a key that all calls of a batch share."""
        return 0

    @abc.abstractmethod
    def values(self, calls: Sequence[Call]) -> Sequence[Any]:
        """Return the value of each call of a batch, or `Failed`."""

    def batches(self, calls: Sequence[Call], done: Collection[int]) -> Batches:
        """Yield the batches of every group, see `Service`.

        Joint batches are planned over all calls, and skipped if all of them are done.
        """
        groups: dict[Any, list[int]] = {}
        for i, call in enumerate(calls):
            if self.is_joint or i not in done:
                groups.setdefault(self.group(call), []).append(i)
        for _, places in sorted(groups.items()):
            size = self.size or len(places)
            for first in range(0, len(places), size):
                batch = places[first : first + size]
                if not all(i in done for i in batch):
                    served = [calls[i] for i in batch]
                    values = run_fitting(self.values, served, lambda _, x: Failed(x))
                    yield list(zip(batch, values, strict=True))


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was made."""

    call: Call
    wave: str  # the wave in which it was made
    seconds: float  # its share of the batch's time
    value: Any  # of the type in `VALUES`; plain JSON in a line of the file
    check: str = ""  # hash of all other fields and of the journal's key


class CallJournal:
    """Every call that was made under one key, in memory and in a file.

    The key identifies everything that values depend on besides the calls. `passages`
    are given if an external search finds them, since their indices then depend on the
    order in which they were found. The file is truncated at the first line that is
    damaged, of another key or of other passages; the lines removed are moved to
    `calls.jsonl.stale`. `on_calls` gets the number of all calls after each batch.
    """

    def __init__(
        self, path: Path | None, key: str, passages: Sequence[Passage] | None = None
    ) -> None:
        """Open the file and read its calls."""
        self._key, self._passages = key, passages
        self._entries: dict[Call, Entry] = {}
        self._waves: dict[str, list[Call]] = {}
        self.on_calls: Callable[[int], None] = lambda n: None
        self._file = None if path is None else self._open(path)

    def _open(self, path: Path) -> JsonLines:
        path.parent.mkdir(parents=True, exist_ok=True)
        n_good = 0
        with open(path, "a+b", opener=open_unlinked) as lines:
            lines.seek(0)
            for line in lines:
                if not self._read(line):
                    break
                n_good += len(line)
            lines.seek(n_good)
            if others := lines.read().rpartition(b"\n")[0]:  # drops an unfinished line
                with open(f"{path}.stale", "ab", opener=open_unlinked) as stale:
                    stale.write(others + b"\n")
            lines.truncate(n_good)
        return JsonLines.open(path)

    def _read(self, line: bytes) -> bool:
        """Add the call of a line; return whether the line is intact and of this key."""
        try:
            entry = msgspec.json.decode(line, type=Entry)
            kind = VALUES[entry.call.kind]
            value = msgspec.convert(entry.value, kind, strict=False)  # see `_plain`
            check = self._check(entry, value)
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
            return False
        if entry.check != check or not line.endswith(b"\n"):
            return False
        self._add(msgspec.structs.replace(entry, value=value))
        return True

    def _check(self, entry: Entry, value: Any) -> str:
        fields = [self._key, entry.call, entry.wave, entry.seconds, entry.value]
        places = value if entry.call.kind == "search" else entry.call.passages
        if self._passages is not None and places:  # their file may have been replaced
            fields.append([self._passages[place] for place in places])
        return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:16]

    def _add(self, entry: Entry) -> None:
        self._entries[entry.call] = entry
        self._waves.setdefault(entry.wave, []).append(entry.call)

    def find(self, call: Call) -> Entry | None:
        """Return the entry of a call, or None."""
        return self._entries.get(call)

    def value(self, call: Call) -> Any:
        """Return the value of a call that was made."""
        return self._entries[call].value

    def wave_of(self, call: Call) -> list[Call]:
        """Return all calls of a call's wave, in the order in which they were added."""
        return self._waves[self._entries[call].wave]

    def add(
        self, wave: str, calls: Sequence[Call], values: Sequence[Any], seconds: float
    ) -> None:
        """Keep the values of a batch; `seconds` is each call's share of its time."""
        lines = []
        for call, value in zip(calls, values, strict=True):
            entry = Entry(call=call, wave=wave, seconds=round(seconds, 6), value=value)
            self._add(entry)
            entry = msgspec.structs.replace(entry, value=_plain(value))
            line = msgspec.structs.replace(entry, check=self._check(entry, value))
            lines.append(msgspec.json.encode(line).decode())
        if self._file is not None:
            self._file.append(lines)
        self.on_calls(len(self._entries))


def _plain(value: Any) -> Any:
    """Return a value as plain JSON, with numbers that are not finite as texts."""
    value = msgspec.to_builtins(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


class Waves:
    """Runs controllers on groups of questions, and records which calls failed."""

    def __init__(
        self,
        services: dict[str, Service],
        journal: CallJournal,
        group_size: int = GROUP_SIZE,
    ) -> None:
        """Start without failed calls."""
        self.services = services
        self.journal = journal
        self.failed: dict[Call, str] = {}
        self._group_size = group_size

    def add_judge(self, name: str, judge: DraftJudge) -> Judge:
        """Add a user's judge to `JudgeService`; return it as a `Judge` for plans."""
        judging = self.services["judge"]
        assert isinstance(judging, JudgeService)
        return judge_by("judge", judging.add(name, judge))

    def run(self, label: str, plans: Sequence[Plan[Any]]) -> list[Outcome | Failed]:
        """Run a controller's plans, one per question; return their values and costs."""
        results: list[Outcome | Failed] = []
        for first in range(0, len(plans), self._group_size):
            group = plans[first : first + self._group_size]
            results += self._run_group(f"{label}/{first}", group)
        return results

    def _run_group(
        self, label: str, plans: Sequence[Plan[Any]]
    ) -> list[Outcome | Failed]:
        results: dict[int, Outcome | Failed] = {}
        costs = [Cost()] * len(plans)
        waiting: dict[int, Call] = {}

        def advance(i: int, value: Any) -> None:
            try:
                waiting[i] = plans[i].send(value)
            except StopIteration as end:
                results[i] = Outcome(end.value, costs[i])

        for i in range(len(plans)):
            advance(i, None)
        number = 0
        while waiting:
            kinds = [call.kind for call in waiting.values()]
            kind = max(sorted(set(kinds)), key=kinds.count)
            served = [i for i in sorted(waiting) if waiting[i].kind == kind]
            self._serve(f"{label}/{number}/{kind}", kind, [waiting[i] for i in served])
            for i in served:
                call = waiting.pop(i)
                entry = self.journal.find(call)
                if entry is None:
                    results[i] = Failed(self.failed[call], costs[i])
                    plans[i].close()
                    continue
                cost = self.services[kind].cost(call, entry.value)
                costs[i] = costs[i].plus(cost._replace(seconds=entry.seconds))
                advance(i, entry.value)
            number += 1
        return [results[i] for i in range(len(plans))]

    def _serve(self, wave: str, kind: str, calls: Sequence[Call]) -> None:
        entries = {call: self.journal.find(call) for call in calls}
        of_wave = [c for c, e in entries.items() if e is None or e.wave == wave]
        done = {i for i, call in enumerate(of_wave) if entries[call] is not None}
        if len(done) == len(of_wave):
            return
        batches = self.services[kind].batches(of_wave, done)
        began = time.perf_counter()
        with contextlib.closing(batches):
            for batch in batches:
                seconds = (time.perf_counter() - began) / len(batch)
                fresh = [(of_wave[i], value) for i, value in batch if i not in done]
                bad = {c: v.reason for c, v in fresh if isinstance(v, Failed)}
                self.failed |= bad
                good = {c: v for c, v in fresh if c not in bad}
                self.journal.add(wave, list(good), list(good.values()), seconds)
                began = time.perf_counter()


class SearchService(BatchedService):
    """Serves "search": rankings of queries; each query can fail on its own."""

    price, is_joint = Cost(retrievals=1), False

    def __init__(self, retriever: Retriever) -> None:
        """Take the retriever."""
        self._retriever = retriever

    def group(self, call: Call) -> int:
        """Return the depth: queries of one depth are searched together."""
        return call.n

    def values(self, calls: Sequence[Call]) -> list[tuple[int, ...] | Failed]:
        """Return the ranking of each query."""
        texts = [call.text for call in calls]
        reasons: Mapping[int, str] = {}
        try:
            rankings = dict(enumerate(self._retriever.search(texts, calls[0].n)))
        except RetrievalFailed as error:  # such as a server that is down or slow
            rankings, reasons = error.rankings, error.reasons
        return [
            Failed(reasons[n]) if n in reasons else tuple(map(int, rankings[n]))
            for n in range(len(texts))
        ]


class LatestItems(dict[tuple[int, ...], Any]):
    """Arrays or signals by prompt, of the latest answers and of others if they fit."""

    def __init__(self, most_bytes: int) -> None:
        """Start empty; `trim` keeps at most these bytes, or `GROUP_SIZE` items."""
        self._n_bytes, self._most_bytes = 0, most_bytes

    def add(self, prompt: tuple[int, ...], item: Any) -> None:
        """Add an item as the latest."""
        if (old := self.pop(prompt, None)) is not None:
            self._n_bytes -= old.nbytes
        self[prompt] = item
        self._n_bytes += item.nbytes

    def trim(self) -> None:
        """Drop the oldest items."""
        for prompt in list(self)[:-GROUP_SIZE]:
            if self._n_bytes <= self._most_bytes:
                break
            self._n_bytes -= self.pop(prompt).nbytes


class AnswerService(Service):
    """Serves "answer": a greedy answer under the run's template, for all controllers.

    `shown` are the passages of all prompts; control tokens of the model in them were
    split by a blank, as no prompt can have them. `overlong` are those that `fitting`
    left out.
    """

    def __init__(
        self,
        probed: ProbedBackbone,
        passages: Sequence[Passage],
        journal: CallJournal,
        state_layers: Sequence[int] = (),
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """Open the generator; raise a ValueError if the model can be asked nothing."""
        probed.requests("closed_book", ["?"], [()])  # else every question would fail
        self.probed = probed
        self.passages = passages
        self.journal = journal
        self.shown: set[int] = set()
        self.overlong: set[int] = set()
        self._frames: dict[str, int] = {}  # tokens of a question's shortest prompt
        self._state_layers = list(state_layers)
        self._signals = LatestItems(most_bytes)
        self._states = LatestItems(most_bytes)  # mean states, for Probing-RAG
        self._sampling = probed.config.greedy
        self._requests: dict[Call, tuple[Request, int]] = {}  # of the latest calls
        self._sizes: dict[int, int] = {}  # of passages, in bytes
        self.generator = TransformersGenerator(
            backbone=probed.backbone, tokens_per_batch=probed.config.tokens_per_batch
        )

    def request(self, call: Call) -> tuple[Request, int]:
        """Return a call's prompt, and how many of the call's passages it contains.

        The last passages are left out until it fits the model's window; one is kept.
        """
        if (known := self._requests.get(call)) is not None:
            return known
        request, n_shown = self._request(call.text, call.passages), len(call.passages)
        while n_shown > 1 and self._why_too_long(request) is not None:
            n_shown -= 1
            request = self._request(call.text, call.passages[:n_shown])
        if len(self._requests) >= 4 * GROUP_SIZE:
            self._requests.clear()
        self._requests[call] = request, n_shown
        return request, n_shown

    @property
    def _window(self) -> float:
        """The most tokens of a prompt and its answer, for the model and the probe."""
        limits = self.probed.backbone.max_length, self.probed.trained.prompt.window
        return min((n for n in limits if n is not None), default=math.inf)

    def fitting(self, question: str, ranking: Sequence[int]) -> tuple[int, ...]:
        """Return a ranking without the passages too long for a question's prompt."""
        room = self._window - self._sampling.max_new_tokens
        if question not in self._frames:
            shortest = Passage(title="", text=".")
            self._frames[question] = self._n_tokens(question, shortest)
        spare = room - self._frames[question]
        # A token has at least one byte, so short passages need no tokenising.
        long = {
            place
            for place in ranking
            if self._size(place) > spare
            and self._n_tokens(question, self.passages[place]) > room
        }
        self.overlong |= long
        return tuple(place for place in ranking if place not in long)

    def _size(self, place: int) -> int:
        if place not in self._sizes:
            passage = self.passages[place]
            self._sizes[place] = len(f"{passage.title}: {passage.text}".encode())
        return self._sizes[place]

    def _n_tokens(self, question: str, passage: Passage) -> int:
        parts = self.probed.backbone.tokenizer, self.probed.template, question
        with self.probed.lock:
            return len(build_prompt(*parts, showable(*parts, [passage])).ids)

    def _why_too_long(self, request: Request) -> str | None:
        backbone, n_new = self.probed.backbone, self._sampling.max_new_tokens
        n, window = len(request.prompt.ids), self._window
        if n + n_new <= window:
            return None
        is_models = window == backbone.max_length
        whose = backbone.name if is_models else "the probe's prompt"
        other = "a model with a longer one" if is_models else "a probe without one"
        return (
            f"its prompt has {n} tokens and its answer may have {n_new}, but {whose} "
            f"has a window of {window}; give shorter passages, or use {other}"
        )

    @property
    def n_escaped(self) -> int:
        """Number of passages that were not shown unchanged."""
        tokenizer = self.probed.backbone.tokenizer
        passages = [self.passages[place] for place in self.shown]
        with self.probed.lock:
            return sum(escape_passage(tokenizer, x) != x for x in passages)

    def _request(self, question: str, places: Sequence[int]) -> Request:
        """Return the prompt of a question with passages, escaped if necessary."""
        setting: Setting = "with_context" if places else "closed_book"
        context = [self.passages[index] for index in places]
        try:
            return self.probed.requests(setting, [question], [context])[0]
        except ValueError:
            tokenizer = self.probed.backbone.tokenizer
            with self.probed.lock:
                escaped = [escape_passage(tokenizer, passage) for passage in context]
            return self.probed.requests(setting, [question], [escaped])[0]

    def answer_of(self, call: Call, reply: Reply) -> Answer:
        """Return a call's reply as an `Answer`, whose signals can be read."""
        request, _ = self.request(call)
        return Answer(
            example_id=call.text,
            setting=request.setting,
            variant="original",
            text=reply.text,
            prompt_ids=request.prompt.ids,
            token_ids=reply.token_ids,
            stop_id=reply.stop_id,
            context_span=request.prompt.context_span,
        )

    def batches(self, calls: Sequence[Call], done: Collection[int]) -> Batches:
        """Yield batches of answers; see `Service`. A call that has no prompt fails."""
        self._trim()
        yield from self._write(calls, done)

    def _trim(self) -> None:
        self._signals.trim()
        self._states.trim()

    def _write(self, calls: Sequence[Call], done: Collection[int]) -> Batches:
        """Yield batches of answers, keeping their signals if they can be read."""
        requests: dict[int, tuple[Request, int]] = {}
        failed: dict[int, Failed] = {}
        for i, call in enumerate(calls):
            try:
                request, n_shown = self.request(call)
                if (reason := self._why_too_long(request)) is not None:
                    raise ValueError(reason)
                requests[i] = request, n_shown
            except ValueError as error:  # or no prompt can hold the question
                failed[i] = Failed(str(error))
        if failed:
            yield list(failed.items())
        places = list(requests)
        finished = {at for at, i in enumerate(places) if i in done}
        generator = self.generator
        if self.is_read_at_once:
            generator = ReadingGenerator(
                backbone=self.probed.backbone,
                tokens_per_batch=generator.tokens_per_batch,
                reader=self._reader,
                requests={r.prompt.ids: r for r, _ in requests.values()},
                on_batch=self._keep,
                answer_span=self.probed.answer_span,
            )
        ids = (requests[i][0].prompt.ids for i in places)
        prompts = [GeneratorPrompt(text="", ids=x) for x in ids]
        for batch in self._texts(generator, prompts, finished):
            written = [(places[at], text) for at, text in batch]
            yield [(i, self._reply(text, *requests[i])) for i, text in written]

    def _texts(
        self,
        generator: TransformersGenerator,
        prompts: Sequence[GeneratorPrompt],
        finished: Collection[int],
    ) -> Batches:
        """Yield texts in batches; split the rest in half if one does not fit."""
        left = {at for at in range(len(prompts)) if at not in finished}
        try:
            for batch in generator.batches(prompts, self._sampling, finished):
                yield batch
                left -= dict(batch).keys()
        except DoesNotFit as error:
            if len(prompts) == 1:
                yield [(0, Failed(str(error)))]
                return
        rest, middle = sorted(left), (len(left) + 1) // 2
        for half in filter(None, (rest[:middle], rest[middle:])):
            some = [prompts[at] for at in half]
            for batch in self._texts(generator, some, ()):
                yield [(half[at], text) for at, text in batch]

    @functools.cached_property
    def _reader(self) -> SignalReader:
        layers = {self.probed.trained.layer, *self._state_layers}
        return SignalReader(self.probed.backbone, tuple(sorted(layers)))

    @property
    def is_read_at_once(self) -> bool:
        """Whether answers are read in the passes that write them."""
        return self.probed.why_read_again is None

    def _keep(
        self, answers: Sequence[Answer], signals: Sequence[AnswerSignals | None]
    ) -> None:
        layers = self._reader.hidden_layers
        slots = [layers.index(layer) for layer in self._state_layers]
        slot = layers.index(self.probed.trained.layer)
        for answer, read in zip(answers, signals, strict=True):
            if read is None:  # its stop string spans several tokens
                (read,) = self._reader.read(self.probed.sequences([answer]))
            if slots:
                start, stop = written_tokens(answer)
                rows = slice(start - read.first_token, stop - read.first_token)
                states = read.hidden[rows, slots].mean(axis=0)
                self._states.add(answer.prompt_ids, states)
            hidden = read.hidden[:, slot : slot + 1].copy()
            kept = dataclasses.replace(read, hidden=hidden)
            self._signals.add(answer.prompt_ids, kept)

    def _rewrite(self, calls: Sequence[Call], ids_in_memory: Collection[Any]) -> None:
        """Write again, in the batches of their wave, answers whose signals are gone."""
        lost = [c for c in calls if self.request(c)[0].prompt.ids not in ids_in_memory]
        while lost:
            wave = self.journal.wave_of(lost[0])
            done = {i for i, call in enumerate(wave) if call not in lost}
            for batch in self._write(wave, done):
                for _, reply in batch:
                    if isinstance(reply, Failed):
                        raise DoesNotFit(reply.reason)  # it had a prompt
            lost = [call for call in lost if call not in wave]

    def _answers(self, calls: Sequence[Call]) -> list[Answer]:
        return [self.answer_of(call, self.journal.value(call)) for call in calls]

    def reading_of(self, calls: Sequence[Call]) -> Reading:
        """Return the signals of answers, if possible from when they were written."""
        answers = self._answers(calls)
        if not self.is_read_at_once:
            return self.probed.read(answers)
        self._rewrite(calls, self._signals)
        signals = [self._signals[answer.prompt_ids] for answer in answers]
        return self.probed.reading(signals, self.probed.sequences(answers))

    def states_of(self, calls: Sequence[Call]) -> np.ndarray:
        """Return the mean states of answers' tokens, `[n, n_layers, d_model]`."""
        answers, states = self._answers(calls), []
        for first in range(0, len(calls), GROUP_SIZE):
            some = answers[first : first + GROUP_SIZE]
            if self.is_read_at_once:
                self._rewrite(calls[first : first + GROUP_SIZE], self._states)
            else:
                sequences = self.probed.sequences(some)
                for batch, signals in self.probed.read_batches(self._reader, sequences):
                    self._keep([some[i] for i in batch], signals)
            states += [self._states[answer.prompt_ids] for answer in some]
            self._trim()
        return np.stack(states)

    def cost(self, call: Call, value: Reply) -> Cost:
        """Return the cost of an answer, also a kept one, without seconds."""
        self.shown.update(call.passages[: value.n_shown])
        n_tokens = value.n_prompt_tokens + len(value.log_probs)
        return Cost(generations=1, sequences=1, tokens=n_tokens)

    def _reply(
        self, generated: Generated | Failed, request: Request, n_shown: int
    ) -> Reply | Failed:
        """Return what was generated as a `Reply`, with its ids and entropies."""
        if isinstance(generated, Failed):
            return generated
        assert generated.token_ids is not None and generated.log_probs is not None
        assert generated.n_prompt_tokens is not None
        entropies: tuple[float, ...] | None = None
        if (read := self._signals.get(request.prompt.ids)) is not None:
            lengths = len(request.prompt.ids), len(generated.token_ids)
            entropies = tuple(emissions(read, *lengths)[:, ENTROPY].tolist())
        return Reply(
            text=generated.text,
            token_ids=generated.token_ids,
            stop_id=generated.stop_id,
            log_probs=generated.log_probs,
            n_prompt_tokens=generated.n_prompt_tokens,
            n_shown=n_shown,
            entropies=entropies,
        )


def written_tokens(answer: Answer) -> tuple[int, int]:
    """Return the tokens `[start, stop)` of an answer that were fed back to the model.

    The last token never is; if it is the only one, the position that emitted it counts.
    """
    start, stop = sequence_of(answer, answer_span="literal").spans[2].tolist()
    return (start, stop) if start < stop else (len(answer.prompt_ids) - 1, stop)


def escape_passage(tokenizer: Any, passage: Passage) -> Passage:
    """Return a passage with the model's control tokens in title and text broken up."""
    escape = functools.partial(escape_control_tokens, tokenizer)
    title, shown = passage.title, html.unescape(passage.title)
    if escape(shown) != shown:  # a prompt shows titles unescaped
        title = html.escape(escape(shown), quote=False)
    return msgspec.structs.replace(passage, title=title, text=escape(passage.text))


def showable(
    tokenizer: Any, template: PromptTemplate, question: str, passages: Sequence[Passage]
) -> list[Passage]:
    """Return passages, escaped (`escape_passage`) if no prompt can hold them."""
    try:
        build_prompt(tokenizer, template, question, passages)
    except ValueError:
        return [escape_passage(tokenizer, passage) for passage in passages]
    return list(passages)


class ScoreService(BatchedService):
    """Serves "score": the calibrated detector's scores of answers.

    An answer's signals come from the pass that wrote it. With context, the signals of
    the closed-book answer to the question are needed too; they are kept in memory when
    that answer is scored. A run that resumes writes all answers of the wave again, in
    the same batches, so that they are rounded as before.
    """

    size = MOST_ROWS

    def __init__(self, answering: AnswerService) -> None:
        """Start without signals."""
        self._answering = answering
        self._closed_book: dict[str, tuple[AnswerSignals, np.ndarray]] = {}

    def group(self, call: Call) -> bool:
        """Return whether the answer was written with passages."""
        return bool(call.passages)

    def _read_closed_book(self, calls: Sequence[Call]) -> Reading:
        """Read closed-book answers, and keep their signals for the rounds to come."""
        reading = self._answering.reading_of([call.answer for call in calls])
        texts = (call.text for call in calls)
        pairs = zip(reading.signals, reading.spans, strict=True)
        self._closed_book |= dict(zip(texts, pairs, strict=True))
        return reading

    def _closed_book_of(self, calls: Sequence[Call]) -> Reading:
        scored = [Call("score", call.text) for call in calls]
        while lost := [c for c in scored if c.text not in self._closed_book]:
            wave = self._answering.journal.wave_of(lost[0])
            try:
                self._read_closed_book([call for call in wave if not call.passages])
            except DoesNotFit:  # perhaps because of a question that is not needed here
                self._read_closed_book(lost)
        readings = [self._closed_book[call.text] for call in calls]
        signals, spans = zip(*readings, strict=True)
        return Reading(list(signals), np.stack(spans))

    def values(self, calls: Sequence[Call]) -> list[DraftScore]:
        """Return the score of each answer."""
        if len(self._closed_book) > _MOST_CACHED:
            self._closed_book.clear()
        setting: Setting = "with_context" if calls[0].passages else "closed_book"
        passes: dict[Setting, Reading] = {}
        if setting == "with_context":
            passes[setting] = self._answering.reading_of([c.answer for c in calls])
            passes["closed_book"] = self._closed_book_of(calls)
        else:
            passes[setting] = self._read_closed_book(calls)
        scores = self._answering.probed.score(setting, passes)
        return [*map(DraftScore, scores.p_correct.tolist(), scores.raw.tolist())]

    def cost(self, call: Call, value: DraftScore) -> Cost:
        """Return the cost of a score: one pass if the answer has to be read again."""
        return Cost(forwards=int(not self._answering.is_read_at_once))


class JudgeService(BatchedService):
    """Serves "judge": judges of answers written by the user.

    A judge is called with the question, the answer and the passages that were shown,
    and returns the probability that the answer is correct. If it raises an OSError, the
    question fails, and the next run tries it again. What it spends is not counted.
    """

    size, is_joint = 1, False

    def __init__(self, answering: AnswerService) -> None:
        """Start without a judge."""
        self._answering = answering
        self._judges: dict[int, DraftJudge] = {}

    def add(self, name: str, judge: DraftJudge) -> int:
        """Add a judge; return its number, a hash of its name and its code's file."""
        judge = as_judge(judge, name)
        number = int(sha256_json([name, sha256_of_code(judge)])[:12], 16)
        self._judges[number] = judge
        return number

    def values(self, calls: Sequence[Call]) -> list[DraftScore | Failed]:
        """Return one verdict at a time."""
        return [self._judge(call) for call in calls]

    def _judge(self, call: Call) -> DraftScore | Failed:
        reply = self._answering.journal.value(call.answer)
        shown = call.passages[: reply.n_shown]
        passages = [self._answering.passages[index] for index in shown]
        try:
            p_correct = self._judges[call.n](call.text, reply.text, passages)
        except OSError as error:
            return Failed(str(error))
        # Any other error is a mistake in the user's code.
        except Exception as error:
            text = f"the judge failed ({type(error).__name__}): {error}"
            raise ValueError(text) from error
        is_number = isinstance(p_correct, numbers.Real)
        if not is_number or not 0 <= float(p_correct) <= 1:
            raise argument_error("the judge", "a probability in [0, 1]", p_correct)
        return DraftScore(float(p_correct), float(p_correct))


def open_services(answering: AnswerService, retriever: Retriever) -> dict[str, Service]:
    """Return the services for all kinds of calls that need no training."""
    return {
        "search": SearchService(retriever),
        "answer": answering,
        "score": ScoreService(answering),
        "judge": JudgeService(answering),
    }
