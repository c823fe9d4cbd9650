"""An answer as a model reads it: ids, targets and spans. Nothing here loads Torch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from beatrice.extract.records import Answer, AnswerSpan
from beatrice.extract.store.spec import Spans


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One teacher-forced example."""

    ids: np.ndarray  # `[n_tokens]` int64, prompt and answer without the stop token
    # `[n_tokens]` int64, the next token at each position. The last is the stop token;
    # if the answer was cut, it is any id, and its position is outside the answer span.
    targets: np.ndarray
    # `[3, 2]` int64, absolute and half-open, in the order context, question, answer; an
    # empty span has start == stop.
    spans: np.ndarray

    def __post_init__(self) -> None:
        """Check the lengths and the order of the spans."""
        n_tokens = len(self.ids)
        if n_tokens == 0 or self.ids.shape != self.targets.shape:
            raise ValueError(
                "a sequence needs ids and targets of the same length above zero, "
                f"found {self.ids.shape} and {self.targets.shape}"
            )
        edges = self.spans.reshape(-1)
        if edges[0] < 0 or edges[-1] > n_tokens or (np.diff(edges) < 0).any():
            raise ValueError(
                "spans must be half-open and ordered context, question, answer within "
                f"{n_tokens} tokens, found {self.spans.tolist()}"
            )

    def behind(self, n_tokens: int) -> "TokenSequence":
        """Return the sequence without its first tokens, which must be in no span."""
        ids, targets = self.ids[n_tokens:], self.targets[n_tokens:]
        return TokenSequence(ids=ids, targets=targets, spans=self.spans - n_tokens)


class Reader(Protocol):
    """Reads signals, as `extract.signals.reader.SignalReader` does.

    An optional `is_written(sequence)` returns whether an answer was read while written.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Return the entries of the resid axis that are read (0: the embedding)."""
        ...

    @property
    def hidden_spans(self) -> Spans:
        """Return the tokens whose hidden states are read; other families read all."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Return what values depend on besides the answers: model, dtype (as JSON)."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of one token's reading, per family."""
        ...

    def start(self, sequences: list[Any]) -> Any:
        """Begin to read a batch; the next may begin before this one's result is taken.

        Its `result()` gives an object per sequence with `[n_rows, …]` by family: rows
        of the last `n_rows` tokens; those before `first_read_token` may be missing.
        """


def sequence_of(
    answer: Answer,
    *,
    answer_span: AnswerSpan = "emitting",
    question_start: int | None = None,
) -> TokenSequence:
    """Return an answer with its spans, as the model reads it.

    With "emitting", the answer span has the positions that emitted the answer: from
    the last prompt token to the last answer token, which emitted the stop token. With
    "literal", it has only the answer tokens. The question span runs from the end of the
    context to the start of the answer span, so that the spans partition the input
    (section 3.2); prompts without a template may give another `question_start`. If the
    answer was cut at the length limit, what its last token emitted is unknown, so that
    token is outside the answer span in both cases.
    """
    n_prompt, n_answer = len(answer.prompt_ids), len(answer.token_ids)
    context = answer.context_span
    if not 0 <= context[0] <= context[1] <= n_prompt - 1:
        raise ValueError(
            f"answer {answer.key}: expected a context span before the last of "
            f"{n_prompt} prompt tokens, found {list(context)}"
        )
    ids = np.array(answer.prompt_ids + answer.token_ids, dtype=np.int64)
    start = {"emitting": n_prompt - 1, "literal": n_prompt}[answer_span]
    stop = max(start, n_prompt + n_answer - int(answer.stop_id is None))
    last = ids[-1] if answer.stop_id is None else answer.stop_id
    question = context[1] if question_start is None else question_start
    return TokenSequence(
        ids=ids,
        targets=np.append(ids[1:], last),
        spans=np.array([context, (question, start), (start, stop)]),
    )


def first_read_token(context_start: int) -> int:
    """Return the first token whose signals are read, given where the context starts.

    Tokens before the context, even an empty one, belong to no span and are not used:
    worked examples are skipped, but the few of a chat header (30 in Llama 3) are read.
    """
    return int(context_start) if context_start >= 48 else 0


def batches_of(
    lengths: Sequence[int] | np.ndarray,
    tokens_per_batch: int,
    *,
    n_beside: int = 0,
    n_passes: int = 1,
) -> list[list[int]]:
    """Group sequences into batches by length, longest first.

    A batch ends when one more sequence would raise its padded positions above 1.1 per
    token, unless it has fewer than 256 positions per pass: its fixed cost then exceeds
    that of padding. If that many tokens exist in every tenth of the lengths, at most
    1.1 positions per token are computed in all.

    The batches depend only on the lengths, so a run that was killed makes the same ones
    again, and its sums are rounded in the same way.

    Args:
      lengths: `[n_sequences]` number of tokens to compute for each.
      tokens_per_batch: budget with padding; a longer sequence is a batch by itself.
      n_beside: further positions that each sequence takes from the budget: a beginning
        that is computed before, or tokens that will be written.
      n_passes: number of passes of the model over a batch.

    Returns:
      Indices of the sequences of every batch.
    """
    # The fixed cost of a batch is that of some 35 (135M weights, bfloat16) to 100 (the
    # embedded model) further positions, on a core of an EPYC.
    fewest = 256 * n_passes
    batches: list[list[int]] = []
    width = n_tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # The first sequence is the longest, so it sets the padded width.
        n = len(batches[-1]) if batches else 0
        n_tokens += lengths[i]
        is_padded = (n + 1) * width > 1.1 * n_tokens and n * width >= fewest
        is_full = (n + 1) * (width + n_beside) > tokens_per_batch
        if not n or is_full or is_padded:
            batches.append([])
            width = n_tokens = lengths[i]
        batches[-1].append(i)
    return batches


def reading_batches(
    sequences: Sequence[TokenSequence], tokens_per_batch: int
) -> list[list[int]]:
    """Group sequences by `batches_of`, not counting worked examples that all share."""
    n_begun = min((first_read_token(item.spans[0, 0]) for item in sequences), default=0)
    lengths = [len(item.ids) - n_begun for item in sequences]
    return batches_of(lengths, tokens_per_batch, n_beside=n_begun)
