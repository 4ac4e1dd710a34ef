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
    program, call, inputs, encode = marshal.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # not for all: bwrap itself starts two
    builtins.exit = builtins.quit = sys.exit  # `site` would set them, but its import takes time
    getattr(sys, "set_int_max_str_digits", int)(0)  # correct programs may print long integers; time is limited anyway
    scope = {}
    exec(encode, scope)

    def tell(*words):
        os.write(out, " ".join(words).encode("ascii") + b"\n")

    try:
        # Annotations are not evaluated: the starts of functions in APPS use List without importing it.
        code = compile(program, "program", "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    except BaseException:  # also null bytes, half a surrogate pair, code nested too deeply
        return tell("compile_error")
    if call is None:
        for text in inputs:
            outcome = run(lambda: exec(code, {"__name__": "__main__"}), text)
            tell("ran", scope["marlhf_encode"](printed())) if outcome is None else tell("runtime_error")
        return tell("end")
    names = {"__name__": "program"}
    if run(lambda: exec(code, names), "") is not None:
        return tell("runtime_error")
    for arguments in inputs:
        tell(*call_once(names, call, arguments, scope["marlhf_encode"]))
    tell("end")


def call_once(names, call, arguments, encode):
    """Return the words of one report line."""
    values = []

    def calls():
        # As in APPS, the function may be a method of a class Solution.
        function = names[call] if call in names else getattr(names["Solution"](), call)
        values.append(encode(function(*arguments)))

    return ("runtime_error",) if run(calls, "") is not None else ("ran", *values)


def run(action, text):
    """Call `action` with this text on standard input, its output in a file; return the error, if there is one."""
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
        return None if error.code is None or error.code == 0 else error
    except BaseException as error:
        return error


def printed():
    with open("stdout", "rb") as file:
        return file.read().decode("utf-8", "replace")


try:
    main()
finally:
    os._exit(0)  # end everything that the program may have left running
