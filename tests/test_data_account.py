"""Every line, row and file that lies there is read, dropped with a reason, or left out with a name."""

import ast
import bz2
import gzip
import json
import lzma
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pandas
import pyarrow.parquet
import pytest
from conftest import fails

from marlhf_lite.cli import main
from marlhf_lite.experiments.data import describe_files, describe_rows
from marlhf_lite.tasks import addresses
from marlhf_lite.tasks.files import read_and_account, read_file
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.sources import find_rows
from marlhf_lite.utils.user_code import import_user_code

COUNT = 12
ROWS = [
    {"prompt": f"Why {i}?", "chosen": f"Warm {i}.", "rejected": f"Cold {i}."} for i in range(COUNT)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = pandas.DataFrame(ROWS).to_csv(index=False)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# Lines


@pytest.mark.parametrize(
    ("name", "content", "lines", "others"),
    [
        ("a.jsonl", LINES, 12, {}),
        ("a.jsonl", "\n" + LINES.replace("\n", "\n\n", 2) + "\n", 16, {"blank": 4}),
        ("a.jsonl", "\ufeff" + LINES + "\ufeff" + LINES, 24, {}),  # joined files with marks
        ("a.csv", TABLE, 13, {"header": 1}),
        ("a.csv", TABLE + "\n", 14, {"header": 1, "blank": 1}),
        (
            "a.csv",
            TABLE + ",,\n , ,\n",
            15,
            {"header": 1, "blank": 2},
        ),  # empty rows of a spreadsheet
        ("a.csv", TABLE + 'Why?,"one\ntwo\nthree",no\n', 16, {"header": 1, "inside quotes": 2}),
        ("a.csv", "sep=;\n" + TABLE.replace(",", ";"), 14, {"header": 1, "separator": 1}),
        ("a.csv", "SEP=;\n" + TABLE.replace(",", ";"), 14, {"header": 1, "separator": 1}),
        ("a.csv", '"sep=|"\r\n' + TABLE.replace(",", "|"), 14, {"header": 1, "separator": 1}),
        *(
            (name, text.replace("\n", "\r").encode(encoding), text.count("\n"), None)
            for name, text in (("a.jsonl", LINES), ("a.csv", TABLE))
            for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32")
        ),
    ],
)
def test_lines_add_up(tmp_path, name, content, lines, others):
    rows, account = read_and_account(write(tmp_path / name, content))
    found = {kind: count for kind, count in account.other_lines.items() if count}
    assert others is None or found == others
    assert (
        account.lines
        == lines
        == len(rows) + sum(found.values())
        == account.rows + sum(found.values())
    )
    assert rows[:COUNT] == ROWS


STOPS = [  # what would be read wrongly without a word -> what the error names
    ("a.csv", TABLE + 'Who?,"A.,B.\nX?,c. ",d.\n', ["row 13: lines 14 to 15 are one row", "line 14"]),
    ("a.csv", TABLE + 'Who?,"A.,B.\nY?,e.,f.\nX?,c. ",d.\n', ["row 13: lines 14 to 16 are one row"]),
    ("a.tsv", TABLE.replace(",", "\t") + 'Who?\t"A.\tB.\nX?\tc. "\td.\n', ["lines 14 to 15 are one row"]),
    ("a.csv", TABLE + TABLE, ["row 13: the header again, in line 14"]),
    ("a.csv", TABLE + "\ufeff" + TABLE, ["row 13: the header again, in line 14"]),
    ("a.csv", TABLE + "chosen,rejected,prompt\na,b,c\n", ["row 13: the header again"]),
    ("a.csv", TABLE + TABLE.title(), ["row 13: the header again"]),
    ("a.jsonl", LINES + '{"prompt": "a", "chosen": "b", "chosen": "c"}\n', ["line 13", '"chosen" twice']),
    ("a.json", '[{"prompt": "a", "x": {"y": 1, "y": 2}}]', ['"y" twice']),
    ("a.json", json.dumps(ROWS) + json.dumps(ROWS), ["several lists", "part-*.json"]),
    ("a.json", json.dumps({"data": ROWS, "more": ROWS}), ["several lists, data, more"]),
    (  # spaces after the separators are this file's, and not those of prose
        "a.csv",
        TABLE.replace(",", ", ").replace("Warm 3.", '"Warm 3.').replace("Warm 4.", 'Warm 4."'),
        ["row 4: lines 5 to 6 are one row"],
    ),
    (
        "a.csv",
        TABLE.replace(",Warm", ", Warm").replace("Why 3?", '"Why 3?').replace("Why 5?", 'Why 5?"'),
        ["row 4: lines 5 to 7 are one row"],
    ),
    ("a.csv", "sep=;\n" + TABLE, ["line 1 names the separator ';', which the header lacks: delete the line"]),
    (
        "a.csv",
        TABLE.replace("Warm 3.", '"Warm 3.').replace("Cold 5.", 'Cold 5."'),
        ["row 4: lines 5 to 7, one row because a quote opens in line 5"],
    ),
    ("a.csv", TABLE + "total: 12 rows\n", ["line 14", "(1, not 3)", "delete a line that is no row"]),
    ("a.csv", "# exported\n" + TABLE, ["row 1: line 2", "(3, not 1)", "delete a line that is no row"]),
    ("a.csv", TABLE.replace("\n", ",,\n"), ["2 columns of the header have no name: name or delete them"]),
    *((name, text + "a,b\0,c\n", ["a zero byte", "tr -d"]) for name, text in (("a.csv", TABLE), ("a.jsonl", LINES))),
    ("a.csv", TABLE + "W\0hy?,a,b\n", ["line 14: a zero byte"]),
    ("a.jsonl", LINES.replace("\n", ",\n"), ["line 1", "delete the commas at the ends of the lines"]),
    ("a.jsonl", LINES.replace("\n", "", 1), ["line 1", "name the file .json"]),
    ("a.jsonl", '{"x": ' + "[" * 450 + "]" * 450 + "}\n", ["line 1: values nested more than 100 deep"]),
    ("a.json", '[{"x": ' + "[" * 450 + "]" * 450 + "}]", ["values nested more than 100 deep"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "parts"), STOPS)
def test_what_does_not_add_up_stops_with_its_place(tmp_path, name, content, parts):
    path = write(tmp_path / name, content)
    fails(lambda: read_file(path), path, *parts)


def test_line_breaks_in_a_text_are_no_fault(tmp_path):
    """Prose has a space after its commas, and most rows of a table with long texts are not like whole rows."""
    letter = TABLE + 'Who?,"Dear Sir, hello\nYours, Bob",no\n'
    assert len(read_file(write(tmp_path / "a.csv", letter))) == COUNT + 1
    code = TABLE + 'Who?,"f(a,b)\nf(c,d)\nreturn",no\n' * 3 + 'Who?,"f(a,b)\ng(c,d)",no\n'
    rows, account = read_and_account(write(tmp_path / "b.csv", code))
    assert len(rows) == COUNT + 4
    # By chance a row looks like two: so the account names it.
    assert "row 16, lines 23 to 24, may be several rows" in str(account)


def test_objects_may_follow_one_another_where_the_error_says_so(tmp_path):
    assert read_file(write(tmp_path / "a.json", LINES.replace("\n", "", 1))) == ROWS


def test_a_chinese_text_of_few_zeros_is_utf_16(tmp_path):
    """In UTF-16 half of an ASCII text is zeros; a Chinese one has few, and is no UTF-8."""
    chinese = "prompt,chosen\n" + "为什么天空是蓝色的,因为瑞利散射\n" * 12
    assert len(read_file(write(tmp_path / "b.csv", chinese.encode("utf-16-le")))) == 12


def test_a_parquet_file_with_a_name_twice_stops(tmp_path):
    columns = [["a"], ["b"], ["c"], ["d"]]
    table = pyarrow.table(columns, names=["prompt", "chosen", "rejected", "chosen"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    fails(lambda: read_file(tmp_path / "a.parquet"), "more than one column is named chosen")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("prompt ", "rows.rename(columns=str.strip)"),
        ("prompt\xa0", "rows.rename(columns=str.strip)"),
        ("\ufeffprompt", r"rows.rename(columns={'\ufeffprompt': 'prompt'})"),
        ("prompt\u200b", r"rows.rename(columns={'prompt\u200b': 'prompt'})"),
    ],
)
@pytest.mark.parametrize("answers", [("chosen", "rejected"), ("completion",)])
def test_a_name_with_space_around_it_is_that_column(tmp_path, name, fix, answers):
    """Without it, the pairs would be read as whole transcripts."""
    row = {name: "Why?"} | {column: f" {column}." for column in answers}
    path = write(tmp_path / "a.jsonl", json.dumps(row) + "\n")
    fails(lambda: load_task(path), f"columns found: {name!r}, ", fix)
    others = "".join(json.dumps(row | {" note": "c"}) + "\n" for row in ROWS)
    assert load_task(write(tmp_path / "b.jsonl", others)).counts["read"] == COUNT


# What is no data

TO_JSON = 'orient="records", lines=True'
FRAME = pandas.DataFrame(ROWS)
TAR = b"rows.jsonl".ljust(257, b"\0") + b"ustar  \0"
LOOKALIKES = [
    *(
        (name, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "git lfs pull")
        for name in ("a.jsonl", "a.csv", "a.json.gz", "a.parquet")
    ),
    *((name, b"\n <!DOCTYPE HTML>\n<html>", "download the raw file") for name in ("a.csv", "a.jsonl.gz")),
    ("a.csv", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "check the address"),
    ("a.json", b'{"error": "Not Found"}', "check the address"),
    *(("a.jsonl", text, "check the address") for text in ("404: Not Found", "Entry not found\n", "403 Forbidden")),
    ("a.csv", b"PK\x03\x04\x14", "save the sheet as .csv"),
    ("a.jsonl", b"\x80\x04\x95\x00", "a pickle"),
    ("a.jsonl", b"\x28\xb5\x2f\xfd", "zstd -d"),
    ("a.jsonl", TABLE, "name the file .csv"),
    ("a.csv", LINES, "name the file .jsonl"),
    ("a.csv", json.dumps(ROWS), "name the file .json"),
    ("a.jsonl", json.dumps(ROWS), "name the file .json"),
    ("a.jsonl", "".join(f"[{json.dumps(row)}]\n" for row in ROWS), "a list on each line"),
    ("a.json", json.dumps([[{"role": "user", "content": "a"}]] * 2), 'write each as {"messages": [...]}'),
    ("a.jsonl", json.dumps(ROWS, indent=1), "name the file .json"),
    ("a.jsonl", json.dumps(ROWS[0], indent=1), "name the file .json"),
    ("a.jsonl", "".join(f"{row}\n" for row in ROWS), "json.dumps"),
    ("a.csv", "| prompt | chosen |\n| --- | --- |\n| a | b |\n", "Markdown"),
    *(("a.json", FRAME.to_json(orient=way), TO_JSON) for way in ("columns", "index", "split", "values")),
    ("a.jsonl", FRAME.to_json(orient="columns"), TO_JSON),
    ("a.json", FRAME[:1].to_json(orient="columns"), TO_JSON),
    ("a.json", json.dumps(FRAME.to_dict("list")), TO_JSON),
    ("a.json", json.dumps({"train": ROWS, "test": ROWS}), "a file of its own"),
    ("a.json", json.dumps({"info": {"version": 1}, "items": ROWS}), "rows under the name items"),
    ("a.json", json.dumps({"data": FRAME.to_dict("list")}), TO_JSON),
    *((name, TAR, "unpack it by tar -xf") for name in ("a.tar", "a.jsonl")),
    *((name, b"PK\x03\x04\x14", "unpack it and give the file in it") for name in ("a.zip", "a.jsonl.zip", "a.xlsx")),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", "zstd -d"),
    ("a.tar.gz", gzip.compress(TAR, mtime=0), "unknown extension '.tar.gz'"),
    ("a.txt", TABLE, "unknown extension '.txt'"),
    ("a.csv", "prompt,chosen\n为什么天空是蓝色的,因为瑞利散射\n".encode("gbk"), "iconv -f gb18030 -t utf-8"),
    ("a.csv", "prompt,chosen\nなぜ空は青いのですか,わかりません\n".encode("cp932"), "iconv -f cp932 -t utf-8"),
    ("a.csv", "prompt,chosen\nWärme,für\n".encode("latin-1"), "iconv -f cp1252 -t utf-8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "fix"), LOOKALIKES)
def test_a_file_that_is_no_data_says_what_to_type(tmp_path, name, content, fix):
    path = write(tmp_path / name, content)
    fails(lambda: read_file(path), path, fix)


def test_rows_of_messages_are_not_taken_for_columns(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for row in ({"messages": chat}, {"chosen": chat, "rejected": chat}, ROWS[0]):
        assert read_file(write(tmp_path / "a.json", json.dumps(row))) == [row]


# Files


def test_files_of_a_folder_are_read_or_left_out_with_their_names(tmp_path):
    write(tmp_path / "a::b" / "train.jsonl", LINES)
    assert load_task("a::b").counts["read"] == COUNT
    for name in ("train.jsonl", "more.jsonl", "notes/read.me", ".hidden.jsonl"):
        write(tmp_path / "data [1]" / name, LINES)
    task = load_task("data [1]")
    assert task.counts["read"] == COUNT
    assert describe_files(task) == [
        "data [1]/train.jsonl: 12 lines = 12 rows",
        "files left out: more.jsonl, notes/read.me",
    ]
    write(tmp_path / "data [1]" / "more.jsonl", LINES.replace("Why", "When"))
    assert load_task("data [1]/*.jsonl").counts["read"] == 2 * COUNT


def test_files_of_other_kinds_are_left_out_whatever_split_they_are_named_after(tmp_path):
    for name in ("train.jsonl", "train.jsonl.bak", "train.jsonl~", "train.md5"):
        write(tmp_path / "d" / name, LINES)
    task = load_task("d")
    assert task.counts["read"] == COUNT
    assert task.left_out_files == ("train.jsonl.bak", "train.jsonl~", "train.md5")
    datasets.Dataset.from_list(ROWS).save_to_disk("saved")
    write(tmp_path / "saved" / "more.jsonl", LINES)
    assert load_task("saved").left_out_files == ("more.jsonl",)


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (["notes.txt"], ["no file of a known kind, found notes.txt"]),
        (["README.md"], ["it has no file of a known kind"]),
        (["Train.jsonl", "Test.jsonl"], ["Test.jsonl would be read as rows to train on", "lower case"]),
        (
            ["data/train-00000-of-00003.jsonl", "data/train-00002-of-00003.jsonl"],
            ["data/train-00001-of-00003 is missing", "--dataset 'd/data/train-*'"],
        ),
        (["part-01-of-02.jsonl"], ["part-00-of-02 is missing"]),
        (["part-02-of-02.jsonl"], ["part-01-of-02 is missing"]),
        (["part-2-of-3.jsonl", "part-3-of-3.jsonl"], ["part-1-of-3 is missing"]),
        (["train.jsonl", "train (1).jsonl"], ["d/train.jsonl: the same rows as d/train (1).jsonl"]),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole_or_has_a_file_twice_stops(tmp_path, files, parts):
    for name in files:
        write(tmp_path / "d" / name, LINES)
    fails(lambda: load_task("d"), *parts)


@pytest.mark.parametrize(
    ("better", "worse", "place"),
    [
        ("chosen.jsonl", "rejected.jsonl", "d"),
        ("chosen.jsonl", "rejected.jsonl", "d/*.jsonl"),
        ("chosen/part.jsonl", "rejected/part.jsonl", "d"),
        ("train_accepted.jsonl", "train_rejected.jsonl", "d"),
        ("chosen.parquet", "rejected.parquet", "d"),
    ],
)  # fmt: skip
def test_chosen_and_rejected_answers_in_two_files_stop(tmp_path, better, worse, place):
    for name in (better, worse):
        rows = [
            {"prompt": f"Question {i}?", "response": f" the {name} answer {i}"} for i in range(8)
        ]
        file = tmp_path / "d" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pandas.DataFrame(rows).to_parquet(file)
        else:
            write(file, "".join(json.dumps(row) + "\n" for row in rows))
    fails(lambda: load_task(place), f"d/{better} and d/{worse}: two halves of pairs", "one row")
    (tmp_path / "d" / worse).unlink()
    assert load_task(place).counts["read"] == 8  # one half alone is data for SFT


def test_names_of_halves_are_no_fault_of_pairs_nor_of_the_folder_of_all_files(tmp_path):
    for name in ("chosen.jsonl", "rejected.jsonl"):  # each has both answers
        rows = [
            {"prompt": f"{name} {i}?", "chosen": f" yes {i}", "rejected": f" no {i}"}
            for i in range(4)
        ]
        write(tmp_path / "pairs" / name, "".join(json.dumps(row) + "\n" for row in rows))
    assert load_task("pairs").counts["read"] == 8
    for name in ("chosen.jsonl", "more.jsonl"):
        rows = [{"prompt": f"{name} {i}?", "response": f" yes {i}"} for i in range(4)]
        write(tmp_path / "rejected" / name, "".join(json.dumps(row) + "\n" for row in rows))
    assert load_task("rejected").counts["read"] == 8


@pytest.mark.parametrize(
    ("copy", "fault"),
    [
        ("train.parquet.bak", "train.parquet.bak would be read with the rows"),
        ("train-2.parquet", "train.parquet is a copy of train-2.parquet"),
    ],
)
def test_a_library_reads_no_file_beside_those_of_the_account(tmp_path, copy, fault):
    (tmp_path / "d").mkdir()
    FRAME.to_parquet(tmp_path / "d" / "train.parquet")
    FRAME.to_parquet(tmp_path / "d" / copy)
    fails(lambda: load_task("d"), fault)
    assert load_task("d/train.parquet").counts["read"] == COUNT


def test_a_test_set_with_all_prompts_says_so(tmp_path):
    for name in ("train.jsonl", "test.jsonl"):
        write(tmp_path / "d" / name, LINES)
    fails(lambda: load_task("d"), "all 12 rows have a prompt of the test set: give a test set of")


def test_parts_that_are_given_by_a_pattern_are_those_that_are_meant(tmp_path):
    for number in (0, 2):
        lines = LINES.replace("Why", f"Why {number}")
        write(tmp_path / "d" / f"train-{number}-of-3.jsonl", lines)
    assert load_task("d/train-*").counts["read"] == 2 * COUNT
    write(tmp_path / "d" / "train-1-of-3.jsonl", LINES)
    assert load_task("d").counts["read"] == 3 * COUNT
    write(tmp_path / "best" / "top-10-of-2024.jsonl", LINES)  # a name, and no part
    assert load_task("best").counts["read"] == COUNT


def test_a_saved_folder_that_lacks_a_file_says_so(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk("d", num_shards=2)
    (tmp_path / "d" / "data-00001-of-00002.arrow").unlink()
    fails(lambda: load_task("d"), "data-00001-of-00002.arrow is missing: copy the whole folder")


def test_files_with_different_rows_are_named(tmp_path):
    write(tmp_path / "d" / "pairs.jsonl", LINES)
    write(tmp_path / "d" / "prompts.jsonl", '{"prompt": "a"}\n')
    fails(
        lambda: load_task("d"),
        "pairs.jsonl (pairs)",
        "prompts.jsonl (only prompts)",
        "--dataset d/pairs.jsonl",
    )


def test_a_split_that_is_not_there_names_those_that_are(tmp_path):
    write(tmp_path / "d" / "test.jsonl", LINES)
    fails(lambda: load_task("d"), "no split named train, found test: add --split test")
    fails(lambda: load_task("d", split="dev"), "no split named dev, found test")
    assert load_task("d", split="test").counts["read"] == COUNT
    write(tmp_path / "d" / "pairs.jsonl", LINES)
    fails(lambda: load_task("d"), "add --split test, or give a file by --dataset d/pairs.jsonl")


def test_a_readme_names_no_file_outside_its_folder(tmp_path):
    write(tmp_path / "secret.jsonl", LINES)
    write(
        tmp_path / "d" / "README.md",
        "---\nconfigs:\n- config_name: x\n  data_files: ../secret.jsonl\n---\n",
    )
    fails(lambda: load_task("d"), "its README.md names", "secret.jsonl")


def test_rows_add_up(tmp_path):
    """Read = those of the parts and those that were dropped, whatever dropped them; else the account stops."""
    bad = [
        {"prompt": "", "chosen": "a", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
    ]
    write(tmp_path / "d" / "train.jsonl", LINES + "".join(json.dumps(row) + "\n" for row in bad))
    write(tmp_path / "d" / "test.jsonl", json.dumps(ROWS[0]) + "\n" + json.dumps(bad[0]) + "\n")
    for size in (None, 8):
        task = load_task("d", bad_rows="drop", size=size)
        parts, dropped = describe_rows(task)
        reasons = ["2 empty prompt", "1 equal pair", "beyond size" if size else "1 prompt in test"]
        assert all(reason in dropped for reason in reasons), dropped
        counted = [int(text.split()[-1]) for text in parts.split(",")]
        counted += [int(text.split()[0]) for text in dropped.split(",")]
        assert sum(counted) == task.counts["read"] == COUNT + 4
    task.counts["read"] += 1
    fails(lambda: describe_rows(task), "17 rows were read")


def test_json_columns_and_sequences_of_parquet_are_messages(tmp_path):
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "So."}]
        for row in ROWS
    ]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    datasets.Dataset.from_dict({"messages": chats}, features=features).to_parquet(
        tmp_path / "json.parquet"
    )
    columns = [
        {name: [turn[name] for turn in chat] for name in ("role", "content")} for chat in chats
    ]
    pandas.DataFrame({"messages": columns}).to_parquet(tmp_path / "sequence.parquet")
    write(
        tmp_path / "plain.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    expected = load_task("plain.jsonl").splits["ppo"].to_list()
    for name in ("json.parquet", "sequence.parquet"):
        assert load_task(name).splits["ppo"].to_list() == expected


# Addresses and archives


class Slow(BaseHTTPRequestHandler):
    def do_GET(self):
        if "silent" not in self.path:
            self.send_response(200)
            self.end_headers()
        for _ in range(100):
            if "drips" in self.path:
                self.wfile.write(b"x")
                self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *words):
        pass


@pytest.mark.parametrize("name", ["silent", "drips"])
def test_an_address_that_never_answers_or_drips_is_given_up(monkeypatch, name):
    monkeypatch.setattr(addresses, "SECONDS", 0.4)
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = time.monotonic()
        address = f"http://127.0.0.1:{server.server_port}/{name}.jsonl"
        fails(lambda: find_rows(address), address, "in 0.4 seconds", "download the file")
        assert time.monotonic() - start < 3
        server.shutdown()


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip), (".bz2", bz2), (".xz", lzma)])
def test_an_archive_that_fills_the_memory_is_refused(tmp_path, monkeypatch, suffix, pack):
    monkeypatch.setattr(addresses, "SMALL", 1 << 20)
    path = write(tmp_path / f"a.jsonl{suffix}", pack.compress(bytes(8 << 20)))
    fails(lambda: read_file(path), path, "made to fill the memory")
    assert (
        len(read_file(write(tmp_path / f"b.jsonl{suffix}", pack.compress(LINES.encode() * 99))))
        == 99 * COUNT
    )


# The command


def test_a_refusal_needs_neither_torch_nor_transformers_nor_nltk(tmp_path):
    """They take seconds of a processor, and NLTK fails for a user without a home."""
    roles = [{"role": "user", "content": "a"}, {"role": "observation", "content": "b"}]
    write(
        tmp_path / "roles.jsonl",
        json.dumps({"messages": [*roles, {"role": "assistant", "content": "c"}]}),
    )
    write(tmp_path / "few.jsonl", LINES.splitlines()[0])
    write(tmp_path / "rows.jsonl", LINES)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    write(tmp_path / "calls.jsonl", json.dumps({"messages": [roles[0], call]}))
    write(tmp_path / "plain.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}")
    write(tmp_path / "columns.csv", "a,b\n1,2\n")
    write(tmp_path / "folder" / "dev.jsonl", LINES)
    check = (
        "import sys; from marlhf_lite.cli import main; "
        "codes = [main(['data', *words.split()]) for words in sys.argv[1:]]; "
        "heavy = {'torch', 'transformers', 'trl', 'nltk', 'accelerate'} & sys.modules.keys(); "
        "print(codes, heavy)"
    )
    faults = [
        "roles.jsonl",
        "columns.csv",
        "folder",
        "calls.jsonl --chat_template plain.jinja",
        "few.jsonl",
        "rows.jsonl --part news --model nowhere/none --chat_template none",
    ]
    words = [sys.executable, "-c", check, *faults]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2, 2, 2, 2, 2, 2] set()", done.stderr
    for part in ("'observation'", "found validation", "the tool 'add'", "too few", "--part news"):
        assert part in done.stderr


