"""Every reading against a second implementation from the eager model's own outputs."""

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.tiny_models import N_TEXT_IDS, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.readings.batch import Batch, cue_length
from beatrice.extract.readings.prompts import SECOND_PASSES, middle_entry
from beatrice.extract.readings.reader import PARTS, READINGS, read
from beatrice.extract.records import Answer
from beatrice.extract.signals.batch import ReadingBudget, budget_for
from tests.extract.readings.reading_loops import Eager, expected

CUE = (5, 9, 7)
OWN = tuple(name for part in PARTS for name in part.names)
# Sums of float32 products in another order; the Gram matrix' logarithms in float64 of
# states that differ so.
TOLERANCE = 2e-4


def made_answer(seed, n_prompt, n_answer, is_cut=False):
    rng = np.random.default_rng(seed)
    ids = rng.integers(10, N_TEXT_IDS, n_prompt + n_answer).tolist()
    return Answer(
        example_id=f"q{seed}",
        setting="with_context",
        variant="original",
        text="",
        prompt_ids=(*ids[: n_prompt - 3], *CUE),
        token_ids=tuple(ids[n_prompt:]),
        stop_id=None if is_cut else 2,
        context_span=(1, n_prompt - 5),
    )


ANSWERS = [
    made_answer(1, 23, 3),
    made_answer(2, 14, 1),
    made_answer(3, 31, 5, is_cut=True),
    made_answer(4, 12, 0),
]
SWAPPED = [made_answer(10 + i, 18 + i, 0).prompt_ids for i in range(3)] + [None]
TRUTH = [made_answer(20 + i, 15 + i, 0).prompt_ids for i in range(3)] + [None]
DRAWN = [[(11, 12), (13,), (11, 12)], [(15, 16, 17)], [None, ()], []]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def backbone(family):
    return Backbone.from_model(tiny_model(family))


