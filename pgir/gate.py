"""The score as a gate: whether to retrieve and which answer to keep; and PGIR itself.

A gate accepts an answer if the probe trusts it at the precision it was loaded with or,
if the gate has a threshold, if its P reaches that. The threshold of a run is PGIR's
tau, as chosen by `beatrice control` and used in its tables. `run_pgir` runs the whole
loop with a user's retriever, without a run directory.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from beatrice.extract.records import SETTINGS, Passage
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import read_json
from beatrice.jaxprobe.scope import Decision
from beatrice.pgir.arguments import (
    argument_error,
    as_count,
    as_passages,
    as_path,
    as_probability,
    as_text,
    as_texts,
)
from beatrice.pgir.asking import AnswerScorer, Score
from beatrice.pgir.bridge import ProbedBackbone, run_fitting
from beatrice.pgir.controllers.loop import (
    Accept,
    Call,
    ControllerConfig,
    Judge,
    Policy,
    Query,
    Reply,
    Trace,
    TracedDraft,
    Verdict,
    decide,
    detector_judge,
    drafts,
)
from beatrice.pgir.controllers.waves import (
    AnswerService,
    CallJournal,
    Failed,
    Waves,
    open_services,
    showable,
)
from beatrice.pgir.retrievers import UserRetriever
from beatrice.pgir.scorer import Scorer
from beatrice.pgir.stages import DraftJudge
from beatrice.pgir.warnings import REASONS, WARNINGS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A closed-book answer, and whether it is trusted.

    Attributes:
      question: the question as it was asked.
      answer: the answer of the run's backbone; empty if the question cannot be asked.
      p_correct: probability that it is correct, in [0, 1]; None if it cannot be scored.
      decision: "trust" from the gate's threshold on, "distrust" below it, "unknown"
        without a probability; if the gate has no threshold, the score's decision.
      reason: why there is no P: the answer could not be scored, or the model could not
        be asked the question (see `Gate.draft`); None if there is one.
      warnings: the warnings of the answer's score.
    """

    question: str
    answer: str
    p_correct: float | None
    decision: Decision
    reason: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def retrieve(self) -> bool:
        """Whether to retrieve passages, since the answer is not trusted."""
        return self.decision != "trust"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The answer to return.

    Attributes:
      answer: its text.
      p_correct: probability that it is correct, in [0, 1]; None if it has none.
      is_grounded: whether it is the answer written with passages.
      decision: as in `Draft`; unless "trust", the answer is only the better of the two.
      reason: why the grounded answer has no probability (see `Score.reason`), even if
        the draft is kept; None if it has one.
      warnings: the warnings of the grounded answer's score, preceded by one that
        counts the passages that had to be changed or left out, if any.
    """

    answer: str
    p_correct: float | None
    is_grounded: bool
    decision: Decision
    reason: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_trusted(self) -> bool:
        """Whether the answer reaches the threshold."""
        return self.decision == "trust"


class _Policy(msgspec.Struct):
    """The fields of `control.json` used here."""

    tau: float


def _checked(scorer: Any) -> AnswerScorer:
    if not isinstance(scorer, AnswerScorer):
        raise argument_error("scorer", "a Probe, as `beatrice.load(run)`", scorer)
    return scorer


class Gate:
    """Decides from scores when to retrieve; may be called from several threads.

    Args:
      scorer: a probe, or the scorer of a run, see `Scorer.load`.
      threshold: lowest probability at which an answer is trusted, in (0, 1]; None takes
        the scorer's decisions, and is refused if it can trust no closed-book answer.
    """

    def __init__(self, scorer: AnswerScorer, threshold: float | None = None) -> None:
        """Check the scorer and its threshold."""
        self.scorer = _checked(scorer)
        self.threshold = threshold
        if threshold is not None:
            as_probability(threshold, "threshold")
        loaded = scorer.load_scorer()
        loaded.require_head("closed_book")
        if threshold is None:
            _check_trusts_any(loaded)

    def __repr__(self) -> str:
        """Show the scorer and the threshold."""
        limit = "the probe's" if self.threshold is None else self.threshold
        return f"Gate({self.scorer!r}, threshold: {limit})"

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        threshold: float | None = None,
        model: Any = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> "Gate":
        """Open the gate of a finished run.

        Args:
          path: the run's folder.
          threshold: as for `Gate`; None takes PGIR's, chosen by `beatrice control`.
          model: as for `Scorer.load`, like the remaining arguments.
          device: device of the backbone.
          dtype: type of its weights.
        """
        path = as_path(path, "path")
        if threshold is None:
            run = RunDir(path)
            again = "run `beatrice control`, or give a threshold"
            threshold = read_json(run.control / "control.json", _Policy, again).tau
            if (gap := run.stage_gap("control")) is not None:
                raise ValueError(
                    f"the threshold of {path} does not fit the run's contents "
                    f"({gap}); run `beatrice control` again, or give a threshold"
                )
        threshold = as_probability(threshold, "threshold")  # before weights are loaded
        scorer = Scorer.load(path, model=model, device=device, dtype=dtype)
        return cls(scorer, threshold)

    def draft(self, questions: Sequence[str]) -> list[Draft]:
        """Answer questions closed-book and decide for each whether to retrieve.

        A question that the model cannot be asked (it is empty, too long for the window
        or the memory, or has a control token) gets no answer, and needs retrieval.
        """
        questions = as_texts(questions, "questions")
        reasons = self.scorer.load_scorer().why_unasked(questions)
        fitting = [q for i, q in enumerate(questions) if i not in reasons]
        answer, fail = self.scorer.answer, lambda _, reason: Score(reason=reason)
        answered = iter(run_fitting(answer, fitting, fail))
        scores = [
            Score(reason=reasons[i]) if i in reasons else next(answered)
            for i in range(len(questions))
        ]
        return [
            Draft(
                question=question,
                answer=score.text or "",
                p_correct=score.p_correct,
                decision=self._decide(score, score.text or ""),
                reason=score.reason if score.p_correct is None else None,
                warnings=score.warnings,
            )
            for question, score in zip(questions, scores, strict=True)
        ]

    def should_retrieve(self, question: str) -> bool:
        """Return whether the closed-book answer to a question is not trusted."""
        return self.draft([as_text(question, "question")])[0].retrieve

    def keep(self, draft: Draft, grounded: str, passages: Any = ()) -> Kept:
        """Return the draft if it is trusted, else the grounded answer if that one is.

        If neither is trusted, return the one with the higher P; a tie keeps the draft,
        and an answer without P counts as 0. A blank draft is replaced unless the
        grounded answer is blank too.

        Args:
          draft: the draft of the same question, see `draft`.
          grounded: an answer that any model wrote with passages; a blank one has no P.
          passages: those passages, as in `Scorer.score`; without any, the answer is
            scored as a closed-book one.
        """
        if not isinstance(draft, Draft):
            raise argument_error("draft", "a Draft, as returned by `draft`", draft)
        context = as_passages(passages, "passages")
        score = Score(reason="the grounded answer is empty; give at least one word")
        changes: list[str] = []
        if as_text(grounded, "grounded").strip():
            shown, changes = self._readable(draft.question, context)
            score = Score(
                reason="every passage is empty; give one with a word, or none"
            )
            if shown or not context:  # else it would be scored as a closed-book answer
                setting = "with_context" if shown else "closed_book"
                self.scorer.load_scorer().require_head(setting)
                # `score` would raise for a bad answer, and the draft would be lost.
                row = (draft.question, grounded, shown)
                (score,) = self.scorer.score_many([row])
        decision = self._decide(score, grounded)
        is_better = (score.p_correct or 0.0) > (draft.p_correct or 0.0)
        if not draft.answer.strip():
            is_better = bool(grounded.strip())
        is_grounded = draft.decision != "trust" and (decision == "trust" or is_better)
        return Kept(
            answer=grounded if is_grounded else draft.answer,
            p_correct=score.p_correct if is_grounded else draft.p_correct,
            is_grounded=is_grounded,
            decision=decision if is_grounded else draft.decision,
            reason=score.reason if score.p_correct is None else None,
            warnings=(*changes, *score.warnings),
        )

    def _readable(
        self, question: str, passages: Sequence[Passage]
    ) -> tuple[list[Passage], list[str]]:
        """Return passages as a prompt can hold them, and a warning if any was changed.

        An error here would waste an answer that was already paid for.
        """
        probed = self.scorer.load_scorer().probed
        filled = [passage for passage in passages if passage.text.strip()]
        shown = _shown(probed, question, filled)
        n_empty = len(passages) - len(filled)
        n_split = sum(old != new for old, new in zip(filled, shown, strict=True))
        if not n_empty and not n_split:
            return shown, []
        counts = {"n": len(passages), "n_empty": n_empty, "n_split": n_split}
        return shown, [WARNINGS["changed_passages"].format(**counts)]

    def _decide(self, score: Score, answer: str) -> Decision:
        if score.p_correct is not None and not answer.strip():
            return "distrust"  # a blank answer is useless, whatever its P
        if self.threshold is None:
            return score.decision
        if score.p_correct is None:
            return "unknown"
        return "trust" if score.p_correct >= self.threshold else "distrust"


def _check_trusts_any(scorer: Scorer) -> None:
    """Check that the probe's own decisions can trust any closed-book answer."""
    thresholds = scorer.thresholds("closed_book")
    if thresholds is None or thresholds.trust.p_correct is None:
        why = "at the precision it was loaded with"
        what = "load it with a lower precision"
        if thresholds is not None and thresholds.trust.doubt is not None:
            why, what = f"({thresholds.trust.doubt})", "fit it on more answers"
        raise ValueError(
            f"the probe trusts no closed-book answer {why}, so every question would "
            f"need retrieval; {what}, or give a threshold"
        )


