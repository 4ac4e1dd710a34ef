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
    """How many times each model ran over the batch in one update, forward and backward.

    A pass over a part of the batch counts as that part.
    """
    counts = Counter()
    sampling = []  # not empty while the sampler runs; a list, so that the hooks see it change

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
    """Count in `counts` the rows that pass through a role's model, except while `sampling` holds something.

    `module` is the last layer norm of the model, which runs once in each pass; it gets hooks.
    """

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
