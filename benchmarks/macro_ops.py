"""Time the macro-action functions against plain loops, side by side in one run.

Both do the same job on the same ragged batch: segmentation, macro values, KL and macro rewards, GAE, policy and value
loss, and the backward pass of both losses. The loop version is what one writes from the equations: one response at a
time, one macro action at a time, on float32 tensors. Prints a table and one JSON line.

    python benchmarks/macro_ops.py --batch 64 --tokens 512 --n 5
"""

import argparse
import gc
import json
import statistics
import time

import torch
from torch import Tensor

from marlhf_lite.macro import (
    FixedNGram,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
)

BETA = 0.05
LAM = 0.95
CLIP = 0.2
STAGES = ("segmentation", "values", "rewards", "gae", "policy_loss", "value_loss", "backward")


class Clock:
    """Seconds spent between marks, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] = now - self.last
        self.last = now


def make_batch(batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """Random log-probabilities, values [B, T] and scores [B] for responses of tokens/4 to tokens tokens.

    The first response has the full length, so that no column is padding alone.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(tokens // 4, tokens + 1, (batch,), generator=g)
    lengths[0] = tokens
    old = -torch.rand(batch, tokens, generator=g) * 4
    noise = [torch.randn(batch, tokens, generator=g) for _ in range(4)]
    return {
        "mask": torch.arange(tokens) < lengths[:, None],
        "logprobs": old + 0.1 * noise[0],
        "old_logprobs": old,
        "ref_logprobs": old + 0.2 * noise[1],
        "values": noise[2] + 0.1 * noise[3],
        "old_values": noise[2],
        "scores": torch.randn(batch, generator=g),
    }


def library(data: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Clock]:
    """Both losses and their gradients by the library's functions, and the clock with the time of each stage."""
    logprobs = data["logprobs"].clone().requires_grad_()
    values = data["values"].clone().requires_grad_()
    clock = Clock()
    macro = FixedNGram(n)(data["mask"])
    clock.mark("segmentation")
    old = macro_values(data["old_values"], macro)
    clock.mark("values")
    kl = kl_rewards(data["old_logprobs"], data["ref_logprobs"], data["mask"], BETA)
    rewards = macro_rewards(kl, data["scores"], macro)
    clock.mark("rewards")
    advantages, returns = gae(rewards, old, macro.mask, lam=LAM)
    clock.mark("gae")
    policy, _ = policy_loss(logprobs, data["old_logprobs"], advantages, macro, clip=CLIP)
    clock.mark("policy_loss")
    value, _ = value_loss(values, data["old_values"], returns, macro, clip=CLIP)
    clock.mark("value_loss")
    (policy + value).backward()
    clock.mark("backward")
    return policy.detach(), value.detach(), logprobs.grad, values.grad, clock


def loops(data: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Clock]:
    """What `library` returns, computed by loops over responses and macro actions."""
    logprobs = data["logprobs"].clone().requires_grad_()
    values = data["values"].clone().requires_grad_()
    clock = Clock()
    totals = data["mask"].sum(1).tolist()
    sizes = [[min(n, total - a) for a in range(0, total, n)] for total in totals]
    clock.mark("segmentation")
    old_values = pieces(data["old_values"], sizes)
    old = [[piece.mean() for piece in row] for row in old_values]
    clock.mark("values")
    old_logprobs = pieces(data["old_logprobs"], sizes)
    rewards = loop_rewards(old_logprobs, pieces(data["ref_logprobs"], sizes), data["scores"])
    clock.mark("rewards")
    advantages = [loop_gae(r, v) for r, v in zip(rewards, old)]
    returns = [[a + v for a, v in zip(*row)] for row in zip(advantages, old)]
    clock.mark("gae")
    policy = loop_policy_loss(pieces(logprobs, sizes), old_logprobs, advantages) / sum(totals)
    clock.mark("policy_loss")
    value = loop_value_loss(pieces(values, sizes), old_values, returns) / sum(totals)
    clock.mark("value_loss")
    (policy + value).backward()
    clock.mark("backward")
    return policy.detach(), value.detach(), logprobs.grad, values.grad, clock


def pieces(x: Tensor, sizes: list[list[int]]) -> list[tuple[Tensor, ...]]:
    """For each response of x [B, T] a list with one tensor for each macro action.

    They are made by `unbind` and `split`, because the backward pass of x[i, a:b] would fill a whole [B, T] tensor for
    each of them.
    """
    return [row[: sum(size)].split(size) for row, size in zip(x.unbind(0), sizes)]


def loop_rewards(old: list, ref: list, scores: Tensor) -> list[list[Tensor]]:
    """Macro rewards of each response: the sums of −β (log π_old − log π_ref), and the score added to the last."""
    out = []
    for old_row, ref_row, score in zip(old, ref, scores):
        sums = [(-BETA * (a - b)).sum() for a, b in zip(old_row, ref_row)]
        sums[-1] = sums[-1] + score
        out.append(sums)
    return out


def loop_gae(rewards: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Advantages of one response's macro actions by GAE's backward recursion, with γ = 1."""
    out = []
    following = 0.0
    running = 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        running = reward + following - value + LAM * running
        following = value
        out.append(running)
    return out[::-1]


def loop_policy_loss(new: list, old: list, advantages: list) -> Tensor:
    """The clipped policy loss, with the ratio of each token, summed over all tokens."""
    total = 0.0
    for rows in zip(new, old, advantages):
        for now, then, gain in zip(*rows):
            ratio = torch.exp(now - then)
            total = total + torch.max(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()
    return total


def loop_value_loss(new: list, old: list, returns: list) -> Tensor:
    """The clipped value loss of every token's value against its macro action's return, summed over all tokens."""
    total = 0.0
    for rows in zip(new, old, returns):
        for now, then, goal in zip(*rows):
            kept = torch.clamp(now, then - CLIP, then + CLIP)
            total = total + 0.5 * torch.max((now - goal) ** 2, (kept - goal) ** 2).sum()
    return total


def measure(run, data: dict[str, Tensor], n: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each stage and of the total."""
    gc.collect()
    gc.disable()  # as timeit does: the collector would walk the loops' many small tensors
    clocks = [run(data, n)[-1].spent for _ in range(repeats)]
    gc.enable()
    out = {stage: 1e3 * statistics.median(c[stage] for c in clocks) for stage in STAGES}
    out["total"] = 1e3 * statistics.median(sum(c.values()) for c in clocks)
    return out


def main() -> None:
    """Check that both agree, then time both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64, help="responses")
    parser.add_argument("--tokens", type=int, default=512, help="longest response, in tokens")
    parser.add_argument("--n", type=int, default=5, help="tokens in a macro action")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of the library")
    parser.add_argument("--loop-repeats", type=int, default=5, help="timed runs of the loops")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = make_batch(args.batch, args.tokens, args.seed)
    for ours, theirs in zip(library(data, args.n)[:4], loops(data, args.n)[:4]):  # also warms up
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)

    fast = measure(library, data, args.n, args.repeats)
    slow = measure(loops, data, args.n, args.loop_repeats)
    print(f"{'ms (median)':14}{'library':>10}{'loops':>12}{'ratio':>9}")
    for stage in (*STAGES, "total"):
        print(f"{stage:14}{fast[stage]:10.3f}{slow[stage]:12.2f}{slow[stage] / fast[stage]:9.0f}")
    record = {**vars(args), "torch": torch.__version__, "library_ms": round(fast["total"], 3)}
    record |= {
        "loops_ms": round(slow["total"], 2),
        "speedup": round(slow["total"] / fast["total"], 1),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
