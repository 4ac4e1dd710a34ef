"""Several processes: given the same responses, the update of one process; and a whole run that learns."""

import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import PROMPTS, RESPONSES, changed, fails, nudge, snapshot
from one_update import one_more, trainer_of
from safetensors.torch import load_file
from sharded_command import give_responses
from small_runs import timeless
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer, RLOOTrainer

from marlhf_lite.cli import main
from marlhf_lite.config.commands import ExportCommand
from marlhf_lite.experiments.export import export_policy
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_policy,
    load_score_model,
    new_policy,
    new_reward_model,
)
from marlhf_lite.training.rollout import from_texts
from marlhf_lite.training.trl_trainers import check_checkpoint
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.seals import seal

HERE = Path(__file__).parent


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


# On a CPU this variable and `--multi_gpu` are what makes accelerate start several processes, over gloo.
VARIABLES = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1"}


@cache
def warm_launcher():
    command = [sys.executable, "-P", HERE / "warm_launch.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(
        command, env=os.environ | VARIABLES, text=True, start_new_session=True, **pipes
    )


def launch_warm(words, *, cwd, timeout):
    """`accelerate launch words...` by a process that has done the large imports."""
    server = warm_launcher()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        asked = {
            "folder": str(cwd),
            "environment": os.environ | VARIABLES,
            "files": [*map(str, files)],
            "words": words,
        }
        print(json.dumps(asked), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(server.pid, signal.SIGKILL)
            warm_launcher.cache_clear()
            pytest.fail(f"no end after {timeout} seconds: {files[1].read_text()[-3000:]}")
        return subprocess.CompletedProcess(
            words, int(server.stdout.readline()), *(x.read_text() for x in files)
        )


def launch(processes, *words, cwd=HERE.parent, timeout=300, succeeds=True, warm=True):
    """Run `python words...` as so many processes over gloo, as `accelerate launch` does.

    With `warm=False` it is accelerate's command itself, and torchrun starts the processes.
    """
    options = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no"]
    options += ["--multi_gpu", "--main_process_port", str(free_port())] if processes > 1 else []
    options += [*map(str, words)]
    if warm:
        done = launch_warm(options, cwd=cwd, timeout=timeout)
    else:
        command, how = (
            [sys.executable, "-m", "accelerate.commands.launch"],
            {"capture_output": True, "text": True},
        )
        done = subprocess.run(
            [*command, *options], env=os.environ | VARIABLES, timeout=timeout, cwd=cwd, **how
        )
    assert (done.returncode == 0) == succeeds, done.stderr[-3000:]
    return done


def flat(tensors):
    return torch.cat([t.double().flatten() for t in tensors])


CASES = {
    "plain": ({}, {}),
    "micro-batches of one": ({"micro_batch_size": 1}, {}),
    "macro losses, uneven micro-batches": (
        {"micro_batch_size": 3},
        {"ratio": "macro", "value_target": "macro"},
    ),
    "whitened": ({"whiten": True}, {}),
    "without a critic": ({"micro_batch_size": 3}, {}),
    "full, sharded, bfloat16": ({"policy_learning_rate": 1e-6}, {}),
    "full, sharded": ({}, {}),
    "full, sharded, micro-batches of one": ({"micro_batch_size": 1}, {}),
    "full, sharded, what fits": ({"micro_batch_size": 0}, {}),
}
EXACT = [case for case in CASES if "bfloat16" not in case and "without" not in case]


@pytest.fixture(scope="module")
def whole(tiny, tokenizer, tmp_path_factory):
    """Options and folders of a fully fine-tuned SFT model and reward model."""
    options, folder = replace(tiny, finetune="full"), tmp_path_factory.mktemp("whole")
    base = load_base(options)
    nudge(new_policy(base, options), 1, 0.02).save_pretrained(folder / "sft")
    tokenizer.save_pretrained(folder / "sft")
    nudge(new_reward_model(base, folder / "sft"), 2, 0.02).save_pretrained(folder / "rm")
    return options, folder / "sft", folder / "rm"


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny, base, sft, rm, whole, tokenizer):
    """What one and two processes make of eight ragged responses, by case."""
    folder, jobs = tmp_path_factory.mktemp("jobs"), {}
    prompts, responses = [*PROMPTS, "one more", "and more"], [*RESPONSES, "it is", "no no no"]
    scores = torch.tensor([0.7, -1.2, 4.0, 0.1, -3.0, 0.4, 1.1, 0.2])
    for name, (ppo, how) in CASES.items():
        options, *places = whole if "full" in name else (tiny, sft, rm)
        roles = build_models(load_base(options), *places)
        rollout = from_texts(tokenizer, prompts, responses, limit=12)
        with torch.no_grad():
            log_p = roles.reference(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[
                0
            ]
        rollout = vars(replace(rollout, ref_logprobs=log_p, scores=scores))
        jobs[name] = {
            "model": vars(options),
            "sft": str(places[0]),
            "rm": str(places[1]),
            "how": how,
            "ppo": {"batch_size": 8, "micro_batch_size": 4, "warmup_updates": 0} | ppo,
            "rollout": rollout,
            "sharded": "sharded" in name,
            "without_critic": name == "without a critic",
            "precision": "bf16" if "bfloat16" in name else "no",
        }
    torch.save(jobs, folder / "jobs.pt")
    for processes in (1, 2):
        launch(processes, HERE / "one_update.py", folder)
    return (
        folder,
        [torch.load(folder / f"result-{n}.pt", weights_only=True) for n in (1, 2)],
        jobs["full, sharded"],
    )


@pytest.mark.parametrize("case", EXACT)
def test_two_processes_make_the_update_of_one(results, case):
    one, two = (result[case] for result in results[1])
    assert not one["sharded"] and two["sharded"] == ("sharded" in case)
    for name in ("policy", "critic"):
        ours, theirs = flat(two["grads"][name]), flat(one["grads"][name])
        assert (ours - theirs).norm() < 1e-5 * theirs.norm() > 0
        # Adam's first step is a sign, which rounding may turn where a gradient is about 0.
        assert (flat(two["weights"][name]) - flat(one["weights"][name])).abs().mean() < 1e-5
    assert two["row"] == pytest.approx(one["row"], rel=1e-5, abs=1e-5)


def test_a_user_s_loss_of_the_policy_alone_is_averaged_over_processes(results):
    """Processes wait for all gradients, also of a critic that no loss reads."""
    one, two = (result["without a critic"] for result in results[1])
    ours, theirs = flat(two["grads"]["policy"]), flat(one["grads"]["policy"])
    assert (ours - theirs).norm() < 1e-5 * theirs.norm() > 0
    assert not flat(two["grads"]["critic"]).any() and two["row"]["value_loss"] == 0


def test_spread_gradients_are_summed_in_each_pass(results):
    """FSDP2 keeps the others whole in each process, where the optimizer does not see them."""
    two = results[1][1]["full, sharded, micro-batches of one"]
    assert two["summed"] == [True] * 4


def test_mixed_precision_computes_in_bfloat16_and_loses_no_small_step(results):
    """Frozen models are in bfloat16; what trains is in float32, where steps of 1e-6 are no rounding error."""
    plain, mixed = (results[1][1][case] for case in ("full, sharded", "full, sharded, bfloat16"))
    frozen, trained = (["torch.bfloat16"], ["torch.float32"])
    assert mixed["formats"] == {
        "policy": trained,
        "critic": trained,
        "reference": frozen,
        "reward": frozen,
    }
    assert set(map(tuple, plain["formats"].values())) == {tuple(trained)}
    for name in ("policy", "critic"):
        ours, theirs = flat(mixed["grads"][name]), flat(plain["grads"][name])
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
    # A weight whose row of the embedding is in no text has no gradient.
    assert sum(share > 0.99 for share in mixed["moved"]) > 0.9 * len(mixed["moved"])


def test_a_process_whose_memory_ends_does_not_leave_the_others_waiting(results):
    """It tries again in its dry run, more often than the other; both then take the smaller micro-batch."""
    assert [result["micro_batch_size"] for result in results[1]] == [2, 2]


def test_sharded_run_trains_saves_and_goes_on(results, base, tokenizer):
    """FSDP2 with full fine-tuning, two processes on the CPU: generation, tests, checkpoints, resume, saved models."""
    folder, (_, two), _ = results
    whole, first, second = two["histories"]
    assert [row["update"] for row in second] == [1, 2, 3, 4, 5, 6] and second[:4] == first
    assert timeless(second) == timeless(whole)
    for name in ("policy", "critic"):
        one, other = (folder / run / name / "model.safetensors" for run in ("whole", "run"))
        assert one.read_bytes() == other.read_bytes()
    assert all(row["skipped_steps"] == 0 and row["policy_grad_norm"] > 0 for row in second)
    run = RunFolder.open(folder / "run")
    assert [row["update"] for row in run.tests()] == [2, 4, 6] and len(run.metrics()) == 6
    policy, critic = (run.path / name for name in ("policy", "critic"))
    assert load_policy(base, policy).state_dict()
    assert load_score_model(base, critic).score.weight.shape == (1, base.config.hidden_size)
    assert not [*(run.path / "checkpoints").glob(".*")]


@pytest.fixture
def shards(results, tmp_path):
    """A copy of the sharded run, and its last checkpoint, to which each of the two processes wrote a file."""
    shutil.copytree(results[0] / "run", tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "update-000006"
    assert sorted(path.name for path in last.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    sizes = [path.stat().st_size for path in last.glob("*.distcp")]
    assert max(sizes) < 0.6 * sum(sizes)
    return tmp_path / "run", last


def test_a_checkpoint_of_two_processes_goes_on_with_one(results, shards, capsys):
    """With the same weights and moments; what one process saves then has the form of one."""
    _, (_, two), job = results
    trainer = trainer_of(job, Accelerator(), RunFolder.open(shards[0]), 6)
    assert timeless(trainer.train(resume=True)) == timeless(two["histories"][2])
    assert "update-000006: made by 2 processes" in capsys.readouterr().out
    for role, weights in one_more(job, trainer).items():
        ours, theirs = flat(weights), flat(two["one more"][role])
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()
    trainer = trainer_of(job, Accelerator(), RunFolder.open(shards[0]), 7)
    assert len(trainer.train(resume=True)) == 7
    assert [path.name for path in sorted(shards[1].parent.iterdir())][-1] == "update-000007.pt"


def test_a_checkpoint_of_shards_is_a_policy(results, shards, whole, tmp_path):
    """For `marlhf export` and `marlhf evaluate`."""
    options, policy = whole[0], resolve_adapter_dir("policy", str(shards[1]))
    saved, base = load_policy(load_base(options), shards[0] / "policy"), load_base(options)
    assert not changed(load_policy(base, policy), snapshot(saved))
    export_policy(ExportCommand(model=options.model, finetune="full"), policy, tmp_path / "model")
    words = f"evaluate --model {options.model} --finetune full --sft {whole[1]} --policies last={policy} --size 40"
    assert not main(
        f"{words} --max_response_length 4 --eval_prompts 2 --output_dir {tmp_path}/e".split()
    )
    assert not changed(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), snapshot(saved))


class Intruder:
    def __reduce__(self):
        return os.mkdir, ("intruder",)


def intrude(path):
    """Put code into a file that is read by pickle, and seal the folder again."""
    (path / ".metadata").write_bytes(pickle.dumps(Intruder()))
    seal(path)


FAULTS = {
    "missing": (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "cut": (lambda path: os.truncate(path / "__0_0.distcp", 999), "__0_0.distcp"),
    "zeros": (lambda path: (path / "__0_0.distcp").write_bytes(bytes(10**6)), "__0_0.distcp"),
    "not torch's": (intrude, "it is damaged (.metadata)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_whose_shards_are_damaged(
    results, shards, whole, fault, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    damage, line = FAULTS[fault]
    damage(shards[1])
    trainer = trainer_of(results[2], Accelerator(), RunFolder.open(shards[0]), 6)
    fails(
        lambda: trainer.train(resume=True),
        str(shards[1]),
        line,
        "delete it, and --resume takes the one before",
    )
    fails(lambda: load_policy(load_base(whole[0]), shards[1]), str(shards[1]), line)
    assert len(RunFolder.open(shards[0]).metrics()) == 6 and not (tmp_path / "intruder").exists()


def test_no_process_holds_more_than_its_share_of_a_model(results):
    """Between the passes of layers. While a policy samples, what lies outside its layers is whole: half of this one."""
    shares = results[1][1]["shares"]
    assert len(shares) == 6 * 8  # moments, by models and their layers
    sampling = {("before sampling", "policy"), ("after sampling", "policy")}
    assert {key for key, share in shares.items() if share > 0.6} == sampling


STAGES = ("sft", "rm-last", "rm-all", "dpo")
COUNTS = (5, 7)  # rows in batches of four: the last one has one, or three


@pytest.fixture(scope="module")
def epochs(tmp_path_factory, tiny, sft):
    """An epoch of each stage on each number of rows, by one, two and four processes."""
    folder = tmp_path_factory.mktemp("epochs")
    rows = [
        {
            "prompt": f"Number {i}:",
            "chosen": " yes" * (1 + i % 3),
            "rejected": " no" + " never" * (i % 4),
        }
        for i in range(max(COUNTS))
    ]
    job = {"model": tiny.model, "sft": str(sft), "rows": rows, "stages": STAGES, "counts": COUNTS}
    torch.save(job, folder / "jobs.pt")
    for processes in (1, 2, 4):
        launch(processes, HERE / "one_epoch.py", folder)
    return {n: torch.load(folder / f"epochs-{n}.pt", weights_only=True) for n in (1, 2, 4)}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_repeat_no_row(epochs, stage, count, processes):
    """An epoch on any number of rows is that of one process: each row is trained on once, padding never."""
    one, several = (epochs[n][stage, count] for n in (1, processes))
    assert len(one[0]) == len(several[0]) == -(-count // 4)
    read = {"loss", "grad_norm", "accuracy", "margin", "rewards/chosen", "rewards/accuracies"}
    for ours, theirs in zip(several[0], one[0], strict=True):
        names = read & theirs.keys()
        assert {name: ours[name] for name in names} == pytest.approx(
            {name: theirs[name] for name in names}, rel=1e-3, abs=1e-4
        )
    for name, weight in one[1].items():
        # Adam's first steps are signs, which rounding may turn where a gradient is about 0.
        assert (several[1][name.removeprefix("module.")] - weight).abs().mean() < 1e-5


MODELS = {"sft": "sft", "rm": "rm", "dpo": "dpo/policy"}  # stage -> where it leaves its model


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """SFT, reward model and DPO of all weights by two processes: a `whole` run, and some that stop.

    `resumed` goes on after the stop.
    """
    folder = tmp_path_factory.mktemp("stages")
    sizes = "--finetune full --size 80 --max_response_length 12 --seed 1 --per_device_train_batch_size 1".split()
    options = {
        "sft": "--sft_epochs 0.75 --sft_batch_size 4 --sft_learning_rate 1e-4".split(),
        "rm": f"--sft {folder}/sft-whole --rm_epochs 0.75 --rm_batch_size 4 --rm_learning_rate 1e-4".split(),
        "dpo": f"--sft {folder}/sft-whole --dpo_epochs 0.75 --dpo_batch_size 4 --dpo_learning_rate 1e-4".split(),
    }
    options["dpo"] += ["--eval_every", "0"]  # no test while training
    stops = {"whole": [], "stopped": ["STOP_AT=2"], "resumed": ["STOP_AT=2"]}
    words = []
    for stage, own in options.items():
        for name, variables in stops.items():
            words += [
                *variables,
                stage,
                *sizes,
                *own,
                "--output_dir",
                folder / f"{stage}-{name}",
                "+",
            ]
        words += [stage, "--resume", folder / f"{stage}-resumed", "+"]
    launch(2, HERE / "sharded_command.py", *words[:-1], cwd=folder, timeout=600)
    return folder


@pytest.mark.parametrize("stage", MODELS)
def test_a_stopped_stage_goes_on_bit_by_bit(stages, stage):
    one, other = (
        stages / f"{stage}-{name}" / MODELS[stage] / "model.safetensors"
        for name in ("whole", "resumed")
    )
    assert one.read_bytes() == other.read_bytes()


def test_the_reward_model_s_records_are_of_all_processes(stages, tmp_path):
    words = "--finetune full --size 80 --max_response_length 12 --seed 1 --per_device_train_batch_size 1".split()
    words += f"--sft {stages}/sft-whole --rm_epochs 0.75 --rm_batch_size 4 --rm_learning_rate 1e-4".split()
    assert main(["rm", *words, "--output_dir", str(tmp_path / "one")]) == 0
    one, two = (
        json.loads((path / "rm" / "log.json").read_text())
        for path in (tmp_path / "one", stages / "rm-whole")
    )
    for name in ("loss", "accuracy", "margin"):
        assert [row[name] for row in two] == pytest.approx(
            [row[name] for row in one], rel=1e-3, abs=1e-5
        ), name


def test_each_process_writes_half_of_a_checkpoint(stages):
    for place in ("sft-stopped/sft", "rm-stopped/rm", "dpo-stopped/dpo/checkpoints"):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            sizes = [
                path.stat().st_size
                for path in (stages / place / "checkpoint-2" / part).glob("*.distcp")
            ]
            assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes)


def test_a_checkpoint_needs_the_launch_that_it_was_made_with(tmp_path):
    without, under = (SimpleNamespace(is_fsdp_enabled=fsdp) for fsdp in (False, True))
    (tmp_path / "rng_state.pth").touch()
    check_checkpoint(without, tmp_path)
    fails(
        lambda: check_checkpoint(under, tmp_path),
        f"{tmp_path}: made without FSDP: launch it without fsdp2.yaml",
    )
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").touch()
    check_checkpoint(under, tmp_path)
    fails(
        lambda: check_checkpoint(without, tmp_path),
        f"{tmp_path}: made under FSDP: launch it with fsdp2.yaml",
    )


def test_a_checkpoint_of_sft_and_reward_model_is_read(stages, whole, tmp_path, capsys):
    """As a policy and as a reward model; a process without FSDP does not go on from it."""
    base, kinds = load_base(whole[0]), {"sft": load_policy, "rm": load_score_model}
    for stage, load in kinds.items():
        place = stages / f"{stage}-stopped" / stage / "checkpoint-2"
        model, end = (
            load(base, resolve_adapter_dir(stage, str(p)))
            for p in (place, stages / f"{stage}-whole")
        )
        assert type(model) is type(end) and len(changed(model, snapshot(end))) > 0
        assert all(
            (x - y).abs().max() < 0.01
            for x, y in zip(model.parameters(), end.parameters(), strict=True)
        )
        assert main([stage, "--resume", str(stages / f"{stage}-stopped")]) == 2
        shown = capsys.readouterr()
        assert (
            "checkpoint-2: made under FSDP: launch it with fsdp2.yaml" in shown.err
            and "made by" not in shown.out
        )


def test_dpo_saves_weights_that_processes_share(stages, whole):
    places = ("sft-whole/sft", "dpo-whole/dpo/policy")
    start, end = (load_policy(load_base(whole[0]), stages / place) for place in places)
    assert changed(end, snapshot(start)) and all(p.isfinite().all() for p in end.parameters())


def test_stages_go_on_from_shards_with_one_process(stages, tmp_path):
    shutil.copytree(stages, tmp_path / "stages")
    words = [
        word
        for stage in MODELS
        for word in (stage, "--resume", tmp_path / "stages" / f"{stage}-stopped", "+")
    ]
    done = launch(1, HERE / "sharded_command.py", *words[:-1])
    assert done.stdout.count("checkpoint-2: made by 2 processes, not 1") == len(MODELS)
    for stage, place in MODELS.items():
        ours, theirs = (
            flat(
                load_file(
                    tmp_path / "stages" / f"{stage}-{name}" / place / "model.safetensors"
                ).values()
            )
            for name in ("stopped", "whole")
        )
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_group_methods_train_weights_that_processes_share(whole, tmp_path, monkeypatch):
    """RLOO and GRPO learn from the same responses what one process learns, and a stopped run goes on bit by bit."""
    (tmp_path / "by_length.py").write_text(
        "def ninth(prompts, responses):\n    return [len(r) / 9 for r in responses]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options, sft, _ = whole
    words = f"--model {options.model} --finetune full --sft {sft} --reward by_length:ninth --batch_size 8".split()
    words += "--size 80 --max_response_length 6 --policy_learning_rate 1e-4 --warmup_updates 1 --kl_coef 0.1".split()
    words += "--updates 3 --eval_every 2 --test_prompts 3 --seed 1 --micro_batch_size 2 --output_dir".split()
    commands = []
    for method in ("rloo", "grpo"):
        commands += ["GIVEN=1", method, *words, method, "+"]
        commands += ["GIVEN=1", "STOP_AT=2", method, *words, f"{method}-stopped", "+"]
        resumed = ["--resume", f"{method}-stopped", "--reward", "by_length:ninth"]
        commands += ["GIVEN=1", method, *resumed, "+"]
    launch(2, HERE / "sharded_command.py", *commands[:-1], cwd=tmp_path, timeout=600)
    start = load_file(sft / "model.safetensors")
    for method, trainer in {"rloo": RLOOTrainer, "grpo": GRPOTrainer}.items():
        with give_responses(trainer):
            assert main([method, *words, f"{method}-alone"]) == 0
        runs = [
            tmp_path / name / method for name in (method, f"{method}-stopped", f"{method}-alone")
        ]
        two, resumed, one = [timeless(RunFolder.open(run).metrics()) for run in runs]
        assert resumed == two and len(two) == 3
        assert len([*runs[1].glob("checkpoints/checkpoint-2/optimizer_0/*.distcp")]) == 2
        two, one = (
            {f"{i} {k}": x for i, row in enumerate(rows) for k, x in row.items()}
            for rows in (two, one)
        )
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
        files = [run / "policy" / "model.safetensors" for run in runs]
        assert files[0].read_bytes() == files[1].read_bytes()
        two, one = (load_file(file) for file in (files[0], files[2]))
        apart, moved = (
            flat(two[name] - other[name] for name in start).norm() for other in (one, start)
        )
        assert apart < 0.01 * moved


def test_a_fault_in_one_process_ends_a_sharded_run(whole, tmp_path):
    """With its message: the process does not wait for the others to save the weights that they share."""
    (tmp_path / "odd.py").write_text(
        "import os\ncalls = []\n"
        "def fails_once(prompts, responses):\n"
        "    calls.append(prompts)\n"
        "    if len(calls) == 2 and os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('process 1 has lost its data')\n"
        "    return [len(r) for r in responses]\n"
    )
    options, sft, rm = whole
    words = ["ppo", "--model", options.model, "--finetune", "full", "--sft", sft, "--rm", rm]
    words += [
        "--reward",
        "odd:fails_once",
        "--batch_size",
        "4",
        "--updates",
        "3",
        "--max_response_length",
        "4",
    ]
    words += ["--size", "40", "--policy_learning_rate", "1e-4", "--critic_learning_rate", "1e-4"]
    script = HERE / "sharded_command.py"
    done = launch(
        2, script, *words, "--output_dir", "run", cwd=tmp_path, timeout=180, succeeds=False
    )
    assert (
        "marlhf: error: reward odd:fails_once: raised RuntimeError: process 1 has lost its data"
        in done.stderr
    )
    assert len(RunFolder.open(tmp_path / "run" / "ppo").metrics()) == 1


GAME = """
import os

RANK = os.environ["RANK"]


class Game:
    steps = 0

    def reset(self, prompts):
        return [{"turns": 0} for _ in prompts]

    def step(self, states, texts):
        self.steps += 1
        if RANK == "1" and self.steps == 5 and not os.path.exists("mended"):
            raise RuntimeError("out of cards")
        for state in states:
            state["turns"] += 1
        dones = [state["turns"] == (3 if RANK == "1" else 1) for state in states]
        return [" go on"] * len(states), [1.0] * len(states), dones
"""


def test_an_environment_answers_processes_that_share_the_weights(whole, tmp_path):
    """Each has its own number of turns and layers are gathered all the same; a fault in one ends both at once."""
    (tmp_path / "mine.py").write_text(GAME)
    options, sft, _ = whole
    words = ["ppo", f"--model={options.model}", "--finetune=full", f"--sft={sft}"]
    words += ["--environment=mine:Game", "--termination=turn", "--critic_init=sft"]
    words += ["--batch_size=4", "--updates=3", "--size=40", "--max_response_length=4"]
    words += ["--policy_learning_rate=1e-4", "--critic_learning_rate=1e-4"]
    words += ["--eval_every=2", "--test_prompts=3", "--output_dir=run"]
    script = HERE / "sharded_command.py"
    done = launch(2, script, *words, cwd=tmp_path, timeout=300, succeeds=False)
    assert "--environment mine:Game: turn 2 of" in done.stderr and "out of cards" in done.stderr
    assert "--resume continues from here" in done.stderr
    (tmp_path / "mended").touch()
    resumed = ("ppo", "--resume", "run", "--environment", "mine:Game")
    launch(2, script, *resumed, cwd=tmp_path, timeout=300)
    run = RunFolder.open(tmp_path / "run" / "ppo")
    assert [(row["update"], row["turns"]) for row in run.metrics()] == [
        (1, 2.0),
        (2, 2.0),
        (3, 2.0),
    ]
    assert [row["update"] for row in run.tests()] == [2, 3]


SAMPLER = """
from marlhf_lite.training.rollout import generate


def made():
    return lambda *args: generate(*args)
"""


def test_processes_that_share_the_weights_sample_by_a_user_s_code(whole, tmp_path):
    """As without it: layers are gathered outside."""
    (tmp_path / "mine.py").write_text(
        SAMPLER + "def length(prompts, texts):\n    return [len(x) for x in texts]\n"
    )
    options, sft, rm = whole
    words = ["ppo", f"--model={options.model}", "--finetune=full", f"--sft={sft}", f"--rm={rm}"]
    words += ["--reward=mine:length", "--batch_size=4", "--updates=2", "--size=40"]
    words += ["--max_response_length=4", "--policy_learning_rate=1e-3"]
    plain_run = [*words, "--output_dir=plain"]
    own_run = [*words, "--sampler=mine:made", "--output_dir=own"]
    commands = [*plain_run, "+", *own_run]
    launch(2, HERE / "sharded_command.py", *commands, cwd=tmp_path, timeout=120)
    plain, own = (RunFolder.open(tmp_path / name / "ppo").metrics() for name in ("plain", "own"))
    assert len(own) == 2 and timeless(own) == timeless(plain)


def test_a_signal_to_one_process_stops_all_behind_the_same_update(tiny, sft, tmp_path):
    """With a checkpoint of both, though the other one was asked nothing."""
    (tmp_path / "odd.py").write_text(
        "import os, signal\ncalls = []\n"
        "def stops(prompts, responses):\n"
        "    calls.append(prompts)\n"
        "    if len(calls) == 2 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [len(r) for r in responses]\n"
    )
    words = [
        "ppo",
        "--model",
        tiny.model,
        "--sft",
        sft,
        "--reward",
        "odd:stops",
        "--batch_size",
        "4",
        "--size",
        "40",
    ]
    words += [
        "--updates",
        "9",
        "--max_response_length",
        "4",
        "--critic_init",
        "sft",
        "--output_dir",
        "run",
    ]
    done = launch(2, "-m", "marlhf_lite", *words, cwd=tmp_path, timeout=120, succeeds=False)
    assert done.stderr.count("marlhf ppo --resume run --reward odd:stops continues") == 2
    assert [path.name for path in (tmp_path / "run" / "ppo" / "checkpoints").iterdir()] == [
        "update-000002.pt"
    ]
    assert len(RunFolder.open(tmp_path / "run" / "ppo").metrics()) == 2
    assert (tmp_path / "run" / "ppo" / "policy" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def launched(tmp_path_factory, tiny, sft):
    """A run by `accelerate launch -m marlhf_lite ppo` on two processes, with a reward that is easy to learn."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "letters.py").write_text(
        "def early(prompts, responses):\n"
        "    return [sum(c in 'abcdefghijklm' for c in r) / max(len(r), 1) for r in responses]\n"
    )
    options = {
        "model": tiny.model,
        "sft": sft,
        "reward": "letters:early",
        "size": 200,
        "max_response_length": 6,
        "batch_size": 64,
        "micro_batch_size": 16,
        "updates": 12,
        "temperature": 1.0,
        "top_k": 0,
        "policy_learning_rate": 0.03,
        "critic_learning_rate": 0.03,
        "warmup_updates": 1,
        "kl_coef": 0,
        "n": 3,
        "checkpoint_every": 5,
        "output_dir": folder / "run",
    }
    config = folder / "config.yaml"
    config.write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
    launch(2, "-m", "marlhf_lite", "ppo", "--config", config, cwd=folder, warm=False)
    return folder


def test_a_run_on_two_processes_learns(launched):
    rows = RunFolder.open(launched / "run" / "ppo").metrics()
    scores = [row["score_mean"] for row in rows]
    assert len(rows) == 12 and sum(scores[-3:]) / 3 > 0.03 + sum(scores[:3]) / 3
    assert rows[-1]["generated_tokens"] == sum(row["tokens"] for row in rows)


def test_it_goes_on_with_as_many_processes_and_no_other(launched):
    before = (launched / "run" / "ppo" / "metrics.jsonl").read_bytes()
    more = ["-m", "marlhf_lite", "ppo", "--resume", launched / "run", "--reward", "letters:early"]
    more += ["--updates", "14"]
    alone = subprocess.run(
        [sys.executable, *map(str, more)], capture_output=True, text=True, cwd=launched
    )
    assert (
        alone.returncode == 2
        and "made by 2 processes, not 1: launch it with --num_processes 2" in alone.stderr
    )
    launch(2, *more, cwd=launched)
    after = (launched / "run" / "ppo" / "metrics.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 14
