"""From a store to what the encoders read, with every token or the answer's alone."""

import dataclasses

import numpy as np
import pytest

from benchmarks.baselines.perplexity import perplexity_scores
from extract.store.families import Family, encode, scale_family
from extract.store.read import read_family
from extract.store.spec import StoreSpec
from extract.store.write import create_store, write_range
from jaxprobe.features.families import fit_standardizer, split_families
from jaxprobe.features.reading import (
    family_dims,
    fit_reading,
    fit_reading_of,
    mean_answer_states,
    read_features,
    read_tokens,
    stored_dtypes,
)
from jaxprobe.features.subsets import FLOATS, FamilyDims
from jaxprobe.kernels.stored import values_of

N, LAYERS, D = 12, (1, 3), 6


def spans_and_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, N)
    cuts = np.sort(rng.integers(1, lengths[:, None] - 1, (N, 2)), axis=1)
    spans = np.stack(
        [
            np.stack([np.ones_like(lengths), cuts[:, 0]], -1),
            cuts,
            np.stack([cuts[:, 1], lengths], -1),
        ],
        axis=1,
    )
    spans[4, 2] = lengths[4]  # an example with an empty answer
    return spans.astype(np.int64), lengths.astype(np.int64)


@pytest.fixture(scope="module", params=["closed_book", "with_context"])
def setting(request):
    return request.param


def stored(hidden_spans, is_spared=False, dtype="float32"):
    """The same signals: hidden states of all tokens, or of the answers alone.

    Every other example may have rows from its context on alone.
    """
    spans, lengths = spans_and_lengths()
    firsts = spans[:, 0, 0] * (np.arange(N) % 2) * is_spared
    families = {
        "hidden": Family(
            shape=(len(LAYERS), D), by_layer=True, spans=hidden_spans, dtype=dtype
        ),
        "prob": Family(shape=(5,)),
        "resid": Family(shape=(4,)),
        "attn": Family(shape=(2, 2, 1, 1)),
    }
    spec = StoreSpec(
        families=families,
        keys=tuple((f"q{i}",) for i in range(N)),
        lengths=lengths,
        spans=spans,
        firsts=firsts,
        rows_per_shard=32,
        hidden_layers=LAYERS,
        fingerprint={},
    )
    rng = np.random.default_rng(1)
    every = {
        name: rng.standard_normal((lengths.sum(), *f.shape)).astype(np.float32) + 3
        for name, f in families.items()
    }
    place = np.concatenate([np.arange(n) for n in lengths])
    bounds = np.repeat(spans[:, 2], lengths, axis=0)
    is_read = place >= np.repeat(firsts, lengths)
    if hidden_spans == "answer":
        is_answer = (place >= bounds[:, 0]) & (place < bounds[:, 1])
        every["hidden"] = every["hidden"][is_answer]
    for name, family in families.items():
        if family.spans == "all":
            every[name] = every[name][is_read]
    encoded = encode(every["hidden"], dtype)
    every["hidden"] = encoded.codes
    if encoded.scales is not None:
        families["hidden_scale"] = scale_family(families["hidden"])
        every["hidden_scale"] = encoded.scales
    spec = dataclasses.replace(spec, families=families)
    url = f"memory://reading-{hidden_spans}-{is_spared}-{dtype}"
    store = create_store(url, spec)
    for range_id in range(spec.n_ranges):
        part = {}
        for name in families:
            start, stop = spec.range_rows(range_id, name)
            part[name] = every[name][start:stop]
        write_range(store, range_id, part)
    return store


def split_of(store, features):
    dims = family_dims(store)
    return split_families(features, dims, fit_reading(features, dims))


