"""The true quality of an answer in `tiny-webgpt`, known because its sources are generated.

    gold = (supported statements − unsupported ones − 0.5 x other sentences) / facts in the sources

A statement is supported if the source that it cites says the same. Other sentences are repeats, phrases that state
nothing, and text of unknown form. An answer with every fact and nothing else scores 1.
"""

from marlhf_lite.tasks.statements import pattern, sentences
from marlhf_lite.tasks.templates import HUMAN

STATEMENT = "They {verb} {thing}[{source}]"
FORM = pattern(STATEMENT)
SUPPORTED = "supported"
WRONG = "unsupported"
REPEATED = "repeated"
PHRASE = "phrase"
WEIGHTS = {"supported": 1.0, "unsupported": -1.0, "other": -0.5}  # of a sentence of each kind


def read_sources(prompt: str) -> set[str]:
    """Return the facts in the sources of a prompt, each a sentence with its citation; empty for another prompt."""
    asked = prompt.rpartition(HUMAN)[2]
    return {text for text in sentences(asked) if FORM.fullmatch(text)}


def label_sentences(prompt: str, response: str) -> list[str]:
    """Return the kind of each sentence of an answer: `supported`, `unsupported`, `repeated` or a mere `phrase`."""
    facts = read_sources(prompt)
    earlier: set[str] = set()
    labels = []
    for text in sentences(response):
        if not FORM.fullmatch(text):
            labels.append(PHRASE)
        elif text in earlier:
            labels.append(REPEATED)
        elif text in facts:
            labels.append(SUPPORTED)
        else:
            labels.append(WRONG)
        earlier.add(text)
    return labels


def inspect(prompt: str, response: str) -> dict[str, int]:
    """Return how many sentences of an answer are of each kind in `WEIGHTS`; `facts`: how many the sources have."""
    labels = label_sentences(prompt, response)
    supported = labels.count(SUPPORTED)
    unsupported = labels.count(WRONG)
    return {
        "supported": supported,
        "unsupported": unsupported,
        "other": len(labels) - supported - unsupported,
        "facts": len(read_sources(prompt)),
    }


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the quality of each answer, at most 1."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        counts = inspect(prompt, response)
        total = sum(weight * counts[kind] for kind, weight in WEIGHTS.items())
        scores.append(total / max(counts["facts"], 1))
    return scores
