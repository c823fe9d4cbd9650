"""What a stage will need, counted before it is done: `--dry-run`.

Counts of rows, requests, tokens and bytes are exact, or said to be an upper bound.
No time is given: what a few rows take tells little of thousands (a projection said
13 s, the stage took 68).
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is left of a stage; None where a number does not apply or is not known.

    Attributes:
      n_rows: rows it will write.
      n_requests: texts a model has to write, retries not included.
      n_prompt_tokens: that it reads.
      n_new_tokens: that it writes, at most.
      n_flops: floating-point operations of matrix products, at most.
      model_bytes: weights and caches of the largest batch, on the device that the
        model is loaded on.
      memory_bytes: of the arrays that a stage without such a model holds at once.
      disk_bytes: of what it writes, at most.
      basis: what is counted, in a sentence.
    """

    stage: str
    n_rows: int | None = None
    n_requests: int | None = None
    n_prompt_tokens: int | None = None
    n_new_tokens: int | None = None
    n_flops: int | None = None
    model_bytes: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    basis: str

    def as_text(self) -> str:
        """Return the forecast in lines."""
        lines = [f"{self.stage}: a dry run, nothing is written"]
        for name, words, show in _SHOWN:
            value = getattr(self, name)
            if value is not None:
                lines.append(f"  {words:<24}{show(value)}")
        return "\n".join([*lines, f"  {self.basis}"])


def bytes_in_words(n: int) -> str:
    """Return a size with its unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("n_rows", "rows", lambda n: f"{n:,}"),
    ("n_requests", "requests", lambda n: f"{n:,}"),
    ("n_prompt_tokens", "prompt tokens", lambda n: f"{n:,}"),
    ("n_new_tokens", "new tokens, at most", lambda n: f"{n:,}"),
    ("n_flops", "operations, at most", lambda n: f"{n:.3g} FLOP"),
    ("model_bytes", "memory of the model", bytes_in_words),
    ("memory_bytes", "memory of the arrays", bytes_in_words),
    ("disk_bytes", "disk, at most", bytes_in_words),
)
