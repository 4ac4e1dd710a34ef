"""Options: who wins of flags, files, presets and earlier runs; bounds, help, and one typed object a command."""

import re
import shutil
import sys
import typing
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml
from conftest import fails

from marlhf_lite.cli import main
from marlhf_lite.config.checked import BOUNDS
from marlhf_lite.config.commands import COMMANDS, OPTIONS, OWN, groups, option_names
from marlhf_lite.config.options import DataConfig, MacroConfig, PPOConfig
from marlhf_lite.config.parser import (
    CODE_OPTIONS,
    COMMON,
    parse,
    parse_and_name_presets,
    presets,
    read_presets,
)
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.macro import FixedNGram, RandomizedNGram, Whole
from marlhf_lite.utils.run_folder import RunFolder

OWNER = {f.name: (name, f) for name, command in COMMANDS.items() for f in fields(command)}
TYPES = {
    name: hint
    for command in COMMANDS.values()
    for name, hint in typing.get_type_hints(command).items()
}
FLOATS = (float, float | None)
BOUNDED = [name for name, (_, f) in OWNER.items() if set(f.metadata) & set(BOUNDS)]


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
    quick = read_presets("demo", "test") if name == "demo" else {}
    assert asdict(read(command=name)) == asdict(COMMANDS[name]()) | quick


def test_one_name_is_one_option():
    """Where two commands have an option of the same name, it means the same."""
    for command in COMMANDS.values():
        for f in fields(command):
            assert f.metadata["help"] == OWNER[f.name][1].metadata["help"], (command, f.name)


WORDS = "--preset released --config FILE --reward_pooling mean --updates 3"
FILE = "score_clip: 1.5\nreward_pooling: sum\nseed: 4\nwhiten: true\nn: .inf\nkl_coef: 1e-3\nsize: 40\n"
WINS = [  # command, its words -> what it reads
    (
        "run",
        WORDS,
        {"rm_loss": "all", "score_clip": 1.5, "reward_pooling": "mean", "seed": 4, "updates": 3},
    ),
    (
        "run",
        WORDS,
        {
            "size": 40,
            "whiten": True,
            "n": "inf",
            "kl_coef": 0.001,
            "batch_size": PPOConfig().batch_size,
        },
    ),
    ("run", "--seed 5 --config FILE", {"seed": 5}),
    ("run", "--config FILE --seed 5", {"seed": 5}),
    # keys of others are left out
    ("sft", "--config FILE --preset gemma-2b/webgpt", {"sft_epochs": 3, "seed": 4}),
    ("demo", "--updates 7", {"updates": 7, "sft_epochs": 1.0}),  # over the demo's own preset
    ("demo", "--preset gemma-2b/tldr", {"sft_epochs": 3}),
    ("run", "--preset gemma-2b/webgpt", {"prompt_epochs": 4.0}),
    ("run", "--preset gemma-2b/webgpt --updates 3", {"prompt_epochs": None}),
    ("run", "--preset gemma-2b/webgpt --updates 3 --prompt_epochs 2", {"prompt_epochs": 2.0}),
]


@pytest.mark.parametrize(("command", "words", "expected"), WINS)
def test_flags_win_over_files_over_presets_over_defaults(config, command, words, expected):
    found = asdict(read(*words.replace("FILE", config(FILE)).split(), command=command))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}", "size:\n"])
def test_empty_config_and_empty_values(config, content):
    assert read("--config", config(content)) == read()


