"""The smallest effect that each study could have seen (see `power`), as the register of `docs/results.md` has it.

For a study without a primary contrast the effect is that of MA-PPO, n = 5, against PPO.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.mean_reward import contrasts_of
from marlhf_lab.studies.power import visible_gap, visible_ratio
from marlhf_lab.studies.results import EXPLAINED, by_method, stored_results
from marlhf_lab.studies.study import load_study

PAIR, TRAINED = ("MA-PPO", "PPO"), ("MA-PPO trained critic", "PPO trained critic")


def ratio(study: str, methods: Sequence[str] = ()) -> str:
    """Of updates to the study's threshold, of these methods or of its primary contrast."""
    protocol = load_study(study)
    methods = methods or next(iter(protocol.contrasts.values()))["ratio"]
    value = ratio_of_updates(stored_results(study), methods, protocol.threshold, protocol.window)
    return f"ratio {visible_ratio(value['by_seed']):.2f}"


def gap(study: str, score: str, words: str, methods: Sequence[str] = PAIR) -> str:
    """Of the means of a final score, paired by seed."""
    ours, theirs = (by_method(stored_results(study))[method] for method in methods)
    means = [
        np.mean(run["final"][score]) - np.mean(theirs[seed]["final"][score])
        for seed, run in ours.items()
    ]
    return f"{visible_gap(means):.2g} in {words}"


def scores(study: str, methods: Sequence[str] = PAIR) -> str:
    """Of both scores of a study with a reward model."""
    return f"{gap(study, 'rm_score', 'RM', methods)}, {gap(study, 'gold', 'gold', methods)}"


def explained(study: str, method: str) -> str:
    """Of the explained variance, a mean over the updates in which the policy moves."""
    runs = by_method(stored_results(study))[method].values()
    means = [
        np.mean([row[EXPLAINED] for row in run["curve"][run["options"]["critic_warmup"] :]])
        for run in runs
    ]
    return f"{visible_gap(means):.2g} in EV"


def mean_reward(study: str) -> str:
    """Of a mean reward, from the study's primary contrast."""
    primary = next(iter(contrasts_of(load_study(study), stored_results(study)).values()))
    return f"{primary['visible']:.2g} in reward"


# Study with several seeds -> the size. A study with one run of each method has none.
SEEN: Mapping[str, Callable[[], str]] = {
    "main": lambda: scores("main"),
    "summaries": lambda: scores("summaries"),
    "summaries_schedule": lambda: gap("summaries_schedule", "gold", "gold", TRAINED),
    "critic_tries": lambda: explained("critic_tries", "as in summaries"),
    "size_small": lambda: scores("size_small"),
    "size_large": lambda: scores("size_large"),
    "umbrella": lambda: ratio("umbrella", ["L32 first E0", "L32 first E4"]),
    "umbrella_seeing": lambda: ratio("umbrella_seeing", ["L32 first E0", "L32 first E4"]),
    "umbrella_noise": lambda: ratio("umbrella_noise", ["L32 first noise E0", "L32 first noise E4"]),
    "n_sweep": lambda: ratio("n_sweep", ["n=1", "n=5"]),
    "critic": lambda: ratio("critic", ["seeing PPO", "seeing MA-PPO"]),
    "steps": lambda: gap("steps", "gold", "accuracy"),
    "steps_schedule": lambda: gap("steps_schedule", "gold", "accuracy", ("VC", "PPO")),
    "tuned_steps": lambda: gap("tuned_steps", "gold", "accuracy"),
    "tuned_tldr": lambda: gap("tuned_tldr", "gold", "gold"),
    "kl_price": lambda: scores("kl_price", ("MA-PPO sum 0.05", "PPO 0.05")),
    "kl_price_high": lambda: scores("kl_price_high", ("MA-PPO sum 0.2", "PPO 0.2")),
    "hh": lambda: scores("hh"),
    "webgpt": lambda: scores("webgpt"),
    "programs": lambda: gap("programs", "pass@1", "pass@1"),
    "ablations": lambda: scores("ablations", ("n=5", "n=1")),
}


def seen(study: str) -> str:
    """The size that a study could have seen with 90 % power; "-" for one run of each method."""
    if study in SEEN:
        return SEEN[study]()
    protocol = load_study(study)
    if len(protocol.seeds) == 1 or not protocol.contrasts:
        return "-"
    return mean_reward(study) if protocol.mean_updates else ratio(study)
