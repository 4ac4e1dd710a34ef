"""The third try of the study `critic_tries`: a critic that regresses on a replay of the last four rollouts.

Setting, seeds and primary outcome are those of the study's protocol. After each update the critic takes one optimizer
step more on each of the three rollouts before it, toward their returns with lambda 1, in which no critic has a part.
The policy does not move in these steps. The library's trainer has no such option: the one here adds it.

    python benchmarks/critic_replay.py --folder runs/critic_replay

`--study` may name another protocol, such as one of seconds; of its methods only `as in summaries` runs, with a replay.
Writes JSON, seed by seed; an interrupted table goes on where it stopped.
"""

import argparse
import os
import shutil
import tempfile
from collections import deque
from pathlib import Path
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from cells import RESULTS, Cells

from marlhf_lab.studies.results import EXPLAINED, t_interval
from marlhf_lab.studies.study import Study, load_study, plan
from marlhf_lite import cli, macro
from marlhf_lite.experiments import pipeline
from marlhf_lite.training.experience import Batch
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.utils.run_folder import RunFolder

KEPT = 4  # rollouts, the newest included
METHOD = "as in summaries"  # of the study: its options are those of the runs here


class ReplayTrainer(PPOTrainer):
    """`PPOTrainer` whose critic learns from earlier rollouts, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.earlier: deque[tuple[Batch, torch.Tensor]] = deque(maxlen=KEPT - 1)  # with returns

    def learn(self, rollout, macro_actions) -> dict[str, float]:
        """Update on the rollout, then take a step of the critic on each rollout before it; return the metrics."""
        batch = self.objective.batch(rollout, macro_actions)
        # Before the update, so that the KL in these returns is that of the policy that sampled.
        returns = self.objective.advantages(batch, self.all_outputs(rollout)).returns
        row = super().learn(rollout, macro_actions)
        for earlier in self.earlier:
            self.critic_step(*earlier)
        self.earlier.append((batch, returns))
        return row

    def critic_step(self, batch: Batch, returns: torch.Tensor) -> None:
        """Take one optimizer step of the critic toward returns [B, S] of an earlier rollout."""
        # Of all micro-batches, so that their losses add up to a mean over the batch.
        tokens = batch.steps.token_mask.sum()
        for rows in self._micro_batches(batch):
            part = batch.select(rows)
            values = self.compute_outputs(part.rollout).values
            # Without a clip range the old values, the second argument, have no part in the loss.
            loss, _ = macro.value_loss(
                values, values, returns[rows], part.steps, clip=None, normalizer=tokens
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters["critic"], self.config.max_grad_norm)
        self.optimizer.step()  # the policy's weights have no gradients
        self.optimizer.zero_grad(set_to_none=True)


def run_seed(folder: Path, seed: int, study: Study) -> dict:
    """Run SFT, reward model and PPO with a replay; return the critic's explained variance of the score by update.

    `mean` is over the updates after the critic's warm-up, in which the policy moves.
    """
    (run,) = plan(study, [seed], only=[METHOD])
    sft = folder / f"models-{seed}" / "sft"
    rm = folder / f"models-{seed}" / "rm"
    replay = folder / f"replay-{seed}"
    marlhf("sft", run.words["sft"], output_dir=sft)
    marlhf("rm", [*run.words["rm"], f"--sft={sft}"], output_dir=rm)
    with mock.patch.object(pipeline, "PPOTrainer", ReplayTrainer):
        marlhf("ppo", [*run.words["ppo"], f"--sft={sft}", f"--rm={rm}"], output_dir=replay)
    curve = [row[EXPLAINED] for row in RunFolder.open(replay / "ppo").metrics()]
    while_the_policy_moves = curve[run.options["critic_warmup"] :]
    return {"curve": curve, "mean": sum(while_the_policy_moves) / len(while_the_policy_moves)}


def marlhf(command: str, words: list[str], output_dir: Path) -> None:
    """Run a command of the library in this process; what an interrupted call has left in its folder is deleted."""
    shutil.rmtree(output_dir, ignore_errors=True)
    if cli.main([command, *words, f"--output_dir={output_dir}"]):
        raise SystemExit(f"marlhf {command} failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "critic_replay", help="of runs"
    )
    parser.add_argument("--study", default="critic_tries", help="name or YAML file of the protocol")
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_critic_replay.json")
    args = parser.parse_args()
    study = load_study(args.study)
    cells = Cells(args.out, args)
    means = []
    for seed in study.seeds:
        found = cells.measure(f"seed {seed}", run_seed, args.folder, seed, study)
        means.append(found["mean"])
    cells.finish(interval=t_interval(means))
    print(means, t_interval(means))


if __name__ == "__main__":
    main()
