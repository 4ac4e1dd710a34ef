"""Objectives to try or to change. From this folder: marlhf run --n 1 --lam 0.98979 --objective objectives:PastMean"""

import torch

from marlhf_lite.training.objective import Objective

# Two better baselines for PPO with a longer lambda. A baseline may be anything that was known before the token was
# sampled: the expected gradient stays the same, and only its noise changes. The mean of V over a macro action, which
# MA-PPO subtracts, was not known before all tokens of the action but its first.


def past_mean(values, rewards, batch, past=5, gamma=1.0):
    """[B, S] mean of the last `past` values of the turn, each less the rewards that were paid since then."""
    steps = batch.steps
    turn = steps.pool(steps.turns.ids.float(), "start")  # [B, S]: an environment may speak between two turns
    known, total, count = values, torch.zeros_like(values), torch.zeros_like(values)
    for back in range(past):  # `known` is what the value of `back` steps ago says of the rewards that are left
        same = steps.mask & (turn.roll(back, 1) == turn) & (torch.arange(values.shape[1], device=turn.device) >= back)
        total, count = total + known.where(same, 0.0), count + same
        known = (known - rewards).roll(1, 1) / gamma
    return total / count.clamp(min=1)


class PastMean(Objective):
    """Â = Q̂ − mean of the last five values: the expected gradient of PPO, with less of a critic's white noise."""

    def estimate(self, rewards, values, batch):
        advantages, returns = super().estimate(rewards, values, batch)
        baseline = past_mean(values, rewards, batch, gamma=self.config.gamma)
        return advantages + values - baseline, returns


class Fitted(Objective):
    """Â = Q̂ − (a + b V + c · past mean); a, b, c are least squares over the batch's other responses."""

    def estimate(self, rewards, values, batch):
        advantages, returns = super().estimate(rewards, values, batch)
        past = past_mean(values, rewards, batch, gamma=self.config.gamma)
        x = torch.stack([torch.ones_like(values), values, past], 2).double() * batch.steps.mask[..., None]  # [B, S, 3]
        gram, moment = x.mT @ x, x.mT @ (advantages + values).double()[..., None]  # of each response
        others = torch.linalg.pinv(gram.sum(0) - gram, hermitian=True, rtol=1e-9) @ (moment.sum(0) - moment)
        return advantages + values - (x @ others)[..., 0].to(values), returns
