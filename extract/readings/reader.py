"""What rival detectors read beyond the four families, in a pass of its own.

The exact ids of prompt and answer are read once more, a batch at a time; each group of
readings (`Part`) reduces what it sees at once. Without a reading of attention the model
attends with its own kernel.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from beatrice.extract.backbone.layout import LayerPass, watch_layers
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.readings.batch import Batch, Part, begin, cue_length, final_states
from beatrice.extract.readings.parts import PARTS
from beatrice.extract.readings.prompts import SECOND_PASSES
from beatrice.extract.records import Answer
from beatrice.extract.signals.attention import AttentionReading, run_reading
from beatrice.extract.signals.batch import budget_for
from beatrice.extract.signals.sequence import batches_of
from beatrice.extract.signals.span_sums import AttentionCall, AttentionMap, row_chunks

READINGS = tuple(n for part in PARTS for n in part.names) + tuple(SECOND_PASSES)
# Answers in memory at once; of these, those of similar length are read together.
_N_AHEAD = 256
_TOKENS_PER_BATCH = 4096


class _WeightReading(AttentionReading):
    """Shows the log attention weights to the parts that read them."""

    def __init__(self, batch: Batch, readers: Sequence[Part]) -> None:
        """Begin a forward; the model's own kernel attends, for no row is shared."""
        n_tokens = batch.ids.shape[1]
        layers = batch.backbone.attention_layers
        budget = batch.budget.n_attention_weights
        super().__init__(n_tokens, layers, (n_tokens, n_tokens), budget)
        self._parts, self._begun = readers, batch.beginning
        self._first = max(0, min(part.first_row() for part in readers))

    def reduce(
        self,
        layer: int,
        call: AttentionCall | AttentionMap,
        value: torch.Tensor | None,
    ) -> tuple[bool, torch.Tensor | None]:
        """Show a layer's weights in chunks of rows."""
        if isinstance(call, AttentionCall) and self._begun is not None:
            call = self._begun.before_call(layer, call)
        call = call.prepared()
        n_examples, n_heads, n_tokens = call.shape
        per_row = n_examples * n_heads * n_tokens
        for start, stop in row_chunks((self._first, n_tokens), per_row, self.budget):
            log_weights = _log_weights(call, start, stop)
            for reader in self._parts:
                reader.on_weights(layer, log_weights, start)
        if value is None:
            return True, None
        return True, value.new_empty((n_examples, 0, n_heads, value.shape[-1]))


def _log_weights(
    call: AttentionCall | AttentionMap, start: int, stop: int
) -> torch.Tensor:
    """Return the log weights of some rows, `[n_examples, n_heads, n_rows, stop]`."""
    if isinstance(call, AttentionMap):
        return call.map[:, :, start:stop, :stop].float().log()
    logits = call.logits(start, stop)
    log_total = logits.logsumexp(-1, keepdim=True)
    if call.sinks is not None:
        log_total = torch.logaddexp(log_total, call.sinks.float()[:, None, None])
    return logits.sub_(log_total)


def check_names(names: Sequence[str]) -> frozenset[str]:
    """Return the names, or refuse those that no part reads."""
    if unknown := sorted(set(names) - set(READINGS)):
        raise ValueError(
            f"no reading is called {', '.join(unknown)}; expected some of "
            f"{', '.join(READINGS)}"
        )
    return frozenset(names)


