"""Names of termination conditions, as options and config files use them, to rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.macro import FixedNGram, Perplexity, RandomizedNGram, TerminationRule, Whole
from marlhf_lite.parsing import GrammarParser, LinkGrammarParser, Parser, Parsing, PythonParser, Sentence, StanzaParser
from marlhf_lite.utils.errors import InputError

PARSERS: dict[str, Callable[[], Parser]] = {
    "grammar": GrammarParser,
    "stanza": StanzaParser,
    "link": LinkGrammarParser,
    "python": PythonParser,
}
RULES: dict[str, Callable[[MacroConfig, int], TerminationRule]] = {
    "fixed": lambda how, seed: FixedNGram(math.inf if how.n == "inf" else _whole_numbers("n", [how.n])[0]),
    "randomized": lambda how, seed: RandomizedNGram(_whole_numbers("lengths", how.lengths.split(",")), seed=seed),
    "whole": lambda how, seed: Whole(),
    "perplexity": lambda how, seed: Perplexity(how.perplexity_rule),
    "sentence": lambda how, seed: Sentence(),
    "parsing": lambda how, seed: Parsing(make_parser(how.parser), how.cutoff, how.inclusive),
}


def make_rule(how: MacroConfig, seed: int = 0) -> TerminationRule:
    """The rule that `how.termination` names.

    Raises `InputError` that names the option, for an unknown rule, a bad n or lengths, and for a parser whose package
    or model is missing.
    """
    if how.termination not in RULES:
        raise InputError(f"--termination {how.termination}: unknown: choose from {', '.join(RULES)}")
    return RULES[how.termination](how, seed)


@cache
def make_parser(name: str) -> Parser:
    """The parser of this name, one for the whole program: it may hold a model, processes and a cache."""
    if name not in PARSERS:
        raise InputError(f"--parser {name}: unknown: choose from {', '.join(PARSERS)}")
    return PARSERS[name]()


def _whole_numbers(name: str, words: list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        more = ", or inf" if name == "n" else ", comma-separated"
        raise InputError(f"--{name} {','.join(words)}: give whole numbers from 1 up{more}")
    return numbers
