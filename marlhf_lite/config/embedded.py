"""The embedded data sets, and the options that each brings along: they hold where nothing else gives them."""

EMBEDDED_DEFAULTS: dict[str, dict] = {
    "tiny-tldr": {"model": "tiny-gemma"},
    "tiny-umbrella": {"model": "tiny-gemma-umbrella", "max_response_length": 136},
    "tiny-steps": {"model": "tiny-gemma-steps", "max_response_length": 176},
    "tiny-hh": {"model": "tiny-gemma-hh", "max_response_length": 136},
    "tiny-webgpt": {"model": "tiny-gemma-webgpt", "max_response_length": 136},
    "tiny-code": {"model": "tiny-codegemma", "reward": "tests", "critic_init": "sft"},
}
EMBEDDED_MODELS: tuple[str, ...] = tuple(options["model"] for options in EMBEDDED_DEFAULTS.values())
