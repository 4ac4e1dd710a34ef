"""Hostile programs against both executors: none passes a test, none runs on, none leaves a process or a file.

Each program tries something and then returns `answer()`, which hands out all that it got hold of. The expected output
is a secret, so a program passes only if it finds the secret somewhere.
"""

import contextlib
import ctypes
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import ready

from marlhf_lite.extras.programs import Test, TestRunner, bubblewrap
from marlhf_lite.extras.programs.bubblewrap import _command

SECONDS = 1.0
FAULTS = {"runtime_error", "timeout", "unsupported"}

GIVEN = yaml.safe_load(
    (Path(__file__).parent / "data" / "attacks.yaml").read_text(encoding="utf-8")
)
ENDS = {"stopped": FAULTS, "may run": FAULTS | {"ran"}, "endless": {"timeout"}}
# Name: (program, statuses that may come of it).
ATTACKS = {
    name: (program, ends) for kind, ends in ENDS.items() for name, program in GIVEN[kind].items()
} | {
    "recursion": ("def f():\n    return f()", {"runtime_error"}),
    "null byte": ("def f():\n    return 1\0", {"compile_error"}),
    "half a surrogate pair": ("def f():\n    return '\ud800'", FAULTS | {"compile_error", "ran"}),
    "nested source": ("x = " + "(" * 10**4 + ")" * 10**4, FAULTS | {"compile_error"}),
}


@pytest.fixture(autouse=True)
def nothing_left():
    """No process that a test started, however it left its parent, and no file of its name."""
    if sys.platform == "linux":
        # PR_SET_CHILD_SUBREAPER: orphans become children of this process
        ctypes.CDLL(None).prctl(36, 1)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    end = time.monotonic() + 10
    while left := [
        p for p in psutil.Process().children(recursive=True) if p.pid not in before and alive(p)
    ]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.01)


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("name", list(ATTACKS))
def test_attacks(executor, name):
    program, statuses = ATTACKS[name]
    secret = secrets.token_hex(8)
    tests = [
        Test([], secret, "f"),
        Test([], int(secret, 16), "f"),
        Test([], [secret], "f", as_apps=True),
    ]
    outcome = TestRunner(executor, SECONDS, workers=1).run([program], [tests])[0]
    assert outcome.status in statuses and not any(outcome.passed), outcome


@pytest.mark.parametrize("kind", ["call", "stdin"])
def test_the_expected_output_is_nowhere(executor, kind, monkeypatch, tmp_path):
    secret, told = secrets.token_hex(16), secrets.token_hex(16)
    monkeypatch.setenv("SECRET", secret)
    (tmp_path / "secret").write_text(secret)
    file = str(tmp_path / "secret")
    places = [*GIVEN["places"], f"open({file!r}).read()"]
    program, test = f"PLACES = {places!r}\n{GIVEN['harvest']}", Test([told], secret, "f")
    if kind == "stdin":
        program += "\nprint(f())\ntry:\n    print(input())\nexcept Exception:\n    pass"
        test = Test(told, secret)
    sandbox = ready(executor, seconds=30.0)  # it reads many places, also on busy cores
    given, results = [], sandbox.results
    monkeypatch.setattr(sandbox, "results", lambda *of: given.append(results(*of)) or given[-1])
    sandbox.run([program], [[test]])
    found = repr(given)
    assert told in found  # the search works: what the program was given, it finds
    assert secret not in found and "root:" not in found


LISTS_FILES = """
import os
def f():
    found = []
    for folder, _, names in os.walk("/"):
        for name in names:
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    if file.read(1):
                        found.append(path)
            except OSError:
                pass
    return found
"""


