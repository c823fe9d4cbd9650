"""What the prompts of a setting begin with is run once, and no reading changes."""

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.tiny_models import N_TEXT_IDS, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.readings.batch import Batch, begin
from beatrice.extract.readings.prompts import _end_states
from beatrice.extract.readings.reader import PARTS, _read_batch, read
from beatrice.extract.records import Answer
from beatrice.extract.signals.batch import ReadingBudget

N_SHARED = 24
OWN = frozenset(name for part in PARTS for name in part.names)


def ids_of(seed, n):
    return tuple(np.random.default_rng(seed).integers(10, N_TEXT_IDS, n).tolist())


def answer_of(seed, n_prompt, n_answer, prompt_ids=None):
    return Answer(
        example_id=f"q{seed}",
        setting="with_context",
        variant="original",
        text="",
        prompt_ids=prompt_ids or (*ids_of(0, N_SHARED), *ids_of(seed, n_prompt)),
        token_ids=ids_of(100 + seed, n_answer),
        stop_id=2,
        context_span=(N_SHARED, N_SHARED),
    )


ANSWERS = [answer_of(1, 9, 3), answer_of(2, 4, 1), answer_of(3, 14, 5)]
SWAPPED = [answer_of(10 + i, 7 + 2 * i, 0).prompt_ids for i in range(3)]
PROMPTS = [*(answer.prompt_ids for answer in ANSWERS), *SWAPPED]


def backbone_of(name):
    model = tiny_model(name)
    if name.startswith("gemma"):  # longer than what is common, shorter than a sequence
        model.config.sliding_window = 30
        model = type(model)(model.config).eval().requires_grad_(False)
    return Backbone.from_model(model)


@torch.no_grad()
def readings(backbone, begun, answers=ANSWERS, swapped=SWAPPED):
    batch = Batch(
        backbone=backbone,
        answers=answers,
        swapped=swapped,
        n_cue=1,
        budget=ReadingBudget(),
        beginning=begun,
    )
    return _read_batch(batch, PARTS, OWN)


# Full attention, learned positions, windows that a sequence outgrows, and layers that
# read the keys of others.
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gemma4"])
def test_a_batch_goes_on_from_its_beginning_to_the_same_readings(name):
    backbone = backbone_of(name)
    with torch.no_grad():
        begun = begin(backbone.layout, PROMPTS)
    assert begun.n_tokens == N_SHARED
    whole, own = readings(backbone, None), readings(backbone, begun)
    again = readings(backbone, begun)  # what one batch adds is not there for the next
    for reading in OWN:
        for one, other, third in zip(
            whole[reading], own[reading], again[reading], strict=True
        ):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
            assert torch.equal(other, third)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_beginning_goes_on_from_a_shorter_one(name):
    backbone, first = backbone_of(name), ids_of(0, N_SHARED)
    draws = [(*first, *ids_of(5, 20), *ids_of(30 + k, 1 + k)) for k in range(3)]
    answers = [answer_of(1, 9, 3, ids) for ids in draws]
    with torch.no_grad():
        short = begin(backbone.layout, PROMPTS)
        both, once = begin(backbone.layout, draws, short), begin(backbone.layout, draws)
    assert both.n_tokens == once.n_tokens == N_SHARED + 20
    with_both, with_once = (readings(backbone, b, answers, draws) for b in (both, once))
    for reading in OWN:
        for one, other in zip(with_both[reading], with_once[reading], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def test_another_beginning_gives_other_readings():
    backbone = backbone_of("llama")
    with torch.no_grad():
        begun = begin(backbone.layout, [ids_of(9, N_SHARED + 2)] * 2)
    whole, own = readings(backbone, None), readings(backbone, begun)
    assert begun.n_tokens >= N_SHARED
    assert not torch.allclose(
        torch.stack(whole["llmcheck_hidden"]), torch.stack(own["llmcheck_hidden"])
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_states_of_draws_are_those_of_each_sequence_by_itself(name):
    backbone, n_layers = backbone_of(name), 3
    for entry in (2, n_layers):
        with torch.no_grad():
            together = _end_states(backbone, PROMPTS, entry, 4096)
            alone = [_end_states(backbone, [ids], entry, 4096) for ids in PROMPTS]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_what_is_common_is_run_once():
    backbone, n_read = backbone_of("llama"), []
    handle = backbone.layout.layers[0].module.register_forward_pre_hook(
        lambda module, given: n_read.append(given[0].shape[:2])
    )
    list(read(backbone, ANSWERS, ["lookback", "lumina_mmd"], swapped=SWAPPED))
    handle.remove()
    assert n_read == [(1, N_SHARED), (3, 19), (3, 16)]


# A window shorter than what is common, recurrent layers, a softcap, sinks, and
# attention that the model does not ask for.
@pytest.mark.parametrize(
    "name", ["mistral_window", "qwen3_5", "gemma2", "gpt_oss", "bloom"]
)
def test_some_models_read_every_sequence_from_its_beginning(name):
    with torch.no_grad():
        assert begin(Backbone.from_model(tiny_model(name)).layout, PROMPTS) is None


def test_little_in_common_is_not_worth_a_run():
    backbone = backbone_of("llama")
    assert begin(backbone.layout, [ids[N_SHARED - 15 :] for ids in PROMPTS]) is None
    assert (
        begin(backbone.layout, PROMPTS[:1]) is None
        and begin(backbone.layout, []) is None
    )
