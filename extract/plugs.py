"""Load a user's own judge, retriever or detector: `module:NAME` or an entry point."""

import importlib
import importlib.metadata
import inspect
import operator
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from beatrice.extract.run.files import sha256_file

_named: set[tuple[str, str]] = set()  # plugs that the user named in this process


class NotNamed(ValueError):
    """A run names code that the user has not named in this process."""

    def __init__(self, spec: str, option: str) -> None:
        """`option` is the command-line option that names the code."""
        self.arguments = f"{option} {spec}"
        super().__init__(
            f"this run uses the code of {spec!r}, which anybody may have put there; "
            f"give {self.arguments} to allow it"
        )


def load_plug(spec: str, group: str, *, option: str | None = None) -> Any:
    """Return the object that `spec` names.

    Args:
      spec: `module:NAME`, where the module is installed or in the current folder and
        NAME may contain dots; or the name of an entry point.
      group: group of the entry points, such as "beatrice.judges".
      option: the command-line option that names such a plug; give it if `spec` comes
        from a run. A run may come from anybody and name any code, so a module is loaded
        only if the user named it, too, by an earlier call without `option`.
    """
    if not isinstance(spec, str):
        raise ValueError(
            f"expected MODULE:NAME or the name of an entry point of {group}, not a "
            f"{type(spec).__name__}"
        )
    module_name, colon, name = spec.strip().partition(":")
    if not colon:
        return _load_entry_point(module_name, group)
    parts = [*module_name.split("."), *name.split(".")]
    if not all(word.isidentifier() for word in parts):
        raise ValueError(
            f"{spec!r} is not MODULE:NAME, such as my_file:my_function of my_file.py"
        )
    if option is None:
        _named.add((spec, group))
    elif (spec, group) not in _named:
        raise NotNamed(spec, option)
    return _attribute(_import(module_name, spec), name, spec)


def sha256_of_code(plug: Any) -> str:
    """Return the SHA-256 of a callable's file; "" if none, as in a notebook."""
    plug = inspect.unwrap(plug)
    while isinstance(plug, partial):
        plug = plug.func
    is_code = inspect.isroutine(plug) or inspect.isclass(plug)
    try:
        return sha256_file(Path(inspect.getfile(plug if is_code else type(plug))))
    except (TypeError, OSError):
        return ""


def identity_or_error(identity: Callable[[], str]) -> str | NotNamed:
    """Return the identity of a plug, or the error that keeps it from being loaded."""
    try:
        return identity()
    except NotNamed as error:
        return error


def _load_entry_point(name: str, group: str) -> Any:
    points = importlib.metadata.entry_points(group=group)
    if name not in points.names:
        installed = ", ".join(sorted(points.names)) or "none"
        raise ValueError(
            f"{name!r} is not an entry point of {group} (installed: {installed}); give "
            "one of them, or MODULE:NAME of a module installed or in this folder"
        )
    value = points[name].value.partition("[")[0]  # without extras
    module_name, _, attribute = (word.strip() for word in value.partition(":"))
    module = _import(module_name, f"{name} ({value})")
    return _attribute(module, attribute, name) if attribute else module


def _import(name: str, spec: str) -> ModuleType:
    # Last, so that no file here shadows an installed package; never removed, since the
    # module may import its neighbours when it runs.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    # Any exception that a user's module raises while it loads is a mistake in it.
    except (Exception, SystemExit) as error:
        # The missing module is the one to import, or a parent package of it.
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{spec}: no module {error.name!r} is installed, and {here} has no "
                f"{name.partition('.')[0]}.py; start in the folder that has it, or "
                "install it"
            ) from None
        raise ValueError(
            f"{spec}: importing {name} failed with {type(error).__name__}: {error}"
        ) from error


def _attribute(module: ModuleType, name: str, spec: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        names = [key for key in vars(module) if not key.startswith("_")]
        raise ValueError(
            f"{spec}: {module.__name__} has no {name!r}; it has "
            f"{', '.join(names) or 'no public name'}"
        ) from None
