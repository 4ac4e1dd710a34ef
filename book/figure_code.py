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

LIMIT, FEW = 0.15, 20
DRAWING = ("matplotlib", "seaborn")
SHOWING = ("IPython.display", "marlhf_lite.plotting", "marlhf_lab.figures")
TABLES = {"DataFrame", "Series"}
SETUP_CELLS = 3


def imported(cells: list[ast.Module], rooms: tuple[str, ...]) -> set[str]:
    """The names under which these cells import from modules of these rooms."""
    found = set()
    for node in (node for cell in cells for node in ast.walk(cell)):
        module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                if full.startswith(rooms):
                    found.add((alias.asname or alias.name).partition(".")[0])
    return found


def names(node: ast.AST) -> set[str]:
    """Every name and attribute that stands in a piece of code, imports included."""
    found = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    found |= {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
    imports = (
        alias
        for x in ast.walk(node)
        if isinstance(x, ast.Import | ast.ImportFrom)
        for alias in x.names
    )
    return found | {(alias.asname or alias.name).partition(".")[0] for alias in imports}


def statements(node: ast.AST) -> list[ast.stmt]:
    """The simple statements of a cell, in order; of a loop, a condition or a function those inside."""
    inside = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return [leaf for child in inside for leaf in (statements(child) or [child])]


def lines(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def shown_lines(cell: ast.Module, showing: set[str]) -> set[int]:
    """Numbers of the lines of statements that show, and of what is assigned for them alone."""
    leaves = statements(cell)
    shows = [leaf for leaf in leaves if names(leaf) & (showing | TABLES)]
    if cell.body and isinstance(cell.body[-1], ast.Expr) and not _is_print(cell.body[-1].value):
        shows += [leaf for leaf in leaves[-1:] if leaf not in shows]
    rest = [leaf for leaf in leaves if leaf not in shows]
    for leaf in [
        x
        for x in rest
        if isinstance(x, ast.Assign) and not any(isinstance(y, ast.Call) for y in ast.walk(x))
    ]:
        targets = {
            x.id for target in leaf.targets for x in ast.walk(target) if isinstance(x, ast.Name)
        }
        readers = [x for x in leaves if x is not leaf and names(x) & targets]
        shows += [leaf] if readers and all(x in shows for x in readers) else []
    return set().union(*map(lines, shows)) if shows else set()


def _is_print(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") == "print"


def _is_code(line: str) -> bool:
    return bool(line.strip()) and line[0] not in "%!"


def measure(path: Path) -> tuple[int, int]:
    """Lines of figures and tables in a lesson's core, and lines of its code."""
    pieces = parts(path)
    sources = [text for kind, text in pieces["core"] if kind == "code" and text.strip()]
    sources = ["\n".join(filter(_is_code, text.splitlines())) for text in sources[SETUP_CELLS:]]
    cells = [ast.parse(text) for text in sources]
    drawing, showing = (imported(cells, rooms) for rooms in (DRAWING, SHOWING))
    counted = 0
    for cell, source in zip(cells, sources, strict=True):
        whole = names(cell) & drawing
        counted += len(source.splitlines()) if whole else len(shown_lines(cell, showing))
    return counted, sum(len(source.splitlines()) for source in sources)


if __name__ == "__main__":
    for lesson in LESSONS:
        part, whole = measure(lesson)
        print(f"{lesson.stem:28} {part:3} of {whole:3} lines, {part / whole:.0%}")
