"""The one exception for mistakes that the user can fix."""


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, row or option), and the fix.

    The command line prints it without a traceback and exits with code 2.
    """
