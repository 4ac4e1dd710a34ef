"""PPO with a critic, over macro actions. `FixedNGram(1)` makes it token-level PPO; nothing else changes.

Left out here on purpose: RewardTrainer, SFTTrainer and friends come from TRL; this trainer exists because TRL has had
no PPO trainer with a critic since 1.13.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from marlhf_lite.config import MacroOptions, PPOOptions
from marlhf_lite.errors import InputError
from marlhf_lite.macro import MacroActions, TerminationRule, check_segmentation
from marlhf_lite.records import RunFolder
from marlhf_lite.roles import Roles
from marlhf_lite.rollouts import Rollout, Sampling, generate
from marlhf_lite.training.learner import Learner
from marlhf_lite.training.metrics import Clock


class PPOTrainer:
    """Trains the policy and critic of `roles` on `prompts`.

    Args:
        roles: the four models; see `build_roles`.
        tokenizer: of the base model.
        prompts: texts; drawn without replacement, reshuffled when used up.
        reward: rollout -> [B] scores (`ModelReward`, `FunctionReward`, or your own).
        rule: termination condition, `rule(mask, **context) -> MacroActions`.
        how, ppo: options; see `marlhf_lite.config`.
        max_response_length: tokens.
        run: where records go; None keeps them in memory only.
        gold: (prompts, responses) -> true scores, recorded but never trained on.
    """

    def __init__(
        self,
        roles: Roles,
        tokenizer,
        prompts: Sequence[str],
        reward: Callable[[Rollout], Tensor],
        rule: TerminationRule,
        how: MacroOptions,
        ppo: PPOOptions,
        *,
        max_response_length: int,
        seed: int = 0,
        run: RunFolder | None = None,
        gold: Callable[[list[str], list[str]], list[float]] | None = None,
        name: str = "ppo",
        accelerator: Accelerator | None = None,
    ):
        if not len(prompts):
            raise InputError("prompts: there are none to answer: give more data, or a larger --max_prompt_length")
        self.accelerator = accelerator or Accelerator()
        self.tokenizer, self.prompts, self.reward, self.rule, self.gold = tokenizer, list(prompts), reward, rule, gold
        self.how, self.ppo, self.seed, self.run, self.name = how, ppo, seed, run, name
        self.sampling = Sampling(max_response_length, ppo.temperature, ppo.top_k, ppo.top_p)
        self.roles = roles
        self.learner = Learner(roles, how, ppo, self.accelerator)
        self.history: list[dict] = []

    def train(self) -> list[dict]:
        """Run all updates; the metrics of each, which also stand in the run's metrics.jsonl."""
        torch.manual_seed(self.seed + self.accelerator.process_index)
        batches = self._batches()
        shown = self.accelerator.is_local_main_process
        bar = tqdm(total=self.ppo.updates, desc=self.name, disable=not shown, dynamic_ncols=True)
        with bar:
            while len(self.history) < self.ppo.updates:
                row = self.update(next(batches))
                bar.set_postfix({k: f"{row[k]:.2f}" for k in ("rm_score_mean", "gold_mean", "kl_k1") if k in row})
                bar.update()
        return self.history

    def update(self, prompts: list[str]) -> dict:
        """One update on these prompts: sample, score, cut into macro actions, train. Returns its metrics."""
        clock, start = Clock(), time.perf_counter()
        with clock.phase("generation"):
            rollout = self._sample(prompts)
        with clock.phase("scoring"):
            if hasattr(self.rule, "prepare"):  # slow work on the CPU, while the models score
                self.rule.prepare(rollout.mask, **self._context(rollout))
            rollout = self._score(rollout)
        with clock.phase("macro"):
            macro = self._segment(rollout)
        row = self.learner.learn(rollout, macro, clock)
        row = {"update": len(self.history) + 1} | row | self._gold(rollout)
        row |= self.rule.metrics() if hasattr(self.rule, "metrics") else {}
        seconds = time.perf_counter() - start
        tokens = int(rollout.lengths.sum()) * self.accelerator.num_processes
        row |= {"tokens_per_second": tokens / seconds, "seconds": seconds}
        row |= {f"seconds_{phase}": spent for phase, spent in clock.seconds.items()}
        self._record(row, rollout, macro)
        return row

    # The steps of an update

    def _batches(self) -> Iterator[list[str]]:
        """This process's share of each global batch, from a seeded order."""
        order, share = random.Random(self.seed), self.accelerator.num_processes
        pool: list[str] = []
        while True:
            while len(pool) < self.ppo.batch_size:
                pool += order.sample(self.prompts, len(self.prompts))
            batch, pool = pool[: self.ppo.batch_size], pool[self.ppo.batch_size :]
            yield batch[self.accelerator.process_index :: share]

    def _sample(self, prompts: list[str]) -> Rollout:
        self.roles.policy.eval()
        rollout = generate(self.roles.policy.model, self.tokenizer, prompts, self.sampling)
        self.roles.policy.train()
        return rollout.by_length()

    @torch.no_grad()
    def _score(self, rollout: Rollout) -> Rollout:
        """Two scoring passes: reference log-probabilities and rewards."""
        temperature = self.ppo.temperature if self.ppo.logprobs_at_temperature else 1.0
        parts = []
        for rows in torch.arange(len(rollout)).split(self.ppo.micro_batch_size):
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
            "step": len(self.history),
        }

    def _segment(self, rollout: Rollout) -> MacroActions:
        macro = self.rule(rollout.mask, **self._context(rollout))
        return check_segmentation(macro, rollout.mask, "termination rule")

    def _gold(self, rollout: Rollout) -> dict[str, float]:
        if self.gold is None:
            return {}
        scores = self.gold(rollout.prompts, rollout.responses)
        return {"gold_mean": sum(scores) / len(scores)}

    def _record(self, row: dict, rollout: Rollout, macro: MacroActions) -> None:
        self.history.append(row)
        if self.run is None or not self.accelerator.is_main_process:
            return
        self.run.log_metrics(row)
        if row["update"] == 1 or row["update"] % self.ppo.sample_every == 0:
            self.run.log_samples(_samples(row["update"], rollout, macro))

    def save(self, folder: Path) -> None:
        """Policy and critic as adapter folders, with the tokenizer: what the other commands take."""
        if self.accelerator.is_main_process:
            self.roles.policy.model.save_pretrained(folder / "policy")
            self.roles.critic.model.save_pretrained(folder / "critic")
            self.tokenizer.save_pretrained(folder / "policy")


def _samples(update: int, rollout: Rollout, macro: MacroActions, count: int = 4) -> list[dict]:
    """Some responses as they were, with their macro actions as token spans."""
    spans = macro.spans()
    return [
        {
            "update": update,
            "prompt": rollout.prompts[i],
            "response": rollout.responses[i],
            "score": rollout.scores[i].item(),
            "tokens": int(rollout.lengths[i]),
            "ended": bool(rollout.ended[i]),
            "spans": spans[i],
        }
        for i in range(0, len(rollout), max(len(rollout) // count, 1))  # rows are sorted by length: short and long
    ]
