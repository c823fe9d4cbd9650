"""The backend on this machine: Transformers, in batches of similar length."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from extract.backbone.loading import Backbone
from extract.generate.generator import (
    Generated,
    GeneratorPrompt,
    SamplingConfig,
    draw_seed,
    stop_ids_of,
    tokenizer_identity,
)
from extract.generate.prompts import render_message
from extract.generate.requests import GenerationConfig, Request, plan_batches
from extract.records import Answer


def _check_window(backbone: Backbone, request: Request, config: GenerationConfig):
    needed = len(request.prompt.ids) + config.max_new_tokens
    if backbone.max_length is not None and needed > backbone.max_length:
        raise ValueError(
            f"question {request.example_id!r} needs {len(request.prompt.ids)} prompt "
            f"and {config.max_new_tokens} answer tokens, but {backbone.name} has a "
            f"window of {backbone.max_length}; give fewer or shorter passages"
        )


def stop_ids(backbone: Backbone) -> tuple[int, ...]:
    """Return the tokens that end a text.

    Raises:
      ValueError: the model names none.
    """
    stop = backbone.model.generation_config.eos_token_id
    if stop is None:
        stop = backbone.model.config.get_text_config().eos_token_id
    return stop_ids_of(stop, backbone.name)


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask `[n_examples, n_tokens]`; generation appends to the right."""
    width = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.long
    )
    return padded.to(device), mask.to(device)


@torch.inference_mode()
def generate(
    backbone: Backbone, requests: Sequence[Request], config: GenerationConfig
) -> list[Answer]:
    """Answer one batch of requests.

    Raises:
      ValueError: a prompt and its answer do not fit the model's window; nothing is
        ever cut.
    """
    for request in requests:
        _check_window(backbone, request, config)
    stops = stop_ids(backbone)
    ids, mask = left_padded([r.prompt.ids for r in requests], backbone.device)
    written = backbone.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=config.max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,  # some checkpoints bring another as their default
        eos_token_id=list(stops),
        pad_token_id=stops[0],
    )[:, ids.shape[1] :].tolist()
    return [
        _answer(backbone, request, tokens, stops)
        for request, tokens in zip(requests, written, strict=True)
    ]


def _answer(
    backbone: Backbone, request: Request, tokens: list[int], stops: tuple[int, ...]
) -> Answer:
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    return Answer(
        example_id=request.example_id,
        setting=request.setting,
        variant=request.variant,
        text=backbone.tokenizer.decode(kept, skip_special_tokens=True).strip(),
        prompt_ids=request.prompt.ids,
        token_ids=tuple(kept),
        stop_id=None if end is None else tokens[end],
        context_span=request.prompt.context_span,
        dropped=request.dropped,
    )


def generate_all(
    backbone: Backbone, requests: Sequence[Request], config: GenerationConfig
) -> Iterator[list[Answer]]:
    """Yield the answers of one planned batch after another."""
    lengths = [len(request.prompt.ids) for request in requests]
    for batch in plan_batches(lengths, config):
        yield generate(backbone, [requests[i] for i in batch], config)


