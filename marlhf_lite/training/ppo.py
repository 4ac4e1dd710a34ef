"""PPO with a critic, over macro actions. `FixedNGram(1)` makes it token-level PPO; nothing else changes.

SFT, reward model, DPO, RLOO and GRPO come from TRL; this trainer exists because TRL has had no PPO trainer with a
critic since 1.13.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from marlhf_lite.config.options import CheckpointConfig, LoggingConfig, MacroConfig, PPOConfig
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.macro import MacroActions, TerminationRule, check_segmentation
from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.training.checkpoint import Checkpoints, save_models
from marlhf_lite.training.distributed import summon_full_params
from marlhf_lite.training.dry_run import fit_micro_batch
from marlhf_lite.training.learner import Learner, sampling
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.metrics import Clock, over_processes
from marlhf_lite.training.rollout import Rollout, Sampling, generate, in_batches, prompt_stream
from marlhf_lite.training.step import replace_nonfinite_ref_logprobs
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder


class PPOTrainer:
    """Trains the policy and critic of `roles` on `prompts`.

    Args:
        roles: the four models; see `build_models`.
        tokenizer: of the base model.
        prompts: texts; drawn without replacement, reshuffled when used up.
        reward: rollout -> [B] scores (`ModelReward`, `FunctionReward`, or your own).
        rule: termination condition, `rule(mask, **context) -> MacroActions`.
        how, ppo, checkpoint, logging: options; see `marlhf_lite.config.options`.
        max_response_length: tokens.
        run: where records and checkpoints go; None keeps records in memory and makes no checkpoints.
        gold: (prompts, responses) -> true scores, recorded but never trained on.
        test_prompts: held-out texts for `logging.eval_every`.
        accelerator: made with `log_with` if there are trackers.
        generator: (model, tokenizer, prompts, sampling) -> Rollout; None is `generate`.
    """

    def __init__(
        self,
        roles: PPOModels,
        tokenizer,
        prompts: Sequence[str],
        reward: Callable[[Rollout], Tensor],
        rule: TerminationRule,
        how: MacroConfig,
        ppo: PPOConfig,
        *,
        max_response_length: int,
        checkpoint: CheckpointConfig | None = None,
        logging: LoggingConfig | None = None,
        seed: int = 0,
        run: RunFolder | None = None,
        gold: Callable[[list[str], list[str]], list[float]] | None = None,
        test_prompts: Sequence[str] = (),
        name: str = "ppo",
        accelerator: Accelerator | None = None,
        generator: Callable | None = None,
    ):
        self.accelerator = accelerator or Accelerator()
        self.checkpoint, self.logging = checkpoint or CheckpointConfig(), logging or LoggingConfig()
        _check_batch(len(prompts), ppo, self.accelerator.num_processes)
        self.tokenizer, self.prompts, self.reward, self.rule, self.gold = tokenizer, list(prompts), reward, rule, gold
        self.how, self.ppo, self.seed, self.name = how, ppo, seed, name
        self.sampling = Sampling(max_response_length, ppo.temperature, ppo.top_k, ppo.top_p)
        self.roles, self.generator = roles, generator or generate
        self.learner = Learner(roles, how, ppo, self.accelerator)
        self.updates = ppo.updates
        if ppo.prompt_epochs:
            rounds = ppo.prompt_epochs * len(prompts) * ppo.rollouts / ppo.batch_size
            self.updates = math.ceil(round(rounds, 6))  # 1.1 * 10 is a little more than 11
        self.test = None
        if self.logging.eval_every and len(test_prompts):
            held_out = list(test_prompts)[: self.logging.test_prompts]
            batch = ppo.generation_batch_size or 128
            self.test = HeldOutEvaluation(
                held_out, tokenizer, self.sampling, reward, gold, self.accelerator, seed, batch
            )
        self.journal = RunLogger(run, self.logging, self.accelerator)
        self.checkpoints = Checkpoints(run, self.checkpoint.save_total_limit, self.accelerator) if run else None
        self.generated = 0

    @property
    def history(self) -> list[dict]:
        """The metrics of each update so far."""
        return self.journal.history

    def train(self, resume: bool = False) -> list[dict]:
        """Run all updates; the metrics of each, which also stand in the run's metrics.jsonl.

        `resume` goes on from the run's last checkpoint (`checkpoint.from_checkpoint`: another one), bit by bit as if it
        had not been stopped. Stops early where KL goes beyond `ppo.kl_ceiling`.
        """
        torch.manual_seed(self.seed + self.accelerator.process_index)
        if resume:
            self._resume()
        elif not self.ppo.micro_batch_size:
            self._fit()
        batches = islice(self._batches(), self.learner.updates, None)
        shown = self.accelerator.is_local_main_process
        bar = tqdm(total=self.updates, initial=len(self.history), desc=self.name, disable=not shown, dynamic_ncols=True)
        stop = bool(self.history) and self._stops(self.history[-1])
        with bar:
            while not stop and len(self.history) < self.updates:
                row = self.update(next(batches))
                bar.set_postfix({k: f"{row[k]:.2f}" for k in ("rm_score_mean", "gold_mean", "kl_k1") if k in row})
                bar.update()
                stop = self._stops(row)
                self._after(row["update"], last=stop or row["update"] == self.updates)
        return self.history

    def update(self, prompts: list[str]) -> dict:
        """One update on these prompts: sample, score, cut into macro actions, train. Returns its metrics."""
        clock, start = Clock(), time.perf_counter()
        with clock.phase("generation"):
            rollout = self._sample(prompts)
        with clock.phase("scoring"):
            if hasattr(self.rule, "prepare"):  # slow work on the CPU, while the models score
                self.rule.prepare(rollout.mask, **self._context(rollout))
            rollout, bad = replace_nonfinite_ref_logprobs(self._score(rollout))
        with clock.phase("macro"):
            macro = self._segment(rollout)
        row = self.learner.learn(rollout, macro, clock, bad)
        row = {"update": self.learner.updates} | row | self._counts(rollout)
        row |= self.rule.metrics() if hasattr(self.rule, "metrics") else {}
        seconds = time.perf_counter() - start
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        row |= {f"seconds_{phase}": spent for phase, spent in clock.seconds.items()}
        self.journal.log(row, rollout, macro)
        return row

    # Before and after updates

    def _resume(self) -> None:
        if self.checkpoints is None:
            raise InputError("resume: a trainer without a run folder has no checkpoints: give it one")
        state = self.checkpoints.load(self.learner, self.checkpoint.from_checkpoint)
        self.generated = state["generated_tokens"]
        self.journal.reload(state["update"])

    def _fit(self) -> None:
        longest = max(map(len, self.tokenizer(self.prompts)["input_ids"]))
        share = self.ppo.batch_size // self.ppo.num_mini_batches // self.accelerator.num_processes
        token = self.tokenizer.eos_token_id
        fit_micro_batch(self.learner, max(share, 1), longest, self.sampling.max_new_tokens, token)

    def _stops(self, row: dict) -> bool:
        beyond = self.ppo.kl_ceiling and row["kl_k1"] > self.ppo.kl_ceiling and not row["skipped_steps"]
        if beyond and self.accelerator.is_main_process:
            tqdm.write(f"{self.name}: stopped at update {row['update']}: KL {row['kl_k1']:.1f} is beyond --kl_ceiling")
        return bool(beyond)

    def _after(self, update: int, last: bool) -> None:
        """Test on held-out prompts and write a checkpoint, where it is time."""
        if self.test and (update % self.logging.eval_every == 0 or last):
            with summon_full_params(self.learner.actors):
                scores = self.test(self.roles)
            self.journal.log_test(update, scores)
        every = self.checkpoint.checkpoint_every
        if self.checkpoints and every and (update % every == 0 or last):
            self.checkpoints.save(self.learner, self.generated)

    # The steps of an update

    def _batches(self) -> Iterator[list[str]]:
        """This process's share of each global batch, from a seeded order."""
        stream, share = prompt_stream(self.prompts, self.seed), self.accelerator.num_processes
        while True:
            batch = list(islice(stream, self.ppo.batch_size // self.ppo.rollouts))
            mine = batch[self.accelerator.process_index :: share]
            yield [prompt for prompt in mine for _ in range(self.ppo.rollouts)]

    def _sample(self, prompts: list[str]) -> Rollout:
        self.roles.policy.eval()
        model, size = self.roles.policy.model, self.ppo.generation_batch_size
        with summon_full_params(self.learner.actors), sampling():
            rollout = in_batches(self.generator, size, model, self.tokenizer, prompts, self.sampling)
        self.roles.policy.train()
        return rollout.by_length()

    @torch.no_grad()
    def _score(self, rollout: Rollout) -> Rollout:
        """Two scoring passes: reference log-probabilities and rewards, in the precision that training has."""
        temperature, parts = self.ppo.temperature if self.ppo.logprobs_at_temperature else 1.0, []
        with self.accelerator.autocast():
            for rows in torch.arange(len(rollout)).split(self.learner.ppo.micro_batch_size):
                part = rollout.select(rows).trim()
                logprobs, _ = self.roles.reference(part.tokens, part.attention_mask, part.mask.shape[1], temperature)
                parts.append(rollout.widen(logprobs))
            return replace(rollout, ref_logprobs=torch.cat(parts), scores=self.reward(rollout))

    def _context(self, rollout: Rollout) -> dict:
        """What every termination rule is called with, besides the mask."""
        return {
            "token_ids": rollout.response_ids,
            "ref_logprobs": rollout.ref_logprobs,
            "tokenizer": self.tokenizer,
            "step": self.learner.updates,
        }

    def _segment(self, rollout: Rollout) -> MacroActions:
        macro = self.rule(rollout.mask, **self._context(rollout))
        return check_segmentation(macro, rollout.mask, "termination rule")

    def _counts(self, rollout: Rollout) -> dict[str, float]:
        """Generated tokens and, where known, gold scores, over all processes."""
        gold = self.gold(rollout.prompts, rollout.responses) if self.gold else []
        sums = {"tokens": rollout.mask.sum(), "rows": len(rollout), "gold": float(sum(gold))}
        sums = over_processes(sums, self.learner.sum, self.accelerator.device)
        self.generated += int(sums["tokens"])
        row = {"tokens": int(sums["tokens"]), "generated_tokens": self.generated}
        return row | ({"gold_mean": sums["gold"] / sums["rows"]} if self.gold else {})

    def save(self, folder: Path) -> None:
        """Policy and critic as adapter folders (or whole models), with the tokenizer: what the other commands take."""
        save_models(Path(folder), self.roles, self.learner, self.tokenizer)


def _check_batch(prompts: int, ppo: PPOConfig, processes: int) -> None:
    if not prompts:
        raise InputError("prompts: there are none to answer: give more data, or a larger --max_prompt_length")
    whole = ppo.rollouts * processes
    if ppo.batch_size % whole:
        what = (
            f"--rollouts {ppo.rollouts} times {processes} processes" if processes > 1 else f"--rollouts {ppo.rollouts}"
        )
        raise InputError(f"--batch_size {ppo.batch_size}: not a multiple of {what}: give a multiple of {whole}")
    if ppo.num_mini_batches * processes > ppo.batch_size:
        most = ppo.batch_size // processes
        raise InputError(
            f"--num_mini_batches {ppo.num_mini_batches}: more than a process's responses: give at most {most}"
        )
