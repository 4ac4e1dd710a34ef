"""Which learning rate of the reward model serves a pretrained model, where it has something to learn?

On 256 pairs of HH-RLHF no rate taught SmolLM2-135M-Instruct anything (`default_rates.py`). Here a known score ranks
each pair: of two answers of the model itself to a question of `data/sentiment`, the chosen one is friendlier by VADER.

Fixed before the first run. Answers of 48 tokens to all 400 questions and to the 100 held-out ones, two to each; pairs
with equal scores are left out. LoRA as the library's, batches of 16, one pass, seed 141, which no study uses; every
rate has one run. Chosen: the rate with the smallest held-out Bradley-Terry loss a pair; of rates within 0.01 of it the
smallest. A best rate at an edge of its grid is said to be one. If no loss is below 0.68, nothing is chosen. This table
chooses, and claims nothing.

    python benchmarks/reward_model_rates.py --model FOLDER

Writes JSON, rate by rate; an interrupted table goes on where it stopped.
"""

import time
from pathlib import Path

import datasets
import torch
from cells import Cells, arguments
from default_rates import BATCH, PASS, choose, pair_loss

from marlhf_lab.corpora.sentiment import all_words
from marlhf_lite.config.commands import RunCommand
from marlhf_lite.config.options import RewardModelConfig, TrainerConfig
from marlhf_lite.experiments.context import RunContext, open_context
from marlhf_lite.experiments.pipeline import sft_stage
from marlhf_lite.models.loading import load_policy, new_reward_model, share
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.rollout import from_texts, generate, generate_in_batches
from marlhf_lite.utils.jsonl import append_lines, read_lines

RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
SEED = 141
LEARNED = 0.68  # nats a pair: a loss below it shows that something was learned
DATA = Path(__file__).parents[1] / "data" / "sentiment"


def make_pairs(context: RunContext, sft: Path, part: str) -> list[dict]:
    """Pairs of two answers to each question of a part ("ppo" or "test"), of which the friendlier one is chosen.

    They are made once and kept in a file of the run's folder, from which later calls read them.
    """
    file = context.path / f"{part}.jsonl"
    if not file.is_file():
        torch.manual_seed(SEED)
        policy = load_policy(context.base, sft, trainable=False)
        questions = list(context.task.splits[part]["prompt"])
        asked = []
        for question in questions:
            asked += [question, question]
        rollout, _ = generate_in_batches(
            generate, BATCH, policy, context.tokenizer, asked, context.sampling
        )
        scores = all_words(rollout.prompts, rollout.responses)
        answers = list(zip(scores, rollout.responses, strict=True))
        pairs = []
        for number, question in enumerate(questions):
            (worse, rejected), (better, chosen) = sorted(answers[2 * number : 2 * number + 2])
            if worse < better:  # equal scores rank nothing
                pairs.append({"prompt": question, "chosen": chosen, "rejected": rejected})
        append_lines(file, pairs)
    return read_lines(file)


def one_rate(context: RunContext, sft: Path, rate: float) -> dict:
    """Train a reward model at this rate, and return its loss and accuracy on the held-out pairs."""
    rows = datasets.Dataset.from_list(make_pairs(context, sft, "ppo"))
    held_out = datasets.Dataset.from_list(make_pairs(context, sft, "test"))
    model = new_reward_model(share(context.base), sft, SEED)
    begin = time.time()
    config = RewardModelConfig(rm_epochs=1, rm_batch_size=BATCH, rm_learning_rate=rate)
    passes = TrainerConfig(per_device_train_batch_size=PASS)
    train_reward_model(
        model,
        context.tokenizer,
        rows,
        config,
        context.options,
        context.path / f"rm-{rate}",
        SEED,
        passes,
    )
    sides = {}
    for side in ("chosen", "rejected"):
        sides[side] = from_texts(
            context.tokenizer, held_out["prompt"], held_out[side], context.limit
        )
    found = pair_loss(model, **sides) | {"seconds": time.time() - begin}
    return found | {"pairs": len(rows), "held_out": len(held_out)}


def main() -> None:
    args = arguments(__doc__, "reward_model_rates").parse_args()
    place = {"output_dir": str(args.folder)}
    if (args.folder / "config.yaml").is_file():  # an interrupted table goes on
        place["resume"] = str(args.folder)
    options = RunCommand(
        model=args.model,
        dataset=str(DATA),
        # The reward is a function, because the questions come without answers to train a reward model on.
        reward="marlhf_lab.corpora.sentiment:all_words",
        critic_init="sft",
        max_response_length=48,
        temperature=1.0,
        seed=SEED,
        **place,
    )
    context = open_context(options)
    cells = Cells(args.out, args)
    sft = sft_stage(context)
    losses = []
    for rate in RATES:
        found = cells.measure(f"rm {rate}", one_rate, context, sft, rate)
        losses.append(found["loss"])
        print("rm", rate, found, flush=True)
    chosen = None
    if min(losses) < LEARNED:
        chosen = choose(cells.cells, "rm", RATES)
    cells.finish(chosen=chosen)


if __name__ == "__main__":
    main()
