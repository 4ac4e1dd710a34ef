"""Kernels, autocast and checkpointing on the card where there is one, else on the CPU; and the script of `make gpu`."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import fails, nudge
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from marlhf_lite.models import logprobs
from marlhf_lite.models.actor_critic import PolicyModel, checkpoint_activations
from marlhf_lite.models.fast import lora
from marlhf_lite.models.fast.decoding import CHECK_EVERY, decode, has_plain_cache
from marlhf_lite.models.fast.fused import use_fused_kernels
from marlhf_lite.models.logprobs import from_hidden, from_logits
from marlhf_lite.training.rollout import Sampling, nonfinite_probabilities_refused
from marlhf_lite.utils.errors import InputError

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
SMALL = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = torch.randint(3, 300, (4, 24), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(24) >= torch.tensor([0, 3, 0, 7])[:, None]).long()  # padded on the left
LENGTH = 9
RESULTS = Path(__file__).parents[1] / "data" / "results" / "gpu"


def relative(ours, theirs):
    """The largest difference, relative to the largest element."""
    return float(
        (ours.double().cpu() - theirs.double().cpu()).abs().max()
        / theirs.double().abs().max().cpu()
    )


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
    logits = expected(
        input_ids=TOKENS, attention_mask=MASK, position_ids=positions, use_cache=False
    ).logits
    wanted = (
        (logits[:, -LENGTH - 1 : -1] / 0.8)
        .log_softmax(-1)
        .gather(-1, TOKENS[:, -LENGTH:, None])
        .squeeze(-1)
    )
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


@pytest.fixture
def gpu_script(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the script sets it
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("gpu", folder / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("way", "share"), [("lora", 0.129), ("full", 0.265)])
def test_make_gpu_counts_what_a_stored_update_had_to_compute(gpu_script, way, share):
    """Of an H100's 989 TFLOP/s, Gemma-2B's architecture, 64 texts of 256 + 128 tokens."""
    from gpu_updates import training_flops

    record = json.loads((RESULTS / "nvidia_h100_80gb_hbm3.json").read_text(encoding="utf-8"))
    run = next(
        run for run in record["parts"]["update"]["runs"] if (run["way"], run["n"]) == (way, 1)
    )
    head, asked, phases = 256_000 * 2048, record["arguments"], run["seconds_by_phase"]
    responses = asked["batch"] * asked["response"]
    tokens = asked["batch"] * asked["prompt"] + responses
    work = training_flops(run["parameters"] - head, head, tokens, responses, way)
    assert work / (phases["scoring"] + phases["training"]) / 989e12 == pytest.approx(
        share, abs=0.001
    )


# A process that has used the card cannot begin anew on the CPU; on the card `make gpu` itself measures.
without_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


@without_card
def test_make_gpu_measures_row_by_row_and_goes_on(gpu_script, tmp_path, capsys):
    log, out = tmp_path / "new" / "gpu.jsonl", tmp_path / "gpu.json"
    log.parent.mkdir()
    broken = "3 lora: + no checkpointing"
    killed = (
        {"name": "3 lora: + 16-bit adapters", "begun": True},
        {"name": broken, "error": "it was killed"},
    )
    log.write_text("".join(json.dumps(line) + "\n" for line in killed))
    given = ["--device", "cpu", "--tiny", "--rows", "2-3", "--log", str(log), "--out", str(out)]
    assert gpu_script.main(given) == 1  # for the error, which stays until its line is deleted
    found = json.loads(out.read_text())["measured"]
    assert found.pop(broken)["error"] == "it was killed"
    assert found.pop("3 lora: + a graph samples")["left_out"] == "on a GPU alone"
    for run in found.values():
        assert run["finite"] and run["last_update"]["policy_grad_norm"] > 0 and run["mfu"] is None
        assert run["tflop"] > 0 and run["generated_tokens_per_second"] > 0 and run["peak_gib"] > 0
    old, *some, new = found.values()
    assert old["checkpointing"] and old["rows_a_pass"] == 2 and len(old["profile"]["top"]) == 25
    assert (
        all(run["checkpointing"] for run in some)
        and not new["checkpointing"]
        and new["rows_a_pass"] == 4
    )
    lines = log.read_text()
    assert gpu_script.main(given) == 1 and log.read_text() == lines


@without_card
def test_the_record_says_which_ways_give_equal_numbers_and_which_defaults_follow(
    gpu_script, tmp_path, capsys, monkeypatch
):
    from gpu_equal import WAYS, equal_numbers
    from gpu_updates import Bench

    log, out = tmp_path / "gpu.jsonl", tmp_path / "gpu.json"
    given = ["--device", "cpu", "--tiny", "--log", str(log), "--out", str(out)]
    args = gpu_script.arguments([*given, "--child", "inf"])
    bench = Bench(args)
    bench.measure("1 equal: last_layer", equal_numbers, "last_layer")
    bench.measure("1 equal: checkpointing", equal_numbers, "checkpointing")
    plain = lora.WAYS[torch.bfloat16]

    class Doubled(plain):
        """The adapters of 16 bits with a factor that is wrong."""

        @classmethod
        def apply(cls, *arguments):
            return plain.apply(*arguments[:-1], 2 * arguments[-1])

    monkeypatch.setitem(lora.WAYS, torch.bfloat16, Doubled)
    bench.measure("1 equal: lora", equal_numbers, "lora")
    monkeypatch.undo()
    for name, seconds in zip(WAYS["checkpointing"][1:], (3.0, 2.0), strict=True):
        with log.open("a") as file:
            file.write(json.dumps({"name": name, "seconds_per_update": seconds}) + "\n")
    gpu_script.join(args)
    assert json.loads(out.read_text())["equal"] == {
        "lora": False,
        "checkpointing": True,
        "last_layer": True,
    }
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| --")]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[-5:]] == [
        ["--fast lora", "differ", "", "no"],
        ["--gradient_checkpointing auto", "equal", "3.00 → 2.00", "yes"],
        ["--fast graph", "not compared", "", "no"],
        ["--fast last_layer", "equal", "", "yes, if it is faster"],
        ["--fast fused", "not compared", "", "no: it needs a package"],
    ]


@without_card
def test_make_gpu_without_a_card_says_so_in_one_line(gpu_script, capsys):
    assert gpu_script.main([]) == 1
    assert (
        capsys.readouterr().out == "make gpu: no CUDA device here, so there is nothing to measure\n"
    )


# -- fused kernels ----------------------------------------------------------------------------------------------------


def test_fused_kernels_are_asked_for_in_a_line(model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fails(lambda: use_fused_kernels(model), "--fast fused: ", "pip install -e '.[gpu]'")


@pytest.mark.skipif(DEVICE == "cpu", reason="triton's kernels need a GPU")
def test_fused_kernels_give_what_the_layers_give():
    """In float32: the states of a causal LM and of a classifier, and all gradients."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    torch.manual_seed(0)
    kinds = (GemmaForCausalLM, GemmaForSequenceClassification)
    # made before the classes are patched
    for plain in [nudge(kind(CONFIG).eval(), 1).to(DEVICE) for kind in kinds]:
        fused, found = use_fused_kernels(copy.deepcopy(plain)), []
        for one in (plain, fused):
            states = one.model(TOKENS.to(DEVICE), attention_mask=MASK.to(DEVICE)).last_hidden_state
            states[MASK.bool().to(DEVICE)].sin().sum().backward()
            gradients = torch.cat([p.grad.flatten() for p in one.model.parameters()])
            found.append((states.detach()[MASK.bool().to(DEVICE)], gradients))
        assert all(relative(ours, theirs) < 1e-4 for ours, theirs in zip(*found, strict=True))
        assert "Liger" in str(fused.model.norm) and "Liger" not in str(plain.model.norm)


