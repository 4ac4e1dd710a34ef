"""Presets: every cell of Table 5 and Appendix C.4, what is refused, which of several wins, and the listing."""

import dataclasses
import math
from functools import cache

import pytest
import yaml
from transformers import AutoModelForCausalLM, Gemma2Config

from marlhf_lite.cli import COMMANDS
from marlhf_lite.config.groups import GROUPS
from marlhf_lite.config.parser import flatten, list_presets, parse, preset_text, presets
from marlhf_lite.training.optimizer import learning_rate_share
from marlhf_lite.utils.errors import InputError

# Table 5, row by row, its cells spread over the tasks they speak of; - where it has a dash. The last column is Appendix
# C.4: actor 5e-6, critic 1e-5, KL 0.1, all else as Gemma-2B on TL;DR. n: Tables 8 to 10. DPO, K: Appendix C.3.
# Evaluation prompts: section 4.1. Warm-up of PPO: 200 of the 4,600 rounds of 8 prompts on TL;DR (Figure 9), 5,600 on
# HH-RLHF and 3,700 on WebGPT, 20 of 500 on APPS (80 % of 5,000 problems), as shares of a run.
TABLE_5 = """
                       gemma-2b              gemma-7b              gemma-2-27b           codegemma-2b  codegemma-7b  llama-3.2-3b
                       tldr   hh     webgpt  tldr   hh     webgpt  tldr   hh     webgpt  apps          apps          tldr
sft_batch_size         512    512    64      128    128    128     128    128    128     16            32            512
sft_epochs             3      3      3       1      1      5       3      3      3       1             1             3
sft_learning_rate      5e-5   5e-5   1e-4    2e-5   2e-5   2e-5    5e-6   5e-6   5e-6    5e-6          2e-6          5e-5
lr_scheduler_type      cosine cosine cosine  cosine cosine cosine  cosine cosine cosine  cosine        cosine        cosine
warmup_ratio           0.1    0.1    0.1     0.1    0.1    0.1     0.1    0.1    0.1     0             0             0.1
rm_batch_size          64     64     32      128    64     32      128    128    128     -             -             64
rm_epochs              1      1      1       1      1      1       1      1      1       -             -             1
rm_learning_rate       1e-5   1e-5   2e-5    1e-6   1e-6   1e-6    8e-6   8e-6   8e-6    -             -             1e-5
batch_size             256    256    256     256    256    256     256    256    256     16            16            256
policy_learning_rate   1.5e-5 1.5e-5 1.5e-5  1e-6   1e-6   1e-6    7e-7   7e-7   7e-7    5e-7          5e-7          5e-6
critic_learning_rate   1.5e-5 1.5e-5 1.5e-5  1e-6   1e-6   1e-6    1e-6   1e-6   1e-6    5e-5          5e-5          1e-5
prompt_epochs          1      1      4       1      1      4       1      1      1       1             1             1
num_ppo_epochs             1      1      1       1      1      1       1      1      1       1             1             1
rollouts               1      1      1       1      1      1       1      1      1       1             1             1
cliprange              0.2    0.2    0.2     0.2    0.2    0.2     0.2    0.2    0.2     0.2           0.2           0.2
lam                    0.95   0.95   0.95    0.95   0.95   0.95    0.95   0.95   0.95    0.95          0.95          0.95
gamma                  1      1      1       1      1      1       1      1      1       1             1             1
kl_coef                0.05   0.05   0.05    0.05   0.05   0.1     0.1    0.1    0.1     0.05          0.05          0.1
max_prompt_length      512    512    512     512    512    512     512    512    512     600           600           512
max_response_length    512    512    512     512    512    512     512    512    512     512           512           512
warmup_updates         0.05   0.05   0.05    0.05   0.05   0.05    0      0      0       0.04          0.04          0.05
temperature            0.8    0.8    0.8     0.8    0.8    0.8     0.8    0.8    0.8     1.0           1.0           0.8
top_p                  1.0    1.0    1.0     1.0    1.0    1.0     1.0    1.0    1.0     1.0           1.0           1.0
top_k                  50     50     50      50     50     50      50     50     50      5             5             50
n                      5      5      5       5      5      5       5      5      5       10            10            5
dpo_learning_rate      2e-7   2e-7   2e-7    2e-7   2e-7   2e-7    2e-7   2e-7   2e-7    -             -             2e-7
dpo_beta               0.1    0.01   0.1     0.1    0.01   0.1     0.1    0.01   0.1     -             -             0.1
num_generations        4      4      4       4      4      4       4      4      4       -             -             4
eval_prompts           2000   2000   2000    2000   2000   2000    2000   2000   2000    -             -             2000
critic_init            rm     rm     rm      rm     rm     rm      rm     rm     rm      sft           sft           rm
"""  # noqa: E501
MODELS = {
    "gemma-2b": "google/gemma-2b",
    "gemma-7b": "google/gemma-7b",
    "gemma-2-27b": "google/gemma-2-27b",
    "codegemma-2b": "google/codegemma-1.1-2b",
    "codegemma-7b": "google/codegemma-1.1-7b-it",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
}
DATASETS = {
    "tldr": "openai/summarize_from_feedback",
    "hh": "Dahoas/full-hh-rlhf",
    "webgpt": "openai/webgpt_comparisons",
    "apps": "codeparrot/apps",
}
LADDER = [f"estimators/{rung}" for rung in ("E0", "E1", "E2", "E3", "E4", "E5", "MC", "VC")]
CARDS = {"lora-t4-16gb": "gemma-2b/tldr", "lora-24gb": "gemma-2b/tldr", "lora-80gb": "gemma-7b/tldr"}
RATES = ("sft_learning_rate", "rm_learning_rate", "policy_learning_rate", "critic_learning_rate", "dpo_learning_rate")


