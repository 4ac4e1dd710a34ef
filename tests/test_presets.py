"""Presets: every cell of Table 5 and Appendix C.4, what is refused, which of several wins, and the listing."""

from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from conftest import fails
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from marlhf_lite.cli import preset_lines
from marlhf_lite.config.commands import COMMANDS, option_names
from marlhf_lite.config.parser import (
    list_presets,
    parse,
    parse_and_name_presets,
    preset_file,
    presets,
)
from marlhf_lite.macro import kl_per_token
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.tokenization import encode_prompts

# with Appendix C.4
TABLE_5 = (Path(__file__).parent / "data" / "table_5.txt").read_text(encoding="utf-8")
LADDER = [f"estimators/{rung}" for rung in ("E0", "E1", "E2", "E3", "E4", "E5", "MC", "VC")]
CARDS = {
    "lora-t4-16gb": "gemma-2b/tldr",
    "lora-24gb": "gemma-2b/tldr",
    "lora-80gb": "gemma-7b/tldr",
}
RATES = (
    "sft_learning_rate",
    "rm_learning_rate",
    "policy_learning_rate",
    "critic_learning_rate",
    "dpo_learning_rate",
)


def expected() -> dict[str, dict[str, str]]:
    """The table by preset: the cells that the paper fills, as words."""
    models, tasks, *rows = (
        line.split() for line in TABLE_5.splitlines() if line and line[0] != "#"
    )
    names = [
        model for model in models for _ in range(1 if "code" in model or "llama" in model else 3)
    ]
    assert all(len(cells) == len(names) == len(tasks) for _, *cells in rows)
    columns = [f"{model}/{task}" for model, task in zip(names, tasks)]
    return {
        column: {row[0]: row[1 + i] for row in rows if row[1 + i] != "-"}
        for i, column in enumerate(columns)
    }


PAPER = expected()


@cache
def load(names: str, *argv: str, command: str = "run") -> dict:
    """Options of a command by name, as the presets give them."""
    return asdict(parse(command, ["--preset", names, *argv], COMMANDS[command]))


def given(name: str) -> dict:
    """What stands in a preset's file."""
    return yaml.safe_load(preset_file(name, "test").read_text(encoding="utf-8"))


# What the paper says


def test_the_presets_are_the_papers_columns_the_methods_the_cards_and_the_ladder():
    own = {"demo", "demo/umbrella", "demo/summaries", "pretrained"} | {
        f"embedded/{name}" for name in EMBEDDED
    }
    assert (
        set(presets()) == {*PAPER, *CARDS, *LADDER, "paper", "released", *own} and len(PAPER) == 12
    )
    _, *lines = list_presets().splitlines()
    shown = [
        (name, given(name).get("model", "-"), given(name).get("dataset", "-")) for name in presets()
    ]
    assert [tuple(line.split()[:3]) for line in lines] == shown


@pytest.mark.parametrize("name", PAPER)
def test_every_cell(name):
    """A cell that equals today's default stands in the file all the same; one that the paper leaves open does not."""
    options = load(name, command="rloo") | load(name, command="dpo") | load(name)
    found = {key: options[key] for key in PAPER[name]}
    assert found == {key: type(found[key])(cell) for key, cell in PAPER[name].items()}
    rows = {key for cells in PAPER.values() for key in cells} - {"critic_init"}
    assert given(name).keys() & rows == PAPER[name].keys() - {"critic_init"}
    full = {
        "finetune": "full",
        "dtype": "float32",
        "load_in_4bit": False,
        "termination": "fixed",
        "size": None,
    }
    assert full.items() <= options.items()
    # it caps its logits
    assert options["attn_implementation"] == ("eager" if "gemma-2-" in name else "auto")


