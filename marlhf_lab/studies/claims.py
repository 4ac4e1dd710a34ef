"""Numbers that no table has, from the stored results; `docs/results.md` has some: `python -m ...studies.claims`.

The explained variances of `critic_tries` are primary outcomes; the ratio of `tuned_steps` to 0.6 and the noise of
`critic_head` in the first five updates were chosen before the first run. All others are exploratory.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lab.credit.gradient_signal import ratio_of_signals
from marlhf_lab.figures.gradient_signal import gradient_record
from marlhf_lab.studies.contrasts import (
    curve_of,
    ratio_of_updates,
    ratio_to_final_score,
    updates_to,
)
from marlhf_lab.studies.equal_kl import difference_at_kl
from marlhf_lab.studies.mean_reward import difference_of_means, interaction, means_of
from marlhf_lab.studies.results import EXPLAINED, by_method, stored_results, t_interval, t_quantile
from marlhf_lab.studies.study import STUDIES, load_study
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval

RATIOS = [  # study, methods (see `ratio_of_updates`), threshold, window
    *(("steps", ["PPO", method], 0.6, 5) for method in ("MA-PPO", "PPO lam^(1/5)")),
    ("n_sweep", ["n=2", "n=inf"], 0.8, 3),
    ("umbrella", ["L128 first E4", "L128 first E1"], 0.8, 3),
    ("tuned_steps", ["PPO", "MA-PPO"], 0.6, 5),
    *(("steps_confirm", ["MA-PPO", long], 0.6, 5) for long in ("PPO lam^(1/5)", "PPO lam=1")),
]


NEVER = [  # name, study, method: how many runs never reach the score of 0.8, so that a ratio is only a bound
    ("umbrella: PPO runs that never arrive, 128 tokens", "umbrella", "L128 first E0"),
    ("critic_confirm: PPO runs that never arrive, new critic", "critic_confirm", "blind PPO"),
    (
        "critic_confirm: MA-PPO runs that never arrive, critic trained first",
        "critic_confirm",
        "seeing MA-PPO",
    ),
    (
        "lam_far: PPO-0.99 runs that never arrive, critic trained first",
        "lam_far",
        "trained 0.99",
    ),
]


def claims() -> dict[str, str]:
    """Return name of a number -> the number with its 95 % interval, as text."""
    texts = {}
    for study, methods, threshold, window in RATIOS:
        value = ratio_of_updates(stored_results(study), methods, threshold, window)
        texts[f"{study}: {' / '.join(methods)} to {threshold:g}, window {window}"] = interval(
            value, beside=1
        )
    for study in ("main", "summaries", "tuned_steps"):
        ratio = ratio_to_final_score(stored_results(study), ["PPO", "MA-PPO"])
        texts[f"{study}: PPO / MA-PPO to PPO's final score"] = interval(ratio, beside=1)
    for study in ("tuned_steps", "steps_confirm"):
        value = _between(stored_results(study), "gold_mean", 51, 60)
        texts[f"{study}: MA-PPO - PPO, accuracy in updates 51 to 60"] = interval(value)
    for method, runs in by_method(stored_results("critic_tries")).items():
        learning = [[row[EXPLAINED] for row in curve_of(run)] for run in runs.values()]
        texts[f"critic_tries: {method}, explained variance"] = interval(
            t_interval([*map(np.mean, learning)])
        )
    runs = [
        run
        for name in ("kl_price", "kl_price_high")
        for run in stored_results(name)
        if run["method"] != "SFT"
    ]
    for score in ("rm_score", "gold"):
        texts[f"kl_price: MA-PPO - PPO at equal KL, {score}"] = interval(
            at_equal_kl(runs, score, degree=2), "+.3f"
        )
    distance = {
        method: np.mean([np.mean(run["final"]["kl"]) for run in of_seed.values()])
        for method, of_seed in by_method(stored_results("kl_price")).items()
    }
    texts["kl_price: KL of MA-PPO with the mean over that of PPO, both at 0.05"] = (
        f"{distance['MA-PPO mean 0.05'] / distance['PPO 0.05']:.1f}"
    )
    noise = means_of(stored_results("critic_head"), (1, 5), "value_noise")
    less = [noise["blind PPO"][seed] - value for seed, value in noise["blind PPO, zero"].items()]
    texts["critic_head: less noise in the values of a head of zero, updates 1 to 5"] = interval(
        t_interval(less), ".3f"
    )
    texts |= _equal_kl() | _near() | _after_the_price() | _by_the_rules() | _first_gradients()
    return texts | _critics() | _trained_critic() | _signal_apart()


def _equal_kl() -> dict[str, str]:
    """Differences at equal KL: in `sentiment_settle`, and in `turns` of the score that was trained on."""
    rewards = [
        run
        | {
            "curve": [
                {key: x for key, x in row.items() if key != "gold_mean"} for row in run["curve"]
            ]
        }
        for run in stored_results("turns")
    ]
    settled = difference_at_kl(stored_results("sentiment_settle"), "PPO lam^(1/5)", "PPO")
    turns = difference_at_kl(rewards, "MA-PPO turn", "PPO")
    return {
        "sentiment_settle: PPO lam^(1/5) - PPO at equal KL": interval(settled, "+.3f"),
        "turns: turns - PPO at equal KL": interval(turns, "+.3f"),
    }


def _near() -> dict[str, str]:
    """What `sentiment_near` shows beside its outcomes, and at equal KL the difference between it and its far words."""
    results, texts = stored_results("sentiment_near"), {}
    near, far = (
        difference_at_kl(found, "MA-PPO", "PPO")
        for found in (results, stored_results("sentiment_settle"))
    )
    texts["sentiment_near: far - near at equal KL"] = interval(
        interaction(far["by_seed"], near["by_seed"]), "+.3f"
    )
    value = _between(results, "score_mean", 1, 15)
    texts["sentiment_near: MA-PPO - PPO, reward in updates 1 to 15"] = interval(value, "+.3f")
    signals = gradient_record("benchmark_gradient_signal_last")["found"]
    for critic in ("constant", "zero, trained"):
        value = signals[critic]["over_PPO"]["MA-PPO"]
        texts[f"gradient_signal, last words paid: MA-PPO / PPO, {critic}"] = interval(value, ".2f")
    return texts


def _after_the_price() -> dict[str, str]:
    """Reward − β·KL, PPO's objective, in `sentiment_settle`: differences, and each method against its first update."""
    settled, (first, last) = (
        stored_results("sentiment_settle"),
        load_study("sentiment_settle").mean_updates,
    )
    net: dict[str, dict] = {}
    for method, of_seed in by_method(settled).items():
        rows = {
            seed: [row["score_mean"] - 0.05 * row["kl_k1"] for row in run["curve"]]
            for seed, run in of_seed.items()
        }
        net[method] = {seed: (np.mean(row[first - 1 : last]), row[0]) for seed, row in rows.items()}
    texts = {}
    for method in net:
        after = [late - early for late, early in net[method].values()]
        texts[f"sentiment_settle: {method}, reward - 0.05 KL, against its first update"] = interval(
            t_interval(after), "+.3f"
        )
        if method != "PPO":
            gaps = [net[method][seed][0] - net["PPO"][seed][0] for seed in net["PPO"]]
            texts[f"sentiment_settle: {method} - PPO, reward - 0.05 KL"] = interval(
                t_interval(gaps), "+.3f"
            )
    distance = {
        method: np.mean([*by_seed.values()])
        for method, by_seed in means_of(settled, (first, last), "kl_k1").items()
    }
    for method in ("MA-PPO", "PPO lam^(1/5)"):
        texts[f"sentiment_settle: KL of {method} over that of PPO"] = (
            f"{distance[method] / distance['PPO']:.1f}"
        )
    kl = [row["kl_k1"] for run in settled for row in run["curve"]]
    texts["sentiment_settle: share of batches with a KL below -0.5"] = (
        f"{100 * np.mean(np.array(kl) < -0.5):.1f} %"
    )
    return texts


