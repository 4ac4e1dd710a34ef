"""Scores of responses: the models that give them, tables of them, and a summary of each method.

Responses are rows of a DataFrame, as `evaluate_checkpoints` and `read_responses` give them: id (of the prompt), sample
(0, 1, … among the responses to this prompt), method, temperature, prompt, response, and the columns of NUMBERS.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pandas as pd
import torch

from marlhf_lite.evaluation.statistics import paired_bootstrap
from marlhf_lite.macro import kl_per_token
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.training.rewards import (
    EnvironmentReward,
    FunctionReward,
    ModelReward,
    checked_scores,
)
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils import tables
from marlhf_lite.utils.errors import InputError

# Columns of scores. A reward that is no reward model has a column of its own name: see `score_columns`.
SCORES = ("rm_score", "gold")
# columns of each response's KL to the reference, in nats, by estimator
KLS = {"kl": "k1", "kl_k3": "k3"}
NUMBERS = (*SCORES, *KLS, "tokens", "ended")
# What else the table of `summarise` has, after the method and its scores.
OTHER_COLUMNS = ("kl", "tokens", "updates_to_ppo")
# A reward of one of these names, or of one of NUMBERS, has "reward" before it.
TAKEN = "id sample seed method temperature prompt response token_ids turns reference rm reward path".split()
# Headings of columns whose name in the rows says too little.
HEADINGS = {
    "rm_score": "RM score",
    "gold": "gold score",
    "kl": "KL (nats)",
    "ended": "share with EOS",
    "updates_to_ppo": "updates to PPO's final training score",
}
GoldScore = Callable[[list[str], list[str]], list[float]]


@dataclass
class Scorers:
    """What scores responses: a reference for the KL, a reward model, a reward of code, a true score; each optional.

    `load` and `load_rm` load a model from its folder when it is first needed. Reference and reward model stay loaded.
    If stored scores have another `reward_version` or `gold_name`, they are computed again.
    """

    load: Callable[[Path], PolicyModel]
    reference: Path | None = None
    rm: Path | None = None
    load_rm: Callable[[Path], ScalarHeadModel] | None = None
    gold: GoldScore | None = None  # a true score, which nobody trains on
    gold_name: str = ""
    # what a reward model with another tokenizer reads
    read: Callable[[Rollout], Rollout] | None = None
    reward: FunctionReward | EnvironmentReward | None = None  # its column has its name
    reward_version: str = ""

    @cached_property
    def _reference(self) -> PolicyModel:
        return self.load(self.reference).eval()

    @cached_property
    def _reward_model(self) -> ModelReward:
        return ModelReward(self.load_rm(self.rm), read=self.read)

    def policy(self, folder: Path) -> Callable[[], PolicyModel]:
        """Return a function that loads the policy in a folder at its first call, unless the reference is the same."""
        is_reference = self.reference and folder.resolve() == Path(self.reference).resolve()
        return cache(lambda: self._reference if is_reference else self.load(folder).eval())

    def columns_of_code(self) -> list[str]:
        """Return the columns of the scores that code computes."""
        columns = []
        if self.reward:
            columns.append(reward_column(self.reward))
        if self.gold:
            columns.append("gold")
        return columns

    def version_of_code(self) -> str:
        """Return what the scores of code depend on, with the name of the reward first: see `score_columns`."""
        versions = []
        if self.reward:
            versions.append(self.reward_version or reward_column(self.reward))
        if self.gold and self.gold_name:
            versions.append(self.gold_name)
        return ", ".join(versions)

    def score(self, rollout: Rollout, policy: Callable[[], PolicyModel]) -> dict[str, list]:
        """Return the columns of `score_rollout`, with the given scorers; `policy` loads the model that answered."""
        answered_by = None
        reference = None
        if self.reference:  # only the KL needs the two models
            answered_by = policy()
            reference = self._reference
        rewards = []
        if self.rm:
            rewards.append(self._reward_model)
        if self.reward:
            rewards.append(self.reward)
        return score_rollout(rollout, answered_by, reference, rewards, self.gold)


def reward_column(reward: Callable) -> str:
    """Return the column of a reward's scores: rm_score for a reward model, else the reward's name."""
    name = getattr(reward, "name", "")
    if isinstance(reward, ModelReward) or not name:
        return "rm_score"
    return f"reward {name}" if name in (*NUMBERS, *TAKEN) else name


def score_columns(responses: pd.DataFrame) -> list[str]:
    """Return the columns of scores that responses have: those of SCORES, and one for each reward.

    The column `reward` begins with the name of the reward, which is also the name of the column of its scores. What the
    scores depend on follows after a comma.
    """
    marks = responses["reward"].dropna().unique() if "reward" in responses else []
    rewards = [str(mark).split(", ")[0] for mark in marks]
    return [name for name in dict.fromkeys((*SCORES, *rewards)) if name in responses]


@torch.no_grad()
def score_rollout(
    rollout: Rollout,
    policy: PolicyModel | None = None,
    reference: PolicyModel | None = None,
    rewards: Sequence[Callable] = (),
    gold: GoldScore | None = None,
) -> dict[str, list]:
    """Return columns [B]: response, tokens, ended, one for each reward, and gold if it is given.

    If `policy` and `reference` are given, there are also their KLs in nats, always at temperature 1: kl is the k1
    estimate and kl_k3 the k3 estimate. Raises `InputError` unless scores are B finite numbers.
    """
    columns = {
        "response": rollout.responses,
        "tokens": rollout.lengths.tolist(),
        "ended": rollout.ended.tolist(),
    }
    if policy is not None and policy is reference:
        columns |= dict.fromkeys(KLS, [0.0] * len(rollout))  # what two equal passes would give
    elif policy is not None and reference is not None:
        inputs = (rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])
        logprobs = (policy(*inputs)[0], reference(*inputs)[0], rollout.mask)
        for name, kind in KLS.items():
            columns[name] = kl_per_token(*logprobs, kind).sum(1).tolist()
    for reward in rewards:
        columns[reward_column(reward)] = checked_scores(reward, rollout).tolist()
    if gold is not None:
        columns["gold"] = checked_scores(FunctionReward(gold), rollout).tolist()
    return columns


# Tables


def to_frame(rows: pd.DataFrame | Iterable[Mapping]) -> pd.DataFrame:
    """Return rows of responses as a DataFrame that has the columns id, sample, seed, method and temperature.

    A row without an id gets one from its prompt, and a row without a sample is sample 0. What else is missing is NaN.
    """
    if not isinstance(rows, pd.DataFrame):
        # As Python objects: pandas keeps texts in Arrow, which refuses half a surrogate pair, and data may have one.
        rows = pd.DataFrame(list(rows), dtype=object)
    columns = dict.fromkeys([*rows, "id", "sample", "seed", "method", "temperature"])
    frame = rows.reindex(columns=list(columns))  # those that are missing are NaN
    frame["sample"] = frame["sample"].where(frame["sample"].notna(), 0)
    is_unnamed = frame["id"].isna()
    if is_unnamed.any():
        # If a text is repeated within one group, these are different prompts with the same text, and `prompt_ids` tells
        # them apart. In another group (method, temperature or sample) the text is the same prompt again.
        groups = frame[is_unnamed].groupby(["method", "temperature", "sample"], dropna=False)
        ids = groups["prompt"].transform(
            lambda prompts: pd.Series(prompt_ids(prompts), index=prompts.index, dtype=object)
        )
        frame["id"] = frame["id"].where(~is_unnamed, ids)
    numbers = ["temperature", *score_columns(frame), *KLS]
    return frame.astype({name: float for name in numbers if name in frame})


def prompt_ids(prompts: Iterable[str]) -> list[str]:
    """Return an id for each prompt, from its text; a repeated text also gets a number."""
    seen: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        name = hashlib.sha256(prompt.encode("utf-8", "backslashreplace")).hexdigest()[:12]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


def to_records(responses: pd.DataFrame) -> list[dict]:
    """Return a dict for each row, without the values that are missing."""
    rows = responses.astype(object).where(responses.notna(), None).to_dict("records")
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def score_matrix(responses: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a column of responses as a table [P, S]: a row for each of P prompts, a column for each of its S samples.

    `responses` are those of one method at one temperature. The index of the table is `id`, in the order of the rows.
    Raises `InputError` if a value is missing, or prompts have different numbers of samples.
    """
    frame = to_frame(responses)
    if column not in frame or frame[column].isna().any():
        raise InputError(
            f"{frame['method'].iloc[0]}: a response without {column}: score the responses first"
        )
    ids_in_order = frame["id"].unique()
    # Number each prompt's samples 0, 1, 2, …: several seeds may use one number twice, and numbers may have gaps.
    frame = frame.sort_values("sample", kind="stable")
    frame["sample"] = frame.groupby("id").cumcount()
    values = frame.pivot(index="id", columns="sample", values=column).reindex(ids_in_order)
    # A prompt with fewer samples than others has NaN in its last columns.
    numbers_of_samples = sorted(values.notna().sum(axis=1).unique().tolist())
    if len(numbers_of_samples) > 1:
        method = frame["method"].iloc[0]
        raise InputError(
            f"{method}: prompts have {numbers_of_samples} samples: evaluate again to complete them"
        )
    return values.astype(float)