def test_what_the_baselines_start_with():
    """Appendix C.3: RLOO with four responses to a prompt, all else as PPO; all weights and batches of 256 for DPO."""
    dpo, ppo = load("gemma-2b/tldr", command="dpo"), load("gemma-2b/tldr")
    assert (dpo["dpo_batch_size"], dpo["dpo_epochs"], dpo["finetune"]) == (256, 1, "full")
    for method in ("rloo", "grpo"):
        options = load("gemma-2b/tldr", command=method)
        assert options["num_generations"] == 4
        assert all(options[key] == ppo[key] for key in options.keys() & ppo.keys())


RELEASED = {
    "rl_lr_scheduler_type": "linear", "warmup_updates": 0.05, "adam_beta1": 0.9, "adam_beta2": 0.95,
    "weight_decay": 0.1, "objective": "released", "last_token_alone": True, "template": "released",
    "perplexity_rule": "token", "perplexity_early": True, "score_clip": 2.5, "rm_loss": "all", "reward_pooling": "mean",
}  # fmt: skip


@pytest.mark.parametrize("command", ["run", "rloo"])
def test_the_released_recipe(command):
    options = load("released", command=command)
    own = {key: value for key, value in RELEASED.items() if key in options}
    assert own.items() <= options.items() and len(own) >= 5


@pytest.mark.parametrize(("name", "paper"), CARDS.items())
def test_cards_take_adapters_with_ten_times_the_rates_of_full_fine_tuning(name, paper):
    options = load(name) | load(name, command="dpo")
    assert options["finetune"] == "lora" and options["gradient_checkpointing"] is True
    assert options["model"] == load(paper)["model"]
    assert options["load_in_4bit"] == (name == "lora-t4-16gb") and options["dtype"] in (
        "float16",
        "bfloat16",
    )
    for rate in RATES:
        assert options[rate] == pytest.approx(10 * float(PAPER[paper][rate]), rel=1e-9), rate


def test_the_ladder_changes_one_thing_a_rung():
    """E0 to E5, Monte Carlo and a critic trained first; all but lambda, segmentation and baseline stays."""
    default = asdict(COMMANDS["run"]())
    rungs = {name[-2:]: {k: v for k, v in load(name).items() if v != default[k]} for name in LADDER}
    assert rungs == {
        "E0": {"n": "1"},
        "E1": {"n": "1", "lam": pytest.approx(0.95 ** (1 / 5), abs=1e-5)},
        "E2": {"objective": "sae"},
        "E3": {"sigma": "start"},
        "E4": {},  # the defaults are MA-PPO
        "E5": {"reward_pooling": "mean"},
        "MC": {"n": "1", "lam": 1.0},
        "VC": {"n": "1", "objective": "vapo=0.33,vc_ppo", "critic_warmup": 8, "critic_epochs": 6},
    }


# Every file, and several of them


@pytest.mark.parametrize("name", presets())
def test_every_preset_parses_for_every_command(name):
    lines = preset_file(name, "test").read_text(encoding="utf-8").splitlines()
    keys = [line.split(":")[0] for line in lines if line and not line.startswith("#")]
    # YAML keeps the last of two without a word
    assert len(keys) == len(set(keys)) == len(given(name))
    assert lines[0].startswith("# ")  # which the list of presets shows
    for command in COMMANDS:
        found, shared = load(name, command=command), load(name)
        if command == "evaluate":  # gold scores and tests score there without being named
            shared = shared | {"reward": ""}
        assert all(found[key] == shared[key] for key in found.keys() & keys & shared.keys())


def test_later_presets_win():
    both = load("released,gemma-7b/webgpt")
    own = {key: RELEASED[key] for key in ("score_clip", "rm_loss", "reward_pooling")}
    # both name the last
    assert (own | {"model": "google/gemma-7b", "kl_coef": 0.1}).items() <= both.items()
    assert load("released")["kl_coef"] == load("gemma-7b/webgpt,released")["kl_coef"] == 0.05
    assert load(" released , gemma-7b/webgpt ") == both
    assert load("released,gemma-2b/tldr", "--n", "1")["n"] == "1"


NEAR = {"gemma2b/tldr": "gemma-2b/tldr", "gemma-2b": "gemma-2b/hh", "Released": "released"}


