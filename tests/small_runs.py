"""PPO on the random two-layer model: in this process, or in one that may be killed."""

import itertools
import multiprocessing
import os
import random
import shutil
import time
from multiprocessing import forkserver
from pathlib import Path

import numpy
import torch
from accelerate import Accelerator
from transformers import set_seed

from marlhf_lite.config.options import ModelConfig, PPOTrainerConfig
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import EMBEDDED_MODEL, build_models, load_base, load_tokenizer
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import Sampling, prompt_batches
from marlhf_lite.utils.errors import disk_fault, one_line
from marlhf_lite.utils.run_folder import RunFolder

PROMPTS = ["a", "The cat sat on the mat.", "Why?", "One two three four", "no", "Tell me a story"]
# The trainer's arguments that `build` takes; all other names are options.
GIVEN = "prompts reward termination gold held_out callbacks accelerator sampler".split()


def early_letters(prompts, responses):
    """Share of characters from the first half of the alphabet."""
    return [sum(c in "abcdefghijklm" for c in r) / max(len(r), 1) for r in responses]


def noisy(prompts, responses):
    """`early_letters` with noise from the global generators of python and numpy, which a checkpoint has to keep."""
    return [x + random.random() + numpy.random.rand() for x in early_letters(prompts, responses)]


def build(models, tokenizer, run=None, length=6, **changes):
    """A trainer on a few prompts. Each of `changes` is an argument of the trainer if `GIVEN` has it, else an option.

    `test_prompts` are held-out prompts on which the trainer is tested every `eval_every` updates.
    """
    given = {
        "prompts": PROMPTS,
        "reward": FunctionReward(early_letters),
        "termination": FixedNGram(2),
    }
    given["accelerator"] = Accelerator()
    given |= {name: changes.pop(name) for name in GIVEN if name in changes}
    prompts = changes.pop("test_prompts", None)
    small = {"updates": 3, "batch_size": 4, "micro_batch_size": 4, "checkpoint_every": 1}
    config = PPOTrainerConfig(**small | changes, max_response_length=length)
    if prompts:
        sampling = Sampling(length, config.temperature, config.top_k, config.top_p)
        asked = HeldOutPrompts(prompts, tokenizer, sampling, config.seed)
        given["held_out"] = HeldOutEvaluation(asked, given["reward"], given.get("gold"))
    return PPOTrainer(models, tokenizer, config=config, run=run, **given)


def batches(trainer):
    """The prompts of each update, as `train` draws them."""
    return prompt_batches(trainer.prompts, trainer.config, trainer.accelerator, trainer.seed)


def state(trainer):
    """Copies of all weights that train, and of what the optimizer holds for each of them.

    The keys are pairs: the number of the weight, and "weights" or the optimizer's name, such as "exp_avg".
    """
    weights = [p for name in ("policy", "critic") for p in trainer.parameters[name]]
    held = [{"weights": p.detach()} | trainer.optimizer.state.get(p, {}) for p in weights]
    return {(i, name): x.clone() for i, values in enumerate(held) for name, x in values.items()}


def same(ours, theirs):
    """Whether two results of `state` are equal, bit by bit."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def watch(trainer, look):
    """A list of what `look()` returns: now, and after each update that the trainer makes later."""
    seen = [look()]
    update = trainer.update

    def watched(prompts):
        row = update(prompts)
        seen.append(look())
        return row

    trainer.update = watched
    return seen


def timeless(rows):
    """Rows of metrics without those that a clock measures: seconds, and rates per second."""
    return [{name: x for name, x in row.items() if "second" not in name} for row in rows]


def same_checkpoints(one, other):
    """Whether two checkpoints hold the same state, bit by bit.

    "logs" is left out: it holds the sizes of log files, which depend on the times that stand in them.
    """
    states = [torch.load(path, weights_only=True) for path in (one, other)]
    flat = [dict(_leaves({k: v for k, v in state.items() if k != "logs"})) for state in states]
    if flat[0].keys() != flat[1].keys():
        return False
    return all(
        torch.equal(x, flat[1][k]) if torch.is_tensor(x) else x == flat[1][k]
        for k, x in flat[0].items()
    )


def _leaves(value, name=""):
    """Pairs of a path and a value for everything that is inside dicts, lists and tuples.

    Lists and tuples have the same paths, because torch makes lists of tuples when it loads an optimizer.
    """
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{name}/{key}")
    else:
        yield name, value


# -- processes of their own -------------------------------------------------------------------------------------------


def start(target, *args):
    """Start `target(*args)` in a new process, and return the process.

    It is forked from a server that has imported everything and has done nothing else, so it starts fast and clean.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["small_runs"])
    # While the server starts, Python's path has this folder, in which the server finds this file.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    process = context.Process(target=target, args=args)
    process.start()
    return process


def wait(process, until=lambda: False, seconds=120):
    """Wait until the condition holds or the process ends, and return whether the process still runs."""
    end = time.monotonic() + seconds
    while process.is_alive() and not until():
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.002)
    return process.is_alive()


def halted(path):
    """The path of the file by which a child that trains in `path` says that it has halted where it was told to."""
    return path.with_suffix(".halted")


def run_child(path, folders, changes, seed=0, halt=0, limit=None):
    """Train in the folder `path`, from its last checkpoint if there is one, and save policy and critic there.

    An error is written to error.txt in the folder.

    Args:
        path: the run's folder.
        folders: of a model, an SFT adapter and a reward adapter.
        changes: arguments of `build`.
        seed: of the random numbers with which a resumed run begins; its checkpoint has to overrule them.
        halt: if not 0, wait to be killed before the call of this number, of the calls that write or delete files.
        limit: `(update, bytes)`, or None; from the end of that update on no file may be larger.
    """
    # What the child prints goes nowhere.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(1)
    path = Path(path)
    resume = any((path / "checkpoints").glob("update-*"))
    set_seed(seed if resume else 0)
    if not resume:
        shutil.rmtree(path, ignore_errors=True)
    run = RunFolder.open(path) if resume else RunFolder.create(path, {})
    try:
        model, sft, rm = folders
        roles = build_models(load_base(ModelConfig(model=model)), sft, rm)
        trainer = build(roles, load_tokenizer(EMBEDDED_MODEL), run, **changes)
        if halt:
            _halt_at(halt, halted(path))
        if limit:
            _limit_files(trainer, *limit)
        trainer.train(resume)
        trainer.save(path)
    except Exception as error:
        # as the command prints it
        (path / "error.txt").write_text(disk_fault(error) or one_line(error))
        raise SystemExit(1) from error


def _halt_at(count, mark):
    """Let the call of this number, of `torch.save`, `os.replace` and `os.unlink`, make the file `mark` and wait."""
    calls = itertools.count(1)

    def slow(function):
        def call(*args, **kwargs):
            if next(calls) == count:
                mark.touch()
                time.sleep(600)
            return function(*args, **kwargs)

        return call

    torch.save, os.replace, os.unlink = slow(torch.save), slow(os.replace), slow(os.unlink)


def _limit_files(trainer, update, size):
    """After this update, let the system refuse to write files of more than `size` bytes, as on a full disk."""
    import resource

    plain = trainer.update

    def limited(prompts):
        if len(trainer.history) == update:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return plain(prompts)

    trainer.update = limited
