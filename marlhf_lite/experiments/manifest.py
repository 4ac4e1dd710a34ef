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
from marlhf_lite.config.commands import ExportCommand, GenerateCommand, StageCommand
from marlhf_lite.config.parser import same_data
from marlhf_lite.experiments.inputs import Inputs
from marlhf_lite.models.loading import model_folder
from marlhf_lite.tasks.prompts import ROW
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.contents import code_hash, model_hash, text_hash, tokenizer_hash
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder, run_of

CODE = {
    "reward": "reward function",
    "environment": "environment",
    "objective": "objective",
    "termination": "rule",
}
COLUMNS = "other columns of the data"
Contents = dict[str, dict[str, str]]  # name -> its "place" and "hash"


def contents_of(options: StageCommand, inputs: Inputs, template: str, task: Task) -> Contents:
    """Return what a command reads, by name. The base model must be in the hub's cache."""
    code = [
        (what, word.strip())
        for name, what in CODE.items()
        for word in getattr(options, name, "").split(",")
    ]
    found = model_contents(options, template if task.chats else "")
    found |= {
        what: _entry(word, text) for what, word in code if ":" in word and (text := code_hash(word))
    }
    found |= input_contents(inputs.sft, inputs.rm)
    places = {
        "data": options.dataset,
        COLUMNS: f"{options.dataset} for {options.reward} {options.environment}".strip(),
    }
    return found | {name: _entry(places[name], text) for name, text in task.digests.items()}


def model_contents(
    options: StageCommand | GenerateCommand | ExportCommand, template: str
) -> Contents:
    """Return base model, tokenizer and chat template; a model on the hub counts by its commit."""
    folder, name = model_folder(options.model), options.model
    hashes = [folder.name] * 2
    if folder.parent.name != "snapshots":
        weights = model_hash(folder, f"--model {name}", counts_tokenizer=False)
        hashes = [weights, tokenizer_hash(folder)]
    written = (
        {"chat template": _entry(options.chat_template, text_hash(template))} if template else {}
    )
    return {"base model": _entry(name, hashes[0]), "tokenizer": _entry(name, hashes[1]), **written}


def input_contents(sft: Path | None, rm: Path | None) -> Contents:
    """Return the models of earlier stages that are given."""
    models = {"SFT model": sft, "reward model": rm}
    return {
        name: _entry(os.path.realpath(path), model_hash(path, name))
        for name, path in models.items()
        if path
    }


def _entry(place: str, text: str) -> dict[str, str]:
    return {"place": place, "hash": text}


def rows_digests(task: Task) -> dict[str, str]:
    """Return a hash of all rows, as they were split, and one of the columns that a reward or environment asks for."""
    digests = {"data": hashlib.sha256()}
    for part, rows in task.splits.items():
        for column in sorted(rows.column_names):
            digest = digests.setdefault(COLUMNS if column == ROW else "data", hashlib.sha256())
            digest.update(json.dumps([part, column, list(rows[column])], default=str).encode())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def runs_of(folders: Iterable[Path]) -> list[RunFolder]:
    """Return the runs of folders of models, each once; folders outside a run are skipped."""
    return [RunFolder.open(run) for run in dict.fromkeys(filter(None, map(run_of, folders)))]


def date_of(runs: Iterable[RunFolder]) -> str:
    """Return the date that chat templates see: the first run's, or today."""
    return next((run.manifest["date"] for run in runs), datetime.date.today().isoformat())


def check_earlier(run: RunFolder, options: Checked, contents: Contents, accept: bool) -> list[dict]:
    """Return the differences to the manifest of a run that a model comes from, of what both read from one place.

    Rows count if both have the same data, chat template and part. Raises `InputError` as `check_contents`.
    """
    theirs, mine = run.config, vars(options)
    there = run.manifest["contents"]
    names = [
        name
        for name, x in contents.items()
        if name != "data" and there.get(name, x)["place"] == x["place"]
    ]
    alike = "data" in contents and same_data(theirs, mine)
    if alike and all(theirs.get(key) == mine[key] for key in ("chat_template", "part")):
        names.append("data")
    asked = [
        f"--{k} {theirs[k]} and not {mine[k]}"
        for k in ("template", "columns")
        if alike and theirs[k] != mine[k]
    ]
    fix = f"give {', '.join(asked)}" if asked else ""
    return check_contents(run, {name: contents[name] for name in names}, accept, fix)


def check_contents(run: RunFolder, contents: Contents, accept: bool, fix: str = "") -> list[dict]:
    """Return the differences between these contents, wherever they are now, and the manifest of a run.

    Raises `InputError` that names them, unless they are accepted.
    """
    stored = run.manifest["contents"]
    changed = [
        name for name, x in contents.items() if name in stored and stored[name]["hash"] != x["hash"]
    ]
    if changed and not accept:
        which = ", ".join(f"{name} {contents[name]['place']}" for name in changed)
        has, them = ("has", "it") if len(changed) == 1 else ("have", "them")
        fault = f"{which} {has} other content than when {run.path} was made"
        raise InputError(
            f"{fault}: {fix or f'restore {them}'}, or add --accept_changed to continue"
        )
    return [
        {"what": name, "run": str(run.path), "was": stored[name], "is": contents[name]}
        for name in changed
    ]
