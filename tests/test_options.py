"""Flags, config files and presets: who wins, what is refused, and that every refusal is one line with the fix."""

import dataclasses
import re
import subprocess
import sys
import typing

import pytest
import yaml

from marlhf_lite.cli import COMMANDS
from marlhf_lite.config.checked import BOUNDS
from marlhf_lite.config.embedded import EMBEDDED_DEFAULTS
from marlhf_lite.config.groups import GROUPS, OPTIONS
from marlhf_lite.config.options import MacroConfig
from marlhf_lite.config.parser import flatten, named_folders, parse, presets
from marlhf_lite.macro import FixedNGram, RandomizedNGram, Whole
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

RUN = COMMANDS["run"].groups
FIELDS = [(group, f) for group, kind in GROUPS.items() for f in dataclasses.fields(kind)]
TYPES = {name: hint for kind in GROUPS.values() for name, hint in typing.get_type_hints(kind).items()}
FLOATS = (float, float | None)
OWNED = {f.name: (group, f) for group, f in FIELDS}
BOUNDED = [(group, f) for group, f in OWNED.values() if set(f.metadata) & set(BOUNDS)]


def read(*argv, groups=RUN, command="run"):
    return parse(command, argv, groups, "about")


def refused(*argv, groups=RUN, command="run"):
    with pytest.raises(InputError) as caught:
        read(*argv, groups=groups, command=command)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def config(tmp_path):
    """A function that writes a config file and returns its name."""

    def write(content, name="my.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


# Where options come from


def test_defaults_are_those_of_the_dataclasses():
    for command in COMMANDS.values():
        options = read(groups=command.groups)
        assert vars(options) == {group: GROUPS[group]() for group in command.groups}


def test_one_name_is_one_option():
    """Where two groups have an option of the same name, it means the same; no command has it twice."""
    for group, f in FIELDS:
        assert f.metadata["help"] == OPTIONS[f.name].metadata["help"], (group, f.name)
    for name, command in COMMANDS.items():
        names = [f.name for group in command.groups for f in dataclasses.fields(GROUPS[group])]
        assert len(names) == len(set(names)), name


def test_every_option_belongs_to_a_command():
    used = {group for command in COMMANDS.values() for group in command.groups}
    reachable = {f.name for group in used for f in dataclasses.fields(GROUPS[group])}
    assert reachable == set(OPTIONS)


def test_flags_win_over_config_over_preset(config):
    name = config("score_clip: 1.5\nreward_pooling: sum\nseed: 4\n")
    options = read("--preset", "official", "--config", name, "--reward_pooling", "mean", "--updates", "3")
    assert options.rm.rm_loss == "all"  # preset alone
    assert options.ppo.score_clip == 1.5  # config over the preset's 2.5
    assert options.macro.reward_pooling == "mean"  # flag over config
    assert (options.run.seed, options.ppo.updates) == (4, 3)
    assert options.ppo.batch_size == GROUPS["ppo"]().batch_size  # nobody: the default


def test_order_of_flags_does_not_matter(config):
    name = config("seed: 4\n")
    assert read("--seed", "5", "--config", name).run.seed == read("--config", name, "--seed", "5").run.seed == 5
    assert read("--seed", "5", "--preset", "paper", "--config", name).macro.ratio == "macro"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--preset", "gemma-2b/webgpt"], 4.0),
        (["--preset", "gemma-2b/webgpt", "--updates", "3"], None),
        (["--preset", "gemma-2b/webgpt", "--updates", "3", "--prompt_epochs", "2"], 2.0),
    ],
)
def test_updates_replace_passes_over_prompts(argv, expected):
    assert read(*argv).ppo.prompt_epochs == expected


def test_keys_of_other_commands_are_ignored(config):
    name = config("updates: 7\nsft_epochs: 0.5\neval_prompts: 3\n")
    options = read("--config", name, groups=("run", "model", "data", "sft"), command="sft")
    assert options.sft.sft_epochs == 0.5
    assert not hasattr(options, "ppo")


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}", "size:\n", "size: null\n"])
def test_empty_config_and_empty_values(config, content):
    assert read("--config", config(content)) == read()


