"""The paper's claims beside the stored results of this project: differences, verdicts, and the overview of elective 15.

`paper.yaml` has the claims. A counterpart is the name of one of `measures`, or "study: one > other", a difference of
final RM scores, with ", gold" for another score; "-" is a claim that nothing here can test; "not comparable: …"
was judged by another kind of judge, and "other answers: …" was measured on answers of other models.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import yaml

from marlhf_lab.figures.agreement import agreement_table, verdicts_of_scores
from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.learning import learning_table
from marlhf_lab.studies.people import with_a_person
from marlhf_lab.studies.results import (
    by_method,
    crossed_interval,
    stored_results,
    study_table,
    t_interval,
)
from marlhf_lab.studies.study import load_study
from marlhf_lite.evaluation import scores
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval

# the paper's lead on TL;DR as a share of PPO's gain over SFT (Table 7)
SIZE = (1.40 - 0.83) / (0.83 + 0.64)
# one goal for all methods
TIMED = ("umbrella", "umbrella_seeing", "umbrella_noise", "n_sweep", "critic_confirm")
BUDGET = 30  # updates of a run that never reaches the goal
NOT_COMPARABLE = "not comparable: "
OTHER_ANSWERS = "other answers: "


@cache
def stored(study: str) -> list[dict]:
    """The results of a study that come with the project; an empty list if there are none yet."""
    try:
        return stored_results(study)
    except InputError:
        return []


def typeset(text: str) -> str:
    """Text for a lesson, with "−" before negative numbers and "∞" for n=inf."""
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text).replace("n=inf", "n=∞")


def table(rows: Sequence[Mapping], columns: Mapping[str, str]) -> str:
    """The rows as a Markdown table for a lesson."""
    return typeset(scores.table(rows, columns))


def say(value: Mapping | None, form: str = "+.2f", beside: float = 0) -> str:
    """An interval as text; `beside`: the value that it is compared with, 1 for a ratio."""
    return "-" if value is None else typeset(interval(value, form, beside))


def verdict(
    value: Mapping | None, sign: int = 1, size: float | None = None, beside: float = 0
) -> str:
    """Compare an interval with the claim that a number is above `beside` (sign −1: below) and of this size."""
    if value is None:
        return "not measured"
    low, high = sorted(sign * (value[end] - beside) for end in ("low", "high"))
    words = "agrees" if low > 0 else "contradicts" if high < 0 else "no difference seen"
    return words + (
        "; the claimed size is excluded" if size is not None and high < sign * size else ""
    )


# Final scores


def gaps(study: str, one: str, other: str, score: str = "rm_score") -> np.ndarray | None:
    """Differences of two methods, [seeds, prompts]; None if one of them is not stored."""
    runs = by_method(stored(study)) if stored(study) else {}
    seeds = sorted(set(runs.get(one, ())) & set(runs.get(other, ())))
    if not seeds or score not in runs[one][seeds[0]]["final"]:
        return None
    return np.array(
        [
            np.subtract(*(runs[name][seed]["final"][score] for name in (one, other)))
            for seed in seeds
        ]
    )


def compare(study: str, one: str, other: str, score: str = "rm_score") -> dict | None:
    """The mean difference with its interval for other seeds and prompts; None if it is not measured."""
    value = gaps(study, one, other, score)
    return None if value is None else crossed_interval(value)._asdict()


def wins(study: str, one: str, other: str, score: str) -> np.ndarray:
    """1 if the first method's score is higher, ½ for a tie, else 0: [seeds, prompts]."""
    return (np.sign(gaps(study, one, other, score)) + 1) / 2


def bad(method: str, of: str = "PPO") -> np.ndarray:
    """1 if the RM score is below the lowest 5 % of another method's with the same seed, in `main`."""
    runs = by_method(stored("main"))
    lowest = {
        seed: np.quantile(run["final"]["rm_score"], 0.05) for seed, run in sorted(runs[of].items())
    }
    return np.array(
        [np.less(runs[method][s]["final"]["rm_score"], low) for s, low in lowest.items()],
        dtype=float,
    )


# Two judges: the RM score and the gold score in `main`


