"""The one exception that stands for a mistake the user can mend."""


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, row or option), and the mend.

    The command line prints it without a traceback and exits with code 2.
    """
