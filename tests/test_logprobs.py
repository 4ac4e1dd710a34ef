"""Log-probabilities from hidden states, in tiles and at once, against float64 loops; the role that uses them."""

import math
from contextlib import contextmanager

import pytest
import torch
from conftest import nudge
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from marlhf_lite.models import logprobs
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.logprobs import from_hidden, has_plain_head, is_plain_linear

CAPS = [None, 2.0, 5.0]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
TOKENS = torch.tensor([[0, 0, 9, 4, 7, 30, 31, 5], [3, 17, 40, 8, 60, 33, 2, 1]])
MASK = (TOKENS != 0).long()
LENGTH = 5


@contextmanager
def tiles(size):
    """Everything in tiles of so many logits; None: everything at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "MAX_LOGITS", -1 if size else 2**60)
        patch.setattr(logprobs, "_TILE", {"cpu": size})
        yield


def make(n=6, vocabulary=13, width=5, bias=True, seed=0, dtype=torch.float32):
    """Hidden states, a head with logits of spread 2, and targets."""
    g = torch.Generator().manual_seed(seed)
    head = nn.Linear(width, vocabulary, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 2 * width**-0.5)
    hidden = torch.randn(n, width, generator=g).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocabulary, (n,), generator=g)


def loop(hidden, head, targets, temperature, softcap, weights):
    """One token at a time in float64, gradients of Σ weights·logp by hand: d logp / dz_j = 1[j = target] - p_j."""
    h, W = hidden.detach().double(), head.weight.detach().double()
    b = (
        head.bias.detach().double()
        if head.bias is not None
        else torch.zeros(len(W), dtype=torch.float64)
    )
    out, spread, dh, dW, db = [], [], torch.zeros_like(h), torch.zeros_like(W), torch.zeros_like(b)
    for i, target in enumerate(targets.tolist()):
        z = [float(W[v] @ h[i]) + float(b[v]) for v in range(len(W))]
        slope = [1.0] * len(z) if softcap is None else [1 - math.tanh(x / softcap) ** 2 for x in z]
        y = z if softcap is None else [softcap * math.tanh(x / softcap) for x in z]
        total = math.log(math.fsum(math.exp(x / temperature) for x in y))
        logp = [x / temperature - total for x in y]
        out.append(logp[target])
        spread.append(-math.fsum(math.exp(x) * x for x in logp))
        for v in range(len(W)):
            g = ((v == target) - math.exp(logp[v])) * slope[v] / temperature * float(weights[i])
            dh[i] += g * W[v]
            dW[v] += g * h[i]
            db[v] += g
    return torch.tensor(out), torch.tensor(spread), dh, dW, db


def run(hidden, head, targets, temperature, softcap, weights):
    """The same from `from_hidden`."""
    hidden = hidden.detach().clone().requires_grad_()
    head.zero_grad()
    logp, entropy = from_hidden(hidden, head, targets, temperature, softcap)
    (logp * weights).sum().backward()
    return (
        logp,
        entropy,
        hidden.grad,
        head.weight.grad,
        None if head.bias is None else head.bias.grad,
    )


def assert_near(ours, theirs, size=1e-5):
    """Values and gradients, relative to the largest of each tensor; pairs with None are passed over."""
    for a, b in zip(ours, theirs):
        if a is not None:
            allowed = size * max(float(b.detach().abs().max()), 1)
            torch.testing.assert_close(
                a.detach().double(), b.detach().double(), rtol=0, atol=allowed
            )


# -- the function -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    width=st.integers(1, 7),
    columns=st.one_of(st.none(), st.integers(1, 50)),
    temperature=st.floats(0.2, 3.0),
    softcap=st.sampled_from(CAPS),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_a_loop(
    n, vocabulary, width, columns, temperature, softcap, bias, seed
):
    """Any shape, in tiles of so many columns of the vocabulary or (None) at once."""
    hidden, head, targets = make(n, vocabulary, width, bias, seed)
    weights = torch.linspace(-1, 1, n)
    with tiles(columns and n * columns):
        ours = run(hidden, head, targets, temperature, softcap, weights)
    assert all(x.dtype == torch.float32 for x in ours[:3])
    assert_near(ours, loop(hidden, head, targets, temperature, softcap, weights), 2e-5)


# -- memory, by the tensors that come into being ----------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The size of the largest tensor made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        self.largest = max(
            [self.largest, *(x.numel() for x in made if isinstance(x, torch.Tensor))]
        )
        return out


def watch(n, vocabulary, frozen=True):
    hidden, head, targets = make(n, vocabulary, 4, bias=False)
    head.requires_grad_(not frozen)
    with Watch() as seen:
        from_hidden(hidden, head, targets)[0].sum().backward()
    return seen


def test_no_tensor_grows_with_tokens_times_vocabulary():
    with tiles(2**12):
        for n, vocabulary in ((64, 1000), (128, 1000), (64, 2000), (256, 2000)):
            for frozen in (True, False):
                # a tile, the head's gradient, the hidden states' gradient
                allowed = max(2**12, 4 * vocabulary, 4 * n)
                assert watch(n, vocabulary, frozen).largest <= allowed < n * vocabulary


# -- the form of a head -----------------------------------------------------------------------------------------------


def build(cls, config, **more):
    torch.manual_seed(0)
    return cls(config(**SMALL | more)).eval()


MODELS = {  # and whether the library may make their logits from the head's weight
    "gemma2": (lambda: build(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=4.0), True),
    "no cap": (lambda: build(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=None), True),
    "mixtral": (lambda: build(MixtralForCausalLM, MixtralConfig, num_local_experts=2), True),
    "gpt2": (lambda: build(GPT2LMHeadModel, GPT2Config, n_layer=1), True),
    "granite": (lambda: build(GraniteForCausalLM, GraniteConfig, logits_scaling=8.0), False),
    "cohere": (lambda: build(CohereForCausalLM, CohereConfig, logit_scale=0.3), False),
    "opt": (
        lambda: build(OPTForCausalLM, OPTConfig, ffn_dim=48, word_embed_proj_dim=16, dropout=0.0),
        False,
    ),
}


def plain(model, temperature=1.0, length=LENGTH):
    """Log-probabilities and entropy from the model's own logits, in float64 from there."""
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    logits = model(
        input_ids=TOKENS, attention_mask=MASK, position_ids=positions, use_cache=False
    ).logits
    log_p = (logits[:, -length - 1 : -1].double() / temperature).log_softmax(-1)
    return log_p.gather(-1, TOKENS[:, -length:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [None, 64])
def test_log_probabilities_of_every_family(name, size):
    make_model, is_plain = MODELS[name]
    model = make_model()
    assert has_plain_head(model) == is_plain
    with tiles(size), torch.no_grad():
        assert_near(PolicyModel(model)(TOKENS, MASK, LENGTH, 0.7), plain(model, 0.7))


def test_only_a_plain_linear_head_is_read():
    assert (
        is_plain_linear(nn.Linear(2, 3))
        and not is_plain_linear(None)
        and not is_plain_linear(nn.Sequential(nn.Linear(2, 3)))
    )
    for change in (
        lambda head: head.register_forward_hook(lambda *_: None),
        lambda head: head.register_forward_pre_hook(lambda *_: None),
        lambda head: setattr(head, "forward", lambda x: x),
        lambda head: nn.utils.parametrizations.weight_norm(head),
    ):
        head = nn.Linear(2, 3)
        change(head)
        assert not is_plain_linear(head)


@pytest.mark.parametrize(
    "config",
    [LoraConfig(target_modules=["q_proj", "lm_head"]), LoraConfig(modules_to_save=["lm_head"])],
)
def test_a_head_with_an_adapter_is_called_with_it(config):
    model = nudge(
        get_peft_model(build(Gemma2ForCausalLM, Gemma2Config, tie_word_embeddings=False), config), 1
    )
    role = PolicyModel(model)
    with tiles(64):
        ours, expected = role(TOKENS, MASK, LENGTH), plain(model)
    assert_near(ours, expected)
    ours[0].sum().backward()
    changed = [p for name, p in model.named_parameters() if "lm_head" in name and p.requires_grad]
    assert changed and all(p.grad is not None and p.grad.abs().sum() > 0 for p in changed)


# -- the role ---------------------------------------------------------------------------------------------------------


def gradients(role, size, temperature=0.8):
    """Of every trainable parameter, by name."""
    role.zero_grad()
    with tiles(size):
        logp, _ = role(TOKENS, MASK, LENGTH, temperature)
    (logp * torch.linspace(-1, 1, LENGTH)).sum().backward()
    return {k: p.grad.clone() for k, p in role.named_parameters() if p.requires_grad}


def by_model(model, temperature=0.8):
    """The same by the model's own logits."""
    model.zero_grad()
    (plain(model, temperature)[0] * torch.linspace(-1, 1, LENGTH)).sum().backward()
    return {f"model.{k}": p.grad.clone() for k, p in model.named_parameters() if p.requires_grad}


def whole():
    """Full fine-tuning: embeddings and head are one weight, with gradients from both."""
    return build(
        Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=4.0, attn_implementation="eager"
    )


def adapted():
    return nudge(get_peft_model(whole(), LoraConfig(r=2, target_modules="all-linear")), 1)


@pytest.mark.parametrize("make_model", [whole, adapted])
@pytest.mark.parametrize("size", [None, 64])
def test_gradients_of_the_role_are_the_model_s(make_model, size):
    model = make_model()
    ours, expected = gradients(PolicyModel(model), size), by_model(model)
    assert ours.keys() == expected.keys() and ours
    for name, gradient in expected.items():
        torch.testing.assert_close(
            ours[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name
        )
    assert any(g.abs().max() > 1e-3 for g in expected.values())
    tied = [name for name in ours if "embed_tokens" in name]
    assert len(tied) == (make_model is whole) and not any("lm_head" in name for name in ours)
