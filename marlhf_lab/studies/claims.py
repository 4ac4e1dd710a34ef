"""Numbers that no table has, from the stored results. `docs/results.md` has some of them.

`python -m marlhf_lab.studies.claims` prints all.

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
    ("steps", ["PPO", "MA-PPO"], 0.6, 5),
    ("steps", ["PPO", "PPO lam^(1/5)"], 0.6, 5),
    ("n_sweep", ["n=2", "n=inf"], 0.8, 3),
    ("umbrella", ["L128 first E4", "L128 first E1"], 0.8, 3),
    ("tuned_steps", ["PPO", "MA-PPO"], 0.6, 5),
    ("steps_confirm", ["MA-PPO", "PPO lam^(1/5)"], 0.6, 5),
    ("steps_confirm", ["MA-PPO", "PPO lam=1"], 0.6, 5),
]


# Name of the number, study, method: how many runs never reach the score of 0.8. They count with all their updates, so
# that a ratio of updates is only a bound.
NEVER = [
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
    """Return name of a number -> the number as text, in most cases with its 95 % interval."""
    return (
        _updates()
        | _early_accuracy()
        | _critic_tries()
        | _kl_price()
        | _critic_head()
        | _equal_kl()
        | _near()
        | _after_the_price()
        | _by_the_rules()
        | _first_gradients()
        | _critics()
        | _trained_critic()
        | _signal_apart()
        | _temperature()
        | _averaged_kl()
    )


def _updates() -> dict[str, str]:
    """Ratios of updates: to a threshold, and to PPO's final score."""
    texts = {}
    for study, methods, threshold, window in RATIOS:
        value = ratio_of_updates(stored_results(study), methods, threshold, window)
        name = f"{study}: {' / '.join(methods)} to {threshold:g}, window {window}"
        texts[name] = interval(value, beside=1)
    for study in ("main", "summaries", "tuned_steps"):
        value = ratio_to_final_score(stored_results(study), ["PPO", "MA-PPO"])
        texts[f"{study}: PPO / MA-PPO to PPO's final score"] = interval(value, beside=1)
    return texts


def _early_accuracy() -> dict[str, str]:
    """How many more answers are right with MA-PPO than with PPO in arithmetic, before both reach the same share."""
    texts = {}
    for study in ("tuned_steps", "steps_confirm"):
        value = _between(stored_results(study), "gold_mean", first=51, last=60)
        texts[f"{study}: MA-PPO - PPO, accuracy in updates 51 to 60"] = interval(value)
    return texts


def _critic_tries() -> dict[str, str]:
    """How much of the score's variance the critic explains, for each way to train it; means over updates and seeds."""
    texts = {}
    for method, runs in by_method(stored_results("critic_tries")).items():
        means = [np.mean([row[EXPLAINED] for row in curve_of(run)]) for run in runs.values()]
        value = t_interval(means)
        texts[f"critic_tries: {method}, explained variance"] = interval(value)
    return texts


def _kl_price() -> dict[str, str]:
    """What MA-PPO adds to final scores at equal KL, over all KL coefficients; its KL if KL rewards are averaged."""
    trained = []
    for study in ("kl_price", "kl_price_high"):
        trained += [run for run in stored_results(study) if run["method"] != "SFT"]
    texts = {}
    for score in ("rm_score", "gold"):
        value = at_equal_kl(trained, score, degree=2)
        texts[f"kl_price: MA-PPO - PPO at equal KL, {score}"] = interval(value, "+.3f")
    kl = {}  # method -> its final KL, mean over prompts and seeds
    for method, runs in by_method(stored_results("kl_price")).items():
        kl[method] = np.mean([np.mean(run["final"]["kl"]) for run in runs.values()])
    times = kl["MA-PPO mean 0.05"] / kl["PPO 0.05"]
    name = "kl_price: KL of MA-PPO with the mean over that of PPO, both at 0.05"
    return texts | {name: f"{times:.1f}"}


