"""Kernels, autocast and checkpointing on the card where there is one, else on the CPU; and the script of `make gpu`."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from conftest import nudge
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM

from marlhf_lite.models import logprobs
from marlhf_lite.models.actor_critic import PolicyModel, checkpoint_activations
from marlhf_lite.models.logprobs import from_hidden, from_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = GemmaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    initializer_range=0.3,
)
TOKENS = torch.randint(3, 300, (4, 24), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(24) >= torch.tensor([0, 3, 0, 7])[:, None]).long()  # padded on the left
LENGTH = 9


def relative(ours, theirs):
    """The largest difference, relative to the largest element."""
    return float((ours.double().cpu() - theirs.double().cpu()).abs().max() / theirs.double().abs().max().cpu())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nudge(GemmaForCausalLM(CONFIG).eval(), 1)


def outputs(model, autocast=False):
    """Log-probabilities of the response, and the gradient of every weight, on the device."""
    model, tokens, mask = model.to(DEVICE), TOKENS.to(DEVICE), MASK.to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        found, _ = PolicyModel(model)(tokens, mask, LENGTH, 0.8)
    found.sum().backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_tiles_give_what_full_logits_give(monkeypatch, dtype, softcap):
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 0)
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(64, 3000, bias=False)
    head.weight.data = torch.randn(3000, 64, generator=generator) / 4
    hidden = torch.randn(40, 64, generator=generator)
    targets = torch.randint(3000, (40,), generator=generator).to(DEVICE)
    head, hidden = head.to(DEVICE, dtype), hidden.to(DEVICE, dtype).requires_grad_()
    logp, entropy = from_hidden(hidden, head, targets, 0.7, softcap)
    logp.sum().backward()
    reference = hidden.detach().double().requires_grad_()
    logits = reference @ head.weight.detach().double().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, targets[:, None]).squeeze(-1)
    expected.sum().backward()
    near = 1e-4 if dtype == torch.float32 else 2e-2
    assert relative(logp, expected.detach()) < near and relative(hidden.grad, reference.grad) < near
    assert relative(entropy, from_logits(logits.detach(), targets, 0.7)[1]) < near


def test_the_device_gives_what_the_cpu_gives(model, monkeypatch):
    expected = copy.deepcopy(model).double()
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    logits = expected(input_ids=TOKENS, attention_mask=MASK, position_ids=positions, use_cache=False).logits
    wanted = (logits[:, -LENGTH - 1 : -1] / 0.8).log_softmax(-1).gather(-1, TOKENS[:, -LENGTH:, None]).squeeze(-1)
    found, _ = outputs(model)
    assert relative(found, wanted.detach()) < 1e-3


def test_autocast_stays_near_float32(model):
    exact, gradient = outputs(copy.deepcopy(model))
    found, rounded = outputs(copy.deepcopy(model), autocast=True)
    assert found.dtype == torch.float32 and relative(found, exact) < 0.1
    cosine = torch.nn.functional.cosine_similarity(gradient, rounded, 0)
    assert cosine > 0.95


def test_checkpointing_changes_no_gradient(model):
    plain, gradient = outputs(copy.deepcopy(model).train())
    again = copy.deepcopy(model).train()
    checkpoint_activations(again)
    found, recomputed = outputs(again)
    assert relative(found, plain) < 1e-5 and relative(recomputed, gradient) < 1e-4


# A process that has used the card cannot begin anew on the CPU; on the card `make gpu` itself measures.
without_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


@pytest.fixture
def gpu_script(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the script sets it
    spec = importlib.util.spec_from_file_location("gpu", Path(__file__).parents[1] / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@without_card
def test_make_gpu_measures_ppo_and_ma_ppo(gpu_script, tmp_path, capsys):
    out = tmp_path / "new" / "cpu.json"
    assert (
        gpu_script.main(
            ["--device", "cpu", "--tiny", "--parts", "update,vllm,four_bits", "--vllm", "", "--out", str(out)]
        )
        == 0
    )
    record = json.loads(out.read_text())
    assert record["device"]["name"] == "CPU" and "torch" in record["environment"]
    runs = record["parts"]["update"]["runs"]
    assert [(run["way"], run["n"]) for run in runs] == [("lora", 1), ("lora", 5), ("full", 1), ("full", 5)]
    for run in runs:
        assert run["kl_at_start"] == 0 and run["response_tokens_per_second"] > 0 and run["policy_grad_norm"] > 0
        assert run["seconds_by_phase"].keys() >= {"generation", "scoring", "training"}
        assert run["peak_gib"] > 0 and run["estimated_peak_gib"] > 0
    assert all("left_out" in record["parts"][part] for part in ("vllm", "four_bits"))


@without_card
def test_make_gpu_without_a_card_says_so_in_one_line(gpu_script, capsys):
    assert gpu_script.main([]) == 0
    assert capsys.readouterr().out == "make gpu: no CUDA device here, so there is nothing to measure\n"
