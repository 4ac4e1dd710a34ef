"""The questions to judges, and the reading of their answers (paper, section 4.1 and Appendix F).

Prompts and responses come from strangers or from the models under test, and may contain sentences such as "answer A".
They stand between marks that no text can guess, and the instructions say that nothing between the marks is an order.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from marlhf_lite.extras.judges.judgments import Judgment

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
VERDICT_CHARACTERS = 100_000  # characters of a text that are read: unclosed braces take long
LOWEST, HIGHEST = 1, 10  # score of a criterion
_THOUGHTS = re.compile(r"\A.*</think(?:ing)?>|<think(?:ing)?>.*", re.DOTALL | re.IGNORECASE)  # or cut
_NAMES, _TIES = "response|reply|answer|summary|assistant|option|model|candidate", "tie|draw|equal|both|neither"
_WINNER = re.compile(rf"\W*(?:(?:{_NAMES})[\s_]*)?(a|b|{_TIES})\W*", re.IGNORECASE)


@dataclass(frozen=True)
class Criteria:
    """The question of a task to its judges."""

    name: str
    prompt: str  # what the task calls a prompt
    response: str  # what the task calls a response
    aspects: dict[str, str]  # criterion to what it asks
    rule: str  # how the criteria decide

    def question(self) -> str:
        """Return the question, one line per criterion, and the rule."""
        lines = [f"- {name}: {text}" for name, text in self.aspects.items()]
        return "\n".join([f"Which {self.response} is better? Criteria:", *lines, self.rule])


CRITERIA = {name: Criteria(name, **texts) for name, texts in _TEXTS["criteria"].items()}


def mark(prompt: str, a: str, b: str) -> str:
    """Return a word that no text contains: a hash of all of them."""
    return hashlib.sha256(json.dumps([prompt, a, b]).encode()).hexdigest()[:10]


def material(criteria: Criteria, prompt: str, a: str, b: str) -> str:
    """Return the prompt and both responses between marks."""
    word, name = mark(prompt, a, b), criteria.response.upper()
    parts = {criteria.prompt.upper(): prompt, f"{name} A": a, f"{name} B": b}
    text = "\n\n".join(f"<{title} {word}>\n{part}\n</{title} {word}>" for title, part in parts.items())
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent


def instructions(criteria: Criteria, prompt: str, a: str, b: str) -> str:
    """Return the instructions for an endpoint: the criteria, the meaning of the marks, and the form of the verdict."""
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
    """Read the JSON verdict that `instructions` ask for; a text without exactly one such verdict is `malformed`.

    Thoughts up to </think>, and prose or a fence around the object, are left out. The winner may be in lower or upper
    case, with marks around it or as "Answer A", a tie as "draw", a score as a number or as text ("7", "7/10"). Faults
    are a missing, repeated or unknown key, a score outside 1 to 10, and a second object after the verdict.
    """
    objects = list(_objects(_THOUGHTS.sub("", text)[:VERDICT_CHARACTERS]))
    verdicts = [verdict for verdict in (_verdict(each, criteria) for each in objects) if verdict]
    if len(verdicts) != 1 or not _verdict(objects[-1], criteria):  # a quotation may stand before it
        return Judgment("malformed", raw=text)
    winner, scores = verdicts[0]
    return Judgment(winner, scores, text)


def _objects(text: str) -> Iterator[dict | None]:
    """Yield the JSON objects of a text in order, and None for each brace that begins no object."""
    decoder, place = json.JSONDecoder(object_pairs_hook=_unique_keys), text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, end = None, place + 1
        yield value
        place = text.find("{", end)


def _verdict(value: dict | None, criteria: Criteria) -> tuple[str, dict] | None:
    """Return winner and scores if the object is a verdict, else None."""
    try:
        winner, sides = _WINNER.fullmatch(value["winner"])[1].lower(), value["scores"]
        scores = {side: {name: _score(n) for name, n in sides[side].items()} for side in sides}
        fits = (
            value.keys() == {"reason", "scores", "winner"}
            and isinstance(value["reason"], str)
            and scores.keys() == {"A", "B"}
            and all(side.keys() == criteria.aspects.keys() for side in scores.values())
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return ({"a": "A", "b": "B"}.get(winner, "tie"), scores) if fits else None


def _score(n: float | str) -> float:
    """Return a score as a number. Raises `ValueError` or `TypeError` for anything but a number from 1 to 10."""
    n = float(n.replace(" ", "").removesuffix(f"/{HIGHEST}")) if isinstance(n, str) else n
    if isinstance(n, bool) or not LOWEST <= n <= HIGHEST:
        raise ValueError(f"{n} is not a score")
    return n


def _unique_keys(pairs: list[tuple]) -> dict:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
