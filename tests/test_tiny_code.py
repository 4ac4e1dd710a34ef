"""The embedded task tiny-code: its programs in the sandbox, its form, its texts through a tokenizer."""

import random
import re
import sys
from pathlib import Path

import pytest
from test_programs_attacks import ready

from marlhf_lite.config.options import ProgramConfig
from marlhf_lite.programs import TestRunner, read_problem
from marlhf_lite.tasks.tiny_code.corpus import document, load_tiny_code, make_problem, make_rows, write, write_with_bug
from marlhf_lite.tasks.tiny_code.families import FAMILIES
from marlhf_lite.training.program_tests import with_tests
from marlhf_lite.utils.errors import InputError

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))
from build_models import train_tokenizer


def problems(count, seed=1):
    rng = random.Random(seed)
    return rng, [make_problem(rng) for _ in range(count)]


@pytest.mark.long
def test_right_programs_pass_and_programs_with_a_bug_fail():
    ready("monty")
    rng, made = problems(1000)
    tests = [read_problem(problem.tests).tests for problem in made]
    runner = TestRunner("monty")
    right = runner.run([write(rng, problem) for problem in made], tests)
    wrong = [p.prompt for p, outcome in zip(made, right) if not all(outcome.passed) or outcome.status != "ran"]
    assert not wrong, wrong[:3]
    programs = [write_with_bug(rng, problem) for problem in made]
    outcomes = runner.run(programs, tests)
    passed = [program for program, outcome in zip(programs, outcomes) if all(outcome.passed)]
    assert not passed, passed[:3]
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count("ran") > 700 and {"compile_error", "runtime_error"} <= set(statuses)
    assert "unsupported" not in statuses and "timeout" not in statuses
    assert sum(any(outcome.passed) for outcome in outcomes) > 200  # a part of the tests is something to climb from


def test_both_sandboxes_agree():
    for name in ("monty", "bubblewrap"):
        ready(name)
    rng, made = problems(25, 3)
    programs = [write_with_bug(rng, problem) for problem in made]
    tests = [read_problem(problem.tests).tests for problem in made]
    outcomes = [TestRunner(name).run(programs, tests) for name in ("monty", "bubblewrap")]
    assert [o.passed for o in outcomes[0]] == [o.passed for o in outcomes[1]]


def test_form_of_prompts_programs_and_tests():
    rng, made = problems(500, 2)
    assert len({id(problem.family) for problem in made}) == len(FAMILIES)
    for problem in made:
        program, tests = write(rng, problem), read_problem(problem.tests).tests
        assert re.fullmatch(rf"f\({problem.family.argument}\): .*\. f\(.*\) is .*\. f\(.*\) is .*\.", problem.prompt)
        assert program.startswith(f"\ndef f({problem.family.argument}):\n    ") and program == program.rstrip()
        assert 1 <= program.count("\n") - 1 <= 6
        assert len(tests) == 5 and not any(test.unwrap for test in tests)
        examples = [f"f({argument!r})" for argument in problem.arguments[:2]]
        assert all(example in problem.prompt for example in examples)
        assert not {repr(test.input[0]) for test in tests} & {repr(x) for x in problem.arguments[:2]}


def test_a_share_of_the_documents_has_a_bug():
    ready("monty")
    rng = random.Random(5)
    made = [document(rng) for _ in range(300)]
    outcomes = TestRunner("monty").run([text for _, text, _ in made], [read_problem(x).tests for *_, x in made])
    assert 0.3 < sum(not all(outcome.passed) for outcome in outcomes) / 300 < 0.5


def test_a_tokenizer_keeps_lines_and_indentation():
    rng = random.Random(0)
    texts = [document(rng)[:2] for _ in range(1500)]
    tokenizer = train_tokenizer([prompt + program for prompt, program in texts], 512)
    lengths = []
    for prompt, program in texts[:300]:
        ids = tokenizer(program, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == program
        assert tokenizer.decode(tokenizer(prompt)["input_ids"], skip_special_tokens=True) == prompt
        lengths.append(len(ids))
    for text in ("\n    x\n        y", "a  b   c", "\n\n\n", "    ", "if x:\n            y = 1\n"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert min(lengths) >= 10 and max(lengths) <= 80


def test_the_task():
    ready("monty")
    task = with_tests(load_tiny_code(200, 0), ProgramConfig())
    sizes = {part: len(rows) for part, rows in task.splits.items()}
    assert sizes == {"sft": 36, "rm": 0, "ppo": 144, "test": 20}
    rows = task.splits["test"]
    assert task.gold(rows["prompt"], rows["chosen"]) == [1.0] * 20
    assert set(rows["difficulty"]) <= {"lists", "texts", "numbers"}
    assert make_rows(20, 3) == make_rows(20, 3) != make_rows(20, 4)
    with pytest.raises(InputError, match="--size 1: "):
        load_tiny_code(1, 0)
