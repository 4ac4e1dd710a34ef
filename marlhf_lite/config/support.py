"""The support matrix: which options go together. One look-up refuses a combination that no row of `TABLE` has.

docs/scaling.md has the same table. A new row comes with a test that runs it.
"""

import os
from collections.abc import Mapping
from itertools import combinations

from marlhf_lite.utils.errors import InputError

TABLE = """
| stage | data | reward | environment | 4 bits | scaled | weighted | sft | finetune | sampler | launch |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| sft | pairs answers | - | - | no yes | - | - | - | lora | - | one ddp deepspeed |
| sft | pairs answers | - | - | no | - | - | - | full | - | one ddp fsdp2 deepspeed |
| rm | pairs | - | - | no yes | - | - | adapter | lora | - | one ddp deepspeed |
| rm | pairs | - | - | no | - | - | - | full | - | one ddp fsdp2 deepspeed |
| ppo | pairs answers prompts | rm code | no | no yes | no yes | no | adapter | lora | generate | one ddp |
| ppo | pairs answers prompts | rm code | no | no | no yes | no | - | full | generate | one ddp fsdp2 |
| ppo | pairs answers prompts | rm code | no | no yes | no | no yes | adapter | lora | vllm | one ddp |
| ppo | pairs answers prompts | rm code | no | no | no | no yes | - | full | vllm | one ddp fsdp2 |
| ppo | - | code turns | yes | no yes | no yes | no | adapter | lora | generate | one ddp |
| ppo | - | code turns | yes | no | no yes | no | - | full | generate | one ddp fsdp2 |
| dpo | pairs | - | no | no yes | - | - | adapter | lora | generate | one ddp |
| dpo | pairs | - | no | no | - | - | model | full | generate | one ddp fsdp2 |
| rloo grpo | pairs answers prompts | rm code | no | no yes | - | - | adapter | lora | generate | one ddp |
| rloo grpo | pairs answers prompts | rm code | no | no | - | - | model | full | generate | one ddp fsdp2 |
| evaluate | - | - | no | no yes | - | - | - | lora | generate vllm | one ddp fsdp2 |
| evaluate | - | - | no | no | - | - | - | full | generate vllm | one ddp fsdp2 |
| evaluate | - | - | yes | no yes | - | - | - | lora | generate | one ddp fsdp2 |
| evaluate | - | - | yes | no | - | - | - | full | generate | one ddp fsdp2 |
| generate | - | - | no yes | no yes | - | - | - | lora full | generate | one |
| export | - | - | - | no yes | - | - | - | lora full | - | one |
""".strip()  # a dash stands for all values
AXES, _, *LINES = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()]
ROWS = [{axis: cell.split() for axis, cell in zip(AXES, line, strict=True) if cell != "-"} for line in LINES]
# Each value of an axis: what a message calls it, and how to get it. The first axis begins a message.
WORDS = """
data | pairs | --dataset {data} (pairs) | give rows with chosen and rejected, or train PPO by --reward package.module:f
data | answers | --dataset {data} (one answer to a prompt) | give rows with prompt and completion, or messages
data | prompts | --dataset {data} (only prompts) | give only prompts
data | turns | --dataset {data} (its environment answers in turns; train it by marlhf ppo or run) |
environment | no | --environment (none) | leave out --environment
environment | yes | --environment | give an --environment
reward | rm | --reward rm | give another --reward
reward | code | --reward | give another --reward
reward | turns | --reward environment |
4 bits | no | | leave out --load_in_4bit
4 bits | yes | --load_in_4bit |
scaled | no | | give --temperature 1
scaled | yes | --logprobs_at_temperature |
weighted | no | | leave it out
weighted | yes | --vllm_importance_sampling_mode |
sft | adapter | --sft {sft} (an adapter) | give it as --model, and as --sft what marlhf sft --model {sft} makes
sft | model | --sft {sft} (a whole model) | make one by marlhf export --finetune full --policy {sft} --output_dir NEW
sft | shards | --sft {sft} (a checkpoint by shards) |
finetune | lora | --finetune lora | use --finetune lora
finetune | full | --finetune full | use --finetune full
sampler | generate | no --vllm_url | leave out --vllm_url
sampler | vllm | --vllm_url | give --vllm_url
launch | one | one process | start one process
launch | ddp | DDP | launch with DDP (accelerate launch --multi_gpu)
launch | fsdp2 | FSDP | launch with fsdp2.yaml
launch | deepspeed | DeepSpeed | launch with DeepSpeed
""".strip()
SAYS: dict[str, dict[str, tuple[str, str]]] = {}
for _axis, _value, *_texts in ([word.strip() for word in line.split("|")] for line in WORDS.splitlines()):
    SAYS.setdefault(_axis, {})[_value] = tuple(_texts)


def is_listed(cell: Mapping[str, str]) -> bool:
    """Return whether a row of the table has all of these values."""
    return any(all(value in row.get(axis, (value,)) for axis, value in cell.items()) for row in ROWS)


def refuse(cell: Mapping[str, str], **shown: object) -> None:
    """Raise `InputError` for a combination that no row lists; `shown` are the texts of `SAYS`.

    The message names the fewest values that clash, most often two, and each single change that helps.
    """
    if is_listed(cell):
        return
    axes = [axis for axis in SAYS if axis in cell]
    clashes = (of for n in range(1, len(axes) + 1) for of in combinations(axes, n))
    clash = next(of for of in clashes if not is_listed({axis: cell[axis] for axis in (*of, "stage")}))
    field, *others = [SAYS[axis][cell[axis]][0].format(**shown) for axis in clash]
    others = others or [f"the stage {cell['stage']}"]
    changes = ((fix, cell | {axis: value}) for axis in clash for value, (_, fix) in SAYS[axis].items() if fix)
    fixes = dict.fromkeys(fix.format(**shown) for fix, changed in changes if is_listed(changed))
    fix = ", or ".join(fixes) or "see the table of what goes together in docs/scaling.md"
    raise InputError(f"{field}: does not go with {' and '.join(others)}: {fix}")


def launched() -> str:
    """Return how `accelerate launch` started this process."""
    flags = {"fsdp2": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}
    used = [kind for kind, flag in flags.items() if os.environ.get(flag, "").lower() in ("1", "true", "yes")]
    return used[0] if used else "ddp" if os.environ.get("WORLD_SIZE", "1") != "1" else "one"
