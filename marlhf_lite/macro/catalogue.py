"""Termination conditions by the names that options and config files give them."""

import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from marlhf_lite import macro
from marlhf_lite.config.method import MacroConfig
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.user_code import import_user_code, is_user_code, named_errors

if TYPE_CHECKING:
    from marlhf_lite.parsing.base import Parser

# Imported on demand: macro actions by number or by the models' outputs work without a parser.
PARSERS = {
    "grammar": "marlhf_lite.parsing.grammar:GrammarParser",
    "python": "marlhf_lite.extras.parsers.python_code:PythonParser",
}
RULES: dict[str, Callable[[MacroConfig, int], macro.TerminationRule]] = {
    "fixed": lambda config, seed: macro.FixedNGram(_tokens(config.n)),
    "randomized": lambda config, seed: macro.RandomizedNGram(
        _integers("lengths", config.lengths.split(",")), 3, seed
    ),
    "listed": lambda config, seed: macro.Listed(_integers("lengths", config.lengths.split(","))),
    "whole": lambda config, seed: macro.Whole(),
    "turn": lambda config, seed: macro.Turn(),
    "perplexity": lambda config, seed: macro.Perplexity(
        config.perplexity_rule, config.perplexity_early
    ),
    "sentence": lambda config, seed: _text_rule("Sentence")(),
    "sentence_shuffled": lambda config, seed: macro.Shuffled(_text_rule("Sentence")(), seed),
    "parsing": lambda config, seed: _text_rule("Parsing")(
        make_parser(config.parser), config.cutoff
    ),
    "value_change": lambda config, seed: macro.LargestChange("values", _tokens(config.n)),
    "cutpoints": lambda config, seed: macro.LargestChange("logprobs", _tokens(config.n)),
}


def make_rule(macro_config: MacroConfig, seed: int = 0) -> macro.TerminationRule:
    """Make the rule that `macro_config.termination` names.

    Raises `InputError` that names the option, for an unknown rule, a bad n or lengths, and for a parser whose package
    or model is missing.
    """
    name, known = macro_config.termination, ", ".join(RULES)
    if is_user_code(name):
        rule = import_user_code("termination", name, known)
        with named_errors("termination", name):
            return NamedRule(name, macro.as_rule(rule() if isinstance(rule, type) else rule))
    if name not in RULES:
        raise InputError(
            f"--termination {name}: unknown: choose from {known}, or give package.module:function"
        )
    return RULES[name](macro_config, seed)


@dataclass(frozen=True)
class NamedRule(macro.TerminationRule):
    """A user's rule with its name in `--termination`: errors are one line with that name."""

    name: str
    rule: macro.TerminationRule

    @property
    def needs_outputs(self) -> bool:
        return self.rule.needs_outputs

    def __call__(self, mask: Tensor, **context: Any) -> macro.MacroActions:
        with named_errors("termination", self.name):
            return macro.check_segmentation(self.rule(mask, **context), mask)

    def check(self) -> None:
        with named_errors("termination", self.name):
            self.rule.check()

    def metrics(self) -> dict[str, float]:
        with named_errors("termination", self.name):
            return self.rule.metrics()


@cache
def make_parser(name: str) -> "Parser":
    """Make the parser of this name, once for the whole program: it may hold a model and a cache."""
    return pkgutil.resolve_name(PARSERS[name])()


def _text_rule(name: str) -> type[macro.TerminationRule]:
    """Return a rule that reads text, imported on demand."""
    return pkgutil.resolve_name(f"marlhf_lite.parsing.termination:{name}")


def _tokens(n: str) -> int | float:
    return math.inf if n == "inf" else _integers("n", [n])[0]


def _integers(name: str, words: list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        more = ", or inf" if name == "n" else ", comma-separated"
        raise InputError(f"--{name} {','.join(words)}: give whole numbers from 1 up{more}")
    return numbers
