import scipy.linalg  # noqa: F401  its OpenBLAS is the one that JAX calls
from threadpoolctl import threadpool_info, threadpool_limits

from beatrice.jaxprobe.kernels.stored import use_one_blas_thread


def threads():
    libraries = threadpool_info()
    return {one["num_threads"] for one in libraries if one["user_api"] == "blas"}


def test_linear_algebra_has_one_thread_once_training_has_asked_for_it():
    with threadpool_limits(2, user_api="blas"):  # puts back what was there
        assert threads() == {2}
        use_one_blas_thread()
        assert threads() == {1}