class _LogProbs(LogitsProcessor):
    """Notes the log-probability of every token written; changes nothing.

    Keeps one step's logits at a time: all of them, as `output_logits` keeps them, are
    tens of gigabytes for a batch of rewrites and a vocabulary of 150 000.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None
        self._found: list[torch.Tensor] = []

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor:
        """Return the scores; note the step before, whose token is known by now."""
        self._note(input_ids[:, -1:])
        self._last = scores.to(torch.float32).log_softmax(-1)
        return scores

    def _note(self, tokens: torch.Tensor) -> None:
        if self._last is not None:
            self._found.append(self._last.gather(-1, tokens))

    def finish(self, tokens: torch.Tensor) -> list[list[float]]:
        """Return `[n_rows, n_new_tokens]` in nats, given the written sequences."""
        self._note(tokens[:, -1:])
        return torch.cat(self._found, dim=1).tolist()


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, so that the largest logit is a draw from the softmax.

    Every row has a generator of its own: a draw does not depend on its batch.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [
            torch.Generator(device=device).manual_seed(seed) for seed in seeds
        ]

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor:
        """Return `[n_rows, n_vocabulary]` logits plus noise."""
        uniform = torch.stack(
            [
                torch.rand(scores.shape[1], generator=g, device=scores.device)
                for g in self._generators
            ]
        )
        tiny = torch.finfo(torch.float32).tiny
        return scores - torch.log(-torch.log(uniform.clamp_min(tiny)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersGenerator:
    """Generates with a backbone that is loaded here.

    Attributes:
      backbone: has a tokenizer.
      tokens_per_batch: prompt and new tokens, padding included.
      enable_thinking: passed to the chat template; most templates ignore it.
    """

    backbone: Backbone
    tokens_per_batch: int = 16_384
    enable_thinking: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """Return what changes a text."""
        return {
            "backend": "transformers",
            "revision": self.backbone.revision,
            **tokenizer_identity(self.backbone.tokenizer),
            "enable_thinking": self.enable_thinking,
            "stop_ids": list(stop_ids(self.backbone)),
            "dtype": str(self.backbone.dtype).removeprefix("torch."),
        }

    @property
    def max_length(self) -> int | None:
        """Return the backbone's window in tokens."""
        return self.backbone.max_length

    def count_tokens(self, prompt: GeneratorPrompt) -> int:
        """Return how many tokens the model reads."""
        return len(self.prompt_ids(prompt))

    def prompt_ids(self, prompt: GeneratorPrompt) -> tuple[int, ...]:
        """Return the ids the model reads.

        A model without a chat template reads a message as it stands.
        """
        if prompt.ids is not None:
            return prompt.ids
        tokenizer = self.backbone.tokenizer
        if not prompt.is_chat or tokenizer.chat_template is None:
            return tuple(tokenizer(prompt.text)["input_ids"])
        rendered = render_message(
            tokenizer, prompt.text, enable_thinking=self.enable_thinking
        )
        # The template writes its own special tokens.
        return tuple(tokenizer(rendered.text, add_special_tokens=False)["input_ids"])

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index, text); a batch is skipped if all of it is done.

        Raises:
          ValueError: a prompt and its text do not fit the model's window.
        """
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        self._check_window(ids, config)
        batches = plan_batches(
            [len(tokens) for tokens in ids],
            GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                tokens_per_batch=self.tokens_per_batch,
            ),
        )
        for batch in batches:
            if all(i in done for i in batch):
                continue
            texts = self._generate(
                [ids[i] for i in batch], [prompts[i] for i in batch], config
            )
            yield from zip(batch, texts, strict=True)

    def _check_window(
        self, ids: Sequence[tuple[int, ...]], config: SamplingConfig
    ) -> None:
        limit = self.backbone.max_length
        needed = max((len(tokens) for tokens in ids), default=0)
        if limit is not None and needed + config.max_new_tokens > limit:
            raise ValueError(
                f"the longest prompt has {needed} tokens and its reply may have "
                f"{config.max_new_tokens}, but {self.backbone.name} has a window of "
                f"{limit}; use a model with a longer one, nothing is cut"
            )

    def _processors(
        self, prompts: Sequence[GeneratorPrompt], config: SamplingConfig
    ) -> list[LogitsProcessor]:
        """Return what turns the largest logit into a draw; nothing if greedy."""
        if config.is_greedy:
            return []
        seeds = [draw_seed(prompt, config) for prompt in prompts]
        processors: list[LogitsProcessor] = [
            TemperatureLogitsWarper(float(config.temperature))
        ]
        if config.top_k is not None:
            processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            processors.append(TopPLogitsWarper(config.top_p))
        processors.append(_GumbelNoise(seeds, self.backbone.device))
        return processors

    @torch.inference_mode()
    def _generate(
        self,
        ids: Sequence[tuple[int, ...]],
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
    ) -> list[Generated]:
        stops = stop_ids(self.backbone)
        padded, mask = left_padded(ids, self.backbone.device)
        log_probs = _LogProbs()
        sequences = self.backbone.model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            do_sample=False,  # the draws are in the processors
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
            logits_processor=LogitsProcessorList(
                [log_probs, *self._processors(prompts, config)]
            ),
        )
        tokens = sequences[:, padded.shape[1] :]
        return [
            self._generated(len(prompt), row, probs, stops)
            for prompt, row, probs in zip(
                ids, tokens.tolist(), log_probs.finish(tokens), strict=True
            )
        ]

    def _generated(
        self,
        n_prompt_tokens: int,
        tokens: list[int],
        log_probs: list[float],
        stops: tuple[int, ...],
    ) -> Generated:
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        kept = tokens if end is None else tokens[:end]
        n_new = len(kept) + (end is not None)
        return Generated(
            text=self.backbone.tokenizer.decode(kept, skip_special_tokens=True).strip(),
            token_ids=tuple(kept),
            stop_id=None if end is None else tokens[end],
            log_probs=tuple(log_probs[:n_new]),
            finish="length" if end is None else "stop",
            n_prompt_tokens=n_prompt_tokens,
            n_new_tokens=n_new,
        )
