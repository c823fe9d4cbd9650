"""The backend on this machine: Transformers, in batches of similar length."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.backbone.sharing import begun_states, has_plain_states
from beatrice.extract.generate.backends.choosing import Choice, Done
from beatrice.extract.generate.generator import (
    Generated,
    GeneratorPrompt,
    SamplingConfig,
    cut_at_stop,
    draw_seed,
    stop_ids_of,
    tokenizer_identity,
)
from beatrice.extract.generate.prompts import render_message
from beatrice.extract.generate.requests import GenerationConfig, Request, plan_batches
from beatrice.extract.records import Answer


def stop_ids(backbone: Backbone) -> tuple[int, ...]:
    """Return the tokens that end a text.

    Raises:
      ValueError: the model names no such token.
    """
    stop = backbone.model.generation_config.eos_token_id
    if stop is None:
        stop = backbone.model.config.get_text_config().eos_token_id
    return stop_ids_of(stop, backbone.name)


@contextlib.contextmanager
def _contiguous_states(backbone: Backbone) -> Iterator[None]:
    """Give the output matrix its states in one piece.

    Of a prompt only the last states are multiplied, which is a view with holes. Torch
    multiplies such a view in bfloat16 on a CPU by a copy of the matrix for every row:
    58 GB for 172 rows and 262,144 words.
    """
    head = backbone.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),))
    try:
        yield
    finally:
        hook.remove()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersGenerator:
    """Generates with a backbone that is loaded here.

    Attributes:
      backbone: has a tokenizer.
      tokens_per_batch: prompt and new tokens, padding included.
    """

    backbone: Backbone
    tokens_per_batch: int = 16_384

    @property
    def identity(self) -> dict[str, Any]:
        """Return what changes a text."""
        return {
            "backend": "transformers",
            "revision": self.backbone.revision,
            **tokenizer_identity(self.backbone.tokenizer),
            "enable_thinking": False,
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
        rendered = render_message(tokenizer, prompt.text)
        # The template writes its own special tokens.
        return tuple(tokenizer(rendered.text, add_special_tokens=False)["input_ids"])

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index, text); see `batches`."""
        return itertools.chain.from_iterable(self.batches(prompts, config, done))

    def plan(
        self, prompts: Sequence[GeneratorPrompt], config: SamplingConfig
    ) -> list[tuple[int, ...]]:
        """Return the batches of prompts, as indices; see `plan_batches`."""
        lengths = [self.count_tokens(prompt) for prompt in prompts]
        return plan_batches(lengths, self._batching(config))

    def _batching(self, config: SamplingConfig) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=config.max_new_tokens,
            tokens_per_batch=self.tokens_per_batch,
        )

    def batches(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[list[tuple[int, Generated]]]:
        """Yield the (index, text) of each batch; one is skipped if all of it is done.

        Raises:
          ValueError: a prompt and its text do not fit the model's window, or the
            model's logits are not finite.
        """
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        lengths, n_new = [len(tokens) for tokens in ids], config.max_new_tokens
        window = self.max_length
        if window is not None and any(n + n_new > window for n in lengths):
            raise ValueError(
                f"the longest prompt has {max(lengths)} tokens and its reply may have "
                f"{n_new}, but {self.backbone.name} has a window of {window}; use a "
                "model with a longer one, nothing is cut"
            )
        for batch in plan_batches(lengths, self._batching(config)):
            if all(i in done for i in batch):
                continue
            seeds = [draw_seed(prompts[i], config) for i in batch]
            stops = stop_ids(self.backbone)
            choice = Choice(config, seeds, self.backbone.device, stops)
            written = self._continue([ids[i] for i in batch], config, choice)
            yield [
                (i, self._text(len(ids[i]), tokens, log_probs, config.stop))
                for i, (tokens, log_probs) in zip(batch, written, strict=True)
            ]

    @torch.inference_mode()
    def _continue(
        self, prompts: Sequence[Sequence[int]], config: SamplingConfig, choice: Choice
    ) -> list[tuple[list[int], list[float]]]:
        """Return of every prompt the ids that are chosen, and their log-probabilities.

        When half of the rows are done the others go on without them, so that a long
        answer does not keep short ones in the batch.
        """
        width, stops = max(map(len, prompts)), stop_ids(self.backbone)
        # Padded on the left, since generation appends to the right.
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        ids, mask = ids.to(self.backbone.device), mask.to(self.backbone.device)

        def run(ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
            return self.backbone.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,  # draws are made by the processor
                num_beams=1,
                repetition_penalty=1.0,  # some checkpoints have another default
                eos_token_id=list(stops),
                pad_token_id=stops[0],
                return_dict_in_generate=True,
                **options,
            )

        found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        rows, edges = list(range(len(prompts))), (width, width + config.max_new_tokens)
        layout, tokenizer = self.backbone.layout, self.backbone.tokenizer
        are_parted = has_plain_states(layout)
        with _contiguous_states(self.backbone):
            cache = begun_states(layout, prompts, ids, mask, run)
            while rows:
                n_read = ids.shape[1]
                done = Done(tokenizer, edges, config.stop, stops, are_parted=are_parted)
                made = run(
                    ids,
                    mask,
                    past_key_values=cache,
                    max_new_tokens=edges[1] - n_read,
                    logits_processor=LogitsProcessorList([choice]),
                    stopping_criteria=StoppingCriteriaList([done]),
                )
                new = made.sequences[:, n_read:]
                for row, *written in zip(rows, new, choice.taken(), strict=True):
                    found[row][0].extend(written[0].tolist())
                    found[row][1].extend(written[1])
                left = (~done.rows).nonzero()[:, 0]
                if len(left):
                    cache, ids = made.past_key_values, made.sequences[left]
                    cache.batch_select_indices(left)
                    mask = torch.cat([mask[left], torch.ones_like(new[left])], dim=1)
                    choice.keep(left.tolist())
                rows = [rows[place] for place in left.tolist()]
        return found

    def _text(
        self,
        n_prompt: int,
        tokens: list[int],
        log_probs: list[float],
        stop: Sequence[str],
    ) -> Generated:
        """Return what was written before it stopped, and the padding behind that."""
        stops = stop_ids(self.backbone)
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        kept = tokens[:end]
        n_new = len(kept) + (end is not None)
        if any(map(math.isnan, log_probs[:n_new])):
            raise ValueError(
                f"{self.backbone.name} gives logits that are not finite, in "
                f"{self.identity['dtype']}: its weights are damaged, or too large for "
                "this type; check them, or load them as float32"
            )
        whole = Generated(
            text=self.backbone.tokenizer.decode(kept, skip_special_tokens=True).strip(),
            token_ids=tuple(kept),
            stop_id=None if end is None else tokens[end],
            log_probs=tuple(log_probs[:n_new]),
            finish="length" if end is None else "stop",
            n_prompt_tokens=n_prompt,
            n_new_tokens=n_new,
        )
        found = cut_at_stop(whole, stop, self.backbone.tokenizer)
        if found is whole:
            return whole
        # What stands behind the stop token is padding, or was written for other rows.
        n_new = len(found.token_ids or ()) + 1
        return msgspec.structs.replace(found, n_new_tokens=n_new)


def generate(
    backbone: Backbone, requests: Sequence[Request], config: GenerationConfig
) -> list[Answer]:
    """Answer requests greedily, in batches; returns the answers in their order.

    Raises:
      ValueError: a prompt and its answer do not fit the model's window; nothing is
        ever cut.
    """
    window, n_new = backbone.max_length, config.max_new_tokens
    for request in requests:
        if window is not None and len(request.prompt.ids) + n_new > window:
            raise ValueError(
                f"question {request.example_id!r} needs {len(request.prompt.ids)} "
                f"prompt and {n_new} answer tokens, but {backbone.name} has a window "
                f"of {window}; give fewer or shorter passages"
            )
    generator = TransformersGenerator(
        backbone=backbone, tokens_per_batch=config.tokens_per_batch
    )
    prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in requests]
    sampling = SamplingConfig(max_new_tokens=n_new, stop=config.stop)
    found = dict(generator.stream(prompts, sampling))
    return [request.answer(found[i]) for i, request in enumerate(requests)]
