"""What a run says of its data before anything trains: `marlhf data`, what is cut or dropped, a file for each stage."""

import json
import shutil

import datasets
import pytest
from conftest import fails

from marlhf_lite.cli import main
from marlhf_lite.config.commands import COMMANDS, DataCommand, RunCommand
from marlhf_lite.config.parser import parse
from marlhf_lite.experiments.context import open_context
from marlhf_lite.experiments.data import fit_lengths
from marlhf_lite.experiments.inputs import find_inputs
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.run_folder import RunFolder

COUNT, LIMIT = 40, 6
WORDS = "the cat sat on a mat and saw the dog".split()
REPEATED = "the cat sat on a mat and saw"  # longer than LIMIT tokens


def pair(i):
    """Every fourth pair differs behind the limit alone."""
    chosen, rejected = (
        (REPEATED, f"{REPEATED} a dog") if i % 4 == 0 else (" ".join(WORDS[: i % 9 + 1]), "a dog")
    )
    return {"prompt": f"Say {i}:", "chosen": f" {chosen}.", "rejected": f" {rejected}."}


def task_of(rows, **splits):
    parts = {"sft": [], "rm": rows, "ppo": [], "test": []} | splits
    tables = {
        part: datasets.Dataset.from_list(part_rows or [rows[0]])
        for part, part_rows in parts.items()
    }
    tables = {part: table if parts[part] else table.select([]) for part, table in tables.items()}
    return Task("x", datasets.DatasetDict(tables), None, {"read": len(rows)})


def ids_of(tokenizer, text):
    """The tokens of an answer with its end, as a loop over one text at a time gives them."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Lengths


def test_what_is_cut_is_counted_with_the_length_that_would_cut_few(tokenizer):
    rows = [
        {"prompt": "a", "chosen": " the" * (i + 1), "rejected": " dog" * (i % 3 + 1)}
        for i in range(COUNT)
    ]
    lengths = [len(ids_of(tokenizer, row[side])) for row in rows for side in ("chosen", "rejected")]
    for limit in (LIMIT, max(lengths) - 1, max(lengths)):
        options = DataCommand(max_response_length=limit)
        _, notes = fit_lengths(task_of(rows), tokenizer, options, {"rm": ("chosen", "rejected")})
        cut = sum(length > limit for length in lengths)
        assert bool(notes) == bool(cut)
        if cut:
            few = next(
                n
                for n in range(1, 99)
                if sum(length > n for length in lengths) <= 0.05 * len(lengths)
            )
            line = f"{cut} of {len(lengths)} answers are cut to {limit} tokens, and end without EOS"
            longer = (
                f": --max_response_length {few} would cut 5%" if cut > 0.05 * len(lengths) else ""
            )
            assert notes == [line + longer]


def test_pairs_that_the_cut_makes_equal_are_dropped_and_all_of_them_stop(tokenizer):
    rows, options, sides = (
        list(map(pair, range(COUNT))),
        DataCommand(max_response_length=LIMIT),
        ("chosen", "rejected"),
    )
    task, _ = fit_lengths(task_of(rows), tokenizer, options, {"rm": sides})
    kept = [
        row
        for row in rows
        if len({tuple(ids_of(tokenizer, row[side])[:LIMIT]) for side in sides}) == 2
    ]
    assert task.splits["rm"].to_list() == kept and 0 < len(kept) < COUNT
    assert (task.counts["equal_after_cut"], task.counts["rm"]) == (COUNT - len(kept), len(kept))
    same, longest = (
        rows[::4],
        max(len(ids_of(tokenizer, row[side])) for row in rows[::4] for side in sides),
    )
    fails(
        lambda: fit_lengths(task_of(same), tokenizer, options, {"rm": sides}),
        f"raise it, to {longest} to cut few",
    )
    assert (
        fit_lengths(task_of(rows), tokenizer, options, {"sft": sides[:1]})[0].counts["rm"] == COUNT
    ), "SFT: no pairs"


@pytest.fixture
def run_words(tiny, tmp_path, monkeypatch):
    """(name of a file, number of its pairs that the cut makes equal, reward) -> the options of a run on that file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shortness.py").write_text(
        "def short(prompts, responses): return [-len(r) for r in responses]\n"
    )

    def words(name, count_same, reward):
        same = [
            {"chosen": f" the cat sat on a mat {i} a.", "rejected": f" the cat sat on a mat {i} b."}
            for i in range(COUNT)
        ]
        rows = [
            *same[:count_same],
            *[{"chosen": "two by two", "rejected": "one by one"}] * (COUNT - count_same),
        ]
        write(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"Say {i}:"} | row for i, row in enumerate(rows)],
        )
        options = f"--dataset {name}.jsonl --model {tiny.model} --lora_r 2 --max_response_length 5 --reward {reward}"
        return [*options.split(), "--output_dir", name]

    return words


