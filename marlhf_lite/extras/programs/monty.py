"""Programs in Monty (`pydantic-monty`), an interpreter in Rust for a subset of Python, in separate worker processes.

Programs reach no files, network, environment or processes. A program that uses what Monty lacks (generators, `del`,
`sys.stdin`, most of the standard library) is `unsupported`.
"""

import builtins
import io
import re
import time
from collections.abc import Iterator, Sequence

from marlhf_lite.extras.programs.protocol import ENCODE, OUTPUT_BYTES, Executor, decode
from marlhf_lite.extras.programs.tests import NO_OUTPUT, Outcome, Result, Status, Test
from marlhf_lite.utils.errors import InputError, one_line

try:
    import pydantic_monty as monty
except ImportError:  # MontyExecutor tells how to install it
    monty = None

# Monty lacks `input`, `exit` and `EOFError`; an error that nothing else raises takes the place of `EOFError`.
# `marlhf_lines` are the lines of standard input.
INPUT = """
EOFError = NotADirectoryError

def input(prompt="", lines=iter(marlhf_lines)):
    print(prompt, end="")
    for line in lines:
        return line
    raise EOFError("EOF when reading a line")

def exit(code=None):
    raise SystemExit("1" if code else "")

quit = exit
"""
# Messages of Monty in cases in which CPython would continue: its own limits, conversions of long integers, files.
LACKS = ("monty", "not supported in this environment", "limit (4300 digits)", "os.pathlike")
GRACE = 0.5  # seconds after the time limit at which a worker is killed
SLEEP = 0.5  # seconds that a program may sleep; Monty does not count them as its time


class MontyExecutor(Executor):
    """Run programs in a pool of Monty workers."""

    def __init__(self, *limits, **named_limits):
        super().__init__(*limits, **named_limits)
        if monty is None:
            raise InputError("--executor monty: not installed: pip install pydantic-monty")
        # Try Monty out: if it did not start, every program would count as faulty.
        try:
            with monty.Monty(max_processes=1) as pool, pool.checkout() as session:
                session.feed_run("1")
        except Exception as error:
            hint = "pip install --force-reinstall pydantic-monty"
            raise InputError(
                f"--executor monty: it does not start ({one_line(error)}): {hint}"
            ) from None

    def run(self, programs: Sequence[str], tests: Sequence[Sequence[Test]]) -> list[Outcome]:
        grace = {"feed_duration_limit_grace": GRACE, "turn_duration_limit_grace": GRACE}
        with monty.Monty(max_processes=self.workers, **grace) as self.pool:
            return super().run(programs, tests)

    def results(self, program: str, tests: Sequence[Test]) -> list[Result]:
        """Return at most one result of each test, and the fault that ended the program early, if there is one.

        If the tests call a function, they share one session, which runs the program once. If they read what a program
        prints, each test has a new session with a text on standard input.
        """
        deadline = time.monotonic() + self.seconds
        if tests[0].call is None:
            return list(self._results_of_printing(program, tests, deadline))
        return list(self._results_of_calls(program, tests, deadline))

    def _session(self, deadline: float):
        """Return a new session of a worker, whose limits end it at the deadline, as a context manager."""
        left = max(deadline - time.monotonic(), 0.001)
        memory = self.memory_mb * 2**20
        limits = {
            "max_feed_duration_secs": left,
            "max_memory": memory,
            "max_total_sleep_secs": SLEEP,
        }
        return self.pool.checkout(limits=limits, assert_message_annotations=False)

    def _results_of_printing(
        self, program: str, tests: Sequence[Test], deadline: float
    ) -> Iterator[Result]:
        """Run the program anew for each test, and yield what it prints; stop after a fault that all tests would have.

        A program that raises for one input may still be right for another, so the tests go on after `runtime_error`.
        """
        for test in tests:
            printed = monty.CollectStreams(OUTPUT_BYTES)
            # `newline=None` reads the line ends of all systems.
            lines = [line.removesuffix("\n") for line in io.StringIO(test.input, newline=None)]
            try:
                with self._session(deadline) as session:
                    session.feed_run(INPUT, inputs={"marlhf_lines": lines}, print_callback=printed)
                    session.feed_run(program, print_callback=printed)
                status = "ran"
            except Exception as error:  # of the program, or of Monty
                status = _status(error)
            if status == "ran":
                yield status, "".join(text for stream, text in printed.output if stream == "stdout")
            else:
                yield status, NO_OUTPUT
            if status not in ("ran", "runtime_error"):
                return

    def _results_of_calls(
        self, program: str, tests: Sequence[Test], deadline: float
    ) -> Iterator[Result]:
        """Run the program once, and yield the value of each test's call; the fault that ends it comes last."""
        try:
            with self._session(deadline) as session:
                session.feed_run(ENCODE)
                session.feed_run(program, print_callback=monty.CollectString(OUTPUT_BYTES))
                for test in tests:
                    if time.monotonic() > deadline:
                        raise TimeoutError  # becomes the status "timeout" below
                    yield _call_once(session, program, test)
        except Exception as error:  # of the program itself, or the session is lost
            yield _status(error), NO_OUTPUT


def _call_once(session, program: str, test: Test) -> Result:
    """Return the status and the value of one call of the function, in a session that has run the program.

    If the call raises an error, that is a status, too. Raises if the session is lost or out of time, so that no other
    call can follow.
    """
    printed = monty.CollectString(OUTPUT_BYTES)
    # As in APPS, the function may be a method of a class Solution.
    function = f"Solution().{test.call}" if "class Solution" in program else test.call
    try:
        # The value is printed on a line of its own, after whatever the function itself has printed.
        call = f"print('\\n' + marlhf_encode({function}(*marlhf_input)))"
        session.feed_run(call, inputs={"marlhf_input": test.input}, print_callback=printed)
    except Exception as error:
        status = _status(error)
        if status == "timeout" or isinstance(error, monty.MontyCrashedError):
            raise
        return status, NO_OUTPUT
    last_line = printed.output.rstrip("\n").rpartition("\n")[2]
    return "ran", decode(last_line)


def _status(error: Exception) -> Status:
    """Return the status of a program that ended with this error, of Monty or of the conversion of its values.

    Monty knows a part of Python. A program that failed because it used another part is `unsupported`, not faulty.
    """
    inner = error.exception() if isinstance(error, monty.MontyError) else error  # Python's own
    text = str(inner)
    if isinstance(error, monty.MontySyntaxError):
        return "compile_error"
    if isinstance(inner, TimeoutError) or "request timeout" in text:
        return "timeout"
    if isinstance(inner, SystemExit) and not any(inner.args):  # exit() and exit(0)
        return "ran"
    # Does Python have what the program used, and Monty not?
    match inner:
        case ImportError():
            is_missing = True
        case NameError():
            is_missing = any(text == f"name '{name}' is not defined" for name in dir(builtins))
        case AttributeError():
            # "'str' object has no attribute 'foo'", or "module 'os' has no attribute 'foo'"
            kind, *others = re.findall(r"'([\w.]+)'", text)
            attribute = others[0] if others else kind
            type_of_python = getattr(builtins, kind, None)
            if kind == "_io.TextIOWrapper":  # standard input and output
                type_of_python = io.TextIOWrapper
            is_missing = text.startswith("module '") or hasattr(type_of_python, attribute)
        case _:
            is_missing = any(word in text.lower() for word in LACKS)
    return "unsupported" if is_missing else "runtime_error"