def _by_the_rules() -> dict[str, str]:
    """Without the seeds that ran out of order, on two kinds of machine, or before a first look at the results."""
    texts, (turns, near) = {}, (load_study(name) for name in ("turns", "sentiment_near"))
    kept = [run for run in stored_results("turns") if run["seed"] not in (802, 804, 813)]
    value = difference_of_means(kept, ["MA-PPO turn", "PPO"], turns.mean_updates)
    texts["turns, without 802, 804, 813: turns - PPO"] = interval(value, "+.4f")
    kept = [run for run in stored_results("sentiment_near") if run["seed"] != 843]
    value = difference_of_means(kept, ["MA-PPO", "PPO"], near.mean_updates)
    texts["sentiment_near, without 843: MA-PPO - PPO"] = interval(value, "+.3f")
    far = difference_of_means(
        stored_results("sentiment_settle"), ["MA-PPO", "PPO"], near.mean_updates
    )
    value = interaction(far["by_seed"], value["by_seed"])
    texts["sentiment_near, without 843: far - near"] = interval(value, "+.3f")
    kept = [run for run in stored_results("critic_head") if run["seed"] != 866]
    value = ratio_of_updates(kept, ["seeing MA-PPO, zero", "seeing MA-PPO"], 0.8, 3)
    texts["critic_head, without 866: seeing MA-PPO, zero / normal"] = interval(value, ".3f")
    kept = [run for run in stored_results("umbrella_start") if run["seed"] > 917]
    for ours, theirs in (("S", "M"), ("M", "L")):
        value = ratio_of_updates(kept, [ours, theirs], 0.8, 3)
        texts[f"umbrella_start, the twelve last seeds: {ours} / {theirs}"] = interval(
            value, ".3f", beside=1
        )
    return texts


