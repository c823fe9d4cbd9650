"""Every reading against loops over the eager model, also with a shared beginning."""

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.tiny_models import N_TEXT_IDS, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.readings.batch import Batch, begin, cue_length
from beatrice.extract.readings.formulas import map_statistics
from beatrice.extract.readings.reader import (
    PARTS,
    READINGS,
    SECOND_PASSES,
    _read_batch,
    end_states,
    hidden_state,
    middle_entry,
    read,
)
from beatrice.extract.signals.batch import ReadingBudget
from tests.extract.generate.loopback import shapes_run
from tests.extract.readings.loops import Eager, expected
from tests.records import an_answer

CUE = (5, 9, 7)
READING_NAMES = tuple(name for group in PARTS for name in group.names)
# Sums of float32 products differ in their order, and so do the states from which the
# logarithms of Gram matrices are computed in float64.
TOLERANCE = 2e-4


def ids_of(seed, n):
    return tuple(np.random.default_rng(seed).integers(10, N_TEXT_IDS, n).tolist())


def answer_of(seed, prompt_ids, n_answer, **fields):
    ids = {"prompt_ids": prompt_ids, "token_ids": ids_of(100 + seed, n_answer)}
    return an_answer(example_id=f"q{seed}", setting="with_context", **ids, **fields)


def answer_after_cue(seed, n_prompt, n_answer, **fields):
    prompt_ids = (*ids_of(seed, n_prompt - 3), *CUE)
    span = {"context_span": (1, n_prompt - 5)}
    return answer_of(seed, prompt_ids, n_answer, **span, **fields)


ANSWERS = [
    answer_after_cue(1, 19, 3),
    answer_after_cue(2, 9, 1),  # too short for a tenth of it to be a token
    answer_after_cue(3, 31, 5, stop_id=None),
    answer_after_cue(4, 12, 0),
]
SWAPPED = [answer_after_cue(10 + i, 18 + i, 0).prompt_ids for i in range(3)] + [None]
TRUTH = [answer_after_cue(20 + i, 15 + i, 0).prompt_ids for i in range(3)] + [None]
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


GIVEN = {"swapped": SWAPPED, "truth_prompts": TRUTH, "drawn": DRAWN}


def read_all(backbone, answers=ANSWERS, names=READINGS, **changes):
    return list(read(backbone, answers, names, **{**GIVEN, "n_cue": 3, **changes}))


@pytest.fixture(scope="module")
def arrays(backbone):
    return read_all(backbone)


