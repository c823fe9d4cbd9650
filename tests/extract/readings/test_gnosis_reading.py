"""What Gnosis reads of a map: golden values, and what each number answers to."""

import numpy as np
import pytest
import torch

from beatrice.extract.readings.gnosis import bin_weights, map_statistics
from tests.extract.readings.gnosis_loops import statistics

# Of Amirhosein-gh98/Gnosis f8ff11d, `compute_attn_stats(A[None, None], ("all",))` in
# float64, where A is `made_map()`.
GOLDEN = [
    *(2.433117151, 0.00841421, 0.013417416, 0.121788226, 0.856380224),
    *(0.075951562, 0.077601563, 2.409176157, 2.401336395),
    *(0.061868683, 0.118371205, 0.175189383, 14.86),
    *(0.665322581, 0.33266129, 0.061313085, 0.060664076, 0.030645703, 0.005320744),
    *(0.88213545, 0.948622593, 0.947382334, 0.131734027),
]


def made_map(n=32):
    i = torch.arange(n, dtype=torch.float64)
    rows, columns = i[:, None], i[None, :]
    return (1 + (7 * rows + 3 * columns) % 11) * (columns <= rows) / 200


def test_a_map_has_the_statistics_of_the_official_code():
    np.testing.assert_allclose(map_statistics(made_map()), GOLDEN, atol=2e-8)
    np.testing.assert_allclose(statistics(made_map().numpy()), GOLDEN, atol=1e-7)


def test_maps_are_described_one_by_one_in_single_precision_too():
    many = torch.stack([made_map(), made_map().flip(0), made_map().mT]).float()
    found = map_statistics(many.reshape(3, 1, 32, 32))
    assert found.shape == (3, 1, 23)
    for one, own in zip(found[:, 0], many, strict=True):
        np.testing.assert_allclose(one, map_statistics(own.double()), atol=1e-5)


def test_a_head_that_sees_itself_alone_has_all_on_the_diagonal():
    found = map_statistics(torch.eye(32)).numpy()
    np.testing.assert_allclose(found[9:13], [1, 1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(found[13:15], 0.5, atol=1e-6)
    assert found[22] == pytest.approx(1, abs=1e-6)  # a row tells its column


def test_a_head_that_sees_the_first_token_alone_has_all_in_one_column():
    sink = torch.zeros(32, 32)
    sink[:, 0] = 1
    found = map_statistics(sink).numpy()
    assert found[14] == found[16] == 0 and found[18] == pytest.approx(1, abs=1e-6)
    assert found[22] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 7, 32, 50])
def test_bins_are_those_of_adaptive_pooling(n_tokens):
    values = torch.rand(1, 1, n_tokens, generator=torch.Generator().manual_seed(0))
    bins = bin_weights([(3, 3 + n_tokens)], n_tokens + 9, 32)
    own = bins[0, :, 3 : 3 + n_tokens]
    assert float(bins.sum()) == pytest.approx(float(own.sum()), abs=1e-5)
    pooled = torch.nn.functional.adaptive_avg_pool1d(values, 32)
    torch.testing.assert_close(own @ values.flatten(), pooled.flatten())
