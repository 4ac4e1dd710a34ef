"""What libraries expect of the environment of a process, made good before they are imported."""

import os
import sys
import tempfile

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.threads import choose_threads


def prepare_surroundings() -> None:
    """Set the variables that libraries read once, when they are imported. What the user has set stays if it works."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_NUM_THREADS", str(choose_threads()))
    # A user id without a name, as in many containers, has no home: nltk, for one, fails at its import.
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = tempfile.gettempdir()
    # A notebook tells its commands to draw by a module that another Python may lack; a command only writes files.
    backend = os.environ.get("MPLBACKEND")
    if backend and not _has_backend(backend):
        os.environ["MPLBACKEND"] = "Agg"


def _has_backend(name: str) -> bool:
    """Return whether matplotlib takes this way to draw."""
    # The variable is away during the import, because matplotlib's import fails half-way for a value it does not take.
    del os.environ["MPLBACKEND"]
    from matplotlib.rcsetup import validate_backend

    os.environ["MPLBACKEND"] = name
    try:
        validate_backend(name)
    except ValueError:
        return False
    return True


def check_encoding(words: list[str]) -> None:
    """Raise `InputError` for a word of the command, or a current folder, whose bytes Python could not read as text.

    Python then keeps the bytes as halves of surrogate pairs, and the libraries that save weights and tokenizers fail.
    """
    for word in (*words, os.getcwd()):
        try:
            word.encode()
        except UnicodeEncodeError:
            name = word.encode("utf-8", "replace").decode()
            raise InputError(f"{name}: {_how_to_read(os.fsencode(word))}") from None


def _how_to_read(raw: bytes) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "not UTF-8: convert it, as by iconv -f latin1 -t utf8"
    encoding = sys.getfilesystemencoding()
    return f"this system reads words as {encoding}, which lacks letters of it: set PYTHONUTF8=1"
