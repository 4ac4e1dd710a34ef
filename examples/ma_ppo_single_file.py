"""PPO and MA-PPO (RLHF with macro actions, arXiv 2410.02743) whole in one file, in the order of Algorithm 1.

    python examples/ma_ppo_single_file.py [--n 5] [--updates 20] [--seed 0]

A Gemma of two million weights learns to write summaries: supervised fine-tuning (SFT), a reward model (RM), then PPO
(a macro action is one token) and MA-PPO (a macro action ω is n tokens) from the same start, in about three minutes on
two cores. Read `update` first, which is Algorithm 1; MA-PPO differs from PPO only in `tau`. All weights train, as in
the paper. This file does not need marlhf_lite, which also has LoRA, micro-batches, several processes, checkpoints,
other termination rules ζ, weights σ and losses.

Shapes: B responses, P prompt tokens (padded on the left), T response tokens (padded on the right), S macro actions.
"""

import argparse
import copy
import gzip
import json
import random
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)
from transformers.utils import logging

DATA = Path(__file__).resolve().parents[1] / "data"
# the base model; rows of prompt, chosen, rejected
MODEL, PAIRS = DATA / "tiny-gemma", DATA / "tiny-tldr.jsonl.gz"
MAX_PROMPT, MAX_RESPONSE = 100, 64  # tokens
SFT_RATE, RM_RATE, POLICY_RATE, CRITIC_RATE = 2e-4, 1e-3, 3e-4, 5e-4  # learning rates
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 1.0  # of sampling
BETA = 0.05  # β, the weight of the KL penalty
GAMMA, LAMBDA = 1.0, 0.95  # γ and λ of GAE, per macro action
EPSILON, VALUE_RANGE = 0.2, 0.2  # clip ranges of the policy's ratio (ε), and of changes of values
# optimizer steps on each batch of responses; the norm of gradients, for each model
EPOCHS, MAX_GRAD_NORM = 1, 1.0


# -- texts become tokens [B, P+T], attention [B, P+T] (1 on tokens) and mask [B, T] (True on response tokens) ---------


def encode(tokenizer, rows, name):
    """Rows with their responses of this name, "chosen" or "rejected"; a response ends with EOS."""
    responses = [row[name] + tokenizer.eos_token for row in rows]
    prompts = [row["prompt"] for row in rows]
    left = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    right = tokenizer(
        responses, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
    )
    tokens = torch.cat([left["input_ids"], right["input_ids"]], 1)
    attention = torch.cat([left["attention_mask"], right["attention_mask"]], 1)
    return tokens, attention, right["attention_mask"].bool()


@torch.no_grad()
def sample(policy, tokenizer, prompts):
    """Prompts with responses of the policy, y ~ π(x)."""
    left = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    choice = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
    ends = {"max_new_tokens": MAX_RESPONSE, "eos_token_id": tokenizer.eos_token_id}
    tokens = policy.generate(**left, **choice, **ends, pad_token_id=tokenizer.pad_token_id)
    # The first EOS ends a response and belongs to it. `tokens != pad` would be wrong: pad may be EOS.
    is_eos = (tokens[:, left["input_ids"].shape[1] :] == tokenizer.eos_token_id).long()
    mask = is_eos.cumsum(1) - is_eos == 0
    return tokens, torch.cat([left["attention_mask"], mask.long()], 1), mask


# -- what the models say about them -----------------------------------------------------------------------------------


