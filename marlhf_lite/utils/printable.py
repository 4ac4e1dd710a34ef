"""Text of data, answers and servers as a terminal or a table may show it."""

import re
from typing import Any, TextIO

# Controls (C0 but tab and newline, DEL, C1), marks that turn the reading direction, halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with U+FFFD for what could control a terminal, turn the reading direction or not be written."""
    return UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class PrintableStream:
    """A text stream through which only printable text reaches `stream`; all else is as there."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def write_colours(self, text: str) -> None:
        """Write a line with colours of our own, in which all else is printable."""
        self._stream.write(f"{text}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
