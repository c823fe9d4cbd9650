"""Keep the threads of a linear-algebra library out of training's way.

On a CPU, JAX hands a Cholesky factor and its triangular solves to SciPy's OpenBLAS,
which spreads 64 x 64 numbers over every core and then lets its threads spin for some
milliseconds. These are the cores that the next products need: at the paper's widths a
training step took 1.3 times as long.
"""

import jax
from threadpoolctl import threadpool_limits


def use_one_blas_thread() -> None:
    """Let linear algebra run in the thread that calls it, from now on.

    For the whole process, and not undone: several trainings may run side by side, and
    the first to end must not wake the threads for the others. Without effect where
    another living thread has set limits through `threadpoolctl`, and on accelerators,
    which factor on the device.
    """
    if jax.default_backend() != "cpu":
        return
    # The library that JAX will call: a limit reaches only what is loaded.
    import scipy.linalg  # noqa: F401

    threadpool_limits(1, user_api="blas")
