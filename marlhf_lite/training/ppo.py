"""PPO with a critic, over macro actions: MA-PPO (paper, Algorithm 1), to be read from top to bottom.

`PPOTrainer.update` is one update in five numbered steps; the methods of each step follow in the order in which they
are called, and `Objective` holds the equations. With `FixedNGram(1)` every macro action is one token, and the same code
is token-level PPO. What keeps a run alive around its updates is in other files, which know nothing of the method:
`TrainingLoop`, `MemoryLimit`, `Safeguards` and `Checkpoints`; `wiring` makes them.

Shapes: B responses, T response tokens, S macro actions.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training import sampler_checks
from marlhf_lite.training.checkpoint import save_models
from marlhf_lite.training.critic_metrics import diagnose_critic
from marlhf_lite.training.distributed import (
    full_tensor,
    gathered_outside_layers,
    raise_on_all_ranks,
    sum_over_processes,
)
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.loop import Callback
from marlhf_lite.training.memory_limit import longest_rollout
from marlhf_lite.training.metrics import Clock, mean_over_steps, update_metrics
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.objectives import check_first_update, make_objective
from marlhf_lite.training.optimizer import set_learning_rates
from marlhf_lite.training.rewards import (
    EnvironmentReward,
    FunctionReward,
    score_responses,
    scores_for_training,
)
from marlhf_lite.training.rollout import (
    Rollout,
    Sampler,
    generate,
    generate_in_batches,
    is_remote,
    longest_response,
    sampling_of,
)
from marlhf_lite.training.safeguards import count_updates
from marlhf_lite.training.wiring import make_run_parts, prepare_models
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.less_memory import keep_freed_memory
from marlhf_lite.utils.user_code import named_errors

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

# What the optimizer steps of an update leave: old outputs with advantages [B, S], the metrics of each step, and those
# of the sampler.
Learned = tuple[Experience, list[dict[str, float]], dict[str, float]]


class PPOTrainer:
    """Trains the policy and the critic of `models` on `prompts`: `train()` makes all updates.

    Args:
        models: policy, reference, reward model and critic; see `build_models`.
        tokenizer: the tokenizer of the base model.
        prompts: texts; drawn without replacement, and shuffled again when all were used.
        reward: rollout -> [B] scores (`ModelReward`, `FunctionReward`, or your own function).
        termination: the termination rule ζ: a `macro.TerminationRule`, or a function `rule(mask, **context)`.
        config: all options; see `PPOTrainerConfig`.
        run: folder for records and checkpoints; None keeps records in memory and makes no checkpoints.
        gold: (prompts, responses) -> true scores, which are recorded and never trained on.
        held_out: models -> numbers by name, called every `config.eval_every` updates; printed, and in `history` as
            `test/NAME`.
        callbacks: each is told of every update: `callback.after_update(trainer, row, rollout)`; see `Callback`.
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
        callbacks: Sequence[Callback] = (),
        name: str = "ppo",
        accelerator: Accelerator | None = None,
        sampler: Sampler = generate,
        objective: type[Objective] | None = None,
    ):
        self.accelerator = accelerator or Accelerator()
        self.config = config
        self.seed = config.seed
        self.prompts = list(prompts)
        self.total_updates = count_updates(config, len(prompts), self.accelerator)
        self.callbacks = callbacks

        # The method: who answers, how answers are scored and cut, and the equations.
        self.models = models
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.sampling = sampling_of(config, config.max_response_length)
        self.reward = reward
        self.gold = gold
        self.termination = macro.as_rule(termination)
        self.objective = objective(config) if objective else make_objective(config)
        # A custom objective may read all responses of an update.
        self.has_custom_objective = bool(objective or self.objective.user_name)
        self.logprob_temperature = config.temperature if config.logprobs_at_temperature else 1.0

        # Policy and critic, as accelerate has prepared them, with their optimizer.
        trained = prepare_models(models, config, self.accelerator)
        self.actor_critic = trained.actor_critic
        self.optimizer = trained.optimizer
        self.parameters = trained.parameters
        self.is_sharded = trained.is_sharded
        self.loss_scale = trained.loss_scale

        # The run around the method.
        parts = make_run_parts(
            config=config,
            models=models,
            trained=trained,
            prompts=self.prompts,
            total_updates=self.total_updates,
            accelerator=self.accelerator,
            run=run,
            held_out=held_out,
            name=name,
        )
        self.state = parts.state
        self.logger = parts.logger
        self.checkpoints = parts.checkpoints
        self.best = parts.best
        self.safeguards = parts.safeguards
        self.memory = parts.memory
        self.loop = parts.loop
        self.update_of_weights = 0  # the update after which the models have their present weights

    @property
    def history(self) -> list[dict]:
        """The metrics of each update so far, with the held-out numbers of updates that were tested."""
        return self.logger.history

    def train(
        self,
        resume: bool = False,
        asked_to_stop: Callable[[], bool] = lambda: False,
        at: int | None = None,
    ) -> list[dict]:
        """Make all updates; return the metrics of each, which are also in the run's metrics.jsonl.

        With `resume` the run continues from its last checkpoint, bit by bit as if it had not been stopped; `at` takes
        the checkpoint of an earlier update and deletes the later ones.

        The run ends early if the KL passes `config.kl_ceiling`, or if `config.patience` tests in a row have found
        nothing better. It stops, with a checkpoint, after the update in which `asked_to_stop()` becomes true. With
        `config.keep_best`, the models of a run that has ended have the weights of the best update.
        """
        keep_freed_memory()
        # Each process draws other random numbers. The large step between processes keeps their seeds apart from the
        # seeds of other runs.
        torch.manual_seed(self.seed + 100_003 * self.accelerator.process_index)
        if resume:
            self.resume(at)
        # Two options leave it to dry runs to find what fits into memory: `--micro_batch_size 0` and
        # `--gradient_checkpointing auto`. A resumed run has what they found from its checkpoint.
        is_micro_batch_unknown = self.state.micro_batch.now == 0
        if is_micro_batch_unknown or self.state.gradient_checkpointing == "auto":
            self.fit_micro_batch_size()
        has_ended = self.loop.run(self.update, asked_to_stop)
        self.update_of_weights = self.state.updates_done
        if has_ended:
            self.take_best_weights()
        return self.history

    def update(self, prompts: list[str]) -> dict[str, float]:
        """Make one update of Algorithm 1 on these prompts; return its metrics."""
        is_first_update = self.state.updates_done == 0
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
            if is_first_update:
                # The rule may find that it does not work on these responses, such as a parser without trees.
                self.termination.check()

        # 4. and 5. Old outputs, advantages, and optimisation.
        with clock.phase("training"):
            row = self.learn(rollout, macro_actions)

        row |= self.termination.metrics()
        if hasattr(self.reward, "metrics"):
            row |= self.reward.metrics()
        row = self.loop.record(row, clock, rollout, macro_actions)

        # The policy samples with its adapter merged, and trains with it beside the weights. Now that the adapter has
        # moved, both must still be the same policy.
        if is_first_update or self.loop.is_due(self.config.checkpoint_every):
            self._check_merged_policy_agrees_with_trained(rollout)
        for callback in self.callbacks:
            callback.after_update(self, row, rollout)
        return row

    # -- 1. rollout -------------------------------------------------------------------------------

    def generate_rollout(self, prompts: list[str]) -> Rollout:
        """Responses of the current policy, sorted by length, so that micro-batches need little padding."""
        policy = self.models.policy.eval()
        # A sampler may take these names as seeds: no two responses of the run have the same one.
        prefix = f"{self.seed}/{self.state.updates_done}/{self.accelerator.process_index}"
        seed_names = tuple(f"{prefix}/{row}" for row in range(len(prompts)))
        sampling = replace(self.sampling, seed_names=seed_names)

        # `generate` needs all weights outside layers, which FSDP2 may have sharded. A server has its own copy of them.
        gathered: AbstractContextManager = nullcontext()
        if not is_remote(self.sampler):
            gathered = gathered_outside_layers(policy, root=self.actor_critic)
        with gathered:
            rollout, size_that_fitted = raise_on_all_ranks(
                lambda: generate_in_batches(
                    self.sampler,
                    self.state.generation_batch.now,
                    policy.model,
                    self.tokenizer,
                    prompts,
                    sampling,
                )
            )
        # It is smaller than before if memory has ended: the next updates begin with the size that fitted.
        self.state.generation_batch.now = size_that_fitted
        self.models.policy.train()
        return rollout.sort_by_length()

    # -- 2. scoring -------------------------------------------------------------------------------

    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with log π_ref of its tokens [B, T], and scores and gold scores of its responses [B]."""
        return self.memory.run(
            lambda: self._score_in_micro_batches(rollout),
            no_process_waits=not self.is_sharded,
        )

    @torch.no_grad()
    def _score_in_micro_batches(self, rollout: Rollout) -> Rollout:
        parts = []
        with self.accelerator.autocast():  # the precision that training has
            for rows in self._micro_batches(rollout):
                part = rollout.select(rows).trim()
                logprobs, _ = self.models.reference(*self._inputs_of_models(part))
                parts.append(rollout.widen(logprobs))
            scores = score_responses(self.reward, rollout)

        gold_scores = None
        if self.gold:
            gold_scores = score_responses(FunctionReward(self.gold, "gold"), rollout).cpu()
        # If another reward scores the dialogues, PPO must not train on the rewards that the environment gave each turn.
        turn_rewards = None
        if isinstance(self.reward, EnvironmentReward):
            turn_rewards = rollout.turn_rewards
        return replace(
            rollout,
            ref_logprobs=torch.cat(parts).masked_fill(~rollout.mask, 0.0),
            scores=scores,
            turn_rewards=turn_rewards,
            gold=gold_scores,
        )

    def _micro_batches(self, batch: Rollout | Batch) -> Sequence[slice]:
        """The rows of each pass through the models."""
        size = self.state.micro_batch.now
        return [slice(start, start + size) for start in range(0, len(batch), size)]

    def _inputs_of_models(self, part: Rollout) -> tuple[Tensor, Tensor, int, float]:
        """The arguments of policy, reference, and policy with critic: tokens, attention mask, T, temperature."""
        response_width = part.mask.shape[1]
        return part.tokens, part.attention_mask, response_width, self.logprob_temperature

    # -- 3. segmentation --------------------------------------------------------------------------

    def segment(
        self,
        rollout: Rollout,
        rule: macro.TerminationRule | None = None,
        config: PPOTrainerConfig | None = None,
    ) -> macro.MacroActions:
        """Macro actions of every response, by the trainer's own rule and options unless others are given.

        Raises `InputError` if what the rule returns is not a segmentation of the responses.
        """
        rule = rule or self.termination
        config = config or self.config
        copy = rollout.copy()  # a rule may be a user's, and change what it gets
        context = {
            "token_ids": copy.response_ids,
            "ref_logprobs": copy.ref_logprobs,
            "tokenizer": self.tokenizer,
            "step": self.state.updates_done,
            "process": self.accelerator.process_index,
        }
        if rule.needs_outputs:  # log-probabilities, entropies and values: one more forward pass
            context |= vars(self.all_outputs(rollout))
        macro_actions = macro.check_segmentation(rule(copy.mask, **context), rollout.mask)
        if config.last_token_alone:
            return macro_actions.split_last_token()
        return macro_actions

    # -- 4. old outputs and advantages, and 5. optimisation ---------------------------------------

    def learn(self, rollout: Rollout, macro_actions: macro.MacroActions) -> dict[str, float]:
        """Steps 4 and 5 of an update: train on a scored and segmented rollout; return the metrics.

        Most metrics describe policy and critic before the update; those of losses and gradients are means over its
        optimizer steps. Gradients and metrics are those of all processes together.

        Raises:
            InputError: too many updates in a row were not finite, or the first one shows that something is wrong.
        """
        config = self.config
        segmentation = macro.check_segmentation(macro_actions, rollout.mask)
        batch = self.objective.batch(rollout, segmentation)
        weights_before = self.safeguards.weights_before_update()
        set_learning_rates(
            self.optimizer, config, self.state.updates_done, total_updates=self.total_updates
        )
        epochs = config.critic_epochs if self._only_critic_learns() else config.num_ppo_epochs

        # Several minibatches, whitening and objectives that read other responses need all advantages before the first
        # optimizer step. Otherwise one pass can do both: give the advantages, and the gradients of that step.
        needs_all_first = config.num_mini_batches > 1 or config.whiten or self.has_custom_objective
        if needs_all_first:
            old, steps, sampler_row = self.learn_in_epochs(batch, epochs)
        else:
            old, steps, sampler_row = self.learn_from_first_pass(batch, epochs)

        row = update_metrics(batch, old, config, self.accelerator)
        scores = scores_for_training(rollout, config)
        row |= diagnose_critic(old.values, scores, rollout.mask, self.accelerator)
        row |= mean_over_steps(steps)
        row |= sampler_row
        self.safeguards.check_update(row, weights_before)
        self.state.updates_done += 1
        return row

    def learn_in_epochs(self, batch: Batch, epochs: int) -> Learned:
        """Steps 4 and 5 as Algorithm 1 has them: the advantages of all responses, then epochs of minibatches."""
        # 4. Old outputs and advantages, by the policy that sampled (section 3.2.2, Appendices D.1 and E).
        outputs = self.memory.run(lambda: self.all_outputs(batch.rollout))
        old = self.objective.advantages(batch, outputs)
        sampler_row = self._compare_with_sampler(batch.rollout, old)
        if self.config.whiten:
            whitened = macro.whiten(old.advantages, batch.steps.mask, self.accelerator.reduce)
            old = replace(old, advantages=whitened)

        # 5. Optimisation: clipped losses of policy and critic (section 3.2.2, Appendix E).
        steps: list[dict[str, float]] = []
        for _ in range(epochs):
            for rows in self._minibatches(len(batch)):
                losses = self._add_gradients(batch.select(rows), old.select(rows))
                is_first_step_of_run = self.state.updates_done == 0 and not steps
                if is_first_step_of_run and self.has_custom_objective:
                    check_first_update(self.objective, batch, old, losses)
                steps.append(self.optimizer_step(losses))
        return old, steps, sampler_row

    def learn_from_first_pass(self, batch: Batch, epochs: int) -> Learned:
        """Steps 4 and 5 with one pass less than `learn_in_epochs`.

        With one minibatch, the first optimizer step begins with the policy that sampled. So its forward pass also gives
        the old outputs.
        """
        normalizers = self.loss_normalizers(batch)
        old, losses = self.memory.run(lambda: self.forward_backward(batch, normalizers))
        sampler_row = self._compare_with_sampler(batch.rollout, old)
        steps = [self.optimizer_step(losses)]
        for _ in range(epochs - 1):
            losses = self._add_gradients(batch, old)
            steps.append(self.optimizer_step(losses))
        return old, steps, sampler_row

    def _only_critic_learns(self) -> bool:
        """Whether the policy still waits for its critic (`--critic_warmup`)."""
        return self.state.updates_done < self.config.critic_warmup

    def _minibatches(self, count: int) -> Sequence[Tensor]:
        """The rows of each optimizer step of an epoch."""
        if self.config.num_mini_batches == 1:
            # All responses are in one step, so their order changes nothing. Those of like length stay together.
            return [torch.arange(count)]
        return torch.randperm(count).tensor_split(min(self.config.num_mini_batches, count))

    def _compare_with_sampler(self, rollout: Rollout, old: Experience) -> dict[str, float]:
        """Metrics of how far the sampler is from the policy. Raises `ServerError` if another policy has sampled."""
        is_first_update = self.state.updates_done == 0
        if is_first_update and sampler_checks.is_unknown_policy(self.sampler, rollout):
            self.logger.write_line(f"note: {sampler_checks.UNKNOWN_POLICY}")
        with named_errors("sampler", getattr(self.sampler, "name", "")):
            return sampler_checks.check_sampled(
                rollout, self.models.policy, old.logprobs, self.accelerator
            )

    def _check_merged_policy_agrees_with_trained(self, rollout: Rollout) -> None:
        """Raise `InputError` if the policy with its adapter merged, which samples here, is not the one that trains."""
        if is_remote(self.sampler):  # servers merge nothing here
            return

        def check() -> None:
            one_micro_batch = rollout.select(slice(self.state.micro_batch.now))
            sampler_checks.check_merged_policy_agrees_with_trained(
                self.models.policy, one_micro_batch, self.logprob_temperature, self.accelerator
            )

        # Models with adapters are whole in each process, so nobody waits before the sums at the end.
        self.memory.run(check, no_process_waits=True)

    # -- passes through policy and critic ---------------------------------------------------------

    def _add_gradients(self, batch: Batch, old: Experience) -> dict[str, Tensor]:
        """Add up the gradients of an optimizer step on these responses; returns the stats of its losses."""
        normalizers = self.loss_normalizers(batch)
        _, losses = self.memory.run(lambda: self.forward_backward(batch, normalizers, old))
        return losses

    def forward_backward(
        self, batch: Batch, normalizers: Tensor, old: Experience | None = None
    ) -> tuple[Experience, dict[str, Tensor]]:
        """Add up gradients of the losses, in micro-batches; return old outputs, and the stats of the losses.

        If `old` is None, the policy is still the one that sampled: then its outputs become the old ones, and advantages
        follow from them.
        """
        # DDP divides gradients by the number of processes. But the losses are divided by normalizers, which count the
        # terms of all processes already. So the first factor takes DDP's division back.
        scale = self.accelerator.num_processes * self.loss_scale
        old_parts = []
        stats: dict[str, Tensor] = {}
        micro_batches = self._micro_batches(batch)
        for rows in micro_batches:
            part = batch.select(rows)
            is_last = rows == micro_batches[-1]
            # Processes exchange their gradients once, with the last micro-batch (under FSDP2 with each).
            sync = nullcontext() if is_last else self._without_gradient_sync()
            with sync:
                outputs = self.compute_outputs(part.rollout)
                if old is None:
                    old_part = self.objective.advantages(part, outputs)
                else:
                    old_part = old.select(rows)
                loss, part_stats = self.objective.losses(part, outputs, old_part, normalizers)
                self.accelerator.backward(loss * scale)
            old_parts.append(old_part)
            for name, value in part_stats.items():
                stats[name] = stats.get(name, 0.0) + value
        return Experience.concatenate(old_parts), stats

    def _without_gradient_sync(self) -> AbstractContextManager:
        """A block in which each process keeps its gradients to itself.

        Under FSDP2 it does nothing: a process would keep all gradients whole until the end of the block.
        """
        if self.is_sharded:
            return nullcontext()
        return self.accelerator.no_sync(self.actor_critic)

    @torch.no_grad()
    def all_outputs(self, rollout: Rollout) -> ModelOutputs:
        """Outputs of the policy that sampled and of the critic, in micro-batches; no gradient."""
        micro_batches = self._micro_batches(rollout)
        parts = [self.compute_outputs(rollout.select(rows)) for rows in micro_batches]
        return ModelOutputs.concatenate(parts)

    def compute_outputs(self, rollout: Rollout) -> ModelOutputs:
        """One forward pass of policy and critic, with gradients if they are on."""
        part = rollout.trim()
        outputs = self.actor_critic(*self._inputs_of_models(part))
        logprobs, entropy, values = (
            rollout.widen(output.masked_fill(~part.mask, 0.0)) for output in outputs
        )
        return ModelOutputs(logprobs, entropy, values)

    def loss_normalizers(self, batch: Batch) -> Tensor:
        """[3] counts of the whole optimizer step over all processes; see `Objective.counts`.

        So gradients do not depend on how the step is split into micro-batches, or over processes.
        """
        return self.accelerator.reduce(self.objective.counts(batch), reduction="sum")

    # -- optimizer steps --------------------------------------------------------------------------

    def optimizer_step(self, losses: dict[str, Tensor]) -> dict[str, float]:
        """Clip gradients of policy and critic separately; step if losses and gradients are finite; return metrics."""
        # Gradients in their true size: accelerate's scaler (mixed precision fp16) and this trainer (float16 weights)
        # may have scaled the loss up.
        self.accelerator.unscale_gradients()
        if self.loss_scale != 1.0:
            for parameter in chain(*self.parameters.values()):
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
        norms = {}
        for role, parameters in self.parameters.items():
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
            norms[f"{role}_grad_norm"] = full_tensor(norm)

        # The one place of an optimizer step where the CPU waits for the device, and processes for each other.
        row = sum_over_processes(losses, self.accelerator)
        row |= {name: float(norm) for name, norm in norms.items()}
        is_finite = all(map(math.isfinite, row.values()))

        if self._only_critic_learns():
            for parameter in self.parameters["policy"]:
                parameter.grad = None  # the optimizer does not touch a parameter without a gradient
        # A scaler (mixed precision fp16) gets every step: it leaves out those that are not finite by itself.
        if is_finite or self.accelerator.scaler is not None:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        row["skipped_steps"] = float(not is_finite)
        return row

    # -- the run: what fits into its memory, its checkpoints and models ----------------------------

    def fit_micro_batch_size(self) -> int:
        """Set the micro-batch to the largest that fits, found by dry runs; returns it."""
        return self.memory.fit_micro_batch(self._dry_run)

    def _dry_run(self) -> None:
        """Try two micro-batches of the longest responses, the second on top of the first's gradients.

        Raises the error of the device if memory ends.
        """
        # In training Adam's two moments of each weight are in memory beside the passes, so the trial needs them, too.
        moments = []
        for weight in chain(*self.parameters.values()):
            moments += [torch.empty_like(weight), torch.empty_like(weight)]
        rollout = longest_rollout(
            rows=min(2 * self.state.micro_batch.now, self.memory.rows_per_step),
            prompt_tokens=max(map(len, encode_prompts(self.tokenizer, self.prompts))),
            response_tokens=longest_response(
                self.sampler, self.tokenizer, self.sampling.max_new_tokens
            ),
            token=self.tokenizer.eos_token_id,
            device=self.accelerator.device,
        )
        single_tokens = macro.FixedNGram(1)(rollout.mask)  # the most that segmentation can need
        batch = self.objective.batch(rollout, single_tokens)
        with self._without_gradient_sync():  # processes may differ in how often they try
            self.forward_backward(batch, self.objective.counts(batch))
        del moments
        self.optimizer.zero_grad(set_to_none=True)

    def resume(self, at: int | None = None) -> None:
        """Continue from the last checkpoint, or from that of update `at`, which deletes the later ones.

        Raises `InputError` if there is none, if it does not fit, or if it is of a later update than the run is to make.
        """
        if self.checkpoints is None:
            raise InputError(
                "resume: a trainer without a run folder has no checkpoints: give it one"
            )
        update = self.checkpoints.update_to_resume(at, total_updates=self.total_updates)
        counters = self.checkpoints.load(self.actor_critic, self.optimizer, update)
        self.state.restore(counters)
        if self.state.best_update not in self.checkpoints.updates():
            # After the checkpoint that is loaded, a later update became the best, so the checkpoint of the one that was
            # best before was not kept.
            self.best.forget()
        if self.state.gradient_checkpointing is True:
            self.memory.recompute_activations()
        self.logger.reload(self.state.updates_done)

    def take_best_weights(self) -> None:
        """Take back the weights of the best update, if one is kept (`--keep_best`) and was found."""
        best = self.state.best_update
        # 0: no update was found to be the best. `updates_done`: the models have its weights already.
        if self.checkpoints is None or best in (0, self.state.updates_done):
            return
        self.checkpoints.load_weights(self.actor_critic, self.optimizer, best)
        self.update_of_weights = best
        found = f"{self.config.keep_best} {self.state.best_number:.4g}"
        self.logger.write_line(
            f"{self.logger.name}: takes the policy of update {best}, the best: {found}"
        )

    def save(self, folder: Path) -> None:
        """Save policy and critic as adapter folders (or full models), with the tokenizer."""
        save_models(
            Path(folder),
            self.models,
            self.actor_critic,
            self.tokenizer,
            self.accelerator,
            update=self.update_of_weights,
        )
