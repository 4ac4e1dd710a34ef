"""What the method imports: the files that a reader of PPO reads, and no others; and names that have moved."""

import importlib
import json
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import marlhf_lite
from marlhf_lite.extras.programs import program_reward
from marlhf_lite.training.experience import Experience
from marlhf_lite.utils.moved import MOVED, MOVED_NAMES
from marlhf_lite.utils.user_code import import_user_code

PACKAGE = Path(marlhf_lite.__file__).parent

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
    rooms = ("parsing", "evaluation", "experiments", "plotting", "lab", "extras", "tasks.loading")
    outside = tuple(f"marlhf_lite.{room}" for room in rooms)
    assert not [name for name in ours if name.startswith(outside)]
    assert sum(ours.values()) <= 4100, sorted(ours.items(), key=lambda item: -item[1])


def test_macro_actions_need_torch_alone():
    _, packages = imported("marlhf_lite.macro")
    others = {"transformers", "accelerate", "peft", "trl", "datasets", "pandas", "yaml"}
    assert "torch" in packages and not packages & others


@pytest.mark.parametrize("old", MOVED)
def test_a_former_path_warns_and_is_the_same_module(old):
    path, today = f"marlhf_lite.{old}", f"marlhf_lite.{MOVED[old]}"
    assert not (PACKAGE / old.replace(".", "/")).exists() and not (PACKAGE / f"{old.replace('.', '/')}.py").exists()
    sys.modules.pop(path, None)
    with pytest.warns(DeprecationWarning, match=f"{path} is now {today}:"):
        former = importlib.import_module(path)
    assert former is sys.modules[path] is importlib.import_module(today)
    for name in getattr(former, "__path__", []) and [module.name for module in pkgutil.iter_modules(former.__path__)]:
        if name != "inside":  # the program of a sandbox, which runs when it is imported
            with pytest.warns(DeprecationWarning, match=f"{path}.{name} is now {today}.{name}:"):
                assert importlib.import_module(f"{path}.{name}") is importlib.import_module(f"{today}.{name}")


@pytest.mark.parametrize("old", MOVED_NAMES)
def test_a_former_name_warns_and_is_the_same_object(old):
    module, name = old.rsplit(".", 1)
    with pytest.warns(DeprecationWarning, match=f"{old} is now marlhf_lite.{MOVED_NAMES[old]}:"):
        former = getattr(importlib.import_module(f"marlhf_lite.{module}"), name)
    assert former is pkgutil.resolve_name(f"marlhf_lite.{MOVED_NAMES[old]}")


def test_records_with_former_paths_are_read():
    """A pickle, and a name as `--reward` and protocols have it."""
    with pytest.warns(DeprecationWarning, match="OldOutputs is now"):
        assert pickle.loads(b"cmarlhf_lite.training.outputs\nOldOutputs\n.") is Experience
    sys.modules.pop("marlhf_lite.tasks.programs", None)
    with pytest.warns(DeprecationWarning, match="tasks.programs is now"):
        reward = import_user_code("reward", "marlhf_lite.tasks.programs:program_reward", "")
    assert reward is program_reward
