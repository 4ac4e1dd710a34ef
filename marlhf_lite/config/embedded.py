"""The embedded models. The presets `embedded/<data set>` have the options that suit each embedded data set."""

# Embedded model -> the data set that it was trained on. Two are other sizes of tiny-gemma.
EMBEDDED_MODELS: dict[str, str] = {
    "tiny-gemma": "tiny-tldr",
    "tiny-gemma-umbrella": "tiny-umbrella",
    "tiny-gemma-steps": "tiny-steps",
    "tiny-gemma-hh": "tiny-hh",
    "tiny-gemma-webgpt": "tiny-webgpt",
    "tiny-codegemma": "tiny-code",
    "tiny-gemma-guess": "tiny-guess",
    "tiny-gemma-small": "tiny-tldr",
    "tiny-gemma-large": "tiny-tldr",
}