def test_a_report_needs_no_library_of_training(tmp_path):
    """They would take three times as long as everything that a report needs."""
    write(tmp_path / "rows.jsonl", LINES)
    check = (
        "import sys; from marlhf_lite.cli import main; "
        "run = lambda *words: main(['data', 'rows.jsonl', *words]); "
        "codes = [run('--model', 'nowhere')]; "
        "has_torch = 'torch' in sys.modules; "
        "codes += [run('--rows', '0'), run('--max_prompt_length', '1')]; "
        "heavy = {'peft', 'accelerate', 'bitsandbytes', 'trl', 'torch._dynamo', 'scipy'}; "
        "print(codes, has_torch, heavy & sys.modules.keys())"
    )
    words = [sys.executable, "-c", check]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    # Only the tokenizer needs torch, so a model that is not there is refused without it.
    assert done.stdout.splitlines()[-1] == "[2, 0, 2] False set()", done.stderr
    assert "no such folder" in done.stderr and "prompts are longer" in done.stderr


def test_a_report_is_printed_once_by_several_processes(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "rows.jsonl", LINES)
    monkeypatch.setenv("RANK", "1")  # as `accelerate launch` sets it
    assert main(["data", path]) == 0
    assert capsys.readouterr().out == ""


def test_trees_need_no_home(tmp_path):
    code = (
        "import os, pwd\n"
        "def unknown(user): raise KeyError(user)\n"
        "pwd.getpwuid = unknown\n"
        "os.environ.pop('HOME', None)\n"
        "from marlhf_lite.utils.trees import nltk\n"
        "print(nltk.Tree.fromstring('(S a)'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(S a)"


def test_the_report_and_a_run_show_the_account(tiny, tmp_path, capsys):
    write(tmp_path / "d" / "train.csv", TABLE + 'Why not?,"a\nb",c\n')
    write(tmp_path / "d" / "more.csv", TABLE)
    assert not main(["data", "d", "--model", tiny.model])
    report = capsys.readouterr().out
    line = "d/train.csv: 15 lines = 13 rows + 1 header + 1 inside quotes (first: row 13, lines 14 to 15)"
    words = (
        f"sft --sft_epochs 0 --dataset d --model {tiny.model} --lora_r 2 --output_dir run".split()
    )
    assert not main(words)
    for text in (report, capsys.readouterr().out):
        assert line in text and "files left out: more.csv" in text


# Texts and messages


def rows_with(column, texts):
    return "".join(
        json.dumps({"prompt": f"Why {i}?", "completion": "So.", column: text}) + "\n"
        for i, text in enumerate(texts)
    )


WRITTEN = [
    json.dumps({"role": "assistant", "content": "a"}),
    str({"id": 1, "role": "assistant", "content": "a"}),
    json.dumps([{"id": 1, "from": "gpt", "value": "a"}]),
    json.dumps(json.dumps([{"role": "user", "content": "a"}])),
    json.dumps([{"type": "text", "text": "a"}]),
    "[{'content': 'a', 'role': 'user'}\n {'content': 'b', 'role': 'assistant'}]",  # of NumPy
    '["a", "b"]',
    "['a']",
]
TEXTS = [
    '{"city": "Bonn"}',
    '{"from": "EUR", "value": 3}',
    "[1, 2]",
    '{"role": "admin", "content": 1}',
    "[]",
    '"a"',
]


@pytest.mark.parametrize("column", ["prompt", "completion"])
@pytest.mark.parametrize("text", WRITTEN)
def test_messages_and_lists_as_text_in_every_row_are_not_text(tmp_path, column, text):
    path = write(tmp_path / "a.jsonl", rows_with(column, [text] * COUNT))
    fails(
        lambda: load_task(path),
        "row 1",
        f"'{column}' is a",
        "as text, as in every row",
        "json.loads",
    )


def test_bytes_as_text_in_every_row_are_not_text(tmp_path):
    path = write(tmp_path / "a.jsonl", rows_with("completion", [str(b"Warm.")] * COUNT))
    fails(lambda: load_task(path), "'completion' is bytes as text", "ast.literal_eval", "decode")
    column = pandas.Series([str("Wärme".encode())])  # the mend, typed
    assert list(column.map(ast.literal_eval).str.decode("utf-8")) == ["Wärme"]


@pytest.mark.parametrize("text", TEXTS)
def test_other_json_is_an_answer(tmp_path, text):
    assert (
        load_task(write(tmp_path / "a.jsonl", rows_with("completion", [text] * COUNT))).counts[
            "kept"
        ]
        == COUNT
    )


def test_a_list_in_some_rows_is_an_answer(tmp_path):
    texts = ['["a"]'] * (COUNT - 1) + ["So."]
    assert (
        load_task(write(tmp_path / "a.jsonl", rows_with("completion", texts))).counts["kept"]
        == COUNT
    )


@pytest.mark.parametrize(
    ("name", "is_compared"),
    [
        *(
            (name, False)
            for name in ("preferred_language", "chosen_model", "user_preferences", "rejected_by")
        ),
        *(
            (name, True)
            for name in ("better_response", "preferred", "winner", "isChosen", "output_2", "ref_b")
        ),
        *(("good", False), ("positive", False)),  # unless their opposite is there
    ],
)
def test_names_of_compared_answers(tmp_path, name, is_compared):
    path = write(tmp_path / "a.jsonl", rows_with(name, ["x"] * COUNT))
    if is_compared:
        fails(lambda: load_task(path), "columns found: prompt, completion, " + name)
    else:
        task = load_task(path)
        assert task.counts["kept"] == COUNT and task.unused == (name,)


@pytest.mark.parametrize(
    "names", [("positive", "negative"), ("y_w", "y_l"), ("bad", "good"), ("win_response", "lose")]
)
def test_names_of_opposites_are_compared_answers(tmp_path, names):
    rows = [{"prompt": f"Why {i}?"} | dict.fromkeys(names, "x") for i in range(COUNT)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    fails(lambda: load_task(path), "write the better answer of each row into chosen")


@pytest.mark.parametrize(
    ("rows", "fix"),
    [
        ([{"row": row} for row in ROWS], "the rows are inside 'row'"),
        ([{"prompt:chosen:rejected": "a:b:c"}], "separate the columns by commas"),
        ([{"prompt  completion": "a  b"}], "separate the columns by commas"),
        (
            [{"Why is the sky blue?": "a", "Light is scattered.": "b"}],
            "write a line with the names",
        ),
    ],
)
def test_rows_inside_others_and_rows_without_names_say_so(tmp_path, rows, fix):
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    fails(lambda: load_task(path), path, fix)


def test_spaces_around_names_are_shown_and_columns_takes_them(tmp_path):
    path = write(tmp_path / "a.jsonl", LINES.replace('"chosen"', '"chosen "'))
    fails(lambda: load_task(path), "prompt, 'chosen ', rejected", "str.strip")
    assert load_task(path, columns="chosen=chosen").counts["kept"] == COUNT


def notes_of(capsys, *words):
    assert not main(["data", *words, "--rows", "0"]), capsys.readouterr().err
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


def test_words_for_a_missing_text_are_noted(tmp_path, capsys):
    path = write(tmp_path / "a.csv", TABLE.replace("Warm 3.", "None").replace("Why 5?", "NULL"))
    notes = notes_of(capsys, path)
    assert any(note.startswith("note: 2 of 36 texts are 'N") for note in notes), notes
    path = write(tmp_path / "b.csv", TABLE.replace("Warm 3.", "nan-o"))
    assert not any("or the like" in note for note in notes_of(capsys, path))


def test_an_answer_of_nothing_but_spaces_of_no_width_is_empty(tmp_path):
    path = write(tmp_path / "a.jsonl", LINES.replace("Warm 3.", r"\u200b\ufeff "))
    assert load_task(path).counts["empty_response"] == 1


def test_pairs_that_contradict_each_other_are_noted(tiny, tmp_path, capsys):
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[:2]]
    path = write(tmp_path / "a.jsonl", LINES + "".join(json.dumps(row) + "\n" for row in turned))
    assert any("4 pairs say the opposite of another one" in note for note in notes_of(capsys, path))
    assert not any(
        "opposite" in note for note in notes_of(capsys, write(tmp_path / "b.jsonl", LINES * 2))
    )


@pytest.mark.parametrize(("before", "noted"), [("", True), (" ", False), ("\n", False)])
def test_nothing_between_prompt_and_answer_in_all_rows_is_noted(tmp_path, capsys, before, noted):
    path = write(
        tmp_path / "a.jsonl", LINES.replace('"chosen": "', '"chosen": ' + json.dumps(before)[:-1])
    )
    assert (
        any("nothing between prompt and answer" in note for note in notes_of(capsys, path)) == noted
    )


def test_a_module_that_another_one_hides_is_named(tmp_path, monkeypatch):
    """Python has a package `test`, which is found before the user's file."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("test", "json", "own_rewards"):
        write(
            tmp_path / f"{name}.py", "def score(prompts, responses): return [0.0] * len(prompts)\n"
        )
    for name in ("test", "json"):
        fails(
            lambda: import_user_code("reward", f"{name}:score", "gold"),  # noqa: B023
            f"--reward {name}:score: another module {name}",
            f"hides your {name}.py: rename your file, such as my_{name}.py",
        )
    assert import_user_code("reward", "own_rewards:score", "gold")(["a"], ["b"]) == [0.0]