def test_yaml_values_arrive_as_their_types(config):
    name = config("whiten: true\nn: .inf\nkl_coef: 1e-3\nsize: 40\nlora_target_modules: '-x|.*q_proj'\nscore_clip: 2\n")
    options = read("--config", name)
    assert options.ppo.whiten is True and options.ppo.kl_coef == 0.001
    assert (options.macro.n, options.data.size) == ("inf", 40)
    assert options.model.lora_target_modules == "-x|.*q_proj"  # a value may begin with a dash
    assert options.ppo.score_clip == 2.0 and isinstance(options.ppo.score_clip, float)


def test_a_runs_own_config_comes_back_as_it_was(config):
    argv = ["--preset", "paper", "--output_dir", "runs/x", "--whiten", "--n", "inf", "--reward", "gold"]
    first = read(*argv)
    saved = yaml.safe_dump(flatten(first) | {"environment": {"python": "3.11"}}, sort_keys=False)
    again = read("--config", config(saved))
    assert again == first and flatten(again) == flatten(first)


def test_switches_and_dashes():
    assert read("--whiten").ppo.whiten is True and read("--whiten", "false").ppo.whiten is False
    assert read("--overwrite=true").run.overwrite is True
    assert read("--batch-size", "8").ppo.batch_size == 8


# Data and model come from the run that is given

STAGE = ("inputs", "reward", "ppo", "run", "model", "data")


@pytest.fixture
def runs(tmp_path):
    """A function that makes a run with these options, and an adapter's folder in it; the run's folder."""

    def make(name, **options):
        run = RunFolder.create(tmp_path / name, {"dataset": "tiny-tldr", "updates": 9} | options)
        (run.path / "sft").mkdir()
        return str(run.path)

    return make


def test_a_stage_takes_data_and_model_from_the_run_it_is_given(runs, config):
    run = runs("a", dataset="pairs.jsonl", size=40, split_seed=7, model="some/model", dtype="bfloat16", lora_r=4)
    for folder in (run, f"{run}/sft"):
        options = read("--sft", folder, groups=STAGE, command="ppo")
        assert (options.data.dataset, options.data.size, options.data.split_seed) == ("pairs.jsonl", 40, 7)
        assert (options.model.model, options.model.dtype, options.model.lora_r) == ("some/model", "bfloat16", 4)
        assert options.ppo.updates == 30  # an option of another stage is not taken over
    assert read("--config", config(f"sft: {run}\n"), groups=STAGE).data.dataset == "pairs.jsonl"
    policies = read("--policies", f"x={run}", groups=("policies", "data"))
    assert policies.data.dataset == "pairs.jsonl"
    odd = runs("lam=1", dataset="pairs.jsonl")  # a folder's name may hold the sign
    assert read("--policies", f"x={odd}", groups=("policies", "data")).data.dataset == "pairs.jsonl"
    assert read("--sft", odd, groups=STAGE).data.dataset == "pairs.jsonl"
    other = read("--sft", run, "--dtype", "float32", "--max_response_length", "5", groups=STAGE)
    assert (other.model.dtype, other.data.max_response_length) == ("float32", 5)  # these may differ
    assert read("--sft", run, "--dataset", "pairs.jsonl", groups=STAGE).data.dataset == "pairs.jsonl"


def test_an_embedded_data_set_brings_its_model_along(runs, monkeypatch, config):
    monkeypatch.setitem(EMBEDDED_DEFAULTS, "steps", {"model": "its-own", "max_response_length": 144})
    own = read("--dataset", "steps", groups=STAGE)
    assert (own.model.model, own.data.max_response_length) == ("its-own", 144)
    assert read("--config", config("dataset: steps\n"), groups=STAGE).model.model == "its-own"
    given = read("--dataset", "steps", "--model", "a/b", "--max_response_length", "9", groups=STAGE)
    assert (given.model.model, given.data.max_response_length) == ("a/b", 9)
    run = runs("a", dataset="steps", model="some/model", max_response_length=7)
    assert read("--sft", run, groups=STAGE).model.model == "some/model"  # that of the run
    for words in ([], ["--dataset", "pairs.jsonl"], ["--dataset", "tiny-tldr"]):
        assert read(*words, groups=STAGE).model.model == "tiny-gemma"


def test_a_folder_outside_of_a_run_brings_nothing_along(tmp_path):
    (tmp_path / "adapter").mkdir()
    assert read("--sft", str(tmp_path / "adapter"), groups=STAGE).data == GROUPS["data"]()


