"""Every reading against a second implementation from the eager model's own outputs."""

import math

import numpy as np
import pytest
import torch

from benchmarks.speed.tiny_models import N_TEXT_IDS, tiny_model
from extract.backbone.loading import Backbone
from extract.readings import llm_check, lumina, redeep
from extract.readings.lookback import lookback_ratio
from extract.readings.part import Batch, cue_length
from extract.readings.reader import PARTS, READINGS, read
from extract.readings.second_passes import SECOND_PASSES, middle_entry
from extract.records import Answer
from extract.signals.batch import ReadingBudget, budget_for
from extract.signals.probability import Head
from tests.extract import gnosis_loops

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


class Eager:
    """One answer through the untouched model, everything kept."""

    def __init__(self, model, ids):
        self.model, layers = model, model.model.layers
        self.mid, self.ffn, self.last = [], [], []
        is_gemma = hasattr(layers[0], "pre_feedforward_layernorm")
        handles = [
            model.model.norm.register_forward_pre_hook(
                lambda _, inputs: self.last.append(inputs[0][0])
            )
        ]
        for layer in layers:
            before = "pre_feedforward" if is_gemma else "post_attention"
            norm = getattr(layer, f"{before}_layernorm")
            behind = layer.post_feedforward_layernorm if is_gemma else layer.mlp
            handles.append(
                norm.register_forward_pre_hook(
                    lambda _, inputs: self.mid.append(inputs[0][0])
                )
            )
            handles.append(
                behind.register_forward_hook(
                    lambda _, inputs, output: self.ffn.append(output[0])
                )
            )
        kinds = {"output_attentions": True, "output_hidden_states": True}
        output = model(torch.tensor([ids]), use_cache=False, **kinds)
        for handle in handles:
            handle.remove()
        self.states = [state[0] for state in output.hidden_states]
        self.maps = [one[0].double() for one in output.attentions]
        self.logits = output.logits[0].double()

    def lens(self, state):
        return self.model.lm_head(self.model.model.norm(state)).double()

    @property
    def unnormed(self):
        return [*self.states[1:-1], self.last[0]]


def entropy(logits):
    p = logits.double().softmax(-1).numpy()
    return float(-sum(x * math.log(x) for x in p if x > 0))


def log_gram(states):
    rows = states.double().numpy()
    rows = rows - rows.mean(1, keepdims=True)
    gram = rows @ rows.T + 1e-3 * np.eye(len(rows))
    return np.log(np.linalg.svd(gram, compute_uv=False)).mean()


def shannon(p, q, is_swapped):
    total, m = 0.0, (p + q) / 2
    for one in (p, q):
        a, b = (m, one) if is_swapped else (one, m)
        total += 0.5 * float((a * (a.log() - b.log())).sum())
    return total


def mmd(p, q, embeddings):
    unit = embeddings / embeddings.norm(dim=-1, keepdim=True)
    kernel = (1 + unit @ unit.T) / 2
    return float(p @ kernel @ p + q @ kernel @ q - 2 * p @ kernel @ q)


