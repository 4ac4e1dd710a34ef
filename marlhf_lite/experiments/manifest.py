"""What a run is made from, compared at every load: base model, tokenizer, chat template, earlier models, code, data.

Each counts by its content, wherever it is, and is stored in the run's manifest (`utils.run_folder`). One rule:

- `--resume` compares everything that the run reads with its own manifest;
- a command that takes a model of an earlier run compares what both read from the same place with that run's manifest;
- a difference is an error of one line; `--accept_changed` accepts it, and the command's own run records it.

An evaluation trains nothing: what it reads is the key of its stored answers, and changed content is answered again.
"""

import datetime
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from marlhf_lite.config.checked import Checked
from marlhf_lite.config.commands import (
    ExportCommand,
    GenerateCommand,
    StageCommand,
    environment_of,
    reward_of,
)
from marlhf_lite.config.parser import same_data
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.models.tokenizers import model_folder
from marlhf_lite.tasks.prompts import ROW
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.contents import code_hash, model_hash, text_hash, tokenizer_hash
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder, run_of
from marlhf_lite.utils.user_code import is_user_code

# Option that may name code -> what the manifest calls that code. (Another sampler may continue a run.)
CODE = {
    "reward": "reward function",
    "environment": "environment",
    "objective": "objective",
    "termination": "rule",
}
COLUMNS = "other columns of the data"
Contents = dict[str, dict[str, str]]  # name -> its "place" and "hash"


def contents_of(options: StageCommand, inputs: Inputs, template: str, task: Task) -> Contents:
    """Return what a command reads, by name. The base model must be in the hub's cache.

    `template` is the text of the chat template, which counts only if it writes the prompts of the task.
    """
    contents = model_contents(options, template if task.chats else "")
    for option in CODE:
        contents |= code_contents(option, getattr(options, option, ""))
    contents |= input_contents(inputs.sft, inputs.rm)

    # The rows have two digests (`rows_digests`): of prompts and answers ("data"), and of the other columns (`COLUMNS`).
    # Entries of two runs are compared only if their places are equal. A run with another reward or environment may read
    # other columns of the same file, so the reward and the environment are a part of the place of `COLUMNS`.
    readers_of_columns = f"{reward_of(options)} {environment_of(options)}".strip()
    places = {"data": options.dataset, COLUMNS: f"{options.dataset} for {readers_of_columns}"}
    for name, digest in task.digests.items():
        contents[name] = _entry(places[name], digest)
    return contents


def model_contents(
    options: StageCommand | GenerateCommand | ExportCommand, template: str
) -> Contents:
    """Return the entries of base model, tokenizer and chat template (none if `template` is empty).

    A model of the hub counts by its commit, any other by the content of its files.
    """
    name = options.model
    folder = model_folder(name)
    is_in_cache_of_hub = folder.parent.name == "snapshots"
    if is_in_cache_of_hub:  # there the name of a folder is its commit
        hash_of_weights = folder.name
        hash_of_tokenizer = folder.name
    else:
        hash_of_weights = model_hash(folder, f"--model {name}", counts_tokenizer=False)
        hash_of_tokenizer = tokenizer_hash(folder)
    contents = {
        "base model": _entry(name, hash_of_weights),
        "tokenizer": _entry(name, hash_of_tokenizer),
    }
    if template:
        contents["chat template"] = _entry(options.chat_template, text_hash(template))
    return contents


def code_contents(option: str, names: str) -> Contents:
    """Return an entry for each name of a user's code in `names`: the value of `option`, with commas between names.

    The entry is called as `CODE` calls the option. If there are several, as two classes of `--objective`, the name of
    its code is added to each. Code without a file cannot be hashed, so it has no entry.
    """
    entries = {}
    for name in names.split(","):
        name = name.strip()
        if is_user_code(name) and code_hash(name):
            entries[name] = _entry(name, code_hash(name))
    if len(entries) == 1:
        (entry,) = entries.values()
        return {CODE[option]: entry}
    return {f"{CODE[option]} {name}": entry for name, entry in entries.items()}


def input_contents(sft: Path | None, rm: Path | None) -> Contents:
    """Return the entries of the models of earlier stages, of those that are given."""
    contents = {}
    for name, path in {"SFT model": sft, "reward model": rm}.items():
        if path:
            contents[name] = _entry(os.path.realpath(path), model_hash(path, name))
    return contents


