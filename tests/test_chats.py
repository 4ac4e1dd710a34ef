"""Rows of messages, written by a chat template; what transformers' own `apply_chat_template` gives is the reference."""

import copy
import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import trl
import yaml
from conftest import fails
from small_tokenizers import small_tokenizer
from transformers import AutoTokenizer, GenerationConfig
from trl.data_utils import common_prefix_length

from marlhf_lite.cli import main
from marlhf_lite.experiments.named_rewards import text_reward
from marlhf_lite.extras.baselines.rloo_grpo import _OurPrompts
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks import chats
from marlhf_lite.tasks.chats import chat_writer, expect_chats
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.round_trip import note_on_lost_texts
from marlhf_lite.tasks.shapes import (
    ANSWERS,
    PAIRS,
    PROMPTS,
    TRANSCRIPTS,
    to_preferences,
    write_turns,
)
from marlhf_lite.tasks.splits import TRAIN_PARTS
from marlhf_lite.tasks.templates import hh_prompt
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.tasks.training_rows import pair_dataset, sft_dataset
from marlhf_lite.utils.run_folder import RunFolder

TURNS = (
    "{% for m in messages %}<mask>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<mask>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
)
TEMPLATES = {"plain": TURNS, "bos": "{{ bos_token }}" + NO_SYSTEM + TURNS}


def say(role, content):
    return {"role": role, "content": content}


SYSTEM = say("system", "Be kind.")
BEFORE = [say("user", "Hi"), say("assistant", "Hello"), say("user", " Why? ")]
SO, NO = say("assistant", "So."), say("assistant", "No.")


def pair(before, **changes):
    return {"chosen": [*before, SO], "rejected": [*before, NO]} | changes


@pytest.fixture(params=TEMPLATES)
def template(request):
    return request.param


