"""Verdicts counted: wins, ties, what went wrong, and whether the place decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from marlhf_lite.evaluation.judges.pairs import WINNERS, Verdict
from marlhf_lite.utils.errors import InputError

VALID = ("first", "second", "tie")


def combine(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict a pair, from one order or from both, in the order of first appearance.

    Of two verdicts on a pair, in the two orders: skipped if one is skipped, else malformed if one is malformed, else
    the winner that both name; where they disagree, or one is a tie, a tie. A judge whose scores are log-probabilities
    (`logprob`) decides by their mean over both orders instead. Scores are averaged, seconds, tokens and cost summed.

    Raises `InputError` for verdicts of several judges, and for a pair that has two in one order.
    """
    if len({verdict.judge for verdict in verdicts}) > 1:
        raise InputError("verdicts: of several judges: combine one judge's at a time")
    return [_together(group) for group in _by_pair(verdicts).values()]


def summary(verdicts: Sequence[Verdict]) -> dict:
    """Counts over pairs, as `first` has them: win, lose, tie, malformed, skipped, and `judged`, the first three.

    `position`: `first_shown_share`, of all verdicts that name a winner, the share that names the response shown first
    (0.5 without bias, None where no verdict has an order), and with both orders `consistency`, the share of pairs
    whose two valid verdicts say the same of the same response. `scores`: each criterion's mean for first and second
    over judged pairs. `prompt_tokens`, `completion_tokens`, `cost`, `seconds`: sums over all verdicts.
    """
    pairs = combine(verdicts)
    count = Counter(verdict.winner for verdict in pairs)
    names = dict(zip(WINNERS, ("win", "lose", "tie", "malformed", "skipped"), strict=True))
    totals = ("prompt_tokens", "completion_tokens", "cost", "seconds")
    return {
        "judge": verdicts[0].judge if verdicts else "",
        "methods": list(verdicts[0].methods) if verdicts else [],
        "pairs": len(pairs),
        "judged": sum(count[name] for name in VALID),
        **{word: count[name] for name, word in names.items()},
        "position": _position(verdicts),
        "scores": _mean_scores([verdict.scores for verdict in pairs if verdict.winner in VALID]),
        **{name: sum(getattr(verdict, name) for verdict in verdicts) for name in totals},
    }


def _position(verdicts: Sequence[Verdict]) -> dict:
    decided = [v for v in verdicts if v.shown != "none" and v.winner in ("first", "second")]
    groups = [group for group in _by_pair(verdicts).values() if len(group) == 2]
    twice = [group for group in groups if all(verdict.winner in VALID for verdict in group)]
    return {
        "decided": len(decided),
        "first_shown_share": _share([verdict.winner == verdict.shown for verdict in decided]),
        "both_orders": len(twice),
        "consistency": _share([one.winner == other.winner for one, other in twice]),
    }


def _by_pair(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        group = groups.setdefault(verdict.pair, [])
        if any(verdict.shown == other.shown for other in group) or len(group) == 2:
            raise InputError(f"verdicts: pair {verdict.pair} has two in one order: give each pair's once")
        group.append(verdict)
    return groups


def _together(group: list[Verdict]) -> Verdict:
    if len(group) == 1:
        return group[0]
    one, other = group
    scores = _mean_scores([one.scores, other.scores])
    return replace(
        one,
        winner=_winner({one.winner, other.winner}, scores),
        shown="both",
        scores=scores,
        raw=f"{one.raw}\n{other.raw}",
        seconds=one.seconds + other.seconds,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cost=one.cost + other.cost,
    )


def _winner(said: set[str], scores: dict | None) -> str:
    for fault in ("skipped", "malformed"):
        if fault in said:
            return fault
    if scores and "logprob" in scores["first"]:
        first, second = scores["first"]["logprob"], scores["second"]["logprob"]
        return "tie" if first == second else "first" if first > second else "second"
    return said.pop() if len(said) == 1 else "tie"


def _mean_scores(scores: Sequence[dict | None]) -> dict | None:
    there = [score for score in scores if score]
    if not there:
        return None
    names = list(there[0]["first"])
    return {
        side: {name: sum(score[side][name] for score in there) / len(there) for name in names}
        for side in ("first", "second")
    }


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None
