"""Other packages: whether their versions will do, and what they would write on a user's screen."""

import warnings
from importlib import metadata

from marlhf_lite.utils.errors import InputError

# Category, module that the warning names, message. An entry goes when the package has mended it.
WARNINGS = [
    # peft and TRL still use the old names
    (FutureWarning, r"(peft|transformers|trl)\.", r"`(is_)?gradient_checkpointing"),
    # of adapters on tied weights, which `models.lora` takes apart
    (UserWarning, r"peft\.", r"(Model with `tie_word_embeddings|Input and output embeddings are no longer tied)"),
    # of patterns for experts, which peft writes itself
    (RuntimeWarning, r"peft\.", r"The following (rank|alpha)_pattern keys .*gate_up_proj"),
    # of shards that one process reads, and of outputs that nothing here changes in place
    (UserWarning, r"torch\.distributed\.", r"(torch\.distributed is |FSDP2-wrapped module .* returned a view)"),
]


def ignore_warnings() -> None:
    """Hide the warnings of other packages that a user can do nothing about; those of other messages stay."""
    for category, module, message in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


def check_versions(package: str) -> None:
    """Raise `InputError` if a package that this one needs is there in another version than it asks for.

    One that is missing is left to its import, and so is all if this package was not installed.
    """
    from packaging.requirements import Requirement

    try:
        needs = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for need in map(Requirement, needs):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            there = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            continue
        if not need.specifier.contains(there, prereleases=True):
            fix = f"pip install '{need}'"
            raise InputError(f"{need.name} {there} is installed, and {package} needs {need.specifier}: {fix}")
