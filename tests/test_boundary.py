"""What the method imports: the files that a reader of PPO reads, and no others; and what the library never imports."""

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hygiene.folding import measure

import marlhf_lab
import marlhf_lite

PACKAGE = Path(marlhf_lite.__file__).parent
ROOT = Path(__file__).resolve().parents[1]

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
    """Data sets, judges, sandboxes, parsers and TRL's trainers are loaded by the options that ask for them."""
    ours, packages = imported("marlhf_lite.training.ppo")
    assert not packages & {
        "trl",
        "datasets",
        "pandas",
        "matplotlib",
        "openai",
        "pydantic_monty",
        "stanza",
    }
    # Also what its functions import when they run.
    read, todo = {}, ["training.ppo"]
    while todo:
        if (module := todo.pop()) not in read:
            read[module] = measure(module_files()[module].read_text(encoding="utf-8"))["nodes"]
            todo += [target for source, target, _ in imports(for_types=False) if source == module]
    assert {name.removeprefix("marlhf_lite.") for name in ours} <= {"marlhf_lite"} | parents(read)
    outside = ("parsing", "evaluation", "experiments", "plotting", "extras", "tasks.loading")
    assert not [name for name in read if name.startswith(outside)]
    assert sum(read.values()) <= 42_000, sorted(read.items(), key=lambda item: -item[1])


def test_macro_actions_need_torch_alone():
    _, packages = imported("marlhf_lite.macro")
    others = {"transformers", "accelerate", "peft", "trl", "datasets", "pandas", "yaml"}
    assert "torch" in packages and not packages & others


def test_rules_are_named_without_their_parsers():
    ours, packages = imported("marlhf_lite.experiments.named_rules")
    assert not packages & {"nltk", "transformers", "stanza", "tree_sitter"}
    assert not [
        name for name in ours if name.startswith(("marlhf_lite.parsing", "marlhf_lite.extras"))
    ]


@functools.cache
def module_files(package: Path = PACKAGE) -> dict[str, Path]:
    """The files of a package by module."""
    files = {
        ".".join(file.relative_to(package).with_suffix("").parts): file
        for file in package.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def parents(modules: Iterable[str]) -> set[str]:
    """The modules and the packages in which they lie."""
    parts = [module.split(".") for module in modules]
    return {".".join(names[:end]) for names in parts for end in range(1, len(names) + 1)}


@functools.cache
def imports(for_types: bool = True, package: Path = PACKAGE) -> list[tuple[str, str, bool]]:
    """`(module, what it imports of its package, whether in a function)`, from the files; `for_types` also for types."""
    modules, found, prefix = module_files(package), [], f"{package.name}."

    def read(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.If)
                and ast.unparse(child.test) == "TYPE_CHECKING"
                and not for_types
            ):
                continue
            if isinstance(child, ast.Import):
                yield from ((name.name, inside) for name in child.names)
            if isinstance(child, ast.ImportFrom):
                yield from ((f"{child.module}.{name.name}", inside) for name in child.names)
            yield from read(child, inside or isinstance(child, ast.FunctionDef | ast.Lambda))

    for module, file in modules.items():
        for path, inside in read(ast.parse(file.read_text(encoding="utf-8")), False):
            target = path.removeprefix(prefix)
            while target and target not in modules:  # a name in a module
                target = target.rpartition(".")[0]
            if target and path.startswith(prefix):
                found.append((module, target, inside))
    return found


# The map of CONTRIBUTING.md: a room imports only from rooms before it. (`extras` is loaded only if an option asks.)
ROOMS = (
    "utils",
    "config",
    "tasks",
    "macro",
    "parsing",
    "models",
    "training",
    "evaluation",
    "plotting",
    "experiments",
    "cli",
)


def test_a_room_imports_only_from_rooms_before_it():
    backwards = []
    for module, target, _ in imports(for_types=False):
        room, other = module.partition(".")[0], target.partition(".")[0]
        if room in ROOMS and other in ROOMS and ROOMS.index(other) > ROOMS.index(room):
            backwards.append((module, target))
    assert not backwards
    named = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert " ← ".join(ROOMS) in named


def test_extras_import_the_method_and_never_the_other_way():
    """What composes a run imports one where an option asks; the course may import all."""
    composing = {
        "cli",
        *(f"experiments.{name}" for name in ("data", "named_rewards", "pipeline", "samplers")),
    }
    of_extras = [
        edge
        for edge in imports()
        if edge[1].startswith("extras") and not edge[0].startswith("extras")
    ]
    assert {module for module, _, _ in of_extras} >= composing  # the files are read
    wrong = [edge for edge in of_extras if not (edge[0] in composing and edge[2])]
    assert not wrong


def test_the_library_never_imports_the_laboratory():
    """Also not inside a function, for types or by a string: the laboratory adds its command by an entry point."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = (
                [x.name for x in node.names]
                if isinstance(node, ast.Import)
                else [getattr(node, "module", "")]
            )
            names.append(node.value if isinstance(node, ast.Constant) else "")
            found += [(file.name, str(name).partition(".")[0]) for name in names]
    assert ("cli.py", "marlhf_lite") in found  # the files are read
    assert not [name for name, package in found if package.partition(":")[0] == "marlhf_lab"]


@pytest.mark.parametrize(
    "package", [PACKAGE, Path(marlhf_lab.__file__).parent], ids=lambda p: p.name
)
def test_no_circle(package):
    """Not even by imports inside functions, or for types alone."""
    graph: dict[str, set[str]] = {}
    for module, target, _ in imports(package=package):
        graph.setdefault(module, set()).add(target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_command_says_what_it_needs():
    """Nobody asks which class of options it is, but at the edges."""
    asked = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance":
                names = {getattr(x, "id", getattr(x, "attr", "")) for x in ast.walk(call.args[1])}
                asked += [
                    f"{path.name}:{call.lineno}"
                    for name in names
                    if name.endswith(("Command", "Config"))
                ]
    assert len(asked) <= 9, asked
