"""Answers of a policy to held-out prompts, with every score there is: what tables and figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tqdm.auto import tqdm

from marlhf_lite.evaluation.responses import Key, noise_names, prompt_ids
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.evaluation.statistics import paired_bootstrap
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.training.metrics import kl_terms
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, Sampling


@torch.no_grad()
def answer(
    policy: PolicyModel,
    reference: PolicyModel,
    tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    reward: ModelReward | None = None,
    gold: Callable[[list[str], list[str]], list[float]] | None = None,
    *,
    name: str = "policy",
    seed: int = 0,
    batch_size: int = 128,
) -> list[dict]:
    """One row a prompt: prompt, method, response, tokens, ended, kl (k1, nats), rm_score and gold where known.

    The noise is that of `evaluate_checkpoints`: it belongs to seed and prompt, whatever the policy and the batch, so
    that comparisons by prompt are tighter.
    """
    policy.eval()
    rows: list[dict] = []
    noises = noise_names([Key(id, 0, seed) for id in prompt_ids(prompts)])
    for start in tqdm(range(0, len(prompts), batch_size), desc=f"answers of {name}", leave=False):
        batch = slice(start, start + batch_size)
        rollout = generate_seeded(policy.model, tokenizer, prompts[batch], noises[batch], sampling)
        columns = {"prompt": rollout.prompts, "method": [name] * len(rollout)}
        columns |= scored(rollout, policy, reference, reward, gold)
        rows += as_rows(columns)
    return rows


@torch.no_grad()
def scored(
    rollout: Rollout,
    policy: PolicyModel | None = None,
    reference: PolicyModel | None = None,
    reward: ModelReward | None = None,
    gold: Callable[[list[str], list[str]], list[float]] | None = None,
) -> dict[str, list]:
    """Columns [B] of what is known of each response: response, tokens, ended, and kl, rm_score and gold where asked.

    kl is the k1 estimate in nats, at temperature 1 whatever the temperature of sampling; it takes both models.
    """
    columns = {"response": rollout.responses, "tokens": rollout.lengths.tolist(), "ended": rollout.ended.tolist()}
    if policy is not None and policy is reference:
        columns["kl"] = [0.0] * len(rollout)  # what the two passes would give
    elif policy is not None and reference is not None:
        width = rollout.mask.shape[1]
        ours, theirs = (role(rollout.tokens, rollout.attention_mask, width)[0] for role in (policy, reference))
        columns["kl"] = kl_terms(ours, theirs, rollout.mask)[0].tolist()
    if reward is not None:
        columns["rm_score"] = reward(rollout).tolist()
    if gold is not None:
        columns["gold"] = list(gold(rollout.prompts, rollout.responses))
    return columns


def as_rows(columns: dict[str, list]) -> list[dict]:
    """Columns of equal length to a dict for each row."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def column(rows: Sequence[dict], name: str, method: str) -> list[float]:
    """One column of one method, in prompt order."""
    return [row[name] for row in rows if row["method"] == method]


def summarise(rows: Sequence[dict], baseline: str = "SFT") -> list[dict]:
    """One row a method: means, and for scores the paired bootstrap 95 % interval of the difference to `baseline`."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    return [_summary(rows, method, baseline if baseline in methods else methods[0]) for method in methods]


def _summary(rows: Sequence[dict], method: str, baseline: str) -> dict:
    mine = [row for row in rows if row["method"] == method]
    out: dict = {"method": method, "prompts": len(mine)}
    for name in ("rm_score", "gold", "kl", "tokens", "ended"):
        if name in mine[0]:
            out[name] = sum(float(row[name]) for row in mine) / len(mine)
    for name in ("rm_score", "gold"):
        if name in mine[0] and method != baseline:
            gain = paired_bootstrap(column(rows, name, method), column(rows, name, baseline))
            out[f"{name}_gain"] = gain._asdict()
    return out


COLUMNS = {
    "method": "method",
    "rm_score": "RM score",
    "gold": "gold score",
    "kl": "KL (nats)",
    "tokens": "tokens",
    "updates_to_ppo": "updates to PPO's final RM score",
}


def table(summary: Sequence[dict], columns: Mapping[str, str] = COLUMNS) -> str:
    """The summary as a Markdown table; a gain stands behind its score with its 95 % interval.

    `columns` are names in the summary to headings. A value that is an interval (mean, low, high) shows all three.
    """
    names = [name for name in columns if any(name in row for row in summary)]
    lines = [[columns[name] for name in names], ["---"] * len(names)]
    lines += [[_cell(row, name) for name in names] for row in summary]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: dict, name: str) -> str:
    value = row.get(name)
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    gain = row.get(f"{name}_gain")
    return text + (f" ({gain['mean']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}])" if gain else "")
