"""How often each model runs over the batch in one update, counted by hooks inside the models. Sampling is left out."""

import argparse
from collections import Counter
from pathlib import Path

from synthetic import options, shaped_trainer

from marlhf_lite.models.actor_critic import unwrap_peft
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.tables import markdown

ROLES = ("policy", "critic", "reference", "reward")
CASES = {"one step": {}, "whitened": {"whiten": True}, "4 epochs": {"num_ppo_epochs": 4}}


def count_passes(args: argparse.Namespace, folder: Path, case: str) -> dict[str, float]:
    """Rows that went through each model, in batches."""
    counts = Counter()
    sampling = []

    def sample(*given):
        sampling.append(True)
        rollout = generate(*given)
        sampling.clear()
        return rollout

    trainer, prompts = shaped_trainer(
        args, folder, "2M", 5, options(args, **CASES[case]), sampler=sample
    )
    for role in ROLES:
        backbone = unwrap_peft(getattr(trainer.models, role).model).model
        count_rows(backbone.norm, role, counts, sampling)
    trainer.update(prompts)
    return {key: rows / args.batch for key, rows in counts.items()}


def count_rows(module, role: str, counts: Counter, sampling: list) -> None:
    """Hooks on a backbone's last layer norm."""

    def forward(_, inputs, output) -> None:
        counts[f"{role} forward"] += 0 if sampling else len(output)

    def backward(_, grad_inputs, grad_outputs) -> None:
        counts[f"{role} backward"] += len(grad_outputs[0])

    module.register_forward_hook(forward)
    module.register_full_backward_hook(backward)


def passes_table(found: dict[str, dict[str, float]]) -> str:
    rows = []
    for case, counts in found.items():
        row = [case]
        for role in ROLES:
            forward = counts.get(f"{role} forward", 0)
            backward = counts.get(f"{role} backward", 0)
            row.append(f"{forward:g} + {backward:g}")
        rows.append(row)
    return markdown(["forward + backward", *ROLES], rows)
