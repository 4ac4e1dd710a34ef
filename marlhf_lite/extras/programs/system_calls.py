"""The system calls that a sandbox may make, as a program for the kernel (classic BPF), which `bwrap --seccomp` loads.

CPython needs these calls to start, compute, read and print. To all others, and to those of later kernels, the filter
answers that the kernel lacks them, and C libraries then take another way. A call through another architecture's table
ends the process. So programs reach no process, thread, socket, pipe, key, memory or file that the limits do not count.
"""

import errno
import functools
import struct
from pathlib import Path

import yaml

CALLS: dict[str, dict[str, int]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the kernel numbers them

# Operations of the filter: load a number of the record, compare it, test its bits, and answer.
LOAD, EQUAL, HAS, RETURN = 0x20, 0x15, 0x45, 0x06
# Answers of the filter. The last two make the call fail with an error's number.
ALLOW, KILL, LACKING, REFUSED = (
    0x7FFF0000,
    0x80000000,
    0x50000 | errno.ENOSYS,
    0x50000 | errno.EPERM,
)

# The argument that decides, the comparison, its values, and the answers if one value matches and if none does.
CHECKS = {
    # O_CREAT, O_TMPFILE: no limit counts files
    "openat": (2, HAS, [0o100 | 0o20000000], REFUSED, ALLOW),
    # TCGETS, TIOCGWINSZ, FIONCLEX, FIOCLEX
    "ioctl": (1, EQUAL, [0x5401, 0x5413, 0x5450, 0x5451], ALLOW, REFUSED),
    # F_DUPFD to F_SETFL, F_DUPFD_CLOEXEC: no locks
    "fcntl": (1, EQUAL, [0, 1, 2, 3, 4, 1030], ALLOW, REFUSED),
    "prlimit64": (0, EQUAL, [0], ALLOW, REFUSED),  # its own limits
}


@functools.cache
def rules(machine: str) -> bytes:
    """Return the filter of system calls (seccomp) for a machine of `ARCHITECTURES`, as instructions of 8 bytes.

    An instruction is (operation, steps to skip if true, steps to skip if false, number). The kernel runs the filter for
    each system call, on a record with the call's number at byte 0, the architecture at 4, and the arguments from 16 on,
    which have 8 bytes each.
    """
    code = [
        # On another architecture the calls have other numbers. If the architecture is right, skip the instruction that
        # kills the process.
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    for name, number_on in CALLS.items():
        if machine not in number_on:  # an old call that this machine never had
            continue
        answer = [(RETURN, 0, 0, ALLOW)]
        if name in CHECKS:  # permitted with some arguments only
            answer = _check(*CHECKS[name])
        # If it is another call, skip this call's answer.
        code += [(EQUAL, 0, len(answer), number_on[machine]), *answer]
    code.append((RETURN, 0, 0, LACKING))  # no call of the table
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _check(
    argument: int, comparison: int, values: list[int], yes: int, no: int
) -> list[tuple[int, ...]]:
    """Return the instructions that answer `yes` if the comparison holds for one of the values, otherwise `no`.

    `argument` is the number of the argument that is compared, from 0 on.
    """
    # The lower 32 bits are enough: the kernel itself reads only those of these arguments.
    tests = []
    for i, value in enumerate(values):
        steps_to_yes = len(values) - i  # over the other tests and `no`
        tests.append((comparison, steps_to_yes, 0, value))
    return [(LOAD, 0, 0, 16 + 8 * argument), *tests, (RETURN, 0, 0, no), (RETURN, 0, 0, yes)]
