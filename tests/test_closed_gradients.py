"""RMSNorm and rotary embeddings with closed gradients compute what transformers' own modules and autograd do."""

import importlib
from unittest import mock

import pytest
import torch
import transformers
from torch.autograd import gradcheck

from marlhf_lite.models import gradients
from marlhf_lite.models.gradients import use_closed_gradients
from marlhf_lite.models.last_layer import PLAIN_LAYERS

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_model(family):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SIZES))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight)
    return model


def outputs_and_gradients(model, ids):
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters())]


def turn(q, k, cos, sin):
    """The rotary embedding from its definition: each pair of numbers is turned by an angle."""

    def turned(x):
        first, second = x.tensor_split(2, -1)
        c, s = (part[:, None, :, : first.shape[-1]] for part in (cos, sin))
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    return turned(q), turned(k)


@pytest.mark.parametrize("family", sorted(PLAIN_LAYERS))
def test_a_model_has_the_same_outputs_and_gradients(family):
    model, ids = make_model(family), torch.randint(40, (3, 11))
    modeling, norm = importlib.import_module(type(model).__module__), type(model.model.norm)
    plain = getattr(norm.forward, "__wrapped__", norm.forward)
    with mock.patch.object(norm, "forward", plain), mock.patch.object(modeling, "apply_rotary_pos_emb", turn):
        wanted = outputs_and_gradients(model, ids)
    use_closed_gradients(model)
    with mock.patch.object(gradients._RMSNorm, "apply", wraps=gradients._RMSNorm.apply) as called:
        found = outputs_and_gradients(model, ids)
    assert called.call_count == 5  # two norms a layer, and the last
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bits_stay_as_they_are(dtype):
    model = make_model("gemma").to(dtype)
    norm, x = model.model.norm, torch.randn(2, 3, 32, dtype=dtype)
    use_closed_gradients(model)
    assert torch.equal(norm(x), type(norm).forward.__wrapped__(norm, x))


def test_gradients_are_the_derivatives():
    torch.manual_seed(0)
    x, weight = (torch.randn(*size, dtype=torch.double, requires_grad=True) for size in ((2, 3, 6), (6,)))
    assert gradcheck(lambda x, w: gradients._RMSNorm.apply(x, w, 1e-3), (x, weight))
    q = torch.randn(2, 3, 4, 6, dtype=torch.double, requires_grad=True)
    angles = torch.randn(2, 1, 4, 3, dtype=torch.double).repeat(1, 1, 1, 2)
    assert gradcheck(lambda q: gradients._Rotation.apply(q, angles.cos(), angles.sin()), (q,))


def test_a_frozen_norm_gets_no_gradient():
    x, weight = torch.randn(2, 6, requires_grad=True), torch.ones(6)
    gradients._RMSNorm.apply(x, weight, 1e-6).sum().backward()
    assert weight.grad is None and x.grad.isfinite().all()
