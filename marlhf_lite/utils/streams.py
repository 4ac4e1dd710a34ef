"""Standard streams that work with narrow encodings and with a standard error that takes no text."""

import sys
from contextlib import suppress


class _Unread:
    """Standard error that drops text it cannot write, so that training survives a log on a full disk."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text if possible; return its length."""
        try:
            return self.stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError):
            self.stream.flush()


def open_streams() -> None:
    """Write letters that standard output's encoding (such as Windows' cp1252) lacks as \\uXXXX; see `_Unread`."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):  # streams of notebooks and tests may lack it
        reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _Unread(sys.stderr)