def expected(model, answer, swapped, n_cue):
    """Return every reading, by loops over what the eager model puts out."""
    p, n_told = len(answer.prompt_ids), len(answer.token_ids)
    ids = answer.prompt_ids + answer.token_ids
    seen = Eager(model, ids)
    before, told = range(p - 1, p + n_told - 1), range(p, p + n_told)
    n_words = seen.logits.shape[-1]
    found = {}
    for name, rows in (("", told), ("_all", range(len(ids)))):
        found[f"llmcheck_hidden{name}"] = [
            log_gram(state[list(rows)]) for state in seen.states[1:]
        ]
        found[f"llmcheck_attention{name}"] = [
            sum(np.mean([math.log(h[t, t]) for t in rows]) for h in heads)
            for heads in seen.maps
        ]
    for name, rows in (("", told), ("_corrected", before)):
        found[f"window_entropy{name}"] = max(
            entropy(seen.logits[t]) / n_words for t in rows
        )
        tops = [seen.logits[t].sort(descending=True).values[:50] for t in rows]
        found[f"logit_entropy{name}"] = np.mean([entropy(top) / 50 for top in tops])
    c = p - n_cue
    steps = range(p - 1, len(ids) - (answer.stop_id is None))
    found["lookback"] = np.zeros((len(seen.maps), len(seen.maps[0])))
    found["redeep_ecs"] = np.zeros_like(found["lookback"])
    for layer, heads in enumerate(seen.maps):
        for head, weights in enumerate(heads):
            ratios, cosines = [], []
            for n in steps:
                a, b = weights[n, :c].mean(), weights[n, c : n + 1].mean()
                ratios.append(float(a / (a + b)))
            for n in before:
                most = sorted(range(p), key=lambda j: -float(weights[n, j]))
                most = [j for j in most[: max(1, p // 10)] if weights[n, j] > 0]
                mean = seen.states[-1][most].mean(0)
                if most:
                    cosine = torch.cosine_similarity(mean, seen.states[-1][n], dim=0)
                    cosines.append(float(cosine))
            found["lookback"][layer, head] = np.mean(ratios)
            found["redeep_ecs"][layer, head] = np.mean(cosines)
    for name, is_swapped in (("redeep_pks", False), ("redeep_pks_swapped", True)):
        found[name] = []
        for mid, post in zip(seen.mid, seen.unnormed, strict=True):
            pairs = [[seen.lens(h[n]).softmax(-1) for h in (mid, post)] for n in before]
            found[name].append(np.mean([shannon(a, b, is_swapped) for a, b in pairs]))
    for name, states in (
        ("lumina_ipr", seen.states[1:]),
        ("lumina_ipr_inner", seen.states[1:-1]),
    ):
        rates = []
        for n in before:
            own = seen.logits[n].softmax(-1)
            best = int(own.argmax())
            late = weight = 0.0
            for number, state in enumerate(states, start=1):
                lens = seen.lens(state[n])
                late += number * (1 - min(float(lens.softmax(-1)[best] / own[best]), 1))
                weight += number / (entropy(lens) + 1e-8)
            rates.append(late / weight * float(own[ids[n + 1]] / own[best]))
        found[name] = np.mean(rates)
    found["lumina_mmd"] = math.nan
    if swapped is not None:
        other = Eager(model, swapped + answer.token_ids).logits
        table = model.get_input_embeddings().weight.double()
        values = [
            mmd(
                seen.logits[p - 1 + t].softmax(-1),
                other[len(swapped) - 1 + t].softmax(-1),
                table,
            )
            for t in range(n_told)
        ]
        found["lumina_mmd"] = np.mean(values)
    found["gnosis_maps"] = gnosis_loops.maps(seen.maps)
    found["gnosis_states"] = gnosis_loops.trace(seen.states[-1][p - 1 :])
    found["mlp_exact_answer"] = [part[len(ids) - 1].numpy() for part in seen.ffn]
    return found


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
        from extract.readings import reader

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


def matrix():
    rows = [i**1.5 for i in range(12)]
    return torch.tensor(rows, dtype=torch.float64).reshape(3, 4)


def test_the_hidden_score_has_its_golden_value():
    scores = llm_check.hidden_scores(matrix()[None], [(0, 3)])
    assert scores.tolist() == pytest.approx([-0.93214521812], abs=1e-9)


def test_the_attention_score_has_its_golden_value(backbone):
    answer = Answer(
        example_id="q",
        setting="closed_book",
        variant="original",
        text="",
        prompt_ids=(11,),
        token_ids=(12, 13),
        stop_id=2,
        context_span=(0, 0),
    )
    batch = Batch(
        backbone=backbone,
        answers=[answer],
        swapped=[None],
        n_cue=1,
        budget=ReadingBudget(),
    )
    part = llm_check.DiagonalScores(batch, frozenset(["llmcheck_attention_all"]))
    rows = [[1, 0.5, 0.25], [1, 0.2, 0.1]]
    diagonals = torch.tensor(rows, dtype=torch.float64)
    log_weights = torch.diag_embed(diagonals).log()[None]
    part.on_weights(0, log_weights[:, :, :2, :2], 0)
    part.on_weights(0, log_weights[:, :, 2:], 2)
    scores = part.finish(torch.empty(0))["llmcheck_attention_all"]
    assert float(scores[0]) == pytest.approx(-1.9971548490359936, abs=1e-9)


def test_the_entropies_have_their_golden_values():
    logits = torch.tensor([[2.0, 1, 0, -1], [0, 0, 0, 0]]).double()
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    window = llm_check.window_entropy
    assert float(window(entropies, 4)) == pytest.approx(0.34657359, abs=1e-8)
    assert float(window(entropies, 4, 2)) == pytest.approx(0.29172892, abs=1e-8)
    top = llm_check.top_entropies(logits, 2).mean()
    assert float(top) == pytest.approx(0.31883757, abs=1e-8)


def test_a_head_that_sees_the_context_alone_looks_back_entirely():
    weights = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    ratios = lookback_ratio(weights[None, None], torch.tensor([2]), torch.tensor([4]))
    assert ratios.tolist() == [[[1.0, 0.0]]]
    even = torch.full((1, 1, 1, 5), 0.2)
    ratio = lookback_ratio(even, torch.tensor([4]), torch.tensor([5]))
    assert float(ratio) == pytest.approx(0.5)


def test_a_large_vocabulary_in_chunks_gives_what_float64_gives_row_by_row():
    n_words, n_rows = 2**18 + 5, 260  # two chunks of rows, uneven blocks of words
    torch.manual_seed(0)
    weight = (torch.randn(n_words, 8) * 2).bfloat16()
    states = torch.randn(n_rows, 8).bfloat16()
    states[1::2] = states[::2] + 0.1 * states[1::2]

    class OwnHead(Batch):
        head = Head(weight=weight, bias=None, softcap=None)

    own = {"answers": (), "swapped": (), "n_cue": 1, "budget": ReadingBudget()}
    batch = OwnHead(backbone=None, **own)
    rows, found = [], torch.empty((n_rows // 2, 2))
    for part, log_probs in batch.log_probs(states, is_normed=True):
        rows += range(part.start, part.stop)
        found[part.start // 2 : part.stop // 2] = redeep.divergences(
            log_probs[::2], log_probs[1::2]
        )
    assert rows == list(range(n_rows))
    for pair in (0, 127, 128, 129):  # on both sides of where the chunks meet
        logits = states[2 * pair : 2 * pair + 2].double() @ weight.double().T
        exact = logits.softmax(-1)
        for column, is_swapped in enumerate((False, True)):
            wanted = shannon(*exact, is_swapped)
            assert float(found[pair, column]) == pytest.approx(wanted, rel=1e-4)


def test_gram_matrices_of_a_batch_are_those_of_each_alone():
    torch.manual_seed(0)
    states = torch.randn(4, 9, 6, dtype=torch.float64)
    edges = [(0, 9), (2, 5), (8, 9), (3, 3)]
    found = llm_check.hidden_scores(states, edges)
    for one, value, (start, stop) in zip(states[:3], found, edges, strict=False):
        assert float(value) == pytest.approx(log_gram(one[start:stop]), abs=1e-9)
    assert math.isnan(found[3])


def test_more_tokens_than_features_far_apart_in_size_have_an_exact_hidden_score():
    """Rounding leaves their Gram matrix indefinite; their singular values are known."""
    rng, n_tokens, width = np.random.default_rng(0), 60, 12
    left = np.linalg.qr(rng.standard_normal((n_tokens, width - 1)))[0]
    # Orthogonal to the vector of ones, so that centring the rows changes nothing.
    ones = np.ones((width, 1))
    basis = np.linalg.qr(np.hstack([ones, rng.standard_normal((width, width - 1))]))[0]
    sizes = np.geomspace(1e-2, 3e7, width - 1)
    states = torch.tensor(left * sizes @ basis[:, 1:].T)
    ridged = states @ states.T + 1e-3 * torch.eye(n_tokens, dtype=torch.double)
    assert torch.linalg.cholesky_ex(ridged).info > 0
    n_null = n_tokens - len(sizes)
    expected = (np.log(sizes**2 + 1e-3).sum() + n_null * np.log(1e-3)) / n_tokens
    edges = [(0, n_tokens), (0, 3)]
    found = llm_check.hidden_scores(torch.stack([states, states]), edges)
    assert found[0].item() == pytest.approx(expected, abs=1e-6)
    alone = llm_check.hidden_scores(states[None], [(0, 3)])
    assert found[1].item() == pytest.approx(alone.item(), abs=1e-9)


def test_distributions_apart_diverge_by_log_two_and_equal_ones_by_nothing():
    one = torch.tensor([[0.0, -80.0]]).log_softmax(-1)
    found = redeep.divergences(one, one.flip(-1))[0]
    assert float(found[0]) == pytest.approx(math.log(2), abs=1e-6)
    # Exchanged arguments have no bound: 80 nats times a half, less log 2.
    assert float(found[1]) == pytest.approx(40 - math.log(2), abs=1e-4)
    assert redeep.divergences(one, one).abs().max() < 1e-6


@pytest.mark.parametrize(("n_prompt", "n"), [(5, 1), (19, 1), (20, 2), (1500, 150)])
def test_a_tenth_of_the_prompt_is_attended_and_at_least_one_token(n_prompt, n):
    assert redeep.n_attended(n_prompt) == n


def test_the_discrepancy_is_that_of_the_double_sums_over_the_largest_words():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn((2, 9), generator=generator).double().softmax(-1)
    table = torch.randn((9, 5), generator=generator).double()

    def cut(values):
        return torch.where(values >= values.sort().values[-4], values, 0.0)

    found = lumina.discrepancy(p.log()[None], q.log()[None], table, n_top=4)
    # The embeddings are taken in float32.
    assert float(found) == pytest.approx(mmd(cut(p), cut(q), table), rel=1e-5)
    same = lumina.discrepancy(p.log()[None], p.log()[None], table)
    assert float(same) == pytest.approx(0.0, abs=1e-12)


def test_layers_that_know_the_word_already_process_nothing():
    entropies, emphasis = torch.ones((1, 2)), torch.ones(1)
    rate = lumina.processing_rate
    assert float(rate(torch.tensor([[1.0, 2.0]]), entropies, emphasis)) == 0.0
    # (1 * 1 + 2 * 0.5) / (1 + 2), and half of it where the told word is half as likely.
    halfway = torch.tensor([[0.0, 0.5]])
    assert float(rate(halfway, entropies, emphasis)) == pytest.approx(2 / 3)
    assert float(rate(halfway, entropies, emphasis / 2)) == pytest.approx(1 / 3)
