"""The sentence that goes through notebooks 01, 02, 04, 05 and 08: *the cat sat on cat the*.

A game of six words (lesson 2): the goal is *the cat sat on the mat*, and each right word at its position earns a
quarter of a point. The policy is a table of logits [6, 5], one row per position and one column per word.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

WORDS = "the cat sat on mat".split()
WANTED = "the cat sat on the mat".split()
WRITTEN = "the cat sat on cat the".split()
# log-probability of the right word at each position, of two models
POLICY = [-1.2, -2.0, -0.9, -0.4, -0.3, -1.1]
REFERENCE = [-1.0, -2.4, -1.1, -0.4, -0.2, -1.6]
# values before each word, of two critics; the blind one says the same before all of them
BLIND = 0.65
SEEING = [0.65, 0.80, 1.05, 1.20, 1.25, 1.10]
SCORE = 1.0  # of the sentence
BETA = 0.05  # β of the KL penalty


def table(logprobs: list[float]) -> Tensor:
    """Logits [6, 5] that give the right word at each position this log-probability; the other four share the rest."""
    wanted = torch.tensor(logprobs, dtype=torch.float64)
    logits = ((1 - wanted.exp()) / 4).log()[:, None].repeat(1, 5)
    logits[range(6), [WORDS.index(word) for word in WANTED]] = wanted
    return logits


def of_sentence(logits: Tensor) -> Tensor:
    """Log-probabilities of the words that were written [1, 6]."""
    return logits.log_softmax(-1)[range(6), [WORDS.index(word) for word in WRITTEN]][None]


def linear_critic(heard: Tensor, scores: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit a critic to the sentences `heard` [N, 6] and their scores [N]; return it.

    The critic maps sentences [B, 6] to values [B, 6]. A value is a linear function of the position and of the words
    before it, fitted by least squares.
    """
    # At all six positions of a sentence the value to predict is the sentence's score.
    goals = scores[:, None, None].expand(-1, 6, 1).flatten(0, 1)
    weights = torch.linalg.lstsq(_features(heard).flatten(0, 1), goals, driver="gelsd").solution
    return lambda sentences: (_features(sentences) @ weights).squeeze(-1)


def _features(sentences: Tensor) -> Tensor:
    """[B, 6, 36] the critic's input before each word: the words so far (30 numbers), and the position (6)."""
    # [6, 30]: the words are six blocks of 5 numbers, and at position t the blocks from t on are hidden.
    before = torch.arange(30) // 5 < torch.arange(6)[:, None]
    seen = one_hot(sentences, 5).float().flatten(1)[:, None] * before
    return torch.cat([seen, torch.eye(6).expand(len(sentences), 6, 6)], dim=2)
