"""Greedy answers in batches of similar length, with the exact ids kept."""

from collections.abc import Iterator, Sequence

import torch

from extract.backbone.loading import Backbone
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


def stop_ids_of(stop: int | Sequence[int] | None, name: str) -> tuple[int, ...]:
    """Return a checkpoint's `eos_token_id` as ids.

    Raises:
      ValueError: there is none.
    """
    if stop is None:
        raise ValueError(
            f"{name} names no end-of-text token, so no answer would ever "
            "end; add eos_token_id to its generation_config.json"
        )
    return (stop,) if isinstance(stop, int) else tuple(stop)


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
