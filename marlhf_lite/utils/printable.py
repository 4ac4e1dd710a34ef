"""Make text of data, answers and servers safe for a terminal or a table."""

import re
from typing import Any, TextIO

# Controls (C0 but tab and newline, DEL, C1), marks that turn the reading direction, halves of surrogate pairs.
UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with U+FFFD for controls of a terminal, turns of the reading direction and half characters."""
    return UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class PrintableStream:
    """A text stream that writes only printable text to `stream`, and does everything else as `stream` does."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def write_colours(self, text: str) -> None:
        """Write a line of printable text with colour codes."""
        self._stream.write(f"{text}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
