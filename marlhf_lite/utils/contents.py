"""What a run reads, by hashes of its contents: models, tokenizers and code."""

import hashlib
import json
import sys
from fnmatch import fnmatch
from modulefinder import ModuleFinder
from pathlib import Path

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.seals import file_hash, files_that_count

# Entries of a model's config that tell where its weights came from: equal weights may differ in them.
_PLACES = (
    "base_model_name_or_path",
    "name_or_path",
    "_name_or_path",
    "transformers_version",
    "peft_version",
    "inference_mode",
)
_SETS = ("target_modules", "exclude_modules", "modules_to_save")  # PEFT writes a set in any order
_TOKENIZER = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model")
_TEMPLATES = ("chat_template", "additional_chat_templates")
WEIGHTS = (".safetensors", ".bin", ".distcp")  # how names of files with weights end


def text_hash(*texts: str) -> str:
    """Return the SHA-256 of texts in this order."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def model_hash(folder: str | Path, name: str = "checkpoint", counts_tokenizer: bool = True) -> str:
    """Return a hash of all files of a model or an adapter, which does not change if its folder is moved.

    All files count, because all can change what the model does: not only weights, but also settings for sampling, and a
    reward model's tokenizer and template. Without `counts_tokenizer` the files of the tokenizer are left out (see
    `tokenizer_hash`). Raises `InputError`, which calls the folder `name`, if there are no weights or no config.
    """
    folder = Path(folder)
    files = files_that_count(folder)
    has_config = "adapter_config.json" in files or "config.json" in files
    has_weights = any(file.endswith(WEIGHTS) for file in files)
    if not (has_config and has_weights):
        what = "it holds no weights with their config"
        if not folder.is_dir():
            what = "there is no such folder"
        raise InputError(f"{name}: {folder}: {what}: give the folder of an adapter or of a model")
    hashes = {}
    for file in files:
        if counts_tokenizer or not _is_of_tokenizer(file):
            hashes[file] = _hash_without_places(folder / file, name)
    return text_hash(json.dumps(hashes, sort_keys=True))


def tokenizer_hash(folder: Path) -> str:
    """Return a hash of the tokenizer's files in a model's folder, apart from its chat template."""
    hashes = {}
    for file in files_that_count(folder):
        # A template is in files of its own, or in an entry of tokenizer_config.json: both are left out.
        if _is_of_tokenizer(file) and not file.startswith(_TEMPLATES):
            hashes[file] = _hash_without_places(folder / file, "tokenizer", ("chat_template",))
    return text_hash(json.dumps(hashes, sort_keys=True))


def _is_of_tokenizer(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in _TOKENIZER) or file.startswith(_TEMPLATES)


def _hash_without_places(path: Path, name: str, also: tuple[str, ...] = ()) -> str:
    """Return the hash of a file of a model. If it is a config, it counts without what may differ for equal weights.

    In a config, the entries that tell where weights came from (`_PLACES`) and those of `also` do not count. Nor does
    the order of lists that stand for sets (`_SETS`), because it differs between runs. Raises `InputError`, which calls
    the folder `name`, if a config is damaged.
    """
    if not path.name.endswith("config.json"):  # weights, and all other files
        return file_hash(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in (*_PLACES, *also):
            entries.pop(entry, None)
        for entry in _SETS:
            if isinstance(entries.get(entry), list):
                entries[entry] = sorted(entries[entry], key=str)
    except (ValueError, AttributeError, TypeError):
        raise InputError(
            f"{name}: {path} is damaged: train it again, or give another folder"
        ) from None
    return text_hash(json.dumps(entries, sort_keys=True))


def code_hash(name: str) -> str:
    """Return a hash of the code of `package.module:name`: the module's file, and the files beside it that it imports.

    The module must be imported already. Installed packages that it imports do not count, nor does this library, unless
    the module is part of it. The hash is empty if the module was not imported or has no file, and for names of another
    form.
    """
    module = sys.modules.get(name.partition(":")[0])
    place = getattr(module, "__file__", None)
    if not place:
        return ""
    file = Path(place)
    files = {file}
    # The folder from which the module's package was imported: for a module a.b, in a/b.py or in a/b/__init__.py, it is
    # the folder in which a is. A package has one more folder of its own to leave.
    parts = module.__name__.split(".")
    is_package = file.name == "__init__.py"
    root = file.parents[len(parts) if is_package else len(parts) - 1]
    if "site-packages" not in root.parts:  # of an installed module its own file is enough
        package = parts[0]
        ours = set()  # modules of this library, unless the code is in it
        for imported in sys.modules:
            if imported.startswith("marlhf_") and imported.partition(".")[0] != package:
                ours.add(imported)
        finder = ModuleFinder([str(root)], excludes=ours)  # it sees only what is under `root`
        finder.import_hook(module.__name__)
        files |= {Path(found.__file__) for found in finder.modules.values() if found.__file__}
    content = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(content).hexdigest()
