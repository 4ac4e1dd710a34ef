"""Objectives to try or to change. From this folder: marlhf run --n 1 --lam 0.98979 --objective objectives:PastMean"""

from dataclasses import replace

import torch

from marlhf_lite.training.objective import Objective

# Two better baselines for PPO with a larger lambda. A baseline may be anything that was known before the token was
# sampled: the expected gradient stays the same, and only its noise changes. The mean of V over a macro action, which
# MA-PPO subtracts, was not known before all tokens of the action but its first.


def past_mean(values, rewards, batch, past=5, gamma=1.0):
    """[B, S] mean of the last `past` values of the turn, each less the rewards that were paid since then.

    values, rewards: [B, S] of the steps of `batch`: tokens or macro actions.
    """
    steps = batch.steps
    # [B, S] the number of each step's turn: an environment may speak between two turns.
    turn = steps.pool(steps.turns.ids.float(), "start")
    place = torch.arange(values.shape[1], device=turn.device)
    total = torch.zeros_like(values)
    count = torch.zeros_like(values)
    # At each step, what the value of `back` steps ago says of the rewards that are left.
    known = values
    for back in range(past):
        is_same_turn = turn.roll(back, 1) == turn
        is_there = place >= back  # at the first steps `roll` puts the last ones
        counts = steps.mask & is_same_turn & is_there
        total = total + known.where(counts, 0.0)
        count = count + counts
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
        columns = torch.stack([torch.ones_like(values), values, past], 2)  # [B, S, 3]
        x = columns.double() * batch.steps.mask[..., None]
        y = (advantages + values).double()[..., None]
        # Sums of each response; all of them less its own are those of the other responses.
        gram = x.mT @ x  # [B, 3, 3]
        moment = x.mT @ y  # [B, 3, 1]
        inverse = torch.linalg.pinv(gram.sum(0) - gram, hermitian=True, rtol=1e-9)
        coefficients = inverse @ (moment.sum(0) - moment)
        baseline = (x @ coefficients)[..., 0].to(values)
        return advantages + values - baseline, returns


# What people compare PPO with, each in the slot that it changes. GSPO's ratio of whole responses (arXiv 2507.18071) is
# two options, --termination whole --ratio macro_mean, with a narrow clip range such as --cliprange 0.0004.
# DAPO's mean over tokens is what `count` gives anyway. EntropyMask does not go with --whiten, which moves the zeros.


class ClipHigher(Objective):
    """DAPO (arXiv 2503.14476): 1 − ε ≤ ρ ≤ 1 + 0.28: rare tokens may grow."""

    high = 0.28

    def policy_loss(self, batch, outputs, old, count):
        gain = batch.steps.broadcast(old.advantages)  # [B, T]
        ratio = (outputs.logprobs - old.logprobs).exp()
        clipped = ratio.clamp(1 - self.config.cliprange, 1 + self.high)
        return -torch.minimum(gain * ratio, gain * clipped).sum() / count, {}


class EntropyMask(Objective):
    """80/20 (arXiv 2506.01939): a fifth of the steps, with the highest entropy."""

    share = 0.2

    def advantages(self, batch, outputs):
        made = super().advantages(batch, outputs)
        entropy = batch.steps.pool(made.entropy)  # [B, S], the mean over a macro action
        # of all responses of the update
        lowest = entropy[batch.steps.mask].quantile(1 - self.share)
        return replace(made, advantages=made.advantages.where(entropy >= lowest, 0.0))


class DrGRPO(Objective):
    """Dr. GRPO (arXiv 2503.20783): a constant instead of the count of tokens."""

    def policy_loss(self, batch, outputs, old, count):
        loss, stats = super().policy_loss(batch, outputs, old, count)
        responses = self.config.batch_size / self.config.num_mini_batches  # of an optimizer step
        return loss * count / (responses * self.config.max_response_length), stats


class SamplerWeights(Objective):
    """Weights min(π_old / μ, 3) of tokens that a sampler μ drew (as in TRL, OpenRLHF and verl)."""

    most = 3.0

    def policy_loss(self, batch, outputs, old, count):
        sampled = batch.rollout.sampled_logprobs
        if sampled is None:  # as after --resume with --sampler generate
            return super().policy_loss(batch, outputs, old, count)
        weights = (old.logprobs - sampled).exp().clamp(max=self.most)  # [B, T]
        gain = weights * batch.steps.broadcast(old.advantages)
        ratio = (outputs.logprobs - old.logprobs).exp()
        clipped = ratio.clamp(1 - self.config.cliprange, 1 + self.config.cliprange)
        return -torch.minimum(gain * ratio, gain * clipped).sum() / count, {}


class MissingEOS(Objective):
    """TRL's missing_eos_penalty: an answer that is cut before its end token scores less."""

    penalty = 1.0

    def rewards(self, batch, outputs):
        is_cut = ~batch.rollout.ended.to(batch.rollout.scores.device)  # [B]
        scores = batch.rollout.scores - self.penalty * is_cut
        rollout = replace(batch.rollout, scores=scores)
        return super().rewards(replace(batch, rollout=rollout), outputs)
