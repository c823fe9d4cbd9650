"""States of prompts that are computed once: of what all begin with, and of equal ones.

A layer may keep other states than keys and values (recurrent ones, an indexer's); these
cannot be laid out for other rows, so that every row is computed from its beginning.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from beatrice.extract.backbone.layout import Layout

FEWEST_SHARED = 16  # a forward of its own for fewer costs about what it saves


def n_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many ids all prompts begin with; the last one of each is its own."""
    first, last = min(prompts), max(prompts)  # no two differ earlier than these
    pairs = enumerate(zip(first, last, strict=False))
    n_equal = next((i for i, (a, b) in pairs if a != b), len(first))
    return min(n_equal, min(map(len, prompts)) - 1)


def has_plain_states(layout: Layout) -> bool:
    """Say whether all layers keep keys and values alone, which rows can be taken of."""
    return _empty_cache(layout) is not None


def _empty_cache(layout: Layout) -> DynamicCache | None:
    """Return a cache, or None where a layer keeps other states than keys and values."""
    cache = DynamicCache(config=layout.decoder.config.get_text_config(decoder=True))
    # A dummy stands for a layer that keeps nothing: it reads another layer's keys.
    kinds = {type(layer) for layer in cache.layers} - {DummyLayer}
    is_plain = bool(kinds) and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    return cache if is_plain else None


def filled_layers(cache: DynamicCache) -> list[DynamicLayer]:
    """Return the layers of a cache that hold keys and values."""
    return [layer for layer in cache.layers if layer.keys is not None]


def begun_cache(
    layout: Layout,
    n_tokens: int,
    run: Callable[[DynamicCache], object],
    cache: DynamicCache | None = None,
) -> DynamicCache | None:
    """Return the keys and values of a beginning that others may go on from.

    Args:
      layout: of the model that computes them.
      n_tokens: of the beginning.
      run: puts it through the decoder with the cache that it is given.
      cache: of what was run of it before, to be added to; None begins with nothing.

    Returns:
      None where a layer keeps other states than keys and values (recurrent ones, an
      indexer's), or where a sliding window is shorter than the beginning.
    """
    cache = _empty_cache(layout) if cache is None else cache
    if cache is None:
        return None
    run(cache)
    filled = filled_layers(cache)
    is_whole = all(layer.keys.shape[-2] == n_tokens for layer in filled)
    return cache if filled and is_whole else None


def shared_states(
    layout: Layout, prompts: Sequence[Sequence[int]], width: int
) -> DynamicCache | None:
    """Return the keys and values of what all prompts begin with, computed once.

    Every row's lie as they would if the row were computed by itself behind its padding
    on the left; of a row that is shorter than `width` tokens the last ones are left
    out, and are computed with the rest of it.

    Returns:
      None where too little is common to be worth it, and as `begun_cache`: then every
      row is computed from its beginning.
    """
    n = n_shared(prompts)
    if len(prompts) < 2 or n < FEWEST_SHARED:
        return None
    ids = torch.tensor([list(prompts[0][:n])], device=layout.head.weight.device)

    def run(cache: DynamicCache) -> None:
        layout.decoder(input_ids=ids, past_key_values=cache, use_cache=True)

    if (cache := begun_cache(layout, n, run)) is None:
        return None
    n_padding = torch.tensor([[width - len(own)] for own in prompts])
    places = (torch.arange(n) - n_padding).clamp_min(0).to(ids.device)
    for layer in filled_layers(cache):
        layer.keys = layer.keys[0][:, places].transpose(0, 1).contiguous()
        layer.values = layer.values[0][:, places].transpose(0, 1).contiguous()
    return cache


def begun_states(
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    ids: torch.Tensor,
    mask: torch.Tensor,
    generate: Callable[..., Any],
) -> DynamicCache | None:
    """Return what generation may go on from, each row's states behind its padding.

    Where prompts are equal (draws of one question) that is all but their last token,
    computed once; else as `shared_states`.

    Args:
      layout: of the model that generates.
      prompts: ids, none empty.
      ids: `[n_prompts, width]`, the prompts padded on the left.
      mask: likewise, 0 where there is padding.
      generate: of the model, given ids, mask and options, returning its states too; it
        knows what positions and masks its architecture needs.
    """
    width, own = ids.shape[1], {tuple(p): row for row, p in enumerate(prompts)}
    begun = _empty_cache(layout)
    if len(own) == len(prompts) or min(map(len, own)) < 2 or begun is None:
        return shared_states(layout, prompts, width)
    shared = shared_states(layout, [prompt[:-1] for prompt in own], width - 1)
    found = generate(
        ids[list(own.values()), :-1],
        mask[list(own.values()), :-1],
        past_key_values=begun if shared is None else shared,
        max_new_tokens=1,
    )
    places = {prompt: place for place, prompt in enumerate(own)}
    rows = torch.tensor([places[tuple(prompt)] for prompt in prompts])
    found.past_key_values.batch_select_indices(rows.to(ids.device))
    return found.past_key_values
