"""Standard streams that stand in no command's way: narrow encodings, and messages that nobody can read."""

import sys
from contextlib import suppress


class _Unread:
    """Standard error that drops what cannot be written: a log on a full disk ends no training."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text if that is possible; return its length."""
        try:
            return self.stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with suppress(OSError):
            self.stream.flush()


def open_streams() -> None:
    """Write letters that standard output's encoding lacks, such as Windows' cp1252, as \\uXXXX; see `_Unread`."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):  # streams of notebooks and tests may lack it
        reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _Unread(sys.stderr)
