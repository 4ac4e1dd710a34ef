"""Checked answers: reasoning-gym's tasks as a data file, and their reward (pip install reasoning-gym).

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
    """Return reasoning-gym's score of each response's last line, from 0 to 1.

    `kind` and `task` are columns of the data file. An answer that is not harmless counts as empty.
    """
    scores = []
    for response, name, known in zip(responses, kind, task, strict=True):
        lines = response.strip().splitlines()
        last_line = lines[-1] if lines else ""
        answer = last_line.removeprefix("Answer:").strip()
        if not harmless(name, answer):
            answer = ""
        score_answer = checker(name)
        scores.append(score_answer(answer, known))
    return scores


checker = cache(reasoning_gym.get_score_answer_fn)


def harmless(kind, answer):
    """Whether an answer may go to the checker of its kind.

    Countdown's checker calls Python's eval on the text, so only short texts of numbers, brackets and the four signs of
    arithmetic may; `**` is not among them.
    """
    return kind != "countdown" or bool(re.fullmatch(r"(?!.*\*\*)[\d\s.()+*/-]{1,99}", answer))


def rows(count, seed=0):
    """Yield `count` tasks, equally many of each kind, with a prompt, an answer for SFT, and what `right` needs."""
    for kind, options in KINDS.items():
        size = count // len(KINDS)
        for task in reasoning_gym.create_dataset(kind, size=size, seed=seed, **options):
            yield {
                "prompt": f"{task['question']}\nAnswer:",
                "answer": f" {task['answer']}",
                "kind": kind,
                "task": task,
            }


if __name__ == "__main__":
    lines = [json.dumps(row, default=str) + "\n" for row in rows(400)]
    Path("reasoning.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"reasoning.jsonl: {len(lines)} tasks")
