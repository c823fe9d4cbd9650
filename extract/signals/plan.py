"""What an extraction reads together and where it goes, fixed from the answers alone.

Rank, world size and what was done before only choose which units are done here, so
the bytes of a store depend on neither. Nothing here loads Torch.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from beatrice.extract.records import Answer, AnswerSpan
from beatrice.extract.store.config import StoreConfig, stored_families
from beatrice.extract.store.families import Family, Spans
from beatrice.extract.store.spec import StoreSpec

_BATCHES_PER_UNIT = 16
_WANTED_UNITS = 16
_UNIT_BYTES = 8 << 30
_SHARD_BYTES = 128 << 20
_FEWEST_ROWS = 256
_WANTED_RANGES = 64
_FEWEST_SPARED = 48  # Llama 3's chat header has 30 tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractConfig(StoreConfig):
    """How answers are read, and what is kept of them.

    Attributes:
      answer_span: see `sequence_of`.
      tokens_per_batch: most tokens of a batch, padding included; a longer sequence
        is a batch of its own.
      rows_per_shard: tokens per file, a power of two; None chooses by `n_rows_of`.
    """

    answer_span: AnswerSpan = "emitting"
    tokens_per_batch: int = 16384
    rows_per_shard: int | None = None

    def __post_init__(self) -> None:
        """Check the fields; the store checks `rows_per_shard`."""
        super().__post_init__()
        if self.tokens_per_batch < 1:
            raise ValueError(
                f"tokens_per_batch must be at least 1, found {self.tokens_per_batch}"
            )
        if self.answer_span not in ("emitting", "literal"):
            raise ValueError(
                f"answer_span is emitting or literal, not {self.answer_span!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One teacher-forced example.

    Attributes:
      ids: `[n_tokens]` int64, prompt and answer; the stop token is not fed.
      targets: `[n_tokens]` int64, the next token at each position. The last is the
        stop token; of an answer that was cut it is unknown, any id stands there, and
        the position lies outside the answer span.
      spans: `[3, 2]` int64, absolute and half-open, in the order context, question,
        answer; an empty span has start == stop.
    """

    ids: np.ndarray
    targets: np.ndarray
    spans: np.ndarray

    def __post_init__(self) -> None:
        """Check the lengths and the order of the spans."""
        n_tokens = len(self.ids)
        if n_tokens == 0 or self.ids.shape != self.targets.shape:
            raise ValueError(
                "a sequence needs ids and targets of one equal length above zero, "
                f"found {self.ids.shape} and {self.targets.shape}"
            )
        edges = self.spans.reshape(-1)
        if edges[0] < 0 or edges[-1] > n_tokens or (np.diff(edges) < 0).any():
            raise ValueError(
                "spans must be half-open and ordered context, question, answer within "
                f"{n_tokens} tokens, found {self.spans.tolist()}"
            )


def sequence_of(
    answer: Answer, *, answer_span: AnswerSpan = "emitting"
) -> TokenSequence:
    """Return an answer as the model reads it again, with its spans.

    The answer span is, "emitting", the positions that emitted the answer: from the
    last prompt token to the last answer token, which emitted the stop token;
    "literal", the answer tokens alone. The question span runs from the end of the
    context to where the answer span starts, so that the spans part the input (section
    3.2: "partitioned"). If the answer was cut at the length limit its last token
    emitted nothing we know, and is outside in both.

    Raises:
      ValueError: no prompt, or a context that reaches its last token.
    """
    n_prompt, n_answer = len(answer.prompt_ids), len(answer.token_ids)
    context, is_cut = answer.context_span, answer.stop_id is None
    if not 0 <= context[0] <= context[1] <= n_prompt - 1:
        raise ValueError(
            f"answer {answer.key}: expected a context span before the last of "
            f"{n_prompt} prompt tokens, found {list(context)}"
        )
    ids = np.array(answer.prompt_ids + answer.token_ids, dtype=np.int64)
    start = {"emitting": n_prompt - 1, "literal": n_prompt}[answer_span]
    stop = max(start, n_prompt + n_answer - int(is_cut))
    return TokenSequence(
        ids=ids,
        targets=np.append(ids[1:], ids[-1] if is_cut else answer.stop_id),
        spans=np.array([context, (context[1], start), (start, stop)]),
    )


