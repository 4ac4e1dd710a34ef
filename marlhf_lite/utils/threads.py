"""Number of threads for torch, from how busy the machine is.

Threads of one matrix product wait for each other. Where another program holds a core, the slowest thread is late at
every product: on two cores, an update of the demo takes 4 s with two threads on an idle machine, 17 to 25 s beside one
busy process, and 6 s with one thread in both cases.
"""

import math
import os

import psutil

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a user's own choice
INTERVAL = 0.25  # seconds over which the load is measured


def choose_threads() -> int:
    """Return the number of cores that are free now, at least 1; a user's OMP_NUM_THREADS or MKL_NUM_THREADS wins."""
    chosen = next((value for name in VARIABLES if (value := os.environ.get(name, "")).isdigit()), None)
    if chosen:
        return max(int(chosen), 1)
    loads = psutil.cpu_percent(INTERVAL, percpu=True)
    if hasattr(os, "sched_getaffinity"):  # Linux: a process may be limited to some of the cores
        loads = [load for core, load in enumerate(loads) if core in os.sched_getaffinity(0)] or loads
    cores = min(len(loads), psutil.cpu_count(logical=False) or len(loads))
    # A core counts as busy where others use more than half of it.
    return max(1, min(cores, math.floor(len(loads) - sum(loads) / 100 + 0.5)))
