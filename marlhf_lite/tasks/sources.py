"""Find the rows of a data set: a file, files, a folder, an address or a name on the hub; and account for its files.

Every file that lies in a folder is read, or left out with its name.
"""

import filecmp
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.files import KNOWN, SUFFIXES, FileAccount, read_and_account
from marlhf_lite.tasks.paper_datasets import HUB, form_of
from marlhf_lite.tasks.places import files_below, matching_files
from marlhf_lite.tasks.shapes import columns_of, rename
from marlhf_lite.tasks.templates import Form
from marlhf_lite.utils.errors import InputError, did_you_mean, one_line

ENOUGH_ROWS = 1000  # that many rows show what the others are like
SAVED = (".arrow", "dataset_dict.json", "dataset_info.json", "state.json")  # by `save_to_disk`
_NAMES_BETTER_ANSWERS = re.compile(r"(^|[^a-z])(chosen|accepted|preferred)([^a-z]|$)")
_NAMES_WORSE_ANSWERS = re.compile(r"(^|[^a-z])rejected([^a-z]|$)")
_NAMES_A_TEST_SET = re.compile(r"(^|[^a-zA-Z])(test|validation|valid|dev|eval)([^a-zA-Z]|$)")
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
    files: tuple[FileAccount, ...] = ()  # those of `rows`, in order; none if a library read them
    test_files: tuple[FileAccount, ...] = ()
    left_out_files: tuple[str, ...] = ()  # files of the folder that are not read


@dataclass(frozen=True)
class Split:
    """The rows of a split of a folder or of the hub, and the accounts of its files."""

    rows: Iterable[dict]
    files: tuple[FileAccount, ...] = ()


def find_rows(dataset: str, columns: str = "", **where: str) -> Found:
    """Return the rows of `dataset` and those of its test set; `columns` are the user's names (`shapes.rename`).

    `where` has `dataset_config`, `data_dir` and the `split` to train on, each empty if it is not given. Raises
    `InputError`.
    """
    # 1. A folder. (`os.path` takes a name of any length, while the methods of `Path` may raise.)
    path = os.path.expanduser(dataset)
    if dataset and os.path.isdir(path):
        return _find_splits(dataset, columns, _load_folder, path, **where)

    # 2. A file, files or an address. A name that looks like one is taken as one, so that a misspelt name is not looked
    # up on the hub.
    is_address = "://" in dataset
    looks_local = (
        dataset.startswith(("/", ".", "~"))
        or dataset.lower().endswith(SUFFIXES)
        or _has_marks_of_patterns(dataset)
    )
    if dataset and (is_address or looks_local or os.path.exists(path)):
        # A file has a single split, which is called train: so `--split train` fits, and no other option.
        unfit = {name: value for name, value in where.items() if value != "train"}
        refuse_options(unfit, f"{dataset} is a file and")
        if is_address:
            files = [dataset]
        else:
            files = matching_files(dataset) or [path]  # if no file matches, reading it says so
        split = _read_files(files, columns)
        return Found(rows=rename(split.rows, columns), files=split.files)

    # 3. A name on the hub, as owner/name.
    owner, slash, name = dataset.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise InputError(
            f"--dataset {dataset}: unknown: {did_you_mean(dataset, [*EMBEDDED, *HUB])}{CHOICES}"
        )
    arguments = {}
    if dataset in HUB:
        _, arguments = HUB[dataset]
    return _find_splits(dataset, columns, _load_from_hub, dataset, **arguments, **where)


def form_of_rows(dataset: str, rows: Iterable[dict], where: Mapping[str, str]) -> Form:
    """Return the form of the rows of a data set.

    The paper's data are known by their name on the hub, others by their columns. `where` has the other arguments of
    `find_rows`.
    """
    # If the user says where the rows are, by `--split` for example, they may be others than the paper's.
    is_paper_data = dataset in HUB and not any(where.values())
    if is_paper_data:
        form, _ = HUB[dataset]
        return form
    return form_of(columns_of(rows), where.get("columns", ""))


def most_rows_have_messages(rows: Iterable[dict], form: Form) -> bool:
    """Return whether most of the first rows have messages, so that one odd row does not decide for all."""
    first_rows = list(islice(rows, ENOUGH_ROWS))
    with_messages = 0
    for row in first_rows:
        with_messages += any(isinstance(row.get(column), list | dict) for column in form.columns)
    return 2 * with_messages > len(first_rows)


def name_of_test(dataset: str, found: Found) -> str:
    """Return how errors name the rows of a separate test set: with its files, because the user may expect others."""
    files = "".join(f": {os.path.basename(file.name)}" for file in found.test_files)
    return f"{dataset} (test{files})"


