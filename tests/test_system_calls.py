"""What the kernel does for bubblewrap: the filter of system calls, the limits of every process, and the end of all.

Each of the three has to hold without the others. An interpreter of the kernel's rules says what the filter answers.
"""

import contextlib
import ctypes
import errno
import os
import re
import struct
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from conftest import ready

from marlhf_lite.extras.programs import Test, TestRunner, bubblewrap, system_calls
from marlhf_lite.extras.programs.system_calls import (
    ALLOW,
    ARCHITECTURES,
    CALLS,
    KILL,
    LACKING,
    REFUSED,
    rules,
)

# the 32-bit architecture of the same processor
OTHER = {"x86_64": 0x40000003, "aarch64": 0x40000028}
LIMITS = {
    "Max address space": 256 * 2**20,
    "Max file size": bubblewrap.OUTPUT_BYTES,
    "Max open files": 64,
}
LIMITS |= {"Max core file size": 0, "Max cpu time": 21}
# Numbers on x86_64.
DANGEROUS = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "pidfd_getfd": 438,
    "kcmp": 312, "add_key": 248, "request_key": 249, "keyctl": 250, "shmget": 29, "shmat": 30, "semget": 64,
    "msgget": 68, "mq_open": 240, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "mount": 165, "unshare": 272,
    "setns": 308, "pivot_root": 155, "clone": 56, "fork": 57, "vfork": 58, "clone3": 435, "io_uring_setup": 425,
    "memfd_create": 319, "execveat": 322, "personality": 135, "socket": 41, "socketpair": 53, "pipe2": 293, "kill": 62,
    "tgkill": 234, "prctl": 157, "seccomp": 317, "timer_create": 222, "eventfd2": 290, "epoll_create1": 291, "open": 2,
    "creat": 85, "mkdir": 83, "link": 86, "symlink": 88, "mknod": 133, "openat2": 437, "setsid": 112, "flock": 73,
}  # fmt: skip


def answer(machine, number, *arguments, architecture=None):
    """What the kernel answers by this filter."""
    places = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *places)
    code = list(struct.iter_unpack("=HBBI", rules(machine)))
    at = value = 0
    while True:
        kind, yes, no, k = code[at]
        at += 1
        if kind == system_calls.LOAD:
            value = struct.unpack_from("=I", data, k)[0]
        elif kind == system_calls.RETURN:
            return k
        else:
            at += yes if (value == k if kind == system_calls.EQUAL else value & k) else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_only_the_calls_of_the_list_pass(machine):
    known = {numbers[machine]: name for name, numbers in CALLS.items() if machine in numbers}
    assert len(known) == {"x86_64": 73, "aarch64": 64}[machine] and len(rules(machine)) < 4096 * 8
    for number in range(1024):
        expected = {ALLOW} if known.get(number) not in system_calls.CHECKS else {ALLOW, REFUSED}
        assert answer(machine, number) in (expected if number in known else {LACKING}), number
        assert answer(machine, number | 0x40000000) == LACKING  # x32, which runs on x86_64
        assert answer(machine, number, architecture=OTHER[machine]) == KILL  # int 0x80
    calls = {name: number for number, name in known.items()}
    for name, at, passes, refused in [
        ("openat", 2, [0, 1, 2, 0o2000000, 0o1001], [0o100, 0o101, 0o20200002, 0o300, 2**32 - 1]),
        # TIOCSTI, TIOCLINUX, FICLONE
        ("ioctl", 1, [0x5401, 0x5451, 2**32 + 0x5401], [0x5412, 0x541C, 0x40049409, 0]),
        # locks, leases, sizes of pipes
        ("fcntl", 1, [0, 1, 2, 3, 4, 1030], [5, 6, 7, 37, 1024, 1031, 1033]),
        ("prlimit64", 0, [0], [1, 2, 2**31]),
    ]:
        for value in passes + refused:
            arguments = [0] * at + [value]
            assert answer(machine, calls[name], *arguments) == (
                ALLOW if value in passes else REFUSED
            ), (name, value)


def test_dangerous_calls_are_not_on_the_list():
    assert all(answer("x86_64", number) == LACKING for number in DANGEROUS.values())
    assert not set(CALLS) & set(DANGEROUS)


def test_numbers_are_those_of_libseccomp():
    try:
        resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name_arch
    except OSError:
        pytest.skip("libseccomp is not installed")
    for machine, architecture in ARCHITECTURES.items():
        for name, numbers in CALLS.items():
            number = resolve(ctypes.c_uint32(architecture), name.encode())
            assert number == numbers[machine] if machine in numbers else number < 0, name


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="numbers of x86_64"
)
@pytest.mark.parametrize("name", DANGEROUS)
def test_the_kernel_refuses(name):
    ready("bubblewrap")
    program = "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\ndef f(n):\n"
    program += "    return l.syscall(n, 0, 0, 0, 0, 0, 0), ctypes.get_errno()"
    tests = [Test([DANGEROUS[name]], [-1, errno.ENOSYS], "f")]
    assert TestRunner("bubblewrap", 20.0, workers=1).run([program], [tests])[0].passed == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_limits_and_filter_hold_for_every_process():
    executor = ready("bubblewrap", seconds=20.0)
    thread = threading.Thread(target=executor.results, args=("while True: pass", [Test("", "")]))
    before = set(psutil.Process().children(recursive=True))
    thread.start()
    inside = []
    try:
        end = time.monotonic() + 15
        while True:  # until the program runs: bwrap outside, its first process inside, and Python
            with contextlib.suppress(psutil.NoSuchProcess):  # a helper of bwrap has just ended
                inside = [p for p in psutil.Process().children(recursive=True) if p not in before]
                if len(inside) == 3 and inside[-1].cpu_times().user > 0.2:
                    break
            assert time.monotonic() < end
            time.sleep(0.05)
        for process in inside:
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            for name, value in LIMITS.items():
                assert re.search(rf"^{name} +{value} +{value} ", limits, re.MULTILINE), limits
        for process in inside[1:]:
            assert "Seccomp:\t2" in Path(f"/proc/{process.pid}/status").read_text()
    finally:
        for process in inside:
            # the kernel has ended it with the one before
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_nothing_outlives_its_time():
    """Also if the first process does not die with its parent, as if a program had switched that off."""
    executor = ready("bubblewrap")
    # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    ctypes.CDLL(None).prctl(36, 1)
    before = set(psutil.Process().children(recursive=True))
    command = [word for word in executor.command if word != "--die-with-parent"]
    for seconds in (2.0, 0.001):  # in the midst, and before it has begun
        executor = bubblewrap.BubblewrapExecutor(seconds, command=command)
        assert executor.report("while True: pass", [Test("", "")]) == (b"", True)
        assert set(psutil.Process().children(recursive=True)) <= before
