"""Other packages: check their versions, and hide warnings that a user can do nothing about."""

import warnings
from contextlib import suppress
from importlib import metadata

from marlhf_lite.utils.errors import InputError

# Category, module that the warning names, message. Delete an entry when its package no longer warns.
WARNINGS = [
    # peft and TRL still use the old names
    (FutureWarning, r"(peft|transformers|trl)\.", r"`(is_)?gradient_checkpointing"),
    # of adapters on tied weights, which `models.fast.lora` separates
    (
        UserWarning,
        r"peft\.",
        r"(Model with `tie_word_embeddings|Input and output embeddings are no longer tied)",
    ),
    # of patterns for experts, which peft writes itself
    (RuntimeWarning, r"peft\.", r"The following (rank|alpha)_pattern keys .*gate_up_proj"),
    # of shards that one process reads, and of outputs that no code here changes in place
    (
        UserWarning,
        r"torch\.distributed\.",
        r"(torch\.distributed is |FSDP2-wrapped module .* returned a view)",
    ),
]


def ignore_warnings() -> None:
    """Hide the messages of WARNINGS; other warnings stay."""
    for category, module, message in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


def check_versions(package: str) -> None:
    """Raise `InputError` if a requirement of this package is installed in a version that it does not accept.

    A missing requirement fails at its import. Nothing is checked if this package itself is not installed.
    """
    from packaging.requirements import Requirement

    with suppress(metadata.PackageNotFoundError):
        for text in metadata.requires(package) or []:
            need = Requirement(text)
            if need.marker:  # of an extra, which may be missing
                continue
            there = metadata.version(need.name)
            if not need.specifier.contains(there, prereleases=True):
                fix = f"pip install '{need}'"
                raise InputError(
                    f"{need.name} {there} is installed, and {package} needs {need.specifier}: {fix}"
                )
