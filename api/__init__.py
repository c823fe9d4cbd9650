"""Is a frozen language model's answer right? Ask its own internal signals.

The names below load when they are first used, so that `import beatrice` is instant and
a user of one side never loads the other's framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beatrice.cli import load

__all__ = ["load"]

_PLACES = {"load": "beatrice.cli"}


def __getattr__(name: str) -> Any:
    """Load a public name from where it is defined (PEP 562)."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*globals(), *__all__])
