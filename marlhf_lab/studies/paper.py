"""The paper's claims beside the stored results of this project: differences, verdicts, and the overview of elective 15.

`paper.yaml` has the claims, each with its counterpart here. A counterpart is

- the name of one of `measures`;
- "study: one > other" (or "<"): the difference of two methods' final RM scores; of gold scores with ", gold" after it;
- "-" if nothing here can test the claim;
- one of these after "not comparable: ", if the paper had another kind of judge, or after "other answers: ", if it was
  measured on answers of other models than ours.
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
from marlhf_lab.figures.temperature import temperature_record
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
# studies in which all methods are timed to the same score
TIMED = ("umbrella", "umbrella_seeing", "umbrella_noise", "n_sweep", "critic_confirm")
BUDGET = 30  # updates of a run in the studies TIMED: so many count if it never reaches the score
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
    # A hyphen before a digit is a sign, unless a letter, a digit or a hyphen stands before it ("2024-05").
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text).replace("n=inf", "n=∞")


def table(rows: Sequence[Mapping], columns: Mapping[str, str]) -> str:
    """The rows as a Markdown table for a lesson."""
    return typeset(scores.table(rows, columns))


def say(value: Mapping | None, form: str = "+.2f", beside: float = 0) -> str:
    """A mean with its interval as text, "-" for None; `beside`: the number that means no difference, 1 for a ratio."""
    return "-" if value is None else typeset(interval(value, form, beside))


def verdict(
    value: Mapping | None, sign: int = 1, size: float | None = None, beside: float = 0
) -> str:
    """Compare an interval with the claim that a number is above `beside`, or with sign −1 below it.

    value: low and high of the interval; None if nothing was measured.
    size: the claimed distance from `beside`, below 0 with sign −1; None if the claim names none.
    """
    if value is None:
        return "not measured"
    # Turned so that the claim says "above 0". With sign −1 the lower end becomes the higher one, so they are sorted.
    low, high = sorted(sign * (value[end] - beside) for end in ("low", "high"))
    if low > 0:
        words = "agrees"
    elif high < 0:
        words = "contradicts"
    else:
        words = "no difference seen"
    if size is not None and high < sign * size:
        words += "; the claimed size is excluded"
    return words


# Final scores


def gaps(study: str, one: str, other: str, score: str = "rm_score") -> np.ndarray | None:
    """Differences of two methods in a final score, [seeds, prompts]; None if one of them or the score is not stored."""
    results = stored(study)
    if not results:
        return None
    runs = by_method(results)
    seeds = sorted(set(runs.get(one, ())) & set(runs.get(other, ())))
    if not seeds or score not in runs[one][seeds[0]]["final"]:
        return None
    differences = []
    for seed in seeds:
        ours = runs[one][seed]["final"][score]
        theirs = runs[other][seed]["final"][score]
        differences.append(np.subtract(ours, theirs))
    return np.array(differences)


def compare(study: str, one: str, other: str, score: str = "rm_score") -> dict | None:
    """The mean difference with its interval for other seeds and prompts; None if it is not measured."""
    value = gaps(study, one, other, score)
    return None if value is None else crossed_interval(value)._asdict()


def wins(study: str, one: str, other: str, score: str) -> np.ndarray:
    """[seeds, prompts]: 1 if the score of the method `one` is higher, ½ for a tie, 0 if that of `other` is higher."""
    return (np.sign(gaps(study, one, other, score)) + 1) / 2


def bad(method: str, of: str = "PPO") -> np.ndarray:
    """[seeds, prompts]: 1 if an answer of the method in `main` is among bad ones, else 0.

    Bad is an RM score below the 5 % quantile of the scores of the method `of`, with the same seed.
    """
    runs = by_method(stored("main"))
    is_bad = []
    for seed, run in sorted(runs[of].items()):
        lowest = np.quantile(run["final"]["rm_score"], 0.05)
        is_bad.append(np.less(runs[method][seed]["final"]["rm_score"], lowest))
    return np.array(is_bad, dtype=float)


# Two judges: the RM score and the gold score in `main`


def judged(one: str, other: str, score: str, seeds: list[int] | None = None) -> dict:
    """Verdicts of a score on pairs of answers, one of each method to the same prompt: number of the pair -> verdict.

    The pairs are those of all prompts of these seeds of `main`; without `seeds`, of all its seeds.
    """
    runs = by_method(stored("main"))
    seeds = seeds or sorted(runs["PPO"])
    first, second = (
        np.concatenate([runs[method][seed]["final"][score] for seed in seeds])
        for method in (one, other)
    )
    return dict(enumerate(verdicts_of_scores(first, second)))


def agreement(one: str, other: str, seeds: list[int] | None = None) -> dict:
    """How far RM and gold score agree: a row of `agreement_table`, over the pairs in which neither has a tie."""
    rm = judged(one, other, "rm_score", seeds)
    gold = judged(one, other, "gold", seeds)
    decided = [pair for pair in rm if "tie" not in (rm[pair], gold[pair])]
    raters = {
        "RM": {pair: rm[pair] for pair in decided},
        "gold": {pair: gold[pair] for pair in decided},
    }
    return agreement_table(raters)[0]


# Speed and norms


@cache
def learned() -> dict[tuple[str, str], dict]:
    """(study, method) -> its row of `learning_table`, in the studies with one goal for all methods."""
    rows = {}
    for name in TIMED:
        study = load_study(name)
        groups = study.figures or {"": list(study.methods)}  # without groups, all methods are one
        for row in learning_table(groups, stored(name), study.threshold):
            rows[name, row["method"]] = row
    return rows


def updates(study: str, method: str) -> np.ndarray:
    """[seeds]: updates to the goal; a run that never reaches it counts with all its updates."""
    by_seed = learned()[study, method]["updates"]["by_seed"]
    return np.array([count or BUDGET for count in by_seed])  # None: never


def sooner(group: str, one: str = "E4", other: str = "E0", study: str = "umbrella") -> dict:
    """Updates to the goal of one estimator minus those of another, with a t-interval, paired by seed.

    A method of these studies is called by its group, such as "L128 first", and its estimator, such as "E4" (MA-PPO).
    """
    differences = updates(study, f"{group} {one}") - updates(study, f"{group} {other}")
    return t_interval(differences.tolist())


def times(study: str, one: str, other: str, score: float = 0.8, window: int = 3) -> str:
    """Updates of one method over those of another until the mean of `window` scores is `score`, as text."""
    return say(ratio_of_updates(stored(study), [one, other], score, window), ".2f", 1)


def turned() -> dict:
    """A difference of differences: MA-PPO − PPO, in updates to the goal, with a seeing critic minus with a blind one.

    A blind critic cannot predict the score, a seeing one can.
    """
    study = "critic_confirm"
    gap = {}
    for critic in ("blind", "seeing"):
        gap[critic] = updates(study, f"{critic} MA-PPO") - updates(study, f"{critic} PPO")
    return t_interval((gap["seeing"] - gap["blind"]).tolist())


def norm_change(key: str) -> dict:
    """log(MA-PPO / PPO) of a metric's mean over training, paired by seed: below 0 if MA-PPO's is smaller."""
    runs = by_method(stored("main"))
    logs = []
    for seed in sorted(runs["PPO"]):
        ours, theirs = (
            np.mean([row[key] for row in runs[method][seed]["curve"]])
            for method in ("MA-PPO", "PPO")
        )
        logs.append(float(np.log(ours / theirs)))
    return t_interval(logs)


def cost() -> dict:
    """Processor time of an update of MA-PPO over that of PPO, as the benchmark `update` has measured it."""
    record = json.loads(shipped("results/benchmark_update.json").read_text(encoding="utf-8"))
    return record["cells"]["a/b"]["ratio"]["cpu"]


# The overview


class Measure(NamedTuple):
    """A number with its interval, and the paper's claim about it."""

    what: str
    value: Mapping
    sign: int  # 1: above `beside`, −1: below
    form: str = "+.2f"
    size: float | None = None  # the claimed one, on our scale; None: the claim has none
    beside: float = 0


