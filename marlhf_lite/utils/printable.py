"""Make text of data, answers and servers safe for a terminal or a table, and standard streams safe for any text."""

import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

# Controls (C0 but tab and newline, DEL, C1), marks that turn the reading direction, halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with U+FFFD for controls of a terminal, turns of the reading direction and half characters."""
    return UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class _Stream:
    """A text stream that does what another one does, unless a method says otherwise."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintableStream(_Stream):
    """A text stream that writes only printable text, and to nowhere once its reader, such as `head`, has ended.

    Otherwise an error would end hours of training when `head` ends in `marlhf run | head`.
    """

    def write(self, text: str) -> int:
        try:
            return self._stream.write(printable(text))
        except BrokenPipeError:
            self._write_to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._write_to_nowhere()

    def _write_to_nowhere(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _DropsWhatItCannotWrite(_Stream):
    """Standard error that drops text it cannot write, so that training survives a log on a full disk."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def open_streams() -> None:
    """Let nothing that is printed end the process, whatever the letters and wherever it goes.

    Standard output writes letters that its encoding (such as Windows' cp1252) lacks as \\uXXXX. Standard error drops
    what it cannot write.
    """
    if hasattr(sys.stdout, "reconfigure"):  # streams of notebooks and tests may lack it
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:  # closed, as by 2>&- in a shell: bars of progress would write to it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _DropsWhatItCannotWrite(sys.stderr)
