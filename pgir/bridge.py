"""A backbone with its detector: the backbone answers, the detector scores.

Signals are assembled as NumPy arrays. Encoders and heads run in Torch on the backbone's
device, see `TorchForward`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.generator import SamplingConfig
from beatrice.extract.generate.prompts import GenerationConfig, Request, build_prompt
from beatrice.extract.records import Answer, AnswerSpan, Setting
from beatrice.extract.signals.batch import DoesNotFit
from beatrice.extract.signals.decode import check_decoding, generate_and_read
from beatrice.extract.signals.reader import AnswerSignals, SignalReader
from beatrice.extract.signals.sequence import (
    TokenSequence,
    reading_batches,
    sequence_of,
)
from beatrice.extract.store.spec import as_written
from beatrice.jaxprobe.detector import Detector, HeadName, Scores
from beatrice.jaxprobe.families import FAMILIES, FLOATS, SPANS, Features, assemble
from beatrice.pgir.forward import TorchForward
from beatrice.pgir.warnings import differences

MOST_ROWS = 256  # most answers that are encoded together
Item = TypeVar("Item")
Value = TypeVar("Value")


def run_fitting(
    work: Callable[[Sequence[Item]], Iterable[Value]],
    batch: Sequence[Item],
    fail: Callable[[Item, str], Value],
) -> list[Value]:
    """Return the value of each item of a batch, which `work` returns.

    A batch with an item that does not fit in memory is run in halves; the value of that
    item is `fail`'s, which is given the reason.
    """
    try:
        return [*work(batch)]
    except DoesNotFit as error:
        if len(batch) == 1:
            return [fail(batch[0], str(error))]
    middle = len(batch) // 2
    halves = batch[:middle], batch[middle:]
    return [value for half in halves for value in run_fitting(work, half, fail)]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The signals of some answers, one row each."""

    signals: list[AnswerSignals]
    spans: np.ndarray  # [n_examples, 3, 2]

    def rows(self, places: Sequence[int]) -> "Reading":
        """Return the rows of some answers."""
        return Reading([self.signals[i] for i in places], self.spans[list(places)])

    def features(self, setting: Setting) -> Features:
        """Return the signals in a setting's spans, each padded to its longest."""
        lengths = [len(s.prob) for s in self.signals]
        firsts = np.array([s.first_token for s in self.signals])
        rows = {
            name: np.concatenate([getattr(s, name) for s in self.signals])
            for name in FAMILIES
        }
        rows["hidden"] = rows["hidden"][:, 0]  # the only layer
        starts = np.cumsum([0, *lengths[:-1]]) - firsts
        return assemble(rows, starts, self.spans, SPANS[setting])


def emissions(signals: AnswerSignals, n_prompt: int, n_answer: int) -> np.ndarray:
    """Return the prob rows `[n, 5]` of the positions that emitted an answer."""
    start = n_prompt - 1 - signals.first_token
    return signals.prob[start : start + n_answer]


