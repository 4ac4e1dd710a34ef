"""What the project promises outside its code: versions, packages, sizes, no trace of a machine. `make lint` runs it."""

import ast
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

import marlhf_lite
from marlhf_lite.config.embedded import EMBEDDED_MODELS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"marlhf_lite", "marlhf_lab"}
LIBRARY = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNTIME = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
EVERYTHING = [*RUNTIME, *(requirement for group in EXTRAS.values() for requirement in group)]
TESTED = [*RUNTIME, *EXTRAS["notebooks"], *EXTRAS["dev"], *EXTRAS["book"], *EXTRAS["real"]]
PINS = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
GPU = ("nvidia-", "cuda-", "triton")  # torch pins its own


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


@cache
def repository() -> dict[str, Path]:
    """Files that are in the repository or that `git add .` would put there, by their path from the root."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    return {name: ROOT / name for name in listed if name and (ROOT / name).is_file()}


def test_dependencies_are_bounded_on_both_sides_and_pinned_within():
    for text in EVERYTHING:
        assert {s.operator for s in Requirement(text).specifier} == {">=", "<"}, text
    for requirement in map(Requirement, TESTED):
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), (
            requirement
        )
    assert list(PINS) == sorted(PINS) and not [name for name in PINS if name.startswith(GPU)]


@pytest.mark.skipif("MARLHF_ANY_VERSIONS" in os.environ, reason="MARLHF_ANY_VERSIONS is set")
def test_installed_versions_and_those_that_they_bring_are_the_pins():
    queue, seen = list(names(TESTED)), set()
    while queue:
        name = queue.pop()
        if name in seen or name.startswith(GPU):
            continue
        seen.add(name)
        try:
            needs, version = (
                map(Requirement, metadata.requires(name) or []),
                Version(metadata.version(name)).public,
            )
        except metadata.PackageNotFoundError:
            continue  # an extra that this environment lacks: its own needs cannot be read
        assert version == PINS.get(name), f"{name}: `make install`, or set MARLHF_ANY_VERSIONS"
        queue += [
            canonicalize_name(r.name)
            for r in needs
            if not r.marker or r.marker.evaluate({"extra": ""})
        ]


def test_the_library_imports_only_what_it_declares():
    """At the top of a module a runtime dependency, inside a function an extra too."""
    installed = metadata.packages_distributions()
    for path in LIBRARY:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for module in (
                {m.partition(".")[0] for m in modules} - sys.stdlib_module_names - PACKAGES
            ):
                distributions = {canonicalize_name(d) for d in [*installed.get(module, ()), module]}
                assert distributions & names(RUNTIME if node in tree.body else EVERYTHING), (
                    path,
                    node.lineno,
                    module,
                )


def test_the_wheel_carries_what_the_library_reads_from_data():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["sources"] == {"data": "marlhf_lite/_data", "figures": "marlhf_lite/_figures"}
    shipped = {path for place in wheel["include"] for path in ROOT.glob(place.strip("/"))}
    assert {ROOT / "data" / name for name in (*EMBEDDED_MODELS, "results")} | {
        ROOT / "marlhf_lite"
    } <= shipped
    files = {path for place in shipped for path in [place, *place.rglob("*")] if path.is_file()}
    lost = [path for path in files - set(repository().values()) if "__pycache__" not in path.parts]
    assert not lost, "the build leaves out what .gitignore names, without a word"


def test_the_version_is_the_same_everywhere_and_the_site_that_is_built_is_the_one_published():
    version = PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == marlhf_lite.__version__ == version
    workflow = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "site.yml").read_text(encoding="utf-8")
    )
    steps = workflow["jobs"]["site"]["steps"]
    (built,) = [step["run"].split()[1] for step in steps if "run" in step]
    (published,) = [step["with"]["path"] for step in steps if "path" in step.get("with", {})]
    recipe = re.search(
        rf"^{built}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )[1]
    assert re.search(rf"-c \S+ \S+ {published}\n", recipe)


def test_the_library_has_few_rooms():
    assert (
        len([p for p in (ROOT / "marlhf_lite").iterdir() if not p.name.startswith(("_", "."))])
        <= 13
    )


def test_files_are_small():
    megabytes = {name: path.stat().st_size / 2**20 for name, path in repository().items()}
    assert not {name: size for name, size in megabytes.items() if size > 10}
    assert sum(megabytes.values()) <= 52
    assert sum(size for name, size in megabytes.items() if name.startswith("data/")) <= 40


def test_every_picture_of_a_study_is_shown():
    """`marlhf study` draws the others again from the stored results."""
    named = ("README.md", "benchmarks/README.md", "docs/")
    pages = [
        path.read_text(encoding="utf-8")
        for name, path in repository().items()
        if name.startswith(named)
    ]
    elsewhere = ("figures/diagrams/", "figures/interactive/")  # lessons show them by name
    pictures = [name for name in repository() if re.fullmatch(r"figures/.+\.(png|svg)", name)]
    assert not [
        x for x in pictures if not x.startswith(elsewhere) and not any(x in page for page in pages)
    ]


MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/[a-z_][\w-]*)/")
INDEX_OPTION = re.compile(
    r"(?:index[-_]url|find[-_]links|_INDEX)\b[\s\"'=:]*(?:https?|file)://([^/\s\"']*)", re.I
)
PUBLIC_HOSTS = {
    "pypi.org",
    "test.pypi.org",
    "files.pythonhosted.org",
    "download.pytorch.org",
    "huggingface.co",
}


def test_no_file_has_a_trace_of_its_machine():
    variables = (
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "UV_DEFAULT_INDEX",
        "HF_ENDPOINT",
    )
    values = [urlsplit(v) for variable in variables for v in os.environ.get(variable, "").split()]
    private = {s for s in (v.hostname or v.path for v in values) if len(s) > 4} - PUBLIC_HOSTS
    for name, path in repository().items():
        text = (
            path.read_bytes().decode(errors="replace")
            if path.suffix not in (".safetensors", ".png", ".gz")
            else ""
        )
        assert not [
            text[max(0, m.start() - 30) : m.end() + 30] for m in MACHINE_PATH.finditer(text)
        ], name
        assert {m[1] for m in INDEX_OPTION.finditer(text)} <= PUBLIC_HOSTS, name
        assert not [source for source in private if source in text], name