@pytest.mark.parametrize(
    "words", [["--dataset", "tiny-tldr"], ["--size", "9"], ["--split_seed", "3"], ["--model", "tiny-gemma"]]
)
def test_contradictions_to_the_given_run_are_refused(runs, words):
    run = runs("a", dataset="pairs.jsonl", size=40, split_seed=7, model="some/model")
    message = refused("--sft", run, *words, groups=STAGE, command="ppo")
    assert message.startswith(f"{words[0]} {words[1]}: --sft {run} was made with ") and "leave --" in message


def test_runs_that_do_not_belong_together_are_refused(runs):
    a, b = runs("a", dataset="pairs.jsonl"), runs("b", dataset="others.jsonl")
    message = refused("--sft", a, "--rm", b, groups=STAGE, command="ppo")
    assert f"--rm {b}: made with --dataset others.jsonl, but --sft {a} with pairs.jsonl" in message


# What is refused


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("updats: 3\n", ["unknown key updats", "did you mean updates?"]),
        ("batch-size: 3\n", ["unknown key batch-size", "did you mean batch_size?"]),
        ("zzzzzz: 3\n", ["unknown key zzzzzz"]),
        ("1: 3\n", ["unknown key 1"]),
        ("seed: many\n", ["--seed", "invalid int value: 'many'"]),
        ("seed: 1.5\n", ["--seed", "invalid int value"]),
        ("cliprange: {a: 1}\n", ["--cliprange", "invalid float value"]),
        ("whiten: perhaps\n", ["--whiten", "perhaps"]),
        ("ratio: both\n", ["--ratio", "'both'", "token", "macro"]),
        ("updates: 0\n", ["--updates 0: it must be at least 1"]),
        ("- seed\n- 3\n", ["a list", "name: value"]),
        ("seed\n", ["a str", "name: value"]),
        ("a: b: c\n", ["not YAML"]),
        ("seed: [1\n", ["not YAML"]),
        (b"model: \xff\xfe\n", ["not YAML in UTF-8"]),
    ],
)
def test_bad_config(config, content, parts):
    name = config(content)
    message = refused("--config", name)
    assert message.startswith(f"--config {name}: ")
    for part in parts:
        assert part in message, message


def test_missing_config(tmp_path):
    assert refused("--config", str(tmp_path / "no.yaml")).endswith("check the path")
    assert "cannot be read" in refused("--config", str(tmp_path))


def test_a_wrong_flag_is_not_blamed_on_the_config(config):
    assert "--config" not in refused("--config", config("seed: 1\n"), "--seed", "x")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--updats", "3"], ["unknown option --updats", "did you mean --updates?"]),
        (["--batch-sise=3"], ["unknown option --batch-sise", "did you mean --batch_size?"]),
        (["--update", "3"], ["--update:", "did you mean --updates?"]),  # no abbreviations
        (["words"], ["unknown option words"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["--seed", "x"], ["--seed", "invalid int value: 'x'"]),
        (["--ratio", "x"], ["--ratio", "invalid choice: 'x'"]),
        (["--preset", "x"], ["--preset x", "paper", "released"]),
    ],
)
def test_bad_flags(argv, parts):
    message = refused(*argv)
    for part in parts:
        assert part in message, message
    assert "marlhf run --help" in message or "choose from" in message


def test_options_of_other_commands_are_unknown():
    for command, flag in [("sft", "--updates"), ("rloo", "--lam"), ("rloo", "--kl-in"), ("grpo", "--whiten"),
                          ("dpo", "--updates"), ("evaluate", "--cliprange"), ("rm", "--rm"), ("rm", "--reward"),
                          ("memory", "--seed"), ("study", "--model"), ("compare", "--seed")]:  # fmt: skip
        message = refused(flag, "3", groups=COMMANDS[command].groups, command=command)
        assert f"unknown option {flag}" in message


def outside(f):
    """Values just out of a field's bounds, as words."""
    step = 0.001 if TYPES[f.name] in FLOATS else 1
    beyond = {"least": -step, "above": 0, "most": step, "below": 0}
    return [str(f.metadata[kind] + beyond[kind]) for kind in BOUNDS if kind in f.metadata]


