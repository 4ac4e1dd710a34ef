"""Termination rules by the names that options and config files give them (`--termination`)."""

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


def make_rule(macro_config: MacroConfig, seed: int = 0) -> macro.TerminationRule:
    """Make the rule that `macro_config.termination` names.

    `seed` is for rules that draw random numbers. Raises `InputError` that names the option, for an unknown rule, a bad
    n or lengths, and for a parser whose package or model is missing.
    """
    name = macro_config.termination
    known = ", ".join(RULES)
    if is_user_code(name):
        rule = import_user_code("termination", name, known)
        with named_errors("termination", name):
            if isinstance(rule, type):  # a class, else a function
                rule = rule()
            return NamedRule(name, macro.as_rule(rule))
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


# -- the rules of the library, each from its options and the seed --------------------------------------------------


def _fixed(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.FixedNGram(_tokens_per_action(config))


def _randomized(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.RandomizedNGram(_lengths(config), repeats=3, seed=seed)


def _listed(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.Listed(_lengths(config))


def _whole(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.Whole()


def _turn(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.Turn()


def _perplexity(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.Perplexity(config.perplexity_rule, config.perplexity_early)


def _sentence(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return _rule_that_reads_text("Sentence")()


def _sentence_shuffled(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.Shuffled(_rule_that_reads_text("Sentence")(), seed)


def _parsing(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return _rule_that_reads_text("Parsing")(make_parser(config.parser), config.cutoff)


def _value_change(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.LargestChange("values", _tokens_per_action(config))


def _cutpoints(config: MacroConfig, seed: int) -> macro.TerminationRule:
    return macro.LargestChange("logprobs", _tokens_per_action(config))


RULES: dict[str, Callable[[MacroConfig, int], macro.TerminationRule]] = {
    "fixed": _fixed,
    "randomized": _randomized,
    "listed": _listed,
    "whole": _whole,
    "turn": _turn,
    "perplexity": _perplexity,
    "sentence": _sentence,
    "sentence_shuffled": _sentence_shuffled,
    "parsing": _parsing,
    "value_change": _value_change,
    "cutpoints": _cutpoints,
}


def _rule_that_reads_text(name: str) -> Callable[..., macro.TerminationRule]:
    """Return a class of `parsing.termination`, which is imported on demand."""
    return pkgutil.resolve_name(f"marlhf_lite.parsing.termination:{name}")


def _tokens_per_action(config: MacroConfig) -> int | float:
    if config.n == "inf":
        return math.inf
    (tokens,) = _whole_numbers("n", [config.n], end_of_fix="or inf")
    return tokens


def _lengths(config: MacroConfig) -> tuple[int, ...]:
    return _whole_numbers("lengths", config.lengths.split(","), end_of_fix="comma-separated")


def _whole_numbers(option: str, words: list[str], end_of_fix: str) -> tuple[int, ...]:
    """Return the numbers that the value of an option has, as `words`.

    Raises `InputError` unless all of them are whole and above 0; `end_of_fix` is the end of its message.
    """
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        numbers = (0,)  # refused below, as numbers below 1 are
    if min(numbers) < 1:
        given = ",".join(words)
        raise InputError(f"--{option} {given}: give whole numbers from 1 up, {end_of_fix}")
    return numbers
