"""How fast, how often and how far an endpoint is asked: rate, waits between tries, and a budget."""

from __future__ import annotations

import email.utils
import math
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from marlhf_lite.evaluation.judges.judge import Stopped
from marlhf_lite.utils.errors import InputError


class Pace:
    """Threads that share it send at most `rpm` requests a minute, evenly; 0 is no limit."""

    def __init__(self, rpm: float = 0.0):
        self.interval = 60 / rpm if rpm else 0.0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._next = self._held = -math.inf

    def start(self) -> None:
        """Before a run."""
        self._stop.clear()

    def stop(self) -> None:
        """Whoever waits gets `Stopped`."""
        self._stop.set()

    def turn(self) -> None:
        """Returns when the caller may send."""
        while True:
            self.sleep(0)
            with self._lock:
                now = time.monotonic()
                left = max(self._next, self._held) - now
                if left <= 0:
                    self._next = now + self.interval
                    return
            self.sleep(left)

    def hold(self, seconds: float) -> None:
        """Nobody sends for so long: the endpoint has asked for it."""
        with self._lock:
            self._held = max(self._held, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Raises `Stopped` if the run ends meanwhile, or has ended."""
        if self._stop.wait(seconds):
            raise Stopped


def backoff(tries: int, first: float, longest: float) -> float:
    """Seconds before the next try, after `tries` failed ones: `first` doubled each time, up to `longest`.

    A random share of up to a half is taken off, so that requests that failed together do not come again together.
    """
    full = min(first * 2.0 ** min(tries - 1, 60), longest)
    return full * (1 - random.random() / 2)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that Retry-After asks for, given as a number or a date; None where it does not or is unreadable."""
    text = headers.get("retry-after")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(seconds, 0.0)


@dataclass(frozen=True)
class Use:
    """Tokens of prompts and of verdicts."""

    prompt: int = 0
    completion: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.prompt + other.prompt, self.completion + other.completion)

    def __sub__(self, other: Use) -> Use:
        return Use(self.prompt - other.prompt, self.completion - other.completion)

    @property
    def total(self) -> int:
        return self.prompt + self.completion


class Budget:
    """What a run has used and may use. Prices are for a million tokens; a limit of 0 is none.

    A request is reserved at its estimate before it is sent, so that threads together cannot pass a limit, and settled
    at what it did use.
    """

    def __init__(self, token_limit: int = 0, cost_limit: float = 0.0, price_in: float = 0.0, price_out: float = 0.0):
        if cost_limit and not (price_in or price_out):
            raise InputError("--judge_cost_limit: needs prices: give --judge_price_in and --judge_price_out")
        self.token_limit, self.cost_limit = token_limit, cost_limit
        self.price_in, self.price_out = price_in, price_out
        self._used, self._lock = Use(), threading.Lock()

    @property
    def used(self) -> Use:
        return self._used

    @property
    def priced(self) -> bool:
        return bool(self.price_in or self.price_out)

    def cost(self, use: Use) -> float:
        """In the prices' currency; 0 without prices."""
        return (use.prompt * self.price_in + use.completion * self.price_out) / 1e6

    def fault(self, use: Use) -> str:
        """What would be wrong with using so much more; empty if nothing."""
        after = self._used + use
        if self.token_limit and after.total > self.token_limit:
            return f"{after.total} tokens pass --judge_token_limit {self.token_limit}"
        if self.cost_limit and self.cost(after) > self.cost_limit:
            return f"a cost of {self.cost(after):.4g} passes --judge_cost_limit {self.cost_limit:g}"
        return ""

    def reserve(self, use: Use) -> None:
        """Raises `InputError` where that passes a limit."""
        with self._lock:
            if fault := self.fault(use):
                raise InputError(f"the next verdict may not be bought ({fault}): raise it; verdicts so far are kept")
            self._used += use

    def settle(self, reserved: Use, used: Use) -> None:
        with self._lock:
            self._used += used - reserved