def _first_gradients() -> dict[str, str]:
    """MA-PPO's signal over that of λ^(1/5) and of the value at the start, in the record of `gradient_signal`."""
    record = gradient_record("benchmark_gradient_signal_afterwards")
    rows = record["cells"]["projections"]["zero, trained"]
    return {
        f"gradient_signal: MA-PPO / {name}": interval(
            ratio_of_signals(rows, "MA-PPO", name)._asdict(), ".2f"
        )
        for name in ("PPO lam^(1/5)", "MA-PPO, first value")
    }


def _critics() -> dict[str, str]:
    """How well the critics of all stored runs predict the score: counts of runs, by a warm-up and by study.

    A run's number is the mean of the score's explained variance over the first ten updates in which its policy learned
    (a critic's warm-up comes before them). Runs without a critic have none, and are not counted.
    """
    found: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for folder in sorted(shipped("results").iterdir()):
        if not (STUDIES / f"{folder.name}.yaml").is_file():
            continue
        for run in stored_results(folder.name):
            values = [
                row[EXPLAINED] for row in curve_of(run)[:10] if row.get(EXPLAINED) is not None
            ]
            if values:
                trained_first = run["options"].get("critic_warmup", 0) > 0
                found[trained_first].setdefault(folder.name, []).append(float(np.mean(values)))
    new = np.concatenate([*found[False].values()])
    trained = np.concatenate([*found[True].values()])
    above = {study: sum(x > 0.2 for x in values) for study, values in found[True].items()}
    umbrella = [
        study for study in above if load_study(study).shared.get("dataset") == "tiny-umbrella"
    ]
    start = found[True]["umbrella_start"]
    summaries = np.concatenate(
        [found[True][study] for study in ("summaries", "summaries_schedule", "critic_tries")]
    )
    arithmetic = np.concatenate([found[True][study] for study in ("steps", "steps_schedule")])
    return {
        "critics: runs without a warm-up": f"{len(new):,}",
        "critics: runs without a warm-up above 0.05": str(int((new > 0.05).sum())),
        "critics: largest without a warm-up": f"{new.max():.2f}",
        "critics: runs with a warm-up": f"{len(trained):,}",
        "critics: runs with a warm-up above 0.2": str(sum(above.values())),
        "critics: of these in umbrella": str(sum(above[study] for study in umbrella)),
        "critics: median of umbrella_start": f"{np.median(start):.1f}",
        "critics: runs on summaries with a warm-up": str(len(summaries)),
        "critics: of these below 0": str(int((summaries < 0).sum())),
        "critics: arithmetic with a warm-up, lowest": f"{arithmetic.min():.2f}",
        "critics: arithmetic with a warm-up, highest": f"{arithmetic.max():.2f}",
    }


