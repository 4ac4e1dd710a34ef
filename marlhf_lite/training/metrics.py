"""What is recorded of an update. All means are over valid tokens, macro actions or responses, never over padding."""

import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.macro import kl_per_token
from marlhf_lite.training.distributed import sum_over_processes
from marlhf_lite.training.experience import Batch, Experience
from marlhf_lite.utils.precision import exact


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


def update_metrics(
    batch: Batch,
    old: Experience,
    config: PPOTrainerConfig,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Metrics of one update over all processes; `old` are of the whole batch."""
    rollout, macro_actions, steps, mask = batch.rollout, batch.macro_actions, batch.steps, batch.rollout.mask
    # Explained variance is over tokens: each one's value against the return of its macro action.
    returns = exact(steps.broadcast(old.returns)[mask])
    numbers = {
        "score": rollout.scores,
        "tokens": rollout.lengths,
        "ended": rollout.ended,
        "entropy": old.entropy[mask],
        "return": returns,
        "return error": returns - exact(old.values[mask]),
        "macro actions": macro_actions.mask.sum(1),
        "macro length": macro_actions.lengths[macro_actions.mask],
    }
    for estimator in ("k1", "k3"):  # of each response's KL(π || π_ref), in nats
        numbers[estimator] = kl_per_token(old.logprobs, rollout.ref_logprobs, mask, estimator).sum(1)
    for name, x in (("advantage", old.advantages), ("q", old.returns)):
        numbers |= {name: x[steps.mask], f"{name} norm": exact(x.masked_fill(~steps.mask, 0.0)).norm(dim=1)}
    if rollout.gold is not None:
        numbers["gold"] = rollout.gold
    if rollout.turns is not None:
        numbers["turns"] = torch.tensor([len(turns) for turns in rollout.turns])
        numbers["cut"] = torch.tensor([sum("observation_cut" in turn for turn in turns) for turns in rollout.turns])
    statistics = moments(numbers, accelerator)
    macro_length = statistics["macro length"].mean
    row = {
        "score_mean": statistics["score"].mean,
        "score_std": statistics["score"].variance ** 0.5,
        "kl_k1": statistics["k1"].mean,
        "kl_k3": statistics["k3"].mean,
        "response_length": statistics["tokens"].mean,
        "eos_rate": statistics["ended"].mean,
        "entropy": statistics["entropy"].mean,
        "explained_variance": explained_variance(statistics["return"], statistics["return error"]),
        "macro_actions": statistics["macro actions"].mean,
        "macro_length": macro_length,
        "kl_coef": config.kl_coef,
        # Mean pooling, as in the released code, divides each KL reward by the length of its macro action.
        "effective_kl_coef": config.kl_coef / (macro_length if config.reward_pooling == "mean" else 1.0),
        "tokens": int(statistics["tokens"].total),
    }
    means = {"gold": "gold_mean", "turns": "turns", "cut": "cut_observations"}
    row |= {name: statistics[x].mean for x, name in means.items() if x in statistics}
    for name in ("advantage", "q"):
        # The norm over a response's macro actions, averaged over responses (figure 11), and the size of one element.
        row |= {f"{name}_norm": statistics[f"{name} norm"].mean, f"{name}_rms": statistics[name].square ** 0.5}
    return row


class Clock:
    """Seconds spent in each phase of an update."""

    def __init__(self):
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
