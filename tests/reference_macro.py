"""The equations as plain float64 loops, and ragged batches to try them on.

Nothing here uses marlhf_lite. Responses are lists of scalars: floats, or 0-d float64 tensors for gradients.
A segmentation is a list of lengths for each response. What an environment says between turns is in no list.
"""

import itertools
import random

import torch

SIGMAS = ("equal", "unit", "start", "position", "position_reversed")


# -- batches ------------------------------------------------------------------------------------------------------


def starts(lengths: list[list[int]], mask: torch.Tensor) -> torch.Tensor:
    """[B,T] bool, True at the first token of each macro action.

    `lengths` are those of each row's macro actions, in tokens of `mask` [B,T]; tokens that it leaves out count nowhere.
    """
    flags = torch.zeros_like(mask)
    for row, lengths_of_row in enumerate(lengths):
        assert sum(lengths_of_row) == mask[row].sum()
        places = mask[row].nonzero().flatten()  # of the tokens that count
        firsts = [0, *itertools.accumulate(lengths_of_row)][
            :-1
        ]  # the last sum is the end of the row
        flags[row, places[firsts]] = True
    return flags


def random_lengths(rng: random.Random, tokens: int) -> list[int]:
    """Random lengths of 1 to 6 that add up to `tokens`."""
    out = []
    while tokens:
        out.append(rng.randint(1, min(tokens, 6)))
        tokens -= out[-1]
    return out


def fixed_lengths(tokens: int, n: float) -> list[int]:
    """Lengths of n that add up to `tokens`; the last may be shorter."""
    out = []
    while tokens:
        out.append(int(min(n, tokens)))
        tokens -= out[-1]
    return out


def random_turns(rng: random.Random, tokens: int) -> list[bool]:
    """A row of a mask with `tokens` tokens in turns of up to nine.

    After each turn, and now and then before the first, there are places that are False, as an environment's texts are.
    """
    row = [False] * rng.choice([0, 0, 2])
    while tokens:
        turn = rng.randint(1, min(tokens, 9))
        row += [True] * turn + [False] * rng.randint(1, 4)
        tokens -= turn
    return row


def turn_lengths(row: list[bool]) -> list[int]:
    """How many tokens each turn of a row of a mask has: turns are runs of True."""
    return [len(list(run)) for acted, run in itertools.groupby(row) if acted]


class Batch:
    """Ragged random data: a row of T tokens, rows of 1 and of 0 tokens, random ones, and `tail` columns of padding.

    If the seed is odd, the responses are in turns, with holes between them. Padding and holes hold NaN in every tensor.
    """

    def __init__(self, seed: int, T: int = 23, rows: int = 7, tail: int = 3, noise: float = 0.3):
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.counts = [T, 1, 0] + [rng.randint(2, T - 1) for _ in range(rows - 3)]
        masks = [random_turns(rng, c) if seed % 2 else [True] * c for c in self.counts]
        self.B, self.T = rows, max(map(len, masks)) + tail
        self.mask = torch.tensor([row + [False] * (self.T - len(row)) for row in masks])
        self.turns = [turn_lengths(row) for row in masks]
        self.parts = [[n for turn in row for n in random_lengths(rng, turn)] for row in self.turns]
        self.old_logprobs = self._pad(-torch.rand(rows, self.T, generator=g) * 4)
        self.logprobs = self._pad(
            self.old_logprobs + noise * torch.randn(rows, self.T, generator=g)
        )
        self.ref_logprobs = self._pad(
            self.old_logprobs + 0.4 * torch.randn(rows, self.T, generator=g)
        )
        self.old_values = self._pad(torch.randn(rows, self.T, generator=g))
        self.values = self._pad(self.old_values + 0.3 * torch.randn(rows, self.T, generator=g))
        self.scores = torch.randn(rows, generator=g)
        self.generator = g

    def _pad(self, x):
        """x [B,T] with NaN on padding and holes."""
        return x.masked_fill(~self.mask, float("nan"))

    def steps(self, parts=None):
        """A random [B,S] tensor with NaN on padding."""
        parts = parts or self.parts
        x = torch.randn(self.B, max(map(len, parts)), generator=self.generator)
        return x.masked_fill(
            ~torch.tensor([[s < len(p) for s in range(x.shape[1])] for p in parts]), float("nan")
        )

    def rows(self, x):
        """[B,T] → lists of floats, valid tokens only."""
        return [row[m].double().tolist() for row, m in zip(x, self.mask)]

    def leaves(self, x):
        """[B,T] → a float64 leaf with zeros on padding, and lists of its valid scalars."""
        leaf = x.double().nan_to_num(0.0).requires_grad_()
        return leaf, [list(row[m].unbind()) for row, m in zip(leaf, self.mask)]

    def on_mask(self, lists):
        """Lists of floats, one a valid token → [B,T] float64, 0 elsewhere."""
        out = torch.zeros(self.B, self.T, dtype=torch.float64)
        out[self.mask] = torch.tensor([x for row in lists for x in row], dtype=torch.float64)
        return out


