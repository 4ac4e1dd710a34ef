"""Options of PPO: each against plain float64, a closed form, or the run it must equal; the optimizer."""

import gc
import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import pytest
import torch
from conftest import PROMPTS, changed, fails, snapshot
from plain_update import NAMES, TIGHT, far, learner, options, record, restore, trainables
from small_runs import batches, build, same, timeless, watch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from marlhf_lite.config.options import RolloutConfig
from marlhf_lite.macro import FixedNGram, LargestChange, MacroActions, Shuffled
from marlhf_lite.models.loading import build_models, load_base
from marlhf_lite.training.environments import Dialogues
from marlhf_lite.training.optimizer import learning_rate_share, make_optimizer
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, from_texts, generate, generate_in_batches
from marlhf_lite.training.safeguards import updates_of_passes
from marlhf_lite.utils.run_folder import RunFolder

# -- a run's course ---------------------------------------------------------------------------------------------------


def test_a_kl_ceiling_ends_the_run(make, base, sft, rm, tokenizer, tmp_path, capsys):
    """After the first update beyond it, with a checkpoint and a test; going on does not go on."""
    run = RunFolder.create(tmp_path / "run", {})
    changes = {
        "updates": 30,
        "kl_ceiling": 1.0,
        "kl_coef": 0.0,
        "checkpoint_every": 50,
        "temperature": 1.0,
    }
    changes |= {
        "policy_learning_rate": 0.05,
        "warmup_updates": 0,
        "eval_every": 50,
        "test_prompts": ["b"],
        "length": 4,
    }
    trainer = make(run, **changes)
    *before, last = trainer.train()
    assert (
        all(row["kl_k1"] <= 1.0 for row in before) and last["kl_k1"] > 1.0 and last["update"] < 30
    )
    assert (
        trainer.checkpoints.updates() == [last["update"]] == [row["update"] for row in run.tests()]
    )
    assert f"stopped at update {last['update']}" in "".join(capsys.readouterr())
    again = build(build_models(base, sft, rm), tokenizer, RunFolder.open(run.path), **changes)
    assert len(again.train(resume=True)) == last["update"] == len(run.metrics())


def test_a_critic_that_learns_alone_in_all_updates_is_refused(roles, tokenizer):
    fails(
        lambda: build(roles, tokenizer, updates=3, critic_warmup=3),
        "--critic_warmup 3: ",
        "in 3 updates",
    )
    fails(
        lambda: build(roles, tokenizer, prompt_epochs=2, critic_warmup=30), "--critic_warmup 30: "
    )


@pytest.mark.parametrize("changes", [{}, {"num_ppo_epochs": 2}, {"critic_epochs": 3}])
def test_critic_warm_up_trains_the_critic_alone(make, changes):
    trainer = make(updates=4, critic_warmup=2, **changes)
    seen = watch(trainer, lambda: [snapshot(getattr(trainer.models, name)) for name in NAMES])
    history = trainer.train()
    moves = [[not same(*weights) for weights in zip(*pair)] for pair in itertools.pairwise(seen)]
    assert moves == [[False, True], [False, True], [True, True], [True, True]]
    assert [row["kl_k3"] < 1e-6 for row in history] == [True, True, True, False]
    steps = [int(trainer.optimizer.state[trainer.parameters[name][0]]["step"]) for name in NAMES]
    each, alone = changes.get("num_ppo_epochs", 1), changes.get("critic_epochs", 1)
    assert steps == [2 * each, 2 * each + 2 * alone]  # no moments of updates that were not made


