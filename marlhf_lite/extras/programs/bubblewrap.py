"""Programs in CPython inside bubblewrap (`bwrap`), for Linux: separate namespaces, and limits of the kernel.

The sandbox starts as an unprivileged user, because the kernel does not count the processes of root. It sees one Python
read-only (`_python_without_packages`) and two files; no other file of this machine, no /proc, no /dev, no environment
and no network. It can start neither processes nor threads, and has few system calls (`system_calls`). Limits and
filter hold for every process in it, bwrap's own included.
"""

import contextlib
import functools
import json
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
from marlhf_lite.utils.errors import InputError, one_line

NOBODY = "65534"
INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
# A program for an interpreter. It prints the folders of the standard library, and the names of the modules in them.
TELL_LIBRARY = "import json, sys; print(json.dumps([sys.path, sorted(sys.stdlib_module_names)]))"
FILES = ("stdin", "stdout")  # of the program; it cannot create others


class BubblewrapExecutor(Executor):
    """Run each program in a separate sandbox, which ends with it."""

    def __init__(self, *limits, command: Sequence[str] = (), **named_limits):
        super().__init__(*limits, **named_limits)
        self.command = command or _command()

    def results(self, program: str, tests: Sequence[Test]) -> list[Result]:
        """Run all tests in one sandbox: a program that spoils its later tests harms only itself."""
        report, late = self.report(program, tests)
        # An empty report means that the program ended the sandbox, or that bwrap no longer starts. A trial tells which.
        if not report and not late and _fault(self.command):
            fix = "free processes or memory, then --resume"
            raise InputError(f"--executor bubblewrap: bwrap does not start any more: {fix}")
        return _results_in(report, late, len(tests))

    def report(
        self, program: str, tests: Sequence[Test], errors: Any = subprocess.DEVNULL
    ) -> tuple[bytes, bool]:
        """Run a program with the inputs of these tests in a sandbox that leaves nothing.

        Return its report, and whether its time was up before it ended; bwrap's messages go to the file `errors`. The
        report is what the sandbox writes to its standard output, which is a file (`_results_in` says what it contains).
        Limits are set before bwrap starts, so they hold for every process inside, and for the size of the report.
        """
        # 1. What the sandbox reads on standard input: the program; the function to call, or None (all tests of a
        #    program call the same); the inputs; and the function that writes outputs as text. It never sees the
        #    expected outputs. The sandbox may have another Python, and every Python 3 reads version 2 of the format.
        inputs = [test.input for test in tests]
        task = marshal.dumps((program, tests[0].call, inputs, ENCODE), 2)

        # 2. The limits, by the names of prlimit's options.
        limits = {
            "as": self.memory_mb * 2**20,  # address space
            "cpu": math.ceil(self.seconds) + 1,  # seconds; the time-out below comes first
            "fsize": OUTPUT_BYTES,  # of each file
            "nofile": 64,  # open files
            "core": 0,  # no file with the memory of a program that crashed
        }
        limiter = ["prlimit", *(f"--{name}={value}" for name, value in limits.items())]

        # bwrap writes into this pipe which process is the first inside: `_end` kills it.
        read_end, write_end = os.pipe()
        is_late = False
        with open(read_end, "rb", buffering=0) as info, tempfile.TemporaryFile() as report:
            # 3. Open files that bwrap inherits: where to write about the first process, the filter of system calls, and
            #    the program's streams, which are empty. The command has a word for each, which its number replaces.
            inherited = {"INFO": write_end, "FILTER": _file_with(rules(platform.machine()))}
            for name in FILES:
                inherited[name] = _file_with(b"")
            words = [*limiter, *(str(inherited.get(word, word)) for word in self.command)]
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=report,
                    stderr=errors,
                    pass_fds=tuple(inherited.values()),
                    cwd="/",
                    env={},
                    start_new_session=True,  # an interrupt from the keyboard reaches this process alone
                )
            finally:
                for number in inherited.values():  # bwrap has its own copies by now
                    os.close(number)

            # 4. Wait, and end whatever is left in the sandbox, also after an interrupt.
            with process:
                try:
                    process.communicate(task, timeout=self.seconds)
                except subprocess.TimeoutExpired:
                    is_late = True
                finally:
                    _end(process, info)
            report.seek(0)
            return report.read(OUTPUT_BYTES), is_late


