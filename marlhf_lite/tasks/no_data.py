"""Files that are not rows of data, though their names say so: what they look like, and what to type instead.

A new kind is a new line of `LOOKALIKES` (by the first bytes of the file), or of `refuse_object_that_is_no_row` (by the
parsed value).
"""

import re
from dataclasses import dataclass
from itertools import chain

from marlhf_lite.utils.errors import InputError

HEAD = 4096  # bytes that show what a file is
JSON = (".jsonl", ".ndjson", ".json")
LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
TEXTS = (*JSON, *TABLES)
GZIP = rb"\x1f\x8b"
BZIP2 = rb"BZh[1-9]1AY&SY"
XZ = rb"\xfd7zXZ\x00"
PACKED = {".gz": GZIP, ".bz2": BZIP2, ".xz": XZ}
NAMED = (*TEXTS, ".parquet", *PACKED)
NO_KIND = ""  # of a file whose name ends in something else
RECORDS = 'save it in pandas with to_json(name, orient="records", lines=True)'
# what a server sends has these names only, if it sends an error instead of the data
NAMES_IN_ERRORS = {"error", "errors", "message", "detail", "status", "documentation_url", "cause"}


@dataclass(frozen=True)
class Lookalike:
    """A kind of file that people give by mistake."""

    # regular expression of how the file begins, after white space and byte order marks
    begins: bytes
    what: str
    fix: str
    # the kinds of files that cannot begin like this
    kinds: tuple[str, ...] = (*NAMED, NO_KIND)


LOOKALIKES = (
    # What stands for a file that is stored elsewhere.
    Lookalike(rb"version https://git-lfs\.", "a Git LFS pointer, not the data", "run git lfs pull"),
    Lookalike(rb"[./]*(\.git/)?annex/objects/", "a git-annex pointer, not the data", "run git annex get"),
    Lookalike(rb"# xet version", "a Xet pointer, not the data", "run hf download for this file"),
    # What a server sends instead of a file.
    Lookalike(
        rb"(?i)<(!doctype|html|head|body|title|meta|script|!--)",
        "a web page, not data",
        "download the raw file: /resolve/ instead of /blob/ in an address of the hub, the button Raw on GitHub",
    ),
    Lookalike(
        rb"<(\?xml|[A-Za-z][\w:.-]*[\s/>])",
        "XML, not data",
        "check the address if a server sent it as an error, or convert it to JSON lines",
        TEXTS,
    ),
    Lookalike(
        rb"(?i)([45]\d\d( |: )|((entry )?not found|access denied|forbidden|unauthorized)\W*$)",
        "a server's message, not data",
        "check the address, and whether it needs a token",
        TEXTS,
    ),
    # Other formats under this name.
    Lookalike(GZIP, "packed by gzip", "end the name with .gz, as rows.jsonl.gz, or unpack it", NAMED),
    Lookalike(BZIP2, "packed by bzip2", "end the name with .bz2, as rows.jsonl.bz2, or unpack it", NAMED),
    Lookalike(XZ, "packed by xz", "end the name with .xz, as rows.jsonl.xz, or unpack it", NAMED),
    Lookalike(rb"(?s).{257}ustar", "a tar archive", "unpack it by tar -xf, and give the file in it"),
    Lookalike(rb"\x28\xb5\x2f\xfd", "packed by zstd", "unpack it with zstd -d"),
    Lookalike(rb"7z\xbc\xaf", "a 7z archive", "unpack it and give the file in it"),
    Lookalike(rb"Rar!", "a RAR archive", "unpack it and give the file in it"),
    Lookalike(
        rb"PK\x03\x04",
        "a zip archive or an Excel workbook",
        "unpack it and give the file in it, or save the sheet as .csv",
    ),
    Lookalike(rb"\xd0\xcf\x11\xe0", "an Excel workbook", "save the sheet as .csv"),
    Lookalike(rb"PAR1", "a Parquet file", "end its name with .parquet", TEXTS),
    Lookalike(
        rb"ARROW1|\xff\xff\xff\xff",
        "an Arrow file",
        "give the folder that save_to_disk wrote, or save it as Parquet",
    ),
    Lookalike(
        rb"\x80[\x02-\x05][\x95c}\]]", "a pickle", "load it where it was made, and save JSON lines"
    ),
    Lookalike(rb"SQLite format 3\x00", "an SQLite database", "export the table as .csv"),
    Lookalike(rb"%PDF-", "a PDF document", "give the rows as .jsonl or .csv"),
    Lookalike(rb"\x89HDF|\x93NUMPY", "an array file", RECORDS),
    # Text in another form than the name says.
    Lookalike(
        rb"\[[^\n]*\][ \t]*\r?\n[ \t]*\[",
        "a list on each line, not an object",
        'write {"messages": [...]} if they are chats, else the cells under their names',
        LINES,
    ),
    Lookalike(rb"\[", "a list, not an object per line", "name the file .json", LINES),
    Lookalike(rb"\{[ \t]*\r?\n", "an object over several lines", "name the file .json", LINES),
    Lookalike(rb"[\[{\s]*\{\s*'", "written by Python's print, not JSON", "write it with json.dumps", TEXTS),
    Lookalike(rb'\{\s*"', "JSON, not a table", "name the file .jsonl (.json if it is one value)", TABLES),
    Lookalike(rb"\[\s*[\[{]", "a JSON list, not a table", "name the file .json", TABLES),
    Lookalike(rb"[^\n]*\|[^\n]*\n[ \t]*\|?[ \t]*:?-{2,}[ \t:|-]*\n", "a Markdown table", "save it as .csv", TEXTS),
    Lookalike(rb"(---[ \t]*\r?\n|- \"?\w+\"?:)", "YAML", "convert it to JSON lines", TEXTS),
    Lookalike(rb'"?[A-Za-z][\w ]*"?[ ]*[,;\t|][^\n{]*\n', "a table, not JSON", "name the file .csv", JSON),
)  # fmt: skip


