"""The door for tokenizers: they, and the folder of a model, are found and read here, without reading any weights.

It is the other half of `models.door`, in a file of its own, because a command that only looks at data needs no PEFT and
no model of transformers, whose imports take seconds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import huggingface_hub
import transformers
from safetensors import SafetensorError

from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.models.adapters import hub_errors
from marlhf_lite.utils.errors import InputError, one_line
from marlhf_lite.utils.shipped import shipped

# Without it transformers asks on standard input whether code of the folder may run, and `yes |` says y.
NO_CODE = {"trust_remote_code": False}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# How reading a folder fails if it is damaged, unknown or made by somebody who wants it to fail.
ERRORS_OF_LOADING = (
    OSError,
    ValueError,
    ImportError,
    EOFError,
    UnpicklingError,
    SafetensorError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    RecursionError,
)


def model_path(name: str) -> str:
    """Return the path of an embedded model or a local folder, or the name of a model on the hub.

    Raises `InputError` for a folder without a config or a tokenizer, and for a name that leads nowhere.
    """
    if name in EMBEDDED_MODELS:
        return str(shipped(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return str(folder)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join(EMBEDDED_MODELS)
        raise InputError(
            f"--model {name}: no such folder: give {known}, a folder, or a hub name (owner/name)"
        )
    # If the model was not downloaded before, ask the hub once for its config: transformers would try for a minute.
    with hub_errors(f"--model {name}"):
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):  # a path, if it is there
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"))
    return name


def model_folder(name: str) -> Path:
    """Return the folder with the files of a model; a model on the hub has a snapshot named by its commit."""
    path = model_path(name)
    if Path(path).is_dir():
        return Path(path)
    return Path(huggingface_hub.hf_hub_download(path, "config.json")).parent


def _check_folder(folder: Path) -> None:
    """Raise `InputError` unless the folder of a model has a config and a tokenizer."""
    if not (folder / "config.json").is_file():
        hint = "give a folder that save_pretrained wrote"
        if (folder / "adapter_config.json").is_file():
            hint = "it holds an adapter: give it as --sft or --rm, and its base as --model"
        raise InputError(f"--model {folder}: no config.json: {hint}")
    if not has_tokenizer(folder):  # transformers would make an empty one
        raise InputError(
            f"--model {folder}: no tokenizer ({TOKENIZERS[0]}): save the tokenizer there too"
        )


def load_tokenizer(name: str, option: str = "model"):
    """Load the tokenizer of the model that `option` names, usually `--model`.

    Text such as "<eos>" in data stays text; it never becomes the special token. If the tokenizer has no pad token, EOS
    takes its place, which is safe because masks come from lengths and not from token ids.
    """
    source = f"--{option} {name}"
    tokenizer = read_tokenizer(source, model_path(name))
    if tokenizer.eos_token_id is None:
        fix = "set eos_token in tokenizer_config.json"
        raise InputError(f"{source}: its tokenizer has no EOS token: {fix}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.split_special_tokens = True  # set after loading: a saved copy keeps its own setting
    return tokenizer


def read_tokenizer(source: str, place: str | Path, kind: type | None = None):
    """Read a tokenizer. If it has several chat templates, keep the one called `default`, as transformers does.

    Without `kind` transformers chooses the tokenizer's class, by the model's config if that is beside the tokenizer.
    With `kind`, the class of another tokenizer, the files are read as that tokenizer's files were.
    Raises `InputError` if there are no files of a tokenizer: transformers would make an empty one, which reads every
    text as `<unk>`.
    """
    if kind is None:
        kind = transformers.AutoTokenizer  # not as a default: naming it imports torch
    try:
        with errors_of_reading(source, place):
            tokenizer = kind.from_pretrained(str(place), **NO_CODE)
    except InputError:
        if has_tokenizer(place):  # else the missing files are the reason: see the next lines
            raise
    if not has_tokenizer(place):  # transformers has raised an error or made an empty one
        fix = "save the tokenizer there too, or download the model again"
        raise InputError(f"{source}: no tokenizer ({TOKENIZERS[0]}): {fix}")
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        if "default" not in templates:
            names = ", ".join(templates)
            fix = "save one of them as chat_template.jinja in a copy of the folder"
            raise InputError(
                f"{source}: its tokenizer has several chat templates ({names}), none called default: {fix}"
            )
        tokenizer.chat_template = templates["default"]
    return tokenizer


def read_template_and_end(folder: Path) -> tuple[str | None, str | None]:
    """Return the chat template and the end token of a model's folder whose tokenizer itself is missing.

    They may still be in `tokenizer_config.json` and `chat_template.jinja`, which need no tokenizer. Each is None if the
    folder does not have it.
    """
    values = json_of(folder / "tokenizer_config.json")
    template = values.get("chat_template")
    if isinstance(template, list):  # several, as older versions of transformers saved them
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    file = folder / "chat_template.jinja"
    if file.is_file():  # newer versions save the template here
        template = file.read_text(encoding="utf-8")
    end = values.get("eos_token")
    if isinstance(end, dict):  # a token with its settings
        end = end.get("content")
    return template, end


def has_tokenizer(place: str | Path) -> bool:
    """Return whether a folder has files of a tokenizer; for a model's name on the hub, whether the local cache has."""
    if Path(place).is_dir():
        return any((Path(place) / name).is_file() for name in TOKENIZERS)
    in_cache = [huggingface_hub.try_to_load_from_cache(str(place), name) for name in TOKENIZERS]
    return any(isinstance(path, str) for path in in_cache)  # a path only if the file is there


@contextmanager
def errors_of_reading(source: str, place: str | Path | None = None) -> Iterator[None]:
    """A context: an error of loading a model, an adapter or a tokenizer becomes one line that begins with `source`.

    `place` is what is read. If it is a local folder, its name is right, so the fix in the line is about its files. An
    `InputError` from inside passes as it is.
    """
    try:
        yield
    except InputError:  # a kind of `ValueError`, so the next line would catch it
        raise
    except ERRORS_OF_LOADING as error:
        reason = one_line(error)
        fix = "check the name, or give a local folder"
        if place is not None and Path(place).is_dir():
            fix = "download or save it again, or give another one"
        if isinstance(error, ImportError):
            fix = "install that, or give a model without it"
        if isinstance(error, UnpicklingError):  # torch's own text tells how to run the code
            reason = (
                "a file of weights holds more than numbers, which could run code and is not read"
            )
            fix = "give its weights as .safetensors"
        if "trust_remote_code" in str(error):
            reason = "it needs code from its own files, which never runs"
            fix = "choose one that transformers knows"
        raise InputError(f"{source}: cannot be loaded ({reason}): {fix}") from None


def json_of(file: Path) -> dict:
    """Return what a config says; empty if there is none, or if it cannot be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
