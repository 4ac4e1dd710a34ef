"""Load the preference data of a task: an embedded corpus, a local file or folder, or a data set on the hub."""

import csv
import difflib
import glob
import gzip
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import datasets
from tqdm.auto import tqdm

from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.paper_datasets import HUB, form_of
from marlhf_lite.tasks.splits import Task, check_part, draw, split_rows
from marlhf_lite.tasks.templates import Form, columns_of, to_preferences
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.utils.errors import InputError

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
SUFFIXES = tuple(READERS) + tuple(f"{kind}.gz" for kind in READERS if kind != ".parquet")
SHUFFLE_BUFFER = 1000  # rows of a stream that are read before the first one is used
_TEST_SPLITS = ("test", "validation", "valid")


def load_task(
    dataset: str,
    *,
    size: int | None = None,
    seed: int = 1234,
    bad_rows: str = "error",
    streaming: bool = False,
    template: str = "paper",
    part: str = "",
) -> Task:
    """Load, check and split the data of a task (paper, Appendix B.1 and B.2).

    Args:
        dataset: the name of an embedded corpus, a local file (one of `SUFFIXES`), a folder that
            `datasets.load_dataset` or `save_to_disk` knows, or a name on the hub (`owner/name`). Its columns are those
            that `to_preferences` takes, or those of one of the paper's data sets (`paper_datasets`). Where no split is
            called test, validation or valid, 10 % of the rows are held out, and 5 % for WebGPT.
        size: the number of rows to use in all, drawn by `seed` from the good ones; None uses all.
        bad_rows: `error` or `drop`, see `to_preferences`.
        streaming: read a hub name or a folder of files only until it has `size` rows, in an order drawn by `seed`.
        template: `paper` or `released`, the prompts of TL;DR and WebGPT, see `templates`.
        part: rows of another kind that become the test part, such as TL;DR's news articles, `cnn_dm`; the other parts
            stay as they are.

    `Task.counts` has `read`, `kept`, the reasons of `to_preferences`, the size of each part, and two reasons for rows
    that were kept but not used: `beyond_size` and `prompt_in_test`.

    Raises:
        InputError: for every fault of the name, the file or the rows.
    """
    _check_size(size, streaming)
    if dataset in EMBEDDED:
        return EMBEDDED[dataset](size, seed, part)
    rows, test = _find_rows(dataset, seed if streaming else None)
    form = HUB[dataset][0] if dataset in HUB else form_of(columns_of(rows))
    form = form.released or form if template == "released" else form
    check_part(dataset, part, form.parts)
    source = rows if test is None else test  # of a named part
    most = None if size is None else max(round(size * form.test_fraction), 1)
    test_size = most if test is not None else 0
    limits = (max(size - test_size, 1), most) if streaming else (None, None)
    rows, counts = to_preferences(_wanted(rows, form), dataset, bad_rows, form, limits[0])
    if test is not None:
        form = replace(form, convert=form.convert_test or form.convert)
        test, test_counts = to_preferences(_wanted(test, form), f"{dataset} (test)", bad_rows, form, limits[1])
        counts = Counter(counts) + Counter(test_counts)
    if size is not None:  # a separate test set gets as many of the rows as would be held out without it
        test = None if test is None else draw(test, most, seed)
        rows = draw(rows, max(size - len(test or ()), 0), seed)
    task = _split(dataset, rows, test, form, seed, counts)
    if not part:
        return task
    form = replace(form, convert=form.parts[part])
    rows, _ = to_preferences(_wanted(source, form), f"{dataset} ({part})", bad_rows, form, limits[1])
    return _with_test(task, part, draw(rows, most, seed))


def _check_size(size: int | None, streaming: bool) -> None:
    if size is not None and size < 1:
        raise InputError(f"--size {size}: give a number of rows from 1 up")
    if streaming and size is None:
        raise InputError("--dataset_streaming: it reads until it has --size rows: give --size")


def _with_test(task: Task, part: str, rows: list[dict]) -> Task:
    """Return the task with these rows as its test part."""
    splits = datasets.DatasetDict({**task.splits, "test": datasets.Dataset.from_list(rows)})
    counts = {name: n for name, n in task.counts.items() if name != part} | {"test": len(rows)}
    return replace(task, splits=splits, counts=counts)


def _split(name: str, rows: list, test: list | None, form: Form, seed: int, counts: dict) -> Task:
    used = len(rows) + len(test or ())
    try:
        splits = split_rows(rows, seed, form.fractions, form.test_fraction, test)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    sizes = {part: len(split) for part, split in splits.items()}
    unused = {"beyond_size": counts["kept"] - used, "prompt_in_test": used - sum(sizes.values())}
    return Task(name, splits, None, dict(counts) | unused | sizes)


