"""The number of threads from the machine's load, with loads that are made up."""

import os

import pytest
import torch

from marlhf_lite.utils import threads
from marlhf_lite.utils.threads import FreeCores, Reading, free_cores


@pytest.fixture
def machine(monkeypatch):
    """A function that says how many cores there are; no user's variable is set."""

    def has(cores, physical=None):
        monkeypatch.setattr(threads.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(threads.psutil, "cpu_count", lambda logical: physical)
        if hasattr(os, "sched_getaffinity"):
            monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(cores)))

    monkeypatch.setattr(threads, "GIVEN", None)
    monkeypatch.setattr(FreeCores, "chosen", None)
    return has


@pytest.mark.parametrize(
    "cores, physical, others, expected",
    [(2, None, 0.3, 2), (2, None, 1.05, 1), (2, None, 2.0, 1), (1, None, 0, 1), (16, None, 1.0, 15), (4, 2, 0.1, 2)],
)
def test_threads_are_the_cores_that_others_leave(machine, cores, physical, others, expected):
    """Over 10 seconds in which this process itself used 15."""
    machine(cores, physical)
    before, now = Reading(100.0, 50.0, 7.0), Reading(110.0, 50.0 + 15.0 + 10 * others, 22.0)
    assert free_cores(before, now) == expected


def test_they_are_set_before_each_update(machine, monkeypatch):
    """Another program comes and goes; what a user sets is left alone."""
    machine(2)
    load = iter([(0, 0), (1, 0.1), (2, 1.1), (2.1, 1.2), (3, 1.2), (4, 2.2)])
    monkeypatch.setattr(threads, "read", lambda: Reading(*next(load), 0.0))
    torch.set_num_threads(2)
    cores, seen = FreeCores(), []
    for _ in range(4):
        cores.use()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 2]  # the third look came too soon
    torch.set_num_threads(1)
    cores.use()
    assert torch.get_num_threads() == 1


def test_a_user_s_own_choice_wins(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(threads, "GIVEN", 3)
    assert threads.choose_threads() == 3
    before = torch.get_num_threads()
    FreeCores().use()
    assert torch.get_num_threads() == before


def test_on_this_machine():
    now = threads.read()
    assert 0 < now.own <= now.all + 1 and threads.choose_threads() >= 1
