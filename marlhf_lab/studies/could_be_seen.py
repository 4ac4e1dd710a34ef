"""The smallest effect that each study could have seen (see `power`), as the register of `docs/results.md` has it.

For a study without a primary contrast the effect is that of MA-PPO, n = 5, against PPO.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.mean_reward import contrasts_of
from marlhf_lab.studies.power import visible_gap, visible_ratio
from marlhf_lab.studies.results import EXPLAINED, by_method, stored_results
from marlhf_lab.studies.study import load_study

PAIR = ("MA-PPO", "PPO")
TRAINED = ("MA-PPO trained critic", "PPO trained critic")


def ratio(study: str, methods: Sequence[str] = ()) -> str:
    """The smallest ratio of two methods' updates to the study's threshold that could have been seen, as text.

    Without `methods`, the ratio is that of the study's first contrast, its primary outcome.
    """
    protocol = load_study(study)
    if not methods:
        primary = next(iter(protocol.contrasts.values()))
        methods = primary["ratio"]
    value = ratio_of_updates(stored_results(study), methods, protocol.threshold, protocol.window)
    return f"ratio {visible_ratio(value['by_seed']):.2f}"


def gap(study: str, score: str, words: str, methods: Sequence[str] = PAIR) -> str:
    """The smallest difference of two methods' mean final score that could have been seen, paired by seed, as text.

    `score`: its key in the results; `words`: what the text calls it.
    """
    runs = by_method(stored_results(study))
    ours, theirs = (runs[method] for method in methods)
    differences = []
    for seed, run in ours.items():
        other = theirs[seed]
        differences.append(np.mean(run["final"][score]) - np.mean(other["final"][score]))
    return f"{visible_gap(differences):.2g} in {words}"


def scores(study: str, methods: Sequence[str] = PAIR) -> str:
    """The smallest differences in RM score and gold score that could have been seen, as text."""
    return f"{gap(study, 'rm_score', 'RM', methods)}, {gap(study, 'gold', 'gold', methods)}"


def explained(study: str, method: str) -> str:
    """The smallest change of a method's explained variance of the score that could have been seen, as text.

    A seed's number is the mean over the updates in which the policy learns, which come after the critic's warm-up.
    """
    means = []
    for run in by_method(stored_results(study))[method].values():
        after_warmup = run["curve"][run["options"]["critic_warmup"] :]
        means.append(np.mean([row[EXPLAINED] for row in after_warmup]))
    return f"{visible_gap(means):.2g} in EV"


def mean_reward(study: str) -> str:
    """The smallest difference of mean rewards that could have been seen in the study's first contrast, as text."""
    contrasts = contrasts_of(load_study(study), stored_results(study))
    primary = next(iter(contrasts.values()))
    return f"{primary['visible']:.2g} in reward"


# Study -> the function that tells what it could have seen, and the function's arguments after the study. Studies that
# are not here are in `seen`.
SEEN: Mapping[str, tuple] = {
    "main": (scores,),
    "summaries": (scores,),
    "summaries_schedule": (gap, "gold", "gold", TRAINED),
    "critic_tries": (explained, "as in summaries"),
    "size_small": (scores,),
    "size_large": (scores,),
    "umbrella": (ratio, ["L32 first E0", "L32 first E4"]),
    "umbrella_seeing": (ratio, ["L32 first E0", "L32 first E4"]),
    "umbrella_noise": (ratio, ["L32 first noise E0", "L32 first noise E4"]),
    "n_sweep": (ratio, ["n=1", "n=5"]),
    "critic": (ratio, ["seeing PPO", "seeing MA-PPO"]),
    "steps": (gap, "gold", "accuracy"),
    "steps_schedule": (gap, "gold", "accuracy", ("VC", "PPO")),
    "tuned_steps": (gap, "gold", "accuracy"),
    "tuned_tldr": (gap, "gold", "gold"),
    "kl_price": (scores, ("MA-PPO sum 0.05", "PPO 0.05")),
    "kl_price_high": (scores, ("MA-PPO sum 0.2", "PPO 0.2")),
    "hh": (scores,),
    "webgpt": (scores,),
    "programs": (gap, "pass@1", "pass@1"),
    "ablations": (scores, ("n=5", "n=1")),
}


def seen(study: str) -> str:
    """The smallest effect that a study could have seen with 90 % power, as text.

    For a study that is not in SEEN, this is the effect of its first contrast. If there is no contrast, or a single
    seed, which has no spread, the text is "-".
    """
    if study in SEEN:
        smallest_effect, *arguments = SEEN[study]
        return smallest_effect(study, *arguments)
    protocol = load_study(study)
    if len(protocol.seeds) == 1 or not protocol.contrasts:
        return "-"
    return mean_reward(study) if protocol.mean_updates else ratio(study)