@pytest.mark.parametrize(("group", "f"), BOUNDED, ids=[f.name for _, f in BOUNDED])
def test_bounds(group, f):
    for value in [*outside(f), *(["nan"] if TYPES[f.name] in FLOATS else [])]:
        message = refused(f"--{f.name}", value, groups=(group,))
        assert re.match(rf"--{f.name} \S+: it must be ", message), message
        with pytest.raises(InputError, match=f"--{f.name} "):
            GROUPS[group](**{f.name: float(value)})
    for kind in ("least", "most"):
        if kind in f.metadata:
            edge = read(f"--{f.name}", str(f.metadata[kind]), groups=(group,))
            assert getattr(getattr(edge, group), f.name) == f.metadata[kind]


def test_every_number_is_bounded_but_those_that_may_be_anything():
    numbers = {name for name in OPTIONS if TYPES[name] in (int, int | None, *FLOATS)}
    assert numbers - {f.name for _, f in BOUNDED} == {"split_seed"}


# Rules


@pytest.mark.parametrize("n", ["0", "-1", "2.5", "", "five", "1,2", "infinity"])
def test_bad_n(n):
    with pytest.raises(InputError, match=re.escape(f"--n {n}: give whole numbers from 1 up, or inf")):
        make_rule(MacroConfig(n=n))


@pytest.mark.parametrize("lengths", ["2,x", "", "2,,3", "0,3", "2,-3", "2.5", "[2, 3]"])
def test_bad_lengths(lengths):
    with pytest.raises(InputError, match=r"--lengths .*: give whole numbers from 1 up, comma-separated"):
        make_rule(MacroConfig(lengths=lengths, termination="randomized"))


def test_good_rules():
    assert make_rule(MacroConfig(n="1")) == FixedNGram(1)
    assert make_rule(MacroConfig(n="inf")) == FixedNGram(float("inf"))
    assert isinstance(make_rule(MacroConfig(termination="whole", n="x")), Whole)
    made = make_rule(MacroConfig(termination="randomized", lengths=" 1, 2,3"), seed=3)
    assert made == RandomizedNGram((1, 2, 3), 3, 3)
    for name in presets():
        make_rule(read("--preset", name).macro)


# Help


def test_every_option_is_described_by_a_noun_phrase():
    for name, (group, f) in OWNED.items():
        text = f.metadata.get("help", "")
        assert len(text.split()) >= 2 and text.endswith(".") and text[0].isupper(), f"{group}.{name}: {text!r}"
        assert not re.match(r"(Of|What|Which|Whom|How|Where|Who) ", text), f"{name}: {text!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_with_its_type_own_ones_first(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        parse(name, ["--help"], COMMANDS[name].groups, COMMANDS[name].help)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert COMMANDS[name].help in shown
    letters = "".join(shown.split())  # lines may break at hyphens
    for group in COMMANDS[name].groups:
        for f in dataclasses.fields(GROUPS[group]):
            assert re.search(rf"^  --{f.name} (\[?(TEXT|INT|FLOAT|BOOL)|\{{)", shown, re.M), f.name
            assert "".join(f.metadata["help"].split()) in letters, f.name
    for option in ("--config FILE", "--preset TEXT"):
        assert re.search(rf"^  {option}  +\S", shown, re.M)
    assert not re.search(r"--no_|SUPPRESS|None\]", shown)
    if "--model " in shown and name != "memory":
        own = COMMANDS[name].groups[0]
        assert shown.index(f"--{dataclasses.fields(GROUPS[own])[0].name} ") < shown.index("--model ")


def test_choices_are_types():
    """A field with choices is a Literal, so that the parser, not the trainer, refuses the rest."""
    for name, hint in TYPES.items():
        assert hint in (int, str, bool, int | None, *FLOATS) or typing.get_origin(hint) is typing.Literal, name


def test_options_are_read_without_torch():
    code = "import sys; from marlhf_lite.config.parser import parse, presets; parse('x', ['--preset', 'paper'], "
    code += "('run', 'ppo'), ''); assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_policy_is_a_name_and_a_folder():
    assert named_folders("PPO=runs/a=1, runs/b,x=") == [("PPO", "runs/a=1"), ("", "runs/b"), ("x", "")]
    assert named_folders("") == []
