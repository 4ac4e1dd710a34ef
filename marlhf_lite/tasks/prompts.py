"""Prompts that carry their row: a user's function takes other columns of the row by name, as in TRL."""

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import Parameter
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
    """The columns of the rows that a user's function takes by the names of its arguments.

    Args:
        function: such as `reward(prompts, responses, answer, hint=None)`, which needs the column `answer` and takes
            `hint` if there is one. With `**row` it takes all columns.
        given: the number of its first arguments that are no columns; here 2.
        source: what messages call it: its option and its name.
        not_in_rows: names of arguments that are no columns either, because the caller has their values from elsewhere,
            such as the turns of a dialogue. `takes_beside_row` are those of them that the function takes.
    """

    def __init__(
        self, function: Callable, given: int, source: str, not_in_rows: Collection[str] = ()
    ):
        """Read from the function's signature which columns it takes.

        Its first `given` arguments are no columns, nor are those in `not_in_rows`. `source` names it in messages.
        """
        self.source = source
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):  # some builtins have no signature, and take no columns
            parameters = []
        self.names_of_given = {parameter.name for parameter in parameters[:given]}
        # `**row` takes all columns.
        self.takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        self.takes_beside_row: list[str] = []  # names in `not_in_rows`
        self.named: list[str] = []  # columns
        self.needed: list[str] = []  # columns in `named` whose argument has no default
        for parameter in parameters[given:]:
            # Columns are passed by name, so `*args` and arguments by position only take none; `**row` names none.
            if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                continue
            if parameter.name in not_in_rows:
                self.takes_beside_row.append(parameter.name)
            else:
                self.named.append(parameter.name)
                if parameter.default is Parameter.empty:
                    self.needed.append(parameter.name)

    def choose(self, columns: Iterable[str], already_read: Iterable[str] = ()) -> list[str]:
        """Return which of `columns` the function takes, in their order.

        It takes those that it names. With `**row` it also takes all others, except those in `already_read`, from which
        the prompt and the answers are made. Raises `InputError` if a column that it needs is missing.
        """
        passable = []
        for column in columns:
            # A name in a file may be a number, and a column cannot be passed under the name of a given argument.
            if isinstance(column, str) and column not in self.names_of_given:
                passable.append(column)
        missing = [name for name in self.needed if name not in passable]
        if missing:
            fix = "the prompts have no other columns: leave it out"
            if passable:
                fix = f"name one of {', '.join(passable)}"
            raise InputError(
                f"{self.source}: asks for the column {missing[0]}, which is not there: {fix}"
            )
        chosen = []
        for column in passable:
            is_of_the_rest = self.takes_all and column not in already_read
            if column in self.named or is_of_the_rest:
                chosen.append(column)
        return chosen

    def arguments(self, prompts: Sequence[str]) -> dict[str, list]:
        """Return the columns that the function takes of these prompts' rows, each a new list with a value per prompt.

        A row without the column has None. Raises `InputError` if a column that it needs is missing in all rows.
        """
        # Without prompts, no column is missing; and a function may take none.
        if not prompts or not (self.named or self.takes_all):
            return {name: [] for name in self.needed}
        rows = [json.loads(getattr(prompt, "row", "{}")) for prompt in prompts]
        columns = dict.fromkeys(chain(*rows))  # those of any row, each once
        arguments = {}
        for name in self.choose(columns):
            arguments[name] = [row.get(name) for row in rows]
        return arguments


def prompts_of(rows: "datasets.Dataset") -> list[str]:
    """Return the prompts of rows of a task, each with its row if a function asks for columns."""
    if ROW not in rows.column_names:
        return list(rows["prompt"])
    return [Prompt(prompt, row) for prompt, row in zip(rows["prompt"], rows[ROW], strict=True)]