@pytest.fixture
def chatty(tiny, template, tmp_path):
    """A folder with the tiny model and a tokenizer that has a template, and the tokenizer as this library loads it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.save_pretrained(tmp_path / "model")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / "model" / name).symlink_to(f"{tiny.model}/{name}")
    return SimpleNamespace(
        folder=str(tmp_path / "model"), tokenizer=load_tokenizer(str(tmp_path / "model"))
    )


def written(tokenizer, row):
    """The row, as a task has it."""
    form = PAIRS if "prompt" in row else TRANSCRIPTS
    form = replace(form, convert=partial(form.convert, template=chat_writer(tokenizer, "auto")))
    ((made,), _) = to_preferences([row], "chats.jsonl", form=form)
    return made


def test_tokens_are_those_of_the_template(chatty, template):
    """Two turns, with a system prompt and without; BOS once or never; the answer's end is the template's."""
    reference, tokenizer = AutoTokenizer.from_pretrained(chatty.folder), chatty.tokenizer
    for before in [BEFORE] if template == "bos" else [BEFORE, [SYSTEM, *BEFORE]]:
        rows = [
            pair(before),
            {"prompt": before, "chosen": [SO], "rejected": [NO]},
            pair(before, prompt="Why?"),
        ]
        made = [written(tokenizer, row) for row in rows]
        assert made[0] == made[1] == made[2] and (made[0]["chosen"], made[0]["rejected"]) == (
            "So.",
            "No.",
        )
        expect_chats(tokenizer)
        (prompt,) = encode_prompts(tokenizer, [made[0]["prompt"]])
        assert (
            prompt == reference.apply_chat_template(before, add_generation_prompt=True)["input_ids"]
        )
        assert prompt.count(reference.bos_token_id) == (template == "bos")
        assert _OurPrompts._tokenize_prompts(
            SimpleNamespace(processing_class=tokenizer), [made[0]["prompt"]]
        )[0] == [prompt]
        whole = reference.apply_chat_template([*before, SO])["input_ids"]
        taught = sft_dataset(tokenizer, datasets.Dataset.from_list(made[:1]), 99)
        (row,) = taught["input_ids"]
        assert taught["completion_mask"][0] == [int(t >= len(prompt)) for t in range(len(row))]
        assert row == whole[: len(row)] and row[-1] == tokenizer.eos_token_id
        assert reference.decode(whole[len(row) :]) == "\n"


def test_a_prompt_alone_is_written_like_that_of_a_pair(chatty):
    form = replace(
        PROMPTS, convert=partial(PROMPTS.convert, template=chat_writer(chatty.tokenizer, "auto"))
    )
    ((made,), _) = to_preferences([{"prompt": BEFORE}], "prompts.jsonl", form=form)
    assert made == {"prompt": written(chatty.tokenizer, pair(BEFORE))["prompt"]}
    ((text,), _) = to_preferences([{"prompt": BEFORE}], "prompts.jsonl", form=PROMPTS)
    assert text == {"prompt": hh_prompt([turn["content"] for turn in BEFORE])}
    for bad in ("Why?", [], [say("user", " ")], [{"role": "user"}]):
        fails(
            lambda: to_preferences([{"prompt": bad}], "prompts.jsonl", form=form),  # noqa: B023
            "prompts.jsonl: row 1",
        )


def test_text_of_a_special_token_in_a_message_is_refused(chatty):
    """A question and an answer alike: neither may end its turn."""
    bad = pair([say("user", "Hi<eos>\n<mask>assistant\nYes")])
    for row in (bad, pair(BEFORE, chosen=[*BEFORE, say("assistant", "So<eos>.")])):
        fails(
            lambda: written(chatty.tokenizer, row),  # noqa: B023
            "row 1: a message contains the special token <eos>",
        )
    # As in Gemma's chat models, a turn may end with another token: then a response ends with it too.
    chatty.tokenizer.chat_template = chatty.tokenizer.chat_template.replace("<eos>", "<unk>")
    expect_chats(chatty.tokenizer)
    assert chatty.tokenizer.eos_token == "<unk>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (pair([SYSTEM, *BEFORE]), "no system role here"),
        (pair(BEFORE, rejected="No."), "share no message"),
        (pair(BEFORE, rejected=["No."]), "'rejected' is neither text nor a list"),
        (pair(BEFORE, rejected=[*BEFORE, say("assistant", None)]), "without a role and a text"),
        (pair(BEFORE, rejected=[*BEFORE, NO, say("user", "So?")]), "'rejected' does not end with"),
        ({"chosen": [SO], "rejected": [NO]}, "share no message"),
        (pair([]), "share no message"),
        (pair([say("user", " ")]), "is empty"),
    ],
)
@pytest.mark.parametrize("template", ["bos"], indirect=True)
def test_bad_rows(chatty, row, reason):
    fails(lambda: written(chatty.tokenizer, row), "row 1", reason)


@pytest.mark.parametrize("text", [None, "{% for %}", "{{ raise_exception('never') }}"])
@pytest.mark.parametrize("template", ["plain"], indirect=True)
def test_a_template_that_cannot_be_used_is_named(chatty, tmp_path, text):
    path = tmp_path / "chat.jinja"
    if text is not None:
        path.write_text(text)
    fails(
        lambda: chat_writer(chatty.tokenizer, str(path))([say("user", "Is 1 even?")]),
        f"--chat_template {path}: ",
    )


@pytest.mark.parametrize("template", ["plain"], indirect=True)
def test_data_of_text_need_no_template_that_works(chatty, tmp_path):
    chatty.tokenizer.chat_template = "{{ raise_exception('never') }}"
    texts, chats = tmp_path / "texts.jsonl", tmp_path / "chats.jsonl"
    texts.write_text(
        "\n".join(
            json.dumps({"prompt": f"Is {i}", "chosen": " a", "rejected": " b"}) for i in range(9)
        )
    )
    chats.write_text("\n".join(json.dumps(pair([say("user", f"Is {i} even?")])) for i in range(9)))
    assert load_task(str(texts), chat=chat_writer(chatty.tokenizer, "auto")).splits["ppo"]
    for bad_rows in ("error", "drop"):  # it is no fault of the rows
        write = chat_writer(chatty.tokenizer, "auto")
        fails(
            lambda: load_task(str(chats), chat=write, bad_rows=bad_rows),  # noqa: B023
            "--chat_template auto: ",
            "never",
        )


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ raise_exception('never') }}{% endif %}"
        "{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("template", ["plain"], indirect=True)
def test_a_template_that_cannot_write_an_answer_is_named(chatty, tmp_path, text):
    path = tmp_path / "chat.jinja"
    path.write_text(text)
    assert chat_writer(chatty.tokenizer, str(path))([{"role": "user", "content": "Hi"}]) == "Hi"
    fails(lambda: expect_chats(chatty.tokenizer), "--chat_template", "answer")


def test_which_rows_take_the_template(chatty, tokenizer, tmp_path):
    """Messages do where there is a template; text never does, nor anything with `none`."""
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl"
    rows = [pair([say("user", f"Is {i} even?")]) for i in range(40)]
    apart = [{"prompt": row["chosen"][:1], "chosen": [SO], "rejected": [NO]} for row in rows]
    datasets.Dataset.from_list(apart).save_to_disk(tmp_path / "folder")
    chats.write_text("\n".join(map(json.dumps, rows)))
    texts.write_text(
        "\n".join(
            json.dumps({"prompt": f"Is {i}", "chosen": " a", "rejected": " b"}) for i in range(40)
        )
    )
    write = chat_writer(chatty.tokenizer, "auto")
    assert (
        write and not chat_writer(chatty.tokenizer, "none") and not chat_writer(tokenizer, "auto")
    )
    asked = write([say("user", "Is")])[:9]
    folder = tmp_path / "folder"
    for chat, path, start in [
        (write, chats, asked),
        (write, folder, asked),
        (None, chats, hh_prompt("Is")[:9]),
    ]:
        task = load_task(str(path), chat=chat)
        assert task.chats == bool(chat)
        assert all(
            prompt.startswith(start)
            for part in TRAIN_PARTS
            for prompt in task.splits[part]["prompt"]
        )
    assert not load_task(str(texts), chat=write).chats


@pytest.mark.parametrize("template", ["bos"], indirect=True)
def test_a_run_on_chats(chatty, tmp_path, capsys):
    """The run says that it took the template, its samples begin with it, and `generate` takes a user's message."""
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(pair([say("user", f"Is {i} even?")])) for i in range(40)))
    sizes = "--batch_size 4 --sft_batch_size 4 --rm_batch_size 4 --max_response_length 6 --updates 1 --eval_prompts 2"
    assert not main(
        f"run --model {chatty.folder} --dataset {path} {sizes} --output_dir {tmp_path}/run".split()
    )
    assert "chat template" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["chat_template"] == "auto"
    sample = json.loads((tmp_path / "run" / "ma-ppo" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("<bos><mask>user\nIs ") and sample["prompt"].endswith(
        "?<eos>\n<mask>assistant\n"
    )
    inputs = (
        f"--sft {tmp_path}/run --rm {tmp_path}/run --batch_size 4 --num_generations 2 --updates 1"
    )
    assert not main(f"rloo {inputs} --max_response_length 6 --output_dir {tmp_path}/rloo".split())
    assert not main(f"generate --policy {tmp_path}/run/ma-ppo --prompt Why?".split())


@pytest.mark.parametrize("template", ["bos"], indirect=True)
def test_answers_to_texts_that_are_read_in_another_way_are_not_used_again(chatty, sft, tmp_path):
    """The texts are the same, but not their tokens, nor what ends an answer."""
    chats, texts, out = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl", tmp_path / "e"
    rows = [[say("user", f"Is {i} even?")] for i in range(40)]
    chats.write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    write = chat_writer(chatty.tokenizer, "auto")
    texts.write_text("\n".join(json.dumps({"prompt": write(row)}) for row in rows))
    words = f"evaluate --model {chatty.folder} --sft {sft} --eval_prompts 2 --max_response_length 6 --output_dir {out}"
    for path in (texts, chats, chats, texts):
        assert not main([*words.split(), "--dataset", str(path)])
    assert len(list((out / "responses").iterdir())) == 2


@pytest.mark.parametrize("template", ["bos"], indirect=True)
def test_what_is_exported_writes_samples_and_stops_as_the_run(chatty, sft, tmp_path):
    """The template of a file, the end of its turn as EOS beside the model's own, and the run's sampling."""
    file, out = tmp_path / "own.jinja", tmp_path / "out"
    file.write_text(TURNS.replace("<eos>", "<unk>"))
    sampling = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "max_response_length": 6}
    run = RunFolder.create(
        tmp_path / "run", sampling | {"model": chatty.folder, "chat_template": str(file)}
    )
    shutil.copytree(sft, run.path / "policy")
    assert not main(["export", "--policy", str(run.path), "--output_dir", str(out)])
    tokenizer, config = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out)
    assert tokenizer.chat_template == file.read_text() and tokenizer.eos_token == "<unk>"
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    assert set(config.eos_token_id) == {tokenizer.unk_token_id, chatty.tokenizer.eos_token_id}
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.7, 0, 0.9)
    assert (config.max_new_tokens, config.pad_token_id) == (6, chatty.tokenizer.pad_token_id)


