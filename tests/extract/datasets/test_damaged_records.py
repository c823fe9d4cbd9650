"""Records of every layout, spoiled at random places, in files with whole ones."""

import copy
import json
import random

import pytest

from beatrice.extract.datasets.loading import inspect_file
from tests.extract.datasets import published as pub

JUNK = (
    None,
    5,
    -1,
    1.5,
    True,
    "",
    "x",
    "[",
    "[1",
    "{'a':1}",
    "[['a','b']]",
    [],
    {},
    [1],
    [None],
    [[]],
    [{}],
    {"a": 1},
    ["x"],
    [["a", "b"]],
    "\u2028",
    10**30,
)
MAKERS = (
    pub.hotpot,
    pub.hotpot_columns,
    pub.twowiki,
    pub.twowiki_strings,
    pub.musique,
    pub.popqa,
    pub.biencoder,
    pub.oracle,
    pub.simplified,
    pub.trivia,
    pub.flashrag,
    pub.lm_eval,
)


def spoil(rng, value):
    """Replace, or remove, something at a random depth."""
    if isinstance(value, dict) and value and rng.random() > 0.15:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: spoil(rng, value[key])}
    if isinstance(value, list) and value and rng.random() > 0.15:
        i = rng.randrange(len(value))
        return [*value[:i], spoil(rng, value[i]), *value[i + 1 :]]
    return copy.deepcopy(rng.choice(JUNK))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_spoiled_record_costs_no_other_and_never_a_traceback(make, tmp_path):
    rng = random.Random(make.__name__)
    path = tmp_path / "file"
    n_refused = 0
    for _ in range(40):
        records = [make(i) for i in range(4)]
        records[1] = spoil(rng, records[1])
        report = inspect_file(pub.write_array(path, records))
        json.dumps(report, allow_nan=False)
        assert report["error"] is None
        assert report["records"] == 4 == report["loaded"] + report["refused"]
        # A spoiled id can be that of a later record, which is then the second one.
        assert report["refused"] <= 1
        n_refused += report["refused"]
    assert n_refused > 0


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_spoiled_byte_is_counted_or_named(make, tmp_path):
    rng = random.Random(make.__name__)
    path = tmp_path / "file"
    for _ in range(20):
        content = bytearray(
            "".join(json.dumps(make(i)) + "\n" for i in range(4)).encode()
        )
        content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        report = inspect_file(path)
        assert report["error"] is not None or report["loaded"] >= 2
        assert report["records"] == report["loaded"] + report["refused"]
