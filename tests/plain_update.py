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

BETA, TIGHT = 0.3, 1e-5  # of the KL penalty; a relative distance that counts as equal
NAMES = ("policy", "critic")


def options(**changes):
    """PPO's options: gradients are not clipped and rates are full from the first update, so equations are simple."""
    return PPOConfig(
        **{"kl_coef": BETA, "max_grad_norm": 1e9, "warmup_updates": 0, "micro_batch_size": 4}
        | changes
    )


def learner(models, config, macro_config=None, started=True, objective=None):
    """A trainer that gets its rollouts from the test, so it needs no tokenizer, reward and termination rule.

    With `started` it counts an update as done. Otherwise its first update would be checked, and these policies do not
    begin where their reference does.
    """
    groups = vars(config) | vars(macro_config or MacroConfig())
    whole = PPOTrainerConfig(**groups, max_response_length=12)
    made = PPOTrainer(models, None, PROMPTS, None, None, whole, objective=objective)
    made.state.updates_done = int(started)
    return made


def record(made):
    """By model a list to which each later optimizer step adds a pair: the gradients, and the model before the step.

    The copy of the model is in float64.
    """
    steps = {name: [] for name in NAMES}

    def keep(*_):
        for name in NAMES:
            gradients = [p.grad.clone() for p in made.parameters[name]]
            model_before = copy.deepcopy(getattr(made.models, name).model).double()
            steps[name].append((gradients, model_before))

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
    assert theirs.norm() > 1e-4  # a comparison of zeros would show nothing
    return ((ours - theirs).norm() / theirs.norm()).item()


# -- an update from the equations, in float64 -------------------------------------------------------------------------


def plain_pass(policy, critic, rollout, temperature=1.0):
    """For each response the log-probabilities and values of its tokens, as lists of float64 scalars."""
    classifier = critic.get_base_model()
    logprobs = []
    values = []
    for tokens, attended in zip(rollout.tokens, rollout.attention_mask.bool()):
        ids = tokens[attended]  # without padding
        start = int(attended[: rollout.prompt_width].sum())  # of the response
        logits = policy(input_ids=ids[None]).logits[0] / temperature
        hidden = classifier.model(input_ids=ids[None])[0]
        scores = classifier.score(hidden)[0, :, 0]
        at = range(start, len(ids))
        # Token t is chosen, and the state before it is valued, at token t − 1.
        logprobs.append([logits[t - 1][ids[t]] - logits[t - 1].logsumexp(0) for t in at])
        values.append([scores[t - 1] for t in at])
    return logprobs, values


def numbers(rows):
    """Lists of scalar tensors -> lists of floats, which have no gradient."""
    return [[x.item() for x in row] for row in rows]


def plain_losses(models, rollout, parts, how, ppo, old=None, made=None):
    """The losses of policy and critic (Algorithm 1) by loops over responses; the old outputs; and the estimates.

    Args:
        models: policy and critic.
        parts: for each response the lengths of its macro actions.
        how: the options of macro actions; `ppo` are the others.
        old: log-probabilities and values of the models that sampled. If None, these models are the ones that sampled.
        made: advantages and returns of each response, to be used in place of the estimates.
    """
    temperature = ppo.temperature if ppo.logprobs_at_temperature else 1.0
    logprobs, values = plain_pass(*models, rollout, temperature)
    old_logprobs, old_values = old or (numbers(logprobs), numbers(values))
    # Name of an objective -> its number, 1 if it has none: "vapo=0.05,k3" is {"vapo": "0.05", "k3": 1.0}.
    named = dict((name.split("=") + [1.0])[:2] for name in ppo.objective.split(",") if name)
    policy = []
    value = []
    estimates = []
    for i, lengths in enumerate(parts):
        # 1. Rewards of the tokens (the KL penalty), then of the macro actions, with the score on the last.
        theirs = rollout.ref_logprobs[i][rollout.mask[i]].double().tolist()
        gaps = [a - b for a, b in zip(old_logprobs[i], theirs)]
        if "k3" in ppo.objective:
            kl = [math.exp(-d) - 1 + d for d in gaps]
        else:
            kl = gaps
        rewards = [-ppo.kl_coef * x for x in kl]
        score = float(rollout.scores[i])
        if ppo.score_clip:
            score = ref.clamp(score, -ppo.score_clip, ppo.score_clip)
        rewards = ref.rewards(rewards, score, lengths, how.reward_pooling, how.rho, how.sigma)
        # 2. Advantages and returns. VAPO's λ depends on the length, and VC-PPO's returns have a λ of their own.
        lam = ppo.lam
        if "vapo" in named:
            lam = max(1 - 1 / (float(named["vapo"]) * max(len(lengths), 1)), 0.0)
        pooled = ref.pool(old_values[i], lengths, how.sigma)
        gains, returns = ref.gae(rewards, pooled, ppo.gamma, lam)
        if "vc_ppo" in named:
            _, returns = ref.gae(rewards, pooled, ppo.gamma, float(named["vc_ppo"]))
        if made is not None:
            gains, returns = made[i]
        estimates.append((gains, returns))
        # 3. The terms of both losses.
        policy.append(
            ref.policy_terms(logprobs[i], old_logprobs[i], gains, lengths, ppo.cliprange, how.ratio)
        )
        clip = ppo.cliprange_value or None  # 0 is off
        value.append(
            ref.value_terms(
                values[i], old_values[i], returns, lengths, clip, how.value_target, how.sigma
            )
        )
    # As the paper's released code has it, or over all tokens.
    mean_of = "response" if "released" in ppo.objective else "token"
    losses = (ref.mean(terms, mean_of) for terms in (policy, value))
    return *losses, (old_logprobs, old_values), estimates


def plain_grads(loss, model):
    """The gradients of a loss for the weights of a model that train."""
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def cut(rollout, n):
    """For each response the lengths of its macro actions of n tokens."""
    return [ref.fixed_lengths(int(length), n) for length in rollout.lengths]


def trainables(roles):
    """Copies of the weights of policy and critic that train; `restore` puts them back."""
    return {name: [p.detach().clone() for p in trainable(getattr(roles, name))] for name in NAMES}


@torch.no_grad()
def restore(roles, weights):
    """Give policy and critic the weights of `trainables`."""
    for name in NAMES:
        for parameter, value in zip(trainable(getattr(roles, name)), weights[name]):
            parameter.copy_(value)
