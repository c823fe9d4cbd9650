"""What serves the calls of controllers: the retriever, and the probed backbone."""

import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from beatrice.extract.generate.backends.local import TransformersGenerator
from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.prompts import build_prompt, escape_control_tokens
from beatrice.extract.generate.requests import Request
from beatrice.extract.generate.templates import PromptTemplate
from beatrice.extract.records import Answer, Passage, Setting
from beatrice.extract.run.files import sha256_json
from beatrice.extract.signals.batch import Signals
from beatrice.pgir.border import refuse
from beatrice.pgir.bridge import ROWS, ProbedBackbone, Reading
from beatrice.pgir.controllers.calls import Call, Cost, Reply, Scored
from beatrice.pgir.controllers.waves import Failed, Journal, Service
from beatrice.pgir.retrieval.retrievers import Bm25Retriever, RetrievalFailed, Retriever

_MOST_CACHED = 2 * ROWS[-1]  # closed-book answers; a group has half of them


def _as_tuple(ranking: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(place) for place in ranking)


class Searching:
    """Serves "search": the ranking of a query, indices into the corpus."""

    def __init__(self, retriever: Retriever) -> None:
        """Take the retriever; an error of the connection fails the query alone."""
        self._retriever = retriever

    def batches(
        self, calls: Sequence[Call], done: Collection[int]
    ) -> Iterator[list[tuple[int, tuple[int, ...] | Failed]]]:
        """Yield the rankings of one depth together; see `Service`."""
        for depth in sorted({call.n for call in calls}):
            places = [i for i, c in enumerate(calls) if c.n == depth and i not in done]
            if not places:
                continue
            try:
                texts = [calls[i].text for i in places]
                rankings = dict(enumerate(self._retriever.search(texts, depth)))
                reasons: Mapping[int, str] = {}
            except RetrievalFailed as error:  # of some queries; the others are there
                rankings, reasons = error.rankings, error.reasons
            except OSError as error:  # a server that is down or slow
                rankings, reasons = {}, dict.fromkeys(range(len(texts)), str(error))
            yield [
                (
                    i,
                    Failed(reasons[n]) if n in reasons else _as_tuple(rankings[n]),
                )
                for n, i in enumerate(places)
            ]

    def cost(self, call: Call, value: tuple[int, ...]) -> Cost:
        """Return what a search costs."""
        return Cost(retrievals=1)


class Answering:
    """Serves "answer": a greedy answer under the run's own template, for everyone.

    Attributes:
      probed: the backbone.
      passages: the corpus.
      escaped: indices of passages that hold control tokens of the model, which no
        prompt can; a blank parts them.
    """

    def __init__(self, probed: ProbedBackbone, passages: Sequence[Passage]) -> None:
        """Take the backbone and the corpus."""
        self.probed = probed
        self.passages = passages
        self.escaped: set[int] = set()
        self._sampling = SamplingConfig(
            max_new_tokens=probed.config.max_new_tokens, stop=probed.config.stop
        )
        self.generator = TransformersGenerator(
            backbone=probed.backbone, tokens_per_batch=probed.config.tokens_per_batch
        )

    def request(self, call: Call) -> tuple[Request, int]:
        """Return a call's prompt, and how many of its passages are in it.

        The last ones are left out until it fits the model's window; that all of a
        question's first passages do not fit is an error of whoever made the run.
        """
        setting = "with_context" if call.passages else "closed_book"
        window = self.probed.backbone.max_length
        for n_shown in range(len(call.passages), -1, -1):
            request = self._request(setting, call.text, call.passages[:n_shown])
            n_tokens = len(request.prompt.ids) + self._sampling.max_new_tokens
            if window is None or n_tokens <= window or n_shown <= 1:
                return request, n_shown
        raise AssertionError("the loop ends at no passage")

    def _request(
        self, setting: Setting, question: str, places: Sequence[int]
    ) -> Request:
        """Return the prompt of a question with passages, in which they can stand."""
        context = [self.passages[place] for place in places]
        try:
            return self.probed.requests(setting, [question], [context])[0]
        except ValueError:
            for i, place in enumerate(places):
                escaped = escape_passage(self.probed.backbone.tokenizer, context[i])
                if escaped != context[i]:
                    self.escaped.add(place)
                    context[i] = escaped
            return self.probed.requests(setting, [question], [context])[0]

    def answered(self, call: Call, reply: Reply) -> Answer:
        """Return a call's answer as a record, for whoever reads its signals."""
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

    def batches(
        self, calls: Sequence[Call], done: Collection[int]
    ) -> Iterator[list[tuple[int, Reply]]]:
        """Yield batches of answers; see `Service`."""
        asked = [self.request(call) for call in calls]
        prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r, _ in asked]
        with self.probed.lock:
            found = self.generator.batches(prompts, self._sampling, done)
            for batch in found:
                yield [
                    (
                        i,
                        Reply(
                            text=written.text,
                            token_ids=written.token_ids,
                            stop_id=written.stop_id,
                            log_probs=written.log_probs,
                            n_prompt_tokens=written.n_prompt_tokens,
                            n_shown=asked[i][1],
                        ),
                    )
                    for i, written in batch
                ]

    def cost(self, call: Call, value: Reply) -> Cost:
        """Return what an answer costs."""
        n_tokens = value.n_prompt_tokens + len(value.log_probs)
        return Cost(generations=1, sequences=1, tokens=n_tokens)


def escape_passage(tokenizer: Any, passage: Passage) -> Passage:
    """Return a passage whose title and text hold no control token of a model."""
    title, text = (
        escape_control_tokens(tokenizer, words)
        for words in (passage.title, passage.text)
    )
    return msgspec.structs.replace(passage, title=title, text=text)


