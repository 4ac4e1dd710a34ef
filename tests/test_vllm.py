"""`--sampler vllm`: against a small server on loopback, and against a real one that MARLHF_VLLM_URL names."""

import dataclasses
import json
import math
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import fails, nudge
from scipy.stats import chi2_contingency
from small_runs import build, same_checkpoints, timeless
from transformers import set_seed

from marlhf_lite.cli import main
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.experiments.samplers import OwnSampler
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.training.sampler_checks import SAMPLED_TOLERANCE, check_sampled
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder

pytest.importorskip("openai")

from small_vllm import SmallVLLM

from marlhf_lite.extras import vllm as vllm_servers

NAME = "vllm"
HOW = {"policy_learning_rate": 0.05, "warmup_updates": 0}


@pytest.fixture(autouse=True)
def vllm(monkeypatch, tmp_path):
    """The module; adapters go to a folder of the test."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    (tmp_path / "adapters").mkdir()
    monkeypatch.setenv("VLLM_FOLDER", str(tmp_path / "adapters"))
    return vllm_servers


@pytest.fixture
def ask(monkeypatch):
    """A function that names the servers to ask."""
    return lambda *servers: monkeypatch.setenv(
        "VLLM_URL", ",".join(server.url for server in servers)
    )


@pytest.fixture
def serve(base, tokenizer):
    """A function that starts servers."""
    started = []

    def start(**how):
        started.append(SmallVLLM(how.pop("base", base), tokenizer, **how))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def make(base, sft, rm, tokenizer, ask, vllm, monkeypatch):
    """A function that makes a trainer whose responses come from these servers."""

    def trainer(*servers, run=None, retries=1, **changes):
        ask(*servers)
        monkeypatch.setattr(vllm, "RETRIES", retries)
        return build(
            build_models(base, sft, rm), tokenizer, run, sampler=OwnSampler(NAME), **HOW, **changes
        )

    return trainer


def test_every_server_has_every_adapter_for_one_update_and_its_share_of_the_prompts(
    serve, make, tmp_path
):
    servers = serve(), serve()
    trainer = make(*servers, run=RunFolder.create(tmp_path / "run", {}))
    rows = trainer.train()
    assert max(row["sampler_difference"] for row in rows) < 1e-5
    for server in servers:
        loaded = server.names("load_lora_adapter")
        assert len(set(loaded)) == 3 and all(name.startswith("policy-") for name in loaded)
        assert server.names("unload_lora_adapter") == loaded and not server.adapters
        asked = server.names("completions")
        # half of four, while that adapter is there
        assert asked == [name for name in loaded for _ in range(2)]
    assert not list(tmp_path.glob("adapters/*"))
    seeds = [
        body["seed"]
        for server in servers
        for route, _, body in server.requests
        if route == "completions"
    ]
    assert len(set(seeds)) == len(seeds) == 12


def test_an_update_is_that_of_the_same_responses_from_anywhere(
    serve, make, tokenizer, base, sft, rm
):
    """Tokens, end token included, reach the update as the server sampled them."""
    rollouts = []

    def recorded(*args):
        rollouts.append(engine(*args))
        return rollouts[-1]

    recorded.remote = True
    trainer, ends = make(serve(), length=12), list(range(100, 140))
    trainer.models.policy.model.generation_config.eos_token_id = ends  # as chat models have several
    engine, trainer.sampler = trainer.sampler, recorded
    rows = trainer.train()
    given = iter([dataclasses.replace(rollout, sampled_logprobs=None) for rollout in rollouts])
    other = build(
        build_models(base, sft, rm), tokenizer, sampler=lambda *_: next(given), length=12, **HOW
    ).train()
    assert [row.pop("sampler_difference") for row in rows] and not any(
        row.pop("sampler_beyond") for row in rows
    )
    assert timeless(rows) == timeless(other)
    ended = torch.cat([rollout.ended for rollout in rollouts])
    last = torch.cat(
        [r.response_ids.gather(1, r.lengths[:, None] - 1).squeeze(1) for r in rollouts]
    )
    assert (
        torch.equal(torch.isin(last, torch.tensor(ends)), ended) and ended.any() and not ended.all()
    )


def test_tokens_that_the_server_gave_another_chance_are_counted(serve, make):
    """Two tokens of a response are 1.5 nats away: within what bfloat16 allows on average, and far out by themselves."""
    trainer = make(serve(), length=40)
    rollout = trainer.score(trainer.generate_rollout(trainer.prompts[:8]))
    logprobs = trainer.all_outputs(rollout).logprobs
    change = torch.zeros_like(logprobs)
    change[:, 2], change[:, 5] = -1.5, 1.5
    odd = dataclasses.replace(rollout, sampled_logprobs=logprobs + change / 2)
    model = torch.nn.Linear(1, 1).to(torch.bfloat16)
    assert check_sampled(odd, model, logprobs)["sampler_beyond"] == 0
    odd = dataclasses.replace(rollout, sampled_logprobs=logprobs + change)
    share = float((change != 0)[rollout.mask].float().mean())
    assert share > 0 and check_sampled(odd, model, logprobs)["sampler_beyond"] == pytest.approx(
        share
    )


def test_servers_keep_the_minimum_length(serve, make):
    """Half of all tokens end a response here."""
    trainer = make(serve(), length=12, min_response_length=5)
    trainer.models.policy.model.generation_config.eos_token_id = list(range(0, 512, 2))
    rollout = trainer.generate_rollout(trainer.prompts[:8])
    ends = rollout.response_ids[:, :5] % 2 == 0
    assert rollout.lengths.min() > 5 and not ends.any() and rollout.ended.any()


def test_what_fails_for_a_moment_is_asked_for_again(serve, make):
    """Also a load that was done, and whose answer was lost."""
    server = serve()
    server.script = [503, 0, None, None, 500, 0, 429]
    server.loses = 1
    assert make(server, updates=1, retries=3).train()
    assert len(server.names("load_lora_adapter")) == 4 and len(server.names("completions")) > 4


def spoiled(**changes):
    """Return a function that changes these fields of an answer's only choice, or `choices` itself."""

    def spoil(answer):
        return (
            answer | {"choices": [answer["choices"][0] | changes]}
            if "choices" not in changes
            else answer | changes
        )

    return spoil