def test_a_runs_own_config_comes_back_as_it_was(config):
    argv = [
        "--preset",
        "paper",
        "--output_dir",
        "runs/x",
        "--whiten",
        "--n",
        "inf",
        "--reward",
        "gold",
    ]
    argv += ["--lora_target_modules=-x|.*q_proj", "--batch-size", "8", "--last_token_alone=true"]
    first = read(*argv)
    assert (
        first.lora_target_modules == "-x|.*q_proj"
        and first.batch_size == 8
        and first.last_token_alone
    )
    saved = yaml.safe_dump(asdict(first) | {"versions": {"python": "3.11"}}, sort_keys=False)
    assert read("--config", config(saved)) == first


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
    own = {"dataset": "pairs.jsonl", "size": 40, "model": "some/model", "dtype": "bfloat16"}
    # a folder's name may hold the sign
    run, odd = runs("a", **own), runs("lam=1", dataset="pairs.jsonl")
    for folder in (run, f"{run}/sft"):
        options = read("--sft", folder, command="ppo")
        assert own.items() <= asdict(options).items() and options.updates == 30  # of another stage
    assert read("--config", config(f"sft: {run}\n"), command="ppo").dataset == "pairs.jsonl"
    for words in (["--policies", f"x={run}"], ["--policies", f"x={odd}"], ["--sft", odd]):
        assert read(*words, command="evaluate").dataset == "pairs.jsonl"
    other = read("--sft", run, "--dtype", "float32", "--max_response_length", "5", command="ppo")
    assert (other.dtype, other.max_response_length) == ("float32", 5)  # these may differ
    (tmp_path / "adapter").mkdir()  # outside of a run
    assert read("--sft", str(tmp_path / "adapter"), command="ppo").dataset == DataConfig().dataset


@pytest.mark.parametrize("layer", range(4))
def test_of_two_sources_the_stronger_one_wins(config, monkeypatch, layer):
    """Four layers, each with all below it: the default, a preset, a file, a flag; also for a run that goes on."""
    layers = [
        [],
        ["--preset", "released"],
        ["--config", config("score_clip: 1.5\n")],
        ["--score_clip", "3"],
    ]
    words = [word for sources in layers[: layer + 1] for word in sources]
    for order in (words, words[2:] + words[:2]):
        assert read(*order, command="ppo").score_clip == (0.0, 2.5, 1.5, 3.0)[layer]


def test_presets_that_come_by_themselves_are_weaker_than_runs_and_these_than_named_ones(runs):
    """The presets of an embedded data set, of other models and of the demo, and the order of their names."""
    run = runs("a", dataset="tiny-steps", model="some/model", max_response_length=7)
    for command, words, names, expected in (
        ("demo", "", ["demo", "embedded/tiny-tldr"], {"updates": 18, "model": "tiny-gemma"}),
        ("ppo", "--model a/b --dataset x", ["pretrained"], {"max_response_length": 128, "temperature": 1.0}),
        ("ppo", "--model a/b --dataset tiny-hh", ["pretrained", "embedded/tiny-hh"], {"max_response_length": 136}),
        ("ppo", f"--sft {run}", ["pretrained", "embedded/tiny-steps"], {"max_response_length": 7, "top_k": 0}),
        ("ppo", f"--sft {run} --preset paper,lora-24gb --model some/model --dataset tiny-steps",
         ["pretrained", "embedded/tiny-steps", "paper", "lora-24gb"], {"max_response_length": 512, "top_k": 50}),
        ("ppo", f"--resume {run}", [], {"max_response_length": 7, "temperature": 0.8}),
        ("compare", "", [], {}),
        ("memory", "--model a/b", ["pretrained"], {"micro_batch_size": 8}),
    ):  # fmt: skip
        options, found = parse_and_name_presets(command, words.split(), COMMANDS[command])
        assert (found, {name: getattr(options, name) for name in expected}) == (names, expected)


def test_an_embedded_data_set_brings_its_model_along(runs):
    run = runs("a", dataset="tiny-steps", model="some/model", max_response_length=7)
    for words, expected in (
        ("--dataset tiny-steps", ("tiny-gemma-steps", 176)),
        ("--dataset tiny-steps --model a/b --max_response_length 9", ("a/b", 9)),
        (f"--sft {run}", ("some/model", 7)),  # that of the run
        ("--dataset pairs.jsonl", ("tiny-gemma", 96)),
    ):
        options = read(*words.split(), command="ppo")
        assert (options.model, options.max_response_length) == expected


@pytest.mark.parametrize(("stored", "fast"), [(False, "auto"), (True, "fused")])
def test_a_run_of_version_1_0_stored_fused_kernels_as_an_option(runs, stored, fast):
    run = runs("a", fused_kernels=stored)
    assert read("--resume", run, command="ppo").fast == fast


@pytest.mark.parametrize("words", ["--size 9", "--model tiny-gemma", "--rm b"])
def test_contradictions_to_the_given_run_are_refused(runs, words):
    run, other = (runs(name, dataset=f"{name}.jsonl", size=40, model="some/model") for name in "ab")
    named = f"--rm {other}" if "--rm" in words else words
    source = named if "--rm" in words else f"--sft {run}"
    fails(
        lambda: read("--sft", run, *named.split(), command="ppo"), f"{source}: ", words.split()[0]
    )