def check_same_prompts(one: str, ours: pd.DataFrame, other: str, theirs: pd.DataFrame) -> None:
    """Raise `InputError` unless two methods, called `one` and `other`, have answers to the same prompts."""
    our_prompts = set(zip(ours["id"], ours["prompt"], strict=True))
    their_prompts = set(zip(theirs["id"], theirs["prompt"], strict=True))
    lacking = [
        (other, one, our_prompts - their_prompts),
        (one, other, their_prompts - our_prompts),
    ]
    for method, has_them, missing in lacking:
        if missing:
            _, first_prompt = min(missing)
            words = " ".join(first_prompt.split())[:60]
            raise InputError(
                f"{method} lacks {len(missing)} of {has_them}'s prompts, such as {words!r}: answer the same prompts"
            )


def check_one_temperature(responses: pd.DataFrame) -> None:
    """Raise `InputError` for several temperatures: their differences would count as those of methods."""
    temperatures = responses["temperature"].unique().tolist()
    if len(temperatures) > 1:
        there = ", ".join(map(str, temperatures))
        fix = "give the responses of one, such as rows[rows['temperature'] == 0.8]"
        raise InputError(f"responses: several temperatures ({there}): {fix}")


def name_temperatures(responses: pd.DataFrame) -> pd.DataFrame:
    """Return the responses, with the temperature in the method's name, as in "PPO T=0.4", if there are several."""
    frame = to_frame(responses)
    if frame["temperature"].nunique(dropna=False) < 2:
        return frame
    pairs = zip(frame["method"], frame["temperature"], strict=True)
    return frame.assign(method=[f"{method} T={'?' if pd.isna(t) else t}" for method, t in pairs])


