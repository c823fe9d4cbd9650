"""The sums that signals are made of, and the survey of readable model types."""

import copy
import dataclasses
import functools
import math
import weakref

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.commands import RowPrinter
from beatrice.benchmarks.bench.oracle import (
    SIGNALS,
    SURVEY_TOLERANCE,
    TOLERANCE,
    attention_reading,
    exact_map,
    largest_errors,
    require_types,
    summary,
    survey_one,
    survey_types,
)
from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.probability import Head, token_probabilities
from beatrice.extract.signals.span_sums import (
    AttentionCall,
    AttentionMap,
    StepCalls,
    span_readings,
    span_sums,
    step_sums,
)

N_TOKENS = 24
SPANS = [(2, 12), (12, 19), (19, 24)]
SINKS = torch.tensor([-90.0, 0.0, 2.0, 90.0])


def make_mask(kind):
    """Return no mask, a window of 8 tokens, or ALiBi as an additive causal mask."""
    positions = torch.arange(N_TOKENS)
    distance = positions[:, None] - positions
    if kind == "window":
        return ((distance >= 0) & (distance < 8))[None, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    alibi = (-slopes * distance).masked_fill(distance < 0, torch.finfo().min)
    return alibi[None] if kind == "alibi" else None


def make_call(spread, mask=None, sinks=None):
    generator = torch.Generator().manual_seed(3)
    query = spread * torch.randn(1, 4, N_TOKENS, 8, generator=generator)
    key = torch.randn(1, 2, N_TOKENS, 8, generator=generator)
    return AttentionCall(query, key, mask, 8**-0.5, None, sinks)


VALUE = torch.randn(1, 2, N_TOKENS, 8, generator=torch.Generator().manual_seed(4))


def members():
    positions = torch.arange(N_TOKENS)
    inside = [(positions >= start) & (positions < stop) for start, stop in SPANS]
    return torch.stack(inside)[None]


# Spread 40 gives logits of size 100: shifts are needed, and far keys underflow.
@pytest.mark.parametrize("spread", [1.0, 40.0])
@pytest.mark.parametrize("budget", [100, 2**20])
@pytest.mark.parametrize("kind", ["causal", "window", "alibi"])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_readings_and_output_agree_with_the_exact_map(spread, budget, kind, sinks):
    call, value = make_call(spread, make_mask(kind), sinks), VALUE
    result, attended = span_readings(call, members(), (12, N_TOKENS), budget, value)
    exact = exact_map(call.query, call.key, call.mask, call.scaling, None, sinks)
    for position in range(N_TOKENS):
        for head in range(4):
            expected = attention_reading(exact[head].numpy(), SPANS, position)
            # By convention a mass too small for parts of it in float32 counts as zero.
            expected = [pair if pair[1] >= 1e-30 else (0.0, 0.0) for pair in expected]
            reading = result[0, position, :, :, head].numpy()
            np.testing.assert_allclose(reading, expected, rtol=0, atol=2e-5)
    values = value[0].double().repeat_interleave(2, dim=0)
    expected = (exact @ values)[:, 12:].transpose(0, 1)
    torch.testing.assert_close(attended[0].double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("spread", [1.0, 40.0])
@pytest.mark.parametrize("kind", ["causal", "window", "alibi"])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_the_last_row_has_the_same_sums_alone_as_among_all_rows(spread, kind, sinks):
    call, value = make_call(spread, make_mask(kind), sinks), VALUE
    last = slice(N_TOKENS - 1, N_TOKENS)
    mask = None if call.mask is None else call.mask[:, :, last]
    alone = dataclasses.replace(call, query=call.query[:, :, last], mask=mask)
    keys, rows = members()[:, :2].float(), members()[:, 1:].float()
    by_row, by_key, attended = step_sums(alone, keys, rows[..., last], value)
    only = rows.clone()
    only[..., :-1] = 0.0
    every = span_sums(call, keys, only, (0, N_TOKENS), 2**20, value)
    assert every[2] is not None and attended is not None
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(by_row, every[0][..., last])
    close(by_key, every[1])
    close(attended, every[2][:, last])


@pytest.mark.parametrize("kind", ["causal", "window", "alibi"])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("n_kept", [N_TOKENS, N_TOKENS - 2, 8])  # keys in the cache
def test_steps_read_together_have_the_sums_of_single_steps(kind, sinks, n_kept):
    call = make_call(1.0, make_mask(kind), sinks)
    keys, rows = members()[:, :2].float(), members()[:, 1:].float()
    steps, every_row, by_key = [], [], torch.zeros(2, 1, 4, 2, N_TOKENS)
    stops = range(N_TOKENS - 4, N_TOKENS + 1)
    for stop in stops:
        row, seen = slice(stop - 1, stop), slice(max(0, stop - n_kept), stop)
        mask = None if call.mask is None else call.mask[:, :, row, seen]
        part = {"query": call.query[:, :, row], "key": call.key[:, :, seen]}
        steps.append(dataclasses.replace(call, mask=mask, **part))
        by_row, sent, _ = step_sums(steps[-1], keys[..., seen], rows[..., row], None)
        every_row.append(by_row)
        by_key[..., seen] += sent
    waiting = StepCalls(steps[0])
    for step in steps[1:]:
        waiting.add(step)
    first, rows = max(0, stops[0] - n_kept), rows[..., stops[0] - 1 :]
    whole = waiting.joined({}), keys[..., first:], rows
    joined = span_sums(*whole, (0, len(stops)), 2**20, None)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(joined[0], torch.cat(every_row, dim=-1))
    close(joined[1], by_key[..., first:])


def test_only_the_last_keys_of_a_growing_cache_are_held():
    queries, held = torch.zeros(1, 4, 1, 8), []
    for n_keys in (3, 4, 5):
        key = torch.zeros(1, 2, n_keys, 8)
        call = AttentionCall(queries, key, None, 1.0, None)
        if n_keys == 3:
            steps = StepCalls(call)
        else:
            steps.add(call)
        held.append(weakref.ref(key))
        del key, call
    assert [ref() is not None for ref in held] == [False, False, True]
    assert steps.joined({}).n_cached == 2


def test_a_map_gives_the_same_readings_as_its_queries_and_keys():
    call = make_call(1.0, make_mask("alibi"))
    exact = exact_map(call.query, call.key, call.mask, call.scaling, None)
    rows = (12, N_TOKENS)
    result, _ = span_readings(AttentionMap(exact[None].float()), members(), rows, 100)
    expected, _ = span_readings(call, members(), rows, 2**20)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_without_rows_to_read_nothing_is_attended_and_readings_are_zero():
    call, value = make_call(1.0), VALUE
    none = torch.zeros(1, 3, N_TOKENS, dtype=torch.bool)
    result, attended = span_readings(call, none, (N_TOKENS, N_TOKENS), 2**20, value)
    assert attended.shape == (1, 0, 4, 8)
    assert (result == 0).all()


def probabilities(logits, targets, n_words_per_block):
    """Read distributions with these logits: each state picks a column of the head."""
    budget = ReadingBudget(n_tokens_per_chunk=4, n_words_per_block=n_words_per_block)
    head = Head(weight=logits.T.contiguous(), bias=None, softcap=None)
    return token_probabilities(torch.eye(len(logits)), targets, head, budget)


def test_wide_half_precision_weights_are_widened_fewer_words_at_a_time():
    budget, sizes = ReadingBudget(), ((5000, 640), (5000, 4096), (7, 4096))
    for dtype, expected in (
        (torch.float32, [2048, 2048, 7]),
        (torch.bfloat16, [2048, 1024, 7]),
    ):
        weights = (torch.empty(size, dtype=dtype) for size in sizes)
        heads = [Head(weight=weight, bias=None, softcap=None) for weight in weights]
        assert [head.n_words_at_once(budget) for head in heads] == expected


def test_a_certain_token_has_no_surprise_and_a_tie_has_no_margin():
    logits = torch.tensor([[900.0, 0, -900, 0], [0, 0, 0, 0]])
    result = probabilities(logits, torch.tensor([0, 3]), 3)
    expected = [[1, 0, 0, 1, 1], [0.25, np.log(4), np.log(4), 0.25, 0]]
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)
    assert not torch.signbit(result).any()


# Logits of every size in one vocabulary, so that the shift has to move between blocks.
@pytest.mark.parametrize("offset", [-500.0, 0.0, 500.0])
@pytest.mark.parametrize("spread", [2.0, 400.0])
def test_probabilities_are_exact_whatever_the_size_of_logits(offset, spread):
    generator = torch.Generator().manual_seed(5)
    logits = offset + spread * torch.randn(9, 301, generator=generator)
    targets = torch.arange(9) * 33
    result = probabilities(logits, targets, 67)
    log_p = logits.double().log_softmax(-1)
    first, second = log_p.exp().topk(2).values.T
    chosen, entropy = log_p[torch.arange(9), targets], -(log_p.exp() * log_p).sum(-1)
    expected = torch.stack([chosen.exp(), -chosen, entropy, first, first - second], -1)
    # float32 logits of size 1000 carry rounding of 6e-5.
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=5e-4)