@pytest.mark.parametrize("kind", ["constant", "linear"])
def test_the_schedule_of_the_policy_begins_when_the_policy_moves(make, kind):
    """With and without a critic that learns alone first, the policy has the same rates; the critic counts on."""

    def rates(updates, critic_warmup):
        # the next trainer starts there, too
        small = {"policy_learning_rate": 1e-6, "critic_learning_rate": 1e-6}
        # rates change by update, not by optimizer step
        small |= {"num_ppo_epochs": 2, "num_mini_batches": 2}
        options = dict(
            updates=updates,
            critic_warmup=critic_warmup,
            warmup_updates=3,
            rl_lr_scheduler_type=kind,
        )
        trainer = make(**options, **small)
        groups = trainer.optimizer.param_groups
        full = {name: getattr(trainer.config, f"{name}_learning_rate") for name in NAMES}
        seen = watch(
            trainer, lambda: {group["name"]: group["lr"] / full[group["name"]] for group in groups}
        )
        trainer.train()
        return [[row[name] for row in seen[1:]] for name in NAMES]

    (policy, critic), (later, counted_on) = rates(4, 0), rates(6, 2)
    assert later[2:] == pytest.approx(policy) and policy[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert critic == policy and counted_on == pytest.approx(rates(6, 0)[1])


def test_the_last_token_alone(make):
    trainer = make(last_token_alone=True)
    rollout = trainer.score(trainer.generate_rollout(trainer.prompts[:4]))
    macro, expected = trainer.segment(rollout), []
    for whole, length in zip(FixedNGram(2)(rollout.mask).spans(), rollout.lengths.tolist()):
        start = whole[-1][0]
        cut = [(start, length - 1)] if start < length - 1 else []
        expected.append([*whole[:-1], *cut, (length - 1, length)])
    assert macro.spans() == expected


@pytest.mark.parametrize("wrap", [lambda rule: rule, Shuffled])
def test_a_wrong_rule_is_named_before_its_macro_actions_are_cut(make, wrap):
    """What splits off the last token, or shuffles, would hide the fault or stumble over it."""
    wrong = {
        "returned Tensor": lambda mask, **context: mask,
        "expected shape": lambda mask, **context: MacroActions.from_lengths([[1]] * len(mask)),
        "response 0, token 1 has 2": lambda mask, **context: MacroActions(
            (2 * FixedNGram(1)(mask).ids).masked_fill(~mask, -1)
        ),
        "left response tokens out": lambda mask, **context: FixedNGram(2)(
            mask & (mask.cumsum(1) < 3)
        ),
    }
    for said, rule in wrong.items():
        trainer = make(last_token_alone=True, termination=wrap(rule), length=8)
        rollout = trainer.score(trainer.generate_rollout(trainer.prompts[:4]))
        fails(partial(trainer.segment, rollout), "termination rule: ", said)


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

    make(
        updates=3, rollouts=rollouts, batch_size=8, sampler=generator, reward=reward, length=4
    ).train()
    for prompts in asked:
        drawn = [PROMPTS.count(p) for p in prompts]
        assert len(prompts) == 8 and drawn == [1] * 8
        assert all(prompts[i] == prompts[i - i % rollouts] for i in range(8))
    most = Counter(p for prompts in asked for p in prompts)
    assert max(most.values()) - min(most.values()) <= rollouts and all(
        n % rollouts == 0 for n in most.values()
    )
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
    "epochs, rollouts, batch_size, updates",
    [(1, 1, 2, 3), (2, 1, 4, 3), (0.5, 1, 1, 3), (1, 2, 4, 3), (1.5, 1, 4, 3)],
)
def test_prompt_epochs_are_passes_over_the_prompts(make, epochs, rollouts, batch_size, updates):
    """Six prompts; the last batch may go beyond."""
    trainer = make(prompt_epochs=epochs, rollouts=rollouts, batch_size=batch_size, updates=99)
    assert trainer.total_updates == updates == math.ceil(epochs * 6 * rollouts / batch_size)
    drawn = Counter(chain(*islice(batches(trainer), updates)))
    assert all(drawn[p] >= int(epochs) * rollouts for p in PROMPTS)


