"""The package is a library and a laboratory: only the command line and the lessons import the laboratory."""

import ast
from pathlib import Path

import marlhf_lite

PACKAGE = Path(marlhf_lite.__file__).parent


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return froms | {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}


def test_only_the_command_line_imports_the_laboratory():
    library = [path for path in PACKAGE.rglob("*.py") if "lab" not in path.relative_to(PACKAGE).parts[:1]]
    users = {str(path.relative_to(PACKAGE)) for path in library if any("marlhf_lite.lab" in x for x in _imports(path))}
    assert users == {"cli.py"}


def test_the_package_has_few_rooms():
    rooms = [path for path in PACKAGE.iterdir() if not path.name.startswith(("_", "."))]
    assert len(rooms) <= 13
