"""The metrics of an update. All means are over valid tokens, macro actions or responses, without padding."""

import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.macro import kl_per_token
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.experience import Batch, Experience
from marlhf_lite.utils.precision import exact


class Moments(NamedTuple):
    """The count of some numbers, their sum, and the sum of their squares."""

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
        """The variance; 0 if the numbers differ only by rounding."""
        variance = self.square - self.mean**2
        return 0.0 if variance <= 1e-12 * self.square else variance


def moments(numbers: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Moments]:
    """The moments of each name's numbers over all processes, in float64."""
    sums: dict[str, Any] = {}
    for name, x in numbers.items():
        x = exact(x)
        sums[f"{name} n"] = x.numel()
        sums[f"{name} total"] = x.sum()
        sums[f"{name} squares"] = x.square().sum()
    sums = sum_over_processes(sums, accelerator)  # one wait for the device
    return {
        name: Moments(
            n=sums[f"{name} n"], total=sums[f"{name} total"], squares=sums[f"{name} squares"]
        )
        for name in numbers
    }


def explained_variance(target: Moments, error: Moments) -> float:
    """1 − Var(Q̂ − V) / Var(Q̂): 1 for a perfect critic, 0 for a constant one; 0 if Q̂ does not vary."""
    return 1 - error.variance / target.variance if target.variance else 0.0


def update_metrics(
    batch: Batch, old: Experience, config: PPOTrainerConfig, accelerator: Accelerator
) -> dict[str, float]:
    """Metrics of one update over all processes.

    `old` holds the models' outputs and the advantages of the whole batch, from before the update's optimizer steps.
    """
    rollout = batch.rollout
    mask = rollout.mask
    macro_actions = batch.macro_actions
    steps = batch.steps

    # Numbers that the row has as a mean, by the name of the metric.
    averaged = {
        "score_mean": rollout.scores,
        "response_length": rollout.lengths,
        "eos_rate": rollout.ended,
        "entropy": old.entropy[mask],
        "macro_actions": macro_actions.mask.sum(1),
        "macro_length": macro_actions.lengths[macro_actions.mask],
        # KL(π || π_ref) of each response, in nats.
        "kl_k1": kl_per_token(old.logprobs, rollout.ref_logprobs, mask, "k1").sum(1),
        "kl_k3": kl_per_token(old.logprobs, rollout.ref_logprobs, mask, "k3").sum(1),
    }
    if rollout.gold is not None:
        averaged["gold_mean"] = rollout.gold
    if rollout.turns is not None:
        averaged["turns"] = torch.tensor([len(turns) for turns in rollout.turns])
        averaged["cut_observations"] = torch.tensor([_count_cut(turns) for turns in rollout.turns])
    averaged["advantage_norm"] = _norm_of_responses(old.advantages, steps.mask)
    averaged["q_norm"] = _norm_of_responses(old.returns, steps.mask)

    # Numbers of which the row has other statistics: root mean squares, and the explained variance. That is over tokens:
    # the value of each token is compared with the return of its macro action.
    return_of_each_token = exact(steps.broadcast(old.returns)[mask])
    not_averaged = {
        "advantage": old.advantages[steps.mask],
        "q": old.returns[steps.mask],
        "return": return_of_each_token,
        "error": return_of_each_token - exact(old.values[mask]),
    }
    statistics = moments(averaged | not_averaged, accelerator)

    row: dict[str, float] = {name: statistics[name].mean for name in averaged}
    row["advantage_rms"] = statistics["advantage"].square ** 0.5
    row["q_rms"] = statistics["q"].square ** 0.5
    row["score_std"] = statistics["score_mean"].variance ** 0.5
    row["explained_variance"] = explained_variance(statistics["return"], statistics["error"])
    row["kl_coef"] = config.kl_coef
    row["effective_kl_coef"] = config.kl_coef
    if config.reward_pooling == "mean":
        # As in the released code, this divides each KL reward by the length of its macro action.
        row["effective_kl_coef"] /= row["macro_length"]
    row["tokens"] = int(statistics["response_length"].total)
    return row


def _norm_of_responses(x: Tensor, mask: Tensor) -> Tensor:
    """[B] norm of x [B, S] over a response's macro actions (figure 11)."""
    return exact(x.masked_fill(~mask, 0.0)).norm(dim=1)


def _count_cut(turns: list[dict]) -> int:
    """How many observations of a dialogue were cut."""
    return sum("observation_cut" in turn for turn in turns)


def mean_over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps of an update."""
    means = {}
    for name in steps[0]:
        total = sum(step[name] for step in steps)
        means[name] = total / len(steps)
    return means


class Clock:
    """Seconds spent in each phase of an update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = _now()

    def total(self) -> float:
        """Seconds since the clock was made."""
        return _now() - self.start

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
