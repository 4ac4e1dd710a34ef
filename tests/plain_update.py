"""One update by the trainer, and the same from the equations: float64 loops over single responses."""

import copy
import math

import reference_macro as ref
import torch
from conftest import PROMPTS

from marlhf_lite.config.options import MacroConfig, PPOConfig, PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.training.ppo import PPOTrainer

BETA, TIGHT = 0.3, 1e-5
NAMES = ("policy", "critic")


def options(**changes):
    return PPOConfig(
        **{"kl_coef": BETA, "max_grad_norm": 1e9, "warmup_updates": 0, "micro_batch_size": 4}
        | changes
    )


def learner(models, config, macro_config=None, started=True, objective=None):
    """A trainer that gets its rollouts from the test."""
    groups = vars(config) | vars(macro_config or MacroConfig())
    whole = PPOTrainerConfig(**groups, max_response_length=12)
    made = PPOTrainer(models, None, PROMPTS, None, None, whole, objective=objective)
    made.state.updates_done = int(started)  # these policies have left the reference already
    return made


def record(made):
    """Gradients at each optimizer step, and copies of the two models before it, in float64."""
    steps = {name: [] for name in NAMES}

    def keep(*_):
        for name in NAMES:
            model, parameters = getattr(made.models, name).model, made.parameters[name]
            steps[name].append(
                ([p.grad.clone() for p in parameters], copy.deepcopy(model).double())
            )

    made.optimizer.optimizer.register_step_pre_hook(keep)
    return steps


def update(models, batch, config, macro_config=None, n=3):
    """The metrics of one update, and what `record` saw of it."""
    made = learner(models, config, macro_config)
    steps = record(made)
    return made.learn(batch, FixedNGram(n)(batch.mask)), steps


def far(ours, theirs):
    """Relative distance of two lists of gradients."""
    ours, theirs = (torch.cat([g.double().flatten() for g in x]) for x in (ours, theirs))
    assert theirs.norm() > 1e-4
    return ((ours - theirs).norm() / theirs.norm()).item()


# -- an update from the equations, in float64 -------------------------------------------------------------------------


def plain_pass(policy, critic, rollout, temperature=1.0):
    """For each response the log-probabilities and values of its tokens, as lists of float64 scalars."""
    classifier, logprobs, values = critic.get_base_model(), [], []
    for tokens, attended in zip(rollout.tokens, rollout.attention_mask.bool()):
        ids, start = tokens[attended], int(attended[: rollout.prompt_width].sum())
        logits = policy(input_ids=ids[None]).logits[0] / temperature
        hidden = classifier.model(input_ids=ids[None])[0]
        scores = classifier.score(hidden)[0, :, 0]
        at = range(start, len(ids))
        logprobs.append([logits[t - 1][ids[t]] - logits[t - 1].logsumexp(0) for t in at])
        values.append([scores[t - 1] for t in at])
    return logprobs, values


def numbers(rows):
    return [[x.item() for x in row] for row in rows]


def plain_losses(models, rollout, parts, how, ppo, old=None, made=None):
    """Algorithm 1 by loops. Without `old` the models are those that sampled; `made` are advantages and returns."""
    logprobs, values = plain_pass(
        *models, rollout, ppo.temperature if ppo.logprobs_at_temperature else 1.0
    )
    old_logprobs, old_values = old or (numbers(logprobs), numbers(values))
    policy, value, estimates = [], [], []
    for i, lengths in enumerate(parts):
        theirs = rollout.ref_logprobs[i][rollout.mask[i]].double().tolist()
        gaps = [a - b for a, b in zip(old_logprobs[i], theirs)]
        rewards = [
            -ppo.kl_coef * (math.exp(-d) - 1 + d if "k3" in ppo.objective else d) for d in gaps
        ]
        score = float(rollout.scores[i])
        score = ref.clamp(score, -ppo.score_clip, ppo.score_clip) if ppo.score_clip else score
        rewards = ref.rewards(rewards, score, lengths, how.reward_pooling, how.rho, how.sigma)
        named = dict((name.split("=") + [1.0])[:2] for name in ppo.objective.split(",") if name)
        lam = (
            max(1 - 1 / (float(named["vapo"]) * max(len(lengths), 1)), 0.0)
            if "vapo" in named
            else ppo.lam
        )
        pooled = ref.pool(old_values[i], lengths, how.sigma)
        gains, returns = ref.gae(rewards, pooled, ppo.gamma, lam)
        if "vc_ppo" in named:
            _, returns = ref.gae(rewards, pooled, ppo.gamma, float(named["vc_ppo"]))
        gains, returns = (gains, returns) if made is None else made[i]
        estimates.append((gains, returns))
        policy.append(
            ref.policy_terms(logprobs[i], old_logprobs[i], gains, lengths, ppo.cliprange, how.ratio)
        )
        clip = ppo.cliprange_value or None
        value.append(
            ref.value_terms(
                values[i], old_values[i], returns, lengths, clip, how.value_target, how.sigma
            )
        )
    losses = (
        ref.mean(terms, "response" if "released" in ppo.objective else "token")
        for terms in (policy, value)
    )
    return *losses, (old_logprobs, old_values), estimates


def plain_grads(loss, model):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def cut(rollout, n):
    return [ref.fixed_lengths(int(length), n) for length in rollout.lengths]


def trainables(roles):
    return {name: [p.detach().clone() for p in trainable(getattr(roles, name))] for name in NAMES}


@torch.no_grad()
def restore(roles, weights):
    for name in NAMES:
        for parameter, value in zip(trainable(getattr(roles, name)), weights[name]):
            parameter.copy_(value)
