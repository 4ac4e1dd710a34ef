"""RMSNorm and rotary embeddings with closed gradients compute what transformers' own modules and autograd do."""

import sys
from unittest import mock

import pytest
import torch
from conftest import nudge
from test_architectures import FAMILIES, save_family
from torch.autograd import gradcheck

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models import gradients
from marlhf_lite.models.loading import load_base

PLAIN = ("gemma", "llama3.2", "qwen2", "mistral")


@pytest.fixture
def load(tokenizer, tmp_path):
    """Loads a family as a run does, here with all weights to train."""
    return lambda name, **more: nudge(
        load_base(ModelConfig(model=save_family(name, tokenizer, tmp_path), **more)).requires_grad_(
            True
        ),
        1,
    )


def parts_of(model):
    """The module of its family, and the class of its norms."""
    return sys.modules[type(model).__module__], type(model.base_model.norm)


def outputs_and_gradients(model):
    model.zero_grad()
    logits = model(input_ids=torch.arange(5, 38).view(3, 11), use_cache=False).logits
    logits.sin().sum().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters())]


def turn(q, k, cos, sin):
    """The rotary embedding from its definition: each pair of numbers is turned by an angle."""

    def turned(x):
        first, second = x.tensor_split(2, -1)
        c, s = (part[:, None, :, : first.shape[-1]] for part in (cos, sin))
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    return turned(q), turned(k)


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_has_the_same_outputs_and_gradients(load, name):
    model = load(name)
    with mock.patch.object(gradients._RMSNorm, "apply", wraps=gradients._RMSNorm.apply) as called:
        found = outputs_and_gradients(model)
    assert called.call_count == 5  # two norms a layer, and the last
    modeling, norm = parts_of(model)
    plain = mock.patch.object(norm, "forward", norm.forward.__wrapped__)
    with plain, mock.patch.object(modeling, "apply_rotary_pos_emb", turn):
        wanted = outputs_and_gradients(model)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_other_families_stay_as_they_are(load, name):
    assert name in FAMILIES
    modeling, norm = parts_of(load(name))
    assert norm.forward.__module__ == modeling.apply_rotary_pos_emb.__module__ == modeling.__name__
    assert not hasattr(norm.forward, "__wrapped__")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_of_16_bits_stay_as_they_are(load, dtype):
    norm = load("gemma", dtype=dtype).base_model.norm
    x = torch.randn(2, 3, 32, dtype=norm.weight.dtype)
    assert torch.equal(norm(x), type(norm).forward.__wrapped__(norm, x))


def test_gradients_are_the_derivatives():
    torch.manual_seed(0)
    x, weight = (
        torch.randn(*size, dtype=torch.double, requires_grad=True) for size in ((2, 3, 6), (6,))
    )
    assert gradcheck(lambda x, w: gradients._RMSNorm.apply(x, w, 1e-3), (x, weight))
    q = torch.randn(2, 3, 4, 6, dtype=torch.double, requires_grad=True)
    angles = torch.randn(2, 1, 4, 3, dtype=torch.double).repeat(1, 1, 1, 2)
    assert gradcheck(lambda q: gradients._Rotation.apply(q, angles.cos(), angles.sin()), (q,))


def test_a_frozen_norm_gets_no_gradient():
    x, weight = torch.randn(2, 6, requires_grad=True), torch.ones(6)
    gradients._RMSNorm.apply(x, weight, 1e-6).sum().backward()
    assert weight.grad is None and x.grad.isfinite().all()
