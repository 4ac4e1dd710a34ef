"""The third try of the study `critic_tries`: a critic that regresses on a replay of the last four rollouts.

Setting, seeds and primary outcome are those of the study's protocol. After each update the critic takes one optimizer
step more on each of the three rollouts before it, toward their returns with lambda 1, in which no critic has a part.
The policy does not move in these steps. The library's trainer has no such option: the one here adds it.

    python benchmarks/critic_replay.py --folder runs/critic_replay

Writes JSON, seed by seed; an interrupted table goes on where it stopped.
"""

import argparse
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from cells import RESULTS, Cells

from marlhf_lab.studies.former import with_todays_names
from marlhf_lab.studies.results import EXPLAINED, t_interval
from marlhf_lab.studies.study import load_study
from marlhf_lite import cli, macro
from marlhf_lite.experiments import pipeline
from marlhf_lite.training.experience import Batch
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.run_folder import RunFolder

KEPT = 4  # rollouts, the newest included


class ReplayTrainer(PPOTrainer):
    """`PPOTrainer` whose critic learns from earlier rollouts, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.earlier: deque[tuple[Batch, torch.Tensor]] = deque(maxlen=KEPT - 1)

    def learn(self, rollout, macro_actions) -> dict[str, float]:
        """An update, and after it the critic's steps on what is kept."""
        batch = self.objective.batch(rollout, macro_actions)
        # With the KL of the policy that sampled.
        returns = self.objective.advantages(batch, self.all_outputs(rollout)).returns
        row = super().learn(rollout, macro_actions)
        for earlier in self.earlier:
            self.critic_step(*earlier)
        self.earlier.append((batch, returns))
        return row

    def critic_step(self, batch: Batch, returns: torch.Tensor) -> None:
        """One optimizer step toward returns [B, S] of an earlier rollout."""
        tokens = batch.steps.token_mask.sum()
        for rows in self._micro_batches(batch):
            part = batch.select(rows)
            values = self.compute_outputs(part.rollout).values
            loss, _ = macro.value_loss(
                values, values, returns[rows], part.steps, clip=None, normalizer=tokens
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters["critic"], self.config.max_grad_norm)
        self.optimizer.step()  # the policy's weights have no gradients
        self.optimizer.zero_grad(set_to_none=True)


def run_seed(folder: Path, seed: int, shared: Mapping) -> dict:
    """SFT, reward model and PPO with a replay; the critic's explained variance of the score, update by update."""
    models = folder / f"models-{seed}"
    place = folder / f"replay-{seed}"
    sft = models / "sft"
    rm = models / "rm"
    marlhf("sft", seed=seed, output_dir=sft)
    marlhf("rm", seed=seed, sft=sft, output_dir=rm, rm_loss=shared["rm_loss"])
    of_ppo = {
        name: value for name, value in shared.items() if name not in ("rm_loss", "eval_prompts")
    }
    options = with_todays_names(of_ppo)  # the protocol has the names of its day
    pipeline.PPOTrainer = ReplayTrainer
    marlhf("ppo", seed=seed, n=1, sft=sft, rm=rm, output_dir=place, **options)
    curve = [row[EXPLAINED] for row in RunFolder.open(place / "ppo").metrics()]
    learning = curve[shared["critic_warmup"] :]
    return {"curve": curve, "mean": sum(learning) / len(learning)}


def marlhf(command: str, **options) -> None:
    """One command of the library, in this process."""
    shutil.rmtree(options["output_dir"], ignore_errors=True)
    if cli.main([command, *(f"--{name}={value}" for name, value in options.items())]):
        raise SystemExit(f"marlhf {command} failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "critic_replay", help="of runs"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_critic_replay.json")
    args = parser.parse_args()
    study = load_study("critic_tries")
    cells = Cells(args.out, args)
    means = [
        cells.measure(f"seed {x}", run_seed, args.folder, x, study.shared)["mean"]
        for x in study.seeds
    ]
    cells.finish(interval=t_interval(means))
    print(means, t_interval(means))


if __name__ == "__main__":
    main()
