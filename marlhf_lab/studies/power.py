"""The smallest effect that a study could have seen, from its own records.

Seen means that a two-sided t-test at 5 % finds an effect of this size with a probability of 90 %. If a study finds
nothing, this says nothing about effects that are smaller.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

POWER = 0.9
LEVEL = 0.05


def minimum_detectable(error: float, freedom: float) -> float:
    """The smallest effect that could be seen if a mean has the standard error `error`: (t + z) times this error.

    `freedom`: its degrees of freedom. t is the quantile of `LEVEL`, on two sides, and z that of `POWER`. This usual
    approximation is a little low: by the noncentral t the effect is 3 % larger with ten seeds, 8 % with five and 22 %
    with three.
    """
    return float((stats.t.ppf(1 - LEVEL / 2, freedom) + stats.norm.ppf(POWER)) * error)


def visible_gap(gaps: Sequence[float]) -> float:
    """The smallest mean difference that a study with these differences by seed could have seen."""
    return minimum_detectable(float(np.std(gaps, ddof=1)) / len(gaps) ** 0.5, len(gaps) - 1)


def visible_ratio(ratios: Sequence[float]) -> float:
    """The smallest ratio above 1 that a study with these ratios by seed could have seen."""
    return float(np.exp(visible_gap(np.log(ratios))))
