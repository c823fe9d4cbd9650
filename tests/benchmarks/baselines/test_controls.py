"""Controls for what is easy: length, the commoner class, a linear probe."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines.plain import (
    length_scores,
    majority_scores,
    pooled_signals,
    probe_scores,
    rows_at_equal_length,
    standardise,
)
from beatrice.benchmarks.results.evaluate import annotated_rows
from beatrice.benchmarks.results.names import AT_EQUAL_LENGTH, probe
from beatrice.benchmarks.results.tables import find, results_of
from beatrice.extract.run.rows import Subject
from beatrice.extract.store.families import Family
from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.store import create_store, write_range
from beatrice.jaxprobe.evaluation import Scored, permute_by_question
from beatrice.jaxprobe.metrics import BootstrapConfig
from tests.benchmarks.rows import rows_of


def lengths(n_tokens):
    """The features of answers that were neither empty nor cut."""
    zeros = np.zeros(len(n_tokens))
    return np.stack([n_tokens, np.log1p(n_tokens), zeros, zeros], axis=1)


@pytest.mark.parametrize("sign", [1, -1])
def test_answer_length_learns_its_direction_from_training_answers(sign):
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 30, size=900)
    rows = rows_of(sign * (n_tokens - 15) + rng.normal(0, 5, 900) > 0)
    (scores,) = length_scores(lengths(n_tokens), rows)
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_answer_length_learns_that_the_middle_is_best():
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 200, size=900)
    rows = rows_of((n_tokens > 5) & (n_tokens < 60))
    (scores,) = length_scores(lengths(n_tokens), rows)
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_the_majority_ranks_nothing():
    rows = rows_of(np.arange(90) % 3 == 0)
    (scores,) = majority_scores(rows)
    assert len(set(scores)) == 1 and scores[0] == pytest.approx(1 / 3)


def test_standardised_features_have_variance_one_together():
    features = np.random.default_rng(0).normal(3, [1, 5, 0, 9], (50, 4))
    standardise(features, np.arange(40))
    np.testing.assert_allclose(features[:40].mean(axis=0), 0, atol=1e-12)
    assert features[:40].var(axis=0).sum() == pytest.approx(3 / 4)  # one is constant


N, D, LAYERS = 240, 6, (1, 3)


def stored(labels, hidden_spans="all"):
    """Random signals; in layer 3 the answers that are right have larger ones."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, len(labels))
    bounds = np.stack([lengths * 0 + 1, lengths // 3, lengths - 2, lengths], axis=1)
    spans = np.stack([bounds[:, i : i + 2] for i in range(3)], axis=1).astype(np.int64)
    spans[4, 2] = lengths[4]  # an empty answer
    families = {
        "hidden": Family(
            shape=(len(LAYERS), D), by_layer=True, spans=hidden_spans, dtype="float32"
        ),
        "prob": Family(shape=(5,), dtype="float32"),
        "resid": Family(shape=(4,), dtype="float32"),
        "attn": Family(shape=(2, 2, 1, 1), dtype="float32"),
    }
    spec = StoreSpec(
        families=families,
        keys=tuple((f"q{i}",) for i in range(len(labels))),
        lengths=lengths.astype(np.int64),
        spans=spans,
        rows_per_shard=64,
        hidden_layers=LAYERS,
        fingerprint={},
    )
    every = {
        name: rng.standard_normal((lengths.sum(), *f.shape)).astype(np.float32)
        for name, f in families.items()
    }
    every["hidden"][:, 1, 0] += 2 * np.repeat(labels, lengths)
    place = np.concatenate([np.arange(n) for n in lengths])
    own = np.repeat(spans[:, 2], lengths, axis=0)
    if hidden_spans == "answer":
        is_answer = (place >= own[:, 0]) & (place < own[:, 1])
        every["hidden"] = every["hidden"][is_answer]
    store = create_store(f"memory://probes-{hidden_spans}-{labels.sum()}", spec)
    for range_id in range(spec.n_ranges):
        stops = {name: spec.range_rows(range_id, name) for name in families}
        part = {name: every[name][slice(*stops[name])] for name in families}
        write_range(store, range_id, part)
    return store, every, spans, np.cumsum(lengths) - lengths


def test_a_probe_reads_mean_least_and_largest_of_the_answer_and_means_elsewhere():
    store, every, spans, starts = stored(np.arange(40) % 2 == 0)
    found = pooled_signals(store, "with_context", "hidden", 3).reshape(40, 5, D)
    for i, start in enumerate(starts):
        context, question, answer = (
            every["hidden"][start + a : start + b, 1] for a, b in spans[i]
        )
        np.testing.assert_allclose(found[i, 3], context.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(found[i, 4], question.mean(axis=0), rtol=1e-5)
        wanted = [
            getattr(answer, x)(axis=0) for x in ("mean", "min", "max") if len(answer)
        ]
        np.testing.assert_allclose(found[i, :3], wanted or np.zeros((3, D)), rtol=1e-5)


def test_a_probe_reads_the_same_of_a_store_that_keeps_the_answers_alone():
    labels = np.arange(40) % 2 == 0
    whole = pooled_signals(stored(labels)[0], "closed_book", "hidden", 3)
    kept = pooled_signals(stored(labels, "answer")[0], "closed_book", "hidden", 3)
    np.testing.assert_array_equal(kept, whole[:, : 3 * D])


def test_a_probe_reads_the_same_in_however_many_parts():
    store, *_ = stored(np.arange(40) % 2 == 0)
    few, many = (
        pooled_signals(store, "with_context", "attn", None, most_bytes=n)
        for n in (1 << 30, 100)
    )
    np.testing.assert_array_equal(few, many)


def test_a_linear_probe_finds_what_was_planted_in_its_family_and_layer_alone():
    labels = np.random.default_rng(3).random(N) < 0.5
    store, *_ = stored(labels)
    rows = rows_of(labels)
    test = rows.where("test")

    def aurocs(layer):
        scores, chosen = probe_scores(store, rows, layer)
        assert [row.subject for row in chosen] == list(scores)
        return {n: roc_auc_score(labels[test], x[0, test]) for n, x in scores.items()}

    there, elsewhere = aurocs(3), aurocs(1)
    assert there[probe("H")] > 0.9 and there[probe("HPRA")] > 0.8
    # Of 80 answers: s.d. 0.065 by chance.
    assert all(abs(there[probe(x)] - 0.5) < 0.2 for x in "PRA")
    assert abs(elsewhere[probe("H")] - 0.5) < 0.2


def matched(n=1800):
    """Right answers are short; one detector sees that alone, another sees more."""
    rng = np.random.default_rng(1)
    n_tokens = rng.integers(1, 12, n)
    rows = rows_of(rng.random(n) < 1 - n_tokens / 12)
    noise = rng.standard_normal((3, n))
    scores = {
        Subject("champion"): 2.0 * rows.labels - n_tokens + noise,
        Subject("answer_length"): -1.0 * n_tokens[None],
        Subject("perplexity"): -1.0 * n_tokens[None] + noise[:1],
    }
    scores |= {x: noise[1:2] for x in AT_EQUAL_LENGTH if x not in scores}
    return rows, n_tokens, [Scored(name=n, scores=x) for n, x in scores.items()]


BOOTSTRAP = BootstrapConfig(n_resamples=300)


def equal_length(detectors, rows, n_tokens):
    names = list(AT_EQUAL_LENGTH)
    return rows_at_equal_length(detectors, rows, n_tokens, BOOTSTRAP, names)


def test_what_only_follows_length_vanishes_at_equal_length_and_the_rest_stays():
    rows, n_tokens, detectors = matched()
    table = results_of(equal_length(detectors, rows, n_tokens))
    where = {"split": "test", "dataset": "world", "metric": "auroc", "seed": "mean"}
    length, ours, rival = (
        find(table, detector=x, against=None, **where)
        for x in ("answer_length", "champion", "perplexity")
    )
    labels, test = rows.labels, rows.where("test")
    assert roc_auc_score(labels[test], -n_tokens[test]) > 0.8  # without matching
    assert length.value == length.ci_low == length.ci_high == 0.5
    assert rival.ci_low < 0.5 < rival.ci_high
    assert ours.ci_low > 0.85
    gain = find(table, against="answer_length", **where)
    assert gain.value == pytest.approx(ours.value - 0.5)
    assert gain.experiment == "at_equal_length_paired"


def test_permuted_labels_cover_one_half_at_equal_length():
    rows, n_tokens, detectors = matched()
    permuted = permute_by_question(rows, seed=5)
    detectors = [
        Scored(name=one.name, scores=one.scores, labels=permuted) for one in detectors
    ]
    made = equal_length(detectors, rows, n_tokens)
    where = {"split": "test", "dataset": "world", "metric": "auroc", "seed": "mean"}
    row = find(results_of(made), detector="champion", against=None, **where)
    assert row.ci_low < 0.5 < row.ci_high


def test_answers_without_a_counterpart_of_their_length_are_counted():
    rows, n_tokens, detectors = matched()
    n_tokens = np.where(rows.labels, n_tokens, n_tokens + 100)
    n_tokens[rows.where("test")[:10]] = 7
    table = results_of(equal_length(detectors, rows, n_tokens))
    where = {"split": "test", "dataset": "world"}
    share = find(table, detector="answers", **where)
    where |= {"against": None}
    n = find(table, detector="champion", metric="auroc", seed="mean", **where).n
    assert 0 < n < share.n and share.value == pytest.approx(1 - n / share.n)
    undefined = find(
        table, detector="champion", **where | {"split": "validation"}, metric="auroc"
    )
    assert undefined.value is None and "no stratum" in undefined.reason


def annotated(rows, disputed):
    """A person's verdicts on every test row, as `label --audit` leaves them."""
    test = rows.where("test")
    verdicts = [
        [rows.ids[i], "closed_book", "original", bool(rows.labels[i] ^ (i in disputed))]
        for i in test
    ]
    noise = []
    for label in (True, False):
        own = [i for i in test if rows.labels[i] == label]
        n_disputed = sum(i in disputed for i in own)
        noise.append(dict(setting="closed_book", label=label, n_all=3 * len(own)))
        noise[-1] |= dict(n=len(own), n_disputed=n_disputed, ci_low=0.0, ci_high=1.0)
    return {"noise": noise, "verdicts": verdicts}


def test_mislabelled_answers_cost_auroc_that_a_person_gives_back():
    rng = np.random.default_rng(2)
    truth = rng.random(900) < 0.4
    slips = np.flatnonzero(rng.random(900) < 0.15)
    labels = truth.copy()
    labels[slips] ^= True
    rows = rows_of(labels)
    scores = (2.5 * truth + rng.standard_normal(900))[None]
    verdicts = annotated(rows, set(slips.tolist()))
    scored = [Scored(name="champion", scores=scores)]
    made = annotated_rows(verdicts, scored, rows, BOOTSTRAP)
    by = {x.kind: x for x in made if x.experiment == "annotated"}
    test = rows.where("test")
    expected = roc_auc_score(labels[test], scores[0, test])
    assert by["labels"].value == pytest.approx(expected, abs=1e-5)
    expected = roc_auc_score(truth[test], scores[0, test])
    assert by["a person"].value == pytest.approx(expected, abs=0.02)  # weighted
    assert by["labels"].value < by["undisputed labels"].ci_low
    assert by["undisputed labels"].n == 300 - len(set(slips) & set(test))
    shares = [x for x in made if x.experiment == "label_noise"]
    assert [row.kind for row in shares] == ["right", "wrong"]