def _trained_critic() -> dict[str, str]:
    """What a longer λ and macro actions do with a critic that was trained first, and arithmetic's critic at the end."""
    texts = {}
    for name, study, method in NEVER:
        runs = by_method(stored_results(study))[method].values()
        never = sum(updates_to(run, 0.8, 3) is None for run in runs)
        texts[name] = f"{never} of {len(runs)}"
    for study, ours, theirs in (
        ("noise_confirm", "E1", "E0"),
        ("umbrella_start", "L", "T"),
        ("umbrella_start", "M", "T"),
    ):
        value = ratio_of_updates(stored_results(study), [ours, theirs], 0.8, 3)
        texts[f"{study}: {ours} / {theirs}"] = interval(value, beside=1)
    for method, runs in by_method(stored_results("steps_confirm")).items():
        last = [np.mean([row[EXPLAINED] for row in curve_of(run)[-10:]]) for run in runs.values()]
        texts[f"steps_confirm: {method}, explained variance of the last ten updates"] = interval(
            t_interval(last)
        )
    return texts


def _signal_apart() -> dict[str, str]:
    """Outcomes of `signal_apart`: signals less those of the placebo, by setting and pair of estimators."""
    record = json.loads(shipped("results/benchmark_signal_apart.json").read_text(encoding="utf-8"))
    texts = {}
    for setting, found in record["found"].items():
        for pair, value in found["contrasts"].items():
            texts[f"signal_apart: {setting}, {pair}"] = interval(value, "+.2f")
    return texts


def _between(results: Sequence[Mapping], metric: str, first: int, last: int) -> dict:
    """MA-PPO - PPO in the mean of a metric of the training batches of these updates, with its 95 % t-interval."""
    runs = by_method(results)
    means = [
        [
            np.mean([row[metric] for row in runs[name][seed]["curve"][first - 1 : last]])
            for seed in sorted(runs[name])
        ]
        for name in ("MA-PPO", "PPO")
    ]
    return t_interval(np.subtract(*means).tolist())


def at_equal_kl(results: Sequence[Mapping], score: str, degree: int) -> dict:
    """What MA-PPO adds to a final score at equal final KL, with its 95 % interval.

    Least squares over all runs: an effect of each seed, the powers of log KL up to `degree`, and one of MA-PPO.
    """
    kl = np.log([np.mean(r["final"]["kl"]) for r in results])
    seeds = np.array(
        [[r["seed"] == seed for seed in sorted({r["seed"] for r in results})] for r in results]
    )
    ours = np.array([r["method"].startswith("MA-PPO") for r in results])
    design = np.column_stack([ours, *(kl**power for power in range(1, degree + 1)), seeds]).astype(
        float
    )
    scores = np.array([np.mean(r["final"][score]) for r in results])
    fit, squares, *_ = np.linalg.lstsq(design, scores, rcond=None)
    freedom = len(scores) - design.shape[1]
    half = (
        t_quantile(freedom) * (squares[0] / freedom * np.linalg.inv(design.T @ design)[0, 0]) ** 0.5
    )
    return {"mean": fit[0], "low": fit[0] - half, "high": fit[0] + half}


if __name__ == "__main__":
    print(*(f"{name}: {text}" for name, text in claims().items()), sep="\n")