def place_in_files(files: Sequence[FileAccount], number: int) -> str:
    """Return the place of a row for an error: its file, if there are several, and its number there.

    `number` counts the rows of all files from 1.
    """
    if len(files) < 2:
        return f"row {number}"
    for file in files[:-1]:
        if number <= file.rows:
            return f"{file.name}: row {number}"
        number -= file.rows
    return f"{files[-1].name}: row {number}"


def refuse_options(options: Mapping[str, str], what: str) -> None:
    """Raise `InputError` for the first of these options (name -> value) that has a value: the data have no use for it.

    These are options that say where the rows are, such as `--split`. `what` describes the data.
    """
    for name, value in options.items():
        if value:
            raise InputError(f"--{name} {value}: {what} has none: leave it out")


def _read_files(paths: Iterable[str], user_columns: str) -> Split:
    """Read files as one data set; `user_columns` is `--columns`, which says what the rows are.

    Raises `InputError` if the files have rows of different shapes, such as pairs and prompts, if two files have the
    same rows, and if one file has the better answers of pairs and another one the worse.
    """
    rows: list[dict] = []
    accounts: list[FileAccount] = []
    rows_of_files: list[list[dict]] = []
    shape_of_file = {}
    for path in paths:
        rows_of_file, account = read_and_account(path)
        if rows_of_file and rows_of_file in rows_of_files:
            other = accounts[rows_of_files.index(rows_of_file)].name
            fix = "move one of them elsewhere, or give one of them"
            raise InputError(f"{account.name}: the same rows as {other}: {fix}")
        rows_of_files.append(rows_of_file)
        rows.extend(rows_of_file)
        accounts.append(account)
        if rows_of_file:
            shape_of_file[account.name] = form_of(columns_of(rows_of_file), user_columns).name
    if len(set(shape_of_file.values())) > 1:
        found = ", ".join(f"{name} ({shape})" for name, shape in shape_of_file.items())
        fix = f"give one of them, such as --dataset {accounts[0].name}"
        raise InputError(f"files with different rows: {found}: {fix}")
    _refuse_halves_of_pairs([account.name for account in accounts], rows, user_columns)
    return Split(rows, tuple(accounts))


def _refuse_halves_of_pairs(names: Sequence[str], rows: Iterable[dict], user_columns: str) -> None:
    """Raise `InputError` if one of the files of these rows has the better answers, by its name, and another the worse.

    Read as rows of one kind, the worse answers would be learned like the better ones. Rows with both answers pass.
    """
    has_both_answers = "rejected" in columns_of(rows) or "rejected" in user_columns
    if has_both_answers or len(names) < 2:
        return
    shared_folder = os.path.commonpath([os.path.dirname(name) for name in names])
    better = []
    worse = []
    for name in names:
        # A folder that all files are in says nothing of their differences.
        own_name = os.path.relpath(name, shared_folder or ".").lower()
        names_better = _NAMES_BETTER_ANSWERS.search(own_name)
        names_worse = _NAMES_WORSE_ANSWERS.search(own_name)
        if names_better and not names_worse:
            better.append(name)
        if names_worse and not names_better:
            worse.append(name)
    if better and worse:
        fix = "put the two answers of a prompt into one row, as chosen and rejected, or give one of the files"
        raise InputError(f"{better[0]} and {worse[0]}: two halves of pairs, by their names: {fix}")


def _find_splits(
    dataset: str,
    user_columns: str,
    load: Callable[..., tuple[dict[str, Split], tuple[str, ...]]],
    place: str,
    *,
    split: str = "",
    dataset_config: str = "",
    data_dir: str = "",
    **arguments,
) -> Found:
    """Return the rows of the `split` to train on (default: train), and those of its test set, as `find_rows` does.

    The test set of train is the first of test, validation and valid that is there; that of train_prefs is found by its
    name in the same way, such as test_prefs.

    Args:
        dataset: the value of `--dataset`, for messages.
        user_columns: the value of `--columns`.
        load: `_load_folder` or `_load_from_hub`, which loads `place` with the arguments of `datasets.load_dataset`.
        place: the path of the folder, or the name on the hub.
        split, dataset_config, data_dir: the values of these options.
        arguments: further arguments of `datasets.load_dataset`.
    """
    # 1. Load all splits.
    is_folder = os.path.isdir(place)
    option = f"--dataset {dataset} (a folder)" if is_folder else f"--dataset {dataset}"
    if dataset_config:
        arguments["name"] = dataset_config
    if data_dir:
        arguments["data_dir"] = data_dir
    try:
        splits, left_out_files = load(place, user_columns, **arguments)
    except InputError:
        raise
    except Exception as error:  # a library may raise any
        cause = one_line(error.__cause__ or error)  # datasets wraps the cause in a general error
        fix = CHOICES
        if is_folder and not _readable(files_below(place)):
            fix = f"it has no file of a known kind, which are {KNOWN}"
        elif is_folder:
            fix = "give one file of it, or name a configuration by --dataset_config"
        raise InputError(f"{option}: cannot be loaded ({cause}): {fix}") from None

    # 2. Choose the one to train on and its test set.
    train = split or "train"
    if train not in splits:
        fix = "name one by --split, or name one of them train"
        if len(splits) == 1:
            fix = f"add --split {next(iter(splits))}"
        others = _readable(left_out_files)
        if others:
            fix += f", or give a file by --dataset {os.path.join(place, others[0])}"
        raise InputError(f"{option}: no split named {train}, found {', '.join(splits)}: {fix}")
    test = None
    for word in ("test", "validation", "valid"):
        name = train.replace("train", word)
        is_another = name != train  # a split may be named without the word train
        if test is None and name in splits and is_another:
            test = name
    left_out = []
    if not split:  # a user who names a split knows that there are others
        left_out = [name for name in splits if name not in (train, test)]
    found = Found(
        rows=rename(splits[train].rows, user_columns),
        left_out_splits=tuple(left_out),
        files=splits[train].files,
        left_out_files=left_out_files,
    )
    if test is None:
        return found
    test_rows = rename(splits[test].rows, user_columns)
    return replace(found, test=test_rows, test_files=splits[test].files)


