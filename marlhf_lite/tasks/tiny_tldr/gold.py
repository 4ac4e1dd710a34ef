"""The true quality of a summary of an embedded post, known because the corpus is generated.

gold = facts stated correctly - facts stated wrongly - 0.5 x (fillers, repeats and sentences without a fact)
       - 0.05 x words beyond 36

It depends only on the text, so it scores any response, also one that the grammar did not make.
"""

import re
from dataclasses import dataclass

from marlhf_lite.tasks.statements import sentences
from marlhf_lite.tasks.tiny_tldr.grammar import FACTS, LEXICON, SLOT, WHO

WRONG, PADDING, LONG, FREE_WORDS = 1.0, 0.5, 0.05, 36


def _pattern(template: str) -> re.Pattern:
    words = re.sub(r"\([^ ()]+ |\)", "", SLOT.sub("SLOT", template))
    return re.compile(r"\b" + re.sub(r"\s+", r"\\s+", words).replace("SLOT", r"(\w+)") + r"\b")


# Only the known relations name a person: `my red kettle` is part of another fact.
_RELATION = f"({'|'.join(LEXICON['relation'])})"
_WHO = _pattern(WHO).pattern.replace("My", "[Mm]y").replace(r"(\w+)", _RELATION, 1)
PATTERNS = {"who": re.compile(_WHO)} | {kind: _pattern(template) for kind, template in FACTS.items()}


@dataclass(frozen=True)
class Report:
    """The counts of what a summary says. `score` is the gold score."""

    correct: int
    wrong: int
    padding: int
    words: int
    total: int  # facts in the post

    @property
    def score(self) -> float:
        excess = max(0, self.words - FREE_WORDS)
        return self.correct - WRONG * self.wrong - PADDING * self.padding - LONG * excess


def statements(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return every (kind, values) that the text states, with repeats."""
    return [(kind, m.groups()) for kind, pattern in PATTERNS.items() for m in pattern.finditer(text)]


def inspect(prompt: str, response: str) -> Report:
    """Compare what `response` states with what `prompt` (a post) states."""
    truth, stated = set(statements(prompt)), statements(response)
    distinct = set(stated)
    correct = len(distinct & truth)
    empty = sum(not statements(text) for text in sentences(response))
    padding = empty + len(stated) - len(distinct)
    return Report(correct, len(distinct) - correct, padding, len(response.split()), len(truth))


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the gold score of each response; a perfect summary of a post with six facts scores 6."""
    return [inspect(p, r).score for p, r in zip(prompts, responses, strict=True)]
