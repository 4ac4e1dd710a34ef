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

EPSILON = 0.2  # of the clip range
RATE = 3.0  # of gradient descent on the logits
LONG = 101  # words of the answer in which the first word decided the score
# the settings with which the page begins, see `one_update`
STORY = {"n": 3, "lam": 0.95, "sees": 0.0, "beta": 0.0, "steps": 0, "hole": 0}


def true_advantages() -> list[float]:
    """What each word changed in the expected score: a right word earns ¼, and ¼ times its chance was expected."""
    advantages = []
    for written, wanted, logprob in zip(WRITTEN, WANTED, POLICY, strict=True):
        chance = torch.tensor(logprob).exp().item()
        is_right = written == wanted
        advantages.append(0.25 * (is_right - chance))
    return advantages


def on_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Put the numbers of six words [1, 6] at the six True tokens of a mask [1, T]; the others, a hole, are NaN."""
    return x.new_full(mask.shape, math.nan).masked_scatter(mask, x)


def one_update(
    n: int, lam: float, sees: float, beta: float, steps: int, hole: int
) -> dict[str, list[float]]:
    """Return each row of the page as a list, with a number for each word (6 numbers) or for each macro action.

    Rows of MA-PPO have names that begin with `macro_`; those of PPO, whose macro actions are single words, have no
    such beginning. `share` has two numbers, PPO's and MA-PPO's: what the first of `LONG` words keeps of the credit.

    Args:
        n: words in a macro action, from 1.
        lam: GAE's λ, per word for PPO and per macro action for MA-PPO.
        sees: from 0, a critic that expects 0.65 before every word, to 1, the critic of lesson 2.
        beta: β of the KL penalty.
        steps: gradient steps on the sentence.
        hole: how many words an environment says after the third word.
    """
    # 1. What both methods share: the words, the critic's values before them, and the KL penalties.
    mask = torch.tensor([[True] * 3 + [False] * hole + [True] * 3])
    values = torch.tensor([[BLIND + sees * (value - BLIND) for value in SEEING]])
    old_logprobs = on_mask(of_sentence(table(POLICY)), mask)
    reference_logprobs = on_mask(of_sentence(table(REFERENCE)), mask)
    penalties = kl_rewards(old_logprobs, reference_logprobs, mask, beta)
    shares = [signal_kept(0, LONG, size, lam, seen=0.0) for size in (1, n)]
    rows = {"V": values, "share": torch.tensor([shares])}
    # 2. PPO, whose actions are single words, and MA-PPO.
    for method, macro in (("", FixedNGram(1)(mask)), ("macro_", FixedNGram(n)(mask))):
        rewards = macro_rewards(penalties, torch.tensor([SCORE]), macro)
        pooled = macro_values(on_mask(values, mask), macro)
        advantages, _ = gae(rewards, pooled, macro.mask, lam=lam)
        deltas, _ = gae(rewards, pooled, macro.mask, lam=0.0)  # GAE with λ = 0 is the TD error
        rows[f"{method}r"] = rewards
        rows[f"{method}V"] = pooled
        rows[f"{method}delta"] = deltas
        rows[f"{method}A"] = macro.broadcast(advantages)[mask][None]
        for name, row in after_steps(advantages, macro, steps).items():
            rows[f"{method}{name}"] = row
    return {name: row[0].tolist() for name, row in rows.items()}


def after_steps(advantages: Tensor, macro: MacroActions, steps: int) -> dict[str, Tensor]:
    """Do `steps` gradient steps on the policy loss, and return what they change in each word, [1, 6] each.

    Returns `p`, the words' probabilities; `rho`, the ratios of these to the old ones; and `stopped`, which is 1.0 for
    words that the clip has stopped.
    """
    logits = table(POLICY)
    old = of_sentence(logits)
    mask = macro.token_mask
    # A pass more than there are steps, for the slope after the last step: it shows which words the clip has stopped.
    # The logits that the last pass makes are not used.
    for _ in range(steps + 1):
        logits.requires_grad_()
        new = of_sentence(logits)
        loss, _ = policy_loss(
            on_mask(new, mask), on_mask(old, mask), advantages, macro, clip=EPSILON
        )
        slope, slope_of_words = torch.autograd.grad(loss, (logits, new))
        logits = (logits - RATE * slope).detach()
    # Without an advantage the slope is 0, too, but then it is not the clip that has stopped the word.
    has_advantage = macro.broadcast(advantages)[mask] != 0
    stopped = (slope_of_words == 0) & has_advantage
    return {"p": new.detach().exp(), "rho": (new - old).detach().exp(), "stopped": stopped.float()}


def page_data() -> dict:
    """Return the page's input, and the library's rows for five settings, with which the page compares its own."""
    settings = [
        STORY,
        STORY | {"lam": 1.0},
        STORY | {"sees": 1.0},
        STORY | {"sees": 1.0, "beta": BETA, "steps": 4},
        STORY | {"n": 4, "hole": 2},
    ]
    return {
        "score": SCORE,
        "beta": BETA,
        "epsilon": EPSILON,
        "rate": RATE,
        "long": LONG,
        "blind": BLIND,
        "policy": table(POLICY).tolist(),
        "reference": table(REFERENCE).tolist(),
        "seeing": SEEING,
        "words": WORDS,
        "wanted": WANTED,
        "written": WRITTEN,
        "truth": true_advantages(),
        "story": STORY,
        "checks": [{"settings": setting, "rows": one_update(**setting)} for setting in settings],
    }
