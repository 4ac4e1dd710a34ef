"""Numbers that are in no table, from the stored results; `docs/results.md` has some: `python -m ...studies.claims`.

The explained variances of `critic_tries` are primary outcomes; the ratio of `tuned_steps` to 0.6 and the noise of
`critic_head` in the first five updates were fixed beforehand. All others were found afterwards: exploration.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lab.credit.gradient_signal import ratio_of_signals
from marlhf_lab.figures.gradient_signal import gradient_record
from marlhf_lab.studies.contrasts import curve_of, ratio_of_updates, ratio_to_final_score, ratios_from_logs
from marlhf_lab.studies.equal_kl import WINDOW, difference_at_kl
from marlhf_lab.studies.mean_reward import difference_of_means, interaction, means_of
from marlhf_lab.studies.paper import compare, say
from marlhf_lab.studies.results import EXPLAINED, by_method, crossed_interval, stored_results, t_interval, t_quantile
from marlhf_lab.studies.study import load_study
from marlhf_lite.evaluation.statistics import trailing_mean
from marlhf_lite.utils.tables import interval, markdown

LONG = ("MA-PPO", "MA-PPO lines", "PPO lam^(1/5)", "PPO lam=1")  # methods of `steps` with a long horizon
SEEING, BLIND = ("seeing MA-PPO", "seeing PPO"), ("blind MA-PPO", "blind PPO")
RATIOS = [  # study, methods (see `ratio_of_updates`), threshold, window
    *(("steps", ["PPO", method], share, 5) for share in (0.55, 0.6) for method in ("MA-PPO", "PPO lam^(1/5)")),
    ("steps", ["PPO lam^(1/5)", "MA-PPO"], 0.6, 5),
    ("steps", ["PPO", "MA-PPO"], 0.6, 3),
    ("critic", BLIND[::-1], 0.8, 3),
    ("critic", SEEING + BLIND, 0.8, 3),
    ("umbrella_noise", ["L32 first noise E4", "L32 first noise E3"], 0.8, 3),
    ("n_sweep", ["n=2", "n=inf"], 0.8, 3),
    ("umbrella", ["L128 first E4", "L128 first E1"], 0.8, 3),
    *(("tuned_steps", ["PPO", "MA-PPO"], share, 5) for share in (0.6, 0.7, 0.75)),
    ("tuned_steps", ["PPO lam=0.95", "MA-PPO"], 0.6, 5),
    *(("steps_confirm", ["MA-PPO", long], 0.6, 5) for long in ("PPO lam^(1/5)", "PPO lam=1")),
]

LOW, HIGH = ("kl_price", "0.05"), ("kl_price_high", "0.2")
PLACES = [  # what the protocols predicted at one place: label, then (study, β, method, method)
    (
        "MA-PPO, sum, β − PPO, β",
        (*LOW, "MA-PPO sum 0.05", "PPO 0.05"),
        (*HIGH, "MA-PPO sum 0.2", "PPO 0.2"),
    ),
    (
        "MA-PPO, mean, β − PPO, β / 5",
        (*LOW, "MA-PPO mean 0.05", "PPO 0.01"),
        (*HIGH, "MA-PPO mean 0.2", "PPO 0.04"),
    ),
    (
        "MA-PPO, mean, 5 β − MA-PPO, sum, β",
        (*LOW, "MA-PPO mean 0.25", "MA-PPO sum 0.05"),
        (*HIGH, "MA-PPO mean 1.0", "MA-PPO sum 0.2"),
    ),
]


def claims() -> dict[str, str]:
    """Return name of a number -> the number with its 95 % interval, as text."""
    texts = {}
    for study, methods, threshold, window in RATIOS:
        value = ratio_of_updates(stored_results(study), methods, threshold, window)
        texts[f"{study}: {' / '.join(methods)} to {threshold:g}, window {window}"] = interval(value, beside=1)
    pooled = [("critic", SEEING), ("umbrella_noise", ["L32 first noise E4", "L32 first noise E0"])]
    ratios = [ratio_of_updates(stored_results(study), methods, 0.8, 3)["by_seed"] for study, methods in pooled]
    both = ratios_from_logs(t_interval(np.log(np.concatenate(ratios)).tolist()))
    texts["critic and umbrella_noise: MA-PPO / PPO, seeing"] = interval(both, beside=1)
    for study in ("main", "summaries", "size_small", "size_large", "tuned_tldr", "steps_confirm", "tuned_steps"):
        ratio = ratio_to_final_score(stored_results(study), ["PPO", "MA-PPO"])
        texts[f"{study}: PPO / MA-PPO to PPO's final score"] = interval(ratio, beside=1)
    runs = by_method(stored_results("steps"))
    gold = {name: np.array([value[seed]["final"]["gold"] for seed in sorted(value)]) for name, value in runs.items()}
    for name, gaps in (
        ("four of long horizon - PPO", np.mean([gold[method] for method in LONG], axis=0) - gold["PPO"]),
        ("MA-PPO - PPO lam^(1/5)", gold["MA-PPO"] - gold["PPO lam^(1/5)"]),
    ):
        texts[f"steps: {name}, accuracy"] = interval(crossed_interval(gaps)._asdict(), "+.3f")
    for first, last in ((21, 45), (51, 60)):
        value = _between(stored_results("tuned_steps"), "gold_mean", first, last)
        texts[f"tuned_steps: MA-PPO - PPO, accuracy in updates {first} to {last}"] = interval(value)
    value = _between(stored_results("sentiment_all"), "score_mean", 26, 30)
    texts["sentiment_all: MA-PPO - PPO, score in updates 26 to 30"] = interval(value, "+.2f")
    texts |= _settled() | _near() | _quieter_heads() | _after_the_price() | _by_the_rules() | _first_gradients()
    for study in ("tuned_steps", "tuned_tldr"):
        texts[f"{study}: MA-PPO - PPO, updates of the same KL"] = interval(_same_kl(stored_results(study)))
        runs = [run for run in stored_results(study) if run["method"] in ("PPO", "MA-PPO")]
        texts[f"{study}: MA-PPO - PPO at equal KL at the end"] = interval(at_equal_kl(runs, "gold", degree=1), "+.2f")
    tuned = stored_results("tuned_tldr")
    runs = by_method(tuned)
    gaps = [np.subtract(*(runs[x][seed]["final"]["gold"] for x in ("MA-PPO", "PPO lam=0.99"))) for seed in runs["PPO"]]
    texts["tuned_tldr: MA-PPO - PPO lam=0.99, gold score"] = interval(
        crossed_interval(np.array(gaps))._asdict(), "+.2f"
    )
    value = difference_at_kl(tuned, "MA-PPO", "PPO lam=0.99")
    texts["tuned_tldr: MA-PPO - PPO lam=0.99 at equal KL"] = interval(value, "+.2f")
    for name, metric in (("KL", "kl_k1"), ("score", "gold_mean")):
        texts[f"tuned_tldr: MA-PPO - PPO, {name} in updates 11 to 20"] = interval(_between(tuned, metric, 11, 20))
    for method in ("PPO", "MA-PPO", "PPO lam=0.99"):
        scores = np.array([[row["gold_mean"] for row in run["curve"][-10:]] for run in runs[method].values()])
        rise = t_interval((scores[:, 5:].mean(1) - scores[:, :5].mean(1)).tolist())
        texts[f"tuned_tldr: {method}, rise of the score in the last five updates"] = interval(rise)
    confirmed = stored_results("steps_confirm")
    value = _between(confirmed, "gold_mean", 51, 60)
    texts["steps_confirm: MA-PPO - PPO, accuracy in updates 51 to 60"] = interval(value)
    early, late = (_between(confirmed, "gold_mean", *span)["by_seed"] for span in ((21, 30), (51, 60)))
    texts["steps_confirm: lead in updates 21 to 30 - 51 to 60"] = interval(
        t_interval(np.subtract(early, late).tolist())
    )
    for study, method in (("tuned_steps", "PPO lam=0.95"), ("steps_confirm", "PPO")):
        texts[f"{study}: {method}, accuracy in the last ten updates"] = interval(_last_ten(study, method))
    for method, runs in by_method(stored_results("critic_tries")).items():
        learning = [[row[EXPLAINED] for row in curve_of(run)] for run in runs.values()]
        texts[f"critic_tries: {method}, explained variance"] = interval(t_interval([*map(np.mean, learning)]))
    runs = [run for name in ("kl_price", "kl_price_high") for run in stored_results(name) if run["method"] != "SFT"]
    for score in ("rm_score", "gold"):
        texts[f"kl_price: MA-PPO - PPO at equal KL, {score}"] = interval(at_equal_kl(runs, score, degree=2), "+.3f")
    return texts


def places_table() -> str:
    """How far pairs of methods are apart that `kl_price` and `kl_price_high` predicted at one place, in Markdown."""
    heads = ["predicted: at one place", "β", "RM score", "gold score", "KL (nats)"]
    lines = []
    for label, *pairs in PLACES:
        for study, beta, one, other in pairs:
            found = [say(compare(study, one, other, score)) for score in ("rm_score", "gold", "kl")]
            lines.append([label, beta, *found])
    return markdown(heads, lines)


def _settled() -> dict[str, str]:
    """What `sentiment_settle` shows beside its outcomes."""
    settled, texts = stored_results("sentiment_settle"), {}
    for pair in (("PPO lam^(1/5)", "PPO"), ("PPO lam^(1/5)", "MA-PPO")):
        value = difference_at_kl(settled, *pair)
        texts[f"sentiment_settle: {' - '.join(pair)} at equal KL"] = interval(value, "+.3f")
    for first, last in ((1, 15), (26, 30)):
        value = _between(settled, "score_mean", first, last)
        texts[f"sentiment_settle: MA-PPO - PPO, reward in updates {first} to {last}"] = interval(value, "+.3f")
    return texts


def _near() -> dict[str, str]:
    """What `sentiment_near` shows beside its outcomes, and at equal KL the difference between it and its far words."""
    results, texts = stored_results("sentiment_near"), {}
    near, far = (difference_at_kl(found, "MA-PPO", "PPO") for found in (results, stored_results("sentiment_settle")))
    texts["sentiment_near: MA-PPO - PPO at equal KL"] = interval(near, "+.3f")
    texts["sentiment_near: far - near at equal KL"] = interval(interaction(far["by_seed"], near["by_seed"]), "+.3f")
    for first, last in ((1, 15), (26, 30)):
        value = _between(results, "score_mean", first, last)
        texts[f"sentiment_near: MA-PPO - PPO, reward in updates {first} to {last}"] = interval(value, "+.3f")
    signals = gradient_record("benchmark_gradient_signal_last")["found"]
    for critic in ("constant", "zero, trained"):
        value = signals[critic]["over_PPO"]["MA-PPO"]
        texts[f"gradient_signal, last words paid: MA-PPO / PPO, {critic}"] = interval(value, ".2f")
    return texts


def _quieter_heads() -> dict[str, str]:
    """How much less noise the values of a head of zero have than those of a normal head, in blind PPO."""
    texts = {}
    for span in ((1, 5), (11, 15)):
        noise = means_of(stored_results("critic_head"), span, "value_noise")
        less = [noise["blind PPO"][seed] - value for seed, value in noise["blind PPO, zero"].items()]
        texts[f"critic_head: less noise, updates {span[0]} to {span[1]}"] = interval(t_interval(less), ".3f")
    return texts


def _after_the_price() -> dict[str, str]:
    """Reward − β·KL, which PPO raises: differences, and each arm against its own first update; KL where it is one."""
    settled, (first, last) = stored_results("sentiment_settle"), load_study("sentiment_settle").mean_updates
    runs, net = by_method(settled), {}
    for method, of_seed in runs.items():
        rows = {
            seed: [row["score_mean"] - 0.05 * row["kl_k1"] for row in run["curve"]] for seed, run in of_seed.items()
        }
        net[method] = {seed: (np.mean(row[first - 1 : last]), row[0]) for seed, row in rows.items()}
    texts = {}
    for method in net:
        after = [late - early for late, early in net[method].values()]
        texts[f"sentiment_settle: {method}, reward - 0.05 KL, against its first update"] = f"{np.mean(after):+.3f}"
        if method != "PPO":
            gaps = [net[method][seed][0] - net["PPO"][seed][0] for seed in net["PPO"]]
            texts[f"sentiment_settle: {method} - PPO, reward - 0.05 KL"] = interval(t_interval(gaps), "+.3f")
    kl = [row["kl_k1"] for run in settled for row in run["curve"]]
    texts["sentiment_settle: share of batches with a KL below -0.5"] = f"{100 * np.mean(np.array(kl) < -0.5):.1f} %"
    rewards = [  # the score that was trained on, in place of the true one
        run | {"curve": [{key: x for key, x in row.items() if key != "gold_mean"} for row in run["curve"]]}
        for run in stored_results("turns")
    ]
    value = difference_at_kl(rewards, "MA-PPO turn", "PPO")
    return texts | {"turns: turns - PPO at equal KL": interval(value, "+.3f")}


def _by_the_rules() -> dict[str, str]:
    """Without the seeds that ran out of order, or on two kinds of machine."""
    texts, (turns, near) = {}, (load_study(name) for name in ("turns", "sentiment_near"))
    kept = [run for run in stored_results("turns") if run["seed"] not in (802, 804, 813)]
    value = difference_of_means(kept, ["MA-PPO turn", "PPO"], turns.mean_updates)
    texts["turns, without 802, 804, 813: turns - PPO"] = interval(value, "+.4f")
    kept = [run for run in stored_results("sentiment_near") if run["seed"] != 843]
    value = difference_of_means(kept, ["MA-PPO", "PPO"], near.mean_updates)
    texts["sentiment_near, without 843: MA-PPO - PPO"] = interval(value, "+.3f")
    far = difference_of_means(stored_results("sentiment_settle"), ["MA-PPO", "PPO"], near.mean_updates)
    value = interaction(far["by_seed"], value["by_seed"])
    texts["sentiment_near, without 843: far - near"] = interval(value, "+.3f")
    kept = [run for run in stored_results("critic_head") if run["seed"] != 866]
    value = ratio_of_updates(kept, ["seeing MA-PPO, zero", "seeing MA-PPO"], 0.8, 3)
    return texts | {"critic_head, without 866: seeing MA-PPO, zero / normal": interval(value, ".3f")}


def _first_gradients() -> dict[str, str]:
    """MA-PPO's signal over that of λ^(1/5) and of the value at the start, in the record of `gradient_signal`."""
    record = gradient_record("benchmark_gradient_signal_afterwards")
    rows = record["cells"]["projections"]["zero, trained"]
    return {
        f"gradient_signal: MA-PPO / {name}": interval(ratio_of_signals(rows, "MA-PPO", name)._asdict(), ".2f")
        for name in ("PPO lam^(1/5)", "MA-PPO, first value")
    }