WRONG = {  # what a server does -> what the line names
    "forgets": ({"forgets": True}, ["does not load the adapter", "--max-lora-rank"]),
    "no token ids": ({"spoil": spoiled(token_ids=None)}, ["no whole response"]),
    "no log-probabilities": ({"spoil": spoiled(logprobs=None)}, ["no whole response"]),
    "no choices": ({"spoil": spoiled(choices=[])}, ["no whole response"]),
    "cut": (
        {"spoil": spoiled(token_ids=[7], logprobs={"token_logprobs": [-1.0]})},
        ["no whole response"],
    ),
    "another model": (
        {"spoil": lambda answer: answer | {"model": "base"}},
        ["no whole response of policy-"],
    ),
    "deep": ({"spoil": lambda answer: b"[" * 10**6 + b"]" * 10**6}, ["nested too deeply"]),
    "no JSON object": ({"spoil": lambda answer: b"[1]"}, ["no whole response"]),
    "choices by name": ({"spoil": spoiled(choices={"0": 1})}, ["no whole response"]),
    "too many tokens": (
        {"spoil": spoiled(token_ids=[7] * 9**4, logprobs={"token_logprobs": [-1.0] * 9**4})},
        ["no wh"],
    ),
    "logprobs as text": (
        {"spoil": spoiled(logprobs={"token_logprobs": "-" * 6})},
        ["no whole response"],
    ),
    "models by name": ({"listed": lambda served: {"data": ["base"]}}, ["names no models"]),
    "no models": ({"listed": lambda served: {"data": None}}, ["names no models"]),
    "models without names": (
        {"listed": lambda served: {"data": [{"id": {}}]}},
        ["does not load the adapter"],
    ),
    "a deep list": ({"listed": lambda served: b"[" * 10**6}, ["nested too deeply"]),
}


