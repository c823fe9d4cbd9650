"""An answer's tokens as they are written, with P of the answer so far.

A stop string may be several tokens. Those that could begin one are held back until they
do not, or until the answer has ended before them.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence

from beatrice.extract.generate.generator import SamplingConfig, decode_ids, find_stop
from beatrice.extract.generate.local import stop_ids
from beatrice.extract.generate.requests import Request
from beatrice.extract.records import Answer
from beatrice.extract.signals.decode import WrittenToken, read_stepwise
from beatrice.extract.signals.reader import AnswerSignals
from beatrice.pgir.bridge import ProbedBackbone

_HALF = "\N{REPLACEMENT CHARACTER}"  # a character whose other bytes are to come


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedToken:
    """One token of an answer that is being written.

    Attributes:
      text: what it adds to the answer, which may be nothing: one character can take
        several tokens.
      p: its probability under the model, before any temperature, in [0, 1].
      entropy: of the distribution that it was chosen from, in nats.
      is_stop: whether it ended the answer; its text is what stands before a stop
        string.
      p_correct: calibrated P(the answer is correct if it ends behind this token); None
        where it was not asked for.
      p_if_cut: the same of the answer read as one that is cut here, without a last
        token's signals. No probability: a probe is fitted on whole answers, so it is
        too low. It ranks answers that still go on, early, as well as `p_correct` or
        better.
    """

    text: str
    p: float
    entropy: float
    is_stop: bool = False
    p_correct: float | None = None
    p_if_cut: float | None = None


def stream_tokens(
    probed: ProbedBackbone,
    request: Request,
    sampling: SamplingConfig,
    every: int | None,
    p_correct: Callable[[Answer, AnswerSignals], float | None],
) -> Generator[StreamedToken, None, tuple[Answer, AnswerSignals]]:
    """Yield an answer's tokens as they are chosen; return it with its signals.

    Args:
      probed: the model; between two tokens others may use it.
      request: the prompt.
      sampling: how tokens are chosen.
      every: so many tokens apart is P of the answer so far; None is nowhere. Such a
        token comes with the next one's step, which tells how likely its end is.
      p_correct: P of an answer, by what was read of it.
    """
    tokenizer, stop = probed.backbone.tokenizer, sampling.stop
    stops, n_most = stop_ids(probed.backbone), sampling.max_new_tokens
    usual = probed.trained.stop_id  # as where the answer is scored as a text
    stop_id = stops[0] if usual is None else usual
    steps = read_stepwise(
        probed.reader, request, sampling, answer_span=probed.answer_span
    )
    waiting: list[tuple[StreamedToken, str]] = []  # with the text that ends in each
    ids: tuple[int, ...] = ()
    n_shown = 0
    step: WrittenToken | None = None
    is_due = False  # whether P is wanted behind the last token
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
                p_if_ended = p_correct(*before.ended(stop_id))
                waiting[-1] = dataclasses.replace(token, p_correct=p_if_ended), text
            if written is not None:
                break
            assert step is not None  # a token came
            ids = (*ids, step.id)
            text = decode_ids(tokenizer, ids)
            is_end = step.id in stops or find_stop(text, stop) is not None
            # The last token of an answer that is cut has no next; there is the score.
            is_due = bool(every) and len(ids) % every == 0 and not is_end
            is_due &= len(ids) < n_most
            p_if_cut = p_correct(*step.cut()) if is_due else None
        p, entropy = float(step.prob[0]), float(step.prob[2])
        token = StreamedToken(text="", p=p, entropy=entropy, p_if_cut=p_if_cut)
        waiting.append((token, text))
        if is_end or len(ids) == n_most or _may_begin(text, stop):
            continue
        ready = waiting[: len(waiting) - is_due]
        waiting = waiting[len(ready) :]
        for token, text in ready:
            shown = text.rstrip(_HALF)
            yield dataclasses.replace(token, text=shown[n_shown:])
            n_shown = max(n_shown, len(shown))
    answer, signals = written
    text = decode_ids(tokenizer, ids)
    text = text[: find_stop(text, stop)]
    n_left = len(answer.token_ids) - (len(ids) - len(waiting))
    yield from _last_tokens(waiting, text, n_shown, n_left)
    return answer, signals


def _last_tokens(
    waiting: list[tuple[StreamedToken, str]], answer: str, n_shown: int, n_left: int
) -> Iterator[StreamedToken]:
    """Yield the tokens that waited for the end of the answer.

    Args:
      waiting: each with the text that ends in it.
      answer: its whole text.
      n_shown: characters of it that went out before.
      n_left: how many of these tokens are of the answer; the one behind ended it.
    """
    for index, (token, text) in enumerate(waiting[: n_left + 1]):
        is_last = index in (n_left, len(waiting) - 1)
        shown = answer if is_last else answer[: len(text)]
        if is_stop := index == n_left:
            token = dataclasses.replace(token, p_correct=None, p_if_cut=None)
        yield dataclasses.replace(token, text=shown[n_shown:], is_stop=is_stop)
        n_shown = max(n_shown, len(shown))


def _may_begin(text: str, stop: Sequence[str]) -> bool:
    """Return whether a text ends in what one of the strings begins with."""
    return any(text.endswith(s[:n]) for s in stop for n in range(1, len(s)))
