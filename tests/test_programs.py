"""Programs and their tests: formats, comparison, outcomes of both executors, reward, pass@k."""

import itertools
import json
import shutil
import sys

import pandas as pd
import pytest
from conftest import fails, ready
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.config.options import ProgramConfig
from marlhf_lite.evaluation.pass_at_k import pass_at_k, pass_rates, pass_table
from marlhf_lite.evaluation.scores import prompt_ids
from marlhf_lite.extras.programs import (
    EXECUTORS,
    Outcome,
    Test,
    TestRunner,
    bubblewrap,
    monty,
    program_reward,
    read_problem,
    run_tests,
)
from marlhf_lite.extras.programs.protocol import ENCODE, PROGRAM_CHARACTERS, decode
from marlhf_lite.extras.programs.rewards import ProgramTests
from marlhf_lite.extras.programs.tests import NO_OUTPUT, same

ADD = [Test([3, 4], 7, "add"), Test([1, 1], 2, "add"), Test([0, 0], 0, "add")]
LINES = [Test("3 4\n", "7"), Test("1 1", "2  \n\n")]


# Outcomes


@pytest.mark.parametrize(
    ("program", "tests", "status", "passed"),
    [
        ("def add(a, b):\n    return a + b", ADD, "ran", [1, 1, 1]),
        ("def add(a, b):\n    return a * b", ADD, "ran", [0, 0, 1]),
        ("\ndef add(a, b):\n    print('noise')\n    return a + b", ADD, "ran", [1, 1, 1]),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", ADD, "ran", [1, 1, 1]),
        # the starts of functions in APPS
        (
            "class Solution:\n    def add(self, a: List[int], b) -> Optional[int]:\n        return a + b",
            ADD,
            "ran",
            [1, 1, 1],
        ),
        ("def add(a, b):\n    return [7][b - 4] if b else 0 // a", ADD, "runtime_error", [1, 0, 0]),
        ("def add(a, b):\n    return str(a + b)", ADD, "ran", [0, 0, 0]),
        ("def add(a, b)\n    return a + b", ADD, "compile_error", [0, 0, 0]),
        ("def plus(a, b):\n    return a + b", ADD, "runtime_error", [0, 0, 0]),
        (
            "def add(a, b):\n    while a:\n        pass\n    return 0",
            ADD[::-1],
            "timeout",
            [1, 0, 0],
        ),
        ("a, b = map(int, input().split())\nprint(a + b)", LINES, "ran", [1, 1]),
        ("if __name__ == '__main__':\n    print(7)", LINES, "ran", [1, 0]),
        ("import sys\nprint('now', file=sys.stderr)\nprint(7)", LINES, "ran", [1, 0]),
        ("print(7 if input() == '3 4' else 1 / 0)", LINES, "runtime_error", [1, 0]),
        (
            "print(len(input('long? ')))",
            [Test("a\u2028b\x0cc\r\nd", "long? 5"), Test("a", "1")],
            "ran",
            [1, 0],
        ),
        ("input()\ninput()\nprint(7)", [LINES[1]], "runtime_error", [0]),
        ("x" * (PROGRAM_CHARACTERS + 1), ADD, "unsupported", [0, 0, 0]),
    ],
)
def test_outcomes(executor, program, tests, status, passed):
    outcome = run_tests(program, tests, executor, seconds=1.0)
    assert (outcome.status, outcome.passed) == (status, list(map(bool, passed)))


def test_what_monty_lacks_is_told_apart_from_faults_and_bubblewrap_is_cpython():
    ready("monty")
    for program in (
        "import heapq",
        "def add(a, b):\n    yield a",
        "import sys\nsys.stdin.read()",
        "x = compile",
    ):
        assert run_tests(program, ADD, "monty").status == "unsupported"
    assert run_tests("x = conpile", ADD, "monty").status == "runtime_error"
    ready("bubblewrap")
    program = (
        "import heapq, sys\ndef nth():\n    yield from sorted(map(int, sys.stdin.read().split()))\n"
    )
    program += "print(heapq.nsmallest(1, nth())[0])\nsys.exit(0)"
    assert run_tests(program, [Test("3 1 2", "1"), Test("5\n4", "4")], "bubblewrap").passed == [
        True,
        True,
    ]
    for end, status in (("exit()", "ran"), ("quit(0)", "ran"), ("exit(1)", "runtime_error")):
        outcome = run_tests(f"print(7)\n{end}\nprint(8)", [Test("", "7")], "bubblewrap")
        assert (outcome.status, outcome.passed) == (status, [status == "ran"])
    assert run_tests(
        "print(open(0).read(), end='')", [Test("a\nb", "a\nb")], "bubblewrap"
    ).passed == [True]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def encode(value):
    """Run `ENCODE` here: it is our code, and harmless."""
    scope = {}
    exec(ENCODE, scope)
    return scope["marlhf_encode"](value)


