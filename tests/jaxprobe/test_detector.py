"""A detector scores as its encoders and heads do, with any families of signals."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.extract.generate.templates import PromptConfig, Shot
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import Share
from beatrice.extract.store.spec import Family
from beatrice.jaxprobe import fusion
from beatrice.jaxprobe.calibrate import (
    FusedHead,
    TrainedGrid,
    calibrated,
    encoder_bank,
    pool_of,
    run_selection,
    score_store,
)
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    GridConfig,
    SelectConfig,
    TrainConfig,
)
from beatrice.jaxprobe.detector import Detector, Provenance, branch_setting
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import SUBSETS, paper_dims, subset_index
from beatrice.jaxprobe.grid import Member
from beatrice.jaxprobe.metrics import auroc, auroc_interval
from beatrice.jaxprobe.rows import rows_of, training_set
from beatrice.jaxprobe.tokens import read_features, split_families
from beatrice.jaxprobe.train import open_rows, train_encoders
from beatrice.pgir.forward import TorchForward
from beatrice.selection.greedy import HeadTrainer
from tests.jaxprobe.samples import (
    assert_same_leaves,
    ragged_features,
    random_detector,
    store_like,
)
from tests.records import a_label, an_example

CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)
FUSION = FusionConfig(hidden=8, n_slots=4)
DIMS = {
    "closed_book": paper_dims(hidden=6, prob=5, resid=4, attn=2),
    "with_context": paper_dims(hidden=6, prob=5, resid=4, attn=3),
}


@pytest.fixture(scope="module")
def detector():
    reads = {
        "closed_book": (("closed_book", "HP"), ("closed_book", "A")),
        "with_context": (("with_context", "A"), ("closed_book", "HP")),
    }
    return random_detector(DIMS, CONFIG, reads, FUSION.n_slots)


def features_of(setting):
    return ragged_features(setting, DIMS[setting])


def score_closed_book(detector, features):
    return TorchForward(detector).score("closed_book", {"closed_book": features})


def score_with_context(detector, with_context, **passes):
    passes |= {"with_context": with_context}
    return TorchForward(detector).score("with_context", passes)


def test_a_detector_scores_as_its_encoders_and_its_head_do(detector):
    features, bank = features_of("closed_book"), detector.banks["closed_book"]
    scores = score_closed_book(detector, features)
    families = split_families(features, bank.dims, bank.standardizer)
    apply, outputs = jax.jit(Encoder(CONFIG, bank.dims).apply), []
    for seed, name in itertools.product((0, 1), ("HP", "A")):
        at = seed, subset_index(name)
        params = jax.tree.map(lambda x, at=at: x[at], bank.params)
        outputs.append(apply(params, families, jnp.asarray(SUBSETS[at[1]])))
    logits, pooled = (np.stack(x) for x in zip(*outputs, strict=True))
    logits = logits.reshape(2, 2, -1)
    inputs = fusion.head_inputs(pooled.reshape(2, 2, 7, -1), logits)
    pool, p = fusion.PoolOutputs(inputs, *[None] * 3), []
    for s in (0, 1):
        params = jax.tree.map(lambda x, s=s: x[s], detector.heads["closed_book"].params)
        fixed = params, *fusion.slots_of((0, 1), 4), pool, np.int32(s)
        logit = fusion.apply_head(*fixed, head=fusion.FusionHead(FUSION))
        p.append(jax.nn.sigmoid(logit))
    np.testing.assert_allclose(scores.raw, np.mean(p, axis=0), atol=1e-5)
    np.testing.assert_allclose(scores.p_correct, 0.05 + 0.9 * scores.raw, atol=1e-9)
    expected = np.asarray(jax.nn.sigmoid(logits)).mean(axis=0).T
    np.testing.assert_allclose(scores.encoders, expected, atol=1e-5)
    assert scores.encoder_names == ("closed_book/HP", "closed_book/A")


def test_a_detector_loaded_from_disk_scores_the_same(detector, tmp_path):
    shots = (Shot(question="q?", answer="a"),)
    prompt = PromptConfig(template="few-shot", shots=shots, chat=True)
    provenance = Provenance(
        model="m", revision="r", layer=3, prompt=prompt, stop_id=7, scripts=("LATIN",)
    )
    detector = dataclasses.replace(detector, provenance=provenance)
    detector.save(tmp_path / "detector")
    loaded = Detector.load(tmp_path / "detector")
    assert loaded.provenance == provenance
    features = {setting: features_of(setting) for setting in DIMS}
    before, after = (score_with_context(x, **features) for x in (detector, loaded))
    np.testing.assert_array_equal(before.p_correct, after.p_correct)
    assert after.encoder_names == ("with_context/A", "closed_book/HP")


def test_a_detector_with_numpy_sizes_and_shares_is_saved_with_them(detector, tmp_path):
    config, precision = dataclasses.replace(CONFIG, hidden=np.int64(8)), np.float32(0.7)
    banks, heads = (
        {name: dataclasses.replace(part, **fields) for name, part in parts.items()}
        for parts, fields in (
            (detector.banks, {"config": config}),
            (detector.heads, {"precision": precision}),
        )
    )
    dataclasses.replace(detector, banks=banks, heads=heads).save(tmp_path / "detector")
    loaded = Detector.load(tmp_path / "detector")
    assert all(bank.config == CONFIG for bank in loaded.banks.values())
    assert all(head.precision == precision for head in loaded.heads.values())


def stored(setting, questions):
    """A store of random signals of some questions; closed-book there is no context."""
    rng, dims = np.random.default_rng(len(questions)), DIMS[setting]
    lengths = rng.integers(1, 5, (len(questions), 3))
    lengths[:, 0] *= setting == "with_context"
    stops = np.cumsum(lengths, axis=1)
    sizes = zip(dims.names, dims.sizes, strict=True)
    return store_like(
        f"memory://detector-{setting}-{len(questions)}",
        {name: Family(shape=(size,)) for name, size in sizes},
        np.stack([stops - lengths, stops], axis=-1),
        keys=tuple((f"q{i}", setting, "original") for i in questions),
    )


def score_all(detector, branch, stores, **options):
    score = TorchForward(detector).score
    return score_store(detector, branch, stores, layer=None, score=score, **options)


def test_stored_answers_are_scored_with_their_questions_closed_book_answers(detector):
    context, closed = np.arange(90), np.roll(np.arange(100)[::-1], 7)
    stores = {
        "with_context": stored("with_context", context),
        "closed_book": stored("closed_book", closed),
    }
    partner = np.array([closed.tolist().index(i) for i in context])
    expected = score_with_context(
        detector,
        read_features(stores["with_context"], None),
        closed_book=read_features(stores["closed_book"], None, partner),
    )
    read = partial(score_all, detector, "with_context")
    scores = read(stores)
    np.testing.assert_allclose(scores.raw, expected.raw, atol=1e-5)
    some = np.array([80, 3, 41])
    subset = read(stores, examples={"with_context": some})
    np.testing.assert_allclose(subset.encoders, expected.encoders[some], atol=1e-5)
    with pytest.raises(ValueError, match="needs the signals of closed_book"):
        read({"with_context": stores["with_context"]})
    with pytest.raises(ValueError, match="'q0' has no closed-book answer"):
        stores["closed_book"] = stored("closed_book", context[1:])
        read(stores)
    read(stores, examples={"with_context": some})


def test_no_more_answers_are_encoded_at_once_than_a_gibibyte_holds(detector):
    stores = {"closed_book": stored("closed_book", np.arange(90))}
    bank, sizes = detector.banks["closed_book"], []
    bank = dataclasses.replace(bank, config=dataclasses.replace(CONFIG, hidden=1 << 16))
    banks = detector.banks | {"closed_book": bank}
    wide = dataclasses.replace(detector, banks=banks)

    def score(branch, passes):
        sizes.append(passes["closed_book"].n_examples)
        return TorchForward(detector).score(branch, passes)

    scores = score_store(wide, "closed_book", stores, layer=None, score=score)
    longest = [bank.bytes_of([4] * len(bank.spans)) * n for n in sizes]
    assert max(longest) <= 1 << 30 and sum(sizes) == 90 > sizes[0] > 1
    expected = score_all(detector, "closed_book", stores)
    np.testing.assert_allclose(scores.raw, expected.raw, atol=1e-5)


def test_a_detector_names_what_is_missing(detector):
    with_context = features_of("with_context")
    with pytest.raises(ValueError, match="closed_book pass"):
        score_with_context(detector, with_context)
    with pytest.raises(ValueError, match="spans"):
        score_closed_book(detector, with_context)
    with pytest.raises(ValueError, match="no head with_context"):
        heads = {"closed_book": detector.heads["closed_book"]}
        score_with_context(Detector(banks=detector.banks, heads=heads), with_context)
    with pytest.raises(ValueError, match="which the detector lacks"):
        Detector(banks={}, heads=detector.heads)
    bank = detector.banks["closed_book"]
    dims = dataclasses.replace(bank.dims, names=bank.dims.names[::-1])
    other = {**detector.banks, "closed_book": dataclasses.replace(bank, dims=dims)}
    with pytest.raises(ValueError, match="with_context head .* whose families are oth"):
        Detector(banks=other, heads=detector.heads)


N, N_SEEDS = 300, 2
GRID = GridConfig(
    encoder=CONFIG,
    train=TrainConfig(learning_rate=1e-2, batch_size=32, max_epochs=6, n_seeds=N_SEEDS),
)
HEADS = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=3, n_seeds=N_SEEDS)


@pytest.mark.parametrize(
    ("branch", "n_tried"),
    [("closed_book", 15), ("with_context", 30), ("single_pass", 15)],
)
def test_a_runs_interval_allows_for_the_choice_among_all_encoders(
    smoke_run, branch, n_tried
):
    run = RunDir(smoke_run)
    _, rows = open_rows(run, branch_setting(branch))
    where = rows.where("validation")
    scores = run_selection(run, branch)[0]["champion"]["scores"].mean(axis=0)[where]
    answers = scores, rows.labels[where], rows.ids[where]
    evidence = Detector.load(run.detector).heads[branch].evidence
    interval = evidence.auroc
    assert evidence.n_tried == n_tried
    assert interval == pytest.approx(auroc_interval(*answers, n_tried))
    assert np.ptp(interval) > np.ptp(auroc_interval(*answers)) + 0.01


def answers(url, wild=()):
    """Answers without prompts; only the family `loud` knows which are right.

    Those in `wild` are longer than the others and have values that no other has.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, N)
    is_right = rng.random(N) < 0.5
    lengths[list(wild)] = 9
    is_token = np.arange(9) < lengths[:, None]
    is_wild = np.repeat(np.isin(np.arange(N), wild), lengths)
    spans = np.zeros((N, 3, 2), np.int64)
    spans[:, 2, 1] = lengths
    shapes = {"mute": (3,), "loud": (2, 2), "flat": (1,)}
    families = {name: Family(shape=shape) for name, shape in shapes.items()}
    values = {
        name: rng.standard_normal((*is_token.shape, *shape), np.float32)[is_token]
        for name, shape in shapes.items()
    }
    for x in values.values():
        x[is_wild] += 99
    values["loud"][:, 1, 0] += 1.5 * np.repeat(is_right, lengths)
    store = store_like(url, families, spans, values)
    splits = ("train",) * 3 + ("validation", "test")
    examples = [an_example(id=f"q{i}", split=splits[i % 5]) for i in range(N)]
    labels = [a_label(bool(y), example_id=f"q{i}") for i, y in enumerate(is_right)]
    return store, rows_of(store, examples, labels)