def _load_from_hub(
    name: str, user_columns: str, **arguments
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Return the splits of a data set on the hub, and no files that are left out.

    `user_columns` is not used; it is there because `_load_folder` takes it.
    """
    import datasets  # takes long to import, and files need none of it

    return _splits_of(datasets.load_dataset(name, **arguments)), ()


def _splits_of(loaded) -> dict[str, Split]:
    """Return the splits of what `datasets` loaded; rows that are not split are called train."""
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return {"train": Split(loaded)}
    return {str(name): Split(rows) for name, rows in loaded.items()}


def _load_folder(
    folder: str, user_columns: str, **arguments
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Return the splits of a folder of files, or of what `save_to_disk` wrote, and the files that are in no split.

    `datasets` says which file is in which split. CSV and JSON files are then read as if the user had given the files
    themselves: an error names the line, and cells of CSV stay text, also if they say NA or 007. Files of other kinds,
    such as Parquet, are read by `datasets`. `user_columns` is the value of `--columns`; `arguments` go to `datasets`.
    """
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    datasets.disable_progress_bars()

    # 1. What `save_to_disk` wrote.
    marks_of_save_to_disk = ("dataset_dict.json", "state.json")
    if any(os.path.exists(os.path.join(folder, name)) for name in marks_of_save_to_disk):
        try:
            splits = _splits_of(datasets.load_from_disk(folder, **arguments))
        except FileNotFoundError as error:
            fix = "copy the whole folder that save_to_disk wrote"
            raise InputError(
                f"--dataset {folder} (a folder): {error.filename} is missing: {fix}"
            ) from None
        return splits, tuple(name for name in files_below(folder) if not name.endswith(SAVED))

    # 2. The files of each split. Files that are no data, such as a copy `train.jsonl.bak`, are left out.
    with _folder_with_plain_name(folder) as plain:
        config = datasets.load_dataset_builder(plain, **arguments).config
        files_of_split: dict[str, list[str]] = {}
        used: set[str] = set()
        of_other_kinds: list[str] = []
        for split, files in (config.data_files or {}).items():
            names = [_path_inside(str(file), plain) for file in files]
            files_of_split[str(split)] = _readable(names)
            used.update(files_of_split[str(split)])
            of_other_kinds += [name for name in names if name not in used]
        all_files = files_below(folder)
        left_out = tuple(name for name in all_files if name not in used)
        _check_files(folder, files_of_split, left_out)

        # 3. Their rows. The configuration shows which kind of files `datasets` would read.
        has_csv_or_json = isinstance(config, CsvConfig | JsonConfig)
        if not has_csv_or_json:
            _check_files_of_library(folder, used, of_other_kinds)
            splits = _splits_of(datasets.load_dataset(plain, **arguments))
            for split, files in files_of_split.items():
                names = [os.path.join(folder, name) for name in files]
                _refuse_halves_of_pairs(names, splits[split].rows, user_columns)
            return splits, left_out
    splits = {}
    for split, files in files_of_split.items():
        splits[split] = _read_files([os.path.join(folder, name) for name in files], user_columns)
    return splits, left_out


def _readable(names: Iterable[str]) -> list[str]:
    """Return the names of files whose kind can be read."""
    return [name for name in names if name.lower().endswith((*SUFFIXES, ".arrow"))]


def _check_files(
    folder: str, files_of_split: Mapping[str, Sequence[str]], left_out: Sequence[str]
) -> None:
    """Raise `InputError` if a folder has no file to read, lacks a part, or would train on its test set."""
    option = f"--dataset {folder} (a folder)"
    if not any(files_of_split.values()):
        found = ", ".join(left_out) or "nothing"
        raise InputError(
            f"{option}: no file of a known kind, found {found}: known are {KNOWN}; unpack an archive"
        )
    for files in files_of_split.values():
        missing = _missing_part(files)
        if missing:
            others = re.sub(r"\d+-of-\d+$", "*", missing)
            fix = f"copy it, too, or give the other parts by --dataset '{os.path.join(folder, others)}'"
            raise InputError(f"{option}: {missing} is missing: {fix}")
    # `datasets` knows the names of splits in lower case only, so it takes Test.jsonl for rows to train on.
    for name in files_of_split.get("train", ()):
        if _NAMES_A_TEST_SET.search(name.lower()) and not _NAMES_A_TEST_SET.search(name):
            fix = "write the names of splits in lower case, such as test.jsonl"
            raise InputError(f"{option}: {name} would be read as rows to train on: {fix}")


def _check_files_of_library(
    folder: str, files: Collection[str], of_other_kinds: Sequence[str]
) -> None:
    """Raise `InputError` if `datasets` would read a file of another kind with the rows of a folder, or a file twice.

    A file of another kind is one such as `train.parquet.bak`, a copy one such as `train (1).parquet`.
    """
    option = f"--dataset {folder} (a folder)"
    if of_other_kinds:
        fix = "move it elsewhere, or give the files by a pattern"
        raise InputError(f"{option}: {of_other_kinds[0]} would be read with the rows: {fix}")
    paths_of_size: dict[int, list[str]] = {}
    for name in sorted(files):
        path = os.path.join(folder, name)
        same_size = paths_of_size.setdefault(os.path.getsize(path), [])
        for other in same_size:
            if filecmp.cmp(path, other, shallow=False):
                fix = "move one of them elsewhere"
                raise InputError(f"{option}: {name} is a copy of {os.path.basename(other)}: {fix}")
        same_size.append(path)


def _missing_part(files: Iterable[str]) -> str:
    """Return the name of the first part that is missing among the files, such as `train-00001-of-00002`; else empty.

    The name is without what follows the numbers, such as `.parquet`: in data of the hub, that is different for each
    part. If there is only one file such as `best-3-of-5`, whose number is not filled up with zeros, it may be no part
    but have this name by chance, so it is passed over.
    """
    numbers_of_parts: dict[tuple[str, str], set[str]] = {}
    for name in files:
        part = re.match(r"(.*?)(\d+)-of-(\d+)", name)
        if part:
            before, number, total = part.groups()
            numbers_of_parts.setdefault((before, total), set()).add(number)
    for (before, total), numbers in numbers_of_parts.items():
        are_filled_up = len(total) > 1 and all(len(number) == len(total) for number in numbers)
        if len(numbers) == 1 and not are_filled_up:
            continue
        width = len(total) if are_filled_up else 1
        found = {int(number) for number in numbers}
        first = 1 if int(total) in found else 0  # counted from 0, a number is below the total
        for number in range(first, first + int(total)):
            if number not in found:
                return f"{before}{number:0{width}}-of-{total}"
    return ""


def _path_inside(file: str, folder: str) -> str:
    """Return the path of a file relative to its folder. Raises `InputError` if a folder's README names other files."""
    name = os.path.relpath(os.path.abspath(file), os.path.abspath(folder))
    is_elsewhere = "://" in file or name.startswith("..")
    if is_elsewhere:
        raise InputError(
            f"--dataset {folder} (a folder): its README.md names {file}, which is not in it: give that file itself"
        )
    return name


def _has_marks_of_patterns(name: str) -> bool:
    """Return whether a name has marks of a pattern of files, such as the star in `part-*.jsonl`.

    Two colons are such a mark for `datasets`: they stand between an archive and the file in it.
    """
    return any(mark in name for mark in ("[", "]", "*", "?", "::"))


@contextmanager
def _folder_with_plain_name(folder: str) -> Iterator[str]:
    """Give the `with` statement a folder with the files of `folder`, by a name without marks of a pattern.

    `datasets` would take a folder's name with such marks, as in `data [1]`, for a pattern of files. If `folder` has no
    marks in its name, it is given itself. Otherwise a temporary folder with links to its files is given, which is
    deleted at the end of the `with` statement.
    """
    if not _has_marks_of_patterns(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as folder_of_links:
        for name in files_below(folder):
            link = Path(folder_of_links) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.abspath(os.path.join(folder, name)))
        yield folder_of_links