def expected() -> dict[str, dict[str, str]]:
    """The table by preset: the cells that the paper fills, as words."""
    _, tasks, *rows = (line.split() for line in TABLE_5.strip().splitlines())
    names = ["gemma-2b"] * 3 + ["gemma-7b"] * 3 + ["gemma-2-27b"] * 3 + ["codegemma-2b", "codegemma-7b", "llama-3.2-3b"]
    assert all(len(cells) == len(names) == len(tasks) for _, *cells in rows)
    columns = [f"{model}/{task}" for model, task in zip(names, tasks)]
    return {column: {row[0]: row[1 + i] for row in rows if row[1 + i] != "-"} for i, column in enumerate(columns)}


PAPER = expected()


@cache
def load(names: str, *argv: str) -> dict:
    """Options of the command that runs all stages, by name, as the presets give them."""
    return effective("run", names, *argv)


def effective(command: str, names: str, *argv: str) -> dict:
    return flatten(parse(command, ["--preset", names, *argv], COMMANDS[command].groups, "about"))


def refused(names: str) -> str:
    with pytest.raises(InputError) as caught:
        load(names)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What the paper says


def test_the_presets_are_the_papers_columns_the_methods_and_the_cards():
    assert set(presets()) == {*PAPER, *CARDS, *LADDER, "paper", "released"}
    assert len(PAPER) == 12


@pytest.mark.parametrize("name", PAPER)
def test_every_cell(name):
    options = effective("rloo", name) | effective("dpo", name) | load(name)
    found = {key: options[key] for key in PAPER[name]}
    assert found == {key: type(found[key])(cell) for key, cell in PAPER[name].items()}


@pytest.mark.parametrize("name", PAPER)
def test_every_cell_stands_in_the_file(name):
    """A cell that equals today's default is written all the same; one that the paper leaves open is not."""
    given = set(yaml.safe_load(preset_text(name)))
    rows = {key for cells in PAPER.values() for key in cells} - {"critic_init"}
    assert given & rows == set(PAPER[name]) - {"critic_init"}


@pytest.mark.parametrize("name", PAPER)
def test_model_data_and_way_of_training(name):
    model, task = name.split("/")
    options = load(name)
    assert (options["model"], options["dataset"]) == (MODELS[model], DATASETS[task])
    assert (options["finetune"], options["dtype"], options["load_in_4bit"]) == ("full", "float32", False)
    assert options["termination"] == "fixed"
    assert options["size"] is None


def test_gemma_2_gets_an_attention_that_caps_its_logits():
    tiny = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    for task in ("tldr", "hh", "webgpt"):
        attention = load(f"gemma-2-27b/{task}")["attn_implementation"]
        config = Gemma2Config(**tiny, head_dim=8, vocab_size=16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("name", "rate"), [("gemma-2b/tldr", 1.5e-5), ("gemma-2b/hh", 1.5e-5), ("gemma-7b/tldr", 1e-6)]
)
def test_what_the_baselines_start_with(name, rate):
    """Appendix C.3: DPO with 2e-7, RLOO with four responses to a prompt and all else as PPO."""
    dpo = effective("dpo", name)
    assert (dpo["dpo_learning_rate"], dpo["dpo_beta"]) == (2e-7, 0.01 if name.endswith("hh") else 0.1)
    assert (dpo["dpo_batch_size"], dpo["dpo_epochs"], dpo["finetune"]) == (256, 1, "full")
    ppo = load(name)
    for method in ("rloo", "grpo"):
        options = effective(method, name)
        assert (options["policy_learning_rate"], options["num_generations"]) == (rate, 4)
        assert all(options[key] == ppo[key] for key in options if key in PAPER[name] and key in ppo)