@cache
def measures() -> dict[str, Measure]:
    """Counterparts other than differences of final scores, by their names in `paper.yaml`."""
    # 1. Speed: updates of MA-PPO to PPO's final score, minus PPO's own; the paper says 1.7 times faster, so `claimed`
    #    is how much less than PPO's number a 1.7th of it is.
    main = {row["method"]: row for row in study_table(stored("main"))}
    ours, theirs = (np.array(main[name]["updates"]["by_seed"]) for name in ("MA-PPO", "PPO"))
    sooner_by = t_interval((ours - theirs).tolist())
    claimed = theirs.mean() / 1.7 - theirs.mean()
    steps = ratio_of_updates(stored("steps_confirm"), ["PPO", "MA-PPO"], threshold=0.6, window=5)
    sweep = learned()["n_sweep", "n=3"]["updates_difference"]
    # 2. Answers: win rates above 50 %, bad ones, and how far two judges agree. The paper's win rates are 78 and 74 %.
    won = {}
    for score in ("rm_score", "gold"):
        won[score] = crossed_interval(wins("main", "MA-PPO", "PPO", score) - 0.5)._asdict()
    tails = crossed_interval(bad("MA-PPO") - bad("PPO"))._asdict()
    kappas = [agreement("MA-PPO", "PPO", [seed])["kappa"]["mean"] for seed in main["PPO"]["seeds"]]
    people = {row["judge"]: row for row in with_a_person()}
    kappa_of_people = people["GPT-3.5"]["kappa"]
    found = {
        "speed": Measure("updates to PPO's score", sooner_by, -1, "+.1f", claimed),
        "far": Measure("updates, umbrella, L = 128", sooner("L128 first"), -1, "+.1f"),
        "wins RM": Measure("win rate by RM − 50 %", won["rm_score"], 1, "+.0%", 0.28),
        "wins gold": Measure("win rate by gold − 50 %", won["gold"], 1, "+.0%", 0.24),
        "tail": Measure("answers below PPO's lowest 5 %", tails, -1, "+.1%"),
        "sweep": Measure("updates, n = 3 − n = 1", sweep, -1, "+.1f"),
        "turned": Measure("updates, difference of differences", turned(), 1, "+.1f"),
        "judges": Measure("κ of RM and gold, over seeds", t_interval(kappas), 1),
        "people": Measure("κ of GPT-3.5 and people, PandaLM's pairs", kappa_of_people, 1),
        "arithmetic": Measure("steps_confirm, updates, PPO / MA-PPO", steps, 1, ".2f", beside=1),
    }
    # 3. Robustness: how MA-PPO's score changes from the temperature 0.8 to 1.0, beside PPO's change.
    hotter = temperature_record()["found"]["contrasts"]["MA-PPO - PPO, 0.8 to 1.0"]["rm_score"]
    found["temperature"] = Measure("RM score, change from 0.8 to 1.0", hotter, 1, "+.3f")
    # 4. Norms of advantages and returns.
    for key in ("advantage_norm", "advantage_rms", "q_norm", "q_rms"):
        found[key] = Measure("log ratio to PPO", norm_change(key), -1)
    return found


