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

    A method that is in several files or folders gets the name "path: method". If a prompt has several samples, their
    mean counts.

    Args:
        paths: two or more, or one with several methods; see `read_responses`.
        baseline: a method, with which each method is compared at the same temperature; or a name with a temperature,
            such as "PPO T=0.8", with which all are compared. By default SFT, or the first method if there is no SFT.

    Returns:
        For each method the dict of `summarise`, with `baseline`, `samples` of each prompt and, except for a baseline,
        <score>_wins: the share of prompts at which the method scores higher, ties as half (Wilson interval).
        If the answers name different SFT models, there is no KL, because such KLs cannot be compared.

    Raises:
        InputError: fewer than two methods, different prompts, scores of different reward models or rewards, no such
            baseline, or as `read_responses`.
    """
    different_paths = list(dict.fromkeys(map(str, paths)))
    answers = _read_all(different_paths)
    # A name is a method, and if there are several temperatures, also has one of them, such as "PPO T=0.8". `entries`
    # has the rows of each name, and `methods` its method.
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
    if len(_scorers(answers, "reference")) > 1:  # KLs to different SFT models
        answers = answers.drop(columns=[name for name in KLS if name in answers])
    summary = summarise(answers, baseline or "SFT")
    for row in summary:
        name = row["method"]
        rows_of_method = entries[name]
        base = baselines[name]
        row |= {"baseline": base, "samples": len(rows_of_method) // row["prompts"]}
        for score in scores_of_summary([row]):
            if f"{score}_gain" in row:  # not of a baseline itself
                row[f"{score}_wins"] = _wins(rows_of_method, entries[base], score)
    return summary


def comparison_table(summary: Sequence[dict]) -> str:
    """Return a Markdown table, in which a score's gain over the baseline follows it, with its interval."""
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
    rows_of_path = {path: read_responses(path) for path in paths}
    paths_with_method: Counter[str] = Counter()
    for rows in rows_of_path.values():
        paths_with_method.update(set(rows["method"]))
    for path, rows in rows_of_path.items():
        new_names = {}
        for name in rows["method"].unique():
            if paths_with_method[name] > 1:
                new_names[name] = f"{path}: {name}"
        rows_of_path[path] = rows.assign(method=rows["method"].replace(new_names))
    return pd.concat(list(rows_of_path.values()), ignore_index=True)


def _check_alike(base: str, ours: pd.DataFrame, name: str, theirs: pd.DataFrame) -> None:
    """Raise `InputError` unless two methods answered the same prompts, and the same models or code scored them.

    `base` and `name` are the methods' names. Answers that do not tell who scored them are accepted.
    """
    check_same_prompts(base, ours, name, theirs)
    for column, scorers in (("rm", "reward models"), ("reward", "rewards")):
        scorers_of_ours = _scorers(ours, column)
        scorers_of_theirs = _scorers(theirs, column)
        names = scorers_of_ours | scorers_of_theirs
        if scorers_of_ours and scorers_of_theirs and len(names) > 1:
            what = f"scored by different {scorers} ({', '.join(sorted(names))})"
            raise InputError(f"{base} and {name}: {what}: evaluate both with the same --{column}")


def _scorers(rows: pd.DataFrame, column: str) -> set[str]:
    """Return the names of the scorers that the rows tell: fingerprints of models, or versions of code.

    The set is empty if the rows do not tell. But gold scores without a name are the data's own, which is a scorer, too.
    """
    names = set()
    if column in rows:
        names = set(rows[column].dropna()) - {""}
    if names:
        return names
    has_gold = column == "reward" and "gold" in rows and rows["gold"].notna().any()
    return {"the data's gold score"} if has_gold else set()


def _wins(rows: pd.DataFrame, base: pd.DataFrame, score: str) -> dict:
    """Return the share of prompts at which `rows` score higher than `base`, ties as half, with Wilson's interval.

    If there are several samples, each sample of `rows` is paired with each one of `base`, and a prompt counts by the
    share of its pairs that `rows` win.
    """
    ours = score_matrix(rows, score)  # [prompts, samples]
    theirs = score_matrix(base, score).loc[ours.index]  # the prompts in the same order
    differences = ours.to_numpy()[:, :, None] - theirs.to_numpy()[:, None, :]
    wins_of_pairs = np.sign(differences) / 2 + 0.5  # 1, 0.5 or 0
    wins_of_prompts = wins_of_pairs.mean((1, 2))
    return wilson(float(wins_of_prompts.sum()), len(wins_of_prompts))._asdict()
