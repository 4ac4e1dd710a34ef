"""How large the code is and how folded its statements are. Formatting changes none of these numbers.

A statement is counted without the statements inside it. Imports and the headers of functions and classes are not
counted as statements, and docstrings are not counted at all.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HEADERS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
INNER_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def parse_without_docstrings(source: str) -> ast.Module:
    """Return the syntax tree of a module in which no scope has a docstring."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, SCOPES) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


def count_own_nodes(statement: ast.stmt) -> int:
    """Count the nodes of a statement, without those of the statements inside it."""
    count = 0
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        count += 1
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, INNER_STATEMENTS):
                waiting.append(child)
    return count


def is_assignment_of_a_tuple_to_a_tuple(node: ast.AST) -> bool:
    """Whether a node is a statement such as `a, b = f(), g()`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def count_tricks(node: ast.AST) -> int:
    """Count what stands for a plain statement: `map`, `filter`, `lambda`, and `and` or `or` as a value."""
    if isinstance(node, ast.Lambda):
        return 1
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return | ast.keyword):
        return int(isinstance(node.value, ast.BoolOp))
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in ("map", "filter")
        return named + sum(isinstance(argument, ast.BoolOp) for argument in node.args)
    return 0


def measure(source: str) -> Counter:
    """Return the counts of a module. Counts of several modules can be added."""
    counts: Counter = Counter()
    for node in ast.walk(parse_without_docstrings(source)):
        counts["nodes"] += 1
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
        counts["ternaries"] += isinstance(node, ast.IfExp)
        counts["tricks"] += count_tricks(node)
        if isinstance(node, ast.stmt) and not isinstance(node, HEADERS):
            counts["statements"] += 1
            counts["tuples"] += is_assignment_of_a_tuple_to_a_tuple(node)
            counts[("statements of", count_own_nodes(node))] += 1
    return counts


def measure_rooms(package: Path) -> dict[str, Counter]:
    """Return the counts of each folder of a package; "." stands for the files beside the folders."""
    rooms: dict[str, Counter] = defaultdict(Counter)
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        if any(part.startswith(".") for part in parts):
            continue  # what a program installed beside itself, such as TRL, is not ours
        room = parts[0] if len(parts) > 1 else "."
        rooms[room] += measure(path.read_text(encoding="utf-8"))
    return dict(rooms)


def nodes_at_percentile(counts: Counter, share: float) -> int:
    """Return the nodes of the statement that this share of all statements does not exceed."""
    sizes = sorted(key[1] for key in counts if isinstance(key, tuple))
    passed = 0
    for size in sizes:
        passed += counts[("statements of", size)]
        if passed > share * counts["statements"]:
            return size
    return 0


def describe_folding(counts: Counter) -> dict[str, float]:
    """Return the numbers that `folding.yaml` limits (per statement, 1,000 nodes or 100 statements)."""
    thousands_of_nodes = counts["nodes"] / 1000
    hundreds_of_statements = counts["statements"] / 100
    return {
        "median": nodes_at_percentile(counts, 0.5),
        "90th percentile": nodes_at_percentile(counts, 0.9),
        "comprehensions": counts["comprehensions"] / thousands_of_nodes,
        "ternaries": counts["ternaries"] / thousands_of_nodes,
        "tricks": counts["tricks"] / thousands_of_nodes,
        "tuples": counts["tuples"] / hundreds_of_statements,
    }
