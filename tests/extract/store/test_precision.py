from typing import get_args

import numpy as np
import pytest

from beatrice.extract.store.families import Dtype, as_written, decode, encode


def rows_of(n=200, d=64, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, d)) * rng.lognormal(0, 3, (n, 1))).astype(
        np.float32
    )


def test_an_int8_channel_is_off_by_at_most_half_a_step_of_its_token():
    values = rows_of()
    encoded = encode(values, "int8")
    step = np.abs(values).max(axis=1) / 127
    np.testing.assert_allclose(encoded.scales, step, rtol=1e-6)
    error = np.abs(decode(encoded.codes, encoded.scales) - values)
    # A few float32 roundings beside the half step.
    assert (error <= 0.5001 * step[:, None]).all()
    assert error.max() > 0  # it is lossy: the bound above is not met by doing nothing


def test_the_largest_channel_and_tokens_of_zeros_survive_int8():
    values = np.zeros((3, 5), np.float32)
    values[0] = [1, -2, 0, 4, -127]
    values[1, 2] = -1e-20
    encoded = encode(values, "int8")
    np.testing.assert_allclose(decode(encoded.codes, encoded.scales), values, rtol=1e-6)
    assert encoded.scales[2] == 0


def test_what_was_written_is_written_again_as_the_same_bytes():
    for dtype in get_args(Dtype):
        once = as_written(rows_of(), dtype)
        again = as_written(once, dtype)
        # An int8 scale is itself rounded, in its last bit.
        np.testing.assert_allclose(again, once, rtol=1e-6 if dtype == "int8" else 0)


def test_bfloat16_is_the_upper_half_of_float32_rounded_to_even():
    values = rows_of()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    np.testing.assert_array_equal(
        as_written(values, "bfloat16"), rounded.view(np.float32)
    )


def test_float16_overflow_is_counted_apart_from_what_was_no_number():
    values = np.ones((4, 8), np.float32)
    values[1, :3] = 1e5, -7e4, 65520
    values[2, 0] = 65503  # rounds to the largest float16
    assert encode(values, "float16").n_overflowed == 3
    assert encode(values, "float16").n_invalid == 0
    values[3, :2] = np.nan, -np.inf
    result = encode(values, "float16")
    assert (result.n_invalid, result.n_overflowed) == (2, 3)
    for dtype in ("bfloat16", "float32", "int8"):
        result = encode(values, dtype)
        assert (result.n_invalid, result.n_overflowed) == (2, 0)


def test_values_that_a_type_cannot_hold_are_refused_when_rounded_for_a_detector():
    with pytest.raises(ValueError, match="1 of 8 values .* float16"):
        as_written(np.array([[1e6, 1, 1, 1], [0, 1, 1, 1]], np.float32), "float16")


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_codes_written_in_their_place_are_the_codes_that_are_returned(dtype):
    # Laid out as a reader hands states over: entries outside, tokens inside.
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
