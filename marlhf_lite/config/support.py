"""Which options go together: one look-up refuses a combination that no row of the table in support.yaml has."""

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import yaml

from marlhf_lite.utils.errors import InputError

_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TABLE, SAYS = _FILE["table"].strip(), _FILE["says"]
AXES, _, *LINES = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()
]
ROWS = [
    {axis: cell.split() for axis, cell in zip(AXES, line, strict=True) if cell != "-"}
    for line in LINES
]


def is_listed(cell: Mapping[str, str]) -> bool:
    """Return whether a row of the table has all of these values."""
    return any(
        all(value in row.get(axis, (value,)) for axis, value in cell.items()) for row in ROWS
    )


def refuse(cell: Mapping[str, str], **shown: object) -> None:
    """Raise `InputError` for a combination that no row lists; `shown` fills the texts of `SAYS`.

    The message names the fewest values that clash, most often two, and each single change that helps.
    """
    if is_listed(cell):
        return
    axes = [axis for axis in SAYS if axis in cell]
    clashes = (of for n in range(1, len(axes) + 1) for of in combinations(axes, n))
    clash = next(
        of for of in clashes if not is_listed({axis: cell[axis] for axis in (*of, "stage")})
    )
    field, *others = [SAYS[axis][cell[axis]][0].format(**shown) for axis in clash]
    others = others or [f"the stage {cell['stage']}"]
    changes = (
        (fix, cell | {axis: value})
        for axis in clash
        for value, (_, fix) in SAYS[axis].items()
        if fix
    )
    fixes = dict.fromkeys(fix.format(**shown) for fix, changed in changes if is_listed(changed))
    fix = ", or ".join(fixes) or "see the table of what goes together in docs/scaling.md"
    raise InputError(f"{field}: does not go with {' and '.join(others)}: {fix}")


def launched() -> str:
    """Return how `accelerate launch` started this process."""
    flags = {"fsdp2": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}
    used = [
        kind
        for kind, flag in flags.items()
        if os.environ.get(flag, "").lower() in ("1", "true", "yes")
    ]
    return used[0] if used else "ddp" if os.environ.get("WORLD_SIZE", "1") != "1" else "one"
