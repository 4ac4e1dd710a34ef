"""The embedded data sets, and the options that each brings along: they hold where nothing else gives them."""

EMBEDDED_DEFAULTS: dict[str, dict] = {
    "tiny-tldr": {"model": "tiny-gemma"},
    "tiny-umbrella": {"model": "tiny-gemma-umbrella", "max_response_length": 136},
    "tiny-steps": {"model": "tiny-gemma-steps", "max_response_length": 176},
    "tiny-hh": {"model": "tiny-gemma-hh", "max_response_length": 136},
    "tiny-webgpt": {"model": "tiny-gemma-webgpt", "max_response_length": 136},
    "tiny-code": {"model": "tiny-codegemma", "reward": "tests", "critic_init": "sft"},
    "tiny-guess": {
        "model": "tiny-gemma-guess",
        "max_response_length": 12,
        "environment": "marlhf_lite.tasks.tiny_guess.game:GuessGame",
        "max_turns": 6,
        # What learns it: a game's score is mostly luck, so many games an update, and all guesses are tried.
        "updates": 150,
        "batch_size": 64,
        "policy_learning_rate": 3e-3,
        "kl_coef": 0.01,
        "temperature": 1.0,
        "top_k": 0,
    },
}
# Embedded model -> the data set whose text it has read. Two are other sizes of tiny-gemma.
EMBEDDED_MODELS: dict[str, str] = {
    **{options["model"]: name for name, options in EMBEDDED_DEFAULTS.items()},
    "tiny-gemma-small": "tiny-tldr",
    "tiny-gemma-large": "tiny-tldr",
}