def test_passes_are_not_rounded_up_by_floating_point():
    """1.1 * 10 is a little more than 11; RLOO and GRPO count with the same function."""
    assert updates_of_passes(1.1, 10, 1) == 11 and updates_of_passes(1.1, 10, 3) == 4


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6])
def test_generation_in_batches_gives_the_same_responses(roles, tokenizer, texts, size):
    """Greedy, so that noise does not matter: tokens, masks and prompts, however they were padded."""
    model, greedy = roles.policy.model.eval(), Sampling(7, temperature=0)
    whole = generate(model, tokenizer, texts.prompts, greedy)
    parts, _ = generate_in_batches(generate, size, model, tokenizer, texts.prompts, greedy)
    assert parts.prompts == whole.prompts == texts.prompts and parts.responses == whole.responses
    for name in ("attention_mask", "ended", "mask"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    here, there = (x.tokens.masked_fill(x.attention_mask == 0, -1) for x in (parts, whole))
    assert torch.equal(here, there)


# -- memory -----------------------------------------------------------------------------------------------------------


def small_memory(
    roles, rows, message="CUDA out of memory. Tried to allocate 2.00 GiB.", recomputing=0
):
    """A pass with gradients of more rows than these does not fit; the sizes that were tried.

    A model that recomputes its activations has room for more rows, `recomputing`.
    """
    tried = []

    def hook(backbone, args, kwargs):
        ids = kwargs["input_ids"]
        if torch.is_grad_enabled():
            tried.append(tuple(ids.shape))
            if len(ids) > (
                recomputing if recomputing and backbone.gradient_checkpointing else rows
            ):
                raise torch.OutOfMemoryError(message)

    roles.policy.model.get_base_model().model.register_forward_pre_hook(hook, with_kwargs=True)
    return tried


@pytest.mark.parametrize("fits, expected", [(99, 12), (8, 6), (3, 3), (2, 1), (1, 1)])
def test_the_dry_run_finds_the_most_that_fits(roles, tokenizer, fits, expected, capsys):
    """By halves; two passes of the longest batch, no weight moved, no gradient and no draw left behind."""
    made = build(roles, tokenizer, micro_batch_size=0, batch_size=12, length=5)
    before, drawn, tried = (
        snapshot(made.actor_critic),
        torch.get_rng_state(),
        small_memory(roles, fits),
    )
    shapes = {p.shape for name in NAMES for p in made.parameters[name]}
    alive = lambda: sum(type(x) is torch.Tensor and x.shape in shapes for x in gc.get_objects())  # noqa: E731
    gc.collect()  # what earlier tests left
    at_rest, held = alive(), []
    model = roles.policy.model.get_base_model().model
    model.register_forward_pre_hook(lambda *_: held.append(alive() - at_rest))
    assert made.fit_micro_batch_size() == made.state.micro_batch.now == expected
    longest = max(len(ids) for ids in tokenizer(PROMPTS)["input_ids"])
    # the last is a target alone
    assert tried[-1][0] == expected and all(width == longest + 5 - 1 for _, width in tried)
    # the second on top of the first
    assert [rows for rows, _ in tried].count(expected) == min(2, 12 // expected)
    assert not changed(made.actor_critic, before) and torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in made.actor_critic.parameters()) and not made.optimizer.state
    # room for the optimizer's two moments
    assert min(held) >= 2 * sum(len(made.parameters[name]) for name in NAMES)
    assert f"micro_batch_size {expected}: the most that fits of 12" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "asked, fits, recomputing, expected",
    [
        (0, 99, 99, (False, 12)),
        (0, 6, 99, (False, 6)),
        (0, 3, 7, (True, 6)),
        (0, 1, 1, (True, 1)),
        (6, 7, 99, (False, 6)),
        (6, 5, 6, (True, 6)),
        (6, 5, 5, (True, 3)),
        (2, 2, 99, (False, 2)),
    ],
)
def test_the_dry_run_decides_whether_to_recompute(
    base, sft, rm, tokenizer, asked, fits, recomputing, expected, capsys
):
    """Only if fewer rows than asked for fit without it, or fewer than four of any number."""
    roles = build_models(base, sft, rm, gradient_checkpointing="auto")
    small_memory(roles, fits, recomputing=recomputing)
    made = build(roles, tokenizer, micro_batch_size=asked, batch_size=12, length=5, updates=1)
    made.train()
    assert (made.state.gradient_checkpointing, made.state.micro_batch.now) == expected
    for role in (roles.policy, roles.critic):
        layers = [x for x in role.modules() if isinstance(x, GradientCheckpointingLayer)]
        assert {layer.gradient_checkpointing for layer in layers} == {expected[0]}
    assert f"longest responses (gradient_checkpointing {expected[0]})" in "".join(
        capsys.readouterr()
    )


