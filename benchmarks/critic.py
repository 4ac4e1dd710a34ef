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

import torch
from accelerate import Accelerator
from cells import RESULTS
from tqdm import tqdm

from marlhf_lab.credit.credit import token_values
from marlhf_lab.studies.results import rounded
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import ScalarHeadModel, position_ids, trainable, unwrap_peft
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import build_models, load_base, load_score_model, load_tokenizer
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.critic_metrics import diagnose_critic
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, generate, generate_in_batches, prompt_stream
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment

PLACES = (0.125, 0.375, 0.625, 0.875)  # the middle of each quarter
RIDGE = 100.0
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
    args = parser.parse_args()
    sft, rm, rm_all = (
        resolve_adapter_dir(*x) for x in (("sft", args.sft), ("rm", args.rm), ("rm", args.rm_all))
    )
    base = load_base(ModelConfig())
    tokenizer = load_tokenizer("tiny-gemma")
    task = load_task("tiny-tldr")
    models = build_models(base, sft, rm, "sft")
    rollout = sample(models, tokenizer, task, args)
    scores = {
        "RM score": ModelReward(models.reward)(rollout),
        "gold score": torch.tensor(gold(task, rollout)),
    }
    found = {
        "seed": args.seed,
        "fit": args.fit,
        "held_out": args.held_out,
        "environment": environment(),
        "rows": [],
    }
    states = hidden_states(unwrap_peft(models.policy.model).base_model, rollout)
    rewards = {
        "RM": models.reward,
        "RM on all tokens": ScalarHeadModel(load_score_model(base, rm_all)),
    }
    for name, y in scores.items():
        rows = {"truth": truth(task, tokenizer, rollout, y, args)}
        rows["readout of SFT"] = measure(readout(states, y, rollout, args.fit), y, rollout, args)
        rows |= {
            f"{x} itself": measure(token_values(model, rollout), y, rollout, args)
            for x, model in rewards.items()
        }
        for x, start in {"SFT": None, "RM on all tokens": rm_all}.items():
            critic = build_models(base, sft, start).critic
            fit(critic, y, rollout, args)
            rows[f"fitted from {x}"] = measure(token_values(critic, rollout), y, rollout, args)
        found["rows"] += [{"target": name, "critic": x} | row for x, row in rows.items()]
        write_json(RESULTS / "benchmark_critic.json", rounded(found))
        for x, row in rows.items():
            print(f"{name:<10} {x:<29}", *(f"{value:6.3f}" for value in row.values()), flush=True)


def sample(models, tokenizer, task, args):
    torch.manual_seed(args.seed)
    prompts = list(
        islice(prompt_stream(task.splits["ppo"]["prompt"], args.seed), args.fit + args.held_out)
    )
    models.policy.eval()
    return generate_in_batches(
        generate, 256, models.policy.model, tokenizer, prompts, Sampling(96)
    )[0]


def gold(task, rollout) -> list[float]:
    return task.gold(rollout.prompts, rollout.responses)


def measure(values, y, rollout, args) -> dict[str, float]:
    """Metrics of values [B, T] on the held-out responses, as PPO records them."""
    some = slice(args.fit, None)
    return diagnose_critic(values[some], y[some], rollout.mask[some], Accelerator())


def truth(task, tokenizer, rollout, y, args) -> dict[str, float]:
    """Explained variance of the final score by the gold score so far, at four places; and their mean."""
    explained = []
    for place in PLACES:
        ids = [
            row[: int(place * n)]
            for row, n in zip(rollout.response_ids.tolist(), rollout.lengths.tolist())
        ]
        so_far = torch.tensor(
            task.gold(rollout.prompts, tokenizer.batch_decode(ids, skip_special_tokens=True))
        )
        line = solve(so_far[:, None], y, slice(0, args.fit), 0.0)
        errors = (y - line)[args.fit :]
        explained.append(float(1 - errors.var() / y[args.fit :].var()))
    names = ["score_explained_variance", *(f"score_explained_variance_q{q}" for q in (1, 2, 3, 4))]
    return dict(zip(names, [sum(explained) / 4, *explained]))


@torch.no_grad()
def hidden_states(backbone, rollout) -> torch.Tensor:
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
        parts.append(
            torch.nn.functional.pad(
                states, (0, 0, 0, rollout.mask.shape[1] - states.shape[1])
            ).half()
        )
    return torch.cat(parts)


def readout(states, y, rollout, count: int) -> torch.Tensor:
    """Values [B, T] by ridge regression of the final score on states, fitted to the first `count` responses."""
    values = torch.zeros(rollout.mask.shape)
    mask = rollout.mask
    fitted = int(mask[:count].sum())
    values[mask] = solve(
        states[mask].float(), y[:, None].expand_as(mask)[mask], slice(0, fitted), RIDGE
    )
    return values


def solve(x, y, some: slice, ridge: float) -> torch.Tensor:
    """Least squares with a constant, fitted to the rows `some`; predictions for all."""
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    gram = x[some].T @ x[some] + ridge * torch.eye(x.shape[1], dtype=torch.double)
    return (x @ torch.linalg.solve(gram, x[some].T @ y[some].double())).float()


def fit(critic, y, rollout, args) -> None:
    """Train the critic on the final scores of the first `args.fit` responses, at every token."""
    parameters = trainable(critic)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    batches = [rows for _ in range(args.epochs) for rows in torch.randperm(args.fit).split(BATCH)]
    for step, rows in enumerate(tqdm(batches, desc="fit")):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 5)
        part = rollout.select(rows).trim()
        values = part.before_tokens(critic(part.tokens, part.attention_mask))
        (values - y[rows, None])[part.mask].square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
