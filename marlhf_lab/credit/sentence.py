"""The sentence that goes through lessons 01, 02, 04, 05 and 08: *the cat sat on cat the*.

A game of six words (lesson 01): wanted is *the cat sat on the mat*, and each right word at its place earns a
quarter of a point. The policy is a table of logits [6, 5], one row for each place and one column for each word.
"""

import torch
from torch import Tensor

WORDS = "the cat sat on mat".split()
WANTED, WRITTEN = "the cat sat on the mat".split(), "the cat sat on cat the".split()
POLICY, REFERENCE = [-1.2, -2.0, -0.9, -0.4, -0.3, -1.1], [-1.0, -2.4, -1.1, -0.4, -0.2, -1.6]
BLIND, SEEING = 0.65, [0.65, 0.80, 1.05, 1.20, 1.25, 1.10]  # values before each word, of two critics
SCORE, BETA = 1.0, 0.05  # of the sentence; the price of one nat of KL


def table(logprobs: list[float]) -> Tensor:
    """Logits [6, 5] with this log-probability of the wanted word at each place; the other words share the rest."""
    wanted = torch.tensor(logprobs, dtype=torch.float64)
    logits = ((1 - wanted.exp()) / 4).log()[:, None].repeat(1, 5)
    logits[range(6), [WORDS.index(word) for word in WANTED]] = wanted
    return logits


def of_sentence(logits: Tensor) -> Tensor:
    """Log-probabilities of the words that were written [1, 6]."""
    return logits.log_softmax(-1)[range(6), [WORDS.index(word) for word in WRITTEN]][None]
