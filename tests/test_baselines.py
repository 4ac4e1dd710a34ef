"""DPO, RLOO and GRPO through TRL: what they start from, what their reference is, what they are rewarded for."""

import copy
import math
import os
import shutil
import signal
from itertools import islice
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import fails, nudge
from small_runs import early_letters, timeless
from transformers import TrainerCallback

from marlhf_lite.config.commands import COMMANDS, OPTIONS, option_names
from marlhf_lite.experiments import pipeline
from marlhf_lite.experiments.context import RunContext
from marlhf_lite.experiments.inputs import check_groups
from marlhf_lite.extras.baselines.dpo import dpo_row, dpo_trainer
from marlhf_lite.extras.baselines.rloo_grpo import SampledReward, group_row, group_trainer
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.loading import load_policy, load_score_model
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rewards import FunctionReward, ModelReward
from marlhf_lite.training.rollout import Sampling, from_texts, generate, prompt_stream
from marlhf_lite.training.safeguards import check_start
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.interrupts import Stopped
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.seals import seal

METHODS = ("rloo", "grpo")
GROUP_KEYS = set(
    "update score_mean score_std gold_mean response_length eos_rate generated_tokens tokens_per_second seconds "
    "tokens policy_loss policy_grad_norm entropy clip_fraction".split()
)
DPO_KEYS = set(
    "update policy_loss policy_grad_norm accuracy margin log_ratio_chosen log_ratio_rejected generated_tokens seconds "
    "tokens_per_second".split()
)


def adapter(model, name="default"):
    """Copies of an adapter's weights, by parameter name."""
    return {
        k.replace(f".{name}.", "."): p.detach().clone()
        for k, p in model.named_parameters()
        if f".{name}." in k
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self):
        self.first = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.first = self.first or {
            k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None
        }


@pytest.fixture
def model_reward(base, rm):
    return ModelReward(ScalarHeadModel(load_score_model(base, rm)))


@pytest.fixture
def make(base, sft, tokenizer, texts, tmp_path):
    """A group trainer, its model and the rollouts it scores; keyword arguments are options, else of the trainer."""

    def build(
        method="rloo", reward=None, limit=6, prompts=None, seed=0, tokenizer=tokenizer, **changes
    ):
        few = {
            "updates": 2,
            "batch_size": 8,
            "micro_batch_size": 8,
            "warmup_updates": 1,
            "policy_learning_rate": 0.01,
        }
        few |= {"max_response_length": limit, "seed": seed, "checkpoint_every": 0}
        group = COMMANDS[method](**few | changes)
        model, own, rollouts = load_policy(base, sft), reward or FunctionReward(early_letters), []

        def seen(rollout):
            rollouts.append(rollout)
            return own(rollout)

        function = SampledReward(seen, model, tokenizer, group, early_letters)
        prompts = texts.prompts if prompts is None else prompts
        trainer = group_trainer(model, tokenizer, prompts, function, group, tmp_path)
        return SimpleNamespace(
            trainer=trainer, model=model, rollouts=rollouts, group=group, method=method
        )

    return build


def move(model, policy):
    """A policy that has moved away from its start; `model` then has the same weights."""
    nudge(policy, 5, 0.05)
    for name, parameter in policy.named_parameters():
        model.get_parameter(name).data.copy_(parameter.data)
    return policy


def rows(made):
    """Train, and the rows of metrics."""
    made.trainer.train()
    return [
        group_row(logs, made.group) for logs in made.trainer.state.log_history if "loss" in logs
    ]


def logprobs(model, rollout):
    return (
        PolicyModel(model)(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0]
        * rollout.mask
    )


