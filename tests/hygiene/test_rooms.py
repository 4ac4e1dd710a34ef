"""Both packages stay small: each room has a ceiling of code lines (`rooms.yaml`)."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
ROOMS = yaml.safe_load((ROOT / "tests" / "hygiene" / "rooms.yaml").read_text(encoding="utf-8"))
SPACE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def code_lines(text: str) -> int:
    """Lines of code: without comments, blank lines and docstrings."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in SPACE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def sizes(package: str) -> Counter[str]:
    """Code lines of each room of a package; "." has its own files."""
    found: Counter[str] = Counter()
    for path in (ROOT / package).rglob("*.py"):
        place = path.relative_to(ROOT / package).parts
        found[place[0] if len(place) > 1 else "."] += code_lines(path.read_text(encoding="utf-8"))
    return found


def test_code_lines_are_those_without_text():
    text = '"""One."""\n\nx = """a\nb"""  # c\n\n\ndef f():\n    """Two\n    lines."""\n    # no\n'
    text += "    return (\n        1)\n"
    assert code_lines(text) == 5


def test_no_room_is_above_its_ceiling():
    for package, rooms in ROOMS.items():
        found, ceilings = sizes(package), dict(rooms)
        total = ceilings.pop("total")
        assert found.keys() == ceilings.keys(), package
        above = {room: f"{n} > {ceilings[room]}" for room, n in found.items() if n > ceilings[room]}
        assert not above and found.total() <= total, (package, above, found.total())