def _between(results: Sequence[Mapping], metric: str, first: int, last: int) -> dict:
    """MA-PPO - PPO in the mean of a metric of the training batches of these updates, with its 95 % t-interval."""
    runs = by_method(results)
    means = [
        [np.mean([row[metric] for row in runs[name][seed]["curve"][first - 1 : last]]) for seed in sorted(runs[name])]
        for name in ("MA-PPO", "PPO")
    ]
    return t_interval(np.subtract(*means).tolist())


def _same_kl(results: Sequence[Mapping]) -> dict:
    """MA-PPO - PPO in the mean gold score of updates whose KL is in the range of `difference_at_kl`, by seed."""
    runs, gaps = by_method(results), []
    for seed, end in zip(sorted(runs["PPO"]), difference_at_kl(results, "MA-PPO", "PPO")["kl"], strict=True):
        means = []
        for method in ("MA-PPO", "PPO"):
            rows = curve_of(runs[method][seed])
            kl, score = (np.array(trailing_mean([row[key] for row in rows], WINDOW)) for key in ("kl_k1", "gold_mean"))
            means.append(score[(kl >= end / 2) & (kl <= end)].mean())
        gaps.append(means[0] - means[1])
    return t_interval(gaps)


def _last_ten(study: str, method: str) -> dict:
    """Mean gold score of the training batches of the last ten updates, with its 95 % t-interval over seeds."""
    runs = [run for run in stored_results(study) if run["method"] == method]
    return t_interval([np.mean([row["gold_mean"] for row in curve_of(run)[-10:]]) for run in runs])


def at_equal_kl(results: Sequence[Mapping], score: str, degree: int) -> dict:
    """What MA-PPO adds to a final score at equal final KL, with its 95 % interval.

    Least squares over all runs: an effect of each seed, the powers of log KL up to `degree`, and one of MA-PPO.
    """
    kl = np.log([np.mean(r["final"]["kl"]) for r in results])
    seeds = np.array([[r["seed"] == seed for seed in sorted({r["seed"] for r in results})] for r in results])
    ours = np.array([r["method"].startswith("MA-PPO") for r in results])
    design = np.column_stack([ours, *(kl**power for power in range(1, degree + 1)), seeds]).astype(float)
    scores = np.array([np.mean(r["final"][score]) for r in results])
    fit, squares, *_ = np.linalg.lstsq(design, scores, rcond=None)
    freedom = len(scores) - design.shape[1]
    half = t_quantile(freedom) * (squares[0] / freedom * np.linalg.inv(design.T @ design)[0, 0]) ** 0.5
    return {"mean": fit[0], "low": fit[0] - half, "high": fit[0] + half}


if __name__ == "__main__":
    print(*(f"{name}: {text}" for name, text in claims().items()), places_table(), sep="\n")