def test_the_warm_up_takes_a_twentieth_of_a_run():
    """0.4 x 92,858 comparisons in batches of 256: 146 updates, of which seven warm up."""
    config = parse("ppo", ["--preset", "gemma-2b/tldr"], COMMANDS["ppo"].groups, "about").ppo
    updates = math.ceil(0.4 * 92_858 / config.batch_size)
    shares = [learning_rate_share(config, update, updates) for update in range(updates)]
    assert updates == 146 and sum(share < 1 for share in shares) == 7 and shares[-1] == 1


# The released code


def test_the_released_recipe():
    options = load("released")
    assert options["rl_lr_scheduler_type"] == "linear" and options["warmup_updates"] == 0.05
    assert (options["adam_beta1"], options["adam_beta2"], options["weight_decay"]) == (0.9, 0.95, 0.1)
    assert (options["loss_mean"], options["last_token_alone"], options["template"]) == ("response", True, "released")
    assert (options["perplexity_rule"], options["perplexity_early"]) == ("token", True)
    assert (options["score_clip"], options["rm_loss"], options["reward_pooling"]) == (2.5, "all", "mean")
    rloo = effective("rloo", "released")
    assert all(rloo[key] == options[key] for key in ("rl_lr_scheduler_type", "adam_beta2", "weight_decay"))


def test_official_is_another_name_of_it():
    assert load("official,gemma-7b/tldr") == load("released,gemma-7b/tldr")
    assert preset_text("official") == preset_text("released") and "official" not in presets()
    assert "official" in preset_text("released").splitlines()[0]


# Cards


@pytest.mark.parametrize(("name", "paper"), CARDS.items())
def test_adapters_get_ten_times_the_rates_of_full_fine_tuning(name, paper):
    options = load(name)
    assert options["finetune"] == "lora" and options["gradient_checkpointing"] is True
    assert options["model"] == load(paper)["model"]
    options |= effective("dpo", name)
    for rate in RATES:
        assert options[rate] == pytest.approx(10 * float(PAPER[paper][rate]), rel=1e-9), rate
    assert "this project's choice" in preset_text(name) and "untested" in preset_text(name)


def test_what_each_card_can_hold():
    dtypes = {name: load(name)["dtype"] for name in CARDS}
    assert dtypes == {"lora-t4-16gb": "float16", "lora-24gb": "bfloat16", "lora-80gb": "bfloat16"}
    assert [name for name in CARDS if load(name)["load_in_4bit"]] == ["lora-t4-16gb"]
    assert 1 <= load("lora-t4-16gb")["micro_batch_size"] <= 4  # fixed; the others find theirs
    assert load("lora-24gb")["micro_batch_size"] == load("lora-80gb")["micro_batch_size"] == 0


# Every file


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("command", COMMANDS)
def test_every_preset_parses_for_every_command(name, command):
    groups = COMMANDS[command].groups
    options = parse(command, ["--preset", name], groups, "about")
    values = yaml.safe_load(preset_text(name))
    for group in groups:
        for field in dataclasses.fields(GROUPS[group]):
            if field.name in values and field.name in load(name):
                assert getattr(getattr(options, group), field.name) == load(name)[field.name], field.name


@pytest.mark.parametrize("name", presets())
def test_a_file_begins_with_a_sentence_on_itself(name):
    first = preset_text(name).splitlines()[0]
    assert first.startswith("# ") and first.endswith(".") and 20 < len(first) <= 100


@pytest.mark.parametrize("name", presets())
def test_no_key_stands_twice(name):
    """YAML keeps the last of two without a word."""
    keys = [line.split(":")[0] for line in preset_text(name).splitlines() if line and not line.startswith("#")]
    assert len(keys) == len(set(keys)) == len(yaml.safe_load(preset_text(name)))


# The ladder of estimators


