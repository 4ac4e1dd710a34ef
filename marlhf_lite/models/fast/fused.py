"""Norms, gated units and rotary embeddings as kernels of liger-kernel: less time, and less memory for gradients."""

import importlib.util

import torch
from transformers import PreTrainedModel

from marlhf_lite.utils.errors import InputError


def use_fused_kernels(model: PreTrainedModel) -> PreTrainedModel:
    """Let norms, gated units and rotary embeddings of `model` run as kernels of liger-kernel; returns `model`.

    Raises `InputError` if there is no GPU, no liger-kernel, or no kernel for the family.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        fix = "pip install -e '.[gpu]'"
        raise InputError(f"--fast fused: needs a GPU and the package liger-kernel: {fix}")
    # Imported here, because only the extra [gpu] installs liger-kernel.
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    family = model.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(f"--fast fused: liger-kernel has none for {family} models: leave it out")
    # The losses are this library's own, so liger-kernel's stay out.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    return model