def evidence(what: str) -> tuple[str, str]:
    """Counterpart of a claim, with its number, and verdict; `what` is written as the module's first lines say."""
    # 1. A remark before the counterpart: "not comparable" replaces its verdict, "other answers" is added to it.
    if what.startswith(NOT_COMPARABLE):
        text, _ = evidence(what.removeprefix(NOT_COMPARABLE))
        return text, NOT_COMPARABLE.rstrip(": ")
    if what.startswith(OTHER_ANSWERS):
        text, words = evidence(what.removeprefix(OTHER_ANSWERS))
        return text, f"{words} ({OTHER_ANSWERS.rstrip(': ')})"
    # 2. The name of a measure, or "-".
    if what in measures():
        found = measures()[what]
        text = f"{found.what}: {say(found.value, found.form, found.beside)}"
        return text, verdict(found.value, found.sign, found.size, found.beside)
    study, _, comparison = what.partition(": ")
    if not comparison:
        return what, "not measured"
    # 3. "study: one > other, score". "<" claims that the difference is below 0.
    pair, _, score = comparison.partition(", ")
    sign = 1 if " > " in pair else -1
    one, other = pair.split(" > " if sign == 1 else " < ")
    value = compare(study, one, other, score or "rm_score")
    name = f"{study}, {one} − {other}"
    if score:
        name += f" ({score})"
    return f"{typeset(name)}: {say(value)}", verdict(value, sign)


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
    texts = _texts()
    rows = []
    for item, claim, what, section in texts["claims"][group]:
        here, words = evidence(what)
        title = texts["sections"][section]
        anchor = f"{section} · {title}".replace(
            " ", "-"
        )  # as notebooks name the place of a heading
        rows.append(
            {
                "item": item,
                "claim": claim,
                "here": here,
                "verdict": words,
                "in": f"[{section}](#{anchor})",
            }
        )
    return rows


def studies_table() -> str:
    """A table of the studies: what each asks, its stored runs, methods and seeds, and the day of its first run."""
    rows = []
    for name, question in _texts()["studies"].items():
        runs = stored(name)
        days = [run["environment"]["date"][:10] for run in runs]
        rows.append(
            {
                "study": f"`{name}`",
                "asks": question,
                "runs": len(runs),
                "methods": len({run["method"] for run in runs}),
                "seeds": len({run["seed"] for run in runs}),
                "date": min(days, default="not measured yet"),
            }
        )
    names = ("study", "asks", "runs", "methods", "seeds")
    return table(rows, {name: name for name in names} | {"date": "first run"})