def assert_same(items, others, names=READINGS):
    """Check that each answer has the same readings in both lists."""
    for item, other in zip(items, others, strict=True):
        for name in names:
            np.testing.assert_allclose(
                item[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_every_reading_equals_loops_over_the_eager_model(eager, arrays):
    for answer, swapped, item in zip(ANSWERS[:3], SWAPPED, arrays, strict=False):
        wanted = expected(eager, answer, swapped, 3)
        assert set(wanted) == set(READING_NAMES)
        for name, value in wanted.items():
            assert item[name].dtype == np.float32
            value = np.array(value)
            assert item[name].shape == value.shape, name
            np.testing.assert_allclose(
                item[name], value, rtol=TOLERANCE, atol=TOLERANCE / 10, err_msg=name
            )


def test_p_true_is_the_probability_of_the_last_id_given_the_others(eager, arrays):
    for prompt, item in zip(TRUTH[:3], arrays, strict=False):
        logits = Eager(eager, prompt).logits[-2].softmax(-1)
        assert item["p_true"] == pytest.approx(float(logits[prompt[-1]]), rel=1e-4)
    assert np.isnan(arrays[3]["p_true"])


def test_the_states_of_draws_are_those_at_their_last_tokens(eager, arrays):
    entry = (eager.config.num_hidden_layers + 1) // 2
    for answer, draws, item in zip(ANSWERS, DRAWN, arrays, strict=True):
        assert item["sample_states"].shape == (len(draws), eager.config.hidden_size)
        for ids, state in zip(draws, item["sample_states"], strict=True):
            if not ids:
                assert np.isnan(state).all()
                continue
            seen = Eager(eager, answer.prompt_ids + ids).states[entry][-1]
            np.testing.assert_allclose(state, seen.numpy(), rtol=1e-4, atol=1e-5)


def test_the_middle_of_32_layers_is_16_and_of_40_is_20():
    assert [middle_entry(n) for n in (32, 40)] == [16, 20]


def test_an_answer_without_tokens_has_nan_for_readings_of_tokens(backbone, arrays):
    whole = {"llmcheck_hidden_all", "llmcheck_attention_all", "lookback"}
    whole |= {"gnosis_maps", "gnosis_states"}
    assert {"window_entropy", "logit_entropy"} <= set(READING_NAMES) - whole
    for name in set(READING_NAMES):
        assert arrays[3][name].shape == arrays[0][name].shape, name
        is_nan = np.isnan(arrays[3][name])
        assert not is_nan.any() if name in whole else is_nan.all(), name


def test_readings_do_not_depend_on_the_batch_or_the_order(backbone, arrays):
    alone = read_all(backbone, tokens_per_batch=1)
    assert_same(arrays, alone)
    backwards = {name: values[::-1] for name, values in GIVEN.items()}
    turned = read_all(backbone, ANSWERS[::-1], **backwards)
    assert_same(arrays, turned[::-1])


WHOLE = ReadingBudget()


@torch.no_grad()
def readings(backbone, begun, answers, swapped, *, n_cue=1, budget=WHOLE):
    fields = {"answers": answers, "swapped": swapped, "n_cue": n_cue, "budget": budget}
    batch = Batch(backbone=backbone, beginning=begun, **fields)
    return _read_batch(batch, PARTS, frozenset(READING_NAMES))


def test_chunks_of_one_row_give_the_same_readings_as_one_chunk(backbone):
    least = {"n_attention_weights": 1, "n_tokens_per_chunk": 1, "n_words_per_block": 2}
    chunks, whole = (
        readings(backbone, None, ANSWERS, SWAPPED, n_cue=3, budget=budget)
        for budget in (ReadingBudget(**least), WHOLE)
    )
    checks = dict(rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False)
    assert_same_batch(chunks, whole, **checks)


def test_only_requested_readings_are_read(backbone, arrays):
    for name in READINGS:
        single = read_all(backbone, names=[name])
        assert all(set(item) == {name} for item in single)
        assert_same(single, arrays, [name])


def test_attention_is_computed_here_only_for_readings_of_attention(backbone):
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
    with pytest.raises(ValueError, match="unknown readings: attn"):
        list(read(backbone, ANSWERS, ["attn"]))
    with pytest.raises(ValueError, match="'p_true' needs its argument"):
        list(read(backbone, ANSWERS, ["p_true"]))
    with pytest.raises(ValueError, match="needs its argument for each of 4"):
        list(read(backbone, ANSWERS, ["lumina_mmd"], swapped=SWAPPED[:2]))
    assert set(SECOND_PASSES) <= set(READINGS)


@pytest.mark.parametrize("name", ["bloom", "gpt_oss", "qwen3_5", "gpt2", "falcon"])
def test_other_architectures_give_finite_readings(name):
    backbone = Backbone.from_model(tiny_model(name))
    for item in read_all(backbone)[:3]:
        for reading in READING_NAMES:
            assert np.isfinite(item[reading]).all(), reading
        assert item["llmcheck_attention"].shape == (len(backbone.attention_layers),)


def test_the_cue_is_what_all_prompts_end_with():
    assert cue_length(ANSWERS) == 3
    assert cue_length(ANSWERS[:1]) == cue_length(ANSWERS[:1] * 2) == 1


N_SHARED = 24


def after_shared(seed, n_prompt):
    return (*ids_of(0, N_SHARED), *ids_of(seed, n_prompt))


TAILED = [
    answer_of(seed, after_shared(seed, n), n_answer, context_span=(N_SHARED, N_SHARED))
    for seed, n, n_answer in ((1, 9, 3), (2, 4, 1), (3, 14, 5))
]
TAILED_SWAPS = [after_shared(10 + i, 7 + 2 * i) for i in range(3)]
PROMPTS = [*(answer.prompt_ids for answer in TAILED), *TAILED_SWAPS]


def backbone_of(name):
    model = tiny_model(name)
    if name.startswith("gemma"):  # between N_SHARED and the lengths of sequences
        model.config.sliding_window = 30
        model = type(model)(model.config).eval().requires_grad_(False)
    return Backbone.from_model(model)


def assert_same_batch(batch, other, rtol=2e-4, atol=2e-5, **checks):
    """Check that two batches, lists of tensors by reading, are the same."""
    for name in READING_NAMES:
        for left, right in zip(batch[name], other[name], strict=True):
            torch.testing.assert_close(left, right, rtol=rtol, atol=atol, **checks)


# Full attention, learned positions, windows that a sequence outgrows, and layers that
# read the keys of others.
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gemma4"])
def test_a_batch_that_continues_a_beginning_has_the_same_readings(name):
    backbone = backbone_of(name)
    with torch.no_grad():
        begun = begin(backbone.layout, PROMPTS)
    assert begun.n_tokens == N_SHARED
    # A batch leaves nothing in the beginning for the next.
    whole, continued, again = (
        readings(backbone, item, TAILED, TAILED_SWAPS) for item in (None, begun, begun)
    )
    assert_same_batch(whole, continued)
    assert_same_batch(continued, again, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_beginning_can_continue_a_shorter_one(name):
    backbone, first = backbone_of(name), ids_of(0, N_SHARED)
    draws = [(*first, *ids_of(5, 20), *ids_of(30 + k, 1 + k)) for k in range(3)]
    with torch.no_grad():
        short = begin(backbone.layout, PROMPTS, is_seen=False)
        assert short.n_tokens == N_SHARED
        assert begin(backbone.layout, draws, short).n_tokens == N_SHARED + 20
        assert begin(backbone.layout, PROMPTS, short) is short
        pick = hidden_state(backbone, 2)
        both, once = (end_states(backbone, draws, pick, 4096, b) for b in (short, None))
    torch.testing.assert_close(both, once, rtol=1e-4, atol=1e-5)


def test_another_beginning_gives_other_readings():
    backbone = backbone_of("llama")
    with torch.no_grad():
        begun = begin(backbone.layout, [ids_of(9, N_SHARED + 2)] * 2)
    assert begun.n_tokens >= N_SHARED
    whole, other = (
        torch.stack(readings(backbone, b, TAILED, TAILED_SWAPS)["llmcheck_hidden"])
        for b in (None, begun)
    )
    assert not torch.allclose(whole, other)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_end_states_of_a_batch_are_those_of_each_sequence_by_itself(name):
    backbone = backbone_of(name)
    for entry in (2, backbone.n_layers):
        pick = hidden_state(backbone, entry)
        together = end_states(backbone, PROMPTS, pick, 4096)
        alone = [end_states(backbone, [ids], pick, 4096) for ids in PROMPTS]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_a_shared_beginning_is_run_once():
    backbone = backbone_of("llama")
    with shapes_run(backbone) as shapes:
        list(read(backbone, TAILED, ["lookback", "lumina_mmd"], swapped=TAILED_SWAPS))
    assert shapes == [(1, N_SHARED), (3, 19), (3, 16)]


# A window shorter than the shared beginning, recurrent layers, a softcap, sinks, and
# attention without the attention function.
@pytest.mark.parametrize(
    "name", ["mistral_window", "qwen3_5", "gemma2", "gpt_oss", "bloom"]
)
def test_some_models_read_every_sequence_in_full(name):
    with torch.no_grad():
        assert begin(Backbone.from_model(tiny_model(name)).layout, PROMPTS) is None


def test_a_short_shared_beginning_is_not_run_separately():
    backbone = backbone_of("llama")
    assert begin(backbone.layout, [ids[N_SHARED - 15 :] for ids in PROMPTS]) is None
    for prompts in (PROMPTS[:1], []):
        assert begin(backbone.layout, prompts) is None


# From Amirhosein-gh98/Gnosis f8ff11d, `compute_attn_stats(A[None, None], ("all",))` in
# float64, where A is `planted_map()`.
GOLDEN = [
    *(2.433117151, 0.00841421, 0.013417416, 0.121788226, 0.856380224),
    *(0.075951562, 0.077601563, 2.409176157, 2.401336395),
    *(0.061868683, 0.118371205, 0.175189383, 14.86),
    *(0.665322581, 0.33266129, 0.061313085, 0.060664076, 0.030645703, 0.005320744),
    *(0.88213545, 0.948622593, 0.947382334, 0.131734027),
]


def planted_map(n=32):
    i = torch.arange(n, dtype=torch.float64)
    rows, columns = i[:, None], i[None, :]
    return (1 + (7 * rows + 3 * columns) % 11) * (columns <= rows) / 200


def test_a_map_has_the_statistics_of_the_official_code():
    np.testing.assert_allclose(map_statistics(planted_map()), GOLDEN, atol=2e-8)
    unlike = map_statistics(planted_map().mT)[18]  # a difference without a sign
    assert float(unlike) == pytest.approx(GOLDEN[18], abs=2e-8)
