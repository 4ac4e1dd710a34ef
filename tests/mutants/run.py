"""Try the faults of mutants.yaml in a copy of the project: the tests that each names must fail.

    python tests/mutants/run.py            # all of them, about ten seconds each
    python tests/mutants/run.py clip KL    # those whose description has one of these words

It prints a line per fault and ends with status 1 if the tests miss one. Pytest does not collect it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")
FOUND = {0: "MISSED", 1: "caught"}  # pytest's exit codes; any other one is a fault of the list


def copy_project(target: Path) -> None:
    """Copy code and tests; data, which no fault changes, are links."""
    for name in ("marlhf_lite", "marlhf_lab", "tests", "examples", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target / name)
    for name in ("data", "figures", "docs", "notebooks"):
        (target / name).symlink_to(ROOT / name)


def try_out(mutant: dict, project: Path) -> str:
    """Write one fault into the copy, run its tests, and take it out again."""
    file = project / mutant["file"]
    text = file.read_text(encoding="utf-8")
    if text.count(mutant["old"]) != 1:
        return f"its old text stands {text.count(mutant['old'])} times in {mutant['file']}"
    file.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *mutant["tests"].split(),
    ]
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=os.environ | {"PYTHONPATH": str(project)},
            capture_output=True,
            text=True,
        )
    finally:
        file.write_text(text, encoding="utf-8")
    return (
        FOUND.get(done.returncode) or f"pytest ended with {done.returncode}: {done.stdout[-500:]}"
    )


def main(words: list[str]) -> int:
    """Try those that have one of the words, or all; the exit code."""
    mutants = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    chosen = [m for m in mutants if not words or any(word in m["about"] for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        found = []
        for mutant in chosen:
            found.append(try_out(mutant, Path(folder)))
            print(f"{found[-1]:<8} {mutant['about']}", flush=True)
    print(f"{found.count('caught')} of {len(found)} caught")
    return int(found.count("caught") < len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