@pytest.fixture
def work(base, tokenizer, texts, tmp_path):
    """A context of a command on a few prompts and pairs; keyword arguments are options."""

    def build(model=base, method="rloo", **changes):
        given = {
            "updates": 2,
            "batch_size": 8,
            "warmup_updates": 1,
            "checkpoint_every": 0,
            "max_response_length": 6,
        }
        given |= {
            "policy_learning_rate": 0.01,
            "dpo_learning_rate": 0.01,
            "dpo_batch_size": 2,
        } | changes
        assert given.keys() <= OPTIONS
        command = COMMANDS[method]
        options = command(**{name: given[name] for name in option_names(command) & given.keys()})
        pairs = {
            "prompt": texts.prompts,
            "chosen": texts.responses,
            "rejected": texts.responses[::-1],
        }
        splits = {part: datasets.Dataset.from_dict(pairs) for part in ("rm", "ppo", "test")}
        task = Task("few", datasets.DatasetDict(splits), early_letters, {})
        folder = tmp_path / "work"
        if not options.resume:
            shutil.rmtree(folder, ignore_errors=True)
        run = RunFolder.open(folder) if folder.exists() else RunFolder.create(folder, {})
        return RunContext(options, run, task, tokenizer, lambda: model, resume=bool(options.resume))

    return build


STAGES = {"rloo": pipeline.group_stage, "grpo": pipeline.group_stage, "dpo": pipeline.dpo_stage}


@pytest.mark.parametrize(("method", "least"), [("rloo", 0), ("rloo", 4), ("grpo", 4)])
def test_no_response_of_a_group_ends_before_its_minimum(make, base, sft, tokenizer, method, least):
    """The end token is the one that is likeliest at first, and only the likeliest token is drawn."""
    prompts = ["The cat sat"] * 4
    first = generate(
        load_policy(base, sft), tokenizer, prompts[:1], Sampling(1, temperature=0)
    ).response_ids
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(int(first))
    made = make(
        method, updates=1, min_response_length=least, prompts=prompts, tokenizer=ending, top_k=1
    )
    made.trainer.train()
    (rollout,) = made.rollouts
    assert rollout.lengths.min() > 4 if least else rollout.lengths.max() == 1


