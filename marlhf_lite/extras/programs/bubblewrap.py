"""Programs in CPython inside bubblewrap (`bwrap`), for Linux: namespaces of their own, and limits of the kernel.

The sandbox starts as an unprivileged user: for root the kernel would not count processes. It sees the system's Python
read-only, one small tmpfs, no /proc, no /dev, no environment and no network, and may start neither process nor thread.
"""

import functools
import marshal
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from marlhf_lite.extras.programs.protocol import ENCODE, OUTPUT_BYTES, Executor, Report, decode
from marlhf_lite.extras.programs.tests import NO_OUTPUT, STATUSES, Test
from marlhf_lite.utils.errors import InputError

NOBODY = "65534"
INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
HARMLESS = marshal.dumps(("print(input())", None, ["works"], {}, ENCODE), 2)
OUTSIDE = {"cwd": "/", "env": {}}  # nothing of this process goes along
FOLDERS = ("/usr", "/bin", "/lib", "/lib64")


class BubblewrapExecutor(Executor):
    """Runs each program in a sandbox of its own, which ends with it."""

    def __init__(self, *limits):
        super().__init__(*limits)
        self.command = _command()

    def run(self, program: str, tests: Sequence[Test]) -> Report:
        """All tests in one sandbox; what a program does to the later ones harms only itself."""
        limits = {
            "RLIMIT_AS": self.memory_mb * 2**20,
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,
            "RLIMIT_FSIZE": OUTPUT_BYTES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": 1,  # itself
        }
        task = marshal.dumps((program, tests[0].call, [test.input for test in tests], limits, ENCODE), 2)
        late = False
        with tempfile.TemporaryFile() as file:  # so that the kernel limits the size of the report
            streams = {"input": task, "stdout": file, "stderr": subprocess.DEVNULL}
            try:  # the sandbox dies with its process
                subprocess.run(self.command, **streams, timeout=self.seconds, **OUTSIDE, start_new_session=True)
            except subprocess.TimeoutExpired:
                late = True
            file.seek(0)
            report = file.read(OUTPUT_BYTES)
        if not report and not late and _fault(self.command):  # else the program ended itself
            raise InputError(
                "executor bubblewrap: bwrap does not start any more: free processes or memory, then --resume"
            )
        return _read(report, late, len(tests))


def _read(report: bytes, late: bool, count: int) -> Report:
    lines = report.decode("ascii", "replace").split("\n")[:-1]  # a last line without its end was cut
    words = [line.partition(" ") for line in lines[: count + 1]]
    results = [(s, decode(value) if s == "ran" else NO_OUTPUT) for s, _, value in words if s in STATUSES]
    if late:
        results.append(("timeout", NO_OUTPUT))
    elif not lines or lines[-1] not in ("end", "compile_error"):  # it ended before its last test
        results.append(("runtime_error", NO_OUTPUT))
    return Report.of(results, count)


# The sandbox


@functools.cache
def _command() -> tuple[str, ...]:
    """Return the command that starts a sandbox, once it has been tried. Raises `InputError` where there is none."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError("executor bubblewrap: bwrap is not installed: apt-get install bubblewrap (Linux only)")
    for python in dict.fromkeys((os.path.realpath(sys.executable), "/usr/bin/python3")):
        command = (*_as_nobody(), bwrap, *_options(bwrap, python), python, "-ISB", "-c", INSIDE)
        reason = _fault(command)
        if not reason:
            return command
    raise InputError(
        f"executor bubblewrap: bwrap cannot start a sandbox here ({reason}): permit unprivileged user namespaces, or "
        "choose executor monty"
    )


def _fault(command: Sequence[str]) -> str:
    """Return nothing where the command starts a sandbox in which a program runs, else the last line that it wrote."""
    try:
        run = subprocess.run(command, input=HARMLESS, capture_output=True, timeout=20, **OUTSIDE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    if _read(run.stdout, False, 1).outputs == ["works\n"]:
        return ""
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {run.returncode}"


def _as_nobody() -> tuple[str, ...]:
    """Return what makes a command of root's one of nobody's."""
    if os.geteuid() != 0:
        return ()
    setpriv = shutil.which("setpriv") or "setpriv"
    return (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")


def _options(bwrap: str, python: str) -> list[str]:
    known = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    options += ["--cap-drop", "ALL"]
    # Older versions lack the first, which closes the kernel's namespaces to the program; these have no size limit.
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
    return [*options, *size, "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
