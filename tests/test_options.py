"""Options: who wins of flags, files, presets and earlier runs; bounds, help, and one typed object a command."""

import dataclasses
import re
import typing

import pytest
import yaml

from marlhf_lite.config.checked import BOUNDS
from marlhf_lite.config.commands import COMMANDS, DemoCommand, groups
from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.config.options import DataConfig, MacroConfig, PPOConfig
from marlhf_lite.config.parser import flatten, parse, presets
from marlhf_lite.macro import FixedNGram, RandomizedNGram, Whole
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

FIELDS = [
    (name, group, kind, f)
    for name, command in COMMANDS.items()
    for group, kind in groups(command).items()
    for f in dataclasses.fields(kind)
]
OWNED = {row[-1].name: row for row in FIELDS}
TYPES = {name: hint for *_, kind, _ in FIELDS for name, hint in typing.get_type_hints(kind).items()}
FLOATS = (float, float | None)
BOUNDED = [name for name, (*_, f) in OWNED.items() if set(f.metadata) & set(BOUNDS)]


def read(*argv, command="run"):
    return parse(command, argv, COMMANDS[command])


@pytest.fixture
def config(tmp_path):
    """A function that writes a config file and returns its name."""

    def write(content):
        (tmp_path / "my.yaml").write_text(content)
        return str(tmp_path / "my.yaml")

    return write


# Where options come from


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_an_object_of_its_class_with_the_defaults(name):
    own = getattr(COMMANDS[name], "DEFAULTS", {})
    assert flatten(read(command=name)) == flatten(COMMANDS[name]()) | own


def test_flags_and_presets_win_over_the_demos_own_defaults():
    assert DemoCommand.DEFAULTS["updates"] != PPOConfig().updates
    assert read("--updates", "7", command="demo").ppo.updates == 7
    assert read("--preset", "gemma-2b/tldr", command="demo").sft.sft_epochs == 3


def test_one_name_is_one_option():
    """Where two groups have an option of the same name, it means the same; no command has it twice."""
    for _, group, _, f in FIELDS:
        assert f.metadata["help"] == OWNED[f.name][-1].metadata["help"], (group, f.name)
    for command in COMMANDS:
        names = [f.name for name, *_, f in FIELDS if name == command]
        assert len(names) == len(set(names)), command


def test_flags_win_over_config_over_preset(config):
    name = config("score_clip: 1.5\nreward_pooling: sum\nseed: 4\nwhiten: true\nn: .inf\nkl_coef: 1e-3\nsize: 40\n")
    options = read("--preset", "released", "--config", name, "--reward_pooling", "mean", "--updates", "3")
    assert options.rm.rm_loss == "all"  # preset alone
    assert options.ppo.score_clip == 1.5  # config over the preset's 2.5
    assert options.macro.reward_pooling == "mean"  # flag over config
    assert (options.run.seed, options.ppo.updates, options.data.size) == (4, 3, 40)
    assert (options.ppo.whiten, options.macro.n, options.ppo.kl_coef) == (True, "inf", 0.001)
    assert options.ppo.batch_size == PPOConfig().batch_size  # nobody: the default
    assert read("--seed", "5", "--config", name).run.seed == read("--config", name, "--seed", "5").run.seed == 5
    other = read("--config", name, "--preset", "gemma-2b/webgpt", command="sft")  # keys of other commands are ignored
    assert other.sft.sft_epochs == 3 and not hasattr(other, "ppo")


@pytest.mark.parametrize(
    ("argv", "expected"), [([], 4.0), (["--updates", "3"], None), (["--updates", "3", "--prompt_epochs", "2"], 2.0)]
)
def test_updates_replace_passes_over_prompts(argv, expected):
    assert read("--preset", "gemma-2b/webgpt", *argv).ppo.prompt_epochs == expected


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}", "size:\n"])
def test_empty_config_and_empty_values(config, content):
    assert read("--config", config(content)) == read()


def test_a_runs_own_config_comes_back_as_it_was(config):
    argv = ["--preset", "paper", "--output_dir", "runs/x", "--whiten", "--n", "inf", "--reward", "gold"]
    argv += ["--lora_target_modules=-x|.*q_proj", "--batch-size", "8", "--overwrite=true"]
    first = read(*argv)
    assert first.model.lora_target_modules == "-x|.*q_proj" and first.ppo.batch_size == 8 and first.run.overwrite
    saved = yaml.safe_dump(flatten(first) | {"environment": {"python": "3.11"}}, sort_keys=False)
    again = read("--config", config(saved))
    assert again == first and flatten(again) == flatten(first)


# Data and model come from the run that is given


@pytest.fixture
def runs(tmp_path):
    """A function that makes a run with these options, and an adapter's folder in it; the run's folder."""

    def make(name, **options):
        run = RunFolder.create(tmp_path / name, {"dataset": "tiny-tldr", "updates": 9} | options)
        (run.path / "sft").mkdir()
        return str(run.path)

    return make