def find_baselines(methods: Mapping[str, str], baseline: str) -> dict[str, str]:
    """Return the name that each name is compared with.

    A method is compared with the baseline at the same temperature, because a difference between temperatures would
    count as one between methods. If the baseline has no answers at this temperature, the baseline's first name is taken
    instead.

    Args:
        methods: names as `name_temperatures` gives them, such as "PPO T=0.4", with the method of each.
        baseline: a method, or one of the names. If it is a name, all names are compared with it. If it is neither, the
            first method is the baseline. If there is only one method, its names are compared with the first of them.
    """
    is_a_name = baseline in methods  # whose keys are names
    if is_a_name:
        return dict.fromkeys(methods, baseline)
    different = list(dict.fromkeys(methods.values()))
    base = baseline if baseline in different else different[0]
    names_of_base = [name for name, method in methods.items() if method == base]
    found = {}
    for name, method in methods.items():
        at_same_temperature = base + name.removeprefix(method)  # such as "SFT" + " T=0.4"
        # A single method would be its own baseline at each temperature, so all its names take the first one.
        has_other_methods = len(different) > 1
        if at_same_temperature in methods and has_other_methods:
            found[name] = at_same_temperature
        else:
            found[name] = names_of_base[0]
    return found


def summarise(responses: pd.DataFrame | Sequence[Mapping], baseline: str = "SFT") -> list[dict]:
    """Return means of each method, and the gain of its scores over the baseline, with an interval.

    A gain is the mean difference of the two methods' scores for the same prompt.

    Args:
        responses: if a prompt has several samples, their mean counts; a method at two temperatures is two methods.
        baseline: as `find_baselines` takes it.

    Returns:
        Dicts with method, prompts and the mean of each score and of each of NUMBERS that all responses of the method
        have; except for a baseline also <score>_gain with mean, low, high and level.

    Raises:
        InputError: a method with other prompts than its baseline's.
    """
    plain = to_frame(responses)
    if not len(plain):
        return []
    frame = name_temperatures(plain)
    baselines = find_baselines(dict(zip(frame["method"], plain["method"], strict=True)), baseline)

    # 1. The mean of each number over the samples of a prompt; NaN if a sample lacks the number.
    scores = score_columns(frame)
    other_numbers = [name for name in NUMBERS if name in frame and name not in scores]
    numbers = [*scores, *other_numbers]
    frame = frame.astype(dict.fromkeys(numbers, float))
    samples_of_prompt = frame.groupby(["method", "id"], sort=False)[numbers]
    has_all = samples_of_prompt.count().eq(samples_of_prompt.size(), axis=0)
    means = samples_of_prompt.mean().where(has_all)
    by_method = {}
    for name, rows in means.groupby("method", sort=False):
        by_method[name] = rows.droplevel("method")

    # 2. A line for each method: means over prompts, and gains over its baseline at the same prompts.
    summary = []
    for method, rows in by_method.items():
        known = [name for name in numbers if rows[name].notna().all()]
        line = {"method": method, "prompts": len(rows)} | rows[known].mean().to_dict()
        base = by_method[baselines[method]]
        for score in scores:
            if rows is base or score not in known or base[score].isna().any():
                continue
            if len(rows) != len(base) or not base.index.isin(rows.index).all():
                raise InputError(
                    f"{method}: other prompts than those of the baseline: answer the same prompts"
                )
            gain = paired_bootstrap(rows[score].loc[base.index], base[score])
            line[f"{score}_gain"] = gain._asdict()
        summary.append(line)
    return summary


