"""How each token is chosen, what it is worth to the model, and when a row is done."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from beatrice.extract.generate.generator import SamplingConfig, decode_ids, find_stop


def _likeliest(scores: torch.Tensor, n_most: int | None) -> torch.Tensor:
    """Return the places of each row's `n_most` largest, and of all equal to the last.

    What is drawn is one of them; to sort a vocabulary for its top p takes 20 times as
    long as a whole row's other sums.
    """
    n_words = scores.shape[-1]
    if n_most is None or n_most >= n_words:
        return torch.arange(n_words, device=scores.device).expand(len(scores), -1)
    top = scores.topk(min(2 * n_most, n_words), dim=-1)
    last = top.values[:, n_most - 1, None]
    if (top.values[:, -1:] == last).any():
        top = scores.topk(int((scores >= last).sum(-1).max()), dim=-1)
    return top.indices


class Choice(LogitsProcessor):
    """Chooses each token, greedily or by a draw, and notes its log-probability.

    With Gumbel noise the largest logit is a draw from the softmax. Every row has a
    generator of its own, so that a draw does not depend on its batch.

    The log-probabilities are kept, not the logits: `output_logits` would keep tens of
    gigabytes for a batch of rewrites and a vocabulary of 150 000.

    Args:
      config: how tokens are drawn; a greedy one changes no logits.
      seeds: one per row; not read by a greedy one.
      device: of the logits.
      stops: ids that end a row; it is padded with them, and drawn no more.
    """

    def __init__(
        self,
        config: SamplingConfig,
        seeds: Sequence[int],
        device: torch.device,
        stops: Sequence[int],
    ) -> None:
        """Begin with all rows."""
        self._stops = torch.tensor(list(stops), device=device)
        self._found: list[torch.Tensor] = []
        self._generators: list[torch.Generator] = []
        self._warpers, self._n_most = LogitsProcessorList(), config.top_k
        if config.is_greedy:
            return
        self._generators = [torch.Generator(device).manual_seed(s) for s in seeds]
        self._warpers.append(TemperatureLogitsWarper(float(config.temperature)))
        if config.top_k is not None:
            self._warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            self._warpers.append(TopPLogitsWarper(config.top_p))

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor:
        """Return `[n_rows, n_vocabulary]` logits; the largest of a row is taken."""
        if not self._generators:
            log_probs = scores.to(torch.float32).log_softmax(-1)
            # The largest itself: to find its place costs ten times as much on a CPU.
            self._found.append(log_probs.amax(-1, keepdim=True))
            return scores
        is_live = torch.ones_like(input_ids[:, -1], dtype=torch.bool)
        if self._found:  # before, a prompt's last token stands there
            is_live = ~torch.isin(input_ids[:, -1], self._stops)
        live = is_live.nonzero()[:, 0]
        own = scores[live]
        words = _likeliest(own, self._n_most)
        kept = self._warpers(input_ids, own.gather(-1, words))
        rows = [
            torch.rand(
                scores.shape[1], generator=self._generators[row], device=own.device
            )
            for row in live.tolist()
        ]
        tiny = torch.finfo(torch.float32).tiny
        noise = torch.stack(rows).gather(-1, words).clamp_min(tiny)
        best = (kept - torch.log(-torch.log(noise))).argmax(-1, keepdim=True)
        chosen = words.gather(-1, best)
        told = own.gather(-1, chosen) - own.float().logsumexp(-1, keepdim=True)
        log_probs = torch.zeros((len(scores), 1), device=own.device)
        self._found.append(log_probs.index_copy_(0, live, told))
        drawn = torch.full_like(scores, -torch.inf)
        drawn[live, chosen[:, 0]] = 0.0
        return drawn

    def taken(self) -> list[list[float]]:
        """Return `[n_rows, n_new_tokens]` in nats, of the model itself; forget them."""
        found = torch.cat(self._found, dim=1).tolist()
        self._found.clear()
        return found

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows."""
        if self._generators:
            self._generators = [self._generators[row] for row in rows]


class Done(StoppingCriteria):
    """Ends a batch when half of its rows are done, so that the others go on alone.

    A row is done at a stop token, at its longest, or when its text holds a stop string;
    texts are decoded, since one string is many tokens: a line feed ends hundreds.

    Attributes:
      rows: `[n_rows]`, whether each is done.

    Args:
      tokenizer: that decodes.
      edges: tokens of the prompts with their padding, and with the longest text.
      stop: strings.
      stops: ids.
      are_parted: whether the others can go on alone; else the batch ends with its last.
    """

    def __init__(
        self,
        tokenizer: Any,
        edges: tuple[int, int],
        stop: Sequence[str],
        stops: Sequence[int],
        *,
        are_parted: bool,
    ) -> None:
        """Begin with no row done."""
        self._tokenizer, self._edges, self._stop = tokenizer, edges, stop
        self._stops, self._are_parted = list(stops), are_parted
        self.rows = torch.zeros(0, dtype=torch.bool)

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any
    ) -> torch.BoolTensor:
        """Return `[n_rows]`, all true where the batch is to end."""
        start, stop = self._edges
        stops = torch.tensor(self._stops, device=input_ids.device)
        found = torch.isin(input_ids[:, -1], stops) | (input_ids.shape[1] >= stop)
        if self._stop:
            texts = (
                decode_ids(self._tokenizer, row)
                for row in input_ids[:, start:].tolist()
            )
            ended = [find_stop(text, self._stop) is not None for text in texts]
            found |= torch.tensor(ended, device=input_ids.device)
        self.rows = found
        is_over = self._are_parted and 2 * int(found.sum()) >= len(found)
        return found | is_over
