"""The number of threads from the machine's load, with loads that are made up."""

import os

import psutil
import pytest

from marlhf_lite.utils import threads


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the load of each core, in percent, and the number of physical cores."""

    def set_load(*loads, physical=None):
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: list(loads))
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
        if hasattr(os, "sched_getaffinity"):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(loads))))

    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return set_load


@pytest.mark.parametrize(
    "loads, expected",
    [((0, 0), 2), ((20, 15), 2), ((100, 3), 1), ((55, 50), 1), ((100, 100), 1), ((0,), 1), ((100, *[0] * 15), 15)],
)
def test_threads_are_the_free_cores(machine, loads, expected):
    machine(*loads)
    assert threads.choose_threads() == expected


def test_two_threads_of_one_core_count_once(machine):
    machine(0, 0, 0, 0, physical=2)
    assert threads.choose_threads() == 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no such limit on this system")
def test_only_cores_that_the_process_may_use_count(machine, monkeypatch):
    machine(0, 0, 0, 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    assert threads.choose_threads() == 1


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_a_user_s_own_variables_win(machine, monkeypatch, name):
    machine(100, 100)
    monkeypatch.setenv(name, "3")
    assert threads.choose_threads() == 3


def test_on_this_machine():
    assert 1 <= threads.choose_threads() <= (os.cpu_count() or 1) or "OMP_NUM_THREADS" in os.environ