# -- sampling ---------------------------------------------------------------------------------------------------------

SAMPLINGS = [
    Sampling(40, temperature=0.0),
    Sampling(40, temperature=1.3, top_k=0),
    Sampling(40, temperature=0.7, top_k=20, top_p=0.9),
    Sampling(5, temperature=1.0, top_k=50),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("ends", [[7], [*range(3, 60)]], ids=["few", "many"])
def test_steps_in_fixed_tensors_draw_the_tokens_of_generate(model, sampling, ends):
    """On a card by a graph. Rows end apart, and all of them where many tokens are ends."""
    model, ids, mask = model.to(DEVICE), TOKENS.to(DEVICE), MASK.to(DEVICE)
    assert has_plain_cache(model) and sampling.max_new_tokens != CHECK_EVERY
    torch.manual_seed(1)
    found = decode(model, ids, mask, sampling, ends, 0)
    torch.manual_seed(1)
    given = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": ends}
    right = model.generate(**given, **sampling.arguments())
    assert (
        torch.equal(found[:, : right.shape[1]], right) and (found[:, right.shape[1] :] == 0).all()
    )
    assert found.shape[1] == ids.shape[1] + sampling.max_new_tokens


def test_a_probability_that_is_not_finite_ends_in_a_line(model):
    model.model.norm.weight.data.fill_(float("nan"))
    given = (model.to(DEVICE), TOKENS.to(DEVICE), MASK.to(DEVICE), SAMPLINGS[1], [7], 0)
    with (
        pytest.raises(InputError, match="the policy's probabilities are not finite"),
        nonfinite_probabilities_refused(),
    ):
        decode(*given)


def test_what_a_graph_cannot_replay_is_left_to_generate(model):
    assert has_plain_cache(model)
    window = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    assert not has_plain_cache(window)
    assert has_plain_cache(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)))
    assert not has_plain_cache(
        GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    assert not has_plain_cache(
        MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None, rope_parameters=dynamic))
    )
    model.set_attn_implementation("eager")
    assert not has_plain_cache(model)
