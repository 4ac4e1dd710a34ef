"""What is recorded of an update. All means are over valid tokens, macro actions or responses, never over padding."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.macro import MacroActions, kl_per_token
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.outputs import Batch, OldOutputs
from marlhf_lite.training.rollout import Rollout


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`(k1, k3)` [B], two estimates of each response's KL(π || π_ref) in nats: sums of `kl_per_token`."""
    k1, k3 = (kl_per_token(logprobs, ref_logprobs, mask, estimator).sum(1) for estimator in ("k1", "k3"))
    return k1, k3


def explained_variance(count: float, target: float, target_square: float, error: float, error_square: float) -> float:
    """1 − Var(Q̂ − V) / Var(Q̂), from sums over tokens; 1 is a perfect critic, 0 no better than a constant."""
    count = max(count, 1)
    variance = target_square / count - (target / count) ** 2
    if variance <= 1e-12 * target_square / count:  # returns that differ by rounding alone
        return 0.0
    return 1 - (error_square / count - (error / count) ** 2) / variance


QUARTERS = (1, 2, 3, 4)


def quarters(mask: Tensor) -> Tensor:
    """[B, T] int64: the quarter of the response (0 to 3) that each token lies in; −1 on padding."""
    place = torch.arange(mask.shape[1], device=mask.device)
    return (4 * place // mask.sum(1, keepdim=True).clamp(min=1)).masked_fill(~mask, -1)


def critic_sums(values: Tensor, scores: Tensor, mask: Tensor) -> dict[str, Tensor | int]:
    """Sums for what a critic knows of the final score, by quarter of the response; see `critic_metrics`.

    Args:
        values: [B, T] V(s_t); scores: [B] the final scores; mask: [B, T] True on response tokens.
    """
    values, scores = values.masked_fill(~mask, 0.0).double(), scores.double()
    lengths = mask.sum(1, keepdim=True)
    quarter = quarters(mask) + 1
    sums: dict[str, Tensor | int] = {}
    for q in QUARTERS:
        inside = quarter == q
        target, error = (x[inside] for x in (scores[:, None].expand_as(values), scores[:, None] - values))
        parts = {"count": inside.sum(), "target": target.sum(), "target_square": target.square().sum()}
        parts |= {"error": error.sum(), "error_square": error.square().sum()}
        sums |= {f"q{q}_{name}": x for name, x in parts.items()}
    neighbours = mask[:, 1:]
    change = values.gather(1, (lengths - 1).clamp(min=0))[:, 0] - values[:, 0]
    return sums | {
        "neighbours": neighbours.sum(),
        "value_steps": values.diff(dim=1).masked_fill(~neighbours, 0.0).square().sum(),
        "change": change.sum(),
        "change_times_score": (change * scores).sum(),
    }


def critic_metrics(sums: dict[str, float]) -> dict[str, float]:
    """What the critic knows of the final score, from `critic_sums`.

    - score_explained_variance: 1 − Var(score − V) / Var(score) over tokens, and by quarter (…_q1 to …_q4). A blind
      critic has 0 everywhere, a good one rises to the last quarter; a negative one is worse than a constant.
    - value_noise: root mean square of V(s_{t+1}) − V(s_t). Where it is large and nothing is explained, the critic is
      noisy.
    - credit_seen: Cov(V(s_T) − V(s_0), score) / Var(score): the share s of the credit that the critic has passed on
      before the last token (`lab.credit.credit` measures s at every place, against Monte-Carlo values).
    """
    names = ("count", "target", "target_square", "error", "error_square")
    by_quarter = [[sums[f"q{q}_{name}"] for name in names] for q in QUARTERS]
    row = {"score_explained_variance": explained_variance(*map(sum, zip(*by_quarter, strict=True)))}
    row |= {f"score_explained_variance_q{q}": explained_variance(*x) for q, x in zip(QUARTERS, by_quarter, strict=True)}
    responses = max(sums["responses"], 1)
    score = sums["score"] / responses
    variance = sums["score_square"] / responses - score**2
    covariance = sums["change_times_score"] / responses - score * sums["change"] / responses
    flat = variance <= 1e-12 * sums["score_square"] / responses
    row["value_noise"] = (sums["value_steps"] / max(sums["neighbours"], 1)) ** 0.5
    return row | {"credit_seen": 0.0 if flat else covariance / variance}


def metric_sums(rollout: Rollout, macro_actions: MacroActions, old: OldOutputs) -> dict[str, Tensor | int]:
    """Sums over this process's responses in float64, which add up over processes."""
    mask, tokens = rollout.mask, macro_actions.token_mask
    k1, k3 = kl_terms(old.logprobs, rollout.ref_logprobs, mask)
    # Explained variance is over tokens: each one's value against the return of its macro action.
    targets = macro_actions.broadcast(old.returns)[tokens].double()
    errors = targets - old.values[tokens].double()
    scores = rollout.scores.double()
    sums = {
        "responses": len(rollout),
        "tokens": mask.sum(),
        "actions": macro_actions.mask.sum(),
        "ended": rollout.ended.sum(),
        "score": scores.sum(),
        "score_square": scores.square().sum(),
        "k1": k1.double().sum(),
        "k3": k3.double().sum(),
        "entropy": old.entropy.masked_fill(~mask, 0.0).double().sum(),
        "target": targets.sum(),
        "target_square": targets.square().sum(),
        "error": errors.sum(),
        "error_square": errors.square().sum(),
    }
    if rollout.gold is not None:
        sums["gold"] = rollout.gold.double().sum()
    for name, x in (("advantage", old.advantages), ("q", old.returns)):
        x = x.masked_fill(~macro_actions.mask, 0.0).double()
        sums |= {f"{name}_norm": x.norm(dim=1).sum(), f"{name}_square": x.square().sum()}
    return sums


def update_metrics(
    batch: Batch,
    old: OldOutputs,
    kl_coef: float,
    macro_config: MacroConfig,
    accelerator: Accelerator,
    diagnose_critic: bool = True,
) -> dict[str, float]:
    """Metrics of one update over all processes, `critic_metrics` among them if asked; `old` are of the whole batch."""
    rollout = batch.rollout
    sums = metric_sums(rollout, batch.steps, old)
    if diagnose_critic:
        sums |= critic_sums(old.values, rollout.scores, rollout.mask)
    sums = sum_over_processes(sums, accelerator)
    responses, tokens, actions = (max(sums[name], 1) for name in ("responses", "tokens", "actions"))
    mean, macro_length = sums["score"] / responses, sums["tokens"] / actions
    row = {
        "rm_score_mean": mean,
        "rm_score_std": max(sums["score_square"] / responses - mean**2, 0.0) ** 0.5,
        "kl_k1": sums["k1"] / responses,
        "kl_k3": sums["k3"] / responses,
        "response_length": sums["tokens"] / responses,
        "eos_rate": sums["ended"] / responses,
        "entropy": sums["entropy"] / tokens,
        "explained_variance": explained_variance(
            tokens, *(sums[name] for name in ("target", "target_square", "error", "error_square"))
        ),
        **(critic_metrics(sums) if diagnose_critic else {}),
        "macro_actions": sums["actions"] / responses,
        "macro_length": macro_length,
        "kl_coef": kl_coef,
        # Mean pooling, as in the released code, divides each KL reward by the length of its macro action.
        "effective_kl_coef": kl_coef / (macro_length if macro_config.reward_pooling == "mean" else 1.0),
        "tokens": int(sums["tokens"]),
    }
    if "gold" in sums:
        row["gold_mean"] = sums["gold"] / responses
    for name in ("advantage", "q"):
        # The norm over a response's macro actions, averaged over responses (figure 11), and the size of one element.
        row[f"{name}_norm"] = sums[f"{name}_norm"] / responses
        row[f"{name}_rms"] = (sums[f"{name}_square"] / actions) ** 0.5
    return row


class Clock:
    """Seconds spent in each phase of an update."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str):
        """`with clock.phase("scoring"): ...` adds the time of the block to that phase."""
        start = _now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + _now() - start


def _now() -> float:
    if torch.cuda.is_available():  # CUDA kernels are asynchronous: wait before reading the clock
        torch.cuda.synchronize()
    return time.perf_counter()
