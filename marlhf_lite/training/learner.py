"""From a scored, segmented rollout to changed weights: every optimizer step of one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from tqdm.auto import tqdm

from marlhf_lite.config.options import MacroConfig, PPOConfig
from marlhf_lite.macro import MacroActions
from marlhf_lite.models.actor_critic import ActorCritic, PPOModels, trainable
from marlhf_lite.training.distributed import local, whole
from marlhf_lite.training.metrics import Clock, describe_update, over_processes, totals
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.training.step import (
    Estimate,
    Pass,
    compute_losses,
    estimate,
    freeze,
    loss_normalizers,
    needs_freeze,
    run_models,
    shape_scores,
)
from marlhf_lite.utils.errors import InputError

START_KL = 0.05  # nats a token: beyond this at the first update, policy and reference did not start alike


class Learner:
    """The optimizer of policy and critic, built from explicit parameter lists, and the steps it takes.

    `ppo` are the options in force: the KL coefficient adapts, and the micro-batch shrinks when memory runs out.
    """

    def __init__(self, roles: PPOModels, how: MacroConfig, ppo: PPOConfig, accelerator: Accelerator):
        if accelerator.distributed_type == "DEEPSPEED":  # whose engine steps by itself, unclipped by us and unskipped
            raise InputError(
                "PPO does not run under DeepSpeed: use FSDP2, which shards as ZeRO-3 does, or DDP for LoRA"
            )
        self.roles, self.how, self.ppo, self.accelerator = roles, how, ppo, accelerator
        self.updates, self.bad_in_row = 0, 0
        self.clock, self.found = Clock(), []
        self.rates = {"policy": ppo.policy_learning_rate, "critic": ppo.critic_learning_rate}
        groups = [{"params": trainable(getattr(roles, k)), "lr": rate, "name": k} for k, rate in self.rates.items()]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        # One module, so that data-parallel wrappers see one forward and one backward pass.
        self.actors, self.optimizer = accelerator.prepare(ActorCritic(roles.policy, roles.critic), optimizer)
        self.parameters = {group["name"]: group["params"] for group in self.optimizer.param_groups}

    def learn(
        self, rollout: Rollout, macro: MacroActions, clock: Clock | None = None, bad: Sequence[str] = ()
    ) -> dict[str, float]:
        """All optimizer steps on one rollout; metrics of the models before them, and means over steps.

        Given different responses on each process, the update and its metrics are those of all of them together.
        `bad` names what was not finite in the rollout: its steps are left out. Raises `InputError` where that makes too
        many such updates in a row.
        """
        self.clock, self.found = clock or Clock(), list(bad)
        _check_input(rollout, macro)
        rollout = replace(rollout, rewards=shape_scores(rollout, self.ppo))
        self._set_rates()
        before, made = None, None
        if needs_freeze(self.ppo):
            with self.clock.phase("training"):
                rollout, before, made, bad = freeze(self.actors, rollout, macro, self.how, self.ppo, self.sum)
                self.found += bad
        stats, seen = self._steps(rollout, macro, made)
        if made is None:  # one step on all rows: what it saw is the state before it
            before = Pass.cat([now for now, _ in seen])
            made = Estimate(*(torch.cat(x) for x in zip(*((m.advantages, m.returns) for _, m in seen), strict=True)))
        row = describe_update(self._over_processes(totals(rollout, macro, made, before)), self.how, self.ppo)
        row |= {k: sum(s[k] for s in stats) / len(stats) for k in stats[0]}
        self._finish(row)
        return row

    def _steps(self, rollout: Rollout, macro: MacroActions, made: Estimate | None) -> tuple[list[dict], list]:
        """Every optimizer step of the update: its stats, and what the last one saw."""
        stats, seen, bad = [], [], list(self.found)
        for _ in range(self.ppo.num_ppo_epochs):
            order = torch.arange(len(rollout)) if made is None else torch.randperm(len(rollout))
            for rows in order.tensor_split(min(self.ppo.num_mini_batches, len(order))):
                step, seen = self._step(rollout.select(rows), macro.select(rows), made and made.select(rows), bad)
                stats.append(step)
        return stats, seen

    def _step(
        self, batch: Rollout, macro: MacroActions, made: Estimate | None, before: Sequence[str] = ()
    ) -> tuple[dict, list]:
        """One optimizer step, in micro-batches whose gradients add up to that of the whole."""
        counts = self.sum(loss_normalizers(macro, self.how))
        while True:
            try:
                total, seen, bad = self.accumulate(batch, macro, made, counts)
                break
            except RuntimeError as error:
                self.halve(error)
        with self.clock.phase("training"):
            return self._over_processes(total) | self._apply([*before, *bad]), seen

    def accumulate(
        self, batch: Rollout, macro: MacroActions, made: Estimate | None, counts: Tensor, sync: bool = True
    ) -> tuple[dict, list, list[str]]:
        """Gradients of all micro-batches: `(stats, [(pass, estimate)], names of what was not finite)`.

        `sync`: add them up over processes.
        """
        total, seen, bad = {}, [], []
        parts = torch.arange(len(batch)).split(self.ppo.micro_batch_size)
        for i, rows in enumerate(parts):
            part, actions = batch.select(rows), macro.select(rows)
            last = i == len(parts) - 1
            with nullcontext() if last and sync else self.accelerator.no_sync(self.actors):
                with self.clock.phase("training"):
                    now, found = run_models(self.actors, part, self.ppo).finite()
                with self.clock.phase("macro"):
                    now_made = made.select(rows) if made else self._estimate(part, actions, now.detach())
                    losses = compute_losses(now, part, actions, now_made, self.how, self.ppo, counts)
                with self.clock.phase("training"):
                    # DDP averages gradients over processes, while the counts are global: hence the factor.
                    self.accelerator.backward((losses.policy + losses.value) * self.accelerator.num_processes)
            seen.append((now.detach(), now_made))
            bad += found
            total = {k: total.get(k, 0.0) + v for k, v in losses.stats.items()}
        return total, seen, bad

    def halve(self, error: RuntimeError, alone: bool = False) -> None:
        """Out of memory: from now on half the micro-batch. Raises the error if it is another one, or if that is 1.

        `alone`: no other process waits for this one in the middle of a pass.
        """
        size = self.ppo.micro_batch_size
        self.optimizer.zero_grad(set_to_none=True)
        if not should_reduce_batch_size(error):
            raise error
        if size == 1 or (self.accelerator.num_processes > 1 and not alone):
            raise InputError(
                f"out of memory with --micro_batch_size {size}: "
                + ("shorten --max_response_length or use a smaller model" if size == 1 else f"give {size // 2}")
            ) from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.ppo = replace(self.ppo, micro_batch_size=size // 2)
        tqdm.write(f"out of memory: micro_batch_size is {size // 2} from here on; gradients stay the same")

    def _estimate(self, part: Rollout, macro: MacroActions, now: Pass) -> Estimate:
        return estimate(part, macro, now.logprobs, now.values, self.how, self.ppo)

    def _apply(self, bad: list[str]) -> dict[str, float]:
        """Clip and step; a step with anything that is not finite is left out. The very first one must move weights."""
        self.accelerator.unscale_gradients()
        norms = {
            k: whole(torch.nn.utils.clip_grad_norm_(p, self.ppo.max_grad_norm)) for k, p in self.parameters.items()
        }
        stats = {f"{name}_grad_norm": float(norm) for name, norm in norms.items()}
        bad += [f"gradient of the {name}" for name, norm in norms.items() if not norm.isfinite()]
        self.found += bad
        skip = bool(self._over_processes({"bad": len(bad)})["bad"])
        before = {k: [p.detach().clone() for p in ps] for k, ps in self.parameters.items() if self.updates == 0}
        if self.updates < self.ppo.critic_warmup:
            for parameter in self.parameters["policy"]:
                parameter.grad = None
        if not skip or self.accelerator.scaler is not None:  # fp16's scaler leaves such steps out by itself
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not skip:
            self._check_moved(before)
        return stats | {"skipped_steps": float(skip)}

    def _check_moved(self, before: dict[str, list[Tensor]]) -> None:
        for name, old in before.items():
            pairs = zip(old, self.parameters[name], strict=True)
            moved = float(any(not torch.equal(local(a), local(b)) for a, b in pairs))
            if not self._over_processes({"moved": moved})["moved"] and not (
                name == "policy" and self.ppo.critic_warmup
            ):
                raise RuntimeError(
                    f"the first update moved no weight of the {name}: is its learning rate or gradient 0?"
                )

    def _finish(self, row: dict[str, float]) -> None:
        """What follows from an update's metrics: start check, the count of bad updates, and the next KL coefficient."""
        bad = bool(row["skipped_steps"]) and self.accelerator.scaler is None  # then its KL says nothing either
        per_token = row["kl_k3"] / max(row["response_length"], 1.0)
        if self.updates == 0 and per_token > START_KL and not bad:
            raise RuntimeError(
                f"KL to the reference is {per_token:.3f} nats a token before any step: the policy does not start from "
                "the reference (another SFT adapter, or dropout in the adapters?)"
            )
        self.updates += 1
        self.bad_in_row = self.bad_in_row + 1 if bad else 0
        if self.bad_in_row >= self.ppo.max_bad_updates:
            where = ", ".join(dict.fromkeys(self.found)) or "another process"
            raise InputError(
                f"{self.bad_in_row} updates in a row were not finite and were left out ({where}): start again with "
                "lower learning rates, a smaller --max_grad_norm, or --dtype float32"
            )
        if self.ppo.kl_target and not bad:  # Ziegler et al. 2019, section 2.2
            error = max(min(row["kl_k1"] / self.ppo.kl_target - 1, 0.2), -0.2)
            step = error * self.ppo.batch_size / self.ppo.kl_horizon
            self.ppo = replace(self.ppo, kl_coef=self.ppo.kl_coef * (1 + step))

    def restore(self, state: dict) -> None:
        """The counters of a checkpoint; weights and the optimizer's moments are set apart."""
        self.updates, self.bad_in_row = state["update"], state["bad_in_row"]
        size = min(state["micro_batch_size"], self.ppo.micro_batch_size or state["micro_batch_size"])
        self.ppo = replace(self.ppo, kl_coef=state["kl_coef"], micro_batch_size=size)

    def _set_rates(self) -> None:
        """Linear warm-up by updates, however many optimizer steps an update has; then constant."""
        share = min((self.updates + 1) / max(self.ppo.warmup_updates, 1), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[group["name"]] * share

    def _over_processes(self, sums: dict) -> dict[str, float]:
        return over_processes(sums, self.sum, self.accelerator.device)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(x, reduction="sum")


def _check_input(rollout: Rollout, macro: MacroActions) -> None:
    """A reward and a rule may be anybody's: one score a response, and every response token in a macro action."""
    if rollout.scores.shape != (len(rollout),):
        raise InputError(f"scores: expected shape ({len(rollout)},), got {tuple(rollout.scores.shape)}")
    if macro.token_mask.shape != rollout.mask.shape or (macro.token_mask != rollout.mask).any():
        raise InputError("the termination rule left response tokens out of macro actions, or put padding into one")


@contextmanager
def sampling() -> Iterator[None]:
    """Raises `InputError` where torch, about to draw a token, finds that the policy's probabilities are no numbers."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise InputError("the policy's probabilities are not finite: start again with a lower learning rate") from error
