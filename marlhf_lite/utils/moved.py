"""Modules that have moved: their earlier paths go on for one release, with a warning.

Both paths are one module object, so that classes, pickles and names in records (`package.module:name`) are the same.
"""

import importlib
import importlib.abc
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "marlhf_lite"
# Earlier path -> today's, both below the package: of modules (submodules go with their package), and of names that have
# left a module which is still there.
TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MOVED, MOVED_NAMES = TABLE["modules"], TABLE["names"]


def moved_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that names have left; `module` is its path."""

    def lookup(name: str) -> Any:
        target = MOVED_NAMES.get(f"{module.removeprefix(f'{PACKAGE}.')}.{name}")
        if target is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{PACKAGE}.{target}", stacklevel=2)
        return pkgutil.resolve_name(f"{PACKAGE}.{target}")

    return lookup


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds today's module behind an earlier path."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _today(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system; `exec_module` puts today's module in its place."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _warn(name, _today(name), stacklevel=2)
        sys.modules[name] = importlib.import_module(_today(name))


def install() -> None:
    """Make earlier paths importable; the package does so once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())


def _today(fullname: str) -> str:
    """Today's path of a module that has moved, or of one in a package that has; empty for all others."""
    package, _, path = fullname.partition(".")
    if package != PACKAGE:
        return ""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if new := MOVED.get(".".join(parts[:count])):
            return ".".join([PACKAGE, new, *parts[count:]])
    return ""


def _warn(old: str, new: str, stacklevel: int) -> None:
    """Warn at the user's import. The frames of the import system do not count."""
    warnings.warn(f"{old} is now {new}: its former name ends with the next release", DeprecationWarning, stacklevel + 1)
