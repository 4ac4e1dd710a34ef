"""PPO with a critic, over macro actions: MA-PPO (paper, Algorithm 1), to be read from top to bottom.

`PPOTrainer.update` and `PPOTrainer.learn` are one update in five numbered steps; the methods of each step follow in the
order in which they are called, and `Objective` holds the equations. With `FixedNGram(1)` every macro action is one
token, and the same code is token-level PPO. Shapes: B responses, T response tokens, S macro actions.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.models.actor_critic import ActorCritic, PPOModels, trainable
from marlhf_lite.training import safeguards
from marlhf_lite.training.distributed import (
    full_tensor,
    gathered_outside_layers,
    is_sharded,
    spread,
    sum_over_processes,
    together,
)
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.logging import SAMPLES, RunLogger
from marlhf_lite.training.metrics import Clock, update_metrics
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.optimizer import learning_rate_share, loss_scale, make_optimizer
from marlhf_lite.training.rewards import EnvironmentReward, FunctionReward, score_responses, shape_scores
from marlhf_lite.training.rollout import (
    Rollout,
    Sampler,
    generate,
    generate_in_batches,
    is_remote,
    prompt_batches,
    sampling_of,
)
from marlhf_lite.utils.errors import InputError, ServerError
from marlhf_lite.utils.less_memory import with_less_memory
from marlhf_lite.utils.random_states import random_states, set_random_states
from marlhf_lite.utils.threads import FreeCores

if TYPE_CHECKING:
    from marlhf_lite.training.checkpoint import Checkpoints
    from marlhf_lite.utils.run_folder import RunFolder

BATCH_SIZES = ("micro_batch_size", "generation_batch_size")  # that become smaller where memory ends


class PPOTrainer:
    """Trains the policy and the critic of `models` on `prompts`.

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
        accelerator: where the models run; made with `log_with` if there are trackers.
        sampler: what answers the prompts; see `rollout.Sampler`.
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
        self.accelerator = accelerator or Accelerator()
        self.total_updates = safeguards.count_updates(config, len(prompts), self.accelerator)
        self.models, self.tokenizer, self.prompts = models, tokenizer, list(prompts)
        self.reward, self.termination, self.gold, self.held_out = reward, macro.as_rule(termination), gold, held_out
        self.config, self.seed, self.name = config, config.seed, name
        self.objective = objective(config) if objective else _named_objective(config)
        self.own_equations = bool(objective or self.objective.user_name)  # they may read all responses of an update
        self.sampling = sampling_of(config, config.max_response_length)
        self.sampler = sampler
        self.logprob_temperature = config.temperature if config.logprobs_at_temperature else 1.0

        # One optimizer from explicit lists of parameters, and one module for both models, so that data-parallel
        # wrappers see one forward and one backward pass.
        self.learning_rates = {"policy": config.policy_learning_rate, "critic": config.critic_learning_rate}
        parameters = {role: trainable(getattr(models, role)) for role in self.learning_rates}
        optimizer = make_optimizer(parameters, self.learning_rates, config)
        actor_critic = ActorCritic(models.policy, models.critic)
        self.actor_critic, self.optimizer = self.accelerator.prepare(actor_critic, optimizer)
        if isinstance(self.actor_critic, DistributedDataParallel):
            # All processes have the same buffers, and may differ in how many passes they make (`dry_run`).
            self.actor_critic.broadcast_buffers = False
        spread(models.reference, models.reward, beside=self.actor_critic, accelerator=self.accelerator)
        groups = self.optimizer.param_groups
        self.parameters = {x: [p for g in groups if g["name"] == x for p in g["params"]] for x in self.learning_rates}
        self.loss_scale = loss_scale(models.policy)

        # What changes while training besides weights and optimizer; a checkpoint holds it.
        self.updates_done = 0
        self.generated_tokens = 0
        self.nonfinite_in_row = 0  # updates without a step, one after the other
        self.micro_batch_size = self.asked_micro_batch_size = config.micro_batch_size  # the first may become smaller
        self.generation_batch_size = self.asked_generation_batch_size = config.generation_batch_size  # so may this

        self.free_cores = FreeCores()
        self.logger = RunLogger(run, name, self.accelerator)
        self.checkpoints = self._checkpoints_of(run) if run else None

    @property
    def history(self) -> list[dict]:
        """The metrics of each update so far."""
        return self.logger.history

    # -- the training loop --------------------------------------------------------------------------------------------

    def train(self, resume: bool = False, asked_to_stop: Callable[[], bool] = lambda: False) -> list[dict]:
        """Make all updates; returns the metrics of each, which are in the run's metrics.jsonl too.

        With `resume` the run goes on from its last checkpoint (or from `config.from_checkpoint`), bit by bit as if it
        had not been stopped. It stops early where the KL goes beyond `config.kl_ceiling`, and with a checkpoint behind
        the update in which `asked_to_stop()` becomes true.
        """
        torch.manual_seed(self.seed + 100_003 * self.accelerator.process_index)  # no process of another seed
        if resume:
            self._resume()
        if not self.micro_batch_size:
            from marlhf_lite.training.dry_run import fit_micro_batch_size

            fit_micro_batch_size(self)
        # Batches follow from the seed, so the number of updates is the position in the data.
        stream = prompt_batches(self.prompts, self.config, self.accelerator, self.seed)
        batches = islice(stream, self.updates_done, None)
        stop = bool(self.history) and self._is_beyond_kl_ceiling(self.history[-1])
        hidden = not self.accelerator.is_local_main_process
        with tqdm(total=self.total_updates, initial=self.updates_done, desc=self.name, disable=hidden) as bar:
            while not stop and self.updates_done < self.total_updates:
                row = self._update_or_save(next(batches))
                bar.set_postfix({k: f"{row[k]:z.2f}" for k in ("score_mean", "gold_mean", "kl_k3") if k in row})
                bar.update()
                stop = self._is_beyond_kl_ceiling(row)
                self._evaluate(last=stop or self.updates_done == self.total_updates)
                stop = asked_to_stop() or stop
                self._save_checkpoint(last=stop or self.updates_done == self.total_updates)
        return self.history

    def _update_or_save(self, prompts: list[str]) -> dict[str, float]:
        """An update; where a server or environment fails, a checkpoint is written from which the run goes on."""
        states = random_states()
        try:
            return self.update(prompts)
        except ServerError as error:
            saved = ""
            if self.checkpoints:
                set_random_states(states)
                self.checkpoints.save(self.actor_critic, self.optimizer, self.counters)
                saved = "; --resume goes on from here"
            raise InputError(f"update {self.updates_done + 1}: {error}{saved}") from error

    def update(self, prompts: list[str]) -> dict[str, float]:
        """One update of Algorithm 1 on these prompts; returns its metrics."""
        self.free_cores.use()
        clock, start = Clock(), time.perf_counter()

        # 1. Rollout: the current policy answers each prompt (section 2.2).
        with clock.phase("generation"):
            rollout = self.generate_rollout(prompts)

        # 2. Scoring: log-probabilities of the reference model, and a reward for each response (section 2.2).
        with clock.phase("scoring"):
            copy = rollout.copy()
            turns, context = macro.turns.turns_as_rows(copy.mask, self._context(copy))
            self.termination.prepare(turns, **context)  # a parser works while the models score
            rollout = self.score(rollout)

        # 3. Segmentation: the termination rule cuts each response into macro actions (section 3.2.1).
        with clock.phase("macro"):
            macro_actions = self.segment(rollout)
            if self.updates_done == 0:
                self.termination.check()

        # 4. and 5. Old outputs, advantages, and optimisation.
        with clock.phase("training"):
            row = self.learn(rollout, macro_actions)

        self.generated_tokens += row["tokens"]
        row = {"update": self.updates_done} | row | {"generated_tokens": self.generated_tokens}
        row |= self.termination.metrics() | getattr(self.reward, "metrics", dict)()
        seconds = time.perf_counter() - start
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        row |= {f"seconds_{phase}": spent for phase, spent in clock.seconds.items()}
        self.logger.log_update(row)
        shown = slice(None, None, max(len(rollout) // SAMPLES, 1))  # sorted by length: short and long ones
        self.logger.log_samples(self.updates_done, rollout.select(shown), macro_actions.select(shown))
        return row

    def learn(self, rollout: Rollout, macro_actions: macro.MacroActions) -> dict[str, float]:
        """Steps 4 and 5 of an update: train on a scored and segmented rollout; returns the metrics.

        They describe policy and critic before the update, and are means over its optimizer steps. Where each process
        has different responses, gradients and metrics are those of all of them together.

        Raises:
            InputError: too many updates in a row were not finite, or the first one shows that something is wrong.
        """
        config, critic_alone = self.config, self.updates_done < self.config.critic_warmup
        batch = self.objective.batch(rollout, macro.check_segmentation(macro_actions, rollout.mask))
        is_first = self.updates_done in (0, config.critic_warmup)  # of the critic, of the policy
        at_start = safeguards.some_weights(self.parameters) if is_first else None
        self._set_learning_rates()

        # 4. Old outputs and advantages, from a first pass with the policy that sampled (section 3.2.2, Appendices D.1
        #    and E). With one minibatch it is the pass of the first optimizer step, too, so its gradients are kept.
        #    Several minibatches, whitening and objectives that read other responses need all advantages before that.
        keeps = config.num_mini_batches == 1 and not config.whiten and not self.own_equations
        if keeps:
            old, stats = self._with_less_memory(self.forward_backward, batch, self.loss_normalizers(batch))
        else:
            old = self.objective.advantages(batch, self._with_less_memory(self.all_outputs, rollout))
        checked = self._check_sampled(rollout, old.logprobs)
        if config.whiten:
            old = replace(old, advantages=macro.whiten(old.advantages, batch.steps.mask, self.accelerator.reduce))

        # 5. Optimisation: clipped losses of policy and critic (section 3.2.2, Appendix E), in epochs and minibatches.
        epochs, steps = config.critic_epochs if critic_alone else config.num_ppo_epochs, []
        for i, rows in enumerate(rows for _ in range(epochs) for rows in self._minibatches(len(batch))):
            if i > 0 or not keeps:
                part = batch.select(rows)
                passed = (part, self.loss_normalizers(part), old.select(rows))
                _, stats = self._with_less_memory(self.forward_backward, *passed)
            if i == self.updates_done == 0 and self.own_equations:
                from marlhf_lite.training.objectives import check_first_update

                check_first_update(self.objective, batch, old, stats)
            steps.append(self.optimizer_step(stats))

        row = update_metrics(batch, old, config, self.accelerator)
        if self._diagnoses_critic():
            from marlhf_lite.training.critic_metrics import diagnose_critic

            row |= diagnose_critic(old.values, shape_scores(rollout, config), rollout.mask, self.accelerator)
        row |= {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} | checked
        self._finish_update(row, at_start)
        return row

    # -- 1. rollout ---------------------------------------------------------------------------------------------------

    def generate_rollout(self, prompts: list[str]) -> Rollout:
        """Responses of the current policy, sorted by length, so that micro-batches need little padding."""
        self.models.policy.eval()
        model, remote = self.models.policy.model, is_remote(self.sampler)
        prefix = f"{self.seed}/{self.updates_done}/{self.accelerator.process_index}"
        sampling = replace(self.sampling, names=tuple(f"{prefix}/{row}" for row in range(len(prompts))))
        size = 0 if remote else self.generation_batch_size
        with nullcontext() if remote else gathered_outside_layers(self.models.policy, root=self.actor_critic):
            rollout, size = together(generate_in_batches, self.sampler, size, model, self.tokenizer, prompts, sampling)
        if not remote:
            self.generation_batch_size = size
        if self.updates_done == 0 and isinstance(model, PeftModel) and not remote:
            from marlhf_lite.training.sampler_checks import check_merged  # once a run, of adapters alone

            self._with_less_memory(check_merged, self, rollout, alone=True)
        self.models.policy.train()
        return rollout.sort_by_length()

    def _check_sampled(self, rollout: Rollout, logprobs: Tensor) -> dict[str, float]:
        """Metrics of how far servers that sampled are from the policy's `logprobs` [B, T]; none without servers."""
        if rollout.sampled_logprobs is None:
            return {}
        from marlhf_lite.training.sampler_checks import check_sampled

        bound = self.config.vllm_importance_sampling_clip_max
        return check_sampled(rollout, logprobs, self.models.policy, self.accelerator, bound=bound)

    # -- 2. scoring ---------------------------------------------------------------------------------------------------

    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with log π_ref of its tokens [B, T], and scores and gold scores of its responses [B]."""
        return self._with_less_memory(self._score, rollout, alone=not is_sharded(self.actor_critic))

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
            turn_rewards=rollout.turn_rewards if isinstance(self.reward, EnvironmentReward) else None,
            gold=score_responses(FunctionReward(self.gold, "gold"), rollout).cpu() if self.gold else None,
        )

    def _micro_batches(self, batch: Rollout | Batch) -> Sequence[Tensor]:
        """The rows that go through the models together."""
        return torch.arange(len(batch)).split(self.micro_batch_size)

    def _inputs(self, part: Rollout) -> tuple:
        """What policy, reference, and policy with critic are called with."""
        return part.tokens, part.attention_mask, part.mask.shape[1], self.logprob_temperature

    # -- 3. segmentation ----------------------------------------------------------------------------------------------

    def segment(
        self, rollout: Rollout, rule: macro.TerminationRule | None = None, config: PPOTrainerConfig | None = None
    ) -> macro.MacroActions:
        """Macro actions of every response, by the trainer's own rule and options unless others are given.

        Raises `InputError` where the rule gives no segmentation of them.
        """
        rule, config = rule or self.termination, config or self.config
        copy = rollout.copy()  # a rule may be a user's, and change what it gets
        context = self._context(copy)
        if rule.needs_outputs:  # one forward pass more
            context |= vars(self.all_outputs(rollout))
        macro_actions = macro.check_segmentation(rule(copy.mask, **context), rollout.mask)
        return macro_actions.split_last_token() if config.last_token_alone else macro_actions

    def _context(self, rollout: Rollout) -> dict:
        """What every termination rule is called with, besides the mask."""
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
            part, sums = batch.select(rows), is_sharded(self.actor_critic) or i == len(micro_batches) - 1
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
        parts = [self.compute_outputs(rollout.select(rows)) for rows in self._micro_batches(rollout)]
        return ModelOutputs(*(torch.cat(x) for x in zip(*(vars(part).values() for part in parts), strict=True)))

    def compute_outputs(self, rollout: Rollout) -> ModelOutputs:
        """One forward pass of policy and critic, with gradients where they are on."""
        part = rollout.trim()
        logprobs, entropy, scores = self.actor_critic(*self._inputs(part))
        # The critic's score at a token is the value of the state in which the next token is chosen.
        per_token = (logprobs, entropy, part.before_tokens(scores))
        return ModelOutputs(*(rollout.widen(x.masked_fill(~part.mask, 0.0)) for x in per_token))

    def loss_normalizers(self, batch: Batch) -> Tensor:
        """[3] counts of the whole optimizer step over all processes; see `Objective.counts`.

        So gradients do not depend on how the step is split into micro-batches, or over processes.
        """
        return self.accelerator.reduce(self.objective.counts(batch), reduction="sum")

    # -- 5. optimisation ----------------------------------------------------------------------------------------------

    def _minibatches(self, count: int) -> Sequence[Tensor]:
        """The rows of each optimizer step of an epoch."""
        if self.config.num_mini_batches == 1:
            return [torch.arange(count)]  # the order changes nothing: keep responses of like length together
        return torch.randperm(count).tensor_split(min(self.config.num_mini_batches, count))

    def optimizer_step(self, stats: dict[str, Tensor]) -> dict[str, float]:
        """Clip gradients, policy and critic apart, and step where losses and gradients are finite; returns metrics."""
        self.accelerator.unscale_gradients()
        if self.loss_scale != 1.0:
            for parameter in chain(*self.parameters.values()):
                parameter.grad /= self.loss_scale
        most = self.config.max_grad_norm
        norms = {x: full_tensor(torch.nn.utils.clip_grad_norm_(ps, most)) for x, ps in self.parameters.items()}
        # The one place of an optimizer step where the CPU waits for the device, and processes for each other.
        row = sum_over_processes(stats, self.accelerator)
        row |= {f"{role}_grad_norm": float(norm) for role, norm in norms.items()}
        skip = not all(map(math.isfinite, row.values()))
        if self.updates_done < self.config.critic_warmup:  # the critic learns alone at first
            for parameter in self.parameters["policy"]:
                parameter.grad = None
        if not skip or self.accelerator.scaler is not None:  # the scaler of fp16 leaves such steps out by itself
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
            done = max(self.updates_done - waits, 0)  # no matter while it waits: it has no gradient then
            share = learning_rate_share(self.config, done, self.total_updates - waits)
            group["lr"] = self.learning_rates[group["name"]] * share

    # -- after an update ----------------------------------------------------------------------------------------------

    def _finish_update(self, row: dict[str, float], at_start: dict | None) -> None:
        """Count the update, and refuse a run that does not work; `at_start` are the weights before a first update."""
        skipped = bool(row["skipped_steps"]) and self.accelerator.scaler is None
        if at_start and not row["skipped_steps"]:
            critic_alone = self.updates_done < self.config.critic_warmup
            # Where all scores are 0, a head of zero is right, and nothing is to be learned.
            moving = {"policy": row["advantage_rms"] and not critic_alone, "critic": row["value_loss"]}
            rates = {role: f"--{role}_learning_rate" for role, moves in moving.items() if moves}
            fix = "; with an --objective of your own, build its loss on `outputs` (`old` has no gradient)"
            safeguards.check_moved(at_start, self.parameters, rates, fix)
        if self.updates_done == 0 and not skipped:
            safeguards.check_start(row["kl_k3"], row["response_length"])
        self.updates_done += 1
        self.nonfinite_in_row = self.nonfinite_in_row + 1 if skipped else 0
        safeguards.check_nonfinite(self.nonfinite_in_row, row)

    def _diagnoses_critic(self) -> bool:
        every = self.config.diagnose_critic_every
        return bool(every) and (self.updates_done + 1) % every == 0

    def _is_beyond_kl_ceiling(self, row: dict[str, float]) -> bool:
        ceiling = self.config.kl_ceiling
        if not ceiling or row["skipped_steps"] or row["kl_k1"] <= ceiling:
            return False
        kl = f"KL {row['kl_k1']:.1f} is beyond --kl_ceiling {ceiling:g}"
        self.logger.write_line(f"{self.name}: stopped at update {row['update']}: {kl}")
        return True

    def _evaluate(self, last: bool) -> None:
        """A held-out test, where it is time."""
        every = self.config.eval_every
        if self.held_out and every and (self.updates_done % every == 0 or last):
            scores = self.held_out(self.models)
            self.logger.log_held_out(self.updates_done, scores)

    def _checkpoints_of(self, run: "RunFolder") -> "Checkpoints":
        """The run's checkpoints."""
        from marlhf_lite.training.checkpoint import Checkpoints  # a run in memory makes none

        return Checkpoints(run, self.config.save_total_limit, self.accelerator)

    def _save_checkpoint(self, last: bool) -> None:
        """A checkpoint, where it is time."""
        every = self.config.checkpoint_every
        if self.checkpoints and every and (self.updates_done % every == 0 or last):
            self.checkpoints.save(self.actor_critic, self.optimizer, self.counters)

    @property
    def counters(self) -> dict[str, float]:
        """What changes while training besides weights, optimizer and random generators."""
        sizes = [f"{asked}{name}" for asked in ("", "asked_") for name in BATCH_SIZES]
        return {name: getattr(self, name) for name in ("updates_done", "generated_tokens", "nonfinite_in_row", *sizes)}

    def _resume(self) -> None:
        if self.checkpoints is None:
            raise InputError("resume: a trainer without a run folder has no checkpoints: give it one")
        update = self.config.from_checkpoint
        for name, value in self.checkpoints.load(self.actor_critic, self.optimizer, update).items():
            setattr(self, name, value)
        for name in BATCH_SIZES:
            asked = getattr(self.config, name)
            if getattr(self, f"asked_{name}") != asked:  # else the size in force stays
                setattr(self, name, asked)
                setattr(self, f"asked_{name}", asked)
        self.logger.reload(self.updates_done)

    def save(self, folder: Path) -> None:
        """Save policy and critic as adapter folders (or full models), with the tokenizer."""
        from marlhf_lite.training.checkpoint import save_models

        save_models(Path(folder), self.models, self.actor_critic, self.tokenizer, self.accelerator)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _with_less_memory(self, run: Callable, *args, alone: bool = False):
        """`run(*args)`, again with half the micro-batch where memory ran out; gradients stay the same.

        `alone`: no other process waits for this one in the middle of it.
        """

        def attempt(size: int):
            self.micro_batch_size = size
            return run(*args)

        result, _ = with_less_memory(
            attempt,
            self.micro_batch_size,
            "--micro_batch_size {}",
            alone=alone or self.accelerator.num_processes == 1,
            start_over=self.optimizer.zero_grad,
        )
        return result


def _named_objective(config: PPOTrainerConfig) -> Objective:
    """The objective that `config.objective` names: MA-PPO's own where it is empty."""
    if not config.objective:
        return Objective(config)
    from marlhf_lite.training.objectives import make_objective  # the equations of other methods, and the user's own

    return make_objective(config)