# -- start, reference, what moves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, at_temperature", [("rloo", False), ("grpo", True)])
def test_kl_is_to_the_sft_model(make, base, sft, method, at_temperature):
    """Of a policy that has moved, against the estimators on the sampled tokens; the base would give another."""
    made = make(
        method,
        updates=1,
        policy_learning_rate=1e-9,
        temperature=0.7,
        logprobs_at_temperature=at_temperature,
    )
    policy = move(made.model, load_policy(base, sft))
    row, temperature = rows(made)[0], 0.7 if at_temperature else 1.0
    rollout = made.rollouts[0]

    def kl(reference):
        roles = (PolicyModel(policy), PolicyModel(reference))
        now, ref = (
            r(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1], temperature)[0]
            for r in roles
        )
        gap = (now - ref).double()[rollout.mask]
        terms = gap if method == "rloo" else (-gap).exp() - 1 + gap
        return terms.sum().item() / len(rollout)

    with torch.no_grad():
        got = row["kl_k1" if method == "rloo" else "kl_k3"]
        assert got == pytest.approx(kl(load_policy(base, sft, trainable=False)), rel=1e-3, abs=1e-3)
        with policy.disable_adapter():
            of_base = PolicyModel(policy)(
                rollout.tokens, rollout.attention_mask, rollout.mask.shape[1]
            )[0]
        assert (of_base - logprobs(load_policy(base, sft), rollout))[rollout.mask].abs().max() > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_entropy_and_kl_are_means_over_all_tokens(make, often_ends, base, sft, method):
    """However the update is split: responses of different lengths, of a policy that has moved, one to eight a pass."""
    found = []
    for size in (1, 2, 8):
        made = make(
            method,
            updates=1,
            policy_learning_rate=1e-9,
            micro_batch_size=size,
            tokenizer=often_ends,
            limit=40,
        )
        policy = move(made.model, load_policy(base, sft))
        found.append(rows(made)[0])
    rollout, reference = made.rollouts[0], load_policy(base, sft)
    with torch.no_grad():
        inputs = {"input_ids": rollout.tokens, "attention_mask": rollout.attention_mask}
        log_p = policy(**inputs).logits[:, rollout.prompt_width - 1 : -1].double().log_softmax(-1)
        gap = (logprobs(policy, rollout) - logprobs(reference, rollout)).double()[rollout.mask]
    entropy = -(log_p.exp() * log_p).sum(-1)[rollout.mask].mean().item()
    kl = (gap if method == "rloo" else (-gap).exp() - 1 + gap).sum().item() / len(rollout)
    assert len(set(rollout.lengths.tolist())) > 1
    for row in found:
        assert row["entropy"] == pytest.approx(entropy, rel=1e-4)
        assert row["kl_k1" if method == "rloo" else "kl_k3"] == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_that_of_the_equations(make, base, sft, model_reward, method):
    """Groups of two in two micro-batches of three, with clipped scores, a KL, and a policy that has moved."""
    made = make(method, model_reward, updates=1, batch_size=6, micro_batch_size=3, num_generations=2, kl_coef=0.3,
                max_grad_norm=1e9, temperature=1.0, score_clip=0.1)  # fmt: skip
    policy = move(made.model, load_policy(base, sft))
    seen = Gradients()
    made.trainer.add_callback(seen)
    made.trainer.train()
    rollout = made.rollouts[0]
    now, ref = logprobs(policy, rollout), logprobs(load_policy(base, sft), rollout).detach()
    gap = now - ref
    scores = model_reward(rollout)
    assert scores.abs().max() > 0.1 > scores.abs().min()
    scores = scores.clamp(-0.1, 0.1).tolist()
    if method == "rloo":
        returns = [s - 0.3 * k for s, k in zip(scores, gap.sum(1).tolist())]
        terms = [-(returns[i] - returns[i ^ 1]) * now[i].sum() for i in range(6)]
    else:
        terms = []
        for i in range(6):
            pair = torch.tensor([scores[i], scores[i ^ 1]])
            advantage = ((pair[0] - pair.mean()) / (pair.std() + 1e-4)).item()
            k3 = ((-gap[i]).exp() - 1 + gap[i]) * rollout.mask[i]
            # its gradient is that of the reverse KL
            unbiased = k3 * (now[i] - now[i].detach()).exp()
            terms.append((-advantage * now[i].sum() + 0.3 * unbiased.sum()) / rollout.lengths[i])
    (sum(terms) / 6).backward()
    expected = {k: p.grad for k, p in policy.named_parameters() if p.grad is not None}
    assert expected.keys() == seen.first.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            seen.first[name], gradient, rtol=2e-3, atol=1e-4 * float(gradient.abs().max())
        )


def test_the_distance_at_the_start_is_that_of_a_token():
    """Rounding adds up over a long response; a short one may not be as far."""
    check_start(10.0, 512)
    with pytest.raises(InputError, match="0.250 nats a token"):
        check_start(-2.0, 8)


@pytest.mark.parametrize("method", [*METHODS, "dpo"])
def test_a_policy_that_comes_apart_ends_the_run_in_a_line_and_is_not_kept(
    work, sft, method, monkeypatch, capsys
):
    """Half way: two updates are fine, then weights that give no number."""
    place = work(method=method, updates=4, warmup_ratio=0.0)

    def spoil(self, args, state, control, model=None, **unused):
        if state.global_step == 2:
            next(p for p in model.parameters() if p.requires_grad).data.fill_(torch.nan)

    monkeypatch.setattr(pipeline.Recorder, "on_step_begin", spoil)
    monkeypatch.setattr(pipeline.Recorder, "start", 0.0, raising=False)
    with pytest.raises(InputError, match="not finite: start again with a lower learning rate"):
        STAGES[method](place, sft, FunctionReward(early_letters))
    # the bar is closed, so the message begins a new line
    assert capsys.readouterr().err.endswith("\n")
    rows = RunFolder.open(place.path / method).metrics()
    assert [row["update"] for row in rows][:2] == [1, 2] and all(
        row["policy_loss"] is not None for row in rows[:2]
    )
    assert not (place.path / method / "policy").exists()


