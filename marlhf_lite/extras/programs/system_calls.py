"""The system calls that a sandbox may make, as a program for the kernel (classic BPF), which `bwrap --seccomp` loads.

CPython needs these calls to start, compute, read and print. To all others, and to those of later kernels, the filter
answers that the kernel lacks them, and C libraries then take another way. A call through another architecture's table
ends the process. So programs reach no process, thread, socket, pipe, key, memory or file that the limits do not count.
"""

import errno
import functools
import struct

# Name, number on x86_64, and on aarch64 if it has the call.
CALLS = [call.split() for call in """
read 0 63, write 1 64, lseek 8 62, futex 202 98, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, brk 12 214,
madvise 28 233, close 3 57, openat 257 56, fstat 5 80, newfstatat 262 79, stat 4, lstat 6, access 21, faccessat 269 48,
faccessat2 439 439, readlink 89, readlinkat 267 78, getcwd 79 17, getdents64 217 61, ioctl 16 29, fcntl 72 25,
pread64 17 67, readv 19 65, writev 20 66, ftruncate 77 46, dup 32 23, dup2 33, dup3 292 24, close_range 436 436,
clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201, times 100 153, getrusage 98 165,
nanosleep 35 101, clock_nanosleep 230 115, select 23, pselect6 270 72, restart_syscall 219 128, alarm 37,
getitimer 36 102, setitimer 38 103, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
sigaltstack 131 132, sched_yield 24 124, sched_getaffinity 204 123, getrandom 318 278, uname 63 160, sysinfo 99 179,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getrlimit 97 163, prlimit64 302 261, arch_prctl 158, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293,
execve 59 221, wait4 61 260, exit 60 93, exit_group 231 94
""".replace("\n", " ").split(",")]  # fmt: skip
ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # the kernel's number of it, column in CALLS

LOAD, EQUAL, HAS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL, LACKING, REFUSED = 0x7FFF0000, 0x80000000, 0x50000 | errno.ENOSYS, 0x50000 | errno.EPERM

# The argument that decides, the comparison, its values, and the answers if one value matches and if none does.
CHECKS = {
    "openat": (2, HAS, [0o100 | 0o20000000], REFUSED, ALLOW),  # O_CREAT, O_TMPFILE: no limit counts files
    "ioctl": (1, EQUAL, [0x5401, 0x5413, 0x5450, 0x5451], ALLOW, REFUSED),  # TCGETS, TIOCGWINSZ, FIONCLEX, FIOCLEX
    "fcntl": (1, EQUAL, [0, 1, 2, 3, 4, 1030], ALLOW, REFUSED),  # F_DUPFD to F_SETFL, F_DUPFD_CLOEXEC: no locks
    "prlimit64": (0, EQUAL, [0], ALLOW, REFUSED),  # its own limits
}


@functools.cache
def rules(machine: str) -> bytes:
    """Return the filter for a machine of `ARCHITECTURES`, as instructions of 8 bytes."""
    architecture, place = ARCHITECTURES[machine]
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for call in CALLS:
        if len(call) > place:
            answer = _check(*CHECKS[call[0]]) if call[0] in CHECKS else [(RETURN, 0, 0, ALLOW)]
            code += [(EQUAL, 0, len(answer), int(call[place])), *answer]
    return b"".join(struct.pack("=HBBI", *line) for line in [*code, (RETURN, 0, 0, LACKING)])


def _check(argument: int, comparison: int, values: list[int], yes: int, no: int) -> list[tuple[int, ...]]:
    # The lower 32 bits are enough: the kernel itself reads only those of these arguments.
    tests = [(comparison, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(LOAD, 0, 0, 16 + 8 * argument), *tests, (RETURN, 0, 0, no), (RETURN, 0, 0, yes)]
