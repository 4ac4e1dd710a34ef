"""The environment of `tiny-guess`: it hides a number, and answers each guess with higher or lower.

The hidden number follows from the prompt, in a way that no model can read. So a game can be repeated, a resumed run
plays the games that it would have played, and two policies are compared on the same numbers.
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
    """The number from 1 to 16 that this prompt hides."""
    return zlib.crc32(prompt.encode("utf-8", "backslashreplace")) % HIGHEST + 1


def make_prompt(rng: random.Random) -> str:
    """A prompt; four letters tell one game from another."""
    return f"Game {''.join(rng.choices('abcdefghijklmnopqrstuvwxyz', k=4))}: find my number from 1 to 16."


def make_guess(number: int) -> str:
    """What the policy says in a turn: 8 tokens of tiny-gemma-guess, EOS included; the sixth is the number."""
    return f" I will try the number {number}."


def read_guess(text: str) -> int | None:
    """The guess in a text; None where it does not hold exactly one number from 1 to 16."""
    numbers = {int(word[:4]) for word in _NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 and 1 <= min(numbers) <= HIGHEST else None


def score(turns: int) -> float:
    """The score of a number that was found in so many turns."""
    return 1 - PRICE * (turns - 1)


@dataclass
class Game:
    """The state of a game."""

    hidden: int
    turns: int = 0


class GuessGame:
    """The environment: `marlhf run --environment marlhf_lite.tasks.tiny_guess.game:GuessGame`."""

    def reset(self, prompts: Sequence[str]) -> list[Game]:
        """A game for each prompt."""
        return [Game(hidden_number(prompt)) for prompt in prompts]

    def step(self, states: Sequence[Game], texts: Sequence[str]) -> tuple[list[str], list[float], list[bool]]:
        """The answer to each guess, its reward, and whether the game is over."""
        answers = [self._answer(*pair) for pair in zip(states, texts, strict=True)]
        return tuple(map(list, zip(*answers, strict=True))) if answers else ([], [], [])

    def _answer(self, game: Game, text: str) -> tuple[str, float, bool]:
        game.turns += 1
        guess, last = read_guess(text), game.turns == MAX_TURNS
        if guess == game.hidden:
            return FOUND, score(game.turns), True
        return UNCLEAR if guess is None else HIGHER if guess < game.hidden else LOWER, 0.0, last


def binary_search(hidden: int) -> int:
    """Turns that halving takes to find a number: 3.375 on average, the least that any way of guessing takes."""
    low, high, turns = 1, HIGHEST, 1
    while (guess := (low + high) // 2) != hidden:
        low, high, turns = (guess + 1, high, turns + 1) if guess < hidden else (low, guess - 1, turns + 1)
    return turns


def gold_scores(prompts: list[str], responses: list[str]) -> list[float]:
    """How many turns fewer than by halving each game took: 0 on average at best. What is not found counts 7 turns.

    The right guess ends a game. One with text behind it was none: the policy had written the answer before it itself.
    """
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        guesses, hidden = _ANSWERED.split(response), hidden_number(prompt)
        found = len(guesses) <= MAX_TURNS and read_guess(guesses[-1]) == hidden
        scores.append(float(binary_search(hidden) - (len(guesses) if found else MAX_TURNS + 1)))
    return scores


# Data: games of random guesses


def random_game(rng: random.Random, prompt: str) -> list[str]:
    """Texts of a game in turn, of policy and environment, with random guesses that no answer rules out."""
    game, (state,), texts, low, high, over = GuessGame(), GuessGame().reset([prompt]), [], 1, HIGHEST, False
    while not over:
        guess = rng.randint(low, high)
        (answer,), _, (over,) = game.step([state], [make_guess(guess)])
        texts += [make_guess(guess)] if over else [make_guess(guess), answer]
        low, high = (guess + 1, high) if answer == HIGHER else (low, guess - 1)
    return texts


def load_tiny_guess(size: int | None, seed: int) -> Task:
    """The task with `size` games (default 2000): 20 % for SFT, 80 % for PPO, after 10 % are held out.

    A row has `chosen`, the first turn of a game of random guesses, and `dialogue`, all its texts.
    """
    rng, rows = random.Random(f"tiny-guess-{seed}"), []
    for _ in range(size or DEFAULT_SIZE):
        texts = random_game(rng, prompt := make_prompt(rng))
        rows.append({"prompt": prompt, "chosen": texts[0], "dialogue": texts})
    return make_task("tiny-guess", rows, seed, fractions=WITHOUT_PAIRS, gold=gold_scores)
