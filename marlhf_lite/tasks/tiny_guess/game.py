"""The environment of `tiny-guess`: it hides a number, and answers each guess with higher or lower.

The hidden number follows from the prompt, by a hash that no model can learn. So a game can be repeated, a resumed run
plays the same games, and two policies meet the same numbers.
"""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from marlhf_lite.tasks.splits import Task, make_task
from marlhf_lite.tasks.templates import WITHOUT_PAIRS

HIGHEST = 16
MAX_TURNS = 6
PRICE = 0.15  # of each turn after the first
DEFAULT_SIZE = 2000
HIGHER, LOWER, FOUND, UNCLEAR = " Higher.", " Lower.", " Found.", " Say one number from 1 to 16."
_NUMBER = re.compile("[0-9]+")
_ANSWERED = re.compile(rf"{re.escape(HIGHER)}|{re.escape(LOWER)}|{re.escape(UNCLEAR)}")


def hidden_number(prompt: str) -> int:
    """Return the number from 1 to 16 that this prompt hides."""
    return zlib.crc32(prompt.encode("utf-8", "backslashreplace")) % HIGHEST + 1


def make_prompt(rng: random.Random) -> str:
    """Return a prompt; four letters identify a game."""
    return f"Game {''.join(rng.choices('abcdefghijklmnopqrstuvwxyz', k=4))}: find my number from 1 to 16."


def make_guess(number: int) -> str:
    """Return a turn of the policy: 8 tokens of tiny-gemma-guess with EOS; the sixth is the number."""
    return f" I will try the number {number}."


def read_guess(text: str) -> int | None:
    """Return the guess in a text; None unless it has exactly one number from 1 to 16."""
    numbers = {int(word[:4]) for word in _NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 and 1 <= min(numbers) <= HIGHEST else None


def score(turns: int) -> float:
    """Return the score of a number that was found in this many turns."""
    return 1 - PRICE * (turns - 1)


@dataclass
class Game:
    """The state of a game."""

    hidden: int
    turns: int = 0


class GuessGame:
    """The environment: `marlhf run --environment marlhf_lite.tasks.tiny_guess.game:GuessGame`."""

    def reset(self, prompts: Sequence[str]) -> list[Game]:
        """Return a game for each prompt."""
        return [Game(hidden_number(prompt)) for prompt in prompts]

    def step(
        self, states: Sequence[Game], texts: Sequence[str]
    ) -> tuple[list[str], list[float], list[bool]]:
        """Return the answer to each guess, its reward, and whether the game is over."""
        answers = [self._answer(*pair) for pair in zip(states, texts, strict=True)]
        return tuple(map(list, zip(*answers, strict=True))) if answers else ([], [], [])

    def _answer(self, game: Game, text: str) -> tuple[str, float, bool]:
        game.turns += 1
        guess, last = read_guess(text), game.turns == MAX_TURNS
        if guess == game.hidden:
            return FOUND, score(game.turns), True
        return UNCLEAR if guess is None else HIGHER if guess < game.hidden else LOWER, 0.0, last


def binary_search(hidden: int) -> int:
    """Return the turns that halving takes to find a number: 3.375 on average, the least possible."""
    low, high, turns = 1, HIGHEST, 1
    while (guess := (low + high) // 2) != hidden:
        low, high, turns = (
            (guess + 1, high, turns + 1) if guess < hidden else (low, guess - 1, turns + 1)
        )
    return turns


def gold_scores(
    prompts: list[str], responses: list[str], turns: Sequence[Sequence[dict]] | None = None
) -> list[float]:
    """Return how many turns fewer than halving each game took: 0 on average at best. A number not found counts 7 turns.

    Without the `turns` that were played, a response is the text of a whole game. The right guess ends a game. If text
    follows it, the policy had written an answer of the environment itself.
    """
    scores = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if turns is None:
            guesses = _ANSWERED.split(response)
        else:
            guesses = [turn["response"] for turn in turns[i]]
        hidden = hidden_number(prompt)
        found = len(guesses) <= MAX_TURNS and read_guess(guesses[-1]) == hidden
        scores.append(float(binary_search(hidden) - (len(guesses) if found else MAX_TURNS + 1)))
    return scores


# Data: games of random guesses


def random_game(rng: random.Random, prompt: str) -> list[str]:
    """Return the texts of a game, of policy and environment in turn, with random guesses that the answers allow."""
    game, (state,), texts, low, high, over = (
        GuessGame(),
        GuessGame().reset([prompt]),
        [],
        1,
        HIGHEST,
        False,
    )
    while not over:
        guess = rng.randint(low, high)
        (answer,), _, (over,) = game.step([state], [make_guess(guess)])
        texts += [make_guess(guess)] if over else [make_guess(guess), answer]
        low, high = (guess + 1, high) if answer == HIGHER else (low, guess - 1)
    return texts


def load_tiny_guess(size: int | None, seed: int) -> Task:
    """Return the task with `size` games (default 2000): 10 % held out, of the rest 20 % for SFT and 80 % for PPO.

    A row has `chosen`, the first turn of a game of random guesses, and `dialogue`, all its texts.
    """
    rng, rows = random.Random(f"tiny-guess-{seed}"), []
    for _ in range(size or DEFAULT_SIZE):
        texts = random_game(rng, prompt := make_prompt(rng))
        rows.append({"prompt": prompt, "chosen": texts[0], "dialogue": texts})
    return make_task("tiny-guess", rows, seed, fractions=WITHOUT_PAIRS, gold=gold_scores)
