"""A person as a judge: side by side, blind, one key a verdict. The notebook's widget asks the same questions."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from marlhf_lite.evaluation.judges.criteria import Criteria
from marlhf_lite.evaluation.judges.judge import Answer, Judge, Question, Quit
from marlhf_lite.utils.errors import InputError

KEYS = {"1": "A", "2": "B", "t": "tie", "s": "skipped"}
HELP = "1 or 2: this one is better   t: tie   s: skip   q: stop, and go on later"
_LINE = "-" * 78


class HumanJudge(Judge):
    """Shows pairs in a terminal and reads keys. It shows neither names nor ids, in an order drawn by seed and name.

    Args:
        annotator: whose verdicts these are; each name has a file of its own, and an order of its own.
        criteria: shown at the start.
        keys: where keys are read: single ones from a terminal, else the first character of each line.
        out: where it is shown.

    Raises:
        InputError: an empty name.
    """

    bar = False

    def __init__(self, annotator: str, criteria: Criteria, keys: TextIO | None = None, out: TextIO | None = None):
        if not annotator.strip():
            raise InputError("--annotator: an empty name: give the name under which your verdicts are kept")
        self.annotator, self._criteria = annotator.strip(), criteria
        self.name, self.criteria, self.order_salt = f"human-{self.annotator}", criteria.label, self.annotator
        self.keys, self.out = keys or sys.stdin, out or sys.stdout
        self._left = self._all = 0

    def identity(self) -> dict:
        return {"kind": "human", "annotator": self.annotator, "criteria": self._criteria.question()}

    def prepare(self, questions: Sequence[Question]) -> None:
        self._left = self._all = len(questions)
        print(f"{self._criteria.question()}\n\n{HELP}", file=self.out)

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        """Raises `Quit` at q, at the end of input and at Ctrl-D."""
        return [self._ask(question) for question in questions]

    def _ask(self, question: Question) -> Answer:
        parts = {
            f"{self._criteria.prompt} ({self._all - self._left + 1} of {self._all})": question.pair.prompt,
            f"{self._criteria.response} 1": question.a,
            f"{self._criteria.response} 2": question.b,
        }
        for title, text in parts.items():
            print(f"\n{title}\n{_LINE}\n{printable(text.strip())}", file=self.out)
        while True:
            print("\n1 / 2 / t / s / q > ", end="", file=self.out, flush=True)
            key = read_key(self.keys)
            print(key if len(key) == 1 and key.isprintable() else "", file=self.out)
            if key in ("", "q"):
                raise Quit
            if key in KEYS:
                self._left -= 1
                return Answer(KEYS[key])
            print(HELP, file=self.out)


def read_key(stream: Any) -> str:
    """One key in lower case, without Enter, from a terminal; else the first character of a line. "" at the end."""
    if not stream.isatty():
        line = stream.readline()
        return "" if not line else (line.strip()[:1].lower() or "\n")
    try:
        import termios
        import tty
    except ImportError:  # Windows
        import msvcrt

        key = msvcrt.getwch()
        if key == "\x03":
            raise KeyboardInterrupt from None
    else:
        before = termios.tcgetattr(stream)
        try:
            tty.setcbreak(stream)  # Ctrl-C still interrupts; keys pressed before the texts were shown are dropped
            # All bytes of a key at once: Home is ESC [ 1 ~, of which the 1 would count as a verdict.
            key = os.read(stream.fileno(), 64).decode("utf-8", "replace")[:1]
        finally:
            termios.tcsetattr(stream, termios.TCSADRAIN, before)
    return "" if key in ("\x04", "\x1a") else key.lower()


def printable(text: str) -> str:
    """Text without what could move the cursor, recolour the terminal or turn the reading direction."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
