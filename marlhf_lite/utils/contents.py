"""What a run reads, by hashes of its contents: models, tokenizers and code."""

import hashlib
import json
import sys
from modulefinder import ModuleFinder
from pathlib import Path

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.seals import file_hash

# Entries of a model's config that tell where its weights came from: equal weights may differ in them.
_PLACES = (
    "base_model_name_or_path",
    "_name_or_path",
    "transformers_version",
    "peft_version",
    "inference_mode",
)
_SETS = ("target_modules", "exclude_modules", "modules_to_save")  # PEFT writes a set in any order
_TOKENIZER = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model")


def text_hash(*texts: str) -> str:
    """Return the SHA-256 of texts in this order."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def model_hash(folder: str | Path, name: str = "checkpoint") -> str:
    """Return a hash of the weights in a folder and of their config, wherever the folder is.

    Raises `InputError`, which calls the folder `name`, if there are none.
    """
    folder = Path(folder)
    adapter = folder / "adapter_config.json"
    config, pattern = (
        (adapter, "adapter_model.*") if adapter.is_file() else (folder / "config.json", "*")
    )
    weights = [
        path for path in sorted(folder.glob(pattern)) if path.suffix in (".safetensors", ".bin")
    ]
    weights = weights or sorted(folder.glob("**/*.distcp"))  # of a checkpoint by several processes
    if not weights or not config.is_file():
        what = (
            "it holds no weights with their config"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise InputError(f"{name}: {folder}: {what}: give the folder of an adapter or of a model")
    try:
        facts = json.loads(config.read_text(encoding="utf-8"))
        facts = {key: value for key, value in facts.items() if key not in _PLACES}
        facts |= {
            key: sorted(facts[key], key=str) for key in _SETS if isinstance(facts.get(key), list)
        }
    except (ValueError, AttributeError):
        raise InputError(
            f"{name}: {config} is damaged: train it again, or give another folder"
        ) from None
    hashes = [bytes.fromhex(file_hash(path)) for path in weights]
    return hashlib.sha256(
        b"".join([json.dumps(facts, sort_keys=True).encode(), *hashes])
    ).hexdigest()


def tokenizer_hash(folder: Path) -> str:
    """Return a hash of the tokenizer's files in a model's folder, apart from its chat template."""
    facts = {}
    for path in {path for pattern in _TOKENIZER for path in folder.glob(pattern)}:
        facts[path.name] = file_hash(path)
        if path.name == "tokenizer_config.json":
            settings = json.loads(path.read_text(encoding="utf-8"))
            facts[path.name] = {
                key: value for key, value in settings.items() if key != "chat_template"
            }
    return text_hash(json.dumps(facts, sort_keys=True))


def code_hash(name: str) -> str:
    """Return a hash of the file of `package.module:name`, which was imported, and of those beside it that it imports.

    Installed packages do not count, nor does this library for code outside it. Empty for other names.
    """
    module = sys.modules.get(name.partition(":")[0])
    if not (place := getattr(module, "__file__", None)):
        return ""
    file, parts = Path(place), module.__name__.split(".")
    root = file.parents[len(parts) - (file.name != "__init__.py")]
    files = {file}
    if "site-packages" not in root.parts:
        ours = {
            n for n in sys.modules if n.startswith("marlhf_") and n.partition(".")[0] != parts[0]
        }
        finder = ModuleFinder([str(root)], excludes=ours)
        finder.import_hook(module.__name__)
        files |= {Path(found.__file__) for found in finder.modules.values() if found.__file__}
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