@pytest.mark.parametrize("n_words_per_block", [2, 3, 64, 65, 129, 500])
def test_the_two_most_probable_words_are_found_wherever_they_are(n_words_per_block):
    n_words = 200
    pairs = [(0, 1), (0, 64), (63, 128), (5, 199), (198, 199), (70, 71)]
    logits = torch.zeros(2 * len(pairs), n_words)
    for row, (first, second) in enumerate(pairs):
        logits[2 * row, first], logits[2 * row, second] = 3.0, 2.0
        logits[2 * row + 1, first] = logits[2 * row + 1, second] = 3.0
    targets = torch.zeros(len(logits), dtype=torch.long)
    result = probabilities(logits, targets, n_words_per_block)
    p = logits.softmax(1).topk(2, dim=1).values
    np.testing.assert_allclose(result[:, 3], p[:, 0], rtol=1e-5)
    np.testing.assert_allclose(result[:, 4], p[:, 0] - p[:, 1], rtol=0, atol=1e-7)
    assert (result[1::2, 4] == 0).all()


# One of each kind: a recurrent mixer, latent attention, windows, alibi or parallel
# blocks, sparse keys, sinks, multipliers.
EXACT = (
    "bamba deepseek_v3 exaone4 falcon glm_moe_dsa gpt_neo gpt_oss granite granite_swa "
    "phi"
).split()
REFUSED = {
    "doge": "miss the change of the residual stream",
    "gemma3n": "4 residual streams",
    "inkling_text": "position_bias",
    "mllama": "teach extract/backbone/layout.py this family",
    "roberta": "expected the list of layers",
}


