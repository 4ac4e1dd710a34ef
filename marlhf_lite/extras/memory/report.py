"""Whether SFT, reward model and PPO fit a card, and the least number of cards."""

from collections.abc import Callable
from dataclasses import replace

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.config.support import refuse
from marlhf_lite.extras.memory.estimate import GIB, estimate_memory, estimate_stage, is_spread, memory_table
from marlhf_lite.utils.less_memory import rows_a_pass

CARDS = tuple(2**power for power in range(11))  # numbers of cards to try


def memory_report(options: MemoryCommand) -> str:
    """Format the needs of PPO, SFT and reward model on a card, whether they fit `--gpu`, and the least number of cards.

    Raises `InputError` for weights that training refuses.
    """
    refuse({"finetune": options.finetune, "4 bits": "yes" if options.load_in_4bit else "no", "stage": "ppo"})
    text = f"PPO{_launch(options)}\n{memory_table(estimate_memory(options), options.gpu)}\n\n{stages_table(options)}"
    if options.gpu:
        mode = "FSDP2" if options.finetune == "full" else "DDP"
        counts = ", ".join(f"{name} {number or 'none'}" for name, number in least_cards(options).items())
        text += f"\n\ncards of {options.gpu:g} GiB at least, under {mode}: {counts}"
    return text + ("\n\ndocs/scaling.md says what saves memory" if "does not fit" in text else "")


def _launch(options: MemoryCommand) -> str:
    """Say how several processes share the work."""
    if options.num_processes == 1:
        return ""
    mode = "FSDP2: all models are spread" if is_spread(options) else "DDP: the whole base on each, the batch is shared"
    return f", on each of {options.num_processes} cards ({mode})"


def least_cards(options: MemoryCommand) -> dict[str, int]:
    """Return the least number of cards of `--gpu` GiB for each stage, a power of two; 0 if 1,024 are too few."""
    cards = {
        name: first_that_fits(options, lambda tried, stage=stage: _stage(tried, stage)[1])
        for stage, name in _stages_before(options).items()
    }
    return cards | {"PPO": first_that_fits(options, lambda tried: estimate_memory(tried).peak)}


def first_that_fits(options: MemoryCommand, peak: Callable[[MemoryCommand], float]) -> int:
    """Return the least number of cards of `--gpu` GiB such that a process's `peak` fits, 0 if none does."""
    tried = (replace(options, num_processes=count) for count in CARDS)
    return next((each.num_processes for each in tried if peak(each) <= options.gpu * GIB), 0)


def _stages_before(options: MemoryCommand) -> dict[str, str]:
    """Return the names of the stages before PPO. Data with unit tests have no pairs to train a reward model on."""
    return {"sft": "SFT"} | ({} if options.reward in ("tests", "all_tests") else {"rm": "reward model"})


def _stage(options: MemoryCommand, stage: str) -> tuple[int, float]:
    """Return the rows that a process of `sft` or `rm` puts through a model at a time, and its peak in bytes."""
    share = max(getattr(options, f"{stage}_batch_size") // options.num_processes, 1)
    rows = rows_a_pass(options.per_device_train_batch_size, share)
    return rows, estimate_stage(options, stage, rows).peak


def stages_table(options: MemoryCommand) -> str:
    """Format the peaks of SFT and reward model, and whether they fit the card."""
    lines = []
    for stage, name in _stages_before(options).items():
        rows, peak = _stage(options, stage)
        fits = ": fits" if peak <= options.gpu * GIB else ": does not fit"
        lines.append(f"{name:<12} {peak / GIB:7.2f} GiB  with {rows} rows a pass{fits if options.gpu else ''}")
    return "\n".join(lines)
