"""Two or more sets of stored answers to the same prompts, side by side: `marlhf compare`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from marlhf_lite.evaluation.responses import read_responses
from marlhf_lite.evaluation.scores import (
    KLS,
    SCORES,
    check_same_prompts,
    name_temperatures,
    score_matrix,
    summarise,
    table,
)
from marlhf_lite.evaluation.statistics import wilson
from marlhf_lite.utils.errors import InputError

COLUMNS = "method prompts samples rm_score rm_score_wins gold gold_wins kl tokens ended".split()


def compare(paths: Sequence[str | Path], baseline: str = "") -> list[dict]:
    """Compare all methods in these files or folders with one of them, paired by prompt.

    A method that is in several gets the name "path: method". Several samples of a prompt count by their mean.

    Args:
        paths: two or more, or one with several methods; see `read_responses`.
        baseline: a method; by default SFT, else the first.

    Returns:
        For each method the dict of `summarise`, with `baseline`, `samples` of each prompt and, except for the baseline,
        <score>_wins: the share of prompts at which the method scores higher, ties as half (Wilson interval).
        No KL if the answers name different SFT models: such KLs cannot be compared.

    Raises:
        InputError: fewer than two methods, different prompts, scores of different reward models or rewards, no such
            baseline, or as `read_responses`.
    """
    entries = _entries(list(dict.fromkeys(map(str, paths))))
    if len(entries) < 2:
        raise InputError(f"compare: one set of answers, {', '.join(entries)}: give two or more")
    if baseline and baseline not in entries:
        raise InputError(f"--baseline {baseline}: no such answers; there are: {', '.join(entries)}")
    base = baseline or ("SFT" if "SFT" in entries else next(iter(entries)))
    for name in entries:
        _check_alike(base, entries[base], name, entries[name])
    # One temperature for all: each entry has a single one, which its name has if there are several.
    rows = pd.concat([rows.assign(method=name, temperature=0.0) for name, rows in entries.items()])
    if len(set().union(*(_scorers(answers, "reference") for answers in entries.values()))) > 1:
        rows = rows.drop(columns=[name for name in KLS if name in rows])
    summary = summarise(rows, base)
    for row in summary:
        mine = entries[row["method"]]
        row |= {"baseline": base, "samples": len(mine) // row["prompts"]}
        row |= {f"{s}_wins": _wins(mine, entries[base], s) for s in SCORES if f"{s}_gain" in row}
    return summary


def comparison_table(summary: Sequence[dict]) -> str:
    """Return a Markdown table; a score is followed by its gain over the baseline with the interval."""
    return table(summary, COLUMNS)


def _entries(paths: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return responses by name: path, method and, if there are several, temperature."""
    entries = {}
    answers = pd.concat([read_responses(path).assign(path=path) for path in paths])
    for (path, method), rows in name_temperatures(answers).groupby(["path", "method"], sort=False):
        entries[path, method] = rows.drop(columns="path")
    count = Counter(method for _, method in entries)
    return {
        method if count[method] == 1 else f"{path}: {method}": rows
        for (path, method), rows in entries.items()
    }


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
