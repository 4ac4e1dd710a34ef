"""End training after the current step: Ctrl-C, SIGTERM (Slurm, Kaggle, spot machines), SIGHUP (a closed terminal)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

# Seconds in which another Ctrl-C counts as the same one: terminal and launcher may both send it to a process.
AGAIN = 2.0
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
NOTE = b"\nmarlhf: stopping after this step, with a checkpoint; another Ctrl-C stops at once\n"


class Stopped(KeyboardInterrupt):
    """Training was asked to stop, and stopped in all processes after the same step, with a checkpoint."""


def sigterm_as_ctrl_c() -> AbstractContextManager[None]:
    """Return a context in which SIGTERM and SIGHUP raise `KeyboardInterrupt`."""
    return _handlers(dict.fromkeys((signal.SIGTERM, HANGUP), signal.default_int_handler))


@contextmanager
def graceful_stop() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C, SIGTERM or SIGHUP is remembered, and a later Ctrl-C raises `KeyboardInterrupt`.

    The block gets a function that tells whether a signal came to any process. All processes call it together after
    every step, and leave the block if it returns True. At the end of the block `Stopped` is raised if a signal came.
    """
    since: list[float] = []  # when the first signal came

    def remember(number: int, frame) -> None:
        """Take a signal: note when the first came, and let a second Ctrl-C end everything at once."""
        if not since:
            since.append(time.monotonic())
            if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a machine says so
                with suppress(OSError):  # the terminal may be closed
                    os.write(2, NOTE)  # not print, which the signal may have interrupted
        # A second Ctrl-C. (Within AGAIN seconds it is still the first, which terminal and launcher may both send.)
        elif number == signal.SIGINT and time.monotonic() - since[0] > AGAIN:
            raise KeyboardInterrupt

    def asked_to_stop() -> bool:
        from accelerate.utils import gather_object  # takes seconds, and --help needs none of it

        return any(gather_object([bool(since)]))

    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGINT, HANGUP), remember)):
        yield asked_to_stop
    # Asked once more: a signal may have come after the last step.
    if asked_to_stop():
        raise Stopped


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer; without effect on Windows and outside the main thread."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def late(number: int, frame) -> None:
        raise TimeoutError(f"took more than {seconds:g} seconds")

    with _handlers({signal.SIGALRM: late}):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _handlers(handlers: dict) -> Iterator[None]:
    """Let these handlers take their signals inside this block; afterwards the handlers from before take them again.

    Nothing changes for signals that the shell or `nohup` has switched off. Outside the main thread nothing changes at
    all, because only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number, handler in handlers.items():
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)  # it returns the handler from before
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
