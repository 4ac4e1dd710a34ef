"""The true quality of a summary of an embedded post, known because the corpus is generated.

gold = facts stated correctly - facts stated wrongly - 0.5 x (fillers, repeats and sentences without a fact)
       - 0.05 x words beyond 36

It depends only on the text, so it scores any response, also one that the grammar did not make.
"""

import re

from marlhf_lite.tasks.statements import sentences
from marlhf_lite.tasks.tiny_tldr.grammar import FACTS, LEXICON, SLOT, WHO

WRONG = 1.0
PADDING = 0.5
LONG = 0.05
FREE_WORDS = 36


def _pattern(template: str) -> re.Pattern:
    """Return a pattern that finds a bracketed template in a text, with a group for each slot, which is one word."""
    without_slots = SLOT.sub("SLOT", template)
    words = re.sub(r"\([^ ()]+ |\)", "", without_slots)  # without brackets and their labels
    any_space = re.sub(r"\s+", r"\\s+", words)
    return re.compile(r"\b" + any_space.replace("SLOT", r"(\w+)") + r"\b")


# Only the known relations name a person: `my red kettle` is part of another fact.
_RELATION = f"({'|'.join(LEXICON['relation'])})"
_WHO = _pattern(WHO).pattern.replace("My", "[Mm]y").replace(r"(\w+)", _RELATION, 1)
# kind of fact, or `who` for the person -> what finds it in a text
PATTERNS = {"who": re.compile(_WHO)}
PATTERNS |= {kind: _pattern(template) for kind, template in FACTS.items()}


def statements(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return every fact that the text states, with repeats, as (kind, words in its slots)."""
    found = []
    for kind, pattern in PATTERNS.items():
        found.extend((kind, match.groups()) for match in pattern.finditer(text))
    return found


def inspect(prompt: str, response: str) -> dict[str, int]:
    """Return how many facts a summary states correctly and wrongly, its padding and words; `total`: the post's facts.

    Padding is every repeat of a fact, and every sentence that states none.
    """
    facts_of_the_post = set(statements(prompt))
    stated = statements(response)
    different = set(stated)
    correct = len(different & facts_of_the_post)
    repeats = len(stated) - len(different)
    without_fact = sum(not statements(text) for text in sentences(response))
    return {
        "correct": correct,
        "wrong": len(different) - correct,
        "padding": without_fact + repeats,
        "words": len(response.split()),
        "total": len(facts_of_the_post),
    }


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the gold score of each response; a perfect summary of a post with six facts scores 6."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        counts = inspect(prompt, response)
        words_beyond = max(0, counts["words"] - FREE_WORDS)
        price = WRONG * counts["wrong"] + PADDING * counts["padding"] + LONG * words_beyond
        scores.append(counts["correct"] - price)
    return scores