@pytest.mark.parametrize("lengths", ["short", "beyond"])
@pytest.mark.parametrize("name", EXACT)
def test_a_readable_type_is_exact_within_windows_and_beyond(name, lengths):
    row = survey_one(name, lengths)
    assert row["outcome"] == "exact", row["reason"]
    assert max(row[family] for family in SIGNALS) < SURVEY_TOLERANCE


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_refused_type_has_its_reason(name, reason):
    row = survey_one(name)
    assert row["outcome"] == "refused" and reason in row["reason"], row
    *_, kind = summary([row])  # without what was found there and what to do
    assert " found " not in kind and "; " not in kind


@pytest.mark.parametrize("family", SIGNALS)
def test_a_single_wrong_number_is_an_error_unless_its_token_is_spared(family):
    rng = np.random.default_rng(0)
    expected = [{name: rng.normal(size=(20, 3)) for name in SIGNALS}]
    measured = copy.deepcopy(expected)
    assert max(largest_errors(measured, expected).values()) == 0
    measured[0][family][3, 1] += 1e-3
    errors = largest_errors(measured, expected)
    assert [name for name in SIGNALS if not errors[name] < SURVEY_TOLERANCE] == [family]
    assert max(largest_errors(measured, expected, n_spared=1).values()) == 0
    measured[0][family] = measured[0][family][:, :2]
    assert largest_errors(measured, expected)[family] == np.inf


@pytest.mark.parametrize("family", SIGNALS)
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_nan_on_either_side_is_an_infinite_error_and_not_spared(family, is_relative):
    whole = [{name: np.ones((20, 3)) for name in SIGNALS}]
    broken = copy.deepcopy(whole)
    broken[0][family][3, 1] = np.nan
    for pair in ((broken, whole), (whole, broken)):
        errors = largest_errors(*pair, is_relative=is_relative, n_spared=2)
        assert errors == dict.fromkeys(SIGNALS, 0.0) | {family: np.inf}


def test_a_wrong_type_fails_the_survey_and_is_named(capsys):
    rows = survey_types(["doge"], RowPrinter(as_json=True))
    require_types(rows)
    wrong = rows[0] | {"outcome": "wrong", "reason": "KeyError: 'x'"}
    with pytest.raises(ValueError, match=r"found wrong: doge \(short\)"):
        require_types([*rows, wrong])
    assert "* wrong: KeyError: 'x' (1): doge" in list(summary([*rows, wrong]))
    assert capsys.readouterr().out.count('"outcome": "refused"') == len(rows)


@pytest.mark.slow
def test_every_type_is_exact_or_refused():
    require_types(survey_types([], RowPrinter(as_json=True)))


def make_row(**changes):
    row = {f"fp32 {name}": 1e-6 for name in SIGNALS}
    row |= {f"bf16 {name}": (1e-6, 1e-2) for name in SIGNALS}
    return {"architecture": "llama", **row, **changes}


@pytest.mark.parametrize(
    ("field", "error"),
    [("fp32 attn", x) for x in (2 * TOLERANCE, math.inf, math.nan)]
    + [("bf16 resid", (2e-2, 1e-2))],  # beyond the model's own gap
)
def test_a_large_or_undefined_error_is_named(field, error):
    oracle.require([make_row()])  # control: small errors are accepted
    kind = field.replace("fp", "float").replace("bf", "bfloat")
    with pytest.raises(ValueError, match=f"llama: {kind}"):
        oracle.require([make_row(), make_row(**{field: error})])