def files_that_a_program_can_read(command):
    sandbox = bubblewrap.BubblewrapExecutor(30.0, command=command)
    [(status, found)] = sandbox.results(LISTS_FILES, [Test([], None, "f")])
    assert status == "ran"
    return set(found)


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_a_program_can_read_python_and_its_libraries_alone():
    """No data set or key anywhere: /usr/src, /usr/local, /opt, /var, /etc, /home and /proc are not there at all."""
    command = ready("bubblewrap").command
    python = command[command.index("-ISB") - 1]
    ask = "import sys; print(*sys.path, sep='\\n')"
    asked = subprocess.run([python, "-ISB", "-c", ask], capture_output=True, text=True, check=True)
    standard_library = tuple(f"{folder}/" for folder in asked.stdout.split())
    found = files_that_a_program_can_read(command)
    others = {path for path in found if not path.startswith(standard_library)}
    assert len(found) > 100 and python in others
    for path in others - {python, "/tmp/stdin", "/tmp/stdout"}:
        assert ".so" in Path(path).name, path
    assert not {path for path in found if "-packages" in path or ".json" in path}


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_the_folders_around_an_interpreter_stay_outside(monkeypatch):
    """As conda and uv have it: the interpreter in the user's home, packages below its standard library."""
    ready("bubblewrap")
    system = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib") / system.name
    if not library.is_dir():
        pytest.skip("the system's Python is not where Debian has it")
    # Not in tmp_path, which an unprivileged user cannot enter.
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        python = home / ".conda/envs/e/bin" / system.name
        modules = home / ".conda/envs/e/lib" / system.name
        python.parent.mkdir(parents=True)
        shutil.copy(system, python)
        leave_out = shutil.ignore_patterns("test", "config-*", "dist-packages", "sitecustomize.py")
        shutil.copytree(library, modules, ignore=leave_out)
        places = [home / ".ssh/id_rsa", home / "data/tests.jsonl", python.parent / "tests.jsonl"]
        places += [modules / "site-packages/a_wheel/tests.jsonl.gz", modules / "tests.jsonl"]
        places += [modules.parent / "tests.jsonl", modules / "dist-packages/tests.jsonl"]
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("secret")
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)

        bubblewrap._command.cache_clear()
        monkeypatch.setattr(sys, "executable", str(python))
        command = bubblewrap._command()
        monkeypatch.undo()
        bubblewrap._command.cache_clear()
        assert str(python) in command  # not the system's, to which it would go back
        found = files_that_a_program_can_read(command)
        assert str(python) in found and str(modules / "json/decoder.py") in found
        assert not found & set(map(str, places))


def test_files_outside_stay_as_they_are(executor, tmp_path):
    kept, new = (
        tmp_path / "kept",
        [tmp_path / "new", Path("/tmp/marlhf-attack"), Path("/marlhf-attack")],
    )
    kept.write_text("as it was")
    tmp_path.chmod(0o777), kept.chmod(0o666)
    program = f"""
def f():
    for path in {[str(path) for path in (kept, *new)]!r}:
        try:
            with open(path, "w") as file:
                file.write("attacked")
        except Exception:
            pass
    return "{secrets.token_hex(4)}"
"""
    outcome = TestRunner(executor, SECONDS, workers=1).run([program], [[Test([], "x", "f")]])[0]
    assert not any(outcome.passed)
    assert kept.read_text() == "as it was" and not any(path.exists() for path in new)


def test_a_server_on_this_machine_is_out_of_reach(executor):
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = []

        def accept():
            with contextlib.suppress(OSError):
                reached.append(server.accept())

        thread = threading.Thread(target=accept)
        thread.start()
        address = server.getsockname()
        program = f"import socket\ndef f():\n    socket.create_connection({address!r}, 1).send(b'hello')\n    return 1"
        outcome = TestRunner(executor, SECONDS, workers=1).run([program], [[Test([], 1, "f")]])[0]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert not reached and outcome.status in FAULTS and not any(outcome.passed)


@pytest.mark.parametrize("program", GIVEN["streams"])
def test_streams(executor, program):
    tests = [Test("a\n", "b\n"), Test("\0", "\ufffd" * 128 + "?"), Test("", "c")]
    outcome = TestRunner(executor, SECONDS, workers=1).run([program], [tests])[0]
    assert not any(outcome.passed)