@pytest.mark.parametrize("template", ["plain"], indirect=True)
def test_tokens_that_the_model_has_not_are_named(chatty, tmp_path, capsys):
    """Those that the data use: others do no harm."""
    chatty.tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    chatty.tokenizer.chat_template = CHATML
    chatty.tokenizer.save_pretrained(chatty.folder)
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl"
    chats.write_text("".join(json.dumps(pair([say("user", f"Is {i}")])) + "\n" for i in range(12)))
    texts.write_text(
        "".join(json.dumps({"prompt": f"Is {i}", "completion": " a"}) + "\n" for i in range(12))
    )
    words = [
        "sft",
        "--model",
        chatty.folder,
        "--sft_epochs",
        "0",
        "--output_dir",
        str(tmp_path / "run"),
        "--dataset",
    ]
    assert main([*words, str(chats)]) == 2 and not (tmp_path / "run").exists()
    error = capsys.readouterr().err
    assert (
        "none for the token <|im_" in error
        and "resize_token_embeddings" in error
        and error.count("\n") == 1
    )
    assert main([*words, str(texts)]) == 0
    chatty.tokenizer.add_tokens(["ordinary"])  # which an answer has
    chatty.tokenizer.save_pretrained(chatty.folder)
    texts.write_text(texts.read_text().replace(" a", " ordinary"))
    assert main([*words[:-2], str(tmp_path / "other"), "--dataset", str(texts)]) == 2
    assert "none for the token ordinary" in capsys.readouterr().err