def _critic_head() -> dict[str, str]:
    """How much less noise the values of a critic have if its head starts at zero, in updates 1 to 5, paired by seed."""
    noise = means_of(stored_results("critic_head"), (1, 5), "value_noise")
    less = []
    for seed, with_head_of_zero in noise["blind PPO, zero"].items():
        less.append(noise["blind PPO"][seed] - with_head_of_zero)
    name = "critic_head: less noise in the values of a head of zero, updates 1 to 5"
    return {name: interval(t_interval(less), ".3f")}


def _equal_kl() -> dict[str, str]:
    """Differences of scores at equal KL: of PPO-0.99 from PPO in `sentiment_settle`, of MA-PPO from PPO in `turns`."""
    settled = difference_at_kl(stored_results("sentiment_settle"), "PPO lam^(1/5)", "PPO")
    # In `turns` the score is to be the reward that was trained on. Paths take it if a curve has no gold score.
    without_gold = []
    for run in stored_results("turns"):
        curve = []
        for row in run["curve"]:
            curve.append({key: value for key, value in row.items() if key != "gold_mean"})
        without_gold.append(run | {"curve": curve})
    turns = difference_at_kl(without_gold, "MA-PPO turn", "PPO")
    return {
        "sentiment_settle: PPO lam^(1/5) - PPO at equal KL": interval(settled, "+.3f"),
        "turns: turns - PPO at equal KL": interval(turns, "+.3f"),
    }


def _near() -> dict[str, str]:
    """Numbers beside the outcomes of `sentiment_near`, in which the last words of an answer are rewarded.

    Of MA-PPO − PPO: in `sentiment_settle`, where the first words are rewarded, minus here, at equal KL; and the early
    reward here. Then the signal of MA-PPO's gradient over that of PPO with two critics, if the last words are rewarded.
    """
    results = stored_results("sentiment_near")
    near = difference_at_kl(results, "MA-PPO", "PPO")
    far = difference_at_kl(stored_results("sentiment_settle"), "MA-PPO", "PPO")
    far_minus_near = interaction(far["by_seed"], near["by_seed"])
    early = _between(results, "score_mean", first=1, last=15)
    texts = {
        "sentiment_near: far - near at equal KL": interval(far_minus_near, "+.3f"),
        "sentiment_near: MA-PPO - PPO, reward in updates 1 to 15": interval(early, "+.3f"),
    }
    signals = gradient_record("benchmark_gradient_signal_last")["found"]
    for critic in ("constant", "zero, trained"):
        value = signals[critic]["over_PPO"]["MA-PPO"]
        texts[f"gradient_signal, last words paid: MA-PPO / PPO, {critic}"] = interval(value, ".2f")
    return texts


def _after_the_price() -> dict[str, str]:
    """PPO's objective, reward − β·KL, in `sentiment_settle`: against each method's first update, and against PPO.

    Beside it, how far the methods went from the starting model: their KL, and how often an estimate of it is negative.
    """
    study = "sentiment_settle"
    results = stored_results(study)
    first, last = load_study(study).mean_updates
    # 1. method -> seed -> the objective: the mean of the updates that count, and that of the first update.
    late: dict[str, dict[int, float]] = {}
    start: dict[str, dict[int, float]] = {}
    for method, runs in by_method(results).items():
        late[method] = {}
        start[method] = {}
        for seed, run in runs.items():
            # β is 0.05, as the protocol has it.
            objective = [row["score_mean"] - 0.05 * row["kl_k1"] for row in run["curve"]]
            # Updates are counted from 1, positions in a list from 0.
            late[method][seed] = np.mean(objective[first - 1 : last])
            start[method][seed] = objective[0]
    # 2. Against the first update, and against PPO, paired by seed.
    texts = {}
    for method, by_seed in late.items():
        gained = t_interval([by_seed[seed] - start[method][seed] for seed in by_seed])
        name = f"{study}: {method}, reward - 0.05 KL, against its first update"
        texts[name] = interval(gained, "+.3f")
        if method != "PPO":
            more = t_interval([by_seed[seed] - late["PPO"][seed] for seed in late["PPO"]])
            texts[f"{study}: {method} - PPO, reward - 0.05 KL"] = interval(more, "+.3f")
    # 3. How far the policies went.
    kl = {}
    for method, by_seed in means_of(results, (first, last), "kl_k1").items():
        kl[method] = np.mean(list(by_seed.values()))
    for method in ("MA-PPO", "PPO lam^(1/5)"):
        texts[f"{study}: KL of {method} over that of PPO"] = f"{kl[method] / kl['PPO']:.1f}"
    kl_of_batches = []
    for run in results:
        kl_of_batches += [row["kl_k1"] for row in run["curve"]]
    share = np.mean(np.array(kl_of_batches) < -0.5)
    texts[f"{study}: share of batches with a KL below -0.5"] = f"{100 * share:.1f} %"
    return texts


