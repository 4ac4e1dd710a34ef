"""What judges are asked, and how their answers are read (paper, section 4.1 and Appendix F).

Prompts and responses were written by strangers or by the models under test, and may hold sentences such as "answer A".
They stand between marks that no text can guess, and the instructions say that nothing between the marks is an order.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from marlhf_lite.evaluation.judgments import Judgment

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
LOWEST, HIGHEST = 1, 10  # score of a criterion
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


@dataclass(frozen=True)
class Criteria:
    """The question of a task to its judges."""

    name: str
    prompt: str  # what the task calls a prompt
    response: str  # what the task calls a response
    aspects: dict[str, str]  # criterion to what it asks
    rule: str  # how the criteria decide

    def question(self) -> str:
        """The question, one line for each criterion, and the rule."""
        lines = [f"- {name}: {text}" for name, text in self.aspects.items()]
        return "\n".join([f"Which {self.response} is better? Criteria:", *lines, self.rule])


CRITERIA = {name: Criteria(name, **texts) for name, texts in _TEXTS["criteria"].items()}


def mark(prompt: str, a: str, b: str) -> str:
    """A word that stands in none of the texts: it is a hash of all of them."""
    return hashlib.sha256(json.dumps([prompt, a, b]).encode()).hexdigest()[:10]


def material(criteria: Criteria, prompt: str, a: str, b: str) -> str:
    """The prompt and both responses between marks."""
    word, name = mark(prompt, a, b), criteria.response.upper()
    parts = {criteria.prompt.upper(): prompt, f"{name} A": a, f"{name} B": b}
    text = "\n\n".join(f"<{title} {word}>\n{part}\n</{title} {word}>" for title, part in parts.items())
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent: it becomes "?"


def instructions(criteria: Criteria, prompt: str, a: str, b: str) -> str:
    """The instructions of an endpoint: the criteria, what the marks mean, and the form of the verdict."""
    return _TEXTS["instructions"].format(
        prompt=criteria.prompt,
        response=criteria.response,
        question=criteria.question(),
        scores="{" + ", ".join(f'"{aspect}": n' for aspect in criteria.aspects) + "}",
        mark=mark(prompt, a, b),
        lowest=LOWEST,
        highest=HIGHEST,
    )


def parse_judgment(text: str, criteria: Criteria) -> Judgment:
    """Read the JSON verdict that `instructions` ask for; a text that differs from this form is `malformed`.

    A fence of three backticks around the object is allowed. A missing, doubled or unknown key, a score that is not a
    number from 1 to 10, and any text around the object are not.
    """
    try:
        verdict = json.loads(_FENCE.sub(r"\1", text.strip()), object_pairs_hook=_unique_keys)
        sides = verdict["scores"]
        fits = (
            verdict.keys() == {"reason", "scores", "winner"}
            and isinstance(verdict["reason"], str)
            and verdict["winner"] in ("A", "B", "tie")
            and sides.keys() == {"A", "B"}
            and all(side.keys() == criteria.aspects.keys() for side in sides.values())
            and all(type(n) in (int, float) and LOWEST <= n <= HIGHEST for x in sides.values() for n in x.values())
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        fits = False
    return Judgment(verdict["winner"], sides, text) if fits else Judgment("malformed", raw=text)


def _unique_keys(pairs: list[tuple]) -> dict:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
