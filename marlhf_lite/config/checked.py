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
    """Return a field of a dataclass, with a help text and bounds that are named as in `BOUNDS`.

    For example, `least=1` allows 1 itself, and `above=0` does not allow 0.
    """
    return field(default=default, metadata={"help": help, **bounds})


@dataclass_transform(field_specifiers=(option,))
class Checked:
    """Base of all options classes: a dataclass that raises `InputError` for numbers out of bounds."""

    def __init_subclass__(cls):
        dataclass(cls)

    def __post_init__(self) -> None:
        """Raise `InputError` with a line for each number that is not finite or out of its bounds."""
        errors = []
        for its_field in fields(self):
            value = getattr(self, its_field.name)
            if value is None:  # an option that is not given
                continue
            if isinstance(value, float) and not math.isfinite(value):
                errors.append(InputError(f"--{its_field.name} {value}: it must be a finite number"))
                continue
            is_within = True
            words_of_bounds = []
            for name, (compare, words) in BOUNDS.items():
                if name in its_field.metadata:
                    bound = its_field.metadata[name]
                    is_within = is_within and compare(value, bound)
                    words_of_bounds.append(f"{words} {bound}")
            if not is_within:
                must_be = " and ".join(words_of_bounds)
                errors.append(InputError(f"--{its_field.name} {value}: it must be {must_be}"))
        raise_all(errors)
