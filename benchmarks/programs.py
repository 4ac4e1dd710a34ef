"""Count the programs that each executor runs in a second, with all cores: short functions with five tests each.

A quarter of the programs are right, a quarter are wrong, and half raise an error or do not compile, as a policy's do.
All are different, so that no outcome is known. An executor that is not installed is left out with its reason.

    python benchmarks/programs.py --programs 2000
"""

import argparse
import json
import os
import time

from marlhf_lite.extras.programs import EXECUTORS, Test, TestRunner
from marlhf_lite.utils.errors import InputError

# The tests ask for the first kind's results. The second is wrong, the third mostly raises an IndexError, and the fourth
# lacks a bracket.
KINDS = (
    "def f(xs):\n    return [x + {i} for x in xs if x > 3]",
    "def f(xs):\n    out = []\n    for x in xs:\n        out.append(x * {i})\n    return out",
    "def f(xs):\n    return xs[{i}]",
    "def f(xs):\n    return [x + {i} for x in xs",
)


def made(count: int) -> tuple[list[str], list[list[Test]]]:
    """As many programs, of the four kinds in turn, and for each its five tests, which only the first kind passes."""
    programs = [KINDS[i % len(KINDS)].format(i=i) for i in range(count)]
    tests = []
    for i in range(count):
        tests_of_program = []
        for xs in ([1, 5, 7], [], [4], [9, 9, 2, 0], [3, 6]):
            right = [x + i for x in xs if x > 3]
            tests_of_program.append(Test([xs], right, "f"))
        tests.append(tests_of_program)
    return programs, tests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--programs", type=int, default=2000, help="for monty; bubblewrap runs a tenth"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    results = {"workers": args.workers}
    for name in EXECUTORS:
        try:
            runner = TestRunner(name, workers=args.workers)
            runner.run(*made(args.workers))  # so that what starts only once is not timed
        except InputError as error:
            print(error)
            continue
        share = 1 if name == "monty" else 10  # see --programs
        programs, tests = made(args.programs // share)
        start = time.perf_counter()
        outcomes = TestRunner(name, workers=args.workers).run(programs, tests)
        results[name] = round(len(programs) / (time.perf_counter() - start), 1)
        ran = sum(outcome.status == "ran" for outcome in outcomes)
        print(f"{name}: {results[name]} programs/s ({len(programs)} programs, {ran} of them ran)")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