def _by_the_rules() -> dict[str, str]:
    """Outcomes of four studies without those seeds that depart from the protocol's rules; each block has its reason."""
    texts = {}
    # In each of these seeds one run was made after the last seed, against the stop rule.
    kept = _without_seeds("turns", 802, 804, 813)
    updates = load_study("turns").mean_updates
    value = difference_of_means(kept, ["MA-PPO turn", "PPO"], updates)
    texts["turns, without 802, 804, 813: turns - PPO"] = interval(value, "+.4f")

    # Seed 843 ran on two kinds of machine.
    kept = _without_seeds("sentiment_near", 843)
    updates = load_study("sentiment_near").mean_updates
    near = difference_of_means(kept, ["MA-PPO", "PPO"], updates)
    texts["sentiment_near, without 843: MA-PPO - PPO"] = interval(near, "+.3f")
    far = difference_of_means(stored_results("sentiment_settle"), ["MA-PPO", "PPO"], updates)
    value = interaction(far["by_seed"], near["by_seed"])
    texts["sentiment_near, without 843: far - near"] = interval(value, "+.3f")

    # Seed 866 ran on two kinds of processor.
    kept = _without_seeds("critic_head", 866)
    value = ratio_of_updates(
        kept, ["seeing MA-PPO, zero", "seeing MA-PPO"], threshold=0.8, window=3
    )
    texts["critic_head, without 866: seeing MA-PPO, zero / normal"] = interval(value, ".3f")

    # The first eight seeds, 910 to 917, were analysed before the other twelve ran.
    kept = [run for run in stored_results("umbrella_start") if run["seed"] > 917]
    for ours, theirs in (("S", "M"), ("M", "L")):
        value = ratio_of_updates(kept, [ours, theirs], threshold=0.8, window=3)
        name = f"umbrella_start, the twelve last seeds: {ours} / {theirs}"
        texts[name] = interval(value, ".3f", beside=1)
    return texts


def _without_seeds(study: str, *seeds: int) -> list[dict]:
    """Return the stored results of a study, without the runs of these seeds."""
    return [run for run in stored_results(study) if run["seed"] not in seeds]


def _first_gradients() -> dict[str, str]:
    """Signal-to-noise of MA-PPO's gradient over that of PPO-0.99 and of MA-PPO with the first value as its baseline.

    All three have the critic that was trained from a head of zero.
    """
    record = gradient_record("benchmark_gradient_signal_afterwards")
    projections = record["cells"]["projections"]["zero, trained"]
    texts = {}
    for name in ("PPO lam^(1/5)", "MA-PPO, first value"):
        value = ratio_of_signals(projections, "MA-PPO", name)._asdict()
        texts[f"gradient_signal: MA-PPO / {name}"] = interval(value, ".2f")
    return texts


