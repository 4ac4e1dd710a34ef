"""Which learning rate of policy and critic serves a pretrained model with the library's own adapters, of rank 16?

The studies `sentiment_tuning` and `sentiment_rates` tried rates with adapters of rank 4. Here MA-PPO (n = 5)
trains SmolLM2-135M-Instruct on the questions of `data/sentiment`; VADER's score of the first 12 words is the reward.

Fixed before the first run. Twelve updates of 16 answers of at most 64 tokens, the critic's rate 1.5 times the policy's,
all else as the library's defaults for this model; seed 142, which no study uses; every rate has one run. Chosen: of the
rates whose mean KL in the last six batches is below 5 nats, the smallest whose mean reward in them (96 answers, an
error of 0.03) is within 0.03 of the best. A best rate at an edge of its grid is said to be one. If no mean exceeds
0.25, nothing is chosen: before any training 100 answers have 0.18. This table chooses, and claims nothing.

    python benchmarks/policy_rates.py --model FOLDER

Writes JSON, rate by rate; an interrupted table goes on where it stopped.
"""

import shutil
from pathlib import Path

import numpy as np
from cells import Cells, arguments

from marlhf_lite import cli
from marlhf_lite.utils.run_folder import RunFolder

RATES = (5e-4, 1e-3, 2e-3)
SEED = 142
UPDATES = 12
BATCH = 16
LAST = 6  # batches whose means decide
NEAR = 0.03  # rewards that count as equal to the best
LEARNED = 0.25  # a mean reward above it shows that something was learned
MOST_KL = 5.0  # nats
DATA = Path(__file__).parents[1] / "data" / "sentiment"


def marlhf(command: str, model: str, place: Path, **options) -> None:
    """Run a command of the library on the questions; what an interrupted call has left in `place` is deleted."""
    shutil.rmtree(place, ignore_errors=True)
    shared = {"model": model, "dataset": DATA, "max_response_length": 64, "seed": SEED}
    options = shared | options | {"output_dir": place}
    if cli.main([command, *(f"--{name}={value}" for name, value in options.items())]):
        raise SystemExit(1)


def one_rate(model: str, folder: Path, rate: float) -> dict:
    """Run PPO at this rate, and return means over the last batches, and the mean reward of every batch."""
    place = folder / f"ppo-{rate}"
    marlhf(
        "ppo",
        model,
        place,
        sft=folder / "sft",
        reward="marlhf_lab.corpora.sentiment:first_words",
        critic_init="sft",
        updates=UPDATES,
        batch_size=BATCH,
        checkpoint_every=0,
        policy_learning_rate=rate,
        critic_learning_rate=1.5 * rate,
    )
    rows = RunFolder.open(place / "ppo").metrics()
    found = {}
    for name, metric in (("reward", "score_mean"), ("kl", "kl_k1"), ("tokens", "response_length")):
        found[name] = float(np.mean([row[metric] for row in rows[-LAST:]]))
    return found | {"rewards": [row["score_mean"] for row in rows]}


def choose(cells: dict[str, dict]) -> float | None:
    """The smallest rate whose mean reward is near the best, of the rates with little KL.

    None if no such rate has learned anything.
    """
    means = {}
    for rate in RATES:
        cell = cells[f"ppo {rate}"]
        if cell["kl"] < MOST_KL:
            means[rate] = cell["reward"]
    best = max(means.values(), default=LEARNED)
    if best <= LEARNED:
        return None
    return min(rate for rate, mean in means.items() if mean >= best - NEAR)


def main() -> None:
    args = arguments(__doc__, "policy_rates").parse_args()
    cells = Cells(args.out, args)
    # The questions come without answers, so nothing is trained here: it is the start of every rate.
    marlhf("sft", args.model, args.folder / "sft", sft_epochs=0)
    for rate in RATES:
        found = cells.measure(f"ppo {rate}", one_rate, args.model, args.folder, rate)
        print("ppo", rate, found, flush=True)
    cells.finish(chosen=choose(cells.cells))


if __name__ == "__main__":
    main()