def first_read(context_start: int) -> int:
    """Return the first token whose signals are read.

    Tokens before the context belong to no span, and nothing is computed from their
    signals. Worked examples are many such tokens; a chat's header is few, and is read,
    so that stores of prompts without examples are those from before there were any.

    Args:
      context_start: where the context span starts, also if it is empty.
    """
    return int(context_start) if context_start >= _FEWEST_SPARED else 0


class Reader(Protocol):
    """What reads signals, see `extract.signals.reader.SignalReader`.

    Attributes:
      hidden_layers: entries of the resid axis that are read (0: the embedding).
      hidden_spans: tokens whose hidden states are read; the others are read of all.
    """

    hidden_layers: tuple[int, ...]
    hidden_spans: Spans

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the values depend on beside the answers: model, dtype (JSON)."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of one token's reading, per family."""

    def start(self, sequences: list[Any]) -> Any:
        """Begin to read a batch.

        Its `result()` gives an object per sequence, `[n_rows, …]` by family: rows of
        the last `n_rows` tokens, those before `first_read` may be missing.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """What one worker reads in one go: some ranges and their batches.

    Attributes:
      ranges: consecutive; each is committed by itself.
      batches: of example indices; every example of the ranges once.
    """

    ranges: range
    batches: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExtractionPlan:
    """What is read together and where it goes.

    Attributes:
      spec: the store.
      units: in the order of their ranges; every range is in one. A worker does
        `share.mine(units)`.
    """

    spec: StoreSpec
    units: tuple[Unit, ...]


def _bytes_per_token(
    families: Mapping[str, Family], n_tokens: int, n_answer: int | None
) -> list[int]:
    """Return each family's bytes per token, whether or not that token has a row."""
    n_kept = {"all": n_tokens, "answer": n_tokens if n_answer is None else n_answer}
    return [f.row_bytes * n_kept[f.spans] // n_tokens for f in families.values()]


def n_rows_of(
    lengths: np.ndarray, families: Mapping[str, Family], n_answer: int | None = None
) -> int:
    """Choose the rows of a shard: a power of two, from the answers alone.

    As many as fit in 128 MiB of the widest family, but few enough for 64 ranges, so
    that workers share the load and an interruption costs little; at least 256.

    Args:
      lengths: `[n_examples]` tokens that are read.
      families: what is stored.
      n_answer: tokens of all answer spans; None counts a family of the answer span
        as if it kept every token.
    """
    n_tokens = int(lengths.sum())
    widest = max(_bytes_per_token(families, n_tokens, n_answer))
    most = max(1, min(_SHARD_BYTES // max(1, widest), n_tokens // _WANTED_RANGES))
    return max(_FEWEST_ROWS, 1 << (most.bit_length() - 1))


def tokens_per_unit(
    lengths: np.ndarray,
    families: Mapping[str, Family],
    tokens_per_batch: int,
    n_answer: int | None = None,
) -> int:
    """Choose the tokens of a unit, from the answers alone.

    Sixteen batches' worth: sorted by length, they waste a few percent on padding. But
    few enough for 16 units (of at least one batch), so that workers share the load
    and an interruption costs little; and at most 8 GiB as they are stored, which
    wait in the host's memory, see `extract.signals.extraction.run_plan`.

    Args:
      lengths: `[n_examples]` tokens that are read.
      families: what is stored.
      tokens_per_batch: the budget of a batch.
      n_answer: as in `n_rows_of`.
    """
    n_tokens = int(lengths.sum())
    shared = max(tokens_per_batch, n_tokens // _WANTED_UNITS)
    stored = sum(_bytes_per_token(families, n_tokens, n_answer))
    return min(
        _BATCHES_PER_UNIT * tokens_per_batch, shared, _UNIT_BYTES // max(1, stored)
    )


def _unit_edges(spec: StoreSpec, n_tokens: int) -> list[int]:
    """Join consecutive ranges up to so many tokens; at least one range each."""
    rows = np.diff(spec.offsets[spec.range_examples]).tolist()
    edges, used = [0], 0
    for range_id, n_rows in enumerate(rows):
        if range_id > edges[-1] and used + n_rows > n_tokens:
            edges.append(range_id)
            used = 0
        used += n_rows
    return [*edges, spec.n_ranges]


def _batches(
    lengths: np.ndarray, examples: range, tokens_per_batch: int
) -> tuple[tuple[int, ...], ...]:
    """Group one unit's examples by length, padding included in the budget."""
    order = sorted(examples, key=lambda example: (-lengths[example], example))
    batches: list[list[int]] = []
    for example in order:
        # The first of a batch is its longest, so it sets the padded width.
        is_full = not batches or (
            (len(batches[-1]) + 1) * lengths[batches[-1][0]] > tokens_per_batch
        )
        if is_full:
            batches.append([])
        batches[-1].append(example)
    return tuple(map(tuple, batches))


def _hash_sequences(sequences: Sequence[TokenSequence]) -> str:
    """Hash what the model reads, so that a store never mixes two sets of answers."""
    digest = hashlib.sha256()
    for item in sequences:
        for part in (item.ids, item.targets, item.spans):
            digest.update(np.ascontiguousarray(part, dtype="<i8").data)
    return digest.hexdigest()


def _check_reader(reader: Reader, config: ExtractConfig) -> None:
    """Raise if the reader does not read what the config keeps."""
    wanted = config.hidden_layers
    if wanted is not None and tuple(wanted) != tuple(reader.hidden_layers):
        raise ValueError(
            f"the reader keeps layers {list(reader.hidden_layers)}, the config wants "
            f"{list(wanted)}; build the reader with the config's hidden_layers"
        )
    if reader.hidden_spans not in ("all", config.hidden_spans):
        raise ValueError(
            f"the reader keeps hidden states of the {reader.hidden_spans} span, the "
            f"config wants {config.hidden_spans}; build the reader with the config's "
            "hidden_spans"
        )


def plan_extraction(
    sequences: Sequence[TokenSequence],
    keys: Sequence[tuple[str, ...]],
    reader: Reader,
    config: ExtractConfig,
    fingerprint: Mapping[str, Any],
) -> ExtractionPlan:
    """Fix the store, its ranges and the batches.

    Args:
      sequences: one per answer.
      keys: one per answer, unique.
      reader: says what it reads; nothing is read here.
      config: how the answers are read.
      fingerprint: what the values depend on beside the answers and `config`.
    """
    _check_reader(reader, config)
    lengths = np.array([len(item.ids) for item in sequences], dtype=np.int64)
    spans = np.stack([item.spans for item in sequences]).astype(np.int64)
    firsts = np.array([first_read(start) for start in spans[:, 0, 0]], dtype=np.int64)
    n_answer = int((spans[:, 2, 1] - spans[:, 2, 0]).sum())
    families = stored_families(reader.shapes, config)
    spec = StoreSpec(
        families=families,
        keys=tuple(keys),
        lengths=lengths,
        spans=spans,
        firsts=firsts,
        rows_per_shard=config.rows_per_shard
        or n_rows_of(lengths - firsts, families, n_answer),
        hidden_layers=tuple(reader.hidden_layers),
        fingerprint={
            **fingerprint,
            "answer_span": config.answer_span,
            "tokens_per_batch": config.tokens_per_batch,
            "sequences_sha256": _hash_sequences(sequences),
        },
    )
    n_tokens = tokens_per_unit(
        lengths - firsts, families, config.tokens_per_batch, n_answer
    )
    edges = _unit_edges(spec, n_tokens)
    if len(edges) <= spec.n_ranges:
        # Which examples share a batch moves values by rounding. Where every unit is
        # one range the batches are those of stores from before there were units.
        facts = {**spec.fingerprint, "tokens_per_unit": n_tokens}
        spec = dataclasses.replace(spec, fingerprint=facts)
    units = []
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        examples = range(*spec.range_examples[[first, last]].tolist())
        batches = _batches(lengths, examples, config.tokens_per_batch)
        units.append(Unit(ranges=range(first, last), batches=batches))
    return ExtractionPlan(spec=spec, units=tuple(units))
