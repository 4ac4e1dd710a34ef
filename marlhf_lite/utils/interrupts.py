"""Ctrl-C and SIGTERM, which Slurm, Kaggle and spot machines send: training ends behind the step under way."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = 2.0  # seconds in which a second Ctrl-C counts as the first: a launcher sends it to its processes once more
NOTE = b"\nmarlhf: stopping behind this step, with a checkpoint; another Ctrl-C stops at once\n"


class Stopped(KeyboardInterrupt):
    """Training was asked to stop, and did so in all processes behind the same step, with a checkpoint."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM raises `KeyboardInterrupt`."""
    with _handlers({signal.SIGTERM: signal.default_int_handler}):
        yield


class StopRequest:
    """Whether a signal has asked training to stop; called behind every step, by all processes together."""

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
            os.write(2, NOTE)  # print may be at work where the signal came
        if number == signal.SIGINT and first is not None and time.monotonic() - first > AGAIN:
            raise KeyboardInterrupt


@contextmanager
def stops_behind_a_step() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C or SIGTERM is remembered; at the end of the block it raises `Stopped`.

    The block ends its training when the request says so. Outside the main thread, which alone gets signals, and for a
    Ctrl-C that the shell has switched off, nothing changes.
    """
    request = StopRequest()
    numbers = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) != signal.SIG_IGN)
    with _handlers(dict.fromkeys(numbers, request.remember)):
        yield request
    if request():
        raise Stopped


@contextmanager
def _handlers(handlers: dict) -> Iterator[None]:
    """These handlers of signals inside, and the ones before afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
