"""PPO as textbooks have it, token by token in plain loops: what elective 05 compares MA-PPO with n = 1 to."""

import torch
from torch import Tensor


def textbook_ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    values: Tensor,
    old_values: Tensor,
    scores: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return PPO's two losses, means over all tokens, with γ = 1, λ = 0.95, ε = 0.2 and without a KL penalty.

    Args:
        logprobs, old_logprobs: [B, T], of the policy and of the one that wrote the answers.
        values, old_values: [B, T], the critic's values now, and when the answers were written.
        scores, lengths: [B].
    """
    policy = critic = torch.zeros(())
    for b, length in enumerate(lengths.tolist()):
        # After the last token there is neither an advantage nor a value.
        advantage = 0.0
        next_value = 0.0
        for t in reversed(range(length)):
            reward = scores[b] if t == length - 1 else 0.0
            delta = reward + next_value - old_values[b, t]
            advantage = delta + 0.95 * advantage  # on the right: that of token t + 1
            next_value = old_values[b, t]
            ratio = (logprobs[b, t] - old_logprobs[b, t]).exp()
            policy = policy - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            goal = advantage + old_values[b, t]
            near = old_values[b, t] + (values[b, t] - old_values[b, t]).clamp(-0.2, 0.2)
            critic = critic + 0.5 * torch.maximum((values[b, t] - goal) ** 2, (near - goal) ** 2)
    return policy / lengths.sum(), critic / lengths.sum()
