"""The number of threads from the machine's load, with loads that are made up."""

from types import SimpleNamespace

import pytest

from marlhf_lite.utils import threads


@pytest.fixture
def machine(monkeypatch):
    """A function that makes a machine of these per cents of load, one a core; this process itself uses `own`."""

    def has(loads, own=0.0, physical=None):
        counts = {"cpu_count": lambda logical: physical, "cpu_percent": lambda percpu: loads}
        process = SimpleNamespace(cpu_percent=lambda: own)
        monkeypatch.setattr(threads, "psutil", SimpleNamespace(Process=lambda: process, **counts))
        monkeypatch.setattr(threads.os, "cpu_count", lambda: len(loads))
        monkeypatch.setattr(
            threads.os, "sched_getaffinity", lambda _: set(range(len(loads))), raising=False
        )

    monkeypatch.setattr(threads, "GIVEN", None)
    monkeypatch.setattr(threads, "INTERVAL", 0.0)
    return has


@pytest.mark.parametrize(
    "cores, physical, others, expected",
    [
        (2, None, 0.3, 2),
        (2, None, 1.05, 1),
        (2, None, 2.0, 1),
        (1, None, 0, 1),
        (16, None, 1.0, 15),
        (4, 2, 0.1, 2),
    ],
)
def test_threads_are_the_cores_that_others_leave(machine, cores, physical, others, expected):
    machine([(70 + 100 * others) / cores] * cores, 70.0, physical)
    assert threads.choose_threads() == expected


def test_a_user_s_own_choice_wins(machine, monkeypatch):
    machine([0.0, 0.0])
    monkeypatch.setattr(threads, "GIVEN", 3)
    assert threads.choose_threads() == 3