@pytest.mark.parametrize(
    "name", [*NEAR, "zzz", "released,", " ", "../options", "/etc/passwd", "gemma-2b/../released"]
)
def test_unknown_names_are_refused_and_near_ones_offered(name):
    for read in (load, given):
        fails(lambda read=read: read(name), name, NEAR.get(name, ""))


def test_a_model_that_is_not_embedded_has_defaults_of_its_own():
    """They stand below flags, other presets and what a data set brings along."""
    pretrained = yaml.safe_load(preset_file("pretrained", "").read_text())

    def options(*words):
        found = asdict(parse("run", words, COMMANDS["run"]))
        return {name: found[name] for name in pretrained if name in found}

    own, embedded = options("--model", "owner/model", "--sft_learning_rate", "3e-4"), options()
    assert own == {name: pretrained[name] for name in own} | {"sft_learning_rate": 3e-4}
    assert all(value != own[name] for name, value in embedded.items())
    steps = options("--model", "owner/model", "--dataset", "tiny-steps")
    assert steps["max_response_length"] == options("--dataset", "tiny-steps")["max_response_length"]
    card = yaml.safe_load(preset_file("lora-t4-16gb", "").read_text())
    assert options("--preset", "lora-t4-16gb") == {name: card[name] for name in own}


@torch.no_grad()
@pytest.mark.parametrize(
    ("preset", "unbiased"), [("pretrained", True), ("paper", False), ("released", False)]
)
def test_the_kl_estimates_of_pretrained_are_unbiased(preset, unbiased, moved, tokenizer):
    """Exactly, over every token that can be sampled next, with transformers' own warping of logits; not the paper's."""
    values = yaml.safe_load(preset_file(preset, "").read_text())
    options = COMMANDS["ppo"](
        **{name: values[name] for name in option_names(COMMANDS["ppo"]) & values.keys()}
    )
    prompt = torch.tensor(encode_prompts(tokenizer, ["Why?"]))
    warp = [TemperatureLogitsWarper(options.temperature)]
    warp += [TopKLogitsWarper(options.top_k)] if options.top_k else []

    def sampled(role):
        logits = role.model.eval()(input_ids=prompt).logits[:, -1].double()
        return LogitsProcessorList(warp)(prompt, logits)[0].log_softmax(-1)

    q = sampled(moved.policy)
    tokens = torch.cat([prompt.expand(len(q), -1), torch.arange(len(q))[:, None]], 1)
    given = (
        tokens,
        torch.ones_like(tokens),
        1,
        options.temperature if options.logprobs_at_temperature else 1.0,
    )
    log_p, log_ref = (role(*given)[0].double() for role in (moved.policy, moved.reference))
    # infinite where the reference excludes a token
    exact = (q.exp() * (q - sampled(moved.reference))).nansum().item()
    for estimator in ("k1", "k3"):
        terms = kl_per_token(log_p, log_ref, torch.ones_like(log_p, dtype=torch.bool), estimator)[
            :, 0
        ]
        assert (abs((q.exp() * terms).sum().item() - exact) < 1e-5) == unbiased
    assert exact > 1e-3


def test_the_run_says_which_rates_it_took_and_warns_where_all_weights_are_trained():
    def lines(*words):
        return preset_lines(*parse_and_name_presets("run", words, COMMANDS["run"]))

    own = ["--model", "owner/model"]
    rates = [
        "--sft_learning_rate",
        "1e-5",
        "--rm_learning_rate",
        "1e-5",
        "--policy_learning_rate",
        "1e-5",
    ]
    assert lines("--preset", "paper") == ["presets: embedded/tiny-tldr, paper"]
    assert len(lines(*own)) == 2 and "sft_learning_rate 0.001" in lines(*own)[1]
    assert "too high for --finetune full" in lines(*own, "--finetune", "full")[2]
    assert len(lines(*own, "--finetune", "full", *rates, "--critic_learning_rate", "1e-5")) == 2
