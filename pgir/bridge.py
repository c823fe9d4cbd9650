"""A backbone and its detector: the one answers, the other scores.

Signals are put together as NumPy arrays; encoders and heads run in Torch on the
backbone's device, see `pgir.forward`.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.generator import SamplingConfig
from beatrice.extract.generate.prompts import GenerationConfig, Request, build_prompt
from beatrice.extract.records import Answer, AnswerSpan, Setting
from beatrice.extract.signals.decode import check_decoding, generate_and_read
from beatrice.extract.signals.reader import AnswerSignals, SignalReader
from beatrice.extract.signals.sequence import TokenSequence, batches_of, sequence_of
from beatrice.extract.store.spec import ReadingPath, as_written
from beatrice.jaxprobe.detector import Detector, HeadName, Scores
from beatrice.jaxprobe.families import FAMILIES, SPANS, Features, assemble
from beatrice.pgir.forward import TorchForward
from beatrice.pgir.warnings import differences

MOST_ROWS = 256  # answers that are encoded together


@dataclasses.dataclass(frozen=True)
class Reading:
    """Signals of some answers, as rows; see `Provenance` on their path."""

    signals: list[AnswerSignals]
    spans: np.ndarray  # [n_examples, 3, 2]
    path: ReadingPath = "teacher_forced"

    def rows(self, first: int, n: int) -> "Reading":
        """Return the signals of at most `n` answers from `first` on."""
        rows = slice(first, first + n)
        return Reading(self.signals[rows], self.spans[rows], self.path)

    def features(self, setting: Setting) -> Features:
        """Return the spans of a setting, padded to the longest of each."""
        lengths = [len(s.prob) for s in self.signals]
        firsts = np.array([s.first_token for s in self.signals])
        rows = {
            "hidden": np.concatenate([s.hidden[:, 0] for s in self.signals]),
            "prob": np.concatenate([s.prob for s in self.signals]),
            "resid": np.concatenate([s.resid for s in self.signals]),
            "attn": np.concatenate([s.attn for s in self.signals]),
        }
        starts = np.cumsum([0, *lengths[:-1]]) - firsts
        return assemble(rows, starts, self.spans, SPANS[setting])


class ProbedBackbone:
    """A backbone with its detector: answers questions and scores answers.

    Prompts are those that the detector was trained under, and an answer's span is the
    one of training.

    Args:
      backbone: the frozen model.
      detector: trained on this backbone's signals.
      config: how answers are generated.
      most_bytes: that encoding answers together may take.
      strict: refuse a backbone of another revision or type than the detector's.
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
        """Check that the two belong together."""
        trained = detector.provenance
        if trained is None:
            raise ValueError(
                "the detector was trained on arrays, not on a model's answers, so it "
                f"cannot read {backbone.name}; give it arrays"
            )
        if strict and (different := differences(detector, backbone)):
            raise ValueError(
                f"{different[0]}; with strict=False it is loaded, and every score warns"
            )
        self.backbone = backbone
        self.detector = detector
        self.trained = trained
        self.template = trained.prompt.prompt_template()
        self.config = config
        self.answer_span: AnswerSpan = trained.answer_span
        self.most_bytes = most_bytes
        # Signals are read through hooks on the modules, and a tokenizer keeps settings
        # of its last call, so one thread at a time uses either.
        self.lock = threading.RLock()
        self.reader = SignalReader(backbone, (trained.layer,))
        self.forward = TorchForward(detector, backbone.device)

    def requests(
        self, setting: Setting, questions: Sequence[str], contexts: Sequence
    ) -> list[Request]:
        """Return one request per question, named by its place."""
        return [
            Request(
                example_id=str(i),
                setting=setting,
                variant="original",
                prompt=build_prompt(
                    self.backbone.tokenizer, self.template, question, context
                ),
            )
            for i, (question, context) in enumerate(
                zip(questions, contexts, strict=True)
            )
        ]

    def answer(
        self, requests: Sequence[Request], sampling: SamplingConfig | None = None
    ) -> list[Answer]:
        """Return answers in the order of the requests; greedy ones without sampling."""
        from beatrice.extract.generate.local import generate

        with self.lock:
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

        Where the model cannot be read so, it reads the answers again.

        Args:
          requests: prompts.
          sampling: how tokens are chosen; None is greedily.
        """
        if self.why_read_again is not None:
            answers = self.answer(requests, sampling)
            sequences = list(map(self.sequence, requests, answers))
            return answers, self.read_sequences(sequences)
        with self.lock:
            answers, signals = generate_and_read(
                self.reader,
                requests,
                self.config,
                answer_span=self.answer_span,
                sampling=sampling,
                runs_last=False,  # it is in no span
            )
        sequences = list(map(self.sequence, requests, answers))
        return answers, self.reading(signals, sequences)

    def sequence(self, request: Request, answer: Answer) -> TokenSequence:
        """Return an answer as the model reads it again, with the spans of training."""
        start = request.prompt.question_start
        return sequence_of(answer, answer_span=self.answer_span, question_start=start)

    def reading(
        self,
        signals: Sequence[AnswerSignals],
        sequences: Sequence[TokenSequence],
        path: ReadingPath = "decode",
    ) -> Reading:
        """Return signals with their spans, rounded as those of training."""
        return Reading(
            [self._as_trained(item) for item in signals],
            np.stack([sequence.spans for sequence in sequences]),
            path,
        )

    def read(self, answers: Sequence[Answer]) -> Reading:
        """Return the signals of answers, one forward pass per batch."""
        return self.read_sequences(
            [sequence_of(a, answer_span=self.answer_span) for a in answers]
        )

    def read_sequences(self, sequences: Sequence[TokenSequence]) -> Reading:
        """Return the signals of sequences, one forward pass per batch."""
        signals: dict[int, AnswerSignals] = {}
        budget = self.config.tokens_per_batch
        for batch in batches_of([len(s.ids) for s in sequences], budget):
            with self.lock:
                of_batch = self.reader.read([sequences[i] for i in batch])
            signals |= zip(batch, of_batch, strict=True)
        ordered = [signals[i] for i in range(len(sequences))]
        return self.reading(ordered, sequences, "teacher_forced")

    def _as_trained(self, signals: AnswerSignals) -> AnswerSignals:
        """Round signals as the store that the detector was trained on does.

        So a score is that of the evaluation, also where the store keeps 8 bits.
        """
        rounded = {
            name: as_written(getattr(signals, name), kind)
            for name, kind in zip(FAMILIES, self.trained.stored_as, strict=False)
            if kind != "float32"
        }
        return dataclasses.replace(signals, **rounded)

    def rows_at_once(self, setting: Setting) -> int:
        """Return how many answers are encoded together, one at least."""
        bank = self.detector.banks.get(setting)
        fits = self.most_bytes // max(1, bank.row_bytes if bank else 0)
        return min(max(1, fits), MOST_ROWS)

    def score(self, branch: HeadName, readings: Mapping[Setting, Reading]) -> Scores:
        """Return the scores of answers that were read, `[n]` each."""
        n = min(self.rows_at_once(setting) for setting in readings)
        n_all = len(next(iter(readings.values())).signals)
        return Scores.joined(
            [
                self.forward.score(
                    branch,
                    {
                        setting: reading.rows(first, n).features(setting)
                        for setting, reading in readings.items()
                    },
                )
                for first in range(0, n_all, n)
            ]
        )
