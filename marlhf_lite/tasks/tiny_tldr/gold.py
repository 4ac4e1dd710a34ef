"""The true quality of a summary of an embedded post, known because the corpus is generated.

gold = facts stated correctly - facts stated wrongly - 0.5 x (fillers, repeats and sentences without a fact)
       - 0.05 x words beyond 36

It depends only on the text, so it scores any response, also one that the grammar did not make.
"""

import re

from marlhf_lite.tasks.statements import sentences
from marlhf_lite.tasks.tiny_tldr.grammar import FACTS, LEXICON, SLOT, WHO

WRONG, PADDING, LONG, FREE_WORDS = 1.0, 0.5, 0.05, 36


def _pattern(template: str) -> re.Pattern:
    words = re.sub(r"\([^ ()]+ |\)", "", SLOT.sub("SLOT", template))
    return re.compile(r"\b" + re.sub(r"\s+", r"\\s+", words).replace("SLOT", r"(\w+)") + r"\b")


# Only the known relations name a person: `my red kettle` is part of another fact.
_RELATION = f"({'|'.join(LEXICON['relation'])})"
_WHO = _pattern(WHO).pattern.replace("My", "[Mm]y").replace(r"(\w+)", _RELATION, 1)
PATTERNS = {"who": re.compile(_WHO)} | {
    kind: _pattern(template) for kind, template in FACTS.items()
}


def statements(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return every (kind, values) that the text states, with repeats."""
    return [
        (kind, m.groups()) for kind, pattern in PATTERNS.items() for m in pattern.finditer(text)
    ]


def inspect(prompt: str, response: str) -> dict[str, int]:
    """Count the facts that a summary states correctly and wrongly, its padding and words; `total`: the post's facts."""
    truth, stated = set(statements(prompt)), statements(response)
    distinct = set(stated)
    correct = len(distinct & truth)
    empty = sum(not statements(text) for text in sentences(response))
    padding = empty + len(stated) - len(distinct)
    counts = {"correct": correct, "wrong": len(distinct) - correct, "padding": padding}
    return counts | {"words": len(response.split()), "total": len(truth)}


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the gold score of each response; a perfect summary of a post with six facts scores 6."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        counts = inspect(prompt, response)
        excess = max(0, counts["words"] - FREE_WORDS)
        scores.append(
            counts["correct"]
            - WRONG * counts["wrong"]
            - PADDING * counts["padding"]
            - LONG * excess
        )
    return scores
