"""The switch of `--fast`: which ways of computing the same numbers in less time are taken.

`auto` takes what has been shown to give equal numbers on the device: on a CPU the tests show it, on a GPU a record of
`make gpu`. A free GPU in a notebook therefore gets the path that transformers and PEFT have tested. `off` takes none,
and names take these ways and no others. A model carries the levers that it was loaded with, so two models in one
process can differ, and every model made from a base computes as the base was asked to.
"""

from torch import nn

from marlhf_lite.utils.errors import InputError

LEVERS = {
    "lora": "adapters in fewer products (models/fast/lora.py)",
    "last_layer": "rows aligned left, and the last layer only where it is read (models/fast/last_layer.py)",
    "graph": "sampling by a CUDA graph, on a GPU (models/fast/decoding.py)",
    "fused": "norms, gated units and rotary embeddings by liger-kernel, on a GPU (models/fast/fused.py)",
}
ON_A_CPU = frozenset({"lora", "last_layer"})
# Lever -> the record in data/results/gpu that shows equal numbers on a card. None has run on one yet. `fused` never
# enters: it needs a package and knows only some families, so a default would refuse models that run without it.
RECORDS_OF_A_GPU: dict[str, str] = {}


def levers_of_choice(choice: str, device: str) -> frozenset[str]:
    """Return the levers that a choice of `--fast` takes on a kind of device, such as `cpu` or `cuda`.

    `choice` is `auto`, `off`, or names of levers with commas between them. Raises `InputError` for an unknown name.
    """
    if choice == "auto":
        return ON_A_CPU if device == "cpu" else frozenset(RECORDS_OF_A_GPU)
    if choice == "off":
        return frozenset()
    names = [name.strip() for name in choice.split(",")]
    for name in names:
        if name not in LEVERS:
            known = ", ".join(LEVERS)
            raise InputError(f"--fast {choice}: no {name!r}: give auto, off, or some of {known}")
    return frozenset(names)


def set_levers(model: nn.Module, levers: frozenset[str]) -> None:
    """Let this model, and the copies that are made of it, compute by these levers."""
    model.fast_levers = levers


def levers_of_model(model: nn.Module) -> frozenset[str]:
    """Return the levers that a model was loaded with.

    If this library has not loaded the model, they are those of `auto` on the model's device.
    """
    levers = getattr(model, "fast_levers", None)
    if levers is not None:
        return levers
    return levers_of_choice("auto", next(model.parameters()).device.type)
