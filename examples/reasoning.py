"""Checked answers: tasks of reasoning-gym as a data file, and the reward that checks them (pip install reasoning-gym).

With this file in the current folder:
python reasoning.py && marlhf run --dataset reasoning.jsonl --reward reasoning:right
"""

import json
import re
from functools import cache
from pathlib import Path

import reasoning_gym

KINDS = {
    "chain_sum": {"max_terms": 3, "max_digits": 2},
    "leg_counting": {"max_animals": 4},
    "countdown": {"max_numbers": 4},
    "gsm_symbolic": {},
}


def right(prompts, responses, kind, task, **row):
    """What reasoning-gym gives the last line of each response, 0 to 1; `kind` and `task` are columns of the file."""
    answers = [(response.strip().splitlines() or [""])[-1].removeprefix("Answer:").strip() for response in responses]
    rows = zip(answers, kind, task, strict=True)
    return [checker(name)(answer if harmless(name, answer) else "", known) for answer, name, known in rows]


checker = cache(reasoning_gym.get_score_answer_fn)


def harmless(kind, answer):
    """countdown's checker evaluates the text by Python's eval: let through numbers, brackets and four signs alone."""
    return kind != "countdown" or bool(re.fullmatch(r"(?!.*\*\*)[\d\s.()+*/-]{1,99}", answer))


def rows(count, seed=0):
    """`count` tasks, as many of each kind: the prompt, an answer for SFT to learn, and what `right` takes."""
    for kind, options in KINDS.items():
        for task in reasoning_gym.create_dataset(kind, size=count // len(KINDS), seed=seed, **options):
            yield {"prompt": f"{task['question']}\nAnswer:", "answer": f" {task['answer']}", "kind": kind, "task": task}


if __name__ == "__main__":
    lines = [json.dumps(row, default=str) + "\n" for row in rows(400)]
    Path("reasoning.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"reasoning.jsonl: {len(lines)} tasks")
