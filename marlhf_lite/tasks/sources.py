"""Find the rows of a data set: a file, files, a folder, an address or a name on the hub; and account for its files.

Every file that lies in a folder is read, or left out with its name.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.files import SUFFIXES, FileAccount, read_and_account
from marlhf_lite.tasks.paper_datasets import HUB, form_of
from marlhf_lite.tasks.places import files_below, matching_files
from marlhf_lite.tasks.shapes import columns_of, rename
from marlhf_lite.tasks.templates import Form
from marlhf_lite.utils.errors import InputError, did_you_mean, one_line

FIRST = 1000  # rows that show what the others are like
CHOICES = (
    f"give an embedded corpus ({', '.join(EMBEDDED)}), a local file or folder (such as ./pairs.jsonl), "
    "or a name on the hub (owner/name; needs the network), with --dataset_config if it has several configurations"
)


@dataclass(frozen=True)
class Found:
    """What `--dataset` names: its rows, and what else lies there."""

    rows: Iterable[dict]
    test: Iterable[dict] | None = None  # rows of a separate test set
    left_out_splits: tuple[str, ...] = ()  # splits that were not asked for
    files: tuple[
        FileAccount, ...
    ] = ()  # those of `rows`, in their order; none if a library read them
    test_files: tuple[FileAccount, ...] = ()
    left_out_files: tuple[str, ...] = ()  # files of the folder that are not read


@dataclass(frozen=True)
class Split:
    """The rows of a split of a folder or of the hub, and the accounts of its files."""

    rows: Iterable[dict]
    files: tuple[FileAccount, ...] = ()


def find_rows(dataset: str, columns: str = "", **where: str) -> Found:
    """Return the rows of `dataset` and those of its test set; `columns` are the user's names (`shapes.rename`).

    `where` has `dataset_config`, `data_dir` and the `split` to train on. Raises `InputError`.
    """
    path = os.path.expanduser(dataset)
    # os.path takes a name of any length; Path's own methods may raise
    if dataset and os.path.isdir(path):
        return _find_splits(dataset, columns, _load_folder, path, **where)
    is_address = "://" in dataset
    looks_local = (
        dataset.startswith(("/", ".", "~"))
        or dataset.lower().endswith(SUFFIXES)
        or any(mark in dataset for mark in "[]*?")
    )
    if dataset and (is_address or looks_local or os.path.exists(path)):
        others = {name: value for name, value in where.items() if value != "train"}
        refuse_where(others, f"{dataset} is a file and")
        files = [dataset] if is_address else matching_files(dataset) or [path]
        split = _read_files(files, columns)
        return Found(rows=rename(split.rows, columns), files=split.files)
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        raise InputError(
            f"--dataset {dataset}: unknown: {did_you_mean(dataset, [*EMBEDDED, *HUB])}{CHOICES}"
        )
    arguments = HUB[dataset][1] if dataset in HUB else {}
    return _find_splits(dataset, columns, _load_from_hub, dataset, **arguments, **where)


def form_of_rows(dataset: str, rows: Iterable[dict], where: Mapping[str, str]) -> Form:
    """Return the form of the rows of a data set: the paper's by its name on the hub, else by the columns."""
    is_paper_data = dataset in HUB and not any(where.values())  # else the user says where rows are
    if is_paper_data:
        return HUB[dataset][0]
    return form_of(columns_of(rows), where.get("columns", ""))


def has_chats(rows: Iterable[dict], form: Form) -> bool:
    """Return whether most rows have messages: one odd row does not decide for all."""
    first = list(islice(rows, FIRST))
    chats = 0
    for row in first:
        chats += any(isinstance(row.get(column), list | dict) for column in form.columns)
    return 2 * chats > len(first)


def name_of_test(dataset: str, found: Found) -> str:
    """Return how messages name the rows of a separate test set: with its files, which may be unexpected ones."""
    files = "".join(f": {os.path.basename(file.name)}" for file in found.test_files)
    return f"{dataset} (test{files})"


def place_in_files(files: Sequence[FileAccount], number: int) -> str:
    """Return the place of a row by its number in all files: its file, if there are several, and its row there."""
    if len(files) < 2:
        return f"row {number}"
    for file in files:
        if number <= file.rows:
            return f"{file.name}: row {number}"
        number -= file.rows
    return f"row {number}"


def refuse_where(where: Mapping[str, str], what: str) -> None:
    """Raise `InputError` for options that say where rows are, such as `--split`, if the data have no such places."""
    for name, value in where.items():
        if value:
            raise InputError(f"--{name} {value}: {what} has none: leave it out")


