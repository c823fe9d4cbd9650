"""Signals in memory: subsets, copies, other processes, and when they are freed."""

import copy
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

import beatrice
from beatrice.extract.store.store import open_kvstore
from tests.api.test_fit import planted_signals
from tests.process import forked


def test_memory_of_signals_is_freed_with_the_last_object_that_uses_it(rng):
    signals, _ = planted_signals(rng, 20)
    url, some = signals.store.url, signals[:5]
    others = beatrice.Signals(url)
    del others  # signals opened by an address free nothing
    assert len(signals[0]["sae"])
    del signals
    assert len(some[0]["sae"]) and open_kvstore(url).list().result()
    del some
    assert not open_kvstore(url).list().result()


def test_signals_in_a_forked_process_raise_an_error_and_do_not_end_it(rng):
    owned = [planted_signals(rng, 20)[0]]

    def child():
        with pytest.raises(RuntimeError, match="forked .* by 'spawn'"):
            owned[0][0]
        with pytest.raises(RuntimeError, match="forked .* by 'spawn'"):
            planted_signals(rng, 20)
        owned.clear()  # frees them, which would need TensorStore

    assert forked(child) == 0


def test_signals_in_memory_survive_copying_and_pickling(rng):
    signals, _ = planted_signals(rng, 20)
    values, some = signals[7]["sae"], signals[5:10]
    sent = ForkingPickler.loads(ForkingPickler.dumps(some))
    copies = [sent, copy.deepcopy(some)]
    del signals, some
    for again in copies:
        assert len(again) == 5 and np.array_equal(again[2]["sae"], values)


def test_a_subset_of_signals_holds_the_chosen_answers(rng):
    signals, _ = planted_signals(rng, 20)
    where = np.arange(20) % 3 == 1
    some = signals[where]
    assert len(some) == where.sum() and some.ids == tuple(np.array(signals.ids)[where])
    for name in signals.families:
        assert np.array_equal(some[1][name], signals[4][name])
    assert "20 answers" in repr(signals) and "3 families" in repr(signals)
    assert "(1 answer, " in repr(signals[[0]])
    with pytest.raises(ValueError, match=r"one axis.*, found shape \(2, 1\)"):
        signals[np.argwhere([True, True])]
    for which in (True, "sae"):
        with pytest.raises(TypeError, match=rf"expected the place .*found {which!r}"):
            signals[which]


def test_layers_are_refused_by_a_probe_of_signals_without_layers(rng):
    labels = np.arange(200) % 2 == 0
    states = rng.normal(size=(200, 6)) + labels[:, None]
    probe = beatrice.fit(
        beatrice.Signals.from_arrays({"hidden": states}), labels, progress=False
    )
    layered = beatrice.Signals.from_arrays({"hidden": states[:, None]}, layers=[2])
    with pytest.raises(ValueError, match="fitted on signals without layers"):
        probe.predict(layered)