class ProbedBackbone:
    """A frozen backbone with its detector: answers questions and scores answers.

    Prompts and answer spans are those of the detector's training. `most_bytes` limits
    the memory for encoding answers together; `strict` refuses a backbone of another
    revision or type than the detector's.
    """

    def __init__(
        self,
        backbone: Backbone,
        detector: Detector,
        config: GenerationConfig = GenerationConfig(),  # noqa: B008 (it is frozen)
        *,
        most_bytes: int = 1 << 30,
        strict: bool = True,
    ) -> None:
        """Check that backbone and detector belong together."""
        trained = detector.provenance
        if trained is None:
            raise ValueError(
                "the detector was trained on arrays, not on a model's answers, so it "
                f"cannot be used with {backbone.name}; give it arrays"
            )
        if strict and (first := next(differences(trained, backbone), None)):
            raise ValueError(
                f"{first}; in Python, strict=False loads it with a warning per score"
            )
        n_tokens = backbone.model.get_input_embeddings().weight.shape[0]
        if trained.stop_id is not None and not 0 <= trained.stop_id < n_tokens:
            raise ValueError(
                f"the detector's answers end with token {trained.stop_id}, but "
                f"{backbone.name} knows only tokens 0 to {n_tokens - 1}; use the model "
                "that it was fitted on"
            )
        if backbone.attention != trained.attention_layers:
            backbone = dataclasses.replace(backbone, attention=trained.attention_layers)
        self.backbone = backbone
        self.detector = detector
        self.trained = trained
        self.template = trained.prompt.prompt_template()
        self.config = config
        self.answer_span: AnswerSpan = trained.answer_span
        self.most_bytes = most_bytes
        self.lock = backbone.splitter.lock
        self.reader = SignalReader(backbone, (trained.layer,))
        self.forward = TorchForward(detector, backbone.device)

    def requests(
        self, setting: Setting, questions: Sequence[str], contexts: Sequence
    ) -> list[Request]:
        """Return one request per question, identified by its index."""
        build = functools.partial(build_prompt, self.backbone.tokenizer, self.template)
        with self.lock:
            prompts = [build(*x) for x in zip(questions, contexts, strict=True)]
        return [
            Request(str(i), setting, "original", prompt)
            for i, prompt in enumerate(prompts)
        ]

    def answer(
        self, requests: Sequence[Request], sampling: SamplingConfig | None = None
    ) -> list[Answer]:
        """Return the answers, in order; without `sampling` they are greedy."""
        from beatrice.extract.generate.local import generate

        return generate(self.backbone, requests, self.config, sampling)

    @functools.cached_property
    def why_read_again(self) -> str | None:
        """Why answers cannot be read in the passes that write them, or None."""
        with self.lock:
            return check_decoding(self.reader)

    def answer_and_read(
        self, requests: Sequence[Request], sampling: SamplingConfig | None = None
    ) -> tuple[list[Answer], Reading]:
        """Return answers and their signals, from the passes that write them.

        If the model cannot be read while it writes, it reads the answers in a second
        pass. Without `sampling` they are greedy.
        """
        if self.why_read_again is not None:
            answers, signals = self.answer(requests, sampling), None
        else:
            answers, signals = generate_and_read(
                self.reader,
                requests,
                self.config,
                answer_span=self.answer_span,
                sampling=sampling,
                runs_last=False,  # the last token is in no span
            )
        sequences = list(map(self.sequence, requests, answers))
        if signals is None:
            return answers, self.read_sequences(sequences)
        return answers, self.reading(signals, sequences)

    def sequence(self, request: Request, answer: Answer) -> TokenSequence:
        """Return prompt and answer as one sequence, with the spans of training."""
        start = request.prompt.question_start
        return sequence_of(answer, answer_span=self.answer_span, question_start=start)

    def sequences(self, answers: Sequence[Answer]) -> list[TokenSequence]:
        """Return the sequences of answers, see `sequence`."""
        return [sequence_of(a, answer_span=self.answer_span) for a in answers]

    def reading(
        self, signals: Sequence[AnswerSignals], sequences: Sequence[TokenSequence]
    ) -> Reading:
        """Return signals with their spans, rounded as those of the training were."""
        return Reading(
            [self._as_trained(item) for item in signals],
            np.stack([sequence.spans for sequence in sequences]),
        )

    def read(self, answers: Sequence[Answer]) -> Reading:
        """Return the signals of answers, one forward pass per batch."""
        return self.read_sequences(self.sequences(answers))

    def read_sequences(self, sequences: Sequence[TokenSequence]) -> Reading:
        """Return the signals of sequences, one forward pass per batch."""
        signals: dict[int, AnswerSignals] = {}
        for batch, of_batch in self.read_batches(self.reader, sequences):
            signals |= zip(batch, of_batch, strict=True)
        ordered = [signals[i] for i in range(len(sequences))]
        return self.reading(ordered, sequences)

    def read_batches(
        self, reader: SignalReader, sequences: Sequence[TokenSequence]
    ) -> Iterator[tuple[list[int], list[AnswerSignals]]]:
        """Yield batches of sequences: their indices, and the signals read of them."""
        for batch in reading_batches(sequences, self.config.tokens_per_batch):
            with self.lock:
                signals = reader.read([sequences[i] for i in batch])
            yield batch, signals

    def _as_trained(self, signals: AnswerSignals) -> AnswerSignals:
        """Round signals as the store of the training did, perhaps to 8 bits."""
        types = self.trained.stored_as or FLOATS
        rounded = {
            name: as_written(getattr(signals, name), kind)
            for name, kind in zip(FAMILIES, types, strict=False)
        }
        return dataclasses.replace(signals, **rounded)

    def rows_at_once(self, setting: Setting) -> int:
        """Return how many answers may be encoded together, at least one."""
        bank = self.detector.banks.get(setting)
        fits = self.most_bytes // max(1, bank.row_bytes if bank else 0)
        return min(max(1, fits), MOST_ROWS)

    def score(self, branch: HeadName, readings: Mapping[Setting, Reading]) -> Scores:
        """Return the scores of answers from their readings in each setting, `[n]`."""
        n = min(self.rows_at_once(setting) for setting in readings)
        n_all = len(next(iter(readings.values())).signals)
        parts = []
        for first in range(0, n_all, n):
            rows = range(first, min(first + n, n_all))
            features: dict[Setting, Features] = {
                setting: reading.rows(rows).features(setting)
                for setting, reading in readings.items()
            }
            parts.append(self.forward.score(branch, features))
        return Scores.joined(parts)
