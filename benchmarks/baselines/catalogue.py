"""Every rival detector that a run can be judged with, in the order of the tables.

A detector is one file in `sampled/`, `trained/` or `internal/` that ends in
`DETECTORS`; somebody's own is `module:NAME` of any module, or an entry point.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from beatrice.benchmarks.baselines.detector import Detector, is_taken
from beatrice.extract.plugs import load_plug
from beatrice.extract.run.files import sha256_file

GROUP = "beatrice.baselines"  # of entry points
_FOLDERS = ("sampled", "trained", "internal")
# The order of the paper's tables; a file that is not named here comes behind.
_ORDER = (
    "entropy bayesian selfcheck eigenscore saplma linear_probe llms_know sep gnosis "
    "llm_check p_true lookback_lens redeep lumina ladder"
).split()


@functools.cache
def catalogue() -> dict[str, Detector]:
    """Return the detectors by name; loads JAX and scikit-learn, and not Torch."""
    here = Path(__file__).parent
    files = {
        info.name: folder
        for folder in _FOLDERS
        for info in pkgutil.iter_modules([str(here / folder)])
    }
    places = {name: place for place, name in enumerate(_ORDER)}
    names = sorted(files, key=lambda name: (places.get(name, len(places)), name))
    modules = [
        importlib.import_module(f"{__package__}.{files[name]}.{name}") for name in names
    ]
    return {one.name: one for x in modules for one in getattr(x, "DETECTORS", ())}


def is_plug(spec: str) -> bool:
    """Tell whether a detector is somebody's own, and not in the catalogue."""
    return spec not in catalogue()


def find_detector(spec: str) -> Detector:
    """Return the detector of a name in the catalogue, of `module:NAME`, or of a plug.

    Args:
      spec: the name of an entry point of "beatrice.baselines" too.

    Raises:
      ValueError: there is no such detector, or it has the name of another.
    """
    known = catalogue()
    if spec in known:
        return known[spec]
    if ":" not in spec:
        try:
            detector = load_plug(spec, GROUP)
        except ValueError as error:
            raise ValueError(
                f"no detector {spec!r}; there are {', '.join(known)}; and {error}"
            ) from None
    else:
        detector = load_plug(spec, GROUP)
    if not isinstance(detector, Detector):
        raise ValueError(
            f"{spec} is {type(detector).__name__}, expected a Detector "
            "(benchmarks/baselines/detector.py)"
        )
    is_known = known.get(detector.name) is detector
    if not is_known and (detector.name in known or is_taken(detector.name)):
        raise ValueError(
            f"{spec}: the name {detector.name!r} is that of another row of the tables; "
            "give yours another"
        )
    return detector


def code_of(detector: Detector) -> str:
    """Return the SHA-256 of the file that a detector's function is written in.

    Scores of a detector in the catalogue stay until its `variant` says otherwise;
    somebody's own is scored anew whenever that file changes.
    """
    score = inspect.unwrap(detector.score)
    while isinstance(score, functools.partial):
        score = score.func
    try:
        return sha256_file(Path(inspect.getfile(score)))
    except TypeError:  # an object that is called
        return sha256_file(Path(inspect.getfile(type(score))))


def listed(detectors: Iterable[Detector]) -> str:
    """Return a line for each detector: name, title, what it needs, where it is from."""
    cells = [(one.name, one.title, _needs(one), one.source) for one in detectors]
    widths = [2 + max(map(len, column)) for column in zip(*cells, strict=True)]
    pad = [[f"{x:<{w}}" for x, w in zip(own, widths, strict=True)] for own in cells]
    return "\n".join("".join(own).rstrip() for own in pad)


def _needs(detector: Detector) -> str:
    found: Sequence[str] = [*sorted(detector.needs)]
    return (
        ", ".join([*found, *(["a pass"] if detector.reads else [])]) or "nothing more"
    )
