"""End training after the current step: Ctrl-C, SIGTERM (Slurm, Kaggle, spot machines), SIGHUP (a closed terminal)."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

AGAIN = 2.0  # seconds in which a second Ctrl-C counts as the first: a launcher sends it to its processes once more
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
NOTE = b"\nmarlhf: stopping after this step, with a checkpoint; another Ctrl-C stops at once\n"


class Stopped(KeyboardInterrupt):
    """Training was asked to stop, and stopped in all processes after the same step, with a checkpoint."""


def sigterm_as_ctrl_c() -> AbstractContextManager[None]:
    """Return a context in which SIGTERM and SIGHUP raise `KeyboardInterrupt`."""
    return _handlers(dict.fromkeys((signal.SIGTERM, HANGUP), signal.default_int_handler))


class StopRequest:
    """Tell whether a signal has asked training to stop. All processes call it together after every step."""

    def __init__(self) -> None:
        self.since: float | None = None

    def __call__(self) -> bool:
        from accelerate.utils import gather_object  # takes seconds, and --help needs none of it

        asked = self.since is not None
        return any(gather_object([asked]))

    def remember(self, number: int, frame) -> None:
        """Take a signal. Raises `KeyboardInterrupt` at a second Ctrl-C."""
        first, self.since = self.since, self.since or time.monotonic()
        if first is None and os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):  # the terminal may be closed
                os.write(2, NOTE)  # print may be at work where the signal came
        if number == signal.SIGINT and first is not None and time.monotonic() - first > AGAIN:
            raise KeyboardInterrupt


@contextmanager
def graceful_stop() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C, SIGTERM or SIGHUP is remembered; at the end of the block it raises `Stopped`.

    The block ends its training when the request says so.
    """
    request = StopRequest()
    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGINT, HANGUP), request.remember)):
        yield request
    if request():
        raise Stopped


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer; without effect on Windows and outside the main thread."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
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
    """Inside, these handlers take signals; afterwards, the handlers from before.

    Nothing changes for signals that the shell or `nohup` switched off, and outside the main thread, which alone gets
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = {number: handler for number, handler in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