# -- reward, groups, sampling -----------------------------------------------------------------------------------------


@pytest.fixture
def often_ends(make, tokenizer):
    """A tokenizer whose EOS is a token that the untrained model samples often."""
    made, other = make(updates=1), copy.deepcopy(tokenizer)
    made.trainer.train()
    other.eos_token = tokenizer.convert_ids_to_tokens(
        made.rollouts[0].response_ids.flatten().mode().values.item()
    )
    return other


@pytest.mark.parametrize("method", METHODS)
def test_scores_belong_to_the_sampled_tokens(make, model_reward, often_ends, method):
    tokenizer = often_ends
    made = make(method, model_reward, tokenizer=tokenizer)
    for row, rollout in zip(rows(made), made.rollouts, strict=True):
        kept = [ids[m].tolist() for ids, m in zip(rollout.response_ids, rollout.mask)]
        assert rollout.responses == tokenizer.batch_decode(kept, skip_special_tokens=True)
        assert [row[-1] == tokenizer.eos_token_id for row in kept] == rollout.ended.tolist()
        assert not any(tokenizer.eos_token_id in row[:-1] for row in kept)
        prompts = [ids[m.bool()].tolist() for ids, m in zip(rollout.tokens, rollout.attention_mask)]
        encoded = encode_prompts(tokenizer, rollout.prompts)
        assert prompts == [p + r for p, r in zip(encoded, kept)]
        assert row["score_mean"] == pytest.approx(model_reward(rollout).mean().item(), abs=1e-5)
        assert row["response_length"] == pytest.approx(rollout.lengths.float().mean().item())
        assert row["eos_rate"] == pytest.approx(rollout.ended.float().mean().item())
        assert row["tokens"] == int(rollout.lengths.sum())
    assert any(0 < rollout.ended.float().mean() < 1 for rollout in made.rollouts), (
        "both kinds are wanted"
    )


def test_prompts_come_in_ppos_order(make, texts):
    made = make(updates=3, batch_size=8, num_generations=2, limit=2, seed=3)
    made.trainer.train()
    assert [p for rollout in made.rollouts for p in rollout.prompts[::2]] == list(
        islice(prompt_stream(texts.prompts, 3), 12)
    )


def test_sampling_options_reach_generation(make):
    """With only the likeliest token all responses of a group are equal, whatever the model's defaults are."""
    made = make(top_k=1, updates=1, limit=4)
    made.trainer.train()
    responses = made.rollouts[0].response_ids.reshape(2, 4, -1)
    assert (responses == responses[:, :1]).all() and made.rollouts[0].mask.shape[1] <= 4
    config = make(temperature=0.3, top_p=0.9, top_k=7).trainer.generation_config
    assert (config.temperature, config.top_p, config.top_k) == (0.3, 0.9, 7)


# -- DPO --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dpo(base, sft, tokenizer, texts, tmp_path):
    """A DPO trainer on all pairs at once, its model, its options."""

    def build(limit=6, **changes):
        few = {"dpo_batch_size": 6, "dpo_epochs": 2, "dpo_learning_rate": 0.01}
        options = COMMANDS["dpo"](
            **few | {"max_response_length": limit, "checkpoint_every": 0} | changes
        )
        pairs = {
            "prompt": texts.prompts,
            "chosen": texts.responses,
            "rejected": texts.responses[::-1],
        }
        model = load_policy(base, sft)
        trainer = dpo_trainer(
            model, tokenizer, datasets.Dataset.from_dict(pairs), options, tmp_path
        )
        return SimpleNamespace(trainer=trainer, model=model, options=options)

    return build