def judged(one: str, other: str, score: str, seeds: list[int] | None = None) -> dict:
    """Verdicts by pair, over all prompts of these seeds (of all)."""
    runs = by_method(stored("main"))
    judgments = [
        np.concatenate([runs[name][s]["final"][score] for s in seeds or sorted(runs["PPO"])])
        for name in (one, other)
    ]
    return dict(enumerate(verdicts_of_scores(*judgments)))


def agreement(one: str, other: str, seeds: list[int] | None = None) -> dict:
    """RM against gold score, over the pairs in which neither has a tie."""
    rm, gold = (judged(one, other, score, seeds) for score in ("rm_score", "gold"))
    decided = [pair for pair in rm if "tie" not in (rm[pair], gold[pair])]
    return agreement_table(
        {"RM": {p: rm[p] for p in decided}, "gold": {p: gold[p] for p in decided}}
    )[0]


# Speed and norms


@cache
def learned() -> dict[tuple[str, str], dict]:
    """(study, method) -> its row of `learning_table`, in the studies with one goal for all methods."""
    rows = {}
    for name in TIMED:
        study = load_study(name)
        for row in learning_table(
            study.figures or {"": list(study.methods)}, stored(name), study.threshold
        ):
            rows[name, row["method"]] = row
    return rows


def updates(study: str, method: str) -> np.ndarray:
    """Updates to the goal, by seed; a run that never reaches it counts with all its updates."""
    return np.array([x or BUDGET for x in learned()[study, method]["updates"]["by_seed"]])


def sooner(group: str, one: str = "E4", other: str = "E0", study: str = "umbrella") -> dict:
    """Updates to the goal of one estimator minus those of another, paired by seed."""
    return t_interval(
        (updates(study, f"{group} {one}") - updates(study, f"{group} {other}")).tolist()
    )


def times(study: str, one: str, other: str, score: float = 0.8, window: int = 3) -> str:
    """Updates of one method over those of another until a mean score, as text."""
    return say(ratio_of_updates(stored(study), [one, other], score, window), ".2f", 1)


def turned() -> dict:
    """MA-PPO − PPO, in updates to the goal: with a critic that predicts the score, minus with one that cannot."""
    study = "critic_confirm"
    gap = {
        c: updates(study, f"{c} MA-PPO") - updates(study, f"{c} PPO") for c in ("blind", "seeing")
    }
    return t_interval((gap["seeing"] - gap["blind"]).tolist())


def norm_change(key: str) -> dict:
    """log of MA-PPO's mean over training by PPO's, paired by seed: below 0 if it is smaller."""
    runs = by_method(stored("main"))
    means = [
        [np.mean([row[key] for row in runs[x][s]["curve"]]) for s in sorted(runs["PPO"])]
        for x in ("MA-PPO", "PPO")
    ]
    return t_interval(np.log(np.divide(*means)).tolist())


def cost() -> dict:
    """Processor time of an update of MA-PPO over that of PPO."""
    record = json.loads(shipped("results/benchmark_update.json").read_text(encoding="utf-8"))
    return record["cells"]["a/b"]["ratio"]["cpu"]


# The overview


class Measure(NamedTuple):
    """A number with its interval, and the paper's claim about it."""

    what: str
    value: Mapping
    sign: int  # 1: above `beside`, −1: below
    form: str = "+.2f"
    size: float | None = None  # the claimed one, on our scale
    beside: float = 0


