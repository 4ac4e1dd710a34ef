"""The metrics of an update. All means are over valid tokens, macro actions or responses, without padding."""

import time
from collections.abc import Mapping, Sequence
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
    sums: dict[str, Tensor | int] = {}
    for name, x in numbers.items():
        x = exact(x)
        sums |= {
            f"{name} n": x.numel(),
            f"{name} total": x.sum(),
            f"{name} squares": x.square().sum(),
        }
    sums = sum_over_processes(sums, accelerator)
    return {
        name: Moments(*(sums[f"{name} {what}"] for what in Moments._fields)) for name in numbers
    }


def explained_variance(target: Moments, error: Moments) -> float:
    """1 − Var(Q̂ − V) / Var(Q̂): 1 for a perfect critic, 0 for a constant one; 0 if Q̂ does not vary."""
    return 1 - error.variance / target.variance if target.variance else 0.0


def update_metrics(
    batch: Batch, old: Experience, config: PPOTrainerConfig, accelerator: Accelerator
) -> dict[str, float]:
    """Metrics of one update over all processes; `old` are of the whole batch."""
    rollout, macro_actions, steps, mask = (
        batch.rollout,
        batch.macro_actions,
        batch.steps,
        batch.rollout.mask,
    )
    means = {
        "score_mean": rollout.scores,
        "response_length": rollout.lengths,
        "eos_rate": rollout.ended,
        "entropy": old.entropy[mask],
        "macro_actions": macro_actions.mask.sum(1),
        "macro_length": macro_actions.lengths[macro_actions.mask],
    }
    for estimator in ("k1", "k3"):  # of each response's KL(π || π_ref), in nats
        means[f"kl_{estimator}"] = kl_per_token(
            old.logprobs, rollout.ref_logprobs, mask, estimator
        ).sum(1)
    if rollout.gold is not None:
        means["gold_mean"] = rollout.gold
    if rollout.turns is not None:
        means["turns"] = torch.tensor([len(turns) for turns in rollout.turns])
        cut = [sum("observation_cut" in turn for turn in turns) for turns in rollout.turns]
        means["cut_observations"] = torch.tensor(cut)
    elements = {"advantage": old.advantages, "q": old.returns}
    for name, x in elements.items():  # the norm over a response's macro actions (figure 11)
        means[f"{name}_norm"] = exact(x.masked_fill(~steps.mask, 0.0)).norm(dim=1)
    # Explained variance is over tokens: each one's value against the return of its macro action.
    returns = exact(steps.broadcast(old.returns)[mask])
    numbers = means | {name: x[steps.mask] for name, x in elements.items()}
    statistics = moments(
        numbers | {"return": returns, "error": returns - exact(old.values[mask])}, accelerator
    )
    row = {name: statistics[name].mean for name in means}
    return (
        row
        | {f"{name}_rms": statistics[name].square ** 0.5 for name in elements}
        | {
            "score_std": statistics["score_mean"].variance ** 0.5,
            "explained_variance": explained_variance(statistics["return"], statistics["error"]),
            "kl_coef": config.kl_coef,
            # Mean pooling, as in the released code, divides each KL reward by the length of its macro action.
            "effective_kl_coef": config.kl_coef
            / (row["macro_length"] if config.reward_pooling == "mean" else 1.0),
            "tokens": int(statistics["response_length"].total),
        }
    )


def mean_over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps of an update."""
    means = {}
    for name in steps[0]:
        total = sum(step[name] for step in steps)
        means[name] = total / len(steps)
    return means


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
