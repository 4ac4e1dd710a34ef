"""What only makes a model faster is behind one switch, and changes no number."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import fails
from small_runs import build, timeless

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.fast.lora import MergedLoraLinear
from marlhf_lite.models.fast.switch import (
    LEVERS,
    RECORDS_OF_A_GPU,
    levers_of_choice,
    levers_of_model,
)
from marlhf_lite.models.loading import build_models, load_base, new_policy, new_reward_model

RECORDS = Path(__file__).parents[1] / "data" / "results" / "gpu"


def run(tiny, sft, rm, tokenizer, choice):
    models = build_models(load_base(replace(tiny, fast=choice)), sft, rm)
    return timeless(build(models, tokenizer, updates=3, temperature=1.0).train())


@pytest.mark.parametrize("choice", ["off", "lora", "last_layer"])
def test_a_run_has_the_same_numbers_with_and_without(tiny, sft, rm, tokenizer, choice):
    """Up to rounding: sums are in another order. Entropies and losses differ by 1e-5, a missing part by far more."""
    fast = run(tiny, sft, rm, tokenizer, "auto")
    plain = run(tiny, sft, rm, tokenizer, choice)
    assert len(fast) == len(plain) == 3
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, int | float):
                assert value == pytest.approx(theirs[name], rel=1e-3, abs=1e-4, nan_ok=True), name


def test_the_switch():
    assert levers_of_choice("auto", "cpu") == {"lora", "last_layer"}
    assert levers_of_choice("off", "cpu") == levers_of_choice("off", "cuda") == frozenset()
    assert levers_of_choice("graph, lora", "cuda") == {"graph", "lora"}
    line = "--fast lora,warp: no 'warp': give auto, off, or some of"
    fails(lambda: levers_of_choice("lora,warp", "cpu"), line)


def test_models_of_one_process_keep_the_levers_of_their_own_base(tiny, sft, rm):
    plain, fast = (load_base(replace(tiny, fast=choice)) for choice in ("off", "lora"))
    for base, levers in ((plain, frozenset()), (fast, frozenset({"lora"}))):
        roles = build_models(base, sft, rm)
        made = [role.model for role in (roles.policy, roles.reference, roles.reward, roles.critic)]
        made += [new_policy(base, tiny), new_reward_model(base, sft)]
        for model in made:
            assert levers_of_model(model.get_base_model()) == levers
            kinds = {type(module) for module in model.modules()}
            assert (MergedLoraLinear in kinds) == bool(levers)


def test_on_a_gpu_a_lever_is_a_default_only_by_a_record_of_equal_numbers():
    assert levers_of_choice("auto", "cuda") == frozenset(RECORDS_OF_A_GPU)
    assert set(RECORDS_OF_A_GPU) <= set(LEVERS) - {"fused"}
    for lever, name in RECORDS_OF_A_GPU.items():
        record = json.loads((RECORDS / name).read_text())
        assert record["equal"][lever] is True, f"{name} does not show equal numbers of {lever}"


def test_no_default_recomputes_activations_by_a_dry_run():
    """`--gradient_checkpointing auto` has not run on a card, so somebody must ask for it."""
    assert ModelConfig().gradient_checkpointing is False
    presets = Path(__file__).parents[1] / "marlhf_lite" / "config" / "presets"
    files = sorted(presets.rglob("*.yaml"))
    assert files
    for file in files:
        assert "gradient_checkpointing: auto" not in file.read_text(encoding="utf-8"), file
