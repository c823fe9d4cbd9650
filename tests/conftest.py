import os

import pytest

# Set before JAX or Torch start: no test needs more than the two cores of the
# smallest machine, and most of a JAX test's time is compilation, which need not
# optimise code that runs for milliseconds.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config):
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def compiled_code_lasts_for_one_file():
    """A process that keeps all that it compiles comes to six gigabytes, and to as many
    mappings of memory as Linux allows one (65,530), where the compiler crashes."""
    yield
    import jax

    jax.clear_caches()
