"""Verdicts on disk, by content: a question that has been answered once is not asked again."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import asdict, fields
from pathlib import Path

from marlhf_lite.evaluation.judges.judge import CHOICES, Judge, Question, to_answer
from marlhf_lite.evaluation.judges.pairs import WINNERS, Verdict
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, read_lines

_FORMAT = 1  # of the key; a new number makes all stored verdicts unknown


def file_name(name: str) -> str:
    """A judge's name as the name of a file, whatever it holds."""
    return re.sub(r"[^A-Za-z0-9_=+-]+", "-", name).strip("-") or "judge"


def content_key(judge: Judge, question: Question) -> str:
    """SHA-256 of the judge's identity, the prompt and both texts in the order shown; names and ids are left out."""
    what = [_FORMAT, judge.identity(), judge.ordered, question.pair.prompt, question.a, question.b]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


class Store:
    """One judge's verdicts in `folder`, a JSON line each, in the file `path`. Threads may add at the same time.

    Raises `InputError` for a folder that cannot be made, or a line that is no verdict; a cut-off last line is let go.
    """

    def __init__(self, folder: str | Path, judge: Judge):
        self.path = Path(folder).expanduser() / f"{file_name(judge.name)}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be made ({error.strerror}): choose another --judge_folder") from None
        self._lock = threading.Lock()
        self._found = {line["key"]: verdict for line, verdict in _read(self.path)}

    def get(self, key: str) -> Verdict | None:
        """What is stored under this key."""
        return self._found.get(key)

    def add(self, key: str, verdict: Verdict) -> None:
        """Writes a verdict at once; not again where the same answer is stored already."""
        with self._lock:
            before = self._found.get(key)
            if before is None or to_answer(before) != to_answer(verdict):
                append_lines(self.path, [{"key": key, **asdict(verdict)}])
            self._found[key] = verdict


def read_verdicts(path: str | Path) -> list[Verdict]:
    """All verdicts of a judge's file, the last one of each question, in the order in which they were first given.

    Raises `InputError` if there is no such file, or a line is no verdict.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{path}: no such file: give one that `marlhf judge` wrote")
    return list({line["key"]: verdict for line, verdict in _read(path)}.values())


def _read(path: Path) -> list[tuple[dict, Verdict]]:
    names = {field.name for field in fields(Verdict)}
    out = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            verdict = Verdict(**{name: line[name] for name in names} | {"methods": tuple(line["methods"])})
            known = verdict.winner in WINNERS and to_answer(verdict).choice in CHOICES and isinstance(line["key"], str)
        except (KeyError, TypeError):
            known = False
        if not known:
            raise InputError(f"{path}, line {number}: no verdict: mend or delete the line")
        out.append((line, verdict))
    return out
