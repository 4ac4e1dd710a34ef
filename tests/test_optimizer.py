"""AdamW's groups, and the learning-rate schedule against transformers' own."""

import pytest
import torch
from transformers import get_scheduler

from marlhf_lite.config.options import RolloutConfig
from marlhf_lite.training.optimizer import learning_rate_share, make_optimizer


def shares(total, **options):
    config = RolloutConfig(**options)
    return [learning_rate_share(config, update, total) for update in range(total)]


def test_warm_up_then_constant():
    assert shares(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert shares(4, warmup_updates=0) == [1.0] * 4
    assert shares(10, warmup_updates=0.4) == shares(10, warmup_updates=4)
    assert shares(3, warmup_updates=200) == [1 / 200, 2 / 200, 3 / 200]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [1, 7, 20])
def test_decay_is_that_of_transformers(kind, warmup):
    """Theirs begins with a step at rate 0, which would be lost: ours is one step ahead."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=41)
    rates = []
    for _ in range(41):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates[0] == 0.0
    assert shares(40, warmup_updates=warmup, rl_lr_scheduler_type=kind) == pytest.approx(rates[1:], abs=1e-12)


def test_weight_decay_is_for_matrices():
    """One step with a zero gradient: AdamW shrinks by rate times decay what decays, and nothing else."""
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    config = RolloutConfig(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95)
    optimizer = make_optimizer({"policy": [matrix, vector]}, {"policy": 0.5}, config)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))
    assert {group["name"] for group in optimizer.param_groups} == {"policy"}
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
    assert len(make_optimizer({"policy": [matrix, vector]}, {"policy": 0.5}, RolloutConfig()).param_groups) == 1