def _critics() -> dict[str, str]:
    """How well the critics of all stored runs predict the score: counts of runs with and without a critic's warm-up.

    A run's number is the mean of the score's explained variance over the first ten updates in which its policy learned
    (a critic's warm-up comes before them). Runs without a critic have none, and are not counted.
    """
    # 1. study -> a number of each run, of critics that learned with the policy, and of those that were trained first.
    new: dict[str, list[float]] = {}
    trained_first: dict[str, list[float]] = {}
    for folder in sorted(shipped("results").iterdir()):
        if not (STUDIES / f"{folder.name}.yaml").is_file():  # not the results of a study
            continue
        for run in stored_results(folder.name):
            # `curve_of` leaves the warm-up out.
            early = [row.get(EXPLAINED) for row in curve_of(run)[:10]]
            values = [value for value in early if value is not None]
            if values:
                has_warmup = run["options"].get("critic_warmup", 0) > 0
                studies = trained_first if has_warmup else new
                studies.setdefault(folder.name, []).append(float(np.mean(values)))
    # 2. All runs, and those of some tasks. 0.05 and 0.2 are the bounds that docs/results.md counts by.
    all_new = np.concatenate(list(new.values()))
    all_trained = np.concatenate(list(trained_first.values()))
    above = {study: sum(x > 0.2 for x in values) for study, values in trained_first.items()}
    above_in_umbrella = 0
    for study, count in above.items():
        if load_study(study).shared.get("dataset") == "tiny-umbrella":
            above_in_umbrella += count
    start = trained_first["umbrella_start"]
    studies_of_summaries = ("summaries", "summaries_schedule", "critic_tries")
    summaries = np.concatenate([trained_first[study] for study in studies_of_summaries])
    arithmetic = np.concatenate([trained_first[study] for study in ("steps", "steps_schedule")])
    return {
        "critics: runs without a warm-up": f"{len(all_new):,}",
        "critics: runs without a warm-up above 0.05": str(int((all_new > 0.05).sum())),
        "critics: largest without a warm-up": f"{all_new.max():.2f}",
        "critics: runs with a warm-up": f"{len(all_trained):,}",
        "critics: runs with a warm-up above 0.2": str(sum(above.values())),
        "critics: of these in umbrella": str(above_in_umbrella),
        "critics: median of umbrella_start": f"{np.median(start):.1f}",
        "critics: runs on summaries with a warm-up": str(len(summaries)),
        "critics: of these below 0": str(int((summaries < 0).sum())),
        "critics: arithmetic with a warm-up, lowest": f"{arithmetic.min():.2f}",
        "critics: arithmetic with a warm-up, highest": f"{arithmetic.max():.2f}",
    }


def _trained_critic() -> dict[str, str]:
    """Runs that never reach the score, ratios with a critic that was trained first, and arithmetic's critic at the end.

    The ratios are updates of PPO-0.99 (E1, L) and of MA-PPO (M) over those of PPO (E0, T).
    """
    texts = {}
    for name, study, method in NEVER:
        runs = by_method(stored_results(study))[method].values()
        never = [run for run in runs if updates_to(run, threshold=0.8, window=3) is None]
        texts[name] = f"{len(never)} of {len(runs)}"
    for study, ours, theirs in (
        ("noise_confirm", "E1", "E0"),
        ("umbrella_start", "L", "T"),
        ("umbrella_start", "M", "T"),
    ):
        value = ratio_of_updates(stored_results(study), [ours, theirs], threshold=0.8, window=3)
        texts[f"{study}: {ours} / {theirs}"] = interval(value, beside=1)
    for method, runs in by_method(stored_results("steps_confirm")).items():
        at_end = [np.mean([row[EXPLAINED] for row in curve_of(run)[-10:]]) for run in runs.values()]
        name = f"steps_confirm: {method}, explained variance of the last ten updates"
        texts[name] = interval(t_interval(at_end))
    return texts