def showable(
    tokenizer: Any,
    template: PromptTemplate,
    question: str,
    passages: Sequence[Passage],
) -> list[Passage]:
    """Return a question's passages as its prompt can hold them, see `escape_passage`.

    They are as they were wherever a prompt can be made of them.
    """
    try:
        build_prompt(tokenizer, template, question, passages)
    except ValueError:
        return [escape_passage(tokenizer, passage) for passage in passages]
    return list(passages)


class Scoring:
    """Serves "score": the calibrated detector on answers that were given.

    With context it reads the closed-book answer to the question too, whose signals
    are in memory from when that was scored. A run that goes on reads them again,
    together with the same others, so that they are rounded as before.
    """

    def __init__(self, answering: Answering, journal: Journal) -> None:
        """Take what made the answers, and where they are kept."""
        self._answering = answering
        self._journal = journal
        self._closed_book: dict[str, tuple[Signals, np.ndarray]] = {}

    def _read(self, calls: Sequence[Call]) -> Reading:
        answers = []
        for call in calls:
            asked = msgspec.structs.replace(call, kind="answer")
            answers.append(self._answering.answered(asked, self._journal.value(asked)))
        return self._answering.probed.read(answers)

    def _keep(self, calls: Sequence[Call], reading: Reading) -> None:
        """Keep the signals of closed-book answers for the rounds that follow."""
        texts = (call.text for call in calls)
        pairs = zip(reading.signals, reading.spans, strict=True)
        self._closed_book |= dict(zip(texts, pairs, strict=True))

    def _closed_book_of(self, calls: Sequence[Call]) -> Reading:
        for call in calls:
            if call.text not in self._closed_book:
                beside = self._journal.beside(Call("score", call.text))
                beside = [other for other in beside if not other.passages]
                self._keep(beside, self._read(beside))
        found = [self._closed_book[call.text] for call in calls]
        return Reading([s for s, _ in found], np.stack([spans for _, spans in found]))

    def batches(
        self, calls: Sequence[Call], done: Collection[int]
    ) -> Iterator[list[tuple[int, Scored]]]:
        """Yield batches of scores; see `Service`."""
        probed = self._answering.probed
        if len(self._closed_book) > _MOST_CACHED:
            self._closed_book.clear()
        for has_context in (False, True):
            places = [i for i, c in enumerate(calls) if bool(c.passages) == has_context]
            for first in range(0, len(places), ROWS[-1]):
                batch = places[first : first + ROWS[-1]]
                if all(i in done for i in batch):
                    continue
                own = [calls[i] for i in batch]
                reading = self._read(own)
                if has_context:
                    closed_book = self._closed_book_of(own)
                    scores = probed.score_with_context(reading, closed_book)
                else:
                    self._keep(own, reading)
                    scores = probed.score_closed_book(reading)
                pairs = zip(scores.p_correct, scores.raw, strict=True)
                yield [
                    (i, Scored(float(p), float(raw)))
                    for i, (p, raw) in zip(batch, pairs, strict=True)
                ]

    def cost(self, call: Call, value: Scored) -> Cost:
        """Return what a score costs: one pass over the answer."""
        return Cost(forwards=1)


DraftJudge = Callable[[str, str, Sequence[Passage]], float]
JUDGES = "beatrice.draft_judges"  # the group of entry points


class Judging:
    """Serves "judge": what judges of one's own say of an answer.

    A judge is called with the question, the answer and the passages that were shown,
    and returns P(the answer is correct). An OSError of it fails the question, which
    the next run tries again.

    Attributes:
      judges: by the number that calls name them by.
    """

    def __init__(self, answering: Answering, journal: Journal) -> None:
        """Take what made the answers, and where they are kept."""
        self._answering, self._journal = answering, journal
        self.judges: dict[int, DraftJudge] = {}

    def add(self, name: str, judge: DraftJudge) -> int:
        """Add a judge; return its number, which depends on its name alone."""
        if not callable(judge):
            refuse(name, "a callable of question, answer and passages", judge)
        number = int(sha256_json(name)[:12], 16)
        self.judges[number] = judge
        return number

    def batches(
        self, calls: Sequence[Call], done: Collection[int]
    ) -> Iterator[list[tuple[int, Scored | Failed]]]:
        """Yield one verdict at a time; see `Service`."""
        for i, call in enumerate(calls):
            if i not in done:
                yield [(i, self._judge(call))]

    def _judge(self, call: Call) -> Scored | Failed:
        reply = self._journal.value(Call("answer", call.text, call.passages))
        passages = [self._answering.passages[place] for place in call.passages]
        try:
            p_correct = self.judges[call.n](call.text, reply.text, passages)
        except OSError as error:
            return Failed(str(error))
        # Whatever a person's own code raises is a mistake in that code.
        except Exception as error:
            raise ValueError(
                f"the judge fails ({type(error).__name__}): {error}"
            ) from error
        is_number = isinstance(p_correct, numbers.Real)
        if not is_number or not 0 <= p_correct <= 1:
            refuse("the judge", "a probability in [0, 1]", p_correct)
        return Scored(float(p_correct), float(p_correct))

    def cost(self, call: Call, value: Scored) -> Cost:
        """Return what it costs here; what a judge asks elsewhere is its own account."""
        return Cost()


def open_services(
    answering: Answering,
    passages: Sequence[Passage],
    journal: Journal,
    retriever: Retriever | None = None,
) -> dict[str, Service]:
    """Return what serves the calls that need no training.

    Args:
      answering: the backbone.
      passages: the corpus.
      journal: where calls are kept.
      retriever: ranks the passages; None takes BM25.
    """
    return {
        "search": Searching(retriever or Bm25Retriever(passages)),
        "answer": answering,
        "score": Scoring(answering, journal),
        "judge": Judging(answering, journal),
    }
