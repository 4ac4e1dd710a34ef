"""What each section of `docs/results.md` says of the effect that it could have seen (see `power`).

    python -m marlhf_lab.studies.could_be_seen

Where a study has no primary contrast, its first question is taken: MA-PPO, n = 5, against PPO.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.mean_reward import contrasts_of
from marlhf_lab.studies.power import visible_gap, visible_ratio
from marlhf_lab.studies.results import EXPLAINED, by_method, stored_results
from marlhf_lab.studies.study import load_study

PAIR = ("MA-PPO", "PPO")


def ratio(study: str, methods: Sequence[str] = ()) -> str:
    """Of updates to the study's threshold, of these methods or of its primary contrast."""
    protocol = load_study(study)
    methods = methods or next(iter(protocol.contrasts.values()))["ratio"]
    value = ratio_of_updates(stored_results(study), methods, protocol.threshold, protocol.window)
    return f"a ratio of {visible_ratio(value['by_seed']):.2f}"


def gap(study: str, score: str, words: str, methods: Sequence[str] = PAIR) -> str:
    """Of the means of a final score, paired by seed."""
    ours, theirs = (by_method(stored_results(study))[method] for method in methods)
    means = [np.mean(run["final"][score]) - np.mean(theirs[seed]["final"][score]) for seed, run in ours.items()]
    return f"{visible_gap(means):.2g} in {words}"


def scores(study: str, methods: Sequence[str] = PAIR) -> str:
    """Of both scores of a study with a reward model."""
    return f"{gap(study, 'rm_score', 'RM score', methods)} and {gap(study, 'gold', 'gold score', methods)}"


def explained(study: str, method: str) -> str:
    """Of the explained variance, a mean over the updates in which the policy moves."""
    runs = by_method(stored_results(study))[method].values()
    means = [np.mean([row[EXPLAINED] for row in run["curve"][run["options"]["critic_warmup"] :]]) for run in runs]
    return f"{visible_gap(means):.2g} in explained variance"


def mean_reward(study: str, words: str) -> str:
    """Of a mean reward, from the study's primary contrast."""
    primary = next(iter(contrasts_of(load_study(study), stored_results(study)).values()))
    return f"a difference of {primary['visible']:.2g} in {words}"


# A section's heading up to the colon -> parts of its sentence. Sections with one run of each arm have none.
SECTIONS: Mapping[str, Sequence[Callable[[], str]]] = {
    "main": [lambda: scores("main")],
    "summaries": [
        lambda: scores("summaries"),
        lambda: gap("summaries_schedule", "gold", "gold score", ("MA-PPO trained critic", "PPO trained critic")),
    ],
    "critic_tries": [
        lambda: explained("critic_tries", "as in summaries"),
        lambda: explained("critic_tries", "batch 64"),
        lambda: explained("critic_tries", "rank 64"),
    ],
    "size_small, size_large": [lambda: scores("size_small"), lambda: scores("size_large")],
    "umbrella, umbrella_seeing, umbrella_noise": [
        lambda: ratio("umbrella", ["L32 first E0", "L32 first E4"]),
        lambda: ratio("umbrella_seeing", ["L32 first E0", "L32 first E4"]),
        lambda: ratio("umbrella_noise", ["L32 first noise E0", "L32 first noise E4"]),
    ],
    "n_sweep": [lambda: ratio("n_sweep", ["n=1", "n=5"])],
    "critic": [
        lambda: ratio("critic", ["blind PPO", "blind MA-PPO"]),
        lambda: ratio("critic", ["seeing PPO", "seeing MA-PPO"]),
    ],
    "steps": [
        lambda: gap("steps", "gold", "accuracy"),
        lambda: gap("steps_schedule", "gold", "accuracy", ("VC", "PPO")),
    ],
    "critic_confirm": [lambda: ratio("critic_confirm")],
    "noise_confirm": [lambda: ratio("noise_confirm")],
    "noise_contrast": [lambda: ratio("noise_contrast")],
    "steps_confirm": [lambda: ratio("steps_confirm")],
    "boundaries": [lambda: ratio("boundaries")],
    "tuned_steps": [lambda: gap("tuned_steps", "gold", "accuracy")],
    "tuned_tldr": [lambda: gap("tuned_tldr", "gold", "gold score")],
    "sentiment_first": [lambda: ratio("sentiment_first")],
    "sentiment_last": [lambda: ratio("sentiment_last")],
    "sentiment_all": [lambda: ratio("sentiment_all")],
    "kl_price, kl_price_high": [
        lambda: scores("kl_price", ("MA-PPO sum 0.05", "PPO 0.05")),
        lambda: scores("kl_price_high", ("MA-PPO sum 0.2", "PPO 0.2")),
    ],
    "hh": [lambda: scores("hh")],
    "webgpt": [lambda: scores("webgpt")],
    "programs": [lambda: gap("programs", "pass@1", "pass@1")],
    "sentiment_settle": [lambda: mean_reward("sentiment_settle", "mean reward")],
    "sentiment_near": [lambda: mean_reward("sentiment_near", "mean reward")],
    "critic_head": [lambda: ratio("critic_head")],
    "turns": [lambda: mean_reward("turns", "mean score")],
    "ablations": [lambda: scores("ablations", ("n=5", "n=1"))],
}


def sizes() -> dict[str, list[str]]:
    """Section -> the sizes that its text names."""
    return {section: [part() for part in parts] for section, parts in SECTIONS.items()}


if __name__ == "__main__":
    print(*(f"{section}: {'; '.join(parts)}" for section, parts in sizes().items()), sep="\n")
