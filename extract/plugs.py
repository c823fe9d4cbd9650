"""A person's own judge, retriever or detector: by `module:NAME`, or an entry point."""

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

_named: set[tuple[str, str]] = set()  # plugs that a person named in this process


class NotNamed(ValueError):
    """A run names code that no line of this process has named."""

    def __init__(self, spec: str, option: str) -> None:
        """`option` is what of the command line names it."""
        self.arguments = f"{option} {spec}"
        super().__init__(
            f"this run uses the code of {spec!r}, which anybody may have put there; "
            f"give {self.arguments} to run it"
        )


def load_plug(spec: str, group: str, *, option: str | None = None) -> Any:
    """Return the object that a person plugs in.

    Args:
      spec: `module:NAME`, of a module that is installed or lies in the current folder;
        NAME may have dots. Or the name of an entry point.
      group: of the entry points, such as "beatrice.judges".
      option: what of the command line names such a plug; given where `spec` stands in
        a run. A run may come from anybody and name any code, so a module is loaded for
        it only after a call without `option`, by which a person names it here too.
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
            f"{spec!r} is not MODULE:NAME; my_file:my_function is that of my_file.py"
        )
    if option is None:
        _named.add((spec, group))
    elif (spec, group) not in _named:
        raise NotNamed(spec, option)
    return _attribute(_import(module_name, spec), name, spec)


def sha256_of_code(plug: Any) -> str:
    """Return the SHA-256 of the file that a callable is written in.

    Empty where there is no such file, as of what is typed into a notebook.
    """
    plug = inspect.unwrap(plug)
    while isinstance(plug, partial):
        plug = plug.func
    is_code = inspect.isroutine(plug) or inspect.isclass(plug)
    try:
        return sha256_file(Path(inspect.getfile(plug if is_code else type(plug))))
    except (TypeError, OSError):
        return ""


def identity_or_error(identity: Callable[[], str]) -> str | NotNamed:
    """Return the identity of a plug, or why its code is not looked at."""
    try:
        return identity()
    except NotNamed as error:
        return error


def _load_entry_point(name: str, group: str) -> Any:
    points = importlib.metadata.entry_points(group=group)
    if name not in points.names:
        installed = ", ".join(sorted(points.names)) or "none"
        raise ValueError(
            f"{name!r} is no entry point of {group} (installed: {installed}); give one "
            "of them, or MODULE:NAME of a module that is installed or lies here"
        )
    value = points[name].value.partition("[")[0]  # without extras
    module_name, _, attribute = (word.strip() for word in value.partition(":"))
    module = _import(module_name, f"{name} ({value})")
    return _attribute(module, attribute, name) if attribute else module


def _import(name: str, spec: str) -> ModuleType:
    # Last, so that no file here stands in for an installed package; and for good, since
    # a module may import others beside it when it runs.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    # Whatever a person's module raises while it loads is a mistake in that module.
    except Exception as error:
        # The missing module is the one to import, or a package around it.
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{spec}: no module {error.name!r} is installed, nor does "
                f"{name.partition('.')[0]}.py lie in {here}; start where it lies, or "
                "install it"
            ) from None
        raise ValueError(
            f"{spec}: importing {name} ends in {type(error).__name__}: {error}"
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
