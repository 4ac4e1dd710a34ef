"""Libraries of Hugging Face print nothing but what this library prints for them."""

import datasets
import huggingface_hub
import transformers

from marlhf_lite.utils.libraries import ignore_warnings


def silence_libraries() -> None:
    """Switch off progress bars, log messages and known warnings of the libraries that a command uses."""
    datasets.disable_progress_bars()
    # Not even errors of `datasets` are shown: our own error names the file.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    ignore_warnings()
