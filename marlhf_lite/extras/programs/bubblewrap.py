"""Programs in CPython inside bubblewrap (`bwrap`), for Linux: separate namespaces, and limits of the kernel.

The sandbox starts as an unprivileged user, because the kernel does not count the processes of root. It sees the
system's Python read-only and two files; no /proc, no /dev, no environment and no network. It can start neither
processes nor threads, and has few system calls (`system_calls`). Limits and filter hold for every process in it,
bwrap's own included.
"""

import contextlib
import functools
import marshal
import math
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from marlhf_lite.extras.programs.protocol import ENCODE, OUTPUT_BYTES, Executor, decode
from marlhf_lite.extras.programs.system_calls import ARCHITECTURES, rules
from marlhf_lite.extras.programs.tests import NO_OUTPUT, STATUSES, Result, Test
from marlhf_lite.utils.errors import InputError

NOBODY = "65534"
INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
FOLDERS = ("/usr", "/bin", "/lib", "/lib64")
FILES = ("stdin", "stdout")  # of the program; it cannot create others


class BubblewrapExecutor(Executor):
    """Run each program in a separate sandbox, which ends with it."""

    def __init__(self, *limits, command: Sequence[str] = (), **named_limits):
        super().__init__(*limits, **named_limits)
        self.command = command or _command()

    def results(self, program: str, tests: Sequence[Test]) -> list[Result]:
        """Run all tests in one sandbox: a program that spoils its later tests harms only itself."""
        report, late = self.report(program, tests)
        if not report and not late and _fault(self.command):  # else the program ended itself
            fix = "free processes or memory, then --resume"
            raise InputError(f"--executor bubblewrap: bwrap does not start any more: {fix}")
        return _read(report, late, len(tests))

    def report(
        self, program: str, tests: Sequence[Test], errors: Any = subprocess.DEVNULL
    ) -> tuple[bytes, bool]:
        """Run a program with the inputs of these tests in a sandbox that leaves nothing.

        Return its report, and whether its time was up before it ended; the file `errors` takes what bwrap has to say.
        Limits are set before bwrap starts, so they hold for every process inside, and for the file of the report.
        """
        task = marshal.dumps((program, tests[0].call, [test.input for test in tests], ENCODE), 2)
        limits = {
            "as": self.memory_mb * 2**20,
            "cpu": math.ceil(self.seconds) + 1,
            "fsize": OUTPUT_BYTES,
        }
        limits |= {"nofile": 64, "core": 0}
        limiter = ["prlimit", *(f"--{name}={value}" for name, value in limits.items())]
        out, into = os.pipe()
        late = False
        with open(out, "rb", buffering=0) as told, tempfile.TemporaryFile() as file:
            fds = {"INFO": into, "FILTER": _holds(rules(platform.machine()))} | {
                name: _holds(b"") for name in FILES
            }
            words = [*limiter, *(str(fds.get(word, word)) for word in self.command)]
            streams = {
                "stdin": subprocess.PIPE,
                "stdout": file,
                "stderr": errors,
                "pass_fds": tuple(fds.values()),
            }
            try:
                process = subprocess.Popen(
                    words, **streams, cwd="/", env={}, start_new_session=True
                )
            finally:
                for fd in fds.values():
                    os.close(fd)
            with process:
                try:
                    process.communicate(task, timeout=self.seconds)
                except subprocess.TimeoutExpired:
                    late = True
                finally:
                    _end(process, told)
            file.seek(0)
            return file.read(OUTPUT_BYTES), late


def _read(report: bytes, late: bool, count: int) -> list[Result]:
    """Return the results of at most `count` tests in a report, and the fault that ended it, if there is one."""
    # a last line without its end was cut
    lines = report.decode("ascii", "replace").split("\n")[:-1]
    words = [line.partition(" ") for line in lines[: count + 1]]
    results = [
        (s, decode(value) if s == "ran" else NO_OUTPUT) for s, _, value in words if s in STATUSES
    ]
    if late:
        results.append(("timeout", NO_OUTPUT))
    # the program ended before its last test
    elif not lines or lines[-1] not in ("end", "compile_error"):
        results.append(("runtime_error", NO_OUTPUT))
    return results


# The sandbox


def _holds(data: bytes) -> int:
    """Return a file descriptor to read these bytes from; they must fit into a pipe."""
    out, into = os.pipe()
    os.write(into, data)
    os.close(into)
    return out


def _end(process: subprocess.Popen, told: BinaryIO) -> None:
    """Kill the first process of the sandbox's namespace: the kernel ends all others with it, and then bwrap ends."""
    waiting = select.poll()
    waiting.register(told, select.POLLIN)
    first = re.search(rb'"child-pid": *(\d+)', told.read(4096)) if waiting.poll(5000) else None
    if first is None:  # nothing has started yet
        process.kill()
    elif process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(first[1]), signal.SIGKILL)


@functools.cache
def _command() -> tuple[str, ...]:
    """Return the command that starts a sandbox, after trying it. Raises `InputError` if none starts."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            "--executor bubblewrap: bwrap is not installed: apt-get install bubblewrap (Linux only)"
        )
    if platform.machine() not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise InputError(f"--executor bubblewrap: it runs only on {known}: give --executor monty")
    for python in dict.fromkeys((os.path.realpath(sys.executable), "/usr/bin/python3")):
        command = (*_as_nobody(), bwrap, *_options(bwrap, python), python, "-ISB", "-c", INSIDE)
        reason = _fault(command)
        if not reason:
            return command
    fix = "permit unprivileged user namespaces and seccomp, or give --executor monty"
    raise InputError(f"--executor bubblewrap: bwrap cannot start a sandbox here ({reason}): {fix}")


def _fault(command: Sequence[str]) -> str:
    """Return "" if the command starts a sandbox that runs a program, else the last line that the command wrote."""
    trial = BubblewrapExecutor(20.0, 256, command=command)
    try:
        with tempfile.TemporaryFile() as errors:
            report, late = trial.report("print(input())", [Test("works", "works")], errors)
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"{error.filename or 'bwrap'}: {type(error).__name__}"
    if _read(report, late, 1) == [("ran", "works\n")]:
        return ""
    return lines[-1][:200] if lines else "it did not report"


def _as_nobody() -> tuple[str, ...]:
    """Return the words that run a command of root as nobody; none for other users."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")


def _options(bwrap: str, python: str) -> list[str]:
    """Return the options of bwrap for this interpreter, as far as the installed version knows them."""
    known = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    options = [
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    # `_start` fills in the numbers
    options += ["--cap-drop", "ALL", "--seccomp", "FILTER", "--info-fd", "INFO"]
    # Older versions have neither --disable-userns, which closes the kernel's namespaces to the program, nor --size.
    options += ["--disable-userns"] if "--disable-userns" in known else []
    for folder in FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    prefix = str(Path(python).parents[1])
    if not prefix.startswith("/usr"):
        options += ["--ro-bind", prefix, prefix]
    size = ["--size", str(4 * OUTPUT_BYTES)] if "--size" in known else []
    files = [word for name in FILES for word in ("--file", name, f"/tmp/{name}")]
    return [*options, *size, "--tmpfs", "/tmp", *files, "--chdir", "/tmp", "--remount-ro", "/"]