def _wanted(rows, form: Form):
    """Return a data set as a list of rows without the columns that the form does not use: WebGPT's take gigabytes."""
    if not isinstance(rows, datasets.Dataset) or not set(form.columns) <= set(rows.column_names):
        return rows
    return rows.select_columns(list(form.columns)).to_list()


def drop_long_prompts(split: datasets.Dataset, tokenizer, max_tokens: int) -> tuple[datasets.Dataset, int]:
    """Drop prompts of more than `max_tokens` tokens, special tokens included; return the rest and the number dropped.

    Raises `InputError` where no row is left.
    """
    prompts, kept = list(split["prompt"]), []
    for start in range(0, len(prompts), 1000):
        ids = encode_prompts(tokenizer, prompts[start : start + 1000])
        kept += [start + i for i, row in enumerate(ids) if len(row) <= max_tokens]
    if prompts and not kept:
        raise InputError(
            f"--max_prompt_length {max_tokens}: all {len(prompts)} prompts are longer: raise it, or use shorter prompts"
        )
    dropped = len(prompts) - len(kept)
    return (split.select(kept) if dropped else split), dropped


# Where the rows are


def _find_rows(dataset: str, stream_seed: int | None) -> tuple[Iterable[dict], Iterable[dict] | None]:
    """Return the rows of `dataset`, and those of its test set or None. With a seed they are streamed; files never."""
    path = Path(os.path.expanduser(dataset))
    if dataset and os.path.isdir(path):  # os.path takes a name of any length; Path's own methods may raise
        if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            return _load(f"{path} (a folder)", datasets.load_from_disk, str(path), None)
        return _load(f"{path} (a folder)", datasets.load_dataset, str(path), stream_seed)
    looks_local = dataset.startswith(("/", ".", "~")) or dataset.lower().endswith(SUFFIXES)
    if dataset and (looks_local or os.path.exists(path)):
        return read_file(path), None
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        close = difflib.get_close_matches(dataset, [*EMBEDDED, *HUB], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--dataset {dataset}: unknown: {hint}{_choices()}")
    arguments = HUB[dataset][1] if dataset in HUB else {}
    return _load(dataset, datasets.load_dataset, dataset, stream_seed, **arguments)


def _load(source: str, load: Callable, name: str, stream_seed: int | None, **arguments):
    if stream_seed is not None:
        arguments["streaming"] = True
    try:
        loaded = load(name, **arguments)
        if stream_seed is not None:
            loaded = {part: Stream(split, source, stream_seed) for part, split in loaded.items()}
    except Exception as error:
        raise InputError(f"--dataset {source}: cannot be loaded ({_reason(error)}): {_choices()}") from None
    if isinstance(loaded, datasets.Dataset):
        return loaded, None
    if "train" not in loaded:
        raise InputError(f"--dataset {source}: no split named train, found {', '.join(loaded)}: name one of them train")
    return loaded["train"], next((loaded[part] for part in _TEST_SPLITS if part in loaded), None)


class Stream:
    """Iterate over rows that are read as they are used, in an order drawn by `seed`.

    Parquet row groups come in random order, one at a time; rows are shuffled in a buffer of `SHUFFLE_BUFFER`.
    """

    def __init__(self, split: datasets.IterableDataset, source: str, seed: int):
        self.source = source
        self.column_names = split.column_names or list(next(iter(split), {}))
        self._rows = split.reshard().shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER, max_buffer_input_shards=1)

    def place(self, index: int) -> str:
        """Return where a row stands, for error messages."""
        return f"row {index + 1} of the stream"

    def __iter__(self) -> Iterator[dict]:
        try:
            yield from tqdm(self._rows, desc=self.source, unit=" rows", leave=False)
        except Exception as error:
            hint = "run it again, or without --dataset_streaming"
            raise InputError(f"--dataset {self.source}: cannot be read ({_reason(error)}): {hint}") from None


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error  # datasets wraps the cause in a general error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]


def _choices() -> str:
    return (
        f"give an embedded corpus ({', '.join(EMBEDDED)}), a local file or folder (such as ./pairs.jsonl), "
        f"or a name on the hub (owner/name; needs the network)"
    )


# Local files


class FileRows(list):
    """Rows (dicts) of a local file, in its order."""

    def __init__(self, rows: Iterable[dict], path: Path):
        super().__init__(rows)
        self.path = path

    def place(self, index: int) -> str:
        """Return where row `index` stands, for error messages: its line in JSON lines and CSV, else its number."""
        lines = [line for line, _ in _records(self.path, _suffix(self.path))]
        return f"line {lines[index]}" if lines else f"row {index + 1}"