def test_losses_do_not_depend_on_recomputation(base, sft, rm, tokenizer, tmp_path):
    """Nor does a run that goes on: it knows what was decided."""
    histories, asked = [], {"micro_batch_size": 3, "num_ppo_epochs": 2, "checkpoint_every": 1}
    for fits in (99, 2):
        run = RunFolder.create(tmp_path / str(fits), {})
        for updates in (2, 4):
            roles = build_models(base, sft, rm, gradient_checkpointing="auto")
            tried = small_memory(roles, fits, recomputing=99)
            trainer = build(roles, tokenizer, run, updates=updates, **asked)
            history = trainer.train(resume=updates == 4)
            assert (
                trainer.state.gradient_checkpointing == (fits == 2)
                and trainer.state.micro_batch.now == 3
            )
            run = RunFolder.open(run.path)
        assert max(rows for rows, _ in tried) == 3
        histories.append(timeless(history))
    assert histories[0] == histories[1]


def test_the_dry_run_is_of_whole_dialogues(roles, tokenizer):
    made = build(
        roles, tokenizer, micro_batch_size=0, length=5, sampler=Dialogues(None, "mine:Game", 3, 7)
    )
    tried = small_memory(roles, 99)
    made.fit_micro_batch_size()
    assert {width for _, width in tried} == {
        max(map(len, tokenizer(PROMPTS)["input_ids"])) + 3 * 5 + 2 * 7 - 1
    }


def test_a_run_that_looks_for_its_micro_batch(base, sft, rm, tokenizer):
    """Is the run that was given it."""
    histories = []
    for asked, rows in ((0, 2), (2, 99)):
        roles = build_models(base, sft, rm)
        small_memory(roles, rows)
        trainer = build(roles, tokenizer, micro_batch_size=asked, updates=2, num_ppo_epochs=2)
        histories.append(timeless(trainer.train()))
        assert trainer.state.micro_batch.now == 2
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
    assert made.state.micro_batch.now == 1 and [n for n, _ in tried][:3] == [6, 3, 1]
    for ours, theirs in zip(*grads):
        assert far(ours, theirs) < TIGHT
    assert "--micro_batch_size 6: 3 from here on" in "".join(capsys.readouterr())


def test_out_of_memory_while_scoring_halves_the_micro_batch(roles, tokenizer):
    """The reference answers in fewer rows; the scores stay the same."""
    made = build(
        roles, tokenizer, micro_batch_size=4, reward=ModelReward(roles.reward, 16), length=5
    )
    rollout, rows = made.generate_rollout(PROMPTS), []
    scored = made.score(rollout)

    def hook(_, args, kwargs):
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    roles.reference.model.get_base_model().model.register_forward_pre_hook(hook, with_kwargs=True)
    again = made.score(rollout)
    assert made.state.micro_batch.now == 2 and max(rows[1:]) == 2
    assert torch.allclose(scored.scores, again.scores, atol=1e-6)
    assert torch.allclose(scored.ref_logprobs, again.ref_logprobs, atol=1e-6)


def test_out_of_memory_while_responses_are_sampled_halves_their_number(base, sft, rm, tokenizer):
    """The run is the one that was given the smaller number; where one does not fit, it ends in a line."""
    histories, asked = [], []
    for size, fits in ((0, 2), (2, 99)):

        def generator(model, tokenizer, prompts, *rest, fits=fits):
            asked.append(len(prompts))
            rollout = generate(model, tokenizer, prompts, *rest)  # which draws, before memory ends
            if len(prompts) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return rollout

        torch.manual_seed(0)
        trainer = build(
            build_models(base, sft, rm), tokenizer, sampler=generator, generation_batch_size=size
        )
        histories.append(timeless(trainer.train()))
    assert histories[0] == histories[1] and asked == [4] + 2 * 3 * [2, 2]
    trainer.sampler = lambda *given: generator(*given, fits=0)
    fails(
        lambda: trainer.generate_rollout(PROMPTS),
        "out of memory with 1 responses at a time",
        "--max_response_length",
    )


