"""Measures of the text, without a model: what a policy does to gain reward shows here first.

A policy that repeats itself, forgets to stop, or answers every prompt alike may still score well (paper, Appendix C.2).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import pandas as pd
from nltk.util import ngrams

from marlhf_lite.evaluation.scores import KLS, to_frame
from marlhf_lite.evaluation.statistics import bootstrap_mean

COLUMNS = "method responses words tokens ended repetition distinct_1 distinct_2 distinct_3 kl".split()


def repetition(items: Sequence[Hashable], n: int = 3) -> float:
    """Return the share of a response's n-grams that occurred in it before: 1 − distinct / all, 0 without n-grams."""
    runs = list(ngrams(items, n))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def distinct(responses: Iterable[Sequence[Hashable]], n: int) -> float:
    """Return distinct-n: different n-grams over all n-grams, of all responses together; 0 without n-grams.

    It falls with the number and length of responses, so compare it between equally many responses to the same prompts.
    """
    runs = [run for response in responses for run in ngrams(response, n)]
    return len(set(runs)) / len(runs) if runs else 0.0


def _own_words(row: Mapping) -> list[str]:
    turns = row.get("turns")
    texts = [turn["response"] for turn in turns] if isinstance(turns, list) else [row["response"]]
    return " ".join(texts).split()


def text_metrics(responses: pd.DataFrame | Sequence[Mapping]) -> list[dict]:
    """Return a row per method: distinct-1, -2, -3 over all its responses, and means with intervals over prompts.

    The means are of words (separated by white space), repetition (of 3-grams), and if all responses have them tokens,
    ended (share with EOS), kl and kl_k3 (nats). Turns of an environment do not count.
    """
    rows = []
    for method, group in to_frame(responses).groupby("method", sort=False):
        words = [_own_words(row) for row in group.to_dict("records")]
        group = group.assign(words=list(map(len, words)), repetition=list(map(repetition, words)))
        names = [name for name in ("tokens", "ended", *KLS) if name in group and group[name].notna().all()]
        names = ["words", "repetition", *names]
        means = group.astype(dict.fromkeys(names, float)).groupby("id")[names].mean()
        row = {"method": method, "responses": len(group)}
        row |= {name: bootstrap_mean(means[name])._asdict() for name in names}
        rows.append(row | {f"distinct_{n}": distinct(words, n) for n in (1, 2, 3)})
    return rows
