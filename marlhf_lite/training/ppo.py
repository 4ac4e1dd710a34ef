"""PPO with a critic, over macro actions: MA-PPO (paper, Algorithm 1), to be read from top to bottom.

`PPOTrainer.update` and `PPOTrainer.learn` are one update in five numbered steps; the methods of each step follow in the
order in which they are called. With `FixedNGram(1)` every macro action is one token, and the same code is token-level
PPO. Shapes: B responses, T response tokens, S macro actions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from marlhf_lite.config.options import CheckpointConfig, LoggingConfig, MacroConfig, PPOConfig
from marlhf_lite.macro import (
    MacroActions,
    TerminationRule,
    adaptive_lam,
    average,
    border_lam,
    check_segmentation,
    gae,
    kl_per_token,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
    whiten,
)
from marlhf_lite.models.actor_critic import ActorCritic, PPOModels, trainable
from marlhf_lite.training import safeguards
from marlhf_lite.training.checkpoint import Checkpoints, save_models
from marlhf_lite.training.distributed import full_tensor, sum_over_processes, summon_full_params
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.metrics import Clock, update_metrics
from marlhf_lite.training.optimizer import learning_rate_share, make_optimizer
from marlhf_lite.training.outputs import ModelOutputs, OldOutputs
from marlhf_lite.training.rewards import check_scores, shape_scores
from marlhf_lite.training.rollout import Rollout, Sampling, generate, generate_in_batches, prompt_batches
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder


class PPOTrainer:
    """Trains the policy and the critic of `models` on `prompts`.

    Args:
        models: policy, reference, reward model and critic; see `build_models`.
        tokenizer: the tokenizer of the base model.
        prompts: texts; drawn without replacement, and shuffled again when all were used.
        reward: rollout -> [B] scores (`ModelReward`, `FunctionReward`, or your own function).
        termination: the termination rule ζ, `rule(mask, **context) -> MacroActions`; see `macro.TerminationRule`.
        config, macro_config: options of the algorithm.
        max_response_length: where sampling stops, in tokens.
        checkpoint_config, logging_config: what the run leaves behind.
        run: folder for records and checkpoints; None keeps records in memory and makes no checkpoints.
        gold: (prompts, responses) -> true scores, which are recorded and never trained on.
        held_out: models -> scores on held-out prompts, called every `logging_config.eval_every` updates.
        accelerator: where the models run; made with `log_with` if there are trackers.
        generator: (model, tokenizer, prompts, sampling) -> Rollout; None is `rollout.generate`.
    """

    def __init__(
        self,
        models: PPOModels,
        tokenizer,
        prompts: Sequence[str],
        reward: Callable[[Rollout], Tensor],
        termination: TerminationRule,
        config: PPOConfig,
        macro_config: MacroConfig | None = None,
        *,
        max_response_length: int,
        checkpoint_config: CheckpointConfig | None = None,
        logging_config: LoggingConfig | None = None,
        seed: int = 0,
        run: RunFolder | None = None,
        gold: Callable[[list[str], list[str]], list[float]] | None = None,
        held_out: Callable[[PPOModels], dict[str, float]] | None = None,
        name: str = "ppo",
        accelerator: Accelerator | None = None,
        generator: Callable | None = None,
    ):
        self.accelerator = accelerator or Accelerator()
        self.total_updates = safeguards.count_updates(config, len(prompts), self.accelerator)
        self.models, self.tokenizer, self.prompts = models, tokenizer, list(prompts)
        self.reward, self.termination, self.gold, self.held_out = reward, termination, gold, held_out
        self.config, self.macro_config, self.seed, self.name = config, macro_config or MacroConfig(), seed, name
        self.sampling = Sampling(max_response_length, config.temperature, config.top_k, config.top_p)
        self.generator = generator or generate
        self.logprob_temperature = config.temperature if config.logprobs_at_temperature else 1.0

        # One optimizer from explicit lists of parameters, and one module for both models, so that data-parallel
        # wrappers see one forward and one backward pass.
        self.learning_rates = {"policy": config.policy_learning_rate, "critic": config.critic_learning_rate}
        parameters = {role: trainable(getattr(models, role)) for role in self.learning_rates}
        optimizer = make_optimizer(parameters, self.learning_rates, config)
        actor_critic = ActorCritic(models.policy, models.critic)
        self.actor_critic, self.optimizer = self.accelerator.prepare(actor_critic, optimizer)
        groups = self.optimizer.param_groups
        self.parameters = {x: [p for g in groups if g["name"] == x for p in g["params"]] for x in self.learning_rates}

        # What changes while training besides weights and optimizer. A checkpoint holds the first five.
        self.updates_done = 0
        self.generated_tokens = 0
        self.nonfinite_in_row = 0  # updates without a step, one after the other
        self.kl_coef = config.kl_coef  # β
        self.micro_batch_size = config.micro_batch_size
        self.nonfinite: dict[str, Tensor | float] = {}  # how many numbers of this update were NaN or infinite

        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        self.logging_config = logging_config or LoggingConfig()
        self.logger = RunLogger(run, self.accelerator, name)
        self.checkpoints = Checkpoints(run, self.checkpoint_config.save_total_limit, self.accelerator) if run else None

    @property
    def history(self) -> list[dict]:
        """The metrics of each update so far."""
        return self.logger.history

    # -- the training loop --------------------------------------------------------------------------------------------

    def train(self, resume: bool = False) -> list[dict]:
        """Make all updates; returns the metrics of each, which are in the run's metrics.jsonl too.

        With `resume` the run goes on from its last checkpoint (or from `checkpoint_config.from_checkpoint`), bit by
        bit as if it had not been stopped. It stops early where the KL goes beyond `config.kl_ceiling`.
        """
        torch.manual_seed(self.seed + self.accelerator.process_index)
        if resume:
            self._resume()
        elif not self.micro_batch_size:
            safeguards.fit_micro_batch_size(self)
        # Batches follow from the seed, so the number of updates is the position in the data.
        stream = prompt_batches(self.prompts, self.config, self.accelerator, self.seed)
        batches = islice(stream, self.updates_done, None)
        stop = bool(self.history) and self._is_beyond_kl_ceiling(self.history[-1])
        hidden = not self.accelerator.is_local_main_process
        with tqdm(total=self.total_updates, initial=self.updates_done, desc=self.name, disable=hidden) as bar:
            while not stop and self.updates_done < self.total_updates:
                row = self.update(next(batches))
                bar.set_postfix({k: f"{row[k]:.2f}" for k in ("rm_score_mean", "gold_mean", "kl_k1") if k in row})
                bar.update()
                stop = self._is_beyond_kl_ceiling(row)
                self._evaluate_and_save(last=stop or self.updates_done == self.total_updates)
        return self.history

    def update(self, prompts: list[str]) -> dict[str, float]:
        """One update of Algorithm 1 on these prompts; returns its metrics."""
        clock, start = Clock(), time.perf_counter()

        # 1. Rollout: the current policy answers each prompt (section 2.2).
        with clock.phase("generation"):
            rollout = self.generate_rollout(prompts)

        # 2. Scoring: log-probabilities of the reference model, and a reward for each response (section 2.2).
        with clock.phase("scoring"):
            if hasattr(self.termination, "prepare"):  # a parser works on the CPU while the models score
                self.termination.prepare(rollout.mask, **self._termination_context(rollout))
            rollout = self.score(rollout)

        # 3. Segmentation: the termination rule cuts each response into macro actions (section 3.2.1).
        with clock.phase("macro"):
            macro_actions = self.segment(rollout)

        # 4. and 5. Old outputs, advantages, and optimisation.
        with clock.phase("training"):
            row = self.learn(rollout, macro_actions)

        self.generated_tokens += row["tokens"]
        row = {"update": self.updates_done} | row | {"generated_tokens": self.generated_tokens}
        row |= {k: v for part in (self.termination, self.reward) for k, v in getattr(part, "metrics", dict)().items()}
        seconds = time.perf_counter() - start
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        row |= {f"seconds_{phase}": spent for phase, spent in clock.seconds.items()}
        self.logger.log_update(row, rollout, macro_actions)
        return row

    def learn(self, rollout: Rollout, macro_actions: MacroActions) -> dict[str, float]:
        """Steps 4 and 5 of an update: train on a scored and segmented rollout; returns the metrics.

        They describe policy and critic before the update, and are means over its optimizer steps. Where each process
        has different responses, gradients and metrics are those of all of them together.

        Raises:
            InputError: too many updates in a row were not finite, or the first one shows that something is wrong.
        """
        check_segmentation(macro_actions, rollout.mask)
        check_scores(rollout)
        self._set_learning_rates()

        # 4. Old outputs and advantages: log-probabilities and values under the policy that sampled, and from them the
        #    advantages (section 3.2.2, Appendices D.1 and E). With one minibatch the first pass of step 5 is made by
        #    that very policy: its own outputs, detached, are the old ones. Several minibatches, or whitening over the
        #    whole update, need them before the first optimizer step, which costs a forward pass more.
        old_outputs = None
        if self.config.num_mini_batches > 1 or self.config.whiten:
            old_outputs = self.compute_old_outputs(rollout, macro_actions)

        # 5. Optimisation: clipped losses of policy and critic (section 3.2.2, Appendix E), in epochs and minibatches.
        all_stats, critic_alone = [], self.updates_done < self.config.critic_warmup
        for _ in range(self.config.critic_epochs if critic_alone else self.config.num_ppo_epochs):
            for rows in self._minibatches(len(rollout)):
                old = None if old_outputs is None else old_outputs.select(rows)
                stats, used_outputs = self.optimizer_step(rollout.select(rows), macro_actions.select(rows), old)
                all_stats.append(stats)
            old_outputs = old_outputs or used_outputs

        steps = self.steps(macro_actions)
        row = update_metrics(rollout, steps, old_outputs, self.kl_coef, self.macro_config, self.accelerator)
        row |= {name: sum(stats[name] for stats in all_stats) / len(all_stats) for name in stats}
        self._finish_update(row)
        return row

    # -- 1. rollout ---------------------------------------------------------------------------------------------------

    def generate_rollout(self, prompts: list[str]) -> Rollout:
        """Responses of the current policy, sorted by length, so that micro-batches need little padding."""
        self.models.policy.eval()
        model, size = self.models.policy.model, self.config.generation_batch_size
        with summon_full_params(self.actor_critic):
            rollout = generate_in_batches(self.generator, size, model, self.tokenizer, prompts, self.sampling)
        self.models.policy.train()
        return rollout.sort_by_length()

    # -- 2. scoring ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with log π_ref of its tokens [B, T], and scores and gold scores of its responses [B]."""
        logprobs = []
        with self.accelerator.autocast():  # the precision that training has
            for rows in torch.arange(len(rollout)).split(self.micro_batch_size):
                part = rollout.select(rows).trim()
                inputs = (part.tokens, part.attention_mask, part.mask.shape[1], self.logprob_temperature)
                ref_logprobs, _ = self.models.reference(*inputs)
                logprobs.append(rollout.widen(ref_logprobs))
            scores = self.reward(rollout)
        logprobs = self._finite("reference log-probabilities", torch.cat(logprobs).masked_fill(~rollout.mask, 0.0))
        gold = torch.tensor(self.gold(rollout.prompts, rollout.responses)) if self.gold else None
        return replace(rollout, ref_logprobs=logprobs, scores=scores, gold=gold)

    # -- 3. segmentation ----------------------------------------------------------------------------------------------

    def segment(self, rollout: Rollout) -> MacroActions:
        """Macro actions of every response. Raises `InputError` where most sentences could not be parsed."""
        context = self._termination_context(rollout)
        if getattr(self.termination, "needs_outputs", False):  # one forward pass more
            context |= self._outputs_of(rollout)
        macro_actions = self.termination(rollout.mask, **context)
        if self.macro_config.last_token_alone:
            macro_actions = macro_actions.split_last_token()
        # Where most sentences have no tree, parsing is token-level PPO in disguise: stop at the first update.
        checked = self.updates_done == 0 and not self.macro_config.allow_fallback
        if checked and hasattr(self.termination, "check_fallbacks"):
            self.termination.check_fallbacks()
        return macro_actions

    def _termination_context(self, rollout: Rollout) -> dict:
        """What every termination rule is called with, besides the mask."""
        return {
            "token_ids": rollout.response_ids,
            "ref_logprobs": rollout.ref_logprobs,
            "tokenizer": self.tokenizer,
            "step": self.updates_done,
        }

    @torch.no_grad()
    def _outputs_of(self, rollout: Rollout) -> dict[str, Tensor]:
        """Log-probabilities and values [B, T] of the policy that sampled, for rules that read them."""
        parts = [
            self.compute_outputs(rollout.select(x)) for x in torch.arange(len(rollout)).split(self.micro_batch_size)
        ]
        return {name: torch.cat([getattr(part, name) for part in parts]) for name in ("logprobs", "values")}

    # -- 4. old outputs and advantages --------------------------------------------------------------------------------

    def steps(self, macro_actions: MacroActions) -> MacroActions:
        """What GAE and the losses count: the macro actions, or with `--gae_over tokens` (SAE) the single tokens."""
        return macro_actions.single_tokens if self.macro_config.gae_over == "tokens" else macro_actions

    @torch.no_grad()
    def compute_old_outputs(self, rollout: Rollout, macro_actions: MacroActions) -> OldOutputs:
        """Outputs and advantages of the whole rollout before the first optimizer step."""
        parts = []
        for rows in torch.arange(len(rollout)).split(self.micro_batch_size):
            part = rollout.select(rows)
            parts.append(self.compute_advantages(part, macro_actions.select(rows), self.compute_outputs(part)))
        old = OldOutputs.concatenate(parts)
        if self.config.whiten:
            mask = self.steps(macro_actions).mask
            old = replace(old, advantages=whiten(old.advantages, mask, self.accelerator.reduce))
        return old

    def compute_outputs(self, rollout: Rollout) -> ModelOutputs:
        """One forward pass of policy and critic, with gradients where they are on."""
        part = rollout.trim()
        inputs = (part.tokens, part.attention_mask, part.mask.shape[1], self.logprob_temperature)
        logprobs, entropy, scores = self.actor_critic(*inputs)
        # The critic's score at a token is the value of the state in which the next token is chosen.
        per_token = (logprobs, entropy, part.before_tokens(scores))
        logprobs, entropy, values = (rollout.widen(x.masked_fill(~part.mask, 0.0)) for x in per_token)
        return ModelOutputs(
            self._finite("policy log-probabilities", logprobs), entropy, self._finite("critic values", values)
        )

    @torch.no_grad()
    def compute_advantages(self, rollout: Rollout, macro_actions: MacroActions, outputs: ModelOutputs) -> OldOutputs:
        """These outputs as old ones, with advantages and returns by GAE over macro actions."""
        config, macro, steps = self.config, self.macro_config, self.steps(macro_actions)
        # r_t = −β (log π_old − log π_ref) of each token (section 2.2) ...
        beta = self.kl_coef if config.kl_in == "reward" else 0.0
        token_rewards = kl_rewards(outputs.logprobs, rollout.ref_logprobs, rollout.mask, beta, config.kl_estimator)
        # ... summed over each macro action, and the score of the response on the last one: R_τ (section 3.2.2).
        scores = shape_scores(rollout, config)
        rewards = macro_rewards(token_rewards, scores, steps, macro.reward_pooling, macro.rho, macro.sigma)
        # V(ω_τ) = Σ_i σ_i V(s_{t_τ+i}) (Appendix D.1).
        values = macro_values(outputs.values, steps, macro.sigma)
        # δ_τ = R_τ + γ V(ω_{τ+1}) − V(ω_τ),  Â_τ = Σ_k (γλ)^k δ_{τ+k},  Q̂_τ = Â_τ + V(ω_τ) (Appendix E).
        lam = adaptive_lam(steps.mask, config.lam_alpha) if config.lam_alpha else config.lam
        if macro.gae_over == "tokens":
            lam = border_lam(macro_actions, lam)
        advantages, returns = gae(rewards, values, steps.mask, config.gamma, lam)
        if config.critic_lam is not None:  # a λ of its own for what the critic regresses to (VC-PPO)
            _, returns = gae(rewards, values, steps.mask, config.gamma, config.critic_lam)
        return OldOutputs(*(x.detach() for x in vars(outputs).values()), advantages, returns)

    # -- 5. optimisation ----------------------------------------------------------------------------------------------

    def _minibatches(self, count: int) -> Sequence[Tensor]:
        """The rows of each optimizer step of an epoch."""
        if self.config.num_mini_batches == 1:
            return [torch.arange(count)]  # the order changes nothing: keep responses of like length together
        return torch.randperm(count).tensor_split(min(self.config.num_mini_batches, count))

    def optimizer_step(
        self, rollout: Rollout, macro_actions: MacroActions, old_outputs: OldOutputs | None
    ) -> tuple[dict[str, float], OldOutputs]:
        """One optimizer step; returns its stats and the old outputs it used, its own where none are given."""
        normalizers = self.loss_normalizers(self.steps(macro_actions))
        while True:
            try:
                sums, used_outputs = self.accumulate_gradients(rollout, macro_actions, old_outputs, normalizers)
                break
            except RuntimeError as error:  # out of memory: again, with half the micro-batch
                safeguards.reduce_micro_batch_size(self, error)
        return self._apply_gradients(sums), used_outputs

    def loss_normalizers(self, steps: MacroActions) -> Tensor:
        """[4] the terms of policy loss, value loss and a KL loss (tokens or macro actions), and the responses.

        These are counts of the whole optimizer step over all processes. So gradients do not depend on how it is split
        into micro-batches, or over processes.
        """
        tokens, actions = steps.token_mask.sum(), steps.mask.sum()
        by_token = (self.macro_config.ratio == "token", self.macro_config.value_target == "token", True)
        counts = [*(tokens if token else actions for token in by_token), steps.token_mask.any(1).sum()]
        return self.accelerator.reduce(torch.stack(counts).float(), reduction="sum")

    def accumulate_gradients(
        self, rollout: Rollout, macro_actions: MacroActions, old_outputs: OldOutputs | None, normalizers: Tensor
    ) -> tuple[dict[str, Tensor], OldOutputs]:
        """Forward and backward pass of every micro-batch, whose gradients add up to those of the optimizer step.

        Returns sums of the losses' stats, still on the device, and the old outputs that were used.
        """
        used_outputs, sums = [], {}
        micro_batches = torch.arange(len(rollout)).split(self.micro_batch_size)
        for i, rows in enumerate(micro_batches):
            part, segments = rollout.select(rows), macro_actions.select(rows)
            # Gradients are added up over processes with the last micro-batch.
            is_last = i == len(micro_batches) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.actor_critic):
                outputs = self.compute_outputs(part)
                old = old_outputs.select(rows) if old_outputs else self.compute_advantages(part, segments, outputs)
                loss, stats = self.compute_losses(outputs, old, part, self.steps(segments), normalizers)
                # DDP averages gradients over processes, while the normalizers are global: hence the factor.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            used_outputs.append(old)
            sums = {name: sums.get(name, 0.0) + value for name, value in stats.items()}
        return sums, OldOutputs.concatenate(used_outputs)

    def compute_losses(
        self, outputs: ModelOutputs, old: OldOutputs, rollout: Rollout, steps: MacroActions, normalizers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and stats whose sums over micro-batches are means of the optimizer step."""
        config, macro, mean = self.config, self.macro_config, self.config.loss_mean
        # Each mean is over all tokens (macro actions) of the step, or over its responses.
        over = normalizers[:3] if mean == "token" else normalizers[3].expand(3)
        # −min(ρ Â, clip(ρ, 1−ε, 1+ε) Â), with ρ = π / π_old of a token or of a macro action (Appendix E, section 3.2.2)
        ratios = (outputs.logprobs, old.logprobs, old.advantages, steps, config.cliprange, macro.ratio)
        policy, policy_stats = policy_loss(*ratios, normalizer=over[0], mean=mean)
        # ½ max((V − Q̂)², (V_clipped − Q̂)²), of a token or of a macro action (Appendix E, Algorithm 1)
        clip, target = config.cliprange_value or None, macro.value_target
        errors = (outputs.values, old.values, old.returns, steps, clip, target, macro.sigma)
        value, value_stats = value_loss(*errors, normalizer=over[1], mean=mean)
        if config.kl_in == "loss":
            kl = kl_per_token(outputs.logprobs, rollout.ref_logprobs, rollout.mask, config.kl_estimator)
            policy = policy + self.kl_coef * average(kl, rollout.mask, over[2], mean)[0]
        return policy + value, {
            "policy_loss": policy.detach(),
            "value_loss": value.detach(),
            "clip_fraction": policy_stats["clip_fraction"] * policy_stats["count"] / normalizers[0],
            "value_clip_fraction": value_stats["clip_fraction"] * value_stats["count"] / normalizers[1],
        }

    def _apply_gradients(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Clip gradients, policy and critic apart, and step; a step with NaN or infinite numbers is left out."""
        self.accelerator.unscale_gradients()
        norms = {}
        for role, parameters in self.parameters.items():
            norms[role] = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
            self._finite(f"gradient of the {role}", norms[role])
        # The one place of an optimizer step where the CPU waits for the device, and processes for each other.
        totals = sum_over_processes({**sums, **self.nonfinite}, self.accelerator)
        self.nonfinite = {name: totals.pop(name) for name in self.nonfinite}
        skip = any(self.nonfinite.values())
        if self.updates_done < self.config.critic_warmup:  # the critic learns alone at first
            for parameter in self.parameters["policy"]:
                parameter.grad = None
        moved = safeguards.MovedCheck(self) if self.updates_done == 0 and not skip else None
        if not skip or self.accelerator.scaler is not None:  # the scaler of fp16 leaves such steps out by itself
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if moved is not None:
            moved.check()
        norms = {f"{role}_grad_norm": float(norm) for role, norm in norms.items()}
        return totals | norms | {"skipped_steps": float(skip)}

    def _finite(self, name: str, x: Tensor) -> Tensor:
        """Count NaN and infinity, which leave out all optimizer steps from here on, and put 0 in their place."""
        self.nonfinite[name] = self.nonfinite.get(name, 0.0) + (~x.detach().isfinite()).sum()
        return torch.nan_to_num(x, 0.0, 0.0, 0.0)

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

    def _finish_update(self, row: dict[str, float]) -> None:
        """Count the update, refuse a run that does not work, and adapt the KL coefficient."""
        config = self.config
        nonfinite = bool(row["skipped_steps"]) and self.accelerator.scaler is None
        if self.updates_done == 0 and not nonfinite:
            safeguards.check_start(row)
        self.updates_done += 1
        self.nonfinite_in_row = self.nonfinite_in_row + 1 if nonfinite else 0
        safeguards.check_nonfinite(self.nonfinite_in_row, self.nonfinite)
        self.nonfinite = {}
        if config.kl_target and not nonfinite:  # β *= 1 + clip(KL / target − 1, ±0.2) B / horizon (Ziegler et al. 2019)
            error = max(min(row["kl_k1"] / config.kl_target - 1, 0.2), -0.2)
            self.kl_coef *= 1 + error * config.batch_size / config.kl_horizon

    def _is_beyond_kl_ceiling(self, row: dict[str, float]) -> bool:
        ceiling = self.config.kl_ceiling
        if not ceiling or row["kl_k1"] <= ceiling or row["skipped_steps"]:
            return False
        kl = f"KL {row['kl_k1']:.1f} is beyond --kl_ceiling {ceiling:g}"
        self.logger.write_line(f"{self.name}: stopped at update {row['update']}: {kl}")
        return True

    def _evaluate_and_save(self, last: bool) -> None:
        """Held-out tests and checkpoints, where it is time."""
        every = self.logging_config.eval_every
        if self.held_out and every and (self.updates_done % every == 0 or last):
            with summon_full_params(self.actor_critic):
                scores = self.held_out(self.models)
            self.logger.log_held_out(self.updates_done, scores)
        every = self.checkpoint_config.checkpoint_every
        if self.checkpoints and every and (self.updates_done % every == 0 or last):
            self.checkpoints.save(self.actor_critic, self.optimizer, self._counters())

    def _counters(self) -> dict[str, float]:
        names = ("updates_done", "generated_tokens", "nonfinite_in_row", "kl_coef", "micro_batch_size")
        return {name: getattr(self, name) for name in names}

    def _resume(self) -> None:
        if self.checkpoints is None:
            raise InputError("resume: a trainer without a run folder has no checkpoints: give it one")
        update = self.checkpoint_config.from_checkpoint
        for name, value in self.checkpoints.load(self.actor_critic, self.optimizer, update).items():
            setattr(self, name, value)
        self.micro_batch_size = min(self.micro_batch_size, self.config.micro_batch_size or self.micro_batch_size)
        self.logger.reload(self.updates_done)

    def save(self, folder: Path) -> None:
        """Save policy and critic as adapter folders (or full models), with the tokenizer."""
        save_models(Path(folder), self.models, self.actor_critic, self.tokenizer, self.accelerator)