class FlashRagJudger:
    """A judger for FlashRAG's ConditionalPipeline (flashrag/judger/judger.py, 1ee5249).

    The pipeline creates its judger itself, so set
    `flashrag.pipeline.pipeline.get_judger = FlashRagJudger` before creating one.
    `config["judger_config"]` needs a `run`, and may have a `threshold`. The run's
    backbone should be the pipeline's generator, since its knowledge is judged. The
    pipeline's `run` raises a KeyError if all verdicts are equal: then call the `run` of
    its `sequential_pipeline` if all need retrieval, and that one's `naive_run` if none.

    Args:
      config: FlashRAG's config, or a similar mapping.
      gate: an open gate to use instead of the one that the config names.
    """

    def __init__(self, config: Mapping[str, Any], gate: Gate | None = None) -> None:
        """Open the gate."""
        if not hasattr(config, "__getitem__") or isinstance(config, (str, Sequence)):
            raise argument_error(
                "config", "a mapping, such as FlashRAG's Config", config
            )
        self.name = config["judger_name"] if "judger_name" in config else "beatrice"
        if gate is None:
            settings = config["judger_config"] if "judger_config" in config else {}
            if not isinstance(settings, Mapping) or "run" not in settings:
                raise argument_error(
                    "judger_config", "a mapping that names a 'run'", settings
                )
            gate = Gate.load(settings["run"], threshold=settings.get("threshold"))
        self.gate = gate

    def judge(self, dataset: Any) -> list[bool]:
        """Return for every question whether to retrieve.

        Args:
          dataset: FlashRAG's Dataset, a list of questions, or one question.
        """
        if isinstance(dataset, str):
            dataset = [dataset]
        questions = as_texts(getattr(dataset, "question", dataset), "dataset")
        return [draft.retrieve for draft in self.gate.draft(questions)]


