import csv
import gzip
import json

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from marlhf_lite.tasks.files import SUFFIXES, known_suffix, read_rows
from marlhf_lite.utils.errors import InputError

ROWS = [
    {"prompt": "Häuser?\nTwo lines, one comma", "chosen": ' "quoted"', "rejected": " no\u2028separator"},
    {"prompt": "Why?", "chosen": " because 🐈", "rejected": " no"},
]


def write(path, rows):
    name = path.name
    opener = gzip.open if name.endswith(".gz") else open
    if ".parquet" in name:
        pandas.DataFrame(rows).to_parquet(path)
        return path
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        if ".jsonl" in name:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif ".json" in name:
            json.dump(rows, file, indent=1)
        else:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


def fails(path, *parts):
    """The one-line message, which names the file and holds every part."""
    with pytest.raises(InputError) as caught:
        read_rows(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    for part in parts:
        assert part in message, message
    return message


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".JSONL"])
def test_round_trip(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    write(tmp_path / "pairs.lower.jsonl" if suffix.isupper() else path, ROWS)
    if suffix.isupper():
        (tmp_path / "pairs.lower.jsonl").rename(path)
    rows = read_rows(path)
    assert rows == ROWS
    assert read_rows(str(path)) == ROWS


def test_json_with_data_key(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}))
    rows = read_rows(path)
    assert rows == ROWS and rows.place(1) == "row 2"


def test_byte_order_mark_and_windows_lines(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_bytes(b"\xef\xbb\xbfprompt,chosen,rejected\r\na,b,c\r\n\r\nd,e,f\r\n")
    rows = read_rows(path)
    assert rows[0] == {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert [rows.place(0), rows.place(1)] == ["line 2", "line 4"]


def test_places_count_blank_and_broken_lines(tmp_path):
    lines = tmp_path / "pairs.jsonl"
    lines.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_rows(lines).place(1) == "line 3"
    table = tmp_path / "pairs.csv"
    table.write_text('a,b\n"one\ntwo",x\ny,z\n')
    rows = read_rows(table)
    assert rows[0]["a"] == "one\ntwo" and [rows.place(0), rows.place(1)] == ["line 2", "line 4"]


def test_long_csv_field_leaves_the_limit_alone(tmp_path):
    path, before = tmp_path / "pairs.csv", csv.field_size_limit()
    path.write_text("a\n" + "x" * 200_000 + "\n")
    assert len(read_rows(path)[0]["a"]) == 200_000
    assert csv.field_size_limit() == before


def test_missing_directory_unknown(tmp_path):
    fails(tmp_path / "none.jsonl", "no such file", "check the path")
    fails(tmp_path, "directory", "name one file")
    odd = tmp_path / "pairs.xlsx"
    odd.write_text("x")
    fails(odd, "unknown extension '.xlsx'", *SUFFIXES)
    assert known_suffix("a/b.JSON.gz") == ".json.gz" and known_suffix("owner/name") is None


def test_unreadable(tmp_path, monkeypatch):
    path = write(tmp_path / "pairs.jsonl", ROWS)

    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", deny)
    fails(path, "Permission denied", "check its permissions")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_empty(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    path.write_bytes(b"")
    fails(path, "the file is empty")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz"])
def test_empty_inside_gzip(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    path.write_bytes(gzip.compress(b" \n"))
    fails(path, "the file is empty")


def test_no_rows(tmp_path):
    for name, text in (("a.json", "[]"), ("b.csv", "prompt,chosen\n"), ("c.json", '{"data": []}')):
        path = tmp_path / name
        path.write_text(text)
        fails(path, "holds no rows")
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.string())}), path)
    fails(path, "holds no rows")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".jsonl.gz", ".csv.gz"])
def test_not_utf8(tmp_path, suffix):
    data = b'{"a": "x"}\n{"a": "caf\xe9"}\n'
    path = tmp_path / f"pairs{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    fails(path, "line 2", "not UTF-8", "0xe9", f"offset {data.index(0xE9)}", "iconv")


def test_utf16(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_bytes("a,b\n1,2\n".encode("utf-16"))
    fails(path, "line 1", "not UTF-8", "offset 0")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz"])
def test_gzip_faults(tmp_path, suffix):
    path = write(tmp_path / f"pairs{suffix}", ROWS * 50)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    fails(path, "cut short", "again")
    path.write_bytes(whole[:20] + bytes(20) + whole[40:])
    fails(path, "damaged", "again")
    path.write_bytes(b'{"a": 1}\n')
    fails(path, "not gzip data", f"rename it to pairs{suffix.removesuffix('.gz')}")


def test_gzip_without_its_name(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    fails(path, "gzip-compressed", "rename it to pairs.jsonl.gz")


def test_parquet_faults(tmp_path):
    path = write(tmp_path / "pairs.parquet", ROWS * 200)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"PAR1", b"not a table at all", whole[:4] + bytes(60) + whole[64:]):
        path.write_bytes(data)
        fails(path, "damaged or not Parquet", "again")


def test_parquet_not_utf8(tmp_path):
    path = tmp_path / "pairs.parquet"
    text = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), path)
    fails(path, "row 2", "not UTF-8")
    whole = write(path, ROWS).read_bytes()
    path.write_bytes(whole.replace(b"prompt", b"prom\xc4t"))
    fails(path, "damaged or not Parquet", "utf-8")


def test_parquet_date_out_of_range(tmp_path):
    path = tmp_path / "pairs.parquet"
    days = pyarrow.array([1, 2**31 - 1], pyarrow.int32()).view(pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"day": days}), path)
    fails(path, "row 2", "mend or delete the row")


def test_jsonl_faults(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 1,}\n')
    fails(path, "line 3 column 9", "invalid JSON", "mend or delete the line")
    path.write_text('{"a": 1}\n{"a": "cut of')
    fails(path, "line 2 column", "Unterminated string")
    path.write_text('{"a": 1}\n' + "[" * 200_000)
    fails(path, "line 2", "nested too deeply")
    path.write_text('{"a": ' + "9" * 5000 + "}\n")
    fails(path, "line 1", "a number is too long")


@pytest.mark.parametrize(
    ("value", "kind"),
    [("[1]", "a list"), ('"x"', "a string"), ("3", "a number"), ("null", "null"), ("true", "true or")],
)
def test_rows_that_are_no_objects(tmp_path, value, kind):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": 1}\n' + value + "\n")
    fails(path, "line 2", f'expected an object such as {{"prompt": ...}}, found {kind}')
    path = tmp_path / "pairs.json"
    path.write_text('[{"a": 1}, ' + value + "]")
    fails(path, "row 2", f"found {kind}")


def test_json_faults(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text('[{"a": 1},\n {"a" 2}]')
    fails(path, "line 2 column 7", "invalid JSON")
    path.write_text('{"a": 1}\n{"a": 2}\n')
    fails(path, "line 2 column 1", "Extra data", "name the file .jsonl")
    path.write_text('{"rows": []}')
    fails(path, "expected a list of objects", "found an object")


def test_csv_faults(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text('a,b\n"1\n1",2\n3\n')
    fails(path, "line 4: 1 fields where the header has 2", "double quotes")
    path.write_text("a,b\n1,2,3\n")
    fails(path, "line 2: 3 fields")
    path.write_text('a,b\n1,2\n"3,4\n5,6\n')
    fails(path, "line 3", "not CSV", "mend the double quotes")
    path.write_text("a,a\n1,2\n")
    fails(path, "line 1", "repeated in ['a', 'a']")
    path.write_text("a,\n1,2\n")
    fails(path, "line 1", "empty or repeated")