# As TRL writes them

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
OPENS_A_THOUGHT = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
TRLS = Path(trl.__file__).parent / "chat_templates"
FORMS = {
    "chatml": CHATML,
    "llama-2": LLAMA_2,
    "qwen3": (TRLS / "qwen3.jinja").read_text(encoding="utf-8"),
    "gemma": (TRLS / "gemma.jinja").read_text(encoding="utf-8"),
    # the prompt alone is no prefix of prompt and answer, as DeepSeek's
    "opens a thought": OPENS_A_THOUGHT,
}


def tokenizer_of(family, form):
    """A small tokenizer whose chat template is of this form, as the library loads one."""
    tokenizer = copy.deepcopy(small_tokenizer(family))
    marks = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template, tokenizer.split_special_tokens = FORMS[form], True
    return tokenizer


def as_trl(tokenizer, prompt, answer):
    """Ids of prompt and answer, and where the answer begins, as `trl.SFTTrainer` and `DPOTrainer` take them."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.split_special_tokens = False
    alone = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*prompt, answer])["input_ids"]
    return whole, common_prefix_length(alone, whole)


@pytest.mark.parametrize("family", ["byte_level", "metaspace", "byte_fallback"])
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_what_the_template_writes_behind_the_prompt(form, family):
    """Token for token those of TRL, up to the end of the assistant's turn, where a response ends."""
    tokenizer = tokenizer_of(family, form)
    chat = chat_writer(tokenizer, "auto")
    questions = [
        [say("user", "Why?")],
        [say("user", "Hi"), say("assistant", "Hello."), say("user", "The mat?")],
    ]
    for before in questions:
        # spaces stay where the template keeps them
        for text in ("Because.", "    return x", "\n\nThe old cat"):
            row = {"prompt": before, "chosen": [say("assistant", text)], "rejected": [NO]}
            made = to_preferences(
                [row], "x", form=replace(PAIRS, convert=partial(PAIRS.convert, template=chat))
            )[0][0]
            answered = replace(ANSWERS, convert=partial(ANSWERS.convert, template=chat))
            taught = to_preferences(
                [{"prompt": before, "completion": row["chosen"]}], "x", form=answered
            )[0][0]
            expect_chats(tokenizer)
            data = sft_dataset(tokenizer, datasets.Dataset.from_list([taught]), 999)
            ids, mask = data["input_ids"][0], data["completion_mask"][0]
            whole, start = as_trl(tokenizer, before, row["chosen"][0])
            # tokens of the prompt's end and the answer would join: sampling cannot do so
            if mask.index(1) > start:
                assert (
                    ids[: mask.index(1)] == encode_prompts(tokenizer, [chat(before)])[0]
                    and form != "llama-2"
                )
                assert (
                    tokenizer.decode(ids) == tokenizer.decode(whole)[: len(tokenizer.decode(ids))]
                )
            else:
                assert ids == whole[: len(ids)] and mask.index(1) == start
            assert ids[-1] == tokenizer.eos_token_id not in ids[mask.index(1) : -1]
            (chosen,) = pair_dataset(tokenizer, datasets.Dataset.from_list([made]), 999)[
                "chosen_ids"
            ]
            assert chosen == ids