@contextlib.contextmanager
def _pipelines() -> Iterator[None]:
    """Say how to install a missing package of the extra `pipelines`."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{error}: pip install 'beatrice-probe[pipelines]'"
        raise ImportError(text, name=error.name) from error


def langgraph_app(
    gate: Gate,
    retrieve: Callable[[str], Sequence[Any]],
    generate: Callable[[str, Sequence[Any]], str],
) -> Any:
    """Return a compiled LangGraph graph that retrieves unless the draft is trusted.

    Args:
      gate: an open gate.
      retrieve: returns passages for a question.
      generate: returns an answer to a question with passages.

    Returns:
      A graph whose `app.invoke({"question": ...})` gives `answer`, `p_correct`, the
      `passages` that were retrieved, and the `reason` of `Kept`, or else of `Draft`.
    """
    with _pipelines():
        from langgraph.graph import END, START, StateGraph
        from typing_extensions import TypedDict  # Pydantic needs it before Python 3.12

    class Question(TypedDict):
        question: str

    class State(Question, total=False):
        draft: dict[str, Any]  # a checkpoint should hold no class of ours
        answer: str
        p_correct: float | None
        reason: str | None
        passages: Sequence[Any]

    def write(state: dict) -> dict:
        (draft,) = gate.draft([state["question"]])
        # A thread's state may still have the passages of its previous question.
        facts = {"reason": draft.reason, "passages": []}
        answer = {"answer": draft.answer, "p_correct": draft.p_correct}
        return {"draft": dataclasses.asdict(draft), **facts, **answer}

    def ground(state: dict) -> dict:
        passages = retrieve(state["question"])
        grounded = generate(state["question"], passages)
        best = gate.keep(Draft(**state["draft"]), grounded, passages)
        answer = {"answer": best.answer, "p_correct": best.p_correct}
        return {"passages": passages, "reason": best.reason, **answer}

    def next_node(state: dict) -> str:
        return "ground" if Draft(**state["draft"]).retrieve else END

    graph = StateGraph(State, input_schema=Question)  # the arguments as a tool
    graph.add_node("write", write)
    graph.add_node("ground", ground)
    graph.add_edge(START, "write")
    graph.add_conditional_edges("write", next_node, ["ground", END])  # both are drawn
    graph.add_edge("ground", END)
    return graph.compile()


def llama_index_engine(gate: Gate, engine: Any) -> Any:
    """Return a LlamaIndex query engine that asks `engine` unless the draft is trusted.

    Args:
      gate: an open gate.
      engine: any query engine. Its answer is kept if it scores better and has a source
        node; then so is its metadata. `reason` there is that of `Kept` or `Draft`.
    """
    with _pipelines():
        from llama_index.core.base.response.schema import (
            AsyncStreamingResponse,
            Response,
        )
        from llama_index.core.query_engine import CustomQueryEngine
        from llama_index.core.schema import MetadataMode

    def draft_response(draft: Draft) -> Response:
        facts = {"p_correct": draft.p_correct, "reason": draft.reason}
        return Response(response=draft.answer, metadata={**facts, "is_grounded": False})

    def kept_response(draft: Draft, reply: Any) -> Response:
        mode = MetadataMode.LLM  # a node as the engine's model reads it
        passages = [node.get_content(metadata_mode=mode) for node in reply.source_nodes]
        text = str(reply)  # this reads a stream to its end
        # A reply without words has the text "None", one without nodes "Empty Response".
        words = getattr(reply, "response", getattr(reply, "response_txt", None))
        grounded = text if words and passages else ""
        best = gate.keep(draft, grounded, passages)
        return Response(
            response=best.answer,
            source_nodes=reply.source_nodes if best.is_grounded else [],
            metadata={
                **((reply.metadata or {}) if best.is_grounded else {}),
                "p_correct": best.p_correct,
                "is_grounded": best.is_grounded,
                "reason": best.reason,
            },
        )

    class GatedEngine(CustomQueryEngine):
        def custom_query(self, query_str: str) -> Response:
            (draft,) = gate.draft([query_str])
            if not draft.retrieve:
                return draft_response(draft)
            return kept_response(draft, engine.query(query_str))

        async def acustom_query(self, query_str: str) -> Response:
            (draft,) = await asyncio.to_thread(gate.draft, [query_str])
            if not draft.retrieve:
                return draft_response(draft)
            reply = await engine.aquery(query_str)
            if isinstance(reply, AsyncStreamingResponse):  # only this loop can read it
                reply = await reply.get_response()
            return await asyncio.to_thread(kept_response, draft, reply)

    return GatedEngine()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagAnswer:
    """PGIR's answer to one question.

    Attributes:
      question: the question as it was asked.
      answer: the draft that is returned; None if nothing was written.
      p_correct: its probability of being correct, in [0, 1]; None if nothing was
        written, if its judge failed, or if no draft could be scored.
      is_trusted: whether `p_correct` reaches the threshold; else it is the highest.
      passages: the passages that the model was shown; none for a closed-book draft.
      n_generations: number of drafts written.
      reason: why the detector gives the draft no P: it is empty, or as in `Draft`.
      error: why no further draft was written or judged: a search or a judge failed, a
        prompt does not fit the model's window or memory, or none can hold the question.
    """

    question: str
    answer: str | None = None
    p_correct: float | None = None
    is_trusted: bool = False
    passages: tuple[Passage, ...] = ()
    n_generations: int = 0
    reason: str | None = None
    error: str | None = None


def run_pgir(
    scorer: AnswerScorer,
    questions: Sequence[str],
    retriever: Any,
    *,
    threshold: float,
    budget: int = 2,
    n_passages: int = 3,
    query: Query = "draft",
    judge: DraftJudge | None = None,
) -> list[RagAnswer]:
    """Answer questions with PGIR, in batches (see `pgir.controllers.loop`).

    Args:
      scorer: a probe, such as `beatrice.load(run)`.
      questions: texts that are not empty.
      retriever: your retriever, see `UserRetriever`.
      threshold: lowest P at which a draft is returned at once, in (0, 1].
      budget: most retrievals for a question.
      n_passages: passages shown after each retrieval.
      query: what to search with, see `ControllerConfig`.
      judge: replaces the detector: a callable of question, answer and passages that
        returns P(correct) in [0, 1].

    Raises:
      ValueError: an argument has the wrong type, a probe of one setting has no `judge`,
        or the retriever or judge gives a wrong value or any error except an OSError.
    """
    loaded = _checked(scorer).load_scorer()
    probed = loaded.probed
    fitted = [x for x in SETTINGS if x in probed.detector.heads]
    if judge is None and len(fitted) < len(SETTINGS):
        raise ValueError(
            f"scorer: the probe was fitted only on {' and '.join(fitted)} answers, but "
            "drafts are written without passages and with them; fit a probe on both "
            "settings, or give a judge"
        )
    texts = as_texts(questions, "questions")
    policy = Policy(
        threshold=as_probability(threshold, "threshold"),
        budget=as_count(budget, "budget"),
    )
    n_passages = as_count(n_passages, "n_passages")
    config = ControllerConfig(
        n_passages=n_passages,
        max_budget=policy.budget,
        depth=max(ControllerConfig.depth, n_passages * policy.budget),
        query=query,
    )
    cached, journal = UserRetriever(retriever), CallJournal(None, "")
    answering = AnswerService(probed, cached.passages, journal)
    waves = Waves(open_services(answering, cached), journal)
    detector = _DetectorJudge(loaded, answering)
    draft_judge: Judge = detector.judge
    if judge is not None:
        draft_judge = waves.add_judge("judge", judge)
    traces: list[list[TracedDraft]] = [[] for _ in texts]
    plans = [
        drafts(text, config, draft_judge, _recording(trace, policy.accepts))
        for text, trace in zip(texts, traces, strict=True)
    ]
    results = waves.run("pgir", plans)
    return [
        dataclasses.replace(
            _answer_of(text, tuple(trace), policy, detector),
            n_generations=int(result.cost.generations),
            error=result.reason if isinstance(result, Failed) else None,
        )
        for text, trace, result in zip(texts, traces, results, strict=True)
    ]


def _shown(
    probed: ProbedBackbone, question: str, passages: Sequence[Passage]
) -> list[Passage]:
    with probed.lock:
        return showable(probed.backbone.tokenizer, probed.template, question, passages)


class _DetectorJudge:
    """Judges drafts by the detector; P is NaN for a draft that it cannot score.

    `reasons` says why, by question and the passages that were shown.
    """

    def __init__(self, scorer: Scorer, answering: AnswerService) -> None:
        self._scorer, self.answering = scorer, answering
        self.reasons: dict[tuple[str, tuple[int, ...]], str] = {}

    def judge(self, question: str, passages: tuple[int, ...], reply: Reply) -> Verdict:
        p_correct, raw = yield from detector_judge(question, passages, reply)
        probed, shown = self._scorer.probed, passages[: reply.n_shown]
        context = [self.answering.passages[index] for index in shown]
        context = _shown(probed, question, context)
        answer = self.answering.answer_of(Call("answer", question, passages), reply)
        reason = self._scorer.why_unreadable(question, context, answer)
        if reason is None and not math.isfinite(raw):
            reason = REASONS["not_finite"]
        if not answer.text.strip():
            reason = "the model's answer is empty"  # useless, whatever its P
        if reason is None:
            return p_correct, raw
        self.reasons[question, shown] = reason
        return math.nan, raw


def _recording(trace: list[TracedDraft], accept: Accept) -> Accept:
    """Add each draft to a trace, so that a failed question can return its best one."""

    def accept_and_record(draft: TracedDraft) -> bool:
        trace.append(draft)
        return accept(draft)

    return accept_and_record


def _answer_of(
    question: str, trace: Trace, policy: Policy, detector: _DetectorJudge
) -> RagAnswer:
    """Return the answer that a policy chooses among a question's drafts."""
    answering = detector.answering
    if not trace:  # the first draft was not judged, or not written
        first = answering.journal.find(Call("answer", question))
        return RagAnswer(question=question, answer=first and first.value.text)
    decision = decide(trace, policy)
    draft = decision.draft
    return RagAnswer(
        question=question,
        answer=draft.answer,
        p_correct=None if math.isnan(draft.p_correct) else draft.p_correct,
        is_trusted=decision.is_accepted,
        reason=detector.reasons.get((question, draft.passages)),
        passages=tuple(answering.passages[index] for index in draft.passages),
    )
