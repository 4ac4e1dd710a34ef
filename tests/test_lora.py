"""LoRA layers whose adapter is added to the weight before the product, against PEFT's own forward pass."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from marlhf_lite.models.lora import use_merged_forward


@pytest.fixture
def pair():
    """`(PEFT's layer, the same one with the merged forward pass)`, with an adapter that is not 0."""
    return make_pair()


def make_pair(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40)).to(dtype)
    plain = get_peft_model(net, LoraConfig(r=4, lora_alpha=8, target_modules=["0"], **settings))
    for name, weight in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return plain, use_merged_forward(copy.deepcopy(plain))


def outputs_and_gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | gradients


def test_outputs_and_gradients_are_those_of_peft(pair):
    x = torch.randn(3, 7, 24)
    theirs, ours = (outputs_and_gradients(model, x) for model in pair)
    assert theirs.keys() == ours.keys() and len(ours) == 4  # output, input, A and B; none of the frozen weight
    for name, expected in theirs.items():  # float32 sums in another order: relative to the largest element
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}, {"dtype": torch.bfloat16}])
def test_other_layers_take_the_forward_pass_of_peft(settings):
    plain, ours = make_pair(**settings)
    x = torch.randn(3, 24, dtype=settings.get("dtype", torch.float32))
    results = []
    for model in (plain.train(), ours.train()):
        torch.manual_seed(1)
        results.append(outputs_and_gradients(model, x))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_switched_off_and_merged_adapters(pair):
    x = torch.randn(3, 24)
    plain, ours = pair
    with ours.disable_adapter(), plain.disable_adapter():
        assert torch.equal(ours(x), plain(x))
    expected = plain(x)
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
    assert type(ours.merge_and_unload()[0]) is nn.Linear