DROPS_THOUGHTS = OPENS_A_THOUGHT.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
)


def test_thoughts_that_a_template_drops_are_kept():
    """Answers have the data's text, and a prompt has the same tokens before each of them, alone and in `generate`."""
    tokenizer = tokenizer_of("byte_level", "chatml")
    tokenizer.chat_template = DROPS_THOUGHTS
    chat = chat_writer(tokenizer, "auto")
    thought, turn = "<think>\nIt is old.\n</think>\n\nA cat.", say("user", "And now?")
    prompt, answers = chat.write(
        BEFORE, [[say("assistant", thought)], [SO], [say("assistant", thought), turn, SO]]
    )
    between = "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nSo."
    assert (
        answers == [thought, "So.", thought + between]
        and len(chat.restored) == 2
        and not chat.left_out
    )
    assert prompt == chat(BEFORE) == chat.write(BEFORE, [])[0] and prompt.endswith(
        "<|im_start|>assistant\n"
    )
    assert write_turns("Why?", chat) == chat.write([say("user", "Why?")], [[SO]])[0]
    as_text = chat_writer(tokenizer, "text")
    assert write_turns(
        "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:", as_text
    ) == as_text([say("user", "Hi"), say("assistant", "Hello"), say("user", "Why?")])


def test_a_template_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(chats, "SECONDS", 0.2)
    tokenizer = tokenizer_of("byte_level", "chatml")
    tokenizer.chat_template = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    fails(
        lambda: chat_writer(tokenizer, "auto")([say("user", "Hi")]),
        "--chat_template auto: ",
        "more than 0.2 seconds",
    )
    fails(lambda: expect_chats(tokenizer), "--chat_template: ", "more than 0.2 seconds")


@pytest.mark.parametrize("form", [None, "chatml"])
def test_texts_that_tokens_do_not_give_back_are_counted(form):
    """Marks of a template are no text; the first text that differs is shown."""
    tokenizer = tokenizer_of("word_piece", form or "chatml")
    tokenizer.expects_chats = bool(form)
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" if form else "{}"
    kept, lost = "The old cat", "The\tcat has 7 lives ≈"
    assert not list(note_on_lost_texts(tokenizer, [start.format(kept)], [f" {kept} "]))
    (note,) = note_on_lost_texts(
        tokenizer, [start.format(x) for x in (kept, lost)], [kept, lost, lost]
    )
    assert note.startswith("2 of 4 texts do not come back from their tokens, first '")
    assert not list(note_on_lost_texts(tokenizer_of("byte_level", "chatml"), [lost], [lost]))


