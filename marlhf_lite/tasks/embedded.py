"""The embedded tasks by name. `config.embedded` names the model that belongs to each."""

from collections.abc import Callable
from typing import Any

from marlhf_lite.lab.corpora.tiny_code import load_tiny_code
from marlhf_lite.lab.corpora.tiny_hh import load_tiny_hh
from marlhf_lite.lab.corpora.tiny_steps import load_tiny_steps
from marlhf_lite.lab.corpora.tiny_tldr import load_tiny_tldr
from marlhf_lite.lab.corpora.tiny_umbrella import decisive_token, load_tiny_umbrella
from marlhf_lite.lab.corpora.tiny_webgpt import load_tiny_webgpt
from marlhf_lite.tasks.splits import Task
from marlhf_lite.tasks.tiny_hh import gold as hh_gold
from marlhf_lite.tasks.tiny_tldr import gold as tldr_gold
from marlhf_lite.tasks.tiny_webgpt import gold as webgpt_gold

# Name -> function of (number of pairs or None for the task's own, seed, part or "").
EMBEDDED: dict[str, Callable[[int | None, int, str], Task]] = {
    "tiny-tldr": load_tiny_tldr,
    "tiny-umbrella": load_tiny_umbrella,
    "tiny-steps": load_tiny_steps,
    "tiny-code": load_tiny_code,
    "tiny-hh": load_tiny_hh,
    "tiny-webgpt": load_tiny_webgpt,
}

# Name -> function of the part: place of the token that decides the score, from 0, and tokens of a response; None where
# it has no fixed place.
DECISIVE_TOKENS: dict[str, Callable[[str], tuple[int, int] | None]] = {"tiny-umbrella": decisive_token}

# Name -> function of (prompt, response): the counts that the gold score is made of, as a dataclass.
INSPECT: dict[str, Callable[[str, str], Any]] = {
    "tiny-tldr": tldr_gold.inspect,
    "tiny-hh": hh_gold.inspect,
    "tiny-webgpt": webgpt_gold.inspect,
}
