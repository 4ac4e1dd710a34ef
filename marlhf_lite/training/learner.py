"""From a scored, segmented rollout to changed weights: every optimizer step of one update."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from marlhf_lite.config import MacroOptions, PPOOptions
from marlhf_lite.errors import InputError
from marlhf_lite.macro import MacroActions
from marlhf_lite.roles import Roles, trainable
from marlhf_lite.rollouts import Rollout
from marlhf_lite.training.metrics import Clock, measure
from marlhf_lite.training.step import (
    Estimate,
    Pass,
    estimate,
    freeze,
    micro_losses,
    needs_freeze,
    run_models,
    term_counts,
)

START_KL = 0.05  # nats a token: beyond this at the first update, policy and reference did not start alike


class Learner:
    """Optimizers of policy and critic, built from explicit parameter lists, and the steps they take."""

    def __init__(self, roles: Roles, how: MacroOptions, ppo: PPOOptions, accelerator: Accelerator):
        self.how, self.ppo, self.accelerator, self.updates = how, ppo, accelerator, 0
        self.parameters = {"policy": trainable(roles.policy), "critic": trainable(roles.critic)}
        rates = {"policy": ppo.policy_learning_rate, "critic": ppo.critic_learning_rate}
        self.optimizers = {k: torch.optim.AdamW(p, lr=rates[k], weight_decay=0.0) for k, p in self.parameters.items()}
        self.schedulers = {
            k: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / max(ppo.warmup_updates, 1), 1.0))
            for k, o in self.optimizers.items()
        }
        prepare = accelerator.prepare
        self.roles = Roles(prepare(roles.policy), roles.reference, roles.reward, prepare(roles.critic))

    def learn(self, rollout: Rollout, macro: MacroActions, clock: Clock | None = None) -> dict[str, float]:
        """All optimizer steps on one rollout; what `measure` says of the models before them, and means over steps."""
        self.clock = clock or Clock()
        _check_input(rollout, macro)
        before, made = None, None
        if needs_freeze(self.ppo):
            with self.clock.phase("training"):
                rollout, before, made = freeze(self.roles, rollout, macro, self.how, self.ppo, self._sum)
        stats = []
        for _ in range(self.ppo.ppo_epochs):
            order = torch.arange(len(rollout)) if made is None else torch.randperm(len(rollout))
            for rows in order.tensor_split(min(self.ppo.minibatches, len(order))):
                step, seen = self._step(rollout.select(rows), macro.select(rows), made and made.select(rows))
                stats.append(step)
        if made is None:  # one step on all rows: what it saw is the state before it
            before = Pass.cat([now for now, _ in seen])
            made = Estimate(*(torch.cat(x) for x in zip(*((m.advantages, m.returns) for _, m in seen), strict=True)))
        row = measure(rollout, macro, made, before, self.how, self.ppo)
        self._check_start(row, rollout)
        for scheduler in self.schedulers.values():
            scheduler.step()
        self.updates += 1
        return row | {k: sum(s[k] for s in stats) / len(stats) for k in stats[0]}

    def _step(self, batch: Rollout, macro: MacroActions, made: Estimate | None) -> tuple[dict, list]:
        """One optimizer step, in micro-batches whose gradients add up to that of the whole."""
        counts = self._sum(term_counts(macro, self.how))
        total, seen = {}, []
        for rows in torch.arange(len(batch)).split(self.ppo.micro_batch_size):
            part, actions = batch.select(rows), macro.select(rows)
            with self.clock.phase("training"):
                now = run_models(self.roles, part, self.ppo)
            with self.clock.phase("macro"):
                now_made = made.select(rows) if made else self._estimate(part, actions, now.detach())
                losses = micro_losses(now, part, actions, now_made, self.how, self.ppo, counts)
            seen.append((now.detach(), now_made))
            with self.clock.phase("training"):
                # DDP averages gradients over processes, while the counts are global: hence the factor.
                self.accelerator.backward((losses.policy + losses.value) * self.accelerator.num_processes)
            total = {k: total.get(k, 0.0) + v for k, v in losses.stats.items()}
        with self.clock.phase("training"):
            return total | self._apply(), seen

    def _estimate(self, part: Rollout, macro: MacroActions, now: Pass) -> Estimate:
        return estimate(part, macro, now.logprobs, now.values, self.how, self.ppo)

    def _apply(self) -> dict[str, float]:
        """Clip, step, and at the very first step make sure that weights moved."""
        norms = {}
        for name, parameters in self.parameters.items():
            norms[f"{name}_grad_norm"] = float(torch.nn.utils.clip_grad_norm_(parameters, self.ppo.max_grad_norm))
            before = [p.detach().clone() for p in parameters] if self.updates == 0 else []
            self.optimizers[name].step()
            self.optimizers[name].zero_grad(set_to_none=True)
            if before and all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)):
                raise RuntimeError(
                    f"the first update moved no weight of the {name}: is its learning rate or gradient 0?"
                )
        return norms

    def _check_start(self, row: dict[str, float], rollout: Rollout) -> None:
        """Policy and reference start from the same adapter, so their KL is about 0 before the first step."""
        per_token = row["kl_k3"] / max(row["response_length"], 1.0)
        if self.updates == 0 and per_token > START_KL:
            raise RuntimeError(
                f"KL to the reference is {per_token:.3f} nats a token before any step: the policy does not start from "
                "the reference (another SFT adapter, or dropout in the adapters?)"
            )

    def _sum(self, x: Tensor) -> Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(x, reduction="sum")


def _check_input(rollout: Rollout, macro: MacroActions) -> None:
    """A reward and a rule may be anybody's: one score a response, and every response token in a macro action."""
    if rollout.scores.shape != (len(rollout),):
        raise InputError(f"scores: expected shape ({len(rollout)},), got {tuple(rollout.scores.shape)}")
    if macro.token_mask.shape != rollout.mask.shape or (macro.token_mask != rollout.mask).any():
        raise InputError("the termination rule left response tokens out of macro actions, or put padding into one")
