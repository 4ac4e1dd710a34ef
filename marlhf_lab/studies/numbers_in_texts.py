"""Numbers in texts: braces in a cell or a paragraph are replaced by a number of a study's stored results.

The number is one of the study to which the text belongs, or of another study, if the braces begin with its name and a
colon:

- `{PPO|gold_gain}`: a method's entry of this name in summary.json; `{main: PPO|kl|.1f}`: of `main`, with a format;
- `{contrast|PPO over MA-PPO}`: a contrast of the protocol; with `|equal`, whether it is within its margin;
- `{mean|PPO|mean reward|.3f}`: a mean over the protocol's `mean_updates`. Contrasts of such a study are differences.
  Both are "-" until the planned seeds are there;
- `{umbrella_start: ratio|M|T}`: updates of the first method over those of the second, to the protocol's threshold, with
  its interval; `mean ratio` without it;
- `{claim|NAME}`: the number that `claims.py` has under this name.
"""

import functools
import json
import re
from collections.abc import Mapping

import numpy as np

from marlhf_lab.studies.claims import claims
from marlhf_lab.studies.contrasts import curve_of, ratio_of_updates
from marlhf_lab.studies.results import EXPLAINED, stored_results, t_interval
from marlhf_lab.studies.study import load_study
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval, number

NUMBER = re.compile(r"\{(?:([\w+]+): )?([^{}]+)\}")  # braces: maybe a study and a colon, then words


def fill(cell: str, study: str) -> str:
    """Return the text of a cell or paragraph with its braces replaced by numbers, which have true minus signs.

    `study`: whose numbers are meant if braces name no other.
    """

    def number_for(braces: re.Match) -> str:
        other_study, words = braces.groups()
        text = write(other_study or study, *words.split("|"))
        return (
            text if text == "-" else text.replace("-", "−")
        )  # "-" says that there is no number yet

    return NUMBER.sub(number_for, cell)


def write(study: str, source: str, *what: str) -> str:
    """Write one number, interval or list of numbers of a study.

    `source` and `what` are the words between the bars of braces, see the module's first lines. Either `source` is a
    kind of number and `what` its details, or `source` is a method, and `what` a key of summary.json and maybe a format.
    """
    if source == "contrast":
        name, *form = what
        protocol = load_study(study)
        contrast = protocol.contrasts[name]
        if "difference" in contrast:
            return written(_mean_rewards(study).get("contrasts", {}).get(name), *form)
        value = _ratio(study, tuple(contrast["ratio"]), protocol.threshold, protocol.window)
        return _contrast(value, contrast.get("margin"), *form)
    if source in ("ratio", "mean ratio"):
        protocol = load_study(study)
        value = _ratio(study, what, protocol.threshold, protocol.window)
        return number(value["mean"]) if source == "mean ratio" else _contrast(value, margin=None)
    if source == "claim":
        return _claims()[what[0]]
    if source == "mean":
        method, key, form = what
        by_seed = _mean_rewards(study).get("means", {}).get(key, {}).get(method)
        value = t_interval(list(by_seed.values())) if by_seed else None
        return written(value, form)
    method = source
    key, *form = what
    return written(_value(study, method, key), *(form or [".2f"]))


@functools.cache
def _claims() -> dict[str, str]:
    return claims()


@functools.cache
def _ratio(study: str, ratio: tuple[str, ...], threshold: float, window: int) -> dict:
    return ratio_of_updates(stored_results(study), ratio, threshold, window)


def _contrast(value: Mapping, margin: float | None, form: str = "") -> str:
    """Write a ratio with its interval; with the form `equal`, write whether the interval is within the margin."""
    if form == "equal":
        is_inside = margin and 1 / margin <= value["low"] and value["high"] <= margin
        return f"equal within {margin:g}: {'yes' if is_inside else 'open'}"
    text = interval(value, beside=1)
    different_ratios = {round(ratio, 6) for ratio in value["by_seed"]}
    if (
        len(different_ratios) <= 1
    ):  # then the interval has no width, and `interval` writes the mean alone
        text += ", the same update in every seed"
    return text


@functools.cache
def _mean_rewards(study: str) -> dict:
    """Return the summary.json of a study whose outcome is a mean reward; empty until all planned seeds are there.

    Until then a text must not tell the outcome: a protocol says that it is not looked at before.
    """
    file = shipped("results") / study / "summary.json"
    if not file.is_file():
        return {}
    summary = json.loads(file.read_text(encoding="utf-8"))
    primary = next(iter(summary["contrasts"].values()))
    is_complete = primary["seeds"] == load_study(study).seeds
    return summary if is_complete else {}


@functools.cache
def _summary(study: str) -> dict:
    """Return the rows of a study's summary.json: method -> row."""
    summary = json.loads((shipped("results") / study / "summary.json").read_text(encoding="utf-8"))
    return {row["method"]: row for row in summary["methods"]}


def _value(study: str, method: str, key: str):
    """Return a number of a method from the study's summary.

    One key, `explained`, is read from the curves instead: how much of the score's variance the critic explains, a mean
    over the updates in which the policy learns, with its t-interval.
    """
    if key != "explained":
        return _summary(study)[method].get(key)
    means = []
    for run in stored_results(study):
        if run["method"] == method:
            means.append(float(np.mean([step[EXPLAINED] for step in curve_of(run)])))
    return t_interval(means)


def written(value, form: str) -> str:
    """Write a number, a mean with its interval, a median, or values by seed."""
    if not isinstance(value, Mapping):
        return number(value, form)
    middle = value.get("median", value.get("mean"))
    if middle is None:  # runs of some seeds (None) never arrived at the threshold
        return f"never in {value['by_seed'].count(None)} of {len(value['by_seed'])}"
    return interval(value, form) if value.get("low") is not None else number(middle, form)
