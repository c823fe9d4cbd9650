"""The `Scorer`, which answers questions, scores answers and streams both.

A stop string may span several tokens. A stream holds back tokens that could begin one
until they turn out not to, or until the answer has ended before them.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import BackboneConfig, model_path, torch_device
from beatrice.extract.generate.generator import SamplingConfig, decode_ids, find_stop
from beatrice.extract.generate.local import stop_ids, why_overlong
from beatrice.extract.generate.prompts import (
    ANSWER_PRESETS,
    GenerationConfig,
    Request,
    apply_template,
)
from beatrice.extract.records import SETTINGS, Answer, Passage, Setting
from beatrice.extract.signals.decode import (
    WrittenToken,
    groups_in_memory,
    read_stepwise,
)
from beatrice.extract.signals.reader import AnswerSignals
from beatrice.extract.signals.sequence import reading_batches
from beatrice.jaxprobe.detector import OWN_PASS_HEADS, Detector, Scores
from beatrice.jaxprobe.families import Features
from beatrice.jaxprobe.scope import Thresholds
from beatrice.pgir.arguments import argument_error, as_messages, as_path, as_probability
from beatrice.pgir.asking import (
    BATCH_SIZE,
    AnswerScorer,
    QuestionBatch,
    Score,
    StreamedToken,
)
from beatrice.pgir.bridge import ProbedBackbone, Reading, emissions, run_fitting
from beatrice.pgir.forward import TorchForward
from beatrice.pgir.given import (
    HALF,
    AnswerToScore,
    PromptTokens,
    ScoringInput,
    as_answer,
    prepare,
    prompt_tokens,
    token_texts,
)
from beatrice.pgir.warnings import (
    REASONS,
    warn_after,
    warn_before,
    warn_of_path,
    why_unreadable,
)


class Scorer(AnswerScorer):
    """A backbone with its detector; may be called from several threads.

    Threads take turns, one batch at a time: signals are read through hooks on the
    model, which uses all cores anyway. One `score_many` is fastest for many answers.

    Attributes:
      probed: backbone and detector together, as the controllers use them.

    Args:
      model: a `Backbone`, or an object that has one as its `backbone`.
      detector: a detector trained on this model's signals.
      generation: how `answer` writes.
      strict: refuse a model of another revision or type than the detector's; if False,
        every score warns instead.
      precision: share of decisions to be right, in (0, 1]; None takes the detector's.
    """

    def __init__(
        self,
        model: Any,
        detector: Detector,
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (it is frozen)
        *,
        strict: bool = True,
        precision: float | None = None,
    ) -> None:
        """Check that model and detector belong together."""
        if precision is not None:
            as_probability(precision, "precision")
        self.probed = ProbedBackbone(
            backbone_of(model), detector, generation, strict=strict
        )
        self._thresholds = {
            name: head.thresholds(precision) for name, head in detector.heads.items()
        }

    def __repr__(self) -> str:
        """Show the model that the detector was trained on, and its device."""
        trained = self.probed.detector.provenance
        of = "arrays" if trained is None else trained.model
        return f"Scorer({of} on {self.probed.backbone.device})"

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        model: Any = None,
        device: str | None = None,
        dtype: str | None = None,
        strict: bool = True,
        precision: float | None = None,
    ) -> "Scorer":
        """Load the detector of a run and its backbone.

        Args:
          path: run directory.
          model: path of the backbone, if it is not where the run found it; or a
            `Backbone` in memory, or an object that has one as its `backbone`.
          device: device of the backbone, such as "cpu" or "cuda:0"; None takes the
            run's, or the CPU if the run used a GPU and there is none here.
          dtype: type of its weights; None takes the run's, as in the training.
          strict: as for the class.
          precision: as for the class.

        Raises:
          ValueError: the run has no detector yet, or the backbone is a different one.
        """
        from beatrice.extract.run.directory import RunDir, read_manifest

        path = as_path(path, "path")
        read_manifest(path)  # raises if it is no run
        run = RunDir(path)
        detector = Detector.load(run.require(run.detector))
        generation = run.resolve_section(
            "answer", ANSWER_PRESETS, is_recorded=False
        ).generation
        trained = detector.provenance
        assert trained is not None  # a run's detector names its model
        if model is None or isinstance(model, (str, Path)):
            config = run.section("backbone", BackboneConfig)
            model = load_backbone(
                model_path(str(model or trained.model)),
                dtype=_dtype(dtype or trained.dtype),
                device=_device(device, config),
                revision=None if model else trained.commit,
            )
        elif device is not None or dtype is not None:
            raise ValueError(
                "device and dtype are those of the model in memory; give a path to "
                "choose them"
            )
        return cls(model, detector, generation, strict=strict, precision=precision)

    def thresholds(self, setting: Setting) -> Thresholds | None:
        """Return the P at which decisions in a setting begin, and how sure, or None."""
        if setting not in SETTINGS:
            raise argument_error("setting", f"one of {', '.join(SETTINGS)}", setting)
        return self._thresholds.get(OWN_PASS_HEADS[setting])

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return messages as the text that the model reads; ranges refer to it."""
        checked = as_messages(messages, "messages")
        with self.probed.lock:
            return apply_template(self.probed.backbone.tokenizer, checked)

    def load_scorer(self) -> "Scorer":
        """Return this scorer, whose model is loaded."""
        return self

    def answer_batch(self, questions: QuestionBatch) -> list[Score]:
        """Answer questions and return the answers' scores, each with its `text`."""
        requests = self._fitting_requests(questions)
        sampling, is_alone = self._sampling(questions), len(requests) == 1
        scores: list[Score] = []
        reader, n_new = self.probed.reader, sampling.max_new_tokens
        for group in groups_in_memory(reader, requests, n_new):
            scores += self._answer_group(group, sampling, is_alone)
        return scores

    def _answer_group(
        self, requests: Sequence[Request], sampling: SamplingConfig, is_alone: bool
    ) -> list[Score]:
        """Answer questions of one setting, keeping all their signals in memory."""
        answers, reading = self.probed.answer_and_read(requests, sampling)
        return self._score_written(requests, answers, reading, is_alone)

    def _score_written(
        self,
        requests: Sequence[Request],
        answers: Sequence[Answer],
        reading: Reading,
        is_alone: bool,
    ) -> list[Score]:
        """Return the scores of answers that were read while they were written."""
        with self.probed.lock:
            inputs = list(map(self._written, requests, answers))
        scores: dict[int, Score] = {}
        for chosen in self._batches(inputs, BATCH_SIZE):
            of_batch = [inputs[i] for i in chosen]
            done = self._score_batch(of_batch, reading.rows(chosen), is_alone=is_alone)
            scores |= zip(chosen, done, strict=True)
        return [
            dataclasses.replace(
                self._unreadable(prepared) or scores[i], text=answers[i].text
            )
            for i, prepared in enumerate(inputs)
        ]

    def _batches(
        self, inputs: Sequence[ScoringInput], batch_size: int
    ) -> Iterator[list[int]]:
        """Yield indices of answers of one setting, in batches of similar length."""
        probed, sequences = self.probed, [prepared.sequence for prepared in inputs]
        at_once = min(batch_size, probed.rows_at_once(inputs[0].prompt.setting))
        for batch in reading_batches(sequences, probed.config.tokens_per_batch):
            for first in range(0, len(batch), at_once):
                yield batch[first : first + at_once]

    def why_unasked(self, questions: Sequence[str]) -> dict[int, str]:
        """Return, by index, why some questions cannot be asked without passages."""
        self._requests(QuestionBatch(texts=["?"]))  # raises if it can be asked nothing
        reasons: dict[int, str] = {}
        for i, text in enumerate(questions):
            try:
                self._fitting_requests(QuestionBatch(texts=[text]))
            except ValueError as error:
                reasons[i] = str(error)
        return reasons

    def _fitting_requests(self, questions: QuestionBatch) -> list[Request]:
        """Return the requests of questions; raise if one does not fit the window."""
        requests = self._requests(questions)
        n_new = self._sampling(questions).max_new_tokens
        overlong = why_overlong(self.probed.backbone, requests, n_new)
        for i, reason in overlong.items():
            raise ValueError(f"{questions.name_of(i, len(requests))} {reason}")
        return requests

    def stream_question(
        self, questions: QuestionBatch, every: int | None
    ) -> Iterator[StreamedToken | Score]:
        """Answer one question token by token; see `stream`."""
        (request,) = self._fitting_requests(questions)
        if self.probed.why_read_again is not None:
            raise ValueError(
                f"{self.probed.why_read_again}; use `answer`, which reads the whole "
                "answer in a second pass"
            )
        return self._stream(request, self._sampling(questions), every)

    def _stream(
        self, request: Request, sampling: SamplingConfig, every: int | None
    ) -> Iterator[StreamedToken | Score]:
        probed, setting = self.probed, request.setting

        def p_correct(answer: Answer, signals: AnswerSignals) -> float | None:
            prepared = self._written(request, answer, pieces=())
            if why_unreadable(probed.backbone, prepared) is not None:
                return None
            reading = probed.reading([signals], [prepared.sequence])
            scores = _detect(probed.forward, setting, reading.features(setting))
            p = float(scores.p_correct[0])
            return p if np.isfinite(p) else None

        answer, signals = yield from stream_tokens(
            probed, request, sampling, every, p_correct
        )
        reading = probed.reading([signals], [probed.sequence(request, answer)])
        yield from self._score_written([request], [answer], reading, is_alone=True)

    def _sampling(self, questions: QuestionBatch) -> SamplingConfig:
        """Return how tokens are chosen; what is not given is as in training."""
        config = self.probed.config
        return SamplingConfig(
            max_new_tokens=questions.max_new_tokens or config.max_new_tokens,
            stop=config.stop if questions.stop is None else tuple(questions.stop),
            temperature=questions.temperature,
            seed=questions.seed,
        )

    def _requests(self, questions: QuestionBatch) -> list[Request]:
        probed = self.probed
        probed.backbone.require_unchanged()
        tokenizer = probed.backbone.tokenizer
        texts = [None] if questions.texts is None else questions.texts
        prompts: list[PromptTokens] = []
        with probed.lock:
            for text, context in zip(texts, questions.contexts, strict=True):
                given = AnswerToScore(
                    question=text,
                    context=context,
                    messages=questions.messages,
                    answer_ids=(),
                )
                try:
                    prompt = prompt_tokens(tokenizer, probed.template, given)
                except ValueError as error:
                    if len(texts) == 1:
                        raise
                    name = questions.name_of(len(prompts), len(texts))
                    raise ValueError(f"{name}: {error}") from error
                prompts.append(prompt)
        for prompt in prompts[:1]:
            self.require_head(prompt.setting)
        return [
            Request(str(i), prompt.setting, "original", prompt)
            for i, prompt in enumerate(prompts)
        ]

    def _written(
        self, request: Request, answer: Answer, pieces: tuple[str, ...] | None = None
    ) -> ScoringInput:
        """Return an answer that the model has just written, prepared for scoring."""
        prompt, tokenizer = request.prompt, self.probed.backbone.tokenizer
        assert isinstance(prompt, PromptTokens)  # of `_requests`
        if pieces is None:
            pieces = token_texts(tokenizer, answer.token_ids)
        sequence = self.probed.sequence(request, answer)
        return ScoringInput(
            prompt=prompt, answer=answer, pieces=pieces, sequence=sequence
        )

    def why_unreadable(
        self, question: str, context: Sequence[Passage], answer: Answer
    ) -> str | None:
        """Return why an answer that the model has written has no P, or None."""
        questions = QuestionBatch(
            texts=[question], contexts=[context] if context else None
        )
        (request,) = self._requests(questions)
        prepared = self._written(request, answer, pieces=())
        return why_unreadable(self.probed.backbone, prepared)

    def _unreadable(self, prepared: ScoringInput) -> Score | None:
        """Return a score without P if the answer cannot be scored, else None."""
        reason = why_unreadable(self.probed.backbone, prepared)
        return None if reason is None else self._unknown(prepared, reason)

    def _unknown(self, prepared: ScoringInput, reason: str) -> Score:
        warnings = tuple(warn_before(self.probed, prepared))
        return Score(reason=reason, warnings=warnings, tokens=prepared.pieces)

    def score_given(self, given: AnswerToScore) -> Score:
        """Return the score of an answer."""
        self.probed.backbone.require_unchanged()
        return self._score_inputs([self.prepare(given)], 1, is_alone=True)[0]

    def score_rows(self, rows: Sequence[Any], batch_size: int) -> list[Score]:
        """Return the scores of rows; a row that cannot be read gets an `error`."""
        self.probed.backbone.require_unchanged()
        inputs: dict[int, ScoringInput] = {}
        scores: dict[int, Score] = {}
        for i, row in enumerate(rows):
            try:
                inputs[i] = self.prepare(as_answer(row))
            except ValueError as error:
                scores[i] = Score(reason=str(error), error=str(error))
        done = self._score_inputs(list(inputs.values()), batch_size)
        scores |= zip(inputs, done, strict=True)
        return [scores[i] for i in range(len(rows))]

    def prepare(self, given: AnswerToScore) -> ScoringInput:
        """Return the token sequence to score, without running the model."""
        probed = self.probed
        with probed.lock:
            prepared = prepare(
                probed.backbone.tokenizer,
                probed.template,
                given,
                answer_span=probed.answer_span,
                stop_id=probed.trained.stop_id,
            )
        self.require_head(prepared.prompt.setting)
        return prepared

    def require_head(self, setting: Setting) -> None:
        """Check that the probe was fitted on answers of a setting."""
        heads = self.probed.detector.heads
        if OWN_PASS_HEADS[setting] not in heads:
            known = next(name for name, head in OWN_PASS_HEADS.items() if head in heads)
            raise ValueError(
                f"the answer is {setting}, but the probe was fitted only on {known} "
                "answers: score one of those, or fit a probe on both settings"
            )

    def _score_inputs(
        self, inputs: Sequence[ScoringInput], batch_size: int, *, is_alone: bool = False
    ) -> list[Score]:
        scores = {
            i: unknown
            for i, prepared in enumerate(inputs)
            if (unknown := self._unreadable(prepared)) is not None
        }
        score = functools.partial(self._score_batch, is_alone=is_alone)
        for setting in OWN_PASS_HEADS:
            rows = [
                i
                for i, prepared in enumerate(inputs)
                if prepared.prompt.setting == setting and i not in scores
            ]
            of_setting = [inputs[i] for i in rows]
            for batch in self._batches(of_setting, batch_size) if rows else ():
                of_batch = [of_setting[i] for i in batch]
                done = run_fitting(score, of_batch, self._unknown)
                scores |= zip([rows[i] for i in batch], done, strict=True)
        return [scores[i] for i in range(len(inputs))]

    def _score_batch(
        self,
        inputs: Sequence[ScoringInput],
        reading: Reading | None = None,
        *,
        is_alone: bool,
    ) -> Iterator[Score]:
        """Score answers of one setting, in a forward pass unless `reading` is given.

        An answer that the caller scores on its own keeps its signals, for `effects`.
        """
        probed, detector = self.probed, self.probed.detector
        setting = inputs[0].prompt.setting
        if reading is None:
            reading = probed.read_sequences([prepared.sequence for prepared in inputs])
        features, name = reading.features(setting), OWN_PASS_HEADS[setting]
        scores = _detect(self.probed.forward, setting, features)
        outside = warn_after(detector, features, setting)
        doubts = detector.heads[name].evidence.doubts
        dtype = str(probed.backbone.dtype)
        for i, prepared in enumerate(inputs):
            path = reading.signals[i].path
            mixed = warn_of_path(probed.trained, setting, dtype, path)
            warnings = [*warn_before(probed, prepared), *mixed, *outside[i]]
            if not np.isfinite(scores.raw[i]):
                reason, pieces = REASONS["not_finite"], prepared.pieces
                yield Score(reason=reason, warnings=tuple(warnings), tokens=pieces)
                continue
            p_correct = float(scores.p_correct[i])
            decision, reason = self._thresholds[name].decide(p_correct)
            lengths = len(prepared.prompt.ids), len(prepared.pieces)
            surprisal = emissions(reading.signals[i], *lengths)[:, 1]
            values = map(float, scores.encoders[i])
            score = Score(
                p_correct=p_correct,
                raw=float(scores.raw[i]),
                encoders=dict(zip(scores.encoder_names, values, strict=True)),
                decision=decision,
                reason=reason,
                warnings=(*doubts, *warnings),
                tokens=prepared.pieces,
                log_probs=tuple(-float(x) for x in surprisal),
            )
            if is_alone:
                masked = self._masked(setting, features, score)
                score = dataclasses.replace(score, masked=masked)
            yield score

    def _masked(
        self, setting: Setting, features: Features, score: Score
    ) -> Callable[[], tuple[float, ...]]:
        """Return a function that computes `Score.effects` of one answer."""
        # Not the language model, which a score that is kept would keep in memory.
        forward, lock = self.probed.forward, self.probed.lock
        is_literal = self.probed.answer_span == "literal"

        def effects() -> tuple[float, ...]:
            n_tokens, places = len(score.tokens), np.flatnonzero(features.masks[-1][0])
            # A token's signals are those of the position that emits it. A literal span
            # begins one position later, so the first token has no effect on P.
            values = [0.0][:n_tokens] if is_literal else []
            for position in places[: n_tokens - len(values)]:
                answer = features.masks[-1].copy()
                answer[0, position] = False
                without = Features(features.tokens, (*features.masks[:-1], answer))
                with lock:
                    scores = _detect(forward, setting, without)
                values.append(float(score.p_correct or 0.0) - scores.p_correct[0])
            return tuple(map(float, values))

        return effects


