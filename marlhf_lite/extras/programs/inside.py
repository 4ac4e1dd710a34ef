"""The script that CPython runs inside bubblewrap, as `python -c`: one program, all its tests. Its imports are quick.

Standard input holds (program, call, inputs, the code of `marlhf_encode`) in marshal's format; the report goes to
standard output, one line per test. The program gets other files as its standard streams.
"""

import __future__

import builtins
import marshal
import os
import resource
import sys


def main():
    """Read a task from standard input, run its program for each input, and report the results on standard output.

    The task is the program, the name of the function to call (None: the program prints), a list of arguments or a text
    on standard input for each test, and the source of `marlhf_encode`. The report has a line for each test.
    """
    program, call, inputs, source_of_encode = marshal.loads(sys.stdin.buffer.read())
    out = os.dup(1)  # the report: the program's own standard output becomes a file
    # This limit is not set before bwrap starts, as the others are, because bwrap itself starts two processes.
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    builtins.exit = builtins.quit = sys.exit  # `site` would set them, but its import takes time
    # Without Python's limit on digits, because correct programs may print long integers; time is limited anyway.
    if hasattr(sys, "set_int_max_str_digits"):  # Python 3.11 has the limit
        sys.set_int_max_str_digits(0)
    scope = {}
    exec(source_of_encode, scope)
    encode = scope["marlhf_encode"]

    def tell(*words):
        os.write(out, " ".join(words).encode("ascii") + b"\n")

    try:
        # Annotations are not evaluated: the starts of functions in APPS use List without importing it.
        code = compile(
            program, "program", "exec", __future__.annotations.compiler_flag, dont_inherit=True
        )
    except BaseException:  # also null bytes, half a surrogate pair, code nested too deeply
        return tell("compile_error")
    # A function is defined once, and then called for each test. A program that prints runs anew for each test, below.
    names = {"__name__": "program"}
    if call is not None and not run(lambda: exec(code, names)):
        return tell("runtime_error")

    def answer(arguments):
        # As in APPS, the function may be a method of a class Solution.
        function = names[call] if call in names else getattr(names["Solution"](), call)
        values.append(encode(function(*arguments)))

    for given in inputs:
        values = []  # filled by `answer`, or with what the program prints
        if call is not None:
            ended_well = run(lambda arguments=given: answer(arguments))
        else:
            ended_well = run(lambda: exec(code, {"__name__": "__main__"}), given)
            if ended_well:
                with open("stdout", "rb") as file:
                    values.append(encode(file.read().decode("utf-8", "replace")))
        if ended_well:
            tell("ran", *values)
        else:
            tell("runtime_error")
    tell("end")


def run(action, text=""):
    """Call `action` with this text on standard input, its output in a file; return whether it ended well."""
    # The files "stdin" and "stdout" take the places of the program's streams, which are numbers 0 and 1.
    with open(os.open("stdin", os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(text.encode("utf-8", "replace"))
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(os.open("stdout", os.O_WRONLY | os.O_TRUNC), 1)
    os.closerange(4, 64)  # the two above, and files that an earlier test left open; 3 is the report
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    try:
        action()
        sys.stdout.flush()
    except SystemExit as error:
        sys.stdout.flush()
        return error.code is None or error.code == 0
    except BaseException:  # also KeyboardInterrupt and whatever else a program raises
        return False
    return True


try:
    main()
finally:
    os._exit(0)  # end everything that the program may have left running
