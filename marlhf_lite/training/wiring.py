"""What a `PPOTrainer` is composed of: policy and critic with their optimizer, and the run around the updates.

`PPOTrainer` calls both functions once, when it is made. Nothing here belongs to the method.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.models.actor_critic import ActorCritic, PPOModels, trainable
from marlhf_lite.training.best_update import BestUpdate
from marlhf_lite.training.checkpoint import Checkpoints
from marlhf_lite.training.distributed import is_sharded, shard_frozen
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.loop import TrainingLoop
from marlhf_lite.training.memory_limit import MemoryLimit
from marlhf_lite.training.optimizer import loss_scale, make_optimizer
from marlhf_lite.training.run_state import BatchSize, RunState
from marlhf_lite.training.safeguards import Safeguards
from marlhf_lite.utils.errors import InputError

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder


@dataclass(kw_only=True)
class TrainedModels:
    """Policy and critic with their optimizer, as accelerate has prepared them."""

    actor_critic: nn.Module  # both in one module, perhaps inside a wrapper for several processes
    optimizer: torch.optim.Optimizer  # its groups carry the name of their role
    parameters: dict[str, list[nn.Parameter]]  # those that train, by role: "policy" and "critic"
    is_sharded: bool  # whether FSDP2 shards their weights over processes
    loss_scale: float  # multiplies the loss: gradients of single tokens are too small for float16


def prepare_models(
    models: PPOModels, config: PPOTrainerConfig, accelerator: Accelerator
) -> TrainedModels:
    """Make the optimizer, and put models and optimizer where accelerate wants them.

    There is one optimizer from explicit lists of parameters, and one module for both models, so that data-parallel
    wrappers see one forward and one backward pass.
    """
    optimizer = make_optimizer(
        {"policy": trainable(models.policy), "critic": trainable(models.critic)},
        rates={
            "policy": config.policy_learning_rate,
            "critic": config.critic_learning_rate,
        },
        config=config,
    )
    actor_critic, optimizer = accelerator.prepare(
        ActorCritic(models.policy, models.critic), optimizer
    )
    if isinstance(actor_critic, DistributedDataParallel):
        # DDP would send the buffers of one process to all in each pass. They are the same everywhere already, and
        # processes would wait for each other, although they may make different numbers of passes in dry runs.
        actor_critic.broadcast_buffers = False
    shard_frozen(models.reference, models.reward, beside=actor_critic, accelerator=accelerator)

    # Sharding has replaced the parameters: only the optimizer's groups have those that train now.
    parameters: dict[str, list[nn.Parameter]] = {"policy": [], "critic": []}
    for group in optimizer.param_groups:
        parameters[group["name"]].extend(group["params"])
    return TrainedModels(
        actor_critic=actor_critic,
        optimizer=optimizer,
        parameters=parameters,
        is_sharded=is_sharded(actor_critic),
        loss_scale=loss_scale(models.policy),
    )


@dataclass(kw_only=True)
class RunParts:
    """What keeps a run alive around its updates."""

    state: RunState
    logger: RunLogger
    checkpoints: Checkpoints | None  # None without a run folder
    best: BestUpdate
    safeguards: Safeguards
    memory: MemoryLimit
    loop: TrainingLoop


def make_run_parts(
    *,
    config: PPOTrainerConfig,
    models: PPOModels,
    trained: TrainedModels,
    prompts: Sequence[str],
    total_updates: int,
    accelerator: Accelerator,
    run: "RunFolder | None",
    held_out: Callable[[PPOModels], dict[str, float]] | None,
    name: str,
) -> RunParts:
    """Make the parts; see `PPOTrainer` for the arguments.

    Raises `InputError` if the best update is to be kept (`--keep_best`), but there is no folder for its checkpoint, or
    no held-out test that could find it.
    """
    state = RunState(
        micro_batch=BatchSize(asked=config.micro_batch_size, now=config.micro_batch_size),
        generation_batch=BatchSize(
            asked=config.generation_batch_size, now=config.generation_batch_size
        ),
        gradient_checkpointing=models.gradient_checkpointing,
    )
    logger = RunLogger(run, name, accelerator)
    best = BestUpdate(score_name=config.keep_best, patience=config.patience, state=state)

    checkpoints = None
    save_checkpoint = None
    if run:
        checkpoints = Checkpoints(run, config.save_total_limit, accelerator)
        save_checkpoint = partial(
            _save_checkpoint, checkpoints=checkpoints, trained=trained, state=state
        )
    elif config.keep_best:
        fix = "give the trainer a run folder (run=)"
        raise InputError(f"--keep_best {config.keep_best}: no place for its checkpoint: {fix}")
    if config.keep_best and held_out is None:
        fix = "give data with held-out prompts (of the trainer: held_out=)"
        raise InputError(f"--keep_best {config.keep_best}: there are no held-out tests: {fix}")

    # Responses of an optimizer step in this process.
    minibatch = config.batch_size // config.num_mini_batches
    rows_per_step = max(minibatch // accelerator.num_processes, 1)
    return RunParts(
        state=state,
        logger=logger,
        checkpoints=checkpoints,
        best=best,
        safeguards=Safeguards(
            config=config,
            parameters=trained.parameters,
            state=state,
            accelerator=accelerator,
        ),
        memory=MemoryLimit(
            state=state,
            models=models,
            optimizer=trained.optimizer,
            accelerator=accelerator,
            logger=logger,
            rows_per_step=rows_per_step,
            is_sharded=trained.is_sharded,
        ),
        loop=TrainingLoop(
            config=config,
            prompts=prompts,
            state=state,
            total_updates=total_updates,
            logger=logger,
            accelerator=accelerator,
            best=best,
            save_checkpoint=save_checkpoint,
            test_held_out=partial(held_out, models) if held_out else None,
        ),
    )


def _save_checkpoint(*, checkpoints: Checkpoints, trained: TrainedModels, state: RunState) -> None:
    """Write a checkpoint of the present state; that of the best update is never deleted."""
    checkpoints.save(
        trained.actor_critic, trained.optimizer, state.counters(), keep_also=state.best_update
    )