def test_out_of_memory_in_the_reward_model_alone_halves_its_rows(roles, tokenizer):
    """As in its accuracy after training, where no other model runs; the scores stay the same."""
    rollout, reward, rows = (
        from_texts(tokenizer, PROMPTS, PROMPTS[::-1], 8),
        ModelReward(roles.reward),
        [],
    )
    scores = reward(rollout)

    def hook(_, args, kwargs):
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    roles.reward.model.get_base_model().model.register_forward_pre_hook(hook, with_kwargs=True)
    torch.testing.assert_close(reward(rollout), scores, rtol=1e-6, atol=1e-6)
    reward(rollout)
    assert rows == [6, 3, 1, *[1] * 5, *[1] * 6]


def test_other_errors_are_not_taken_for_a_lack_of_memory(moved, batch):
    small_memory(moved, 0, "mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learner(moved, options(micro_batch_size=2)).learn(batch, FixedNGram(3)(batch.mask))


def test_small_gradients_survive_a_float16_base(tiny, sft, rm, batch):
    """A response among 100,000: its gradients are below float16's smallest number, and those of float32 are met."""
    macro, grads = FixedNGram(3)(batch.mask), []
    for dtype in ("float32", "float16"):
        made = learner(
            build_models(load_base(replace(tiny, dtype=dtype)), sft, rm),
            options(micro_batch_size=6),
        )
        steps, counts = record(made), made.loss_normalizers
        made.loss_normalizers = lambda batch, counts=counts: counts(batch) * 1e5
        torch.manual_seed(0)
        made.learn(batch, macro)
        grads.append(steps["policy"][0][0])
    ours, theirs = (torch.cat([g.double().flatten() * 1e5 for g in x]) for x in reversed(grads))
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


# -- optimizer and learning rates -------------------------------------------------------------------------------------


def shares(total, **options):
    config = RolloutConfig(**options)
    return [learning_rate_share(config, update, total) for update in range(total)]


def test_warm_up_then_constant():
    assert shares(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert shares(4, warmup_updates=0) == [1.0] * 4
    assert shares(10, warmup_updates=0.4) == shares(10, warmup_updates=4)
    assert shares(3, warmup_updates=200) == [1 / 200, 2 / 200, 3 / 200]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [1, 7, 20])
def test_decay_is_that_of_transformers(kind, warmup):
    """Theirs begins with a step at rate 0, which would be lost: ours is one step ahead."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=41)
    rates = []
    for _ in range(41):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates[0] == 0.0
    assert shares(40, warmup_updates=warmup, rl_lr_scheduler_type=kind) == pytest.approx(
        rates[1:], abs=1e-12
    )


def test_weight_decay_is_for_matrices():
    """One step with a zero gradient: AdamW shrinks by rate times decay what decays, and nothing else."""
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    config = RolloutConfig(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95)
    optimizer = make_optimizer({"policy": [matrix, vector]}, {"policy": 0.5}, config)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))
    assert {group["name"] for group in optimizer.param_groups} == {"policy"}
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
    assert (
        len(
            make_optimizer(
                {"policy": [matrix, vector]}, {"policy": 0.5}, RolloutConfig()
            ).param_groups
        )
        == 1
    )


class Waits(TorchDispatchMode):
    """Counts where a GPU would be waited for: numbers that Python reads, and indices that a mask gives."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.count += by_mask or name in ("_local_scalar_dense", "nonzero", "equal")
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_micro_batch_waits_for_the_device_three_times_at_most(moved, batch, epoch, monkeypatch):
    """The rows of what is trimmed, and whether each of two models has padding to mask."""
    made, counts, tolist = learner(moved, options(micro_batch_size=1)), [], torch.Tensor.tolist
    work = made.objective.batch(batch, FixedNGram(3)(batch.mask))
    old = made.forward_backward(work, made.loss_normalizers(work))[0] if epoch == 2 else None
    for size in (6, 1):
        made.state.micro_batch.now = size
        with Waits() as waits, monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor,
                "tolist",
                lambda x: (setattr(waits, "count", waits.count + 1), tolist(x))[1],
            )
            made.forward_backward(work, made.loss_normalizers(work), old)
        counts.append(waits.count)
    assert len(batch) == 6 and 0 < (counts[1] - counts[0]) / 5 <= 3
