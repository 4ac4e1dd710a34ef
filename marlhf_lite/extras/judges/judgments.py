"""Comparisons of two methods' responses, and the judgments of a judge on them (paper, section 4.1, Appendix F).

`make_pairs` pairs stored answers, `judge_pairs` asks a judge and stores the judgments, `combine` and `summary` count.
"""

import hashlib
import json
import random
import re
import textwrap
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from tqdm.auto import tqdm

from marlhf_lite.evaluation.scores import check_same_prompts, to_frame
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, read_lines
from marlhf_lite.utils.printable import printable

VALID = ("first", "second", "tie")
WINNERS = (*VALID, "malformed", "skipped")
IDENTICAL = "the two responses are the same text"
Order = Literal["random", "both"]
GIVE_UP = 5  # answers in a row without a verdict that end a run


@dataclass(frozen=True)
class Comparison:
    """Responses of two methods to one prompt."""

    id: str
    prompt: str
    first: str
    second: str
    methods: tuple[str, str] = ("first", "second")  # the authors, hidden from judges
    shown: str = "first"  # the response that the judge sees as A; "none" if both have the same text

    @property
    def sides(self) -> dict[str, str]:
        """Return which of first and second is A, and which is B."""
        return (
            {"A": "second", "B": "first"}
            if self.shown == "second"
            else {"A": "first", "B": "second"}
        )

    @property
    def texts(self) -> tuple[str, str, str]:
        """Return prompt, response A and response B."""
        return self.prompt, getattr(self, self.sides["A"]), getattr(self, self.sides["B"])


@dataclass(frozen=True)
class Judgment:
    """A judge's verdict on responses A and B."""

    winner: str  # A, B, tie, malformed (the text has no verdict) or skipped (to be asked again)
    scores: dict | None = None  # {"A": {criterion: number}, "B": {criterion: number}}
    raw: str = ""  # the judge's text, or the reason why a verdict is missing


def make_pairs(rows: Sequence[Mapping], first: str, second: str) -> list[Comparison]:
    """Pair the answers of two methods (dicts with prompt, method, response and perhaps id), in the order of the first.

    Raises `InputError` for an unknown method, and for methods that did not answer the same prompts once each.
    """
    frame = to_frame(rows)
    groups = dict(list(frame.groupby("method", sort=False)))
    for method in {first, second} - groups.keys():
        raise InputError(
            f"answers: no method {method!r}: choose from {', '.join(groups) or 'none'}"
        )
    one, other = groups[first], groups[second]
    check_same_prompts(first, one, second, other)
    one, other = one.set_index("id"), other.set_index("id")
    if one.index.has_duplicates or other.index.has_duplicates:
        raise InputError(
            f"answers of {first} and {second}: one id twice: give one answer to each prompt"
        )
    texts = zip(
        one.index, one["prompt"], one["response"], other["response"].loc[one.index], strict=True
    )
    return [Comparison(str(id), *each, (first, second)) for id, *each in texts]


# Asking and storing