@settings(max_examples=10)
@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_values_go_through_a_sandbox_as_they_are(values):
    for name in EXECUTORS:
        ready(name)
        tests = [Test([value], value, "f") for value in values]
        outcome = run_tests("def f(value):\n    return value", tests, name)
        assert all(outcome.passed), (name, outcome)


def test_large_integers_and_sets(executor):
    tests = [Test([5000], 10**5000, "f"), Test([1], {10, 1}, "f"), Test([2], (1, {(1, 2): 3}), "f")]
    program = "def f(n):\n    return {1: {1, 10}, 2: [1, {(1, 2): 3}]}.get(n, 10 ** n)"
    assert run_tests(program, tests, executor).passed == [True, True, True]


def test_other_objects_are_no_values(executor):
    """They are not looked into, and fail the test; a Counter is a dict, as in Python."""
    tests = [Test([i], {"a": 2}, "f") for i in range(3)]
    program = "from collections import Counter\nclass A:\n    pass\n"
    program += "def f(i):\n    return [Counter('aa'), A(), map(len, 'aa')][i]"
    outcome = run_tests(program, tests, executor)
    assert (outcome.status, outcome.passed) == ("ran", [True, False, False])


NO_VALUES = [
    "",
    "[",
    "7x",
    "7",
    '"a"',
    "[1]",
    '["none"]',
    "[" * 10**5,
    '["dict",1]',
    '["set",["dict"]]',
]
NO_VALUES += [
    '["int"]',
    '["int","q"]',
    '["plain","q"]',
    '["plain",[]]',
    '["str","q"]',
    '["str",["plain","None"]]',
]


def test_what_is_no_value_equals_nothing():
    """Nor do keys that collide: a dictionary of them would take time that grows with the square of their number."""
    collide = [k * (2**61 - 1) for k in range(1, 3000)]
    for none in (*NO_VALUES, encode(set(collide))):
        assert decode(none) is NO_OUTPUT and not same(None, NO_OUTPUT)
    for value in (dict.fromkeys(collide[:50], 1), set(range(3000))):
        assert decode(encode(value)) == value


def test_comparison():
    assert same([1, (2, 3)], ((1, [2, 3]))) and same(2, 2.0) and same({"a": [1]}, {"a": (1,)})
    for one, other in [
        (1, True),
        (True, 1),
        ([1], 1),
        ([1], [1, 2]),
        ("1", 1),
        ({"a": 1}, {"b": 1}),
        (None, False),
    ]:
        assert not same(one, other) and not same(other, one)
    assert Test("", "a \nb\n\n").passes(" a\n\nb") and not Test("", "a\nb").passes("a b")
    assert not Test("", "a\nb").passes("a\x0bb") and not Test("", "a").passes("a\x00")
    assert (
        not Test("", "a").passes(["a"])
        and not Test("", "2").passes("2.0")
        and not Test("", "a b").passes("ab")
    )


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_deep_values_are_compared_without_recursion(wrap):
    right, wrong = 1, 2
    for _ in range(100_000):
        right, wrong = wrap(right), wrap(wrong)
    assert same(right, right) and not same(right, wrong) and not same(wrong, 2)


def test_deep_values_of_programs_end_no_run(executor):
    """Each is right, wrong or unsupported, but no error of this process, however deep its own stack is."""
    deep = json.loads("[" * 450 + "]" * 450)
    for depth in (100, 450, 900, 5000):
        program = (
            f"def f():\n    x = []\n    for _ in range({depth - 1}):\n        x = [x]\n    return x"
        )
        outcome = run_tests(program, [Test([], deep, "f")], executor)
        assert not any(outcome.passed) or depth == 450


# Right programs that are easily taken for wrong: (tests in APPS's form, program). Monty lacks what the last ones use.


def stream(given, expected):
    return {"inputs": [given], "outputs": [expected]}


def call(arguments, expected):
    return {"fn_name": "f", "inputs": [arguments], "outputs": [expected]}


