"""The four signal families of teacher-forced examples, from one forward pass.

The decoder is called once on the right-padded batch, without an attention mask: a
causal decoder never looks right, so padding is inert. Hooks and a registered
attention function read the pass while it happens; no map and no distribution
survives it.
"""

import contextlib
import dataclasses
from typing import Literal

import numpy as np
import torch

from extract import probability, residual
from extract.attention import SpanReading, read_spans
from extract.backbone import Backbone
from extract.layout import LayerPass, watch_layers
from extract.parity import check_parity
from extract.records import Answer

AnswerSpan = Literal["emitting", "literal"]
Family = Literal["hidden", "prob", "resid", "attn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
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
        """Check shapes and the order of the spans."""
        n_tokens = len(self.ids)
        if self.ids.ndim != 1 or n_tokens == 0 or self.ids.shape != self.targets.shape:
            raise ValueError(
                "a sequence needs ids and targets of one equal length above zero, "
                f"found {self.ids.shape} and {self.targets.shape}"
            )
        if self.spans.shape != (3, 2):
            raise ValueError(f"spans: expected shape (3, 2), found {self.spans.shape}")
        edges = self.spans.reshape(-1)
        if edges[0] < 0 or edges[-1] > n_tokens or (np.diff(edges) < 0).any():
            raise ValueError(
                "spans must be half-open and ordered context, question, answer within "
                f"{n_tokens} tokens, found {self.spans.tolist()}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signals:
    """The four families of one example; a row for every token of the sequence.

    Attributes:
      hidden: `[n_tokens, n_layers_kept, d_model]` float32, un-normed residual states.
      prob: `[n_tokens, 5]` float32: p(v), -log p(v) and entropy in nats, top p,
        margin.
      resid: `[n_tokens, 4 * n_layers]` float32: per layer attention norm, attention
        push, feed-forward norm, feed-forward push.
      attn: `[n_tokens, 2, 2, n_attention_layers, n_heads]` float32: per partner span
        (the other two, ordered) entropy in nats and mass.
    """

    hidden: np.ndarray
    prob: np.ndarray
    resid: np.ndarray
    attn: np.ndarray


def _answer_start_stop(answer: Answer, answer_span: AnswerSpan) -> tuple[int, int]:
    """Return the answer span; see `sequence_of`."""
    n_prompt, n_answer = len(answer.prompt_ids), len(answer.token_ids)
    start = n_prompt - 1 if answer_span == "emitting" else n_prompt
    is_cut = answer.stop_id is None
    return start, max(start, n_prompt + n_answer - int(is_cut))


def sequence_of(answer: Answer, *, answer_span: AnswerSpan = "emitting") -> Sequence:
    """Return an answer as the model reads it again, with its spans.

    The question span runs from the end of the context to the last prompt token,
    exclusive. The answer span is, "emitting", the positions that emitted the answer:
    from the last prompt token to the last answer token, which emitted the stop
    token; "literal", the answer tokens alone. If the answer was cut at the length
    limit its last token emitted nothing we know, and is outside in both.

    Raises:
      ValueError: no prompt, a context that reaches its last token, or an unknown
        `answer_span`.
    """
    if answer_span not in ("emitting", "literal"):
        raise ValueError(
            f"answer_span: expected emitting or literal, found {answer_span!r}"
        )
    n_prompt = len(answer.prompt_ids)
    context = answer.context_span
    if not 0 <= context[0] <= context[1] <= n_prompt - 1:
        raise ValueError(
            f"answer {answer.key}: expected a context span before the last of "
            f"{n_prompt} prompt tokens, found {list(context)}"
        )
    ids = np.array(answer.prompt_ids + answer.token_ids, dtype=np.int64)
    last = ids[-1] if answer.stop_id is None else answer.stop_id
    question = (context[1], n_prompt - 1)
    return Sequence(
        ids=ids,
        targets=np.append(ids[1:], last),
        spans=np.array([context, question, _answer_start_stop(answer, answer_span)]),
    )


def _pad_batch(rows: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Stack to `[n_examples, n_tokens]`, repeating each last id to the right."""
    n_tokens = max(len(row) for row in rows)
    # A repeated id, not a pad token: Transformers warns about pad ids without a mask.
    padded = [np.pad(row, (0, n_tokens - len(row)), mode="edge") for row in rows]
    return torch.from_numpy(np.stack(padded)).to(device)


class _StreamReading:
    """Hidden states and contribution scalars, filled as the layers run."""

    def __init__(
        self,
        lengths: list[int],
        hidden_layers: tuple[int, ...],
        d_model: int,
        scores: residual.Scores,
    ) -> None:
        self.slots = {entry: slot for slot, entry in enumerate(hidden_layers)}
        shape = (len(hidden_layers), d_model)
        self.hidden = [np.empty((n, *shape), dtype=np.float32) for n in lengths]
        self.resid: list[torch.Tensor] = []
        self.scores = scores

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Read one layer."""
        if layer_pass.index == 0:
            self._keep(0, layer_pass.h_in)
        self._keep(layer_pass.index + 1, layer_pass.h_out)
        self.resid.append(residual.contribution_scalars(layer_pass, self.scores))

    def _keep(self, entry: int, states: torch.Tensor) -> None:
        """Copy one entry of the resid axis if it is wanted."""
        if entry in self.slots:
            rows = states.float().cpu().numpy()
            for example, kept in enumerate(self.hidden):
                kept[:, self.slots[entry]] = rows[example, : len(kept)]


class SignalReader:
    """Reads signals from one backbone.

    Construction runs the backbone on a few tokens and checks that what is read sums
    to what the model does.
    """

    def __init__(
        self,
        backbone: Backbone,
        hidden_layers: tuple[int, ...] | None = None,
        *,
        attention_budget: int = 2**20,
        n_tokens_per_chunk: int = 1024,
        n_words_per_block: int = 2**12,
    ) -> None:
        """Check the backbone and prepare to read it.

        Args:
          backbone: the frozen model.
          hidden_layers: entries of the resid axis to keep, out of `n_layers + 1`: 0 is
            the embedding, l the output of layer l, un-normed. None keeps all.
          attention_budget: most attention weights alive at once.
          n_tokens_per_chunk: tokens whose logits are alive at once.
          n_words_per_block: vocabulary entries whose logits are alive at once.

        Raises:
          ValueError: an entry out of range, or "unknown residual layout".
        """
        n_entries = backbone.n_layers + 1
        if hidden_layers is None:
            hidden_layers = tuple(range(n_entries))
        if any(not 0 <= entry < n_entries for entry in hidden_layers):
            raise ValueError(
                f"hidden_layers: expected entries of 0 (embedding) to "
                f"{n_entries - 1}, found {list(hidden_layers)}"
            )
        if len(set(hidden_layers)) < len(hidden_layers):
            raise ValueError(f"hidden_layers: found one twice, {list(hidden_layers)}")
        self.backbone = backbone
        self.hidden_layers = tuple(hidden_layers)
        self._attention_budget = attention_budget
        self._head_sizes = {
            "n_tokens_per_chunk": n_tokens_per_chunk,
            "n_words_per_block": n_words_per_block,
        }
        self._final_norm = residual.measure_final_norm(backbone.layout)
        self._head = probability.head_of(backbone.model)
        check_parity(backbone, self._final_norm, self._head)

    @property
    def shapes(self) -> dict[Family, tuple[int, ...]]:
        """Return the shape of one token's reading, per family."""
        model = self.backbone
        return {
            "hidden": (len(self.hidden_layers), model.d_model),
            "prob": (probability.N_SCALARS,),
            "resid": (residual.N_SCALARS * model.n_layers,),
            "attn": (2, 2, len(model.attention_layers), model.n_heads),
        }

    def _check_lengths(self, sequences: list[Sequence]) -> None:
        """Refuse a sequence longer than the window; nothing is ever cut."""
        longest = max(len(sequence.ids) for sequence in sequences)
        window = self.backbone.max_length
        if window is not None and longest > window:
            raise ValueError(
                f"a sequence has {longest} tokens, backbone {self.backbone.name!r} "
                f"reads at most {window}; shorten the context or use another backbone"
            )

    @torch.no_grad()
    def read(self, sequences: list[Sequence]) -> list[Signals]:
        """Read all families of a batch in one forward of the decoder.

        Args:
          sequences: any lengths; of similar length costs least.

        Returns:
          One `Signals` each, in order; what is read of an example does not depend on
          its batch, up to rounding.
        """
        if not sequences:
            return []
        self._check_lengths(sequences)
        device, layout = self.backbone.device, self.backbone.layout
        lengths = [len(sequence.ids) for sequence in sequences]
        ids = _pad_batch([sequence.ids for sequence in sequences], device)
        targets = _pad_batch([sequence.targets for sequence in sequences], device)
        spans = torch.from_numpy(np.stack([item.spans for item in sequences]))
        scores = residual.Scores(self._final_norm, layout.head, targets)
        d_model = self.backbone.d_model
        stream = _StreamReading(lengths, self.hidden_layers, d_model, scores)
        attention = SpanReading(
            spans.to(device),
            ids.shape[1],
            self.backbone.attention_layers,
            self._attention_budget,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(read_spans(layout.decoder, attention))
            stack.enter_context(watch_layers(layout, stream.on_layer))
            final = layout.decoder(input_ids=ids, use_cache=False).last_hidden_state
        is_token = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        is_token = is_token.to(device)
        prob = probability.token_probabilities(
            final[is_token], targets[is_token], self._head, **self._head_sizes
        )
        return _split(lengths, stream, prob, attention.readings())


def _split(
    lengths: list[int],
    stream: _StreamReading,
    prob: torch.Tensor,
    attn: torch.Tensor,
) -> list[Signals]:
    """Cut the batch's readings into examples without padding."""
    resid = torch.cat(stream.resid, dim=-1).cpu().numpy()
    attn_rows = attn.cpu().numpy()
    prob_rows = np.split(prob.cpu().numpy(), np.cumsum(lengths)[:-1])
    return [
        Signals(
            hidden=stream.hidden[example],
            prob=prob_rows[example],
            resid=resid[example, :length].copy(),
            attn=attn_rows[example, :length].copy(),
        )
        for example, length in enumerate(lengths)
    ]
