"""Rows and stores of made-up answers: what many tests begin with."""

import jax
import numpy as np

from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.store import create_store, write_range
from beatrice.jaxprobe.families import Standardizer
from beatrice.jaxprobe.rows import Rows
from beatrice.jaxprobe.scope import Evidence, Scope, Validation


def rows_like(labels, setting="closed_book", **fields):
    """Labelled training rows of one set, each of its own question, but for `fields`."""
    n = len(labels)
    rows = {
        "ids": [f"q{i}" for i in range(n)],
        "datasets": ["world"] * n,
        "splits": ["train"] * n,
        "variants": ["original"] * n,
        "labels": labels,
        "is_labelled": [True] * n,
    }
    arrays = {name: np.asarray(values) for name, values in (rows | fields).items()}
    return Rows(setting=setting, **arrays)


def rows_of(labels, setting="closed_book", splits=None):
    """Labelled rows of one set; by default a third of each split, one after another."""
    if splits is None:
        thirds = np.array(["train", "validation", "test"])
        splits = thirds[np.arange(len(labels)) * 3 // len(labels)]
    return rows_like(np.asarray(labels, bool), setting, splits=splits)


def store_like(url, families, spans, values=None, **fields):
    """A store in memory; by default of one range, and normal signals of all tokens.

    The spans end with the answer, `[n_examples, 3, 2]`.
    """
    spans = np.asarray(spans, np.int64)
    fixed = {
        "keys": tuple((f"q{i}", "closed_book", "original") for i in range(len(spans))),
        "lengths": spans[:, 2, 1],
        "rows_per_shard": 1 << 11,
        "hidden_layers": (),
        "fingerprint": {},
    }
    spec = StoreSpec(families=families, spans=spans, **(fixed | fields))
    store, rng = create_store(url, spec), np.random.default_rng(len(spans))
    if values is None:
        values = {
            name: rng.standard_normal(
                (spec.family_offsets(name)[-1], *family.shape), np.float32
            )
            for name, family in families.items()
        }
    for range_id in range(spec.n_ranges):
        rows = {name: slice(*spec.range_rows(range_id, name)) for name in values}
        write_range(store, range_id, {name: values[name][rows[name]] for name in rows})
    return store


def wide_scope(total):
    """The scope of signals of four families of which none lies outside."""
    ends = np.full((2, total), 1e30, np.float32)
    return Scope(-ends[0], ends[1], np.ones(4, np.float32))


# Of heads whose training nobody looks at: enough answers, of every P right and wrong.
KNOWN = {
    "evidence": Evidence(train=(60, 60), validation=(50, 50), auroc=(0.6, 0.8)),
    "validation": Validation(np.linspace(0, 1, 100), np.arange(100) % 2 == 0),
}


def assert_same_leaves(left, right, **tolerance):
    """Check that two trees have the same arrays, bit by bit without a tolerance."""
    check = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    jax.tree.map(lambda a, b: check(a, b, **tolerance), left, right)


def identity_of(dims):
    """A standardizer that changes nothing."""
    return Standardizer(
        np.zeros(dims.total, np.float32), np.ones(dims.total, np.float32)
    )
