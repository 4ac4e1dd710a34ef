"""What a judge is asked: two methods' responses to the same prompt. What it says: a verdict."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marlhf_lite.evaluation.responses import prompt_ids
from marlhf_lite.utils.errors import InputError

WINNERS = ("first", "second", "tie", "malformed", "skipped")


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt."""

    id: str
    prompt: str
    first: str
    second: str
    methods: tuple[str, str] = ("first", "second")  # who wrote them; no judge sees these


@dataclass(frozen=True)
class Verdict:
    """One judge's word on one pair, in one order."""

    pair: str  # its id
    winner: str  # one of WINNERS
    judge: str
    methods: tuple[str, str]
    shown: str  # which response was shown first: first or second; none where the judge sees no order
    criteria: str = ""
    scores: dict | None = None  # {"first": {name: number}, "second": {name: number}}
    raw: str = ""  # what the judge wrote, or why there is no verdict
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # in the prices' currency


def make_pairs(rows: Sequence[Mapping], method_a: str, method_b: str) -> list[Pair]:
    """Pairs from stored answers, in the order of method_a's rows.

    Args:
        rows: dicts with prompt, method and response, as samples.jsonl has them. Where every row of both methods has
            an `id` they are matched by it, else by prompt.
        method_a, method_b: who is `first` and who is `second`.

    Raises:
        InputError: a row without these names, an unknown method, one method twice, a prompt or id that a method has
            twice, or one that only one of them has.
    """
    if method_a == method_b:
        raise InputError(f"judge_methods: {method_a} twice: give two different methods")
    _check_rows(rows, (method_a, method_b))
    mine = [row for row in rows if row["method"] in (method_a, method_b)]
    by_id = all(row.get("id") is not None for row in mine)
    first, second = (_by_key(mine, method, by_id) for method in (method_a, method_b))
    for one, other, names in ((first, second, (method_a, method_b)), (second, first, (method_b, method_a))):
        missing = next((row for key, row in one.items() if key not in other), None)
        if missing is not None:
            text = _short(missing["prompt"])
            what = f"id {missing['id']} ({text})" if by_id else f"prompt {text}"
            raise InputError(f"answers: {names[0]} has {what}, {names[1]} has not: give answers to the same prompts")
    return [_pair(key, row, second[key], (method_a, method_b), by_id) for key, row in first.items()]


def draw_pairs(pairs: Sequence[Pair], size: int | None, seed: int = 0) -> list[Pair]:
    """`size` of the pairs, drawn by `seed`, in their order; all where `size` is None or more than there are."""
    if size is None or size >= len(pairs):
        return list(pairs)
    return [pairs[i] for i in sorted(random.Random(seed).sample(range(len(pairs)), size))]


def _check_rows(rows: Sequence[Mapping], methods: Sequence[str]) -> None:
    for number, row in enumerate(rows, 1):
        missing = [name for name in ("prompt", "method", "response") if not isinstance(row.get(name), str)]
        if missing:
            raise InputError(
                f"answers: row {number} has no text {missing[0]!r}: give rows with prompt, method, response"
            )
    there = list(dict.fromkeys(row["method"] for row in rows))
    for method in methods:
        if method not in there:
            raise InputError(f"answers: no method {method!r}; there are: {', '.join(there) or 'none'}")


def _by_key(rows: Sequence[Mapping], method: str, by_id: bool) -> dict[str, Mapping]:
    found: dict[str, Mapping] = {}
    for row in rows:
        if row["method"] != method:
            continue
        key = str(row["id"]) if by_id else row["prompt"]
        if key in found:
            what = f"id {key}" if by_id else f"prompt {_short(key)}"
            raise InputError(f"answers: {method} has {what} twice: leave one answer to each prompt")
        found[key] = row
    return found


def _pair(key: str, first: Mapping, second: Mapping, methods: tuple[str, str], by_id: bool) -> Pair:
    if first["prompt"] != second["prompt"]:
        raise InputError(f"answers: id {key} has different prompts: give answers to the same prompts")
    return Pair(key if by_id else prompt_ids([key])[0], first["prompt"], first["response"], second["response"], methods)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return repr(words if len(words) <= 60 else words[:57] + "...")