def test_a_store_of_answers_reads_as_the_whole_one_without_the_other_states(setting):
    whole, answers = (
        split_of(store, read_features(store, setting, 3))
        for store in (stored("all"), stored("answer"))
    )
    for one, other in zip(whole.tokens[1:], answers.tokens[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    hidden = np.asarray(answers.tokens[0])
    last = answers.span_slices[-1]
    assert not hidden[: last.start].any()
    assert hidden[last].any() and np.asarray(whole.tokens[0])[0].any()


@pytest.mark.parametrize("hidden_spans", ["all", "answer"])
def test_a_store_without_the_rows_before_the_spans_reads_as_the_whole_one(
    setting, hidden_spans
):
    whole, spared = (stored(hidden_spans, is_spared) for is_spared in (False, True))
    assert spared.spec.offsets[-1] == whole.spec.offsets[-1] - N // 2
    some = np.array([5, 2, 3])
    for examples in (None, some):
        one, other = (
            read_features(store, setting, 3, examples) for store in (whole, spared)
        )
        for left, right in zip(one.tokens, other.tokens, strict=True):
            np.testing.assert_array_equal(left, right)
    means = (mean_answer_states(store, some, 1) for store in (whole, spared))
    np.testing.assert_array_equal(*means)
    np.testing.assert_array_equal(*map(perplexity_scores, (whole, spared)))


def test_a_live_pass_with_every_state_reads_as_the_store_of_answers(setting):
    answers = stored("answer")
    kept = read_features(answers, setting, 3)
    live = read_features(stored("all"), setting, 3)  # a model has all of them
    dims = family_dims(answers)
    standardizer = fit_reading(kept, dims)
    for one, other in zip(
        split_families(kept, dims, standardizer).tokens,
        split_families(live, dims, standardizer).tokens,
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("hidden_spans", ["all", "answer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_tokens_are_those_of_the_padded_features_in_the_width_that_is_asked_for(
    setting, hidden_spans, dtype
):
    store = stored(hidden_spans, dtype=dtype)
    some, dims = np.array([5, 4, 2, 3, 3]), family_dims(store)
    features = read_features(store, setting, 3, some)
    standardizer = fit_reading(features, dims)
    wanted = split_families(features, dims, standardizer)
    widths = [mask.shape[1] for mask in features.masks]
    for held_as in (FLOATS, stored_dtypes(store)):
        found = read_tokens(
            *(store, setting, 3, some, widths),
            standardizer=standardizer,
            held_as=held_as,
        )
        for one, other in zip(found.masks, wanted.masks, strict=True):
            np.testing.assert_array_equal(one, other)
        real = np.concatenate(wanted.masks)
        for one, other in zip(found.tokens, wanted.tokens, strict=True):
            if held_as == FLOATS:
                np.testing.assert_array_equal(one, other)
            values = np.asarray(values_of(one))[real]
            # int8 alone: a product and a difference may be rounded once or twice.
            atol = 1e-5 if dtype == "int8" else 0
            np.testing.assert_allclose(values, other[real], rtol=0, atol=atol)
        size = {"int8": 1, "float32": 4}.get(held_as[0], 2)
        hidden = found.tokens[0]
        codes = hidden if held_as[0] == "float32" else hidden.codes
        assert codes.dtype.itemsize == size
    with pytest.raises(ValueError, match="pad to a larger length"):
        read_tokens(
            *(store, setting, 3, some, [1] * len(widths)),
            standardizer=standardizer,
            held_as=FLOATS,
        )


def test_kept_states_are_standardised_by_the_answers_alone(setting):
    answers = stored("answer")
    tokens = np.asarray(split_of(answers, read_features(answers, setting, 1)).tokens[0])
    spans, _ = spans_and_lengths()
    n_answer = (spans[:, 2, 1] - spans[:, 2, 0]).sum()
    real = tokens[np.abs(tokens).sum(-1) > 0]
    assert len(real) == n_answer
    np.testing.assert_allclose(real.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(real.std(axis=0), 1, atol=1e-5)


def test_with_every_state_the_standardisation_is_over_all_spans(setting):
    whole = stored("all")
    features = read_features(whole, setting, 1)
    one, other = fit_reading(features, family_dims(whole)), fit_standardizer(features)
    np.testing.assert_array_equal(one.mean, other.mean)
    np.testing.assert_array_equal(one.std, other.std)


def test_dims_of_an_older_checkpoint_read_every_state():
    assert FamilyDims(hidden=1, prob=1, resid=1, attn=1).hidden_spans == "all"


def test_answer_means_are_those_of_a_loop_over_examples_in_any_chunks():
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
            found = mean_answer_states(store, order, 3, n_chunk)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("kept", ["all", "answer"])
def test_examples_a_few_at_a_time_are_standardised_as_all_at_once(setting, kept):
    store = stored(kept)
    features, dims = read_features(store, setting, 1), family_dims(store)
    parts = [np.arange(5), np.arange(5, 6), np.arange(6, N)]
    widths = [mask.shape[1] for mask in features.masks]

    def read(where):
        return read_features(store, setting, 1, where, widths)

    one = fit_reading(features, dims)
    other = fit_reading_of(lambda: map(read, parts), dims)
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-5)
    np.testing.assert_allclose(one.std, other.std, rtol=1e-5)
