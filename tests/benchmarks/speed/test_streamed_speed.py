import pytest

from benchmarks.speed.commands import measure_fresh
from benchmarks.speed.store import StreamedWork, labels_of, make_store, measure
from extract.store.read import open_store
from jaxprobe.config import EncoderConfig, StreamConfig
from jaxprobe.features.reading import read_features
from jaxprobe.features.subsets import FamilyDims
from jaxprobe.fit.work import Workload

TOY = StreamedWork(
    work=Workload(
        encoder=EncoderConfig(projection=3, hidden=4, n_blocks=1, n_groups=2),
        dims=FamilyDims(hidden=6, prob=5, resid=4, attn=8),
        spans=((2, 5), (1, 3)),
        batch_size=16,
        n_steps=1,
        learning_rate=2e-2,
    ),
    stream=StreamConfig(n_chunk=8, n_mixed=4),
    n_train=192,
    n_valid=64,
    n_epochs=3,
    signal=3.0,
)


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    make_store(path, TOY, TOY.n_train + TOY.n_valid)
    return path


def test_the_store_holds_the_signal_and_its_labels_fall_along_it(where):

    store = open_store(where)
    labels = labels_of(256)
    assert labels[:128].mean() > labels[128:].mean() + 0.15
    features = read_features(store, "closed_book", 0)
    answers, mask = features.tokens[-1], features.masks[-1]
    for first in TOY.work.dims.slices:
        means = [
            answers[kind][mask[kind]][:, first.start].mean()
            for kind in (labels, ~labels)
        ]
        # Of some 250 tokens each; their mean's deviation is 0.06.
        assert means[0] - means[1] == pytest.approx(3.0, abs=0.4)


@pytest.mark.slow
def test_streamed_and_resident_training_find_the_same(where):
    found = {
        mode: measure_fresh(mode, measure, mode, where, TOY)
        for mode in ("streamed", "resident")
    }
    for row in found.values():
        assert row["steps_per_second"] > 0
        assert row["peak_mib"] > row["libraries_mib"] > 0
        assert row["auroc"] > 0.85
    assert found["streamed"]["auroc"] == pytest.approx(
        found["resident"]["auroc"], abs=0.1
    )  # 64 answers and few steps


def test_reading_is_measured_in_order_and_shuffled(where):
    found = measure("reading", where, TOY)
    for name in ("raw", "chunks"):
        assert found[f"{name}_mib_per_second"] > 0


def test_a_process_that_fails_says_why(tmp_path):
    with pytest.raises(ValueError, match="training has failed.*no feature store"):
        measure_fresh("training", measure, "streamed", tmp_path, TOY)
