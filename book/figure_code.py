"""How much of each lesson's core is code of figures and tables: `python book/figure_code.py`.

A core's code are the lines that are not empty of its code cells, without the first three cells (install, parameter,
set-up). Of these, code of figures and tables are

* all lines of a cell that names matplotlib or seaborn, whatever else the cell does;
* elsewhere each statement that shows: it names pandas' DataFrame or Series, IPython.display, or what was imported from
  `marlhf_lite.plotting` or `marlhf_lab.figures`; or it is a cell's last expression, whose value the page shows;
* and each assignment without a call whose names only such statements of its cell read: the columns of a table.

`print` does not count: it says what the computation found. A core may have 15 % of such lines; or 20 of them, where it
does little else than show, as elective 15 does.
"""

import ast
from pathlib import Path

from times import LESSONS, parts

LIMIT = 0.15  # share of a core
FEW = 20  # lines that are always allowed
DRAWING = ("matplotlib", "seaborn")
SHOWING = ("IPython.display", "marlhf_lite.plotting", "marlhf_lab.figures")
TABLES = {"DataFrame", "Series"}
SETUP_CELLS = 3


def imported(cells: list[ast.Module], rooms: tuple[str, ...]) -> set[str]:
    """The names under which these cells import something that begins with one of `rooms`.

    For example `plt`, of `import matplotlib.pyplot as plt` and the room "matplotlib".
    """
    found = set()
    for cell in cells:
        for node in ast.walk(cell):
            if isinstance(node, ast.ImportFrom):
                before = f"{node.module}." if node.module else ""
            elif isinstance(node, ast.Import):
                before = ""
            else:
                continue
            for alias in node.names:
                if f"{before}{alias.name}".startswith(rooms):
                    found.add(_name_in_code(alias))
    return found


def _name_in_code(alias: ast.alias) -> str:
    """The name that an import makes: the one after `as`, else the imported name up to its first dot."""
    return (alias.asname or alias.name).partition(".")[0]


def names(node: ast.AST) -> set[str]:
    """Every name and attribute that stands in a piece of code, imports included."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Import | ast.ImportFrom):
            found |= {_name_in_code(alias) for alias in part.names}
    return found


def statements(node: ast.AST) -> list[ast.stmt]:
    """The simple statements of a cell, in order. A loop, a condition or a function stands for the statements inside."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found += statements(child) or [child]  # the child itself if there is none inside
    return found


def lines(node: ast.AST) -> set[int]:
    """Numbers of the lines of a statement."""
    return set(range(node.lineno, node.end_lineno + 1))


def shown_lines(cell: ast.Module, showing: set[str]) -> set[int]:
    """Numbers of the lines of statements that show, and of what is assigned for them alone.

    `showing` are the names that were imported from modules that show. The top of this file says what counts.
    """
    # 1. Statements that name something which shows, and the cell's last expression.
    every = statements(cell)
    shows = [statement for statement in every if names(statement) & (showing | TABLES)]
    if cell.body and isinstance(cell.body[-1], ast.Expr) and not _is_print(cell.body[-1].value):
        last = every[-1]
        if last not in shows:
            shows.append(last)
    # 2. Assignments without a call whose names only such statements read.
    for statement in every:
        if statement in shows or not isinstance(statement, ast.Assign) or _has_call(statement):
            continue
        targets = set()
        for target in statement.targets:
            targets |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        readers = [other for other in every if other is not statement and names(other) & targets]
        if readers and all(reader in shows for reader in readers):
            shows.append(statement)
    numbers = set()
    for statement in shows:
        numbers |= lines(statement)
    return numbers


def _has_call(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) for part in ast.walk(node))


def _is_print(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") == "print"


def _is_code(line: str) -> bool:
    """Whether a line is neither empty nor a command of IPython's own, such as `%matplotlib inline`."""
    return bool(line.strip()) and line[0] not in "%!"


def measure(path: Path) -> tuple[int, int]:
    """How many lines of a lesson's core are code of figures and tables, and how many are code at all."""
    # 1. The code of each cell, without empty lines and without IPython's own commands.
    sources = []
    for kind, text in parts(path)["core"]:
        if kind == "code" and text.strip():
            code_lines = [line for line in text.splitlines() if _is_code(line)]
            sources.append("\n".join(code_lines))
    sources = sources[SETUP_CELLS:]
    # 2. All lines of a cell that draws; elsewhere those that show.
    cells = [ast.parse(source) for source in sources]
    drawing = imported(cells, DRAWING)
    showing = imported(cells, SHOWING)
    counted = 0  # lines of figures and tables
    total = 0
    for cell, source in zip(cells, sources, strict=True):
        count = len(source.splitlines())
        total += count
        draws = names(cell) & drawing
        counted += count if draws else len(shown_lines(cell, showing))
    return counted, total


if __name__ == "__main__":
    for lesson in LESSONS:
        part, whole = measure(lesson)
        print(f"{lesson.stem:28} {part:3} of {whole:3} lines, {part / whole:.0%}")
