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

VALID = ("first", "second", "tie")  # verdicts: which of a pair's two methods wins
WINNERS = (*VALID, "malformed", "skipped")  # all that a row may have under `winner`
IDENTICAL = "the two responses are the same text"
Order = Literal["random", "both"]
GIVE_UP = 5  # answers in a row without a verdict that end a run


@dataclass(frozen=True)
class Comparison:
    """Responses of two methods to one prompt, and the order in which a judge sees them."""

    id: str
    prompt: str
    first: str
    second: str
    methods: tuple[str, str] = ("first", "second")  # the authors, hidden from judges
    shown: str = "first"  # the response that the judge sees as A; "none" if both have the same text

    @property
    def sides(self) -> dict[str, str]:
        """Return which of first and second is A, and which is B."""
        if self.shown == "second":
            return {"A": "second", "B": "first"}
        return {"A": "first", "B": "second"}

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
    """Pair the answers of two methods to each prompt, in the order of the first method's answers.

    `rows` are dicts with prompt, method, response and perhaps id. Raises `InputError` for an unknown method, and for
    methods that did not answer the same prompts once each.
    """
    frame = to_frame(rows)
    answers_of = dict(list(frame.groupby("method", sort=False)))
    for unknown in {first, second} - answers_of.keys():
        known = ", ".join(answers_of) or "none"
        raise InputError(f"answers: no method {unknown!r}: choose from {known}")
    check_same_prompts(first, answers_of[first], second, answers_of[second])
    ours = answers_of[first].set_index("id")
    theirs = answers_of[second].set_index("id")
    if ours.index.has_duplicates or theirs.index.has_duplicates:
        raise InputError(
            f"answers of {first} and {second}: one id twice: give one answer to each prompt"
        )
    pairs = []
    for id in ours.index:
        pairs.append(
            Comparison(
                id=str(id),
                prompt=ours.at[id, "prompt"],
                first=ours.at[id, "response"],
                second=theirs.at[id, "response"],
                methods=(first, second),
            )
        )
    return pairs


# Asking and storing


class Judge:
    """A function from a prompt and responses A and B to a `Judgment`; it never gets the methods' names.

    Subclasses set `name`, which names the file of judgments; `criteria`, the name of the question, if it has one;
    `identity`, a text with everything else that a judgment depends on, without secrets; and `workers`, the number of
    threads that may call the judge at the same time. If `identity` is empty, stored judgments are not reused.
    """

    name, criteria, identity, workers = "judge", "", "", 1

    def __call__(self, prompt: str, a: str, b: str) -> Judgment:
        """Return the judgment on responses `a` and `b`. Raises `InputError` to end the run."""
        raise NotImplementedError

    def announce(self, comparisons: Sequence[Comparison]) -> None:
        """Say before the first request what all requests will cost, if that is known."""


