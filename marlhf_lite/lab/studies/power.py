"""How small an effect a study could have seen: with 90 % power, a two-sided t-test at 5 %, from its own records.

A study that finds nothing says nothing of smaller effects than this.
"""

from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

POWER, LEVEL = 0.9, 0.05


def power_of(effect: float, error: float, freedom: float) -> float:
    """The probability that a t-test finds `effect` with its sign where a mean has this standard error."""
    return float(stats.nct.sf(stats.t.ppf(1 - LEVEL / 2, freedom), freedom, effect / error))  # the noncentral t


def visible(error: float, freedom: float) -> float:
    """The smallest effect that a t-test finds with the probability `POWER`, in the units of the standard error."""
    if not error:
        return 0.0
    most = 40 * error  # enough for one degree of freedom
    return float(optimize.brentq(lambda effect: power_of(effect, error, freedom) - POWER, 0.0, most))


def visible_gap(gaps: Sequence[float]) -> float:
    """The smallest mean difference that a study with these differences by seed could have seen."""
    return visible(float(np.std(gaps, ddof=1)) / len(gaps) ** 0.5, len(gaps) - 1)


def visible_ratio(ratios: Sequence[float]) -> float:
    """The smallest ratio above 1 that a study with these ratios by seed could have seen."""
    return float(np.exp(visible_gap(np.log(ratios))))