def _results_in(report: bytes, late: bool, count: int) -> list[Result]:
    """Return the results of at most `count` tests in a report, and the fault that ended it, if there is one.

    A report has a line for each test: a status, which is followed by the encoded output if it is "ran". The last line
    is "end". `late` says that the time was up. A program may have written lines of its own into the report.
    """
    # What follows the last line break is empty, or a line that was cut.
    lines = report.decode("ascii", "replace").split("\n")[:-1]
    results = []
    for line in lines[: count + 1]:  # one more, which may be "compile_error" or "end"
        status, _, output = line.partition(" ")
        if status in STATUSES:
            results.append((status, decode(output) if status == "ran" else NO_OUTPUT))
    if late:
        results.append(("timeout", NO_OUTPUT))
    elif not lines or lines[-1] not in ("end", "compile_error"):  # ended before the last test
        results.append(("runtime_error", NO_OUTPUT))
    return results


# The sandbox


def _file_with(data: bytes) -> int:
    """Return a file descriptor to read these bytes from; they must fit into a pipe."""
    read_end, write_end = os.pipe()
    os.write(write_end, data)
    os.close(write_end)
    return read_end


def _end(process: subprocess.Popen, info: BinaryIO) -> None:
    """Kill the first process of the sandbox's namespace: the kernel ends all others with it, and then bwrap ends.

    `info` is where bwrap writes the number of that process, `{"child-pid": 123}`.
    """
    waiting = select.poll()
    waiting.register(info, select.POLLIN)
    first_process = None
    if waiting.poll(5000):  # milliseconds; bwrap writes the number as soon as it has started
        first_process = re.search(rb'"child-pid": *(\d+)', info.read(4096))
    if first_process is None:  # nothing has started yet
        process.kill()
    elif process.poll() is None:  # if bwrap has ended, the number may be another process's by now
        with contextlib.suppress(ProcessLookupError):  # the first process has just ended
            os.kill(int(first_process[1]), signal.SIGKILL)


@functools.cache
def _command() -> tuple[str, ...]:
    """Return a command that starts a sandbox, after trying it; later calls return the same command.

    Raises `InputError` if no sandbox starts.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            "--executor bubblewrap: bwrap is not installed: apt-get install bubblewrap (Linux only)"
        )
    if platform.machine() not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise InputError(f"--executor bubblewrap: it runs only on {known}: give --executor monty")
    # The interpreter that runs this comes first, then the system's. If both are the same, it is tried once.
    candidates = [os.path.realpath(path) for path in (sys.executable, "/usr/bin/python3")]
    for python in dict.fromkeys(candidates):
        try:
            visible = _python_without_packages(python)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"{python}: {one_line(error)}"
            continue
        options = _options(bwrap, visible)
        command = (*_as_nobody(), bwrap, *options, python, "-ISB", "-c", INSIDE)
        reason = _fault(command)
        if not reason:
            return command
    fix = "permit unprivileged user namespaces and seccomp, or give --executor monty"
    raise InputError(f"--executor bubblewrap: bwrap cannot start a sandbox here ({reason}): {fix}")


def _fault(command: Sequence[str]) -> str:
    """Return "" if the command starts a sandbox that runs a program.

    Otherwise return the last line that the command wrote, or another reason.
    """
    trial = BubblewrapExecutor(20.0, 256, command=command)  # seconds, and MB
    try:
        with tempfile.TemporaryFile() as errors:
            report, late = trial.report("print(input())", [Test("works", "works")], errors)
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"{error.filename or 'bwrap'}: {type(error).__name__}"
    if _results_in(report, late, 1) == [("ran", "works\n")]:
        return ""
    return lines[-1][:200] if lines else "it did not report"


def _as_nobody() -> tuple[str, ...]:
    """Return the words that, put before a command of root, run it as the user nobody; none for other users."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")


