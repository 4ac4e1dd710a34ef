"""What the project promises outside its code: versions, files, sizes, and the commands of the Makefile."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from marlhf_lite.config.embedded import EMBEDDED_MODELS

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "marlhf_lite").rglob("*.py"))
MB = 2**20

any_versions = pytest.mark.skipif("MARLHF_ANY_VERSIONS" in os.environ, reason="MARLHF_ANY_VERSIONS is set")


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(r).name) for r in requirements}


def runtime() -> set[str]:
    return names(project()["project"]["dependencies"])


def extra(*groups: str) -> set[str]:
    return set().union(*(names(project()["project"]["optional-dependencies"][g]) for g in groups))


@cache
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that are in the repository or that `git add .` would put there; without git, all that are not hidden."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "runs", "build"}
        paths = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)]
    found = tuple(sorted({p for p in paths if p.is_file()}))
    assert ROOT / "pyproject.toml" in found
    return found


@cache
def repository_text() -> dict[str, str]:
    """Every repository file that is text, by its path from the root."""
    contents = {str(p.relative_to(ROOT)): p.read_bytes() for p in repository_files()}
    return {name: data.decode(errors="replace") for name, data in contents.items() if b"\0" not in data[:8192]}


# pyproject.toml and constraints.txt


def test_every_dependency_is_bounded_on_both_sides():
    groups = project()["project"]["optional-dependencies"]
    every = project()["project"]["dependencies"] + [r for group in groups.values() for r in group]
    for text in every:
        operators = {s.operator for s in Requirement(text).specifier}
        assert operators == {">=", "<"}, text
    assert project()["project"]["requires-python"] == ">=3.11"


def test_constraints_are_names_and_exact_versions_alone():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), line
        assert not line.startswith(("nvidia-", "cuda-", "triton")), f"{line}: torch pins its own GPU libraries"
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert len(lines) == len(pins()), "a name is pinned twice"


def test_pins_satisfy_the_bounds():
    groups = project()["project"]["optional-dependencies"]
    for text in project()["project"]["dependencies"] + groups["notebooks"] + groups["dev"] + groups["book"]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in pins(), f"{name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pins()[name]), f"{text}, but constraints.txt has {pins()[name]}"


@any_versions
def test_installed_versions_are_the_pins():
    found = {name: Version(metadata.version(name)).public for name in runtime() | {"pytest", "hypothesis"}}
    wrong = [f"{n}: installed {v}, pinned {pins()[n]}" for n, v in sorted(found.items()) if v != pins()[n]]
    assert not wrong, f"{wrong}: `make install`, or set MARLHF_ANY_VERSIONS to test with other versions"


@any_versions
def test_what_the_dependencies_bring_is_pinned_too():
    missing, queue, seen = {}, [(n, "marlhf-lite") for n in runtime() | extra("notebooks", "dev", "book")], set()
    while queue:
        name, parent = queue.pop()
        if name in seen or name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        seen.add(name)
        if name not in pins():
            missing[name] = parent
        try:
            needs = [Requirement(r) for r in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue  # an extra that this environment lacks: its own needs cannot be read
        queue += [(canonicalize_name(r.name), name) for r in needs if not r.marker or r.marker.evaluate({"extra": ""})]
    assert not missing, f"not in constraints.txt (name: needed by): {missing}"


def library_imports() -> list[tuple[str, bool, str]]:
    """(module, whether every import of the file runs it, where) of each absolute import under marlhf_lite/."""
    found = []
    for path in LIBRARY:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            found += [(m.partition(".")[0], node in tree.body, where) for m in modules]
    return found


def test_the_library_imports_only_what_it_declares():
    installed = metadata.packages_distributions()
    optional = extra("notebooks", "gpu", "judge", "parse", "track")
    undeclared = []
    for module, always, where in library_imports():
        if module in sys.stdlib_module_names or module == "marlhf_lite":
            continue
        distributions = {canonicalize_name(d) for d in [*installed.get(module, ()), module]}
        if not distributions & (runtime() if always else runtime() | optional):
            undeclared.append(f"{where} {module}")
    assert not undeclared, f"declare in pyproject.toml, or import inside the function if it is an extra: {undeclared}"


# The command and the wheel


def test_console_script_points_at_a_function():
    module, _, function = project()["project"]["scripts"]["marlhf"].partition(":")
    assert importlib.util.find_spec(module) is not None, f"{module} does not exist"
    assert callable(getattr(importlib.import_module(module), function))
    assert importlib.util.find_spec("marlhf_lite.__main__") is not None, "python -m marlhf_lite would fail"


def test_wheel_carries_the_package_the_model_and_the_results():
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["sources"] == {"data": "marlhf_lite/_data"}
    assert set(wheel["include"]) == {"/marlhf_lite", "/data/tiny-*", "/data/results"}
    for name, dataset in EMBEDDED_MODELS.items():
        model = ROOT / "data" / name
        assert (model / "config.json").is_file()
        assert json.loads((model / "build.json").read_text())["arguments"]["task"] == dataset
        assert list(model.glob("*.safetensors"))
    assert list((ROOT / "marlhf_lite" / "config" / "presets").glob("*.yaml"))


def test_no_shipped_file_is_ignored_by_git():
    """The build leaves out what .gitignore names, without a word."""
    folders = ("marlhf_lite", *(f"data/{name}" for name in (*EMBEDDED_MODELS, "results")))
    shipped = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    lost = [p for p in shipped if "__pycache__" not in p.parts and p not in repository_files()]
    assert not lost


# environment.yml, Makefile, continuous integration


def test_environment_installs_the_same_thing():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == project()["project"]["name"]
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip == ["-c constraints.txt", "-e .[notebooks,dev]"]
    python = next(d for d in environment["dependencies"] if str(d).startswith("python="))
    assert Version(python.removeprefix("python=")) >= Version("3.11")


def test_environment_gives_a_reason_for_each_dependency():
    text = (ROOT / "environment.yml").read_text()
    reasons = dict(re.findall(r"^# +([a-z0-9-]+) {2,}(\S.*)$", text, re.MULTILINE))
    expected = runtime() | extra(*project()["project"]["optional-dependencies"])
    assert set(reasons) == expected, "names with a reason and names in pyproject.toml differ"
    short = {name for name, reason in reasons.items() if len(reason.split()) < 4}
    assert not short


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    for command in (["make", "help"], ["make"]):
        shown = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout
        listed = {line.split()[1]: line.split(maxsplit=2)[2] for line in shown.splitlines()}
        assert set(listed) == phony
        assert {"install", "demo", "test", "lint", "format", "bench", "clean", "help"} <= phony


def test_ci_script_is_executable_bash():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


# Sizes


def test_modules_and_functions_are_short():
    long = []
    for path in LIBRARY:
        text, where = path.read_text(), path.relative_to(ROOT)
        if len(text.splitlines()) > 500:
            long.append(f"{where}: {len(text.splitlines())} lines, at most 500")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                long += [f"{where}: {node.name} has {lines} lines, at most 60"] if lines > 60 else []
    assert LIBRARY
    assert not long, "\n".join(long)


def test_files_are_small():
    sizes = {str(p.relative_to(ROOT)): p.stat().st_size for p in repository_files()}
    big = {name: f"{size / MB:.1f} MB" for name, size in sizes.items() if size > 10 * MB}
    assert not big
    data = sum(size for name, size in sizes.items() if name.startswith("data" + os.sep))
    assert data <= 40 * MB, f"data/ holds {data / MB:.1f} MB"


# Nothing of the machine that a file was made on

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/[a-z_][\w-]*)/")
INDEX_OPTION = re.compile(r"(?:index[-_]url|find[-_]links|_INDEX)\b[\s\"'=:]*(?:https?|file)://([^/\s\"']*)", re.I)
PUBLIC_HOSTS = {"pypi.org", "test.pypi.org", "files.pythonhosted.org", "download.pytorch.org", "huggingface.co"}


def test_no_machine_path():
    found = [
        f"{name}: {text[max(0, match.start() - 40) : match.end() + 40]!r}"
        for name, text in repository_text().items()
        for match in MACHINE_PATH.finditer(text)
    ]
    assert not found, "\n".join(found)


def private_sources() -> set[str]:
    """Hosts and folders of package and model sources that this machine is set up with."""
    variables = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_DEFAULT_INDEX", "HF_ENDPOINT")
    values = [value for variable in variables for value in os.environ.get(variable, "").split()]
    sources = {urlsplit(v).hostname or urlsplit(v).path for v in values}
    return {s for s in sources if len(s) > 4} - PUBLIC_HOSTS


def test_no_private_package_source():
    found = []
    for name, text in repository_text().items():
        found += [f"{name}: {m[0]}" for m in INDEX_OPTION.finditer(text) if m[1] not in PUBLIC_HOSTS]
        found += [f"{name}: {source}" for source in private_sources() if source in text]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("open('{0}work{0}main{0}x.json')", True),
        ("{0}root{0}.cache", True),
        ("at {0}home{0}ann{0}x", True),
        ("https:{0}{0}example.org{0}work{0}x", False),
        (".{0}work{0}x", False),
        ("{0}kaggle{0}working{0}x", False),
    ],
)
def test_machine_path_pattern(text: str, bad: bool):
    assert bool(MACHINE_PATH.search(text.format("/"))) == bad


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("pip install --index-url https:{0}mirror.corp.example/simple x", True),
        ("PIP_EXTRA_INDEX_URL=file:{0}/srv/simple", True),
        ("TORCH_INDEX=https:{0}download.pytorch.org/whl/cpu", False),
        ("find-links is an option of pip", False),
    ],
)
def test_index_pattern(text: str, bad: bool):
    hosts = [m[1] for m in INDEX_OPTION.finditer(text.format("//"))]
    assert any(host not in PUBLIC_HOSTS for host in hosts) == bad