def table(rows: Sequence[Mapping], columns: Mapping[str, str] | Sequence[str] | None = None) -> str:
    """Return the rows as a Markdown table.

    `columns` are names in the rows, or a dict from names to headings; columns that no row has are left out. Without
    `columns`, `rows` are those of `summarise`. An interval shows mean, low and high. If a score has a gain, the gain
    follows it. The column kl shows the k3 estimate, which is never below 0, if the rows have it: older records do not.
    """
    if columns is None:
        columns = ["method", *scores_of_summary(rows), *OTHER_COLUMNS]
    if not isinstance(columns, Mapping):
        columns = {name: heading_of(name) for name in columns}
    return tables.table(rows, columns, _cell)


def heading_of(column: str) -> str:
    """Return the heading of a column in tables."""
    if column.endswith("_wins"):
        return f"wins by {heading_of(column.removesuffix('_wins'))}"
    return HEADINGS.get(column, column)


def scores_of_summary(summary: Sequence[Mapping]) -> list[str]:
    """Return the names of the scores in rows of `summarise`: SCORES, and all that have a gain in one of the rows."""
    gained = []
    for row in summary:
        gained += [name.removesuffix("_gain") for name in row if name.endswith("_gain")]
    return list(dict.fromkeys((*SCORES, *gained)))


def _cell(row: Mapping, name: str) -> str:
    """Return a cell of the table: a number with its gain if there is one, an interval, a text, or "-"."""
    value = row.get(name)
    if name == "kl" and "kl_k3" in row:  # the better estimate, which older files lack
        value = row["kl_k3"]
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return tables.interval(value)
    text = tables.number(value) if isinstance(value, float) else str(value)
    gain = row.get(f"{name}_gain")
    if gain:
        text += f" ({tables.interval(gain, '+.2f')})"
    return text