def _python_without_packages(python: str) -> list[str]:
    """Return the options of bwrap that show this interpreter, its standard library and its shared libraries.

    Nothing else of the machine is shown: a folder such as /usr or the parent of an interpreter also holds data sets,
    wheels and keys, and a program that found the expected outputs there could print them. This works for interpreters
    of any layout (Debian, conda, uv, pyenv), because each is asked where its own files are.

    Raises `OSError` or `CalledProcessError` if the interpreter or `ldd` does not start.
    """
    ask = {"capture_output": True, "text": True}
    told = subprocess.run([python, "-ISB", "-c", TELL_LIBRARY], check=True, **ask).stdout
    folders, standard_names = json.loads(told)
    folders = [folder for folder in folders if os.path.isdir(folder)]
    options = ["--ro-bind", python, python]
    for folder in folders:
        options += ["--ro-bind", folder, folder]
    for folder in folders:
        options += _hide_all_but_modules(Path(folder), set(standard_names), folders)

    extension_modules = []
    for folder in folders:
        extension_modules += map(str, Path(folder).glob("*.so"))
    # `ldd` exits with 1 for an interpreter without shared libraries.
    linked = subprocess.run(["ldd", python, *extension_modules], **ask).stdout
    # Lines such as "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f9b9ebde000)".
    libraries = {os.path.normpath(path) for path in re.findall(r"(/\S.*) \(0x", linked)}
    for library in sorted(libraries):
        options += ["--ro-bind", library, library]
    # Inside there is neither the loader's cache in /etc nor /proc, which tells it where the interpreter is. So it must
    # be told the folders of the libraries.
    library_folders = sorted({os.path.dirname(library) for library in libraries})
    return [*options, "--setenv", "LD_LIBRARY_PATH", ":".join(library_folders)]


def _hide_all_but_modules(folder: Path, names: set[str], shown: list[str]) -> list[str]:
    """Return the options that put something empty over what a folder of the standard library holds besides modules.

    That is site-packages, dist-packages, tests, and whatever else was put there. `names` are the names of the modules,
    and `shown` are folders that are shown themselves. Showing only the modules, one by one, would take longer, because
    bwrap needs about a millisecond for each.
    """
    options = []
    for entry in sorted(folder.iterdir()):
        name = entry.name.split(".")[0]
        # `sysconfig` reads the module `_sysconfigdata...`, whose name differs between systems.
        is_module = name in names or name.startswith("_sysconfigdata") or entry.suffix == ".so"
        # A link can stay: inside, it leads nowhere unless its target is shown.
        if is_module or name == "__pycache__" or str(entry) in shown or entry.is_symlink():
            continue
        if entry.is_dir():
            options += ["--tmpfs", str(entry)]
        else:
            options += ["--ro-bind", os.devnull, str(entry)]
    return options


def _options(bwrap: str, visible: list[str]) -> list[str]:
    """Return the options of bwrap, as far as the installed version knows them.

    `visible` are the options that mount the interpreter's folders. The words FILTER, INFO and the names of `FILES`
    stand for file descriptors: `BubblewrapExecutor.report` puts their numbers there when it starts a program.
    """
    known = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    options = [
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    options += ["--cap-drop", "ALL", "--seccomp", "FILTER", "--info-fd", "INFO"]
    # Older versions have neither --disable-userns (the program can make no namespaces of its own; it needs
    # --unshare-user) nor --size, which is that of the next --tmpfs.
    if "--disable-userns" in known:
        options.append("--disable-userns")
    if "--size" in known:
        options += ["--size", str(4 * OUTPUT_BYTES)]
    options += ["--tmpfs", "/tmp"]
    options += visible  # after /tmp, because an interpreter may be in a folder of it
    for name in FILES:
        options += ["--file", name, f"/tmp/{name}"]
    return [*options, "--chdir", "/tmp", "--remount-ro", "/"]
