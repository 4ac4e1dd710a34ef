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
HIGHER = " Higher."
LOWER = " Lower."
FOUND = " Found."
UNCLEAR = " Say one number from 1 to 16."
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
    """Return the guess in a text; None unless it has exactly one number from 1 to 16, which it may repeat."""
    # Four digits show whether a number is too high, and `int` would refuse thousands of digits.
    numbers = {int(digits[:4]) for digits in _NUMBER.findall(text)}
    if len(numbers) != 1:
        return None
    (number,) = numbers
    return number if 1 <= number <= HIGHEST else None


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
        """Return the answer to the guess in each text, its reward, and whether the game is over; count the turn."""
        answers = []
        rewards = []
        are_over = []
        for game, text in zip(states, texts, strict=True):
            game.turns += 1
            guess = read_guess(text)
            is_found = guess == game.hidden
            reward = 0.0
            if is_found:
                answers.append(FOUND)
                reward = score(game.turns)
            elif guess is None:
                answers.append(UNCLEAR)
            elif guess < game.hidden:
                answers.append(HIGHER)
            else:
                answers.append(LOWER)
            rewards.append(reward)
            are_over.append(is_found or game.turns == MAX_TURNS)
        return answers, rewards, are_over


def binary_search(hidden: int) -> int:
    """Return the turns that halving takes to find a number: 3.375 on average, the least possible."""
    low = 1
    high = HIGHEST
    turns = 0
    while True:
        guess = (low + high) // 2
        turns += 1
        if guess == hidden:
            return turns
        if guess < hidden:
            low = guess + 1
        else:
            high = guess - 1


def gold_scores(
    prompts: list[str], responses: list[str], turns: Sequence[Sequence[dict]] | None = None
) -> list[float]:
    """Return for each game the turns that halving the range would have needed, minus the turns that it took.

    Halving is the best strategy, so no player can be above 0 on average, but a lucky game is. If the number is not
    found, the game counts as 7 turns. A number counts as found only if the last text has it: the right guess ends a
    game, so if text follows the right guess, the policy had written an answer of the environment itself.

    Args:
        turns: for each response, the turns that were played, each with the policy's text as `response`. Without them a
            response is the text of a whole game, with the environment's answers between the guesses.
    """
    scores = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if turns is None:
            texts = _ANSWERED.split(response)
        else:
            texts = [turn["response"] for turn in turns[i]]
        hidden = hidden_number(prompt)
        is_found = len(texts) <= MAX_TURNS and read_guess(texts[-1]) == hidden
        turns_taken = len(texts) if is_found else MAX_TURNS + 1
        scores.append(float(binary_search(hidden) - turns_taken))
    return scores


# Data: games of random guesses


def random_game(rng: random.Random, prompt: str) -> list[str]:
    """Return the texts of a game, of policy and environment in turn, with random guesses that the answers allow."""
    environment = GuessGame()
    (state,) = environment.reset([prompt])
    texts = []
    low = 1
    high = HIGHEST
    while True:
        guess = rng.randint(low, high)
        text = make_guess(guess)
        texts.append(text)
        (answer,), _, (is_over,) = environment.step([state], [text])
        if is_over:  # nobody reads the last answer
            return texts
        texts.append(answer)
        if answer == HIGHER:
            low = guess + 1
        else:
            high = guess - 1


def load_tiny_guess(size: int | None, seed: int) -> Task:
    """Return the task with `size` games (default 2000): 10 % held out, of the rest 20 % for SFT and 80 % for PPO.

    A row has `chosen`, the first turn of a game of random guesses, and `dialogue`, all its texts.
    """
    rng = random.Random(f"tiny-guess-{seed}")
    rows = []
    for _ in range(size or DEFAULT_SIZE):
        prompt = make_prompt(rng)
        texts = random_game(rng, prompt)
        rows.append({"prompt": prompt, "chosen": texts[0], "dialogue": texts})
    return make_task("tiny-guess", rows, seed, fractions=WITHOUT_PAIRS, gold=gold_scores)