@pytest.fixture(scope="module")
def trained():
    store, rows = answers("memory://own-families")
    data = training_set(store, rows, layer=None, n_batch=GRID.train.batch_size)
    return store, rows, data, train_encoders(data, GRID)


def test_shares_count_every_epoch_and_saved_members_at_once(trained, tmp_path):
    counts, n_members = ([], [], []), len(trained[3][0].members)
    train = partial(train_encoders, trained[2], GRID, cache=Cache(tmp_path, "key"))
    for share, count in zip((Share(0, 2), Share(1, 2), Share()), counts, strict=True):
        train(share=share, on_epochs=count.append)
    *of_shares, saved = counts
    n_epochs = GRID.train.max_epochs
    assert sum(map(sum, of_shares)) == sum(saved) == n_members * n_epochs
    assert saved == [n_epochs] * n_members
    for count in of_shares:  # a block has at most four members
        assert len(count) >= n_epochs and 0 < max(count) <= 4 * n_epochs


def test_a_detector_can_be_made_saved_and_scored_from_arrays_only(trained, tmp_path):
    store, rows, data, (grid, outputs) = trained  # every subset with every seed
    assert data.dims.letters == "MLF" and data.dims.n_subsets == 7
    assert grid.members == tuple(Member(k, s) for s in range(N_SEEDS) for k in range(7))
    assert outputs.logits.shape == (7 * N_SEEDS, N)
    pool = pool_of({"closed_book": outputs}, {"closed_book": rows}, "closed_book", 2)
    config = SelectConfig(head=FusionConfig(hidden=8, n_slots=3), train=HEADS)
    trainer = HeadTrainer(pool, config)
    chosen = trainer.search()
    scores = trainer.scores(chosen)
    head = FusedHead(chosen.members, chosen.config, chosen.params, scores)
    about = {"store": store, "rows": rows, "layer": None, "config": GRID.encoder}
    source = TrainedGrid(trained=grid, standardizer=data.standardizer, **about)
    detector = calibrated({"closed_book": head}, {"closed_book": source}, precision=0.8)
    assert any("L" in name for _, name in detector.heads["closed_book"].reads)
    detector.save(tmp_path / "probe")
    loaded = Detector.load(tmp_path / "probe")
    assert loaded.provenance is None
    stores = {"closed_book": store}
    output = score_all(loaded, "closed_book", stores)
    np.testing.assert_allclose(output.raw, scores.mean(axis=0), atol=1e-5)
    test = rows.where("test")
    assert auroc(output.p_correct[test], rows.labels[test]).value > 0.85
    some = {"closed_book": test[::-1]}
    some = score_all(loaded, "closed_book", stores, examples=some)
    np.testing.assert_allclose(some.p_correct, output.p_correct[test[::-1]], atol=1e-6)
    dims = dataclasses.replace(data.dims, names=("mute", "loud", "new"))
    bank = dataclasses.replace(loaded.banks["closed_book"], dims=dims)
    other = dataclasses.replace(loaded, banks={"closed_book": bank})
    with pytest.raises(ValueError, match=r"are mute.*trained on mute.*new of 1"):
        score = TorchForward(loaded).score
        score_store(other, "closed_book", stores, layer=None, score=score)


def test_lengths_and_scope_come_only_from_training_and_validation_answers(trained):
    _, _, data, (grid, _) = trained

    def bank(*wild):
        store, rows = answers(f"memory://wild-{wild}", wild)
        about = {"store": store, "rows": rows, "layer": None, "config": GRID.encoder}
        source = TrainedGrid(trained=grid, standardizer=data.standardizer, **about)
        return encoder_bank(source, ["L"])

    plain = bank()
    of_train, of_validation, of_test = (bank(N - back) for back in (5, 2, 1))
    lengths = [x.lengths for x in (plain, of_train, of_validation, of_test)]
    assert lengths == [(5,), (9,), (5,), (5,)]
    assert_same_leaves(of_test.scope, plain.scope)
    assert_same_leaves(of_validation.scope[:2], plain.scope[:2])
    assert (of_validation.scope.limits > plain.scope.limits).all()
    assert (of_train.scope.high > plain.scope.high + 9).all()
