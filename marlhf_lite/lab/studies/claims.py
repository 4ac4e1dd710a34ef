"""The numbers of `docs/results.md` that were found afterwards, from the stored results: `python -m ...studies.claims`.

None was a study's primary outcome, so each is exploration, whatever its interval says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lite.evaluation.statistics import final_score, updates_to_reach
from marlhf_lite.lab.studies.contrasts import curve_of, exp, ratio_of_updates, updates_to
from marlhf_lite.lab.studies.results import by_method, crossed_interval, stored_results, student, t_interval
from marlhf_lite.utils.tables import interval

LONG = ("MA-PPO", "MA-PPO lines", "PPO lam^(1/5)", "PPO lam=1")  # methods of `steps` with a long horizon


def claims() -> dict[str, str]:
    """Return name of a number -> the number with its 95 % interval, as text."""
    steps, critic, noise, sweep = map(stored_results, ("steps", "critic", "umbrella_noise", "n_sweep"))
    found = {}
    for share in (0.55, 0.6):
        for method in ("MA-PPO", "PPO lam^(1/5)"):
            found[f"steps, PPO / {method} to {share}"] = ratio_of_updates(steps, ["PPO", method], share, 5)
    found["steps, PPO lam^(1/5) / MA-PPO to 0.6"] = ratio_of_updates(steps, ["PPO lam^(1/5)", "MA-PPO"], 0.6, 5)
    found["critic, blind PPO / MA-PPO"] = ratio_of_updates(critic, ["blind PPO", "blind MA-PPO"], 0.8, 3)
    seeing = ratio_of_updates(critic, ["seeing MA-PPO", "seeing PPO"], 0.8, 3)
    noisy = ratio_of_updates(noise, ["L32 first noise E4", "L32 first noise E0"], 0.8, 3)
    both = t_interval(np.log(seeing["by_seed"] + noisy["by_seed"]).tolist())
    found["critic and umbrella_noise, seeing MA-PPO / PPO"] = exp(both)
    for study in ("main", "summaries"):
        found[f"{study}, PPO / MA-PPO to PPO's final RM score"] = _to_final_score(stored_results(study))
    texts = {name: interval(value) for name, value in found.items()}
    for name, results, methods in (
        (
            "critic, the difference of the differences",
            critic,
            ("seeing MA-PPO", "seeing PPO", "blind MA-PPO", "blind PPO"),
        ),
        ("umbrella_noise, E4 - E3", noise, ("L32 first noise E4", "L32 first noise E3")),
        ("n_sweep, n=2 - n=inf", sweep, ("n=2", "n=inf")),
    ):
        texts[f"{name} in updates"] = interval(_difference_of_updates(results, methods), "+.1f")
    gold = {method: _final(found, "gold") for method, found in by_method(steps).items()}
    long = np.mean([gold[method] for method in LONG], axis=0)
    texts["steps, four of long horizon - PPO"] = interval(crossed_interval(long - gold["PPO"])._asdict(), "+.3f")
    gap = crossed_interval(gold["MA-PPO"] - gold["PPO lam^(1/5)"])._asdict()
    texts["steps, MA-PPO - PPO lam^(1/5)"] = interval(gap, "+.3f")
    for score in ("rm_score", "gold"):
        texts[f"kl_price, MA-PPO - PPO at equal KL in {score}"] = interval(at_equal_kl(score), "+.3f")
    return texts


def _to_final_score(results: Sequence[Mapping]) -> dict:
    """Updates of PPO to its own final score over those of MA-PPO; PPO gets there by construction."""
    runs, logs = by_method(results), []
    for seed, ppo in runs["PPO"].items():
        curves = [[row["rm_score_mean"] for row in run["curve"]] for run in (ppo, runs["MA-PPO"][seed])]
        there = [updates_to_reach(curve, final_score(curves[0])) or len(curve) for curve in curves]
        logs.append(math.log(there[0] / there[1]))
    return exp(t_interval(logs))


def _difference_of_updates(results: Sequence[Mapping], methods: Sequence[str]) -> dict:
    """Of A - B, or of (A - B) - (C - D); never counts with the budget."""
    runs = {method: {r["seed"]: r for r in results if r["method"] == method} for method in methods}
    counts = [[updates_to(run, 0.8, 3) or len(curve_of(run)) for _, run in sorted(runs[m].items())] for m in methods]
    signs = np.array([1, -1, -1, 1][: len(methods)])
    return t_interval((signs @ np.array(counts)).tolist())


def _final(found: Mapping[int, Mapping], score: str) -> np.ndarray:
    """[seeds, prompts]"""
    return np.array([found[seed]["final"][score] for seed in sorted(found)])


def at_equal_kl(score: str) -> dict:
    """What MA-PPO adds to a final score at equal KL, with its 95 % interval, in `kl_price` and `kl_price_high`.

    Least squares over all runs of both: an effect of each seed, log KL and its square, and one of MA-PPO.
    """
    results = [r for name in ("kl_price", "kl_price_high") for r in stored_results(name) if r["method"] != "SFT"]
    kl = np.log([np.mean(r["final"]["kl"]) for r in results])
    seeds = np.array([[r["seed"] == seed for seed in sorted({r["seed"] for r in results})] for r in results])
    ours = np.array([r["method"].startswith("MA-PPO") for r in results])
    design = np.column_stack([ours, kl, kl**2, seeds]).astype(float)
    scores = np.array([np.mean(r["final"][score]) for r in results])
    fit, squares, *_ = np.linalg.lstsq(design, scores, rcond=None)
    freedom = len(scores) - design.shape[1]
    half = student(freedom) * (squares[0] / freedom * np.linalg.inv(design.T @ design)[0, 0]) ** 0.5
    return {"mean": fit[0], "low": fit[0] - half, "high": fit[0] + half}


if __name__ == "__main__":
    print(*(f"{name}: {text}" for name, text in claims().items()), sep="\n")
