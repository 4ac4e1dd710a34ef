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
# More of an answer is not read, because many unclosed braces take long.
VERDICT_CHARACTERS = 100_000
LOWEST, HIGHEST = 1, 10  # score of a criterion
# Everything up to the end of the thoughts; or, if they were cut off before their end, from their beginning on.
_THOUGHTS = re.compile(r"\A.*</think(?:ing)?>|<think(?:ing)?>.*", re.DOTALL | re.IGNORECASE)
# What judges call a winner: "A", "Response A", "**b**"; a tie also "draw".
_NAMES = "response|reply|answer|summary|assistant|option|model|candidate"
_TIES = "tie|draw|equal|both|neither"
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
    """Return a word that none of the texts contains, because it is a hash of all of them."""
    return hashlib.sha256(json.dumps([prompt, a, b]).encode()).hexdigest()[:10]


def material(criteria: Criteria, prompt: str, a: str, b: str) -> str:
    """Return the prompt and both responses between marks."""
    word = mark(prompt, a, b)
    name = criteria.response.upper()  # such as RESPONSE or SUMMARY
    parts = {criteria.prompt.upper(): prompt, f"{name} A": a, f"{name} B": b}
    blocks = []
    for title, part in parts.items():
        blocks.append(f"<{title} {word}>\n{part}\n</{title} {word}>")
    text = "\n\n".join(blocks)
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

    Thoughts up to </think>, and prose or a fence around the object, are left out. `_verdict` says what makes an object
    a verdict. Other objects may stand before the verdict, such as a quotation, but none after it. What follows the
    first VERDICT_CHARACTERS is not read, since a verdict is short.
    """
    without_thoughts = _THOUGHTS.sub("", text)[:VERDICT_CHARACTERS]
    verdicts = 0
    last = None  # the last object's verdict
    for value in _objects(without_thoughts):
        last = _verdict(value, criteria)  # None: this object is not a verdict
        if last is not None:
            verdicts += 1
    if verdicts != 1 or last is None:  # with `last` None, another object stands after the verdict
        return Judgment("malformed", raw=text)
    winner, scores = last
    return Judgment(winner, scores, text)


def _objects(text: str) -> Iterator[dict | None]:
    """Yield the JSON objects of a text in order, and None for each brace that begins no object."""
    place = text.find("{")
    while place >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            value = None
            end = place + 1
        yield value
        place = text.find("{", end)


def _verdict(value: dict | None, criteria: Criteria) -> tuple[str, dict] | None:
    """Return the winner (A, B or tie) and the scores by side and aspect. If the object is not a verdict, return None.

    The winner may be in lower or upper case, with marks around it, or called "Answer A"; a tie may be a "draw", and a
    score may be a text ("7", "7/10"). An object with a missing or unknown key, or a score outside 1 to 10, is not a
    verdict. A judge may write anything, so the object is read as if it were right; if that fails, it is not a verdict.
    """
    try:
        # The letter, or the word for a tie, without marks or "Answer" around it.
        winner = _WINNER.fullmatch(value["winner"])[1].upper()
        scores = {}
        for side, score_of_aspect in value["scores"].items():
            scores[side] = {aspect: _score(given) for aspect, given in score_of_aspect.items()}
        has_right_keys = value.keys() == {"reason", "scores", "winner"}
        has_both_sides = scores.keys() == {"A", "B"}
        has_all_aspects = all(side.keys() == criteria.aspects.keys() for side in scores.values())
    except (LookupError, TypeError, AttributeError, ValueError):
        return None
    if not (has_right_keys and has_both_sides and has_all_aspects):
        return None
    return (winner if winner in ("A", "B") else "tie"), scores


def _score(given: float | str) -> float:
    """Return a score as a number. Raises `ValueError` or `TypeError` unless it is one from LOWEST to HIGHEST."""
    number = given
    if isinstance(given, str):  # "7" or "7 / 10"
        number = float(given.replace(" ", "").removesuffix(f"/{HIGHEST}"))
    # True counts as 1 in Python; NaN is not in the range either.
    if isinstance(number, bool) or not LOWEST <= number <= HIGHEST:
        raise ValueError(f"{given} is no score")
    return number
