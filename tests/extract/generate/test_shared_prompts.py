"""What a batch shares is computed once, what is done is left: no text changes."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from beatrice.benchmarks.bench.tiny_models import N_TEXT_IDS, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate import local
from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.local import TransformersGenerator
from tests.extract.generate.generating import texts

N_SHARED = 40


class Words:
    """A tokenizer of numbers."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def backbone_of(name):
    model = tiny_model(name)
    if name == "gemma4":  # longer than what is common, shorter than a sequence
        model.config.sliding_window = N_SHARED + 8
        model = type(model)(model.config).eval().requires_grad_(False)
    model.generation_config.eos_token_id = 0
    model.generation_config.pad_token_id = 0
    return Backbone.from_model(model, tokenizer=Words())


def prompts_with(n_shared):
    rng = np.random.default_rng(0)
    common = rng.integers(3, N_TEXT_IDS, n_shared).tolist()
    tails = [rng.integers(3, N_TEXT_IDS, n).tolist() for n in (9, 4, 1, 12, 9, 6)]
    return [(*common, *tail) for tail in tails]


def asked_of(prompts):
    return [GeneratorPrompt(text="", ids=ids) for ids in prompts]


def written(backbone, prompts, config=None):
    generator = TransformersGenerator(backbone=backbone)
    config = config or SamplingConfig(max_new_tokens=6)
    return texts(generator, asked_of(prompts), config)


# Full attention, learned positions, ALiBi, windows shorter than what is common,
# recurrent layers, and layers that share their keys.
@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", "bloom", "gemma3", "mistral_window", "qwen3_5", "gemma4"],
)
def test_texts_are_those_of_each_prompt_by_itself(name):
    backbone, prompts = backbone_of(name), prompts_with(N_SHARED)
    together = written(backbone, prompts)
    for prompt, found in zip(prompts, together, strict=True):
        alone = written(backbone, [prompt])[0]
        assert found.token_ids == alone.token_ids
        # Padding and the cache change the order of float32 sums.
        assert found.log_probs == pytest.approx(alone.log_probs, abs=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma4"])
def test_what_is_common_is_computed_once(name):
    backbone, prompts = backbone_of(name), prompts_with(N_SHARED)
    with torch.inference_mode():
        cache = local.shared_states(backbone.layout, prompts, N_SHARED + 12)
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == N_SHARED
    n_read = []
    handle = backbone.layout.layers[0].module.register_forward_pre_hook(
        lambda module, given: n_read.append(given[0].shape[:2])
    )
    written(backbone, prompts)
    handle.remove()
    assert n_read[:2] == [(1, N_SHARED), (6, 12)]


@pytest.mark.parametrize(
    ("name", "n_shared"), [("llama", 15), ("mistral_window", 40), ("qwen3_5", 40)]
)
def test_little_in_common_short_windows_and_recurrent_states_share_nothing(
    name, n_shared
):
    backbone, prompts = backbone_of(name), prompts_with(n_shared)
    with torch.inference_mode():
        assert local.shared_states(backbone.layout, prompts, n_shared + 12) is None


def test_the_last_token_of_the_shortest_prompt_is_its_own():
    prompts = prompts_with(N_SHARED)
    assert local.n_shared([*prompts, prompts[0][:30]]) == 29
    assert local.n_shared([prompts[0], prompts[0]]) == len(prompts[0]) - 1
    assert local.n_shared([(1, 2, 3), (2, 2, 3)]) == 0


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bloom", "gemma3", "gemma4", "qwen3_5"]
)
def test_draws_to_equal_prompts_are_those_of_each_by_itself(name):
    config = SamplingConfig(max_new_tokens=5, temperature=9.0, top_k=20, top_p=0.9)
    generator = TransformersGenerator(backbone=backbone_of(name))
    asked = [
        GeneratorPrompt(text="", ids=ids, sample=k)
        for ids in prompts_with(N_SHARED)[:3]
        for k in range(3)
    ]
    found = dict(generator.stream(asked, config))
    assert len({found[i].token_ids for i in range(9)}) > 3
    for i, prompt in enumerate(asked):
        alone = dict(generator.stream([prompt], config))[0]
        assert found[i].token_ids == alone.token_ids
        assert found[i].log_probs == pytest.approx(alone.log_probs, abs=2e-4)


def test_an_equal_prompt_is_computed_once():
    backbone, prompts = backbone_of("llama"), prompts_with(N_SHARED)
    n_read = []
    handle = backbone.layout.layers[0].module.register_forward_pre_hook(
        lambda module, given: n_read.append(given[0].shape[:2])
    )
    written(backbone, [*prompts[:2], *prompts[:2], prompts[0]])
    handle.remove()
    assert n_read[:3] == [(1, N_SHARED), (2, 8), (5, 1)]


ENDING = SamplingConfig(max_new_tokens=24, stop=("5",))


def rows_read(backbone, prompts, config):
    """The texts, and how many rows every forward read."""
    n_rows = []
    handle = backbone.layout.layers[0].module.register_forward_pre_hook(
        lambda module, given: n_rows.append(len(given[0]))
    )
    found = written(backbone, prompts, config)
    handle.remove()
    return found, n_rows


@pytest.mark.parametrize("draws", [{}, {"temperature": 3.0, "top_k": 40}])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bloom", "gemma3", "mistral_window", "qwen3_5", "gemma4"]
)
def test_rows_that_are_done_leave_and_no_text_changes(name, draws):
    backbone, config = backbone_of(name), dataclasses.replace(ENDING, **draws)
    prompts = prompts_with(N_SHARED)
    together, n_rows = rows_read(backbone, prompts, config)
    n_new = [found.n_new_tokens for found in together]
    assert len(set(n_new)) > 1
    for prompt, found in zip(prompts, together, strict=True):
        alone = rows_read(backbone, [prompt], config)[0][0]
        assert (found.text, found.token_ids) == (alone.text, alone.token_ids)
        assert (found.finish, found.n_new_tokens) == (alone.finish, alone.n_new_tokens)
        assert found.log_probs == pytest.approx(alone.log_probs, abs=2e-4)
    n_steps = max(n_new)
    if name == "qwen3_5":  # recurrent states stay where they are
        assert n_rows[-n_steps:] == [len(prompts)] * n_steps
    else:
        # Half leave together: no forward reads more than twice the rows that are left.
        left = [sum(n > step for n in n_new) for step in range(n_steps)]
        assert all(a <= 2 * b for a, b in zip(n_rows[-n_steps:], left, strict=True))
