"""The switch of `--fast`: which ways of computing the same numbers in less time are taken.

`auto` takes what has been shown to give equal numbers on the device: on a CPU the tests show it, on a GPU a record of
`make gpu`. A free GPU in a notebook therefore gets the path that transformers and PEFT have tested. `off` takes none,
and names take these ways and no others.
"""

from marlhf_lite.utils.errors import InputError

LEVERS = {
    "lora": "adapters in fewer products (models/fast/lora.py)",
    "last_layer": "rows aligned left, and the last layer only where it is read (models/fast/last_layer.py)",
    "graph": "sampling by a CUDA graph, on a GPU (models/fast/decoding.py)",
}
ON_A_CPU = frozenset({"lora", "last_layer"})
# Lever -> the record in data/results/gpu that shows equal numbers on a card. None has run on one yet.
RECORDS_OF_A_GPU: dict[str, str] = {}

_choice = "auto"


def levers_of(choice: str) -> frozenset[str] | None:
    """Return the levers that `--fast` names; None for `auto`. Raises `InputError` for an unknown one."""
    if choice == "auto":
        return None
    if choice == "off":
        return frozenset()
    names = [name.strip() for name in choice.split(",")]
    for name in names:
        if name not in LEVERS:
            known = ", ".join(LEVERS)
            raise InputError(f"--fast {choice}: no {name!r}: give auto, off, or some of {known}")
    return frozenset(names)


def use_fast(choice: str) -> None:
    """Take these ways from now on, in this process: `auto`, `off`, or names of levers with commas between them."""
    global _choice
    levers_of(choice)
    _choice = choice


def is_on(lever: str, device: str) -> bool:
    """Return whether a way is taken on a kind of device, such as `cpu` or `cuda`."""
    asked = levers_of(_choice)
    if asked is not None:
        return lever in asked
    if device == "cpu":
        return lever in ON_A_CPU
    return lever in RECORDS_OF_A_GPU