def test_a_reward_gets_what_the_data_have(tmp_path):
    """Messages where there are any, and the text that became a message of the user; no marks of a template."""
    tokenizer = tokenizer_of("byte_level", "chatml")
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": [*BEFORE[:2], say("user", f"Why {i}?")]}) + "\n" for i in range(8)
        )
    )
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Why {i}?"}) + "\n" for i in range(8))
    )
    (tmp_path / "prompts_seen.py").write_text(
        "def seen(prompts, responses):\n    return [p if isinstance(p, str) else p[-1]['content'] for p in prompts]\n"
    )
    for file, choice in (("rows", "auto"), ("texts", "text"), ("texts", "auto")):
        task = load_task(str(tmp_path / f"{file}.jsonl"), chat=chat_writer(tokenizer, choice))
        sys.path.insert(0, str(tmp_path))
        seen = text_reward("prompts_seen:seen", task)(
            prompts := task.splits["ppo"]["prompt"], prompts
        )
        sys.path.remove(str(tmp_path))
        assert sorted(seen)[0][:4] == "Why " and all("<|im_start|>" not in text for text in seen)
        assert (
            all(isinstance(said, list) for said in task.source_of_prompt.values())
            == (file == "rows")
            or not task.source_of_prompt
        )


def test_forms_of_answers_by_name():
    """What one sees: a space on both sides in Llama-2's form, an empty thought in Qwen3's."""
    for form, answer in (
        ("llama-2", " Because. "),
        ("qwen3", "<think>\n\n</think>\n\nBecause."),
        ("gemma", "Because."),
    ):
        chat = chat_writer(tokenizer_of("byte_level", form), "auto")
        assert chat.write([say("user", "Why?")], [[say("assistant", "Because.")]])[1] == [answer]


