"""Errors that the user can fix."""

import difflib
import errno
import re
import sys
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

# Errors of a disk or folder -> the fix.
DISK_FAULTS = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some disk space",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.EPERM: "choose a folder that can be written",
    errno.EFBIG: "choose a disk, or a limit such as that of ulimit -f, that takes larger files",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EPIPE: "what reads the output, such as head, ended: write the output to a file",
}
# Messages of writers that raise other errors than OSError: safetensors and torch.
TOO_LARGE = "File too large"
FULL_DISK = re.compile(
    r"No space left on device|No usable temporary directory|quota exceeded"
    r"|PytorchStreamWriter|file write failed|unexpected pos"
)


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, row or option), and the fix.

    The command line prints it without a traceback and exits with code 2. Line breaks, such as those in the text of an
    array, become spaces.
    """

    def __init__(self, message: str = ""):
        super().__init__(re.sub(r"\s*[\r\n]\s*", " ", message))
        self.kind = sys._getframe(1).f_code.co_name  # the name of the function that raises it


class Problems(InputError):
    """Several problems, one line each."""

    def __init__(self, errors: Sequence[InputError]):
        ValueError.__init__(self, "\n".join(map(str, errors)))
        self.errors = errors


def raise_all(errors: Sequence[InputError]) -> None:
    """Raise these errors as one, if there are any."""
    if errors:
        raise Problems(errors) if len(errors) > 1 else errors[0]


class ServerError(InputError):
    """A server that the run needs fails; the run can continue later from where it is."""


def check_address(option: str, text: str) -> None:
    """Raise `InputError` if the value of an option looks like an address and cannot be read as one."""
    if "://" not in text:
        return
    try:
        _ = urlsplit(text).port  # which also reads the host
    except ValueError as error:
        raise InputError(f"--{option} {text}: not an address ({error}): check it") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the known name nearest to a word; empty if none is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def one_line(error: BaseException) -> str:
    """Return the class and the text of an error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def disk_fault(error: BaseException | None) -> str:
    """Return one line if an error, or what caused it, says that a file could not be written or read; else "".

    The causes count, because libraries raise errors of their own from those of the system.
    """
    while error is not None:
        number = getattr(error, "errno", None)
        # Some writers raise errors without the system's number, but with its text.
        if number not in DISK_FAULTS and FULL_DISK.search(str(error)):
            number = errno.ENOSPC
        elif number not in DISK_FAULTS and TOO_LARGE in str(error):
            number = errno.EFBIG
        if number in DISK_FAULTS:
            reason = getattr(error, "strerror", None) or one_line(error)
            line = f"not written or read ({reason}): {DISK_FAULTS[number]}"
            place = getattr(error, "filename", None)
            return f"{place}: {line}" if place else line
        error = error.__cause__ or error.__context__
    return ""