def _detect(forward: TorchForward, setting: Setting, features: Features) -> Scores:
    passes: dict[Setting, Features] = {setting: features}
    return forward.score(OWN_PASS_HEADS[setting], passes)


def backbone_of(model: Any) -> Backbone:
    """Return a backbone, given itself or an object with a `backbone`."""
    backbone = getattr(model, "backbone", model)
    if not isinstance(backbone, Backbone):
        raise argument_error(
            "model",
            "a path or Hub id, or a model in memory as "
            "`beatrice.LanguageModel(model, tokenizer)`",
            model,
        )
    return backbone


def _device(device: Any, config: BackboneConfig) -> str:
    """Return the device for a run's model: the one asked for, else the run's own."""
    if device is not None:
        if not isinstance(device, (str, torch.device)):
            raise argument_error(
                "device", "a Torch device, such as 'cpu' or 'cuda:0'", device
            )
        return torch_device(str(device), torch.cuda.device_count())
    if config.device == "cuda" and not torch.cuda.is_available():
        return "cpu"
    return torch_device(config.device, torch.cuda.device_count())


def _dtype(dtype: Any) -> Any:
    """Return the name of a Torch dtype, and anything else as it is."""
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return dtype


def stream_tokens(
    probed: ProbedBackbone,
    request: Request,
    sampling: SamplingConfig,
    every: int | None,
    p_correct: Callable[[Answer, AnswerSignals], float | None],
) -> Generator[StreamedToken, None, tuple[Answer, AnswerSignals]]:
    """Yield an answer's tokens as they are chosen; return the answer and its signals.

    Args:
      probed: the model; other threads may use it between two tokens.
      request: the prompt.
      sampling: how tokens are chosen.
      every: give P of the answer so far to every n-th token; None gives it to none.
        Such a token waits for the next step, which tells how likely an end is there.
      p_correct: returns P of an answer from the answer and its signals.
    """
    tokenizer, stop = probed.backbone.tokenizer, sampling.stop
    stops, n_most = stop_ids(probed.backbone), sampling.max_new_tokens
    usual = probed.trained.stop_id  # the one used when the answer is scored as a text
    stop_id = stops[0] if usual is None else usual
    steps = read_stepwise(
        probed.reader, request, sampling, answer_span=probed.answer_span
    )
    waiting: list[tuple[StreamedToken, str]] = []  # each with the text up to its end
    ids: tuple[int, ...] = ()
    n_shown = 0
    step: WrittenToken | None = None
    is_due = False  # whether P is wanted after the last token
    written: tuple[Answer, AnswerSignals] | None = None
    while True:
        with probed.lock:
            before = step
            try:
                step = next(steps)
            except StopIteration as end:
                written = end.value
            if is_due and before is not None:
                token, text = waiting[-1]
                p_if_ended = p_correct(*before.so_far(stop_id))
                waiting[-1] = dataclasses.replace(token, p_correct=p_if_ended), text
            if written is not None:
                break
            assert step is not None  # there is a new token
            ids = (*ids, step.id)
            # A stop token belongs to no text, though some decode to plain words.
            is_end = step.id in stops
            text = decode_ids(tokenizer, ids[:-1] if is_end else ids)
            is_end |= find_stop(text, stop) is not None
            # After the last token of an answer that is cut off, only the score follows.
            is_due = bool(every) and len(ids) % every == 0 and not is_end
            is_due &= len(ids) < n_most
            p_if_cut = p_correct(*step.so_far(None)) if is_due else None
        p, entropy = float(step.prob[0]), float(step.prob[2])
        token = StreamedToken(text="", p=p, entropy=entropy, p_if_cut=p_if_cut)
        waiting.append((token, text))
        if is_end or len(ids) == n_most or _may_begin(text, stop):
            continue
        ready = waiting[: len(waiting) - is_due]
        waiting = waiting[len(ready) :]
        for token, text in ready:
            shown = text.rstrip(HALF)
            yield dataclasses.replace(token, text=shown[n_shown:])
            n_shown = max(n_shown, len(shown))
    answer, signals = written
    _, text = waiting[-1]  # nothing of an end has been shown yet
    text = text[: find_stop(text, stop)]
    n_left = len(answer.token_ids) - (len(ids) - len(waiting))
    yield from _last_tokens(waiting, text, n_shown, n_left)
    return answer, signals


def _last_tokens(
    waiting: list[tuple[StreamedToken, str]], answer: str, n_shown: int, n_left: int
) -> Iterator[StreamedToken]:
    """Yield the last `n_left` tokens and any stop token, after `n_shown` characters."""
    for index, (token, text) in enumerate(waiting[: n_left + 1]):
        is_last = index in (n_left, len(waiting) - 1)
        shown = answer if is_last else answer[: len(text)]
        if is_stop := index == n_left:
            token = dataclasses.replace(token, p_correct=None, p_if_cut=None)
        yield dataclasses.replace(token, text=shown[n_shown:], is_stop=is_stop)
        n_shown = max(n_shown, len(shown))


def _may_begin(text: str, stop: Sequence[str]) -> bool:
    """Return whether a text may end with the beginning of a stop string."""
    begins = (s[:n] for s in stop for n in range(1, len(s)))
    return bool(stop) and text.endswith((HALF, *begins))