@cache
def measures() -> dict[str, Measure]:
    """Claims other than differences of final scores, by their names in `paper.yaml`."""
    rows = {row["method"]: row for row in study_table(stored("main"))}
    ours, theirs = (np.array(rows[name]["updates"]["by_seed"]) for name in ("MA-PPO", "PPO"))
    won = {
        s: crossed_interval(wins("main", "MA-PPO", "PPO", s) - 0.5)._asdict()
        for s in ("rm_score", "gold")
    }
    kappas = [agreement("MA-PPO", "PPO", [seed])["kappa"]["mean"] for seed in rows["PPO"]["seeds"]]
    tails = crossed_interval(bad("MA-PPO") - bad("PPO"))._asdict()
    sweep = learned()["n_sweep", "n=3"]["updates_difference"]
    sooner_by, claimed = t_interval((ours - theirs).tolist()), theirs.mean() / 1.7 - theirs.mean()
    people = {row["judge"]: row for row in with_a_person()}
    steps = ratio_of_updates(stored("steps_confirm"), ["PPO", "MA-PPO"], 0.6, 5)
    values = {
        "speed": Measure("updates to PPO's score", sooner_by, -1, "+.1f", claimed),
        "far": Measure("updates, umbrella, L = 128", sooner("L128 first"), -1, "+.1f"),
        "wins RM": Measure("win rate by RM − 50 %", won["rm_score"], 1, "+.0%", 0.28),
        "wins gold": Measure("win rate by gold − 50 %", won["gold"], 1, "+.0%", 0.24),
        "tail": Measure("answers below PPO's lowest 5 %", tails, -1, "+.1%"),
        "sweep": Measure("updates, n = 3 − n = 1", sweep, -1, "+.1f"),
        "turned": Measure("updates, difference of differences", turned(), 1, "+.1f"),
        "judges": Measure("κ of RM and gold, over seeds", t_interval(kappas), 1),
        "people": Measure(
            "κ of GPT-3.5 and people, PandaLM's pairs", people["GPT-3.5"]["kappa"], 1
        ),
        "arithmetic": Measure("steps_confirm, updates, PPO / MA-PPO", steps, 1, ".2f", beside=1),
    }
    keys = ("advantage_norm", "advantage_rms", "q_norm", "q_rms")
    return values | {key: Measure("log ratio to PPO", norm_change(key), -1) for key in keys}


def evidence(what: str) -> tuple[str, str]:
    """Counterpart and verdict of a claim (see the module's first lines)."""
    if what.startswith(NOT_COMPARABLE):
        return evidence(what.removeprefix(NOT_COMPARABLE))[0], NOT_COMPARABLE.rstrip(": ")
    if what.startswith(OTHER_ANSWERS):
        text, words = evidence(what.removeprefix(OTHER_ANSWERS))
        return text, f"{words} ({OTHER_ANSWERS.rstrip(': ')})"
    if what in measures():
        name, value, sign, form, size, beside = measures()[what]
        return f"{name}: {say(value, form, beside)}", verdict(value, sign, size, beside)
    study, _, pair = what.partition(": ")
    if not pair:
        return what, "not measured"
    pair, _, score = pair.partition(", ")
    one, relation, other = pair.replace(" > ", "|>|").replace(" < ", "|<|").split("|")
    value = compare(study, one, other, score or "rm_score")
    name = typeset(f"{study}, {one} − {other}{f' ({score})' * bool(score)}")
    return f"{name}: {say(value)}", verdict(value, 1 - 2 * (relation == "<"))


@cache
def _texts() -> dict:
    return yaml.safe_load((files(__package__) / "paper.yaml").read_text(encoding="utf-8"))


def claims_table(group: str) -> str:
    """The claims of a group of `paper.yaml`, such as "norms", with counterparts and verdicts, as a Markdown table."""
    heads = {
        "item": "paper",
        "claim": "claim",
        "here": "counterpart here",
        "verdict": "verdict",
        "in": "section",
    }
    return table(overview(group), heads)


def overview(group: str) -> list[dict]:
    """Rows of a group of claims: item, claim, here, verdict, and a link to the section."""
    rows, sections = [], _texts()["sections"]
    for item, claim, what, section in _texts()["claims"][group]:
        here, words = evidence(what)
        place = f"{section} · {sections[section]}".replace(" ", "-")
        rows.append(
            {
                "item": item,
                "claim": claim,
                "here": here,
                "verdict": words,
                "in": f"[{section}](#{place})",
            }
        )
    return rows


def studies_table() -> str:
    """The studies that are stored: what each asks, its runs, methods and seeds, and the day of its first run."""
    rows = []
    for name, question in _texts()["studies"].items():
        runs = stored(name)
        days = [run["environment"]["date"][:10] for run in runs]
        row = {
            "study": f"`{name}`",
            "asks": question,
            "runs": len(runs),
            "date": min(days, default="not measured yet"),
        }
        rows.append(row | {key: len({run[key] for run in runs}) for key in ("method", "seed")})
    heads = {"study": "study", "asks": "asks", "runs": "runs", "method": "methods", "seed": "seeds"}
    return table(rows, heads | {"date": "first run"})