RIGHT = {
    "a float": (call([0.1, 0.2], 0.3), "def f(a, b):\n    return a + b"),
    "floats in lists": (
        call([3], [[0.1, 0.2, 0.3], 1]),
        "def f(n):\n    return [[0.1 * i for i in (1, 2, 3)], 1.0]",
    ),
    "floats in a dict": (call([3], {"x": 0.3}), "def f(n):\n    return {'x': 0.1 * n}"),
    "a tuple of floats": (
        call([], [0.3, 2]),
        "def f():\n    return (0.1 + 0.2, 2.0000000000000004)",
    ),
    "a rounded answer": (call([1], 0.333333333333), "def f(n):\n    return round(n / 3, 7)"),
    "no value": (call([1], None), "def f(n):\n    n + 1"),
    "minus nothing": (call([], 0.0), "def f():\n    return -0.0"),
    "minus nothing in text": (stream("", "0\n"), "print(-0.0)"),
    "rounded text": (
        stream("1 3", "0.333333333333"),
        "a, b = map(int, input().split())\nprint(round(a / b, 7))",
    ),
    "a whole number with a point": (
        stream("6 3", "2\n"),
        "a, b = map(int, input().split())\nprint(a / b)",
    ),
    "a large float": (stream("", "10000000000000000"), "print(1e16)"),
    "an exponent": (stream("", "0.00001"), "print(1e-05)"),
    "infinity": (stream("", "inf"), "print(float('inf'))"),
    "other white space": (stream("", "1 2\n3\n"), "print(1, 2, sep='\\t', end='  \\n\\n3')"),
    "line ends of Windows": (stream("2\r\n3\r\n", "5\r\n"), "print(int(input()) + int(input()))"),
    "lines until there are no more": (
        stream("1\n2\n", "3"),
        "n = 0\ntry:\n    while True:\n        n += int(input())\nexcept EOFError:\n    print(n)",
    ),
    "a main function": (
        stream("2", "4"),
        "def main():\n    print(2 * int(input()))\n\nif __name__ == '__main__':\n    main()",
    ),
    "an end by exit": (stream("2", "2"), "print(int(input()))\nexit(0)"),
    "arguments changed": (call([[3, 1]], [1, 3]), "def f(a):\n    a.sort()\n    return a"),
    "a method": (call([2], 4), "class Solution:\n    def f(self, n):\n        return 2 * n"),
    "a long integer returned": (call([5000], 10**4000), "def f(n):\n    return 10 ** (n - 1000)"),
    "letters of other scripts": (stream("añ\n", "ña"), "print(input()[::-1])"),
}
BEYOND_MONTY = {
    "a long integer printed": (stream("5000", "1" + "0" * 5000), "print(10 ** int(input()))"),
    "a long integer read": (stream("1" + "0" * 5000, "2"), "print(int(input()) % 7)"),
    "all of the input": (
        stream("1 2\n3", "6"),
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    ),
    "bytes of the input": (
        stream("1 2", "3"),
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    ),
    "the input as a file": (stream("1 2", "3"), "print(sum(map(int, open(0).read().split())))"),
    "what print calls": (
        stream("1", "1"),
        "import sys\nsys.stdout.write(input() + '\\n')\nsys.stdout.flush()",
    ),
    "bytes of the output": (stream("", "1"), "import sys\nsys.stdout.buffer.write(b'1')"),
    "a method of a number": (stream("5", "3"), "print(int(input()).bit_length())"),
    "an end by sys": (stream("2", "2"), "import sys\nprint(int(input()))\nsys.exit()"),
    "deep recursion": (
        stream("20000", "20000"),
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n"
        "print(f(int(input())))",
    ),
}


def outcome_of(row, program, executor):
    problem = read_problem(json.dumps(row))
    return run_tests(problem.head + program, problem.tests, executor)


@pytest.mark.parametrize("name", [*RIGHT, *BEYOND_MONTY])
def test_right_programs_are_paid_as_right(executor, name):
    """Each is paid 1; Monty says of what it lacks that it is unsupported, and never that the program is faulty."""
    outcome = outcome_of(*(RIGHT | BEYOND_MONTY)[name], executor)
    lacking = executor == "monty" and name in BEYOND_MONTY
    assert (outcome.status, program_reward(outcome)) == (
        ("unsupported", -0.6) if lacking else ("ran", 1.0)
    ), outcome


