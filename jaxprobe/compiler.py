"""How JAX compiles in a run, said before it compiles anything."""

import os
from pathlib import Path

from extract.run.manifest import Preset

# Cores are shared among operations; sharing each one as well costs a third of a
# training step (measured).
_WHOLE_OPERATIONS = "--xla_cpu_multi_thread_eigen=false"
# Code that runs for seconds need not be optimised for longer than that.
XLA_FLAGS: dict[Preset, str] = {
    "demo": _WHOLE_OPERATIONS,
    "smoke": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
    + _WHOLE_OPERATIONS,
    "paper": "",
}


def set_compiler(preset: Preset) -> None:
    """Set the compiler's flags, unless XLA_FLAGS has some, and its cache.

    Compiled code is kept in the user's cache directory (`JAX_COMPILATION_CACHE_DIR`
    names another, `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing): a run that is
    resumed, and the next of the same sizes, compile little.
    """
    import jax

    if XLA_FLAGS[preset]:  # read from the environment when the first array is made
        os.environ.setdefault("XLA_FLAGS", XLA_FLAGS[preset])
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update(
            "jax_compilation_cache_dir", str(cache / "beatrice" / "compiled")
        )
        # All of it: a short run compiles a hundred small pieces of 50 ms each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