@pytest.fixture(scope="module")
def eager(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    return model


def read_all(backbone, answers=ANSWERS, **changes):
    given = {"swapped": SWAPPED, "truth_prompts": TRUTH, "drawn": DRAWN, "n_cue": 3}
    return list(read(backbone, answers, READINGS, **{**given, **changes}))


@pytest.fixture(scope="module")
def found(backbone):
    return read_all(backbone)


def test_every_reading_is_what_loops_over_the_eager_model_give(eager, found):
    for answer, swapped, one in zip(ANSWERS[:3], SWAPPED, found, strict=False):
        wanted = expected(eager, answer, swapped, 3)
        assert set(wanted) == set(OWN)
        for name, value in wanted.items():
            assert one[name].dtype == np.float32
            value = np.array(value)
            assert one[name].shape == value.shape, name
            np.testing.assert_allclose(
                one[name], value, rtol=TOLERANCE, atol=TOLERANCE / 10, err_msg=name
            )


def test_p_true_is_the_probability_of_the_last_id_behind_the_others(eager, found):
    for prompt, one in zip(TRUTH[:3], found, strict=False):
        logits = Eager(eager, prompt).logits[-2].softmax(-1)
        assert one["p_true"] == pytest.approx(float(logits[prompt[-1]]), rel=1e-4)
    assert np.isnan(found[3]["p_true"])


def test_the_states_of_draws_are_those_at_their_last_tokens(eager, found):
    entry = (eager.config.num_hidden_layers + 1) // 2
    for answer, draws, one in zip(ANSWERS, DRAWN, found, strict=True):
        assert one["sample_states"].shape == (len(draws), eager.config.hidden_size)
        for ids, state in zip(draws, one["sample_states"], strict=True):
            if not ids:
                assert np.isnan(state).all()
                continue
            seen = Eager(eager, answer.prompt_ids + ids).states[entry][-1]
            np.testing.assert_allclose(state, seen.numpy(), rtol=1e-4, atol=1e-5)


def test_the_middle_of_32_layers_is_16_and_of_40_is_20():
    assert [middle_entry(n) for n in (32, 40)] == [16, 20]


def test_an_answer_without_tokens_has_nan_where_its_tokens_are_read(backbone, found):
    whole = {"llmcheck_hidden_all", "llmcheck_attention_all", "lookback"}
    whole |= {"gnosis_maps", "gnosis_states"}
    ahead = {"window_entropy", "logit_entropy"}
    for name in set(OWN):
        assert found[3][name].shape == found[0][name].shape, name
        is_nan = np.isnan(found[3][name])
        assert not is_nan.any() if name in whole else is_nan.all(), name
    assert ahead <= set(OWN)


def test_what_is_read_does_not_depend_on_the_batch_nor_on_the_order(backbone, found):
    alone = read_all(backbone, tokens_per_batch=1)
    for one, other in zip(found, alone, strict=True):
        for name in READINGS:
            np.testing.assert_allclose(
                one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name
            )
    turned = read_all(
        backbone,
        ANSWERS[::-1],
        swapped=SWAPPED[::-1],
        truth_prompts=TRUTH[::-1],
        drawn=DRAWN[::-1],
    )
    for one, other in zip(found, turned[::-1], strict=True):
        for name in READINGS:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_chunks_of_one_row_give_what_one_chunk_gives(backbone):
    def parts_of(budget):
        from beatrice.extract.readings import reader

        batch = Batch(
            backbone=backbone, answers=ANSWERS, swapped=SWAPPED, n_cue=3, budget=budget
        )
        with torch.no_grad():
            return reader._read_batch(batch, PARTS, frozenset(OWN))

    small = ReadingBudget(
        n_attention_weights=1, n_tokens_per_chunk=1, n_words_per_block=2
    )
    pairs = parts_of(small), parts_of(budget_for(backbone.device))
    for name in OWN:
        for one, other in zip(pairs[0][name], pairs[1][name], strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False
            )


def test_only_what_is_asked_for_is_read(backbone, found):
    for name in READINGS:
        given = {"swapped": SWAPPED, "truth_prompts": TRUTH, "drawn": DRAWN}
        one = list(read(backbone, ANSWERS, [name], n_cue=3, **given))
        assert all(set(arrays) == {name} for arrays in one)
        for left, right in zip(one, found, strict=True):
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-5)


def test_without_a_reading_of_attention_the_model_attends_by_itself(backbone):
    class Watched(torch.overrides.TorchFunctionMode):
        n_softmax = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.n_softmax += func is torch.Tensor.logsumexp
            return func(*args, **(kwargs or {}))

    with Watched() as watched:
        list(read(backbone, ANSWERS, ["llmcheck_hidden"]))
        assert watched.n_softmax == 0
        list(read(backbone, ANSWERS, ["llmcheck_attention"]))
        assert watched.n_softmax > 0


def test_an_unknown_name_is_refused_and_so_is_a_missing_prompt(backbone):
    with pytest.raises(ValueError, match="no reading is called attn"):
        list(read(backbone, ANSWERS, ["attn"]))
    with pytest.raises(ValueError, match="'p_true' needs what it reads"):
        list(read(backbone, ANSWERS, ["p_true"]))
    with pytest.raises(ValueError, match="needs what it reads for each of 4"):
        list(read(backbone, ANSWERS, ["lumina_mmd"], swapped=SWAPPED[:2]))
    assert set(SECOND_PASSES) <= set(READINGS)


@pytest.mark.parametrize("name", ["bloom", "gpt_oss", "qwen3_5", "gpt2", "falcon"])
def test_other_architectures_give_finite_readings(name):
    backbone = Backbone.from_model(tiny_model(name))
    for one in read_all(backbone)[:3]:
        for reading in OWN:
            assert np.isfinite(one[reading]).all(), reading
        assert one["llmcheck_attention"].shape == (len(backbone.attention_layers),)


def test_the_cue_is_what_all_prompts_end_with():
    assert cue_length(ANSWERS) == 3
    assert cue_length(ANSWERS[:1]) == cue_length(ANSWERS[:1] * 2) == 1
