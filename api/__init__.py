"""Is a frozen language model's answer right? Ask its own internal signals.

    import beatrice

    model = beatrice.LanguageModel("HuggingFaceTB/SmolLM2-135M")
    answers = model.answer(questions)
    probe = beatrice.fit(model.read(answers), labels)
    probe.score("Who wrote Dracula?", "Bram Stoker").p_correct

The public names load on first use, so that `import beatrice` is instant and loads
neither Torch nor JAX before they are needed.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from beatrice.extras import naming_extra

if TYPE_CHECKING:
    from beatrice.extract.datasets.loading import read_questions
    from beatrice.extract.label.labels import exact_match
    from beatrice.extract.records import Answer, Example, Label, Passage
    from beatrice.fitting import FitConfig, fit
    from beatrice.model import LanguageModel
    from beatrice.pgir.asking import Score, StreamedToken
    from beatrice.probe import Probe, load
    from beatrice.signals import Signals

__all__ = [
    "Answer",
    "Example",
    "FitConfig",
    "Label",
    "LanguageModel",
    "Passage",
    "Probe",
    "Score",
    "Signals",
    "StreamedToken",
    "exact_match",
    "fit",
    "load",
    "read_questions",
]
_PLACES = {
    **dict.fromkeys(
        ("Answer", "Example", "Label", "Passage"), "beatrice.extract.records"
    ),
    **dict.fromkeys(("FitConfig", "fit"), "beatrice.fitting"),
    **dict.fromkeys(("Probe", "load"), "beatrice.probe"),
    "LanguageModel": "beatrice.model",
    **dict.fromkeys(("Score", "StreamedToken"), "beatrice.pgir.asking"),
    "Signals": "beatrice.signals",
    "exact_match": "beatrice.extract.label.labels",
    "read_questions": "beatrice.extract.datasets.loading",
}
if not all(map(importlib.util.find_spec, ("flax", "jax", "tensorstore"))):
    # `help` and a star import load every listed name, and would fail on these.
    __all__[:] = [x for x in __all__ if x not in ("FitConfig", "Signals", "fit")]


if not TYPE_CHECKING:  # a type checker would accept any name because of it

    def __getattr__(name: str) -> Any:
        """Load a public name from where it is defined (PEP 562)."""
        if name in _PLACES:
            with naming_extra(f"beatrice.{name}"):
                return getattr(importlib.import_module(_PLACES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names and the loaded subpackages."""
    rooms = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *rooms, *(name for name in globals() if "__" in name)})
