"""From stored signals to what encoders read, of all tokens or only the answer's."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from beatrice.extract.signals.sequence import sequence_of
from beatrice.extract.store.spec import Family, encode
from beatrice.extract.store.store import read_family
from beatrice.jaxprobe.families import (
    FLOATS,
    FamilyDims,
    Features,
    fit_standardizer,
    used_spans,
)
from beatrice.jaxprobe.stored import values_of
from beatrice.jaxprobe.tokens import (
    answer_log_probs,
    family_dims,
    mean_answer_states,
    read_features,
    read_tokens,
    split_families,
    stored_dtypes,
)
from tests.jaxprobe.samples import assert_same_leaves, store_like
from tests.records import an_answer

N, LAYERS, D = 12, (1, 3), 6


def spans_and_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, N)
    cuts = np.sort(rng.integers(1, lengths[:, None] - 1, (N, 2)), axis=1)
    ends = np.column_stack([np.ones(N, int), cuts, lengths])
    spans = np.stack([ends[:, :-1], ends[:, 1:]], axis=-1)
    spans[4, 2] = lengths[4]  # an example with an empty answer
    return spans, lengths


@pytest.fixture(params=[(2,), (1, 2), (0, 1, 2)], ids=["answer", "closed", "context"])
def used(request):
    """The spans that have tokens: only the answer, or all spans of a setting."""
    return request.param


def stored(hidden_spans, is_spared=False, dtype="float32", used=(0, 1, 2)):
    """A store of the same signals, with hidden states of all tokens or only answers.

    With `is_spared`, every other example lacks the rows before its context.
    """
    spans, lengths = spans_and_lengths()
    for span in {0, 1, 2}.difference(used):
        spans[:, span, 1] = spans[:, span, 0]
    firsts = spans[:, 0, 0] * (np.arange(N) % 2) * is_spared
    states = {"by_layer": True, "spans": hidden_spans, "dtype": dtype}
    families = {
        "hidden": Family(shape=(len(LAYERS), D), **states),
        "prob": Family(shape=(5,)),
        "resid": Family(shape=(4,)),
        "attn": Family(shape=(2, 2, 1, 1)),
    }
    rng = np.random.default_rng(1)
    every = {
        name: rng.standard_normal((lengths.sum(), *f.shape)).astype(np.float32) + 3
        for name, f in families.items()
    }
    positions = np.concatenate([np.arange(n) for n in lengths])
    start, stop = np.repeat(spans[:, 2], lengths, axis=0).T
    is_stored = {
        "all": positions >= np.repeat(firsts, lengths),
        "answer": (positions >= start) & (positions < stop),
    }
    every = {name: x[is_stored[families[name].spans]] for name, x in every.items()}
    encoded = encode(every["hidden"], dtype)
    every["hidden"] = encoded.codes
    if encoded.scales is not None:
        hidden = families["hidden"]
        families["hidden_scale"] = dataclasses.replace(
            hidden, shape=hidden.shape[:-1], dtype="float32"
        )
        every["hidden_scale"] = encoded.scales
    return store_like(
        f"memory://reading-{hidden_spans}-{is_spared}-{dtype}-{len(used)}",
        families,
        spans,
        every,
        lengths=lengths,
        first_rows=firsts,
        rows_per_shard=32,
        hidden_layers=LAYERS,
    )


def test_small_values_are_no_constants_in_a_family_of_small_values():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1, 500, 4)) * [1e-8, 2e-8, 1.0, 1e-9]
    values[..., 0] += 1.0  # float32 then holds no variation
    features = Features((values.astype(np.float32),), (np.ones((1, 500), bool),))
    dims = FamilyDims(names=("small", "large"), sizes=(2, 2))
    std = fit_standardizer([features], dims).std
    np.testing.assert_allclose(std, [1, 2e-8, 1, 1], rtol=0.1)
    large = 1000.0 + 0.1 * rng.normal(size=(1, 500, 1)) * [1.0, 0.0]
    features = Features((large.astype(np.float32),), features.masks)
    dims = FamilyDims(names=("far",), sizes=(2,))
    std = fit_standardizer([features], dims).std
    np.testing.assert_allclose(std, [0.1, 1], rtol=0.1)
    with pytest.raises(ValueError, match="no span has a real token"):
        fit_standardizer([], dims)


def split_of(store, features):
    dims = family_dims(store)
    return split_families(features, dims, fit_standardizer([features], dims))


def test_states_kept_only_for_answers_read_as_zero_elsewhere(used):
    whole, answers = (
        split_of(store, read_features(store, 3))
        for store in (stored("all", used=used), stored("answer", used=used))
    )
    assert_same_leaves(whole.tokens[1:], answers.tokens[1:])
    hidden = np.asarray(answers.tokens[0])
    last = answers.span_slices[-1]
    assert not hidden[: last.start].any()
    assert hidden[last].any() and np.asarray(whole.tokens[0])[0].any()


@pytest.mark.parametrize("hidden_spans", ["all", "answer"])
def test_a_store_without_the_rows_before_the_spans_reads_like_a_whole_one(
    used, hidden_spans
):
    whole, spared = (
        stored(hidden_spans, is_spared, used=used) for is_spared in (False, True)
    )
    assert spared.spec.offsets[-1] == whole.spec.offsets[-1] - N // 2
    some = np.array([5, 2, 3])
    for examples in (None, some):
        pair = (read_features(store, 3, examples).tokens for store in (whole, spared))
        assert_same_leaves(*pair)
    means = (mean_answer_states(store, some, 1) for store in (whole, spared))
    np.testing.assert_array_equal(*means)
    np.testing.assert_array_equal(*map(answer_log_probs, (whole, spared)))


def test_literal_and_emitting_spans_give_the_same_answer_log_probabilities():
    answers = [
        an_answer(token_ids=ids, stop_id=stop)
        for ids, stop in (((7, 8), 2), ((7,), 2), ((), 2), ((7, 8), None), ((7,), None))
    ]
    n_read = np.array([len(a.prompt_ids) + len(a.token_ids) for a in answers])
    prob = np.random.default_rng(0).random((n_read.sum(), 5)).astype(np.float32)
    emitting, literal = (
        answer_log_probs(
            store_like(
                f"memory://spans-{span}",
                {"prob": Family(shape=(5,))},
                [sequence_of(a, answer_span=span).spans for a in answers],
                {"prob": prob},
                lengths=n_read,
                fingerprint={"answer_span": span},
            )
        )
        for span in ("emitting", "literal")
    )
    np.testing.assert_array_equal(literal, emitting)


def test_a_live_pass_with_all_states_reads_like_a_store_of_answer_states(used):
    answers = stored("answer", used=used)
    whole = read_features(answers, 3)
    live = read_features(stored("all", used=used), 3)  # a model gives all of them
    dims = family_dims(answers)
    standardizer = fit_standardizer([whole], dims)
    pair = (split_families(x, dims, standardizer).tokens for x in (whole, live))
    assert_same_leaves(*pair)


@pytest.mark.parametrize("hidden_spans", ["all", "answer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_tokens_equal_the_padded_features_in_the_requested_dtype(
    used, hidden_spans, dtype
):
    store = stored(hidden_spans, dtype=dtype, used=used)
    some, dims = np.array([5, 4, 2, 3, 3]), family_dims(store)
    features = read_features(store, 3, some)
    standardizer = fit_standardizer([features], dims)
    wanted = split_families(features, dims, standardizer)
    widths = [mask.shape[1] for mask in features.masks]
    read = partial(read_tokens, store, 3, some, standardizer=standardizer)
    for device_dtypes in (FLOATS, stored_dtypes(store)):
        result = read(widths, device_dtypes=device_dtypes)
        assert_same_leaves(tuple(result.masks), tuple(wanted.masks))
        real = np.concatenate(wanted.masks)
        for token, other in zip(result.tokens, wanted.tokens, strict=True):
            if device_dtypes == FLOATS:
                np.testing.assert_array_equal(token, other)
            values = np.asarray(values_of(token))[real]
            # Only int8: a product and a difference may be rounded once or twice.
            atol = 1e-5 if dtype == "int8" else 0
            np.testing.assert_allclose(values, other[real], rtol=0, atol=atol)
        size = {"int8": 1, "float32": 4}.get(device_dtypes[0], 2)
        hidden = result.tokens[0]
        codes = hidden if device_dtypes[0] == "float32" else hidden.codes
        assert codes.dtype.itemsize == size
    with pytest.raises(ValueError, match="pad to a larger length"):
        read([1] * len(widths), device_dtypes=FLOATS)


def test_states_kept_only_for_answers_are_standardised_over_answers(used):
    answers = stored("answer", used=used)
    tokens = np.asarray(split_of(answers, read_features(answers, 1)).tokens[0])
    spans, _ = spans_and_lengths()
    n_answer = (spans[:, 2, 1] - spans[:, 2, 0]).sum()
    real = tokens[np.abs(tokens).sum(-1) > 0]
    assert len(real) == n_answer
    np.testing.assert_allclose(real.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(real.std(axis=0), 1, atol=1e-5)


def test_answer_means_equal_a_loop_over_examples_whatever_the_chunks():
    spans, _ = spans_and_lengths()
    order = np.array([5, 0, 11, 4, 7, 3])
    for kind in ("all", "answer"):
        store = stored(kind)
        ragged = read_family(store, "hidden")
        wanted = np.zeros((len(order), D))
        for i, example in enumerate(order):
            start, stop = spans[example, 2] - ragged.first_tokens[example]
            if stop > start:
                wanted[i] = ragged.example(example)[start:stop, 1].mean(axis=0)
        for n_chunk in (1, 4, 100):
            result = mean_answer_states(store, order, 3, n_chunk)
            np.testing.assert_allclose(result, wanted, rtol=1e-5)


@pytest.mark.parametrize("spans", ["all", "answer"])
def test_a_standardizer_is_the_same_fitted_in_parts_or_on_all_at_once(used, spans):
    store = stored(spans, used=used)
    features, dims = read_features(store, 1), family_dims(store)
    parts = [np.arange(5), np.arange(5, 6), np.arange(6, N)]
    widths = [mask.shape[1] for mask in features.masks]

    def read(where):
        return read_features(store, 1, where, widths)

    first = fit_standardizer([features], dims)
    other = fit_standardizer(map(read, parts), dims)
    np.testing.assert_allclose(first.mean, other.mean, atol=1e-5)
    np.testing.assert_allclose(first.std, other.std, rtol=1e-5)


def test_spans_that_are_empty_in_every_example_are_not_read(used):
    store = stored("all", used=used)
    assert used_spans(store.spec.spans) == used
    assert read_features(store, 3).n_spans == len(used)


def test_families_of_any_names_and_number_are_read_in_order():
    spans, lengths = spans_and_lengths()
    names, kinds = ("Zeta", "beta"), ("all", "answer")
    families = {
        "Zeta": Family(shape=(len(LAYERS), 3), by_layer=True),
        "beta": Family(shape=(2, 2), spans="answer"),
    }
    fields = {"lengths": lengths, "hidden_layers": LAYERS}
    store = store_like("memory://reading-any", families, spans, **fields)
    values = {name: read_family(store, name).values for name in names}
    dims = family_dims(store)
    assert dims == FamilyDims(names=names, sizes=(3, 4), spans=kinds)
    assert dims.letters == "ZB" and dims.subset_names == ("Z", "B", "ZB")
    for named, letters in (
        (("hidden", "prob", "resid", "attn"), "HPRA"),
        (("mass", "mean", "x"), "ABC"),  # initials are not distinct
        (("1st", "2nd"), "AB"),
    ):
        sizes = (1,) * len(named)
        assert FamilyDims(names=named, sizes=sizes).letters == letters
    features = read_features(store, LAYERS[-1])
    read = zip(features.tokens, features.masks, strict=True)
    for span, (tokens, mask) in enumerate(read):
        where = slice(*(store.spec.offsets[3] + spans[3, span]))
        np.testing.assert_array_equal(tokens[3, mask[3], :3], values["Zeta"][where, -1])
        n_answer = int(spans[:3, 2, 1].sum() - spans[:3, 2, 0].sum())
        answers = values["beta"][n_answer : n_answer + mask[3].sum()].reshape(-1, 4)
        other = answers if span == 2 else np.zeros((mask[3].sum(), 4))
        np.testing.assert_array_equal(tokens[3, mask[3], 3:], other)