def test_the_ladder_changes_one_thing_a_rung():
    """E0 to E5, Monte Carlo and a critic trained first; all but lambda, segmentation and baseline stays."""
    default = flatten(parse("run", [], COMMANDS["run"].groups, "about"))
    rungs = {name[-2:]: {k: v for k, v in load(name).items() if v != default[k]} for name in LADDER}
    assert rungs["E4"] == {}  # the defaults are MA-PPO
    assert rungs["E0"] == {"n": "1"}
    assert rungs["E1"] == {"n": "1", "lam": pytest.approx(0.95 ** (1 / 5), abs=1e-5)}
    assert rungs["E2"] == {"gae_over": "tokens"}
    assert rungs["E3"] == {"sigma": "start"}
    assert rungs["E5"] == {"reward_pooling": "mean"}
    assert rungs["MC"] == {"n": "1", "lam": 1.0}
    assert rungs["VC"] == {"n": "1", "lam_alpha": 0.33, "critic_lam": 1.0, "critic_warmup": 8, "critic_epochs": 6}


# Several presets


def test_later_presets_win():
    both = load("official,gemma-7b/webgpt")
    assert (both["score_clip"], both["rm_loss"], both["reward_pooling"]) == (2.5, "all", "mean")  # official alone
    assert both["model"] == "google/gemma-7b"  # the model's alone
    assert both["kl_coef"] == 0.1 and load("official")["kl_coef"] == 0.05  # both name it
    assert load("gemma-7b/webgpt,official")["kl_coef"] == 0.05
    assert load("gemma-2b/hh,gemma-2b/webgpt") == load("gemma-2b/webgpt")


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("method", ["paper", "released"])
def test_a_method_before_a_model_leaves_every_cell(name, method):
    both, alone = load(f"{method},{name}"), load(name)
    given = yaml.safe_load(preset_text(name)).keys()
    assert {key: both[key] for key in given & both.keys()} == {key: alone[key] for key in given & alone.keys()}
    assert both["ratio"] == load(method)["ratio"] and both["value_target"] == load(method)["value_target"]


def test_spaces_between_names_and_flags_over_presets():
    assert load(" released , gemma-2b/tldr ") == load("released,gemma-2b/tldr")
    assert load("official,gemma-2b/tldr", "--n", "1")["n"] == "1"


def test_a_config_wins_over_all_presets(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("kl_coef: 0.3\n")
    assert load("official,gemma-2b/tldr", "--config", str(mine))["kl_coef"] == 0.3


# What is refused


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gemma2b/tldr", "gemma-2b/tldr"),
        ("gemma-2b/tdlr", "gemma-2b/tldr"),
        ("gemma-2b", "gemma-2b/hh"),
        ("gemma-2b-tldr", "gemma-2b/tldr"),
        ("Official", "official"),
        ("lora-t4", "lora-t4-16gb"),
        ("gemma-2b/tldr.yaml", "gemma-2b/tldr"),
    ],
)
def test_close_names_are_offered(given, meant):
    message = refused(given)
    assert message.startswith(f"--preset {given}: unknown preset {given!r}: did you mean ") and message.endswith("?")
    assert meant in message


@pytest.mark.parametrize("given", ["zzz", "zzz,official", "official,", "official,,paper", ",", " "])
def test_names_that_are_like_none(given):
    message = refused(given)
    assert message.startswith(f"--preset {given}: unknown preset '") and "choose from" in message
    assert all(name in message for name in presets())


@pytest.mark.parametrize("given", ["../options", "/etc/passwd", "gemma-2b/../official", "gemma-2b//tldr"])
def test_names_are_not_paths(given):
    assert "unknown preset" in refused(given)
    with pytest.raises(InputError, match="unknown preset"):
        preset_text(given)


def test_text_of_an_unknown_preset():
    with pytest.raises(InputError, match=r"^marlhf presets gemma-2b/x: unknown preset 'gemma-2b/x': did you mean"):
        preset_text("gemma-2b/x")


# Listing


def test_listing_has_a_line_for_each():
    head, *lines = list_presets().splitlines()
    assert head.split() == ["preset", "model", "dataset", "what", "it", "is"]
    assert [line.split()[0] for line in lines] == presets()
    starts = [head.index(word) for word in ("preset", "model", "dataset", "what")]
    for name, line in zip(presets(), lines):
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None])]
        about = preset_text(name).splitlines()[0].removeprefix("# ")
        values = yaml.safe_load(preset_text(name))
        assert cells == [name, values.get("model", "-"), values.get("dataset", "-"), about]


def test_order_of_the_listing():
    """What goes with any model first, then models by name."""
    assert presets()[:5] == ["lora-24gb", "lora-80gb", "lora-t4-16gb", "paper", "released"]
    assert all("/" in name for name in presets()[5:])
    assert presets()[5:] == sorted(presets()[5:])