def _read_files(paths: Iterable[str], names: str) -> Split:
    """Read files as one data set. Raises `InputError` if one has pairs and another prompts, for example."""
    rows: list[dict] = []
    accounts = []
    shapes = {}
    for path in paths:
        more, account = read_and_account(path)
        rows.extend(more)
        accounts.append(account)
        if more:
            shapes[account.name] = form_of(columns_of(more), names).name
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} ({shape})" for name, shape in shapes.items())
        fix = f"give one of them, such as --dataset {accounts[0].name}"
        raise InputError(f"files with different rows: {found}: {fix}")
    return Split(rows, tuple(accounts))


def _find_splits(
    dataset: str,
    names: str,
    load: Callable[..., tuple[dict[str, Split], tuple[str, ...]]],
    place: str,
    *,
    split: str = "",
    dataset_config: str = "",
    data_dir: str = "",
    **arguments,
) -> Found:
    """Return what `find_rows` does; of a split such as train_prefs the test part is test_prefs."""
    is_folder = os.path.isdir(place)
    shown = f"--dataset {dataset}{' (a folder)' if is_folder else ''}"
    if dataset_config:
        arguments["name"] = dataset_config
    if data_dir:
        arguments["data_dir"] = data_dir
    try:
        splits, left_out_files = load(place, names, **arguments)
    except InputError:
        raise
    except Exception as error:
        cause = one_line(error.__cause__ or error)  # datasets wraps the cause in a general error
        fix = CHOICES
        if is_folder:
            fix = "give one file of it, or name a configuration by --dataset_config"
        raise InputError(f"{shown}: cannot be loaded ({cause}): {fix}") from None
    train = split or "train"
    if train not in splits:
        fix = "name one by --split, or name one of them train"
        if len(splits) == 1:
            fix = f"add --split {next(iter(splits))}"
        raise InputError(f"{shown}: no split named {train}, found {', '.join(splits)}: {fix}")
    test = None
    for word in ("test", "validation", "valid"):
        name = train.replace("train", word)
        if test is None and name in splits and name != train:
            test = name
    left_out = []
    if not split:
        left_out = [name for name in splits if name not in (train, test)]
    return Found(
        rows=rename(splits[train].rows, names),
        test=rename(splits[test].rows, names) if test else None,
        left_out_splits=tuple(left_out),
        files=splits[train].files,
        test_files=splits[test].files if test else (),
        left_out_files=left_out_files,
    )


def _load_from_hub(name: str, names: str, **arguments) -> tuple[dict[str, Split], tuple[str, ...]]:
    import datasets  # takes long to import, and files need none of it

    return _splits_of(datasets.load_dataset(name, **arguments)), ()


def _splits_of(loaded) -> dict[str, Split]:
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return {"train": Split(loaded)}
    return {str(name): Split(rows) for name, rows in loaded.items()}


def _load_folder(folder: str, names: str, **arguments) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Load a folder of files, or what `save_to_disk` wrote; return its splits, and the files that are in none.

    Files of text are read like a single one: an error names the line, and cells of CSV stay text, also if they say NA
    or 007.
    """
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    if os.path.exists(os.path.join(folder, "dataset_dict.json")) or os.path.exists(
        os.path.join(folder, "state.json")
    ):
        return _splits_of(datasets.load_from_disk(folder, **arguments)), ()
    with _name_without_brackets(folder) as plain:
        config = datasets.load_dataset_builder(plain, **arguments).config
        files_of_split: dict[str, list[str]] = {}
        for split, files in (config.data_files or {}).items():
            files_of_split[str(split)] = [_path_inside(str(file), plain) for file in files]
        used = set(chain(*files_of_split.values()))
        left_out = tuple(name for name in files_below(folder) if name not in used)
        if not isinstance(config, CsvConfig | JsonConfig):
            return _splits_of(datasets.load_dataset(plain, **arguments)), left_out
    splits = {}
    for split, files in files_of_split.items():
        splits[split] = _read_files([os.path.join(folder, name) for name in files], names)
    return splits, left_out


def _path_inside(file: str, folder: str) -> str:
    """Return the path of a file relative to its folder. Raises `InputError` if a folder's README names other files."""
    name = os.path.relpath(os.path.abspath(file), os.path.abspath(folder))
    if "://" in file or name.startswith(".."):
        raise InputError(
            f"--dataset {folder} (a folder): its README.md names {file}, which is not in it: give that file itself"
        )
    return name


@contextmanager
def _name_without_brackets(folder: str) -> Iterator[str]:
    """Inside, return a folder with links to the same files, if `datasets` would take its name for a pattern."""
    if not any(mark in folder for mark in "[]*?"):
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        for name in files_below(folder):
            link = Path(copy) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.abspath(os.path.join(folder, name)))
        yield copy
