"""Updates on a share of given responses: run alone, or by several processes, and compare. Not a test by itself.

usage: one_update.py <folder>; it holds jobs.pt, by name: the rollout, options, and how to start.
"""

import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import DistributedType
from accelerate.utils import gather_object

from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.macro import FixedNGram, RandomizedNGram
from marlhf_lite.models.loading import build_models, load_base, load_tokenizer
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, Sampling, generate
from marlhf_lite.utils.run_folder import RunFolder


def sharding(accelerator, precision="no"):
    """Let this accelerator, which is returned, and later ones share out weights by FSDP2 on a CPU.

    Torch can do that, but accelerate chooses FSDP2 only on GPUs, so its shared state is written here.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    if precision != "no":
        plugin.set_mixed_precision(precision)
    accelerator.state._shared_state["_mixed_precision"] = precision
    # Later accelerators take this over from `PartialState`.
    for state in (accelerator.state, PartialState()):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state._shared_state["fsdp_plugin"] = plugin
    return accelerator


def whole(tensor):
    """A copy of a tensor, of which this process may hold only a share."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class WithoutCritic(Objective):
    """An objective from which the critic learns nothing."""

    def value_loss(self, batch, outputs, old, count):
        return torch.zeros(()), {}


def update(job, accelerator):
    """Make an update on this process's share of the job's rollout, and return what it did, with whole tensors.

    `grads` are the gradients at the optimizer step, `summed` says after each backward pass whether the policy's weights
    have gradients, `moved` is the share of each tensor of the policy that the update changed, `formats` are the dtypes
    of each model's weights, and `row` are the metrics.
    """
    # 1. A trainer, with hooks that look at its gradients.
    base = load_base(ModelConfig(**job["model"]))
    models = build_models(base, job["sft"], job["rm"])
    config = PPOTrainerConfig(**job["ppo"], **job["how"], max_response_length=12)
    tokenizer = load_tokenizer(job["model"]["model"])
    prompts = job["rollout"]["prompts"]
    how = {
        "accelerator": accelerator,
        "objective": WithoutCritic if job["without_critic"] else None,
    }
    trainer = PPOTrainer(models, tokenizer, prompts, None, None, config, **how)
    grads = {}
    summed = []
    backward = accelerator.backward

    def backward_and_look(loss):
        backward(loss)
        summed.append(all(p.grad is not None for p in trainer.parameters["policy"]))

    if not config.micro_batch_size:
        trainer.fit_micro_batch_size()

    def keep_gradients(*_):
        for name, parameters in trainer.parameters.items():
            grads[name] = [whole(p.grad) for p in parameters]

    trainer.optimizer.optimizer.register_step_pre_hook(keep_gradients)
    # 2. The update. Segmentation is drawn for all rows, so that it does not depend on the number of processes.
    rollout = Rollout(**job["rollout"])
    rows = torch.arange(len(rollout))[accelerator.process_index :: accelerator.num_processes]
    macro = RandomizedNGram((1, 2, 3), seed=1)(rollout.mask)
    before = [whole(p) for p in trainer.parameters["policy"]]
    with mock.patch.object(accelerator, "backward", backward_and_look):
        row = trainer.learn(rollout.select(rows), macro.select(rows))
    # 3. What it did.
    weights = {k: [whole(p) for p in v] for k, v in trainer.parameters.items()}
    moved = [(x != y).float().mean().item() for x, y in zip(before, weights["policy"], strict=True)]
    roles = {role: getattr(models, role) for role in ("policy", "reference", "reward", "critic")}
    return {
        "moved": moved,
        "formats": {
            role: sorted({str(p.dtype) for p in model.parameters()})
            for role, model in roles.items()
        },
        "grads": grads,
        "weights": weights,
        "row": row,
        "summed": summed,
        "sharded": hasattr(trainer.parameters["policy"][0], "full_tensor"),
    }


def fit(job, accelerator):
    """The micro-batch that a dry run finds if the first process has memory for two rows, and the others for all."""
    models = build_models(load_base(ModelConfig(**job["model"])), job["sft"], job["rm"])
    tokenizer = load_tokenizer(job["model"]["model"])
    prompts = job["rollout"]["prompts"]
    config = PPOTrainerConfig(batch_size=16, micro_batch_size=0, max_response_length=6)
    trainer = PPOTrainer(models, tokenizer, prompts, None, None, config, accelerator=accelerator)

    def run_out_of_memory(_, args, kwargs):
        if accelerator.is_main_process and len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    backbone = models.policy.model.get_base_model().model
    backbone.register_forward_pre_hook(run_out_of_memory, with_kwargs=True)
    return trainer.fit_micro_batch_size()