def states(model, tokens, attention):
    """Last hidden states [B, P+T, D]. Positions count from the first token after the padding on the left."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return model.base_model(tokens, attention, positions).last_hidden_state


def log_probs(model, tokens, attention, mask):
    """log π(a_t | s_t) of the response tokens, [B, T], 0 on padding. State s_t ends with the token before a_t."""
    T = mask.shape[1]
    logits = model.lm_head(states(model, tokens, attention)[:, -T - 1 : -1])
    return logits.log_softmax(-1).gather(2, tokens[:, -T:, None]).squeeze(2).masked_fill(~mask, 0.0)


def values(critic, tokens, attention, mask):
    """V(s_t) of the same states, [B, T], 0 on padding."""
    T = mask.shape[1]
    return (
        critic.score(states(critic, tokens, attention)[:, -T - 1 : -1])
        .squeeze(2)
        .masked_fill(~mask, 0.0)
    )


def reward(rm, tokens, attention, mask):
    """r_rm(x, y), [B]: the score at the last token of the response."""
    scores = rm.score(states(rm, tokens, attention)[:, -mask.shape[1] :]).squeeze(2)
    return scores.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)


# -- Algorithm 1 ------------------------------------------------------------------------------------------------------


def macro_actions(mask, n):
    """ζ, fixed n-grams (section 3.2.1): τ of each token's macro action ω_τ, [B, T]; another rule's are 0 0 0 1 2 2 …"""
    return (torch.arange(mask.shape[1]) // n).expand(mask.shape)


def gae(R, V):
    """Advantages Â_τ and returns Q̂_τ from rewards R_τ and values V_τ of macro actions, all [B, S], 0 on padding."""
    A, advantage, next_value = torch.zeros_like(R), 0.0, 0.0
    for s in reversed(range(R.shape[1])):
        delta = R[:, s] + GAMMA * next_value - V[:, s]  # δ_τ = R_τ + γ V_{τ+1} − V_τ
        A[:, s] = advantage = delta + GAMMA * LAMBDA * advantage  # Â_τ = δ_τ + γλ Â_{τ+1}
        next_value = V[:, s]
    return A, A + V  # Q̂_τ = Â_τ + V_τ


def update(policy, critic, reference, rm, optimizer, experience, n):
    """One update on `experience` (tokens, attention, mask), with macro actions of n tokens; returns metrics."""
    *_, mask = experience
    count = mask.sum()  # tokens of all responses: both losses are means over them

    with torch.no_grad():
        # Values V(s_t) of the critic [B, T], the score r of the reward model [B], and log-probabilities [B, T].
        V_old, score = values(critic, *experience), reward(rm, *experience)
        logp_old, logp_ref = log_probs(policy, *experience), log_probs(reference, *experience)
        # r_t = −β (log π_old − log π_ref); the score comes with the last token, so with the last macro action.
        r = -BETA * (logp_old - logp_ref)
        r.scatter_add_(1, mask.sum(1, keepdim=True) - 1, score[:, None])

        # Macro actions by the termination rule; a sum over each takes [B, T] to [B, S].
        tau = macro_actions(mask, n)

        def over_macro_actions(x):
            return x.new_zeros(len(x), tau.max() + 1).scatter_add(1, tau, x)

        R = over_macro_actions(r)  # R_τ = Σ_i r_{t_τ+i}
        size = over_macro_actions(mask.float())  # |ω_τ|
        # V(s_τ, ω_τ) = Σ_i σ_i V(s_{t_τ+i}), σ_i = 1 / |ω_τ|
        V = over_macro_actions(V_old) / size.clamp(min=1)
        # GAE over macro actions; then each token gets the advantage and the return of its macro action, [B, T].
        A, Q = (x.gather(1, tau) for x in gae(R, V))

    for _ in range(EPOCHS):
        # L^ppo = −E[min(ratio Â, clip(ratio, 1−ε, 1+ε) Â)], ratio = π_θ / π_old of each token (Appendix E).
        ratio = (log_probs(policy, *experience) - logp_old).exp()
        policy_terms = torch.max(-A * ratio, -A * ratio.clamp(1 - EPSILON, 1 + EPSILON))
        policy_loss = (policy_terms * mask).sum() / count

        # L^value = ½ E[max((V − Q̂)², (V_clipped − Q̂)²)]: every V(s_t) moves to the return of its macro action.
        V_new = values(critic, *experience)
        V_clipped = V_old + (V_new - V_old).clamp(-VALUE_RANGE, VALUE_RANGE)
        value_terms = 0.5 * torch.max((V_new - Q) ** 2, (V_clipped - Q) ** 2)
        value_loss = (value_terms * mask).sum() / count

        step(optimizer, policy_loss + value_loss)

    metrics = {
        "score": score.mean(),
        "kl": (logp_old - logp_ref).sum(1).mean(),
        "tokens": count / len(mask),
    }
    metrics |= {"policy_loss": policy_loss, "value_loss": value_loss}  # of the last pass
    return {name: value.item() for name, value in metrics.items()}


# -- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(*models_and_rates):
    """Adam with a learning rate for each model."""
    groups = [{"params": list(model.parameters()), "lr": rate} for model, rate in models_and_rates]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def step(optimizer, loss):
    """One step down the gradient of the loss; its norm is limited separately for each model."""
    loss.backward()
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()


def train(name, model, rate, loss_of, rows, batch_size):
    """Train the model once on these rows."""
    optimizer = make_optimizer((model, rate))
    for start in range(0, len(rows), batch_size):
        loss = loss_of(rows[start : start + batch_size])
        step(optimizer, loss)
        print(f"{name}: {start:4} of {len(rows)} rows, loss {loss.item():.3f}", flush=True)


def print_curves(curves):
    """The RM score by update: numbers, and a letter for each method."""
    low = min(map(min, curves.values()))
    high = max(map(max, curves.values()))
    print("\nupdate, RM scores of " + " and ".join(f"{name} ({name[0]})" for name in curves))
    for update, scores in enumerate(zip(*curves.values(), strict=True), start=1):
        line = [" "] * 61
        for name, score in zip(curves, scores, strict=True):
            place = (score - low) / max(high - low, 1e-6)  # from 0 to 1
            line[round(60 * place)] = name[0]
        numbers = " ".join(f"{score:6.2f}" for score in scores)
        print(f"{update:6} {numbers} |{''.join(line)}|")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=5, help="tokens in a macro action of MA-PPO")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument(
        "--batch_size", type=int, default=20, help="responses an update, and rows a step before it"
    )
    parser.add_argument(
        "--rows", type=int, nargs=3, default=(64, 100, 400), help="number for the test, SFT, RM"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)
    logging.set_verbosity_error()  # the reward model's head is new, which transformers would report

    # Data: the test and each stage have rows of their own.
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with gzip.open(PAIRS, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if len(tokenizer(row["prompt"])["input_ids"]) <= MAX_PROMPT]
    random.shuffle(rows)
    test_rows, sft_rows, rm_rows = ([rows.pop() for _ in range(count)] for count in args.rows)
    prompts = [row["prompt"] for row in rows]

    # 1. SFT: −log π(y | x) of the chosen responses, mean over tokens.
    sft = AutoModelForCausalLM.from_pretrained(MODEL)

    def sft_loss(rows):
        tokens, attention, mask = encode(tokenizer, rows, "chosen")
        return -log_probs(sft, tokens, attention, mask).sum() / mask.sum()

    train("SFT", sft, SFT_RATE, sft_loss, sft_rows, args.batch_size)

    # 2. The reward model: SFT under a new head of one number; −log σ(r(chosen) − r(rejected)) (Bradley-Terry).
    rm = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1)
    rm.base_model.load_state_dict(sft.base_model.state_dict())

    def margins(rows):
        return reward(rm, *encode(tokenizer, rows, "chosen")) - reward(
            rm, *encode(tokenizer, rows, "rejected")
        )

    train(
        "RM", rm, RM_RATE, lambda rows: -logsigmoid(margins(rows)).mean(), rm_rows, args.batch_size
    )

    # 3. PPO and MA-PPO: SFT starts the policy and stays the reference, the reward model starts the critic.
    curves, policies = {}, {"SFT": sft}
    for name, n in {"PPO": 1, "MA-PPO": args.n}.items():
        set_seed(args.seed)
        policy, critic = copy.deepcopy(sft), copy.deepcopy(rm)
        optimizer = make_optimizer((policy, POLICY_RATE), (critic, CRITIC_RATE))
        curves[name], policies[name] = [], policy
        for i in range(args.updates):
            batch = [
                prompts[k % len(prompts)]
                for k in range(i * args.batch_size, (i + 1) * args.batch_size)
            ]
            metrics = update(
                policy, critic, sft, rm, optimizer, sample(policy, tokenizer, batch), n
            )
            curves[name].append(metrics["score"])
            print(
                f"{name} {i + 1}: " + ", ".join(f"{key} {x:.3f}" for key, x in metrics.items()),
                flush=True,
            )

    print_curves(curves)
    print(f"\nRM score on {len(test_rows)} prompts that no stage has seen (± standard error)")
    for name, policy in policies.items():
        with torch.no_grad():
            scores = reward(rm, *sample(policy, tokenizer, [row["prompt"] for row in test_rows]))
        print(f"{name:6} {scores.mean():5.2f} ± {scores.std() / len(scores) ** 0.5:.2f}")


if __name__ == "__main__":
    main()