def dpo_rows(made):
    made.trainer.train()
    return [
        dpo_row(logs, made.options) for logs in made.trainer.state.log_history if "loss" in logs
    ]


def test_dpo_loss_is_that_of_the_equation(dpo, base, sft, tokenizer, texts):
    """Of a policy that has moved, on our tokens: cut responses have no EOS."""
    made = dpo(limit=4, dpo_beta=0.3, dpo_epochs=1)
    policy = move(made.model, load_policy(base, sft))
    row = dpo_rows(made)[0]
    sides = [
        from_texts(tokenizer, texts.prompts, r, limit=4)
        for r in (texts.responses, texts.responses[::-1])
    ]
    assert not sides[0].ended.all()
    reference = load_policy(base, sft, trainable=False)
    with torch.no_grad():
        chosen, rejected = (
            (logprobs(policy, s) - logprobs(reference, s)).sum(1).tolist() for s in sides
        )
    terms = [math.log1p(math.exp(-0.3 * (a - b))) for a, b in zip(chosen, rejected)]
    assert row["policy_loss"] == pytest.approx(sum(terms) / 6, rel=1e-4)
    assert row["log_ratio_chosen"] == pytest.approx(sum(chosen) / 6, rel=1e-3, abs=1e-3)
    assert row["log_ratio_rejected"] == pytest.approx(sum(rejected) / 6, rel=1e-3, abs=1e-3)
    assert row["margin"] == pytest.approx(
        0.3 * (sum(chosen) - sum(rejected)) / 6, rel=1e-3, abs=1e-3
    )
    assert row["accuracy"] == pytest.approx(sum(a > b for a, b in zip(chosen, rejected)) / 6)


def test_dpo_learns_the_same_however_many_pairs_a_pass_has(dpo, base, sft):
    """Six pairs in a step of at most eight: in one pass, in 4 + 2, and one by one."""
    found = []
    for size in (0, 4, 1):
        made = dpo(dpo_batch_size=8, dpo_epochs=1, per_device_train_batch_size=size)
        move(made.model, load_policy(base, sft))
        made.trainer.add_callback(gradients := Gradients())
        found.append((dpo_rows(made)[0], gradients.first))
    (row, whole), *others = found
    for other, split in others:
        assert other == pytest.approx(row, rel=1e-3, abs=1e-5) and split.keys() == whole.keys()
        assert all(torch.allclose(split[name], whole[name], rtol=1e-3, atol=1e-5) for name in whole)


# -- stages and records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, "dpo"])
def test_a_stage_leaves_ppos_records_and_the_adapter_alone(work, base, sft, model_reward, method):
    folder = STAGES[method](work(method=method), sft, model_reward)
    run = RunFolder.open(folder.parent)
    assert folder == run.path / "policy" and run.path.name == method and "versions" in run.config
    assert (folder / "tokenizer.json").is_file() and not [
        path for path in folder.iterdir() if path.is_dir()
    ]
    assert not same(adapter(load_policy(base, folder)), adapter(load_policy(base, sft)))
    found, total = run.metrics(), 0
    if method == "dpo":
        assert [row["update"] for row in found] == [1, 2, 3]
        assert all(row.keys() >= DPO_KEYS and row["generated_tokens"] == 0 for row in found)
        return
    kl = "kl_k1" if method == "rloo" else "kl_k3"
    assert [row["update"] for row in found] == [1, 2] and abs(found[0][kl]) < 1e-3
    for row in found:
        assert row.keys() >= GROUP_KEYS | {kl}
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in row.values())
        total += round(row["response_length"] * 8)
        assert row["generated_tokens"] == total and row["seconds"] > 0
    samples = run.samples()
    assert len(samples) == 4 and len({row["prompt"] for row in samples}) == 1
    for row in samples:
        assert (
            row["update"] == 1 and row["spans"] == [[0, row["tokens"]]] and 1 <= row["tokens"] <= 6
        )
        assert isinstance(row["score"], float) and isinstance(row["ended"], bool)


