import dataclasses

import pytest

from benchmarks.speed.scaling import HEAD, Axis, measure, microworld, variants

SMALL = dataclasses.replace(microworld(1), batch_size=8, n_seeds=1)


def planted(name, power):
    sizes = (1, 2, 4, 8)
    return Axis(
        name=name,
        sizes=sizes,
        seconds=tuple(0.3 * size**power for size in sizes),
        gflops=(1.0,) * 4,
    )


AXES = [planted("examples", 1.0), planted("members", 0.9), planted("width", 1.7)]


def test_planted_powers_are_found():
    assert [axis.exponent for axis in AXES] == pytest.approx([1.0, 0.9, 1.7])
    assert len(AXES[0].cells()) == len(HEAD)


def test_every_variant_changes_one_axis_alone():
    plain = microworld(4)
    for axis, cases in variants(plain).items():
        for size, case in cases.items():
            changed = {
                "examples": dataclasses.replace(case, n_steps=plain.n_steps),
                "members": dataclasses.replace(case, n_seeds=plain.n_seeds),
                "hidden width": dataclasses.replace(case, encoder=plain.encoder),
            }[axis]
            assert changed == plain
            assert size in (case.n_examples, len(case.members), case.encoder.hidden)


@pytest.mark.slow
def test_the_benchmark_times_every_variant():
    told = []
    axes = list(measure(SMALL, 1, 2, lambda *done: told.append(done)))
    assert [len(axis.sizes) for axis in axes] == [4, 3, 4]
    assert told[-1] == (9, 9)  # the plain workload is on every axis, timed once
    assert all(min(axis.seconds + axis.gflops) > 0 for axis in axes)