WRONG = {
    "another float": (call([], 0.3), "def f():\n    return 0.30001"),
    "another integer": (call([], 100000000), "def f():\n    return 100000001"),
    "a float beside an integer": (call([], 3), "def f():\n    return 3.0001"),
    "true for a number": (call([], 1.0), "def f():\n    return True"),
    "an integer beyond floats": (call([], 0.5), "def f():\n    return 10 ** 400"),
    "other words": (stream("", "2"), "print('02')"),
    "another whole number": (stream("", "3"), "print(3.0001)"),
    "no end": (stream("1", "1"), "print(1)\nexit(1)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_not(executor, name):
    assert outcome_of(*WRONG[name], executor).passed == [False]


def test_exact_tests_know_no_rounding(executor):
    row, program = RIGHT["a float"]
    assert outcome_of(row | {"exact": True}, program, executor).passed == [False]
    assert outcome_of(row | {"exact": True, "outputs": [0.1 + 0.2]}, program, executor).passed == [
        True
    ]


# What is refused


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_a_sandbox_that_cannot_start_is_refused(monkeypatch, tmp_path):
    """Programs that nobody could run are not programs with faults."""
    ready("bubblewrap")
    runner = TestRunner("bubblewrap", workers=1)
    monkeypatch.setattr(runner, "command", ("/bin/false",))
    fails(lambda: runner.run(["x = 1"], [ADD]), "bwrap")
    bubblewrap._command.cache_clear()

    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    (tmp_path / "ldd").symlink_to(shutil.which("ldd"))
    monkeypatch.setattr(bubblewrap, "_as_nobody", lambda: ())
    monkeypatch.setenv("PATH", str(tmp_path))
    fails(lambda: run_tests("x = 1", ADD, "bubblewrap"), "No permissions", "executor monty")
    broken.unlink()
    fails(lambda: run_tests("x = 1", ADD, "bubblewrap"), "apt-get install bubblewrap")

    monkeypatch.setenv("MONTY_BIN", "/bin/false")
    fails(lambda: TestRunner("monty"), "executor monty")
    monkeypatch.setattr(monty, "monty", None)
    fails(lambda: TestRunner("monty"), "executor monty", "pip install pydantic-monty")


# Formats


def test_apps_of_both_kinds(executor):
    calls = read_problem(
        json.dumps({"fn_name": "f", "inputs": [[[1, 2]], [[5]]], "outputs": [[3], [5]]})
    )
    assert calls.tests[0] == Test([[1, 2]], [3], "f", as_apps=True)
    for value, passed in (("sum(x)", True), ("[sum(x)]", True), ("[[sum(x)]]", False)):
        assert (
            run_tests(f"def f(x):\n    return {value}", calls.tests, executor).passed
            == [passed] * 2
        )
    streams = read_problem('{"inputs": ["1\\n2\\n", ["3", "4"]], "outputs": ["3\\n", ["7"]]}')
    assert streams.tests[1] == Test("3\n4", "7", as_apps=True)
    assert run_tests("print(int(input()) + int(input()))", streams.tests, executor).passed == [
        True,
        True,
    ]


def test_texts_of_apps_are_compared_as_by_its_own_harness(executor):
    row = {"inputs": ["1 3", "2 3"], "outputs": ["0.333333\n\nof  1\n", "0.666667\nof 1"]}
    program = "a, b = map(int, input().split())\nprint(a / b)\nprint('of 1')"
    for more, passed in (({}, True), ({"exact": True}, False)):
        problem = read_problem(json.dumps(row | more))
        assert run_tests(problem.head + program, problem.tests, executor).passed == [passed] * 2
    for expected, output, passed in [
        ("0.5 2", "0.50 2", True),
        ("0.5", ".5004", False),
        ("1000000", "1000001", False),
        ("2", "2.0", True),
        ("2", "2.5", False),
        ("0.5\n1", "0.5 1", False),
        ("0.5", "half", False),
        ("a.b", "a.b", True),
        ("nan.", "nan.", True),
    ]:
        assert Test("", expected, as_apps=True).passes(output) is passed, (expected, output)


def test_a_program_does_not_run_twice_with_the_same_tests(monkeypatch):
    ready("monty")
    texts = {
        f"is it {n}?": json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [n]}) for n in (2, 3)
    }
    tests, ran = ProgramTests(texts, ProgramConfig()), []
    results = tests.executor.results
    monkeypatch.setattr(
        tests.executor, "results", lambda *given: ran.append(given) or results(*given)
    )
    program = "def f(x):\n    return x"
    for _ in range(2):
        assert tests.shares(["is it 2?", "is it 3?", "is it 2?"], [program] * 3) == [1.0, 0.0, 1.0]
    assert len(ran) == 2  # the same program with other tests is another


