"""How much of the final score PPO's critic predicts."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite.macro import MacroActions, macro_rewards
from marlhf_lite.training.metrics import Moments, explained_variance, moments
from marlhf_lite.utils.precision import exact

PARTS = ("", "_q1", "_q2", "_q3", "_q4")  # the whole response, and its quarters


def quarters(mask: Tensor) -> Tensor:
    """[B, T] int64: the quarter of the response (0 to 3) of each token; −1 on padding."""
    place = mask.cumsum(1) - 1
    return (4 * place // mask.sum(1, keepdim=True).clamp(min=1)).masked_fill(~mask, -1)


def critic_numbers(values: Tensor, scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The numbers from which `critic_metrics` says what a critic knows, by name; each in float64, without padding.

    Of each response: its `score`, the `change` of the critic's estimate of it from the first token to the last, and
    their product. Of each token: the `step` of the estimate to the next token; what its value should be, `target`, and
    the `error` of the value, both also by quarter of the response (`_q1` to `_q4`).

    Args:
        values: [B, T] V(s_t); mask: [B, T] True on response tokens.
        scores: [B] the final scores for training, or [B, K] those of turns, as in `macro.macro_rewards`.
    """
    # 1. Scores and values of the S tokens that the policy wrote, [B, S]. Each of them is taken as a macro action of its
    #    own: so what an environment said between two turns is left out, and a sum over a macro action is its one token.
    tokens = MacroActions.from_starts(mask, mask)
    no_kl = torch.zeros_like(values)
    # The score at the last token of the response or turn, 0 at all others.
    rewards = exact(macro_rewards(no_kl, scores, tokens))
    values = exact(tokens.sum(values))
    mask = tokens.mask.to(values.device)

    # 2. What a value predicts: the scores from its token on, so a sum from the right.
    targets = rewards.flip(1).cumsum(1).flip(1)
    score = targets[:, 0]  # of the whole response

    # 3. The critic's estimate of the whole score at each token: scores of earlier turns are known there.
    score_of_earlier_turns = score[:, None] - targets
    estimate = score_of_earlier_turns + values
    last_token = (mask.sum(1) - 1).clamp(min=0)  # 0 also for a response without tokens
    change = estimate.gather(1, last_token[:, None])[:, 0] - estimate[:, 0]
    numbers = {
        "score": score,
        "change": change,
        "change times score": change * score,
        "step": estimate.diff(dim=1)[mask[:, 1:]],
    }

    # 4. Targets and errors of all tokens, and of each quarter of the response.
    quarter = quarters(mask)  # 0 to 3, and -1 on padding
    regions = {"": mask} | {f"_q{i + 1}": quarter == i for i in range(4)}
    for part, inside in regions.items():
        numbers[f"target{part}"] = targets[inside]
        numbers[f"error{part}"] = (targets - values)[inside]
    return numbers


def critic_metrics(statistics: Mapping[str, Moments]) -> dict[str, float]:
    """How much of the final score the critic predicts, from the moments of `critic_numbers`.

    - score_explained_variance: 1 − Var(score − V) / Var(score) over tokens and by quarter (…_q1 to …_q4). It is 0 for a
      critic that cannot predict the score, rises to the last quarter for a good one, and is negative for one worse than
      a constant. If each turn has a score, "score" means the sum of the scores still to come here. In the two numbers
      below, the scores of earlier turns are then added to V, because they are known.
    - value_noise: root mean square of V(s_{t+1}) − V(s_t). If it is large and no variance is explained, V is noise.
    - credit_seen: Cov(V(s_T) − V(s_0), score) / Var(score): the share s of the credit that the critic has passed on
      before the last token (`marlhf_lab.credit.credit` measures s at every token, against Monte-Carlo values).
    """
    row = {}
    for part in PARTS:
        target = statistics[f"target{part}"]
        error = statistics[f"error{part}"]
        row[f"score_explained_variance{part}"] = explained_variance(target, error)
    row["value_noise"] = statistics["step"].square ** 0.5

    score = statistics["score"]
    covariance = statistics["change times score"].mean - score.mean * statistics["change"].mean
    row["credit_seen"] = covariance / score.variance if score.variance else 0.0
    return row


def diagnose_critic(
    values: Tensor, scores: Tensor, mask: Tensor, accelerator: Accelerator
) -> dict[str, float]:
    """`critic_metrics` of the responses of all processes, from the tensors that `critic_numbers` takes."""
    return critic_metrics(moments(critic_numbers(values, scores, mask), accelerator))
