"""Flags, config files and presets: who wins, what is refused, and that every refusal is one line with the mend."""

import dataclasses
import re
import typing

import pytest
import yaml

from marlhf_lite.cli import COMMANDS
from marlhf_lite.config import parser as library
from marlhf_lite.config.options import GROUPS, MacroConfig
from marlhf_lite.config.parser import parse, presets
from marlhf_lite.experiments.pipeline import flat
from marlhf_lite.macro import FixedNGram, RandomizedNGram, Whole
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.utils.errors import InputError

ALL = tuple(GROUPS)
FIELDS = [(group, f) for group, kind in GROUPS.items() for f in dataclasses.fields(kind)]
TYPES = {name: hint for kind in GROUPS.values() for name, hint in typing.get_type_hints(kind).items()}
FLOATS = (float, float | None)
NAMES = [f.name for _, f in FIELDS]
BOUNDED = [(group, f) for group, f in FIELDS if set(f.metadata) & set(library.BOUNDS)]


def read(*argv, groups=ALL, command="run"):
    return parse(command, argv, groups, "about")


def refused(*argv, groups=ALL, command="run"):
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
    options = read()
    assert {group: getattr(options, group) for group in ALL} == {group: kind() for group, kind in GROUPS.items()}


def test_names_are_unique_over_groups():
    assert len(NAMES) == len(set(NAMES))


def test_flags_win_over_config_over_preset(config):
    preset = yaml.safe_load((library.files("marlhf_lite") / "config" / "presets" / "official.yaml").read_text())
    assert preset["rm_loss"] == "all" and preset["score_clip"] == 2.5 and preset["reward_pooling"] == "mean"
    name = config("score_clip: 1.5\nreward_pooling: sum\nseed: 4\n")
    options = read("--preset", "official", "--config", name, "--reward_pooling", "mean", "--updates", "3")
    assert options.rm.rm_loss == "all"  # preset alone
    assert options.ppo.score_clip == 1.5  # config over preset
    assert options.macro.reward_pooling == "mean"  # flag over config
    assert (options.run.seed, options.ppo.updates) == (4, 3)
    assert options.ppo.batch_size == GROUPS["ppo"]().batch_size  # nobody: the default


def test_order_of_flags_does_not_matter(config):
    name = config("seed: 4\n")
    assert read("--seed", "5", "--config", name).run.seed == read("--config", name, "--seed", "5").run.seed == 5
    assert read("--seed", "5", "--preset", "paper", "--config", name).macro.ratio == "macro"


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
    saved = yaml.safe_dump(flat(first) | {"environment": {"python": "3.11"}}, sort_keys=False)
    again = read("--config", config(saved))
    assert again == first
    assert flat(again) == flat(first)


def test_switches_on_and_off():
    assert read("--whiten").ppo.whiten is True
    assert read("--whiten", "false").ppo.whiten is False
    assert read("--overwrite=true").run.overwrite is True


def test_dashes_do_for_underscores():
    assert read("--batch-size", "8").ppo.batch_size == 8


def test_a_file_beside_the_program_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "marlhf.args").write_text("--seed 9")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "marlhf")])
    assert read().run.seed == 0


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
        ("clip: {a: 1}\n", ["--clip", "invalid float value"]),
        ("whiten: perhaps\n", ["--whiten", "perhaps"]),
        ("ratio: both\n", ["--ratio", "'both'", "token", "macro"]),
        ("- seed\n- 3\n", ["a list", "name: value"]),
        ("seed\n", ["a str", "name: value"]),
        ("a: b: c\n", ["not YAML"]),
        ("seed: [1\n", ["not YAML"]),
        (b"model: \xff\xfe\n", ["not YAML in UTF-8"]),
        (b"\x00\x01", ["not YAML"]),
    ],
)
def test_bad_config(config, content, parts):
    name = config(content)
    message = refused("--config", name)
    assert f"--config {name}" in message
    for part in parts:
        assert part in message, message


def test_missing_config(tmp_path):
    assert refused("--config", str(tmp_path / "no.yaml")).endswith("check the path")
    assert "cannot be read" in refused("--config", str(tmp_path))


def test_out_of_range_in_a_config(config):
    assert "--updates 0: it must be at least 1" in refused("--config", config("updates: 0\n"))


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
        (["--preset", "x"], ["--preset x", "official", "paper"]),
    ],
)
def test_bad_flags(argv, parts):
    message = refused(*argv)
    for part in parts:
        assert part in message, message
    assert "marlhf run --help" in message or "choose from" in message


