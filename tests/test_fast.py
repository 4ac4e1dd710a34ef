"""What only makes a model faster is behind one switch, and changes no number."""

import json
from pathlib import Path

import pytest
from conftest import fails
from small_runs import build, timeless

from marlhf_lite.models.fast import switch
from marlhf_lite.models.fast.switch import LEVERS, RECORDS_OF_A_GPU, is_on, use_fast
from marlhf_lite.models.loading import build_models

RECORDS = Path(__file__).parents[1] / "data" / "results" / "gpu"


@pytest.fixture(autouse=True)
def switched_back(monkeypatch):
    monkeypatch.setattr(switch, "_choice", "auto")


def run(base, sft, rm, tokenizer, choice):
    use_fast(choice)
    trainer = build(build_models(base, sft, rm), tokenizer, updates=3, temperature=1.0)
    return timeless(trainer.train())


@pytest.mark.parametrize("choice", ["off", "lora", "last_layer"])
def test_a_run_has_the_same_numbers_with_and_without(base, sft, rm, tokenizer, choice):
    """Up to rounding: sums are in another order. Entropies and losses differ by 1e-5, a missing part by far more."""
    fast = run(base, sft, rm, tokenizer, "auto")
    plain = run(base, sft, rm, tokenizer, choice)
    assert len(fast) == len(plain) == 3
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, int | float):
                assert value == pytest.approx(theirs[name], rel=1e-3, abs=1e-4, nan_ok=True), name


def test_the_switch():
    assert is_on("lora", "cpu") and is_on("last_layer", "cpu")
    use_fast("off")
    assert not any(is_on(lever, device) for lever in LEVERS for device in ("cpu", "cuda"))
    use_fast("graph, lora")
    assert is_on("graph", "cuda") and is_on("lora", "cuda") and not is_on("last_layer", "cpu")
    fails(lambda: use_fast("lora,warp"), "--fast lora,warp: no 'warp': give auto, off, or some of")
    assert is_on("graph", "cuda")  # the choice before stays


def test_on_a_gpu_a_lever_is_a_default_only_by_a_record_of_equal_numbers():
    use_fast("auto")
    for lever in LEVERS:
        assert is_on(lever, "cuda") == (lever in RECORDS_OF_A_GPU)
    for lever, name in RECORDS_OF_A_GPU.items():
        record = json.loads((RECORDS / name).read_text())
        assert record["equal"][lever] is True, f"{name} does not show equal numbers of {lever}"
