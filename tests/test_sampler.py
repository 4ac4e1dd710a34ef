"""`--sampler`: a user's sampler in training, evaluation and a resumed run, and what can be wrong with it."""

import json
import sys

import pytest
from conftest import fails
from small_runs import build, timeless

from marlhf_lite.cli import main
from marlhf_lite.experiments.samplers import OwnSampler
from marlhf_lite.models.loading import build_models
from marlhf_lite.training.rollout import generate, longest_response
from marlhf_lite.utils.errors import ServerError
from marlhf_lite.utils.run_folder import RunFolder

MINE = """
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.errors import InputError, ServerError


class Plain:
    tried = []

    def __call__(self, model, tokenizer, prompts, sampling):
        return generate(model, tokenizer, prompts, sampling)

    def try_out(self, policy, tokenizer, prompts, sampling):
        self.tried.append((prompts, sampling.seed_names))

    def longest_response(self, tokenizer, new_tokens):
        return 2 * new_tokens


class Picky(Plain):
    def try_out(self, policy, tokenizer, prompts, sampling):
        raise InputError("no room: make some")

    def longest_response(self, tokenizer, new_tokens):
        return new_tokens // 0


def function():
    return generate


def nothing():
    return None


def wants(address):
    return generate


def raises():
    return lambda *_: {}["no such thing"]


def text():
    return lambda *_: "yes"


def short():
    return lambda model, tokenizer, prompts, sampling: generate(model, tokenizer, prompts[:1], sampling)


def gone():
    def sample(*_):
        raise ServerError("the server is gone: start it")

    return sample
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with `mine.py` in it."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["Plain", "function"])
def test_a_sampler_that_calls_generate_changes_nothing(base, sft, rm, tokenizer, name):
    samplers = OwnSampler(f"mine:{name}"), generate
    own, plain = (
        build(build_models(base, sft, rm), tokenizer, updates=2, sampler=one).train()
        for one in samplers
    )
    assert timeless(own) == timeless(plain)


def test_a_run_its_trial_and_its_evaluation_and_another_sampler_from_then_on(folder, tiny, pairs):
    short = "--updates 1 --batch_size 4 --sft_epochs 0.2 --rm_epochs 0.2 --sft_batch_size 4 --rm_batch_size 4"
    sizes = "--max_response_length 24 --lora_r 4 --eval_prompts 4"
    words = f"run --model {tiny.model} --dataset {pairs} {short} {sizes} --sampler mine:Plain --output_dir run"
    assert not main(words.split())
    ((prompts, names),) = sys.modules["mine"].Plain.tried
    assert len(prompts) == 1 and names == ("trial",)
    settings = [json.loads(path.read_text()) for path in folder.glob("run/**/settings.json")]
    assert settings and {one["engine"] for one in settings} == {"mine:Plain"}
    assert not main("run --resume run --updates 2 --sampler generate".split())
    rows = RunFolder.open("run/ma-ppo").metrics()
    assert [row["update"] for row in rows] == [1, 2] and RunFolder.open("run").config[
        "sampler"
    ] == "generate"
    assert len(sys.modules["mine"].Plain.tried) == 1


def test_a_trial_that_fails_ends_the_command_before_it_leaves_anything(folder, tiny, pairs, capsys):
    words = f"run --model {tiny.model} --dataset {pairs} --sampler mine:Picky --lora_r 4 --output_dir run"
    text = MINE.replace("new_tokens // 0", "new_tokens")
    (folder / "mine.py").write_text(text)
    assert main(words.split()) == 2
    line = text.splitlines().index('        raise InputError("no room: make some")') + 1
    assert capsys.readouterr().err.endswith(
        f"--sampler mine:Picky: no room: make some (line {line} of mine.py)\n"
    )
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("nothing", ["it returned None: return a Sampler"]),
        ("wants", ["raised TypeError", "'address'"]),
        ("missing", ["cannot be imported", "give generate, vllm, or package.module:name"]),
    ],
)
def test_what_makes_no_sampler(name, parts):
    fails(lambda: OwnSampler(f"mine:{name}"), f"--sampler mine:{name}: ", *parts)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("raises", ["raised KeyError: 'no such thing' (line", "of mine.py)"]),
        ("text", ["it returned 'yes': return a Rollout with a response to each prompt"]),
        ("short", ["return a Rollout with a response to each prompt"]),
    ],
)
def test_faults_of_a_sampler_name_it(make, name, parts):
    fails(make(sampler=OwnSampler(f"mine:{name}")).train, f"--sampler mine:{name}: ", *parts)


def test_a_server_that_is_gone_may_come_back(make, tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    trainer = make(run=run, sampler=OwnSampler("mine:gone"))
    with pytest.raises(ServerError):
        trainer.generate_rollout(trainer.prompts[:4])
    fails(
        trainer.train,
        "update 1: --sampler mine:gone: the server is gone: start it; --resume continues from here",
    )
    assert [path.name for path in run.path.glob("checkpoints/*")] == ["update-000000.pt"]


def test_the_longest_response_is_the_sampler_s(tokenizer):
    assert longest_response(OwnSampler("mine:Plain"), tokenizer, 6) == 12
    assert longest_response(OwnSampler("mine:function"), tokenizer, 6) == 6
    said = "--sampler mine:Picky: raised ZeroDivisionError"
    fails(lambda: longest_response(OwnSampler("mine:Picky"), tokenizer, 6), said)