def with_one(name, value):
    """A change of one token id, or of one log-probability, in the midst of a response."""

    def spoil(answer):
        choice = answer["choices"][0]
        place = choice["token_ids"] if name == "token_ids" else choice["logprobs"]["token_logprobs"]
        place[len(place) // 2 - 1] = value
        return answer

    return spoil


TOKENS = [-1, 10**9, 512, 2**70, 7.0, 7.5, None, "7", True, [7], {"a": 7}]
LOGPROBS = [None, "x", [-1.0], {}, math.nan, -math.inf, -(10**400)]


@pytest.mark.parametrize(
    ("name", "value"), [("token_ids", x) for x in TOKENS] + [("logprobs", x) for x in LOGPROBS]
)
def test_a_response_has_ids_of_the_vocabulary_and_finite_log_probabilities(
    serve, make, monkeypatch, name, value
):
    server = serve()
    server.spoil = with_one(name, value)
    trainer = make(server)
    fails(
        lambda: trainer.generate_rollout(trainer.prompts[:4]),
        f"--sampler {NAME}",
        server.url,
        "no whole response",
    )


@pytest.mark.parametrize("key", ["sk-secret-0123456789", "sk-secret/01+23=\\9"])
def test_the_key_is_in_no_message(serve, make, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", f"{key}\n")
    server = serve()
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    for quoted in (json.dumps(key), json.dumps(key).replace("/", "\\/"), f'"{escaped}"'):
        body = f'{{"error": {{"message": {quoted}}}}}'.encode()
        server.routes["load_lora_adapter"] = lambda _, body=body: (400, body)
        with pytest.raises(InputError) as caught:
            make(server).train()
        assert "[key]" in str(caught.value) and "secret" not in str(caught.value)
    monkeypatch.setenv("VLLM_API_KEY", f"{key}ä")
    fails(lambda: make(server), "VLLM_API_KEY: not a key")


@pytest.mark.parametrize(("faults", "parts"), WRONG.values(), ids=WRONG)
def test_a_server_that_does_not_do_its_part_is_named(serve, make, faults, parts):
    server = serve()
    for name, value in faults.items():
        setattr(server, name, value)
    fails(make(server).train, f"update 1: --sampler {NAME}: {server.url}", *parts)


@pytest.fixture
def mixed():
    """An accelerator that trains float32 weights in bfloat16."""
    AcceleratorState._reset_state()
    yield Accelerator(mixed_precision="bf16")
    AcceleratorState._reset_state()


def test_mixed_precision_may_be_as_far_from_the_server_as_it_rounds(serve, make, mixed):
    rows = make(serve(), accelerator=mixed, updates=2).train()
    assert all(SAMPLED_TOLERANCE[torch.float32] < row["sampler_difference"] < 0.1 for row in rows)


def test_responses_of_another_policy_end_the_run_before_a_step(serve, make):
    server = serve()
    server.stale = True
    trainer = make(server)
    rows, before = trainer.history, None
    plain = trainer.optimizer_step

    def counted(*args):
        nonlocal before
        row = plain(*args)
        before = [p.detach().clone() for p in trainer.parameters["policy"]]
        return row

    trainer.optimizer_step = counted
    fails(trainer.train, f"update 2: --sampler {NAME}: ", "nats a token from the policy's")
    assert len(rows) == 1  # the first adapter was the right one
    assert all(map(torch.equal, before, trainer.parameters["policy"]))


def test_a_run_whose_server_goes_away_goes_on_where_it_was(serve, make, tmp_path):
    """Bit by bit as if the server had stayed, whatever is drawn in between."""
    whole, cut = (RunFolder.create(tmp_path / name, {}) for name in ("whole", "cut"))
    set_seed(0)
    make(serve(), run=whole, checkpoint_every=3).train()
    set_seed(0)
    server = serve()
    server.ends_after = 6  # in the second of three updates of four responses
    trainer = make(server, run=cut, checkpoint_every=3)
    fails(
        trainer.train, f"update 2: --sampler {NAME}: {server.url}", "--resume continues from here"
    )
    assert [path.name for path in cut.path.glob("checkpoints/*")] == ["update-000001.pt"]
    set_seed(9)
    make(serve(), run=cut, checkpoint_every=3).train(resume=True)
    assert timeless(cut.metrics()) == timeless(whole.metrics())
    assert same_checkpoints(
        *(run.path / "checkpoints" / "update-000003.pt" for run in (cut, whole))
    )


def test_a_server_that_takes_requests_and_is_not_well_ends_the_run(
    serve, make, vllm, tmp_path, monkeypatch
):
    """As vLLM does whose engine has ended: it would keep the run waiting for an hour."""
    monkeypatch.setattr(vllm, "PATIENCE", 0.1)
    run, server = RunFolder.create(tmp_path / "run", {}), serve()
    server.hangs_after, server.well = 6, False
    fails(
        make(server, run=run).train,
        f"update 2: --sampler {NAME}: {server.url}",
        "503",
        "--resume continues from here",
    )
    assert [path.name for path in run.path.glob("checkpoints/*")] == ["update-000001.pt"]


def test_a_server_that_is_slow_and_well_is_waited_for(serve, make, vllm, monkeypatch):
    monkeypatch.setattr(vllm, "PATIENCE", 0.01)
    server = serve()
    server.spoil = lambda answer: time.sleep(0.1) or answer
    assert len(make(server, updates=1).train()) == 1


def test_a_server_on_another_machine_finds_adapters_in_the_folder_that_both_see(
    serve, make, tmp_path, monkeypatch
):
    """A folder elsewhere ends in one line, before an update."""
    server = serve(sees=tmp_path / "shared")
    trainer = make(server)
    fails(
        trainer.train,
        f"--sampler {NAME}",
        "No adapter found for",
        str(tmp_path / "adapters"),
        "must see this folder",
    )
    assert not trainer.history and not server.adapters and not list(tmp_path.glob("adapters/*"))
    monkeypatch.setenv("VLLM_FOLDER", str(tmp_path / "shared" / "adapters"))
    rows = make(server, updates=2).train()
    assert len(rows) == 2 and max(row["sampler_difference"] for row in rows) < 1e-5


def test_without_a_folder_adapters_go_to_the_current_one(serve, make, tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_FOLDER")
    monkeypatch.chdir(tmp_path)
    server = serve()
    make(server, updates=1).train()
    (place,) = [
        body["lora_path"] for route, _, body in server.requests if route == "load_lora_adapter"
    ]
    assert Path(place).parent == tmp_path / "vllm-adapters" and not list(
        tmp_path.glob("vllm-adapters/*")
    )


def test_an_evaluation_whose_server_does_not_see_the_folder_stores_nothing(
    serve, ask, tiny, sft, rm, pairs, tmp_path, capsys, monkeypatch
):
    """The command line: one line that names the folder; then the same command with a folder that both see."""
    server = serve(sees=tmp_path / "shared")
    ask(server)
    sizes = "--max_response_length 6 --lora_r 4 --eval_prompts 4"
    words = f"evaluate --model {tiny.model} --dataset {pairs} --sft {sft} --rm {rm} --policies copy={sft} {sizes}"
    evaluate = f"{words} --sampler {NAME} --output_dir {tmp_path}/answers".split()
    assert main(evaluate) == 2
    shown = capsys.readouterr().err
    assert (
        "No adapter found for" in shown
        and str(tmp_path / "adapters") in shown
        and "must see this folder" in shown
    )
    assert not list(tmp_path.glob("answers/responses/*/*.jsonl")) and not server.adapters
    monkeypatch.setenv("VLLM_FOLDER", str(tmp_path / "shared"))
    assert not main(evaluate)
    assert (
        len(list(tmp_path.glob("answers/responses/*/settings.json"))) == 2 and not server.adapters
    )


def test_a_held_out_prompt_that_is_too_long_for_the_server_is_told_before_anything_is_trained(
    serve, ask, tiny, tmp_path, capsys
):
    (data := tmp_path / "data").mkdir()
    for part, word in (("train", "so "), ("test", "so " * 60)):
        rows = [{"prompt": f"{word}{i}", "chosen": " yes", "rejected": " no"} for i in range(20)]
        append_lines(data / f"{part}.jsonl", rows)
    ask(serve(max_length=50))
    options = f"--sampler {NAME} --max_response_length 6 --lora_r 4"
    assert (
        main(
            f"run --model {tiny.model} --dataset {data} {options} --output_dir {tmp_path}/run".split()
        )
        == 2
    )
    shown = capsys.readouterr().err
    assert (
        shown.count("\n") == 1
        and "maximum context length is 50" in shown
        and not (tmp_path / "run").exists()
    )


def test_a_whole_run_and_an_evaluation(serve, tiny, pairs, tmp_path, monkeypatch):
    """The command line, with two servers: every stage, then the stored policies; nothing is asked for twice."""
    one, two = serve(), serve()
    monkeypatch.setenv("VLLM_URL", f"{one.url}, {two.url}/")
    short = "--updates 2 --batch_size 4 --sft_epochs 0.2 --rm_epochs 0.2 --sft_batch_size 4 --rm_batch_size 4"
    sizes = f"--max_response_length 24 --lora_r 4 --eval_prompts 4 --sampler {NAME}"
    run = tmp_path / "run"
    assert not main(
        f"run --model {tiny.model} --dataset {pairs} {short} {sizes} --output_dir {run}".split()
    )
    labels = [name.rpartition("-")[0] for name in one.names("load_lora_adapter")]
    assert labels == ["policy"] * 5
    asked = len(one.names("completions")), len(two.names("completions"))
    assert asked == (1 + 4 + 4, 1 + 4 + 4)
    rows = RunFolder.open(run / "ma-ppo").metrics()
    assert all(row["sampler_difference"] < 1e-5 for row in rows)
    evaluate = f"evaluate --sft {run} --rm {run} --policies {run} {sizes} --output_dir {tmp_path}/evaluated"
    assert not main(evaluate.split())
    assert len(one.names("completions")) == asked[0] + 4
    one.close(), two.close()
    assert not main(evaluate.split())  # all is stored
    folders = [
        json.loads(path.read_text())
        for path in tmp_path.glob("evaluated/responses/*/settings.json")
    ]
    assert len(folders) == 2 and all(settings["engine"] == "vllm" for settings in folders)


def other_base(tiny):
    torch.manual_seed(1)
    return nudge(load_base(tiny).requires_grad_(True), 1, 0.02).requires_grad_(False)


@pytest.mark.parametrize(
    ("server", "words", "parts"),
    [
        ({"max_rank": 4}, "--lora_r 8", ["LoRA rank 8 is greater than max_lora_rank 4"]),
        ({"lora": False}, "--lora_r 4", ["Not Found", "--enable-lora"]),
        ({"max_length": 40}, "--lora_r 4", ["maximum context length is 40"]),
        ({"sees": "/nowhere"}, "--lora_r 4", ["No adapter found", "it must see this folder"]),
        ({"base": "other"}, "--lora_r 4", ["nats a token from the policy's", "--dtype float32"]),
    ],
    ids=["rank", "no LoRA", "length", "folder", "base"],
)
def test_a_server_that_cannot_serve_the_run_is_told_before_anything_is_trained(
    serve, ask, tiny, pairs, tmp_path, capsys, server, words, parts
):
    if "base" in server:
        server["base"] = other_base(tiny)
    ask(server := serve(**server))
    options = f"--sampler {NAME} --max_response_length 24 {words}"
    before = sorted(tmp_path.rglob("*"))
    assert (
        main(
            f"run --model {tiny.model} --dataset {pairs} {options} --output_dir {tmp_path}/run".split()
        )
        == 2
    )
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and all(
        part in shown for part in [f"--sampler {NAME}: {server.url}/v1/: ", *parts]
    ), shown
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("", "VLLM_URL: not set"),
        ("here", "VLLM_URL here: not an address"),
        ("http://localhost:1,http://me:x@h", "VLLM_URL http://me:x@h: not an address"),
        ("http://h/v1", "VLLM_URL http://h/v1: not an address"),
    ],
)
def test_addresses_that_are_none(monkeypatch, url, parts):
    monkeypatch.setenv("VLLM_URL", url)
    fails(
        lambda: OwnSampler(NAME),
        f"--sampler {NAME}: {parts}",
        "export addresses such as http://localhost:8000",
    )


def test_a_trial_names_the_one_server_of_two_that_has_another_model(serve, make, tiny, tokenizer):
    servers = serve(), serve(base=other_base(tiny))
    trainer = make(*servers)
    sampling = dataclasses.replace(trainer.sampling, seed_names=("trial",))
    line = f"{servers[1].url}/v1/: the log-probabilities are"
    fails(lambda: trainer.sampler.try_out(trainer.models.policy, tokenizer, ["a"], sampling), line)


# All weights


@pytest.fixture
def full(tiny, full_models, tokenizer, ask, vllm, monkeypatch):
    """A function that makes a trainer of all weights whose responses come from these servers."""

    def trainer(*servers, **changes):
        ask(*servers)
        monkeypatch.setattr(vllm, "RETRIES", 1)
        base = load_base(dataclasses.replace(tiny, finetune="full"))
        models = build_models(base, *full_models)
        rates = {"policy_learning_rate": 1e-3, "warmup_updates": 0}
        return build(models, tokenizer, sampler=OwnSampler(NAME), **rates | changes)

    return trainer


@pytest.fixture(scope="module")
def full_models(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    options = dataclasses.replace(tiny, finetune="full")
    nudge(new_policy(load_base(options), options), 1, 0.02).save_pretrained(folder / "sft")
    reward_model = new_reward_model(load_base(options), folder / "sft")
    nudge(reward_model, 2, 0.02).save_pretrained(folder / "rm")
    return folder / "sft", folder / "rm"


def try_out(trainer, tokenizer):
    sampling = dataclasses.replace(trainer.sampling, seed_names=("trial",))
    trainer.sampler.try_out(trainer.models.policy, tokenizer, ["a"], sampling)


def test_every_server_takes_all_weights_of_every_update(serve, full, tmp_path):
    servers = serve(), serve()
    rows = full(*servers).train()
    assert len(rows) == 3 and max(row["sampler_difference"] for row in rows) < 1e-5
    for server in servers:
        places = server.names("collective_rpc")
        assert len(set(places)) == len(places) == 3  # a new name for every update
        assert len(server.names("reset_prefix_cache")) == 3
        assert len(server.names("completions")) == 6
    assert not list(tmp_path.glob("adapters/*"))


def test_a_server_whose_model_has_no_head_of_its_own_gets_weights_without_one(
    serve, full, tokenizer
):
    """It refuses the first folder, with its repetition, and no other; a run that tries it out first knows."""
    server = serve()
    server.headless = True
    trainer = full(server)
    try_out(trainer, tokenizer)
    assert len(server.names("collective_rpc")) == 3
    rows = trainer.train()
    assert len(rows) == 3 and max(row["sampler_difference"] for row in rows) < 1e-5
    assert len(server.names("collective_rpc")) == 6


def test_a_server_that_keeps_old_weights_ends_the_run_before_a_step(serve, full):
    server = serve()
    trainer = full(server)
    plain = trainer.optimizer_step

    def forgetful(*args):
        row = plain(*args)
        server.routes["collective_rpc"] = lambda body: (200, {"results": [None]})
        return row

    trainer.optimizer_step = forgetful
    fails(trainer.train, "--sampler vllm: ", "nats a token from the policy's")
    assert len(trainer.history) == 1


FAULTS_OF_WEIGHTS = {
    "development mode off": ({"dev": False}, {}, ["reloads no weights", "VLLM_SERVER_DEV_MODE=1"]),
    "tied": ({}, {"tied": True}, ["nats a token", "keeps old weights"]),
    "old weights": ({}, {"forgets": True}, ["nats a token", "keeps old weights"]),
    "folder": ({"sees": "/nowhere"}, {}, ["does not reload", "it must see this folder"]),
}


@pytest.mark.parametrize(
    ("server", "faults", "parts"), FAULTS_OF_WEIGHTS.values(), ids=FAULTS_OF_WEIGHTS
)
def test_a_trial_shows_what_keeps_a_server_from_all_weights(
    serve, full, tokenizer, server, faults, parts
):
    """Of two servers the line names the one at fault, and the policy is afterwards as it was."""
    bad = serve(**server)
    for name, value in faults.items():
        setattr(bad, name, value)
    trainer = full(serve(), bad)
    before = [weight.clone() for weight in trainer.models.policy.parameters()]
    fails(lambda: try_out(trainer, tokenizer), f"{bad.url}/v1/", *parts)
    after = trainer.models.policy.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_whole_run_and_an_evaluation_of_all_weights(serve, ask, tiny, pairs, tmp_path):
    server = serve()
    ask(server)
    run, sizes = tmp_path / "run", "--max_response_length 24 --eval_prompts 4 --sampler vllm"
    short = "--updates 2 --batch_size 4 --sft_epochs 0.2 --rm_epochs 0.2 --sft_batch_size 4"
    words = f"run --model {tiny.model} --finetune full --dataset {pairs} {short} {sizes}"
    assert not main(f"{words} --rm_batch_size 4 --output_dir {run}".split())
    # a trial, two updates, and the evaluation of SFT and MA-PPO
    assert len(server.names("collective_rpc")) == 5
    rows = RunFolder.open(run / "ma-ppo").metrics()
    assert all(row["sampler_difference"] < 1e-5 for row in rows)
    evaluate = f"evaluate --sft {run} --rm {run} --policies {run} {sizes}"
    assert not main(f"{evaluate} --output_dir {tmp_path}/evaluated".split())
    assert len(server.names("collective_rpc")) == 7
    assert not list(tmp_path.glob("adapters/*"))


# A real server: benchmarks/vllm_server.sh starts one for the CPU

URL = os.environ.get("MARLHF_VLLM_URL", "")
MODEL = Path(os.environ.get("MARLHF_REAL_MODELS", "")) / "SmolLM2-135M-Instruct"
needs_vllm = pytest.mark.skipif(
    not (URL and (MODEL / "config.json").is_file()), reason="needs a vLLM server's URL"
)


@pytest.fixture(scope="module")
def real_policy():
    """SmolLM2 with an adapter that changes its probabilities."""
    torch.manual_seed(0)
    options = ModelConfig(model=str(MODEL), lora_r=8)
    return nudge(new_policy(load_base(options), options), 0, 0.01)


@pytest.mark.real
@needs_vllm
@pytest.mark.parametrize(
    "shape", [{"temperature": 1.0, "top_k": 0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}]
)
def test_first_tokens_of_a_real_server_have_the_distribution_of_generate(
    real_policy, vllm, monkeypatch, shape
):
    """2,000 of each; tokens that came less than 10 times count as one."""
    tokenizer, prompts = load_tokenizer(str(MODEL)), ["My favourite food is"] * 2000
    monkeypatch.setenv("VLLM_URL", URL)
    sampling, engine = Sampling(1, **shape), vllm.Servers()
    named = dataclasses.replace(sampling, seed_names=tuple(map(str, range(2000))))
    ours = engine(real_policy, tokenizer, prompts, named)
    torch.manual_seed(0)
    theirs = generate(real_policy, tokenizer, prompts, sampling)
    counts = [Counter(rollout.response_ids[:, 0].tolist()) for rollout in (ours, theirs)]
    often = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 10]
    rows = [
        [*(count[token] for token in often), 2000 - sum(count[token] for token in often)]
        for count in counts
    ]
    table = [column for column in zip(*rows) if sum(column)]
    result = chi2_contingency(table)
    print(
        f"{shape}: chi2 {result.statistic:.1f}, {result.dof} degrees of freedom, p {result.pvalue:.3f}"
    )
    assert result.dof > 4 and result.pvalue > 0.001


@pytest.mark.real
@needs_vllm
def test_a_run_with_a_real_server(pairs, vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_URL", URL)
    short = "--sft_epochs 0.2 --rm_epochs 0.2 --sft_batch_size 4 --rm_batch_size 4 --updates 2 --batch_size 4"
    sizes = "--max_response_length 12 --eval_prompts 2 --sft_learning_rate 1e-4 --policy_learning_rate 5e-4"
    words = f"run --model {MODEL} --dataset {pairs} --sampler {NAME} {sizes} {short}"
    (client,) = vllm.Servers().clients
    before = {model.id for model in client.models.list()}
    assert not main(f"{words} --output_dir {tmp_path}/run".split())
    rows = RunFolder.open(tmp_path / "run" / "ma-ppo").metrics()
    assert len(rows) == 2 and all(row["sampler_difference"] < 1e-4 for row in rows)
    assert {model.id for model in client.models.list()} == before  # no adapter stays


FULL_URL = os.environ.get("MARLHF_VLLM_FULL_URL", "")


@pytest.mark.real
@pytest.mark.skipif(
    not (FULL_URL and (MODEL / "config.json").is_file()),
    reason="needs the URL of a server of weights",
)
def test_a_run_of_all_weights_with_a_real_server(pairs, tmp_path, monkeypatch):
    """Two updates: the server must have taken over the weights of the first."""
    monkeypatch.setenv("VLLM_URL", FULL_URL)
    short = "--sft_epochs 0 --rm_epochs 0.1 --rm_batch_size 4 --updates 2 --batch_size 4"
    sizes = "--max_response_length 12 --eval_prompts 2 --policy_learning_rate 1e-5"
    words = f"run --model {MODEL} --dataset {pairs} --finetune full --sampler {NAME} {sizes}"
    assert not main(f"{words} {short} --output_dir {tmp_path}/run".split())
    rows = RunFolder.open(tmp_path / "run" / "ma-ppo").metrics()
    assert len(rows) == 2 and all(row["sampler_difference"] < 1e-4 for row in rows)