def held(models):
    """The share of each model's weights that this process holds, and its share of the weights of the model's layers."""
    shares = {}
    for role in ("policy", "reference", "reward", "critic"):
        weights = dict(getattr(models, role).named_parameters())
        for part in (role, f"{role}.layers"):
            of_part = [p for name, p in weights.items() if part == role or ".layers." in name]
            # A weight that is spread over processes has a local part.
            here = [p.to_local() if hasattr(p, "to_local") else p for p in of_part]
            shares[part] = sum(p.numel() for p in here) / sum(p.numel() for p in of_part)
    return shares


def trainer_of(job, accelerator, run, updates, sampler=generate):
    """A trainer of all weights with checkpoints, and tests while training."""
    models = build_models(load_base(ModelConfig(**job["model"])), job["sft"], job["rm"])
    tokenizer = load_tokenizer(job["model"]["model"])
    prompts = job["rollout"]["prompts"]
    reward = ModelReward(models.reward)
    rates = {"policy_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    kept = {"checkpoint_every": 2, "eval_every": 2}
    return PPOTrainer(
        models,
        tokenizer,
        prompts,
        reward,
        FixedNGram(2),
        PPOTrainerConfig(updates=updates, batch_size=4, max_response_length=6, **rates, **kept),
        run=run,
        held_out=HeldOutEvaluation(HeldOutPrompts(prompts[:5], tokenizer, Sampling(6)), reward),
        accelerator=accelerator,
        sampler=sampler,
    )


def one_more(job, trainer):
    """The weights after an update on this process's share of the given responses."""
    rollout = Rollout(**job["rollout"])
    accelerator = trainer.accelerator
    rows = torch.arange(len(rollout))[accelerator.process_index :: accelerator.num_processes]
    trainer.learn(rollout.select(rows), FixedNGram(2)(rollout.mask).select(rows))
    return {role: [whole(p) for p in parameters] for role, parameters in trainer.parameters.items()}


def train(job, accelerator, folder):
    """Make three sharded runs with tests while training: a whole one, one that stops, and one that resumes the second.

    Returns the histories of the three; by moment and role, the largest share of the role's weights that any process
    ever held then; and the weights after one more update of the third.
    """
    if accelerator.is_main_process:
        for name in ("whole", "run"):
            RunFolder.create(folder / name, {})
    accelerator.wait_for_everyone()
    histories = []
    shares = {}

    def note_shares(moment):
        for role, share in held(trainer.models).items():
            most = max(gather_object([share]))
            shares[moment, role] = max(most, shares.get((moment, role), 0.0))

    def with_notes(work, moment):
        def wrapped(*args, **kwargs):
            note_shares(f"before {moment}")
            result = work(*args, **kwargs)
            note_shares(f"after {moment}")
            return result

        return wrapped

    for name, updates in (("whole", 6), ("run", 4), ("run", 6)):
        run = RunFolder.open(folder / name)
        trainer = trainer_of(job, accelerator, run, updates, with_notes(generate, "sampling"))
        trainer.score = with_notes(trainer.score, "scoring")
        trainer.learn = with_notes(trainer.learn, "training")
        is_third = len(histories) == 2
        histories.append(list(trainer.train(resume=is_third)))
        trainer.save(run.path)
    return {"histories": histories, "shares": shares, "one more": one_more(job, trainer)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator()
    jobs = torch.load(folder / "jobs.pt", weights_only=True)
    results = {"micro_batch_size": fit(jobs["plain"], accelerator)}
    for name, job in jobs.items():
        sharded = job.get("sharded") and accelerator.num_processes > 1
        if sharded:
            sharding(accelerator, job["precision"])
        results[name] = update(job, accelerator)
    if sharded:  # the last job, with several processes
        results |= train(job, accelerator, folder)
    if accelerator.is_main_process:
        torch.save(results, folder / f"result-{accelerator.num_processes}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