def test_texts_as_a_user_s_message(tmp_path):
    """They are the tokens of the same messages; nothing has two ends."""
    tokenizer = tokenizer_of("byte_level", "chatml")
    rows = [{"prompt": f"Why {i}?", "chosen": " Because.", "rejected": "No."} for i in range(8)]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_task(str(path), chat=chat_writer(tokenizer, "text"))
    assert task.chats
    expect_chats(tokenizer)
    data = sft_dataset(tokenizer, task.splits["ppo"], 999)
    for prompt, ids in zip(task.splits["ppo"]["prompt"], data["input_ids"]):
        question = prompt.removeprefix("<|im_start|>user\n").partition("<")[0]
        whole, _ = as_trl(tokenizer, [say("user", question)], say("assistant", "Because."))
        # of the question, and of the answer
        assert ids == whole[:-1] and ids.count(tokenizer.eos_token_id) == 2
    rows[0]["chosen"] = "Because.<end_of_turn>"
    path.write_text("\n".join(map(json.dumps, rows)))
    fails(lambda: load_task(str(path), chat=chat_writer(tokenizer, "text")), "special token")


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n", "<|im_end|>\n<eos>"])
def test_a_written_answer_of_several_turns_keeps_its_last_one(end):
    """Only the end of the whole answer is taken off, with what the template writes after it."""
    tokenizer = tokenizer_of("byte_level", "chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% if loop.last and m.role == 'assistant' %}}{end}{{% else %}}<|im_end|>\n{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    several = [say("assistant", "First."), say("user", "Why?"), say("assistant", "Second.")]
    answers = [several, [say("assistant", "One.")]]
    turns = "First.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSecond."
    assert chat_writer(tokenizer, "auto").write([say("user", "Hi")], answers)[1] == [turns, "One."]


def test_a_transcript_becomes_messages_and_a_system_column_the_first_of_them(tmp_path):
    tokenizer = tokenizer_of("byte_level", "chatml")
    rows = [
        {
            "system": "Be kind.",
            "prompt": hh_prompt([f"Hi {i}", "Hello", "Why?"]),
            "response": " So.",
        }
        for i in range(4)
    ]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_task(str(path), chat=chat_writer(tokenizer, "text"))
    turns = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi {}<|im_end|>\n<|im_start|>assistant\nHello"
    prompts = [prompt for part in task.splits.values() for prompt in part["prompt"]]
    assert task.unused == () and sorted(p[: len(turns) - 1] for p in prompts) == [
        turns.format(i) for i in range(4)
    ]
    assert load_task(str(path)).unused == ("system",)
    tokenizer.chat_template = None
    fails(lambda: chat_writer(tokenizer, "text"), "--chat_template text", "no chat template")


@pytest.mark.parametrize("form", ["tldr", "program", "embedded"])
def test_data_with_prompts_of_their_own_take_no_template(tmp_path, form):
    rows = {
        "tldr": {
            "info": {"subreddit": "tea", "post": "A post."},
            "summaries": [{"text": "A"}, {"text": "B"}],
            "choice": 0,
        },
        "program": dict.fromkeys(
            ("question", "solutions", "input_output", "difficulty", "starter_code"), "x"
        ),
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(rows.get(form))}\n")
    dataset = "tiny-tldr" if form == "embedded" else str(path)
    chat = chat_writer(tokenizer_of("byte_level", "chatml"), "text")
    fails(lambda: load_task(dataset, chat=chat), f"--chat_template text: {dataset}")


# What messages have beside their content


THINKS = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
SILENT = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def chats_of(tmp_path, template, answer, *between):
    """A task of rows that end with this message, written by this template, and the writer."""
    tokenizer = load_tokenizer("tiny-gemma")
    tokenizer.chat_template = template
    chat = chat_writer(tokenizer, "auto")
    rows = [{"messages": [say("user", f"Why {i}?"), *between, answer]} for i in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(str(path), chat=chat), chat


def test_role_and_content_come_before_from_and_value(tmp_path):
    """Some exports name the speaker in `from`, beside the role; Parquet fills up the keys of other rows with None."""
    for answer in (
        say("assistant", "Warm.") | {"from": "bot-7", "value": None},
        {"role": None, "content": None, "from": "gpt", "value": "Warm."},
    ):
        task, _ = chats_of(tmp_path, SILENT, answer)
        assert set(task.splits["sft"]["chosen"]) == {"Warm."}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_a_thought_beside_the_content_reaches_the_template(tmp_path, key):
    """Also under another name than the template's; a template without thoughts says that they are dropped."""
    answer = say("assistant", "Warm.") | {key: "Let me think."}
    task, chat = chats_of(tmp_path, THINKS, answer)
    answers = {row["chosen"] for part in task.splits.values() for row in part if "chosen" in row}
    assert answers == {"<think>Let me think.</think>Warm."} and chat.thoughts_left_out == 0
    task, chat = chats_of(tmp_path, SILENT, answer)
    assert chat.thoughts_left_out == 12 and task.unused == ()


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_tool_calls_without_content_are_written_or_refused(tmp_path, key, content):
    """Also a single call under its former name."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = {"tool_calls": [{"type": "function", "function": function}], "function_call": function}
    answer = {"role": "assistant", "content": content, key: calls[key]}
    task, _ = chats_of(tmp_path, THINKS, answer)
    answers = {row["chosen"] for part in task.splits.values() for row in part if "chosen" in row}
    assert answers == {'<think></think><call>add{"a": 1}</call>'} and task.unused == ()
    fails(
        lambda: chats_of(tmp_path, SILENT, answer), "row 1: a call of the tool 'add'", "leaves out"
    )
    # Also if the name is a word of the text, and in the middle of a chat.
    between = [answer | {"content": "I add them."}, say("tool", "3")]
    last = say("assistant", "It is 3.")
    fails(lambda: chats_of(tmp_path, SILENT, last, *between), "row 1: a call of the tool 'add'")
    assert chats_of(tmp_path, THINKS, last, *between)[0].counts["kept"] == 12


@pytest.mark.parametrize("role", ["function_call", "observation", "critic"])
def test_a_role_that_the_template_does_not_have_is_refused_and_counted_by_name(tmp_path, role):
    other = say(role, "3")
    answer = say("assistant", "Warm.")
    fails(
        lambda: chats_of(tmp_path, SILENT, answer, other),
        f"row 1: a message of the role '{role}'",
        "rename",
    )
    task, _ = chats_of(tmp_path, SILENT + "{# '" + role + "' #}", answer, other)
    assert task.counts["kept"] == 12
    (tmp_path / "two.jsonl").write_text(
        (tmp_path / "rows.jsonl").read_text().replace(role, "user", 3).replace("3", "4")
    )
    task = load_task(str(tmp_path / "two.jsonl"), bad_rows="drop")
    assert task.counts["role_" + role] == 9 and task.counts["kept"] == 3