def refuse_lookalike(content: bytes, kind: str) -> None:
    """Raise `InputError` if the content of a file begins like another kind of file than its name says.

    `kind` is the end of the name, such as `.jsonl` or `.gz`, or `NO_KIND`.
    """
    head = content[:HEAD]
    # Texts may have a byte order mark and white space before what `begins` describes.
    without_mark = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for lookalike in LOOKALIKES:
        has_right_start = lookalike.begins == PACKED.get(kind)  # a file called .gz begins like gzip
        if kind not in lookalike.kinds or has_right_start:
            continue
        if re.match(lookalike.begins, head) or re.match(lookalike.begins, without_mark):
            raise InputError(f"{lookalike.what}: {lookalike.fix}")


def refuse_object_that_is_no_row(value) -> None:
    """Raise `InputError` if a JSON object is probably not a row of data.

    It may be a table by its columns, as pandas writes it, several lists of rows, or a server's message of an error.
    """
    if not isinstance(value, dict) or not value:
        return
    cells = list(value.values())
    _refuse_split_table(value)
    # {"rows": [{"row": {...}}, ...]}, as the hub's server of rows sends them
    if isinstance(value.get("rows"), list):
        raise InputError("rows under the name rows: write that list as a file of its own")
    if all(isinstance(cell, dict) for cell in cells):
        # {"prompt": {"0": ..., "1": ...}, "chosen": {...}}, or row numbers outside and the names of columns inside
        have_same_keys = len({tuple(cell) for cell in cells}) == 1
        is_row_of_messages = _is_message(
            cells[0]
        )  # {"prompt": {"role": ..., "content": ...}, "chosen": {...}}
        if have_same_keys and len(cells) > 1 and not is_row_of_messages:
            raise InputError(f"columns, not rows (pandas' orient columns or index): {RECORDS}")
        # {"prompt": {"0": ..., "1": ...}}, a table of one column
        if len(cells) == 1 and all(str(key).isdigit() for key in cells[0]):
            raise InputError(f"columns, not rows (pandas' orient columns): {RECORDS}")
    may_be_table_under_a_name = len(cells) == 1 and not _is_message(cells[0])
    if may_be_table_under_a_name:  # {"data": {"prompt": [...], "chosen": [...]}}
        refuse_object_that_is_no_row(cells[0])
    if all(isinstance(cell, list) for cell in cells):
        _refuse_lists(value)
    if set(value) <= NAMES_IN_ERRORS:
        message = " ".join(str(cells[0]).split())[:100]
        raise InputError(f"a server's message, not data ({message}): check the address")


def refuse_rows_under_a_name(value) -> None:
    """Raise `InputError` for a file that is one object with the rows in a list, as `{"info": {...}, "items": [...]}`.

    An object that is a row differs: it has a text beside its list, or a second list, or its list has messages.
    """
    if not isinstance(value, dict):
        return
    lists = [name for name, cell in value.items() if isinstance(cell, list)]
    has_texts = any(isinstance(cell, str) for cell in value.values())
    if len(lists) == 1 and not has_texts and _are_rows(value[lists[0]]):
        raise InputError(f"rows under the name {lists[0]}: write that list as a file of its own")


def refuse_other_lists(value: dict) -> None:
    """Raise `InputError` if an object has rows under `data` and other lists beside it, which would not be read."""
    _refuse_split_table(value)
    names = [name for name, cell in value.items() if isinstance(cell, list) and cell]
    if len(names) > 1:
        raise InputError(f"several lists, {', '.join(names)}: write each as a file of its own")


def refuse_lists_of_lists(rows: list) -> None:
    """Raise `InputError` if every row is a list: the names of its columns are not known."""
    if not rows or not all(isinstance(row, list) for row in rows):
        return
    if all(_is_message(item) for item in chain(*rows)):
        raise InputError('lists of messages: write each as {"messages": [...]}')
    raise InputError(f"lists without names of columns (pandas' orient values): {RECORDS}")


def _refuse_split_table(value: dict) -> None:
    """Raise `InputError` for `{"columns": [...], "data": [[...], ...]}`, which pandas writes with orient="split"."""
    if isinstance(value.get("columns"), list) and "data" in value:
        raise InputError(f"columns, not rows (pandas' orient split): {RECORDS}")


def _refuse_lists(value: dict[str, list]) -> None:
    """Raise `InputError` for an object of lists, unless it is one row whose cells are messages.

    Lists of objects are several tables, and lists of one length are the columns of a table. Others may be a row.
    """
    items = list(chain(*value.values()))
    if all(_is_message(item) for item in items):  # also if there are no items
        return
    names = ", ".join(value)
    if all(isinstance(item, dict) for item in items):
        fix = "write each list as a file of its own"
        raise InputError(f"rows under the names {names}, not a list of rows: {fix}")
    lengths = {len(cell) for cell in value.values()}
    if len(lengths) == 1:
        raise InputError(f"columns, not rows (lists under {names}): {RECORDS}")


def _are_rows(items: list) -> bool:
    """Return whether there are several items, and all are objects without the look of a message."""
    if len(items) < 2:
        return False
    return all(isinstance(item, dict) and not _is_message(item) for item in items)


def _is_message(value) -> bool:
    """Return whether a value looks like a message of a chat."""
    return isinstance(value, dict) and bool({"role", "from"} & set(value))
