"""Which learning rates of SFT and reward model serve a pretrained model? They are the preset `pretrained`'s.

Fixed before the first run. Model: SmolLM2-135M-Instruct with the library's LoRA. Data: pairs of HH-RLHF whose prompts
have at most 96 tokens, responses cut at 48; 256 rows for SFT, 256 pairs for the reward model, and the held-out rows
with so short prompts, at most 128, for both. Batches of 16, one pass, seed 140, which no study uses. Every rate has one
run. Chosen: the rate with the smallest held-out loss (SFT: nats a response token; reward model: Bradley-Terry loss a
pair); of rates within 0.01 of it the smallest rate. A best rate at an edge of its grid is said to be one. The reward
models start from the SFT model of the chosen rate. This table chooses, and claims nothing.

Added on 2026-11-23, when the table was there: all four reward models have the loss of a coin (0.690 to 0.694), so the
rule's choice, the smallest rate, says nothing. The preset takes SFT's rate from here, and not the reward model's.

    python benchmarks/default_rates.py --model FOLDER --data PAIRS.jsonl.gz

Writes JSON, rate by rate; an interrupted table goes on where it stopped.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cells import Cells, arguments
from torch.nn.functional import softplus

from marlhf_lite.config.options import (
    LengthConfig,
    ModelConfig,
    RewardModelConfig,
    SFTStageConfig,
    TrainerConfig,
)
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.loading import (
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
    share,
)
from marlhf_lite.tasks.loading import drop_long_prompts, load_task
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, from_texts
from marlhf_lite.training.sft import train_sft

SFT_RATES = (1e-4, 2e-4, 5e-4, 1e-3)
RM_RATES = (5e-5, 1e-4, 2e-4, 5e-4)
LENGTHS = LengthConfig(max_prompt_length=96, max_response_length=48)
ROWS = 256
HELD_OUT = 128
BATCH = 16
PASS = 4
SEED = 140
NEAR = 0.01


class Grid:
    """The model, the rows, and a run of each stage."""

    def __init__(self, options: ModelConfig, data: Path, folder: Path):
        self.options = options
        self.folder = folder
        self.tokenizer = load_tokenizer(options.model)
        self.base = load_base(options)
        parts = load_task(str(data)).splits
        short = {}
        for name, rows in parts.items():
            short[name], _ = drop_long_prompts(rows, self.tokenizer, LENGTHS.max_prompt_length)
        # SFT takes the prompts of PPO: both have all rows that are not held out.
        self.rows = {"sft": short["ppo"].select(range(ROWS)), "rm": short["rm"].select(range(ROWS))}
        self.test = short["test"].select(range(min(HELD_OUT, len(short["test"]))))
        self.training = TrainerConfig(per_device_train_batch_size=PASS)

    def sft(self, rate: float) -> dict:
        """Run SFT at this rate, keep the model for the reward models to start from, and return its held-out loss."""
        torch.manual_seed(SEED)
        model = new_policy(share(self.base), self.options)
        begin = time.time()
        config = SFTStageConfig(sft_epochs=1, sft_batch_size=BATCH, sft_learning_rate=rate)
        output = self.folder / f"sft-{rate}"
        train_sft(
            model, self.tokenizer, self.rows["sft"], config, LENGTHS, output, SEED, self.training
        )
        loss = response_loss(model, self.held_out("chosen"))
        return {"loss": loss, "seconds": time.time() - begin}

    def rm(self, rate: float, sft_rate: float) -> dict:
        """Run the reward model at this rate, from the SFT model of `sft_rate`, and return what it reaches held out."""
        model = new_reward_model(share(self.base), self.folder / f"sft-{sft_rate}", SEED)
        begin = time.time()
        config = RewardModelConfig(rm_epochs=1, rm_batch_size=BATCH, rm_learning_rate=rate)
        output = self.folder / f"rm-{rate}"
        train_reward_model(
            model, self.tokenizer, self.rows["rm"], config, LENGTHS, output, SEED, self.training
        )
        found = pair_loss(model, self.held_out("chosen"), self.held_out("rejected"))
        return found | {"seconds": time.time() - begin}

    def held_out(self, side: str) -> Rollout:
        """The held-out responses of one side."""
        return from_texts(
            self.tokenizer, self.test["prompt"], self.test[side], LENGTHS.max_response_length
        )


@torch.no_grad()
def response_loss(model, rollout: Rollout) -> float:
    """The mean over all tokens of all responses of −log π, in nats."""
    policy = PolicyModel(model.eval())
    total = 0.0
    for rows in torch.arange(len(rollout)).split(PASS):
        part = rollout.select(rows).trim()
        response_width = part.mask.shape[1]
        logprobs, _ = policy(part.tokens, part.attention_mask, response_width)
        total -= (logprobs * part.mask).sum().item()
    return total / rollout.mask.sum().item()


def pair_loss(model, chosen: Rollout, rejected: Rollout) -> dict:
    """Bradley-Terry loss of a reward model, in nats a pair, and the share of pairs ranked right; a tie is half."""
    reward = ModelReward(ScalarHeadModel(model), PASS)
    margins = reward(chosen) - reward(rejected)
    ranked_right = torch.sign(margins) / 2 + 0.5  # 1, 0, and 0.5 for a tie
    return {"loss": softplus(-margins).mean().item(), "accuracy": ranked_right.mean().item()}


def choose(cells: dict[str, dict], stage: str, rates: Sequence[float]) -> float:
    """The smallest rate whose held-out loss is within `NEAR` of the best."""
    losses = {rate: cells[f"{stage} {rate}"]["loss"] for rate in rates}
    best = min(losses.values())
    return min(rate for rate, loss in losses.items() if loss <= best + NEAR)


def main() -> None:
    parser = arguments(__doc__, "default_rates")
    parser.add_argument("--data", type=Path, required=True, help="file of preference pairs")
    args = parser.parse_args()
    cells = Cells(args.out, args)
    grid = Grid(ModelConfig(model=args.model), args.data, args.folder)
    for rate in SFT_RATES:
        found = cells.measure(f"sft {rate}", grid.sft, rate)
        print("sft", rate, found, flush=True)
    sft_rate = choose(cells.cells, "sft", SFT_RATES)
    for rate in RM_RATES:
        found = cells.measure(f"rm {rate}", grid.rm, rate, sft_rate)
        print("rm", rate, found, flush=True)
    chosen = {"sft": sft_rate, "rm": choose(cells.cells, "rm", RM_RATES)}
    cells.finish(chosen=chosen, held_out=len(grid.test))


if __name__ == "__main__":
    main()
