"""Verdicts of people, of GPT-3.5 and of PandaLM-7B on the same answers: a counterpart of the paper's Table 1.

999 pairs of answers to 170 instructions, from the test set of PandaLM (arXiv 2306.05087). data/pandalm/README.md names
its licence, and the pairs that its authors left out. The answers are those of other models than ours: the verdicts show
how far judges and people agree, but compare no methods.
"""

from functools import cache
from itertools import permutations

import pandas as pd

from marlhf_lab.figures.agreement import agree_in_groups, agreement_table, as_row
from marlhf_lite.utils.shipped import shipped

PEOPLE = ("person 1", "person 2", "person 3")
JUDGES = ("GPT-3.5", "PandaLM-7B")
HEADS = {"judge": "judge", "agreement": "agrees with a person", "kappa": "κ", "pairs": "pairs"}


@cache
def verdicts() -> pd.DataFrame:
    """[pairs, 1 + raters]: the number of the instruction, and each rater's `first`, `second`, `tie` or no verdict."""
    return pd.read_json(shipped("pandalm/verdicts.jsonl.gz"), lines=True).set_index("pair")


def each_with_each() -> list[dict]:
    """Rows of `agreement_table`: how far every two of the people and judges agree."""
    return agreement_table(verdicts()[[*PEOPLE, *JUDGES]], verdicts()["instruction"])


def with_a_person() -> list[dict]:
    """How often each judge, another person and two simple rules agree with a person: rows with the names of `HEADS`.

    Intervals are over instructions. Of the two rules, "always second" ignores the pair, and "most of the three" knows
    what the three people said, so that no judge can agree with them more often.
    """
    given = verdicts()
    people = [given[name] for name in PEOPLE]
    judges = {name: given[name] for name in JUDGES}
    judges["always second"] = pd.Series("second", given.index)  # for every pair
    # The most frequent verdict of each pair; if all three differ, the first of them in the alphabet.
    judges["most of the three"] = pd.concat(people, axis=1).mode(axis=1)[0]
    # Name of a row -> the couples of raters whose verdicts on the same pairs are compared.
    couples = {"another person": permutations(people, 2)}
    for name, judge in judges.items():
        couples[name] = [(judge, person) for person in people]
    rows = []
    for name, couples_of_judge in couples.items():
        agreement = agree_in_groups(couples_of_judge, given["instruction"])
        rows.append({"judge": name} | as_row(agreement))
    return rows
