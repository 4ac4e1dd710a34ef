"""Prompts that carry their row: a user's function takes other columns of the row by name, as in TRL."""

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from marlhf_lite.utils.errors import InputError

if TYPE_CHECKING:
    import datasets

ROW = "row"  # the column of a task with the columns that functions ask for, as JSON


class Prompt(str):
    """A prompt's text that carries the other columns of its row as JSON, wherever the text goes."""

    def __new__(cls, text: str, row: str = "{}"):
        prompt = super().__new__(cls, text)
        prompt.row = row
        return prompt


class RowColumns:
    """The columns that a function takes by name after its first `given` arguments; `source`: its option and name.

    Arguments called as in `not_in_rows` are no columns: whoever calls the function has them from elsewhere.
    `takes_beside_row` are those of them that it takes.
    """

    def __init__(
        self, function: Callable, given: int, source: str, not_in_rows: Collection[str] = ()
    ):
        self.source = source
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):  # of builtins, which take no columns
            parameters = []
        named = [
            p for p in parameters[given:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        self.takes_beside_row = [p.name for p in named if p.name in not_in_rows]
        named = [p for p in named if p.name not in not_in_rows]
        self.named, self.needed = (
            {p.name for p in named},
            [p.name for p in named if p.default is p.empty],
        )
        self.rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.first = {p.name for p in parameters[:given]}

    def choose(self, columns: Iterable[str], read: Iterable[str] = ()) -> list[str]:
        """Return which of `columns` the function takes: those that it names, and with `**row` all not in `read`.

        Raises `InputError` if one that it needs is missing.
        """
        columns = [name for name in columns if isinstance(name, str) and name not in self.first]
        if missing := [name for name in self.needed if name not in columns]:
            fix = (
                f"name one of {', '.join(columns)}"
                if columns
                else "the prompts have no other columns: leave it out"
            )
            raise InputError(
                f"{self.source}: asks for the column {missing[0]}, which is not there: {fix}"
            )
        return [name for name in columns if name in self.named or (self.rest and name not in read)]

    def arguments(self, prompts: Sequence[str]) -> dict[str, list]:
        """Return the columns of these prompts' rows, each a new list with an entry per prompt."""
        if not prompts or not (self.named or self.rest):
            return {name: [] for name in self.needed}
        rows = [json.loads(getattr(prompt, "row", "{}")) for prompt in prompts]
        names = self.choose(dict.fromkeys(chain(*rows)))
        return {name: [row.get(name) for row in rows] for name in names}


def prompts_of(rows: "datasets.Dataset") -> list[str]:
    """Return the prompts of rows of a task, each with its row if a function asks for columns."""
    if ROW not in rows.column_names:
        return list(rows["prompt"])
    return [Prompt(prompt, row) for prompt, row in zip(rows["prompt"], rows[ROW], strict=True)]