def test_apps_programs_need_not_import_what_its_own_harness_imports(executor):
    row = {"fn_name": "f", "inputs": [[[4, 9]], [[16]]], "outputs": [6, 5]}
    program = "def f(x):\n    counts = defaultdict(int)\n    for i in x:\n        counts['sum'] += sqrt(i)\n"
    program += "    return math.floor(counts['sum']) + len(set(collections.Counter(x).values()))\n"
    problem, exact = read_problem(json.dumps(row)), read_problem(json.dumps(row | {"exact": True}))
    assert run_tests(problem.head + program, problem.tests, executor).passed == [True, True]
    assert exact.head == "" and run_tests(program, exact.tests, executor).passed == [False, False]
    streams = read_problem('{"inputs": ["3"], "outputs": ["8"]}')
    assert run_tests(
        streams.head + "print(2 ** gcd(3, int(input())))", streams.tests, executor
    ).share
    if executor == "bubblewrap":
        assert run_tests(
            f"{streams.head}print(nsmallest(1, [9, 8])[0])", streams.tests, executor
        ).share


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 10**5, "not JSON"),
        ("{}", "two lists of one length"),
        ('{"inputs": [], "outputs": []}', "no tests"),
        ('{"inputs": [1], "outputs": ["1"]}', "are texts"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}', "a list of arguments"),
        ('{"fn_name": "f(); g", "inputs": [[]], "outputs": [1]}', "not the name of a function"),
    ],
)
def test_tests_that_do_not_parse(text, words):
    fails(lambda: read_problem(text), words)


# Reward and pass@k


def test_reward():
    """Appendix B.5, with the share of tests that passed."""
    for status, passed, reward, strict in [
        ("ran", [1, 1, 1, 1], 1.0, 1.0),
        ("ran", [1, 0, 0, 0], -0.3 + 1.3 / 4, -0.3),
        ("ran", [0, 0], -0.3, -0.3),
        ("runtime_error", [1, 0], -0.6, -0.6),
        ("timeout", [1, 0], -0.6, -0.6),
        ("compile_error", [0], -1.0, -1.0),
    ]:
        outcome = Outcome(status, list(map(bool, passed)))
        assert program_reward(outcome) == pytest.approx(reward)
        assert program_reward(outcome, strict=True) == pytest.approx(strict)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_counts_all_choices(samples):
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_impossible_numbers_is_refused():
    for samples, passed, k in ((2, 0, 5), (2, 0, 0), (0, 0, 1), (2, 3, 1), (2, -1, 1)):
        fails(lambda: pass_at_k(samples, passed, k), "give ")  # noqa: B023


def test_pass_rates_by_difficulty():
    """As Table 3: a line for each difficulty, and one for all."""
    passed = {"a": [1, 1, 0.5], "b": [0, 1, 0], "c": [0, 0.9, 0]}
    levels = {"a": "introductory", "b": "competition", "c": "introductory"}
    ids = dict(zip(passed, prompt_ids(passed), strict=True))
    rows = [
        {
            "id": ids[p],
            "sample": i,
            "seed": 0,
            "method": "PPO",
            "temperature": 1.0,
            "prompt": p,
            "gold": float(x),
        }
        for p, shares in passed.items()
        for i, x in enumerate(shares)
    ]
    found = pass_rates(pd.DataFrame(rows), levels, ks=(1, 2, 5))
    means = {row["difficulty"]: [row[f"pass@{k}"]["mean"] for k in (1, 2)] for row in found}
    assert list(means) == ["introductory", "competition", "all"] and [
        row["problems"] for row in found
    ] == [2, 1, 3]
    assert means["introductory"] == pytest.approx([1 / 3, 1 / 2])
    assert means["competition"] == pytest.approx([1 / 3, 2 / 3])
    assert means["all"] == pytest.approx([1 / 3, (1 + 2 / 3) / 3])
    assert all(
        row["pass@1"]["low"] <= row["pass@1"]["mean"] <= row["pass@1"]["high"] for row in found
    )
    assert "pass@5" not in found[0] and pass_table(found).count("\n") == 4
