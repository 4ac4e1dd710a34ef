"""Options of PPO: each against the equations in plain float64, a closed form, or the run it must equal."""

import math
import random
from collections import Counter
from itertools import chain, islice

import pytest
import torch
from accelerate import Accelerator
from conftest import PROMPTS, changed, snapshot
from plain_update import (
    NAMES,
    TIGHT,
    far,
    learner,
    options,
    record,
    restore,
    trainables,
)
from small_runs import batches, build, early_letters, timeless

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.macro import FixedNGram, LargestChange
from marlhf_lite.models.actor_critic import build_models
from marlhf_lite.training.rollout import Sampling, generate, generate_in_batches
from marlhf_lite.utils.run_folder import RunFolder


@pytest.fixture
def make(roles, tokenizer):
    return lambda run=None, **changes: build(roles, tokenizer, run, **changes)


# -- scores -----------------------------------------------------------------------------------------------------------


# -- KL ---------------------------------------------------------------------------------------------------------------


def test_a_kl_ceiling_ends_the_run(make, base, sft, rm, tokenizer, tmp_path, capsys):
    """After the first update beyond it, with a checkpoint and a test; going on does not go on."""
    run = RunFolder.create(tmp_path / "run", {})
    changes = {"updates": 30, "kl_ceiling": 1.0, "kl_coef": 0.0, "checkpoint_every": 50, "temperature": 1.0}
    changes |= {"policy_learning_rate": 0.05, "warmup_updates": 0, "eval_every": 50, "test_prompts": ["b"], "length": 4}
    trainer = make(run, **changes)
    *before, last = trainer.train()
    assert all(row["kl_k1"] <= 1.0 for row in before) and last["kl_k1"] > 1.0 and last["update"] < 30
    assert trainer.checkpoints.updates() == [last["update"]] == [row["update"] for row in run.tests()]
    assert f"stopped at update {last['update']}" in "".join(capsys.readouterr())
    again = build(build_models(base, sft, rm), tokenizer, RunFolder.open(run.path), **changes)
    assert len(again.train(resume=True)) == last["update"] == len(run.metrics())


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1e-3, 0.05, 1e9])
def test_gradients_are_clipped_by_norm(moved, batch, most):
    """The direction stays; a norm below the limit is left alone."""
    made, whole = learner(moved, options(max_grad_norm=most)), learner(moved, options())
    start, steps = trainables(moved), record(made)
    row = made.learn(batch, FixedNGram(3)(batch.mask))
    restore(moved, start)
    plain = record(whole)
    whole.learn(batch, FixedNGram(3)(batch.mask))
    for name in NAMES:
        ours, theirs = (torch.cat([g.flatten() for g in x[name][0][0]]).double() for x in (steps, plain))
        norm = theirs.norm()
        assert row[f"{name}_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        torch.testing.assert_close(ours, theirs * min(1.0, most / norm), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"num_ppo_epochs": 2}, {"critic_epochs": 3}])
def test_critic_warm_up_trains_the_critic_alone(make, changes):
    trainer, moves = make(updates=4, critic_warmup=2, **changes), []
    update = trainer.update

    def watched(prompts):
        before = {name: snapshot(getattr(trainer.models, name)) for name in NAMES}
        row = update(prompts)
        moves.append([bool(changed(getattr(trainer.models, name), before[name])) for name in NAMES])
        return row

    trainer.update = watched
    history = trainer.train()
    assert moves == [[False, True], [False, True], [True, True], [True, True]]
    assert [row["kl_k3"] < 1e-6 for row in history] == [True, True, True, False]
    steps = [int(trainer.optimizer.state[trainer.parameters[name][0]]["step"]) for name in NAMES]
    each, alone = changes.get("num_ppo_epochs", 1), changes.get("critic_epochs", 1)
    assert steps == [2 * each, 2 * each + 2 * alone]  # no moments of updates that were not made


@pytest.mark.parametrize("kind", ["constant", "linear"])
def test_the_schedule_of_the_policy_begins_when_the_policy_moves(make, kind):
    """With and without a critic that learns alone first, the policy has the same rates; the critic counts on."""

    def rates(updates, critic_warmup):
        small = dict(
            policy_learning_rate=1e-6, critic_learning_rate=1e-6
        )  # the next trainer starts near the reference, too
        options = dict(updates=updates, critic_warmup=critic_warmup, warmup_updates=3, rl_lr_scheduler_type=kind)
        trainer = make(**options, **small)
        seen, update = [], trainer.update

        def watched(prompts):
            row = update(prompts)
            seen.append(
                {g["name"]: g["lr"] / trainer.learning_rates[g["name"]] for g in trainer.optimizer.param_groups}
            )
            return row

        trainer.update = watched
        trainer.train()
        return [[row[name] for row in seen] for name in NAMES]

    (policy, critic), (later, counted_on) = rates(4, 0), rates(6, 2)
    assert later[2:] == pytest.approx(policy) and policy[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert critic == policy and counted_on == pytest.approx(rates(6, 0)[1])


def test_the_last_token_alone(make):
    trainer = make(macro_config=MacroConfig(last_token_alone=True))
    rollout = trainer.score(trainer.generate_rollout(trainer.prompts[:4]))
    macro, expected = trainer.segment(rollout), []
    for whole, length in zip(FixedNGram(2)(rollout.mask).spans(), rollout.lengths.tolist()):
        start = whole[-1][0]
        cut = [(start, length - 1)] if start < length - 1 else []
        expected.append([*whole[:-1], *cut, (length - 1, length)])
    assert macro.spans() == expected


@pytest.mark.parametrize("of", ["values", "logprobs"])
def test_a_rule_that_reads_the_models(make, of):
    """It gets what the policy that sampled, or its critic, says of every token."""
    trainer = make(updates=1, termination=LargestChange(of, 3))
    rollout = trainer.score(trainer.generate_rollout(trainer.prompts[:4]))
    with torch.no_grad():
        whole = trainer.compute_outputs(rollout)
    expected = LargestChange(of, 3)(rollout.mask, **{of: getattr(whole, of)})
    assert torch.equal(trainer.segment(rollout).ids, expected.ids)
    assert trainer.train()[0]["macro_length"] <= 3


# -- prompts and responses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", [1, 2, 4])
def test_each_prompt_is_answered_so_often(make, rollouts):
    asked, given = [], []

    def generator(model, tokenizer, prompts, sampling):
        asked.append(prompts)
        return generate(model, tokenizer, prompts, sampling)

    def reward(rollout):
        given.extend(rollout.responses)
        return rollout.lengths.float()

    make(updates=3, rollouts=rollouts, batch_size=8, generator=generator, reward=reward, length=4).train()
    for prompts in asked:
        drawn = [PROMPTS.count(p) for p in prompts]
        assert len(prompts) == 8 and drawn == [1] * 8
        assert all(prompts[i] == prompts[i - i % rollouts] for i in range(8))
    most = Counter(p for prompts in asked for p in prompts)
    assert max(most.values()) - min(most.values()) <= rollouts and all(n % rollouts == 0 for n in most.values())
    assert len(set(given)) > 8  # they are sampled apart


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_each_batch(make, processes):
    """Disjoint shares of the same draw; each with all answers to its prompts."""
    shares = []
    for rank in range(processes):
        trainer = make(batch_size=6 * 2, rollouts=2)
        trainer.accelerator = Rank(processes, rank)
        shares.append(next(batches(trainer)))
    whole = next(batches(make(batch_size=6 * 2, rollouts=2)))
    assert sorted(p for share in shares for p in share) == sorted(whole)
    assert all(len(share) == 12 // processes and share[::2] == share[1::2] for share in shares)


class Rank:
    """An accelerator's place among processes."""

    def __init__(self, processes, rank):
        self.num_processes, self.process_index = processes, rank


@pytest.mark.parametrize(
    "epochs, rollouts, batch_size, updates", [(1, 1, 2, 3), (2, 1, 4, 3), (0.5, 1, 1, 3), (1, 2, 4, 3), (1.5, 1, 4, 3)]
)
def test_prompt_epochs_are_passes_over_the_prompts(make, epochs, rollouts, batch_size, updates):
    """Six prompts; the last batch may go beyond."""
    trainer = make(prompt_epochs=epochs, rollouts=rollouts, batch_size=batch_size, updates=99)
    assert trainer.total_updates == updates == math.ceil(epochs * 6 * rollouts / batch_size)
    drawn = Counter(chain(*islice(batches(trainer), updates)))
    assert all(drawn[p] >= int(epochs) * rollouts for p in PROMPTS)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6])
def test_generation_in_batches_gives_the_same_responses(roles, tokenizer, texts, size):
    """Greedy, so that noise does not matter: tokens, masks and prompts, however they were padded."""
    model, greedy = roles.policy.model.eval(), Sampling(7, temperature=0)
    whole = generate(model, tokenizer, texts.prompts, greedy)
    parts = generate_in_batches(generate, size, model, tokenizer, texts.prompts, greedy)
    assert parts.prompts == whole.prompts == texts.prompts and parts.responses == whole.responses
    for name in ("attention_mask", "ended", "mask"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    here, there = (x.tokens.masked_fill(x.attention_mask == 0, -1) for x in (parts, whole))
    assert torch.equal(here, there)


# -- memory -----------------------------------------------------------------------------------------------------------


def small_memory(roles, rows, message="CUDA out of memory. Tried to allocate 2.00 GiB."):
    """A pass with gradients of more rows than these does not fit; the sizes that were tried."""
    tried = []

    def hook(_, args, kwargs):
        ids = kwargs["input_ids"]
        if torch.is_grad_enabled():
            tried.append(tuple(ids.shape))
            if len(ids) > rows:
                raise torch.OutOfMemoryError(message)

    roles.policy.model.get_base_model().model.register_forward_pre_hook(hook, with_kwargs=True)
    return tried


@pytest.mark.parametrize("fits, expected", [(99, 12), (8, 6), (3, 3), (2, 1), (1, 1)])
def test_the_dry_run_finds_the_most_that_fits(roles, tokenizer, fits, expected, capsys):
    """By halves; two passes of the longest batch, no weight moved, no gradient and no draw left behind."""
    made = build(roles, tokenizer, micro_batch_size=0, batch_size=12, length=5)
    before, drawn, tried = snapshot(made.actor_critic), torch.get_rng_state(), small_memory(roles, fits)
    assert made.fit_micro_batch_size() == made.micro_batch_size == expected
    longest = max(len(ids) for ids in tokenizer(PROMPTS)["input_ids"])
    assert tried[-1][0] == expected and all(width == longest + 5 for _, width in tried)
    assert [rows for rows, _ in tried].count(expected) == min(2, 12 // expected)  # the second on top of the first
    assert not changed(made.actor_critic, before) and torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in made.actor_critic.parameters()) and not made.optimizer.state
    assert f"micro_batch_size {expected}: the most that fits of 12" in "".join(capsys.readouterr())


@pytest.mark.parametrize("ppo", [{}, {"num_ppo_epochs": 2}])
def test_a_run_that_looks_for_its_micro_batch(base, sft, rm, tokenizer, ppo):
    """Is the run that was given it."""
    histories = []
    for asked, rows in ((0, 2), (2, 99)):
        roles = build_models(base, sft, rm)
        small_memory(roles, rows)
        trainer = build(roles, tokenizer, micro_batch_size=asked, updates=2, **ppo)
        histories.append(timeless(trainer.train()))
        assert trainer.micro_batch_size == 2
    assert histories[0] == histories[1]


@pytest.mark.parametrize("ppo", [{}, {"num_ppo_epochs": 2}])
def test_out_of_memory_halves_the_micro_batch(moved, batch, ppo, capsys):
    """Gradients of the step that failed first are those of one that did not."""
    macro, grads = FixedNGram(3)(batch.mask), []
    start = trainables(moved)
    for rows in (99, 1):
        restore(moved, start)
        made = learner(moved, options(micro_batch_size=6, **ppo))
        if rows == 1:
            tried = small_memory(moved, rows)
        steps = record(made)
        torch.manual_seed(0)
        made.learn(batch, macro)
        grads.append([steps[name][0][0] for name in NAMES])
    assert made.micro_batch_size == 1 and [n for n, _ in tried][:3] == [6, 3, 1]
    for ours, theirs in zip(*grads):
        assert far(ours, theirs) < TIGHT
    assert "micro_batch_size is 3 from here on" in "".join(capsys.readouterr())


def test_other_errors_are_not_taken_for_a_lack_of_memory(moved, batch):
    small_memory(moved, 0, "mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learner(moved, options(micro_batch_size=2)).learn(batch, FixedNGram(3)(batch.mask))


# -- wiring -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_option_runs_together(make):
    """Combinations drawn by chance: finite, and of the promised number of updates."""
    draw = random.Random(0)
    choices = {
        "num_ppo_epochs": [1, 2],
        "num_mini_batches": [1, 2],
        "loss_mean": ["token", "response"],
        "lam_alpha": [0.0, 0.3],
        "critic_lam": [None, 1.0],
        "critic_epochs": [1, 2],
        "weight_decay": [0.0, 0.1],
        "rl_lr_scheduler_type": ["constant", "linear", "cosine"],
        "rollouts": [1, 2],
        "kl_estimator": ["k1", "k3"],
        "whiten": [False, True],
        "critic_warmup": [0, 1],
        "logprobs_at_temperature": [False, True],
        "cliprange_value": [0.0, 0.2],
    }
    trainer = make(gold=early_letters, accelerator=Accelerator())
    for _ in range(4):
        drawn = {name: draw.choice(values) for name, values in choices.items()}
        trainer = make(updates=2, length=4, **drawn)
        for row in trainer.train():
            assert all(math.isfinite(x) for x in row.values()), drawn
            assert row["skipped_steps"] == 0
