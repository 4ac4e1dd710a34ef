"""Whether SFT, reward model and PPO fit a card, which options help, and how many cards are the least."""

from collections.abc import Callable
from dataclasses import replace

from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.extras.memory.estimate import GIB, estimate_memory, estimate_stage, is_spread, memory_table
from marlhf_lite.utils.less_memory import rows_a_pass, smaller_pass

CARDS = tuple(2**power for power in range(11))  # numbers of cards that are tried


def memory_report(options: MemoryCommand) -> str:
    """Format what PPO, SFT and reward model need on a card, whether it fits `--gpu`, and what helps."""
    text = f"PPO{_launch(options)}\n{memory_table(estimate_memory(options), options.gpu)}{_advice(options)}"
    text += f"\n\n{stages_table(options)}"
    if options.gpu:
        text += f"\n\n{least_cards_line(options)}"
    least = replace(options, gradient_checkpointing=True, micro_batch_size=1, generation_batch_size=1)
    peaks = (estimate_memory(least).peak, *(estimate_stage(least, stage, 1).peak for stage in ("sft", "rm")))
    return text + (f"\n\n{_next_step(options)}" if options.gpu and max(peaks) > options.gpu * GIB else "")


def _launch(options: MemoryCommand) -> str:
    """How several processes share the work, in words."""
    if options.num_processes == 1:
        return ""
    how = "FSDP2: all models are spread" if is_spread(options) else "DDP: the whole base on each, the batch is shared"
    return f", on each of {options.num_processes} cards ({how})"


def least_cards_line(options: MemoryCommand) -> str:
    """Format the least number of cards of `--gpu` GiB for each stage, by the rows a pass that the options give."""
    counts = [f"{name} {number or 'none'}" for name, number in least_cards(options).items()]
    how = "FSDP2" if options.finetune == "full" else "DDP"
    return f"cards of {options.gpu:g} GiB at least, under {how}: {', '.join(counts)}"


def least_cards(options: MemoryCommand) -> dict[str, int]:
    """The least number of cards of `--gpu` GiB, a power of two, that a stage fits; 0 where 1,024 are too few."""
    peaks: dict[str, Callable[[MemoryCommand], float]] = {
        "SFT": lambda tried: estimate_stage(tried, "sft", stage_rows(tried, "sft")).peak,
        "reward model": lambda tried: estimate_stage(tried, "rm", stage_rows(tried, "rm")).peak,
        "PPO": lambda tried: estimate_memory(tried).peak,
    }
    return {name: first_that_fits(options, peak) for name, peak in peaks.items()}


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
    """Format the peaks of SFT and reward model, whether they fit the card, and if not, how many rows a pass do."""
    lines = []
    for stage, name in (("sft", "SFT"), ("rm", "reward model")):
        batch, asked = _share(options, stage), stage_rows(options, stage)
        tried = [asked]
        while smaller := smaller_pass(tried[-1], batch):
            tried.append(smaller)
        peaks = {rows: estimate_stage(options, stage, rows).peak for rows in tried}
        line = f"{name:<12} {peaks[asked] / GIB:7.2f} GiB  with {asked} rows a pass"
        if options.gpu:
            fit = next((rows for rows in tried if peaks[rows] <= options.gpu * GIB), 0)
            line += ": fits" if fit == asked else f": does not fit{_stage_advice(options, stage, fit)}"
        lines.append(line)
    return "\n".join(lines)


def _stage_advice(options: MemoryCommand, stage: str, fit: int) -> str:
    """What a stage does where memory ends, with the most rows a pass that fit, or what makes one row fit."""
    if fit:
        return f"; of those that it tries when memory ends, {fit} would fit"
    least = replace(options, gradient_checkpointing=True)
    if estimate_stage(least, stage, 1).peak <= options.gpu * GIB:
        return ", but one row a pass would with --gradient_checkpointing true"
    return ", not even with one row a pass"


def _advice(options: MemoryCommand) -> str:
    """What PPO has to lower to fit the card, as options; empty where it fits, or no card is given."""
    lowered = options
    while options.gpu and estimate_memory(lowered).peak > options.gpu * GIB:
        smaller = _lower(lowered)
        if smaller is None:
            return ", not even with the smallest batches and --gradient_checkpointing true"
        lowered = smaller
    names = ("gradient_checkpointing", "generation_batch_size", "micro_batch_size")
    changed = [name for name in names if getattr(lowered, name) != getattr(options, name)]
    words = [f"--{name} {str(getattr(lowered, name)).lower()}" for name in changed]
    return f", but would with {' '.join(words)}" if words else ""


def _lower(options: MemoryCommand) -> MemoryCommand | None:
    """The options with one step less memory where sampling or training takes the most; None where no step is left."""
    memory = estimate_memory(options)
    if memory.generation > memory.training:
        rows = options.generation_batch_size or options.batch_size
        return replace(options, generation_batch_size=rows // 2) if rows > 1 else None
    if not options.gradient_checkpointing:
        return replace(options, gradient_checkpointing=True)
    rows = options.micro_batch_size
    return replace(options, micro_batch_size=rows // 2) if rows > 1 else None


def _next_step(options: MemoryCommand) -> str:
    """What helps where no batch can be smaller."""
    if options.finetune == "full":
        steps = ["--finetune lora", "several cards (FSDP)"]
    else:
        half, four = options.dtype == "float32", not options.load_in_4bit
        steps = ["--dtype bfloat16"] * half + ["--load_in_4bit true"] * four
    texts = "shorter texts (--max_prompt_length, --max_response_length)"
    return "what can help: " + ", ".join([*steps, texts, "a smaller --model, a larger card"])