@pytest.mark.parametrize("method, by_signal", [("rloo", False), ("dpo", True), ("grpo", True)])
def test_resumed_run_is_the_uninterrupted_one(
    work, base, sft, model_reward, method, by_signal, monkeypatch
):
    """Broken off in update 4 of 5, after the checkpoint of update 2, or by SIGTERM, with a checkpoint after update 4.

    Rows, samples and weights are the same.
    """
    options = {"updates": 5, "checkpoint_every": 2, "eval_every": 2, "dpo_epochs": 5 / 3}
    runs = []
    for stop in (None, 4):
        if stop:
            shutil.rmtree(runs[0][0].parent)
            with monkeypatch.context() as patch:
                patch.setattr(
                    pipeline.Recorder, "on_step_begin", interrupting(stop, by_signal=by_signal)
                )
                with pytest.raises(Stopped if by_signal else KeyboardInterrupt):
                    STAGES[method](work(method=method, **options), sft, model_reward)
            rows = RunFolder.open(runs[0][0].parent).metrics()
            assert [row["update"] for row in rows] == [1, 2, 3, 4][: 3 + by_signal]
            assert (runs[0][0].parent / "checkpoints" / "checkpoint-4").exists() == by_signal
        given = {"resume": "work"} if stop else {}
        folder = STAGES[method](work(method=method, **options, **given), sft, model_reward)
        run = RunFolder.open(folder.parent)
        runs.append(
            (
                folder,
                timeless(run.metrics()),
                run.samples(),
                run.tests(),
                adapter(load_policy(base, folder)),
            )
        )
    whole, resumed = runs
    assert [row["update"] for row in whole[1]] == [1, 2, 3, 4, 5] and [
        row["update"] for row in whole[3]
    ] == [2, 4, 5]
    assert whole[1:4] == resumed[1:4] and same(whole[4], resumed[4])


def test_a_checkpoint_of_another_number_of_processes_is_refused(work, sft):
    reward, options = FunctionReward(early_letters), {"updates": 1, "checkpoint_every": 1}
    folder = pipeline.group_stage(work(**options), sft, reward).parent
    [state] = folder.glob("checkpoints/checkpoint-1/rng_state*.pth")
    for process in (0, 1):  # as two processes name theirs
        shutil.copy(state, state.with_name(f"rng_state_{process}.pth"))
    state.unlink()
    seal(state.parent)
    again = work(**options | {"updates": 2, "resume": "work"})
    fails(
        lambda: pipeline.group_stage(again, sft, reward),
        "checkpoint-1: made by 2 processes, not 1",
        "--num_processes 2",
    )


@pytest.mark.parametrize("method", ["rloo", "dpo"])
def test_a_run_that_goes_back_forgets_what_came_later(work, sft, model_reward, method):
    """To the checkpoint of update 1 of 3, as 2 and 3 are damaged: one line, then the user deletes them."""
    options = {"updates": 3, "checkpoint_every": 1, "save_total_limit": 9, "dpo_epochs": 1}
    run = RunFolder.open(STAGES[method](work(method=method, **options), sft, model_reward).parent)
    whole = timeless(run.metrics())
    (run.path / pipeline.DONE).unlink()
    options |= {"resume": "work"}
    for update in (3, 2):
        damaged = run.path / "checkpoints" / f"checkpoint-{update}"
        os.truncate(damaged / "trainer_state.json", update)
        before = sorted(run.path.rglob("*")), run.metrics()
        fails(
            lambda: STAGES[method](work(method=method, **options), sft, model_reward),
            f"checkpoint-{update}: it is damaged (trainer_state.json): delete it, and --resume takes the one before",
        )
        assert (sorted(run.path.rglob("*")), run.metrics()) == before
        shutil.rmtree(damaged)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline.Recorder, "on_step_begin", interrupting(2))
        STAGES[method](work(method=method, **options), sft, model_reward)
    assert [path.name for path in run.path.glob("checkpoints/checkpoint-*")] == ["checkpoint-1"]
    assert timeless(run.metrics()) == whole[:1]
    # killed while it was written
    (run.path / "checkpoints" / "checkpoint-1" / "hashes.json").unlink()
    STAGES[method](work(method=method, **options), sft, model_reward)
    assert timeless(run.metrics()) == whole


