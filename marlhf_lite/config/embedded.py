"""The embedded models. What each embedded data set brings along stands in the presets `embedded/<data set>`."""

# Embedded model -> the data set whose text it has read. Two are other sizes of tiny-gemma.
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