def judge_pairs(
    judge: Judge,
    pairs: Sequence[Comparison],
    folder: str | Path,
    order: Order = "random",
    seed: int = 0,
) -> list[dict]:
    """Ask a judge about every pair.

    Each judgment is written when it arrives. Unless it is `skipped`, it is never asked for again: so an interrupted run
    continues, and a repeated run costs nothing. Two responses with the same text are a tie, and the judge is not asked.

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
    waiting = store.waiting()  # comparisons without a judgment of an earlier run
    if waiting:
        judge.announce(waiting)

    def ask(comparison: Comparison) -> Judgment:
        judgment = judge(*comparison.texts)
        store.add(comparison, judgment)
        return judgment

    in_a_row_without_verdict = 0
    bar = tqdm(total=len(waiting), desc=f"judgments of {judge.name}", disable=not waiting)
    # At the end of its block the pool waits for requests under way, which are paid for. After an error the requests
    # that have not begun are cancelled.
    with bar, ThreadPoolExecutor(judge.workers) as pool:
        # Even a pool of one thread would have sent the next request before an error is seen; `map` asks one at a time.
        ask_all = map if judge.workers == 1 else pool.map
        # The first request goes alone: if it is refused, such as for a wrong key, no other is sent.
        for part in (waiting[:1], waiting[1:]):
            for judgment in ask_all(ask, part):
                bar.update()
                has_verdict = judgment.winner in ("A", "B", "tie")
                in_a_row_without_verdict = 0 if has_verdict else in_a_row_without_verdict + 1
                if in_a_row_without_verdict == GIVE_UP:
                    text = textwrap.shorten(printable(judgment.raw), 200, placeholder=" ...")
                    said = text or "an empty text"
                    fix = "try another --judge_model, a larger --judge_max_tokens, or 0 for a plain request"
                    what = f"{GIVE_UP} answers in a row have no verdict, such as: {said}; judgments so far are kept"
                    raise InputError(f"{judge.name}: {what}: {fix}")
    return store.rows()


class JudgmentStore:
    """A judge's judgments on some comparisons, including those of earlier runs; `path` is their file.

    The key of a judgment is a hash of the judge's identity, the texts and the order in which they are shown. So it is
    found again even if ids and names of methods change. Arguments and errors are those of `judge_pairs`.
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
        self.judge = judge
        self._lock = threading.Lock()
        self.path = Path(folder).expanduser() / f"{file_name(judge.name)}.jsonl"

        # The rows of judgments that are there, by key. Those of a judge without an identity are not read, because it
        # may judge otherwise today.
        self.done: dict[str, dict] = {}
        if judge.identity:
            for row in read_judgments(self.path):
                self.done[row["key"]] = row

        # All comparisons that should have a judgment, with their keys: one for each order of a pair's two responses.
        self.comparisons: dict[Comparison, str] = {}
        for pair in pairs:
            if pair.first == pair.second:
                shown_first = ["none"]
            elif order == "both":
                shown_first = ["first", "second"]
            else:  # drawn for each pair by itself, so that it does not depend on which other pairs there are
                generator = random.Random(ascii((seed, judge.name, pair.id)))
                shown_first = [generator.choice(("first", "second"))]
            for shown in shown_first:
                comparison = replace(pair, shown=shown)
                question = json.dumps([judge.identity, pair.prompt, pair.first, pair.second, shown])
                key = hashlib.sha256(question.encode()).hexdigest()
                self.comparisons[comparison] = key
                if pair.first == pair.second:  # a tie, about which nobody is asked
                    self.done[key] = self._row(comparison, Judgment("tie", raw=IDENTICAL))

    def waiting(self) -> list[Comparison]:
        """Return comparisons without a judgment.

        Of several comparisons with the same key, which have the same texts, only one waits, and all get its judgment.
        """
        waiting = {}
        for comparison, key in self.comparisons.items():
            if key not in self.done:
                waiting[key] = comparison
        return list(waiting.values())

    def add(self, comparison: Comparison, judgment: Judgment) -> None:
        """Add a judgment, and write it at once, unless it is skipped: then the next run asks again."""
        row = self._row(comparison, judgment)
        with self._lock:  # several threads ask the judge
            self.done[row["key"]] = row  # for this run; the file is for later runs
            if judgment.winner != "skipped":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(self.path, [row])

    def rows(self) -> list[dict]:
        """Return one row per comparison that has a judgment; see `judge_pairs`."""
        rows = []
        for comparison, key in self.comparisons.items():
            if key in self.done:
                # The names of this run: an earlier run may have judged the same texts under other names.
                names = {"pair": comparison.id, "methods": list(comparison.methods)}
                rows.append(self.done[key] | names)
        return rows

    def _row(self, comparison: Comparison, judgment: Judgment) -> dict:
        """Return a row as `judge_pairs` has it: a verdict on A and B becomes one on the first and second method."""
        method_of_side = comparison.sides  # A and B -> first and second
        scores = None
        if judgment.scores:
            scores = {method_of_side[side]: judgment.scores[side] for side in "AB"}
        return {
            "key": self.comparisons[comparison],
            "pair": comparison.id,
            "judge": self.judge.name,
            "methods": list(comparison.methods),
            "shown": comparison.shown,
            "criteria": self.judge.criteria,
            # A tie, malformed and skipped stay as they are.
            "winner": method_of_side.get(judgment.winner, judgment.winner),
            "scores": scores,
            "raw": judgment.raw,
        }


