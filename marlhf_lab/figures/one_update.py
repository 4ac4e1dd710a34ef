"""Every number of the page "One sentence, one update": the sentence of lesson 2, through PPO and MA-PPO.

The critic is anything between one that cannot predict the score and the critic of lesson 2 (sections 6 and 11).
"""

import math

import torch
from torch import Tensor

from marlhf_lab.credit.sentence import (
    BETA,
    BLIND,
    POLICY,
    REFERENCE,
    SCORE,
    SEEING,
    WANTED,
    WORDS,
    WRITTEN,
    of_sentence,
    table,
)
from marlhf_lab.credit.signal_kept import signal_kept
from marlhf_lite.macro import (
    FixedNGram,
    MacroActions,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
)

EPSILON, RATE = 0.2, 3.0
LONG = 101  # words of the answer in which the first word decided the score
# where the page begins
STORY = {"n": 3, "lam": 0.95, "sees": 0.0, "beta": 0.0, "steps": 0, "hole": 0}


def true_advantages() -> list[float]:
    """What each word changed in the expected score: ¼ if it is right, minus ¼ of its chance to be right."""
    chances = [torch.tensor(p).exp().item() for p in POLICY]
    return [0.25 * ((a == b) - p) for a, b, p in zip(WRITTEN, WANTED, chances, strict=True)]


def on_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Put the numbers of six words [1, 6] at the valid tokens of a mask [1, T]; NaN in a hole."""
    return x.new_full(mask.shape, math.nan).masked_scatter(mask, x)


def one_update(
    n: int, lam: float, sees: float, beta: float, steps: int, hole: int
) -> dict[str, list[float]]:
    """Return each row of the page as a list, for words (6 numbers) or for macro actions.

    Args:
        n: words in a macro action, from 1.
        lam: GAE's λ, per word for PPO and per macro action for MA-PPO.
        sees: from 0, a critic that expects 0.65 before every word, to 1, the critic of lesson 2.
        beta: the price of one nat of KL.
        steps: gradient steps on the sentence.
        hole: words that somebody else says after the third one.
    """
    mask = torch.tensor([[True] * 3 + [False] * hole + [True] * 3])
    values = torch.tensor([[BLIND + sees * (value - BLIND) for value in SEEING]])
    old, reference = (
        on_mask(of_sentence(table(logprobs)), mask) for logprobs in (POLICY, REFERENCE)
    )
    penalties = kl_rewards(old, reference, mask, beta)
    rows = {
        "V": values,
        "share": torch.tensor([[signal_kept(0, LONG, size, lam, 0.0) for size in (1, n)]]),
    }
    for name, macro in (("", FixedNGram(1)(mask)), ("macro_", FixedNGram(n)(mask))):
        rewards = macro_rewards(penalties, torch.tensor([SCORE]), macro)
        pooled = macro_values(on_mask(values, mask), macro)
        advantages, _ = gae(rewards, pooled, macro.mask, lam=lam)
        deltas, _ = gae(rewards, pooled, macro.mask, lam=0.0)  # GAE with λ = 0 is the TD error
        rows |= {
            f"{name}r": rewards,
            f"{name}V": pooled,
            f"{name}delta": deltas,
            f"{name}A": macro.broadcast(advantages)[mask][None],
        }
        rows |= {f"{name}{key}": row for key, row in after_steps(advantages, macro, steps).items()}
    return {name: row[0].tolist() for name, row in rows.items()}


def after_steps(advantages: Tensor, macro: MacroActions, steps: int) -> dict[str, Tensor]:
    """Probabilities, ratios, and which words the clip has stopped, after gradient steps on the policy loss [1, 6]."""
    logits, old, mask = table(POLICY), of_sentence(table(POLICY)), macro.token_mask
    for _ in range(steps + 1):  # the last slope shows which words the clip has stopped
        logits.requires_grad_()
        new = of_sentence(logits)
        loss, _ = policy_loss(
            on_mask(new, mask), on_mask(old, mask), advantages, macro, clip=EPSILON
        )
        slope, push = torch.autograd.grad(loss, (logits, new))
        logits = (logits - RATE * slope).detach()
    stopped = (push == 0) & (macro.broadcast(advantages)[mask] != 0)
    return {"p": new.detach().exp(), "rho": (new - old).detach().exp(), "stopped": stopped.float()}


def page_data() -> dict:
    """The page's input, and the library's rows for five settings, against which the page checks itself."""
    settings = [
        STORY,
        STORY | {"lam": 1.0},
        STORY | {"sees": 1.0},
        STORY | {"sees": 1.0, "beta": BETA, "steps": 4},
    ]
    settings.append(STORY | {"n": 4, "hole": 2})
    checks = [{"settings": setting, "rows": one_update(**setting)} for setting in settings]
    constants = {
        "score": SCORE,
        "beta": BETA,
        "epsilon": EPSILON,
        "rate": RATE,
        "long": LONG,
        "blind": BLIND,
    }
    tables = {
        "policy": table(POLICY).tolist(),
        "reference": table(REFERENCE).tolist(),
        "seeing": SEEING,
    }
    sentence = {"words": WORDS, "wanted": WANTED, "written": WRITTEN, "truth": true_advantages()}
    return constants | tables | sentence | {"story": STORY, "checks": checks}