def test_a_stage_takes_data_and_model_from_the_run_it_is_given(runs, config, tmp_path):
    run = runs("a", dataset="pairs.jsonl", size=40, split_seed=7, model="some/model", dtype="bfloat16", lora_r=4)
    for folder in (run, f"{run}/sft"):
        options = read("--sft", folder, command="ppo")
        assert (options.data.dataset, options.data.size, options.data.split_seed) == ("pairs.jsonl", 40, 7)
        assert (options.model.model, options.model.dtype, options.model.lora_r) == ("some/model", "bfloat16", 4)
        assert options.ppo.updates == 30  # an option of another stage is not taken over
    assert read("--config", config(f"sft: {run}\n"), command="ppo").data.dataset == "pairs.jsonl"
    odd = runs("lam=1", dataset="pairs.jsonl")  # a folder's name may hold the sign
    for words in (["--policies", f"x={run}"], ["--policies", f"x={odd}"], ["--sft", odd]):
        assert read(*words, command="evaluate").data.dataset == "pairs.jsonl"
    other = read("--sft", run, "--dtype", "float32", "--max_response_length", "5", command="ppo")
    assert (other.model.dtype, other.data.max_response_length) == ("float32", 5)  # these may differ
    (tmp_path / "adapter").mkdir()  # outside of a run
    assert read("--sft", str(tmp_path / "adapter"), command="ppo").data == DataConfig()


def test_an_embedded_data_set_brings_its_model_along(runs, monkeypatch):
    monkeypatch.setitem(EMBEDDED_DEFAULTS, "steps", {"model": "its-own", "max_response_length": 144})
    own = read("--dataset", "steps", command="ppo")
    assert (own.model.model, own.data.max_response_length) == ("its-own", 144)
    given = read("--dataset", "steps", "--model", "a/b", "--max_response_length", "9", command="ppo")
    assert (given.model.model, given.data.max_response_length) == ("a/b", 9)
    run = runs("a", dataset="steps", model="some/model", max_response_length=7)
    assert read("--sft", run, command="ppo").model.model == "some/model"  # that of the run
    assert read("--dataset", "pairs.jsonl").model.model == "tiny-gemma"


@pytest.mark.parametrize(
    "words", [["--dataset", "tiny-tldr"], ["--size", "9"], ["--split_seed", "3"], ["--model", "tiny-gemma"]]
)
def test_contradictions_to_the_given_run_are_refused(runs, words):
    run = runs("a", dataset="pairs.jsonl", size=40, split_seed=7, model="some/model")
    with pytest.raises(InputError, match=f"^{words[0]} {words[1]}: --sft {run} "):
        read("--sft", run, *words, command="ppo")
    with pytest.raises(InputError, match=f"^--rm {runs('b')}: "):
        read("--sft", run, "--rm", str(run).replace("/a", "/b"), command="ppo")


# Bounds and types


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds(name):
    command, group, kind, f = OWNED[name]
    is_float = TYPES[name] in FLOATS
    beyond = {"least": -0.001 if is_float else -1, "above": 0, "most": 0.001 if is_float else 1, "below": 0}
    outside = [f.metadata[bound] + beyond[bound] for bound in BOUNDS if bound in f.metadata]
    for value in [*outside, *([float("nan")] if is_float else [])]:
        with pytest.raises(InputError, match=rf"^--{name} \S+: "):
            read(f"--{name}", str(value), command=command)
        with pytest.raises(InputError, match=f"--{name} "):
            kind(**{name: value})
    for edge in [f.metadata[bound] for bound in ("least", "most") if bound in f.metadata and name != "from_checkpoint"]:
        assert getattr(getattr(read(f"--{name}", str(edge), command=command), group), name) == edge


def test_every_number_is_bounded_and_every_choice_is_a_type():
    """The parser, not the trainer, refuses the rest."""
    numbers = {name for name in OWNED if TYPES[name] in (int, int | None, *FLOATS)}
    assert numbers - set(BOUNDED) == {"split_seed"}
    for name, hint in TYPES.items():
        assert hint in (int, str, bool, int | None, *FLOATS) or typing.get_origin(hint) is typing.Literal, name


def test_rules_from_options():
    assert make_rule(MacroConfig(n="1")) == FixedNGram(1)
    assert make_rule(MacroConfig(n="inf")) == FixedNGram(float("inf"))
    assert isinstance(make_rule(MacroConfig(termination="whole", n="x")), Whole)
    made = make_rule(MacroConfig(termination="randomized", lengths=" 1, 2,3"), seed=3)
    assert made == RandomizedNGram((1, 2, 3), 3, 3)
    for name in presets():
        make_rule(read("--preset", name).macro)
    lists = {"lengths": ["2,x", "", "2,,3", "0,3", "2.5", "[2, 3]"], "n": ["0", "-1", "2.5", "", "five", "1,2"]}
    for option, wrong in ((option, wrong) for option, words in lists.items() for wrong in words):
        with pytest.raises(InputError, match=f"--{option} {re.escape(wrong)}: "):
            make_rule(MacroConfig(termination="randomized" if option == "lengths" else "fixed", **{option: wrong}))


# Help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_with_its_type_own_ones_first(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        read("--help", command=name)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert COMMANDS[name].__doc__.partition("\n")[0] in shown
    letters = "".join(shown.split())  # lines may break at hyphens
    own = [f for command, *_, f in FIELDS if command == name]
    for f in own:
        assert re.search(rf"^  --{f.name} (\[?(TEXT|INT|FLOAT|BOOL)|\{{)", shown, re.M), f.name
        assert "".join(f.metadata["help"].split()) in letters, f.name
    assert "\n  --model " not in shown or shown.index(f"\n  --{own[0].name} ") < shown.index("\n  --model ")
    example = COMMANDS[name].__doc__.split("example: ")[1].split()
    assert example[:2] == ["marlhf", name]  # its options exist
    assert {word[2:] for word in example if word.startswith("--")} <= {f.name for f in own} | {"preset", "config"}
