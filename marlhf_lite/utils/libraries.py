"""What other packages would write on a user's screen: warnings that only they can mend."""

import warnings

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
