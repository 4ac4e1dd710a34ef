"""What can a critic know on tiny-tldr? Responses of the SFT model, their final scores, and values at every token.

    truth       The gold score of the response so far, read off the text at four places, and a line fitted from it to
                the final score: what a critic that checks facts would explain.
    readout     A ridge regression from the states of all layers to the final score: what a head on frozen weights can
                learn from these responses, whatever the rate and the number of steps.
    itself      The reward model's own scores before the last token, where `--critic_init rm` starts; trained on the
                last token, and on all (`--rm_loss all`).
    fitted      A critic with LoRA, trained on final scores as PPO's critic-only updates do with lambda 1.

Explained variance is of the final score, by quarter of the response, on responses that nothing was fitted to. Writes
JSON; everything is one seed.

    marlhf sft --seed 100 --output_dir runs/sft; marlhf rm --seed 100 --sft runs/sft --output_dir runs/rm
    marlhf rm --seed 100 --sft runs/sft --rm_loss all --output_dir runs/rm_all
    python benchmarks/critic.py --sft runs/sft --rm runs/rm --rm_all runs/rm_all
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from cells import RESULTS
from tqdm import tqdm

from marlhf_lab.credit.credit import token_values
from marlhf_lab.studies.results import rounded
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import (
    PPOModels,
    ScalarHeadModel,
    position_ids,
    trainable,
    unwrap_peft,
)
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import build_models, load_base, load_score_model, load_tokenizer
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.critic_metrics import diagnose_critic
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import (
    Rollout,
    Sampling,
    generate,
    generate_in_batches,
    prompt_stream,
)
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment

PLACES = (0.125, 0.375, 0.625, 0.875)  # the middle of each quarter
RIDGE = 100.0  # weight of the penalty on squared coefficients
RATE = 3e-3
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("sft", "rm", "rm_all"):
        parser.add_argument(
            f"--{name}", required=True, help="folder that `marlhf sft` or `marlhf rm` wrote"
        )
    parser.add_argument("--fit", type=int, default=1024, help="responses that are fitted to")
    parser.add_argument("--held_out", type=int, default=256, help="responses that are explained")
    parser.add_argument("--epochs", type=int, default=1, help="passes of the fitted critic")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_critic.json")
    args = parser.parse_args()

    # 1. Models, responses and their two final scores.
    sft = resolve_adapter_dir("sft", args.sft)
    rm = resolve_adapter_dir("rm", args.rm)
    rm_all = resolve_adapter_dir("rm", args.rm_all)
    base = load_base(ModelConfig())
    tokenizer = load_tokenizer("tiny-gemma")
    task = load_task("tiny-tldr")
    models = build_models(base, sft, rm, "sft")
    rollout = sample_responses(models, tokenizer, task, args.fit + args.held_out, args.seed)
    final_scores = {
        "RM score": ModelReward(models.reward)(rollout),
        "gold score": torch.tensor(task.gold(rollout.prompts, rollout.responses)),
    }

    # 2. What explains them: the text, frozen states, reward models, and critics that learn.
    found = {
        "seed": args.seed,
        "fit": args.fit,
        "held_out": args.held_out,
        "environment": environment(),
        "rows": [],
    }
    states = hidden_states(unwrap_peft(models.policy.model).base_model, rollout)
    reward_models = {
        "RM": models.reward,
        "RM on all tokens": ScalarHeadModel(load_score_model(base, rm_all)),
    }
    for target, y in final_scores.items():
        rows = {"truth": explained_by_gold_score_so_far(task, tokenizer, rollout, y, args.fit)}
        values = read_out_of_states(states, y, rollout, args.fit)
        rows["readout of SFT"] = metrics_on_held_out(values, y, rollout, args.fit)
        for name, model in reward_models.items():
            values = token_values(model, rollout)
            rows[f"{name} itself"] = metrics_on_held_out(values, y, rollout, args.fit)
        for name, start in {"SFT": None, "RM on all tokens": rm_all}.items():
            critic = build_models(base, sft, start).critic
            fit_critic(critic, y, rollout, args.fit, args.epochs)
            values = token_values(critic, rollout)
            rows[f"fitted from {name}"] = metrics_on_held_out(values, y, rollout, args.fit)
        found["rows"] += [{"target": target, "critic": name} | row for name, row in rows.items()]
        write_json(args.out, rounded(found))
        for name, row in rows.items():
            numbers = [f"{value:6.3f}" for value in row.values()]
            print(f"{target:<10} {name:<29}", *numbers, flush=True)


def sample_responses(models: PPOModels, tokenizer, task: Task, count: int, seed: int) -> Rollout:
    """Sample responses of the SFT model to training prompts. The first ones are those that are fitted to."""
    torch.manual_seed(seed)
    prompts = list(islice(prompt_stream(task.splits["ppo"]["prompt"], seed), count))
    models.policy.eval()
    rollout, _ = generate_in_batches(
        generate, 256, models.policy.model, tokenizer, prompts, Sampling(96)
    )
    return rollout


def metrics_on_held_out(values, y, rollout: Rollout, fitted: int) -> dict[str, float]:
    """The critic's metrics, as PPO records them, of values [B, T] for scores y [B] after the first `fitted` rows."""
    held_out = slice(fitted, None)
    mask = rollout.mask[held_out]
    return diagnose_critic(values[held_out], y[held_out], mask, Accelerator())


