"""Exceptions for what the user can fix."""


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, row or option), and the fix.

    The command line prints it without a traceback and exits with code 2.
    """


class ServerError(InputError):
    """A server that the run needs does not do its part; a run that has come so far can go on later."""


def one_line(error: Exception) -> str:
    """Return the class and the text of an error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