@pytest.mark.parametrize(
    ("stored", "words", "made", "fix"),
    [
        ({}, "--size 400", "no --size", "this command has --size 400: give no --size"),
        ({"size": None}, "--size 400", "no --size", "this command has --size 400: give no --size"),
        ({}, "--rm OTHER", "--size 40", "another run has no --size: train one of them again"),
    ],
)
def test_rows_may_not_differ_from_those_of_a_run_with_the_defaults(runs, stored, words, made, fix):
    """They would mix the parts of the split. Data of the command's own, and what it repeats, are no contradiction."""
    run, other = runs("a", **stored), runs("b", size=40)
    words = words.replace("OTHER", other).split()
    fails(lambda: read("--sft", run, *words, command="ppo"), f": made with {made}, but ", fix)
    assert read("--sft", run, command="ppo").size == stored.get("size")
    assert read("--sft", runs("c", dataset=None), "--size", "4", command="ppo").size == 4, (
        "data of a program's own"
    )
    if "--rm" not in words:
        assert (
            read("--sft", run, "--dataset", "own.jsonl", *words, command="ppo").dataset
            == "own.jsonl"
        )


def test_the_shape_of_a_given_adapter_cannot_be_changed(runs):
    """It would have no effect. Several policies may differ, and a reward model's adapter is its own."""
    shape = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ".*q_proj"}
    run, other = runs("a", **shape), runs("b", lora_r=8)
    for name in shape:
        words = [f"--{name}", "9"]
        fails(
            lambda w=words: read("--sft", run, *w, command="ppo"),
            f"--sft {run}: made with --{name} ",
            f"{name} 9",
        )
        fails(
            lambda w=words: read("--resume", run, *w, command="ppo"),
            f"--{name} 9: the run was started with ",
        )
    assert read("--sft", run, "--lora_r", "4", command="ppo").lora_alpha == 8
    assert read("--policies", f"x={run},y={other}", "--sft", run, command="evaluate").lora_r == 4
    assert read("--rm", run, "--lora_r", "9", command="run").lora_r == 9


def test_an_option_that_an_older_run_has_not_stored_had_its_default(runs):
    run = runs("a", lora_r=4)
    assert read("--resume", run, "--sigma", "equal", command="ppo").sigma == "equal"
    said = "--sigma unit: the run was started with equal"
    fails(lambda: read("--resume", run, "--sigma", "unit", command="ppo"), said)


def test_a_run_that_goes_on_may_take_another_sampler_and_less_memory(runs):
    run = runs("a", sampler="mine:Own", micro_batch_size=8, generation_batch_size=0)
    assert read("--resume", run, "--sampler", "mine:Own", command="ppo").sampler == "mine:Own"
    assert read("--resume", run, "--sampler", "generate", command="ppo").sampler == "generate"
    words = "--sampler generate --generation_batch_size 2 --micro_batch_size 4".split()
    less = read("--resume", run, *words, command="ppo")
    assert (less.generation_batch_size, less.micro_batch_size) == (2, 4)


# Names of code: a run may be somebody else's


CODE = {
    "reward": "gift.extra:score",
    "environment": "gift.extra:Env",
    "objective": "sae,gift.extra:Losses",
    "termination": "gift.extra:Rule",
    "sampler": "gift.extra:Own",
}