class Judge:
    """A function from a prompt and responses A and B to a `Judgment`; it never gets the methods' names.

    Subclasses set `name`, which names the file; `identity`, everything else that a judgment depends on, without secrets
    ("": judgments are not reused); and `workers`, the number of threads that may call it at the same time.
    """

    name, criteria, identity, workers = "judge", "", "", 1

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Raises `InputError` to end the run."""
        raise NotImplementedError

    def announce(self, comparisons: Sequence[Comparison]) -> None:
        """Say before the first request what all of them will cost, if that is known."""


def judge_pairs(
    judge: Judge,
    pairs: Sequence[Comparison],
    folder: str | Path,
    order: Order = "random",
    seed: int = 0,
) -> list[dict]:
    """Ask a judge about every pair.

    Each judgment is written when it arrives and never asked for again, except one that is skipped: an interrupted run
    continues, a repeated run costs nothing. Two responses with the same text are a tie without asking.

    Args:
        pairs: from `make_pairs`; their ids differ.
        folder: holds one file of judgments for each judge, NAME.jsonl.
        order: `random` shows one of the two responses first, drawn from `seed`, the judge's name and the pair's id;
            `both` asks in both orders.

    Returns:
        One row per pair and order: pair (its id), winner (one of `WINNERS`), judge, methods, shown (the response shown
        first, "none" if both have the same text), criteria, scores, raw.

    Raises:
        InputError: no pairs, a judge that cannot continue, or GIVE_UP answers in a row without a verdict; judgments so
            far are kept.
    """
    store = JudgmentStore(judge, pairs, folder, order, seed)
    waiting, without = store.waiting(), 0
    if waiting:
        judge.announce(waiting)

    def ask(comparison: Comparison) -> Judgment:
        judgment = judge(*comparison.texts)
        store.add(comparison, judgment)
        return judgment

    bar = tqdm(total=len(waiting), desc=f"judgments of {judge.name}", disable=not waiting)
    # In the end the pool waits for requests under way, which are paid for. An error cancels the others.
    with bar, ThreadPoolExecutor(judge.workers) as pool:
        ask_all = map if judge.workers == 1 else pool.map  # one worker asks nothing after an error
        for part in (waiting[:1], waiting[1:]):  # if the first one is refused, no other is sent
            for judgment in ask_all(ask, part):
                bar.update()
                without = 0 if judgment.winner in ("A", "B", "tie") else without + 1
                if without == GIVE_UP:
                    said = (
                        textwrap.shorten(printable(judgment.raw), 200, placeholder=" ...")
                        or "an empty text"
                    )
                    fix = "try another --judge_model, a larger --judge_max_tokens, or 0 for a plain request"
                    what = f"{GIVE_UP} answers in a row have no verdict, such as: {said}; judgments so far are kept"
                    raise InputError(f"{judge.name}: {what}: {fix}")
    return store.rows()


class JudgmentStore:
    """A judge's judgments on some comparisons, including those of earlier runs; `path` is their file.

    The key of a judgment is a hash of the judge's identity and the texts in the order shown: ids and names of methods
    may change. Arguments and errors are those of `judge_pairs`.
    """

    def __init__(
        self,
        judge: Judge,
        pairs: Sequence[Comparison],
        folder: str | Path,
        order: Order = "random",
        seed: int = 0,
    ):
        if not pairs or len({pair.id for pair in pairs}) < len(pairs):
            raise InputError(f"{len(pairs)} pairs: give at least one, each with its own id")
        self.judge, self._lock = judge, threading.Lock()
        self.path = Path(folder).expanduser() / f"{file_name(judge.name)}.jsonl"
        self.done = {row["key"]: row for row in read_judgments(self.path)} if judge.identity else {}
        self.comparisons = {}
        for pair in pairs:
            drawn = random.Random(ascii((seed, judge.name, pair.id))).choice(("first", "second"))
            shown_first = ("first", "second") if order == "both" else (drawn,)
            if pair.first == pair.second:
                shown_first = ("none",)
            for shown in shown_first:
                comparison = replace(pair, shown=shown)
                question = json.dumps([judge.identity, pair.prompt, pair.first, pair.second, shown])
                key = self.comparisons[comparison] = hashlib.sha256(question.encode()).hexdigest()
                if pair.first == pair.second:
                    self.done[key] = self._row(comparison, Judgment("tie", raw=IDENTICAL))

    def waiting(self) -> list[Comparison]:
        """Return comparisons without a judgment, one of those with the same texts."""
        return list(
            {
                key: comparison
                for comparison, key in self.comparisons.items()
                if key not in self.done
            }.values()
        )

    def add(self, comparison: Comparison, judgment: Judgment) -> None:
        """Add a judgment, and write it at once; one that is skipped is left for the next run."""
        row = self._row(comparison, judgment)
        with self._lock:
            self.done[row["key"]] = row
            if judgment.winner != "skipped":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(self.path, [row])

    def rows(self) -> list[dict]:
        """Return one row per comparison that has a judgment; see `judge_pairs`."""
        return [
            self.done[key] | {"pair": comparison.id, "methods": list(comparison.methods)}
            for comparison, key in self.comparisons.items()
            if key in self.done
        ]

    def _row(self, comparison: Comparison, judgment: Judgment) -> dict:
        sides, scores = comparison.sides, judgment.scores
        row = {"key": self.comparisons[comparison], "pair": comparison.id, "judge": self.judge.name}
        row |= {
            "methods": list(comparison.methods),
            "shown": comparison.shown,
            "criteria": self.judge.criteria,
        }
        verdict = {"winner": sides.get(judgment.winner, judgment.winner)}
        verdict["scores"] = scores and {sides[side]: scores[side] for side in "AB"}
        return row | verdict | {"raw": judgment.raw}


def file_name(name: str) -> str:
    """Return the name with only the characters of a plain file name."""
    return re.sub(r"[^A-Za-z0-9_=+-]+", "-", name).strip("-") or "judge"


def read_judgments(path: str | Path) -> list[dict]:
    """Return the judgments in a judge's file, the last one of each comparison; rows as `judge_pairs` returns them.

    Raises `InputError` for a line that is not a judgment.
    """
    rows = read_lines(Path(path).expanduser())
    for number, row in enumerate(rows, 1):
        if (
            not {"key", "pair", "judge", "shown", "scores"} <= row.keys()
            or row.get("winner") not in WINNERS
        ):
            raise InputError(f"{path}, line {number}: not a judgment: correct or delete the line")
    return list({row["key"]: row for row in rows}.values())


# Counts


def combine(rows: Sequence[Mapping]) -> list[dict]:
    """Return one row per pair, without scores, from the rows of one judge, which asked in one order or in both.

    Two judgments on a pair become skipped if one is skipped, else malformed if one is malformed, else the winner if
    both name the same, else a tie.
    """
    combined = []
    for group in _by_pair(rows):
        winners = {row["winner"] for row in group}
        faults = [fault for fault in ("skipped", "malformed") if fault in winners]
        winner = faults[0] if faults else winners.pop() if len(winners) == 1 else "tie"
        shown = "both" if len(group) == 2 else group[0]["shown"]
        combined.append({**group[0], "winner": winner, "shown": shown, "scores": None})
    return combined


def summary(rows: Sequence[Mapping]) -> dict:
    """Count judgments over pairs: win, lose and tie of the first method (together `judged`), malformed, skipped.

    `position` has `first_shown_share`, the share of
    judgments with a winner that name the response shown first (0.5 without bias, None without an order), and
    `consistency`, the share of pairs asked in both orders whose judgments agree.
    """
    pairs = combine(rows)
    count = Counter(row["winner"] for row in pairs)
    decided = [
        row["winner"] == row["shown"]
        for row in rows
        if row["shown"] != "none" and row["winner"] in VALID[:2]
    ]
    winners_of = [[row["winner"] for row in group] for group in _by_pair(rows)]
    same = [
        len(set(winners)) == 1
        for winners in winners_of
        if len(winners) == 2 and set(winners) <= set(VALID)
    ]
    return {
        "judge": rows[0]["judge"] if rows else "",
        "methods": rows[0]["methods"] if rows else [],
        "pairs": len(pairs),
        "judged": sum(count[name] for name in VALID),
        "win": count["first"],
        "lose": count["second"],
        **{name: count[name] for name in ("tie", "malformed", "skipped")},
        "position": {
            "decided": len(decided),
            "first_shown_share": fmean(decided) if decided else None,
            "both_orders": len(same),
            "consistency": fmean(same) if same else None,
        },
    }


def _by_pair(rows: Sequence[Mapping]) -> list[list[Mapping]]:
    groups: dict[str, list[Mapping]] = {}
    for row in rows:
        groups.setdefault(row["pair"], []).append(row)
    return list(groups.values())