def explained_by_gold_score_so_far(
    task: Task, tokenizer, rollout: Rollout, y, fitted: int
) -> dict[str, float]:
    """Explained variance of the final score by the gold score of the response so far, at each of `PLACES`; their mean.

    A straight line from the score so far to the final score is fitted to the first `fitted` responses.
    """
    explained = []
    for place in PLACES:
        beginnings = []
        for ids, length in zip(
            rollout.response_ids.tolist(), rollout.lengths.tolist(), strict=True
        ):
            beginnings.append(ids[: int(place * length)])
        texts = tokenizer.batch_decode(beginnings, skip_special_tokens=True)
        so_far = torch.tensor(task.gold(rollout.prompts, texts))
        line = least_squares(so_far[:, None], y, fitted, ridge=0.0)
        errors = (y - line)[fitted:]
        explained.append(float(1 - errors.var() / y[fitted:].var()))
    found = {"score_explained_variance": sum(explained) / len(explained)}
    for quarter, share in enumerate(explained, start=1):
        found[f"score_explained_variance_q{quarter}"] = share
    return found


@torch.no_grad()
def hidden_states(backbone, rollout: Rollout) -> torch.Tensor:
    """The states of all layers before each response token: [B, T, layers · D], 0 on padding."""
    parts = []
    for rows in tqdm(torch.arange(len(rollout)).split(64), desc="states"):
        part = rollout.select(rows).trim()
        inputs = {
            "input_ids": part.tokens,
            "attention_mask": part.attention_mask,
            "use_cache": False,
        }
        inputs["position_ids"] = position_ids(part.attention_mask)
        layers = backbone(**inputs, output_hidden_states=True).hidden_states[1:]
        states = torch.cat([x[:, part.prompt_width - 1 : -1] for x in layers], dim=2)
        missing = rollout.mask.shape[1] - states.shape[1]
        # 16 bits, because the states of all layers at all tokens are large
        parts.append(torch.nn.functional.pad(states, (0, 0, 0, missing)).half())
    return torch.cat(parts)


def read_out_of_states(states, y, rollout: Rollout, fitted: int) -> torch.Tensor:
    """Values [B, T] by ridge regression of the final score on states, fitted to the first `fitted` responses."""
    values = torch.zeros(rollout.mask.shape)
    mask = rollout.mask
    score_of_each_token = y[:, None].expand_as(mask)[mask]
    fitted_tokens = int(mask[:fitted].sum())
    values[mask] = least_squares(states[mask].float(), score_of_each_token, fitted_tokens, RIDGE)
    return values


def least_squares(x, y, fitted: int, ridge: float) -> torch.Tensor:
    """Predictions [N] of y from x [N, D] and a constant, by ridge regression on the first `fitted` rows."""
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    seen = x[:fitted]
    gram = seen.T @ seen + ridge * torch.eye(x.shape[1], dtype=torch.double)
    return (x @ torch.linalg.solve(gram, seen.T @ y[:fitted].double())).float()


def fit_critic(critic, y, rollout: Rollout, fitted: int, epochs: int) -> None:
    """Train the critic on the final scores of the first `fitted` responses, at every token."""
    parameters = trainable(critic)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    batches: list[torch.Tensor] = []  # row numbers
    for _ in range(epochs):
        batches += torch.randperm(fitted).split(BATCH)
    for step, rows in enumerate(tqdm(batches, desc="fit")):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 5)  # warm-up
        part = rollout.select(rows).trim()
        values = part.before_tokens(critic(part.tokens, part.attention_mask))
        (values - y[rows, None])[part.mask].square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