def read(
    backbone: Backbone,
    answers: Sequence[Answer],
    names: Sequence[str],
    *,
    swapped: Sequence[tuple[int, ...] | None] | None = None,
    truth_prompts: Sequence[tuple[int, ...] | None] | None = None,
    drawn: Sequence[Sequence[tuple[int, ...] | None]] | None = None,
    n_cue: int | None = None,
    tokens_per_batch: int = _TOKENS_PER_BATCH,
) -> Iterator[dict[str, np.ndarray]]:
    """Read the answers again and reduce what is seen to the readings asked for.

    Args:
      backbone: the model that gave the answers.
      answers: of one setting; of any length.
      names: of `READINGS`; what each is stands at the part that gives it.
      swapped: for "lumina_mmd", one per answer: the ids of the same prompt with other
        passages, see `extract.readings.prompts.swapped_prompts`.
      truth_prompts: for "p_true", one per answer, see `truth_prompt`.
      drawn: for "sample_states", the token ids of each answer's draws.
      n_cue: for "lookback", see `cue_length`; None takes it from these answers, so
        give it where they are read in several calls.
      tokens_per_batch: most tokens of a batch, padding included; a longer sequence is a
        batch of its own. What is read does not depend on it, up to rounding.

    Yields:
      For each answer, in order, float32 arrays by name; NaN where a reading is
      undefined, such as for an answer without tokens.
    """
    wanted = check_names(names)
    given = {"lumina_mmd": swapped, "p_true": truth_prompts, "sample_states": drawn}
    for name in wanted & set(given):
        if given[name] is None or len(given[name]) != len(answers):
            n_given = "none" if given[name] is None else len(given[name])
            raise ValueError(
                f"the reading {name!r} needs what it reads for each of {len(answers)} "
                f"answers, found {n_given}; see `extract.readings.reader.read`"
            )
    cue = cue_length(answers) if n_cue is None else n_cue
    for start in range(0, len(answers), _N_AHEAD):
        ahead = slice(start, start + _N_AHEAD)
        inputs = {name: given[name][ahead] for name in wanted & set(given)}
        readings = _read_some(
            backbone, answers[ahead], wanted, inputs, cue, tokens_per_batch
        )
        yield from readings


@torch.no_grad()
def _read_some(
    backbone: Backbone,
    answers: Sequence[Answer],
    wanted: frozenset[str],
    inputs: dict[str, Any],
    n_cue: int,
    tokens_per_batch: int,
) -> list[dict[str, np.ndarray]]:
    readings: list[dict[str, np.ndarray]] = [{} for _ in answers]
    swapped = inputs.get("lumina_mmd", [None] * len(answers))
    kinds = [kind for kind in PARTS if wanted & set(kind.names)]
    lengths = [
        max(len(answer.prompt_ids), len(other or ())) + len(answer.token_ids)
        for answer, other in zip(answers, swapped, strict=True)
    ]
    prompts = [answer.prompt_ids for answer in answers]
    prompts += [other for other in swapped if other is not None]
    begun = begin(backbone.layout, prompts) if kinds else None
    n_begun = 0 if begun is None else begun.n_tokens
    behind = [n - n_begun for n in lengths] if kinds else []
    for indices in batches_of(behind, tokens_per_batch, n_beside=n_begun):
        batch = Batch(
            backbone=backbone,
            answers=[answers[i] for i in indices],
            swapped=[swapped[i] for i in indices],
            n_cue=n_cue,
            budget=budget_for(backbone.device),
            beginning=begun,
        )
        backbone.check_length(lengths[indices[0]])
        for name, values in _read_batch(batch, kinds, wanted).items():
            for index, value in zip(indices, values, strict=True):
                readings[index][name] = value.float().cpu().numpy()
    for name, second_pass in SECOND_PASSES.items():
        if name in wanted:
            values = second_pass(backbone, answers, inputs[name], tokens_per_batch)
            for index, value in enumerate(values):
                readings[index][name] = value
    return readings


def _read_batch(
    batch: Batch, kinds: Sequence[type[Part]], wanted: frozenset[str]
) -> dict[str, list[torch.Tensor]]:
    reducers = [kind(batch, wanted) for kind in kinds]
    layout, begun = batch.backbone.layout, batch.beginning

    def on_layer(layer_pass: LayerPass) -> None:
        if begun is not None:
            layer_pass = begun.before_pass(layer_pass)
        for reducer in reducers:
            reducer.on_layer(layer_pass)

    if readers := [reducer for reducer in reducers if reducer.reads_weights]:
        reading = _WeightReading(batch, readers)
        if begun is None:
            final = run_reading(layout, batch.ids, reading, on_layer)
        else:
            behind, cache = (
                batch.ids[:, begun.n_tokens :],
                begun.cache_of(len(batch.ids)),
            )
            final = begun.before(run_reading(layout, behind, reading, on_layer, cache))
        reading.found()
    else:
        with watch_layers(layout, on_layer):
            final = final_states(layout, batch.ids, begun)
    readings: dict[str, list[torch.Tensor]] = {}
    for reducer in reducers:
        readings |= reducer.finish(final)
    return readings