def test_options_of_other_commands_are_unknown():
    assert "unknown option --updates" in refused("--updates", "3", groups=("run", "sft"), command="sft")


def outside(f):
    """Values just out of a field's bounds, as words."""
    step = 0.001 if TYPES[f.name] in FLOATS else 1
    beyond = {"least": -step, "above": 0, "most": step, "below": 0}
    return [str(f.metadata[kind] + beyond[kind]) for kind in library.BOUNDS if kind in f.metadata]


@pytest.mark.parametrize(("group", "f"), BOUNDED, ids=[f.name for _, f in BOUNDED])
def test_bounds(group, f):
    for value in [*outside(f), *(["nan"] if TYPES[f.name] in FLOATS else [])]:
        message = refused(f"--{f.name}", value, groups=(group,))
        assert re.match(rf"--{f.name} \S+: it must be ", message), message
    for kind in ("least", "most"):
        if kind in f.metadata:
            edge = read(f"--{f.name}", str(f.metadata[kind]), groups=(group,))
            assert getattr(getattr(edge, group), f.name) == f.metadata[kind]


def test_every_number_is_bounded_but_those_that_may_be_anything():
    free = {f.name for _, f in FIELDS if TYPES[f.name] in (int, int | None, *FLOATS)} - {f.name for _, f in BOUNDED}
    assert free == {"split_seed"}


# Rules


@pytest.mark.parametrize("n", ["0", "-1", "2.5", "", "five", "1,2", "infinity"])
def test_bad_n(n):
    how = read("--n", n, groups=("macro",)).macro
    with pytest.raises(InputError, match=re.escape(f"--n {n}: give whole numbers from 1 up, or inf")):
        make_rule(how)


@pytest.mark.parametrize("lengths", ["2,x", "", "2,,3", "0,3", "2,-3", "2.5", "[2, 3]"])
def test_bad_lengths(lengths):
    how = read("--lengths", lengths, "--termination", "randomized", groups=("macro",)).macro
    with pytest.raises(InputError, match=r"--lengths .*: give whole numbers from 1 up, comma-separated"):
        make_rule(how)


def test_good_rules():
    assert make_rule(MacroConfig(n="1")) == FixedNGram(1)
    assert make_rule(MacroConfig(n="inf")) == FixedNGram(float("inf"))
    assert isinstance(make_rule(MacroConfig(termination="whole", n="x")), Whole)
    made = make_rule(MacroConfig(termination="randomized", lengths=" 1, 2,3", repeats=2), seed=3)
    assert made == RandomizedNGram((1, 2, 3), 2, 3)


# Presets and help


@pytest.mark.parametrize("name", presets())
def test_preset_names_exist_and_are_in_range(name):
    values = yaml.safe_load((library.files("marlhf_lite") / "config" / "presets" / f"{name}.yaml").read_text())
    assert values and set(values) <= set(NAMES)
    options = flat(read("--preset", name))
    for key, value in values.items():
        assert str(options[key]) == str(value) or options[key] == value, key
    for command in COMMANDS.values():
        parse("x", ["--preset", name], command.groups, "about")


def test_presets_make_rules():
    assert {"paper", "official"} <= set(presets())
    for name in presets():
        make_rule(read("--preset", name).macro)


def test_every_field_has_a_help_text():
    for group, f in FIELDS:
        text = f.metadata.get("help", "")
        assert len(text.split()) >= 2 and text.endswith("."), f"{group}.{f.name}: {text!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        parse(name, ["--help"], COMMANDS[name].groups, COMMANDS[name].help)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert COMMANDS[name].help in shown
    flat_text = " ".join(shown.split())
    for group in COMMANDS[name].groups:
        for f in dataclasses.fields(GROUPS[group]):
            assert re.search(rf"^  --{f.name}\b", shown, re.M), f.name
            assert " ".join(f.metadata["help"].split()) in flat_text, f.name
    for option in ("--config", "--preset"):
        assert re.search(rf"^  {option} X  +\S", shown, re.M)
    assert not re.search(r"--no_|SUPPRESS|None\]", shown)


def test_switches_are_shown_without_a_value(capsys):
    with pytest.raises(SystemExit):
        read("-h")
    shown = capsys.readouterr().out
    assert re.search(r"^  --whiten  +\S", shown, re.M)
    assert "--ratio {token,macro}" in shown


def test_choices_are_types():
    """A field with choices is a Literal, so that the parser, not the trainer, refuses the rest."""
    for name, hint in TYPES.items():
        assert hint in (int, str, bool, int | None, *FLOATS) or typing.get_origin(hint) is typing.Literal, name
