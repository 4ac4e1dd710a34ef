"""Number of threads for torch: the cores that no other program uses when a command starts.

Threads of one matrix product wait for each other. If another program holds a core, the slowest thread is late at every
product: on two cores, an update of the demo takes 4 s with two threads on an idle machine, 17 to 25 s beside one busy
process, and 6 s with one thread in both cases. Set OMP_NUM_THREADS yourself if other programs start later, or if runs
must be equal bit by bit: sums over a different number of threads may differ in their last digits.
"""

import math
import os
import time

import psutil

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a user's own choice


def threads_of_user() -> int | None:
    """Return the number of threads that the user has set; None if he has set none."""
    for name in VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit():
            return max(int(value), 1)
    return None


# Looked up when this is imported, before `marlhf` itself sets the variables for libraries that read them once.
GIVEN = threads_of_user()
INTERVAL = 0.25  # seconds: the shortest time over which a load can be measured


def choose_threads() -> int:
    """Return the number of cores that are free now, at least 1; a user's OMP_NUM_THREADS or MKL_NUM_THREADS wins."""
    if GIVEN:
        return GIVEN
    process = psutil.Process()
    # Both functions return the load since their last call: the first calls begin the measurement.
    psutil.cpu_percent(percpu=True)
    process.cpu_percent()
    time.sleep(INTERVAL)
    loads = psutil.cpu_percent(percpu=True)
    ours = process.cpu_percent()
    if hasattr(os, "sched_getaffinity"):  # on Linux a process may be limited to some cores
        cores = os.sched_getaffinity(0)
        loads_of_cores = [load for core, load in enumerate(loads) if core in cores]
        if loads_of_cores:  # none if psutil does not list the cores by these numbers
            loads = loads_of_cores
    loads_of_others = sum(loads) - ours  # in percent of one core
    # A core is busy if others use more than half of it.
    free = math.floor(len(loads) - loads_of_others / 100 + 0.5)
    # A core that runs two threads at once is listed twice in `loads`, and counts once.
    physical = psutil.cpu_count(logical=False) or len(loads)
    return max(1, min(free, physical))