def read_file(path: str | Path) -> FileRows:
    """Read the rows of a local file with `datasets.load_dataset`; nothing is copied to its cache.

    `.jsonl` has one object a line, `.json` a list of objects or `{"data": [...]}`, `.csv` a header and
    comma-separated fields, all in UTF-8 and also gzipped; `.parquet` is a flat table. Columns are not checked here
    (see `to_preferences`); a value that a row lacks is None.

    Raises:
        InputError: where the file is missing, empty, damaged or of unknown kind; it names the line where it can.
    """
    path = Path(os.path.expanduser(path))
    suffix = _suffix(path)
    source = {"data_files": glob.escape(str(path)), "split": "train", "streaming": True}
    level = datasets.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # faults are reported below, in one line
    try:
        options = _csv_options(path) if suffix == ".csv" else {}
        rows = list(datasets.load_dataset(READERS[suffix], **source, **options))
    except StopIteration:  # the JSON reader found no row
        rows = []
    except Exception as error:
        raise _file_error(path, suffix, error) from None
    finally:
        datasets.utils.logging.set_verbosity(level)
    if suffix == ".json" and len(rows) == 1 and isinstance(rows[0].get("data"), list):
        rows = rows[0]["data"]
    if not rows:
        raise InputError(f"{path}: the file holds no rows: give at least one preference pair")
    return FileRows(rows, path)


def _suffix(path: Path) -> str:
    """Return the kind of a file, without `.gz`. Raises `InputError` where it is no file of a known kind."""
    known = ", ".join(SUFFIXES)
    if os.path.isdir(path):
        raise InputError(f"{path}: this is a directory, not a file: name one file in it ({known})")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file: check the path (relative paths start at {Path.cwd()})")
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise InputError(f"{path}: unknown extension {path.suffix!r}: known are {known}")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty: give at least one preference pair")
    return suffix.removesuffix(".gz")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file. Raises `InputError` where one is not UTF-8."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte 0x{line[error.start]:02x}"
                raise InputError(f"{path}: line {number}: not UTF-8 ({byte}): save the file as UTF-8") from None


def _records(path: Path, suffix: str) -> Iterator[tuple[int, str | list[str]]]:
    """Yield `(line, text)` for each row of a JSON lines file, `(line, fields)` for each row of a CSV file."""
    if suffix == ".jsonl":
        yield from ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    if suffix == ".csv":
        yield from itertools.islice(_csv_records(path), 1, None)  # without the header


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the module's 131,072 characters
    reader, line = csv.reader(_lines(path), strict=True), 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}: line {line}: not CSV ({error}): correct the double quotes") from None


def _csv_options(path: Path) -> dict:
    """Ask pandas for every field as text. Raises `InputError` where a row lacks a field, which pandas would fill."""
    _, header = next(_csv_records(path))
    if not all(name.strip() for name in header) or len(set(header)) < len(header):
        raise InputError(f"{path}: a column name is empty or repeated in {header}: name every column once")
    for line, fields in _records(path, ".csv"):
        if len(fields) != len(header):
            raise InputError(
                f"{path}: line {line}: {len(fields)} fields where the header has {len(header)}: "
                f"put fields that hold commas or line breaks in double quotes"
            )
    text = datasets.Features({name: datasets.Value("string") for name in header})
    return {"features": text, "keep_default_na": False}


def _file_error(path: Path, suffix: str, error: Exception) -> InputError:
    """Name the broken line of a file that `datasets` could not read, else give the reason that it had."""
    if isinstance(error, InputError):
        return error
    try:
        if READERS[suffix] == "json":
            _check_json(path, suffix)
    except InputError as fault:
        return fault
    except Exception as fault:  # such as a damaged gzip file
        error = fault
    return InputError(f"{path}: cannot be read ({_reason(error)}): check that it is whole and what its name says")


def _check_json(path: Path, suffix: str) -> None:
    """Raise `InputError` for the first line that is not JSON, or in JSON lines not an object."""
    whole = [(1, "".join(_lines(path)))] if suffix == ".json" else []
    for line, text in whole or _records(path, suffix):
        try:
            value = json.loads(text)
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
        except (ValueError, RecursionError) as error:
            line += getattr(error, "lineno", 1) - 1 if suffix == ".json" else 0
            reason = " ".join(getattr(error, "msg", str(error)).split())
            raise InputError(f"{path}: line {line}: invalid JSON ({reason}): correct or delete the line") from None
        if suffix == ".jsonl" and not isinstance(value, dict):
            raise InputError(f'{path}: line {line}: not an object such as {{"prompt": ...}}: correct or delete it')