def file_name(name: str) -> str:
    """Return the name with only the characters of a plain file name."""
    return re.sub(r"[^A-Za-z0-9_=+-]+", "-", name).strip("-") or "judge"


def read_judgments(path: str | Path) -> list[dict]:
    """Return the judgments in a judge's file as the rows of `judge_pairs`; if a key is there twice, its last row.

    Raises `InputError` for a line that is not a judgment.
    """
    rows = read_lines(Path(path).expanduser())
    for number, row in enumerate(rows, 1):
        has_all = {"key", "pair", "judge", "shown", "scores"} <= row.keys()
        if not has_all or row.get("winner") not in WINNERS:
            raise InputError(f"{path}, line {number}: not a judgment: correct or delete the line")
    return list({row["key"]: row for row in rows}.values())


# Counts


def combine(rows: Sequence[Mapping]) -> list[dict]:
    """Return one row per pair, without scores, from the rows of a judge that was asked in one order or in both.

    If a pair has judgments in both orders, its winner is the first of these that holds: `skipped` if one is skipped,
    `malformed` if one is malformed, the winner if both name the same one, and otherwise a tie.
    """
    combined = []
    for rows_of_pair in _by_pair(rows):  # one, or two in both orders
        winners = {row["winner"] for row in rows_of_pair}
        if "skipped" in winners:
            winner = "skipped"
        elif "malformed" in winners:
            winner = "malformed"
        elif len(winners) == 1:
            winner = rows_of_pair[0]["winner"]
        else:
            winner = "tie"
        shown = "both" if len(rows_of_pair) == 2 else rows_of_pair[0]["shown"]
        combined.append({**rows_of_pair[0], "winner": winner, "shown": shown, "scores": None})
    return combined


def summary(rows: Sequence[Mapping]) -> dict:
    """Count over pairs: `win`, `lose` and `tie` of the first method, `judged` (these three), `malformed`, `skipped`.

    `position` tells whether the judge favours a place: `decided` is the number of judgments that name a winner, and
    `first_shown_share` the share of them that name the response shown first (0.5 without bias). `both_orders` is the
    number of pairs with a verdict in both orders, and `consistency` the share of them whose verdicts agree. Shares are
    None if there is nothing to count.
    """
    pairs = combine(rows)
    count = Counter(row["winner"] for row in pairs)

    # Does the judge favour the response that is shown first? Responses with the same text were shown to nobody.
    names_first_shown = []
    for row in rows:
        if row["shown"] != "none" and row["winner"] in ("first", "second"):
            names_first_shown.append(row["winner"] == row["shown"])

    # Does it name the same winner in both orders?
    verdicts_agree = []
    for rows_of_pair in _by_pair(rows):
        winners = {row["winner"] for row in rows_of_pair}
        if len(rows_of_pair) == 2 and winners <= set(VALID):
            verdicts_agree.append(len(winners) == 1)

    return {
        "judge": rows[0]["judge"] if rows else "",
        "methods": rows[0]["methods"] if rows else [],
        "pairs": len(pairs),
        "judged": count["first"] + count["second"] + count["tie"],
        "win": count["first"],
        "lose": count["second"],
        "tie": count["tie"],
        "malformed": count["malformed"],
        "skipped": count["skipped"],
        "position": {
            "decided": len(names_first_shown),
            "first_shown_share": fmean(names_first_shown) if names_first_shown else None,
            "both_orders": len(verdicts_agree),
            "consistency": fmean(verdicts_agree) if verdicts_agree else None,
        },
    }


def _by_pair(rows: Sequence[Mapping]) -> list[list[Mapping]]:
    """Return the rows of each pair, which has two if the judge was asked in both orders."""
    groups: dict[str, list[Mapping]] = {}
    for row in rows:
        groups.setdefault(row["pair"], []).append(row)
    return list(groups.values())
