"""What a run is made from: every stage meets every change, and what is saved meets flipped bits."""

import importlib
import json
import random
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import fails, nudge
from safetensors.torch import load_file, save_file

from marlhf_lite.cli import main
from marlhf_lite.experiments.manifest import check_contents, code_contents
from marlhf_lite.models.loading import load_base, load_policy
from marlhf_lite.utils import seals
from marlhf_lite.utils.contents import code_hash, model_hash, tokenizer_hash
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.seals import atomic_folder, broken, check_seal, file_hash, seal

TEMPLATE = (
    "Date: {{ strftime_now('%d %b %Y') }}\n{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWARD = """from helper import count


def score(prompts, responses):
    return [float(count(r)) for r in responses]
"""
HELPER = "def count(text):\n    return text.count('a')\n"
SMALL = "--batch_size 4 --micro_batch_size 4 --updates 1 --checkpoint_every 1"
LENGTH = "--max_response_length 8"
TODAY, NEXT = "Etc/GMT+12", "Pacific/Kiritimati"  # their dates always differ


def rows(count):
    pairs = [
        [{"role": "assistant", "content": f"{word} cats {i}."} for word in ("Good", "Bad")]
        for i in range(count)
    ]
    asked = [[{"role": "user", "content": f"How many cats are {i}?"}] for i in range(count)]
    return [
        {"prompt": q, "chosen": [a], "rejected": [b]}
        for q, (a, b) in zip(asked, pairs, strict=True)
    ]


@pytest.fixture
def zone(monkeypatch):
    """A function that sets the time zone, and with it today's date."""

    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


def command(words):
    for name in ("my_reward", "helper"):  # as in a new process
        sys.modules.pop(name, None)
    return main(words.split())


@pytest.fixture(scope="module")
def chain(tiny, tmp_path_factory):
    """A folder with a base, a template, data, a reward, and runs of SFT, reward model and two of PPO made from them."""
    folder = tmp_path_factory.mktemp("chain")
    shutil.copytree(tiny.model, folder / "base")
    for name, text in {
        "template.jinja": TEMPLATE,
        "my_reward.py": REWARD,
        "helper.py": HELPER,
    }.items():
        (folder / name).write_text(text)
    append_lines(folder / "pairs.jsonl", rows(40))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("TZ", TODAY)
        time.tzset()
        data = (
            f"--dataset pairs.jsonl --chat_template template.jinja --model base --lora_r 2 {LENGTH}"
        )
        for name in ("s", "other_s"):
            seed = len(name)
            assert not command(f"sft {data} --sft_batch_size 4 --seed {seed} --output_dir {name}")
            assert not command(
                f"rm --sft {name} --rm_batch_size 4 --seed {seed} {LENGTH} --output_dir r{name}"
            )
        assert not command(f"ppo --sft s --rm rs {SMALL} {LENGTH} --output_dir p")
        assert not command(
            f"ppo --sft s --reward my_reward:score --critic_init sft {SMALL} {LENGTH} --output_dir q"
        )
    time.tzset()
    return folder


@pytest.fixture
def here(chain, monkeypatch):
    monkeypatch.chdir(chain)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return chain


def other_weights(path):
    save_file(
        {name: 2 * tensor for name, tensor in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )


def other_folder(path):
    shutil.rmtree(path)
    shutil.copytree(path.parents[1] / path.parent.name.replace("s", "other_s") / path.name, path)


def other_text(path):
    path.write_text(path.read_text() + "\n\n")


def other_rows(path):
    append_lines(path, rows(41)[-1:])


CHANGES = {
    "base model": ("base/model.safetensors", other_weights),
    "tokenizer": ("base/tokenizer.json", other_text),
    "chat template": ("template.jinja", other_text),
    "data": ("pairs.jsonl", other_rows),
    "SFT model": ("s/sft", other_folder),
    "reward model": ("rs/rm", other_folder),
    "reward function": ("my_reward.py", other_text),
    "helper": ("helper.py", other_text),
}
EVERY = {"base model", "tokenizer", "chat template", "data"}
COMMANDS = {
    f"rm --sft s {LENGTH} --output_dir new": EVERY,
    f"dpo --sft s {LENGTH} --output_dir new": EVERY,
    f"ppo --sft s --rm rs {SMALL} {LENGTH} --output_dir new": {*EVERY, "SFT model"},
    f"evaluate --sft s --policies P=p --rm rs --eval_prompts 2 {LENGTH} --output_dir new": {
        *EVERY,
        "SFT model",
        "reward model",
    },
    "sft --resume s": EVERY,
    "rm --resume rs": {*EVERY, "SFT model"},
    "ppo --resume p --updates 2": {*EVERY, "SFT model", "reward model"},
    "ppo --resume q --reward my_reward:score --updates 2": {
        *EVERY,
        "SFT model",
        "reward function",
        "helper",
    },
    "generate --policy p --prompt Hi": {"base model", "tokenizer", "chat template"},
    "export --policy p --output_dir new": {"base model", "tokenizer", "chat template"},
}


@contextmanager
def changed(path, change):
    """Inside, the file or folder has other content; then it is as it was."""
    kept = path.with_name(f"kept-{path.name}")
    shutil.copytree(path, kept) if path.is_dir() else shutil.copy(path, kept)
    try:
        change(path)
        yield
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept.rename(path)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_stage_names_what_has_changed(here, capsys, words):
    """In one line, before anything is written; what a command does not read is no matter."""
    before = {path: path.read_bytes() for name in "spq" for path in (here / name).rglob("*.json")}
    for name in COMMANDS[words]:
        path, change = CHANGES[name]
        with changed(here / path, change):
            assert command(words) == 2, name
        shown = capsys.readouterr().err.splitlines()
        assert (
            "has other content than when" in shown[-1]
            or "have other content than when" in shown[-1]
        )
        assert {"helper": "reward function"}.get(name, name) in shown[
            -1
        ] and "--accept_changed" in shown[-1]
        assert not [line for line in shown if "Traceback" in line] and not (here / "new").exists()
    assert {
        path: path.read_bytes() for name in "spq" for path in (here / name).rglob("*.json")
    } == before


def test_what_is_restored_goes_on_and_what_is_accepted_is_recorded(here, tmp_path, capsys):
    shutil.copytree(here / "p", tmp_path / "p")
    words = f"ppo --resume {tmp_path / 'p'} --updates 2"
    path, change = CHANGES["base model"]
    with changed(here / path, change):
        assert command(words) == 2
        assert command(f"{words} --accept_changed") == 0
        for run in (tmp_path / "p", tmp_path / "p" / "ppo"):
            manifest = RunFolder.open(run).manifest
            assert [x["what"] for x in manifest["accepted"]] == ["base model"]
            assert manifest["contents"]["base model"]["hash"] == model_hash(
                here / "base", counts_tokenizer=False
            )
        assert command(f"ppo --resume {tmp_path / 'p'} --updates 3") == 0, "it has been accepted"
        assert command(f"generate --policy p --prompt Hi --accept_changed {LENGTH}") == 0
    assert not RunFolder.open("p/ppo").manifest["accepted"], (
        "this command leaves no run, and changes none"
    )
    assert command(f"ppo --resume {tmp_path / 'p'} --updates 4") == 2, (
        "the base is the first one again"
    )
    capsys.readouterr()
    assert command(f"generate --policy p --prompt Hi {LENGTH}") == 0


def test_a_copied_run_is_resumed_with_its_models_and_data_where_they_are_now(
    here, tmp_path, monkeypatch, capsys
):
    """The hashes tell that they are the same; other ones are refused."""
    shutil.copytree(here / "p", tmp_path / "p")
    monkeypatch.chdir(tmp_path)
    assert command("ppo --resume p --updates 2") == 2
    capsys.readouterr()
    data = f"--model {here}/base --dataset {here}/pairs.jsonl --chat_template {here}/template.jinja"
    words = f"ppo --resume p --updates 2 {data} --sft {here}/s --rm {here}/rs"
    assert command(words.replace(f"{here}/rs", f"{here}/rother_s")) == 2
    assert "reward model" in capsys.readouterr().err.splitlines()[-1]
    assert command(words) == 0
    assert RunFolder.open("p").config["sft"] == f"{here}/s"


def test_an_evaluation_writes_into_no_run_that_trained(here, tmp_path, capsys):
    """It would replace the samples, in which a later --resume cuts. Its own folder is opened again."""
    for name in "pq":
        shutil.copytree(here / name, tmp_path / name)
    manifest = tmp_path / "q" / "manifest.json"  # as version 1.0 wrote it
    old = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "command"}
    manifest.write_text(json.dumps(old))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for folder in ("p", "p/ppo", "q", "q/ppo"):
        place = tmp_path / folder
        assert command(f"evaluate --sft s --eval_prompts 2 {LENGTH} --output_dir {place}") == 2
        assert "a run that trained" in capsys.readouterr().err.splitlines()[-1]
    said = "a run of marlhf ppo: give marlhf ppo --resume"
    assert command(f"evaluate --resume {tmp_path / 'p'}") == 2 and said in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        assert not command(f"evaluate --sft s --eval_prompts 2 {LENGTH} --output_dir {tmp_path}/e")


def test_every_name_of_code_in_a_value_has_its_hash(here, tmp_path, monkeypatch):
    """The first of several objectives as well as the last."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("first", "last"):
        (tmp_path / f"{name}.py").write_text(f"class Own:\n    name = {name!r}\n")
        importlib.import_module(name)
    names = "first:Own, vapo=0.05,last:Own"
    found = code_contents("objective", names)
    assert list(found) == ["objective first:Own", "objective last:Own"]
    assert [entry["place"] for entry in found.values()] == ["first:Own", "last:Own"]
    assert code_contents("objective", "last:Own") == {"objective": found["objective last:Own"]}
    run = RunFolder.create("run", {}, {"contents": found})
    for name in ("first", "last"):
        with changed(tmp_path / f"{name}.py", other_text):
            now = code_contents("objective", names)
            said = f"objective {name}:Own has other content than when run was made"
            fails(lambda: check_contents(run, now, accept=False), said)  # noqa: B023


def test_stored_answers_are_those_of_what_they_came_from(here, tmp_path, capsys):
    """Another base below the same adapter answers again; the old one's answers are found again."""
    adapter = tmp_path / "adapter"
    shutil.copytree(here / "s" / "sft", adapter)  # of no run: only its content is known
    words = f"evaluate --model base --dataset pairs.jsonl --chat_template template.jinja --sft {adapter} {LENGTH}"
    words = f"{words} --eval_prompts 2 --output_dir {tmp_path / 'e'}"

    def answers():
        assert command(words) == 0
        return [row["token_ids"] for row in RunFolder.open(tmp_path / "e").samples()]

    first, stores = answers(), tmp_path / "e" / "responses"
    with changed(here / "base" / "model.safetensors", other_weights):
        second = answers()
        assert (
            "base model has other content" in capsys.readouterr().out
            and len(list(stores.iterdir())) == 2
        )
    assert first != second and answers() == first and len(list(stores.iterdir())) == 2


def test_a_run_keeps_the_date_that_its_template_sees(here, tmp_path, zone, capsys):
    """On the next day every later stage reads the same rows; a new chain has the new date."""
    zone(NEXT)
    for words in (
        f"rm --sft s --rm_batch_size 4 {LENGTH} --output_dir {tmp_path / 'r'}",
        f"evaluate --sft s --policies P=p --rm rs --eval_prompts 2 {LENGTH} --output_dir {tmp_path / 'e'}",
        "rm --resume rs",
        f"generate --policy p --prompt Hi {LENGTH}",
        f"dpo --sft s --dpo_batch_size 4 {LENGTH} --output_dir {tmp_path / 'd'}",
    ):
        assert command(words) == 0, capsys.readouterr().err
    dates = [
        RunFolder.open(path).manifest["date"]
        for path in ("s", tmp_path / "r", tmp_path / "e", tmp_path / "d")
    ]
    assert len(set(dates)) == 1
    told = [row["prompt"] for row in RunFolder.open(tmp_path / "e").samples()]
    day = time.strftime("%d %b %Y", time.strptime(dates[0], "%Y-%m-%d"))
    assert all(text.startswith(f"Date: {day}\n") for text in told)
    sizes = (
        f"--dataset pairs.jsonl --chat_template template.jinja --model base {LENGTH} --sft_epochs 0"
    )
    assert command(f"sft {sizes} --output_dir {tmp_path / 's'}") == 0
    assert RunFolder.open(tmp_path / "s").manifest["date"] > dates[0]


def test_a_folder_that_is_no_run_is_used_and_a_run_with_a_damaged_manifest_is_not(
    here, tmp_path, capsys
):
    shutil.copytree("s/sft", tmp_path / "adapter")
    sizes = f"--dataset pairs.jsonl --model base --chat_template template.jinja {LENGTH}"
    assert (
        command(
            f"rm --sft {tmp_path / 'adapter'} {sizes} --rm_batch_size 4 --output_dir {tmp_path / 'r'}"
        )
        == 0
    )
    shutil.copytree("s", tmp_path / "old")
    (tmp_path / "old" / "manifest.json").write_text("{")
    assert command(f"rm --sft {tmp_path / 'old'} --output_dir new") == 2
    assert "old: manifest.json is damaged" in capsys.readouterr().err


# Seals


def flips(path, count, seed=0):
    """Flip one bit of a file at a time; inside each turn it is flipped."""
    draw, whole = random.Random(seed), path.read_bytes()
    for bit in (draw.randrange(8 * len(whole)) for _ in range(count)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        yield bit
    path.write_bytes(whole)


def test_one_flipped_bit_of_a_checkpoint_is_found(tmp_path):
    path = tmp_path / "update-000001.pt"
    torch.save({"weights": torch.randn(30), "counters": {"updates_done": 1}}, path)
    seal(path)
    assert not broken(path) and torch.load(path, weights_only=True)["counters"] == {
        "updates_done": 1
    }
    assert all(broken(path) for _ in flips(path, 200))
    whole = path.read_bytes()
    for cut in (0, 1, 70, 72, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert broken(path)


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "hashes.json"]
)
def test_one_flipped_bit_of_a_saved_model_is_found(base, tiny, tmp_path, name):
    from marlhf_lite.models.loading import new_policy

    with atomic_folder(tmp_path / "policy") as place:
        nudge(new_policy(base, tiny), 1).save_pretrained(place)
    folder = tmp_path / "policy"
    check_seal(folder)
    for _ in flips(folder / name, 200 if name.endswith("safetensors") else 70):
        assert broken(folder)
    next(turn := flips(folder / name, 1))
    fails(
        lambda: load_policy(load_base(tiny), folder),
        f"{folder}: ",
        "is not as it was saved",
        "delete hashes.json",
    )
    next(turn, None)
    load_policy(base, folder)


@pytest.mark.parametrize(
    "words",
    ["sft --dataset pairs.jsonl --model base --sft_batch_size 4", "dpo --sft s --dpo_batch_size 4"],
)
def test_a_damaged_folder_of_ours_is_one_line(here, tmp_path, capsys, words):
    """What a stage left is checked by the next one, whatever file of it is damaged."""
    chats = "" if "--sft s" in words else "--chat_template template.jinja"
    assert command(f"{words} {chats} {LENGTH} --output_dir {tmp_path / 'run'}") == 0
    (folder,) = [
        tmp_path / "run" / name
        for name in ("sft", "dpo/policy")
        if (tmp_path / "run" / name).is_dir()
    ]
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        next(turn := flips(folder / file, 1))
        capsys.readouterr()
        assert command(f"generate --policy {folder} --prompt Hi {LENGTH}") == 2
        assert capsys.readouterr().err.count("\n") == 1
        next(turn, None)
    assert command(f"generate --policy {folder} --prompt Hi {LENGTH}") == 0


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json", "extra/x.bin"]
)
def test_every_file_of_a_model_counts_for_its_hash_and_its_seal(base, tiny, tmp_path, name):
    """A file that is added, and one that changes; wherever the folder is, and whatever lies beside the model."""
    from marlhf_lite.models.loading import new_policy

    with atomic_folder(tmp_path / "policy") as place:
        new_policy(base, tiny).save_pretrained(place)
    folder = tmp_path / "policy"
    whole = model_hash(folder)
    for no_part in ("README.md", ".DS_Store", "log.json"):
        (folder / no_part).write_text("about it")
    assert model_hash(folder) == whole and not broken(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text('{"it is": "added"}')
    added = model_hash(folder)
    assert added != whole and broken(folder) == name
    fails(lambda: load_policy(base, folder), f"{name} is not as it was saved")
    seal(folder)
    assert not broken(folder)
    (folder / name).write_text('{"it is": "other"}')
    assert model_hash(folder) != added and broken(folder) == name
    moved = folder.rename(tmp_path / "moved")
    (moved / name).unlink()
    assert model_hash(moved) == whole


def test_a_base_counts_with_its_sampling_settings_and_apart_from_its_tokenizer(tiny, tmp_path):
    folder = shutil.copytree(tiny.model, tmp_path / "base")
    weights, words = model_hash(folder, counts_tokenizer=False), tokenizer_hash(folder)
    (folder / "chat_template.jinja").write_text("x")  # the template in use has its own hash
    assert tokenizer_hash(folder) == words
    (folder / "added_tokens.json").write_text("{}")
    assert tokenizer_hash(folder) != words
    assert model_hash(folder, counts_tokenizer=False) == weights
    (folder / "generation_config.json").write_text("{}")
    assert model_hash(folder, counts_tokenizer=False) != weights


def test_a_large_file_is_hashed_by_its_size_and_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(seals, "LARGE", 5000)
    monkeypatch.setattr(seals, "BLOCK", 10)
    path = tmp_path / "weights"
    path.write_bytes(bytes(8000))
    first = file_hash(path)
    seen = set()
    for data in (bytes(8001), b"\1" + bytes(7999), bytes(7999) + b"\1", bytes(7999)):
        path.write_bytes(data)
        seen.add(file_hash(path))
    assert len(seen | {first}) == 5


def test_code_counts_with_what_it_imports_beside_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "mine/__init__.py": "",
        "mine/reward.py": "import json\n\nfrom . import near\nfrom mine.deep import far\n",
        "mine/near.py": "import torch\n",
        "mine/deep/__init__.py": "",
        "mine/deep/far.py": "import beside\n",
        "beside.py": "",
        "unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    __import__("mine.reward")
    first = code_hash("mine.reward:score")
    for name in files:
        with changed(tmp_path / name, other_text):
            assert (code_hash("mine.reward:score") != first) == (name != "unused.py"), name
    assert code_hash("gold") == "" and code_hash("mine.reward:score") == first
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "beside")]:
        del sys.modules[name]


def test_a_manifest_says_what_the_run_was_made_from(here):
    for run in ("p", "p/ppo"):
        manifest = json.loads(Path(run, "manifest.json").read_text())
        assert set(manifest["contents"]) == {*EVERY, "SFT model", "reward model"}
        assert manifest["contents"]["SFT model"]["hash"] == model_hash("s/sft")
        assert manifest["options"]["lora_r"] == 2
    assert "reward function" in RunFolder.open("q").manifest["contents"]
