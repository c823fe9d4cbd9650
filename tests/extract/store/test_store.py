"""A store of signals returns what was written, in every number type."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from beatrice.extract.store.spec import (
    Dtype,
    Family,
    StoreSpec,
    as_written,
    canonical_json,
    decode,
    encode,
    parse_index,
)
from beatrice.extract.store.store import (
    as_url,
    create_store,
    done_ranges,
    end_to_end,
    open_store,
    read_family,
    verify,
    write_range,
)
from tests.extract.signals.readers import files_under
from tests.records import flip_bit

FAMILIES = {
    "hidden": Family(shape=(3, 8), dtype="bfloat16", by_layer=True),
    "prob": Family(shape=(5,)),
    "attn": Family(shape=(2, 2, 1, 4)),
}
FINGERPRINT = {"model": "tiny", "revision": "1"}
# The fifth example is longer than a shard; several ranges end inside one.
LENGTHS = np.array([20, 30, 64, 10, 150, 5, 5, 60, 3, 61, 7], dtype=np.int64)


def spec_of(lengths=LENGTHS, **changes):
    spans = np.stack([np.zeros_like(lengths), lengths // 2], -1)
    keys = tuple((f"q{i}", "closed_book", "original") for i in range(len(lengths)))
    usual = dict(families=FAMILIES, keys=keys, lengths=lengths)
    usual |= dict(spans=np.stack([spans] * 3, 1), rows_per_shard=64)
    usual |= dict(hidden_layers=(0, 4, 7), fingerprint=FINGERPRINT)
    return StoreSpec(**(usual | changes))


def signals_of(spec):
    rng = np.random.default_rng(0)
    n_rows = int(spec.offsets[-1])
    return {
        name: rng.standard_normal((n_rows, *family.shape)).astype(family.numpy_dtype)
        for name, family in spec.families.items()
    }


def write(store, signals, ranges=None):
    for range_id in range(store.spec.n_ranges) if ranges is None else ranges:
        start, stop = store.spec.range_rows(range_id)
        in_range = {name: values[start:stop] for name, values in signals.items()}
        write_range(store, range_id, in_range)


def filled_store(where, **changes):
    store = create_store(where, spec_of(**changes))
    signals = signals_of(store.spec)
    write(store, signals)
    return store, signals


@pytest.mark.parametrize("kind", ["memory", "file", "path with spaces #1"])
def test_what_is_written_is_read_back(tmp_path, kind):
    where = f"memory://{tmp_path.name}" if kind == "memory" else tmp_path / kind
    _, signals = filled_store(where)
    store = open_store(where)
    assert store.spec.keys == spec_of().keys
    np.testing.assert_array_equal(store.spec.spans, spec_of().spans)
    for name, values in signals.items():
        read = read_family(store, name)
        assert read.values.dtype == values.dtype
        np.testing.assert_array_equal(read.values, values)
        np.testing.assert_array_equal(read.lengths, LENGTHS)
        np.testing.assert_array_equal(read.starts, store.spec.offsets[:-1])
    assert verify(store) == []


def test_any_examples_equal_the_same_slice_of_everything(tmp_path):
    store, signals = filled_store(tmp_path)
    rng = np.random.default_rng(1)
    for first, last in np.sort(rng.integers(0, 12, (20, 2))).tolist():
        rows = slice(*store.spec.offsets[[first, last]])
        read = read_family(store, "hidden", slice(first, last), layer=4).values
        np.testing.assert_array_equal(read, signals["hidden"][rows, 1])
    for examples in ([7, 3, 10, 4, 5], slice(2, 6), [], np.arange(11)[::-1]):
        read = read_family(store, "attn", examples)
        for i, example in enumerate(np.arange(11)[examples]):
            start, stop = store.spec.offsets[example : example + 2]
            np.testing.assert_array_equal(read.example(i), signals["attn"][start:stop])
        assert len(read.values) == sum(read.lengths)


@pytest.mark.parametrize("rows_per_shard", [16, 64, 256])  # of the second
def test_two_stores_end_to_end_are_read_like_each_by_itself(tmp_path, rows_per_shard):
    lengths = np.array([11, 70, 9, 3, 40], dtype=np.int64)
    other = {"lengths": lengths, "rows_per_shard": rows_per_shard}
    stores, signals = zip(
        filled_store(tmp_path / "a"), filled_store(tmp_path / "b", **other), strict=True
    )
    keys = tuple((str(i),) for i in range(16))
    both = end_to_end(*stores, keys)
    assert both.spec.keys == keys and both.spec.n_ranges == sum(
        store.spec.n_ranges for store in stores
    )
    for name in FAMILIES:
        expected = np.concatenate([of[name] for of in signals])
        read = read_family(both, name)
        np.testing.assert_array_equal(read.values, expected)
        some = read_family(both, name, [15, 2, 11])
        np.testing.assert_array_equal(some.example(1), read.example(2))
        np.testing.assert_array_equal(some.example(0), read.example(15))
    states = read_family(both, "hidden", [12, 0], layer=7, span=2)
    alone = read_family(stores[1], "hidden", [1], layer=7, span=2)
    np.testing.assert_array_equal(states.example(0), alone.values)
    other = create_store(tmp_path / "c", spec_of(hidden_layers=(0, 4, 8)))
    with pytest.raises(ValueError, match="does not match .* expected the same"):
        end_to_end(stores[0], other, keys)
    shutil.rmtree(tmp_path / "b" / "prob")
    with pytest.raises(ValueError, match="is damaged in prob"):
        read_family(both, "prob")


def test_one_layer_is_read_without_the_bytes_of_the_others(tmp_path):
    store, signals = filled_store(tmp_path)
    shard = tmp_path / store.shard_keys(0, "hidden")[0]
    flip_bit(shard, 64 * 8 * 2 + 4 + 10)  # after layer 0's chunk and its checksum
    start, stop = store.spec.range_rows(0)
    first = slice(*store.spec.range_examples[:2])
    for layer, column in ((0, 0), (7, 2)):
        read = read_family(store, "hidden", first, layer=layer).values
        np.testing.assert_array_equal(read, signals["hidden"][start:stop, column])
    with pytest.raises(ValueError, match="damaged"):
        read_family(store, "hidden", first, layer=4)


def test_ranges_never_share_a_shard_and_cover_every_example():
    rng = np.random.default_rng(2)
    for _ in range(50):
        spec = spec_of(rng.integers(1, 150, rng.integers(1, 30)))
        shards, edges = spec.range_shards, spec.range_examples
        assert edges[0] == 0 and edges[-1] == len(spec.keys)
        assert (np.diff(edges) >= 1).all()
        for range_id in range(spec.n_ranges):
            start, stop = spec.range_rows(range_id)
            room = (shards[range_id + 1] - shards[range_id]) * 64
            assert stop - start <= room < stop - start + 64


def test_zeros_and_rows_equal_to_the_fill_value_survive(tmp_path):
    store = create_store(tmp_path, spec_of())
    signals = {name: np.zeros_like(v) for name, v in signals_of(store.spec).items()}
    signals["prob"][:] = np.nan
    write(store, signals)
    assert not read_family(store, "hidden").values.astype(np.float32).any()
    assert np.isnan(read_family(store, "prob").values).all()
    assert verify(store) == []


def test_a_missing_range_is_refused_and_not_read_as_nan(tmp_path):
    store = create_store(tmp_path, spec_of())
    signals = signals_of(store.spec)
    write(store, signals, ranges=[0, 1, 3])
    store = open_store(tmp_path)
    assert done_ranges(store) == {0, 1, 3}
    with pytest.raises(ValueError, match=r"range 2 \(examples 3 to 3\).*not extracted"):
        read_family(store, "prob")
    assert read_family(store, "prob", [0, 1, 2]).values.shape == (114, 5)
    assert len(verify(store)) == store.spec.n_ranges - 3
    (tmp_path / store.commit_key(0)).unlink()
    assert done_ranges(store) == {1, 3}
    write(store, signals, ranges=set(range(store.spec.n_ranges)) - {1, 3})
    assert verify(store) == []


DAMAGES = {
    "a flipped bit": lambda x: x[:100] + bytes([x[100] ^ 16]) + x[101:],
    "half of it": lambda x: x[: len(x) // 2],
    "nothing in it": lambda x: b"",
    "no file": None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_damaged_shard_is_named_and_can_be_written_again(tmp_path, damage, family):
    store, signals = filled_store(tmp_path)
    intact = files_under(tmp_path)
    key = store.shard_keys(1, family)[0]
    path = tmp_path / key
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    with pytest.raises(ValueError) as caught:
        read_family(open_store(tmp_path), family)
    for words in ("range 1 (examples 2 to 2)", key, "damaged", "extract again"):
        assert words in str(caught.value)
    assert verify(store) == [str(caught.value)]
    write(store, signals, ranges=[1])
    assert files_under(tmp_path) == intact


def flipped_bits(path, seed):
    """Flip 150 bits of a file, one at a time; restore the file at the end."""
    intact = path.read_bytes()
    for bit in np.random.default_rng(seed).choice(len(intact) * 8, 150, replace=False):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(content)
        yield
    path.write_bytes(intact)


def test_flipped_bits_of_a_shard_and_a_shard_in_anothers_place_are_found(tmp_path):
    store, _ = filled_store(tmp_path)
    shards = [tmp_path / store.shard_keys(r, "prob")[0] for r in (0, 1, 6)]
    for _ in flipped_bits(shards[0], seed=3):
        with pytest.raises(ValueError, match="range 0 .* damaged"):
            read_family(store, "prob", slice(*store.spec.range_examples[:2]))
    shutil.copy(*shards[1:])
    (problem,) = verify(store)
    assert problem.startswith("range 6 ")
    assert f"; delete {store.source_of(6)} and run" in problem


@pytest.mark.parametrize("name", ["index.json", "examples.safetensors"])
def test_a_damaged_index_is_refused_by_name(tmp_path, name):
    filled_store(tmp_path)
    for _ in flipped_bits(tmp_path / name, seed=4):
        with pytest.raises(ValueError, match=name):
            open_store(tmp_path)
    (tmp_path / name).write_text("[" * 10**5 + "]" * 10**5)
    for read in (open_store, lambda where: create_store(where, spec_of())):
        with pytest.raises(ValueError, match=f"{name} is .*damaged"):
            read(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=name):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keys": [7] * len(LENGTHS)}, "does not hold a store .*keys"),
        ({"rows_per_shard": "x"}, "does not hold a store .*rows_per_shard"),
        ({"families": {"prob": {"shape": [10**30]}}}, "hold"),
        (
            {"keys": [["a"], ["b"]]},
            r"safetensors: expected .*\(2,\).*; delete the store",
        ),
    ],
)
def test_an_index_with_other_content_and_a_right_checksum_is_refused(
    tmp_path, changes, words
):
    filled_store(tmp_path)
    file = tmp_path / "index.json"
    index, _ = parse_index(file.read_bytes(), "")
    index |= changes
    sha256 = hashlib.sha256(canonical_json(index)).hexdigest()
    file.write_text(json.dumps(index | {"sha256": sha256}))
    with pytest.raises(ValueError, match=words):
        open_store(tmp_path)


def test_an_unreadable_commit_record_and_a_stray_file_among_them_are_named(tmp_path):
    store, _ = filled_store(tmp_path)
    record = tmp_path / store.commit_key(2)
    for content in ("{", "[]", "{}", '{"crc32": []}', "[" * 10**5):
        record.write_text(content)
        (problem,) = verify(store)
        assert "unreadable commit record" in problem
        assert f"; delete {store.source_of(2)} and run" in problem
    for name in (".DS_Store", "000001.json.bak", "notes.json"):
        stray = record.with_name(name)
        stray.write_text("")
        with pytest.raises(ValueError, match=f"{name} is not a commit record.*delete"):
            done_ranges(store)
        stray.unlink()
    assert len(done_ranges(store)) == store.spec.n_ranges


def test_damaged_array_metadata_are_refused(tmp_path):
    filled_store(tmp_path)
    path = tmp_path / "prob" / "zarr.json"
    path.write_text(path.read_text().replace("crc32c", "crc32d", 1))
    with pytest.raises(ValueError, match="prob does not hold the array"):
        open_store(tmp_path)
    path.write_text("[" * 10**5 + "]" * 10**5)
    with pytest.raises(ValueError, match="prob/zarr.json: .*nested too deeply"):
        open_store(tmp_path)


def test_the_same_store_is_continued_and_another_one_or_wrong_signals_refused(tmp_path):
    store, signals = filled_store(tmp_path)
    before = files_under(tmp_path)
    again = create_store(tmp_path, spec_of())
    np.testing.assert_array_equal(read_family(again, "prob").values, signals["prob"])
    assert files_under(tmp_path) == before
    with pytest.raises(ValueError, match='fingerprint.revision "1" instead of "2"'):
        create_store(tmp_path, spec_of(fingerprint=FINGERPRINT | {"revision": "2"}))
    with pytest.raises(ValueError, match="rows_per_shard 64 instead of 128"):
        create_store(tmp_path, spec_of(rows_per_shard=128))
    short = {name: values[:10] for name, values in signals.items()}
    with pytest.raises(ValueError, match="range 0 .*: expected .*found"):
        write_range(store, 0, short)
    assert files_under(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows_per_shard": 100}, "power of two, found 100"),
        ({"keys": spec_of().keys[:-1] + spec_of().keys[:1]}, "unique, got .*q0"),
        ({"spans": spec_of().spans + 100}, "expected spans .* inside the example"),
        ({"hidden_layers": (0, 4)}, "has 3 layers, but hidden_layers names 2"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        spec_of(**changes)


def test_an_unknown_family_or_layer_is_refused(tmp_path):
    store, _ = filled_store(tmp_path)
    with pytest.raises(ValueError, match="no family 'resid'; it has hidden, prob"):
        read_family(store, "resid")
    with pytest.raises(ValueError, match="layer 1 is not in the store.*0, 4, 7"):
        read_family(store, "hidden", layer=1)
    with pytest.raises(ValueError, match="'prob' is not stored by layer"):
        read_family(store, "prob", layer=0)


def test_a_path_and_its_url_name_the_same_place_and_s3_is_refused(tmp_path):
    assert as_url(tmp_path) == as_url(f"file://{tmp_path}/")
    assert as_url(Path("runs")) == f"file://{Path.cwd()}/runs/"
    with pytest.raises(ValueError, match="cannot be written to s3://bucket/run/"):
        create_store("s3://bucket/run", spec_of())


def rows_of(n=200, d=64, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, d)) * rng.lognormal(0, 3, (n, 1))
    return values.astype(np.float32)


def test_an_int8_channel_is_off_by_at_most_half_a_step_of_its_token():
    values = rows_of()
    encoded = encode(values, "int8")
    step = np.abs(values).max(axis=1) / 127
    np.testing.assert_allclose(encoded.scales, step, rtol=1e-6)
    error = np.abs(decode(encoded.codes, encoded.scales) - values)
    # A few float32 roundings on top of the half step.
    assert (error <= 0.5001 * step[:, None]).all()
    assert error.max() > 0  # control: int8 is lossy
    # The largest channel and tokens of zeros survive.
    values = np.zeros((3, 5), np.float32)
    values[0] = [1, -2, 0, 4, -127]
    values[1, 2] = -1e-20
    encoded = encode(values, "int8")
    np.testing.assert_allclose(decode(encoded.codes, encoded.scales), values, rtol=1e-6)
    assert encoded.scales[2] == 0


def test_writing_read_values_again_changes_nothing_more():
    for dtype in get_args(Dtype):
        once = as_written(rows_of(), dtype)
        again = as_written(once, dtype)
        # An int8 scale is itself rounded in its last bit.
        np.testing.assert_allclose(again, once, rtol=1e-6 if dtype == "int8" else 0)


def test_bfloat16_is_the_upper_half_of_float32_rounded_to_even():
    values = rows_of()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    written = as_written(values, "bfloat16")
    np.testing.assert_array_equal(written, rounded.view(np.float32))


def test_float16_overflow_is_counted_apart_from_values_that_are_not_finite():
    values = np.ones((4, 8), np.float32)
    values[1, :3] = 1e5, -7e4, 65520
    values[2, 0] = 65503  # rounds to the largest float16
    for n_invalid in (0, 2):
        values[3, :n_invalid] = (np.nan, -np.inf)[:n_invalid]
        for dtype in get_args(Dtype):
            result = encode(values, dtype)
            counts = (n_invalid, 3 if dtype == "float16" else 0)
            assert (result.n_invalid, result.n_overflowed) == counts


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e6), ("float32", np.inf)])
def test_if_a_type_cannot_hold_a_value_all_values_are_read_as_nan(dtype, value):
    values = np.array([[value, 1, 1, 1], [0, 1, 1, 1]], np.float32)
    assert np.isnan(as_written(values, dtype)).all()


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_codes_written_into_a_buffer_are_the_codes_that_are_returned(dtype):
    # The memory order of a reader's states: entries outside, tokens inside.
    values = rows_of().reshape(4, 50, 64).transpose(1, 0, 2)
    values[0, 0, :3] = np.nan, 1e5, -np.inf
    alone = encode(values, dtype)
    buffer = np.zeros((54, 4, 64), alone.codes.dtype)
    there = encode(values, dtype, out=buffer[2:52])
    assert buffer[2:52].tobytes() == np.ascontiguousarray(alone.codes).tobytes()
    assert not buffer[:2].any() and not buffer[52:].any()
    counts = (alone.n_invalid, alone.n_overflowed)
    assert (there.n_invalid, there.n_overflowed) == counts
    assert counts == (2, int(dtype == "float16"))
    if dtype == "int8":
        np.testing.assert_array_equal(there.scales, alone.scales)