def valid(x, parts):
    """[B,S] → lists of floats, real macro actions only."""
    return [row[: len(p)].double().tolist() for row, p in zip(x, parts)]


def padded(lists, width):
    """Lists of floats → [B,width] float64, 0 on padding."""
    return torch.tensor(
        [list(map(float, row)) + [0.0] * (width - len(row)) for row in lists], dtype=torch.float64
    )


# -- macro actions ----------------------------------------------------------------------------------------------------


def split(xs, lengths):
    """One list for each macro action, from a list with one item for each token."""
    out, at = [], 0
    for n in lengths:
        out.append(xs[at : at + n])
        at += n
    assert at == len(xs)
    return out


def sigma_weights(n, sigma):
    """The weights σ of the n tokens of a macro action; they add up to 1."""
    if sigma == "equal":
        return [1 / n] * n
    if sigma == "unit":
        return [0.0] * (n - 1) + [1.0]
    if sigma == "start":
        return [1.0] + [0.0] * (n - 1)
    raw = [1 / (n - i) if sigma == "position" else 1 / (i + 1) for i in range(n)]
    return [w / sum(raw) for w in raw]


def pool(xs, lengths, sigma="equal"):
    """Σ σ_i x_i of each macro action."""
    return [sum(w * x for w, x in zip(sigma_weights(len(p), sigma), p)) for p in split(xs, lengths)]


def rewards(xs, score, lengths, pooling="sum", rho=1.0, sigma="equal"):
    """Macro rewards of one response from rewards `xs` of its tokens; the score is added to the last."""
    if pooling == "sum":
        out = [sum(rho**i * x for i, x in enumerate(p)) for p in split(xs, lengths)]
    else:
        out = pool(xs, lengths, sigma)
    if out:
        out[-1] = out[-1] + score
    return out


def turn_rewards(xs, scores, lengths, turns, **options):
    """`rewards` of a response in turns, each with its own score, as if each turn were a response.

    `turns` are the numbers of tokens of the turns; a macro action ends with its turn at the latest.
    """
    out, at = [], 0
    for score, part in zip(scores, split(xs, turns)):
        lengths_of_turn = []
        while sum(lengths_of_turn) < len(part):
            lengths_of_turn.append(lengths[at])
            at += 1
        out += rewards(part, score, lengths_of_turn, **options)
    return out


def gae(rs, vs, gamma=1.0, lam=0.95):
    """The backward recursion Â_t = δ_t + γλ_t·Â_{t+1}; `lam` is a number, or a list with one a step."""
    lams = lam if isinstance(lam, list) else [lam] * len(rs)
    advantages, running, following = [], 0.0, 0.0
    for r, v, one in zip(reversed(rs), reversed(vs), reversed(lams)):
        running = r + gamma * following - v + gamma * one * running
        following = v
        advantages.insert(0, running)
    return advantages, [a + v for a, v in zip(advantages, vs)]


# -- losses -----------------------------------------------------------------------------------------------------------


def clamp(x, low, high):
    return min(max(x, low), high)


def policy_terms(new, old, advantages, lengths, clip=0.2, ratio="token"):
    """The terms of the policy's loss of one response.

    There is one for each token with the ratio of tokens, and one for each macro action with the ratio of macro actions,
    which is the product over its tokens, or their geometric mean ("macro_mean").
    """
    terms = []
    for p, q, gain in zip(split(new, lengths), split(old, lengths), advantages):
        log_ratios = [a - b for a, b in zip(p, q)]
        joint = sum(log_ratios) / (len(p) if ratio == "macro_mean" else 1)
        for log_ratio in log_ratios if ratio == "token" else [joint]:
            r = torch.as_tensor(log_ratio, dtype=torch.float64).exp()
            term = r * gain if clip is None else min(r * gain, clamp(r, 1 - clip, 1 + clip) * gain)
            terms.append(-torch.as_tensor(term, dtype=torch.float64))
    return terms


def value_terms(new, old, returns, lengths, clip=0.2, target="token", sigma="equal"):
    """The terms of the critic's loss of one response: one for each token, or one for each macro action."""
    if target == "token":  # each token moves to the return of its macro action
        goals = [g for g, n in zip(returns, lengths) for _ in range(n)]
    else:
        new, old, goals = pool(new, lengths, sigma), pool(old, lengths, sigma), returns
    terms = []
    for v, u, goal in zip(new, old, goals):
        plain = (v - goal) ** 2
        terms.append(
            0.5
            * (plain if clip is None else max(plain, (clamp(v, u - clip, u + clip) - goal) ** 2))
        )
    return terms


def mean(terms_by_response, of="token"):
    """The mean over all terms, or, of "response", the mean over responses of the means of their terms."""
    if of == "response":
        means = [sum(row) / len(row) for row in terms_by_response if row]
        return sum(means) / len(means)
    terms = [t for row in terms_by_response for t in row]
    return sum(terms) / len(terms)