def outside(program):
    """What `f` of the program returns without a sandbox, below a parent that may be attacked; skips if it fails."""
    inner = f"{program}\nprint(f())"
    outer = f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {inner!r}], timeout=20).returncode)"
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, timeout=60)
    value, code = done.stdout.split()
    if code != "0":
        pytest.skip("this system refuses it to every program")
    return value


@pytest.mark.skipif(sys.platform != "linux", reason="calls of Linux")
@pytest.mark.parametrize("name", GIVEN["kernel"])
def test_the_kernel_does_not_help_a_program(executor, name):
    program = GIVEN["kernel_head"] + GIVEN["kernel"][name]
    outcome = TestRunner(executor, 20.0, workers=1).run([program], [[Test([], None, "f")]])[0]
    assert outcome.status in {"runtime_error", "unsupported"} and not any(outcome.passed), outcome
    assert outside(program) == "None"


@pytest.mark.skipif(sys.platform != "linux", reason="calls of Linux")
def test_a_key_of_this_process_is_out_of_reach(executor):
    """No namespace separates the kernel's keyring."""
    given = {}
    exec(GIVEN["kernel_head"], given)
    name, secret = f"marlhf-{secrets.token_hex(8)}", secrets.token_hex(8)
    key = given["libc"].syscall(
        given["ADD"], b"user", name.encode(), secret.encode(), len(secret), given["SESSION"]
    )
    if key == -1:
        pytest.skip("this system has no keyring")
    try:
        program = GIVEN["kernel_head"] + GIVEN["read_key"].format(name=name)
        outcome = TestRunner(executor, 20.0, workers=1).run([program], [[Test([], secret, "f")]])[0]
        assert outcome.status in {"runtime_error", "unsupported"} and not any(outcome.passed), (
            outcome
        )
        assert outside(program) == secret
    finally:
        given["libc"].syscall(given["KEYCTL"], 9, key, given["SESSION"])


def test_a_killed_worker_costs_one_program(executor):
    """Among many programs in parallel, those that die or hang leave the others their results."""
    good = "def f(a):\n    return a + 1"
    bad = [
        ATTACKS[name][0]
        for name in ("large power", "squares without end", "exit at once", "memory bomb")
    ]
    bad = [program.replace("f()", "f(a)") for program in bad]
    programs = [program for each in bad for program in (good, each, good + "\n# " + each[:9])]
    tests = [[Test([i], i + 1, "f")] for i in range(len(programs))]
    outcomes = TestRunner(executor, SECONDS, workers=2).run(programs, tests)
    passed = [outcome.passed == [True] for outcome in outcomes]
    assert passed == [i % 3 != 1 for i in range(len(programs))]


def test_new_namespaces_are_refused():
    """In a new user namespace a program could mount file systems without a limit."""
    ready("bubblewrap")
    if "--disable-userns" not in _command():
        pytest.skip("this bubblewrap is too old for --disable-userns")
    program = "import ctypes\ndef f(flag):\n    return ctypes.CDLL(None).unshare(flag)"
    # users, mounts, network
    tests = [Test([flag], -1, "f") for flag in (0x10000000, 0x20000, 0x40000000)]
    seconds = 20.0  # a busy machine is slow
    assert (
        TestRunner("bubblewrap", seconds, workers=1).run([program], [tests])[0].passed == [True] * 3
    )


def test_one_test_does_not_change_the_next(executor):
    """What a program prints for one text does not count for another, and its variables are new each time."""
    program = "try:\n    seen\nexcept NameError:\n    seen = input()\nprint(seen)"
    outcome = TestRunner(executor, SECONDS, workers=1).run(
        [program], [[Test("a", "a"), Test("b", "b")]]
    )[0]
    assert (outcome.status, outcome.passed) == ("ran", [True, True])
