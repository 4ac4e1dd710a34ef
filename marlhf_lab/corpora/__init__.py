"""Makers of the embedded data: `make_rows` makes a data set. Each module makes one row from random numbers."""

import random
from collections.abc import Callable

from marlhf_lab.corpora import tiny_code, tiny_hh, tiny_steps, tiny_tldr, tiny_webgpt

# name of a data set -> the function that makes a row. tiny-umbrella is not among them: it is made when it is loaded,
# because its `--part` chooses how long the stories are.
MAKERS: dict[str, Callable[[random.Random], dict[str, str]]] = {
    "tiny-tldr": tiny_tldr.make_pair,
    "tiny-hh": tiny_hh.make_pair,
    "tiny-webgpt": tiny_webgpt.make_pair,
    "tiny-steps": tiny_steps.make_row,
    "tiny-code": tiny_code.make_row,
}


def make_rows(name: str, size: int, seed: int) -> list[dict[str, str]]:
    """Return `size` rows of an embedded data set; the same seed gives the same rows."""
    make_row = MAKERS[name]
    rng = random.Random(f"{name}-{seed}")
    return [make_row(rng) for _ in range(size)]