def _name_with_place(name: str, place: str) -> str:
    """Return a name of contents, followed by their place unless the name ends with it already, as that of code may."""
    return name if name.endswith(f" {place}") else f"{name} {place}"


def _entry(place: str, digest: str) -> dict[str, str]:
    return {"place": place, "hash": digest}


def rows_digests(task: Task) -> dict[str, str]:
    """Return two hashes of the rows as they were split, by name: of the task's columns, and of `COLUMNS`.

    `COLUMNS` are the other columns of the data that a reward or environment asks for; without any, it has no hash.
    """
    digests = {"data": hashlib.sha256()}
    for part, rows in task.splits.items():
        for column in sorted(rows.column_names):
            # The column ROW holds the other columns of a row, as JSON.
            name = COLUMNS if column == ROW else "data"
            digest = digests.setdefault(name, hashlib.sha256())
            values = json.dumps([part, column, list(rows[column])], default=str)
            digest.update(values.encode())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def runs_of(folders: Iterable[Path]) -> list[RunFolder]:
    """Return the runs of folders of models, each once; folders outside a run are skipped."""
    found = {}
    for folder in folders:
        run = run_of(folder)
        if run and run not in found:
            found[run] = RunFolder.open(run)
    return list(found.values())


def date_of(runs: Iterable[RunFolder]) -> str:
    """Return the date that chat templates see: the first run's, or today."""
    for run in runs:
        return run.manifest["date"]
    return datetime.date.today().isoformat()


def check_earlier(run: RunFolder, options: Checked, contents: Contents, accept: bool) -> list[dict]:
    """Compare what a command reads with the manifest of an earlier run, whose model the command uses.

    Only what both read from the same place is compared: what is read from another place is meant to be something else.
    Returns the differences if `accept` (`--accept_changed`) is true, else raises `InputError` for them; see
    `check_contents`.
    """
    earlier_options = run.config
    own_options = vars(options)
    earlier_contents = run.manifest["contents"]

    # 1. Everything but the rows, if the place is the same. A name that the earlier run does not have may stay on the
    # list, because `check_contents` passes over it.
    names = []
    for name, entry in contents.items():
        if name == "data":
            continue
        if name not in earlier_contents or earlier_contents[name]["place"] == entry["place"]:
            names.append(name)

    # 2. The rows, if they are meant to be the same: the same data, written by the same chat template, of the same part.
    fix = ""
    if "data" in contents and same_data(earlier_options, own_options):
        decides_rows = ("chat_template", "part")
        if all(earlier_options.get(option) == own_options[option] for option in decides_rows):
            names.append("data")
        # `--template` and `--columns` also decide the rows, but hardly anybody changes them on purpose. So the rows are
        # compared even if these options differ, and the error then says which values the earlier run had.
        differing = []
        for option in ("template", "columns"):
            earlier = earlier_options.get(option, own_options[option])
            if earlier != own_options[option]:
                differing.append(f"--{option} {earlier} and not {own_options[option]}")
        if differing:
            fix = f"give {', '.join(differing)}"
    return check_contents(run, {name: contents[name] for name in names}, accept, fix)


def check_contents(run: RunFolder, contents: Contents, accept: bool, fix: str = "") -> list[dict]:
    """Return the differences between these contents, wherever they are now, and those of a run's manifest.

    Contents that the manifest does not have are no difference. Unless differences are accepted (`accept`), raises
    `InputError` that names what has changed, and `fix`, by default to restore it.
    """
    stored = run.manifest["contents"]
    changed = []
    for name, entry in contents.items():
        if name in stored and stored[name]["hash"] != entry["hash"]:
            changed.append(name)
    if changed and not accept:
        which = ", ".join(_name_with_place(name, contents[name]["place"]) for name in changed)
        is_one = len(changed) == 1
        verb = "has" if is_one else "have"
        what = f"{which} {verb} other content than when {run.path} was made"
        if not fix:
            fix = "restore it" if is_one else "restore them"
        raise InputError(f"{what}: {fix}, or add --accept_changed to continue")
    return [
        {"what": name, "run": str(run.path), "was": stored[name], "is": contents[name]}
        for name in changed
    ]
