"""When macro actions help, when they harm, and when we found no difference: fourteen cases of the stored studies."""

from collections.abc import Mapping
from typing import NamedTuple

from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.learning import learning_table
from marlhf_lab.studies.mean_reward import difference_of_means
from marlhf_lab.studies.paper import say, table
from marlhf_lab.studies.results import stored_results, study_table
from marlhf_lab.studies.study import load_study

NO = "uninformed"  # what a critic knows about the score
YES = "informed"


class Case(NamedTuple):
    """Two methods of a study, on a task in which one word decides the score."""

    text: str
    critic: str  # what it knows about the score
    study: str
    ppo: str
    ours: str


ONE_WORD = (  # how many tokens stand between the word and the score
    Case("8 tokens before the score", NO, "umbrella", "L8 first E0", "L8 first E4"),
    Case("32 tokens", NO, "umbrella", "L32 first E0", "L32 first E4"),
    Case("64 tokens", NO, "n_sweep", "n=1", "n=5"),
    Case("64 tokens, noise", NO, "critic_confirm", "blind PPO", "blind MA-PPO"),
    Case("128 tokens", NO, "umbrella", "L128 first E0", "L128 first E4"),
    Case("at the end", NO, "umbrella", "L32 last E0", "L32 last E4"),
    Case("32 tokens", YES, "umbrella_seeing", "L32 first E0", "L32 first E4"),
    Case("32 tokens, noise", YES, "noise_confirm", "E0", "E4"),
    Case("64 tokens, noise", YES, "critic_confirm", "seeing PPO", "seeing MA-PPO"),
)
SCORES = (  # task, what the critic knows, study, key of the score, what the score is
    ("programs", "hardly predicts", "programs", "pass@1", "share of right programs"),
    ("summaries", "noisy", "main", "rm_score", "score of the reward model"),
)
LANGUAGE_MODEL = (  # the rewarded words, study
    ("SmolLM2, first words", "sentiment_settle"),
    ("SmolLM2, last words", "sentiment_near"),
)


def cases_table() -> str:
    """Return the cases as a Markdown table: MA-PPO with n = 5 against PPO with λ = 0.95, with 95 % intervals."""
    lines = []
    # 1. Tasks in which one word decides: updates to the score of 0.8. The first method, PPO, is the reference.
    for case in ONE_WORD:
        of_methods = learning_table({"": [case.ppo, case.ours]}, stored_results(case.study), 0.8)
        lines.append(
            _line(
                case=f"one word, {case.text}",
                critic=case.critic,
                measure="updates, MA-PPO − PPO",
                found=of_methods[1]["updates_difference"],
                form="+.1f",
                good=-1,
            )
        )
    # 2. Arithmetic: updates to the share of 0.6.
    lines.append(
        _line(
            case="arithmetic",
            critic=NO,
            measure="updates to 60 % right, MA-PPO / PPO",
            found=ratio_of_updates(
                stored_results("steps_confirm"), ["MA-PPO", "PPO"], threshold=0.6, window=5
            ),
            form=".2f",
            good=-1,
            beside=1,
        )
    )
    # 3. Final scores of the held-out answers.
    for text, critic, study, key, measure in SCORES:
        of_methods = {row["method"]: row for row in study_table(stored_results(study))}
        lines.append(
            _line(
                case=text,
                critic=critic,
                measure=f"{measure}, MA-PPO − PPO",
                found=of_methods["MA-PPO"][f"{key}_difference"],
                form="+.3f",
                good=1,
            )
        )
    # 4. The language model: mean rewards.
    for text, study in LANGUAGE_MODEL:
        updates = load_study(study).mean_updates
        lines.append(
            _line(
                case=text,
                critic="hardly predicts",
                measure="mean reward, before the KL penalty, MA-PPO − PPO",
                found=difference_of_means(stored_results(study), ["MA-PPO", "PPO"], updates),
                form="+.3f",
                good=1,
            )
        )
    heads = {
        "case": "task",
        "critic": "critic",
        "measure": "measure",
        "gap": "MA-PPO, n = 5",
        "is": "macro actions",
    }
    return table(lines, heads)


def _line(
    *,
    case: str,
    critic: str,
    measure: str,
    found: Mapping,
    form: str,
    good: int,
    beside: float = 0,
) -> dict:
    """Return a row of the table.

    found: mean, low and high of an interval; form: its format; good: +1 if larger numbers are better, −1 if smaller
    ones are; beside: the number that means no difference, 1 for a ratio.
    """
    # How much better than no difference both ends of the interval are. If smaller is better, the lower end becomes the
    # higher one, so they are sorted.
    low, high = sorted(good * (found[end] - beside) for end in ("low", "high"))
    if low > 0:
        words = "help"
    elif high < 0:
        words = "harm"
    else:
        words = "no difference found"
    return {
        "case": case,
        "critic": critic,
        "measure": measure,
        "gap": say(found, form, beside),
        "is": words,
    }
