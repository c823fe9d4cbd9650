"""The four signal families of answers, read in the passes that write them.

A prompt's signals come from the prefill, each new token's from its decode step. What
depends on the next token (its probability, the push towards it) waits one step: the
contributions and logits of every row's last position are kept until that token is
chosen. What a token sends to other spans comes from its step's queries and the cached
keys; what it receives is summed as later steps attend to it. Both are read a few steps
at a time, except for float32 on a CPU, where the model attends with these weights.
Probabilities are read for many tokens at a time, except for those of float32 logits.

Tokens are addressed by column: column 0 is the longest prompt's first token, shorter
prompts are padded on the left, and a layer with a sliding window passes only the last
columns. What all prompts begin with, outside all spans, may be cached and is not read.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from beatrice.extract.backbone.layout import LayerPass, watch_layers
from beatrice.extract.generate.generator import (
    Generated,
    GeneratorPrompt,
    SamplingConfig,
)
from beatrice.extract.generate.local import (
    ForwardWatcher,
    TransformersGenerator,
    check_requests_fit,
)
from beatrice.extract.generate.prompts import GenerationConfig, Prompt, Request
from beatrice.extract.records import Answer, AnswerSpan
from beatrice.extract.run.console import Update
from beatrice.extract.signals import probability, residual
from beatrice.extract.signals.attention import AttentionReading, attending_through
from beatrice.extract.signals.batch import raising_does_not_fit
from beatrice.extract.signals.parity import probe_ids, probe_lengths
from beatrice.extract.signals.precision import exact_products
from beatrice.extract.signals.reader import AnswerSignals, SignalReader
from beatrice.extract.signals.sequence import first_read_token, sequence_of
from beatrice.extract.signals.span_sums import (
    Attention,
    AttentionCall,
    StepCalls,
    entropies_and_masses,
    span_sums,
    step_sums,
)

# Relative to a family's norm, between the model's passes with a cache and without.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_N_PADDED = 4  # columns by which the shorter prompt is padded
_N_CHECKED = 3  # tokens: the first of a decode step, one after it, and the last
# Steps whose attention is read at once if the model's own kernel attends, which saves
# calls of Torch and, on a GPU, kernels.
_N_TOGETHER = 8
_N_ROOM = 8  # new tokens to make room for at first; most answers are shorter


class _Emitting(NamedTuple):
    """Tokens of a step that emitted the tokens of the next one."""

    rows: torch.Tensor  # `[n]` rows of the batch
    columns: torch.Tensor  # `[n]` columns, among those read
    states: torch.Tensor  # `[n, d_model]` after the final norm
    targets: torch.Tensor  # `[n]` the emitted tokens


class DecodeReading(AttentionReading):
    """Reads a batch of prompts and answers while the model writes the answers.

    Generation calls `watching` around each of its runs and `on_choice` after each step.
    """

    @exact_products()
    def __init__(
        self,
        reader: SignalReader,
        prompts: Sequence[Prompt],
        n_new: int,
        *,
        answer_span: AnswerSpan = "emitting",
        runs_last: bool = True,
    ) -> None:
        """Make room for a batch of answers of at most `n_new` tokens.

        `reader` defines what is kept, and its model writes. `runs_last` gives a row
        even to the last token of a cut answer, which emits nothing and is in no span.
        """
        self.runs_last = runs_last
        self.answer_span: AnswerSpan = answer_span
        self.reader, self._layout = reader, (layout := reader.backbone.layout)
        backbone, budget = reader.backbone, reader.budget.n_attention_weights
        layers, passed_over = backbone.attention_layers, backbone.passed_over
        super().__init__(0, layers, budget, passed_over)
        self._slots = {entry: slot for slot, entry in enumerate(reader.hidden_layers)}
        device = layout.head.weight.device
        self._width, self._n_new = max(len(prompt.ids) for prompt in prompts), n_new
        n_rows, n_columns = len(prompts), self._width + n_new
        self._n_room = self._width + min(n_new, _N_ROOM)  # columns with room
        self._pads = [self._width - len(prompt.ids) for prompt in prompts]
        self._firsts = [first_read_token(prompt.context_span[0]) for prompt in prompts]
        # The first column that holds a token to be read.
        self.n_unread = min(map(sum, zip(self._pads, self._firsts, strict=True)))
        self._answer = self._width - (answer_span == "emitting")
        is_all = reader.hidden_spans == "all"
        self._first_hidden = self.n_unread if is_all else self._answer
        ids = [[0] * n + [*p.ids] for n, p in zip(self._pads, prompts, strict=True)]
        self._ids = torch.tensor(ids, device=device)
        members = self._members_of(prompts, n_columns)
        later = members[:, 1:].any(dim=(0, 1)).nonzero()
        # Contexts look back at no span; their rows would take the square of a length.
        self._first_row = int(later[0]) if len(later) else self._answer
        self._members = members.to(device)
        n_read, n_layers = self._n_room - self.n_unread, len(layout.layers)
        self._prob = torch.zeros((n_rows, n_read, 5), device=device)
        self._resid = torch.zeros((n_rows, n_read, 4 * n_layers), device=device)
        self._hidden: torch.Tensor | None = None  # [n_rows, n_room, n_kept, d_model]
        # By layer, `span_sums` over rows and keys, [2, n_rows, n_heads, 2, n_read].
        self._sums: dict[int, tuple[torch.Tensor, ...]] = {}
        self._steps: dict[int, StepCalls] = {}  # by layer, all of the same steps
        # Tokens whose distributions are read together: those of one step have fewer
        # products with the vocabulary's matrix than it takes to read that matrix.
        self._emitting: list[_Emitting] = []
        self._n_written = [0] * n_rows  # tokens of each answer that were run

    def _members_of(self, prompts: Sequence[Prompt], n_columns: int) -> torch.Tensor:
        """Return bools `[n_rows, 3, n_columns]`: columns of context, question, answer.

        Answer columns are added as they are written.
        """
        columns = torch.arange(n_columns)
        edges = []
        for pad, prompt in zip(self._pads, prompts, strict=True):
            (start, stop), question = prompt.context_span, prompt.question_start
            question = stop if question is None else question
            edges.append([(pad + start, pad + stop), (pad + question, self._answer)])
        starts, stops = torch.tensor(edges)[..., None].unbind(2)
        members = torch.zeros((len(prompts), 3, n_columns), dtype=torch.bool)
        members[:, :2] = (columns >= starts) & (columns < stops)
        members[:, 2] = (columns == self._width - 1) & (columns >= self._answer)
        return members

    @contextlib.contextmanager
    def watching(self, rows: Sequence[int], n_cached: int) -> Iterator[None]:
        """Read steps of a run of `rows`; the first `n_cached` columns are cached."""
        self._begin_run(rows, n_cached)
        with (
            attending_through(self._layout, self),
            watch_layers(self._layout, self._on_layer),
            self._layout.decoder.register_forward_hook(self._after_decoder),
            self.reader.backbone.model.register_forward_hook(self._after_model),
        ):
            yield
        self._read_steps()

    def _begin_run(self, rows: Sequence[int], n_cached: int) -> None:
        self.run_rows, self._live = list(rows), list(rows)
        # A slice gives a view of all rows, without a copy.
        is_whole = len(rows) == len(self._pads)
        index = torch.tensor(rows, device=self._ids.device)
        self._index = slice(None) if is_whole else index
        self._begin_step(n_cached)

    def _begin_step(self, n_cached: int) -> None:
        self._run_members: torch.Tensor | None = None
        self.layers = {}
        self._n_before, self._n_step = n_cached, 0
        self._lens: residual.LogitLens | None = None
        self._prompt_resid: list[torch.Tensor] = []
        self._last_parts: list[torch.Tensor] = []

    def _make_room(self) -> None:
        """Double the room for new tokens.

        Room for the longest answer from the start would be several times what short
        ones need, and more than everything else that generation holds.
        """
        n_new = self._n_room - self._width
        n_more = min(n_new, self._n_new - n_new)
        self._n_room += n_more
        lengthened = torch.nn.functional.pad
        self._prob = lengthened(self._prob, (0, 0, 0, n_more))
        self._resid = lengthened(self._resid, (0, 0, 0, n_more))
        if self._hidden is not None:
            self._hidden = lengthened(self._hidden, (0, 0, 0, 0, 0, n_more))
        for layer, sums in self._sums.items():
            self._sums[layer] = tuple(lengthened(item, (0, n_more)) for item in sums)

    @property
    def _first(self) -> int:
        """Return the index of the first of the step's tokens to be read."""
        return min(max(0, self.n_unread - self._n_before), self._n_step)

    def _columns(self) -> slice:
        """Return the columns, among those read, of the step's tokens to be read."""
        start = self._n_before + self._first - self.n_unread
        return slice(start, self._n_before + self._n_step - self.n_unread)

    def reduce(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> tuple[None, torch.Tensor | None]:
        """Add one step of a layer to the sums between spans."""
        assert isinstance(call, AttentionCall)  # a map is of a whole sequence
        n_rows, n_heads, self._n_step = call.shape
        stop = self._n_before + self._n_step
        n_keys = call.n_cached + self._n_step
        if n_keys > stop or n_rows != len(self.run_rows):
            raise ValueError(
                f"expected at most {stop} keys of {len(self.run_rows)} rows, as in a "
                f"growing cache, found {n_keys} of {n_rows}"
            )
        if layer not in self._sums:
            shape = (2, len(self._pads), n_heads, 2, self._prob.shape[1])
            self._sums[layer] = torch.zeros((2, *shape), device=call.device).unbind()
        self.rows = (self._skipped(self._n_before, self._n_step), self._n_step)
        # If the model attends with these weights, it needs them at once.
        if self._n_step > 1 or self.rows[0] or value is not None:
            return None, self._add_sums(layer, call, self._n_before, value)
        if layer in self._steps:
            self._steps[layer].add(call)
        else:
            self._steps[layer] = StepCalls(call)
        return None, None

    def _skipped(self, n_before: int, n_step: int) -> int:
        """Return how many of a step's first rows look back at no span."""
        return min(max(0, self._first_row - n_before), n_step)

    def _add_sums(
        self, layer: int, call: AttentionCall, n_before: int, value: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the sums of a call whose rows follow `n_before` columns; maybe attend."""
        if self._run_members is None:
            self._run_members = self._members[self._index].float()
        stop = n_before + call.shape[2]
        n_keys = call.n_cached + call.shape[2]
        first = self._skipped(n_before, call.shape[2])
        keys = self._run_members[:, :2, stop - n_keys : stop]
        rows = self._run_members[:, 1:, n_before:stop]
        if call.shape[2] == 1 and not first:
            by_row, by_key, attended = step_sums(call, keys, rows, value)
        else:
            by_row, by_key, attended = span_sums(
                call, keys, rows, (first, call.shape[2]), self.budget, value
            )
        row_sums, key_sums = self._sums[layer]
        columns = slice(n_before + first - self.n_unread, stop - self.n_unread)
        row_sums[:, self._index, ..., columns] = by_row[..., first:]
        n_skipped = max(0, self.n_unread - (stop - n_keys))
        at = slice(stop - n_keys + n_skipped - self.n_unread, columns.stop)
        key_sums[:, self._index, ..., at] += by_key[..., n_skipped:]
        return attended

    @exact_products()
    def _read_steps(self) -> None:
        """Read the attention of the steps that are waiting."""
        masks: dict[Any, torch.Tensor | None] = {}
        self._run_members = None
        for layer, steps in self._steps.items():
            n_before = self._n_before + self._n_step - len(steps)
            self._add_sums(layer, steps.joined(masks), n_before, None)
        self._steps = {}

    def _on_layer(self, layer_pass: LayerPass) -> None:
        """Read a layer: all tokens but the last, which waits for the next choice."""
        self._n_step = layer_pass.h_in.shape[1]
        if layer_pass.index == 0:
            self._keep_hidden(0, layer_pass.h_in)
        self._keep_hidden(layer_pass.index + 1, layer_pass.h_out)
        if self._n_step - self._first > 1:
            if self._lens is None:
                ids = self._next_ids()
                # The last one's next token is not chosen yet; any id will do.
                self._lens = self.reader.lens(torch.cat([ids, ids[:, -1:]], dim=1))
            scalars = residual.contribution_scalars(layer_pass, self._lens)
            self._prompt_resid.append(scalars)
        parts = (layer_pass.h_in, layer_pass.att, layer_pass.ffn)
        self._last_parts.append(torch.stack([part[:, -1] for part in parts]))

    def _next_ids(self) -> torch.Tensor:
        """Return the prompt ids that follow the step's tokens to be read."""
        start = self._n_before + self._first + 1
        return self._ids[self._index, start : self._n_before + self._n_step]

    def _keep_hidden(self, entry: int, states: torch.Tensor) -> None:
        if entry not in self._slots:
            return
        if self._hidden is None:
            n_read = self._n_room - self._first_hidden
            shape = (len(self._pads), n_read, len(self._slots), states.shape[-1])
            self._hidden = torch.zeros(shape, dtype=states.dtype, device=states.device)
        stop = self._n_before + self._n_step
        start = max(self._n_before, self._first_hidden)
        if start < stop:
            columns = slice(start - self._first_hidden, stop - self._first_hidden)
            read = states[:, start - self._n_before :]
            self._hidden[self._index, columns, self._slots[entry]] = read

    def _after_decoder(self, module: Any, inputs: Any, output: Any) -> None:
        """Read the prompt's next-token distributions; keep the last token's states."""
        self.check_complete()
        states = output.last_hidden_state
        self._last_states = states[:, -1]
        n_read = self._n_step - self._first
        if n_read < 2:
            return
        columns, targets = self._columns(), self._next_ids()
        # Padding of shorter prompts is not worth products with the vocabulary.
        is_read = self._is_read()[self._index, columns][:, :-1]
        prob = torch.zeros((*targets.shape, 5), device=states.device)
        prob[is_read] = self.reader.probabilities(
            states[:, self._first : -1][is_read], targets[is_read]
        )
        self._prob[self._index, columns.start : columns.stop - 1] = prob
        resid = torch.cat(self._prompt_resid, dim=-1)
        self._resid[self._index, columns] = resid

    def _is_read(self) -> torch.Tensor:
        """Return `[n_rows, n_read]` bool, whether a column has a token to be read."""
        starts = torch.tensor(self._pads) + torch.tensor(self._firsts) - self.n_unread
        columns = torch.arange(self._prob.shape[1])
        return (columns >= starts[:, None]).to(self._prob.device)

    def _after_model(self, module: Any, inputs: Any, output: Any) -> None:
        """Keep the logits from which the next token is chosen."""
        self._logits = output.logits[:, -1]

    def on_choice(self, ids: torch.Tensor, is_done: torch.Tensor) -> None:
        """Read what had to wait for the next token.

        `ids` are `[n_run_rows, n_columns]`, up to the tokens chosen in this step.
        `is_done`, `[n_run_rows]` bool, marks rows whose later tokens are in no answer.
        """
        column = self._n_before + self._n_step - 1
        # An answer that is cut ends in a token that emitted nothing, see `sequence_of`.
        is_last = column == self._width + self._n_new - 1
        targets = ids[:, -2 if is_last else -1]
        self._parts = torch.stack(self._last_parts, dim=2).float()
        at = column - self.n_unread
        self._resid[self._index, at] = self._last_resid(targets)
        if self._has_exact_logits:
            self._prob[self._index, at] = self._last_prob(targets)
        else:
            self._wait_to_emit(at, targets)
        if column >= self._width:
            for row in self._live:
                self._n_written[row] += 1
        places = zip(self.run_rows, is_done.tolist(), strict=True)
        self._live = [row for row, over in places if not over]
        if column + 1 < self._width + self._n_new - 1:
            self._members[self._live, 2, column + 1] = True
        if any(len(steps) == _N_TOGETHER for steps in self._steps.values()):
            self._read_steps()
        if self._live and column + 1 == self._n_room:
            self._make_room()
        self._begin_step(column + 1)

    def _wait_to_emit(self, at: int, targets: torch.Tensor) -> None:
        """Keep the last states of the unfinished rows until enough are waiting."""
        rows = torch.tensor(self._live, device=targets.device)
        live = torch.isin(torch.tensor(self.run_rows, device=targets.device), rows)
        columns, states = torch.full_like(rows, at), self._last_states[live]
        self._emitting.append(_Emitting(rows, columns, states, targets[live]))
        n_waiting = sum(len(step.rows) for step in self._emitting)
        if n_waiting >= self.reader.budget.n_tokens_per_chunk:
            self._read_emissions()

    @exact_products()
    @torch.inference_mode()
    def _read_emissions(self) -> None:
        """Read the distributions that are waiting."""
        if self._emitting:
            rows, columns, *states_and_targets = map(
                torch.cat, zip(*self._emitting, strict=True)
            )
            prob = self.reader.probabilities(*states_and_targets)
            self._prob[rows, columns], self._emitting = prob, []

    @property
    def _has_exact_logits(self) -> bool:
        """Whether the model's logits are not rounded to half precision by its head."""
        return self.reader.head.weight.dtype == self._logits.dtype == torch.float32

    def _last_prob(self, targets: torch.Tensor) -> torch.Tensor:
        """Return `[n_run_rows, 5]` of the last position of every row."""
        if self._has_exact_logits:
            return probability.scalars_of_logits(self._logits, targets)
        return self.reader.probabilities(self._last_states, targets)

    def _last_resid(self, targets: torch.Tensor) -> torch.Tensor:
        """Return `[n_run_rows, 4 * n_layers]` of the last position of every row."""
        h_in, att, ffn = self._parts  # each [n_run_rows, n_layers, d_model]
        lens = self.reader.lens(targets[:, None].expand(-1, h_in.shape[1]))
        layers = LayerPass(0, h_in, att, ffn, h_in)
        return residual.contribution_scalars(layers, lens).flatten(1)

    def last_prob(self) -> np.ndarray:
        """Return the scalars `[5]` of the distribution of the first row's newest id."""
        self._read_emissions()
        return self._prob[0, self._n_before - 1 - self.n_unread].cpu().numpy().copy()

    def signals(self, answers: Sequence[Answer]) -> list[AnswerSignals | None]:
        """Return the signals of every answer, in the order of the prompts.

        An answer that is still being written counts as cut: it is read up to the token
        that emitted its last one; see `ended`. None stands for an answer that has other
        tokens than were run, because its stop string began before the last token.
        """
        self._read_steps()
        self._read_emissions()
        members = self._members[..., self.n_unread : self._n_room]
        per_layer = [
            entropies_and_masses(by_row, by_key, members)
            for by_row, by_key in map(self._sums.__getitem__, self.attention_layers)
        ]
        attn = torch.stack(per_layer, dim=-2).cpu().numpy()
        prob, resid = self._prob.cpu().numpy(), self._resid.cpu().numpy()
        assert self._hidden is not None
        hidden = self._hidden.cpu()
        signals: list[AnswerSignals | None] = []
        for row, answer in enumerate(answers):
            n_tokens, is_cut = len(answer.token_ids), answer.stop_id is None
            n_written = self._n_written[row]
            # The last token of a cut or unfinished answer emitted nothing.
            if n_written != n_tokens and not (is_cut and n_written == n_tokens - 1):
                signals.append(None)
                continue
            first = self._pads[row] + self._firsts[row]
            stop = self._width + n_written
            read = slice(first - self.n_unread, stop - self.n_unread)
            start, end = first, stop
            if self.reader.hidden_spans == "answer":
                start, end = self._answer, self._width + n_tokens - is_cut
            start, end = start - self._first_hidden, end - self._first_hidden
            signals.append(
                AnswerSignals(
                    first_token=self._firsts[row],
                    hidden=hidden[row, start : max(start, end)].float().numpy(),
                    prob=prob[row, read],
                    resid=resid[row, read],
                    attn=attn[row, read],
                    path="decode",
                )
            )
        return signals

    @exact_products()
    @torch.inference_mode()
    def ended(self, answers: Sequence[Answer]) -> list[AnswerSignals | None]:
        """Return every answer's signals as if it had ended before the last choice.

        The distribution after its last token is known, and so are the signals of that
        token if it emits the stop token. Give an unfinished answer without the token
        chosen last, but with the stop token it ends in; for an answer that ended
        earlier, its own signals are returned. None as in `signals`, and after the last
        token of the longest answer, whose attention belongs to no span.
        """
        signals = self.signals(answers)
        stops = [answers[row].stop_id or 0 for row in self.run_rows]
        targets = torch.tensor(stops, device=self._prob.device)
        prob = self._last_prob(targets).cpu().numpy()
        resid = self._last_resid(targets).cpu().numpy()
        for index, row in enumerate(self.run_rows):
            read, n_written = signals[row], self._n_written[row]
            is_before = n_written != self._n_before - self._width
            if read is None or is_before or answers[row].stop_id is None:
                continue
            signals[row] = None
            if n_written < self._n_new:
                signals[row] = dataclasses.replace(
                    read,
                    prob=np.concatenate([read.prob[:-1], prob[index, None]]),
                    resid=np.concatenate([read.resid[:-1], resid[index, None]]),
                )
        return signals


_MOST_TOGETHER = 256  # requests in a group
_MOST_BYTES = 4 << 30  # of a group's signals, unless one answer has more


def groups_in_memory(
    reader: SignalReader, requests: Sequence[Request], n_new: int
) -> Iterator[Sequence[Request]]:
    """Yield requests in order, in groups whose signals fit into memory together.

    That is 4 GiB, as float32 and with `n_new` tokens in each answer.
    """
    n_most = _MOST_BYTES // (4 * sum(map(math.prod, reader.shapes.values())))
    start = n_tokens = 0
    for i, request in enumerate(requests):
        prompt = request.prompt
        n_read = len(prompt.ids) - first_read_token(prompt.context_span[0]) + n_new
        n_tokens += n_read
        if start < i and (n_tokens > n_most or i - start == _MOST_TOGETHER):
            yield requests[start:i]
            start, n_tokens = i, n_read
    if requests:
        yield requests[start:]


def generate_and_read(
    reader: SignalReader,
    requests: Sequence[Request],
    config: GenerationConfig,
    *,
    answer_span: AnswerSpan = "emitting",
    sampling: SamplingConfig | None = None,
    runs_last: bool = True,
    progress: Update | None = None,
) -> tuple[list[Answer], list[AnswerSignals]]:
    """Answer requests, and read the answers in the passes that write them.

    Greedy by default; results are in the order of the requests. Answers for which more
    tokens were run than they have (their stop string is several tokens) are read again.
    """
    sampling = sampling or config.greedy
    check_requests_fit(reader.backbone, requests, sampling.max_new_tokens)
    generator = TransformersGenerator(
        backbone=reader.backbone, tokens_per_batch=config.tokens_per_batch
    )
    prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in requests]
    n_new = sampling.max_new_tokens

    def write(rows: list[int]) -> list[tuple[Answer, AnswerSignals]]:
        some = [requests[i] for i in rows]
        how = {"answer_span": answer_span, "runs_last": runs_last}
        watch = DecodeReading(reader, [r.prompt for r in some], n_new, **how)
        replies = generator.write([prompts[i] for i in rows], sampling, watch)
        return list(_read_written(watch, some, replies))

    written: dict[int, tuple[Answer, AnswerSignals]] = {}
    for batch in generator.plan(prompts, sampling):
        parts = reader.backbone.splitter.run(
            write, batch, lambda i: len(requests[i].prompt.ids) + n_new
        )
        for rows, pairs in parts:
            written |= zip(rows, pairs, strict=True)
            if progress is not None:
                progress(len(written), len(requests))
    ordered = [written[i] for i in range(len(requests))]
    return [answer for answer, _ in ordered], [signals for _, signals in ordered]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingGenerator(TransformersGenerator):
    """Answers requests greedily, reading each batch in the passes that write it."""

    reader: SignalReader  # of the model that answers
    # The requests by their prompts; no other prompt is answered.
    requests: Mapping[tuple[int, ...], Request]
    # Called with the answers of each batch and their signals before the batch's texts
    # are returned; signals are None for an answer for which more tokens were run than
    # it has (its stop string is several tokens).
    on_batch: Callable[[list[Answer], list[AnswerSignals | None]], object]
    answer_span: AnswerSpan = "emitting"  # see `sequence_of`

    def write(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        watch: ForwardWatcher | None = None,
    ) -> list[Generated]:
        """Return the texts of one batch; see `TransformersGenerator`."""
        requests = [self.requests[self.prompt_ids(prompt)] for prompt in prompts]
        some, n_new = [r.prompt for r in requests], config.max_new_tokens
        span = self.answer_span
        reading = DecodeReading(self.reader, some, n_new, answer_span=span)
        replies = super().write(prompts, config, reading)
        answers = list(map(Request.answer, requests, replies))
        self.on_batch(answers, reading.signals(answers))
        return replies


def _read_written(
    watch: DecodeReading, requests: Sequence[Request], replies: Sequence[Generated]
) -> Iterator[tuple[Answer, AnswerSignals]]:
    """Yield a batch's answers with their signals, reading some answers again."""
    answers = list(map(Request.answer, requests, replies))
    signals = watch.signals(answers)
    for request, answer, read in zip(requests, answers, signals, strict=True):
        if read is None:
            sequence = sequence_of(
                answer,
                answer_span=watch.answer_span,
                question_start=request.prompt.question_start,
            )
            (read,) = watch.reader.read([sequence])
        yield answer, read


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenToken:
    """One token of an answer that is being written."""

    id: int  # the token
    # `[5]` float32, the distribution it was chosen from, see `AnswerSignals.prob`.
    prob: np.ndarray
    watch: DecodeReading
    request: Request
    ids: tuple[int, ...]  # the answer up to and including this token

    def so_far(self, stop_id: int | None) -> tuple[Answer, AnswerSignals]:
        """Return the answer up to this token, and its signals.

        With a `stop_id` of None, the answer counts as cut after this token; call this
        before the next token is requested. With a stop token, call it after the next
        token was requested, which computes how likely the stop token is, and before
        another is; the last token of an answer that is cut has no next.
        """
        answer = Answer(
            example_id=self.request.example_id,
            setting=self.request.setting,
            variant=self.request.variant,
            text="",
            prompt_ids=self.request.prompt.ids,
            token_ids=self.ids,
            stop_id=stop_id,
            context_span=self.request.prompt.context_span,
        )
        (signals,) = self.watch.ended([answer])
        assert signals is not None, "called at another step"
        return answer, signals


def read_stepwise(
    reader: SignalReader,
    request: Request,
    sampling: SamplingConfig,
    *,
    answer_span: AnswerSpan = "emitting",
) -> Generator[WrittenToken, None, tuple[Answer, AnswerSignals]]:
    """Yield an answer's tokens as they are written; return it with its signals.

    As in `generate_and_read` of one request; the model may be used between tokens.
    """
    check_requests_fit(reader.backbone, [request], sampling.max_new_tokens)
    prompt = GeneratorPrompt(text="", ids=request.prompt.ids)
    how = {"answer_span": answer_span, "runs_last": False}
    watch = DecodeReading(reader, [request.prompt], sampling.max_new_tokens, **how)
    generator = TransformersGenerator(backbone=reader.backbone)
    steps, ids = generator.write_stepwise(prompt, sampling, watch), ()
    n_tokens = len(request.prompt.ids) + sampling.max_new_tokens
    while True:
        try:
            with (
                raising_does_not_fit(n_tokens),
                reader.backbone.splitter.lock,
                exact_products(),
            ):
                token = next(steps)
        except StopIteration as end:
            reply: Generated = end.value
            break
        ids = (*ids, token)
        about = {"watch": watch, "request": request, "ids": ids}
        yield WrittenToken(id=token, prob=watch.last_prob(), **about)
    return next(_read_written(watch, [request], [reply]))


def decoding_differences(reader: SignalReader) -> dict[str, float]:
    """Compare the signals read while writing with those of reading the ids again.

    Two prompts of unequal length, beyond the model's smallest window, are answered with
    a few tokens. Returns each family's largest difference in an answer over its norm.
    """
    longest, _ = probe_lengths(reader.backbone)
    window = reader.backbone.max_length or longest + _N_CHECKED + _N_PADDED
    longest = min(longest + _N_PADDED, window - _N_CHECKED)
    lengths = longest, max(2, longest - _N_PADDED)
    ids = probe_ids(reader.backbone, lengths).tolist()
    prompts = [
        Prompt(tuple(ids[row][:n]), (1, 1 + n // 2)) for row, n in enumerate(lengths)
    ]
    requests = [
        Request(str(row), "with_context", "original", prompt)
        for row, prompt in enumerate(prompts)
    ]
    config = GenerationConfig(max_new_tokens=_N_CHECKED)
    answers, written = generate_and_read(reader, requests, config)
    again = reader.read([sequence_of(answer) for answer in answers])
    differences = dict.fromkeys(reader.shapes, 0.0)
    for signals, expected in zip(written, again, strict=True):
        for family, largest in differences.items():
            value, wanted = getattr(signals, family), getattr(expected, family)
            norm = float(np.linalg.norm(wanted)) or 1.0
            difference = float(np.linalg.norm(value - wanted)) / norm
            # A NaN counts as largest and stays; the built-in `max` would lose it.
            differences[family] = float(np.maximum(largest, difference))
    return differences


def check_decoding(reader: SignalReader) -> str | None:
    """Check that signals read while writing equal those of reading the ids again.

    Differences beyond rounding are the model's own: Llama 4 places its chunks of
    attention from the start of the padding. Returns None if they agree, else a sentence
    saying why answers must be read again.
    """
    backbone = reader.backbone
    about = [list(reader.hidden_layers), reader.hidden_spans, backbone.attention]

    def require_equal() -> bool:
        try:
            differences = decoding_differences(reader)
        except ValueError as error:
            raise ValueError(f"cannot be read while it writes: {error}") from error
        tolerance = _TOLERANCE[backbone.rounding_in(backbone.dtype)]
        for family, difference in differences.items():
            if not difference <= tolerance:
                raise ValueError(
                    f"computes other states with its cache than without: {family} "
                    f"differs by {difference:.1e} of its norm (expected at most "
                    f"{tolerance:.0e})"
                )
        return True

    try:
        backbone.check_once("decoding", about, require_equal)
    except ValueError as error:
        return f"backbone {backbone.name!r} {error}"
    return None