@pytest.mark.parametrize("reward", ["rm", "shortness:short"])
def test_a_whole_run_drops_such_pairs_whatever_its_reward_is(run_words, capsys, reward):
    options = parse("run", run_words("mixed", COUNT // 2, reward), RunCommand)
    task = open_context(options, find_inputs(options)).task
    assert task.counts["equal_after_cut"] > 0 and set(task.splits["rm"]["chosen"]) == {"two by two"}
    assert task.counts["rm"] == len(task.splits["rm"])
    assert f"dropped: {task.counts['equal_after_cut']} equal after cut" in capsys.readouterr().out


def test_a_run_that_needs_no_reward_model_goes_on_without_one_where_all_pairs_are_equal(
    run_words, tmp_path, capsys
):
    few = (
        "--sft_epochs 0.2 --updates 1 --batch_size 4 --micro_batch_size 4 --eval_prompts 2".split()
    )
    assert main(["run", *run_words("needed", COUNT, "rm"), *few]) == 2
    assert (
        "--max_response_length 5: it makes all pairs of needed.jsonl equal: raise it, to"
        in capsys.readouterr().err
    )
    assert not main(["run", *run_words("same", COUNT, "shortness:short"), *few])
    out = capsys.readouterr().out
    assert "it makes all pairs of same.jsonl equal: no reward model is trained" in out
    assert "stages: SFT, MA-PPO, evaluation" in out and not (tmp_path / "same" / "rm").exists()
    counts = json.loads((tmp_path / "same" / "data.json").read_text())
    assert counts["rm"] == 0 < counts["equal_after_cut"]
    samples = [
        json.loads(line) for line in (tmp_path / "same" / "samples.jsonl").read_text().splitlines()
    ]
    assert {row["method"] for row in samples} == {"SFT", "MA-PPO"}
    assert all("shortness:short" in row and "rm_score" not in row for row in samples)


# The report


def test_the_report_shows_rows_as_tokens_counts_lengths_and_what_would_be_cut(
    tiny, tokenizer, tmp_path, capsys
):
    rows = [*map(pair, range(COUNT)), {"prompt": "a", "chosen": "", "rejected": "b"}]
    path = write(tmp_path / "pairs.jsonl", rows)
    words = f"data {path} --model {tiny.model} --max_response_length {LIMIT}".split()
    assert not main(words)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == f"{path}: {COUNT + 1} rows, read as pairs" and "1 empty response" in lines[2]
    by_prompt = {row["prompt"]: row for row in rows}
    blocks = [block.splitlines() for block in text.split("\n\nrow ")[1:]]
    assert len(blocks) == 3
    for _, prompt, *answers in blocks:
        row = by_prompt[
            "".join(prompt.partition("|")[2].split("|")).removeprefix(tokenizer.bos_token or "")
        ]
        expected = []
        for side in ("chosen", "rejected"):
            ids = ids_of(tokenizer, row[side])
            shown = [tokenizer.decode([i]) for i in (ids[:-1])[:LIMIT]]
            end = (
                f"end: none, cut to {LIMIT} tokens"
                if len(ids) > LIMIT
                else f"end (1): |{tokenizer.eos_token}|"
            )
            expected += [f"{side} ({len(shown)}): |{'|'.join(shown)}|", end]
        assert answers == expected
    lengths = sorted(len(ids_of(tokenizer, row["chosen"])) for row in rows[:-1])
    assert (
        f"chosen in tokens: shortest {lengths[0]}, " in text and f"longest {lengths[-1]}\n" in text
    )
    assert "answers are cut to 6 tokens" in text and "equal after cut" in text
    assert not main([*words, "--rows", "1"])
    assert capsys.readouterr().out.strip() == "\n\n".join(text.split("\n\n")[:2])


NOTES = [  # row number -> a row, options, the note
    (
        lambda i: {
            "prompt": f"Why {i}?",
            "chosen": f"Why {i}? So." if i % 4 == 0 else " So.",
            "rejected": " No.",
        },
        [],
        "note: in 3 of 12 rows answers begin with their prompt",
    ),
    (
        lambda i: {
            "prompt": f"<start_of_turn>user\nWhy {i}?<end_of_turn>\n",
            "chosen": "So.",
            "rejected": "No.",
        },
        [],
        "note: 12 of 36 texts hold marks such as <start_of_turn>, which are read as characters: if",
    ),
    (
        lambda i: {
            "prompt": [{"role": "user", "content": f"[INST] Why {i}? [/INST]"}],
            **{side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")},
        },
        ["--chat_template", "no_system.jinja"],
        "note: 12 of 36 texts hold marks such as [/INST], which are read as characters: if",
    ),
    (
        lambda i: {
            "prompt": [{"role": "system", "content": "Be kind."}] * (i > 3)
            + [{"role": "user", "content": f"Why {i}?"}]
        },
        ["--chat_template", "no_system.jinja"],
        "note: in 8 rows the chat template leaves out text of the prompt",
    ),
]


def test_columns_and_splits_that_are_not_read_are_named(tiny, tmp_path, capsys):
    rows = datasets.Dataset.from_list([pair(i) | {"id": i} for i in range(COUNT)])
    parts = {"train": rows, "validation": rows.select([1]), "test": rows.select([0])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert not main(["data", str(tmp_path / "saved"), "--model", tiny.model])
    assert (
        "\nnote: columns not used: id\nnote: splits not used: validation\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("row", "options", "note"), NOTES)
def test_what_may_not_be_meant_is_noted_with_its_count(
    tiny, tmp_path, capsys, monkeypatch, row, options, note
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [row(i) for i in range(12)])
    turns = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    (tmp_path / "no_system.jinja").write_text(
        f"{turns}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
    )
    assert not main(["data", "rows.jsonl", "--model", tiny.model, *options])
    assert f"\n{note}" in capsys.readouterr().out


# Rows that an earlier stage has split


def webgpt(i):
    texts = {
        "question": {"full_text": f"Why {i}?"},
        "answer_0": f"Warm {i}.",
        "answer_1": f"Cold {i}.",
    }
    # ties are rows of --template released alone
    return texts | {"score_0": float(i % 2), "score_1": -float(i % 2)}


@pytest.mark.parametrize("make", [pair, webgpt])
def test_rows_that_an_earlier_stage_has_split_in_another_way_are_refused(make, tiny, sft, tmp_path):
    """Prompts that it trained on would be held out."""
    rows, run = list(map(make, range(COUNT))), tmp_path / "sft"
    path = write(tmp_path / "rows.jsonl", rows)

    def start(command, *words):
        options = parse(command, words, COMMANDS[command])
        shutil.rmtree(tmp_path / "e", ignore_errors=True)
        return open_context(options, find_inputs(options)).task

    words = ["--model", tiny.model, "--lora_r", "4", "--lora_alpha", "8", "--output_dir", str(run)]
    task = start("sft", "--dataset", str(path), *words)
    shutil.copytree(sft, run / "sft")
    later = ["evaluate", "--sft", str(run), "--output_dir", str(tmp_path / "e")]
    assert start(*later).splits["test"].to_list() == task.splits["test"].to_list()
    said = f"data {path} has other content than when {run} was made"
    if make == webgpt:
        fix = "give --template paper and not released, or add --accept_changed"
        fails(lambda: start(*later, "--preset", "released"), said, fix)
    else:
        assert start(*later, "--preset", "released").counts["test"], "these rows have no --template"
    write(path, [*rows, make(COUNT + 1)])
    for words in (later, ["sft", "--resume", str(run)]):
        fails(lambda w=words: start(*w), said, "restore it, or add --accept_changed to continue")
    assert start(*later, "--accept_changed").counts["read"] == COUNT + 1
    (record,) = RunFolder.open(tmp_path / "e").manifest["accepted"]
    assert record["what"] == "data" and record["run"] == str(run)


# A file for each stage


def test_a_file_for_each_stage(tiny, tokenizer, tmp_path, capsys, monkeypatch):
    """Each stage takes all rows of its own file; what it drops is printed."""
    monkeypatch.chdir(tmp_path)
    pairs = list(map(pair, range(COUNT)))
    write(
        tmp_path / "sft.jsonl",
        [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs],
    )
    write(tmp_path / "pairs.jsonl", [row | {"prompt": f"Now {i}:"} for i, row in enumerate(pairs)])
    write(tmp_path / "prompts.jsonl", [{"prompt": f"And {i}:"} for i in range(COUNT)])
    held_out, equal = COUNT // 10, len(pairs[::4])

    def run(words, data, folder):
        sizes = f"--dataset {data}.jsonl --max_response_length {LIMIT} --output_dir {folder}"
        assert not main(f"{words} {sizes}".split()), capsys.readouterr()
        return capsys.readouterr().out, json.loads((tmp_path / folder / "data.json").read_text())

    _, counts = run(f"sft --model {tiny.model} --lora_r 2 --sft_batch_size 18", "sft", "sft")
    assert (counts["sft"], counts["rm"], counts["ppo"], counts["test"]) == (
        COUNT - held_out,
        0,
        0,
        held_out,
    )
    for stage, words in (("rm", "--rm_batch_size 18"), ("dpo", "--dpo_batch_size 18")):
        out, counts = run(f"{stage} --sft sft {words}", "pairs", stage)
        in_test = COUNT - held_out - counts["rm"]
        assert in_test == counts["equal_after_cut"] and equal - held_out <= in_test <= equal
        assert f"dropped: {in_test} equal after cut" in out and "answers are cut to" in out
    ppo = (
        "ppo --sft sft --rm rm --updates 1 --batch_size 4 --micro_batch_size 4 --checkpoint_every 0"
    )
    out, counts = run(ppo, "prompts", "ppo")
    assert counts["ppo"] == COUNT - held_out
    _, counts = run(
        "evaluate --sft sft --policies ppo --rm rm --eval_prompts 4", "prompts", "evaluated"
    )
    assert counts["test"] == held_out


def test_prompts_that_an_earlier_stage_has_trained_on_are_noted(
    tiny, tmp_path, capsys, monkeypatch
):
    """A reward model that has a separate file trains on all of its rows; PPO may be given the same file."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sft.jsonl", [pair(i) | {"prompt": f"So {i}:"} for i in range(COUNT)])
    write(tmp_path / "pairs.jsonl", list(map(pair, range(COUNT))))
    write(tmp_path / "others.jsonl", [{"prompt": f"And {i}:"} for i in range(COUNT)])
    sizes = f"--max_response_length {LIMIT} --output_dir"
    assert not main(
        f"sft --model {tiny.model} --sft_epochs 0 --lora_r 2 --dataset sft.jsonl {sizes} sft".split()
    )
    assert not main(f"rm --sft sft --dataset pairs.jsonl --rm_batch_size 18 {sizes} rm".split())
    capsys.readouterr()
    ppo = (
        "ppo --sft sft --rm rm --updates 1 --batch_size 4 --micro_batch_size 4 --checkpoint_every 0"
    )
    for data, noted in (("pairs", True), ("others", False)):
        assert not main(f"{ppo} --dataset {data}.jsonl {sizes} ppo_{data}".split())
        note = "rm has trained on all rows of pairs.jsonl: PPO's prompts are among them"
        assert (note in capsys.readouterr().out) == noted
