import dataclasses

import pytest

from benchmarks.results.figures import to_svg
from benchmarks.speed.bench_training import microworld
from benchmarks.speed.scaling_cost import Point, exponents, measure, variants
from benchmarks.speed.scalingfigure import scaling

SMALL = dataclasses.replace(microworld(1), batch_size=8, n_seeds=1)


def planted(**exponent):
    return [
        Point(axis=axis, size=size, seconds=0.3 * size**power, gflops=1.0)
        for axis, power in exponent.items()
        for size in (1, 2, 4, 8)
    ]


def test_planted_powers_are_found():
    found = exponents(planted(examples=1.0, members=0.9, width=1.7))
    assert found == pytest.approx({"examples": 1.0, "members": 0.9, "width": 1.7})


def test_every_variant_changes_one_axis_alone():
    plain = microworld(4)
    for axis, size, case in variants(plain):
        changed = {
            "examples": dataclasses.replace(case, n_steps=plain.n_steps),
            "members": dataclasses.replace(case, n_seeds=plain.n_seeds),
            "width": dataclasses.replace(case, encoder=plain.encoder),
        }[axis]
        assert changed == plain
        assert size in (case.n_examples, len(case.members), case.encoder.hidden)


def test_the_figure_shows_every_axis_with_its_exponent():
    points = planted(examples=1.0, members=0.9, width=1.7)
    svg = to_svg(scaling(points, exponents(points)), "scaling", "said")
    for words in ("examples", "members", "hidden width", "exponent 1.70"):
        assert words in svg


@pytest.mark.slow
def test_the_benchmark_times_every_variant():
    told = []
    points = measure(SMALL, 1, 2, lambda *done: told.append(done))
    assert [p.axis for p in points].count("width") == 4 and told[-1] == (11, 11)
    assert all(p.seconds > 0 and p.gflops > 0 for p in points)
