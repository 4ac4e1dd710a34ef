"""Options with bounds, which are checked when an options object is made."""

import math
import operator
from dataclasses import dataclass, field, fields
from typing import dataclass_transform

from marlhf_lite.utils.errors import InputError, raise_all

# Name of a bound -> its comparison, and its words in an error message.
BOUNDS = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def option(default, help: str, **bounds):
    """Make a dataclass field with a help text and bounds (`least` and `most` include the bound)."""
    return field(default=default, metadata={"help": help, **bounds})


@dataclass_transform(field_specifiers=(option,))
class Checked:
    """Base of all options classes: a dataclass that raises `InputError` for numbers out of bounds."""

    def __init_subclass__(cls):
        dataclass(cls)

    def __post_init__(self) -> None:
        errors = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                errors.append(InputError(f"--{f.name} {value}: it must be a finite number"))
                continue
            bounds = {name: f.metadata[name] for name in BOUNDS if name in f.metadata}
            is_within = all(BOUNDS[name][0](value, bound) for name, bound in bounds.items())
            if not is_within:
                words = " and ".join(f"{BOUNDS[name][1]} {bound}" for name, bound in bounds.items())
                errors.append(InputError(f"--{f.name} {value}: it must be {words}"))
        raise_all(errors)