@pytest.mark.parametrize(
    "file, error", [("pytorch_model_fsdp.bin", "made under FSDP"), ("rng_state_1.pth", "made by 2")]
)
def test_a_wrong_launch_deletes_nothing(work, sft, file, error):
    """Later rows of the logs, and what a killed save left, stay."""
    options = {"checkpoint_every": 1, "save_total_limit": 9, "dpo_epochs": 1}
    run = RunFolder.open(pipeline.dpo_stage(work(method="dpo", **options), sft).parent)
    (run.path / pipeline.DONE).unlink()
    for update in (2, 3):
        # killed while they were written
        (run.path / "checkpoints" / f"checkpoint-{update}" / "hashes.json").unlink()
    first = run.path / "checkpoints" / "checkpoint-1"
    (first / file).touch()
    (first / "hashes.json").unlink()
    seal(first)
    before = sorted(run.path.rglob("*")), run.metrics()
    again = work(method="dpo", **options, resume="work")
    fails(lambda: pipeline.dpo_stage(again, sft), f"checkpoint-1: {error}", ": launch it with")
    assert (sorted(run.path.rglob("*")), run.metrics()) == before


@pytest.mark.parametrize("method, rows", [("rloo", 8), ("grpo", 8), ("dpo", 2)])
def test_where_memory_ends_half_the_rows_a_pass_learn_the_same(
    work, base, sft, model_reward, method, rows, monkeypatch
):
    """From the last checkpoint on; `rows` a pass do not fit from update 2 on, and half of them do."""
    options = {"updates": 3, "checkpoint_every": 1, "dpo_epochs": 1}
    found = []
    for size in (99, rows):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        monkeypatch.setattr(pipeline.Recorder, "on_step_begin", interrupting(2, error, size))
        context = work(method=method, **options)
        shutil.rmtree(context.path / method, ignore_errors=True)
        folder = STAGES[method](context, sft, model_reward)
        found.append((RunFolder.open(folder.parent).metrics(), adapter(load_policy(base, folder))))
    (whole, weights), (halved, others) = found
    assert [row["update"] for row in halved] == [row["update"] for row in whole] == [1, 2, 3]
    for name in ("policy_loss", "policy_grad_norm"):
        assert [row[name] for row in halved] == pytest.approx(
            [row[name] for row in whole], rel=1e-3, abs=1e-5
        )
    assert all(torch.allclose(weights[name], others[name], atol=1e-4) for name in weights)


def interrupting(update, error=KeyboardInterrupt, rows=0, by_signal=False):
    """`Recorder.on_step_begin` that raises `error` when an update begins, if it has as many rows a pass.

    `by_signal`: SIGTERM is sent instead.
    """
    original = pipeline.Recorder.on_step_begin

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == update and args.per_device_train_batch_size >= rows:
            if not by_signal:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, args, state, control, **kwargs)

    return on_step_begin


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, size, processes, option",
    [
        (32, 5, 1, "--num_generations 5"),
        (3, 4, 1, "--num_generations 4"),
        (12, 4, 8, "--batch_size 12"),
    ],
)
def test_batches_of_no_whole_groups_are_refused(batch, size, processes, option):
    with pytest.raises(InputError, match=option) as error:
        check_groups(size, batch, processes)
    assert "multiple of" in str(error.value) and "\n" not in str(error.value)
    check_groups(size, size * processes, processes)
