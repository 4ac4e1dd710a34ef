"""What the method imports: the files that a reader of PPO reads, and no others; and names that have moved."""

import importlib
import json
import subprocess
import sys

import pytest

from marlhf_lite.training.experience import Experience

REPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
files = {name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}
ours = {name: file for name, file in files.items() if name.startswith("marlhf_lite")}
ours = {name: sum(1 for _ in open(file, encoding="utf-8")) for name, file in ours.items()}
print(json.dumps([ours, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def imported(module: str) -> tuple[dict[str, int], set[str]]:
    """What importing a module in a new process brings: our modules with their lines, and all top-level packages."""
    command = [sys.executable, "-c", REPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    ours, packages = json.loads(done.stdout.splitlines()[-1])
    return ours, set(packages)


def test_the_method_is_read_without_what_stands_around_it():
    """Data sets, judges, sandboxes, parsers, vLLM and TRL's trainers are loaded by the options that ask for them."""
    ours, packages = imported("marlhf_lite.training.ppo")
    assert not packages & {"trl", "datasets", "pandas", "matplotlib", "openai", "pydantic_monty", "stanza"}
    rooms = ("parsing", "evaluation", "experiments", "plotting", "lab", "extras.programs", "tasks.loading")
    outside = tuple(f"marlhf_lite.{room}" for room in rooms)
    assert not [name for name in ours if name.startswith(outside)]
    assert sum(ours.values()) <= 3950, sorted(ours.items(), key=lambda item: -item[1])


def test_macro_actions_need_torch_alone():
    _, packages = imported("marlhf_lite.macro")
    others = {"transformers", "accelerate", "peft", "trl", "datasets", "pandas", "yaml"}
    assert "torch" in packages and not packages & others


def test_a_former_module_warns_and_has_the_same_classes():
    with pytest.warns(DeprecationWarning, match="training.experience"):
        outputs = importlib.import_module("marlhf_lite.training.outputs")
    assert outputs.OldOutputs is Experience
