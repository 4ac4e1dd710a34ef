"""Run the chat template of a tokenizer, which may come from somebody else.

transformers' sandbox keeps a template from Python's objects, but not from arithmetic: `3 ** (10 ** 8)` computes for 20
seconds inside one instruction, in which neither Ctrl-C nor a limit on time is heard. Jinja hands such operators to a
function if it is told to; here that function refuses results beyond any chat's size. What loops instead is stopped by
the time limit of the caller.
"""

import functools
import operator
import re

LONGEST = 10**7  # characters or items of a text or a list
BITS = 512  # of a whole number
OPERATORS = {"+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod}
WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")  # a format that pads to 10,000 characters or more


def render(tokenizer, messages: list[dict], template: str, **options) -> str:
    """Return messages as the template writes them, as `tokenizer.apply_chat_template(tokenize=False)` does.

    Raises whatever the template raises, and `OverflowError` if it would compute something without end.
    """
    values = {**tokenizer.special_tokens_map, **options}
    return _compiled(template).render(messages=messages, tools=None, documents=None, **values)


@functools.lru_cache
def _compiled(template: str):
    """Return the template, compiled for transformers' sandbox with bounded operators."""
    # transformers takes seconds to import, and most rows of data have no template.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # The sandbox comes with an empty template: before it is bounded, compiling this one would compute its constants.
    bounded = _compile_jinja_template("").environment.overlay()
    bounded.intercepted_binops = frozenset(OPERATORS)
    bounded.call_binop = _bounded_operation
    return bounded.from_string(template)


def _bounded_operation(context, symbol: str, left, right):
    """Return `left symbol right`. Raises `OverflowError` if the result would be too large."""
    if _size_of_result(symbol, left, right) > 1:
        raise OverflowError(f"{symbol} of a chat template would make too large a value")
    return OPERATORS[symbol](left, right)


def _size_of_result(symbol: str, left, right) -> float:
    """Return about how large the result will be, relative to what is allowed: above 1 it is too large.

    Operations that cannot make anything large, such as a sum of two numbers, give 0.
    """
    if symbol == "%" and isinstance(left, str):  # a format
        return 2.0 if WIDE.search(left) else 0.0
    if isinstance(left, int) and isinstance(right, int):
        if symbol == "**":
            return left.bit_length() * max(right, 0) / BITS
        if symbol == "*":
            return (left.bit_length() + right.bit_length()) / BITS
        return 0.0
    lengths = [len(value) for value in (left, right) if hasattr(value, "__len__")]
    if symbol == "+":
        return sum(lengths) / LONGEST
    if symbol == "*" and lengths:  # a text or a list, repeated
        times = right if isinstance(right, int) else left
        return lengths[0] * times / LONGEST
    return 0.0
