"""PPO with a critic, over macro actions: MA-PPO (paper, Algorithm 1), to be read from top to bottom.

`PPOTrainer.update` and `PPOTrainer.learn` are one update in five numbered steps; the methods of each step follow in the
order in which they are called, and `Objective` holds the equations. With `FixedNGram(1)` every macro action is one
token, and the same code is token-level PPO. Shapes: B responses, T response tokens, S macro actions.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.models.actor_critic import ActorCritic, PPOModels, trainable
from marlhf_lite.training.distributed import (
    full_tensor,
    gathered_outside_layers,
    is_sharded,
    raise_on_all_ranks,
    shard_frozen,
    sum_over_processes,
)
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.metrics import Clock, update_metrics
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.objectives import check_first_update, make_objective
from marlhf_lite.training.optimizer import learning_rate_share, loss_scale, make_optimizer
from marlhf_lite.training.rewards import (
    EnvironmentReward,
    FunctionReward,
    score_responses,
    shape_scores,
)
from marlhf_lite.training.rollout import (
    Rollout,
    Sampler,
    generate,
    generate_in_batches,
    is_remote,
    sampling_of,
)
from marlhf_lite.training.runner import Runner
from marlhf_lite.training.sampler_checks import check_sampled
from marlhf_lite.utils.user_code import named_errors

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder


class PPOTrainer(Runner):
    """Trains the policy and the critic of `models` on `prompts`: `train()` makes all updates (see `Runner`).

    Args:
        models: policy, reference, reward model and critic; see `build_models`.
        tokenizer: the tokenizer of the base model.
        prompts: texts; drawn without replacement, and shuffled again when all were used.
        reward: rollout -> [B] scores (`ModelReward`, `FunctionReward`, or your own function).
        termination: the termination rule ζ: a `macro.TerminationRule`, or a function `rule(mask, **context)`.
        config: all options; see `PPOTrainerConfig`.
        run: folder for records and checkpoints; None keeps records in memory and makes no checkpoints.
        gold: (prompts, responses) -> true scores, which are recorded and never trained on.
        held_out: models -> scores on held-out prompts, called every `config.eval_every` updates.
        name: the trainer's name in the progress bar and in printed lines.
        accelerator: where the models run; made with `log_with` if there are trackers.
        sampler: answers the prompts; see `rollout.Sampler`.
        objective: the equations, a subclass of `Objective`; None takes those that `config.objective` names.
    """

    def __init__(
        self,
        models: PPOModels,
        tokenizer,
        prompts: Sequence[str],
        reward: Callable[[Rollout], Tensor],
        termination: macro.TerminationRule | Callable[..., macro.MacroActions],
        config: PPOTrainerConfig,
        *,
        run: "RunFolder | None" = None,
        gold: Callable[[list[str], list[str]], list[float]] | None = None,
        held_out: Callable[[PPOModels], dict[str, float]] | None = None,
        name: str = "ppo",
        accelerator: Accelerator | None = None,
        sampler: Sampler = generate,
        objective: type[Objective] | None = None,
    ):
        super().__init__(
            config, prompts, run=run, held_out=held_out, name=name, accelerator=accelerator
        )
        self.models, self.tokenizer, self.sampler = models, tokenizer, sampler
        self.gradient_checkpointing = models.gradient_checkpointing
        self.reward, self.termination, self.gold = reward, macro.as_rule(termination), gold
        self.objective = objective(config) if objective else make_objective(config)
        # A custom objective may read all responses of an update.
        self.has_custom_objective = bool(objective or self.objective.user_name)
        self.sampling = sampling_of(config, config.max_response_length)
        self.logprob_temperature = config.temperature if config.logprobs_at_temperature else 1.0

        # One optimizer from explicit lists of parameters, and one module for both models, so that data-parallel
        # wrappers see one forward and one backward pass.
        self.learning_rates = {
            "policy": config.policy_learning_rate,
            "critic": config.critic_learning_rate,
        }
        parameters = {role: trainable(getattr(models, role)) for role in self.learning_rates}
        optimizer = make_optimizer(parameters, self.learning_rates, config)
        actor_critic = ActorCritic(models.policy, models.critic)
        self.actor_critic, self.optimizer = self.accelerator.prepare(actor_critic, optimizer)
        if isinstance(self.actor_critic, DistributedDataParallel):
            # All processes have the same buffers, and may differ in the number of passes of a dry run.
            self.actor_critic.broadcast_buffers = False
        shard_frozen(
            models.reference, models.reward, beside=self.actor_critic, accelerator=self.accelerator
        )
        groups = self.optimizer.param_groups
        self.parameters = {
            x: [p for g in groups if g["name"] == x for p in g["params"]]
            for x in self.learning_rates
        }
        self.loss_scale = loss_scale(models.policy)

    def update(self, prompts: list[str]) -> dict[str, float]:
        """Make one update of Algorithm 1 on these prompts; return its metrics."""
        clock = Clock()

        # 1. Rollout: the current policy answers each prompt (section 2.2).
        with clock.phase("generation"):
            rollout = self.generate_rollout(prompts)

        # 2. Scoring: log-probabilities of the reference model, and a reward for each response (section 2.2).
        with clock.phase("scoring"):
            rollout = self.score(rollout)

        # 3. Segmentation: the termination rule cuts each response into macro actions (section 3.2.1).
        with clock.phase("macro"):
            macro_actions = self.segment(rollout)
            if self.updates_done == 0:
                self.termination.check()

        # 4. and 5. Old outputs, advantages, and optimisation.
        with clock.phase("training"):
            row = self.learn(rollout, macro_actions)

        row |= self.termination.metrics() | getattr(self.reward, "metrics", dict)()
        return self.record(row, clock, rollout, macro_actions)

    def learn(self, rollout: Rollout, macro_actions: macro.MacroActions) -> dict[str, float]:
        """Steps 4 and 5 of an update: train on a scored and segmented rollout; returns the metrics.

        They describe policy and critic before the update, and are means over its optimizer steps. Gradients and metrics
        are those of all processes together.

        Raises:
            InputError: too many updates in a row were not finite, or the first one shows that something is wrong.
        """
        config, critic_alone = self.config, self.updates_done < self.config.critic_warmup
        batch = self.objective.batch(rollout, macro.check_segmentation(macro_actions, rollout.mask))
        at_start = self.weights_at_start()
        self._set_learning_rates()

        # 4. Old outputs and advantages, from a first pass with the policy that sampled (section 3.2.2, Appendices D.1
        #    and E). With one minibatch it is also the pass of the first optimizer step, so its gradients are kept.
        #    Several minibatches, whitening and objectives that read other responses need all advantages before that.
        reuses_first_pass = (
            config.num_mini_batches == 1 and not config.whiten and not self.has_custom_objective
        )
        if reuses_first_pass:
            old, stats = self.with_less_memory(
                self.forward_backward, batch, self.loss_normalizers(batch)
            )
        else:
            old = self.objective.advantages(batch, self.with_less_memory(self.all_outputs, rollout))
        with named_errors("sampler", getattr(self.sampler, "name", "")):
            checked = check_sampled(rollout, self.models.policy, old.logprobs, self.accelerator)
        if config.whiten:
            old = replace(
                old,
                advantages=macro.whiten(old.advantages, batch.steps.mask, self.accelerator.reduce),
            )

        # 5. Optimisation: clipped losses of policy and critic (section 3.2.2, Appendix E), in epochs and minibatches.
        epochs, steps = config.critic_epochs if critic_alone else config.num_ppo_epochs, []
        for i, rows in enumerate(
            rows for _ in range(epochs) for rows in self._minibatches(len(batch))
        ):
            if i > 0 or not reuses_first_pass:
                part = batch.select(rows)
                passed = (part, self.loss_normalizers(part), old.select(rows))
                _, stats = self.with_less_memory(self.forward_backward, *passed)
            if i == self.updates_done == 0 and self.has_custom_objective:
                check_first_update(self.objective, batch, old, stats)
            steps.append(self.optimizer_step(stats))

        row = update_metrics(batch, old, config, self.accelerator)
        from marlhf_lite.training.critic_metrics import diagnose_critic

        row |= diagnose_critic(
            old.values, shape_scores(rollout, config), rollout.mask, self.accelerator
        )
        row |= {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} | checked
        self.finish_update(row, at_start)
        return row

    # -- 1. rollout ---------------------------------------------------------------------------------------------------

    def generate_rollout(self, prompts: list[str]) -> Rollout:
        """Responses of the current policy, sorted by length, so that micro-batches need little padding."""
        policy, process = self.models.policy.eval(), self.accelerator.process_index
        names = tuple(
            f"{self.seed}/{self.updates_done}/{process}/{row}" for row in range(len(prompts))
        )
        given = policy.model, self.tokenizer, prompts, replace(self.sampling, names=names)
        remote, size = is_remote(self.sampler), self.generation_batch_size
        with nullcontext() if remote else gathered_outside_layers(policy, root=self.actor_critic):
            sample = (generate_in_batches, self.sampler, size, *given)
            rollout, self.generation_batch_size = raise_on_all_ranks(*sample)
        self.models.policy.train()
        return rollout.sort_by_length()

    # -- 2. scoring ---------------------------------------------------------------------------------------------------

    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with log π_ref of its tokens [B, T], and scores and gold scores of its responses [B]."""
        return self.with_less_memory(self._score, rollout, alone=not is_sharded(self.actor_critic))

    @torch.no_grad()
    def _score(self, rollout: Rollout) -> Rollout:
        logprobs = []
        with self.accelerator.autocast():  # the precision that training has
            for rows in self._micro_batches(rollout):
                part = rollout.select(rows).trim()
                logprobs.append(rollout.widen(self.models.reference(*self._inputs(part))[0]))
            scores = score_responses(self.reward, rollout)
        return replace(
            rollout,
            ref_logprobs=torch.cat(logprobs).masked_fill(~rollout.mask, 0.0),
            scores=scores,
            turn_rewards=rollout.turn_rewards
            if isinstance(self.reward, EnvironmentReward)
            else None,
            gold=score_responses(FunctionReward(self.gold, "gold"), rollout).cpu()
            if self.gold
            else None,
        )

    def _micro_batches(self, batch: Rollout | Batch) -> Sequence[slice]:
        """The rows of each pass through the models."""
        size = self.micro_batch_size
        return [slice(start, start + size) for start in range(0, len(batch), size)]

    def _inputs(self, part: Rollout) -> tuple:
        """The arguments of policy, reference, and policy with critic."""
        return part.tokens, part.attention_mask, part.mask.shape[1], self.logprob_temperature

    # -- 3. segmentation ----------------------------------------------------------------------------------------------

    def segment(
        self,
        rollout: Rollout,
        rule: macro.TerminationRule | None = None,
        config: PPOTrainerConfig | None = None,
    ) -> macro.MacroActions:
        """Macro actions of every response, by the trainer's own rule and options unless others are given.

        Raises `InputError` if the rule does not segment them.
        """
        rule, config = rule or self.termination, config or self.config
        copy = rollout.copy()  # a rule may be a user's, and change what it gets
        context = self._context(copy)
        if rule.needs_outputs:  # one forward pass more
            context |= vars(self.all_outputs(rollout))
        macro_actions = macro.check_segmentation(rule(copy.mask, **context), rollout.mask)
        return macro_actions.split_last_token() if config.last_token_alone else macro_actions

    def _context(self, rollout: Rollout) -> dict:
        """The arguments of every termination rule after the mask."""
        return {
            "token_ids": rollout.response_ids,
            "ref_logprobs": rollout.ref_logprobs,
            "tokenizer": self.tokenizer,
            "step": self.updates_done,
            "process": self.accelerator.process_index,
        }

    # -- 4. and 5. passes through policy and critic -------------------------------------------------------------------

    def forward_backward(
        self, batch: Batch, normalizers: Tensor, old: Experience | None = None
    ) -> tuple[Experience, dict[str, Tensor]]:
        """Add up gradients of the losses, in micro-batches; returns old outputs, and the stats of the losses.

        Without `old` the policy is the one that sampled: its outputs become old ones, and advantages follow from them.
        """
        parts, stats, micro_batches = [], {}, self._micro_batches(batch)
        for i, rows in enumerate(micro_batches):
            part, sums = (
                batch.select(rows),
                is_sharded(self.actor_critic) or i == len(micro_batches) - 1,
            )
            # Processes add up their gradients with the last micro-batch alone; FSDP2 would keep them whole until then.
            sync = nullcontext() if sums else self.accelerator.no_sync(self.actor_critic)
            with sync:
                outputs = self.compute_outputs(part.rollout)
                parts.append(old.select(rows) if old else self.objective.advantages(part, outputs))
                loss, part_stats = self.objective.losses(part, outputs, parts[-1], normalizers)
                # DDP averages gradients over processes, while the normalizers are global: hence the first factor.
                self.accelerator.backward(loss * (self.accelerator.num_processes * self.loss_scale))
            stats = {name: stats.get(name, 0.0) + x for name, x in part_stats.items()}
        return Experience.concatenate(parts), stats

    @torch.no_grad()
    def all_outputs(self, rollout: Rollout) -> ModelOutputs:
        """Outputs of the policy that sampled and of the critic, in micro-batches; no gradient."""
        parts = [
            self.compute_outputs(rollout.select(rows)) for rows in self._micro_batches(rollout)
        ]
        return ModelOutputs(
            *(torch.cat(x) for x in zip(*(vars(part).values() for part in parts), strict=True))
        )

    def compute_outputs(self, rollout: Rollout) -> ModelOutputs:
        """One forward pass of policy and critic, with gradients if they are on."""
        part = rollout.trim()
        outputs = self.actor_critic(*self._inputs(part))
        return ModelOutputs(*(rollout.widen(x.masked_fill(~part.mask, 0.0)) for x in outputs))

    def loss_normalizers(self, batch: Batch) -> Tensor:
        """[3] counts of the whole optimizer step over all processes; see `Objective.counts`.

        So gradients do not depend on how the step is split into micro-batches, or over processes.
        """
        return self.accelerator.reduce(self.objective.counts(batch), reduction="sum")

    # -- 5. optimisation ----------------------------------------------------------------------------------------------

    def _minibatches(self, count: int) -> Sequence[Tensor]:
        """The rows of each optimizer step of an epoch."""
        if self.config.num_mini_batches == 1:
            # the order changes nothing: keep responses of like length together
            return [torch.arange(count)]
        return torch.randperm(count).tensor_split(min(self.config.num_mini_batches, count))

    def optimizer_step(self, stats: dict[str, Tensor]) -> dict[str, float]:
        """Clip gradients of policy and critic separately; step if losses and gradients are finite; return metrics."""
        self.accelerator.unscale_gradients()
        if self.loss_scale != 1.0:
            for parameter in chain(*self.parameters.values()):
                parameter.grad /= self.loss_scale
        most = self.config.max_grad_norm
        norms = {
            x: full_tensor(torch.nn.utils.clip_grad_norm_(ps, most))
            for x, ps in self.parameters.items()
        }
        # The one place of an optimizer step where the CPU waits for the device, and processes for each other.
        row = sum_over_processes(stats, self.accelerator)
        row |= {f"{role}_grad_norm": float(norm) for role, norm in norms.items()}
        skip = not all(map(math.isfinite, row.values()))
        if self.updates_done < self.config.critic_warmup:  # the critic learns alone at first
            for parameter in self.parameters["policy"]:
                parameter.grad = None
        # the scaler of fp16 leaves such steps out by itself
        if not skip or self.accelerator.scaler is not None:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return row | {"skipped_steps": float(skip)}

    def _set_learning_rates(self) -> None:
        """Each role's schedule counts the updates in which it moves, however many optimizer steps each has.

        The critic counts all of them, so a critic that learns alone first has its full rate when the policy begins; the
        policy counts from the first update after `critic_warmup`, so its own warm-up is the same with and without it.
        """
        for group in self.optimizer.param_groups:
            waits = self.config.critic_warmup if group["name"] == "policy" else 0
            done = max(self.updates_done - waits, 0)  # while it waits it has no gradient
            share = learning_rate_share(self.config, done, self.total_updates - waits)
            group["lr"] = self.learning_rates[group["name"]] * share
