"""Numbers in texts: braces in a cell or a paragraph are replaced by a number of a study's stored results.

Braces hold a number of the text's study, or of another study that they name first:

- `{PPO|gold_gain}`: a method's entry of this name in summary.json; `{main: PPO|kl|.1f}`: with another format;
- `{contrast|PPO over MA-PPO}`: a contrast of the protocol; with `equal`, whether it is within its margin;
- `{mean|PPO|mean reward|.3f}`: a mean over the protocol's `mean_updates`. Such contrasts are differences. All are "-"
  before the planned seeds are there;
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

NUMBER = re.compile(r"\{(?:([\w+]+): )?([^{}]+)\}")


def fill(cell: str, study: str) -> str:
    """Write the numbers of a cell, with true minus signs."""
    return NUMBER.sub(lambda match: _signed(write(match[1] or study, *match[2].split("|"))), cell)


def _signed(text: str) -> str:
    return text if text == "-" else text.replace("-", "−")


def write(study: str, source: str, *what: str) -> str:
    """Write one number, interval or list of numbers of a study."""
    if source == "contrast":
        contrast = load_study(study).contrasts[what[0]]
        if "difference" in contrast:
            return _difference(study, *what)
        value = _ratio(
            study, tuple(contrast["ratio"]), load_study(study).threshold, load_study(study).window
        )
        return _contrast(value, contrast.get("margin"), *what[1:])
    if source in ("ratio", "mean ratio"):
        protocol = load_study(study)
        value = _ratio(study, what, protocol.threshold, protocol.window)
        return number(value["mean"]) if source == "mean ratio" else _contrast(value, margin=None)
    if source == "claim":
        return _claims()[what[0]]
    if source == "mean":
        method, key, form = what
        by_seed = _mean_rewards(study).get("means", {}).get(key, {}).get(method)
        return written(by_seed and t_interval([*by_seed.values()]), form)
    key, form = what[0], what[1] if len(what) > 1 else ".2f"
    return written(_value(study, source, key), form)


@functools.cache
def _claims() -> dict[str, str]:
    return claims()


@functools.cache
def _ratio(study: str, ratio: tuple[str, ...], threshold: float, window: int) -> dict:
    return ratio_of_updates(stored_results(study), ratio, threshold, window)


def _contrast(value: Mapping, margin: float | None, form: str = "") -> str:
    if form == "equal":
        inside = margin and 1 / margin <= value["low"] and value["high"] <= margin
        return f"equal within {margin:g}: {'yes' if inside else 'open'}"
    alike = (
        ""
        if len({round(x, 6) for x in value["by_seed"]}) > 1
        else ", the same update in every seed"
    )
    return interval(value, beside=1) + alike


def _difference(study: str, name: str, form: str) -> str:
    value = _mean_rewards(study).get("contrasts", {}).get(name)
    return written(value, form)


@functools.cache
def _mean_rewards(study: str) -> dict:
    """The summary.json of a study whose outcome is a mean reward; empty before all its seeds are there."""
    file = shipped("results") / study / "summary.json"
    summary = (
        json.loads(file.read_text(encoding="utf-8"))
        if file.is_file()
        else {"contrasts": {"": {"seeds": []}}}
    )
    seeds = next(iter(summary["contrasts"].values()))["seeds"]
    return summary if seeds == load_study(study).seeds else {}


@functools.cache
def _summary(study: str) -> dict:
    summary = json.loads((shipped("results") / study / "summary.json").read_text(encoding="utf-8"))
    return {row["method"]: row for row in summary["methods"]}


def _value(study: str, method: str, key: str):
    """A number of a method, from the study's summary or its curves."""
    # variance of the score, mean over the updates in which the policy learns
    if key == "explained":
        curves = [[step[EXPLAINED] for step in curve_of(run)] for run in _runs(study, method)]
        return t_interval([float(np.mean(curve)) for curve in curves])
    return _summary(study)[method].get(key)


def _runs(study: str, method: str) -> list[dict]:
    return [run for run in stored_results(study) if run["method"] == method]


def written(value, form: str) -> str:
    """Write a number, a mean with its interval, a median, or values by seed."""
    if not isinstance(value, Mapping):
        return number(value, form)
    middle = value.get("median", value.get("mean"))
    if middle is None:
        return f"never in {value['by_seed'].count(None)} of {len(value['by_seed'])}"
    return interval(value, form) if value.get("low") is not None else number(middle, form)