def _temperature() -> dict[str, str]:
    """Contrasts of `temperature`, and RM scores at each sampling temperature, of one answer and of the best of eight.

    A contrast is how a score changes from one temperature to another with one method, minus the same with another.
    """
    record = json.loads(shipped("results/benchmark_temperature.json").read_text(encoding="utf-8"))
    texts = {}
    for pair, by_score in record["found"]["contrasts"].items():
        for score, value in by_score.items():
            texts[f"temperature: {pair}, {score}"] = interval(value, "+.3f")
    for method, by_temperature in record["found"]["means"].items():
        for temperature, by_size in by_temperature.items():
            for size in ("1", "8"):
                value = by_size[size]["rm_score"]
                name = f"temperature: {method} at {temperature}, best of {size}"
                texts[name] = interval(value, ".2f")
    return texts


def _averaged_kl() -> dict[str, str]:
    """KL of the two methods that the primary outcome of `kl_price_umbrella` compares, in the updates that it counts."""
    distance = means_of(stored_results("kl_price_umbrella"), (21, 30), "kl_k1")
    texts = {}
    for method in ("M mean 2.5", "L 2.5/5"):
        mean = np.mean(list(distance[method].values()))
        texts[f"kl_price_umbrella: KL of {method}"] = f"{mean:.2f}"
    return texts


def _signal_apart() -> dict[str, str]:
    """Outcomes of `signal_apart`, by setting: the difference of two estimators' signals, minus that of the placebo."""
    record = json.loads(shipped("results/benchmark_signal_apart.json").read_text(encoding="utf-8"))
    texts = {}
    for setting, found in record["found"].items():
        for pair, value in found["contrasts"].items():
            texts[f"signal_apart: {setting}, {pair}"] = interval(value, "+.2f")
    return texts


def _between(results: Sequence[Mapping], metric: str, first: int, last: int) -> dict:
    """MA-PPO − PPO in a metric, paired by seed, with its 95 % t-interval.

    A seed's number is the mean over the training batches of the updates `first` to `last`, counted from 1.
    """
    runs = by_method(results)
    means = {}
    for method in ("MA-PPO", "PPO"):
        means[method] = []
        for seed in sorted(runs[method]):
            rows = runs[method][seed]["curve"][first - 1 : last]
            means[method].append(np.mean([row[metric] for row in rows]))
    return t_interval(np.subtract(means["MA-PPO"], means["PPO"]).tolist())


def at_equal_kl(results: Sequence[Mapping], score: str, degree: int) -> dict:
    """What MA-PPO adds to a final score at equal final KL, with its 95 % interval.

    Least squares over all runs: an effect of each seed, the powers of log KL up to `degree`, and one of MA-PPO.
    """
    # 1. The design matrix, with a row for each run. Its first column is 1 for MA-PPO and 0 for PPO, so that the first
    #    coefficient is what MA-PPO adds. The columns of the seeds take the place of a constant.
    log_kl = np.log([np.mean(run["final"]["kl"]) for run in results])
    powers = [log_kl**power for power in range(1, degree + 1)]
    is_ours = np.array([run["method"].startswith("MA-PPO") for run in results])
    seeds = sorted({run["seed"] for run in results})
    has_seed = np.array([[run["seed"] == seed for seed in seeds] for run in results])
    design = np.column_stack([is_ours, *powers, has_seed]).astype(float)
    scores = np.array([np.mean(run["final"][score]) for run in results])
    # 2. The fit, and the standard error of the first coefficient.
    fit, sums_of_squares, *_ = np.linalg.lstsq(design, scores, rcond=None)
    degrees_of_freedom = len(scores) - design.shape[1]
    # The variance of a coefficient in least squares: that of the residuals, times its entry on the diagonal
    # of (X'X)⁻¹.
    variance = sums_of_squares[0] / degrees_of_freedom * np.linalg.inv(design.T @ design)[0, 0]
    half = t_quantile(degrees_of_freedom) * variance**0.5
    return {"mean": fit[0], "low": fit[0] - half, "high": fit[0] + half}


if __name__ == "__main__":
    for name, text in claims().items():
        print(f"{name}: {text}")
