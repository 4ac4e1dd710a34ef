"""Former name of `training.experience`, for one release."""

import warnings

from marlhf_lite.training.experience import Batch, ModelOutputs
from marlhf_lite.training.experience import Experience as OldOutputs

__all__ = ["Batch", "ModelOutputs", "OldOutputs"]

warnings.warn(
    "marlhf_lite.training.outputs is now marlhf_lite.training.experience, and OldOutputs is Experience",
    DeprecationWarning,
    stacklevel=2,
)
