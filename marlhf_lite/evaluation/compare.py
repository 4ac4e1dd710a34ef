"""Two or more sets of stored answers to the same prompts, side by side: `marlhf compare`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from marlhf_lite.evaluation.responses import read_responses
from marlhf_lite.evaluation.scores import (
    KLS,
    check_same_prompts,
    find_baselines,
    name_temperatures,
    score_matrix,
    scores_of_summary,
    summarise,
    table,
)
from marlhf_lite.evaluation.statistics import wilson
from marlhf_lite.utils.errors import InputError


def compare(paths: Sequence[str | Path], baseline: str = "") -> list[dict]:
    """Compare all methods in these files or folders with one of them, paired by prompt.

    A method that is in several gets the name "path: method". Several samples of a prompt count by their mean.

    Args:
        paths: two or more, or one with several methods; see `read_responses`.
        baseline: a method, at each temperature the one of that temperature, or a name such as "PPO T=0.8" for all; by
            default SFT, else the first.

    Returns:
        For each method the dict of `summarise`, with `baseline`, `samples` of each prompt and, except for a baseline,
        <score>_wins: the share of prompts at which the method scores higher, ties as half (Wilson interval).
        No KL if the answers name different SFT models: such KLs cannot be compared.

    Raises:
        InputError: fewer than two methods, different prompts, scores of different reward models or rewards, no such
            baseline, or as `read_responses`.
    """
    answers = _read_all(list(dict.fromkeys(map(str, paths))))
    named = name_temperatures(answers)
    entries = dict(list(named.groupby("method", sort=False)))
    methods = dict(zip(named["method"], answers["method"], strict=True))
    if len(entries) < 2:
        raise InputError(f"compare: one set of answers, {', '.join(entries)}: give two or more")
    if baseline and baseline not in {*entries, *methods.values()}:
        raise InputError(f"--baseline {baseline}: no such answers; there are: {', '.join(entries)}")
    baselines = find_baselines(methods, baseline or "SFT")
    for name, base in baselines.items():
        _check_alike(base, entries[base], name, entries[name])
    if len(_scorers(answers, "reference")) > 1:
        answers = answers.drop(columns=[name for name in KLS if name in answers])
    summary = summarise(answers, baseline or "SFT")
    for row in summary:
        name = row["method"]
        mine, base = entries[name], baselines[name]
        row |= {"baseline": base, "samples": len(mine) // row["prompts"]}
        for score in scores_of_summary([row]):
            if f"{score}_gain" in row:
                row[f"{score}_wins"] = _wins(mine, entries[base], score)
    return summary


def comparison_table(summary: Sequence[dict]) -> str:
    """Return a Markdown table; a score is followed by its gain over the baseline with the interval."""
    scores = []
    for score in scores_of_summary(summary):
        scores += [score, f"{score}_wins"]
    return table(summary, ["method", "prompts", "samples", *scores, "kl", "tokens", "ended"])


def comparison_note(summary: Sequence[dict]) -> str:
    """Return the line below the table: what each method is compared with."""
    bases = list(dict.fromkeys(row["baseline"] for row in summary))
    with_what = bases[0] if len(bases) == 1 else f"{', '.join(bases)}, at the same temperature"
    return f"after scores: gain over {with_what}, paired by prompt [95 % interval]"


def _read_all(paths: Sequence[str]) -> pd.DataFrame:
    """Return the responses of all paths; a method that is in several is called "path: method"."""
    parts = {path: read_responses(path) for path in paths}
    places = Counter()
    for rows in parts.values():
        places.update(set(rows["method"]))
    for path, rows in parts.items():
        names = {name: f"{path}: {name}" for name in rows["method"].unique() if places[name] > 1}
        parts[path] = rows.assign(method=rows["method"].replace(names))
    return pd.concat(list(parts.values()), ignore_index=True)


def _check_alike(base: str, ours: pd.DataFrame, name: str, theirs: pd.DataFrame) -> None:
    check_same_prompts(base, ours, name, theirs)
    for column, scorers in (("rm", "reward models"), ("reward", "rewards")):
        marks = [_scorers(rows, column) for rows in (ours, theirs)]
        if all(marks) and len(names := set.union(*marks)) > 1:
            what = f"scored by different {scorers} ({', '.join(sorted(names))})"
            raise InputError(f"{base} and {name}: {what}: evaluate both with the same --{column}")


def _scorers(rows: pd.DataFrame, column: str) -> set[str]:
    """Return the names of the scorers; unnamed gold scores are the data's own, unnamed RM scores are unknown."""
    names = set(rows[column].dropna()) - {""} if column in rows else set()
    own = column == "reward" and "gold" in rows and rows["gold"].notna().any()
    return names or ({"the data's gold score"} if own else set())


def _wins(rows: pd.DataFrame, base: pd.DataFrame, score: str) -> dict:
    ours, theirs = score_matrix(rows, score), score_matrix(base, score)
    theirs = theirs.loc[ours.index].to_numpy()
    wins = (np.sign(ours.to_numpy()[:, :, None] - theirs[:, None, :]) / 2 + 0.5).mean((1, 2))
    return wilson(float(wins.sum()), len(wins))._asdict()
