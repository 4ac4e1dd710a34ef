"""Number of threads for torch: as many as cores are free of other programs, looked at before every update.

Threads of one matrix product wait for each other. Where another program holds a core, the slowest thread is late at
every product: on two cores, an update of the demo takes 4 s with two threads on an idle machine, 17 to 25 s beside one
busy process, and 6 s with one thread in both cases. Sums over another number of threads may differ in their last
digits: set OMP_NUM_THREADS where runs must be equal bit by bit.
"""

import math
import os
import time
from typing import NamedTuple

import psutil

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a user's own choice
# Read when this is imported, before `marlhf` sets them for libraries that read them once.
GIVEN = next((max(int(value), 1) for name in VARIABLES if (value := os.environ.get(name, "")).isdigit()), None)
INTERVAL = 0.25  # seconds: the least that a load is measured over


class Reading(NamedTuple):
    """Processor time so far on the cores that this process may use, in seconds."""

    clock: float
    all: float
    own: float


def read() -> Reading:
    """Read the counters, which takes well below a millisecond."""
    times = psutil.cpu_times(percpu=True)
    used = sum(getattr(times[i], name, 0.0) for i in _cores(len(times)) for name in ("user", "nice", "system", "steal"))
    return Reading(time.perf_counter(), used, time.process_time())


def free_cores(before: Reading, now: Reading) -> int:
    """Number of cores that other programs left free between two readings, at least 1."""
    others = ((now.all - before.all) - (now.own - before.own)) / (now.clock - before.clock)
    cores = len(_cores(os.cpu_count() or 1))
    # A core counts as busy where others use more than half of it; two threads of one physical core count once.
    return max(1, min(math.floor(cores - others + 0.5), psutil.cpu_count(logical=False) or cores))


def choose_threads() -> int:
    """Return the number of cores that are free now, at least 1; a user's OMP_NUM_THREADS or MKL_NUM_THREADS wins."""
    if GIVEN:
        return GIVEN
    before = read()
    time.sleep(INTERVAL)
    FreeCores.chosen = free_cores(before, read())
    return FreeCores.chosen


class FreeCores:
    """Sets torch's threads to the cores that were free since its last look."""

    chosen: int | None = None  # the last number that was chosen here, and by no user

    def __init__(self):
        self.last = read()

    def use(self) -> None:
        """Look, and set. It leaves alone what a user has set, in the environment or by `torch.set_num_threads`."""
        import torch  # `marlhf` sets variables before

        now, default = read(), psutil.cpu_count(logical=False) or os.cpu_count()
        by_user = GIVEN or torch.get_num_threads() not in (FreeCores.chosen, default)
        if by_user or now.clock - self.last.clock < INTERVAL:
            return
        FreeCores.chosen, self.last = free_cores(self.last, now), now
        torch.set_num_threads(FreeCores.chosen)


def _cores(count: int) -> list[int]:
    """The cores that this process may use; on Linux it may be limited to some."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    return [core for core in range(count) if core in allowed] or list(range(count))
