"""Custom functions and classes by the name `package.module:name`, with errors that name their option."""

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from marlhf_lite.utils.errors import InputError, ServerError, one_line


def is_user_code(name: str) -> bool:
    """Return whether an option's value is `package.module:name`: names that the library knows have no colon."""
    return ":" in name


def import_user_code(option: str, name: str, known: str) -> Any:
    """Return the function or class that `package.module:name` names; modules of the current folder are found, too.

    Raises `InputError` if there is none. `known` says in the message which other values the option takes.
    """
    fix = f"give {known}, or package.module:name"
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"--{option} {name}: unknown: {fix}")
    if os.getcwd() not in sys.path:  # `marlhf` itself does not look there, `python -m` does
        sys.path.append(os.getcwd())
    _check_not_hidden(option, name, module.partition(".")[0])
    try:
        code = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise InputError(
            f"--{option} {name}: cannot be imported ({one_line(error)}): {fix}"
        ) from None
    if not callable(code):
        raise InputError(
            f"--{option} {name}: it is of type {type(code).__name__}, not a function or class: {fix}"
        )
    return code


def _check_not_hidden(option: str, name: str, package: str) -> None:
    """Raise `InputError` if a module of the current folder has the name of an installed one, which is found first.

    `test.py` is the usual case: Python itself has a package `test`.
    """
    own_files = [f"{package}.py", os.path.join(package, "__init__.py")]
    own = next((file for file in own_files if os.path.exists(file)), None)
    if own is None:
        return
    # The file of the module that an import gives: of the imported one, else of the one that Python would find.
    module = sys.modules.get(package)
    place = getattr(module, "__file__", None)
    if module is None:
        found = importlib.util.find_spec(package)
        place = found.origin if found else None
    is_own = place is not None and os.path.exists(place) and os.path.samefile(place, own)
    if not is_own and _is_of_python_or_a_library(place):
        fix = f"rename your file, such as my_{own}"
        raise InputError(
            f"--{option} {name}: another module {package}, of Python or of a library, hides your {own}: {fix}"
        )


def _is_of_python_or_a_library(place: str | None) -> bool:
    """Return whether a module's file belongs to Python or to an installed package.

    A module without a file, `place` None or a word, is built into Python.
    """
    if place is None or not os.path.isabs(place):  # such as "built-in" and "frozen"
        return True
    paths = sysconfig.get_paths()
    installed = [os.path.realpath(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    folder = os.path.realpath(place)
    return any(os.path.commonpath([folder, library]) == library for library in installed)


@contextmanager
def named_errors(option: str, name: str) -> Iterator[None]:
    """Make errors of the user's code in this block an `InputError` that names the option and the line of that code.

    If memory has ended, the error stays unchanged, so that the run continues with less. If `name` is empty, the code is
    not a user's, and all errors stay unchanged.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        from accelerate.utils.memory import should_reduce_batch_size

        if not name or should_reduce_batch_size(error):
            raise
        if isinstance(error, ServerError):
            raise ServerError(f"--{option} {name}: {error}") from error
        if isinstance(error, InputError):
            raise InputError(f"--{option} {name}: {error}{line_of(name, error)}") from error
        fix = "correct it"
        if "unexpected keyword argument" in str(error):
            fix = "end its arguments with **context"
        what = f"raised {one_line(error)}{line_of(name, error)}"
        raise InputError(f"--{option} {name}: {what}: {fix}") from error


def line_of(name: str, error: BaseException) -> str:
    """Return the line in the module of `name` from which an error came, as text; empty if it came from elsewhere."""
    module = sys.modules.get(name.partition(":")[0])
    file = getattr(module, "__file__", None)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:  # the last one is the innermost
            place = f" (line {frame.lineno} of {os.path.basename(file)})"
    return place
