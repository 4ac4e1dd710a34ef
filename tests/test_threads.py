"""The number of threads from the machine's load, with loads that are made up."""

from types import SimpleNamespace

import pytest
import torch

from marlhf_lite.utils import threads
from marlhf_lite.utils.threads import FreeCores


@pytest.fixture
def machine(monkeypatch):
    """A function that makes a machine of these per cents of load, one a core; this process itself uses `own`."""

    def has(loads, own=0.0, physical=None):
        counts = {"cpu_count": lambda logical: physical, "cpu_percent": lambda percpu: loads}
        process = SimpleNamespace(cpu_percent=lambda: own)
        monkeypatch.setattr(threads, "psutil", SimpleNamespace(Process=lambda: process, **counts))
        monkeypatch.setattr(threads.os, "cpu_count", lambda: len(loads))
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(len(loads))), raising=False)

    monkeypatch.setattr(threads, "GIVEN", None)
    monkeypatch.setattr(threads, "INTERVAL", 0.0)
    monkeypatch.setattr(FreeCores, "chosen", None)
    return has


@pytest.mark.parametrize(
    "cores, physical, others, expected",
    [(2, None, 0.3, 2), (2, None, 1.05, 1), (2, None, 2.0, 1), (1, None, 0, 1), (16, None, 1.0, 15), (4, 2, 0.1, 2)],
)
def test_threads_are_the_cores_that_others_leave(machine, cores, physical, others, expected):
    machine([(70 + 100 * others) / cores] * cores, 70.0, physical)
    assert FreeCores().count() == threads.choose_threads() == expected


def test_they_are_set_before_each_update(machine, monkeypatch):
    """Another program comes and goes; a look that comes too soon, and what a user sets, change nothing."""
    machine([0.0, 0.0])
    torch.set_num_threads(2)
    cores, seen = FreeCores(), []
    for load, wait in ((10.0, 0.0), (90.0, 0.0), (0.0, 9.0), (0.0, 0.0)):
        machine([load, load])
        monkeypatch.setattr(threads, "INTERVAL", wait)
        cores.use()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 2]
    torch.set_num_threads(3)
    cores.use()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


def test_a_user_s_own_choice_wins(machine, monkeypatch):
    machine([0.0, 0.0])
    monkeypatch.setattr(threads, "GIVEN", 3)
    assert threads.choose_threads() == 3
    before = torch.get_num_threads()
    FreeCores().use()
    assert torch.get_num_threads() == before