@pytest.fixture
def gift(runs, tmp_path, monkeypatch):
    """A function that makes a run whose record names code; the code is there, and leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(**named):
        folder = f"gift{len(list(tmp_path.iterdir()))}"
        run = Path(runs(folder, model="tiny-gemma", **named))
        (run / "extra.py").write_text("from pathlib import Path\nPath('was_run').touch()\n")
        return str(run)

    yield make
    assert not (tmp_path / "was_run").exists()


DOORS = [  # how a run of another's comes into a command, and the options that the command would take from it
    ("ppo --resume GIFT", [*CODE]),
    ("run --resume GIFT", [*CODE]),
    ("ppo --config GIFT/config.yaml", [*CODE]),
    ("ppo --config copy.yaml", [*CODE]),
    ("evaluate --config copy.yaml", ["reward", "environment", "sampler"]),
    ("ppo --sft GIFT", ["environment"]),
    ("ppo --rm GIFT", ["environment"]),
    ("ppo --dataset own.jsonl --sft GIFT", ["environment"]),
    ("evaluate --policies x=GIFT", ["environment"]),
    ("evaluate --sft GIFT", ["environment"]),
    ("generate --policy GIFT --prompt x", ["environment"]),
]


@pytest.mark.parametrize(("words", "taken"), DOORS)
def test_what_a_run_used_of_code_is_never_imported_unasked(gift, words, taken, capsys):
    """One line names it, and the words that it gives are enough to go on. Other options are still inherited."""
    for name, value in CODE.items():
        run = gift(**{name: value})
        shutil.copy(Path(run) / "config.yaml", "copy.yaml")
        argv = words.replace("GIFT", run).split()
        if name not in taken:
            read(*argv[1:], command=argv[0])
            continue
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"the run used --{name} {value}: give it")
        assert getattr(read(*argv[1:], f"--{name}", value, command=argv[0]), name) == value


def test_several_names_of_code_are_one_line_that_a_shell_reads(gift):
    run = gift(reward="my gift:score", sampler=CODE["sampler"])
    said = "the run used --reward 'my gift:score' --sampler gift.extra:Own: give them"
    fails(lambda: read("--resume", run, command="ppo"), said)


def test_code_that_is_the_library_s_own_or_in_the_user_s_file_needs_no_second_word(gift, config):
    game = read_presets("embedded/tiny-guess", "test")["environment"]
    run = gift(environment=game)
    assert read("--resume", run, command="ppo").environment == game
    assert read("--policy", run, command="generate").environment == game
    mine = config("reward: mine:score\n")
    assert read("--config", mine, command="ppo").reward == "mine:score"
    other = gift(reward="mine:score")
    assert read("--config", mine, "--resume", other, command="ppo").reward == "mine:score"
    no_preset = gift(environment="marlhf_lite.cli:main")
    fails(lambda: read("--resume", no_preset, command="ppo"), "marlhf_lite.cli:main: give it")


def test_every_option_that_names_code_is_known():
    """Its help offers package.module:name."""
    offer = {name for name, (_, f) in OWNER.items() if "package.module" in f.metadata["help"]}
    assert offer == set(CODE_OPTIONS) == set(CODE)


# Bounds and types


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds(name):
    command, f = OWNER[name]
    is_float = TYPES[name] in FLOATS
    beyond = {
        "least": -0.001 if is_float else -1,
        "above": 0,
        "most": 0.001 if is_float else 1,
        "below": 0,
    }
    outside = [f.metadata[bound] + beyond[bound] for bound in BOUNDS if bound in f.metadata]
    for value in [*outside, *([float("nan")] if is_float else [])]:
        fails(
            lambda v=value: read(f"--{name}", str(v), command=command), f"--{name} ", "it must be"
        )
        fails(lambda v=value: COMMANDS[command](**{name: v}), f"--{name} ", "it must be")
    for edge in [f.metadata[bound] for bound in ("least", "most") if bound in f.metadata]:
        assert getattr(read(f"--{name}", str(edge), command=command), name) == edge


def test_a_minimum_length_may_be_the_longest_response():
    words = "--max_response_length 64 --min_response_length 64"
    assert read(*words.split(), command="ppo").min_response_length == 64


def test_every_number_is_bounded_and_every_choice_is_a_type():
    """The parser, not the trainer, refuses the rest."""
    numbers = {name for name in OWNER if TYPES[name] in (int, int | None, *FLOATS)}
    assert numbers == set(BOUNDED)
    for name, hint in TYPES.items():
        kinds = (int, str, bool, int | None, *FLOATS, bool | typing.Literal["auto"])
        assert hint in kinds or typing.get_origin(hint) is typing.Literal, name


@pytest.mark.parametrize(
    "words, value",
    [
        ([], False),
        (["--gradient_checkpointing"], True),
        (["--gradient_checkpointing", "true"], True),
        (["--gradient_checkpointing", "False"], False),
        (["--gradient_checkpointing", "auto"], "auto"),
    ],
)
def test_a_switch_that_a_run_may_decide(words, value, tmp_path):
    assert read(*words, command="ppo").gradient_checkpointing is value
    (tmp_path / "my.yaml").write_text(f"gradient_checkpointing: {value}")
    assert (
        read("--config", str(tmp_path / "my.yaml"), command="ppo").gradient_checkpointing == value
    )
    fails(
        lambda: read("--gradient_checkpointing", "perhaps", command="ppo"),
        "--gradient_checkpointing",
    )


def test_rules_from_options():
    assert make_rule(MacroConfig(n="1")) == FixedNGram(1)
    assert make_rule(MacroConfig(n="inf")) == FixedNGram(float("inf"))
    assert isinstance(make_rule(MacroConfig(termination="whole", n="x")), Whole)
    made = make_rule(MacroConfig(termination="randomized", lengths=" 1, 2,3"), seed=3)
    assert made == RandomizedNGram((1, 2, 3), 3, 3)
    for name in presets():
        make_rule(read("--preset", name))
    lists = {
        "lengths": ["2,x", "", "2,,3", "0,3", "2.5", "[2, 3]"],
        "n": ["0", "-1", "2.5", "", "five", "1,2"],
    }
    for option, wrong in ((option, wrong) for option, words in lists.items() for wrong in words):
        termination = "randomized" if option == "lengths" else "fixed"
        macro = MacroConfig(termination=termination, **{option: wrong})
        fails(lambda macro=macro: make_rule(macro), f"--{option} {wrong}: ")


# Help


def help_of(command, word, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        read(word, command=command)
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_lists_every_option_once_with_its_type_own_ones_first(name, capsys, monkeypatch):
    shown = help_of(name, "--help_all", capsys, monkeypatch)
    letters, own = "".join(shown.split()), fields(COMMANDS[name])  # lines may break at hyphens
    assert COMMANDS[name].__doc__.partition("\n")[0] in shown
    for f in own:
        assert (
            len(re.findall(rf"^  --{f.name} (?:\[?(?:TEXT|INT|FLOAT|BOOL)|\{{)", shown, re.M)) == 1
        ), f.name
        assert "".join(f.metadata["help"].split()) in letters, f.name
    assert re.search(r"^  --(\w+) ", shown, re.M)[1] not in (
        "model",
        "seed",
        "output_dir",
        "config",
    )
    assert "--preset" in shown
    example = COMMANDS[name].__doc__.split("example: ")[1].split()
    assert example[:2] == ["marlhf", name]  # its options exist
    assert {word[2:] for word in example if word.startswith("--")} <= {f.name for f in own} | {
        "preset",
        "config",
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_options_that_most_users_need_and_those_of_the_command(
    name, capsys, monkeypatch
):
    common, own = set(COMMON), {f.name for f in groups(COMMANDS[name]).get(OWN, ())}
    assert len(common) == 25 and common < OPTIONS
    shown = set(re.findall(r"^  --(\w+) ", help_of(name, "--help", capsys, monkeypatch), re.M))
    own |= {x for x in option_names(COMMANDS[name]) if x.startswith(f"{name}_")}
    assert shown == (common & option_names(COMMANDS[name])) | own | {"config", "preset"}


# What a command says of its work


# command -> the stages that it trains, whether it answers in the end, the part that a file of its
# own is
NEEDS = {
    "demo": (("sft", "rm", "ppo"), True, ""),
    "run": (("sft", "rm", "ppo"), True, ""),
    "sft": (("sft",), False, "sft"),
    "rm": (("rm",), False, "rm"),
    "ppo": (("ppo",), False, "ppo"),
    "dpo": (("dpo",), False, "rm"),
    "rloo": (("rloo",), False, "ppo"),
    "grpo": (("grpo",), False, "ppo"),
    "evaluate": ((), True, "test"),
    "data": ((), False, ""),
}


def test_what_each_command_needs():
    found = {name: (o.stages, o.answers, o.own_part) for name in NEEDS for o in [COMMANDS[name]()]}
    assert found == NEEDS
    assert {name for name in NEEDS if COMMANDS[name]().methods} == {"demo", "run", "ppo"}
    assert COMMANDS["run"](reward="gold").stages == ("sft", "ppo")
    assert {name for name in NEEDS if COMMANDS[name]().runs_programs} == NEEDS.keys() - {
        "sft",
        "rm",
        "data",
    }
