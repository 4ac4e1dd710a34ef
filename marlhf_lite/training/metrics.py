"""What is recorded of an update. All means are over valid tokens, macro actions or responses, never over padding."""

import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite.config.method import MacroConfig
from marlhf_lite.macro import MacroActions, kl_per_token
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.experience import Batch, Experience
from marlhf_lite.utils.precision import exact

PARTS = ("", "_q1", "_q2", "_q3", "_q4")  # the whole response, and its quarters


class Moments(NamedTuple):
    """What is known of some numbers: how many there are, their sum, and the sum of their squares."""

    n: float
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / max(self.n, 1)

    @property
    def square(self) -> float:
        """The mean of the squares."""
        return self.squares / max(self.n, 1)

    @property
    def variance(self) -> float:
        """0 where the numbers differ by rounding alone."""
        variance = self.square - self.mean**2
        return 0.0 if variance <= 1e-12 * self.square else variance


def moments(numbers: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Moments]:
    """The moments of each name's numbers, of all processes together, in float64."""
    sums: dict[str, Tensor | int] = {}
    for name, x in numbers.items():
        x = exact(x)
        sums |= {f"{name} n": x.numel(), f"{name} total": x.sum(), f"{name} squares": x.square().sum()}
    sums = sum_over_processes(sums, accelerator)
    return {name: Moments(*(sums[f"{name} {what}"] for what in Moments._fields)) for name in numbers}


def explained_variance(target: Moments, error: Moments) -> float:
    """1 − Var(Q̂ − V) / Var(Q̂); 1 is a perfect critic, 0 no better than a constant. 0 where Q̂ does not vary."""
    return 1 - error.variance / target.variance if target.variance else 0.0


def quarters(mask: Tensor) -> Tensor:
    """[B, T] int64: the quarter of the response (0 to 3) that each token lies in; −1 on padding."""
    place = mask.cumsum(1) - 1
    return (4 * place // mask.sum(1, keepdim=True).clamp(min=1)).masked_fill(~mask, -1)


def critic_numbers(values: Tensor, scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What `critic_metrics` are made of, by name.

    Args:
        values: [B, T] V(s_t); scores: [B] the final scores; mask: [B, T] True on response tokens.
    """
    tokens = MacroActions.from_starts(mask, mask)  # each on its own: without the holes between turns
    values, scores = exact(tokens.sum(values)), exact(scores)
    mask = tokens.mask.to(values.device)
    quarter, targets, last = quarters(mask), scores[:, None].expand_as(values), (mask.sum(1) - 1).clamp(min=0)
    change = values.gather(1, last[:, None])[:, 0] - values[:, 0]
    numbers = {"score": scores, "change": change, "change times score": change * scores}
    numbers["step"] = values.diff(dim=1)[mask[:, 1:]]
    for i, part in enumerate(PARTS):
        inside = quarter == i - 1 if part else mask
        numbers |= {f"target{part}": targets[inside], f"error{part}": (targets - values)[inside]}
    return numbers


def critic_metrics(statistics: Mapping[str, Moments]) -> dict[str, float]:
    """What the critic knows of the final score, from the moments of `critic_numbers`.

    - score_explained_variance: 1 − Var(score − V) / Var(score) over tokens, and by quarter (…_q1 to …_q4). A blind
      critic has 0 everywhere, a good one rises to the last quarter; a negative one is worse than a constant.
    - value_noise: root mean square of V(s_{t+1}) − V(s_t). Where it is large and nothing is explained, the critic is
      noisy.
    - credit_seen: Cov(V(s_T) − V(s_0), score) / Var(score): the share s of the credit that the critic has passed on
      before the last token (`lab.credit.credit` measures s at every place, against Monte-Carlo values).
    """
    names = {part: (f"target{part}", f"error{part}") for part in PARTS}
    row = {
        f"score_explained_variance{x}": explained_variance(statistics[t], statistics[e]) for x, (t, e) in names.items()
    }
    covariance = statistics["change times score"].mean - statistics["score"].mean * statistics["change"].mean
    variance = statistics["score"].variance
    return row | {
        "value_noise": statistics["step"].square ** 0.5,
        "credit_seen": covariance / variance if variance else 0.0,
    }


def update_metrics(
    batch: Batch,
    old: Experience,
    kl_coef: float,
    macro_config: MacroConfig,
    accelerator: Accelerator,
    diagnose_critic: bool = True,
) -> dict[str, float]:
    """Metrics of one update over all processes, `critic_metrics` among them if asked; `old` are of the whole batch."""
    rollout, steps, mask = batch.rollout, batch.steps, batch.rollout.mask
    # Explained variance is over tokens: each one's value against the return of its macro action.
    returns = exact(steps.broadcast(old.returns)[mask])
    numbers = {
        "score": rollout.scores,
        "tokens": rollout.lengths,
        "ended": rollout.ended,
        "entropy": old.entropy[mask],
        "return": returns,
        "return error": returns - exact(old.values[mask]),
        "steps": steps.mask.sum(1),
        "step length": steps.lengths[steps.mask],
    }
    for estimator in ("k1", "k3"):  # of each response's KL(π || π_ref), in nats
        numbers[estimator] = kl_per_token(old.logprobs, rollout.ref_logprobs, mask, estimator).sum(1)
    for name, x in (("advantage", old.advantages), ("q", old.returns)):
        numbers |= {name: x[steps.mask], f"{name} norm": exact(x.masked_fill(~steps.mask, 0.0)).norm(dim=1)}
    if rollout.gold is not None:
        numbers["gold"] = rollout.gold
    if rollout.turns is not None:
        numbers["turns"] = torch.tensor([len(turns) for turns in rollout.turns])
    if diagnose_critic:
        numbers |= critic_numbers(old.values, rollout.scores, mask)
    statistics = moments(numbers, accelerator)
    macro_length = statistics["step length"].mean
    row = {
        "rm_score_mean": statistics["score"].mean,
        "rm_score_std": statistics["score"].variance ** 0.5,
        "kl_k1": statistics["k1"].mean,
        "kl_k3": statistics["k3"].mean,
        "response_length": statistics["tokens"].mean,
        "eos_rate": statistics["ended"].mean,
        "entropy": statistics["entropy"].mean,
        "explained_variance": explained_variance(statistics["return"], statistics["return error"]),
        **(critic_metrics(statistics) if diagnose_critic else {}),
        "macro_actions": statistics["steps"].mean,
        "macro_length": macro_length,
        "kl_coef": kl_coef,
        # Mean pooling, as in the released code, divides each KL reward by the length of its macro action.
        "effective_kl_coef": kl_coef / (macro_length if macro_config.reward_pooling == "mean" else 1.0),
        "tokens": int(statistics["tokens"].total),
    }
    if "gold" in statistics:
        row["gold_mean"] = statistics["gold"].mean
    if "turns" in statistics:
        row["turns"] = statistics["turns"].mean
    for name in ("advantage", "q"):
        # The norm over a response's macro actions, averaged over responses (figure 11), and the size of one element.
        row |= {f"{name}_norm": statistics[f"{name} norm"].mean, f"{name}_rms": statistics[name].square ** 0.5}
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
