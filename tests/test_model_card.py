"""Model cards: what the hub reads of them, and that nothing of this machine is in them."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from marlhf_lite.experiments.model_card import model_card, public_name, write_model_card

OPTIONS = {
    "model": "google/gemma-2b",
    "dataset": "owner/pairs",
    "reward": "my_rule:short",
    "seed": 7,
    "termination": "fixed",
    "n": "5",
    "lam": 0.95,
    "sft": "/srv/me/secret/runs/a",
    "output_dir": "/srv/me/secret/runs/c",
}


def test_the_hub_reads_base_data_library_and_a_licence_to_fill_in():
    card = ModelCard(model_card("MA-PPO", OPTIONS, is_adapter=True))
    assert (card.data.base_model, card.data.datasets) == ("google/gemma-2b", ["owner/pairs"])
    assert (card.data.library_name, card.data.license) == ("peft", "unknown")
    for part in ("MA-PPO", "| seed | 7 |", "my_rule:short", "commit ", "`--n 5`", "`--lam 0.95`"):
        assert part in card.text
    whole = ModelCard(model_card("MA-PPO", OPTIONS, is_adapter=False))
    assert whole.data.library_name == "transformers"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("google/gemma-2b", "google/gemma-2b"),
        ("/srv/me/models/mine", "mine"),
        ("./models/mine/", "mine"),
        ("~/pairs.jsonl", "pairs.jsonl"),
        ("data/2024/pairs.jsonl", "pairs.jsonl"),
        ("https://me:key@host/a/pairs.jsonl?token=secret", "pairs.jsonl"),
        ("C:\\models\\mine", "mine"),
        ("tiny-tldr", "tiny-tldr"),
    ],
)
def test_only_a_name_is_told_of_what_lies_on_this_machine(place, name):
    assert public_name(place) == name
    text = model_card("PPO", OPTIONS | {"model": place, "dataset": place}, is_adapter=True)
    assert name in text
    for secret in ("/srv", "me:key", "token", "secret", "2024", "models/", "\\"):
        assert secret not in text, secret


def test_a_folder_beside_the_run_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner/model").mkdir(parents=True)
    assert public_name("owner/model") == "model"


def test_the_card_takes_the_place_of_another(tmp_path):
    (tmp_path / "README.md").write_text("base_model: /srv/me/models/mine")
    (tmp_path / "adapter_config.json").write_text("{}")
    write_model_card(tmp_path, "SFT", OPTIONS)
    card = (tmp_path / "README.md").read_text()
    assert "# SFT of google/gemma-2b" in card and "/srv" not in card and "This adapter" in card
