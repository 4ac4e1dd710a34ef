"""Your own equations. With this file in the current folder: marlhf run --objective my_objective:MonteCarlo"""

from marlhf_lite.training.objective import Objective


class MonteCarlo(Objective):
    """Advantages without bias: the sum of all later rewards, minus the value. All are [B, S], S macro actions."""

    def estimate(self, rewards, values, batch):
        returns = rewards.flip(1).cumsum(1).flip(1)
        return returns - values, returns


class Reinforce(Objective):
    """The policy gradient without a ratio or a clip; log-probabilities are [B, T]: T tokens."""

    def policy_loss(self, batch, outputs, old, count):
        advantages = batch.steps.broadcast(old.advantages)  # each token gets its macro action's
        return -(advantages * outputs.logprobs).sum() / count, {}
