"""Whether SFT, reward model and PPO fit a card, and how many cards are the least."""

from collections.abc import Callable
from dataclasses import replace

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.config.support import refuse
from marlhf_lite.extras.memory.estimate import GIB, estimate_memory, estimate_stage, is_spread, memory_table
from marlhf_lite.utils.less_memory import rows_a_pass

CARDS = tuple(2**power for power in range(11))  # numbers of cards that are tried


def memory_report(options: MemoryCommand) -> str:
    """Format what PPO, SFT and reward model need on a card, whether it fits `--gpu`, and the least number of cards.

    Raises `InputError` for weights that training refuses.
    """
    refuse({"finetune": options.finetune, "4 bits": "yes" if options.load_in_4bit else "no", "stage": "ppo"})
    text = f"PPO{_launch(options)}\n{memory_table(estimate_memory(options), options.gpu)}\n\n{stages_table(options)}"
    if options.gpu:
        text += f"\n\n{least_cards_line(options)}"
    return text + ("\n\ndocs/scaling.md says what saves memory" if "does not fit" in text else "")


def _launch(options: MemoryCommand) -> str:
    """How several processes share the work, in words."""
    if options.num_processes == 1:
        return ""
    mode = "FSDP2: all models are spread" if is_spread(options) else "DDP: the whole base on each, the batch is shared"
    return f", on each of {options.num_processes} cards ({mode})"


def least_cards_line(options: MemoryCommand) -> str:
    """Format the least number of cards of `--gpu` GiB for each stage, by the rows a pass that the options give."""
    counts = [f"{name} {number or 'none'}" for name, number in least_cards(options).items()]
    mode = "FSDP2" if options.finetune == "full" else "DDP"
    return f"cards of {options.gpu:g} GiB at least, under {mode}: {', '.join(counts)}"


def least_cards(options: MemoryCommand) -> dict[str, int]:
    """The least number of cards of `--gpu` GiB, a power of two, that a stage fits; 0 where 1,024 are too few."""

    def peak_of(stage: str) -> Callable[[MemoryCommand], float]:
        return lambda tried: estimate_stage(tried, stage, stage_rows(tried, stage)).peak

    peaks = {name: peak_of(stage) for stage, name in stages_before(options).items()}
    peaks["PPO"] = lambda tried: estimate_memory(tried).peak
    return {name: first_that_fits(options, peak) for name, peak in peaks.items()}


def stages_before(options: MemoryCommand) -> dict[str, str]:
    """Names of the stages before PPO. Data with unit tests have no pairs, from which a reward model could learn."""
    return {"sft": "SFT"} | ({} if options.reward in ("tests", "all_tests") else {"rm": "reward model"})


def first_that_fits(options: MemoryCommand, peak: Callable[[MemoryCommand], float]) -> int:
    """The least number of cards of `--gpu` GiB where a process's `peak` fits, 0 if none does."""
    tried = (replace(options, num_processes=count) for count in CARDS)
    return next((each.num_processes for each in tried if peak(each) <= options.gpu * GIB), 0)


def stage_rows(options: MemoryCommand, stage: str) -> int:
    """The rows that a process puts through a model at a time, in `sft` or `rm`."""
    return rows_a_pass(options.per_device_train_batch_size, _share(options, stage))


def _share(options: MemoryCommand, stage: str) -> int:
    """A process's rows of a step."""
    return max(getattr(options, f"{stage}_batch_size") // options.num_processes, 1)


def stages_table(options: MemoryCommand) -> str:
    """Format the peaks of SFT and reward model, and whether they fit the card."""
    lines = []
    for stage, name in stages_before(options).items():
        rows = stage_rows(options, stage)
        peak = estimate_stage(options, stage, rows).peak
        line = f"{name:<12} {peak / GIB:7.2f} GiB  with {rows} rows a pass"
        if options.gpu:
            line += ": fits" if peak <= options.gpu * GIB else ": does not fit"
        lines.append(line)
    return "\n".join(lines)
