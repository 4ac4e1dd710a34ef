"""Number of threads for torch: as many as cores are free of other programs, looked at before every update.

Threads of one matrix product wait for each other. Where another program holds a core, the slowest thread is late at
every product: on two cores, an update of the demo takes 4 s with two threads on an idle machine, 17 to 25 s beside one
busy process, and 6 s with one thread in both cases. Sums over another number of threads may differ in their last
digits: set OMP_NUM_THREADS where runs must be equal bit by bit.
"""

import math
import os
import time

import psutil

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a user's own choice
# Read when this is imported, before `marlhf` sets them for libraries that read them once.
GIVEN = next((max(int(value), 1) for name in VARIABLES if (value := os.environ.get(name, "")).isdigit()), None)
INTERVAL = 0.25  # seconds: the least that a load is measured over


def choose_threads() -> int:
    """Return the number of cores that are free now, at least 1; a user's OMP_NUM_THREADS or MKL_NUM_THREADS wins."""
    if GIVEN:
        return GIVEN
    cores = FreeCores()
    time.sleep(INTERVAL)
    FreeCores.chosen = cores.count()
    return FreeCores.chosen


class FreeCores:
    """Sets torch's threads to the cores that were free since its last look."""

    chosen: int | None = None  # the last number that was chosen here, and by no user

    def __init__(self):
        self.process = psutil.Process()
        self.count()

    def count(self) -> int:
        """Number of cores that other programs left free since the last call, at least 1."""
        loads, ours, self.last = psutil.cpu_percent(percpu=True), self.process.cpu_percent(), time.monotonic()
        # On Linux a process may be limited to some cores.
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(loads))
        loads = [load for core, load in enumerate(loads) if core in cores] or loads
        # A core counts as busy where others use more than half of it; two threads of one physical core count once.
        free = math.floor(len(loads) - (sum(loads) - ours) / 100 + 0.5)
        return max(1, min(free, psutil.cpu_count(logical=False) or len(loads)))

    def use(self) -> None:
        """Look, and set. It leaves alone what a user has set, in the environment or by `torch.set_num_threads`."""
        import torch  # `marlhf` sets variables before

        default = psutil.cpu_count(logical=False) or os.cpu_count()
        by_user = GIVEN or torch.get_num_threads() not in (FreeCores.chosen, default)
        if not by_user and time.monotonic() - self.last >= INTERVAL:
            FreeCores.chosen = self.count()
            torch.set_num_threads(FreeCores.chosen)
